"""Saves through a manager in which a rank, or what it needs, fails; on real ranks, and what each of them was told.

The rank strikes itself at a request, so that nothing depends on who is fast. Whoever lives tells how its save ended and
when, and then, where the store of the process group lives, tries to go on without the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_remote import CheckpointManager
from dcp_remote.errors import DcpRemoteError
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.storage import LocalStore, ObjectStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from tests.support.rank_faults import exchanged, process_state, signal_this_thread
from tests.support.rank_threads import HOST

_Answer = TypeVar("_Answer")

# Of the save that is tried; ranks say something every second.
SILENCE_SECONDS, DEADLINE_SECONDS = 3.0, 8.0

# By which every rank that lives has raised.
PROMISED_SECONDS = DEADLINE_SECONDS + 5

# Of the saves before and after it, at which nothing fails.
CALM_SECONDS = 60.0

# What a coordinator whose own shards are there waits for a rank that is to be struck when its shards are.
LATE_SECONDS = 1.5

# How a rank fails. "idle" has a manager and never saves; "absent" has none. "stalled" has a store that does not answer.
Way: TypeAlias = Literal["killed", "stopped", "stalled", "idle", "absent"]

# Before, and after, its first shard is put; when all of them are; and of the coordinator, before and after it puts the
# manifest, and before and after it swaps the catalog.
Place: TypeAlias = Literal[
    "before upload", "in upload", "after upload", "before manifest", "after manifest", "before swap", "after swap"
]

State: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """Injected failure.

    Attributes:
        way: Kind of the failure.
        victims: Ranks that fail; empty if the host of the store does.
        place: Point at which they fail; None where the point makes no difference.
    """

    way: Way
    victims: tuple[int, ...]
    place: Place | None = None

    def saves(self, rank: int) -> bool:
        """Return whether a rank lives, and saves."""
        return self.way == "stalled" or rank not in self.victims

    def __str__(self) -> str:
        who = ",".join(map(str, self.victims)) if self.victims else "host"
        return f"{self.way}-{who}" + (f"-{self.place.replace(' ', '-')}" if self.place else "")


@dataclass(frozen=True, slots=True)
class Told:
    """How the save ended on a rank that lives.

    Attributes:
        rank: It.
        seconds: From the call of `save` on.
        error: What was raised; None if it was committed.
        closed_seconds: What it took to close the manager.
        refused: What a save of shards by the survivors alone was refused with.
        steps: That are live when the survivors have saved what each of them has whole.
    """

    rank: int
    seconds: float
    error: BaseException | None
    closed_seconds: float
    refused: BaseException | None = None
    steps: list[int] | None = None


def replicated(value: float) -> State:
    """The same on every rank, as under DDP: so many tensors that each rank writes some shards."""
    count = 4 * dist.get_world_size()
    return {
        "model": {f"w{number}": torch.full((500,), value + number) for number in range(count)},
        "optim": {f"m{number}": torch.full((500,), value - number) for number in range(count)},
    }


def sharded(value: float) -> State:
    """A piece on each rank, as under FSDP."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"model": {"w": DTensor.from_local(torch.full((50, 10), value), mesh, [Shard(0)], run_check=False)}}


class StruckStore(WrappedStore):
    """Does something before or after the n-th request of a kind; then goes on, if this thread still does."""

    def __init__(self, store: ObjectStore, point: tuple[str, int, str], action: Callable[[], None]) -> None:
        super().__init__(store)
        self._key, self._turn, self._when = point
        self._action = action
        self._armed = False
        self._seen = 0
        self._lock = threading.Lock()

    def arm(self) -> None:
        """From now on."""
        self._armed = True

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        if not self._armed or request.verb != "put" or not request.key.startswith(self._key):
            return send()
        if self._when == "before":
            self._count()
            return send()
        answer = send()
        self._count()
        return answer

    def _count(self) -> None:
        with self._lock:
            self._seen += 1
            if self._seen == self._turn:
                self._action()


PLACES: dict[Place, tuple[str, int, str]] = {
    "before upload": ("shards/", 1, "before"),
    "in upload": ("shards/", 1, "after"),
    "after upload": ("shards/", 2, "after"),  # there are two a rank
    "before manifest": ("manifests/", 1, "before"),
    "after manifest": ("manifests/", 1, "after"),
    "before swap": (CATALOG_KEY, 1, "before"),
    "after swap": (CATALOG_KEY, 1, "after"),
}


