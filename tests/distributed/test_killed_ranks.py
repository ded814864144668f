"""A rank that is killed, at every point of a save and of a load by plain `dcp.save` and `dcp.load`.

The others end by themselves, and the store holds the old checkpoint or, once the manifest was put, the new one, whole.
New groups save and load.

What is raised is gloo's own RuntimeError, which names no rank ("Connection closed by peer", "Timed out waiting"): the
ranks talk through torch alone, and no hook of ours is asked. Only something beside the group can tell the culprit.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist

from dcp_remote.storage import LocalStore
from tests.support.figures import count
from tests.support.points import NEW, OLD, found, wait_until
from tests.support.rank_faults import (
    COMMITS,
    LAST_OF_A_SAVE,
    LOAD,
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
from tests.support.rank_pool import RankPool, RanksFailedError

pytestmark = [
    pytest.mark.torture,
    pytest.mark.skipif(sys.platform != "linux", reason="sees in Linux's /proc whether a process is dead"),
]


def attempt_and_die(path: Path, what: str, point: str, victim: int) -> Told:
    points = SAVE if what == "save" else LOAD
    if dist.get_rank() != victim:
        return attempt(LocalStore(str(path)), points)
    store, surroundings = struck(path, points[point], lambda: signal_this_thread(signal.SIGKILL))
    with surroundings:
        attempt(store, points)
    raise AssertionError("unreachable")


def survivors(rank_pool: RankPool, path: Path, what: str, point: str, victim: int) -> list[Told]:
    """How it ended on the others, which returned before the pool would have killed them."""
    with pytest.raises(RanksFailedError) as caught:
        rank_pool.run(attempt_and_die, path, what, point, victim, ranks=THREE)
    failures = caught.value.failures
    assert {rank: failure.signal for rank, failure in failures.items()} == {victim: signal.SIGKILL}, caught.value
    count("ranks killed")
    return list(caught.value.results.values())


@pytest.mark.parametrize(("point", "victim"), places(SAVE))
def test_a_rank_that_is_killed_in_a_save(point: str, victim: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """Let the rank kill itself at that point: all others raise; committed is the save whose manifest was put."""
    rank_pool.run(save, tmp_path, OLD, ranks=THREE)
    for told in survivors(rank_pool, tmp_path, "save", point, victim):
        assert_is_gloos(told.ending)
        assert told.commit == "never tried"
    assert found(tmp_path, len(THREE)) == (NEW if point == "after-the-commit" else OLD)
    assert_goes_on(rank_pool, tmp_path, THREE)


@pytest.mark.parametrize(("point", "victim"), places(LOAD))
def test_a_rank_that_is_killed_in_a_load(point: str, victim: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """All others raise; nothing in the store changes."""
    rank_pool.run(save, tmp_path, OLD, ranks=THREE)
    for told in survivors(rank_pool, tmp_path, "load", point, victim):
        assert_is_gloos(told.ending)
    assert found(tmp_path, len(THREE)) == OLD
    assert_goes_on(rank_pool, tmp_path, THREE)


def save_and_kill(path: Path, point: str) -> Told:
    """The coordinator kills rank 1, which has uploaded all and waits, and goes on when it is dead."""
    pid = exchanged(os.getpid())[1]

    def is_dead() -> bool:
        return process_state(pid) in "ZX"

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        wait_until(is_dead)

    def before_the_last_collective(number: int) -> None:
        """Rank 2 would wait for a coordinator that has raised and lives: nobody closes that connection."""
        if number == LAST_OF_A_SAVE:
            wait_until(is_dead)
            give_up_soon()

    if dist.get_rank() == 0:
        store, surroundings = struck(path, SAVE[point], kill)
        with surroundings:
            return attempt(store, SAVE)
    with before_each_collective(before_the_last_collective) if dist.get_rank() == 2 else nullcontext():
        return attempt(LocalStore(str(path)), SAVE)


@pytest.mark.parametrize("point", COMMITS)
def test_a_rank_that_is_killed_while_the_coordinator_commits(point: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """It has done its part: the save is committed. Torch raises on some ranks all the same, and returns on others.

    An error means "not confirmed"; who is told of no error, is told the truth.
    """
    rank_pool.run(save, tmp_path, OLD, ranks=THREE)
    with pytest.raises(RanksFailedError) as caught:
        rank_pool.run(save_and_kill, tmp_path, point, ranks=THREE)
    assert {rank: failure.signal for rank, failure in caught.value.failures.items()} == {1: signal.SIGKILL}
    count("ranks killed")
    assert caught.value.results[0].commit == "committed"
    for told in caught.value.results.values():
        if told.ending is not None:
            assert_is_gloos(told.ending)
    assert found(tmp_path, len(THREE)) == NEW
    assert_goes_on(rank_pool, tmp_path, THREE)
