"""Train a small module with Fabric, once for each job of an option file; report losses and digests."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from dcp_remote import PerRank, RandomStates
from dcp_remote.errors import DcpRemoteError
from dcp_remote.integrations.runs import close_managers
from lightning_models import ENVIRONMENT, RANK, WORLD_SIZE, digests_of, make_accelerator, make_strategy
from tests.support.rank_programs import leave_process_group, report

logging.basicConfig(level=logging.INFO)


class Counts:
    """Object with a state, equal on all ranks."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Loader:
    """Data loader of this rank with a position; ranks of one tensor parallel group read the same."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self) -> Any:
        while True:
            self.position += 1
            yield torch.randn(3, 8, generator=torch.Generator().manual_seed(100 * self.rank + self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "rank": RANK}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == RANK
        self.position = state["position"]


def shard(module: nn.Module, mesh: Any) -> nn.Module:
    """Shard a module by tensor parallelism and FSDP2, as `ModelParallelStrategy` asks for."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if mesh["tensor_parallel"].size() > 1:
        parallelize_module(module, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (module[0], module[2]):  # type: ignore[index]  # an nn.Sequential
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(module, mesh=mesh["data_parallel"])
    return module


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Train once; return what the test compares."""
    os.environ.update(ENVIRONMENT)
    mode, url, counter = options["mode"], options.get("url"), options.get("counter", "step")
    is_stock = options.get("stock") or (url is None and "load" not in options)
    settings, degree = None if is_stock else dict(options.get("settings") or {}), options.get("tensor_parallel", 1)
    parallel = {"data_parallel_size": WORLD_SIZE // degree, "tensor_parallel_size": degree, "parallelize_fn": shard}
    strategy = make_strategy(mode, settings, is_fabric=True, **parallel)
    accelerator = make_accelerator(mode, is_fabric=True)
    fabric = Fabric(accelerator=accelerator, devices=1 if mode == "plain" else WORLD_SIZE, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    hidden = options.get("hidden", 5)
    module = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 2, bias=False))
    if mode == "fsdp2":
        model = fabric.setup_module(module)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
    else:
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    loader, counts = Loader(RANK // degree), Counts()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, counter: 0, "counts": counts, "loader": loader}
    state["random"] = PerRank(RandomStates())
    losses, digests, error = [], {}, None
    try:
        if options.get("load"):
            rest = fabric.load(options["load"], state, strict=not options.get("loose"))
            digests[str(state[counter])] = digests_of(strategy, model._forward_module, [optimizer.optimizer])
            assert not rest or options.get("loose"), rest
        if url is not None and options.get("saves_twice") and state[counter]:  # as nanoGPT's loop
            fabric.save(f"{url}/step-{state[counter]}.ckpt", state)
        while state[counter] < options.get("max_steps", 6):
            loss = model(next(iter(loader))).square().mean() + torch.rand(()) * 0
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            counts.count += 1
            state[counter] += 1
            if url is not None and state[counter] % 2 == 0:
                if options.get("only_rank_0") and RANK:
                    time.sleep(options.get("away_seconds", 0))
                    continue
                fabric.save(f"{url}/step-{state[counter]}.ckpt", state)
        digests[str(state[counter])] = digests_of(strategy, model._forward_module, [optimizer.optimizer])
        if url is not None and options.get("saves_twice"):  # as litgpt, when training has ended
            fabric.save(f"{url}/final-{state[counter]}.ckpt", state)
    except (DcpRemoteError, RuntimeError) as caught:
        if not options.get("expects_error"):
            raise
        error = f"{type(caught).__name__}: {caught}"
    return {"losses": losses, "digests": digests, "count": counts.count, "error": error}


def main() -> None:
    """Run the jobs of the option file, each reported by its name."""
    for name, options in json.loads(Path(sys.argv[1]).read_text()).items():
        report(**{name: run(options)})
        close_managers()
    leave_process_group()


if __name__ == "__main__":
    main()
