"""Train with Fabric under FSDP2, with checkpoints in object storage; the marked lines are new.

    torchrun --nproc-per-node 2 examples/fabric.py s3://bucket/run

Killed at any moment and started again, also on another number of ranks, training goes on from the newest checkpoint.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard

from dcp_remote import latest  # dcp_remote
from dcp_remote.integrations.fabric import RemoteModelParallelStrategy  # dcp_remote

STEPS, SAVE_EVERY = 100, 20


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Shard a model over the ranks."""
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


@record  # torchrun's summary names the error of the rank that failed first
def main() -> None:
    """Train a hundred steps, with a checkpoint after every twenty."""
    url, has_gpu, ranks = sys.argv[1], torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", "1"))
    backend = None if has_gpu else "gloo"
    strategy = RemoteModelParallelStrategy(shard, ranks, 1, process_group_backend=backend)  # dcp_remote
    accelerator = "auto" if has_gpu else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if latest(url) is not None:
        fabric.load(url, state)
    generator = torch.Generator().manual_seed(state["step"])
    while state["step"] < STEPS:
        inputs = torch.randn(16, 16, generator=generator).to(fabric.device)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] % SAVE_EVERY == 0:
            fabric.save(f"{url}/step-{state['step']}.ckpt", state)
            fabric.print(f"step {state['step']}, loss {loss.item():.4f}")
    fabric.print(f"trained to step {state['step']}")


if __name__ == "__main__":
    main()
