"""Restores and saves for which nobody answers: the host of the group's store is stopped, or a rank is slow.

Ranks are threads here. Nothing waits for longer than it may: a rank that hangs fails its test.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dcp_remote import CheckpointManager
from dcp_remote.coordination.key_value import Client
from dcp_remote.errors import DcpRemoteError
from dcp_remote.storage import MemoryStore
from tests.coordination.test_heartbeat import Host
from tests.support.rank_threads import manager_threads, wait_until


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000,), value)}, "n": value}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.kill()


@pytest.mark.torture
@pytest.mark.parametrize("seconds", [{"silence_seconds": 1.0}, {"timeout_seconds": 2.0}], ids=str)
@pytest.mark.parametrize("connected", [True, False])
def test_a_restore_while_the_host_of_the_ranks_is_stopped(
    seconds: dict[str, float], host: Host, *, connected: bool
) -> None:
    """It raises on both ranks and names that store; when the host goes on, so do they."""
    with manager_threads(2, MemoryStore(), host.client(f"{seconds} {connected}")) as ranks:
        if connected:
            ranks.values(lambda _, manager: manager.save(1, state_of(1), wait=True))
        client = Client(ranks.groups.store)
        wait_until(lambda: client.has([f"group/beat/{rank}" for rank in range(2)]))
        # Short for what is to fail alone: on a busy machine a heartbeat may come a second late.
        for manager in ranks.managers:
            limits = manager._timeout_seconds, manager._silence_seconds
            vars(manager).update({f"_{name}": value for name, value in seconds.items()})
        with host.stopped():
            ended = ranks.run(lambda _, manager: manager.restore(state_of(0)))
            assert all(isinstance(one.error, DcpRemoteError) for one in ended), ended
            assert "key-value store" in str(ended[0].error)
            assert ("until the deadline" in str(ended[0].error)) == ("timeout_seconds" in seconds)
        # Each has seen what the host said before it was stopped.
        groups = ranks.groups.ranks
        wait_until(lambda: all(group.heartbeat and group.heartbeat.contact_seconds() < 0.5 for group in groups))
        for manager in ranks.managers:
            manager._timeout_seconds, manager._silence_seconds = limits
        assert ranks.values(lambda _, manager: manager.restore(state_of(0))) == 2 * [1 if connected else None]


@pytest.mark.parametrize("what", ["restore", "save"])
def test_a_notice_ends_what_waits_already(what: str) -> None:
    """Rank 1 waits for a rank that is slow, and hears that it will be killed: both raise, long before the deadline."""
    has_told = threading.Event()

    def act(rank: int, manager: CheckpointManager) -> None:
        if rank == 0:
            assert has_told.wait(60)
        else:
            threading.Timer(0.2, manager._preemption.record_signal).start()
        try:
            if what == "restore":
                manager.restore(state_of(0))
            else:
                manager.save(1, state_of(1), wait=True)
        finally:
            # The heartbeat's thread tells the others, after this rank has raised. Rank 0 finds all that it waits for,
            # and succeeds, if it is faster than that.
            if rank == 1 and manager._ranks.heartbeat is not None:
                manager._ranks.heartbeat.enqueue(lambda client: has_told.set())

    with manager_threads(2, MemoryStore(), notice_seconds=0.5) as ranks:
        # The pulse tells rank 0 of the signal, too, whose own notice may end first.
        told = [str(one.error) for one in ranks.run(act)]
    assert all("no time left for the" in one for one in told), told
