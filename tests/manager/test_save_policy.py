"""Steps at which a training saves, by number, by time and at preemption. Ranks are threads."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
import torch

from dcp_remote import CheckpointManager, SavePolicy
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError, StorageError
from dcp_remote.manager.preemption import Preemption
from dcp_remote.manager.save_policy import SaveSchedule
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import Fault, FaultyStore
from tests.support.rank_threads import Clock, LostStore, held, manager_threads, rank_threads, wait_until


def state_of(value: float) -> dict[str, Any]:
    return {"weight": torch.full((10,), float(value)), "step": value}


# ---- by number


def test_steps_by_number() -> None:
    """Multiples, but not 0, and those that are listed; absolute steps, wherever a job begins."""
    policy = SavePolicy(every_steps=4, at=[0, 5, 5, 9])
    assert [step for step in range(14) if policy.names(step)] == [0, 4, 5, 8, 9, 12]
    assert [step for step in range(4) if SavePolicy(at=range(2)).names(step)] == [0, 1]
    assert not any(SavePolicy(every_seconds=1).names(step) for step in range(9))


@pytest.mark.parametrize(
    ("rules", "what"),
    [
        ({}, "needs a rule"),
        ({"at": []}, "needs a rule"),
        ({"every_steps": 0}, "every_steps must be"),
        ({"every_steps": 1.5}, "every_steps must be"),
        ({"every_steps": True}, "every_steps must be"),
        ({"every_seconds": 0}, "every_seconds must be"),
        ({"every_seconds": float("nan")}, "every_seconds must be"),
        ({"every_seconds": "10"}, "every_seconds must be"),
        ({"every_seconds": True}, "every_seconds must be"),
        ({"at": 7}, "at must be a list"),
        ({"at": "7"}, "at must be a list"),
        ({"at": [1, -1]}, "A step must be"),
        ({"at": [[1]]}, "A step must be"),
    ],
)
def test_wrong_rules(rules: dict[str, Any], what: str) -> None:
    """Each is refused when the policy is made."""
    with pytest.raises(InvalidArgumentError, match=what):
        SavePolicy(**rules)


def test_a_training_loop_with_one_if() -> None:
    """It saves what the rules say and no step twice, and goes on after a restore; without rules it is told so."""
    store = MemoryStore()
    for last in (5, 9):
        with CheckpointManager(store, save_policy=SavePolicy(every_steps=3, at=[4])) as checkpoints:
            state = state_of(0)
            step = checkpoints.restore(state) or 0
            assert not checkpoints.should_save(step)  # which was restored
            while step < last and not checkpoints.should_stop:
                step += 1
                for _ in range(2):  # as when gradients are accumulated
                    if checkpoints.should_save(step):
                        checkpoints.save(step, state_of(step))
    assert CheckpointManager(store).run.steps() == [3, 4, 6, 9]
    with CheckpointManager(store) as checkpoints, pytest.raises(InvalidArgumentError, match="save_policy=SavePolicy"):
        checkpoints.should_save(10)
    with pytest.raises(InvalidArgumentError, match="must be a SavePolicy"):
        CheckpointManager(store, save_policy=100)  # type: ignore[arg-type]
    with (
        CheckpointManager(store, save_policy=SavePolicy(every_steps=3)) as checkpoints,
        pytest.raises(InvalidArgumentError, match="A step must be"),
    ):
        checkpoints.should_save(1.0)  # type: ignore[arg-type]


def test_a_save_that_fails_is_due_again() -> None:
    """It counts as saved until its error is raised; so is one whose call raises. The one before stays saved."""
    is_down = False

    def is_refused(verb: str, _key: str, _number: int) -> bool:
        return verb == "put" and is_down

    store = FaultyStore(
        MemoryStore(), [Fault(is_refused, "request", persistent=True, error=lambda: StorageError("refused"))]
    )
    with CheckpointManager(store, save_policy=SavePolicy(every_steps=2)) as checkpoints:
        with pytest.raises(InvalidArgumentError):
            checkpoints.save(2, state_of(2), name="7", wait=True)
        assert checkpoints.should_save(2)
        checkpoints.save(2, state_of(2), wait=True)
        is_down = True
        with pytest.raises(DcpRemoteError, match="refused"):
            checkpoints.save(4, state_of(4), wait=True)
        assert not checkpoints.should_save(2)
        assert checkpoints.should_save(4)
        checkpoints.save(4, state_of(4))
        assert not checkpoints.should_save(4)
        with pytest.raises(DcpRemoteError, match="refused"):
            checkpoints.wait()
        assert checkpoints.should_save(4)
        is_down = False
        checkpoints.save(4, state_of(4), wait=True)
        assert not checkpoints.should_save(4)
        assert checkpoints.run.steps() == [2, 4]


# ---- by time


def test_a_rank_alone() -> None:
    """By its clock: from the first step, and from each save or restore."""
    clock = Clock()
    schedule = SaveSchedule(SavePolicy(every_seconds=60, at=[5]), RankGroup(0, 1, None), clock=clock)
    answers = []
    for step, seconds in [(1, 1000), (2, 59), (3, 1), (4, 59), (5, 0), (6, 59), (7, 1)]:
        clock.now += seconds
        answers.append(schedule.should_save(step))
    assert answers == [False, False, True, False, True, False, True]
    schedule.note_saved(7)
    clock.now += 59
    assert not schedule.should_save(8)
    schedule.count_restore()
    schedule.note_saved(5)
    clock.now += 59
    assert not schedule.should_save(6)
    clock.now += 1
    assert not schedule.should_save(5)
    assert schedule.should_save(7)
    schedule.close()


@pytest.mark.parametrize("in_step", [True, False])
def test_ranks_save_at_one_step(in_step: bool) -> None:
    """By the clock of rank 0, though ranks are some steps ahead; again and again, and old keys are deleted."""
    saves: list[list[int]] = [[], [], []]
    barrier, done = threading.Barrier(3), threading.Event()
    with rank_threads(3, beat_seconds=0.01) as them:
        schedules = [SaveSchedule(SavePolicy(every_seconds=0.15), ranks) for ranks in them.ranks]

        def part(ranks: RankGroup) -> None:
            for step in range(1, 100_000):
                if in_step or step % 50 == 0:
                    barrier.wait(20)
                    if len(saves[0]) > 5 and ranks.rank == 0:
                        done.set()
                    barrier.wait(20)
                    if done.is_set():
                        return
                time.sleep(0.001 * (1 + ranks.rank))
                if schedules[ranks.rank].should_save(step):
                    saves[ranks.rank].append(step)
                    schedules[ranks.rank].note_saved(step)

        assert [one.error for one in them.run(part)] == [None] * 3
        assert len(saves[0]) > 5
        assert saves[0] == saves[1] == saves[2]
        wait_until(lambda: len([key for key in them.store.list_keys() if "save-policy" in key]) <= 10)
        for schedule in schedules:
            schedule.close()


def test_a_step_far_ahead_makes_no_rank_wait() -> None:
    """The other rank knows the step before it comes there; both come there with their heartbeats stopped."""
    with rank_threads(2, beat_seconds=0.01) as them:
        clock = Clock()
        first, second = (SaveSchedule(SavePolicy(every_seconds=60), ranks, clock=clock) for ranks in them.ranks)
        for step in (1, 2):
            assert not first.should_save(step)
            assert not second.should_save(step)
            clock.now += 0.004  # ten steps to the save
        clock.now += 59.98
        wait_until(lambda: first.agreement.settled.is_set() and second.agreement.settled.is_set())
        assert first.agreement.decided is not None
        due = first.agreement.decided.step
        assert due == 2 + 10
        with held(them.ranks[0]), held(them.ranks[1]):
            for schedule in (first, second):
                assert [step for step in range(3, due + 2) if schedule.should_save(step)] == [due]
        first.close()
        second.close()


def test_steps_ask_the_store_nothing() -> None:
    """Each call is answered by what this rank knows; a policy without seconds adds nothing to a heartbeat either."""
    with rank_threads(2, beat_seconds=0.01) as them:
        hooks = list(them.ranks[0].hooks)
        by_number = SaveSchedule(SavePolicy(every_steps=10), them.ranks[0])
        assert them.ranks[0].hooks == hooks
        by_time = SaveSchedule(SavePolicy(every_seconds=3600), them.ranks[0])
        with held(them.ranks[0]):
            assert sum(by_number.should_save(step) for step in range(1000)) == 99
            assert not any(by_time.should_save(step) for step in range(1000))
        by_time.close()
        assert them.ranks[0].hooks == hooks


def test_ranks_that_cannot_agree_leave_a_save_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank does not answer: the others go on without that save, which is said once."""
    monkeypatch.setattr("dcp_remote.manager.save_policy.agreement_seconds", lambda _: 0.2)
    clock = Clock()
    with rank_threads(2, beat_seconds=0.01) as them, caplog.at_level(logging.WARNING, "dcp_remote"):
        first = SaveSchedule(SavePolicy(every_seconds=60), them.ranks[0])
        first._clock = clock
        assert not first.should_save(1)
        clock.now += 60
        wait_until(first.agreement.heard.is_set)
        assert [step for step in range(2, 20) if first.should_save(step)] == []
        first.close()
    assert len([one for one in caplog.records if "did not agree in time" in one.message]) == 1


