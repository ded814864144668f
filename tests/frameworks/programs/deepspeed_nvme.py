"""Cases of partitions that ZeRO-3 keeps in files on NVMe; the files lie in the working directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from dcp_remote.integrations.deepspeed import attach
from dcp_remote.integrations.runs import close_managers
from deepspeed_checks import raised
from deepspeed_engines import digests, full_state
from tests.support.rank_programs import report

# Partitions of a rank are swapped from 1 MiB on.
WIDTH = 1024

# Devices of the optimizer's partitions and of the 16-bit parameters' by name of the engine.
OFFLOADS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "optimizer": {"offload_optimizer": {"device": "nvme"}},
    "pipeline": {"offload_optimizer": {"device": "nvme", "pipeline_read": True, "pipeline_write": True}},
    "parameters": {
        "offload_optimizer": {"device": "nvme"},
        "offload_param": {"device": "nvme", "buffer_size": 2 * WIDTH * WIDTH, "max_in_cpu": 0},
    },
    "parameters alone": {
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "nvme", "buffer_size": 2 * WIDTH * WIDTH, "max_in_cpu": 0},
    },
}


def make_swapped(name: str, *, seed: int) -> Any:
    """Return an engine of stage 3 with layers large enough to be swapped, one of them frozen, and small ones."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 8))
    model[1].requires_grad_(requires_grad=False)
    folder = str(Path("nvme").absolute())
    offloads = {
        key: value | ({"nvme_path": folder} if value["device"] == "nvme" else {})
        for key, value in OFFLOADS[name].items()
    }
    config = {
        "train_batch_size": dist.get_world_size(),
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 300_000,
            "memory_efficient_linear": False,
            "stage3_param_persistence_threshold": 100,
            **offloads,
        },
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=0.01), config=config)
    return engine


def train_swapped(engine: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(engine.global_steps)).bfloat16()
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def partitions_on_nvme(url: str) -> None:
    """Saved and loaded from and to files and memory; DeepSpeed's own functions read the state that is compared."""
    expected: dict[str, Any] = {}
    for name in OFFLOADS:
        engine = make_swapped(name, seed=0)
        attach(engine, wait=name != "optimizer", progress=False)
        train_swapped(engine, 2)
        numbers = range(len(engine.optimizer.fp32_partitioned_groups_flat))
        is_swapped = [engine.optimizer._swappable_optimizer_subgroup(number) for number in numbers]
        assert any(is_swapped) is ("alone" not in name and name != "cpu"), (name, is_swapped)
        engine.save_checkpoint(f"{url}/{name.replace(' ', '-')}")
        expected[name] = digests(full_state(engine)), train_swapped(engine, 3)
        engine.destroy()
        close_managers()
    loaded = []
    for source, target in (
        *(("cpu", name) for name in OFFLOADS),
        *((name, "cpu") for name in OFFLOADS),
        *((name, name) for name in OFFLOADS),
    ):
        other = make_swapped(target, seed=1)
        attach(other, progress=False)
        for trained in (0, 1):  # before its first step, an optimizer has no states to load into
            train_swapped(other, trained)
            assert other.load_checkpoint(f"{url}/{source.replace(' ', '-')}")[0] is not None
            assert digests(full_state(other)) == expected[source][0], (source, target, trained)
            assert train_swapped(other, 3) == expected[source][1], (source, target, trained)
        other.destroy()
        close_managers()
        loaded.append(f"{source} into {target}")
    report(loaded=loaded)


def incident_0_on_nvme(url: str) -> None:
    """Two saves of one tag with partitions on NVMe: DeepSpeed's own fail on each rank, with nothing replaced."""
    engine = make_swapped("optimizer", seed=0)
    train_swapped(engine, 1)
    folder = str(Path("incident-nvme").absolute())
    engine.save_checkpoint(folder, tag="global_step1")
    assert raised(engine.save_checkpoint, folder, tag="global_step1").startswith("FileExistsError")
    dist.barrier()
    attach(engine, wait=True, progress=False)
    for _ in range(2):
        engine.save_checkpoint(url, tag="global_step1")


CASES = (partitions_on_nvme, incident_0_on_nvme)
