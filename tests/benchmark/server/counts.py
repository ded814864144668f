"""Counts of the benchmark's server: requests, bytes, connections and faults, and their CPU time."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tally:
    """Requests of one kind.

    Attributes:
        requests: Whose head arrived.
        body_bytes_in: As they came over the wire: the frames of chunks and their trailers included, heads not.
        body_bytes_out: Of answers, heads not.
        statuses: Requests by the status that they were answered with; "cut" for those that were not: the client went.
    """

    requests: int = 0
    body_bytes_in: int = 0
    body_bytes_out: int = 0
    statuses: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the server since it was started, or reset.

    Attributes:
        total: Of all requests.
        methods: The same by method.
        operations: Requests by S3's names for them.
        connections: On which there was a request. Those that came before a reset are not counted again.
        slow_downs: Answers 503 by the shape.
        server_cpu_seconds: User and system, of the process and its children.
    """

    total: Tally
    methods: Mapping[str, Tally]
    operations: Mapping[str, int]
    connections: int
    slow_downs: int
    server_cpu_seconds: float


def parse_counts(text: bytes) -> Counts:
    """Read counts from JSON, as the server tells them."""
    values = json.loads(text)
    methods = {name: Tally(**tally) for name, tally in values.pop("methods").items()}
    return Counts(**(values | {"total": Tally(**values["total"]), "methods": methods}))


class Counter:
    """The counts as they grow, by all connections at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._total = Tally(statuses={})
        self._methods: dict[str, Tally] = {}
        self._operations: dict[str, int] = {}
        self._connections = 0
        self._slow_downs = 0
        self._cpu_seconds = _cpu_seconds()

    def reset(self) -> None:
        """Count from zero."""
        with self._lock:
            self._clear()

    def connection(self) -> None:
        """One more on which there was a request."""
        with self._lock:
            self._connections += 1

    def slow_down(self) -> None:
        """One more answer 503 by the shape."""
        with self._lock:
            self._slow_downs += 1

    def request(self, method: str, operation: str, status: str, *, bytes_in: int, bytes_out: int) -> None:
        """One more, with all bytes that its answer has: it is counted before they leave."""
        with self._lock:
            self._total = _tallied(self._total, 1, status, bytes_in, bytes_out)
            self._methods[method] = _tallied(self._methods.get(method, Tally()), 1, status, bytes_in, bytes_out)
            self._operations[operation] = self._operations.get(operation, 0) + 1

    def unsent(self, method: str, size_bytes: int) -> None:
        """Take back bytes of a counted request: so much of the answer did not leave."""
        with self._lock:
            if method in self._methods:  # else reset since
                self._total = _tallied(self._total, 0, None, 0, -size_bytes)
                self._methods[method] = _tallied(self._methods[method], 0, None, 0, -size_bytes)

    def counts(self) -> Counts:
        """All of them at one moment."""
        with self._lock:
            return Counts(
                total=self._total,
                methods=dict(self._methods),
                operations=dict(self._operations),
                connections=self._connections,
                slow_downs=self._slow_downs,
                server_cpu_seconds=_cpu_seconds() - self._cpu_seconds,
            )


def _tallied(tally: Tally, requests: int, status: str | None, bytes_in: int, bytes_out: int) -> Tally:
    statuses = dict(tally.statuses)
    if status is not None:
        statuses[status] = statuses.get(status, 0) + 1
    return Tally(tally.requests + requests, tally.body_bytes_in + bytes_in, tally.body_bytes_out + bytes_out, statuses)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
