"""Commits under lost, late and refused requests: each result agrees with the stored manifest.

Time is a counter that the pauses advance. Assertions read the `MemoryStore` itself, past all wrappers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CommitConflictError,
    CommitUnknownError,
    ConditionFailedError,
    DcpRemoteError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.format.document import seal, unseal
from dcp_remote.format.manifest import MANIFEST_KEY, REPLACES_MAX
from dcp_remote.format.manifest_json import decode_head, make_tombstone
from dcp_remote.run import commit as commit_module
from dcp_remote.run.commit import Slot, commit, is_committed, list_replaced, read_slot
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.storage.base import Condition, Content, Version
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore
from tests.support.catalogs import full_pauses
from tests.support.clocks import SleepClock
from tests.support.faults import verb_is

OURS, THEIRS, OLD = "a" * 32, "b" * 32, "0" * 32

is_put, is_get = verb_is("put"), verb_is("get")


def body(save_id: str, slot: Slot | None = None) -> bytes:
    """Return the parts of a manifest that a commit reads."""
    return seal(
        unseal(make_tombstone(save_id, list_replaced(slot) if slot else ())).replace(b"tombstone", b"checkpoint")
    )


def run(
    store: ObjectStore, slot: Slot, *, save_id: str = OURS, clock: SleepClock | None = None, seconds: float = 60
) -> None:
    clock = clock or SleepClock()
    with full_pauses(clock.sleep):
        commit(store, slot, body(save_id, slot), save_id=save_id, deadline=Deadline(seconds, clock))


def committed_in(memory: MemoryStore) -> str | None:
    """Return the save_id of the stored manifest, read past all wrappers."""
    found = memory.space.objects.get(MANIFEST_KEY)
    return decode_head(found.data).save_id if found else None


def store_of(*, replacing: bool) -> MemoryStore:
    memory = MemoryStore()
    if replacing:
        memory.put(MANIFEST_KEY, [body(OLD)])
    return memory


BOTH = pytest.mark.parametrize("replacing", [False, True], ids=["fresh", "replacing"])


@BOTH
def test_one_request(replacing: bool) -> None:
    """Commit without faults: one PUT on the condition seen, and no read."""
    memory = store_of(replacing=replacing)
    slot = read_slot(memory)
    assert list_replaced(slot) == ((OLD,) if replacing else ())
    recording = RecordingStore(memory)
    run(recording, slot)
    assert recording.calls == [("put", MANIFEST_KEY)]
    assert committed_in(memory) == OURS
    assert decode_head(memory.get(MANIFEST_KEY, limit_bytes=1 << 20).data).replaces == list_replaced(slot)


@BOTH
@pytest.mark.parametrize(
    "error",
    [TransientStorageError, ConditionFailedError, PermissionDeniedError, StorageError],
    ids=lambda e: e.__name__,
)
def test_response_lost(replacing: bool, error: type[DcpRemoteError]) -> None:
    """Carry out the PUT and answer with any failure: the commit finds its manifest."""
    memory = store_of(replacing=replacing)
    slot = read_slot(memory)
    faulty = FaultyStore(memory, [Fault(is_put, "response", error=lambda: error("An injected answer."))])
    run(faulty, slot)
    assert [request.verb for request in faulty.hits] == ["put"]
    assert committed_in(memory) == OURS


@pytest.mark.parametrize("error", [TransientStorageError, ConditionFailedError])
def test_request_lost(error: type[DcpRemoteError]) -> None:
    """Lose the PUT, or refuse it while another is under way: the same PUT is sent again, after a pause."""
    memory, clock = MemoryStore(), SleepClock()
    faults = [Fault(is_put, "request", error=lambda: error("An injected answer."))] * 3
    recording = RecordingStore(FaultyStore(memory, faults))
    run(recording, read_slot(memory), clock=clock)
    assert committed_in(memory) == OURS
    assert [verb for verb, _ in recording.calls] == ["put", "get"] * 3 + ["put"]
    assert clock.sleeps == [0.05, 0.1, 0.2]


@BOTH
def test_permission_denied(replacing: bool) -> None:
    """Deny the PUT: the error is raised after one read, also if that read is denied, too."""
    for denied in (is_put, lambda *_: True):
        memory = store_of(replacing=replacing)
        slot = read_slot(memory)
        fault = Fault(denied, "request", persistent=True, error=lambda: PermissionDeniedError("No grant."))
        recording = RecordingStore(FaultyStore(memory, [fault]))
        with pytest.raises(PermissionDeniedError):
            run(recording, slot)
        assert recording.count() == 2
        assert committed_in(memory) == (OLD if replacing else None)


@BOTH
def test_denied_after_an_answer_was_lost(replacing: bool) -> None:
    """Lose the first answer and deny the second PUT: unknown, since the first PUT may still arrive."""
    memory = store_of(replacing=replacing)
    slot = read_slot(memory)
    denied = Fault(is_put, "request", persistent=True, error=lambda: PermissionDeniedError("Expired."))
    with pytest.raises(CommitUnknownError):
        run(FaultyStore(memory, [Fault(is_put, "request"), denied]), slot)


@BOTH
def test_another_save_replaced_ours_before_we_looked(replacing: bool) -> None:
    """Replace the manifest before its lost answer is settled: committed, as the newer manifest's list tells."""
    memory = store_of(replacing=replacing)
    slot = read_slot(memory)
    between = FaultyStore(memory, [Fault(lambda verb, *_: verb == "get" and replace_by(memory, 1), "request")])
    run(FaultyStore(between, [Fault(is_put, "response")]), slot)
    assert committed_in(memory) == f"{1:032x}"


