"""Retries: which requests are repeated, for how long, and the final error. The clock is fake, the jitter a constant."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import pytest

from dcp_remote.common.deadline import Deadline, RetryPolicy
from dcp_remote.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage import Condition, MemoryStore, ObjectInfo, ObjectStore
from dcp_remote.storage.retrying import RetryingStore
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore, nth
from dcp_remote.testing.store_suite import StoreSuite
from tests.support.clocks import SleepClock
from tests.support.clouds import VERBS

# Verbs that are sent once, since their outcome is not known after a lost answer.
CONDITIONAL = {"create", "swap"}

# After one failure and a pause of half a second, less than the first delay is left.
TWO_ATTEMPTS_SECONDS = 1.2


def _retrying(store: ObjectStore, clock: SleepClock, *, seconds: float = 60.0, random: float = 0.5) -> RetryingStore:
    policy = RetryPolicy(first_delay_seconds=1.0, delay_seconds_max=8.0)
    return RetryingStore(store, clock.deadline(seconds, share=random), policy)


class TestRetryingStore(StoreSuite):
    """The suite through a wrapper whose store loses every third answer to requests that may be repeated."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        faults = [
            Fault(_third_of_others, "response", persistent=True),
            Fault(lambda verb, key, number: verb in ("head", "list") and number % 5 == 0, "request", persistent=True),
        ]
        clock = SleepClock()
        memory = MemoryStore(uuid.uuid4().hex)
        return RetryingStore(FaultyStore(memory, faults), clock.deadline(1e9))

    def raw_write(self, store: ObjectStore, key: str, data: bytes) -> None:
        _innermost(store).put(key, [data])

    def raw_read(self, store: ObjectStore, key: str) -> bytes:
        return _innermost(store).get(key, limit_bytes=1 << 30).data

    def test_pickling(self, store: ObjectStore) -> None:
        """Pickle a store with a deadline, which is of one clock."""
        with pytest.raises(InvalidArgumentError, match="Deadline cannot be pickled"):
            pickle.dumps(RetryingStore(MemoryStore("name"), Deadline(1.0)))


def _third_of_others(verb: str, key: str, number: int) -> bool:
    return verb in ("get", "get_into", "delete") and number % 3 == 0


def _innermost(store: ObjectStore) -> ObjectStore:
    while isinstance(store, WrappedStore):
        store = store._store
    return store


@pytest.mark.parametrize("lost", ["request", "response"])
@pytest.mark.parametrize("verb", sorted(set(VERBS) - CONDITIONAL))
def test_transient_failures_are_repeated(verb: str, lost: Literal["request", "response"]) -> None:
    """Fail the first two requests of each verb in either direction; the third is answered."""
    memory, clock = MemoryStore(), SleepClock()
    memory.put("key", [b"old data"])
    recording = RecordingStore(memory)
    VERBS[verb](_retrying(FaultyStore(recording, [nth(1, lost), nth(2, lost)]), clock))
    assert clock.sleeps == [0.5, 1.0]
    assert recording.count() == (1 if lost == "request" else 3)


@pytest.mark.parametrize("verb", sorted(set(VERBS) - CONDITIONAL - {"delete"}))
def test_the_final_error_counts_the_attempts(verb: str) -> None:
    """Lose every request until the deadline: the error has the number of attempts, and the last error as its cause."""
    clock = SleepClock()
    faulty = FaultyStore(MemoryStore(), [nth(1, "request", persistent=True)])
    with pytest.raises(TransientStorageError) as caught:
        VERBS[verb](_retrying(faulty, clock, seconds=10.0))
    error = caught.value
    # 0.5, 1, 2, then half of what is left: of 6.5, of 3.25, of 1.625. Then less than the first delay is left.
    assert clock.sleeps == [0.5, 1.0, 2.0, 3.25, 1.625, 0.8125]
    assert error.details["attempts"] == len(faulty.hits) == 7
    assert error.details["seconds"] == pytest.approx(sum(clock.sleeps), abs=0.001)
    assert error.details["key"] == ("" if verb == "list" else "key")
    assert isinstance(error.__cause__, TransientStorageError)
    assert "attempts" not in error.__cause__.details


