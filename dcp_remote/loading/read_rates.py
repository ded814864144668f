"""Rates of the ways by which bytes reach this rank: measured in a load, and compared unit by unit. No I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Advantage that the store must have before a unit is taken from a rank that is sending it: a request costs money, and
# rates that are about equal change places all the time.
_SOONER_FACTOR = 0.75

# Time after which the rest of one unit is read from a store whose rate is unknown, because this rank owns no unit.
_UNKNOWN_SECONDS = 1.0


def comes_sooner_from_store(
    received_bytes: int, seconds: float, *, store_bytes_per_second: float, requests: int
) -> bool:
    """Return whether the rest of a unit comes clearly sooner from the store than from the rank that sends it.

    The store's rate is divided among all that this rank is waiting for: had every unit been moved there, each would
    get that part. So units are moved one after another until the rank that sends is as fast as the store.

    Args:
        received_bytes: Bytes of the unit that have arrived.
        seconds: Time for which the rank has been sending, in seconds.
        store_bytes_per_second: Rate of all requests of this rank to the store, while all ranks read.
        requests: Number of units and ranges that are on their way to this rank, this unit included.
    """
    return received_bytes * requests < _SOONER_FACTOR * store_bytes_per_second * seconds


class ReadRates:
    """Rate of the store as this rank sees it in one load, and number of transfers that share it. Thread-safe.

    All ranks read from the store at the same time, so that the rate is this rank's share of it.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with no rate."""
        self._clock = clock
        self._lock = threading.Lock()
        self._reading = 0  # requests to the store
        self._receiving = 0  # units that other ranks are sending
        self._read_bytes = 0
        self._read_seconds = 0.0  # with at least one request under way
        self._marked_seconds = 0.0

    @contextmanager
    def reading(self, size_bytes: int) -> Iterator[None]:
        """Measure a request to the store while a block runs; its bytes count if the block raises nothing."""
        self._count(reading=1)
        read_bytes = 0
        try:
            yield
            read_bytes = size_bytes
        finally:
            self._count(reading=-1, read_bytes=read_bytes)

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Count a unit that another rank is sending while a block runs."""
        self._count(receiving=1)
        try:
            yield
        finally:
            self._count(receiving=-1)

    def prefers_store(self, received_bytes: int, seconds: float) -> bool:
        """Return whether the rest of a unit that another rank is sending comes sooner from the store.

        Args:
            received_bytes: Bytes of the unit that have arrived.
            seconds: Time for which the other rank has been sending, in seconds.
        """
        with self._lock:
            if not self._read_bytes:
                return not self._reading and seconds >= _UNKNOWN_SECONDS
            rate = self._read_bytes / max(self._read_seconds, 1e-9)
            requests = self._reading + self._receiving
        return comes_sooner_from_store(received_bytes, seconds, store_bytes_per_second=rate, requests=requests)

    def _count(self, *, reading: int = 0, receiving: int = 0, read_bytes: int = 0) -> None:
        with self._lock:
            now_seconds = self._clock()
            if self._reading:
                self._read_seconds += now_seconds - self._marked_seconds
            self._marked_seconds = now_seconds
            self._reading += reading
            self._receiving += receiving
            self._read_bytes += read_bytes
