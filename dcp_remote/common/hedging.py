"""Hedged requests: measured latencies decide when a request is late enough to be sent twice.

A few requests in a hundred take many times as long as the rest: a lost packet, a busy server behind the balancer.
Amazon advises to send the slowest few percent again over another connection ("Best practices design patterns:
optimizing Amazon S3 performance", timeouts and retries). Of two puts the first answer is taken; a late direct read is
given up for the second. Where all requests are slow, second ones would only add load, so at most a few percent are
sent twice.
"""

from __future__ import annotations

import math
import threading
from collections import deque

# Answered requests of one size that are needed before another one can be called late.
SAMPLES_MIN = 16
_SAMPLES_KEPT = 128

# A request is late after this many times the latency of this quantile of the others...
_LATE_FACTOR = 2.0
_LATE_QUANTILE = 0.95

# ...and never before this time: a second request costs a connection and its bytes.
LATE_SECONDS_MIN = 1.0

# Second requests that each answered request allows, and the most that are allowed at once after a quiet time.
_REPEATS_PER_REQUEST = 0.05
_REPEATS_MAX = 4.0

# Schemes of stores behind a network, where a request may be late.
_CLOUDS = ("s3://", "gs://", "az://")


class LatencyTracker:
    """Latencies of one kind of request, by size, from all threads; and the budget of second requests."""

    def __init__(self) -> None:
        """Begin without samples, and with one second request allowed."""
        self._lock = threading.Lock()
        self._seconds: dict[int, deque[float]] = {}  # by the bit length of the size in bytes
        self._repeats = 1.0

    def record(self, size_bytes: int, seconds: float) -> None:
        """Record the latency of an answered request."""
        with self._lock:
            self._seconds.setdefault(size_bytes.bit_length(), deque(maxlen=_SAMPLES_KEPT)).append(seconds)
            self._repeats = min(_REPEATS_MAX, self._repeats + _REPEATS_PER_REQUEST)

    def late_seconds(self, size_bytes: int) -> float:
        """Return the seconds after which a request of about this size (within a factor of two) is late.

        Infinite before `SAMPLES_MIN` requests of that size were answered.
        """
        with self._lock:
            known = sorted(self._seconds.get(size_bytes.bit_length(), ()))
        if len(known) < SAMPLES_MIN:
            return math.inf
        return max(LATE_SECONDS_MIN, _LATE_FACTOR * known[math.ceil(_LATE_QUANTILE * len(known)) - 1])

    def may_repeat(self) -> bool:
        """Take one second request from the budget; return False if none is left."""
        with self._lock:
            if self._repeats < 1:
                return False
            self._repeats -= 1
            return True


def is_far(url: str) -> bool:
    """Return whether a URL is in a cloud, so that reads which do not depend on each other are sent at once."""
    return url.startswith(_CLOUDS)


_put_latencies: dict[str, LatencyTracker] = {}  # by the URL of the bucket


def get_latency_tracker(url: str) -> LatencyTracker:
    """Return the latencies of puts into the bucket of a URL, shared by all saves of this process.

    A store that is not in a cloud gets an empty tracker of its own.
    """
    if not is_far(url):
        return LatencyTracker()
    scheme, _, rest = url.partition("://")
    return _put_latencies.setdefault(f"{scheme}://{rest.partition('/')[0]}", LatencyTracker())
