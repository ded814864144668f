"""What ranks do together, where they are processes that are killed, stopped, or late, or lose their store.

The deadline is far away: who raises before it was told, or found out.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from dcp_remote.errors import FencedError, InvalidArgumentError, SaveFailedError, SaveTimeoutError
from dcp_remote.joint import Joint
from dcp_remote.ranks import Ranks
from dcp_remote.testing.rank_pool import RankPool, RanksFailedError
from tests.distributed.parties import WHAT, Ended, expected, join, together, wait_until
from tests.distributed.strikes import exchanged, process_state, strike

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sees in Linux's /proc whether a process is stopped")

BEAT_SECONDS = 0.2
SILENCE_SECONDS = 2.0
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Told:
    """How it ended on a rank.

    Attributes:
        error: What was raised.
        lost: Whether the coordinator was.
        after: What a joint that followed returned, if there was one.
    """

    error: BaseException | None
    lost: bool = False
    after: object = None


@pytest.fixture
def ranks_that_run(rank_pool: RankPool) -> RankPool:
    """Those that were killed are there again, each by itself: a group would not wait long enough on a busy machine."""
    missing = [rank for rank, pid in enumerate(rank_pool.pids) if pid is None]
    for ranks in [missing] if len(missing) == rank_pool.world_size else [[rank] for rank in missing]:
        rank_pool.run(os.getpid, ranks=ranks)
    return rank_pool


Part: TypeAlias = Callable[[Joint], object]


def attempt(ranks: Ranks, part: Part, *, seconds: float = DEADLINE_SECONDS) -> Told:
    """A joint, in a thread of its own; this one looks, as whoever waits for a save does."""
    joint = join(ranks, seconds=seconds, silence_seconds=SILENCE_SECONDS)
    ended: list[Ended[None]] = []

    def act() -> None:
        with joint:
            part(joint)

    thread = threading.Thread(target=lambda: ended.append(Ended(act)), daemon=True)
    thread.start()
    while thread.is_alive() and joint.cancelled is None:
        joint.look()
        thread.join(0.1)
    thread.join(1.0)
    error = ended[0].error if ended else joint.cancelled
    return Told(error, joint.coordinator_lost)


def save(joint: Joint) -> None:
    """Two rounds, and a commit."""
    joint.gather(None, len)
    joint.note("uploading, 1 of 40 shards")
    time.sleep(0.5)

    def commit(values: list[None]) -> None:
        joint.no_return()

    joint.gather(None, commit)


def save_and_strike(number: signal.Signals, *, at: str) -> Part:
    """The same; this rank is struck in its upload, or in the first round."""

    def part(joint: Joint) -> None:
        if at == "upload":
            joint.gather(None, len)
        joint.note("uploading, 1 of 40 shards")
        time.sleep(2 * BEAT_SECONDS)
        strike(number)
        while True:
            time.sleep(0.05)
            if joint.deadline.expired():  # it was told, when it went on
                raise SaveTimeoutError("The upload did not end by the deadline.")

    return part


def with_ranks(part: Callable[[Ranks], Told]) -> Told:
    ranks = Ranks.of(None, "checkpoints", beat_seconds=BEAT_SECONDS)
    try:
        return part(ranks)
    finally:
        ranks.close()


def meet(where: str, ranks: Iterable[int]) -> None:
    """Until all of them are here; by the store of the process group, which lives as long as the test."""
    store = _get_default_store()
    store.set(f"{where} {dist.get_rank()}", "")
    wait_until(lambda: store.check([f"{where} {rank}" for rank in ranks]))


# ---- ranks


def test_joints_over_a_process_group(ranks_that_run: RankPool) -> None:
    """Of all ranks, of two of them, and twice under one name at a time."""
    assert ranks_that_run.run(_joints_of_groups) == expected(4)


def _joints_of_groups() -> tuple[int, int]:
    first, second = (Ranks.of(None, "checkpoints", beat_seconds=BEAT_SECONDS) for _ in range(2))
    group = dist.new_group([1, 3])
    own: Ranks | None = None
    if dist.get_rank() in (1, 3):
        assert group is not None
        own = Ranks.of(group, "checkpoints", beat_seconds=BEAT_SECONDS)
        assert own.rank == (dist.get_rank() - 1) // 2
        assert together(own) == expected(2)[own.rank]
    else:
        with pytest.raises(InvalidArgumentError, match="does not belong"):
            Ranks.of(group, "checkpoints")
    with join(first, "the first") as one, join(second, "the second") as other:
        assert one.gather(1, sum) == 4
        assert other.gather(2, sum) == 8
    answer = together(first)
    for ranks in (own, second, first):
        if ranks is not None:
            ranks.close()
    return answer


def test_a_rank_that_raises(ranks_that_run: RankPool) -> None:
    """All others raise the same, long before the deadline."""
    told = ranks_that_run.run(_raise)
    assert [type(one.error) for one in told] == 4 * [FencedError]
    assert [str(one.error) for one in told] == ["Stop. rank=2", "Stop. rank=2", "Stop.", "Stop. rank=2"]


def _raise() -> Told:
    def part(joint: Joint) -> None:
        joint.gather(None, len)
        if dist.get_rank() == 2:
            raise FencedError("Stop.")
        while not joint.deadline.expired():
            time.sleep(0.01)
        raise SaveTimeoutError("The upload did not end by the deadline.")

    return with_ranks(lambda ranks: attempt(ranks, part))


@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_is_killed(victim: int, ranks_that_run: RankPool) -> None:
    """The others name it when it has been silent for a while, with what it did last."""
    with pytest.raises(RanksFailedError) as caught:
        ranks_that_run.run(_die, victim, ranks=range(3))
    assert {rank: failure.signal for rank, failure in caught.value.failures.items()} == {victim: signal.SIGKILL}
    for told in caught.value.results.values():
        assert_silent(told, victim)


def assert_silent(told: Told, victim: int) -> None:
    assert type(told.error) is SaveFailedError, told
    assert f"Rank {victim} has been silent" in str(told.error)
    assert WHAT in str(told.error)
    assert f"last='{victim}: uploading, 1 of 40 shards'" in str(told.error)
    assert told.lost == (victim == 0)


def _die(victim: int) -> Told:
    part = save_and_strike(signal.SIGKILL, at="upload") if dist.get_rank() == victim else save
    return with_ranks(lambda ranks: attempt(ranks, part))


@pytest.mark.parametrize(("at", "victim"), [("upload", 1), ("upload", 0), ("before the commit", 0)])
def test_a_rank_that_is_stopped_and_goes_on(at: str, victim: int, ranks_that_run: RankPool) -> None:
    """The others name it; it finds that it was given up, commits nothing, and takes part in what follows."""
    told = ranks_that_run.run(_stop, at, victim, ranks=range(3))
    for rank, one in enumerate(told):
        if rank != victim:
            assert_silent(one, victim)
        assert one.after == expected(3)[rank]
    assert isinstance(told[victim].error, SaveFailedError), told[victim]
    assert "stopped or stuck" in str(told[victim].error) or "silent" in str(told[victim].error)
    assert not told[0].lost


def _stop(at: str, victim: int) -> Told:
    pid = exchanged(os.getpid())[victim]

    def part(joint: Joint) -> None:
        if at == "upload":
            save_and_strike(signal.SIGSTOP, at=at)(joint)
        joint.gather(None, len)
        joint.note("uploading, 1 of 40 shards")
        time.sleep(2 * BEAT_SECONDS)

        def commit(values: list[None]) -> None:
            strike(signal.SIGSTOP)
            joint.no_return()
            raise AssertionError("it was given up, and commits")

        joint.gather(None, commit)

    def act(ranks: Ranks) -> Told:
        if ranks.rank == victim:
            told = attempt(ranks, part)
        else:
            told = attempt(ranks, save)
            others = [rank for rank in range(3) if rank != victim]
            meet("given up", others)
            if ranks.rank == others[0]:
                wait_until(lambda: process_state(pid) == "T")
                os.kill(pid, signal.SIGCONT)
        return Told(told.error, told.lost, together(ranks, "the save of step 8", seconds=DEADLINE_SECONDS))

    return with_ranks(act)


def test_a_rank_that_never_comes(ranks_that_run: RankPool) -> None:
    """It lives, and does something else: named at the deadline."""
    told = ranks_that_run.run(_never_come, ranks=range(3))
    for one in told[:2]:
        assert type(one.error) is SaveTimeoutError
        assert "Rank 2 did not report by the deadline" in str(one.error)
        assert "last='2: not here yet, training'" in str(one.error)


def _never_come() -> Told:
    def act(ranks: Ranks) -> Told:
        if ranks.rank == 2:
            ranks.meet()
            assert ranks.pulse is not None
            ranks.pulse.note("training")
            told = Told(None)
        else:
            told = attempt(ranks, save, seconds=1.5)
        exchanged(0)
        return told

    return with_ranks(act)


def test_a_rank_that_is_busy_is_not_silent(ranks_that_run: RankPool) -> None:
    """It computes in Python for longer than the others' patience."""
    assert [one.error for one in ranks_that_run.run(_be_busy, ranks=range(2))] == [None, None]


