"""Ranges down, several at a time, under a fixed memory budget.

Nothing here knows tensors or manifests. What has arrived is digested in the worker thread that received it, and handed
over in the caller's thread.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from dcp_remote.errors import StorageError
from dcp_remote.ranges import MiB
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.landing import Landing
from dcp_remote.storage.retrying import Deadline, RetryingStore
from dcp_remote.transfer import WAKE_SECONDS, Patience, Workers, submitted

T = TypeVar("T")

DOWNLOADS_IN_FLIGHT = 16
# Ranges that wait for a thread, so that none of these waits for the caller's: with sixteen that want Python's lock, it
# takes the better part of a millisecond to say what is to be read next. Only those that need no memory of ours.
DOWNLOADS_WAITING = 8

# How much one range asks for. Larger ones are slower down (facts: 1.2 s/GiB at 64 MiB, 0.65 s at 8 MiB).
RANGE_BYTES_MAX = 8 * MiB

# From this size on, the memory of a range is used again by the next. What malloc gives to eight threads and gets back,
# it keeps in as many arenas: 6 GiB, read by such ranges with a budget of 64 MiB, took 129.
_REUSED_BYTES_MIN = 1 * MiB

# How long one range is retried. A load has no deadline of its own: as long as bytes arrive, it goes on.
RANGE_RETRY_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Fetch(Generic[T]):
    """A range to be read.

    Attributes:
        key: Of the object.
        start: First byte.
        length: How many; at least 1.
        into: Where to; None for a buffer of its own.
        digest: What to work out of the bytes in the worker thread.
        subject: Whose it is; the caller's own business.
    """

    key: str
    start: int
    length: int
    into: memoryview | None
    digest: Callable[[memoryview], bytes]
    subject: T

    @property
    def held_bytes(self) -> int:
        """Memory that it takes while under way: the client's copy, and a buffer unless it has a place to go."""
        return self.length if self.into is not None else 2 * self.length


@dataclass(frozen=True, slots=True)
class Fetched(Generic[T]):
    """A range that has arrived. `data` is valid until the next one is asked for."""

    fetch: Fetch[T]
    data: memoryview
    digest: bytes


class _Buffers:
    """Memory for ranges that have no place to go to; for one thread. What is kept for the next stays in the budget."""

    def __init__(self, memory_budget_bytes: int) -> None:
        self._kept_max = memory_budget_bytes // RANGE_BYTES_MAX  # a short range leaves the rest of its memory touched
        self._unused: list[mmap.mmap] = []
        self._used: dict[int, mmap.mmap] = {}  # by the id of the view that was given

    def take(self, length: int) -> memoryview:
        """So many bytes, of any content."""
        if not _REUSED_BYTES_MIN <= length <= RANGE_BYTES_MAX:
            return memoryview(bytearray(length))
        memory = self._unused.pop() if self._unused else mmap.mmap(-1, RANGE_BYTES_MAX)
        view = memoryview(memory)[:length]
        self._used[id(view)] = memory
        return view

    def give_back(self, view: memoryview) -> None:
        """Whoever was given it is through with it."""
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
) -> Iterator[Fetched[T]]:
    """Read ranges in parallel, and give each as it arrives; `fetches` is drawn from in the caller's thread.

    One request per range, unless it has to be repeated. When it raises, or is closed, no thread writes any more; of the
    cloud some may still wait, for an answer that nobody wants (`storage/landing.py`).

    Args:
        store: From where.
        fetches: Asked for one at a time, when there is room.
        memory_budget_bytes: Of what is under way or handed over. A single range larger than that goes alone.
        retry_seconds: How long one range is tried again while the store fails.
        deadline: Looked at every second, as another thread may let it expire; what is under way is given up then.

    Raises:
        StorageError: A range could not be read within `retry_seconds` of trying, or not by the deadline.
        CorruptCheckpointError: An object is shorter than its manifest says.
    """
    patience = Patience()
    landing = Landing()
    buffers = _Buffers(memory_budget_bytes)

    def begin(fetch: Fetch[T]) -> Future[Fetched[T]]:
        data = fetch.into if fetch.into is not None else buffers.take(fetch.length)
        return submitted(pool, partial(receive, fetch, data))

    def receive(fetch: Fetch[T], data: memoryview) -> Fetched[T]:
        deadline = Deadline(retry_seconds, patience.clock)
        with landing.used():
            RetryingStore(store, deadline, sleep=patience.pause).get_into(fetch.key, fetch.start, data)
        return Fetched(fetch, data, fetch.digest(data))

    def in_flight_max(fetch: Fetch[T]) -> int:
        return DOWNLOADS_IN_FLIGHT + (DOWNLOADS_WAITING if fetch.into is not None else 0)

    upcoming = iter(fetches)
    waiting: Fetch[T] | None = next(upcoming, None)
    running: set[Future[Fetched[T]]] = set()
    held_bytes = 0
    pool = Workers(DOWNLOADS_IN_FLIGHT, "dcp_remote-download")
    try:
        while waiting is not None or running:
            while (
                waiting is not None
                and len(running) < in_flight_max(waiting)
                and (not held_bytes or held_bytes + waiting.held_bytes <= memory_budget_bytes)
            ):
                held_bytes += waiting.held_bytes
                running.add(begin(waiting))
                waiting = next(upcoming, None)
            done, running = wait(running, None if deadline is None else WAKE_SECONDS, return_when=FIRST_COMPLETED)
            if deadline is not None and deadline.expired():
                raise StorageError("There is no time left for the load; it was given up.", url=store.url)
            while done:
                fetched = done.pop().result()
                yield fetched
                held_bytes -= fetched.fetch.held_bytes
                buffers.give_back(fetched.data)
                del fetched  # or its buffer would outlive its place in the budget
    finally:
        patience.give_up()
        some_wait = landing.close()
        pool.shutdown(wait=not some_wait)
