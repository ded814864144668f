"""Goals of the benchmark, and their measured values; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dcp_remote.common.text import human_bytes
from dcp_remote.common.units import MiB
from tests.benchmark.report.plan import (
    BUSY,
    CEPH,
    FAR,
    HTTP,
    LARGEST,
    LOADED_BY_RANKS,
    MANY,
    OURS,
    PEERS,
    RAW,
    REFUSING,
    RESHARDING,
    SAVED_BY_RANKS,
    TINY,
    TLS,
    TRAINING,
    Beside,
)
from tests.benchmark.report.rows import Results, Row, cpu_per_gib, median, wall

# Where a PUT takes long, what counts is how many are under way.
_FAR_TIMES = {"save": 2.5, "load": 10.0}

# Default `memory_budget_bytes` of writer, reader and manager.
_BUDGET_MIB = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One figure and its limit."""

    what: str  # text in the table
    measured: float  # ratio of medians, or median
    at_least: float | None = None  # lower limit; None if there is none
    at_most: float | None = None  # upper limit; None if there is none. Exactly one of the two is None.
    unit: str = " x"  # text behind the numbers

    @property
    def reached(self) -> bool:
        """True if the measured value is within the limit."""
        if self.at_least is not None:
            return self.measured >= self.at_least
        assert self.at_most is not None
        return self.measured <= self.at_most


def goals(results: Results) -> list[Goal]:
    """Return the goals whose figures were measured."""
    parts = (_speed, _cpu, _busy, _blocked, _fixed, _training, _amplification, _memory)
    return [goal for part in parts for goal in part(results)]


def wall_of_better_peer(results: Results, section: str, action: str, ranks: int) -> float | None:
    """Return the seconds of the faster peer, at its best settings; None if none was measured."""
    found = (median(results.select(section, peer, action, ranks=ranks), wall) for peer in PEERS)
    return min((seconds for seconds in found if seconds is not None), default=None)


def _goal(
    what: str,
    over: float | None,
    under: float | None,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    unit: str = " x",
) -> Iterator[Goal]:
    """Yield the goal of a ratio; nothing if one of its figures was not measured."""
    if over is not None and under:
        yield Goal(what=what, measured=over / under, at_least=at_least, at_most=at_most, unit=unit)


def _speed(results: Results) -> Iterator[Goal]:
    """Yield the ratios to the better peer, which share two cores with the server: as seconds, raw sockets reach 4.6."""
    for section in (HTTP, TLS, FAR, REFUSING, CEPH, MANY):
        for ranks in (1, 2, 4):
            for action in ("save", "load"):
                peer = wall_of_better_peer(results, section, action, ranks)
                own = median(results.select(section, OURS, action, ranks=ranks), wall)
                what = f"{section}, {ranks} rank{'s' * (ranks > 1)}: {action} faster than the better peer"
                yield from _goal(what, peer, own, at_least=_FAR_TIMES[action] if section == FAR else 1.0)


def _cpu(results: Results) -> Iterator[Goal]:
    for section, action, times in ((HTTP, "save", 1.5), (HTTP, "load", 1.7), (TLS, "save", 1.1), (TLS, "load", 1.1)):
        own, raw = (median(results.select(section, client, action), cpu_per_gib) for client in (OURS, RAW))
        yield from _goal(f"{section}: client CPU of a {action} over the raw socket's", own, raw, at_most=times)


def _busy(results: Results) -> Iterator[Goal]:
    def second_save(beside: Beside) -> float | None:
        return median(results.select(BUSY, OURS, "again", beside=beside), wall)

    what = "second save of a process: beside a busy Python thread over beside a busy process"
    yield from _goal(what, second_save("thread"), second_save("process"), at_most=1.3)


def _blocked(results: Results) -> Iterator[Goal]:
    for action, seconds in (("background", 0.08), ("overlapped", 0.01)):
        blocked = median(results.select(HTTP, OURS, action), lambda row: row.blocked_seconds)
        if blocked is not None:
            what = f"{HTTP}: seconds that a save blocks the main thread, {action}"
            yield Goal(what=what, measured=blocked, at_most=seconds, unit=" s")


def _fixed(results: Results) -> Iterator[Goal]:
    used = median(results.select(TINY, OURS, "background"), lambda row: row.later_cpu_seconds)
    if used is not None:
        yield Goal(what=f"{TINY}: CPU of a later save of a manager", measured=used, at_most=0.03, unit=" s")


def training_seconds_lost(rows: Sequence[Row]) -> float | None:
    """Return the seconds that training lost by one save: its steps' time, less that of as many steps alone."""

    def lost(row: Row) -> float:
        return row.wall_seconds / row.saves * (1 - row.steps_per_second / row.alone_steps_per_second)

    return median(rows, lost)


def cpu_seconds_of_a_save(results: Results) -> float | None:
    """Return the CPU seconds of a save of the same state beside no other load, which training may lose at most."""
    rows = results.select(BUSY, OURS, "save") + results.select(HTTP, OURS, "save")
    return median(rows, lambda row: row.cpu_seconds)


def _training(results: Results) -> Iterator[Goal]:
    lost = training_seconds_lost(results.select(TRAINING, OURS, "train", beside="manager"))
    what = "training lost by a save in the background over the CPU that the save needs"
    yield from _goal(what, lost, cpu_seconds_of_a_save(results), at_most=1.0)


def _amplification(results: Results) -> Iterator[Goal]:
    for ranks in LOADED_BY_RANKS:
        rows = results.select(RESHARDING, OURS, "load", ranks=ranks)
        what = f"bytes fetched over bytes needed, {SAVED_BY_RANKS} ranks to {ranks}"
        got, needed = (median(rows, figure) for figure in (_got_bytes, _state_bytes))
        yield from _goal(what, got, needed, at_most=1.05)


def _got_bytes(row: Row) -> float:
    return row.got_bytes


def _state_bytes(row: Row) -> float:
    return row.state_bytes


def _memory(results: Results) -> Iterator[Goal]:
    for section in (HTTP, LARGEST, MANY):
        for action in ("save", "load"):
            rows = results.select(section, OURS, action)
            above, size_bytes = median(rows, lambda row: row.above_state_bytes), median(rows, _state_bytes)
            if above is not None and size_bytes is not None:
                what = f"memory above a state of {human_bytes(round(size_bytes))} in a {action}"
                yield Goal(what=what, measured=above / MiB, at_most=_BUDGET_MIB, unit=" MiB")
