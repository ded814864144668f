"""Time limits of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits after which a request counts as stalled; they grow with its size."""

    floor_seconds: float = 30.0  # of a request without a body
    slowest_bytes_per_second: int = 500_000  # half of 1 MB/s, which is slow
    # Longest pause of a download. Uploads have none: the client cannot tell a server that does not read from one that
    # does not answer yet.
    silence_seconds: float = 30.0

    def request_seconds(self, size_bytes: int) -> float:
        """Return the limit for a request: `floor_seconds` times a power of two, as obstore needs a client per limit."""
        needed = 1 + size_bytes / self.slowest_bytes_per_second / self.floor_seconds
        return float(self.floor_seconds * 2 ** math.ceil(math.log2(needed)))
