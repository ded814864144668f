"""Every fault at every request of every operation: reported outcomes are true, and the next attempt succeeds.

For each operation (a fresh save, an overwrite, a failed save that removes its shards, a load, the removal of orphans)
and each kind of fault: the first request fails, then the second, until an operation ends before its fault. `check`
reads the store without faults: at once, when late requests have been carried out, after the next attempt, and after
orphans were removed. Ranks are simulated in one process, and pauses are those of retries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest

from dcp_remote import RemoteReader
from dcp_remote.errors import CommitUnknownError, DcpRemoteError, SaveFailedError, StorageError
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.run.gc import remove_orphans
from dcp_remote.saving import uploads
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.wrapper import Verb
from dcp_remote.testing import Fault, FaultyStore
from tests.support import faults
from tests.support.faults import CRASHES, NO_ANSWER, ONCE, CrashError, Way, denied
from tests.support.figures import count
from tests.support.simulated_ranks import load_as_ranks
from tests.support.valued_states import found, named, put_orphans, save, shards_in, states, value_of

pytestmark = [pytest.mark.torture, pytest.mark.usefixtures("short_pauses", "_short_cleanup")]

OLD, NEW, NEXT = 1.0, 2.0, 3.0

# Deadline of one operation: three failures in a row take milliseconds, and lasting faults end soon.
PATIENCE_SECONDS = 30.0
FOR_EVER_SECONDS = 0.3

fault = partial(faults.fault, key=MANIFEST_KEY)


@pytest.fixture
def _short_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "CLEANUP_SECONDS", FOR_EVER_SECONDS)


@dataclass(frozen=True, slots=True)
class Told:
    """Outcome of an operation, and the states that may be found after it.

    Attributes:
        error: Error raised; None if it succeeded.
        now: Values that the store may hold now.
        later: Values that the store may hold once all late requests have arrived.
    """

    error: DcpRemoteError | None
    now: set[float | None]
    later: set[float | None]


def told(save_it: Callable[[], None], *, before: float | None, value: float) -> Told:
    """Carry out a save, and return its outcome."""
    try:
        save_it()
    except CommitUnknownError as error:
        return Told(error, {before, value}, {before, value})
    except DcpRemoteError as error:
        return Told(error, {before}, {before})
    return Told(None, {value}, {value})


def check(store: MemoryStore, faulty: FaultyStore, promise: Told, world_size: int, *, settle_last: bool) -> None:
    """Check the store against an outcome; save once more; remove the orphans.

    Args:
        store: Store without faults.
        faulty: Wrapper with the faults; may hold late requests.
        promise: Outcome of the operation with the fault.
        world_size: World size of the next save.
        settle_last: Whether late requests are carried out after the next save, not before.
    """
    count("requests failed", len(faulty.hits))
    assert found(store) in promise.now
    if not settle_last:
        faulty.settle()
        assert found(store) in promise.later
    save(store, NEXT, world_size)
    assert found(store) == NEXT
    if settle_last:
        faulty.settle()
        assert found(store) == NEXT
    removal = remove_orphans(store, grace_seconds=0.0)
    assert removal.failed == {}
    assert removal.young == ()
    assert shards_in(store) == named(store)
    assert found(store) == NEXT


def prepared(*, overwriting: bool, world_size: int) -> tuple[MemoryStore, float | None]:
    store = MemoryStore()
    if overwriting:
        save(store, OLD, world_size)
    return store, OLD if overwriting else None


# Late requests arrive at once, or after the next save.
WHEN = [*((way, False) for way in ONCE), ("late by all requests", True)]


@pytest.mark.parametrize("overwriting", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("way", "settle_last"), WHEN)
def test_a_save_survives_what_happens_once(way: Way, world_size: int, *, overwriting: bool, settle_last: bool) -> None:
    """After a fault of any request, once or for a while, the save succeeds, whatever requests are late."""
    for number in itertools.count(1):
        store, before = prepared(overwriting=overwriting, world_size=world_size)
        faulty = FaultyStore(store, [fault(way, number)])
        promise = told(
            partial(save, faulty, NEW, world_size, timeout_seconds=PATIENCE_SECONDS), before=before, value=NEW
        )
        assert promise.error is None
        check(store, faulty, promise, world_size, settle_last=settle_last)
        if not faulty.hits:
            assert number > 2 + world_size
            return


@pytest.mark.parametrize("overwriting", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("way", NO_ANSWER)
def test_a_save_that_cannot_go_on_says_what_is_true(way: Way, world_size: int, *, overwriting: bool) -> None:
    """A save without answers from any request on fails by its deadline, unless it was committed before.

    On a busy machine a save may not reach its commit in so short a time; its deadline is then longer.
    """
    seen: list[DcpRemoteError | None] = []
    for times in (1, 4, 16):
        for number in itertools.count(1):
            store, before = prepared(overwriting=overwriting, world_size=world_size)
            faulty = FaultyStore(store, [fault(way, number)])
            attempt = partial(save, faulty, NEW, world_size, timeout_seconds=times * FOR_EVER_SECONDS)
            promise = told(attempt, before=before, value=NEW)
            seen.append(promise.error)
            check(store, faulty, promise, world_size, settle_last=False)
            if not faulty.hits:
                break
        if any(isinstance(error, CommitUnknownError) for error in seen):
            break
    assert any(isinstance(error, SaveFailedError) for error in seen)
    assert any(isinstance(error, CommitUnknownError) for error in seen)


@pytest.mark.parametrize("overwriting", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("way", CRASHES)
def test_a_crash_leaves_the_old_checkpoint_or_the_new_one(way: Way, world_size: int, *, overwriting: bool) -> None:
    """A crash before or after any request leaves the old checkpoint, or the new one once its manifest was put."""
    for number in itertools.count(1):
        store, before = prepared(overwriting=overwriting, world_size=world_size)
        faulty = FaultyStore(store, [fault(way, number)])
        try:
            save(faulty, NEW, world_size)
        except (CrashError, SaveFailedError):
            count("crashes")
            (first, *_) = faulty.hits
            is_committed = (first.verb, first.key, way) == ("put", MANIFEST_KEY, "crash after the request")
            promise = NEW if is_committed else before
        else:
            assert not faulty.hits
            promise = NEW
        check(store, faulty, Told(None, {promise}, {promise}), world_size, settle_last=False)
        if not faulty.hits:
            assert number > 2 + world_size
            return


def _puts_the_last_shard_of(rank: int) -> Callable[[Verb, str, int], bool]:
    def when(verb: Verb, key: str, number: int) -> bool:
        return verb == "put" and f"rank-{rank:05d}" in key and key.endswith("-0001.safetensors")

    return when


@pytest.mark.parametrize("way", [*ONCE, *NO_ANSWER])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_failed_save_that_removes_its_shards(way: Way, world_size: int) -> None:
    """A save with a refused shard deletes its other shards, and each request of that deletion fails in turn.

    The old checkpoint stays; the shards left are removed as orphans.
    """
    refused = Fault(
        _puts_the_last_shard_of(world_size - 1),
        "request",
        persistent=True,
        error=denied,
    )
    for number in itertools.count(1):
        store, before = prepared(overwriting=True, world_size=world_size)
        refusing = FaultyStore(store, [refused])
        faulty = FaultyStore(refusing, [fault(way, number)])
        timeout_seconds = FOR_EVER_SECONDS if way in NO_ANSWER else PATIENCE_SECONDS
        attempt = partial(save, faulty, NEW, world_size, timeout_seconds=timeout_seconds)
        promise = told(attempt, before=before, value=NEW)
        assert promise.error is not None
        if way in ONCE and refusing.hits:
            assert isinstance(promise.error, SaveFailedError)
            assert promise.error.details["rank"] == world_size - 1
            faulty.settle()
        check(store, faulty, promise, world_size, settle_last=False)
        if not faulty.hits:
            return


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("way", ["request lost", "response lost", "503 for a while", "503 for ever"])
def test_a_load_is_right_or_fails(way: Way, world_size: int) -> None:
    """After a fault at any request a load is right to the bit, or raises an error with the number of attempts."""
    store = MemoryStore()
    save(store, NEW, 2)
    for number in itertools.count(1):
        faulty = FaultyStore(store, [fault(way, number)])
        templates = states(0.0, world_size)
        timeout_seconds = FOR_EVER_SECONDS if way in NO_ANSWER else PATIENCE_SECONDS
        failures: list[StorageError] = []
        make_reader = partial(RemoteReader, faulty, timeout_seconds=timeout_seconds)
        try:
            load_as_ranks(templates, make_reader)
        except StorageError as error:
            failures.append(error)
        assert bool(failures) == (way in NO_ANSWER and bool(faulty.hits))
        assert all("attempts" in error.details for error in failures)
        if not failures:
            assert all(value_of(template) == NEW for template in templates)
        count("requests failed", len(faulty.hits))
        if not faulty.hits:
            assert number > 2 * world_size
            return


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize(("way", "settle_last"), [*WHEN, *((way, False) for way in NO_ANSWER)])
def test_removing_orphans_harms_nothing(way: Way, *, committed: bool, settle_last: bool) -> None:
    """A fault at any request of the removal of orphans leaves a checkpoint whole, or nothing where there was none."""
    for number in itertools.count(1):
        store, before = prepared(overwriting=committed, world_size=2)
        put_orphans(store)
        faulty = FaultyStore(store, [fault(way, number)])
        timeout_seconds = FOR_EVER_SECONDS if way in NO_ANSWER else PATIENCE_SECONDS
        removed: Sequence[object] = ()
        try:
            removed = remove_orphans(faulty, grace_seconds=0.0, timeout_seconds=timeout_seconds).old
        except DcpRemoteError:
            assert way in (*NO_ANSWER, "403 on the way back")
        else:
            assert way in NO_ANSWER or len(removed) == 2
        check(store, faulty, Told(None, {before}, {before}), 2, settle_last=settle_last)
        if not faulty.hits:
            assert number > 3
            return
