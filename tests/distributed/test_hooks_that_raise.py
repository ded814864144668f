"""A rank that raises, in whatever torch calls there and whatever it raises: every rank raises, and knows why.

None is left behind in a collective: in the same process group, the next attempt gets as far as this one did, and at the
end a save and a load succeed. A group that timed out once (torch 2.13, gloo) can do neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from dcp_remote import RemoteReader, RemoteWriter
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError, SaveFailedError
from dcp_remote.saving.uploads import Uploads
from dcp_remote.storage import LocalStore, ObjectStore
from dcp_remote.testing import FaultyStore, nth
from tests.support.figures import count
from tests.support.points import (
    NEW,
    OLD,
    THIRD,
    Ending,
    When,
    assert_is,
    at,
    ending,
    found,
    orphans,
    state,
    wait_until,
)
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.torture

RANKS = range(3)

# ---- what is raised


class ForeignError(Exception):
    """Error of a user's planner or store: picklable, and not of this package."""


class UnpicklableError(Exception):
    """Holds what no pickle holds, as a client's error may hold its response."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.lock = threading.Lock()


class UnloadableError(Exception):
    """Can be pickled and not be unpickled, as any class whose arguments are not those of its base."""

    def __init__(self, what: str, *, code: int) -> None:
        super().__init__(what)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self.args


class UnprintableError(UnpicklableError):
    """Nor can it be printed."""

    def __str__(self) -> str:
        raise RuntimeError("An error without words.")


# What makes it, what the ranks then hear of, and a word of it.
CAUSES: dict[str, tuple[Callable[[], BaseException], type[BaseException], str]] = {
    "ours": (lambda: SaveFailedError("On purpose.", tensor="w"), SaveFailedError, "On purpose. tensor='w'"),
    "foreign": (lambda: ForeignError("On purpose."), ForeignError, "On purpose."),
    "unpicklable": (lambda: UnpicklableError("On purpose."), DcpRemoteError, "UnpicklableError: On purpose."),
    "unloadable": (lambda: UnloadableError("On purpose.", code=7), DcpRemoteError, "UnloadableError: On purpose."),
    "unprintable": (lambda: UnprintableError("On purpose."), DcpRemoteError, "UnprintableError"),
    "exit": (lambda: SystemExit("On purpose."), SystemExit, "On purpose."),
}


# ---- where


def here(hook: Callable[..., object], when: When, rank: int, cause: str) -> AbstractContextManager[None]:
    """Raise it there, if this is that rank."""

    def action() -> NoReturn:
        make, _, _ = CAUSES[cause]
        raise make()

    return at(hook, when, action) if dist.get_rank() == rank else nullcontext()


WRITER: dict[str, tuple[Callable[..., object], When]] = {
    "storage_meta": (RemoteWriter.storage_meta, "enter"),
    "set_up_storage_writer": (RemoteWriter.set_up_storage_writer, "enter"),
    "prepare_local_plan": (RemoteWriter.prepare_local_plan, "enter"),
    "prepare_global_plan": (RemoteWriter.prepare_global_plan, "enter"),
    "write_data": (RemoteWriter.write_data, "enter"),
    "resolve_data": (DefaultSavePlanner.resolve_data, "enter"),
    "lookup_object": (DefaultSavePlanner.lookup_object, "enter"),
    "waiting": (Uploads.finish, "enter"),
    "write_data-written": (RemoteWriter.write_data, "leave"),
    "finish": (RemoteWriter.finish, "enter"),
    "finish-committed": (RemoteWriter.finish, "leave"),
}

READER: dict[str, tuple[Callable[..., object], When]] = {
    "read_metadata": (RemoteReader.read_metadata, "enter"),
    "set_up_storage_reader": (RemoteReader.set_up_storage_reader, "enter"),
    "prepare_local_plan": (RemoteReader.prepare_local_plan, "enter"),
    "prepare_global_plan": (RemoteReader.prepare_global_plan, "enter"),
    "read_data": (RemoteReader.read_data, "enter"),
    "resolve_tensor": (DefaultLoadPlanner.resolve_tensor, "enter"),
    "commit_tensor": (DefaultLoadPlanner.commit_tensor, "enter"),
    "read_data-read": (RemoteReader.read_data, "leave"),
}

COORDINATORS = {"prepare_global_plan", "finish", "finish-committed"}


def places(points: dict[str, tuple[Callable[..., object], When]]) -> list[tuple[str, int]]:
    """Each on the coordinator, and on another rank where torch calls it there."""
    return [(point, rank) for point in points for rank in (0, 1) if rank == 0 or point not in COORDINATORS]


# ---- on the ranks


def save(path: Path, value: float) -> None:
    dcp.save(state(value), storage_writer=RemoteWriter(path, overwrite=True))


def save_and_load_elsewhere(path: Path) -> None:
    """Save and load, which a group with a rank adrift could not do."""
    elsewhere = path.with_name(f"{path.name}-elsewhere")
    save(elsewhere, THIRD)
    template = state(0.0)
    dcp.load(template, storage_reader=RemoteReader(elsewhere))
    assert_is(template, THIRD)


def fail_each(path: Path, what: str, point: str, rank: int) -> dict[str, Ending | None]:
    """One save or load after another in one group, each failed by another cause; then both succeed."""
    hook, when = (WRITER if what == "save" else READER)[point]
    endings = {}
    for cause in CAUSES:
        with here(hook, when, rank, cause):
            if what == "save":
                endings[cause] = ending(lambda: save(path, NEW))
            else:
                endings[cause] = ending(lambda: dcp.load(state(0.0), storage_reader=RemoteReader(path)))
    if what == "load":
        template = state(0.0)
        dcp.load(template, storage_reader=RemoteReader(path))
        assert_is(template, OLD)
    save_and_load_elsewhere(path)
    return endings


# ---- the tests


def assert_all_were_told(results: list[dict[str, Ending | None]], rank: int, *, of_metadata: bool = False) -> None:
    """Every rank raised torch's exception, which names this rank alone, and what it raised.

    An `Exception` that leaves `read_metadata` torch replaces by an AssertionError that quotes it.
    """
    for result in results:
        assert list(result) == list(CAUSES)
        for cause, (_, kind, words) in CAUSES.items():
            ended = result[cause]
            assert ended is not None, cause
            assert list(ended.failures) == [rank], (cause, ended)
            if of_metadata:
                assert cause == "unprintable" or words.rpartition(": ")[2] in ended.text, (cause, ended)
                continue
            assert type(ended.failures[rank]) is kind, (cause, ended)
            assert words in str(ended.failures[rank]), (cause, ended)
            assert f"(RANK {rank})" in ended.text, (cause, ended)
            assert words in ended.text, (cause, ended)
    count("hooks that raised", len(CAUSES))


@pytest.mark.parametrize(("point", "rank"), places(WRITER))
def test_a_save_in_which_a_rank_raises(point: str, rank: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """Raised as one rank enters (or leaves) a function, by a trace of it; each cause in turn, over an old checkpoint.

    The old one is whole, except where the commit had been made. What the others had uploaded is left for gc: torch
    does not tell them. The rank itself removes its own, unless all of `write_data` was done.
    """
    rank_pool.run(save, tmp_path / "checkpoint", OLD, ranks=RANKS)
    results = rank_pool.run(fail_each, tmp_path / "checkpoint", "save", point, rank, ranks=RANKS)
    assert_all_were_told(results, rank)
    assert found(tmp_path / "checkpoint", len(RANKS)) == (NEW if point == "finish-committed" else OLD)
    if point in ("write_data", "resolve_data", "lookup_object", "waiting"):
        left = set(RANKS) - {rank}
    elif point in ("write_data-written", "finish", "finish-committed"):
        left = set(RANKS)
    else:
        left = set()
    # What was on its way when the rank gave up is removed when it has arrived, by the thread that sent it.
    wait_until(lambda: orphans(tmp_path / "checkpoint") == left)
    rank_pool.run(save, tmp_path / "checkpoint", THIRD, ranks=RANKS)
    assert found(tmp_path / "checkpoint", len(RANKS)) == THIRD


@pytest.mark.parametrize(("point", "rank"), places(READER))
def test_a_load_in_which_a_rank_raises(point: str, rank: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """As for saves. Nothing in the store changes, and the next load of the same group has it all."""
    rank_pool.run(save, tmp_path / "checkpoint", OLD, ranks=RANKS)
    results = rank_pool.run(fail_each, tmp_path / "checkpoint", "load", point, rank, ranks=RANKS)
    assert_all_were_told(results, rank, of_metadata=point == "read_metadata")
    assert found(tmp_path / "checkpoint", len(RANKS)) == OLD
    assert orphans(tmp_path / "checkpoint") == set()


# ---- the store


def failing_requests(path: Path, rank: int, cause: str) -> list[Ending | None]:
    """The first request of this rank raises, then the second, until a save is through; and the same for loads."""
    endings: list[Ending | None] = []
    for attempt in (save_to, load_from):
        for number in range(1, 100):
            store: ObjectStore = LocalStore(str(path))
            if dist.get_rank() == rank:
                store = FaultyStore(store, [nth(number, "request", error=CAUSES[cause][0])])
            endings.append(ending(lambda: attempt(store)))  # noqa: B023  # called here
            if endings[-1] is None:
                break
    return endings


def save_to(store: ObjectStore) -> None:
    dcp.save(state(NEW), storage_writer=RemoteWriter(store, overwrite=True))


def load_from(store: ObjectStore) -> None:
    template = state(0.0)
    dcp.load(template, storage_reader=RemoteReader(store))
    assert_is(template, NEW)


@pytest.mark.parametrize("cause", ["foreign", "unpicklable", "exit"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_raises_what_it_likes(cause: str, rank: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """Each request of one rank in turn, in the thread that sends it: told to all, whoever sends it and whatever it is.

    Two shards are two requests, as are the two keys that are read; the coordinator also looks and commits, and every
    rank of a load reads the manifest. As many endings: a request that failed in silence would leave one out.
    """
    rank_pool.run(save, tmp_path, OLD, ranks=RANKS)
    _, kind, words = CAUSES[cause]
    for result in rank_pool.run(failing_requests, tmp_path, rank, cause, ranks=RANKS):
        saves, loads = result[: result.index(None)], result[result.index(None) + 1 : -1]
        assert len(saves) == (4 if rank == 0 else 2)
        assert len(loads) == 3
        for ended in saves + loads:
            assert ended is not None
            assert list(ended.failures) == [rank], ended
            assert words in ended.text, ended
            (error,) = ended.failures.values()
            # A shard that cannot be written is a SaveFailedError, which quotes its cause.
            assert isinstance(error, SaveFailedError) or type(error) is kind, ended
    count("hooks that raised", len(saves + loads))
    assert found(tmp_path, len(RANKS)) == NEW


# ---- what torch calls before its collectives


def unmoved(path: Path, rank: int) -> list[Ending | None]:
    """A save and a load by `checkpoint_id`, of which one rank is given one that nobody can open."""
    where = "nowhere://else" if dist.get_rank() == rank else path
    writer, reader = RemoteWriter(path, overwrite=True), RemoteReader(path)
    endings = [
        ending(lambda: dcp.save(state(NEW), storage_writer=writer, checkpoint_id=where)),
        ending(lambda: dcp.load(state(0.0), storage_reader=reader, checkpoint_id=where)),
        # Tried again without: the checkpoint before is not replaced, and not taken for the other.
        ending(lambda: dcp.save(state(NEW), storage_writer=writer)),
        ending(lambda: dcp.load(state(0.0), storage_reader=reader)),
    ]
    template = state(0.0)
    dcp.load(template, storage_reader=RemoteReader(path))
    assert_is(template, OLD)
    # Named something that can be opened, both go on.
    dcp.save(state(THIRD), storage_writer=writer, checkpoint_id=path)
    template = state(0.0)
    dcp.load(template, storage_reader=reader, checkpoint_id=path)
    assert_is(template, THIRD)
    return endings


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_id_that_one_rank_cannot_open(rank: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """`reset` is called before torch catches anything: what it finds is told by the next hook, to all ranks."""
    rank_pool.run(save, tmp_path, OLD, ranks=RANKS)
    for result in rank_pool.run(unmoved, tmp_path, rank, ranks=RANKS):
        for ended in result:
            assert ended is not None
            assert list(ended.failures) == [rank], ended
            assert isinstance(ended.failures[rank], InvalidArgumentError), ended
            assert "nowhere" in ended.text
    count("hooks that raised", 4)
    assert found(tmp_path, len(RANKS)) == THIRD
