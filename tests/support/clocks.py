"""Clocks that a test advances, so that retries and deadlines cost no time."""

from __future__ import annotations

import dataclasses

from dcp_remote.common.deadline import Clock, Deadline


@dataclasses.dataclass
class SleepClock:
    """Monotonic clock that only its own `sleep` advances."""

    now: float = 0.0
    sleeps: list[float] = dataclasses.field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def deadline(self, seconds: float, *, share: float = 1.0) -> Deadline:
        """Return a deadline on this clock, whose pauses are this share of the longest."""
        return Deadline(seconds, Clock(self, self.sleep, lambda low, high: low + share * (high - low)))
