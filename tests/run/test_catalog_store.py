"""Reading and swapping a catalog: requests, refusals, damage, many processes at once, lost and late answers.

Time is a counter that the pauses advance. Assertions read the `MemoryStore` itself, past all wrappers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from dcp_remote.common.deadline import Clock, Deadline
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    CommitUnknownError,
    ConditionFailedError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
    UnsupportedFormatError,
)
from dcp_remote.format.catalog import (
    CATALOG_KEY,
    BeginAgainError,
    Catalog,
    add_entry,
    pin_entry,
    retire_entries,
    take_fence,
)
from dcp_remote.format.catalog_json import STORED_BYTES_MAX, encode
from dcp_remote.format.document import seal, unseal
from dcp_remote.run.catalog_store import Change, read_catalog, see_catalog, swap
from dcp_remote.run.conditional_put import Found
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.base import Capabilities
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore
from dcp_remote.testing.wrappers import Lost
from tests.support.catalogs import NONCE, ONE, SECONDS, attempt, commit, identity, store_of, stored, swapped
from tests.support.clocks import SleepClock
from tests.support.faults import denied, verb_is

# ---- nothing goes wrong


def test_reading() -> None:
    """Read a catalog and an absent one: one request each, and no error."""
    recording = RecordingStore(store_of())
    assert see_catalog(recording) == Found(recording.head(CATALOG_KEY).version, ONE)
    assert recording.calls[0] == ("get", CATALOG_KEY)
    assert recording.count("get") == 1
    assert read_catalog(store_of()) == ONE
    assert read_catalog(MemoryStore()) is None


def test_two_requests() -> None:
    """Swap: one GET and one PUT, and the result is the stored catalog."""
    store = store_of()
    recording = RecordingStore(store)
    after = swapped(recording, commit(2))
    assert recording.calls == [("get", CATALOG_KEY), ("put", CATALOG_KEY)]
    assert after == stored(store) == add_entry(ONE, attempt(2, "b"))


def test_one_request_if_nothing_is_to_be_done() -> None:
    """Apply a change that was already made: no PUT."""
    recording = RecordingStore(store_of())
    assert swapped(recording, partial(pin_entry, step=1, pin=False)) == ONE
    assert recording.calls == [("get", CATALOG_KEY)]


def test_a_refusal_writes_nothing() -> None:
    """Raise in a change: the error reaches the caller unchanged, after one request."""
    recording = RecordingStore(store_of())
    with pytest.raises(CommitConflictError, match="step=1"):
        swapped(recording, commit(1))
    assert recording.calls == [("get", CATALOG_KEY)]


def test_a_catalog_that_only_newer_software_may_replace() -> None:
    """A catalog with `requires_to_write` is read, and every swap is refused before its PUT, also a fence."""
    store = store_of()
    newer = seal(unseal(encode(ONE, NONCE)).replace(b'"requires":[]', b'"requires":[],"requires_to_write":["holds"]'))
    store.put(CATALOG_KEY, [newer])
    found = read_catalog(store)
    assert found is not None
    assert found.entries == ONE.entries
    recording = RecordingStore(store)
    changes: list[Change] = [take_fence, commit(2), lambda run: retire_entries(run, [identity(1)])]
    for change in changes:
        with pytest.raises(UnsupportedFormatError, match="holds"):
            swapped(recording, change)
    assert recording.count("put") == 0
    assert bytes(store.space.objects[CATALOG_KEY].data) == newer


def test_no_run() -> None:
    """Swap without `create` where there is no catalog: refused, and nothing is written."""
    store = MemoryStore()
    with pytest.raises(CheckpointNotFoundError, match="no run"):
        swapped(store, take_fence)
    assert stored(store) is None


def test_a_run_begins() -> None:
    """Swap with `create`: two requests, and each run gets an id of its own."""
    stores = [MemoryStore(), MemoryStore()]
    recording = RecordingStore(stores[0])
    runs = [swapped(recording, take_fence, create=True), swapped(stores[1], take_fence, create=True)]
    assert recording.calls == [("get", CATALOG_KEY), ("put", CATALOG_KEY)]
    assert runs == [stored(store) for store in stores]
    assert runs[0].run_id != runs[1].run_id
    assert [(run.revision, run.token, run.entries) for run in runs] == [(1, 1, ())] * 2
    # A run that is there is not begun.
    assert swapped(stores[0], take_fence, create=True).run_id == runs[0].run_id


def test_a_run_begins_empty() -> None:
    """Create a run by a change that does nothing: the result is the empty catalog that is stored."""
    store = MemoryStore()
    begun = swapped(store, lambda run: retire_entries(run, [identity(1)]), create=True)
    assert begun == stored(store) == Catalog(begun.run_id)


class NoSwap(WrappedStore):
    """Store that cannot compare and swap."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(compare_and_swap=False, shared=True, swap_refusal="It is on NFS.")


