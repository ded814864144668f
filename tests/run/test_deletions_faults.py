"""Operations on a run under each fault at each request, and beside each other operation at each request.

For each operation (committing, fencing, retiring, thinning, both by retention, removing orphans, recovering, pinning)
and each fault the first request fails, then the second, until one run ends before its fault. `check` reads the store
past the faults: at once, when late requests have been carried out, after the next save, and after orphans were removed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeAlias

import pytest

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    CommitUnknownError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
)
from dcp_remote.format.catalog import CATALOG_KEY, Attempt, add_entry, pin_entry, take_fence
from dcp_remote.run import recovery
from dcp_remote.run.catalog_store import swap
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.gc import remove_orphans
from dcp_remote.run.labels import give_names
from dcp_remote.run.retention import Retention
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.testing import FaultyStore
from tests.support.catalogs import identity, stored
from tests.support.faults import CRASHES, ONCE, THE_END, CrashError, Way, fault
from tests.support.figures import count
from tests.support.runs import (
    FROZEN,
    OPTIMIZER,
    TRAINED,
    MeanwhileStore,
    a_run,
    assert_sound,
    assert_tidy,
    begin,
    copied,
    fence,
    live,
    save,
    steps,
)

pytestmark = [pytest.mark.torture, pytest.mark.usefixtures("short_pauses")]

# Deadline of one operation: three failures take milliseconds, and a fault without end is given up soon.
PATIENCE_SECONDS = 30.0
FOR_EVER_SECONDS = 0.03

NEXT = 9


# ---- the operations


@dataclass(frozen=True, slots=True)
class Operation:
    """Operation under test.

    Attributes:
        prepare: Makes the store, which is copied for each run.
        act: Carries the operation out on a store, with a deadline in seconds.
    """

    prepare: Callable[[], MemoryStore]
    act: Callable[[ObjectStore, float], object]


@cache
def a_busy_run() -> MemoryStore:
    """Return a run of steps that share shards, with leftovers of interrupted, overwritten and retired saves."""
    store = a_run(0, 1, 2)
    save(store, 3, base=1, borrows=(FROZEN, OPTIMIZER))
    save(store, 4, base=3, borrows=(TRAINED, OPTIMIZER))
    save(store, 4, letter="b", base=3, overwrite=True)
    begin(store, 5)
    Deletions(store).retire([0], deadline=Deadline(PATIENCE_SECONDS))
    return store


@cache
def without_catalog() -> MemoryStore:
    store = copied(a_busy_run())
    remove_orphans(store, grace_seconds=0)
    store.delete([CATALOG_KEY])
    return store


@cache
def with_a_damaged_catalog() -> MemoryStore:
    store = copied(a_busy_run())
    remove_orphans(store, grace_seconds=0)
    store.put(CATALOG_KEY, [b"{}"])
    return store


@cache
def with_a_begun_save() -> tuple[MemoryStore, Attempt]:
    store = copied(a_busy_run())
    return store, begin(store, 6, base=3, borrows=(FROZEN,))


def commit_it(store: ObjectStore, seconds: float) -> None:
    _, attempt = with_a_begun_save()
    swap(store, lambda run: add_entry(run, attempt), deadline=Deadline(seconds))


def tidy(store: ObjectStore, seconds: float, *, retention: Retention) -> None:
    maintenance = Deletions(store)
    maintenance.apply(retention, deadline=Deadline(seconds))
    maintenance.queue.delete(deadline=Deadline(seconds), batch=3, pause_seconds=0)


def remove(store: ObjectStore, seconds: float, *, step: int) -> None:
    maintenance = Deletions(store)
    maintenance.retire([step], deadline=Deadline(seconds))
    maintenance.queue.delete(deadline=Deadline(seconds), batch=3, pause_seconds=0)


def collect(store: ObjectStore, seconds: float) -> None:
    remove_orphans(store, grace_seconds=0, timeout_seconds=seconds)


def make_again(store: ObjectStore, seconds: float) -> None:
    recovery.recover(store, timeout_seconds=seconds)


def take_over(store: ObjectStore, seconds: float) -> None:
    swap(store, lambda now: take_fence(now) if now.token == 1 else None, deadline=Deadline(seconds))


def pin(store: ObjectStore, seconds: float) -> None:
    swap(store, partial(pin_entry, step=1, pin=True), deadline=Deadline(seconds))


OPERATIONS: dict[str, Operation] = {
    "commit": Operation(lambda: with_a_begun_save()[0], commit_it),
    "fence": Operation(a_busy_run, take_over),
    "retire": Operation(a_busy_run, partial(remove, step=1)),
    "retention": Operation(a_busy_run, partial(tidy, retention=Retention(keep_last=2))),
    "thin": Operation(a_busy_run, partial(tidy, retention=Retention(keep_optimizer_last=1))),
    "retention and thin": Operation(a_busy_run, partial(tidy, retention=Retention(keep_last=2, keep_optimizer_last=1))),
    "gc": Operation(a_busy_run, collect),
    "recover": Operation(without_catalog, make_again),
    "recover a damaged one": Operation(with_a_damaged_catalog, make_again),
    "pin": Operation(a_busy_run, pin),
}

Seen: TypeAlias = tuple[object, ...] | None


def seen(store: MemoryStore) -> Seen:
    """Return the parts of the catalog that an operation can change, without random names."""
    try:
        catalog = stored(store)
    except CorruptCheckpointError:
        return None
    if catalog is None:
        return None
    entries = [(entry.step, entry.save_id, entry.pinned, entry.thinned) for entry in catalog.entries]
    return catalog.token, entries


@cache
def after(title: str) -> Seen:
    """Return those parts after the operation without faults."""
    store = copied(OPERATIONS[title].prepare())
    OPERATIONS[title].act(store, PATIENCE_SECONDS)
    return seen(store)


def assert_whole(store: MemoryStore) -> None:
    if seen(store) is not None:
        assert_sound(store)


def tried(title: str, way: Way, number: int, *, settle_last: bool) -> tuple[BaseException | None, FaultyStore]:
    """Carry an operation out under a fault, and compare the store with the result, at once and later."""
    store = copied(OPERATIONS[title].prepare())
    before, wanted = seen(store), after(title)
    faulty = FaultyStore(store, [fault(way, number)])
    error: BaseException | None = None
    try:
        OPERATIONS[title].act(faulty, FOR_EVER_SECONDS if way.endswith("for ever") else PATIENCE_SECONDS)
    except (DcpRemoteError, CrashError) as caught:
        error = caught
    count("crashes" if isinstance(error, CrashError) else "requests failed", len(faulty.hits))
    expected = [wanted] if error is None else [before, wanted]
    if isinstance(error, DcpRemoteError) and not isinstance(error, CommitUnknownError) and title != "gc":
        expected = [before]
    for _ in range(2):
        assert seen(store) in expected, (title, way, number, error)
        assert_whole(store)
        if settle_last:
            break
        faulty.settle()
    if seen(store) is None:
        recovery.recover(store)
    check(store, faulty)
    return error, faulty


def check(store: MemoryStore, faulty: FaultyStore) -> None:
    """Save once more with reused shards, carry out late requests, remove orphans: just the named objects are there."""
    newest = steps(store)[-1]
    save(store, NEXT, base=newest)
    assert_sound(store)
    faulty.settle()
    assert_sound(store)
    assert steps(store)[-2:] == [newest, NEXT]
    removal = remove_orphans(store, grace_seconds=0)
    assert removal.failed == {}
    assert removal.young == ()
    assert_tidy(store)


@pytest.mark.parametrize(("way", "settle_last"), [*((way, False) for way in ONCE), ("late by all requests", True)])
@pytest.mark.parametrize("title", OPERATIONS)
def test_what_happens_once_is_survived(title: str, way: Way, *, settle_last: bool) -> None:
    """Fail each request in turn, once or for a while: the operation succeeds. Late requests arrive after a save."""
    for number in itertools.count(1):
        error, faulty = tried(title, way, number, settle_last=settle_last)
        assert error is None
        if not faulty.hits:
            assert number > 2
            return


@pytest.mark.parametrize("way", THE_END)
@pytest.mark.parametrize("title", OPERATIONS)
def test_what_is_the_end_of_it_harms_nothing(title: str, way: Way) -> None:
    """Fail all from each request on, or crash there: live checkpoints are whole, and the result was true."""
    told: set[str] = set()
    for number in itertools.count(1):
        error, faulty = tried(title, way, number, settle_last=False)
        told.add(type(error).__name__)
        if not faulty.hits:
            break
    assert number > 2
    if way in CRASHES:
        assert told == {"CrashError", "NoneType"}
    expected: dict[Way, str] = {
        "403": "PermissionDeniedError",
        "403 for ever": "PermissionDeniedError",
        "503 for ever": "CommitUnknownError",
        "responses lost for ever": "CommitUnknownError",
    }
    assert expected.get(way, "NoneType") in told


# ---- beside others


def overwrite(store: ObjectStore) -> None:
    save(store, 3, letter="c", base=1, borrows=(TRAINED, OPTIMIZER), overwrite=True)


def roll_back(store: ObjectStore) -> None:
    """Save from a new job that went back to step 1."""
    fence(store)
    save(store, 2, letter="e", base=1, borrows=(FROZEN, OPTIMIZER), abandons=1)


ACTS: dict[str, Callable[[ObjectStore], object]] = {
    "retire": lambda store: remove(store, PATIENCE_SECONDS, step=1),
    "retention": lambda store: tidy(store, PATIENCE_SECONDS, retention=Retention(keep_last=2)),
    "thin": lambda store: tidy(store, PATIENCE_SECONDS, retention=Retention(keep_optimizer_last=1)),
    "gc": lambda store: collect(store, PATIENCE_SECONDS),
    "pin": lambda store: pin(store, PATIENCE_SECONDS),
    "name": lambda store: give_names(store, 1, "best", move=False, deadline=Deadline(PATIENCE_SECONDS)),
    "fence": fence,
    "commit": lambda store: save(store, 6, letter="d"),
    "borrow": lambda store: save(store, 7, base=1, borrows=(FROZEN, TRAINED, OPTIMIZER)),
    "overwrite": overwrite,
    "roll back": roll_back,
}


# save_id that each operation commits, and that no other operation here retires.
COMMITTED = {
    "commit": identity(6, "d"),
    "borrow": identity(7),
    "overwrite": identity(3, "c"),
    "roll back": identity(2, "e"),
}


def refusal_of(title: str, store: ObjectStore) -> DcpRemoteError | None:
    """Carry out an operation; return the error of a refusal, or None."""
    try:
        ACTS[title](store)
    except (CommitConflictError, CheckpointNotFoundError, InvalidArgumentError) as error:
        return error
    return None


# Operations that only write the catalog run between the requests of others, and have too few of their own.
LONG_ACTS = [title for title in ACTS if title not in ("pin", "name", "fence", "commit")]


@pytest.mark.parametrize("other", ACTS)
@pytest.mark.parametrize("title", LONG_ACTS)
def test_each_at_each_request_of_each_other(title: str, other: str) -> None:
    """Run each operation at each request of each other: live checkpoints are whole, and gc leaves the named objects."""
    for number in itertools.count(1):
        store = copied(a_busy_run())
        between: list[DcpRemoteError | None] = []

        def meanwhile(store: MemoryStore = store, between: list[DcpRemoteError | None] = between) -> None:
            between.append(refusal_of(other, store))
            assert_sound(store)

        busy = MeanwhileStore(store, number, meanwhile)
        error = refusal_of(title, busy)
        assert_sound(store)
        entries = {entry.save_id: entry for entry in live(store)}
        for act, refusal in ((title, error), *((other, one) for one in between)):
            if act in COMMITTED and refusal is None:
                assert COMMITTED[act] in entries
            if act in ("pin", "name") and refusal is None and title != "retire":
                # Retention lets nothing go that got a pin or a name before its swap.
                assert identity(1) in entries
                assert entries[identity(1)].pinned or entries[identity(1)].names
        remove_orphans(store, grace_seconds=0)
        assert_tidy(store)
        if not busy.acted:
            break
    assert number > 2
