"""A plain loop whose optimizer keeps 1/N of each state on each rank: by `PerRank`, and refused without."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dcp_remote import PerRank, open_run, training_state
from tests.distributed.managed import Ended, ended, managing
from tests.support.rank_pool import RankPool, RanksFailedError

PAIR = range(2)


class ShardedSGD(torch.optim.Optimizer):
    """SGD with momentum, as nanochat's optimizers: a rank has the momentum of its rows, and updates them for all."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad)
                grad, rows = (
                    value.chunk(dist.get_world_size())[dist.get_rank()] for value in (parameter.grad, parameter)
                )
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(grad))
                momentum.mul_(group["momentum"]).add_(grad)
                parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, rows - group["lr"] * momentum)
                parameter.copy_(torch.cat(parts))


def train(path: Path, *, is_marked: bool, is_killed: bool) -> tuple[int, dict[int, float]]:
    """Train for six steps, with a save at every second one; return the step that was restored, and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = ShardedSGD(model.parameters())
    state = training_state(model=model, optimizer=optimizer, random_states=False)
    if is_marked:
        state["optim"] = PerRank(optimizer)
    losses: dict[int, float] = {}
    with managing(path, storage_options={"upload_bytes_per_second": 100_000}) as checkpoints:
        begun = checkpoints.restore(state) or 0
        for step in range(begun + 1, 7):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            loss = model(torch.randn(3, 8, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            if step % 2 == 0:
                checkpoints.save(step, state, wait=step == 2)
            if is_killed and step == 4:  # while its second save goes on
                os.kill(os.getpid(), signal.SIGKILL)
    return begun, losses


def train_whole(path: Path) -> tuple[int, dict[int, float]]:
    return train(path, is_marked=True, is_killed=False)


def train_killed(path: Path) -> tuple[int, dict[int, float]]:
    return train(path, is_marked=True, is_killed=True)


def train_unmarked(path: Path) -> Ended | None:
    return ended(lambda: train(path, is_marked=False, is_killed=False))


def test_an_optimizer_that_is_sharded_by_hand(rank_pool: RankPool, tmp_path: Path) -> None:
    """Killed in a save, a job goes on to the bit on as many ranks; without `PerRank` its first save is refused."""
    whole = rank_pool.run(train_whole, tmp_path / "whole", ranks=PAIR)
    with pytest.raises(RanksFailedError) as killed:
        rank_pool.run(train_killed, tmp_path / "run", ranks=PAIR)
    assert [failure.signal for failure in killed.value.failures.values()] == [signal.SIGKILL] * 2
    for (_, losses), (begun, after) in zip(
        whole, rank_pool.run(train_whole, tmp_path / "run", ranks=PAIR), strict=True
    ):
        assert begun in {2, 4}
        assert after == {step: loss for step, loss in losses.items() if step > begun}
    for refused in rank_pool.run(train_unmarked, tmp_path / "unmarked", ranks=PAIR):
        assert refused is not None
        assert "optim.state.0.weight.momentum: one value on rank 0, another on rank 1" in refused.text
        assert "Options: PerRank(optimizer) in the state saves the parts of all ranks" in refused.text
    assert open_run(tmp_path / "unmarked").latest() is None