def test_without_the_store_of_the_ranks_a_save_is_due() -> None:
    """The save then raises what has happened, where a training would go on without checkpoints, and without a word."""
    store, clock = LostStore(), Clock()
    ranks = RankGroup(1, 2, store, beat_seconds=0.01)  # type: ignore[arg-type]
    schedule = SaveSchedule(SavePolicy(every_seconds=60), ranks, clock=clock)
    assert not schedule.should_save(1)
    store.is_lost = True
    wait_until(lambda: ranks.heartbeat is not None and ranks.heartbeat.gone)
    assert not schedule.should_save(2)
    clock.now += 60
    assert schedule.should_save(3)
    schedule.close()
    ranks.close()


# ---- preemption


@pytest.mark.parametrize("every_steps", [1, 1000])
def test_ranks_that_are_preempted_save_and_stop(every_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank hears of SIGTERM: all save at one step, stop, and commit; at a step by number they save once."""
    monkeypatch.setattr(Preemption, "install", lambda preemption: preemption._ranks.start_heartbeat())
    barrier, policy = threading.Barrier(2), SavePolicy(every_steps=every_steps)

    def train(rank: int, checkpoints: CheckpointManager) -> int:
        step = 0
        while step < 500 and not checkpoints.should_stop:
            step += 1
            barrier.wait(20)
            time.sleep(0.002)
            if rank == 1 and step == 3:
                checkpoints._preemption.record_signal()
            if checkpoints.should_save(step):
                checkpoints.save(step, state_of(step), wait=True)
        return step

    with manager_threads(2, MemoryStore(), beat_seconds=0.01, save_policy=policy) as ranks:
        stopped, other = ranks.values(train)
        assert stopped is not None
        assert stopped == other
        assert 3 <= stopped < 500
        assert ranks.managers[0].run.steps() == (list(range(1, stopped + 1)) if every_steps == 1 else [stopped])
