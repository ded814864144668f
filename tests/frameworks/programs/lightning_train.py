"""Train a small module with Lightning's Trainer, once for each job of an option file; report losses and digests."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dcp_remote.errors import DcpRemoteError
from dcp_remote.integrations.runs import close_managers
from lightning_models import ENVIRONMENT, RANK, WORLD_SIZE, digests_of, make_accelerator, make_strategy
from tests.support.rank_programs import leave_process_group, report

logging.basicConfig(level=logging.INFO)


@dataclass
class Width:
    """Hyperparameter that is no plain value."""

    hidden: int = 5


class Module(pl.LightningModule):  # type: ignore[misc]  # Lightning may not be installed
    """Two layers of odd sizes, so that shards are uneven and one is empty."""

    def __init__(self, width: Width, activation: Any, *, sharding: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, width.hidden), nn.Linear(width.hidden, 2, bias=False)
        self.activation, self.sharding = activation, sharding
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.sharding == "fsdp2" and not hasattr(self, "is_sharded"):
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            for layer in (self.first, self.second):
                fully_shard(layer, mesh=mesh)
            fully_shard(self, mesh=mesh)
            self.is_sharded = True

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.second(self.activation(self.first(batch[0]))).square().mean() + torch.rand(()) * 0
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


class StatefulLoader:
    """Data loader whose position differs between ranks, as torchdata's `StatefulDataLoader`."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count, self.position = rank, count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        while self.position < self.count:
            self.position += 1
            generator = torch.Generator().manual_seed(100 * self.rank + self.position)
            yield [torch.randn(3, 8, generator=generator)]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self.rank, "the position of another rank"
        self.position = state["position"]


class Counter(Callback):  # type: ignore[misc]  # Lightning may not be installed
    """Callback with a state."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, *arguments: Any, **options: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Watch(Callback):  # type: ignore[misc]  # Lightning may not be installed
    """Callback that notes digests, and kills this process in the middle of a save."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.digests: dict[int, dict[str, str]] = {}

    def note(self, trainer: Any) -> None:
        self.digests[trainer.global_step] = digests_of(trainer.strategy, trainer.strategy.model, trainer.optimizers)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.note(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        step = trainer.global_step
        if step in self.options.get("digest_at", []):
            self.note(trainer)
        if step == self.options.get("kill_at"):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if step == self.options.get("save_on_rank_0_at") and trainer.is_global_zero:
            trainer.save_checkpoint(f"{self.options['url']}/alone.ckpt")
        if step == self.options.get("fail_at") and trainer.global_rank == 1:
            raise ValueError("boo")


def run(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train once; return what the test compares."""
    os.environ.update(ENVIRONMENT)
    torch.manual_seed(7 + RANK)
    mode, url = options["mode"], options.get("url")
    world_size = 1 if mode == "plain" else WORLD_SIZE
    is_remote = url is not None and not options.get("stock")
    strategy = make_strategy(mode, dict(options.get("settings") or {}) if is_remote else None)
    watch, counter = Watch(options), Counter()
    callbacks: list[Any] = [counter, watch]
    saver = None
    if url is not None:
        saver = ModelCheckpoint(dirpath=url, **{"every_n_train_steps": 2, "save_top_k": -1, **options.get("saver", {})})
        callbacks.append(saver)
    if options.get("without_counter"):
        callbacks.remove(counter)
    trainer = pl.Trainer(
        accelerator=make_accelerator(mode),
        devices=world_size,
        strategy=strategy,
        callbacks=callbacks,
        max_steps=options.get("max_steps", 6),
        logger=False,
        enable_checkpointing=url is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=str(folder),
    )
    module = Module(Width(), partial(torch.nn.functional.leaky_relu, negative_slope=0.1), sharding=mode)
    if options.get("stateful"):
        data: Any = StatefulLoader(RANK, 8)
    else:
        generator = torch.Generator().manual_seed(RANK)
        data = DataLoader(TensorDataset(torch.randn(24, 8, generator=generator)), batch_size=3)
    outcome: dict[str, Any] = {}
    try:
        if options.get("validate"):
            strategy.connect(module)
        trainer.fit(module, data, ckpt_path=options.get("ckpt_path"))
    except (DcpRemoteError, ValueError) as error:
        if not options.get("expects_error"):
            raise
        outcome["error"] = f"{type(error).__name__}: {error}"
    return outcome | {
        "losses": module.losses,
        "digests": watch.digests,
        "count": counter.count,
        "best": saver.best_model_path if saver is not None else None,
        "local": sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt")),
    }


def main() -> None:
    """Run the jobs of the option file, each reported by its name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("options", type=Path)
    jobs = json.loads(parser.parse_args().options.read_text())
    for name, options in jobs.items():
        folder = Path(f"job-{name}-{RANK}")
        folder.mkdir()
        report(**{name: run(options, folder)})
        close_managers()
    leave_process_group()


if __name__ == "__main__":
    main()
