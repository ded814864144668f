"""Circuit breaker of direct reads: counts how ranges were read, and leaves them to obstore where direct reads fail.

A store may refuse signed URLs, or a middlebox may cut every connection that carries one. A range whose direct read
broke twice is read by obstore, so no range depends on direct reads, whatever happens to the others. If obstore reads
what direct reads could not, three times in a row, direct reads are paused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

logger = logging.getLogger(__name__)

# Outcome of a direct read: the range was read; the store answered something else; earlier attempts had broken; it was
# not tried.
Outcome: TypeAlias = Literal["read", "refused", "broken", "skipped"]

# Direct reads of one range that break before obstore reads that range. One broken connection only causes a retry.
_BREAKS_MAX = 2

# Ranges in a row that only obstore could read before direct reads are paused, and the length of the pause.
_FAILED_MAX = 3
_PAUSE_SECONDS = 60.0

# Ranges with broken reads that are remembered. Abandoned loads leave theirs behind.
_REMEMBERED_MAX = 10_000


@dataclass(frozen=True, slots=True)
class DirectCounts:
    """Ranges of one store that this process has read so far, and attempts that broke.

    Attributes:
        direct: Ranges that were read directly.
        refused: Ranges that obstore read, because the store answered the direct read with something else.
        broken: Attempts at direct reads that ended with a broken connection, a timeout or an error of the server.
        after_breaks: Ranges that obstore read, because direct reads of them broke.
        skipped: Ranges that obstore read, because direct reads were paused, or a proxy is in between.
    """

    direct: int = 0
    refused: int = 0
    broken: int = 0
    after_breaks: int = 0
    skipped: int = 0

    @property
    def ranges(self) -> int:
        """Ranges that were read, directly or by obstore."""
        return self.direct + self.refused + self.after_breaks + self.skipped

    def plus(self, more: DirectCounts) -> DirectCounts:
        """Return the sums of both counts."""
        return DirectCounts(
            self.direct + more.direct,
            self.refused + more.refused,
            self.broken + more.broken,
            self.after_breaks + more.after_breaks,
            self.skipped + more.skipped,
        )


class CircuitBreaker:
    """Decides whether a range is read directly. Safe to use from many threads.

    Args:
        bucket: Bucket name, for the warning.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, bucket: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Start closed: direct reads are allowed."""
        self._bucket = bucket
        self._clock = clock
        self._lock = threading.Lock()
        self._counts = DirectCounts()
        self._breaks: dict[tuple[str, int], int] = {}
        self._failed_in_a_row = 0
        self._again_at = 0.0
        self._has_warned = False

    @property
    def counts(self) -> DirectCounts:
        """Counts so far."""
        with self._lock:
            return self._counts

    def choose_route(self, range_id: tuple[str, int]) -> Literal["direct", "broken", "skipped"]:
        """Decide how to read a range: directly, or by obstore because of its own broken reads or of a pause.

        After a pause one range is tried directly; the others wait for its outcome.

        Args:
            range_id: Path and first byte, which identify the range.
        """
        with self._lock:
            if self._breaks.get(range_id, 0) >= _BREAKS_MAX:
                del self._breaks[range_id]  # if obstore fails too, the next attempt is direct again
                return "broken"
            if self._failed_in_a_row >= _FAILED_MAX:
                if self._clock() < self._again_at:
                    return "skipped"
                self._again_at = self._clock() + _PAUSE_SECONDS
            return "direct"

    def note_read(self, range_id: tuple[str, int], outcome: Outcome) -> None:
        """Note that a range was read: directly, or by obstore after another outcome of the direct read."""
        with self._lock:
            counts = self._counts
            self._breaks.pop(range_id, None)
            if outcome == "read":
                self._counts = replace(counts, direct=counts.direct + 1)
                self._failed_in_a_row = 0
                return
            if outcome == "skipped":
                self._counts = replace(counts, skipped=counts.skipped + 1)
                return
            if outcome == "refused":
                self._counts = replace(counts, refused=counts.refused + 1)
            else:
                self._counts = replace(counts, after_breaks=counts.after_breaks + 1)
            self._failed_in_a_row += 1
            if self._failed_in_a_row < _FAILED_MAX:
                return
            self._again_at = self._clock() + _PAUSE_SECONDS
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
            counts = self._counts
        logger.log(
            level,
            "Direct reads of this store fail; obstore reads the ranges, at more CPU. Look for a proxy or firewall that "
            "cuts or refuses signed URLs. bucket=%s refused=%d broken=%d next_try_seconds=%d",
            self._bucket,
            counts.refused,
            counts.broken,
            _PAUSE_SECONDS,
        )

    def note_broken(self, range_id: tuple[str, int]) -> None:
        """Note that a direct read broke; the caller retries."""
        with self._lock:
            self._counts = replace(self._counts, broken=self._counts.broken + 1)
            if len(self._breaks) >= _REMEMBERED_MAX:
                self._breaks.clear()
            self._breaks[range_id] = self._breaks.get(range_id, 0) + 1
