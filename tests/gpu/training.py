"""A training on a GPU, alone in its process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

# "cpu" tries the tests themselves on a machine without a GPU.
DEVICE = os.environ.get("DCP_REMOTE_TEST_DEVICE", "cuda")

WIDTH = 1024


def begin_process_group() -> None:
    """Begin a process group of one rank: NCCL on a GPU."""
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


class Training:
    """A model of some layers with statistics, its optimizer, and the function that computes its loss."""

    def __init__(self, *, layers: int = 3, is_sharded: bool = False, is_compiled: bool = False, **options: Any) -> None:
        """Make a model and make one step, so that the optimizer has its moments.

        Args:
            layers: Linear layers, of `WIDTH` inputs and outputs each.
            is_sharded: Use FSDP2. Needs a process group.
            is_compiled: Compile the model and the optimizer's step.
            options: Of AdamW.
        """
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(layers)]
        self.model = nn.Sequential(*blocks).to(DEVICE)
        if is_sharded:
            mesh = init_device_mesh(DEVICE, (1,))
            for block in self.model:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=0.1, **options)
        self._forward: Callable[..., Any] = torch.compile(self.model) if is_compiled else self.model
        self._step: Callable[[], Any] = torch.compile(self.optimizer.step) if is_compiled else self.optimizer.step
        self.train()

    @property
    def state(self) -> dict[str, Any]:
        """State for a checkpoint: the model and its optimizer."""
        return {"model": self.model, "optim": self.optimizer}

    def train(self) -> None:
        """Make one step."""
        self._forward(torch.randn(8, WIDTH, device=DEVICE)).square().mean().backward()
        self._step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        """Wait for the work that is queued on the GPU."""
        if DEVICE == "cuda":
            torch.cuda.synchronize()
