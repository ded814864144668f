"""A rank that is killed or stopped at a point of a save or of a load by plain `dcp.save` and `dcp.load`.

The others end by themselves, and the store holds the old checkpoint or, once the manifest was put, the new one, whole.
A rank that goes on after they gave up and saved overwrites nothing. New groups save and load.

What is raised is gloo's own RuntimeError, which names no rank ("Connection closed by peer", "Timed out waiting"): the
ranks talk through torch alone, and no hook of ours is asked.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_remote import RemoteWriter
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.storage import LocalStore
from tests.support.figures import count
from tests.support.points import NEW, OLD, THIRD, found, state, wait_until
from tests.support.rank_faults import (
    LOAD,
    SAVE,
    Told,
    assert_goes_on,
    assert_is_gloos,
    attempt,
    before_each_collective,
    exchanged,
    give_up_soon,
    process_state,
    save,
    signal_this_thread,
    struck,
)
from tests.support.rank_pool import RankPool, RanksFailedError

pytestmark = [
    pytest.mark.torture,
    pytest.mark.skipif(sys.platform != "linux", reason="sees in Linux's /proc whether a process is dead or stopped"),
]

THREE, PAIR = range(3), range(2)


# ---- killed


def attempt_and_die(path: Path, what: str, point: str, victim: int) -> Told:
    points = SAVE if what == "save" else LOAD
    if dist.get_rank() != victim:
        return attempt(LocalStore(str(path)), points)
    store, surroundings = struck(path, points[point], lambda: signal_this_thread(signal.SIGKILL))
    with surroundings:
        attempt(store, points)
    raise AssertionError("unreachable")


@pytest.mark.parametrize(
    ("what", "point", "victim"),
    [
        ("save", "after-the-commit", 0),
        ("save", "before-the-commit", 0),
        ("save", "in-its-plan", 1),
        ("save", "after-its-first-put", 1),
        ("load", "read-metadata", 0),
        ("load", "after-its-first-range", 1),
    ],
)
def test_a_rank_that_is_killed(what: str, point: str, victim: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """All others raise, before the pool would have killed them; committed is a save whose manifest was put."""
    rank_pool.run(save, tmp_path, OLD, ranks=THREE)
    with pytest.raises(RanksFailedError) as caught:
        rank_pool.run(attempt_and_die, tmp_path, what, point, victim, ranks=THREE)
    failures = caught.value.failures
    assert {rank: failure.signal for rank, failure in failures.items()} == {victim: signal.SIGKILL}, caught.value
    count("ranks killed")
    for told in caught.value.results.values():
        assert_is_gloos(told.ending)
        assert told.commit == "never tried"
    assert found(tmp_path, len(THREE)) == (NEW if point == "after-the-commit" else OLD)
    assert_goes_on(rank_pool, tmp_path, THREE)


# ---- stopped


@dataclass(frozen=True, slots=True)
class Meeting:
    """Files through which the victim tells the survivor which collectives it enters."""

    folder: Path
    victim_pid: int

    def enter(self, number: int) -> None:
        (self.folder / str(number)).touch()

    def join(self, number: int) -> None:
        """Wait until the victim is in this collective too, or will never be."""
        wait_until(lambda: (self.folder / str(number)).exists() or process_state(self.victim_pid) == "T")
        if not (self.folder / str(number)).exists():
            give_up_soon()


def attempt_and_hang(path: Path, point: str, victim: int) -> Told:
    """The survivor gives up, commits a save of its own, and only then lets the victim go on."""
    meeting = Meeting(path.with_name("meeting"), exchanged(os.getpid())[victim])
    if dist.get_rank() == victim:
        store, surroundings = struck(path, SAVE[point], lambda: signal_this_thread(signal.SIGSTOP))
        with surroundings, before_each_collective(meeting.enter):
            return attempt(store, SAVE)
    try:
        with before_each_collective(meeting.join):
            told = attempt(LocalStore(str(path)), SAVE)
        there = found(path, len(PAIR)) if (path / MANIFEST_KEY).exists() else None
        dcp.save(state(THIRD, PAIR), storage_writer=RemoteWriter(path, overwrite=True), no_dist=True)
    finally:
        os.kill(meeting.victim_pid, signal.SIGCONT)
    return Told(told.ending, told.commit, there)


@pytest.mark.parametrize(
    ("point", "victim", "is_first"),
    [
        ("before-the-commit", 0, False),
        ("before-the-commit", 0, True),
        ("after-the-commit", 0, False),
        ("before-set-up", 1, False),
        ("after-its-last-put", 1, False),
    ],
)
def test_a_rank_that_is_stopped(point: str, victim: int, is_first: bool, rank_pool: RankPool, tmp_path: Path) -> None:
    """SIGSTOP at that very point; the other gives up and saves; then SIGCONT: the zombie's commit finds a conflict."""
    path = tmp_path / "checkpoint"
    path.with_name("meeting").mkdir()
    if not is_first:
        rank_pool.run(save, path, OLD, ranks=PAIR)
    told = rank_pool.run(attempt_and_hang, path, point, victim, ranks=PAIR, timeout_seconds=60)
    count("ranks stopped")
    survivor, zombie = told[1 - victim], told[victim]
    assert_is_gloos(survivor.ending)
    assert_is_gloos(zombie.ending)
    assert survivor.there == (None if is_first else NEW if point == "after-the-commit" else OLD)
    assert survivor.commit == "never tried"
    expected = {"before-the-commit": "CommitConflictError", "after-the-commit": "committed"}
    assert zombie.commit == expected.get(point, "never tried")
    assert found(path, len(PAIR)) == THIRD
    assert_goes_on(rank_pool, path, PAIR)