def _be_busy() -> Told:
    def part(joint: Joint) -> None:
        end = time.monotonic() + 1.2 * SILENCE_SECONDS
        while dist.get_rank() == 1 and time.monotonic() < end:
            sum(range(1000))
        save(joint)

    return with_ranks(lambda ranks: attempt(ranks, part))


# ---- the host of the store


def test_a_host_that_is_no_rank(ranks_that_run: RankPool) -> None:
    """The fourth process hosts the store of three, and is stopped: all of them find out, also the coordinator."""
    told = run_and_lose(ranks_that_run, "stopped", host=3, world_size=4)
    assert_store_lost(told, "stopped", host=3)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_host_that_is_the_coordinator(how: str, ranks_that_run: RankPool) -> None:
    """As under torch.distributed without an agent. What it did last, nobody knows."""
    told = run_and_lose(ranks_that_run, how, host=0, world_size=3)
    assert_store_lost(told, how, host=0)


def run_and_lose(pool: RankPool, how: str, *, host: int, world_size: int) -> dict[int, Told]:
    """What became of the ranks that live."""
    if how == "stopped":
        return dict(enumerate(pool.run(_lose_the_host, how, host, ranks=range(world_size))))
    with pytest.raises(RanksFailedError) as caught:
        pool.run(_lose_the_host, how, host, ranks=range(world_size))
    assert list(caught.value.failures) == [host], caught.value
    return caught.value.results


