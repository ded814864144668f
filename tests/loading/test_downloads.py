"""Downloads: budgets are counted, and gates control order and clean-up.

Threads are real. A gate holds a request until the test opens it, which fixes the order of events; waits have a limit
only so that a bug fails instead of hanging.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.digests import digest
from dcp_remote.common.units import MiB
from dcp_remote.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.loading.downloads import DOWNLOADS_IN_FLIGHT, DOWNLOADS_WAITING, RANGE_BYTES_MAX, Fetch, download
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.request_context import remaining_seconds
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing import FaultyStore, nth
from tests.support.threads import PATIENCE_SECONDS, HookedStore, one_thread, opened, workers

DATA = random.Random(5).randbytes(100_000)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Check after every test that its threads end."""
    yield
    assert not workers("download")


def store_with_data() -> MemoryStore:
    memory = MemoryStore()
    memory.put("data", [DATA])
    return memory


def fetch(start: int, length: int, into: memoryview | None = None, key: str = "data") -> Fetch[int]:
    return Fetch(key, start, length, into, digest, start)


def test_every_range_arrives_once_with_its_digest() -> None:
    """Read ranges into new buffers and into destinations; some requests are lost, and repeated."""
    faults = [nth(2, "request"), nth(5, "response"), nth(6, "request")]
    destination = bytearray(len(DATA))
    cuts = sorted({0, len(DATA), *random.Random(6).sample(range(1, len(DATA)), 60)})
    fetches = [
        fetch(a, b - a, memoryview(destination)[a:b] if number % 2 else None)
        for number, (a, b) in enumerate(itertools.pairwise(cuts))
    ]
    seen: list[int] = []
    store = FaultyStore(store_with_data(), faults)
    for fetched in download(store, fetches, memory_budget_bytes=10_000):
        start, stop = fetched.fetch.start, fetched.fetch.start + fetched.fetch.length
        assert bytes(fetched.data) == DATA[start:stop]
        assert fetched.digest == digest(DATA[start:stop])
        if fetched.fetch.into is not None:
            assert fetched.data is fetched.fetch.into
        else:
            destination[start:stop] = fetched.data
        seen.append(fetched.fetch.subject)
    assert sorted(seen) == cuts[:-1]
    assert destination == DATA
    assert len(store.hits) == 3
    assert list(download(store, [], memory_budget_bytes=1)) == []


def test_downloads_stay_within_the_budget() -> None:
    """Count bytes from each request until its data was used; without a destination they count twice."""
    rng = random.Random(8)
    budget_bytes = 1000
    fetches = [
        fetch(n, rng.choice([1, 100, 300, 900]), memoryview(bytearray(900)) if rng.random() < 0.5 else None)
        for n in range(300)
    ]
    fetches = [f if f.into is None else fetch(f.start, f.length, f.into[: f.length]) for f in fetches]
    lock = threading.Lock()
    held: dict[int, int] = {}
    states: list[list[int]] = []
    by_start = {f.start: f for f in fetches}

    class Counting(WrappedStore):
        def get_into(self, key: str, start: int, buffer: memoryview) -> None:
            with lock:
                held[start] = len(buffer) * (1 if by_start[start].into is not None else 2)
                states.append(list(held.values()))
            self._store.get_into(key, start, buffer)

    for fetched in download(Counting(store_with_data()), fetches, memory_budget_bytes=budget_bytes):
        with lock:
            del held[fetched.fetch.start]
    assert not held
    assert all(sum(state) <= budget_bytes or len(state) == 1 for state in states)
    assert max(map(sum, states)) > budget_bytes, "one that is too large goes alone"
    assert max(map(len, states)) > 1, "others go together"


def test_ranges_are_drawn_late_and_by_the_caller() -> None:
    """Draw at most one range more than there is room for, in the thread that iterates and may resolve destinations."""
    drawn: list[int] = []

    def fetches() -> Iterator[Fetch[int]]:
        for number in range(100):
            drawn.append(threading.get_ident())
            yield fetch(number, 10)

    for consumed, _ in enumerate(download(store_with_data(), fetches(), memory_budget_bytes=1 << 20)):
        assert len(drawn) <= consumed + DOWNLOADS_IN_FLIGHT + 1
    assert drawn == [threading.get_ident()] * 100
    drawn.clear()
    for consumed, _ in enumerate(download(store_with_data(), fetches(), memory_budget_bytes=60)):
        assert len(drawn) <= consumed + 3 + 1, "three of 20 bytes fit"


