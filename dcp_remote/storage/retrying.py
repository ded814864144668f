"""Trying again, for as long as a deadline allows and no longer."""

from __future__ import annotations

import logging
import math
import random as random_module
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from dcp_remote.errors import InvalidArgumentError, StorageError, TransientStorageError
from dcp_remote.storage.base import Buffer, Condition, ObjectInfo, ObjectStore, Version
from dcp_remote.storage.time_left import of_use_for
from dcp_remote.storage.wrapper import Request, Verb, WrappedStore

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

# Pauses are drawn by chance, and never by the generator of the process: that one is the training's, part of its
# checkpoints, and seeded alike on all ranks, which would then wait equally long.
_chance: random_module.Random = random_module.SystemRandom()


def jitter(low: float, high: float) -> float:
    """How long a pause is, between these."""
    return _chance.uniform(low, high)


class Deadline:
    """A point in time by which something must have ended, on a clock that nobody sets.

    Args:
        seconds: From now on.
        clock: Monotonic, in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """See the class."""
        self._clock = clock
        self._begin = clock()
        self._seconds = seconds

    def __repr__(self) -> str:
        """With what is left."""
        return f"Deadline(seconds={self._seconds:g}, remaining_seconds={self.remaining_seconds():.1f})"

    def __reduce__(self) -> NoReturn:
        """Refused: another host's clock knows nothing of this one's.

        Raises:
            InvalidArgumentError: Always.
        """
        raise InvalidArgumentError("A Deadline cannot be pickled: send the remaining seconds, and begin anew there.")

    def elapsed_seconds(self) -> float:
        """How long ago it was set."""
        return self._clock() - self._begin

    def remaining_seconds(self) -> float:
        """What is left; 0 when it has passed."""
        return max(0.0, self._seconds - self.elapsed_seconds())

    def expired(self) -> bool:
        """Whether it has passed."""
        return self.remaining_seconds() == 0

    def earlier(self, seconds: float) -> Deadline:
        """Another, so many seconds before this one and by the same clock: for a part whose failure is to be told."""
        return Deadline(max(0.0, self.remaining_seconds() - seconds), self._clock)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to wait before the next attempt: exponential backoff with full jitter.

    Full jitter spreads clients that failed together (a throttled prefix, a server that restarts) best: M. Brooker,
    "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.

    Attributes:
        first_delay_seconds: The longest delay after the first attempt; doubled after each.
        delay_seconds_max: Where the doubling ends.
        attempts_max: Attempts of one request, the first included; None for as many as the deadline allows.
    """

    first_delay_seconds: float = 0.2
    delay_seconds_max: float = 20.0
    attempts_max: int | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that would never wait, or never send."""
        if not 0 < self.first_delay_seconds <= self.delay_seconds_max:
            raise InvalidArgumentError(
                "The first delay must be above 0 and at most the largest.",
                first_delay_seconds=self.first_delay_seconds,
                delay_seconds_max=self.delay_seconds_max,
            )
        if self.attempts_max is not None and self.attempts_max < 1:
            raise InvalidArgumentError("There must be at least one attempt.", attempts_max=self.attempts_max)

    def delay_seconds(self, attempt: int, *, remaining_seconds: float, random: float) -> float | None:
        """The pause after the `attempt`-th failure (from 1), or None to give up.

        Never as long as what remains: jitter is drawn from the part of the backoff that fits. Nothing fits when less
        than the first delay remains.

        Args:
            attempt: How many attempts have failed.
            remaining_seconds: Until the deadline.
            random: From [0, 1).
        """
        if self.attempts_max is not None and attempt >= self.attempts_max:
            return None
        if remaining_seconds < self.first_delay_seconds:
            return None
        # The exponent is bounded, or a long outage would overflow a float.
        backoff = min(self.delay_seconds_max, self.first_delay_seconds * 2.0 ** min(attempt - 1, 64))
        return random * min(backoff, remaining_seconds)


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a `RetryingStore` and its children retry by."""

    deadline: Deadline
    policy: RetryPolicy
    sleep: Callable[[float], None]
    random: Callable[[], float]
    on_retry: Callable[[Verb, str, StorageError], None] | None


# Somebody may be watching, and wonder what the job is waiting for; but a log is not a list of requests.
_TOLD_EVERY_SECONDS = 60.0
_told: dict[str, float] = {}  # when it was last told of a URL, for all its stores in this process


def _tell(url: str, request: Request, error: StorageError) -> None:
    now = time.monotonic()
    level = logging.DEBUG if now - _told.get(url, -math.inf) < _TOLD_EVERY_SECONDS else logging.WARNING
    if level == logging.WARNING:
        _told[url] = now
    logger.log(level, "The store failed; trying again. verb=%s key=%s cause=%s", request.verb, request.key, error)


