"""Limit of the concurrent requests of one opened store and its children, which adapts to a store that refuses requests.

A store that is offered more than its capacity answers some requests with 503 ("SlowDown"), and retries add to the load.
The limit is reduced to the part of the concurrent requests that was not refused, which reaches the store's capacity in
one step, and grows by a tenth per second. Requests under way count as not refused, since refusals are the first answers
of all. If only a few requests are refused, that is no overload, and retries are enough.

Processes of a host share no state. Eight processes that put 800 objects into a server of 60 requests per second took
17 s, with 0.6 refusals per object; 22 s and 0.9 with a share that they kept in one file; 27 s and 1.9 without a limit
(medians of three, when the share was reduced by the fraction of refusals alone).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from dcp_remote.errors import TransientStorageError
from dcp_remote.storage.cloud.errors import classify_error

_Answer = TypeVar("_Answer")

# Concurrent requests at a full share: as many as a load has in flight.
REQUESTS_MAX = 32

# A share changes at most once per interval, and after a minimum of answers.
_STEP_SECONDS = 1.0
_ANSWERS_MIN = 8

# Fraction of refused requests above which the store is overloaded.
REFUSED_MAX = 0.1

_GROWTH = 1.1
SHARE_MIN = 1 / REQUESTS_MAX

# Longest wait for a slot: the limit slows requests down, and a slot that is never released must not block others.
WAIT_SECONDS_MAX = 2.0

# Failures within this time are refusals. Later ones are stalled or broken requests, which fewer requests do not cure.
_REFUSAL_SECONDS_MAX = 5.0


class Throttle:
    """Limit of the concurrent requests of one opened store and its children. Safe to use from many threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with a full share."""
        self.share = 1.0  # fraction of `REQUESTS_MAX` that may be in flight, in (0, 1]
        self._clock = clock
        self._changed = threading.Condition()
        self._step_again_at = -math.inf
        self._running = 0
        self._running_max = 0  # since the share was last reduced
        self._answered = 0
        self._refused = 0

    def send(self, request: Callable[[], _Answer]) -> _Answer:
        """Send a request as one of the concurrent ones; wait for that before, at most `WAIT_SECONDS_MAX`."""
        with self._changed:
            self._changed.wait_for(lambda: self._running < self._limit(), timeout=WAIT_SECONDS_MAX)
            self._running += 1
            self._running_max = max(self._running_max, self._running)
        began_seconds = self._clock()
        is_refused = False
        try:
            return request()
        except Exception as error:
            is_refused = (
                classify_error(error) is TransientStorageError and self._clock() - began_seconds < _REFUSAL_SECONDS_MAX
            )
            raise
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify()
                self.record_answer(refused=is_refused)

    def _limit(self) -> int:
        return math.ceil(self.share * REQUESTS_MAX)

    def record_answer(self, *, refused: bool) -> None:
        """Note that a request was answered or refused, and change the share if it is time to."""
        with self._changed:
            self._answered += 1
            self._refused += refused
            if self._answered < _ANSWERS_MIN or self._clock() < self._step_again_at:
                return
            refused_fraction = self._refused / (self._answered + self._running)
            self._answered = self._refused = 0
            share = self.share * _GROWTH
            if refused_fraction > REFUSED_MAX:
                share = (1 - refused_fraction) * min(self._running_max, self._limit()) / REQUESTS_MAX
                self._running_max = self._running
            self.share = min(1.0, max(SHARE_MIN, share))
            self._step_again_at = self._clock() + _STEP_SECONDS