def test_no_thread_waits_for_the_caller() -> None:
    """Queue the next reads ahead if they have a destination; those that need a buffer only while it is being read."""
    for into, at_most in ((True, DOWNLOADS_IN_FLIGHT + DOWNLOADS_WAITING), (False, DOWNLOADS_IN_FLIGHT)):
        begun: list[str] = []
        enough = threading.Event()

        def before(key: str, begun: list[str] = begun, enough: threading.Event = enough, n: int = at_most) -> None:
            begun.append(key)
            if len(begun) == n:
                enough.set()

        fetches = (fetch(n, 10, memoryview(bytearray(10)) if into else None) for n in range(100))
        for _ in download(HookedStore(store_with_data(), before), fetches, memory_budget_bytes=1 << 20):
            opened(enough)
            assert len(begun) == at_most
            break


def writers(count: int) -> tuple[list[bytearray], list[Fetch[int]]]:
    buffers = [bytearray(100) for _ in range(count)]
    return buffers, [fetch(n, 100, memoryview(buffer)) for n, buffer in enumerate(buffers)]


def test_after_an_error_no_thread_writes() -> None:
    """Fail one read while all workers are in a request: after the error no thread writes."""
    barrier = threading.Barrier(DOWNLOADS_IN_FLIGHT)
    writes: Counter[str] = Counter()

    def before(key: str) -> None:
        if writes["begun"] < DOWNLOADS_IN_FLIGHT:
            writes["begun"] += 1
            barrier.wait(PATIENCE_SECONDS)
        if key == "gone":
            raise ObjectNotFoundError("There is no such object.", key=key)

    def after(key: str) -> None:
        writes["done"] += 1

    buffers, fetches = writers(50)
    fetches[3] = fetch(3, 100, fetches[3].into, key="gone")
    with pytest.raises(ObjectNotFoundError):
        for _ in download(HookedStore(store_with_data(), before, after), fetches, memory_budget_bytes=1 << 20):
            pass
    assert not workers("download")
    for buffer in buffers:
        buffer[:] = bytes(100)
    assert writes["done"] < 50, "those behind it never began"


def test_after_closing_no_thread_writes() -> None:
    """Close the generator after its first range, and drop another one."""
    buffers, fetches = writers(50)
    arriving = download(store_with_data(), fetches, memory_budget_bytes=1 << 20)
    next(arriving)
    assert workers("download")
    arriving.close()  # type: ignore[attr-defined]  # an Iterator to callers, a generator in truth
    assert not workers("download")
    assert sum(any(buffer) for buffer in buffers) < 50
    arriving = download(store_with_data(), fetches, memory_budget_bytes=1 << 20)
    next(arriving)
    del arriving
    assert not workers("download")


def test_retries_end_with_the_load() -> None:
    """Fail one range for ever and deny another: the load does not wait for five minutes of retries."""
    tried = threading.Event()

    def before(key: str) -> None:
        if key == "stuck":
            tried.set()
            raise TransientStorageError("503.")
        opened(tried)
        raise PermissionDeniedError("No grant.")

    fetches = [fetch(0, 10, key="stuck"), fetch(10, 10)]
    with pytest.raises(PermissionDeniedError):
        list(download(HookedStore(store_with_data(), before), fetches, memory_budget_bytes=1000))
    assert not workers("download")


def test_a_deadline_that_expires_during_retries() -> None:
    """Let another thread expire the deadline during retries, and begin a load after the deadline."""
    tried = threading.Event()

    def before(_key: str) -> None:
        tried.set()
        raise TransientStorageError("503.")

    store = HookedStore(store_with_data(), before)
    deadline = Deadline(1000, lambda: 2000 if tried.is_set() else 0)
    for _ in range(2):
        with pytest.raises(StorageError, match="no time left"):
            list(download(store, [fetch(0, 10)], memory_budget_bytes=1000, deadline=deadline))
        assert not workers("download")