class RetryingStore(WrappedStore):
    """Repeats what failed for now, under one deadline.

    Repeated: `head`, `get`, `get_into`; `put` with the condition "any"; of `delete` the keys that failed for now;
    `list` from the last key that was given on. Sent once: a conditional `put`, because after a lost answer only its
    caller can tell its own earlier attempt from another's (`dcp_remote.commit` does).

    While it repeats, that is logged as a warning, at most once a minute.

    In the end the last `TransientStorageError` is raised anew, with the number of attempts and the seconds they took.

    Args:
        store: What is asked.
        deadline: After which nothing is repeated. No sleep reaches it, and of the cloud hardly a request does.
        policy: How long to wait.
        sleep: Waits, in seconds.
        random: Gives numbers in [0, 1).
        on_retry: Called before each pause with verb, key and error, from the thread that pauses. For reporting.
    """

    def __init__(
        self,
        store: ObjectStore,
        deadline: Deadline,
        policy: RetryPolicy | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = lambda: jitter(0, 1),
        on_retry: Callable[[Verb, str, StorageError], None] | None = None,
    ) -> None:
        """See the class."""
        super().__init__(store)
        self._terms = _Terms(deadline, RetryPolicy() if policy is None else policy, sleep, random, on_retry)

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """See `ObjectStore.put`. Repeated only if `condition` is "any"."""
        if condition != "any":
            with of_use_for(self._terms.deadline.remaining_seconds):
                return self._store.put(key, buffers, condition=condition)
        return super().put(key, buffers)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. After a failure it goes on behind the last key; what was given is not given again."""
        attempts = _Attempts(self._terms, self._named("list", prefix), self.url)
        while True:
            try:
                infos = iter(self._store.list(prefix, after=after))
                while (info := self._next(infos)) is not None:
                    after = info.key
                    attempts.begin_again()
                    yield info
                return
            except TransientStorageError as error:
                attempts.pause_or_raise(error)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """See `ObjectStore.delete`. Keys that still fail for now at the end are reported, not raised."""
        failed: dict[str, StorageError] = {}
        attempts = _Attempts(self._terms, self._named("delete", *keys), self.url)
        while True:
            try:
                with of_use_for(self._terms.deadline.remaining_seconds):
                    answer = self._store.delete(keys)
            except TransientStorageError as error:
                answer = dict.fromkeys(keys, error)
            for_now = {key: error for key, error in answer.items() if isinstance(error, TransientStorageError)}
            failed.update((key, error) for key, error in answer.items() if key not in for_now)
            if not for_now:
                return failed
            try:
                attempts.pause_or_raise(next(iter(for_now.values())))
            except TransientStorageError:
                return failed | {key: attempts.last_error(error, key=key) for key, error in for_now.items()}
            keys = list(for_now)

    def _next(self, infos: Iterator[ObjectInfo]) -> ObjectInfo | None:
        with of_use_for(self._terms.deadline.remaining_seconds):
            return next(infos, None)

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        attempts = _Attempts(self._terms, request, self.url)
        while True:
            try:
                with of_use_for(self._terms.deadline.remaining_seconds):
                    return send()
            except TransientStorageError as error:
                attempts.pause_or_raise(error)


class _Attempts:
    """The attempts of one request."""

    def __init__(self, terms: _Terms, request: Request, url: str) -> None:
        self._terms = terms
        self._url = url
        self._request = request
        self._failed = 0
        self._begin_seconds = terms.deadline.elapsed_seconds()

    def begin_again(self) -> None:
        """Progress was made: what fails from here on is a failure of its own."""
        self._failed = 0

    def pause_or_raise(self, error: TransientStorageError) -> None:
        """Count a failure, and wait; or raise the last error, if waiting makes no sense any more."""
        terms, request = self._terms, self._request
        self._failed += 1
        delay_seconds = terms.policy.delay_seconds(
            self._failed, remaining_seconds=terms.deadline.remaining_seconds(), random=terms.random()
        )
        if delay_seconds is None:
            raise self.last_error(error)
        _tell(self._url, request, error)
        if terms.on_retry is not None:
            terms.on_retry(request.verb, request.key, error)
        terms.sleep(delay_seconds)
        if terms.deadline.expired():  # it was given up meanwhile
            raise self.last_error(error)

    def last_error(self, error: TransientStorageError, **details: object) -> TransientStorageError:
        """The error, with what was tried. What the store itself said of verb and key stays, unless it is in `details`.

        The store's own key goes with its own URL, which may be that of a child.
        """
        seconds = round(self._terms.deadline.elapsed_seconds() - self._begin_seconds, 3)
        named = {"verb": self._request.verb, "key": self._request.key} | error.details | details
        last = type(error)(error.what, **named | {"attempts": self._failed, "seconds": seconds})
        last.__cause__ = error
        return last
