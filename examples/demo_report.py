"""Report of the demo: its checks, its table and its picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import matplotlib as mpl

from demo_job import Job

mpl.use("Agg")  # there may be no display
from matplotlib import pyplot as plt

# Another number of ranks adds the same numbers in another order, which changes the loss by up to 5e-7 (measured). A
# skipped batch, or an optimizer that begins anew, changes it by 2e-3 to 1e-1 from the second step on (measured).
LOSS_TOLERANCE = 1e-4
COLORS = ("tab:red", "tab:purple", "tab:blue", "tab:green", "tab:orange", "tab:brown")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One save or load.

    Attributes:
        step: Step that was saved or loaded.
        ranks: Number of ranks.
        sha256: Digest of the whole state, taken at the save, or after the load.
        state_bytes: Size of the whole state's tensors, in bytes.
        seconds: Seconds from the call to the commit, or to the restored state on the slowest rank; None if not known,
            as for the last save of a job that was killed.
        blocked_seconds: Seconds for which a save blocked training; None for a load.
        lost: Reason why a save was not committed; None if it was.
    """

    step: int
    ranks: int
    sha256: str
    state_bytes: int
    seconds: float | None = None
    blocked_seconds: float | None = None
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """Losses, saves and load of one job; `end` says how it ended, None if at its last step."""

    name: str
    ranks: int
    losses: Mapping[int, float]
    saves: tuple[Transfer, ...]
    load: Transfer | None
    end: str | None = None

    @property
    def loaded_step(self) -> int | None:
        """Step from which the job resumed; None if it did not."""
        return self.load.step if self.load else None

    @classmethod
    def of(cls, job: Job, *, lost: Mapping[int, str] | None = None, end: str | None = None) -> Self:
        """Read the events of every rank. `lost` gives the steps whose save was not committed, and the reasons."""
        ranks = [job.events(rank) for rank in range(job.ranks)]
        saves = (_transfer(ranks, "saving", step, done="saved") for step in _steps(ranks[0], "saving"))
        loads = [_transfer(ranks, "loaded", step, done="loaded") for step in _steps(ranks[0], "loaded")]
        return cls(
            name=job.name,
            ranks=job.ranks,
            losses={event["step"]: event["loss"] for event in ranks[0] if event["event"] == "step"},
            saves=tuple(replace(save, lost=(lost or {}).get(save.step)) for save in saves),
            load=loads[0] if loads else None,
            end=end,
        )


def _steps(events: list[dict[str, Any]], of: str) -> list[int]:
    return [event["step"] for event in events if event["event"] == "digest" and event["of"] == of]


def _transfer(ranks: list[list[dict[str, Any]]], of: str, step: int, *, done: str) -> Transfer:
    at_step = [event for events in ranks for event in events if event.get("step") == step]
    digests = [event for event in at_step if event["event"] == "digest" and event["of"] == of]
    phases = [event["seconds"] for event in at_step if event["event"] == done]
    blocked = [seconds["waiting"] + seconds["staging"] for seconds in phases if "staging" in seconds]
    return Transfer(
        step=step,
        ranks=len(ranks),
        # Every rank hashes the gathered state. If the digests differ, the joined text equals no digest.
        sha256=" ".join(sorted({event["sha256"] for event in digests})),
        state_bytes=digests[0]["bytes"],
        seconds=max((sum(seconds.values()) for seconds in phases), default=None),
        blocked_seconds=max(blocked, default=None),
    )


@dataclass(slots=True)
class Report:
    """Phases and checks of the demo; `conclude` adds the checks that compare phases."""

    output: Path
    phases: list[Phase] = field(default_factory=list)
    checks: list[tuple[bool, str]] = field(default_factory=list)

    def add(self, phase: Phase, *, resumed_from: int | None) -> None:
        """Add a job, and check that it resumed from this step. The first is the uninterrupted run."""
        if resumed_from is not None:
            saved, load = self.saved().get(resumed_from), phase.load
            claim = f"{phase.ranks} ranks resumed from step {resumed_from}, the newest checkpoint"
            self.check(claim, holds=phase.loaded_step == resumed_from)
            if saved is not None and load is not None:
                claim = (
                    f"{phase.ranks} ranks restored, bit for bit, what {saved.ranks} ranks saved at step {saved.step}: "
                    f"model, optimizer, schedule and data position have SHA-256 {load.sha256[:16]}…"
                )
                self.check(claim, holds=load.sha256 == saved.sha256)
        elif phase.load is not None:
            self.check(f"{phase.name} began from nothing", holds=False)
        self.phases.append(phase)

    def saved(self) -> dict[int, Transfer]:
        """Return the saves that were committed so far, by step."""
        return {save.step: save for phase in self.phases for save in phase.saves if save.lost is None}

    def check(self, claim: str, *, holds: bool) -> None:
        """Record whether a claim holds."""
        self.checks.append((holds, claim))

    def conclude(self, *, seconds: float) -> int:
        """Check the losses, draw the picture, print the report, and return the exit status."""
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

    def _check_losses(self) -> None:
        reference, *others = self.phases
        for phase in others:
            if not phase.losses:
                self.check(f"{phase.name} trained", holds=False)
                continue
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
                waited = f"{transfer.blocked_seconds:.3f} s" if transfer.blocked_seconds is not None else ""
                yield (
                    f"{phase.name:<18}{what:<7}{transfer.step:>6}{phase.ranks:>7}{transfer.state_bytes:>13,}"
                    f"{transfer.lost or seconds:>9}{waited:>17}"
                )

    def _draw(self) -> None:
        reference, *others = self.phases
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(10, 7), sharex=True, height_ratios=(3, 1), layout="constrained"
        )
        label = f"{reference.ranks} ranks, uninterrupted"
        above.plot(*_curve(reference.losses), color="0.8", linewidth=6, label=label)
        for number, (phase, color) in enumerate(zip(others, COLORS, strict=False)):
            label = f"{phase.ranks} ranks"
            label += f", resumed at step {phase.loaded_step}" if phase.load else ""
            above.plot(*_curve(phase.losses), color=color, linewidth=1.5, label=label)
            differences = {step: abs(loss - reference.losses[step]) for step, loss in phase.losses.items()}
            below.plot(*_curve(differences), color=color, linewidth=1.5)
            if phase.end is not None and phase.losses:
                last = max(phase.losses)
                above.plot(last, phase.losses[last], "X", color=color, markersize=13, zorder=5)
                above.annotate(
                    phase.end,
                    (last, phase.losses[last]),
                    xytext=(15, 40 + 40 * number),
                    textcoords="offset points",
                    arrowprops={"arrowstyle": "->"},
                )
            if phase.loaded_step is not None:
                for axes in (above, below):
                    axes.axvline(phase.loaded_step, color=color, linestyle=":", linewidth=1)
        above.set(
            ylabel="loss (nats per byte)",
            title="Killed in mid-save, hung, preempted; resumed at other sizes",
        )
        above.legend()
        # Linear below the resolution of a float, so that exact agreement (0) is visible.
        below.set_yscale("symlog", linthresh=1e-7)
        below.axhline(LOSS_TOLERANCE, color="0.5", linestyle="--", linewidth=1)
        below.set(xlabel="step", ylabel="difference to\nuninterrupted", ylim=(-3e-8, 10 * LOSS_TOLERANCE))
        figure.savefig(self.output / "loss.png", dpi=120)
        plt.close(figure)


def _curve(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return sorted(values), [values[step] for step in sorted(values)]
