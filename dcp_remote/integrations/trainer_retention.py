"""Retention of the checkpoints of a Trainer: `save_total_limit`, by which the best model stays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_remote import CheckpointInfo
from dcp_remote.errors import InvalidArgumentError

# Metric of each checkpoint by which retention knows the step of the best model.
BEST_STEP_METRIC = "best_global_step"


@dataclass(frozen=True, slots=True)
class KeepLatest:
    """Retention of `save_total_limit`: the newest checkpoints, among them that of the best model; and the named.

    Attributes:
        count: Number of checkpoints to keep, without those that a user has named; two at least where the best is not
            the newest.
    """

    count: int

    def __call__(self, checkpoints: Sequence[CheckpointInfo]) -> list[int]:
        """Return the steps to delete."""
        steps = [info.step for info in checkpoints]
        best = dict(checkpoints[-1].metrics).get(BEST_STEP_METRIC)
        kept = {steps[-1]} | ({int(best)} & set(steps) if best is not None else set())
        free = max(self.count - len(kept), 0)
        kept |= {info.step for info in checkpoints if {*info.names} - {f"checkpoint-{info.step}"}}  # named by the user
        others = [step for step in steps if step not in kept]
        return others[: max(len(others) - free, 0)]


def with_retention(save_total_limit: int | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the retention that `save_total_limit` asks for."""
    if save_total_limit is None or save_total_limit <= 0:
        return dict(settings)
    if settings.get("retention") is not None:
        raise InvalidArgumentError(
            "save_total_limit and retention exclude each other: pass one of them.", save_total_limit=save_total_limit
        )
    return {**settings, "retention": KeepLatest(save_total_limit)}


def metrics_of(state: Any) -> dict[str, float]:
    """Return the numbers that were logged at this step, and the step of the best checkpoint."""
    logged = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    metrics = {
        name: float(value)
        for entry in logged
        for name, value in entry.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }
    best = (state.best_model_checkpoint or "").rpartition("checkpoint-")[2]
    return metrics | ({BEST_STEP_METRIC: float(best)} if best.isdecimal() else {})
