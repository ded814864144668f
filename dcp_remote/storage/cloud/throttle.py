"""Limit of the concurrent requests of one opened store and its children, which adapts to a store that refuses requests.

A store that is offered more than its capacity answers some requests with 503 ("SlowDown"), and retries add to the load.
The limit is reduced to the part of the concurrent requests that was not refused, which reaches the store's capacity in
one step, and grows by a tenth per second. Requests under way count as not refused, since refusals are the first answers
of all. If only a few requests are refused, that is no overload, and retries are enough.

Processes of a host share no state. Eight processes that put 800 objects into a server of 60 requests per second took
17 s, with 0.6 refusals per object; 22 s and 0.9 with a share that they kept in one file; 27 s and 1.9 without a limit
(medians of three, when the share was reduced by the fraction of refusals alone).

The ranks of a job begin together, after one barrier. Those of a job of more than 64 begin with as many requests in all
as 64 have in flight, at random times, and with twice as many after each second without overload; so again after a time
without requests. A share may then be less than one request: a random pause follows each; otherwise it follows each that
is refused, unless many were answered before it: S3 refuses one of thousands at random. For ranks of 32 requests, at a
store that takes 5,500 a second, simulated: 0.4 refusals per request in 69 s for 10,000 ranks, 8.4 in 71 s without; 0.8
in 9 s for 1,000 ranks, 4.1 in 16 s without, and 3.8 in 15 s without pauses.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from dcp_remote.common.deadline import jitter
from dcp_remote.errors import TransientStorageError
from dcp_remote.storage.cloud.errors import classify_error
from dcp_remote.storage.limits import CHECK_SECONDS, count_processes
from dcp_remote.storage.request_context import remaining_seconds, writes_nothing

_Answer = TypeVar("_Answer")

# Concurrent requests at a full share: as many as a load has in flight.
REQUESTS_MAX = 32
SHARE_MIN = 1 / REQUESTS_MAX

# Processes of a job whose shares are full from the beginning: 2,048 requests in all.
PROCESSES_MAX = 64
# Processes whose full shares are the least that a large job has in flight in all: 320 requests, or 3,200 a second, of
# which a prefix of S3 takes 3,500.
_PROCESSES_MIN = 10

# A share changes at most once per interval, and after a minimum of answers, of which one refusal is no overload.
_STEP_SECONDS = 1.0
_ANSWERS_MIN = 10

# Fraction of refused requests above which the store is overloaded.
REFUSED_MAX = 0.1

# Growth of a share per interval. That of a large job begins higher, as does that of a share which was reduced before a
# time without requests; each overload lowers it to its square root.
_GROWTH = 1.1
_FIRST_GROWTH = 2.0

# Part of its share that a process of a large job keeps, since a few answers say little of the store.
_KEPT = 0.7

# Duration of a request: the pause after a refused one, and by which a share of less than one is a pause.
_REQUEST_SECONDS = 0.1

# Time without requests after which the next ones begin as the first did.
_IDLE_SECONDS = 10.0

# Longest wait for a slot: the limit slows requests down, and a slot that is never released must not block others.
WAIT_SECONDS_MAX = 2.0

# Failures within this time are refusals. Later ones are stalled or broken requests, which fewer requests do not cure.
_REFUSAL_SECONDS_MAX = 5.0


class Throttle:
    """Limit of the concurrent requests of one opened store and its children. Safe to use from many threads."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        uniform: Callable[[float, float], float] = jitter,
        processes: Callable[[], int] = count_processes,
    ) -> None:
        """Begin with a full share, or a part of that of 64 processes; `processes` returns how many begin together."""
        self.share = 1.0  # fraction of `REQUESTS_MAX` that may be in flight, in (0, 1]
        self.is_overloaded = False  # the store has refused requests, and the share is not full again
        self._clock = clock
        self._uniform = uniform
        self._processes = processes
        self._changed = threading.Condition()
        self._turns = itertools.count()
        # Deadline and number of each request that waits. A request that was refused goes before those that came later:
        # it would fail by its deadline if it had to wait as long again.
        self._waiting: set[tuple[float, int]] = set()
        self._share_min = SHARE_MIN
        self._growth = _GROWTH
        self._stepped_seconds = -math.inf  # time at which the share was last changed
        self._resume_seconds = -math.inf  # end of the pause
        self._ended_seconds = -math.inf  # time of the last answer
        self._processes_began = 1  # with this one
        self._running = 0
        self._running_max = 0  # since the share was last reduced
        self._answered = 0
        self._refused = 0
        self._answered_in_a_row = 0  # since the last refusal

    def send(self, request: Callable[[], _Answer]) -> _Answer:
        """Send a request as one of the concurrent ones, after a wait for its turn.

        Raises:
            TransientStorageError: The deadline of the request passed meanwhile.
        """
        self._wait()
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
                self.end(refused=is_refused)
                self._changed.notify_all()

    def _wait(self) -> None:
        came_seconds = time.monotonic()
        # Rounded, so that requests of one deadline keep their order.
        turn = (round(came_seconds + remaining_seconds(), 1), next(self._turns))
        with self._changed:
            try:
                self._waiting.add(turn)
                while min(self._waiting) != turn or not self.begin(time.monotonic() - came_seconds):
                    with writes_nothing():
                        self._changed.wait(self.wait_seconds())
                    if not remaining_seconds():  # also if it is the turn of this request now
                        raise TransientStorageError("No time is left for this request: the store refuses others.")
            finally:
                self._waiting.discard(turn)
                self._changed.notify_all()

    def begin(self, waited_seconds: float) -> bool:
        """Return whether a request that has waited for so long may begin now, and count it if so."""
        now_seconds = self._clock()
        if not self._running and now_seconds - max(self._ended_seconds, self._resume_seconds) > _IDLE_SECONDS:
            self._begin_anew(now_seconds)
        has_slot = self._running < self._limit() or waited_seconds >= WAIT_SECONDS_MAX
        if not has_slot or now_seconds < self._resume_seconds:
            return False
        self._running += 1
        self._running_max = max(self._running_max, self._running)
        if self.share < SHARE_MIN:
            self._pause(now_seconds)
        return True

    def wait_seconds(self) -> float:
        """Return the seconds after which to ask again: not at equal intervals, or processes would go on together."""
        pause_seconds = self._resume_seconds - self._clock()
        return pause_seconds if 0 < pause_seconds < CHECK_SECONDS else CHECK_SECONDS

    def end(self, *, refused: bool) -> None:
        """Note that a request was answered or refused, and change the share if it is time to."""
        now_seconds = self._ended_seconds = self._clock()
        self._running -= 1
        self._answered += 1
        self._refused += refused
        seconds, is_below_one = now_seconds - self._stepped_seconds, self.share < SHARE_MIN
        is_stray = self._answered_in_a_row >= REQUESTS_MAX  # of those in flight together, one at most
        self._answered_in_a_row = 0 if refused else self._answered_in_a_row + 1
        if refused and not is_stray and self._processes_began > PROCESSES_MAX and not is_below_one:
            self._pause(now_seconds)  # a refusal comes at once: all that wait would be sent, and refused, in a second
        if seconds < _STEP_SECONDS or (self._answered < _ANSWERS_MIN and not is_below_one):
            return
        refused_fraction = self._refused / (self._answered + self._running)
        self._answered = self._refused = 0
        # One answer says little of the seconds that it took: it doubles the share at most.
        steps = min(seconds, _IDLE_SECONDS) if is_below_one else 1  # no overflow after a stop of the process
        share = self.share * min(self._growth**steps, _FIRST_GROWTH)
        if refused_fraction > REFUSED_MAX:
            share = (1 - refused_fraction) * min(self._running_max, self._limit()) / REQUESTS_MAX
            if self._share_min < SHARE_MIN:
                share = self.share * _KEPT if is_below_one else max(share, self.share * _KEPT)
            self._growth = max(_GROWTH, math.sqrt(self._growth))
            self._running_max = self._running
            self.is_overloaded = True
        self.share = min(1.0, max(self._share_min, share))
        self.is_overloaded &= self.share < 1
        self._stepped_seconds = now_seconds

    def _begin_anew(self, now_seconds: float) -> None:
        """Begin with the share of a process among all of a large job, at a random time."""
        self._ended_seconds = now_seconds
        self._answered = self._refused = self._answered_in_a_row = 0
        processes = self._processes_began = self._processes()
        if processes > PROCESSES_MAX:
            self.share = min(self.share, PROCESSES_MAX / processes)
            self._share_min = min(SHARE_MIN, _PROCESSES_MIN / processes)
            self._stepped_seconds = now_seconds
            if self.share < SHARE_MIN:
                self._pause(now_seconds)
        if self.share < 1:
            self._growth = _FIRST_GROWTH  # an overload of earlier may have passed

    def _limit(self) -> int:
        return math.ceil(self.share * REQUESTS_MAX)

    def _pause(self, now_seconds: float) -> None:
        """Choose the time of the next request: as if those of this process had gone one after another."""
        requests = min(self._limit(), self._processes_began / PROCESSES_MAX)
        seconds = _REQUEST_SECONDS * requests * max(1.0, SHARE_MIN / self.share)
        self._resume_seconds = now_seconds + self._uniform(0.0, 2 * seconds)
