"""Flat partitions on real ranks: saved by three, restored by two, and exchanged with DTensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_remote import load
from tests.distributed.flat_partitions import (
    parameters,
    restore_dtensors,
    restore_partitions,
    save_dtensors,
    save_incomplete,
    save_partitions,
)
from tests.support.rank_pool import RankPool


@pytest.mark.parametrize("wait", [False, True], ids=["background", "waited for"])
def test_flat_partitions(wait: bool, rank_pool: RankPool, tmp_path: Path) -> None:
    """Plans are columns, exchanged once; what is loaded is equal bit for bit: as partitions, whole, as DTensors."""
    assert rank_pool.run(save_partitions, tmp_path, wait, ranks=(0, 1, 2)) == [[1, 0]] * 3
    for step in (1, 2):
        loaded = load(tmp_path, step=step)["model"]
        assert loaded.keys() == parameters(step).keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in parameters(step).items())
        assert rank_pool.run(restore_partitions, tmp_path, step, ranks=(0, 1)) == [True] * 2
    assert rank_pool.run(restore_dtensors, tmp_path, 2, ranks=(0, 1)) == [True] * 2


def test_flat_partitions_of_dtensors(rank_pool: RankPool, tmp_path: Path) -> None:
    """Saved as FSDP2 holds them by three ranks; restored as flat partitions by two."""
    rank_pool.run(save_dtensors, tmp_path, ranks=(0, 1, 2))
    assert rank_pool.run(restore_partitions, tmp_path, 1, ranks=(0, 1)) == [True] * 2


def test_parts_that_no_rank_has(rank_pool: RankPool, tmp_path: Path) -> None:
    """A gap, and a tensor without any box, are named on every rank; nothing is uploaded."""
    for gap, none in rank_pool.run(save_incomplete, tmp_path, ranks=(0, 1, 2)):
        assert "4 of 12 elements are in no chunk" in gap
        assert "No rank holds any part of a tensor" in none
    assert not [path for path in tmp_path.rglob("*") if "shards" in path.name]
