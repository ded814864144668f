"""Plans on real ranks: exchanged when the structure changed anywhere, and never otherwise; replicas shared out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_remote import CheckpointManager, load
from dcp_remote.common.units import KiB, MiB
from tests.distributed.planning import (
    ROWS,
    plans_around_failures,
    plans_of_saves,
    share_replicas,
    unlike_replicas,
)
from tests.support.rank_pool import RankPool

# Structures of saves in turn, and how often plans are exchanged for each.
SEQUENCE = [
    ("", 1),
    ("", 0),
    ("", 0),
    ("dtype of one rank", 1),
    ("dtype of one rank", 0),
    ("shape of one rank", 1),
    ("an object of one rank", 1),
    ("a key of one rank", 1),
    ("a key of one rank", 0),
    ("other rows", 1),
    ("other rows", 0),
    ("", 1),
    ("", 0),
]


def assert_holds(path: Path, step: int, change: str, value: int) -> None:
    """As `planned_state` makes it."""
    state = load(path, step=step)
    rows = torch.full((ROWS if change != "other rows" else ROWS + 3, 2), float(value))
    assert torch.equal(state["model"]["rows"], rows)
    assert torch.equal(state["model"]["replicated"], torch.full((5,), float(value)))
    assert (state["step"], state["history"], state["note"]) == (value, list(range(value % 3)), "n" * value)
    own = state["own"]
    assert set(own) - {"more"} == {"0", "1", "2", "3"}
    assert ("more" in own) == (change == "a key of one rank")
    for rank in range(4):
        expected: object = torch.full((rank + 1,), float(value))
        if rank == 2 and change == "dtype of one rank":
            expected = torch.full((3,), float(value), dtype=torch.float64)
        if rank == 2 and change == "shape of one rank":
            expected = torch.full((6,), float(value))
        if rank == 2 and change == "an object of one rank":
            assert own["2"] == f"step {value}"
            continue
        found = own[str(rank)]
        assert isinstance(expected, torch.Tensor)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dedup", [True, False], ids=["dedup", "whole"])
@pytest.mark.parametrize("overwrite", [True, False], ids=["one step", "steps"])
def test_plans_are_exchanged_when_the_structure_changes(
    dedup: bool, overwrite: bool, rank_pool: RankPool, tmp_path: Path
) -> None:
    """On one rank or all; every rank sees the same. What is saved is right each time, and so is what was before."""
    changes = [change for change, _ in SEQUENCE]
    for exchanged in rank_pool.run(plans_of_saves, tmp_path, changes, dedup, overwrite):
        assert exchanged == [count for _, count in SEQUENCE]
    if overwrite:
        assert_holds(tmp_path, 1, changes[-1], len(changes))
        return
    for step, change in enumerate(changes, 1):
        assert_holds(tmp_path, step, change, step)


@pytest.mark.parametrize("victim", [0, 3])
def test_plans_outlive_a_save_that_fails(victim: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """While shards are put, the first time or a later one; while it is planned; and with a plan that is new."""
    for seen in rank_pool.run(plans_around_failures, tmp_path, victim):
        assert [step for step, (_, kind) in enumerate(seen[:5], 1) if kind is None] == [2, 5]
        assert [step for step, (_, kind) in enumerate(seen[5:], 1) if kind is None] == [1, 5]
        assert [count for count, _ in seen] == [1, 0, 0, 1, 0, 1, 0, 0, 1, 0]
    for name, steps in (("True", [2, 5]), ("False", [1, 5])):
        with CheckpointManager(tmp_path / name) as manager:
            assert manager.run.steps() == steps
        for step in steps:
            assert_holds(tmp_path / name, step, "other rows" if step > 3 else "", step)


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
def test_replicas_are_spread_over_their_holders(strategy: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """12 MiB by four ranks, 3 MiB each beside headers and tables; a holder that fails commits nothing."""
    for put, failure in rank_pool.run(share_replicas, tmp_path, strategy):
        assert all(abs(size - 3 * MiB) < 8 * KiB for size in put[:2])
        assert failure is not None
        assert (failure.kind, failure.rank) == ("SaveFailedError", 2)
    with CheckpointManager(tmp_path) as manager:
        assert manager.run.steps() == [1, 2]
    for step in (1, 2):
        wholes = torch.arange(3 * MiB, dtype=torch.float32).reshape(4, 768, 1024) + (step - 1)
        assert torch.equal(torch.stack(load(tmp_path, step=step)["w"]), wholes)


def test_replicas_that_come_to_differ_are_not_mixed(rank_pool: RankPool, tmp_path: Path) -> None:
    """In one value of a million: the checkpoint holds one rank's. Comparing takes a round in the first save alone."""
    unlike = [False, False, True, False]
    for rank in rank_pool.run(unlike_replicas, tmp_path, unlike):
        assert rank == [(3, 1), (2, 0), (2, 0), (2, 0)]
    for step, differs in enumerate(unlike, start=1):
        whole = load(tmp_path, step=step)["w"]
        assert whole[step * 200, 1].item() == (100 if differs else 99)
        whole[step * 200, 1] = step
        assert torch.equal(whole, torch.full((1024, 1024), float(step)))
