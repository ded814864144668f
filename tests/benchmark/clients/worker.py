"""One step on one rank, in a process that is fresh: made by a fork of one that has imported torch, and nothing else.

What has threads or connections (obstore, boto3, the peers) is imported behind the fork, and before the clock starts.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmark.clients.clients import CLIENTS
from tests.benchmark.clients.state import SHAPES, require_loaded, size_bytes, state_of
from tests.benchmark.clients.training import background_saves, disturbed
from tests.benchmark.report.plan import Beside, Step
from tests.benchmark.report.rows import Measured

# Of a peer's message; the end of a traceback says it.
_FAILURE_CHARACTERS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a worker."""

    client: str  # one of `CLIENTS`; "background", "overlapped" and "train" are ours alone
    step: Step
    url: str
    state: str  # one of `SHAPES`
    options: dict[str, object]  # options of the store
    store_port: int = 0  # where ranks meet; 0 for one rank


def run_rank(task: Task, rank: int, told: Connection) -> None:
    """Measure in the process of this rank; send the result, or a text that says why there is none."""
    Thread(target=_end_with_the_benchmark, name="benchmark", daemon=True).start()
    # One rank is what was asked for.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        if task.step.ranks > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{task.store_port}",
                rank=rank,
                world_size=task.step.ranks,
                timeout=timedelta(minutes=5),
            )
        told.send(measure(task))
    except BaseException:  # noqa: BLE001  # CheckpointException is one; and whatever it is, others go on
        told.send(traceback.format_exc()[-_FAILURE_CHARACTERS_MAX:])
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_the_benchmark() -> None:
    """However it dies: a save whose server is gone would try again for half an hour."""
    benchmark = multiprocessing.parent_process()
    assert benchmark is not None
    wait([benchmark.sentinel])
    os._exit(1)


def measure(task: Task) -> Measured:
    """Make the state, act, and see that what was loaded is what was saved."""
    torch.set_num_threads(1)
    shape = SHAPES[task.state]
    step = task.step
    state = state_of(shape, filled=step.action != "load")
    client = CLIENTS[task.client](task.options)
    if step.action == "again":
        client.save(f"{task.url}/first", state)
    gc.collect()
    _meet()
    resident = _reset_peak()
    cpu = _cpu_seconds()
    began = time.monotonic()
    figures: dict[str, Any] = {}
    match step.action:
        case "save" | "load" | "again":
            act = client.load if step.action == "load" else client.save
            url = f"{task.url}/again" if step.action == "again" else task.url
            with _spinning(step.beside):
                act(url, state)
        case "background" | "overlapped":
            is_overlapped = step.action == "overlapped"
            figures = background_saves(task.url, task.options, state, is_overlapped=is_overlapped)
        case "train":
            figures = disturbed(task.url, task.options, state, step.beside)
    _meet()
    wall = time.monotonic() - began
    cpu = _cpu_seconds() - cpu
    above = max(0, _status_bytes("VmHWM") - resident)
    if step.action == "load":
        require_loaded(state, shape)
    found = Measured(wall_seconds=wall, cpu_seconds=cpu, state_bytes=size_bytes(state), above_state_bytes=above)
    return replace(found, **figures)


@contextmanager
def _spinning(beside: Beside) -> Iterator[None]:
    """Beside a loop of pure Python, which never waits and keeps the interpreter as long as it may."""
    if beside == "process":
        process = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        try:
            yield
        finally:
            process.kill()
            process.wait()
        return
    ended = Event()

    def spin() -> None:
        while not ended.is_set():
            for _ in range(10_000):
                pass

    thread = Thread(target=spin, daemon=True)
    if beside == "thread":
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if beside == "thread":
            thread.join()


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
