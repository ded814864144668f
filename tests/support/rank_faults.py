"""Points of a save or a load at which a rank is killed, stopped or delayed, and the outcome on each rank."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.distributed_c10d import _set_pg_timeout

from dcp_remote import RemoteReader, RemoteWriter
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.storage import LocalStore, ObjectStore
from dcp_remote.storage.wrapper import Request, Verb, WrappedStore
from tests.support.points import NEW, NEWEST, Ending, When, assert_is, at, ending, found, state
from tests.support.rank_pool import RankPool

_Answer = TypeVar("_Answer")

# ---- points


@dataclass(frozen=True, slots=True)
class Hook:
    """Moment at which torch's thread enters or leaves a function."""

    function: Callable[..., object]
    when: When


@dataclass(frozen=True, slots=True)
class Sent:
    """Moment before the first such request is sent, or after its answer; in the thread that sends the request."""

    verb: Verb
    prefix: str
    when: Literal["before", "after"]


Point: TypeAlias = Hook | Sent

SAVE: dict[str, Point] = {
    "before-set-up": Hook(RemoteWriter.storage_meta, "enter"),
    "in-its-plan": Hook(RemoteWriter.prepare_local_plan, "enter"),
    "before-its-first-put": Sent("put", "shards/", "before"),
    "after-its-first-put": Sent("put", "shards/", "after"),
    "after-its-last-put": Hook(RemoteWriter.write_data, "leave"),
    "before-the-commit": Sent("put", MANIFEST_KEY, "before"),
    "after-the-commit": Sent("put", MANIFEST_KEY, "after"),
}
LOAD: dict[str, Point] = {
    "read-metadata": Hook(RemoteReader.read_metadata, "enter"),
    "in-its-plan": Hook(RemoteReader.prepare_local_plan, "enter"),
    "after-its-first-range": Sent("get_into", "shards/", "after"),
}


class ActingStore(WrappedStore):
    """Store that acts at the first request of a kind; others of that kind wait meanwhile."""

    def __init__(self, store: ObjectStore, point: Sent, action: Callable[[], None]) -> None:
        super().__init__(store)
        self._point = point
        self._action: Callable[[], None] | None = action
        self._lock = threading.Lock()

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        if request.verb != self._point.verb or not request.key.startswith(self._point.prefix):
            return send()
        if self._point.when == "before":
            self._act()
            return send()
        answer = send()
        self._act()
        return answer

    def _act(self) -> None:
        with self._lock:
            action, self._action = self._action, None
            if action is not None:
                action()


def struck(path: Path, point: Point, action: Callable[[], None]) -> tuple[ObjectStore, AbstractContextManager[None]]:
    """Return the store and the context of an attempt in which `action` is called at that point."""
    store = LocalStore(str(path))
    if isinstance(point, Sent):
        return ActingStore(store, point, action), nullcontext()
    return store, at(point.function, point.when, action)


def signal_this_thread(number: signal.Signals) -> None:
    """Send a signal to this thread, which stops it here: a signal to the process could reach another thread first."""
    signal.pthread_kill(threading.get_ident(), number)


# ---- what a rank does


def save(path: Path, value: float) -> None:
    dcp.save(state(value), storage_writer=RemoteWriter(path, overwrite=True))


def reload(path: Path, value: float) -> None:
    template = state(0.0)
    dcp.load(template, storage_reader=RemoteReader(path))
    assert_is(template, value)


class RecordingWriter(RemoteWriter):
    """Writer that records the outcome of the commit, which torch cannot report once the group is dead."""

    commit = "never tried"

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            super().finish(metadata, results)
        except BaseException as error:
            self.commit = type(error).__name__
            raise
        self.commit = "committed"


@dataclass(frozen=True, slots=True)
class Told:
    """Outcome of an attempt on a rank."""

    ending: Ending | None  # error that was raised; None if none was
    commit: str = "never tried"  # outcome of the coordinator's commit
    there: float | None = None  # value in the store when this rank had given up; None if there was no checkpoint


def attempt(store: ObjectStore, points: dict[str, Point]) -> Told:
    """Save the new state, or load."""
    if points is LOAD:
        return Told(ending(lambda: dcp.load(state(0.0), storage_reader=RemoteReader(store))))
    writer = RecordingWriter(store, overwrite=True)
    ended = ending(lambda: dcp.save(state(NEW), storage_writer=writer))
    return Told(ended, writer.commit)


def assert_goes_on(rank_pool: RankPool, path: Path, ranks: range) -> None:
    """Check that a new group, with new ranks for dead ones, overwrites the checkpoint and loads it."""
    rank_pool.run(save, path, NEWEST, ranks=ranks)
    assert found(path, len(ranks)) == NEWEST
    rank_pool.run(reload, path, NEWEST, ranks=ranks)


def assert_is_gloos(ended: Ending | None) -> None:
    assert ended is not None
    assert isinstance(ended.error, RuntimeError), ended
    assert not ended.failures


# ---- waiting for another rank
#
# A survivor waits as long as its group's timeout; a low timeout from the start would fail tests on a busy machine. So
# it is lowered only before a collective which the victim certainly will not join: survivors wait until the victim has
# announced that it enters that collective, or hangs.

GIVE_UP_SECONDS = 0.2

COLLECTIVES = ("gather_object", "scatter_object_list", "broadcast_object_list", "all_gather_object")


def give_up_soon() -> None:
    _set_pg_timeout(timedelta(seconds=GIVE_UP_SECONDS))


def process_state(pid: int) -> str:
    """Return the state of a process: `T` is stopped, `Z` dead; see proc(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def exchanged(value: int) -> list[int]:
    """Gather the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def before_each_collective(action: Callable[[int], None]) -> Iterator[None]:
    """Call `action` before each collective of torch's checkpoint, with its number from 0."""
    numbers = itertools.count()
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def announced(original: Callable[..., object]) -> Callable[..., object]:
        def collective(*args: Any, **kwargs: Any) -> object:
            action(next(numbers))
            return original(*args, **kwargs)

        return collective

    for name, original in originals.items():
        setattr(dist, name, announced(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
