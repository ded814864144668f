"""What the demo concludes: its checks, its table and its picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import matplotlib as mpl

from demo_job import Job

mpl.use("Agg")  # there may be no display
from matplotlib import pyplot as plt

# Another number of ranks adds the same numbers in another order: measured, that is up to 5e-7, two units in the last
# place. A skipped batch or an optimizer that begins afresh was tried: 2e-3 to 1e-1 from the second step on.
LOSS_TOLERANCE = 1e-4
COLORS = ("tab:red", "tab:purple", "tab:blue", "tab:green", "tab:orange", "tab:brown")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One save or load. Seconds are those of the slowest rank.

    Attributes:
        step: The step that was saved or loaded.
        sha256: Digest of the whole state, taken when it was saved, or after it was loaded.
        state_bytes: Size of the whole state's tensors.
        seconds: From the call to the commit, or to the state being restored; None if not every rank told.
        blocked_seconds: How long training stood still for a save.
    """

    step: int
    sha256: str
    state_bytes: int
    seconds: float | None
    blocked_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """What one job did."""

    name: str
    ranks: int
    losses: Mapping[int, float]
    saves: tuple[Transfer, ...]
    load: Transfer | None
    killed_at: int | None = None

    @property
    def loaded_step(self) -> int | None:
        """Where the job resumed."""
        return self.load.step if self.load else None

    @classmethod
    def of(cls, job: Job, *, killed_at: int | None = None) -> Self:
        """Read what every rank noted. `killed_at` is the step in whose save the job was killed."""
        ranks = [job.events(rank) for rank in range(job.ranks)]
        saves = [_transfer(ranks, "saving", step, done="saved") for step in _steps(ranks[0], "saving")]
        loads = [_transfer(ranks, "loaded", step, done="loaded") for step in _steps(ranks[0], "loaded")]
        return cls(
            name=job.name,
            ranks=job.ranks,
            losses={event["step"]: event["loss"] for event in ranks[0] if event["event"] == "step"},
            saves=tuple(saves),
            load=loads[0] if loads else None,
            killed_at=killed_at,
        )


def _steps(events: list[dict[str, Any]], kind: str) -> list[int]:
    return [event["step"] for event in events if event["event"] == kind]


def _transfer(ranks: list[list[dict[str, Any]]], of: str, step: int, *, done: str) -> Transfer:
    at_step = [event for events in ranks for event in events if event.get("step") == step]
    digests = [event for event in at_step if event["event"] == "digest" and event["of"] == of]
    seconds = [event["seconds"] for event in at_step if event["event"] == done]
    blocked = [event["blocked_seconds"] for event in at_step if event["event"] == "saving"]
    return Transfer(
        step=step,
        # Every rank hashes what it gathered from all; should they differ, this equals nothing.
        sha256=" ".join(sorted({event["sha256"] for event in digests})),
        state_bytes=digests[0]["bytes"],
        seconds=max(seconds) if len(seconds) == len(ranks) else None,
        blocked_seconds=max(blocked) if blocked else None,
    )