def test_a_load_that_is_stopped_says_how_far_it_came() -> None:
    """One range arrives, the next fails until the deadline: the error has its key, its cause, and the bytes read."""
    seconds = [0.0]

    def before(key: str) -> None:
        if key == "failing":
            raise TransientStorageError("503 Slow Down.")

    store = HookedStore(store_with_data(), before)
    fetches = [fetch(0, 10), fetch(10, 30, key="failing")]
    arriving = download(
        store, fetches, memory_budget_bytes=1000, deadline=Deadline(50, lambda: seconds[0]), total_bytes=40
    )
    next(arriving)
    time.sleep(0.05)  # the other range has failed by then
    seconds[0] = 100.0
    with pytest.raises(StorageError, match="no time left for the load") as caught:
        next(arriving)
    details = caught.value.details
    assert (details["key"], details["read"]) == ("failing", "10 B of 40 B")
    assert str(details["cause"]).startswith("TransientStorageError: 503 Slow Down.")


def test_requests_end_with_the_load() -> None:
    """Read with a deadline in a minute: no request has more time than that."""
    limits: list[float] = []
    store = HookedStore(store_with_data(), lambda _key: limits.append(remaining_seconds()))
    list(download(store, [fetch(0, 10)], memory_budget_bytes=1000, deadline=Deadline(60, lambda: 0)))
    assert len(limits) == 1
    assert limits[0] <= 60


def test_memory_of_ranges_is_used_again() -> None:
    """Forty ranges of 1 MiB reuse the memory of the pending ones; malloc would keep memory for each of the threads."""
    store = MemoryStore()
    store.put("data", [bytes(40 * MiB)])
    budget_bytes = DOWNLOADS_IN_FLIGHT * RANGE_BYTES_MAX
    fetches = [Fetch("data", n * MiB, MiB, None, lambda _: b"", n) for n in range(40)]
    # The objects themselves are kept, so that no address is used twice.
    memories = [fetched.data.obj for fetched in download(store, fetches, memory_budget_bytes=budget_bytes)]
    assert len(memories) == 40
    assert len({id(memory) for memory in memories}) <= DOWNLOADS_IN_FLIGHT


def test_the_memory_of_a_repeated_read_is_freed() -> None:
    """The first attempt of one read fails: its buffer is freed when the next range is asked for, not with the load."""
    faults = [nth(1, "request")]
    arriving = download(
        FaultyStore(store_with_data(), faults), [fetch(0, MiB // 16), fetch(1, 1)], memory_budget_bytes=1
    )
    memory = weakref.ref(next(arriving).data)
    assert next(arriving).fetch.start == 1
    assert memory() is None


def test_drawing_may_fail() -> None:
    """Raise in the iterator of ranges: the error is raised unchanged, and all threads end."""

    def fetches() -> Iterator[Fetch[int]]:
        yield from map(partial(fetch, length=10), range(20))
        raise InvalidArgumentError("Another shape.")

    with pytest.raises(InvalidArgumentError):
        list(download(store_with_data(), fetches(), memory_budget_bytes=1000))
    assert not workers("download")


def test_an_object_that_is_too_short() -> None:
    with pytest.raises(CorruptCheckpointError):
        list(download(store_with_data(), [fetch(99_999, 2)], memory_budget_bytes=1000))


def test_downloads_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read each range once: no thread writes into memory that was handed over."""
    one_thread(monkeypatch)
    memory = MemoryStore()
    memory.put("shard", [bytes(range(8)) * MiB])
    reads: list[str] = []

    def before(key: str) -> None:
        reads.append(key)
        time.sleep(0.005 if threading.current_thread() is threading.main_thread() else 0.02)

    fetches = [Fetch("shard", n * MiB, MiB, None, digest, n) for n in range(8)]
    for fetched in download(HookedStore(memory, before), fetches, memory_budget_bytes=64 * MiB):
        time.sleep(0.01)
        assert digest(fetched.data) == fetched.digest
    assert len(reads) == 8


@pytest.mark.parametrize(("latency_seconds", "at_a_time"), [(0.001, 16), (0.05, 24), (0.1, 32), (2.0, 32)])
def test_more_ranges_are_in_flight_where_the_store_is_far(latency_seconds: float, at_a_time: int) -> None:
    """As many ranges as are meant to be in flight wait for each other, and one more does not begin before they end."""
    barrier = threading.Barrier(at_a_time)
    begun: list[str] = []

    def before(key: str) -> None:
        begun.append(key)
        if len(begun) <= at_a_time:
            barrier.wait(PATIENCE_SECONDS)

    class Far(HookedStore):
        latency_seconds = 0.0

    store = Far(store_with_data(), before)
    store.latency_seconds = latency_seconds
    _, fetches = writers(100)
    assert len(list(download(store, fetches, memory_budget_bytes=1 << 20))) == 100