@pytest.mark.parametrize("random", [0.0, 0.3, 0.999999])
def test_no_sleep_reaches_the_deadline(random: float) -> None:
    """Retry with little and with much jitter: no pause ends and no request begins after the deadline."""
    clock = SleepClock()
    sent: list[float] = []

    def failing() -> StorageError:
        sent.append(clock.now)
        clock.now += 0.25
        return TransientStorageError("slow, and then nothing")

    fault = Fault(lambda verb, key, number: True, "request", persistent=True, error=failing)
    with pytest.raises(TransientStorageError):
        _retrying(FaultyStore(MemoryStore(), [fault]), clock, seconds=30.0, random=random).head("key")
    assert max(sent) < 130.0
    assert clock.now < 130.25


def test_a_passed_deadline_still_allows_the_first_attempt() -> None:
    """Send a request after the deadline, and one that is lost."""
    memory, clock = MemoryStore(), SleepClock()
    memory.put("key", [b"x"])
    assert _retrying(memory, clock, seconds=0.0).head("key").size_bytes == 1
    with pytest.raises(TransientStorageError, match="attempts=1"):
        _retrying(FaultyStore(memory, [nth(1, "request")]), clock, seconds=0.0).head("key")
    assert clock.sleeps == []


def test_conditional_puts_are_sent_once() -> None:
    """Lose conditional puts in either direction: the caller gets the error at once."""
    memory, clock = MemoryStore(), SleepClock()
    version = memory.put("there", [b"x"])
    cases: list[tuple[str, Condition]] = [("new", "absent"), ("there", version)]
    for key, condition in cases:
        for fault in (nth(1, "request"), nth(1, "response")):
            recording = RecordingStore(FaultyStore(memory, [fault]))
            with pytest.raises(TransientStorageError):
                _retrying(recording, clock).put(key, [b"y"], condition=condition)
            assert recording.calls == [("put", key)]
    assert clock.sleeps == []
    assert memory.get("new", limit_bytes=1).data == memory.get("there", limit_bytes=1).data == b"y"


@pytest.mark.parametrize("error", [ObjectNotFoundError, PermissionDeniedError, StorageError, CorruptCheckpointError])
def test_other_errors_are_final(error: type[StorageError]) -> None:
    """Raise other errors: they are raised unchanged, after one request."""
    raised = error("final")
    faulty = FaultyStore(MemoryStore(), [nth(1, "request", persistent=True, error=lambda: raised)])
    with pytest.raises(error) as caught:
        _retrying(faulty, SleepClock()).head("key")
    assert caught.value is raised
    assert len(faulty.hits) == 1


class _Deleting(WrappedStore):
    """Store that answers each delete with the next of the given failures, and deletes the rest."""

    def __init__(self, store: ObjectStore, answers: list[dict[str, StorageError]]) -> None:
        super().__init__(store)
        self.answers = answers
        self.asked: list[list[str]] = []

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        self.asked.append(list(keys))
        answer = self.answers.pop(0) if self.answers else {}
        return answer | dict(self._store.delete([key for key in keys if key not in answer]))


def test_deletes_repeat_only_what_failed_for_now() -> None:
    """Delete four keys: one is denied, two are busy, and one of these twice."""
    busy, denied = TransientStorageError("busy"), PermissionDeniedError("denied")
    store = _Deleting(MemoryStore(), [{"b": busy, "c": denied, "d": busy}, {"d": busy}])
    assert _retrying(store, SleepClock()).delete(["a", "b", "c", "d"]) == {"c": denied}
    assert store.asked == [["a", "b", "c", "d"], ["b", "d"], ["d"]]


def test_deletes_that_fail_until_the_deadline() -> None:
    """Fail deletes until the deadline: a final error is returned unchanged, a transient one with its attempts."""
    busy, denied = TransientStorageError("busy", region="x"), PermissionDeniedError("denied")
    store = _Deleting(MemoryStore(), [{"a": busy, "b": denied}, {"a": busy}])
    failed = _retrying(store, SleepClock(), seconds=TWO_ATTEMPTS_SECONDS).delete(["a", "b", "c"])
    assert failed["b"] is denied
    assert str(failed["a"]) == "busy verb='delete' key='a' region='x' attempts=2 seconds=0.5"
    assert sorted(failed) == ["a", "b"]


