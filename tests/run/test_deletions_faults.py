"""Deletions under each fault at each request, and beside each other operation at each request.

For each operation (retiring, thinning, both by retention, removing orphans, recovering, pinning) and each fault the
first request fails, then the second, until one run ends before its fault. `check` reads the store past the faults: at
once, when late requests have been carried out, after the next save, and after orphans were removed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, TypeAlias

import pytest

from dcp_remote.common.deadline import Deadline, RetryPolicy
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    CommitUnknownError,
    ConditionFailedError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    PermissionDeniedError,
)
from dcp_remote.format.catalog import CATALOG_KEY, Attempt, pin_entry
from dcp_remote.run import catalog_store, conditional_put, recovery
from dcp_remote.run.catalog_store import swap
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.gc import remove_orphans
from dcp_remote.run.retention import Retention
from dcp_remote.storage import MemoryStore, ObjectStore, retrying
from dcp_remote.storage.wrapper import Verb
from dcp_remote.testing import Fault, FaultyStore, matching, nth
from tests.support.catalogs import identity, stored
from tests.support.figures import count
from tests.support.histories import run_histories
from tests.support.runs import (
    FROZEN,
    OPTIMIZER,
    TRAINED,
    MeanwhileStore,
    a_run,
    assert_sound,
    begin,
    commit,
    copied,
    fence,
    keys,
    named,
    save,
    steps,
)

pytestmark = pytest.mark.torture

# Deadline of one operation: three failures take milliseconds, and a fault without end is given up soon.
PATIENCE_SECONDS = 30.0
FOR_EVER_SECONDS = 0.03

NEXT = 9

Way: TypeAlias = Literal[
    "request lost",
    "response lost",
    "late by one request",
    "late by three requests",
    "late by all requests",
    "409",  # another conditional write is under way; nothing was written
    "412 on our own write",  # carried out, repeated by a client that lost the answer, and refused then
    "403 on the way back",  # a write that was carried out, whatever the answer says
    "503 for a while",
    "crash before the request",
    "crash after the request",
    "403",
    "503 for ever",
    "responses lost for ever",
    "403 for ever",
]
ONCE: tuple[Way, ...] = (
    "request lost",
    "response lost",
    "late by one request",
    "late by three requests",
    "late by all requests",
    "409",
    "412 on our own write",
    "403 on the way back",
    "503 for a while",
)
THE_END: tuple[Way, ...] = (
    "crash before the request",
    "crash after the request",
    "403",
    "503 for ever",
    "responses lost for ever",
    "403 for ever",
)


class CrashError(BaseException):
    """End of the process: no code of the package catches this."""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses, so that thousands of failures take a minute."""
    policy = partial(RetryPolicy, first_delay_seconds=0.002, delay_seconds_max=0.01)
    monkeypatch.setattr(retrying, "RetryPolicy", policy)
    for module in (catalog_store, conditional_put):
        monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 0.001)


def fault(way: Way, number: int) -> Fault:
    """Return a fault of the `number`-th request, of three requests from that one on, or of all from that one on."""

    def conditional(verb: Verb, key: str, now: int) -> bool:
        return now >= number and verb == "put" and key == CATALOG_KEY

    def denied() -> PermissionDeniedError:
        return PermissionDeniedError("An injected 403.")

    def refusal() -> ConditionFailedError:
        return ConditionFailedError("An injected refusal.", key=CATALOG_KEY)

    faults: dict[Way, Fault] = {
        "request lost": nth(number, "request"),
        "response lost": nth(number, "response"),
        "late by one request": nth(number, "late", later_by=1),
        "late by three requests": nth(number, "late", later_by=3),
        "late by all requests": nth(number, "late"),
        "409": matching(conditional, "request", error=refusal),
        "412 on our own write": matching(conditional, "response", error=refusal),
        "403 on the way back": matching(conditional, "response", error=denied),
        "503 for a while": matching(lambda verb, key, now: number <= now < number + 3, "request", persistent=True),
        "crash before the request": nth(number, "request", error=CrashError),
        "crash after the request": nth(number, "response", error=CrashError),
        "403": nth(number, "request", error=denied),
        "503 for ever": nth(number, "request", persistent=True),
        "responses lost for ever": nth(number, "response", persistent=True),
        "403 for ever": nth(number, "request", error=denied, persistent=True),
    }
    return faults[way]


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


def tidy(store: ObjectStore, seconds: float, *, retention: Retention) -> None:
    maintenance = Deletions(store)
    maintenance.apply(retention, deadline=Deadline(seconds))
    maintenance.delete(deadline=Deadline(seconds), batch=3, pause_seconds=0)


def remove(store: ObjectStore, seconds: float, *, step: int) -> None:
    maintenance = Deletions(store)
    maintenance.retire([step], deadline=Deadline(seconds))
    maintenance.delete(deadline=Deadline(seconds), batch=3, pause_seconds=0)


def collect(store: ObjectStore, seconds: float) -> None:
    remove_orphans(store, grace_seconds=0, timeout_seconds=seconds)


def make_again(store: ObjectStore, seconds: float) -> None:
    recovery.recover(store, timeout_seconds=seconds)


def pin(store: ObjectStore, seconds: float) -> None:
    swap(store, partial(pin_entry, step=1, pin=True), deadline=Deadline(seconds))


