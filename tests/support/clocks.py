"""Clocks that a test advances, so that retries and deadlines cost no time."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class SleepClock:
    """Monotonic clock that only its own `sleep` advances."""

    now: float = 100.0
    sleeps: list[float] = dataclasses.field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
