"""Train with Lightning's Trainer under FSDP2, with checkpoints in object storage; the three marked lines are new.

    torchrun --nproc-per-node 2 examples/lightning_fsdp.py s3://bucket/run

Killed at any moment and started again, also on another number of ranks, training goes on from the newest checkpoint.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from dcp_remote.integrations.lightning import RemoteModelParallelStrategy  # dcp_remote


class Regression(LightningModule):  # type: ignore[misc]  # Lightning may not be installed
    """Two layers that learn the sum of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        self.is_sharded = False

    def configure_model(self) -> None:
        """Shard the model over the ranks, once."""
        if not self.is_sharded:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])
            self.is_sharded = True

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, sums = batch
        loss: torch.Tensor = (self.layers(inputs) - sums).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the sharded parameters."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@record  # torchrun's summary names the error of the rank that failed first
def main() -> None:
    """Train ten epochs, each of which ends with a checkpoint."""
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    has_gpu, ranks = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        accelerator="auto" if has_gpu else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=RemoteModelParallelStrategy(  # dcp_remote
            data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend=None if has_gpu else "gloo"
        ),
        callbacks=[ModelCheckpoint(dirpath=sys.argv[1], save_last=True)],  # dcp_remote
        max_epochs=10,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), data, ckpt_path="last")
    if trainer.is_global_zero:
        print(f"trained to step {trainer.global_step}")


if __name__ == "__main__":
    main()
