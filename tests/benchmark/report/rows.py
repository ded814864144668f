"""What was measured, and its medians: pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dcp_remote.common.units import GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a step cost on one rank.

    Attributes:
        wall_seconds: From a barrier to the next; of training, while saves were under way.
        cpu_seconds: Of all threads of this process.
        state_bytes: Of the tensors.
        above_state_bytes: The most memory that was resident, beyond what was when it began.
        first_blocked_seconds: Of "background" and "train": until the first save came back.
        blocked_seconds: And a later one.
        steps_per_second: Of "train": while a save was under way and the call was back.
        alone_steps_per_second: And without one, in the same process.
        saves: Of "train": how many that was.
    """

    wall_seconds: float
    cpu_seconds: float
    state_bytes: int
    above_state_bytes: int
    first_blocked_seconds: float = 0.0
    blocked_seconds: float = 0.0
    steps_per_second: float = 0.0
    alone_steps_per_second: float = 0.0
    saves: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a step cost on all ranks.

    Attributes:
        section: One of the plan's.
        client: Who.
        action: One of `plan.Action`.
        ranks: How many.
        beside: One of `plan.Beside`.
        round: Which, from 0.
        wall_seconds: Of the slowest rank.
        cpu_seconds: Of all ranks.
        state_bytes: Of all ranks.
        above_state_bytes: Of the rank that needed most.
        first_blocked_seconds: Of the slowest rank; see `Measured`, as for the next four.
        blocked_seconds: Likewise.
        steps_per_second: Likewise.
        alone_steps_per_second: Likewise.
        saves: Likewise.
        requests: That the server answered.
        sent_bytes: Bodies, on the wire, to the server.
        got_bytes: And from it.
        server_cpu_seconds: What that cost the server, on the same machine.
        failed: Why there are no figures; None if there are.
    """

    section: str
    client: str
    action: str
    ranks: int
    beside: str
    round: int
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    state_bytes: int = 0
    above_state_bytes: int = 0
    first_blocked_seconds: float = 0.0
    blocked_seconds: float = 0.0
    steps_per_second: float = 0.0
    alone_steps_per_second: float = 0.0
    saves: int = 0
    requests: int = 0
    sent_bytes: int = 0
    got_bytes: int = 0
    server_cpu_seconds: float = 0.0
    failed: str | None = None

    @property
    def cpu_seconds_per_gib(self) -> float:
        """Of the clients."""
        return self.cpu_seconds / (self.state_bytes / GiB)


@dataclass(frozen=True, slots=True)
class Results:
    """All of a run.

    Attributes:
        about: The machine, versions, when it was, and how many seconds it took: texts and numbers by name.
        rows: What was measured.
    """

    about: dict[str, Any]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """A line for each row."""
        rows = ",\n".join(json.dumps(_told(row), ensure_ascii=False) for row in self.rows)
        return f'{{"about": {json.dumps(self.about, ensure_ascii=False)},\n"rows": [\n{rows}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Results:
        """The reverse."""
        values = json.loads(text)
        return cls(values["about"], tuple(Row(**row) for row in values["rows"]))

    def sections(self) -> list[str]:
        """In their order."""
        return list(dict.fromkeys(row.section for row in self.rows))

    def select(
        self, section: str, client: str, action: str, *, ranks: int = 1, beside: str = "nothing"
    ) -> tuple[Row, ...]:
        """The rounds of one step that have figures."""
        wanted = (section, client, action, ranks, beside)
        return tuple(
            row
            for row in self.rows
            if (row.section, row.client, row.action, row.ranks, row.beside) == wanted and row.failed is None
        )


def _told(row: Row) -> dict[str, Any]:
    """Without what is at its default."""
    return {name: value for name, value in asdict(row).items() if value or name == "round"}


def median(rows: Sequence[Row], figure: Callable[[Row], float]) -> float | None:
    """Of the rounds; None if there are none."""
    return statistics.median(map(figure, rows)) if rows else None
