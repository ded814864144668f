"""One measurement in a fresh process, on one rank: `python -m dcp_remote.bench.worker JSON` prints a line of JSON."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from dcp_remote.bench.clients import CLIENTS
from dcp_remote.bench.state import SHAPES, require_loaded, size_bytes, state_of

Action: TypeAlias = Literal["save", "load"]


@dataclass(frozen=True, slots=True)
class Task:
    """What is measured.

    Attributes:
        client: One of `CLIENTS`.
        action: Saving, or loading what was saved.
        url: Where.
        shape: One of `SHAPES`.
        options: Of the store.
        world_size: How many ranks; each is a process.
        store_port: Where they meet; 0 for one rank.
    """

    client: str
    action: Action
    url: str
    shape: str
    options: dict[str, object]
    world_size: int = 1
    store_port: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What it cost on this rank.

    Attributes:
        wall_seconds: From a barrier to the next.
        cpu_seconds: Of all threads of this process.
        state_bytes: Of the tensors.
        above_state_bytes: The most memory that was resident, beyond what was when it began.
    """

    wall_seconds: float
    cpu_seconds: float
    state_bytes: int
    above_state_bytes: int


def measure(task: Task) -> Measured:
    """Make the state, act, and see that what was loaded is what was saved."""
    torch.set_num_threads(1)
    shape = SHAPES[task.shape]
    state = state_of(shape, filled=task.action == "save")
    client = CLIENTS[task.client](task.options)
    act = client.save if task.action == "save" else client.load
    gc.collect()
    _meet()
    resident = _reset_peak()
    cpu = _cpu_seconds()
    began = time.monotonic()
    act(task.url, state)
    _meet()
    wall = time.monotonic() - began
    cpu = _cpu_seconds() - cpu
    above = max(0, _status_bytes("VmHWM") - resident)
    if task.action == "load":
        require_loaded(state, shape)
    return Measured(wall, cpu, size_bytes(state), above)


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _reset_peak() -> int:
    """Forget how much memory was ever resident; what is now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def main() -> None:
    """By a task as JSON."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    task = Task(**given)
    if task.world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{task.store_port}",
            rank=int(os.environ["RANK"]),
            world_size=task.world_size,
            timeout=timedelta(minutes=5),
        )
    measured = measure(task)
    sys.stdout.write(json.dumps(asdict(measured)) + "\n")
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
