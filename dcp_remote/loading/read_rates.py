"""Rates of the ways by which bytes reach this rank: measured in a load, and compared unit by unit. No I/O."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Advantage that the store must have before a unit is taken from a rank that is sending it: a request costs money, and
# rates that are about equal change places all the time.
_SOONER_FACTOR = 0.75

# Time after which the rest of one unit is read from a store whose rate is unknown, because this rank owns no unit.
_UNKNOWN_SECONDS = 1.0


# Time after which those that share a link with a unit that is complete have their part of it.
_SETTLING_SECONDS = 0.2


def comes_sooner_from_store(
    received_bytes: int, seconds: float, *, store_bytes_per_second: float, requests: int
) -> bool:
    """Return whether the rest of a unit comes clearly sooner from the store than from other ranks.

    The store's rate is divided among all that this rank is waiting for: had every unit been moved there, each would
    get that part. So units are moved until the other ranks send the rest as fast as the store would.

    Args:
        received_bytes: Bytes of all units under way that have arrived of late.
        seconds: Times in which these bytes arrived, added up over the units, in seconds.
        store_bytes_per_second: Rate of all requests of this rank to the store, while all ranks read.
        requests: Number of units and ranges that are on their way to this rank.
    """
    return received_bytes * requests < _SOONER_FACTOR * store_bytes_per_second * seconds


@dataclass(slots=True, eq=False)
class Transfer:
    """Unit that another rank is sending.

    Attributes:
        received_bytes: Bytes that had arrived at the last look.
        seconds: Time of the last look, in seconds since the first byte.
        recent_bytes: Bytes that arrived between the last two looks.
        recent_seconds: Seconds between the last two looks.
        has_moved: True if the rest of the unit is left to the store.
    """

    received_bytes: int = 0
    seconds: float = 0.0
    recent_bytes: int = 0
    recent_seconds: float = 0.0
    has_moved: bool = False

    def look(self, received_bytes: int, seconds: float) -> None:
        """Note the bytes that have arrived, and the seconds since the first."""
        self.recent_bytes, self.recent_seconds = received_bytes - self.received_bytes, seconds - self.seconds
        self.received_bytes, self.seconds = received_bytes, seconds


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
        self._transfers: set[Transfer] = set()
        self._completed_seconds = -math.inf  # time at which the last of them arrived that did not move
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
    def receiving(self) -> Iterator[Transfer]:
        """Count a unit that another rank is sending while a block runs."""
        transfer = Transfer()
        with self._lock:
            self._transfers.add(transfer)
        try:
            yield transfer
        finally:
            with self._lock:
                self._transfers.remove(transfer)
                if not transfer.has_moved:
                    self._completed_seconds = self._clock()

    def prefers_store(self, transfer: Transfer, received_bytes: int, seconds: float) -> bool:
        """Note what has arrived of a unit, and return whether the rest of it comes sooner from the store.

        All units under way are compared with the store, since they share a link, as unevenly as chance has it; those
        move that are no faster than the others.

        Args:
            transfer: Unit, of `receiving`.
            received_bytes: Bytes of it that have arrived.
            seconds: Seconds since the first of them; more than at the last call.
        """
        with self._lock:
            transfer.look(received_bytes, seconds)
            transfer.has_moved = self._is_slow(transfer)
            return transfer.has_moved

    def _is_slow(self, transfer: Transfer) -> bool:
        if not self._read_bytes:
            return not self._reading and transfer.seconds >= _UNKNOWN_SECONDS
        has_settled = self._clock() - self._completed_seconds >= _SETTLING_SECONDS
        if not has_settled or not all(one.seconds for one in self._transfers):
            return False
        recent_bytes = sum(one.recent_bytes for one in self._transfers)
        recent_seconds = sum(one.recent_seconds for one in self._transfers)
        if transfer.recent_bytes * recent_seconds > recent_bytes * transfer.recent_seconds:
            return False
        return comes_sooner_from_store(
            recent_bytes,
            recent_seconds,
            store_bytes_per_second=self._read_bytes / max(self._read_seconds, 1e-9),
            requests=self._reading + len(self._transfers),
        )

    def _count(self, *, reading: int, read_bytes: int = 0) -> None:
        with self._lock:
            now_seconds = self._clock()
            if self._reading:
                self._read_seconds += now_seconds - self._marked_seconds
            self._marked_seconds = now_seconds
            self._reading += reading
            self._read_bytes += read_bytes