def assert_store_lost(told: dict[int, Told], how: str, *, host: int) -> None:
    for rank in {0, 1, 2} - {host}:
        one = told[rank]
        assert type(one.error) is SaveFailedError, one
        text = "has not answered for" if how == "stopped" else "has gone"
        assert f"The key-value store of the process group {text}" in str(one.error)
        assert one.lost == (rank > 0)
        if how == "stopped":
            assert one.after == expected(3)[rank]


def _lose_the_host(how: str, host: int) -> Told:
    rank = dist.get_rank()
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == host else None
    port, pid = exchanged(own.port if own is not None else 0)[host], exchanged(os.getpid())[host]
    store: dist.Store = own or dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    ranks = Ranks(rank, 3, store, beat_seconds=BEAT_SECONDS) if rank < 3 else None
    number = signal.SIGSTOP if how == "stopped" else signal.SIGKILL
    told = Told(None)
    if rank == host:
        time.sleep(4 * BEAT_SECONDS)
        if ranks is not None:
            told = attempt(ranks, save_and_strike(number, at="first round"))
        else:
            strike(number)
    else:
        assert ranks is not None
        told = attempt(ranks, save_slowly)
        others = [one for one in range(3) if one != host]
        meet("given up", others)
        if how == "killed":
            return told
        if rank == others[0]:
            os.kill(pid, signal.SIGCONT)
    if ranks is None:
        meet("done", range(3))  # it serves until the others have done with it
        return told
    after = together(ranks, "the save of step 8", seconds=DEADLINE_SECONDS)
    ranks.close()
    meet("done", range(3))
    return Told(told.error, told.lost, after)


def save_slowly(joint: Joint) -> None:
    """The host is struck while this waits in the store, or is about to."""
    joint.note("uploading, 1 of 40 shards")
    time.sleep(6 * BEAT_SECONDS)
    joint.gather(None, len)
    time.sleep(6 * BEAT_SECONDS)
    save(joint)
