"""Collective operations of processes, which are killed, stopped, or late, or lose their store.

The deadline is far away: a rank that raises earlier was told of the failure, or has found it out by itself.
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

from dcp_remote.coordination import host_link
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import FencedError, InvalidArgumentError, SaveFailedError, SaveTimeoutError
from tests.support.rank_faults import exchanged, process_state, signal_this_thread
from tests.support.rank_pool import RankPool, RanksFailedError
from tests.support.rank_threads import WHAT, Ended, expected, join, plain, together, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sees in Linux's /proc whether a process is stopped")

HEARTBEAT_SECONDS = 0.2
SILENCE_SECONDS = 2.0
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Told:
    """Result of an operation on a rank.

    Attributes:
        error: Error that was raised, if any.
        lost: True if the coordinator was lost.
        after: Result of the operation that followed, if there was one.
    """

    error: BaseException | None
    lost: bool = False
    after: object = None


@pytest.fixture
def ranks_that_run(rank_pool: RankPool) -> RankPool:
    """Start again the ranks that were killed, one by one: a group would not wait long enough on a busy machine."""
    missing = [rank for rank, pid in enumerate(rank_pool.pids) if pid is None]
    for ranks in [missing] if len(missing) == rank_pool.world_size else [[rank] for rank in missing]:
        rank_pool.run(os.getpid, ranks=ranks)
    return rank_pool


Part: TypeAlias = Callable[[Collective], object]


def attempt(ranks: RankGroup, part: Part, *, seconds: float = DEADLINE_SECONDS) -> Told:
    """Carry out an operation in another thread, and call `check_time_and_store` here, as what waits for a save does."""
    collective = join(ranks, seconds=seconds, silence_seconds=SILENCE_SECONDS)
    ended: list[Ended[None]] = []

    def act() -> None:
        with collective:
            part(collective)

    thread = threading.Thread(target=lambda: ended.append(Ended(act)), daemon=True)
    thread.start()
    while thread.is_alive() and collective.cancelled is None:
        collective.check_time_and_store()
        thread.join(0.1)
    thread.join(1.0)
    error = ended[0].error if ended else collective.cancelled
    return Told(error, collective.is_commit_unknown)


def save(collective: Collective) -> None:
    """Do two rounds, and a commit."""
    collective.gather(None, len)
    collective.set_activity("uploading, 1 of 40 shards")
    time.sleep(0.5)

    def commit(values: list[None]) -> None:
        collective.begin_commit()

    collective.gather(None, commit)


def save_and_strike(number: signal.Signals, *, at: str) -> Part:
    """Return the same part, but a signal strikes this rank in its upload, or in the first round."""

    def part(collective: Collective) -> None:
        if at == "upload":
            collective.gather(None, len)
        collective.set_activity("uploading, 1 of 40 shards")
        time.sleep(4 * HEARTBEAT_SECONDS)  # a leader of the host has this note after one heartbeat, others after two
        signal_this_thread(number)
        while True:
            time.sleep(0.05)
            if collective.deadline.expired():  # this rank has gone on, and was told
                raise SaveTimeoutError("The upload did not end by the deadline.")

    return part


def with_ranks(part: Callable[[RankGroup], Told]) -> Told:
    ranks = RankGroup.from_process_group(None, "checkpoints", beat_seconds=HEARTBEAT_SECONDS)
    try:
        return part(ranks)
    finally:
        ranks.close()


def meet(where: str, ranks: Iterable[int]) -> None:
    """Wait until all ranks are here, by the store of the process group, which lives as long as the test."""
    store = _get_default_store()
    store.set(f"{where} {dist.get_rank()}", "")
    wait_until(lambda: store.check([f"{where} {rank}" for rank in ranks]))


# ---- ranks


def test_operations_of_process_groups(ranks_that_run: RankPool) -> None:
    """Groups of all ranks and of two, and two groups of one name at a time."""
    assert ranks_that_run.run(_use_groups) == expected(4)


def _use_groups() -> tuple[int, int]:
    first, second = (
        RankGroup.from_process_group(None, "checkpoints", beat_seconds=HEARTBEAT_SECONDS) for _ in range(2)
    )
    group = dist.new_group([1, 3])
    own: RankGroup | None = None
    if dist.get_rank() in (1, 3):
        assert group is not None
        own = RankGroup.from_process_group(group, "checkpoints", beat_seconds=HEARTBEAT_SECONDS)
        assert own.rank == (dist.get_rank() - 1) // 2
        assert together(own) == expected(2)[own.rank]
    else:
        with pytest.raises(InvalidArgumentError, match="does not belong"):
            RankGroup.from_process_group(group, "checkpoints")
    with join(first, "the first") as first_operation, join(second, "the second") as second_operation:
        assert first_operation.gather(1, sum) == 4
        assert second_operation.gather(2, sum) == 8
    answer = together(first)
    for ranks in (own, second, first):
        if ranks is not None:
            ranks.close()
    return answer


def test_a_rank_that_raises(ranks_that_run: RankPool) -> None:
    """All other ranks raise the same error, long before the deadline."""
    told = ranks_that_run.run(_raise)
    assert [type(result.error) for result in told] == 4 * [FencedError]
    assert [plain(result.error) for result in told] == ["Stop. rank=2", "Stop. rank=2", "Stop.", "Stop. rank=2"]


def _raise() -> Told:
    def part(collective: Collective) -> None:
        collective.gather(None, len)
        if dist.get_rank() == 2:
            raise FencedError("Stop.")
        while not collective.deadline.expired():
            time.sleep(0.01)
        raise SaveTimeoutError("The upload did not end by the deadline.")

    return with_ranks(lambda ranks: attempt(ranks, part))


@pytest.mark.torture
@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_is_killed(victim: int, ranks_that_run: RankPool) -> None:
    """The others name the silent rank, with its last note."""
    with pytest.raises(RanksFailedError) as caught:
        ranks_that_run.run(_die, victim, ranks=range(3))
    assert {rank: failure.signal for rank, failure in caught.value.failures.items()} == {victim: signal.SIGKILL}
    for told in caught.value.results.values():
        assert_silent(told, victim)


def assert_silent(told: Told, victim: int) -> None:
    assert type(told.error) is SaveFailedError, told
    assert f"Rank {victim} has been silent" in plain(told.error)
    assert WHAT in plain(told.error)
    assert f"last='{victim}: uploading, 1 of 40 shards'" in plain(told.error)
    assert told.lost == (victim == 0)


def _die(victim: int) -> Told:
    part = save_and_strike(signal.SIGKILL, at="upload") if dist.get_rank() == victim else save
    return with_ranks(lambda ranks: attempt(ranks, part))


@pytest.mark.torture(smoke=False)
@pytest.mark.parametrize(("at", "victim"), [("upload", 1), ("upload", 0), ("before the commit", 0)])
def test_a_rank_that_is_stopped_and_goes_on(at: str, victim: int, ranks_that_run: RankPool) -> None:
    """The others name it; the rank itself gives up, commits nothing, and takes part in the next operation."""
    told = ranks_that_run.run(_stop, at, victim, ranks=range(3))
    for rank, result in enumerate(told):
        if rank != victim:
            assert_silent(result, victim)
        assert result.after == expected(3)[rank]
    assert isinstance(told[victim].error, SaveFailedError), told[victim]
    assert "ran no code for" in str(told[victim].error) or "silent" in str(told[victim].error)
    assert not told[0].lost


def _stop(at: str, victim: int) -> Told:
    pid = exchanged(os.getpid())[victim]

    def part(collective: Collective) -> None:
        if at == "upload":
            save_and_strike(signal.SIGSTOP, at=at)(collective)
        collective.gather(None, len)
        collective.set_activity("uploading, 1 of 40 shards")
        time.sleep(4 * HEARTBEAT_SECONDS)

        def commit(values: list[None]) -> None:
            signal_this_thread(signal.SIGSTOP)
            collective.begin_commit()
            raise AssertionError("the others have given up, and the coordinator commits")

        collective.gather(None, commit)

    def act(ranks: RankGroup) -> Told:
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
    """A rank that lives, but never begins the operation, is named at the deadline."""
    told = ranks_that_run.run(_never_come, ranks=range(3))
    for result in told[:2]:
        assert type(result.error) is SaveTimeoutError
        assert "Rank 2 did not report by the deadline" in plain(result.error)
        assert "last='2: has not joined, training'" in plain(result.error)


def _never_come() -> Told:
    def act(ranks: RankGroup) -> Told:
        ranks.start_heartbeat()
        assert ranks.heartbeat is not None
        ranks.heartbeat.set_activity("training")
        meet("training", range(3))  # else a rank that starts slowly, on a busy machine, is missing as well
        told = attempt(ranks, save, seconds=4.0) if ranks.rank != 2 else Told(None)
        exchanged(0)
        return told

    return with_ranks(act)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_speaks_for_its_host_is_struck(number: signal.Signals, ranks_that_run: RankPool) -> None:
    """The rank has put the part of three ranks, and dies or is stopped before the answer: the others get theirs."""
    if number == signal.SIGSTOP:
        assert ranks_that_run.run(_strike_the_speaker, number) == [10, 10, 10, 10]
        return
    with pytest.raises(RanksFailedError) as caught:
        ranks_that_run.run(_strike_the_speaker, number)
    assert [failure.signal for failure in caught.value.failures.values()] == [signal.SIGKILL]
    assert sorted(caught.value.results.values()) == [10, 10, 10]


def _strike_the_speaker(number: signal.Signals) -> int:
    with pytest.MonkeyPatch.context() as patch:  # the process goes on to other tests
        patch.setattr(host_link, "_PING_SECONDS", 0.1)
        return _lose_the_speaker(number)


def _lose_the_speaker(number: signal.Signals) -> int:
    ranks = RankGroup.from_process_group(None, "checkpoints", beat_seconds=HEARTBEAT_SECONDS)
    store = _get_default_store()

    def strike() -> None:
        wait_until(lambda: store.check(["collected"]))
        signal_this_thread(number)

    def decide(values: list[int]) -> int:
        wait_until(lambda: store.check(["speaker"]))
        store.set("collected", "")
        pid = int(store.get("speaker"))
        wait_until(lambda: process_state(pid) in "TZX")
        return sum(values)

    assert together(ranks) == expected(4)[ranks.rank]
    with join(ranks, seconds=DEADLINE_SECONDS, silence_seconds=DEADLINE_SECONDS) as collective:
        link = ranks._member.link()
        if link is not None and link._listening is not None:
            store.set("speaker", str(os.getpid()))
            threading.Thread(target=strike, daemon=True).start()
        answer = collective.gather(ranks.rank + 1, decide)
    pid = int(store.get("speaker"))
    if number == signal.SIGSTOP and pid != os.getpid():
        store.set(f"told {ranks.rank}", "")
        wait_until(lambda: store.add("awake", 0) or sum(store.check([f"told {rank}"]) for rank in range(4)) == 3)
        store.add("awake", 1)
        os.kill(pid, signal.SIGCONT)
    ranks.close()
    return answer


def test_a_rank_that_is_busy_is_not_silent(ranks_that_run: RankPool) -> None:
    """A rank computes in Python for more than `silence_seconds`."""
    assert [result.error for result in ranks_that_run.run(_be_busy, ranks=range(2))] == [None, None]


def _be_busy() -> Told:
    def part(collective: Collective) -> None:
        end = time.monotonic() + 1.2 * SILENCE_SECONDS
        while dist.get_rank() == 1 and time.monotonic() < end:
            sum(range(1000))
        save(collective)

    return with_ranks(lambda ranks: attempt(ranks, part))


# ---- the host of the store


def test_a_host_that_is_no_rank(ranks_that_run: RankPool) -> None:
    """A fourth process hosts the store of three ranks, and is stopped: all ranks find out."""
    told = run_and_lose(ranks_that_run, "stopped", host=3, world_size=4)
    assert_store_lost(told, "stopped", host=3)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_host_that_is_the_coordinator(how: str, ranks_that_run: RankPool) -> None:
    """As under torch.distributed without an agent; no other rank knows what the coordinator did last."""
    try:
        told = run_and_lose(ranks_that_run, how, host=0, world_size=3)
    finally:
        ranks_that_run.close()  # torch's clients of a dead store try on for five minutes, and join no group meanwhile
    assert_store_lost(told, how, host=0)


def run_and_lose(pool: RankPool, how: str, *, host: int, world_size: int) -> dict[int, Told]:
    """Return the results of the ranks that live."""
    if how == "stopped":
        return dict(enumerate(pool.run(_lose_the_host, how, host, ranks=range(world_size))))
    with pytest.raises(RanksFailedError) as caught:
        pool.run(_lose_the_host, how, host, ranks=range(world_size))
    assert list(caught.value.failures) == [host], caught.value
    return caught.value.results


def assert_store_lost(told: dict[int, Told], how: str, *, host: int) -> None:
    for rank in {0, 1, 2} - {host}:
        result = told[rank]
        assert type(result.error) is SaveFailedError, result
        text = plain(result.error)
        assert f"Rank {rank} has " in text
        assert "the key-value store of the process group at 127.0.0.1:" in text
        # A host may be connected to for a moment while its process is being killed.
        assert "has heard nothing from" in text or (how == "killed" and "has lost the connection to" in text)
        assert result.lost == (rank > 0)
        if how == "stopped":
            assert result.after == expected(3)[rank]


def _lose_the_host(how: str, host: int) -> Told:
    rank = dist.get_rank()
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == host else None
    port, pid = exchanged(own.port if own is not None else 0)[host], exchanged(os.getpid())[host]
    store: dist.Store = own or dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    ranks = RankGroup(rank, 3, store, beat_seconds=HEARTBEAT_SECONDS) if rank < 3 else None
    number = signal.SIGSTOP if how == "stopped" else signal.SIGKILL
    told = Told(None)
    if rank == host:
        time.sleep(4 * HEARTBEAT_SECONDS)
        if ranks is not None:
            told = attempt(ranks, save_and_strike(number, at="first round"))
        else:
            signal_this_thread(number)
    else:
        assert ranks is not None
        told = attempt(ranks, save_slowly)
        others = [rank for rank in range(3) if rank != host]
        meet("given up", others)
        if how == "killed":
            return told
        if rank == others[0]:
            os.kill(pid, signal.SIGCONT)
    if ranks is None:
        meet("done", range(3))  # the store is served until the ranks are done
        return told
    after = together(ranks, "the save of step 8", seconds=DEADLINE_SECONDS)
    ranks.close()
    meet("done", range(3))
    return Told(told.error, told.lost, after)


def save_slowly(collective: Collective) -> None:
    """As `save`, but with time for the host to be struck while this rank waits in the store, or is about to."""
    collective.set_activity("uploading, 1 of 40 shards")
    time.sleep(6 * HEARTBEAT_SECONDS)
    collective.gather(None, len)
    time.sleep(6 * HEARTBEAT_SECONDS)
    save(collective)
