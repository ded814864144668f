"""The older FSDP, `FullyShardedDataParallel`: its sharded state dicts, of ShardedTensors and of DTensors.

Saved by two real ranks; loaded by three, by two, and by one process without a template. What is held by the ranks that
saved, and by those that loaded, is put together and must be equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from dcp_remote import RemoteReader, RemoteWriter, load
from tests.support.rank_pool import RankPool
from tests.support.training import Leaves, assert_same, full, gathered

pytestmark = pytest.mark.torture

State: TypeAlias = dict[str, Any]

# What the sharded tensors of a state dict are, by whether FSDP was given a device mesh.
KINDS: dict[str, type] = {"ShardedTensor": ShardedTensor, "DTensor": DTensor}


class Training:
    """Three layers with buffers, of sizes that neither two nor three ranks share evenly, and AdamW; one step done.

    Every rank has rows of every tensor: of a ShardedTensor without any, torch's planner makes a missing name.
    """

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if kind == "DTensor" else None
        model = nn.Sequential(self._sharded(nn.Linear(5, 7), mesh), nn.BatchNorm1d(7), nn.Linear(7, 5))
        self.model = self._sharded(model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 / seed)
        self.step()

    @staticmethod
    def _sharded(module: nn.Module, mesh: Any) -> FullyShardedDataParallel:
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(module, device_mesh=mesh, device_id=cpu, use_orig_params=True)

    def step(self) -> None:
        """On the same inputs on every rank, for the buffers are each rank's own."""
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def state(self) -> State:
        """This rank's shards."""
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.SHARDED_STATE_DICT):
            optim = FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer)
            return {"model": self.model.state_dict(), "optim": optim}

    def full(self) -> Leaves:
        """Every tensor whole, on every rank; a collective."""
        return full(gathered(self.state()))

    def restore(self, state: State) -> None:
        """Take over what was loaded."""
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.SHARDED_STATE_DICT):
            self.model.load_state_dict(state["model"])
            optim = FullyShardedDataParallel.optim_state_dict_to_load(self.model, self.optimizer, state["optim"])
        self.optimizer.load_state_dict(optim)


def save(kind: str, url: str) -> Leaves:
    training = Training(kind, seed=1)
    state = training.state()
    sharded = [*state["model"].values(), *(s["exp_avg"] for s in state["optim"]["state"].values())]
    assert {type(value) for value in sharded} == {KINDS[kind], torch.Tensor}  # the buffers are plain
    dcp.save(state, storage_writer=RemoteWriter(url))
    return training.full()


def restore(kind: str, url: str) -> Leaves:
    training = Training(kind, seed=2)
    before = training.full()
    state = training.state()
    dcp.load(state, storage_reader=RemoteReader(url))
    training.restore(state)
    after = training.full()
    assert not torch.equal(after["/model/0.weight"], before["/model/0.weight"])
    return after


def restore_by_torchs_own_loader(url: str) -> Leaves:
    """As torch's documentation of it has it: the model by a template, the optimizer from metadata alone."""
    training = Training("ShardedTensor", seed=2)
    state = {"model": training.state()["model"]}
    dcp.load(state, storage_reader=RemoteReader(url))
    optim = load_sharded_optimizer_state_dict(state["model"], "optim", RemoteReader(url))
    training.restore(state | optim)
    return training.full()


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_saved_any_number_loads(kind: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """By three ranks and by two, of either kind; and whole, by `load`. Model and optimizer, bit for bit."""
    url = tmp_path.as_uri()
    expected, *others = rank_pool.run(save, kind, url, ranks=(0, 1))
    for other in others:
        assert_same(other, expected)
    for loading in KINDS:
        for ranks in ((0, 1, 2), (0, 1)):
            for state in rank_pool.run(restore, loading, url, ranks=ranks):
                assert_same(state, expected, f"{loading} {ranks}")
    assert_same(full(load(url)), expected)


def test_torchs_loader_of_sharded_optimizers(rank_pool: RankPool, tmp_path: Path) -> None:
    """`load_sharded_optimizer_state_dict` on three ranks: a bare `read_metadata`, and a load after a bare `reset`."""
    url = tmp_path.as_uri()
    expected = rank_pool.run(save, "ShardedTensor", url, ranks=(0, 1))[0]
    for state in rank_pool.run(restore_by_torchs_own_loader, url, ranks=(0, 1, 2)):
        assert_same(state, expected)
