"""Rows of measurements, and their medians; no I/O."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dcp_remote.common.units import GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Cost of a step on one rank."""

    wall_seconds: float = 0.0  # seconds from one barrier to the next; in "train", seconds in which saves were under way
    cpu_seconds: float = 0.0  # CPU seconds of all threads of this process
    state_bytes: int = 0  # size of the tensors, in bytes
    above_state_bytes: int = 0  # peak of resident memory, in bytes, less that at the start
    # Until a call of `save` returned that goes on in the background: of the first, and in the median of later ones.
    first_blocked_seconds: float = 0.0
    blocked_seconds: float = 0.0
    later_cpu_seconds: float = 0.0  # CPU seconds of such a later save, to its end; not in "train"
    steps_per_second: float = 0.0  # training steps per second during a save, after its call returned; "train" only
    alone_steps_per_second: float = 0.0  # training steps per second without a save, in the same process; "train" only
    saves: int = 0  # number of saves; "train" only


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Measured):
    """Cost of a step on all ranks: sums of CPU and sizes, else the figure of the worst rank."""

    section: str  # name of a section of the plan
    client: str
    action: str  # one of `plan.Action`
    ranks: int
    beside: str  # one of `plan.Beside`
    round: int  # number of the round, from 0
    requests: int = 0  # number of requests that the server answered
    sent_bytes: int = 0  # bytes of bodies on the wire to the server
    got_bytes: int = 0  # bytes of bodies on the wire from the server
    server_cpu_seconds: float = 0.0  # CPU seconds of the server, on the same machine
    failed: str | None = None  # reason why there are no figures; None if there are

    @property
    def cpu_seconds_per_gib(self) -> float:
        """CPU seconds of the clients per GiB of state."""
        return self.cpu_seconds / (self.state_bytes / GiB)


@dataclass(frozen=True, slots=True)
class Results:
    """Results of a run."""

    about: dict[str, Any]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """Return JSON with one line per row."""
        rows = ",\n".join(json.dumps(_told(row), ensure_ascii=False) for row in self.rows)
        return f'{{"about": {json.dumps(self.about, ensure_ascii=False)},\n"rows": [\n{rows}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Results:
        values = json.loads(text)
        return cls(values["about"], tuple(Row(**row) for row in values["rows"]))

    def sections(self) -> list[str]:
        """Return the names of the sections, in the order of their rows."""
        return list(dict.fromkeys(row.section for row in self.rows))

    def select(
        self, section: str, client: str, action: str, *, ranks: int = 1, beside: str = "nothing"
    ) -> tuple[Row, ...]:
        """Return the rounds of one step that have figures."""
        wanted = (section, client, action, ranks, beside)
        return tuple(
            row
            for row in self.rows
            if (row.section, row.client, row.action, row.ranks, row.beside) == wanted and row.failed is None
        )


def _told(row: Row) -> dict[str, Any]:
    """Return the fields of a row that are not at their default, the step first."""
    fields = asdict(row)
    step = {name: fields[name] for name in ("section", "client", "action", "ranks", "beside", "round")}
    return step | {name: value for name, value in fields.items() if value and name not in step}


def median(rows: Sequence[Row], figure: Callable[[Row], float]) -> float | None:
    """Return the median of a figure over the rounds; None if there are none."""
    return statistics.median(map(figure, rows)) if rows else None


def wall(row: Row) -> float:
    return row.wall_seconds


def cpu_per_gib(row: Row) -> float:
    return row.cpu_seconds_per_gib
