"""Rates of the two ways by which bytes reach this rank in a load: from the store, and from other hosts. No I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Part of the store's rate below which other hosts count as slower: a request costs money, and rates that are about
# equal change places all the time.
_SLOWER_FACTOR = 0.75

# Time after which the rate of other hosts counts, in seconds: a new connection is slow at first.
_CERTAIN_SECONDS = 0.3

# Time in which the rate of other hosts is measured, in seconds. After this time, a unit is left to a store whose rate
# is unknown, because this rank owns no unit.
_WINDOW_SECONDS = 1.0

# Part of the time that this rank has read for, by which another rank may be later.
_OVERDUE_PART = 0.5


class _Meter:
    """Bytes of one way, and the seconds with something under way; not thread-safe."""

    def __init__(self) -> None:
        self.count = 0  # requests or units that are under way
        self.received_bytes = 0.0
        self.seconds = 0.0  # with something under way, up to the last call
        self.marked_seconds = 0.0  # time of the last call

    def note(self, now_seconds: float, received_bytes: int, *, begun: int = 0) -> None:
        """Count bytes, and requests or units that begin; a negative number of them ends."""
        if self.count:
            self.seconds += now_seconds - self.marked_seconds
        self.marked_seconds = now_seconds
        self.count += begun
        self.received_bytes += received_bytes


class ReadRates:
    """Rates of the store and of the other hosts, as this rank sees them in one load. Thread-safe.

    All ranks read from the store at the same time, so that its rate is this rank's share of it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._store = _Meter()
        self._hosts = _Meter()

    @contextmanager
    def reading(self, size_bytes: int) -> Iterator[None]:
        """Measure a request to the store while a block runs; its bytes count if the block raises nothing."""
        received_bytes = 0
        self._note(self._store, 0, begun=1)
        try:
            yield
            received_bytes = size_bytes
        finally:
            self._note(self._store, received_bytes, begun=-1)

    @contextmanager
    def receiving(self) -> Iterator[Callable[[int], bool]]:
        """Measure a unit that another host is sending while a block runs.

        The function that is yielded is called with the bytes of the unit that have arrived, now and then and at the
        end, and returns whether the rest of the unit comes clearly sooner from the store.
        """
        counted_bytes = 0

        def comes_sooner(received_bytes: int) -> bool:
            nonlocal counted_bytes
            self._note(self._hosts, received_bytes - counted_bytes)
            counted_bytes = received_bytes
            return self._comes_sooner()

        self._note(self._hosts, 0, begun=1)
        try:
            yield comes_sooner
        finally:
            self._note(self._hosts, 0, begun=-1)

    def is_overdue(self) -> bool:
        """Return whether another rank should have read its units long ago: this rank has needed much less for its own.

        All ranks read about the same number of bytes. One of which the way to the store is slow, or cut, is not waited
        for; a rank that has read nothing itself cannot tell.
        """
        with self._lock:
            seconds = self._clock() - self._store.marked_seconds
            is_idle = self._store.received_bytes > 0 and not self._store.count
            return is_idle and seconds > _WINDOW_SECONDS + self._store.seconds * _OVERDUE_PART

    def _note(self, way: _Meter, received_bytes: int, *, begun: int = 0) -> None:
        with self._lock:
            way.note(self._clock(), received_bytes, begun=begun)

    def _comes_sooner(self) -> bool:
        """Return whether the rest of a unit that another host is sending comes sooner from the store.

        Each transfer has its part of the rate of the other hosts. In the store, it would have the same part of the rate
        as all else that this rank is waiting for would have there. So one unit after another is left to the store,
        until the others come as soon.
        """
        with self._lock:
            store, hosts = self._store, self._hosts
            if hosts.seconds < _CERTAIN_SECONDS:
                return False
            is_window_full = hosts.seconds > _WINDOW_SECONDS
            if not store.received_bytes:
                return not store.count and is_window_full
            hosts_rate = hosts.received_bytes / hosts.seconds
            store_rate = store.received_bytes / max(store.seconds, 1e-9)
            if is_window_full:  # the older half counts half, so that the rate is that of the last seconds
                hosts.received_bytes, hosts.seconds = hosts.received_bytes / 2, hosts.seconds / 2
            return hosts_rate * (hosts.count + store.count) < _SLOWER_FACTOR * store_rate * hosts.count
