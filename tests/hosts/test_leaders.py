"""Two hosts of three ranks each, of which one speaks to the key-value store for its host: the leader of a link.

Rank 0 takes part in no link, so that of the first host two ranks are linked.
"""

from __future__ import annotations

import time

import pytest

from tests.hosts.rank import Event
from tests.hosts.rig import Job
from tests.hosts.scenario import MANAGER, SILENCE_BOUND_SECONDS, Scenario

HOSTS, RANKS = ["h0", "h1"], 6

# At this rate the parts of three ranks take some seconds.
MEGABITS = 32.0

# Longer than five pings of a member, after which it speaks for itself; and a silence that is longer.
STOPPED_SECONDS, LONG_SILENCE_SECONDS = 8.0, 20.0


def start(scenario: Scenario, operations: list[str], *, silence_seconds: float, megabits: float = MEGABITS) -> Job:
    """Start a job that has saved step 1, and let it begin the operations, in which the store is reached slowly."""
    rig, manager = scenario.rig, MANAGER | {"silence_seconds": silence_seconds, "timeout_seconds": 80.0}
    job = rig.start(["restore first", "save 1", "pause slow", *operations], hosts=HOSTS, manager=manager, local_ranks=3)
    job.await_begin("pause slow")
    rig.limit("store", megabits)
    job.let_pass("slow")
    return job


def outcomes(scenario: Scenario, job: Job, operation: str, ranks: int) -> dict[int, Event]:
    """Wait until so many ranks have ended an operation, and return how each did."""
    job.await_end(operation, ranks)
    ended = {event.rank: event for event in job.events(operation, "end", "error")}
    scenario.note({f"{event.host} rank {rank}": event for rank, event in ended.items()})
    return ended


def test_leader_dies(scenario: Scenario) -> None:
    """Kill the leader of a host in a save: all other ranks name it, and end; ranks of different hosts have no link."""
    rig = scenario.rig
    job = start(scenario, ["save 2"], silence_seconds=4.0, megabits=3.0)
    rig.await_transfer("h1", "store", "from", size_bytes=100_000)
    assert rig.leader("h0")[1] == 1
    pid, members = rig.leader("h1")
    assert members == 2
    leader = job.rank_of("h1", pid)
    rig.signal("h1", pid, "KILL")
    ended = outcomes(scenario, job, "save 2", RANKS - 1)
    assert ended.keys() == set(range(RANKS)) - {leader}
    assert all(event.kind == "error" and f"ank {leader} " in event.text for event in ended.values())
    assert max(event.seconds for event in ended.values()) - rig.fault_seconds <= SILENCE_BOUND_SECONDS
    assert all(job.wait(30).values())
    outcome = scenario.outcome
    scenario.check_run(HOSTS, steps=[1])
    scenario.outcome = outcome


def test_leader_is_stopped_and_goes_on(scenario: Scenario) -> None:
    """Stop the leader of a host in a save until its members speak for themselves: the save ends well, and the next."""
    rig = scenario.rig
    job = start(scenario, ["save 2", "save 3"], silence_seconds=LONG_SILENCE_SECONDS)
    rig.await_transfer("h1", "store", "from", size_bytes=100_000)
    pid, _ = rig.leader("h1")
    rig.signal("h1", pid, "STOP")
    time.sleep(STOPPED_SECONDS)
    rig.signal("h1", pid, "CONT")
    for operation in ("save 3", "save 2"):
        assert {event.kind for event in outcomes(scenario, job, operation, RANKS).values()} == {"end"}
    scenario.await_end(job)


def test_leader_is_stopped_for_long(scenario: Scenario) -> None:
    """Stop the leader of a host for longer than the silence: it alone is named, and the job goes on when it wakes."""
    rig, silence_seconds = scenario.rig, STOPPED_SECONDS
    job = start(scenario, ["try save 2", "pause b", "save 3"], silence_seconds=silence_seconds, megabits=3.0)
    rig.await_transfer("h1", "store", "from", size_bytes=100_000)
    pid, _ = rig.leader("h1")
    leader = job.rank_of("h1", pid)
    rig.signal("h1", pid, "STOP")
    ended = outcomes(scenario, job, "save 2", RANKS - 1)
    assert ended.keys() == set(range(RANKS)) - {leader}
    assert all(event.kind == "error" and f"ank {leader} " in event.text for event in ended.values())
    outcome = scenario.outcome
    rig.signal("h1", pid, "CONT")
    rig.limit("store", 1000)
    outcomes(scenario, job, "save 2", RANKS)
    job.let_pass("b")
    assert {event.kind for event in outcomes(scenario, job, "save 3", RANKS).values()} == {"end"}
    scenario.outcome = outcome


@pytest.mark.parametrize("seconds", [1.2, None], ids=["for a second", "for good"])
def test_cut_of_linked_ranks(seconds: float | None, scenario: Scenario) -> None:
    """Cut the network of training of a host whose ranks are linked, in rounds: all go on, or name ranks of that host.

    The ranks of that host still hear each other, and say that the store is out of reach.
    """
    rig = scenario.rig
    job = start(scenario, ["save 2"], silence_seconds=4.0, megabits=1000.0 if seconds is not None else 3.0)
    rig.cut("h1", networks=["train"])
    if seconds is not None:
        time.sleep(seconds)
        rig.heal("h1", networks=["train"])
    ended = outcomes(scenario, job, "save 2", RANKS)
    if seconds is not None:
        assert {event.kind for event in ended.values()} == {"end"}
        return
    assert {event.kind for event in ended.values()} == {"error"}
    for rank, event in ended.items():
        assert ("h1" if rank < RANKS // 2 else "key-value store") in event.text
    assert max(event.seconds for event in ended.values()) - rig.fault_seconds <= SILENCE_BOUND_SECONDS
