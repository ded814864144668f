"""A host loses power in each phase of a job: its packets stop, then its processes are gone. No other host is told."""

from __future__ import annotations

import pytest

from dcp_remote.common.units import MiB
from tests.hosts.rig import Direction
from tests.hosts.scenario import MANAGER, MARGIN_SECONDS, Scenario

# Operations after the first checkpoint, the one that raises, and the direction in which the bytes of its ranks go.
PHASES: dict[str, tuple[list[str], str, Direction]] = {
    "save": (["save 2"], "save 2", "from"),
    "background save": (["start 2", "wait"], "wait", "from"),
    "restore": (["restore again"], "restore again", "to"),
    "close": (["start 2", "close"], "close", "from"),
}


def assert_named(victim: str, texts: list[str]) -> None:
    """Check that each message names the host, or the key-value store where that is gone with the host."""
    for text in texts:
        assert victim in text, text
        assert victim != "h0" or "key-value store" in text, text


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["h0", "h1"])
def test_power_loss(victim: str, phase: str, scenario: Scenario) -> None:
    """Take the power in the middle of the phase, whose transfers would take half a minute more: it ends by silence."""
    rig, (operations, raising, direction) = scenario.rig, PHASES[phase]
    job = scenario.start(operations)
    rig.await_transfer("h2", "store", direction, MiB // 2)
    rig.power_loss(victim)
    living = [host for host in rig.names if host != victim]
    errors = scenario.await_errors(job, raising, living)
    assert_named(victim, [event.text for event in errors.values()])
    scenario.check_run(living, steps=[1])


@pytest.mark.parametrize("victim", ["h0", "h1"])
def test_power_loss_while_idle(victim: str, scenario: Scenario) -> None:
    """Take the power between two saves: the next save raises on the others."""
    rig = scenario.rig
    job = rig.start(["restore first", "save 1", "pause a", "save 2"], manager=MANAGER)
    job.await_begin("pause a")
    rig.power_loss(victim)
    job.let_pass("a")
    living = [host for host in rig.names if host != victim]
    errors = scenario.await_errors(job, "save 2", living)
    assert_named(victim, [event.text for event in errors.values()])


@pytest.mark.parametrize("victim", ["h0", "h1"])
def test_power_loss_before_the_first_call(victim: str, scenario: Scenario) -> None:
    """Take the power of a host whose rank was never heard of: only its number is known, and it counts as late."""
    rig = scenario.rig
    job = rig.start([f"late {victim} 1000", "restore again"], manager=MANAGER | {"arrival_seconds": 1.0})
    job.await_begin("restore again", 2)
    rig.power_loss(victim)
    living = [host for host in rig.names if host != victim]
    errors = scenario.await_errors(job, "restore again", living, within=10.0 + MARGIN_SECONDS)
    if victim == "h0":
        assert_named(victim, [event.text for event in errors.values()])
    assert all("ank 1" in event.text or victim == "h0" for event in errors.values())
