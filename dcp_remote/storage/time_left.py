"""How long the thread that asks a store still has: known to who tries again, and of use to who sends.

A store that is silent would keep a request for half a minute, beyond a deadline that has passed long ago.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _no_end() -> float:
    return math.inf


class _Own(threading.local):
    """Of each thread: for how long its request is of use."""

    left: Callable[[], float] = staticmethod(_no_end)


_own = _Own()


@contextmanager
def of_use_for(left: Callable[[], float]) -> Iterator[None]:
    """Around a request that nobody waits for when no seconds are `left`; of one within another the inner one counts."""
    before, _own.left = _own.left, left
    try:
        yield
    finally:
        _own.left = before


def seconds_left() -> float:
    """Until nobody waits for what this thread asks; infinite if that is not known."""
    return _own.left()


def rounded_up(seconds: float) -> float:
    """To one of four values between powers of two, and at least a second: few limits serve all requests."""
    if math.isinf(seconds):
        return seconds
    step = 2.0 ** (math.floor(math.log2(max(1.0, seconds))) - 2)
    return max(1.0, math.ceil(seconds / step) * step)