@dataclass(slots=True)
class Report:
    """Collects the phases and the checks; `conclude` adds those that compare phases."""

    output: Path
    phases: list[Phase] = field(default_factory=list)
    checks: list[tuple[bool, str]] = field(default_factory=list)

    def add(self, phase: Phase) -> None:
        """The first phase is the uninterrupted run."""
        self.phases.append(phase)

    def check(self, claim: str, *, holds: bool) -> None:
        """Note whether a claim holds."""
        self.checks.append((holds, claim))

    def conclude(self, *, seconds: float) -> int:
        """Check, print, draw; returns the exit status."""
        self._check_restored_states()
        self._check_losses()
        self._draw()
        verdicts = [f"{'PASS' if holds else 'FAIL'}  {claim}" for holds, claim in self.checks]
        lines = [
            *(row.rstrip() for row in self._table()),
            "",
            *verdicts,
            "",
            f"{seconds:.0f} s in all; the curves: {self.output.name}/loss.png",
        ]
        (self.output / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n" + "\n".join(lines), flush=True)
        return 0 if all(holds for holds, _ in self.checks) else 1

    def _check_restored_states(self) -> None:
        for number, phase in enumerate(self.phases):
            if phase.load is not None:
                saved = {
                    save.step: (save.sha256, earlier.ranks)
                    for earlier in self.phases[:number]
                    for save in earlier.saves
                    if save.step != earlier.killed_at
                }
                sha256, ranks = saved.get(phase.load.step, ("", 0))
                claim = (
                    f"{phase.ranks} ranks restored, bit for bit, what {ranks} ranks saved at step {phase.load.step}: "
                    f"model, optimizer, schedule and data position have SHA-256 {phase.load.sha256[:16]}…"
                )
                self.check(claim, holds=phase.load.sha256 == sha256)

    def _check_losses(self) -> None:
        reference, *others = self.phases
        for phase in others:
            steps = f"steps {min(phase.losses)} to {max(phase.losses)}"
            difference = max(abs(loss - reference.losses[step]) for step, loss in phase.losses.items())
            if phase.ranks == reference.ranks:
                claim = f"the loss of {phase.name} is exactly the uninterrupted run's in {steps}"
                self.check(claim, holds=difference == 0.0)
            else:
                claim = f"the loss of {phase.name} is the uninterrupted run's within {LOSS_TOLERANCE:g} in {steps}"
                claim += f" (largest difference {difference:.1e})"
                self.check(claim, holds=difference <= LOSS_TOLERANCE)

    def _table(self) -> Iterator[str]:
        yield f"{'job':<18}{'':<7}{'step':>6}{'ranks':>7}{'bytes':>13}{'seconds':>9}{'training waited':>17}"
        for phase in self.phases:
            transfers = [("load", phase.load)] if phase.load else []
            for what, transfer in [*transfers, *(("save", save) for save in phase.saves)]:
                seconds = f"{transfer.seconds:.2f}" if transfer.seconds is not None else "-"
                seconds = "killed" if what == "save" and transfer.step == phase.killed_at else seconds
                waited = f"{transfer.blocked_seconds:.3f} s" if transfer.blocked_seconds is not None else ""
                yield (
                    f"{phase.name:<18}{what:<7}{transfer.step:>6}{phase.ranks:>7}{transfer.state_bytes:>13,}"
                    f"{seconds:>9}{waited:>17}"
                )

    def _draw(self) -> None:
        reference, *others = self.phases
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(10, 7), sharex=True, height_ratios=(3, 1), layout="constrained"
        )
        label = f"{reference.ranks} ranks, uninterrupted"
        above.plot(*_curve(reference.losses), color="0.8", linewidth=6, label=label)
        for phase, color in zip(others, COLORS, strict=False):
            label = f"{phase.ranks} ranks"
            label += f", resumed at step {phase.loaded_step}" if phase.load else ""
            label += ", killed" if phase.killed_at is not None else ""
            above.plot(*_curve(phase.losses), color=color, linewidth=1.5, label=label)
            differences = {step: abs(loss - reference.losses[step]) for step, loss in phase.losses.items()}
            below.plot(*_curve(differences), color=color, linewidth=1.5)
            if phase.killed_at is not None:
                last = max(phase.losses)
                above.plot(last, phase.losses[last], "X", color=color, markersize=13, zorder=5)
                above.annotate(
                    f"SIGKILL, in the middle\nof the save of step {phase.killed_at}",
                    (last, phase.losses[last]),
                    xytext=(15, 55),
                    textcoords="offset points",
                    arrowprops={"arrowstyle": "->"},
                )
            if phase.loaded_step is not None:
                for axes in (above, below):
                    axes.axvline(phase.loaded_step, color=color, linestyle=":", linewidth=1)
        above.set(ylabel="loss (nats per byte)", title="Training killed in mid-save, resumed at other world sizes")
        above.legend()
        # Linear below the resolution of a float, so that exact agreement, 0, can be seen.
        below.set_yscale("symlog", linthresh=1e-7)
        below.axhline(LOSS_TOLERANCE, color="0.5", linestyle="--", linewidth=1)
        below.set(xlabel="step", ylabel="difference to\nuninterrupted", ylim=(-3e-8, 10 * LOSS_TOLERANCE))
        figure.savefig(self.output / "loss.png", dpi=120)
        plt.close(figure)


def _curve(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return sorted(values), [values[step] for step in sorted(values)]
