"""Connection of the rank that speaks to the store for its host: cut, broken, or to a store that is gone."""

from __future__ import annotations

import errno
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial

import pytest
import torch.distributed as dist

from dcp_remote.common.deadline import RetryPolicy
from dcp_remote.coordination import key_value
from dcp_remote.coordination.heartbeat import Heartbeat
from dcp_remote.coordination.host_link import HostLink
from dcp_remote.coordination.key_value import Client, StoreAddress
from tests.coordination import test_store_connections
from tests.coordination.test_store_connections import Relay
from tests.support.rank_threads import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux finds the socket of a connection")

relay = test_store_connections.relay  # a fixture


class Host:
    """Host with one rank, whose connections go through a relay; and the coordinator's view of its rounds."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.client = Client(dist.PrefixStore("group", relay.store))
        self.heartbeat = Heartbeat(relay.connect(), 1).start()
        self.link = HostLink(
            f"test-{relay.port}", 1, self.heartbeat.request, lambda _: RetryPolicy(0.005, 0.05).growing_delays()
        )
        self._connection = self.heartbeat._connection

    def begin(self, number: int) -> None:
        self.link.begin(f"{number}/in", f"{number}/out", b"data")

    def parts(self, number: int) -> int:
        """Return how many parts of a round were put, or counted at least."""
        return self.client.add(f"{number}/in", 0)

    def has_part(self, number: int) -> bool:
        return any(self.client.has([f"{number}/in/{part}"]) for part in range(1, self.parts(number) + 1))

    def has_answer(self, number: int) -> bool:
        return self.link.answer(f"{number}/out", 0.01) == b"answer"

    def finish(self, number: int) -> None:
        self.client.put(f"{number}/out", b"answer")
        wait_until(partial(self.has_answer, number))

    def has_lost_connection(self) -> bool:
        return self.heartbeat._connection is not self._connection

    def break_connections(self) -> None:
        for connection in self.relay._accepted:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def host(relay: Relay) -> Iterator[Host]:
    """Start a host whose rank has done a round."""
    host = Host(relay)
    with closing(host.heartbeat), closing(host.link):
        host.begin(1)
        host.finish(1)
        yield host


def test_a_silent_connection_is_replaced_while_an_answer_is_awaited(host: Host) -> None:
    """Cut the network while the rank polls, publish the answer, heal it: the answer comes, and nothing is put again."""
    host.begin(2)
    wait_until(lambda: host.has_part(2))
    host.relay.cut()
    host.client.put("2/out", b"answer")
    wait_until(host.has_lost_connection)
    host.relay.heal()
    wait_until(partial(host.has_answer, 2))
    assert host.parts(2) == 1


def test_a_part_that_was_lost_is_put_again(host: Host) -> None:
    """Cut the network before the rank contributes, heal it: the contribution arrives over another connection."""
    host.relay.cut()
    host.begin(2)
    wait_until(host.has_lost_connection)
    assert host.parts(2) == 0
    host.relay.heal()
    wait_until(lambda: host.has_part(2))
    host.finish(2)
    host.begin(3)
    host.finish(3)
    assert host.parts(3) == 1


@pytest.mark.parametrize("is_put", [False, True])
def test_a_connection_that_breaks_is_replaced(host: Host, is_put: bool) -> None:
    """The network resets the connection before the rank contributes, or while it polls."""
    if is_put:
        host.begin(2)
        wait_until(lambda: host.has_part(2))
    host.break_connections()
    if not is_put:
        host.begin(2)
    wait_until(lambda: host.parts(2) == 1 + is_put)
    wait_until(lambda: host.has_part(2))
    host.finish(2)


def test_a_store_that_has_ended_is_an_error_at_once(host: Host) -> None:
    """The port refuses connections."""
    host.begin(2)
    wait_until(lambda: host.has_part(2))
    host.relay.close()
    with pytest.raises(dist.DistNetworkError, match="refused"):
        wait_until(partial(host.has_answer, 2))


def test_a_round_that_ended_meanwhile_is_not_put_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank leaves a round while there is no way to the host, and does the next one after it."""
    require_reachable, is_reachable = key_value.require_reachable, threading.Event()

    def require_later(address: StoreAddress) -> None:
        if not is_reachable.is_set():
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        require_reachable(address)

    monkeypatch.setattr("dcp_remote.coordination.heartbeat.require_reachable", require_later)
    host.relay.cut()
    host.begin(2)
    wait_until(host.has_lost_connection)
    host.link.end("2/out")
    wait_until(lambda: not host.link._rounds)
    host.relay.heal()
    is_reachable.set()
    host.begin(3)
    wait_until(lambda: host.has_part(3))
    host.finish(3)
    assert host.parts(2) == 0