def test_a_store_that_cannot_swap() -> None:
    """Swap on such a store: refused before the first request, with the store's reason."""
    recording = RecordingStore(store_of())
    with pytest.raises(InvalidArgumentError, match="NFS"):
        swapped(NoSwap(recording), take_fence)
    assert recording.calls == []


# ---- damage

DAMAGED: dict[str, tuple[bytes, type[DcpRemoteError]]] = {
    "empty": (b"", CorruptCheckpointError),
    "cut": (encode(ONE, NONCE)[:-1], CorruptCheckpointError),
    "one bit": (encode(ONE, NONCE).replace(b'"step":1', b'"step":0'), CorruptCheckpointError),
    "of a newer version": (
        seal(unseal(encode(ONE, NONCE)).replace(b'"version":"1', b'"version":"2')),
        UnsupportedFormatError,
    ),
}


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("what", DAMAGED)
def test_what_cannot_be_read_is_never_overwritten(what: str, *, create: bool) -> None:
    """Swap over a damaged catalog: the bytes stay, and the error names the run."""
    data, error = DAMAGED[what]
    store = MemoryStore()
    store.put(CATALOG_KEY, [data])
    recording = RecordingStore(store)
    with pytest.raises(error) as caught:
        swapped(recording, take_fence, create=create)
    assert caught.value.details["url"] == store.url
    reads = 2 if error is CorruptCheckpointError else 1  # read twice, since the damage may be of the answer alone
    assert recording.calls == [("get", CATALOG_KEY)] * reads
    assert store.space.objects[CATALOG_KEY].data == data


def test_what_is_too_large_is_not_read() -> None:
    """Store one byte more than a catalog may have: refused."""
    store = MemoryStore()
    store.put(CATALOG_KEY, [bytes(STORED_BYTES_MAX + 1)])
    with pytest.raises(CorruptCheckpointError):
        swapped(store, take_fence, create=True)
    assert len(store.space.objects[CATALOG_KEY].data) == STORED_BYTES_MAX + 1


def test_a_change_that_makes_nonsense() -> None:
    """Return an invalid catalog from a change: refused before anything is written."""
    recording = RecordingStore(store_of())
    with pytest.raises(CorruptCheckpointError):
        swapped(recording, lambda run: Catalog(run.run_id, floor=1))
    assert recording.calls == [("get", CATALOG_KEY)]


# ---- many at once


def by_threads(work: Callable[[int], object]) -> None:
    """Call a function with a number in each of eight threads, at once."""
    ready = threading.Barrier(8)

    def begin(number: int) -> None:
        ready.wait(timeout=SECONDS)
        work(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(begin, range(8)))


def test_many_at_once_lose_nothing() -> None:
    """Commit steps from many threads: all are there at the end, and every swap was one revision."""
    store = store_of()

    def work(number: int) -> None:
        for step in range(number, 96, 8):
            swap(store, commit(10 + step), deadline=Deadline(SECONDS, Clock(sleep=lambda _: None)))

    by_threads(work)
    now = stored(store)
    assert now is not None
    assert [one.step for one in now.entries] == [1, *range(10, 106)]
    assert now.revision == ONE.revision + 96


def test_a_run_begins_once() -> None:
    """Take the fence of an absent run from many threads: one run_id remains, and each gets its own token."""
    store, runs = MemoryStore(), list[Catalog]()

    def work(_number: int) -> None:
        runs.append(swap(store, take_fence, create=True, deadline=Deadline(SECONDS, Clock(sleep=lambda _: None))))

    by_threads(work)
    now = stored(store)
    assert now is not None
    assert {run.run_id for run in runs} == {now.run_id}
    assert sorted(run.token for run in runs) == list(range(1, 9))


# ---- requests and answers that are lost, late and refused; `test_deletions_faults.py` fails each request

is_put = verb_is("put")


def test_a_refusal_for_ever_is_an_error_of_the_store() -> None:
    """Refuse every PUT as if another were under way: given up with an error that no handler takes for a conflict."""
    store = store_of()
    refused = Fault(is_put, "request", persistent=True, error=lambda: ConditionFailedError("An injected 409."))
    with pytest.raises(StorageError, match="may not support") as caught:
        swapped(FaultyStore(store, [refused]), commit(2))
    assert not isinstance(caught.value, ConditionFailedError)
    assert stored(store) == ONE


@pytest.mark.parametrize("lost", ["request", "response", "late"])
def test_a_run_begins_although_a_put_is_lost(lost: Lost) -> None:
    """Lose the PUT of a run's first catalog, or its answer: one run, whose fence is taken."""
    store = MemoryStore()
    faulty = FaultyStore(store, [Fault(is_put, lost)])
    after = swapped(faulty, take_fence, create=True)
    faulty.settle()
    assert stored(store) == after
    assert after.token > 0


