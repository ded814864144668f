"""Cost of a save for a training that goes on meanwhile: until its call returns, and in steps."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_remote.manager.manager import CheckpointManager
from dcp_remote.writer import RemoteWriter
from tests.benchmark.report.plan import Beside

Options: TypeAlias = Mapping[str, Any]

# Begins a save, of this number; gives what waits for its end.
Save: TypeAlias = Callable[[int], Callable[[], object]]

# A step is some milliseconds of one core: long enough that Python does not count, short enough to count many.
_WIDTH = 384

# How long training is watched without a save: before, and again after.
_ALONE_SECONDS = 1.5

# A save on loopback is over in a second; several of them, one behind the other, are long enough to count steps.
_SAVES = 3


def background_saves(url: str, options: Options, state: dict[str, Any], *, is_overlapped: bool) -> dict[str, float]:
    """Seconds until `CheckpointManager.save` returns: the first time, and later, in the median, as in `Measured`.

    With `is_overlapped`, the manager is told that training calls `before_update()`: the state is copied later.
    """
    blocked, used = [], []
    with CheckpointManager(url, storage_options=options, dedup=False) as checkpoints:
        if is_overlapped:
            checkpoints.before_update()
        for number in range(1 + _SAVES):
            cpu, began = time.process_time(), time.monotonic()
            checkpoints.save(number, state)
            blocked.append(time.monotonic() - began)
            checkpoints.wait()
            used.append(time.process_time() - cpu)
    return _blocked(blocked) | {"later_cpu_seconds": statistics.median(used[1:])}


def _blocked(seconds: Sequence[float]) -> dict[str, float]:
    return {"first_blocked_seconds": seconds[0], "blocked_seconds": statistics.median(seconds[1:])}


def disturbed(url: str, options: Options, state: dict[str, Any], beside: Beside) -> dict[str, float]:
    """Train alone, then while saves are under way, then alone again.

    The first save is not counted: it makes the staging memory, and the process that saves.
    """
    train = _training()
    seconds, steps = 0.0, 0
    blocked = []
    with _saves(url, options, state, beside) as save:
        for number in range(1 + _SAVES):
            began = time.monotonic()
            done = save(number)
            blocked.append(time.monotonic() - began)
            if number == 0:
                done()
                alone = _steps_per_second(train)
                continue
            began = time.monotonic()
            steps += _train_until(done, train)
            seconds += time.monotonic() - began
        alone = (alone + _steps_per_second(train)) / 2
    steps_per_second = {"steps_per_second": steps / seconds, "alone_steps_per_second": alone}
    return _blocked(blocked) | steps_per_second | {"wall_seconds": seconds, "saves": _SAVES}


def _train_until(done: Callable[[], object], train: Callable[[], None]) -> int:
    ended = threading.Event()

    def wait() -> None:
        try:
            done()
        finally:
            ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    steps = 0
    while not ended.is_set():
        train()
        steps += 1
    waiting.join()
    return steps


def _training() -> Callable[[], None]:
    """A step of training on one thread: two layers, there and back."""
    layers = torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, _WIDTH))
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    batch = torch.ones(_WIDTH, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        layers(batch).square().mean().backward()
        optimizer.step()

    return step


def _steps_per_second(train: Callable[[], None]) -> float:
    began = time.monotonic()
    steps = 0
    while time.monotonic() - began < _ALONE_SECONDS:
        train()
        steps += 1
    return steps / (time.monotonic() - began)


@contextmanager
def _saves(url: str, options: Options, state: dict[str, Any], beside: Beside) -> Iterator[Save]:
    """Saves of this state in the background. Nothing changes between them, so all of it is sent each time."""
    if beside == "manager":
        with CheckpointManager(url, storage_options=options, dedup=False) as checkpoints:

            def save(number: int) -> Callable[[], object]:
                checkpoints.save(number, state)
                return checkpoints.wait

            yield save
        return
    # One stager for all of them, as the manager has: memory that is new each time is dear.
    in_process = beside == "process"
    kind = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    settings = StagingOptions(
        use_pinned_memory=False, use_shared_memory=in_process, use_async_staging=False, use_non_blocking_copy=False
    )
    with closing(DefaultStager(settings)) as stager:

        def async_save(number: int) -> Callable[[], object]:
            writer = RemoteWriter(f"{url}-{number}", storage_options=options)
            future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind, async_stager=stager)
            return future.result  # type: ignore[union-attr]  # the other class is of staging in the background

        yield async_save
    dist.destroy_process_group()
