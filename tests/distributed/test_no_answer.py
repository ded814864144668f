"""Restores and saves for which nobody answers: the host of the group's store is stopped, or the store of objects hangs.

Ranks are threads here. Nothing waits for longer than it may: a rank that hangs fails its test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch

from dcp_remote import CheckpointManager
from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.key_value import Client
from dcp_remote.errors import DcpRemoteError
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from tests.coordination.test_heartbeat import Host
from tests.support.rank_threads import managers_of, rank_threads, wait_until

_Answer = TypeVar("_Answer")


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
    seconds: dict[str, float], host: Host, monkeypatch: pytest.MonkeyPatch, *, connected: bool
) -> None:
    """It raises on both ranks and names that store; when the host goes on, so do they."""
    store = MemoryStore()
    with rank_threads(2, host.client(f"{seconds} {connected}")) as them:
        managers = managers_of(them, store, monkeypatch, **seconds)

        def restore(ranks: RankGroup) -> int | None:
            return managers[ranks.rank].restore(state_of(0))

        if connected:
            them.run(lambda ranks: managers[ranks.rank].save(1, state_of(1), wait=True))
        client = Client(them.store)
        wait_until(lambda: client.has([f"group/beat/{rank}" for rank in range(2)]))
        with host.stopped():
            ended = them.run(restore)
            assert all(isinstance(one.error, DcpRemoteError) for one in ended), ended
            assert "key-value store" in str(ended[0].error)
            assert ("until the deadline" in str(ended[0].error)) == ("timeout_seconds" in seconds)
        # Each has seen what the host said before it was stopped.
        wait_until(lambda: all(ranks.heartbeat and ranks.heartbeat.contact_seconds() < 0.5 for ranks in them.ranks))
        for manager in managers:
            manager._timeout_seconds = 60.0
        assert [one.value for one in them.run(restore)] == 2 * [1 if connected else None]
        for manager in reversed(managers):
            manager.close()


class SilentStore(WrappedStore):
    """Answers some requests only when it is told to."""

    def __init__(self, store: MemoryStore, is_silent: Callable[[Request], bool]) -> None:
        super().__init__(store)
        self._is_silent, self.go_on = is_silent, threading.Event()

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        if self._is_silent(request):
            assert self.go_on.wait(60)
        return send()


@pytest.mark.torture
@pytest.mark.parametrize("prefix", ["manifest.json", "catalog.json", "manifests/"])
def test_a_restore_from_a_store_that_is_silent(prefix: str) -> None:
    """Restore: the call raises at its deadline, whichever request is silent, and works when tried again."""
    inner = MemoryStore()
    with CheckpointManager(inner) as checkpoints:
        checkpoints.save(1, state_of(1))
    store = SilentStore(inner, lambda request: request.key.startswith(prefix))
    checkpoints = CheckpointManager(store, timeout_seconds=1.0)
    with pytest.raises(DcpRemoteError, match="deadline"):
        checkpoints.restore(state_of(0))
    store.go_on.set()
    checkpoints._timeout_seconds = 60.0
    assert checkpoints.restore(state_of(0)) == 1
    checkpoints.close()


@pytest.mark.parametrize("what", ["restore", "save"])
def test_a_notice_ends_what_waits_already(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits for a rank that is slow, and hears that it will be killed: both raise, long before the deadline."""
    with rank_threads(2) as them:
        managers = managers_of(them, MemoryStore(), monkeypatch, notice_seconds=0.5)

        has_told = threading.Event()

        def act(ranks: RankGroup) -> None:
            if ranks.rank == 0:
                assert has_told.wait(60)
            else:
                threading.Timer(0.2, managers[1]._preemption.record_signal).start()
            try:
                if what == "restore":
                    managers[ranks.rank].restore(state_of(0))
                else:
                    managers[ranks.rank].save(1, state_of(1), wait=True)
            finally:
                # The heartbeat's thread tells the others, after this rank has raised. Rank 0 finds all that it waits
                # for, and succeeds, if it is faster than that.
                if ranks.rank == 1 and ranks.heartbeat is not None:
                    ranks.heartbeat.enqueue(lambda client: has_told.set())

        ended = them.run(act)
        # The pulse tells rank 0 of the signal, too, whose own notice may end first.
        told = [str(one.error) for one in ended]
        assert all("no time left for the" in one for one in told), told
        for manager in reversed(managers):
            manager.close()