OPERATIONS: dict[str, Operation] = {
    "retire": Operation(a_busy_run, partial(remove, step=1)),
    "retention": Operation(a_busy_run, partial(tidy, retention=Retention(keep_last=2))),
    "thin": Operation(a_busy_run, partial(tidy, retention=Retention(keep_optimizer_last=1))),
    "retention and thin": Operation(a_busy_run, partial(tidy, retention=Retention(keep_last=2, keep_optimizer_last=1))),
    "gc": Operation(a_busy_run, collect),
    "recover": Operation(without_catalog, make_again),
    "recover a damaged one": Operation(with_a_damaged_catalog, make_again),
    "pin": Operation(a_busy_run, pin),
}

Seen: TypeAlias = "list[tuple[object, ...]] | None"


def seen(store: MemoryStore) -> Seen:
    """Return the parts of the catalog that an operation can change, without random names."""
    try:
        catalog = stored(store)
    except CorruptCheckpointError:
        return None
    if catalog is None:
        return None
    return [(entry.step, entry.save_id, entry.pinned, entry.thinned) for entry in catalog.entries]


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
    assert removal.kept == ()
    assert keys(store) == named(store)
    assert_sound(store)


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
    if way.startswith("crash"):
        assert told == {"CrashError", "NoneType"}
    elif way == "responses lost for ever":
        assert "CommitUnknownError" in told


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
LONG_ACTS = [title for title in ACTS if title not in ("pin", "fence", "commit")]


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
        live = {save_id: pinned for _, save_id, pinned, _ in seen(store) or []}
        for act, refusal in ((title, error), *((other, one) for one in between)):
            if act in COMMITTED and refusal is None:
                assert COMMITTED[act] in live
            if act == "pin" and refusal is None:
                assert live.get(identity(1), True)
        remove_orphans(store, grace_seconds=0)
        assert keys(store) == named(store)
        assert_sound(store)
        if not busy.acted:
            break
    assert number > 2


BEGUN: dict[str, Callable[[ObjectStore], Attempt]] = {
    "commit": lambda store: begin(store, 6, letter="d"),
    "borrow": lambda store: begin(store, 7, base=1, borrows=(FROZEN, TRAINED, OPTIMIZER)),
    "borrow from the newest": lambda store: begin(store, 7, base=4, borrows=(TRAINED, OPTIMIZER)),
    "overwrite": lambda store: begin(store, 3, letter="c", base=1, borrows=(TRAINED, OPTIMIZER), overwrite=True),
}


@pytest.mark.parametrize("other", BEGUN)
@pytest.mark.parametrize("title", LONG_ACTS)
def test_what_began_before_is_committed_at_each_request(title: str, other: str) -> None:
    """Commit a save at each request of an operation: refused, or its objects are live and stay."""
    outcomes: set[str] = set()
    for number in itertools.count(1):
        store = copied(a_busy_run())
        attempt = BEGUN[other](store)

        def meanwhile(store: MemoryStore = store, attempt: Attempt = attempt) -> None:
            try:
                commit(store, attempt)
            except CommitConflictError as error:
                outcomes.add(type(error).__name__)
            else:
                outcomes.add("committed")
            assert_sound(store)

        busy = MeanwhileStore(store, number, meanwhile)
        refusal_of(title, busy)
        assert_sound(store)
        remove_orphans(store, grace_seconds=0)
        assert keys(store) == named(store)
        assert_sound(store)
        if not busy.acted:
            break
    assert "committed" in outcomes


def test_what_was_committed_unheard_and_retired_is_not_committed_again() -> None:
    """Lose a commit's answer, and retire and delete the checkpoint then: the save does not commit it again."""
    outcomes: set[str] = set()
    for number in itertools.count(1):
        store = copied(a_busy_run())

        def meanwhile(store: MemoryStore = store) -> None:
            if 7 in steps(store):
                maintenance = Deletions(store)
                maintenance.retire([7], deadline=Deadline(PATIENCE_SECONDS), force=True)
                maintenance.delete(deadline=Deadline(PATIENCE_SECONDS))

        faulty = FaultyStore(MeanwhileStore(store, number, meanwhile, after=True), [nth(number, "response")])
        try:
            ACTS["borrow"](faulty)
        except CommitConflictError as error:
            outcomes.add(type(error).__name__)
            assert 7 not in steps(store)
        assert_sound(store)
        if not faulty.hits:
            break
    assert outcomes == {"BeginAgainError"}


# ---- random histories


def test_many_things_go_wrong(torture_seconds: float) -> None:
    """Run operations and saves in a row on one store, each with faults drawn from a seed."""
    run_histories(history, torture_seconds)


def history(seed: int) -> None:
    """Run eight operations drawn from a seed; late requests arrive between them or at the end; then save, and gc."""
    draw = random.Random(seed)
    store = copied(a_busy_run())
    faulties: list[FaultyStore] = []
    for step in range(10, 18):
        faults = [fault(draw.choice(ONCE), draw.randint(1, 20)) for _ in range(draw.randint(0, 3))]
        faulty = FaultyStore(store, faults)
        faulties.append(faulty)
        title = draw.choice(["save", "save", "borrow", "thin", "retention", "gc"])
        newest = steps(store)[-1]
        if title == "save":
            save(faulty, step)
        elif title == "borrow":
            save(faulty, step, base=newest, borrows=draw.sample(range(3), 2))
        else:
            OPERATIONS[title].act(faulty, PATIENCE_SECONDS)
        count("requests failed", len(faulty.hits))
        assert_sound(store)
        assert steps(store)[-1] == (step if title in ("save", "borrow") else newest)
        for earlier in faulties:
            if draw.random() < 0.5:
                earlier.settle()
                assert_sound(store)
    for faulty in faulties:
        faulty.settle()
    assert_sound(store)
    remove_orphans(store, grace_seconds=0)
    assert keys(store) == named(store)
    assert_sound(store)
