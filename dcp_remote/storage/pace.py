"""How long requests of a size take here, and from when on one of them is late enough to be sent twice.

A few requests in a hundred take many times as long as the rest: a lost packet, a busy server behind the balancer. The
advice of Amazon is to send the slowest few percent again ("Best practices design patterns: optimizing Amazon S3
performance", timeouts and retries), over another connection, and to take the answer that comes first. Where all
requests are slow, a second one would only make them slower: so no more than a few percent are sent twice.
"""

from __future__ import annotations

import math
import threading
from collections import deque

# Before so many requests of a size have been answered, nobody knows what is slow.
SAMPLES_MIN = 16
_SAMPLES_KEPT = 128

# Late is what takes so many times as long as the slowest twentieth of the others...
_TIMES = 2.0
_SHARE_IN_TIME = 0.95

# ...and so long at least: a second request costs a connection and its bytes.
LATE_SECONDS_MIN = 1.0

# So many of a hundred may be sent twice, and so many at once after a quiet time.
_SHARE_TWICE = 0.05
_TWICE_MAX = 4.0


# What keeps whole objects behind a network, where a request may be late.
_CLOUDS = ("s3://", "gs://", "az://")


class Pace:
    """The pace of one kind of request, of all threads."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._lock = threading.Lock()
        self._seconds: dict[int, deque[float]] = {}
        self._twice = 1.0

    def note(self, size_bytes: int, seconds: float) -> None:
        """A request was answered."""
        with self._lock:
            self._seconds.setdefault(size_bytes.bit_length(), deque(maxlen=_SAMPLES_KEPT)).append(seconds)
            self._twice = min(_TWICE_MAX, self._twice + _SHARE_TWICE)

    def late_seconds(self, size_bytes: int) -> float:
        """From when on a request of this size (to a factor of two) is late; infinite while too little is known."""
        with self._lock:
            known = sorted(self._seconds.get(size_bytes.bit_length(), ()))
        if len(known) < SAMPLES_MIN:
            return math.inf
        return max(LATE_SECONDS_MIN, _TIMES * known[math.ceil(_SHARE_IN_TIME * len(known)) - 1])

    def may_repeat(self) -> bool:
        """Whether one more may be sent twice; counts as done."""
        with self._lock:
            if self._twice < 1:
                return False
            self._twice -= 1
            return True


_paces: dict[str, Pace] = {}  # of puts, by bucket


def pace_of(url: str) -> Pace:
    """The pace of puts below a URL, of all saves in this process; of a store that is no cloud, an empty one."""
    if not url.startswith(_CLOUDS):
        return Pace()
    scheme, _, rest = url.partition("://")
    return _paces.setdefault(f"{scheme}://{rest.partition('/')[0]}", Pace())
