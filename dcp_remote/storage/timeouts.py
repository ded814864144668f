"""How long a request to a store may take, by what it carries."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """When a request counts as stalled: the more it carries, the later.

    Attributes:
        floor_seconds: What a request may take that carries nothing.
        slowest_bytes_per_second: A link at half of 1 MB/s is slow, one below it is taken for stalled.
        silence_seconds: How long a download may pause. Uploads have no such limit: the client cannot tell a server
            that does not read from one that does not answer yet.
    """

    floor_seconds: float = 30.0
    slowest_bytes_per_second: int = 500_000
    silence_seconds: float = 30.0

    def request_seconds(self, size_bytes: int) -> float:
        """The limit for a request of this size: `floor_seconds` times a power of two, so that few clients serve all."""
        needed = 1 + size_bytes / self.slowest_bytes_per_second / self.floor_seconds
        return float(self.floor_seconds * 2 ** math.ceil(math.log2(needed)))