def replace_by(memory: MemoryStore, *numbers: int) -> bool:
    """Commit other saves, each over the last; return False, as a predicate."""
    for number in numbers:
        run(memory, read_slot(memory), save_id=f"{number:032x}")
    return False


@pytest.mark.parametrize("count", [REPLACES_MAX, REPLACES_MAX + 1])
def test_so_many_replaced_ours_that_it_is_forgotten(count: int) -> None:
    """Replace the manifest more often than the list is long: the outcome is unknown."""
    memory = MemoryStore()
    slot = read_slot(memory)
    between = FaultyStore(
        memory, [Fault(lambda verb, *_: verb == "get" and replace_by(memory, *range(1, count + 1)), "request")]
    )
    store = FaultyStore(between, [Fault(is_put, "response")])
    if count <= REPLACES_MAX:
        run(store, slot)
    else:
        with pytest.raises(CommitUnknownError):
            run(store, slot)
    assert committed_in(memory) == f"{count:032x}"


def test_a_long_list_that_still_tells() -> None:
    """Replace a manifest many times: the list has the save that was seen, so it proves that this one is not in it."""
    memory = MemoryStore()
    replace_by(memory, *range(1, 200))
    slot = read_slot(memory)
    replace_by(memory, 200, 201)
    with pytest.raises(CommitConflictError) as caught:
        run(FaultyStore(memory, [Fault(is_put, "request")]), slot)
    assert caught.value.details["committed"] == f"{201:032x}"


@BOTH
def test_a_tombstone(replacing: bool) -> None:
    """Put a tombstone: a conflict for a save that began before, and a slot that a later save replaces."""
    memory = store_of(replacing=replacing)
    slot = read_slot(memory)
    memory.put(MANIFEST_KEY, [make_tombstone(THEIRS, list_replaced(slot))])
    for faults in ([], [Fault(is_put, "request")]):
        with pytest.raises(CommitConflictError):
            run(FaultyStore(memory, faults), slot)
    now = read_slot(memory)
    assert not is_committed(now)
    assert list_replaced(now) == (THEIRS, *list_replaced(slot))
    run(memory, now)
    assert committed_in(memory) == OURS


