"""Results of `dcp-remote bench`, and the conclusion about what limits them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from dcp_remote.common.text import format_count
from dcp_remote.common.units import GiB, MiB

# Noun for what works in parallel: files and memory have threads but no connections.
Unit: TypeAlias = Literal["connection", "thread"]


@dataclass(frozen=True, slots=True)
class Rate:
    """Throughput of a number of parallel connections.

    Attributes:
        connections: Number of parallel connections.
        bytes_per_second: Throughput of all connections together.
        wall_seconds: Duration of the measurement.
        cpu_seconds: CPU time of this process meanwhile.
        size_bytes: Bytes that were moved.
    """

    connections: int
    bytes_per_second: float
    wall_seconds: float
    cpu_seconds: float
    size_bytes: int

    @property
    def cpu_seconds_per_gib(self) -> float:
        """CPU seconds of this process per GiB moved."""
        return self.cpu_seconds / (self.size_bytes / GiB)


@dataclass(frozen=True, slots=True)
class Probe:
    """Results of one measurement of a bucket.

    Attributes:
        first_answer_seconds: Duration of the first request, with credentials, name lookup, connection and TLS.
        answer_seconds: Median duration of requests without a body on an open connection.
        slow_answer_seconds: Longest of these durations.
        creates_if_absent: True if a create of an existing key was refused; None if the store gave no clear answer.
        compares_and_swaps: True if replacing an older version was refused and replacing the newest was not; None if the
            store gave no clear answer, or does not claim to support it.
        small_reads_per_second: Reads of 4 KiB by eight connections.
        object_bytes: Size of each object that is uploaded and downloaded for the rates.
        up: Upload rates, by ascending number of connections.
        down: Download rates, by ascending number of connections.
        requests_again: Requests that were sent again after a transient failure.
        slow_downs: Requests among these that the store refused for their rate (503 or 429).
        requests: All requests, including those sent again and the deletions.
        cores: CPU cores available to this process.
        stopped_early: True if time ran out before all measurements.
        objects_left: Objects that could not be deleted.
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


# Fraction of the CPU, or of the best rate, from which it counts as reached.
_BUSY = 0.9
# Fraction of requests that were refused or sent again, above which these are the limit.
_THROTTLED = 0.02
# Smallest gain of an additional connection, as a fraction of what one connection gives, that counts as growth.
_WORTH = 0.5
# A rate below this fraction of the rate with fewer connections means that the store or the network is unsteady.
_STEADY = 0.5


def find_limit(probe: Probe, *, unit: Unit = "connection") -> str:
    """Return what limits the bucket, in a sentence each for upload and download."""
    if probe.slow_downs > _THROTTLED * probe.requests:
        return (
            f"Throttling: {probe.slow_downs} of {probe.requests} requests were refused for their rate. Ask the "
            "provider for a higher rate, or spread runs over several prefixes."
        )
    if probe.requests_again > _THROTTLED * probe.requests:
        return (
            f"The store or the network fails: {probe.requests_again} of {probe.requests} requests had to be sent again."
        )
    if not probe.up:
        return "Time ran out before any bandwidth was measured: give more --seconds."
    sentences = [_find_limit_of("Upload", probe.up, probe, unit), _find_limit_of("Download", probe.down, probe, unit)]
    return " ".join(sentence for sentence in sentences if sentence)


def _find_limit_of(name: str, rates: Sequence[Rate], probe: Probe, unit: Unit) -> str:
    if not rates:
        return ""
    remote = "the network or the store" if unit == "connection" else "the store"
    for earlier, later in pairwise(rates):
        if later.bytes_per_second < _STEADY * earlier.bytes_per_second:
            return (
                f"{name}: {remote} is unsteady, {format_speed(earlier)} with {format_count(earlier.connections, unit)} "
                f"and only {format_speed(later)} with {later.connections}: nothing can be concluded."
            )
    best = max(rates, key=lambda rate: rate.bytes_per_second)
    if best.cpu_seconds >= _BUSY * probe.cores * best.wall_seconds:
        return f"{name}: the CPU of this machine ({format_count(probe.cores, 'core')}) is fully used."
    first, last = rates[0], rates[-1]
    if len(rates) == 1:
        tried = format_count(first.connections, unit)
        return f"{name}: {format_speed(first)} with {tried}; there was no time to try more."
    before = rates[-2]
    growth = last.bytes_per_second / before.bytes_per_second - 1
    # 1 if the last connections that were added give as much each as those before them.
    growth_per_connection = growth / (last.connections / before.connections - 1)
    times = last.bytes_per_second / first.bytes_per_second
    if growth_per_connection >= _WORTH and times >= _WORTH * last.connections / first.connections:
        latency_fraction = probe.answer_seconds / (probe.object_bytes / first.bytes_per_second)
        if latency_fraction > _WORTH:
            return f"{name}: latency; most of the time of a {probe.object_bytes / MiB:.1f} MiB request is waiting."
        cause = "the connection limits, not the network" if unit == "connection" else "more threads may give more"
        return (
            f"{name}: one {unit} gives {format_speed(first)}, {last.connections} give {times:.1f} times that: {cause}; "
            f"the rate is still growing at {last.connections}."
        )
    if before.bytes_per_second < _BUSY * last.bytes_per_second:
        near = f"near the limit of {remote}, and " if growth_per_connection < _WORTH else ""
        return (
            f"{name}: {format_speed(last)} with {format_count(last.connections, unit)}, {1 + growth:.1f} times "
            f"the rate of {before.connections}: {near}still growing at {last.connections}."
        )
    enough = next(rate for rate in rates if rate.bytes_per_second >= _BUSY * best.bytes_per_second)
    count = format_count(enough.connections, unit)
    return f"{name}: {remote} limits; {format_speed(enough)} with {count}, and hardly more with others."


def format_speed(rate: Rate) -> str:
    """Format a rate for a person, such as `35 MiB/s`."""
    value = rate.bytes_per_second / MiB
    return f"{value:.0f} MiB/s" if value >= 10 else f"{value:.1f} MiB/s"  # noqa: PLR2004  # two significant digits


def describe_support(works: bool | None) -> str:  # noqa: FBT001  # the value itself, not a switch
    """Return whether a kind of conditional write works, in words; None means that the store gave no clear answer."""
    return {True: "works", False: "does NOT work: this store cannot hold checkpoints safely", None: "not known"}[works]
