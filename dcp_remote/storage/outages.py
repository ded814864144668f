"""Outages of a store: a warning about every half minute while its requests are repeated, and one when they succeed.

All stores of one URL in a process share an `Outage`, so that sixteen uploads that fail together make one line. One
rank of a job logs warnings: the coordinator, as set by `name_speaker`; where no rank has called that, the process whose
environment has no `RANK`, or `RANK=0`. The other ranks log the same lines at DEBUG.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from dcp_remote.common.text import format_count, human_seconds
from dcp_remote.errors import DcpRemoteError, StorageError
from dcp_remote.storage.wrapper import Request

logger = logging.getLogger(__name__)

# Time for which a request must have failed before the first line: most failures are over after one or two attempts.
FIRST_SECONDS = 5.0

# Least time between two lines. A line is written when an attempt fails, so it may come a pause (up to 20 s) later.
INTERVAL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _Failing:
    """Request that has failed, and is about to be repeated."""

    began_seconds: float  # beginning of the failure, by the clock of the outage
    left_seconds: Callable[[], float]  # returns the time until its deadline


class Outage:
    """Requests of one store that are being repeated, by all threads of this process; writes the lines about them."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with no request that fails."""
        self.clock = clock
        self._url = url
        self._lock = threading.Lock()
        self._failing: dict[int, _Failing] = {}
        self._began_seconds = 0.0  # of the outage that was logged
        self._logged_seconds: float | None = None  # None: nothing was logged of this outage yet

    def note_failure(
        self,
        number: int,
        request: Request,
        error: StorageError,
        *,
        sent_seconds: float,
        left_seconds: Callable[[], float],
    ) -> None:
        """Note that a request has failed and will be repeated; write a line if one is due.

        `number` identifies the request for `note_end`; `sent_seconds` is the time of its first attempt, by `clock`.
        """
        now_seconds = self.clock()
        with self._lock:
            if number not in self._failing:
                # A first attempt that failed so late had no answer; one that failed sooner may have been a long upload.
                is_silent = now_seconds - sent_seconds >= INTERVAL_SECONDS
                self._failing[number] = _Failing(sent_seconds if is_silent else now_seconds, left_seconds)
            oldest = min(self._failing.values(), key=lambda failing: failing.began_seconds)
            if self._logged_seconds is None:
                if now_seconds - oldest.began_seconds < FIRST_SECONDS:
                    return
                self._began_seconds = oldest.began_seconds
            elif now_seconds - self._logged_seconds < INTERVAL_SECONDS:
                return
            self._logged_seconds = now_seconds
            count, seconds = len(self._failing), now_seconds - self._began_seconds
        details = {name: value for name, value in error.details.items() if name not in {"verb", "key", "url"}}
        logger.log(
            self._level(),
            "%s: %s to the store %s failed for %s, and will be repeated for another %s at most. Last: %s of %s: %s",
            self._url,
            format_count(count, "request"),
            "has" if count == 1 else "have",
            human_seconds(seconds),
            human_seconds(oldest.left_seconds()),
            request.verb,
            request.key or "all keys",
            DcpRemoteError(error.what, **details),
        )

    def note_end(self, number: int, *, is_answered: bool) -> None:
        """Note that a request is not repeated any more; write a line if it was the last of a logged outage.

        Without `is_answered` the request was given up, as its error says. A request that has not failed is ignored.
        """
        with self._lock:
            if self._failing.pop(number, None) is None or self._failing:
                return
            is_logged, self._logged_seconds = self._logged_seconds is not None, None
            seconds = self.clock() - self._began_seconds
        if is_logged and is_answered:
            logger.log(self._level(), "%s: the store answers again, after %s.", self._url, human_seconds(seconds))

    def _level(self) -> int:
        is_speaker = _speakers.get(self._url, os.environ.get("RANK", "0") in {"", "0"})
        return logging.WARNING if is_speaker else logging.DEBUG


_outages: weakref.WeakValueDictionary[str, Outage] = weakref.WeakValueDictionary()
_outages_lock = threading.Lock()
_speakers: dict[str, bool] = {}  # by URL


def outage_of(url: str) -> Outage:
    """Return the outage that all stores of a URL share in this process."""
    with _outages_lock:
        return _outages.setdefault(url, Outage(url))


def name_speaker(url: str, *, is_speaker: bool) -> None:
    """Set whether this process logs the warnings of its job about outages of a store; the last call counts."""
    _speakers[url] = is_speaker
