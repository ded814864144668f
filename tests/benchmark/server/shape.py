"""Behaviour of the benchmark's server: its latency and bandwidth, and which requests fail. No sockets here.

What fails is drawn from what is asked, so runs that ask alike fail alike, whatever their threads do.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from dataclasses import dataclass

# At a bandwidth, slices of 20 ms: finer ones cost CPU, coarser ones arrive in bursts.
_SLICE_SECONDS = 0.02
_SLICE_BYTES_MIN = 4 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Behaviour of the server."""

    latency_ms: float = 0.0  # waited before each answer
    bandwidth_bytes_per_second: float | None = None  # of each connection, each direction; None for all there is
    # Share of requests that are answered 503 SlowDown, the body having been read. Drawn by the key and how often that
    # key was asked for; no key fails twice in a row.
    slow_down_share: float = 0.0


class SlowDowns:
    """Requests that fail, drawn from a shape."""

    def __init__(self, shape: Shape) -> None:
        self._share = shape.slow_down_share
        self._lock = threading.Lock()
        self._asked: dict[str, int] = {}
        self._failed: set[str] = set()

    def draw(self, name: str) -> bool:
        """Return whether the next request for this key fails."""
        if not self._share:
            return False
        with self._lock:
            asked = self._asked[name] = self._asked.get(name, 0) + 1
            if name in self._failed:
                self._failed.remove(name)
                return False
            digest = hashlib.blake2b(f"{asked} {name}".encode(), digest_size=8).digest()
            is_failed = int.from_bytes(digest, "big") / 2**64 < self._share
            if is_failed:
                self._failed.add(name)
            return is_failed


class Pacer:
    """A token bucket of one direction of one connection, which sleeps until what it is asked for has had its time."""

    def __init__(self, bytes_per_second: float) -> None:
        self.slice_bytes = max(_SLICE_BYTES_MIN, int(bytes_per_second * _SLICE_SECONDS))
        self._bytes_per_second = bytes_per_second
        self._paid_until = -math.inf

    def pay(self, size_bytes: int) -> None:
        """Let so many bytes pass. Time that went by unused is lost, but for one slice's."""
        now = time.monotonic()
        self._paid_until = max(self._paid_until, now - _SLICE_SECONDS) + size_bytes / self._bytes_per_second
        if self._paid_until > now:
            time.sleep(self._paid_until - now)
