"""The first hour with dcp_remote, in a minute: train, stop, resume at another size, change the model, evaluate.

    python examples/first_hour.py                      (in a temporary folder)
    python examples/first_hour.py s3://my-bucket/run   (credentials are those that boto3 finds)

Each chapter is a job of several ranks, on the CPU. All that a training script needs is in `train`; `evaluate` is
another program, which reads the run while the training saves into it and deletes old checkpoints.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_remote import Best, CheckpointManager, Opaque, PerRank, Retention, SavePolicy, open_run, training_state
from dcp_remote.errors import StateMismatchError

BATCH, WIDTH = 12, 64
JOB_SECONDS = 240.0


class Net(nn.Module):
    """Small network; with an adapter, it has parameters that earlier checkpoints lack."""

    def __init__(self, *, adapter: bool = False) -> None:
        """Create the layers."""
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        if adapter:
            self.adapter = nn.Linear(WIDTH, 1, bias=False)
            nn.init.zeros_(self.adapter.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return predictions [batch, 1] for inputs [batch, WIDTH]."""
        y: torch.Tensor = self.body(x)
        return y + self.adapter(x) if hasattr(self, "adapter") else y


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [BATCH, WIDTH] and targets [BATCH, 1] of a step: the same at any number of ranks."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.square().mean(1, keepdim=True)


class Average:
    """Moving average of the loss: an object whose state is empty before the first step."""

    def __init__(self) -> None:
        """Begin without a value."""
        self.values: dict[str, float] = {}

    def update(self, loss: float) -> None:
        """Take the loss of a step."""
        self.values["loss"] = 0.9 * self.values.get("loss", loss) + 0.1 * loss

    def state_dict(self) -> dict[str, float]:
        """Return what is saved."""
        return self.values

    def load_state_dict(self, values: dict[str, float]) -> None:
        """Take what was saved."""
        self.values = dict(values)


@dataclass(frozen=True)
class Chapter:
    """Job of one chapter.

    Attributes:
        ranks: Number of ranks.
        until: Step at which the job ends.
        adapter: True for a model with an adapter.
        missing: Option of `restore`: "error" or "keep".
    """

    ranks: int
    until: int
    adapter: bool = False
    missing: Literal["error", "keep"] = "error"


def train(rank: int, url: str, chapter: Chapter) -> None:
    """Train on one rank from the newest checkpoint to the end of the chapter."""
    world_size = chapter.ranks
    torch.manual_seed(0)
    model = Net(adapter=chapter.adapter)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    average = Average()
    extra = {"best": math.inf, "history": Opaque({}), "average": Opaque(average), "seen": PerRank(0)}
    state = training_state(model=model, optimizer=optimizer, scheduler=scheduler, extra=extra)
    with CheckpointManager(
        url, save_policy=SavePolicy(every_steps=5), retention=Retention(keep_last=2, keep_best=Best("loss"))
    ) as checkpoints:
        try:
            step = checkpoints.restore(state, missing=chapter.missing) or 0
        except StateMismatchError as error:
            if rank == 0:
                print(f"    refused: {error}", flush=True)
            return
        best, history, seen = state["best"], state["history"].value, state["seen"].value
        if rank == 0:
            values = f"best {best:.3f} of {list(history)}, average {average.values}, {seen} samples seen"
            print(f"    {world_size} ranks begin at step {step}; {values}", flush=True)
        while step < chapter.until and not checkpoints.should_stop:
            x, y = (part.chunk(world_size)[rank] for part in batch_of(step))
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            dist.all_reduce(loss.detach())  # so that all ranks have the same
            average.update(loss.item() / world_size)
            best, seen = min(best, loss.item() / world_size), seen + len(x)
            if checkpoints.should_save(step):
                history[step] = best
                state |= {"best": best, "history": Opaque(history), "seen": PerRank(seen)}
                checkpoints.save(step, state, metrics=average.values)
    if rank == 0:
        steps = [info.step for info in open_run(url).checkpoints()]
        print(f"    stopped at step {step}; checkpoints: {steps}", flush=True)


def evaluate(url: str, step: int, until: int) -> None:
    """Evaluate the checkpoints that a training saves after a step, up to step `until`."""
    run = open_run(url)
    while step < until:
        newest = run.wait_for_newer(step, timeout_seconds=JOB_SECONDS, poll_seconds=0.5)
        if newest is None:
            raise SystemExit(f"No checkpoint after step {step} within {JOB_SECONDS:g} s.")
        step = newest.step
        model = Net(adapter=True)
        model.load_state_dict(run.load(step, include="model.*")["model"])
        x, y = batch_of(-1)
        with torch.no_grad():
            print(f"    step {step}: loss {nn.functional.mse_loss(model(x), y).item():.4f}", flush=True)


# ---- jobs: torchrun would start the ranks of a real one


def begin(function: Callable[..., None], *args: Any) -> Any:
    """Start a function in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "dcp_remote.manager.manager"])  # imported once for all
    process = context.Process(target=function, args=args)
    process.start()
    return process


def end(processes: list[Any]) -> None:
    """Wait for processes; raise if one failed."""
    for process in processes:
        process.join(JOB_SECONDS)
    failed = [process.exitcode for process in processes if process.exitcode != 0]
    for process in processes:
        process.kill()
    if failed:
        raise SystemExit(f"A process of this chapter failed; exit status {failed[0]}.")


def run_rank(rank: int, port: int, url: str, chapter: Chapter) -> None:
    """Run `train` as one rank."""
    logging.basicConfig(format="    %(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=chapter.ranks)
    train(rank, url, chapter)
    dist.destroy_process_group()


def job(url: str, chapter: Chapter) -> list[Any]:
    """Start the ranks of a job, as torchrun would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [begin(run_rank, rank, port, url, chapter) for rank in range(chapter.ranks)]


def main(url: str) -> None:
    """Run the chapters."""
    print(f"The run is {url}")
    print("1. Two ranks train, and are stopped at step 12, two steps after a checkpoint.")
    end(job(url, Chapter(ranks=2, until=12)))
    print("2. Three ranks resume from step 10.")
    end(job(url, Chapter(ranks=3, until=20)))
    print("3. The model gets an adapter. A restore lists what the checkpoint lacks:")
    end(job(url, Chapter(ranks=1, until=20, adapter=True)))
    print('4. With missing="keep" the adapter keeps its first values. A second process evaluates meanwhile.')
    end([*job(url, Chapter(ranks=2, until=40, adapter=True, missing="keep")), begin(evaluate, url, 20, 40)])
    run = open_run(url)
    best = run.best("loss")
    print(f"Checkpoints: {[info.step for info in run.checkpoints()]}; the best is step {best.step if best else None}.")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main((Path(folder) / "run").as_uri())
