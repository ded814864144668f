"""Deadlines, and the pauses between attempts: exponential backoff with full jitter."""

from __future__ import annotations

import itertools
import math
import random as random_module
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

from dcp_remote.errors import InvalidArgumentError

# Never the process's own generator: the training seeds it alike on all ranks, which would then pause equally long, and
# saves its state in checkpoints.
_generator: random_module.Random = random_module.SystemRandom()


def jitter(low: float, high: float) -> float:
    """Return a random number between `low` and `high`, independent of the training's random state."""
    return _generator.uniform(low, high)


@dataclass(frozen=True, slots=True)
class Clock:
    """Time and chance of an operation, which its `Deadline` carries. That of a test waits for nothing."""

    monotonic: Callable[[], float] = time.monotonic  # seconds
    sleep: Callable[[float], object] = time.sleep
    uniform: Callable[[float, float], float] = jitter  # random number between two others


SYSTEM_CLOCK = Clock()


class Deadline:
    """Point in time by which an operation must end, on a monotonic clock, some seconds from now on."""

    def __init__(self, seconds: float, clock: Clock | Callable[[], float] | None = None) -> None:
        """Begin now, by the clock of the system unless another is given; a function replaces its monotonic time."""
        if not isinstance(clock, Clock):
            clock = SYSTEM_CLOCK if clock is None else replace(SYSTEM_CLOCK, monotonic=clock)
        self.clock = clock
        self._begin = self.clock.monotonic()
        self._seconds = seconds

    def __repr__(self) -> str:
        """Return the whole time and the time left, in seconds."""
        return f"Deadline(seconds={self._seconds:g}, remaining_seconds={self.remaining_seconds():.1f})"

    def __reduce__(self) -> NoReturn:
        """Refuse pickling: the clock of another host has another origin."""
        raise InvalidArgumentError(
            "A Deadline cannot be pickled: send its remaining seconds, and make a new one there."
        )

    def elapsed_seconds(self) -> float:
        """Return the seconds since this deadline was set."""
        return self.clock.monotonic() - self._begin

    def remaining_seconds(self) -> float:
        """Return the seconds left; 0 once the deadline has passed."""
        return max(0.0, self._seconds - self.elapsed_seconds())

    def expired(self) -> bool:
        """Return whether the deadline has passed."""
        return self.remaining_seconds() == 0

    def until(self, event: threading.Event) -> Deadline:
        """Return this deadline for requests that are repeated no more once an event is set."""

        def monotonic() -> float:
            return math.inf if event.is_set() else self.clock.monotonic()

        return Deadline(self.remaining_seconds(), replace(self.clock, monotonic=monotonic))

    def earlier(self, seconds: float) -> Deadline:
        """Return a deadline `seconds` before this one, on the same clock: it leaves time to report a failure."""
        return Deadline(max(0.0, self.remaining_seconds() - seconds), self.clock)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter: how long to wait before the next attempt.

    Full jitter best spreads clients that failed together (a throttled prefix, a server that restarts): M. Brooker,
    "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    first_delay_seconds: float = 0.2  # longest pause after the first failure; doubled after each further one
    delay_seconds_max: float = 20.0  # longest pause after any failure

    def delay_seconds(self, attempt: int, *, remaining_seconds: float, random: float) -> float | None:
        """Return the pause after the `attempt`-th failure (from 1) in seconds, or None to give up.

        `random` is from [0, 1). The pause is shorter than `remaining_seconds`, the time left until the deadline; None
        is returned if less than the first delay remains.
        """
        if remaining_seconds < self.first_delay_seconds:
            return None
        return random * min(self.delay_seconds_limit(attempt), remaining_seconds)

    def delay_seconds_limit(self, attempt: int) -> float:
        """Return the longest pause after the `attempt`-th failure (from 1), in seconds."""
        # The exponent is bounded, or a long outage would overflow a float.
        return min(self.delay_seconds_max, self.first_delay_seconds * 2.0 ** min(attempt - 1, 64))

    def growing_delays(self) -> Iterator[float]:
        """Yield the longest pause after each failure, in seconds, without an end: for looks at what changes soon."""
        return map(self.delay_seconds_limit, itertools.count(1))
