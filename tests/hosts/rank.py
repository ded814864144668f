"""A rank of a job on the rig, which performs a list of operations.

    python -m tests.hosts.rank job.json

The operations of a job, in the order in which each rank performs them:

    restore again     restore the newest checkpoint, and compare all values; "again" tells this restore from another
    save 2            save step 2 and wait for the commit
    start 2           save step 2 in the background
    wait              wait for the save in the background
    train 40          train to step 40 and save as `save_policy` says, until the ranks are asked to stop
    close             close the manager
    pause a           wait until the test lets the ranks pass the pause "a"
    late h2 5         on host h2, wait 5 seconds
    fail h2 0         on host h2, before torchrun restarts the rank there, raise an error
    try <operation>   perform the operation, and go on if it raises

A rank writes the beginning, the end or the error of each operation as a line of JSON. Every element of the state is a
function of step and index, so that values are compared at any number of ranks.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_remote import CheckpointManager, PerRank, SavePolicy

# Elements of a row of the sharded tensor.
_WIDTH = 64

_POLL_SECONDS = 0.05
_STEP_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Event of a rank.

    Attributes:
        seconds: Time of the event, in seconds since the epoch.
        host: Name of the rank's host.
        rank: Number of the rank.
        world_size: Number of ranks.
        operation: Operation that began or ended.
        kind: Kind of the event.
        text: Result; or the error and its causes.
        step: Step that was restored, or reached by training.
        differing: Names of tensors whose restored values differ from the saved ones.
    """

    seconds: float
    host: str
    rank: int
    world_size: int
    operation: str
    kind: Literal["begin", "end", "error"]
    text: str = ""
    step: int | None = None
    differing: Sequence[str] = ()

    @property
    def verb(self) -> str:
        """Return the first word of the operation."""
        return self.operation.partition(" ")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Task of every rank of a job.

    Attributes:
        name: Name of the job.
        operations: Operations, in their order.
        manager: Arguments of the `CheckpointManager`.
        sharded_bytes: Size of the tensor that the ranks share.
        replicated_bytes: Size of the tensor that every rank holds.
    """

    name: str
    operations: Sequence[str]
    manager: Mapping[str, Any]
    sharded_bytes: int
    replicated_bytes: int


class _State:
    """State of a training: a tensor of which each rank has a part, one that all ranks hold, and values of each rank."""

    def __init__(self, task: Task) -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        rows = task.sharded_bytes // 4 // _WIDTH
        share = -(-rows // world_size)
        self._first, self._last = min(rows, rank * share), min(rows, (rank + 1) * share)
        self._part = torch.zeros((self._last - self._first, _WIDTH), dtype=torch.int32)
        self._whole = torch.zeros(task.replicated_bytes // 4, dtype=torch.int32)
        self._own = PerRank(torch.zeros(4, dtype=torch.int32))
        mesh, shape = init_device_mesh("cpu", (world_size,)), torch.Size((rows, _WIDTH))
        sharded = DTensor.from_local(self._part, mesh, [Shard(0)], run_check=False, shape=shape, stride=(_WIDTH, 1))
        self.state: dict[str, Any] = {
            "sharded": sharded,
            "replicated": self._whole,
            "own": self._own,
            "world size": world_size,
        }

    def fill(self, step: int) -> None:
        """Set all elements to the values of a step."""
        self.state["world size"] = dist.get_world_size()
        for name, tensor in self._tensors().items():
            tensor.copy_(self._values(name, step))

    def differing(self, step: int) -> list[str]:
        """Return the names of tensors that do not have the values of a step."""
        return [name for name, tensor in self._tensors().items() if not torch.equal(tensor, self._values(name, step))]

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {"sharded": self._part, "replicated": self._whole, "own": self._own.value}

    def _values(self, name: str, step: int) -> torch.Tensor:
        if name == "own":
            # A rank of which the checkpoint has no values keeps its own.
            is_saved = dist.get_rank() < self.state["world size"]
            return torch.full((4,), 100 * step + dist.get_rank() if is_saved else 0, dtype=torch.int32)
        if name == "sharded":
            elements = torch.arange(self._first * _WIDTH, self._last * _WIDTH, dtype=torch.int32)
            return (elements * 3 + step * 1_000_003).view(-1, _WIDTH)
        return torch.arange(len(self._whole), dtype=torch.int32) * 5 + step * 1_000_033


class _Rank:
    """A rank that performs operations."""

    def __init__(self, folder: Path, task: Task, checkpoints: CheckpointManager) -> None:
        self._folder, self._task, self._checkpoints = folder, task, checkpoints
        self._host, self._rank = socket.gethostname(), dist.get_rank()
        self._events = (folder / f"{task.name}.{self._host}.{os.getpid()}.jsonl").open("a", buffering=1)
        self._state = _State(task)
        self._step = 0

    def perform(self, operation: str) -> None:
        verb, *arguments = operation.split()
        if verb == "try":
            with suppress(Exception):  # its event has the error
                self.perform(" ".join(arguments))
            return
        calls: dict[str, Callable[..., str | None]] = {
            "restore": self._restore,
            "save": lambda step: self._save(int(step), wait=True),
            "start": lambda step: self._save(int(step), wait=False),
            "wait": lambda: str(self._checkpoints.wait()),
            "train": lambda last: self._train(int(last)),
            "close": self._checkpoints.close,
            "pause": self._pause,
            "late": self._be_late,
            "fail": self._fail,
        }
        self._tell(operation, "begin")
        try:
            text = calls[verb](*arguments)
        except BaseException as error:
            causes: list[str] = []
            cause: BaseException | None = error
            while cause is not None:
                causes.append(f"{type(cause).__name__}: {cause}")
                cause = cause.__cause__
            self._tell(operation, "error", text=" <- ".join(causes))
            raise
        differing = self._state.differing(self._step) if verb == "restore" and self._step else []
        self._tell(operation, "end", text=text or "", step=self._step, differing=differing)

    def _tell(self, operation: str, kind: Literal["begin", "end", "error"], **more: Any) -> None:
        event = Event(
            seconds=time.time(),
            host=self._host,
            rank=self._rank,
            world_size=dist.get_world_size(),
            operation=operation,
            kind=kind,
            **more,
        )
        self._events.write(json.dumps(asdict(event)) + "\n")

    def _restore(self, name: str) -> str:
        self._step = self._checkpoints.restore(self._state.state) or 0
        return str(self._checkpoints.last_load)

    def _save(self, step: int, *, wait: bool) -> str:
        self._step = step
        self._state.fill(step)
        self._checkpoints.save(step, self._state.state, wait=wait)
        return str(self._checkpoints.last_save)

    def _train(self, last: int) -> str:
        while self._step < last and not self._checkpoints.should_stop:
            time.sleep(_STEP_SECONDS)
            self._step += 1
            if self._checkpoints.should_save(self._step):
                self.perform(f"start {self._step}")
        return f"{self._checkpoints.should_stop=}"

    def _pause(self, name: str) -> None:
        while not (self._folder / f"{self._task.name}.passed.{name}").exists():
            time.sleep(_POLL_SECONDS)

    def _be_late(self, host: str, seconds: str) -> None:
        if host == self._host:
            time.sleep(float(seconds))

    def _fail(self, host: str, attempt: str) -> None:
        if (host, attempt) == (self._host, os.environ["TORCHELASTIC_RESTART_COUNT"]):
            raise MemoryError("This rank fails, as the test asked.")


def main(job_file: str) -> None:
    """Perform the operations of a job; its events lie beside the file of the task."""
    task = Task(**json.loads(Path(job_file).read_text()))
    settings = dict(task.manager)
    if "save_policy" in settings:
        settings["save_policy"] = SavePolicy(**settings["save_policy"])
    options = {"endpoint_url": "http://store:9000", "key": "rig", "secret": "rig", "region_name": "us-east-1"}
    dist.init_process_group("gloo")
    with CheckpointManager("s3://runs/run", storage_options=options, progress=False, **settings) as checkpoints:
        rank = _Rank(Path(job_file).parent, task, checkpoints)
        for operation in task.operations:
            rank.perform(operation)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
