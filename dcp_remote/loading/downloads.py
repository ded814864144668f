"""Downloads of byte ranges, several at a time, under a fixed memory budget.

Knows neither tensors nor manifests. A range is digested in the worker thread that received it, and yielded in the
caller's thread.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import human_bytes
from dcp_remote.common.threads import WAKE_SECONDS, Cancellation, Workers, submit_or_run
from dcp_remote.common.units import MiB
from dcp_remote.errors import StorageError
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.request_context import BufferLease
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS, RetryingStore

T = TypeVar("T")

DOWNLOADS_IN_FLIGHT = 16
# From a store that is far away as many ranges more are in flight as wait for their first byte, up to this many in all.
FAR_DOWNLOADS_IN_FLIGHT = 32
# Time in which the largest range arrives behind its first byte: 80 MB/s, about the rate of a connection to S3 (Amazon,
# "Performance guidelines for Amazon S3").
_ARRIVAL_SECONDS = 0.1

# Ranges queued beyond those in flight, so that no worker waits for the caller: beside sixteen threads that want the
# GIL, the caller takes most of a millisecond to submit the next range. Only ranges that need no buffer of ours.
DOWNLOADS_WAITING = 8

# Largest range of one request. Larger ranges arrive more slowly (measured: 1.2 s/GiB at 64 MiB, 0.65 s at 8 MiB).
RANGE_BYTES_MAX = 8 * MiB

# Smallest range whose buffer is used again. malloc keeps freed memory in one arena per thread: 6 GiB, read in such
# ranges by eight threads with a budget of 64 MiB, took 129 MiB.
_REUSED_BYTES_MIN = 1 * MiB


@dataclass(frozen=True, slots=True)
class Fetch(Generic[T]):
    """Range to be read."""

    key: str  # key of the object
    start: int  # first byte in the object
    length: int  # bytes; at least 1
    into: memoryview | None  # buffer to read into; None for one that `download` provides
    digest: Callable[[memoryview], bytes]  # called in the worker thread
    subject: T  # any value of the caller's, to recognize the range by

    @property
    def held_bytes(self) -> int:
        """Bytes of memory taken while in flight: the client's copy, and a buffer unless `into` is given."""
        return self.length if self.into is not None else 2 * self.length


@dataclass(frozen=True, slots=True)
class Fetched(Generic[T]):
    """Range that has arrived. `data` is valid until the next range is asked for."""

    fetch: Fetch[T]
    data: memoryview
    digest: bytes


def downloads_in_flight(latency_seconds: float) -> int:
    """Return how many ranges to read at a time, so that sixteen arrive while others wait for a first byte. Pure."""
    return min(FAR_DOWNLOADS_IN_FLIGHT, round(DOWNLOADS_IN_FLIGHT * (1 + latency_seconds / _ARRIVAL_SECONDS)))


class _Buffers:
    """Pool of buffers for ranges without `into`; for one thread. The memory kept for reuse stays within the budget."""

    def __init__(self, memory_budget_bytes: int) -> None:
        self._kept_max = memory_budget_bytes // RANGE_BYTES_MAX  # short ranges count as long: their memory was touched
        self._unused: list[mmap.mmap] = []
        self._used: dict[int, mmap.mmap] = {}  # by the id of the view that `take` returned

    def take(self, length: int) -> memoryview:
        """Return a buffer of this many bytes, of any content."""
        if not _REUSED_BYTES_MIN <= length <= RANGE_BYTES_MAX:
            return memoryview(bytearray(length))
        memory = self._unused.pop() if self._unused else mmap.mmap(-1, RANGE_BYTES_MAX)
        view = memoryview(memory)[:length]
        self._used[id(view)] = memory
        return view

    def give_back(self, view: memoryview) -> None:
        """Return a buffer to the pool."""
        memory = self._used.pop(id(view), None)
        if memory is not None and len(self._unused) + len(self._used) < self._kept_max:
            self._unused.append(memory)


