"""A rank that is stopped or late, at every point of a save and of a load by plain `dcp.save` and `dcp.load`.

The others end by themselves, by the timeout of their group, with gloo's own error, which names no rank. A rank that
goes on after they gave up and somebody else has saved overwrites nothing, and ends, too. New groups save and load.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_remote import RemoteWriter
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.storage import LocalStore, ObjectStore
from tests.support.figures import count
from tests.support.points import NEW, OLD, THIRD, found, state, wait_until
from tests.support.rank_faults import (
    LOAD,
    PAIR,
    SAVE,
    THREE,
    Told,
    assert_goes_on,
    assert_is_gloos,
    attempt,
    before_each_collective,
    exchanged,
    give_up_soon,
    places,
    process_state,
    save,
    signal_this_thread,
    struck,
)
from tests.support.rank_pool import RankPool

pytestmark = [
    pytest.mark.torture,
    pytest.mark.skipif(sys.platform != "linux", reason="sees in Linux's /proc whether a process is stopped"),
]

How: TypeAlias = Literal["stopped", "late"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Files through which two ranks tell each other how far they are."""

    folder: Path
    how: How
    victim_pid: int

    def enter(self, number: int) -> None:
        """The victim will be in this collective."""
        (self.folder / str(number)).touch()

    def hang(self) -> None:
        """The victim goes no further, until it is told to."""
        if self.how == "stopped":
            signal_this_thread(signal.SIGSTOP)
        else:
            (self.folder / "late").touch()
            wait_until((self.folder / "go on").exists)

    def hangs(self) -> bool:
        return process_state(self.victim_pid) == "T" if self.how == "stopped" else (self.folder / "late").exists()

    def go_on(self) -> None:
        if self.how == "stopped":
            os.kill(self.victim_pid, signal.SIGCONT)
        else:
            (self.folder / "go on").touch()

    def join(self, number: int) -> None:
        """The survivor is about to wait for the victim."""
        wait_until(lambda: (self.folder / str(number)).exists() or self.hangs())
        if not (self.folder / str(number)).exists():
            give_up_soon()


def attempt_and_hang(path: Path, what: str, point: str, victim: int, how: How) -> Told:
    """The survivor gives up, commits a save of its own, and only then lets the victim go on."""
    points = SAVE if what == "save" else LOAD
    meeting = Meeting(path.with_name("meeting"), how, exchanged(os.getpid())[victim])
    if dist.get_rank() == victim:
        store, surroundings = struck(path, points[point], meeting.hang)
        with surroundings, before_each_collective(meeting.enter):
            return attempt(store, points)
    try:
        with before_each_collective(meeting.join):
            told = attempt(LocalStore(str(path)), points)
        there = found(path, len(PAIR)) if (path / MANIFEST_KEY).exists() else None
        dcp.save(state(THIRD, PAIR), storage_writer=RemoteWriter(path, overwrite=True), no_dist=True)
    finally:
        meeting.go_on()
    return Told(told.ending, told.commit, there)


def hung(rank_pool: RankPool, path: Path, what: str, point: str, victim: int, *, how: How) -> tuple[Told, Told]:
    """How it ended for the survivor, and for the victim."""
    path.with_name("meeting").mkdir()
    told = rank_pool.run(attempt_and_hang, path, what, point, victim, how, ranks=PAIR, timeout_seconds=60)
    return told[1 - victim], told[victim]


def assert_nothing_was_overwritten(survivor: Told, zombie: Told, path: Path, point: str) -> None:
    """Check that the survivor's checkpoint is there, and that the zombie was told the truth about its own save."""
    assert_is_gloos(survivor.ending)
    assert_is_gloos(zombie.ending)
    assert survivor.there == (NEW if point == "after-the-commit" else OLD)
    assert zombie.commit == {"before-the-commit": "CommitConflictError", "after-the-commit": "committed"}.get(
        point, "never tried"
    )
    assert survivor.commit == "never tried"
    assert found(path, len(PAIR)) == THIRD


