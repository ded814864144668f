"""Limits of bytes per second and of requests in flight. The clock is fake."""

from __future__ import annotations

import math
import pickle
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Clock, Deadline
from dcp_remote.errors import InvalidArgumentError, StorageError, TransientStorageError
from dcp_remote.storage import MemoryStore, ObjectStore, open_store
from dcp_remote.storage.base import Condition, Version
from dcp_remote.storage.limits import ByteRate, LimitedStore, RequestSlots
from dcp_remote.storage.request_context import BufferLease, limit_requests
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing.store_suite import StoreSuite
from tests.support.clocks import SleepClock


class TestLimitedStore(StoreSuite):
    """The suite with all limits, as high as the suite needs."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        options = {"requests_in_flight": 8, "upload_bytes_per_second": 1e12, "download_bytes_per_second": 1e12}
        return open_store(f"memory://{uuid.uuid4().hex}", options)

    def raw_write(self, store: ObjectStore, key: str, data: bytes) -> None:
        _unlimited(store).put(key, [data])

    def raw_read(self, store: ObjectStore, key: str) -> bytes:
        return _unlimited(store).get(key, limit_bytes=1 << 30).data


def _unlimited(store: ObjectStore) -> ObjectStore:
    assert isinstance(store, LimitedStore)
    return store._store


def _rate(clock: SleepClock, bytes_per_second: float) -> ByteRate:
    return ByteRate("upload_bytes_per_second", bytes_per_second, clock=Clock(clock, clock.sleep))


def test_uploads_keep_to_their_rate() -> None:
    """Put 10 objects of 100 bytes at 50 bytes/s: the first at once, the last after 18 s; reads do not wait for them."""
    clock = SleepClock()
    store = LimitedStore(MemoryStore(), upload=_rate(clock, 50.0))
    began_seconds = clock.now
    for number in range(10):
        store.put(f"key-{number}", [b"x" * 60, b"y" * 40])
    assert clock.now - began_seconds == pytest.approx(18)
    sleeps = len(clock.sleeps)
    store.get("key-1", limit_bytes=100)
    store.get_into("key-1", 0, memoryview(bytearray(100)))
    assert len(clock.sleeps) == sleeps
    clock.now += 60
    store.child("below").put("key", [b"z" * 100])  # after a pause at once again
    assert len(clock.sleeps) == sleeps
    store.put("key", [b"z" * 100])  # a child counts as well
    assert len(clock.sleeps) > sleeps


def test_downloads_keep_to_their_rate() -> None:
    """Read ranges, whose size is known before, and whole objects, for which the next request waits."""
    clock = SleepClock()
    memory = MemoryStore()
    memory.put("key", [b"x" * 100])
    store = LimitedStore(memory, download=_rate(clock, 50.0))
    began_seconds = clock.now
    store.get("key", limit_bytes=100)
    assert clock.now == began_seconds
    store.get_into("key", 0, memoryview(bytearray(50)))
    assert clock.now - began_seconds == pytest.approx(2)
    store.get_into("key", 0, memoryview(bytearray(50)))
    assert clock.now - began_seconds == pytest.approx(3)
    store.put("key", [b"x" * 1000])
    assert clock.now - began_seconds == pytest.approx(3)


def test_no_wait_reaches_the_deadline() -> None:
    """Put what has no time before the deadline: the error names the option, and the next put waits for nothing more."""
    clock = SleepClock()
    store = LimitedStore(MemoryStore(), upload=_rate(clock, 10.0))
    store.put("first", [b"x" * 100])
    sleeps = len(clock.sleeps)
    with (
        limit_requests(Deadline(5, clock).remaining_seconds),
        pytest.raises(TransientStorageError, match="upload_bytes_per_second in storage_options left no time"),
    ):
        store.put("second", [b"x" * 1000])
    assert len(clock.sleeps) == sleeps
    store.put("third", [b"x"])
    assert clock.now == pytest.approx(10)


def test_a_wait_ends_when_the_save_is_given_up() -> None:
    """Expire the deadline during a wait, as a failed save does."""
    clock = SleepClock()
    left_seconds = [1e9, 0.0]
    store = LimitedStore(MemoryStore(), upload=_rate(clock, 10.0))
    store.put("first", [b"x" * 100])
    with limit_requests(lambda: left_seconds[clock.now > 3]), pytest.raises(TransientStorageError):
        store.put("second", [b"x"])
    assert 3 < clock.now < 4


class _Counting(WrappedStore):
    """Store that holds each put for a moment, and counts how many it holds at a time."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.lock = threading.Lock()
        self.running = self.most = 0

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(0.005)
        with self.lock:
            self.running -= 1
        return super().put(key, buffers, condition=condition)


