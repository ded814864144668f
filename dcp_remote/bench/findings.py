"""What was found of a user's bucket, and what that says: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from dcp_remote.bench.space import GiB, MiB
from dcp_remote.terminal import counted

# What is at work at a time: files and memory have no connections.
Unit: TypeAlias = Literal["connection", "thread"]


@dataclass(frozen=True, slots=True)
class Rate:
    """What a number of connections moved.

    Attributes:
        connections: At a time.
        bytes_per_second: All of them together.
        wall_seconds: How long it was tried.
        cpu_seconds: Of this process.
        size_bytes: How much was moved.
    """

    connections: int
    bytes_per_second: float
    wall_seconds: float
    cpu_seconds: float
    size_bytes: int

    @property
    def cpu_seconds_per_gib(self) -> float:
        """Of this process."""
        return self.cpu_seconds / (self.size_bytes / GiB)


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found.

    Attributes:
        first_answer_seconds: Of the first request: credentials, name, connection, TLS, and an answer.
        answer_seconds: Of requests without a body on an open connection, in the median.
        slow_answer_seconds: The slowest of these.
        creates_if_absent: A create of a key that was there was refused. None: the store never said.
        compares_and_swaps: A replacement of an older version was refused, one of the newest not. None: the store never
            said, or does not claim it.
        small_reads_per_second: Of 4 KiB, by eight connections.
        object_bytes: Of each object that was put and read for the rates.
        up: By connections.
        down: By connections.
        requests_again: Requests that failed for now and were sent again.
        slow_downs: Of these, how many the store refused for their rate (503 or 429).
        requests: All of them, these and the deletions included.
        cores: Of this process.
        stopped_early: Whether time ran out before all was tried.
        objects_left: That could not be deleted.
    """

    first_answer_seconds: float
    answer_seconds: float
    slow_answer_seconds: float
    creates_if_absent: bool | None
    compares_and_swaps: bool | None
    small_reads_per_second: float
    object_bytes: int
    up: tuple[Rate, ...]
    down: tuple[Rate, ...]
    requests_again: int
    slow_downs: int
    requests: int
    cores: int
    stopped_early: bool
    objects_left: int


# Of a core, of all cores, and of requests: from where on one of them is what limits.
_BUSY = 0.9
_THROTTLED = 0.02
# A connection more that gives less than half of what the first one gave is not worth having.
_WORTH = 0.5
# From one row to the next a rate may stay as it is; one that falls below half of the last says nothing.
_STEADY = 0.5


def limit(probe: Probe, *, unit: Unit = "connection") -> str:
    """What limits it, in a sentence; pure."""
    if probe.slow_downs > _THROTTLED * probe.requests:
        return (
            f"Throttling: {probe.slow_downs} of {probe.requests} requests were refused for their rate. Ask for a "
            "higher one, or spread runs over prefixes."
        )
    if probe.requests_again > _THROTTLED * probe.requests:
        return (
            f"The store or the network fails: {probe.requests_again} of {probe.requests} requests had to be sent again."
        )
    if not probe.up:
        return "There was no time to move bytes: give it more --seconds."
    told = [_limit_of("Upload", probe.up, probe, unit), _limit_of("Download", probe.down, probe, unit)]
    return " ".join(sentence for sentence in told if sentence)


def _limit_of(name: str, rates: Sequence[Rate], probe: Probe, unit: Unit) -> str:
    if not rates:
        return ""
    place = "the network or the store" if unit == "connection" else "the store"
    for earlier, later in pairwise(rates):
        if later.bytes_per_second < _STEADY * earlier.bytes_per_second:
            return (
                f"{name}: {place} is unsteady, {speed(earlier)} by {counted(earlier.connections, unit)} and only "
                f"{speed(later)} by {later.connections}: nothing can be concluded."
            )
    best = max(rates, key=lambda rate: rate.bytes_per_second)
    if best.cpu_seconds >= _BUSY * probe.cores * best.wall_seconds:
        return f"{name}: the CPU of this machine ({counted(probe.cores, 'core')}) is all in use."
    first, last = rates[0], rates[-1]
    if len(rates) == 1:
        return f"{name}: {speed(first)} by {counted(first.connections, unit)}; there was no time to try more."
    before = rates[-2]
    # How much of what the last connections could have added they did add: 1 if each gives what the others give.
    grown = last.bytes_per_second / before.bytes_per_second - 1
    part = grown / (last.connections / before.connections - 1)
    times = last.bytes_per_second / first.bytes_per_second
    if part >= _WORTH and times >= _WORTH * last.connections / first.connections:
        waiting = probe.answer_seconds / (probe.object_bytes / first.bytes_per_second)
        if waiting > _WORTH:
            return f"{name}: latency; most of a request of {probe.object_bytes / MiB:.1f} MiB is waiting."
        culprit = "the connection is what limits, not the network" if unit == "connection" else "more may give more"
        return (
            f"{name}: one {unit} gives {speed(first)}, {last.connections} give {times:.1f} times that: {culprit}, "
            f"and it is still growing at {last.connections}."
        )
    if before.bytes_per_second < _BUSY * last.bytes_per_second:
        near = f"near the limit of {place}, and " if part < _WORTH else ""
        return (
            f"{name}: {speed(last)} by {counted(last.connections, unit)}, {1 + grown:.1f} times what "
            f"{before.connections} give: {near}still growing at {last.connections}."
        )
    enough = next(rate for rate in rates if rate.bytes_per_second >= _BUSY * best.bytes_per_second)
    return f"{name}: {place}; {speed(enough)} by {counted(enough.connections, unit)}, and hardly more by others."


def speed(rate: Rate) -> str:
    """For a person."""
    value = rate.bytes_per_second / MiB
    return f"{value:.0f} MiB/s" if value >= 10 else f"{value:.1f} MiB/s"  # noqa: PLR2004  # two digits


def said(answer: bool | None) -> str:  # noqa: FBT001  # an answer
    """Of a conditional write."""
    return {True: "works", False: "does NOT work: this store cannot hold checkpoints safely", None: "not known"}[answer]