def test_a_delete_that_fails_whole_is_reported_for_every_key() -> None:
    """Lose every delete request; refuse one, which is not repeated."""
    faulty = FaultyStore(MemoryStore(), [nth(1, "request", persistent=True)])
    failed = _retrying(faulty, SleepClock(), seconds=TWO_ATTEMPTS_SECONDS).delete(["a", "b"])
    assert {key: error.details["key"] for key, error in failed.items()} == {"a": "a", "b": "b"}
    assert all(error.details["attempts"] == 2 for error in failed.values())
    refusal = StorageError("No deletes here.")
    refusing = FaultyStore(MemoryStore(), [nth(1, "request", error=lambda: refusal)])
    assert _retrying(refusing, SleepClock()).delete(["a", "b"]) == {"a": refusal, "b": refusal}


class _Breaking(WrappedStore):
    """Store that breaks off each listing after two keys, for the given number of times."""

    def __init__(self, store: ObjectStore, times: int) -> None:
        super().__init__(store)
        self.times = times
        self.asked: list[str] = []

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        self.asked.append(after)
        for index, info in enumerate(self._store.list(prefix, after=after)):
            if index == 2 and self.times:
                self.times -= 1
                raise TransientStorageError("broken off")
            yield info


def test_a_listing_goes_on_where_it_broke_off() -> None:
    """Break off a listing of ten keys three times: each key comes once, in order, and the backoff restarts."""
    memory, clock = MemoryStore(), SleepClock()
    keys = [f"key-{number}" for number in range(10)]
    for key in keys:
        memory.put(key, [b"x"])
    breaking = _Breaking(memory, times=3)
    assert [info.key for info in _retrying(breaking, clock).list("key-")] == keys
    assert breaking.asked == ["", "key-1", "key-3", "key-5"]
    assert clock.sleeps == [0.5, 0.5, 0.5]


def test_retries_are_reported_with_the_whole_key() -> None:
    """Retry a child's request: the key is reported relative to the topmost wrapper."""
    memory, clock = MemoryStore(), SleepClock()
    memory.put("a/b/key", [b"x"])
    seen: list[tuple[str, str, str]] = []
    store = RetryingStore(
        FaultyStore(memory, [nth(1, "request"), nth(2, "response")]),
        clock.deadline(60),
        on_retry=lambda verb, key, error: seen.append((verb, key, type(error).__name__)),
    )
    store.child("a").child("b").head("key")
    assert seen == [("head", "a/b/key", "TransientStorageError")] * 2


def test_deadlines() -> None:
    """Look before, at and after the deadline."""
    clock = SleepClock()
    deadline = Deadline(10.0, clock)
    assert (deadline.remaining_seconds(), deadline.expired()) == (10.0, False)
    clock.now += 9.0
    assert (deadline.elapsed_seconds(), deadline.remaining_seconds(), deadline.expired()) == (9.0, 1.0, False)
    clock.now += 1.0
    assert (deadline.remaining_seconds(), deadline.expired()) == (0.0, True)
    clock.now += 5.0
    assert (deadline.elapsed_seconds(), deadline.remaining_seconds(), deadline.expired()) == (15.0, 0.0, True)


def test_backoff() -> None:
    """Check pauses of 10**9 failures, without jitter, and near the deadline."""
    policy = RetryPolicy(first_delay_seconds=0.5, delay_seconds_max=10.0)
    assert policy.delay_seconds(10**9, remaining_seconds=100.0, random=0.5) == 5.0
    assert policy.delay_seconds(3, remaining_seconds=100.0, random=0.0) == 0.0
    assert policy.delay_seconds(6, remaining_seconds=3.0, random=0.5) == 1.5
    assert policy.delay_seconds(6, remaining_seconds=0.49, random=0.5) is None