@pytest.mark.parametrize(
    "garbage", [b"", b"not a manifest", body(THEIRS).replace(b'"version":"1"', b'"version":"2"'), b"x" * 2000]
)
def test_what_cannot_be_read_is_not_nothing(garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store garbage, or an object larger than any manifest: counted as committed, and replaced only by its version."""
    monkeypatch.setattr(commit_module, "STORED_BYTES_MAX", 1000)
    memory = MemoryStore()
    fresh = read_slot(memory)
    assert not is_committed(fresh)
    memory.put(MANIFEST_KEY, [garbage])
    slot = read_slot(memory)
    assert is_committed(slot)
    assert slot.error
    assert list_replaced(slot) == ()
    with pytest.raises(CommitConflictError):
        run(memory, fresh)
    # The object may have replaced this save's manifest, whose PUT had no answer: the outcome is unknown.
    with pytest.raises(CommitUnknownError):
        run(FaultyStore(memory, [Fault(is_put, "request")]), fresh)
    run(memory, slot)
    assert committed_in(memory) == OURS


def test_the_manifest_was_removed() -> None:
    """Remove the manifest that is to be replaced: a conflict; unknown if the removed one may be this save's."""
    memory = store_of(replacing=True)
    slot = read_slot(memory)
    memory.delete([MANIFEST_KEY])
    with pytest.raises(CommitConflictError):
        run(memory, slot)
    with pytest.raises(CommitUnknownError):
        run(FaultyStore(memory, [Fault(is_put, "request")]), slot)
    assert committed_in(memory) is None


@BOTH
@pytest.mark.parametrize("lost", ["request", "response"])
@pytest.mark.parametrize("blind", [False, True], ids=["seeing", "blind"])
def test_persistent_failure(replacing: bool, lost: str, blind: bool) -> None:
    """Fail every PUT, and with `blind` every read: unknown by the deadline, unless a read tells."""
    memory = store_of(replacing=replacing)
    slot = read_slot(memory)
    clock = SleepClock()
    direction = Fault(is_put, "request" if lost == "request" else "response", persistent=True)
    faulty = FaultyStore(memory, [direction, *([Fault(is_get, "request", persistent=True)] * blind)])
    if lost == "response" and not blind:
        run(faulty, slot, clock=clock)
    else:
        with pytest.raises(CommitUnknownError) as caught:
            run(faulty, slot, clock=clock)
        assert caught.value.details["save_id"] == OURS
    assert clock.now < 60
    assert max(clock.sleeps, default=0) <= 10
    assert committed_in(memory) == (OURS if lost == "response" else OLD if replacing else None)


def test_a_store_that_does_not_do_conditional_writes() -> None:
    """Refuse every PUT although nothing changed: an error about conditional writes, long before the deadline."""
    memory = MemoryStore()
    refuse = Fault(is_put, "request", persistent=True, error=lambda: ConditionFailedError("412."))
    clock = SleepClock()
    with pytest.raises(StorageError, match="may not support such writes") as caught:
        run(FaultyStore(memory, [refuse]), read_slot(memory), clock=clock, seconds=1800)
    assert not isinstance(caught.value, ConditionFailedError)
    assert clock.now < 120
    assert committed_in(memory) is None


# ---- every interleaving of two committers

# Outcomes of a request: answered, lost before the store, answer lost, or carried out only at the end.
FATES = ("request", "response", "late")


class _Steps(WrappedStore):
    """Store that gives each PUT its outcome, and calls a function before each request: all orders, without threads."""

    def __init__(
        self, memory: MemoryStore, fates: Iterator[str], late: list[Callable[[], object]], other: Callable[[], None]
    ) -> None:
        super().__init__(memory)
        self._fates = fates
        self._late = late
        self._other = other

    def get(self, key: str, *, limit_bytes: int) -> Content:
        self._other()
        return self._store.get(key, limit_bytes=limit_bytes)

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        self._other()
        fate = next(self._fates, "fine")
        data = b"".join(buffers)
        if fate == "late":
            self._late.append(lambda: self._store.put(key, [data], condition=condition))
        if fate in ("late", "request"):
            raise TransientStorageError("No answer.")
        version = self._store.put(key, buffers, condition=condition)
        if fate == "response":
            raise TransientStorageError("No answer.")
        return version


def outcome_of(action: Callable[[], None]) -> str:
    try:
        action()
    except CommitConflictError:
        return "conflict"
    except CommitUnknownError:
        return "unknown"
    except DcpRemoteError as error:
        return type(error).__name__
    return "committed"


@BOTH
def test_two_committers(replacing: bool) -> None:
    """Run the second commit whole at any request of the first, or of its last read; answers may be lost or late.

    All combinations of slots seen, of the outcomes of PUTs, and of the points at which late PUTs arrive: a save that
    returns is committed, one that raises a conflict never was, and both are only if the second replaced the first.
    """
    seen: set[tuple[str, str]] = set()
    once, twice = ([f for n in range(most + 1) for f in itertools.product(FATES, repeat=n)] for most in (1, 2))
    for first_fates, second_fates, point, looks_late, arrive in itertools.product(
        twice, once, range(5), (False, True), range(5)
    ):
        seen.add(two(replacing, first_fates, second_fates, point, looks_late=looks_late, arrive=arrive))
    assert {("committed", "conflict"), ("conflict", "committed"), ("committed", "committed")} <= seen
    assert not {one for pair in seen for one in pair} - {"committed", "conflict", "unknown"}


def two(
    replacing: bool, first: Sequence[str], second: Sequence[str], point: int, *, looks_late: bool, arrive: int
) -> tuple[str, str]:
    memory = store_of(replacing=replacing)
    history: list[str] = []
    write = memory.space.put

    def noted(key: str, data: bytes, *, condition: Condition, modified_seconds: float) -> Version:
        version = write(key, data, condition=condition, modified_seconds=modified_seconds)
        history.append(decode_head(data).save_id)
        return version

    memory.space.put = noted  # type: ignore[method-assign]  # notes every PUT that is carried out
    late: list[Callable[[], object]] = []
    early = read_slot(memory)
    told: list[str] = []
    step = 0

    def deliver() -> None:
        while late:
            outcome_of(late.pop(0))  # type: ignore[arg-type]  # its answer is not used

    def tick() -> None:
        nonlocal step
        step += 1
        if step == arrive:
            deliver()

    def start_other() -> None:
        if step == point and not told:
            told.append("")
            slot = read_slot(memory) if looks_late else early
            store = _Steps(memory, iter(second), late, tick)
            told[0] = outcome_of(lambda: run(store, slot, save_id=THEIRS))
        tick()

    store = _Steps(memory, iter(first), late, start_other)
    ours = outcome_of(lambda: run(store, early))
    if not told:
        start = read_slot(memory) if looks_late else early
        told.append(outcome_of(lambda: run(_Steps(memory, iter(second), late, tick), start, save_id=THEIRS)))
    theirs = told[0]
    deliver()
    for save_id, answer in ((OURS, ours), (THEIRS, theirs)):
        assert (save_id in history) or answer != "committed", "told committed, and is not"
        assert (save_id not in history) or answer != "conflict", "told conflict, and was committed"
        assert history.count(save_id) <= 1, "committed twice"
    if {OURS, THEIRS} <= set(history):
        assert history == [OURS, THEIRS]
        last = decode_head(memory.get(MANIFEST_KEY, limit_bytes=1 << 20).data)
        assert last.replaces[0] == OURS, "the second replaced the first by its version"
        assert looks_late
    return ours, theirs
