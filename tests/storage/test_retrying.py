"""Retries: what is repeated, for how long, and what is said in the end. Time is a counter, randomness a constant."""

from __future__ import annotations

import dataclasses
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import pytest

from dcp_remote.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage import Condition, MemoryStore, ObjectInfo, ObjectStore
from dcp_remote.storage.retrying import Deadline, RetryingStore, RetryPolicy
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore, matching, nth
from dcp_remote.testing.store_suite import StoreSuite


@dataclasses.dataclass
class Clock:
    """Time that passes only by sleeping."""

    now: float = 100.0
    sleeps: list[float] = dataclasses.field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def _retrying(
    store: ObjectStore, clock: Clock, *, seconds: float = 60.0, random: float = 0.5, attempts_max: int | None = None
) -> RetryingStore:
    policy = RetryPolicy(first_delay_seconds=1.0, delay_seconds_max=8.0, attempts_max=attempts_max)
    return RetryingStore(store, Deadline(seconds, clock), policy, sleep=clock.sleep, random=lambda: random)


class TestRetryingStore(StoreSuite):
    """The suite through a wrapper whose store loses every third answer to what may be repeated."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        faults = [
            matching(_third_of_others, "response", persistent=True),
            matching(
                lambda verb, key, number: verb in ("head", "list") and number % 5 == 0, "request", persistent=True
            ),
        ]
        clock = Clock()
        memory = MemoryStore(uuid.uuid4().hex)
        return RetryingStore(FaultyStore(memory, faults), Deadline(1e9, clock), sleep=clock.sleep)

    def raw_write(self, store: ObjectStore, key: str, data: bytes) -> None:
        _innermost(store).put(key, [data])

    def raw_read(self, store: ObjectStore, key: str) -> bytes:
        return _innermost(store).get(key, limit_bytes=1 << 30).data

    def test_pickling(self, store: ObjectStore) -> None:
        """A deadline is of one clock, and so is what it bounds."""
        with pytest.raises(InvalidArgumentError, match="Deadline cannot be pickled"):
            pickle.dumps(RetryingStore(MemoryStore("name"), Deadline(1.0)))


def _third_of_others(verb: str, key: str, number: int) -> bool:
    return verb in ("get", "get_into", "delete") and number % 3 == 0


def _innermost(store: ObjectStore) -> ObjectStore:
    while isinstance(store, WrappedStore):
        store = store._store
    return store


_CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "head": lambda store: store.head("key"),
    "get": lambda store: store.get("key", limit_bytes=3),
    "get_into": lambda store: store.get_into("key", 0, memoryview(bytearray(3))),
    "put": lambda store: store.put("key", [b"new"]),
    "list": lambda store: list(store.list("k")),
    "delete": lambda store: store.delete(["key"]),
}


@pytest.mark.parametrize("lost", ["request", "response"])
@pytest.mark.parametrize("verb", _CALLS)
def test_what_fails_for_now_is_repeated(verb: str, lost: Literal["request", "response"]) -> None:
    """The first two requests of each verb fail in either direction; the third is the answer."""
    memory, clock = MemoryStore(), Clock()
    memory.put("key", [b"old"])
    recording = RecordingStore(memory)
    _CALLS[verb](_retrying(FaultyStore(recording, [nth(1, lost), nth(2, lost)]), clock))
    assert clock.sleeps == [0.5, 1.0]
    assert recording.count() == (1 if lost == "request" else 3)


@pytest.mark.parametrize("verb", ["head", "get", "get_into", "put", "list"])
def test_in_the_end_it_says_what_was_tried(verb: str) -> None:
    """Every request is lost until the deadline: the error counts, and keeps the last one as its cause."""
    clock = Clock()
    faulty = FaultyStore(MemoryStore(), [nth(1, "request", persistent=True)])
    with pytest.raises(TransientStorageError) as caught:
        _CALLS[verb](_retrying(faulty, clock, seconds=10.0))
    error = caught.value
    # 0.5, 1, 2, then half of the 6.5 and of the 3.25 that are left, then less than the first delay would fit soon.
    assert clock.sleeps == [0.5, 1.0, 2.0, 3.25, 1.625, 0.8125]
    assert error.details["attempts"] == len(faulty.hits) == 7
    assert error.details["seconds"] == pytest.approx(sum(clock.sleeps), abs=0.001)
    assert error.details["key"] == ("k" if verb == "list" else "key")
    assert isinstance(error.__cause__, TransientStorageError)
    assert "attempts" not in error.__cause__.details
    assert "An injected fault: the request was lost. " in str(error)


@pytest.mark.parametrize("random", [0.0, 0.3, 0.999999])
def test_no_sleep_reaches_the_deadline(random: float) -> None:
    """With little and with much jitter, nothing is slept past it, and nothing tried after it."""
    clock = Clock()
    sent: list[float] = []

    def failing() -> StorageError:
        sent.append(clock.now)
        clock.now += 0.25
        return TransientStorageError("slow, and then nothing")

    fault = Fault(lost="request", when=lambda verb, key, number: True, persistent=True, error=failing)
    with pytest.raises(TransientStorageError):
        _retrying(FaultyStore(MemoryStore(), [fault]), clock, seconds=30.0, random=random).head("key")
    assert max(sent) < 130.0
    assert clock.now < 130.25


def test_attempts_are_limited() -> None:
    """Three of them, however far the deadline is."""
    faulty = FaultyStore(MemoryStore(), [nth(1, "request", persistent=True)])
    with pytest.raises(TransientStorageError, match="attempts=3"):
        _retrying(faulty, Clock(), seconds=1e6, attempts_max=3).head("key")
    assert len(faulty.hits) == 3


def test_a_passed_deadline_still_allows_the_first_attempt() -> None:
    """Nothing left, an object that is there and one request that is lost."""
    memory, clock = MemoryStore(), Clock()
    memory.put("key", [b"x"])
    assert _retrying(memory, clock, seconds=0.0).head("key").size_bytes == 1
    with pytest.raises(TransientStorageError, match="attempts=1"):
        _retrying(FaultyStore(memory, [nth(1, "request")]), clock, seconds=0.0).head("key")
    assert clock.sleeps == []


def test_conditional_puts_are_sent_once() -> None:
    """Lost in either direction, with both conditions: the caller is told at once, and settles it."""
    memory, clock = MemoryStore(), Clock()
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
    """Raised as they are, after one request."""
    raised = error("final")
    faulty = FaultyStore(MemoryStore(), [nth(1, "request", persistent=True, error=lambda: raised)])
    with pytest.raises(error) as caught:
        _retrying(faulty, Clock()).head("key")
    assert caught.value is raised
    assert len(faulty.hits) == 1


class _Deleting(WrappedStore):
    """Answers each delete with the next of the given failures, and deletes the rest."""

    def __init__(self, store: ObjectStore, answers: list[dict[str, StorageError]]) -> None:
        super().__init__(store)
        self.answers = answers
        self.asked: list[list[str]] = []

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        self.asked.append(list(keys))
        answer = self.answers.pop(0) if self.answers else {}
        return answer | dict(self._store.delete([key for key in keys if key not in answer]))


def test_deletes_repeat_only_what_failed_for_now() -> None:
    """Four keys: one denied, two busy, of which one is busy again."""
    busy, denied = TransientStorageError("busy"), PermissionDeniedError("denied")
    store = _Deleting(MemoryStore(), [{"b": busy, "c": denied, "d": busy}, {"d": busy}])
    assert _retrying(store, Clock()).delete(["a", "b", "c", "d"]) == {"c": denied}
    assert store.asked == [["a", "b", "c", "d"], ["b", "d"], ["d"]]


def test_deletes_that_never_pass_are_reported() -> None:
    """Each key with its own error: the final one as it was, those for now with what was tried."""
    busy, denied = TransientStorageError("busy", region="x"), PermissionDeniedError("denied")
    store = _Deleting(MemoryStore(), [{"a": busy, "b": denied}, {"a": busy}])
    failed = _retrying(store, Clock(), attempts_max=2).delete(["a", "b", "c"])
    assert failed["b"] is denied
    assert str(failed["a"]) == "busy verb='delete' key='a' region='x' attempts=2 seconds=0.5"
    assert sorted(failed) == ["a", "b"]


def test_a_delete_that_fails_whole_is_reported_for_every_key() -> None:
    """No answer at all, ever."""
    faulty = FaultyStore(MemoryStore(), [nth(1, "request", persistent=True)])
    failed = _retrying(faulty, Clock(), attempts_max=2).delete(["a", "b"])
    assert {key: error.details["key"] for key, error in failed.items()} == {"a": "a", "b": "b"}
    assert all(error.details["attempts"] == 2 for error in failed.values())


class _Breaking(WrappedStore):
    """Breaks off each listing after two keys, until it has done so the given number of times."""

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
    """Ten keys, broken off three times: each is given once, in order, and progress begins the backoff again."""
    memory, clock = MemoryStore(), Clock()
    keys = [f"key-{number}" for number in range(10)]
    for key in keys:
        memory.put(key, [b"x"])
    breaking = _Breaking(memory, times=3)
    assert [info.key for info in _retrying(breaking, clock, attempts_max=2).list("key-")] == keys
    assert breaking.asked == ["", "key-1", "key-3", "key-5"]
    assert clock.sleeps == [0.5, 0.5, 0.5]


def test_retries_are_reported_with_the_whole_key() -> None:
    """A child's request, with the key as the wrapper's user knows it."""
    memory, clock = MemoryStore(), Clock()
    memory.put("a/b/key", [b"x"])
    seen: list[tuple[str, str, str]] = []
    store = RetryingStore(
        FaultyStore(memory, [nth(1, "request"), nth(2, "response")]),
        Deadline(60, clock),
        sleep=clock.sleep,
        on_retry=lambda verb, key, error: seen.append((verb, key, type(error).__name__)),
    )
    store.child("a").child("b").head("key")
    assert seen == [("head", "a/b/key", "TransientStorageError")] * 2


def test_backoff() -> None:
    """The ceiling doubles up to the maximum, also after a thousand failures; jitter is a fraction of all of it."""
    policy = RetryPolicy(first_delay_seconds=0.5, delay_seconds_max=10.0)

    def delays(random: float) -> list[float | None]:
        return [
            policy.delay_seconds(n, remaining_seconds=100.0, random=random) for n in (1, 2, 3, 4, 5, 6, 1000, 10**9)
        ]

    assert delays(0.5) == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    assert delays(0.0) == [0.0] * 8
    assert policy.delay_seconds(6, remaining_seconds=3.0, random=0.5) == 1.5
    assert policy.delay_seconds(6, remaining_seconds=0.49, random=0.5) is None


@pytest.mark.parametrize(
    "arguments", [{"first_delay_seconds": 0.0}, {"first_delay_seconds": 3.0, "delay_seconds_max": 2.0}]
)
def test_policies_that_make_no_sense(arguments: dict[str, float]) -> None:
    """No pause at all, and a first one above the last."""
    with pytest.raises(InvalidArgumentError):
        RetryPolicy(**arguments)  # type: ignore[arg-type]  # mypy reads the mapping as holding every argument
    with pytest.raises(InvalidArgumentError):
        RetryPolicy(attempts_max=0)


def test_deadlines() -> None:
    """Before, at and after."""
    clock = Clock()
    deadline = Deadline(10.0, clock)
    assert (deadline.remaining_seconds(), deadline.expired()) == (10.0, False)
    clock.now += 9.0
    assert (deadline.elapsed_seconds(), deadline.remaining_seconds(), deadline.expired()) == (9.0, 1.0, False)
    clock.now += 1.0
    assert (deadline.remaining_seconds(), deadline.expired()) == (0.0, True)
    clock.now += 5.0
    assert (deadline.elapsed_seconds(), deadline.remaining_seconds(), deadline.expired()) == (15.0, 0.0, True)
