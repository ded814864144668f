"""Goals of the benchmark, and their measured values; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dcp_remote.common.units import MiB
from tests.benchmark.report.plan import (
    BEST,
    BUSY,
    FAR,
    HTTP,
    LARGEST,
    LOADED_BY_RANKS,
    MANY,
    OURS,
    PEERS,
    RAW,
    RESHARDING,
    S3FS,
    SAVED_BY_RANKS,
    TLS,
    TRAINING,
    Beside,
)
from tests.benchmark.report.rows import Results, Row, cpu_per_gib, median, wall

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
    parts = (_speed, _cpu, _far, _busy, _blocked, _training, _amplification, _memory, _many)
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
    for section in (HTTP, TLS):
        for ranks in (1, 2, 4):
            for action, times in (("save", 3.0), ("load", 4.0)):
                peer = wall_of_better_peer(results, section, action, ranks)
                own = median(results.select(section, OURS, action, ranks=ranks), wall)
                what = f"{section}, {ranks} rank{'s' * (ranks > 1)}: {action} faster than the better peer"
                yield from _goal(what, peer, own, at_least=times)


def _cpu(results: Results) -> Iterator[Goal]:
    for section, action, times in ((HTTP, "save", 1.5), (HTTP, "load", 2.0), (TLS, "save", 1.0), (TLS, "load", 1.5)):
        own, raw = (median(results.select(section, client, action), cpu_per_gib) for client in (OURS, RAW))
        yield from _goal(f"{section}: client CPU of a {action} over the raw socket's", own, raw, at_most=times)


def _far(results: Results) -> Iterator[Goal]:
    stock, own = (median(results.select(FAR, client, "load"), wall) for client in (S3FS + BEST, OURS))
    yield from _goal(f"{FAR}: load faster than FsspecReader", stock, own, at_least=8.0)


def _busy(results: Results) -> Iterator[Goal]:
    def second_save(beside: Beside) -> float | None:
        return median(results.select(BUSY, OURS, "again", beside=beside), wall)

    what = "second save of a process: beside a busy Python thread over beside a busy process"
    yield from _goal(what, second_save("thread"), second_save("process"), at_most=1.3)


def _blocked(results: Results) -> Iterator[Goal]:
    for section in (HTTP, FAR):
        stock = median(results.select(section, S3FS + BEST, "save"), wall)
        own = median(results.select(section, OURS, "background"), lambda row: row.blocked_seconds)
        what = f"{section}: seconds that a save blocks the main thread, FsspecWriter over ours in the background"
        yield from _goal(what, stock, own, at_least=54.0)


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
    for section in (HTTP, LARGEST):
        for action in ("save", "load"):
            rows = results.select(section, OURS, action)
            above, size_bytes = median(rows, lambda row: row.above_state_bytes), median(rows, _state_bytes)
            if above is not None and size_bytes is not None:
                what = f"memory above a state of {size_bytes / MiB / 1024:.1f} GiB in a {action}"
                yield Goal(what=what, measured=above / MiB, at_most=_BUDGET_MIB, unit=" MiB")


def _many(results: Results) -> Iterator[Goal]:
    for action in ("save", "load"):
        rows = results.select(MANY, OURS, action)
        peer, above = wall_of_better_peer(results, MANY, action, 1), median(rows, lambda row: row.above_state_bytes)
        yield from _goal(f"{MANY}: {action} faster than the better peer", peer, median(rows, wall), at_least=1.0)
        if above is not None:
            what = f"{MANY}: memory above the state in a {action}"
            yield Goal(what=what, measured=above / MiB, at_most=_BUDGET_MIB, unit=" MiB")
