"""Jobs that are replaced, restarted and terminated: zombies, torchrun's restarts, SIGTERM."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.hosts.rank import Event
from tests.hosts.rig import Direction, Job, Rig, wait_until
from tests.hosts.scenario import MANAGER, MARGIN_SECONDS, SILENCE_BOUND_SECONDS, Scenario

# torch's two races at restarts and joins do not arise when attempts do not share the store of the rendezvous.
OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TRAINING = MANAGER | {"save_policy": {"every_steps": 10}}


@pytest.mark.parametrize("new_job", ["runs", "has ended"])
@pytest.mark.parametrize("moment", ["between saves", "in a save"])
def test_old_job_returns(moment: str, new_job: str, scenario: Scenario) -> None:
    """Freeze a job on two hosts, start a new one on the third, and thaw the old one: it is fenced."""
    rig = scenario.rig
    old, new = ["h0", "h1"], ["h2"]
    job = rig.start(["restore first", "save 1", "pause a", "save 2"], hosts=old, manager=MANAGER)
    job.await_begin("pause a")
    if moment == "in a save":
        rig.limit("store", 2, *old)
        job.let_pass("a")
        rig.await_transfer("h1", "store", "from", size_bytes=100_000)
    rig.freeze(*old)
    newer = rig.start(["restore first", "save 5", "pause b", "save 6"], name="newer", hosts=new, manager=MANAGER)
    newer.await_begin("pause b")
    if new_job == "has ended":
        newer.let_pass("b")
        scenario.await_end(newer)
    rig.limit("store", 1000, *old)
    if moment == "between saves":
        job.let_pass("a")
    rig.thaw(*old)
    errors = scenario.await_errors(job, "save 2", old, within=SILENCE_BOUND_SECONDS + MARGIN_SECONDS)
    outcome = scenario.outcome
    if moment == "between saves":
        assert all("FencedError" in error.text for error in errors.values())
    if new_job == "runs":
        newer.let_pass("b")
        scenario.await_end(newer)
    scenario.outcome = outcome
    scenario.check_run(rig.names, steps=[6])


def await_training(rig: Rig, job: Job, *, ranks: int) -> dict[str, Event]:
    """Wait until so many ranks have restored since the last fault, and committed a checkpoint; return the restores."""

    def events() -> list[Event]:
        # A host that comes late at the start makes torchrun restart, so that fewer ranks may have trained before.
        new = [one for one in job.events() if one.seconds > rig.fault_seconds]
        return [one for one in new if (one.world_size, one.kind) == (ranks, "end")]

    def have_committed() -> bool:
        # A save waits for the commit of the one before, and raises its error.
        saves = Counter(one.host for one in events() if one.verb == "start")
        return sum(number >= 2 for number in saves.values()) == ranks

    wait_until(have_committed, f"two saves of {ranks} ranks")
    restored = {one.host: one for one in events() if one.verb == "restore"}
    assert not any(one.differing for one in restored.values())
    return restored


def test_rank_fails_before_its_first_call(scenario: Scenario) -> None:
    """Raise on one host before its first restore: torchrun's next attempt saves and restores on all hosts.

    Where attempts share a store, gloo itself may fail to connect; `test_incarnation` has the ranks of such attempts.
    """
    rig = scenario.rig
    job = rig.start_torchrun(
        ["fail h1 0", "restore first", "save 1", "restore again"],
        nodes="3",
        restarts=2,
        manager=MANAGER,
        environment=OWN_STORES,
    )
    job.await_end("fail h1 0")
    rig.fault_seconds = time.time()
    job.await_end("restore again")
    scenario.await_success(job, "restore again")
    scenario.await_end(job)


def test_torchrun_loses_a_host(scenario: Scenario) -> None:
    """Take the power of one of three hosts: the others restart as two ranks, and go on with the newest checkpoint."""
    rig = scenario.rig
    job = rig.start_torchrun(
        ["restore first", "train 100000"], nodes="2:3", restarts=3, manager=TRAINING, environment=OWN_STORES
    )
    await_training(rig, job, ranks=3)
    rig.power_loss("h2")
    restored = await_training(rig, job, ranks=2)
    assert all(event.step for event in restored.values())
    scenario.note(restored)


def test_host_joins_torchrun(scenario: Scenario) -> None:
    """Start torchrun on a third host while two train: all three restart, and go on with the newest checkpoint."""
    rig = scenario.rig
    manager = TRAINING | {"notice_seconds": 20.0}
    job = rig.start_torchrun(
        ["restore first", "train 100000"],
        nodes="2:3",
        hosts=["h0", "h1"],
        restarts=3,
        manager=manager,
        environment=OWN_STORES,
    )
    await_training(rig, job, ranks=2)
    rig.fault_seconds = time.time()
    rig.join_torchrun(job, "h2", nodes="2:3", restarts=3, environment=OWN_STORES)
    restored = await_training(rig, job, ranks=3)
    assert all(event.step for event in restored.values())
    scenario.note(restored)


def test_termination_of_one_host(scenario: Scenario) -> None:
    """Send SIGTERM to one host: all ranks save at the same step, and end."""
    rig = scenario.rig
    job = rig.start(["restore first", "train 1000"], manager=TRAINING | {"notice_seconds": 20.0})
    job.await_begin("train 1000")
    time.sleep(1)
    rig.terminate("h1")
    scenario.await_success(job, "train 1000")
    scenario.await_end(job)
    steps = {event.step for event in job.ended("train 1000").values()}
    assert len(steps) == 1
    scenario.check_run(rig.names, steps=[step for step in steps if step is not None])


@pytest.mark.parametrize("direction", ["from", "to"])
def test_termination_of_a_host_that_is_cut_off(direction: Direction, scenario: Scenario) -> None:
    """Send SIGTERM to a host that hears no other: it stops in time, and its log says why."""
    notice_seconds, rig = 20.0, scenario.rig
    job = rig.start(
        ["restore first", "train 1000"],
        manager=MANAGER | {"save_policy": {"every_steps": 900}, "notice_seconds": notice_seconds},
    )
    job.await_begin("train 1000")
    time.sleep(1)
    rig.cut("h1", networks=["train"], directions=[direction])
    rig.terminate("h1")
    fault_seconds = rig.fault_seconds
    job.wait(notice_seconds + MARGIN_SECONDS, ["h1"])
    ended = job.ended("train 1000")["h1"]
    scenario.note({"h1": ended}, time.time())
    assert ended.seconds - fault_seconds <= notice_seconds
    assert "SIGTERM" in job.log("h1").read_text()