def test_what_is_on_its_way_is_not_denied() -> None:
    """Delay the first swap and refuse the second for good: the outcome is unknown, since the first may arrive."""
    store = store_of()
    late, refused = Fault(is_put, "late"), Fault(is_put, "request", error=denied, persistent=True)
    faulty = FaultyStore(store, [late, refused])
    with pytest.raises(CommitUnknownError):
        swapped(faulty, commit(2))
    assert stored(store) == ONE
    faulty.settle()
    assert stored(store) == commit(2)(ONE)


def test_what_can_never_arrive_is_denied() -> None:
    """Do the same after another's swap: the late PUT can no longer succeed, so the refusal is certain."""
    store = store_of()
    late, refused = Fault(is_put, "late"), Fault(is_put, "request", error=denied, persistent=True)
    with pytest.raises(PermissionDeniedError):
        swapped(FaultyStore(store, [late, refused]), meanwhile(store, commit(2), None, commit(7)))
    assert stored(store) == commit(7)(ONE)


def meanwhile(store: MemoryStore, change: Change, *others: Change | None) -> Change:
    """Return a change before whose n-th attempt another process makes the n-th of other changes, None for none."""
    left = iter(others)

    def changing(run: Catalog) -> Catalog | None:
        other = next(left, None)
        return change(run if other is None else swapped(store, other))

    return changing


def test_a_lost_answer_costs_one_look() -> None:
    recording = RecordingStore(FaultyStore(store_of(), [Fault(is_put, "response")]))
    swapped(recording, commit(2))
    assert [verb for verb, _ in recording.calls] == ["get", "put", "get"]


def test_a_lost_swap_costs_two_requests_more() -> None:
    """Let another process swap between GET and PUT, twice: a GET and a PUT more each, and all changes are there."""
    store = store_of()
    recording = RecordingStore(store)
    others = iter([commit(7), commit(8)])

    def change(run: Catalog) -> Catalog | None:
        other = next(others, None)
        if other is not None:
            swapped(store, other)
        return commit(2)(run)

    now = swapped(recording, change)
    assert now == stored(store)
    assert [verb for verb, _ in recording.calls] == ["get", "put"] * 3
    assert [one.step for one in now.entries] == [1, 2, 7, 8]


def test_a_lost_answer_and_then_a_fence() -> None:
    """Lose the answer to a commit, and fence the job: the commit is found, and succeeds."""
    store, ours = store_of(), attempt(2, "b")
    faulty = FaultyStore(store, [Fault(is_put, "response")])
    after = swapped(faulty, meanwhile(store, lambda run: add_entry(run, ours), None, take_fence))
    assert after.holds(ours.entry.save_id)


def test_what_was_committed_and_retired_is_not_committed_again() -> None:
    """Lose the answer to a commit, and retire the checkpoint: not committed again, since its shards may be gone."""
    store, ours = store_of(), attempt(2, "b")
    retire = partial(retire_entries, save_ids=[ours.entry.save_id])
    with pytest.raises(BeginAgainError):
        swapped(
            FaultyStore(store, [Fault(is_put, "response")]),
            meanwhile(store, lambda run: add_entry(run, ours), None, retire),
        )
    now = stored(store)
    assert now is not None
    assert not now.holds(ours.entry.save_id)


def test_pauses_double_and_end_at_the_deadline() -> None:
    """Fail all: pauses double up to five seconds, then one more read, since the last PUT may have succeeded."""
    clock = SleepClock()
    recording = RecordingStore(FaultyStore(store_of(), [Fault(is_put, "request", persistent=True)]))
    with pytest.raises(CommitUnknownError) as caught:
        swapped(recording, commit(2), seconds=20, clock=clock)
    assert clock.sleeps == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert [verb for verb, _ in recording.calls] == ["get", "put"] * 10 + ["get"]
    assert "TransientStorageError" in str(caught.value.details["cause"])


def test_the_deadline_has_passed() -> None:
    """Swap after the deadline: one attempt and one read, which finds a PUT that was carried out."""
    store = store_of()
    assert swapped(FaultyStore(store, [Fault(is_put, "response")]), commit(2), seconds=0) == stored(store)
    store = store_of()
    with pytest.raises(CommitUnknownError):
        swapped(FaultyStore(store, [Fault(is_put, "request")]), commit(2), seconds=0)
    assert stored(store) == ONE


def test_reads_are_retried() -> None:
    """Fail reads: retried under the same deadline, by the same clock."""
    clock = SleepClock()
    faulty = FaultyStore(store_of(), [Fault(verb_is("get"), "request", persistent=True)])
    with pytest.raises(TransientStorageError):
        swapped(faulty, commit(2), clock=clock)
    assert len(clock.sleeps) > 3
    assert clock.now <= SECONDS
