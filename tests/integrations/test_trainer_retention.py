"""Retention of a Trainer's checkpoints."""

from __future__ import annotations

from dcp_remote import CheckpointInfo
from dcp_remote.integrations.trainer_retention import BEST_STEP_METRIC, KeepLatest


def test_the_newest_the_best_and_those_of_the_user_stay() -> None:
    """The name that each checkpoint has of itself keeps none; what a user has named does not count."""
    names = {4: ("checkpoint-4", "gold"), 6: ("best",)}
    checkpoints = [
        CheckpointInfo(
            step=step,
            save_id=str(step),
            created="",
            size_bytes=0,
            names=names.get(step, (f"checkpoint-{step}",)),
            metrics={BEST_STEP_METRIC: 2.0},
            pinned=False,
            thinned=(),
            abandoned=False,
        )
        for step in (2, 4, 6, 8, 10)
    ]
    assert KeepLatest(1)(checkpoints) == [8]
    assert KeepLatest(3)(checkpoints) == []
