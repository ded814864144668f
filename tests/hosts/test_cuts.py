"""Networks that lose packets, hosts that stand still, and a store that goes away: for a while, and for good."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.hosts.rig import BOTH, Direction, Network
from tests.hosts.scenario import (
    MANAGER,
    MARGIN_SECONDS,
    SILENCE_SECONDS,
    Scenario,
)

# Shorter than the silence, also with the wait of TCP before it sends a lost packet again.
SHORT_SECONDS = 1.2
LONG_SECONDS = SILENCE_SECONDS + 4.0

NETWORKS: dict[str, tuple[Network, ...]] = {"train": ("train",), "store": ("store",), "both": BOTH}
DIRECTIONS: dict[str, Direction] = {"save 2": "from", "restore again": "to"}

# At this rate the part of a rank takes some seconds.
MEGABITS = 32.0


@pytest.mark.parametrize("networks", NETWORKS)
@pytest.mark.parametrize("operation", DIRECTIONS)
def test_cut_that_heals(operation: str, networks: str, scenario: Scenario) -> None:
    """Cut a host off for a second in the middle of an operation: it ends well on all ranks, and so does the next."""
    rig = scenario.rig
    job = scenario.start([operation, "save 3"], megabits=MEGABITS)
    rig.await_transfer("h1", "store", DIRECTIONS[operation])
    rig.cut("h1", networks=NETWORKS[networks])
    time.sleep(SHORT_SECONDS)
    rig.heal("h1", networks=NETWORKS[networks])
    scenario.await_success(job, operation)
    scenario.await_success(job, "save 3")
    scenario.await_end(job)


@pytest.mark.parametrize("operation", DIRECTIONS)
@pytest.mark.parametrize("victim", ["h0", "h1"])
def test_cut_that_does_not_heal(victim: str, operation: str, scenario: Scenario) -> None:
    """Cut the network of training of one host: every rank raises, those that were cut off from the others as well."""
    rig = scenario.rig
    job = scenario.start([operation])
    rig.await_transfer("h2", "store", DIRECTIONS[operation])
    rig.cut(victim, networks=["train"])
    errors = scenario.await_errors(job, operation, rig.names)
    assert all(victim in error.text for host, error in errors.items() if host != victim)
    if victim != "h0":  # the rank that hears nothing says so, and blames no other rank
        assert "key-value store" in errors[victim].text
    rig.heal(victim, networks=["train"])
    scenario.check_run(rig.names, steps=[1])


@pytest.mark.parametrize("direction", ["from", "to"])
def test_cut_in_one_direction(direction: Direction, scenario: Scenario) -> None:
    """Let packets from, or to, one host vanish in the network of training: every rank raises."""
    rig = scenario.rig
    job = scenario.start(["save 2"])
    rig.await_transfer("h2", "store", "from")
    rig.cut("h1", networks=["train"], directions=[direction])
    errors = scenario.await_errors(job, "save 2", rig.names)
    assert all("h1" in error.text for host, error in errors.items() if host != "h1")
    rig.heal("h1", networks=["train"], directions=[direction])
    scenario.check_run(rig.names, steps=[1])


@pytest.mark.parametrize("operation", DIRECTIONS)
def test_store_out_of_reach(operation: str, scenario: Scenario) -> None:
    """Cut one host off from the store for good: every rank raises by the deadline, with the cause of that host."""
    rig, timeout_seconds = scenario.rig, 12.0
    job = scenario.start([operation], manager={"timeout_seconds": timeout_seconds}, megabits=MEGABITS)
    rig.await_transfer("h1", "store", DIRECTIONS[operation])
    rig.cut("h1", networks=["store"])
    errors = scenario.await_errors(job, operation, rig.names, within=timeout_seconds + MARGIN_SECONDS)
    # The others have read all by themselves. At the deadline the coordinator names rank 1, or rank 1 itself says why.
    assert all(re.search("Rank 1 |rank=1 ", errors[host].text) for host in ("h0", "h2")), errors
    rig.heal("h1", networks=["store"])
    scenario.check_run(rig.names, steps=[1])


@pytest.mark.parametrize("operation", ["save 2", "restore again"])
def test_job_goes_on_after_a_cut(operation: str, scenario: Scenario) -> None:
    """Cut a host off for longer than the silence, and heal: the operation fails, and the next ones succeed."""
    rig = scenario.rig
    job = scenario.start([f"try {operation}", "pause b", "save 3", "restore newest"])
    rig.await_transfer("h1", "store", DIRECTIONS[operation])
    rig.cut("h1")
    scenario.await_failure(job, operation, rig.names)
    rig.heal("h1")
    rig.limit("store", 1000)
    job.let_pass("b")
    scenario.await_success(job, "save 3")
    scenario.await_success(job, "restore newest")
    scenario.await_end(job)


@pytest.mark.parametrize("victim", ["h0", "h1"])
def test_cut_while_idle(victim: str, scenario: Scenario) -> None:
    """Cut a host off between two saves for longer than the silence, and heal: the next save finds nothing amiss."""
    rig = scenario.rig
    job = rig.start(["restore first", "save 1", "pause a", "save 2", "restore again"], manager=MANAGER)
    job.await_begin("pause a")
    rig.cut(victim)
    time.sleep(LONG_SECONDS)
    rig.heal(victim)
    job.let_pass("a")
    scenario.await_success(job, "save 2")
    scenario.await_success(job, "restore again")
    scenario.await_end(job)


def test_flapping_link(scenario: Scenario) -> None:
    """Cut and heal both networks of a host six times during a save: the save ends well."""
    rig = scenario.rig
    job = scenario.start(["save 2", "restore again"], megabits=MEGABITS / 2)
    rig.await_transfer("h1", "store", "from")
    for _ in range(6):
        rig.cut("h1")
        time.sleep(0.4)
        rig.heal("h1")
        time.sleep(0.8)
    scenario.await_success(job, "save 2")
    scenario.await_end(job)


@pytest.mark.parametrize("hosts", [("h1",), ("h0", "h1", "h2")], ids=["one host", "all hosts"])
def test_short_freeze(hosts: tuple[str, ...], scenario: Scenario) -> None:
    """Stop all processes of hosts in a save for less than the silence: the save ends well."""
    rig = scenario.rig
    job = scenario.start(["save 2"], megabits=MEGABITS)
    rig.await_transfer("h1", "store", "from")
    rig.freeze(*hosts)
    time.sleep(SHORT_SECONDS)
    rig.thaw(*hosts)
    scenario.await_success(job, "save 2")


@pytest.mark.parametrize("victim", ["h0", "h1"])
def test_long_freeze(victim: str, scenario: Scenario) -> None:
    """Stop all processes of a host in a save for longer than the silence: the others raise, and it does when it wakes.

    Then the same job goes on.
    """
    rig = scenario.rig
    job = scenario.start(["try save 2", "pause b", "save 3"])
    rig.await_transfer("h2", "store", "from")
    rig.freeze(victim)
    errors = scenario.await_failure(job, "save 2", [host for host in rig.names if host != victim])
    assert all(victim in error.text for error in errors.values())
    outcome = scenario.outcome
    rig.thaw(victim)
    rig.limit("store", 1000)
    scenario.await_failure(job, "save 2", rig.names)
    job.let_pass("b")
    scenario.await_success(job, "save 3")
    scenario.outcome = outcome


@pytest.mark.parametrize("operation", DIRECTIONS)
def test_store_that_moves(operation: str, scenario: Scenario) -> None:
    """Give the store's name another address in the middle of an operation; the old address answers no more."""
    rig = scenario.rig
    job = scenario.start([operation], megabits=MEGABITS, manager={"timeout_seconds": 120.0})
    rig.await_transfer("h1", "store", DIRECTIONS[operation])
    rig.move_store()
    scenario.await_success(job, operation)