def download(
    store: ObjectStore,
    fetches: Iterable[Fetch[T]],
    *,
    memory_budget_bytes: int,
    retry_seconds: float = RANGE_RETRY_SECONDS,
    deadline: Deadline | None = None,
    total_bytes: int | None = None,
    latency_seconds: float = 0.0,
) -> Iterator[Fetched[T]]:
    """Read ranges in parallel, and yield each as it arrives; `fetches` is consumed in the caller's thread.

    One request per range, unless it is retried. After this generator has raised or was closed, no thread writes into a
    buffer any more; threads of a cloud store may still wait for an answer, which is dropped (`BufferLease`).

    The budget bounds the memory of all ranges in flight or yielded; a larger range is read alone. Each range is retried
    for `retry_seconds` while the store fails. The deadline is checked twice a second, since another thread may expire
    it; ranges in flight are abandoned then. `total_bytes`, of all ranges together, is told in the error.
    `latency_seconds` is the latency of a store that has measured none itself.
    """
    cancellation = Cancellation()
    lease = BufferLease()
    buffers = _Buffers(memory_budget_bytes)
    at_a_time = downloads_in_flight(getattr(store, "latency_seconds", 0.0) or latency_seconds)
    pool = Workers(at_a_time, "dcp_remote-download")
    running: dict[Future[Fetched[T]], Fetch[T]] = {}
    failures: dict[tuple[str, int], StorageError] = {}  # by key and first byte, of ranges that have not arrived
    held_bytes, read_bytes, arrived_seconds = 0, 0, time.monotonic()

    def begin(fetch: Fetch[T]) -> Future[Fetched[T]]:
        data = fetch.into if fetch.into is not None else buffers.take(fetch.length)
        return submit_or_run(pool, partial(receive, fetch, data))

    def receive(fetch: Fetch[T], data: memoryview) -> Fetched[T]:
        seconds = retry_seconds if deadline is None else min(retry_seconds, deadline.remaining_seconds())
        range_deadline = Deadline(seconds, cancellation.clock)
        with lease.used():
            RetryingStore(store, range_deadline, on_retry=partial(note_retry, fetch)).get_into(
                fetch.key, fetch.start, data
            )
        return Fetched(fetch, data, fetch.digest(data))

    def note_retry(fetch: Fetch[T], _verb: str, _key: str, error: StorageError) -> None:
        failures[fetch.key, fetch.start] = error

    def late_error() -> StorageError:
        """Return the error of a load that is stopped; it names a range in flight, if possible one that has failed."""
        places = [(fetch.key, fetch.start) for fetch in running.values()]
        place = next((place for place in places if place in failures), places[0])
        return StorageError(
            "There is no time left for the load: its deadline has passed, or it was cancelled.",
            url=store.url,
            key=place[0],
            read=human_bytes(read_bytes) + (f" of {human_bytes(total_bytes)}" if total_bytes is not None else ""),
            seconds_since_last_range=round(time.monotonic() - arrived_seconds, 1),
            cause=failures.get(place),
        )

    upcoming = iter(fetches)
    next_fetch: Fetch[T] | None = next(upcoming, None)
    try:
        while next_fetch is not None or running:
            while (
                next_fetch is not None
                and len(running) < at_a_time + (DOWNLOADS_WAITING if next_fetch.into is not None else 0)
                and (not held_bytes or held_bytes + next_fetch.held_bytes <= memory_budget_bytes)
            ):
                held_bytes += next_fetch.held_bytes
                running[begin(next_fetch)] = next_fetch
                next_fetch = next(upcoming, None)
            done, _ = wait(running, None if deadline is None else WAKE_SECONDS, return_when=FIRST_COMPLETED)
            if deadline is not None and deadline.expired():
                raise late_error()
            while done:
                future = done.pop()
                del running[future]
                fetched = future.result()
                del future
                failures.pop((fetched.fetch.key, fetched.fetch.start), None)  # its frames hold the buffer
                read_bytes, arrived_seconds = read_bytes + fetched.fetch.length, time.monotonic()
                yield fetched
                held_bytes -= fetched.fetch.held_bytes
                buffers.give_back(fetched.data)
                del fetched  # or the buffer would stay while its bytes are free in the budget
    finally:
        cancellation.cancel()
        has_waiting_threads = lease.close()
        pool.shutdown(wait=not has_waiting_threads)
