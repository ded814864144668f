"""Failures of one rank under plain `dcp.save` and `dcp.load` are raised on all ranks, with rank, object and cause.

Afterwards the same ranks save and load again. `tests/end_to_end` has every failure, with simulated ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.errors import CheckpointNotFoundError, CorruptCheckpointError, PermissionDeniedError, SaveFailedError
from dcp_remote.storage import LocalStore, ObjectStore
from dcp_remote.storage.wrapper import Verb
from dcp_remote.testing import Fault, FaultyStore
from tests.distributed.managed import sharded
from tests.support.rank_pool import RankPool

State = dict[str, Any]

RANKS = range(3)


def state_of(factor: int) -> State:
    """Return rows of which each rank has some, and a tensor that only this rank has."""
    rank = dist.get_rank()
    return {
        "rows": sharded(torch.arange(60.0).reshape(6, 10) * factor),
        f"rank_{rank}": torch.full((3,), rank * factor),
    }


def save(path: Path, factor: int) -> None:
    dcp.save(state_of(factor), storage_writer=RemoteWriter(path, overwrite=True))


def read(path: Path) -> State:
    state = state_of(0)
    dcp.load(state, storage_reader=RemoteReader(path))
    return state


def failures(path: Path, attempt: Callable[[], object]) -> dict[int, BaseException]:
    """Make an attempt that fails; then save and load in the same group. Return the errors that this rank was told."""
    with pytest.raises(CheckpointException) as caught:
        attempt()
    elsewhere = path.with_name(f"{path.name}-elsewhere")
    save(elsewhere, 4)
    assert torch.equal(read(elsewhere)["rows"].to_local(), state_of(4)["rows"].to_local())
    return {rank: cause for rank, (cause, _) in caught.value.failures.items()}


def is_shard_put(verb: Verb, key: str, _number: int) -> bool:
    return verb == "put" and key.startswith("shards/")


def save_denied(path: Path, in_background: bool) -> dict[int, BaseException]:
    store: ObjectStore = LocalStore(str(path))
    if dist.get_rank() == 1:
        refused = PermissionDeniedError("An injected refusal.")
        store = FaultyStore(store, [Fault(is_shard_put, "request", persistent=True, error=lambda: refused)])
    if not in_background:
        return failures(path, lambda: dcp.save(state_of(1), storage_writer=RemoteWriter(store)))
    group = dist.new_group(backend="gloo")
    saving = dcp.async_save(state_of(1), storage_writer=RemoteWriter(store), process_group=group)
    return failures(path, cast("Future[object]", saving).result)


@pytest.mark.parametrize("in_background", [False, True], ids=["dcp.save", "dcp.async_save"])
def test_a_store_that_refuses_one_rank(in_background: bool, rank_pool: RankPool, tmp_path: Path) -> None:
    for told in rank_pool.run(save_denied, tmp_path, in_background, ranks=RANKS):
        assert list(told) == [1]
        error = told[1]
        assert type(error) is SaveFailedError
        assert (error.details["rank"], error.details["attempts"]) == (1, 1)
        assert (error.details["cause"], "rank-00001" in str(error.details["shard"])) == ("PermissionDeniedError", True)
    with pytest.raises(CheckpointNotFoundError):
        load(tmp_path)
    rank_pool.run(save, tmp_path, 5, ranks=RANKS)
    assert torch.equal(load(tmp_path)["rows"], torch.arange(60.0).reshape(6, 10) * 5)


def read_damaged(path: Path) -> dict[int, BaseException]:
    return failures(path, lambda: read(path))


def test_damage_that_one_rank_reads(rank_pool: RankPool, tmp_path: Path) -> None:
    """A flipped bit in the rows of rank 1, and then no manifest, which each rank finds for itself."""
    rank_pool.run(save, tmp_path, 5, ranks=RANKS)
    (shard,) = [file for file in tmp_path.glob("shards/*/rank-00001-*") if b'"rows' in file.read_bytes()]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for told in rank_pool.run(read_damaged, tmp_path, ranks=RANKS):
        assert list(told) == [1]
        assert isinstance(told[1], CorruptCheckpointError)
        assert shard.name in str(told[1])
    shard.write_bytes(data)
    (tmp_path / "manifest.json").rename(tmp_path / "away")
    for told in rank_pool.run(read_damaged, tmp_path, ranks=RANKS):
        assert [type(told[rank]) for rank in RANKS] == [CheckpointNotFoundError] * 3
    (tmp_path / "away").rename(tmp_path / "manifest.json")
    rank_pool.run(read, tmp_path, ranks=RANKS)