@pytest.mark.parametrize("count", [1, 3])
def test_requests_in_flight(count: int) -> None:
    """Send from twelve threads, by a store and its child: never more than the limit at a time, and all are sent."""
    counting = _Counting(MemoryStore())
    store = LimitedStore(counting, slots=RequestSlots(count))
    stores = [store, store.child("below")]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda number: stores[number % 2].put(f"key-{number}", [b"x"]), range(12)))
    assert counting.most <= count
    assert len(list(counting.list())) == 12


def test_a_slot_is_given_back_after_an_error() -> None:
    """Fail a request, and wait for a slot beyond the deadline."""
    slots = RequestSlots(1)
    store = LimitedStore(MemoryStore(), slots=slots)
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            store.head("missing")
    with (
        slots.slot(),
        limit_requests(lambda: 0.0),
        pytest.raises(TransientStorageError, match="requests_in_flight in storage_options left no time"),
    ):
        store.head("missing")


def test_a_load_that_was_given_up_keeps_no_slot() -> None:
    """Close the lease of a load whose read waits for a slot: the read is refused, and the slot is free again."""
    slots, lease = RequestSlots(1), BufferLease()
    memory = MemoryStore()
    memory.put("key", [b"data"])
    store = LimitedStore(memory, slots=slots)
    refusals: list[StorageError] = []
    waiting = threading.Event()

    def read() -> None:
        with pytest.raises(StorageError, match="given up") as caught, lease.used():  # noqa: PT012
            waiting.set()
            store.get_into("key", 0, memoryview(bytearray(4)))
        refusals.append(caught.value)

    with slots.slot():
        thread = threading.Thread(target=read)
        thread.start()
        waiting.wait()
        lease.close()
    thread.join()
    assert len(refusals) == 1
    assert store.head("key").size_bytes == 4


def test_stores_of_a_process_share_their_limits() -> None:
    """Open two stores with one limit, one with another, and one without; and pickle one."""
    first, second, other = (
        open_store(f"memory://limited-{number}", {"requests_in_flight": count, "upload_bytes_per_second": 1e9})
        for number, count in enumerate((4, 4, 5))
    )
    assert isinstance(first, LimitedStore)
    assert isinstance(second, LimitedStore)
    assert isinstance(other, LimitedStore)
    assert first._slots is second._slots is not other._slots
    assert first._upload is second._upload is other._upload
    assert isinstance(open_store("memory://not-limited", {"requests_in_flight": None}), MemoryStore)
    copy = pickle.loads(pickle.dumps(open_store("/tmp", {"requests_in_flight": 4})))
    assert copy._slots is first._slots


@pytest.mark.parametrize(
    ("name", "values"),
    [("requests_in_flight", [0, 2.5, True]), ("upload_bytes_per_second", ["100MB", -1, math.nan, math.inf])],
)
def test_invalid_limits(name: str, values: list[object]) -> None:
    """Refuse limits of a wrong type, zero, negative or infinite ones."""
    for value in values:
        with pytest.raises(InvalidArgumentError, match=f"'{name}'.*above zero"):
            open_store("memory://limited", {name: value})


def test_limits_are_options_of_every_store() -> None:
    """Give a limit to each kind of store; a misspelled one is named, with its nearest neighbour."""
    for url in ("s3://bucket", "gs://bucket", "az://container", "/tmp", "memory://limited"):
        assert isinstance(open_store(url, {"requests_in_flight": 3}), LimitedStore)
        with pytest.raises(
            InvalidArgumentError, match=r"closest is 'requests_in_flight'.*Known: .*download_bytes_per_second"
        ):
            open_store(url, {"request_in_flight": 3})
