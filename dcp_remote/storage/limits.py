"""Limits that a site sets for all requests of a process: requests in flight, and bytes per second in each direction.

They are options of every kind of store, and hold per process: its stores with the same limit share it. A limit of bytes
per second holds on average, since each request begins when the bytes of those before have had their time, and then runs
at full speed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from dcp_remote.common.deadline import SYSTEM_CLOCK, Clock
from dcp_remote.errors import TransientStorageError
from dcp_remote.storage.base import Content, ObjectStore
from dcp_remote.storage.options import LIMIT_OPTIONS
from dcp_remote.storage.request_context import remaining_seconds, writes_nothing
from dcp_remote.storage.wrapper import Request, WrappedStore

_Answer = TypeVar("_Answer")
_Limit = TypeVar("_Limit")

# A request that waits for its turn checks its deadline this often, since a save or load that fails expires it.
CHECK_SECONDS = 0.2

_NO_TIME = (
    "The limit of {} in storage_options left no time for this request. Raise the limit, or the deadline of the save or "
    "load."
)


class ByteRate:
    """Limit of bytes per second, shared by threads: gives each request a time to begin. Has the name of its option."""

    def __init__(self, name: str, bytes_per_second: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Begin with no byte sent."""
        self._name = name
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._free_seconds = -math.inf  # time at which the bytes claimed so far have had theirs

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the limit; a process has its own count."""
        return _share, (ByteRate, self._name, self._bytes_per_second)

    def wait(self, size_bytes: int) -> None:
        """Wait until a request of this size may begin; transient error if its deadline comes first."""
        with self._lock:
            now_seconds = self._clock.monotonic()
            begin_seconds = max(now_seconds, self._free_seconds)
            if begin_seconds - now_seconds > remaining_seconds():
                raise self._no_time()  # nothing is claimed
            self._free_seconds = begin_seconds + size_bytes / self._bytes_per_second
        while (left_seconds := begin_seconds - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left_seconds, CHECK_SECONDS))
            if not remaining_seconds():
                raise self._no_time()

    def count(self, size_bytes: int) -> None:
        """Count bytes that have arrived, of a request whose size was not known; later requests wait for them."""
        with self._lock:
            self._free_seconds = max(self._clock.monotonic(), self._free_seconds) + size_bytes / self._bytes_per_second

    def _no_time(self) -> TransientStorageError:
        return TransientStorageError(_NO_TIME.format(self._name), bytes_per_second=self._bytes_per_second)


class RequestSlots:
    """Limit of the requests in flight, shared by threads."""

    def __init__(self, count: int) -> None:
        """Begin with no request in flight."""
        self._count = count
        self._slots = threading.BoundedSemaphore(count)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the limit; a process has its own count."""
        return _share, (RequestSlots, self._count)

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a slot while a block runs; transient error if the deadline of the request passes before one is free."""
        has_slot = False
        try:
            with writes_nothing():
                while not (has_slot := self._slots.acquire(timeout=min(CHECK_SECONDS, remaining_seconds()))):
                    if not remaining_seconds():
                        raise TransientStorageError(
                            _NO_TIME.format("requests_in_flight"), requests_in_flight=self._count
                        )
            yield
        finally:
            if has_slot:  # also if the load that asked was given up meanwhile
                self._slots.release()


class LimitedStore(WrappedStore):
    """Store that keeps to limits, as do its children. A listing is in flight while its first page is asked for."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        upload: ByteRate | None = None,
        download: ByteRate | None = None,
        slots: RequestSlots | None = None,
    ) -> None:
        """Store the arguments."""
        super().__init__(store)
        self._upload = upload
        self._download = download
        self._slots = slots

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        rate = self._upload if request.verb == "put" else self._download
        if rate is not None and request.size_bytes:
            with writes_nothing():
                rate.wait(request.size_bytes)
        with self._slots.slot() if self._slots is not None else nullcontext():
            answer = send()
        if isinstance(answer, Content) and self._download is not None:
            self._download.count(len(answer.data))
        return answer


def limit_store(store: ObjectStore, options: Mapping[str, object]) -> ObjectStore:
    """Return the store with the limits among its options, which were checked; the store itself if there are none."""
    given = [options.get(name) for name in LIMIT_OPTIONS]
    if given == [None] * len(given):
        return store
    count, upload, download = given
    return LimitedStore(
        store,
        upload=None if upload is None else _share(ByteRate, "upload_bytes_per_second", upload),
        download=None if download is None else _share(ByteRate, "download_bytes_per_second", download),
        slots=None if count is None else _share(RequestSlots, count),
    )


_processes = 1  # of the job


def note_processes(count: int) -> None:
    """Note how many processes the job has, which begin their requests together."""
    global _processes  # noqa: PLW0603  # one job, whatever the number of stores
    _processes = count


def count_processes() -> int:
    """Return how many processes the job has, as noted; 1 at first."""
    return _processes


_shared_lock = threading.Lock()
_shared: dict[tuple[object, ...], Any] = {}


def _share(kind: Callable[..., _Limit], *arguments: object) -> _Limit:
    """Return the limit that all stores of this process with the same one share."""
    with _shared_lock:
        limit: _Limit = _shared.setdefault((kind, *arguments), kind(*arguments))
        return limit
