"""Rates of the two ways by which bytes reach this rank in a load: from the store, and from other hosts. No I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Part of the store's rate below which other hosts count as slower: a request costs money, and rates that are about
# equal change places all the time.
_SLOWER_FACTOR = 0.75

# Time after which a rate begins to count, and after which it counts in full, in seconds: what has arrived is looked at
# every tenth of a second, and a new connection is slow at first.
_RATE_BEGINS_SECONDS, _RATE_COUNTS_SECONDS = 0.1, 0.5

# Time in which the rate of other hosts is measured, in seconds.
_WINDOW_SECONDS = 1.0

# Time after which a unit is left to a store whose rate is unknown, because this rank owns no unit, in seconds.
_UNKNOWN_SECONDS = 1.0


def comes_sooner_from_store(
    hosts_rate: float, store_rate: float, *, transfers: int, reading: int, measured_seconds: float
) -> bool:
    """Return whether the rest of a unit comes clearly sooner from the store than from another host.

    Each transfer has its part of the rate of the other hosts. In the store, it would have the same part of the rate as
    all else that this rank is waiting for would have there. So one unit after another is left to the store, until the
    others come as soon.

    Args:
        hosts_rate: Bytes per second from other hosts.
        store_rate: Bytes per second from the store, while all ranks read from it.
        transfers: Number of units that other hosts are sending, at least 1.
        reading: Number of requests to the store.
        measured_seconds: Time for which `hosts_rate` was measured: the shorter, the greater the advantage must be.
    """
    certainty = (measured_seconds - _RATE_BEGINS_SECONDS) / (_RATE_COUNTS_SECONDS - _RATE_BEGINS_SECONDS)
    factor = _SLOWER_FACTOR * min(1.0, max(0.0, certainty))
    return hosts_rate * (transfers + reading) < factor * store_rate * transfers


class _Meter:
    """Bytes of one way, and the seconds with something under way; not thread-safe.

    Attributes:
        count: Number of requests or units that are under way.
        received_bytes: Bytes that have arrived.
        seconds: Time with something under way, up to the last call.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marked_seconds = 0.0
        self.count = 0
        self.received_bytes = 0.0
        self.seconds = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.received_bytes / max(self.seconds, 1e-9)

    def note(self, received_bytes: int, *, begun: int = 0) -> None:
        """Count bytes, and requests or units that begin; a negative number of them ends."""
        now_seconds = self._clock()
        if self.count:
            self.seconds += now_seconds - self._marked_seconds
        self._marked_seconds = now_seconds
        self.count += begun
        self.received_bytes += received_bytes

    def forget(self) -> None:
        """Halve bytes and seconds, so that the rate is that of the last seconds."""
        self.received_bytes, self.seconds = self.received_bytes / 2, self.seconds / 2


class ReadRates:
    """Rates of the store and of the other hosts, as this rank sees them in one load. Thread-safe.

    All ranks read from the store at the same time, so that its rate is this rank's share of it.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with no rate."""
        self._clock = clock
        self._lock = threading.Lock()
        self._store = _Meter(clock)
        self._hosts = _Meter(clock)

    @contextmanager
    def reading(self, size_bytes: int) -> Iterator[None]:
        """Measure a request to the store while a block runs; its bytes count if the block raises nothing."""
        received_bytes = 0
        with self._lock:
            self._store.note(0, begun=1)
        try:
            yield
            received_bytes = size_bytes
        finally:
            with self._lock:
                self._store.note(received_bytes, begun=-1)

    @contextmanager
    def receiving(self) -> Iterator[Callable[[int], bool]]:
        """Measure a unit that another host is sending while a block runs.

        Yields:
            Function to be called with the bytes of the unit that have arrived, now and then and at the end. Returns
            whether the rest of the unit comes sooner from the store.
        """
        began_seconds = self._clock()
        counted_bytes = 0

        def comes_sooner(received_bytes: int) -> bool:
            nonlocal counted_bytes
            with self._lock:
                self._hosts.note(received_bytes - counted_bytes)
                counted_bytes = received_bytes
                return self._comes_sooner(self._clock() - began_seconds)

        with self._lock:
            self._hosts.note(0, begun=1)
        try:
            yield comes_sooner
        finally:
            with self._lock:
                self._hosts.note(0, begun=-1)

    def _comes_sooner(self, seconds: float) -> bool:
        """Return whether the rest of a unit comes sooner from the store that another host has sent for some seconds."""
        if not self._store.received_bytes:
            return not self._store.count and seconds >= _UNKNOWN_SECONDS
        is_slow = comes_sooner_from_store(
            self._hosts.rate,
            self._store.rate,
            transfers=self._hosts.count,
            reading=self._store.count,
            measured_seconds=self._hosts.seconds,
        )
        if self._hosts.seconds > _WINDOW_SECONDS:
            self._hosts.forget()
        return is_slow and seconds >= _RATE_BEGINS_SECONDS