@pytest.mark.parametrize("operation", DIRECTIONS)
@pytest.mark.parametrize("kind", ["refuses", "vanishes"])
def test_store_that_is_down_for_a_while(kind: str, operation: str, scenario: Scenario) -> None:
    """Let the store refuse connections, or its packets vanish, for longer than the silence: the operation ends well."""
    rig = scenario.rig
    job = scenario.start([operation], megabits=MEGABITS)
    rig.await_transfer("h1", "store", DIRECTIONS[operation])
    if kind == "refuses":
        rig.stop_store()
        time.sleep(LONG_SECONDS)
        rig.continue_store()
    else:
        rig.cut("store", networks=["store"])
        time.sleep(LONG_SECONDS)
        rig.heal("store", networks=["store"])
    scenario.await_success(job, operation)


@pytest.mark.parametrize("seconds", [3, 14])
def test_late_host(seconds: int, scenario: Scenario) -> None:
    """Let a host come late to the first restore: it is waited for for ten times `arrival_seconds`, and then named.

    A rank that comes later than that raises the same error at once.
    """
    rig = scenario.rig
    job = rig.start([f"late h2 {seconds}", "restore again", "save 1"], manager=MANAGER | {"arrival_seconds": 1.0})
    job.await_begin("restore again", 2)
    rig.fault_seconds = time.time()
    if seconds < 10:
        scenario.await_success(job, "save 1")
    else:
        errors = scenario.await_errors(job, "restore again", rig.names, within=seconds + MARGIN_SECONDS)
        assert all("ank 2" in errors[host].text for host in ("h0", "h1"))


def test_host_that_is_late_for_a_save(scenario: Scenario) -> None:
    """Let a host come to a save much later than the others: they name it and its host, and it raises at once."""
    rig = scenario.rig
    job = rig.start(
        ["restore first", "save 1", "late h2 8", "try save 2", "pause b", "save 3"],
        manager=MANAGER | {"arrival_seconds": 3.0},
    )
    job.await_begin("save 2", 2)
    rig.fault_seconds = time.time()
    errors = scenario.await_failure(job, "save 2", rig.names)
    assert all("h2" in errors[host].text for host in ("h0", "h1"))
    outcome = scenario.outcome
    job.let_pass("b")
    scenario.await_success(job, "save 3")
    scenario.outcome = outcome


def test_doctor(scenario: Scenario) -> None:
    """Let two ranks of each host check the store, then once more with a host cut off from it: its ranks are named."""
    # Checks end within 30 s, and ranks wait for others for 90 s more. Below that limit, a late rank would not be named.
    rig, seconds = scenario.rig, 30.0 + 90.0 + MARGIN_SECONDS
    job = rig.start_doctor("well", ranks=2)
    assert not any(job.wait(seconds).values())
    assert "no check failed" in job.log("h0").read_text()
    rig.cut("h1", networks=["store"])
    job = rig.start_doctor("cut", ranks=2)
    assert job.wait(seconds)["h0"] == 1
    report = job.log("h0").read_text().splitlines()
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text().partition("## Before the first job")[2]
    shown = page.partition("```text\n")[2].partition("```")[0].splitlines()
    assert shown
    assert [line for line in report if line in shown] == shown