def attempt(path: Path, case: Case, host: Host | None) -> Told | None:
    """A save that goes well, and one that does not; on each rank. None on a rank that lives and does not save.

    Args:
        path: Of the run; beside it ranks note that they have ended.
        case: What fails.
        host: Of the group's store, if it is not the pool's.
    """
    if host is not None:
        meet_at(host)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pids, shards = exchanged(os.getpid()), sharded(2.0)
    fails = rank in case.victims
    ending = Ending(path.parent, pids, [one for one in range(world_size) if case.saves(one)], case.victims)
    if fails and case.way == "absent":
        ending.wait()
        return None
    released = threading.Event()
    store = struck(LocalStore(str(path)), case, released, host)
    checkpoints = CheckpointManager(store, timeout_seconds=DEADLINE_SECONDS, silence_seconds=SILENCE_SECONDS)
    if case.way != "absent":
        save(checkpoints, 1)
    if fails and case.way == "idle":
        ending.wait()
        checkpoints.close()
        return None
    if isinstance(store, StruckStore):
        store.arm()
    error: BaseException | None = None
    began = time.monotonic()
    try:
        save(checkpoints, 2)
    except DcpRemoteError as raised:
        error = raised
    ended = time.monotonic()
    released.set()
    checkpoints.close()  # an error is raised once
    closed = time.monotonic()
    ending.note()
    refused, steps = None, None
    if host is None and case.way in ("killed", "stopped") and error is not None:
        refused, steps = go_on(path, ending.living, shards)
    return Told(rank, ended - began, error, closed - ended, refused, steps)


def save(checkpoints: CheckpointManager, step: int) -> None:
    checkpoints.save(step, replicated(step))
    checkpoints.wait()


def go_on(path: Path, living: Sequence[int], shards: State) -> tuple[BaseException | None, list[int]]:
    """In a new group: what everybody has whole is saved; what is sharded is not whole any more, and refused."""
    group = dist.new_group(list(living), use_local_synchronization=True, timeout=timedelta(seconds=CALM_SECONDS))
    refused: BaseException | None = None
    with CheckpointManager(
        LocalStore(str(path)), process_group=group, resumed_from=1, timeout_seconds=CALM_SECONDS
    ) as checkpoints:
        save(checkpoints, 3)
        checkpoints.save(4, shards)
        try:
            checkpoints.wait()
        except Exception as error:  # noqa: BLE001  # torch's own planner sees it first, on the new coordinator
            refused = error
        steps = checkpoints.run.steps()
    return refused, steps


def struck(store: ObjectStore, case: Case, released: threading.Event, host: Host | None) -> ObjectStore:
    """The store of this rank: if that is to fail, or to end the host, it does so there."""
    rank = dist.get_rank()
    if case.place is None:
        return store
    if rank not in (case.victims or (0,)):
        if rank == 0 and case.place == "after upload":
            # Nobody commits before the victim's shards are there, and it is struck.
            return StruckStore(store, ("shards/", 1, "before"), lambda: time.sleep(LATE_SECONDS))
        return store

    def act() -> None:
        number = signal.SIGKILL if case.way == "killed" else signal.SIGSTOP
        if case.way == "stalled":
            released.wait()
        elif not case.victims:
            assert host is not None
            os.kill(host.pid, number)
        elif case.place == "after upload":
            # When this request has returned, and the rank's report was given.
            threading.Timer(LATE_SECONDS / 3, signal_this_thread, (number,)).start()
        else:
            signal_this_thread(number)

    return StruckStore(store, PLACES[case.place], act)


class Ending:
    """Ranks that have ended, noted in files, since the store of the group may have failed.

    Attributes:
        living: Ranks that live, and save.
    """

    def __init__(self, folder: Path, pids: Sequence[int], living: Sequence[int], victims: Sequence[int]) -> None:
        self.living = living
        self._files = [folder / f"ended-{rank}" for rank in range(len(pids))]
        self._victims = [pids[rank] for rank in victims]

    def note(self) -> None:
        """This rank has ended. The last one ends who is stopped, whose process the pool would wait for."""
        self._files[dist.get_rank()].touch()
        if self._all():
            for pid in self._victims:
                if process_state(pid) == "T":
                    os.kill(pid, signal.SIGKILL)

    def wait(self) -> None:
        """Until all have."""
        while not self._all():
            time.sleep(0.05)

    def _all(self) -> bool:
        return all(self._files[rank].exists() for rank in self.living)


# ---- a store of a group in a process of its own


@dataclass(frozen=True, slots=True)
class Host:
    """The process of a TCPStore."""

    pid: int
    port: int


@contextmanager
def hosted() -> Iterator[Host]:
    """A process that hosts a store while the block runs, if it is not killed."""
    with subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield Host(process.pid, int(process.stdout.readline()))
        finally:
            process.kill()


def meet_at(host: Host) -> None:
    """The default group of this rank is one over that store from now on."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=CALM_SECONDS)
    )
