"""Counts of the benchmark's server: requests, bytes and their CPU time."""

from __future__ import annotations

import json
import resource
import threading
from collections import Counter as Numbers
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the server since it was started, or reset."""

    requests: int = 0  # requests whose head arrived
    body_bytes_in: int = 0  # bytes of their bodies on the wire: frames of chunks and trailers included, heads not
    body_bytes_out: int = 0  # bytes of the bodies of answers
    operations: Mapping[str, int] = field(default_factory=dict)  # requests by S3's names for them
    server_cpu_seconds: float = 0.0  # CPU seconds, user and system, of the process and its children


def parse_counts(text: bytes) -> Counts:
    """Read counts from JSON, as the server tells them."""
    return Counts(**json.loads(text))


class Counter:
    """The counts as they grow, by all connections at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        with self._lock:
            self._bytes_in = self._bytes_out = 0
            self._operations: Numbers[str] = Numbers()
            self._cpu_seconds = _cpu_seconds()

    def request(self, operation: str, *, bytes_in: int, bytes_out: int) -> None:
        """Count a request, with all bytes that its answer has: it is counted before they leave."""
        with self._lock:
            self._bytes_in += bytes_in
            self._bytes_out += bytes_out
            self._operations[operation] += 1

    def unsent(self, size_bytes: int) -> None:
        """Take back bytes of a counted request: so much of the answer did not leave."""
        with self._lock:
            self._bytes_out = max(0, self._bytes_out - size_bytes)  # reset since, if there are not as many

    def counts(self) -> Counts:
        """Return all of them at one moment."""
        with self._lock:
            return Counts(
                requests=self._operations.total(),
                body_bytes_in=self._bytes_in,
                body_bytes_out=self._bytes_out,
                operations=dict(self._operations),
                server_cpu_seconds=_cpu_seconds() - self._cpu_seconds,
            )


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
