"""Program of the campaign: a small model, deterministic to the bit, saved and restored through a manager.

Started by torchrun, one process per rank. Everything that a step changes is in the state, each rank's random states
included, so that a training that was interrupted anywhere ends in the same bits as one that was not.

It reports events in a file of JSON lines, and takes orders from another file: how far to train, and which faults to act
out.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from dcp_remote import CheckpointManager, PerRank, RandomStates, Retention
from dcp_remote.errors import DcpRemoteError

WIDTH, HIDDEN, CLASSES, BATCH = 192, 48, 10, 6

# Elements of the tensor, sharded over all ranks, that marks the job that saved it.
MARKS = 12

# Small, so that a fault is over soon; every rank reports each second.
DEADLINE_SECONDS, SILENCE_SECONDS, NOTICE_SECONDS = 30.0, 6.0, 20.0

KEEP_LAST, KEEP_EVERY = 3, 60

# Least duration of a step: saves take a while, too.
STEP_SECONDS = 0.02


class Net(nn.Module):
    """A frozen part, most of the model as under LoRA, and a trained one that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
        self.up, self.norm, self.down = nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.down(self.dropout(self.norm(self.up(torch.tanh(self.frozen(x)))))))


class Position:
    """Position in the data; torch's `Stateful`."""

    def __init__(self) -> None:
        self.step = 0

    def next_batch(self, rank: int) -> torch.Tensor:
        """Return a batch, a function of position and rank, with noise of the rank's own generators."""
        self.step += 1
        batch = torch.arange(float(BATCH * WIDTH)).reshape(BATCH, WIDTH) * (self.step + 7 * rank)
        return torch.sin(batch) + 0.1 * torch.randn(BATCH, WIDTH) + random.gauss() + float(np.random.rand())

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Refusing:
    """A part of the state that can be told to fail when its state is asked for."""

    fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise RuntimeError("this part of the state cannot be had")
        return {"calm": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state to restore."""


@dataclass(slots=True)
class Training:
    """Everything that one step changes, and a mark of the job that saves."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    position: Position
    mark: DTensor
    refusing: Refusing

    @classmethod
    def begun(cls, mesh: DeviceMesh, job: int) -> Training:
        """Return a training at step 0, equal on all ranks but for random states; called on every rank."""
        torch.manual_seed(0)
        model = Net()
        fully_shard(model.frozen, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=0.01)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1_000 + mesh.get_rank())
        # torch creates the optimizer's state by an empty step, which counts: done at the same point in every training.
        get_state_dict(model, optimizer)
        mark = distribute_tensor(torch.full((MARKS,), job), mesh, [Shard(0)], src_data_rank=None)
        return cls(model, optimizer, schedule, Position(), mark, Refusing())

    def state(self, job: int) -> dict[str, Any]:
        """Return the state to save, or to restore into."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optim": optimizer,
            "schedule": self.schedule,
            "data": self.position,
            "mark": self.mark,
            "job": job,
            "refusing": self.refusing,
            "random": PerRank(RandomStates()),
            "own": PerRank({"job": job, "rank": dist.get_rank()}),
        }

    def take(self, state: Mapping[str, Any]) -> None:
        """Continue from a restored state."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def advance(self, rank: int) -> None:
        time.sleep(STEP_SECONDS)
        loss = self.model(self.position.next_batch(rank)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()


def whole_digest(state: Mapping[str, Any]) -> str:
    """Return a digest of all names, tensors and values that ranks share; a collective where tensors are sharded."""
    digest = hashlib.sha256()
    trained = {key: state[key] for key in ("model", "optim", "schedule", "data")}
    for name, value in sorted(_leaves("", trained), key=lambda leaf: leaf[0]):
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            whole = whole.detach().contiguous()
            digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
            digest.update(whole.reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(f"{name} {value!r}\n".encode())
    return digest.hexdigest()


def own_digest() -> str:
    """Return a digest of this rank's random states, read from the generators."""
    digest = hashlib.sha256(repr(random.getstate()).encode())
    kind, words, *rest = np.random.get_state()
    digest.update(f"{kind} {np.asarray(words).tobytes()!r} {rest}".encode())
    digest.update(torch.get_rng_state().numpy().data)
    return digest.hexdigest()


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Stateful):
        value = value.state_dict()
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif not callable(value):
        yield name, value


# ---- events and orders


class Events:
    """Events of one rank as JSON lines, each written at once: the process may be killed at any time."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, "at": time.time(), **values}) + "\n")
        self._file.flush()


@dataclass(frozen=True, slots=True)
class Orders:
    """Orders to the ranks."""

    harness: int  # process id of the harness; without that process ranks stop waiting
    gate: int  # last step that may be made now
    last: int = 2**31
    raises: tuple[int, int] | None = None  # rank and step after which the rank raises
    refuses: tuple[int, int] | None = None  # rank and step at whose save the rank fails to give its state
    sleeps: tuple[int, float] | None = None  # rank, and seconds by which the rank delays its state

    @classmethod
    def read(cls, folder: Path) -> Orders:
        read: dict[str, Any] = json.loads((folder / "orders.json").read_text())
        orders: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in read.items()
        }
        return cls(**orders)

    def write(self, folder: Path) -> None:
        new = folder / "orders.new"
        orders = {name: getattr(self, name) for name in self.__slots__}
        new.write_text(json.dumps(orders))
        new.replace(folder / "orders.json")


# ---- training


class Trainee:
    """A rank of a job."""

    def __init__(self, options: argparse.Namespace, events: Events) -> None:
        self._options, self._events = options, events
        self._rank = dist.get_rank()
        self._training = Training.begun(init_device_mesh("cpu", (dist.get_world_size(),)), options.job)
        self._checkpoints: CheckpointManager | None = None
        self._told: str | None = None
        self._step = 0

    def run(self) -> None:
        """Train from the newest checkpoint on, as far as the gate allows."""
        with self._manager() as checkpoints:
            self._checkpoints = checkpoints
            try:
                self._restore()
                self._train()
            except BaseException as error:
                self._fail("failed", error)
                self._learn_of_the_save()
                raise

    def _manager(self) -> Any:
        if self._options.url is None:
            return nullcontext()
        return CheckpointManager(
            self._options.url,
            retention=Retention(keep_last=KEEP_LAST, keep_every=KEEP_EVERY),
            timeout_seconds=DEADLINE_SECONDS,
            silence_seconds=SILENCE_SECONDS,
            notice_seconds=NOTICE_SECONDS,
        )

    def _restore(self) -> None:
        if self._checkpoints is None:
            return
        state = self._training.state(self._options.job)
        began = time.monotonic()
        step = self._checkpoints.restore(state, self._options.restore_step)
        if step is None:
            self._events.write("fresh")
            return
        self._training.take(state)
        self._step = step
        report = self._checkpoints.last_load
        assert report is not None
        assert step == self._training.position.step, "the position is that of the step"
        jobs = {state["job"], *state["mark"].full_tensor().tolist()}
        own = state["own"].value
        is_own = self._rank < report.saved_world_size  # a new rank keeps its own
        self._events.write(
            "restored",
            save_id=report.save_id,
            seconds=time.monotonic() - began,
            jobs=sorted(jobs | ({own["job"]} if is_own else set())),
            own_rank=own["rank"],
            **self._digests(),
        )
        # The next checkpoint has this job's mark.
        self._training.mark.to_local().fill_(self._options.job)

    def _train(self) -> None:
        while True:
            orders = self._wait_at_the_gate()
            if self._step == orders.last:
                break
            self._training.advance(self._rank)
            self._step += 1
            if orders.raises == (self._rank, self._step):
                raise RuntimeError("an error of the training itself")
            stopping = self._checkpoints is not None and self._checkpoints.reached_preemption(self._step)
            if self._step % self._options.save_every == 0 or stopping or self._step == orders.last:
                self._save(orders)
            if stopping:
                self._wait()
                self._events.write("preempted", step=self._step)
                return
        self._wait()
        self._events.write("finished", **self._digests())

    def _wait_at_the_gate(self) -> Orders:
        orders = Orders.read(self._options.folder)
        if orders.gate > self._step or orders.last == self._step:
            return orders
        self._wait()
        self._events.write("idle", step=self._step)
        while orders.gate <= self._step and orders.last != self._step:
            time.sleep(0.01)
            if not _is_there(orders.harness):
                raise SystemExit("the harness is gone")
            orders = Orders.read(self._options.folder)
        return orders

    def _save(self, orders: Orders) -> None:
        if orders.sleeps is not None and orders.sleeps[0] == self._rank:
            time.sleep(orders.sleeps[1])
        self._events.write("saving", **self._digests())
        if self._checkpoints is None:
            return
        self._training.refusing.fails = orders.refuses == (self._rank, self._step)
        self._checkpoints.save(self._step, self._training.state(self._options.job))
        self._tell()

    def _digests(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "job": self._options.job,
            "whole": whole_digest(self._training.state(self._options.job)),
            "own": own_digest(),
        }

    def _wait(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.wait()
            self._tell()

    def _tell(self) -> None:
        """Report the last committed save, once."""
        report = self._checkpoints.last_save if self._checkpoints is not None else None
        if report is not None and report.save_id != self._told:
            self._told = report.save_id
            self._events.write(
                "committed",
                step=report.step,
                save_id=report.save_id,
                attempts=report.attempts,
                deduplicated_bytes=report.deduplicated_bytes,
            )

    def _learn_of_the_save(self) -> None:
        """Wait for the save in progress after the last step, and report its outcome."""
        try:
            self._wait()
        except DcpRemoteError as error:
            self._fail("save failed", error)

    def _fail(self, event: str, error: BaseException) -> None:
        details = error.details if isinstance(error, DcpRemoteError) else {}
        self._events.write(event, step=self._step, error=type(error).__name__, text=str(error), details=details)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Train as one rank, started by torchrun."""
    faulthandler.register(signal.SIGUSR1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--url")
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--restore-step", type=int)
    options = parser.parse_args()
    events = Events(options.folder, int(os.environ["RANK"]))
    events.write("started", pid=os.getpid())
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_SECONDS))
    try:
        Trainee(options, events).run()
    except Exception:  # noqa: BLE001  # reported already; what follows is the usual end of a failed process
        sys.excepthook(*cast("Any", sys.exc_info()))
        sys.exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
