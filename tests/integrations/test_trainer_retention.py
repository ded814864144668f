"""Retention of a Trainer's checkpoints, applied after each save as the manager does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcp_remote import CheckpointInfo
from dcp_remote.integrations.trainer_retention import BEST_STEP_METRIC, KeepLatest


def make_info(step: int, best: int | None) -> CheckpointInfo:
    """Return the information of a checkpoint, saved when that of step `best` was the best."""
    metrics = {} if best is None else {BEST_STEP_METRIC: float(best)}
    return CheckpointInfo(step, "id", "2026-01-01T00:00:00Z", 1, (f"checkpoint-{step}",), metrics, False, (), False)


@pytest.mark.parametrize("best", [None, 2, 12])
@pytest.mark.parametrize("count", range(1, 9))
def test_the_newest_stay_and_the_best(count: int, best: int | None) -> None:
    """As many as `save_total_limit` says; before there are as many, none is deleted."""
    kept: list[CheckpointInfo] = []
    for number in range(1, 7):
        step = 2 * number
        kept.append(make_info(step, best if best is not None and best <= step else None))
        gone = KeepLatest(count)(kept)
        kept = [info for info in kept if info.step not in gone]
        steps = [info.step for info in kept]
        if best == 2 and step > best and number > count:
            expected = [2, *range(2 * (number - max(count, 2) + 2), step + 1, 2)]
        else:
            expected = list(range(2 * max(number - count + 1, 1), step + 1, 2))
        assert steps == expected


def test_what_a_user_has_named_stays() -> None:
    """The name that each checkpoint has of itself keeps none; named ones do not count."""
    names = {4: ("checkpoint-4", "gold"), 6: ("best",)}
    infos = [make_info(step, 2) for step in (2, 4, 6, 8, 10)]
    named = [replace(info, names=names.get(info.step, info.names)) for info in infos]
    assert KeepLatest(1)(named) == [8]
    assert KeepLatest(3)(named) == []
