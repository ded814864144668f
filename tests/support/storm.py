"""Many ranks that begin together at a store with a limited rate, in simulated time: what the throttle offers it.

The requests pass the package's own `Throttle` and `RetryPolicy`. The store refuses what comes above the rates that S3
documents for each prefix: 3,500 PUTs, or 5,500 GETs a second.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from dcp_remote.common.deadline import RetryPolicy
from dcp_remote.storage.cloud.throttle import Throttle
from dcp_remote.storage.limits import CHECK_SECONDS

# Time until a refusal, and the time in which the ranks' first requests come after a barrier.
_REFUSAL_SECONDS = 0.02
_BARRIER_SECONDS = 0.2

# Requests of a prefix beyond its rate that are taken at once.
_BURST_SECONDS = 0.25

_WORKERS = 32


@dataclass
class Prefixes:
    """Prefixes of a bucket, each with a rate above which requests are refused."""

    count: int
    per_second: float  # of each prefix

    def __post_init__(self) -> None:
        self._left = [self.per_second * _BURST_SECONDS] * self.count
        self._at_seconds = [0.0] * self.count

    def takes(self, prefix: int, now_seconds: float) -> bool:
        gained = (now_seconds - self._at_seconds[prefix]) * self.per_second
        self._at_seconds[prefix] = now_seconds
        self._left[prefix] = min(self._left[prefix] + gained, self.per_second * _BURST_SECONDS)
        if self._left[prefix] < 1:
            return False
        self._left[prefix] -= 1
        return True


@dataclass(eq=False)
class _Task:
    """Request of a rank, repeated until it is answered."""

    prefix: int
    failures: int = 0
    came_seconds: float = 0.0  # time at which the wait for the throttle began


@dataclass(eq=False)
class _Rank:
    throttle: Throttle
    left: int  # requests that no worker has taken
    waiting: deque[_Task] = field(default_factory=deque)
    looks_again: bool = False


@dataclass
class Storm:
    """Ranks that each send so many requests, 32 at a time, from one barrier on."""

    ranks: int
    requests: int  # of each rank
    prefixes: Prefixes
    seconds: float  # that an accepted request takes
    processes: int | None = None  # that the throttles are told; None for `ranks`
    seed: int = 0

    def __post_init__(self) -> None:
        self.now_seconds = 0.0
        self.refused = 0
        self.taken = 0
        self.offered: Counter[int] = Counter()  # requests by second
        self._random = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._policy = RetryPolicy()

    @property
    def peak(self) -> int:
        """Most requests that were sent in one second."""
        return max(self.offered.values())

    def run(self) -> Storm:
        """Send all requests until each is answered."""
        told = self.ranks if self.processes is None else self.processes
        for _ in range(self.ranks):
            throttle = Throttle(lambda: self.now_seconds, uniform=self._random.uniform, processes=lambda: told)
            rank = _Rank(throttle, self.requests)
            self._after(self._random.uniform(0, _BARRIER_SECONDS), partial(self._begin, rank))
        while self._events:
            self.now_seconds, _, act = heapq.heappop(self._events)
            act()
        return self

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_seconds + seconds, next(self._numbers), act))

    def _begin(self, rank: _Rank) -> None:
        for _ in range(min(_WORKERS, rank.left)):
            self._take(rank)
        self._send(rank)

    def _take(self, rank: _Rank) -> None:
        rank.left -= 1
        rank.waiting.append(_Task(self._random.randrange(self.prefixes.count), came_seconds=self.now_seconds))

    def _send(self, rank: _Rank) -> None:
        """Send what the throttle lets through; look again a little later."""
        while rank.waiting and rank.throttle.begin(self.now_seconds - rank.waiting[0].came_seconds):
            task = rank.waiting.popleft()
            self.offered[int(self.now_seconds)] += 1
            if self.prefixes.takes(task.prefix, self.now_seconds):
                self._after(self.seconds * self._random.uniform(0.7, 1.3), partial(self._answered, rank, task))
            else:
                self._after(_REFUSAL_SECONDS, partial(self._refused, rank, task))
        if rank.waiting and not rank.looks_again:
            rank.looks_again = True
            self._after(CHECK_SECONDS, partial(self._look_again, rank))

    def _look_again(self, rank: _Rank) -> None:
        rank.looks_again = False
        self._send(rank)

    def _answered(self, rank: _Rank, task: _Task) -> None:
        self.taken += 1
        rank.throttle.end(refused=False)
        if rank.left:
            self._take(rank)
        self._send(rank)

    def _refused(self, rank: _Rank, task: _Task) -> None:
        self.refused += 1
        task.failures += 1
        rank.throttle.end(refused=True)
        pause = self._policy.delay_seconds(task.failures, remaining_seconds=1e9, random=self._random.random())
        assert pause is not None
        self._after(pause, partial(self._again, rank, task))
        self._send(rank)

    def _again(self, rank: _Rank, task: _Task) -> None:
        task.came_seconds = self.now_seconds
        rank.waiting.append(task)
        self._send(rank)
