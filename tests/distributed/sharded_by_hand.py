"""Train with an optimizer that keeps 1/N of each state on each rank. Arguments: URL of the run, and what the job does.

`whole` saves nothing, `killed` dies while its second save goes on, `resumed` goes on, and `unmarked` has no `PerRank`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dcp_remote import CheckpointManager, PerRank, training_state
from dcp_remote.errors import InvalidArgumentError
from tests.support.rank_programs import leave_process_group, report


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


def train(url: str, job: str) -> None:
    """Train for six steps, with a save at every second one; report losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = ShardedSGD(model.parameters())
    state = training_state(model=model, optimizer=optimizer, random_states=False)
    if job != "unmarked":
        state["optim"] = PerRank(optimizer)
    losses: dict[int, float] = {}
    with CheckpointManager(url, storage_options={"upload_bytes_per_second": 100_000}) as checkpoints:
        begun = checkpoints.restore(state) or 0
        for step in range(begun + 1, 7):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            loss = model(torch.randn(3, 8, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            if job == "whole" or step % 2:
                continue
            try:
                checkpoints.save(step, state, wait=job == "unmarked" or step == 2)
            except InvalidArgumentError as error:
                report(error=str(error))
                return
            if job == "killed" and step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
    report(begun=begun, losses=losses)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(*sys.argv[1:])
    leave_process_group()