@pytest.mark.parametrize(("point", "victim"), places(SAVE))
def test_a_rank_that_is_stopped_in_a_save(point: str, victim: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """SIGSTOP at that very point; the other gives up and saves; then SIGCONT: the zombie's commit finds a conflict."""
    path = tmp_path / "checkpoint"
    rank_pool.run(save, path, OLD, ranks=PAIR)
    survivor, zombie = hung(rank_pool, path, "save", point, victim, how="stopped")
    count("ranks stopped")
    assert_nothing_was_overwritten(survivor, zombie, path, point)
    assert_goes_on(rank_pool, path, PAIR)


def test_a_coordinator_that_is_stopped_in_the_first_save(rank_pool: RankPool, tmp_path: Path) -> None:
    """Before its commit, where nothing lies yet: what the other saves meanwhile is not overwritten either."""
    path = tmp_path / "checkpoint"
    survivor, zombie = hung(rank_pool, path, "save", "before-the-commit", 0, how="stopped")
    count("ranks stopped")
    assert_is_gloos(survivor.ending)
    assert_is_gloos(zombie.ending)
    assert survivor.there is None
    assert zombie.commit == "CommitConflictError"
    assert found(path, len(PAIR)) == THIRD


@pytest.mark.parametrize(("point", "victim"), places(LOAD))
def test_a_rank_that_is_stopped_in_a_load(point: str, victim: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """The same. What was saved meanwhile is no concern of the zombie's, whose load fails with its group."""
    path = tmp_path / "checkpoint"
    rank_pool.run(save, path, OLD, ranks=PAIR)
    survivor, zombie = hung(rank_pool, path, "load", point, victim, how="stopped")
    count("ranks stopped")
    assert_is_gloos(survivor.ending)
    assert_is_gloos(zombie.ending)
    assert found(path, len(PAIR)) == THIRD
    assert_goes_on(rank_pool, path, PAIR)


@pytest.mark.parametrize(
    ("point", "victim"), [("before-set-up", 1), ("after-its-last-put", 1), ("before-the-commit", 0)]
)
def test_a_straggler_that_is_too_late(point: str, victim: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """Later than the group's timeout: it ends as the others do, by itself, and overwrites nothing."""
    path = tmp_path / "checkpoint"
    rank_pool.run(save, path, OLD, ranks=PAIR)
    survivor, straggler = hung(rank_pool, path, "save", point, victim, how="late")
    assert_nothing_was_overwritten(survivor, straggler, path, point)
    assert_goes_on(rank_pool, path, PAIR)


def save_behind_the_others(path: Path, meeting: Path, point: str, straggler: int) -> None:
    """The straggler goes on only when all others wait for it in the collective that comes next."""
    rank, others = dist.get_rank(), dist.get_world_size() - 1

    def enter(number: int) -> None:
        (meeting / f"{number}-{rank}").touch()

    def wait_for_the_others() -> None:
        coming = len(list(meeting.glob(f"*-{rank}")))
        wait_until(lambda: len(list(meeting.glob(f"{coming}-*"))) == others)

    store: ObjectStore = LocalStore(str(path))
    surroundings: AbstractContextManager[None] = nullcontext()
    if rank == straggler:
        store, surroundings = struck(path, SAVE[point], wait_for_the_others)
    with surroundings, before_each_collective(enter):
        dcp.save(state(NEW), storage_writer=RemoteWriter(store, overwrite=True))


@pytest.mark.parametrize(("point", "straggler"), places(SAVE))
def test_a_straggler(point: str, straggler: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """At each point one rank waits until all others are in the next collective, or about to be: the save succeeds."""
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    rank_pool.run(save_behind_the_others, tmp_path / "checkpoint", meeting, point, straggler, ranks=THREE)
    assert found(tmp_path / "checkpoint", len(THREE)) == NEW
