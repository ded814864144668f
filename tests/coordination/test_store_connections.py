"""Connections to the store of the ranks that are cut, heal, or end at another store; and what each rank says of it."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.heartbeat import Heartbeat
from dcp_remote.coordination.key_value import Client
from dcp_remote.errors import SaveFailedError, SaveTimeoutError
from tests.support.rank_threads import WHAT, Ended, expected, join, plain, together, upload, wait_until

pytestmark = pytest.mark.usefixtures("no_heartbeat_is_left")

HELPER = "dcp_remote-store_0"
PROCESS = f"{socket.gethostname()}, pid {os.getpid()}"


class Relay:
    """Network between a rank and a TCPStore: a port that forwards to the store's, until it is cut.

    A connection that was cut never delivers anything again, as one in TCP's backoff does not for minutes. While the
    port is cut, connections to it are not made, because its queue is full; or are made and never answered.
    """

    def __init__(self, store: dist.TCPStore) -> None:
        self.store = store
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.port = int(self._listening.getsockname()[1])
        self._healthy = threading.Event()
        self._accepts = threading.Event()
        self._healthy.set()
        self._accepts.set()
        self._filling: list[socket.socket] = []
        self._cuts = 0
        self._accepted: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def connect(self) -> dist.Store:
        timeout = timedelta(seconds=3)
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False, timeout=timeout)
        return dist.PrefixStore("group", store)

    def cut(self, *, accepts: bool = False) -> None:
        self._cuts += 1
        self._healthy.clear()
        for _ in range(0 if accepts else 4):
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", self.port))
            self._filling.append(connection)
        (self._accepts.set if accepts else self._accepts.clear)()

    def heal(self) -> None:
        for connection in self._filling:
            connection.close()
        self._filling.clear()
        self._healthy.set()
        self._accepts.set()

    def close(self) -> None:
        self.heal()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()  # it may be about to accept a connection that waited, and to make another for it
        self._listening.close()
        for connection in self._accepted:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                assert self._accepts.wait(60)
                connection, _ = self._listening.accept()
                assert self._accepts.wait(60)
                self._accepted.append(connection)
                if not self._healthy.is_set():
                    continue
                onward = socket.create_connection(("127.0.0.1", self.store.port))
                self._accepted.append(onward)
                for source, target in ((connection, onward), (onward, connection)):
                    threading.Thread(target=self._copy, args=(source, target, self._cuts), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, cuts: int) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if self._cuts != cuts:
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def host_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    monkeypatch.setattr("dcp_remote.coordination.heartbeat._SILENT_CONNECTION_SECONDS", 0.3)
    monkeypatch.setattr("dcp_remote.coordination.heartbeat._RECONNECT_SECONDS", 0.1)
    monkeypatch.setattr("dcp_remote.coordination.heartbeat._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("dcp_remote.coordination.key_value._CONNECT_SECONDS", 0.2)
    monkeypatch.setattr("dcp_remote.common.threads.WAKE_SECONDS", 0.05)
    with closing(Relay(host_store())) as relay:
        yield relay


@contextmanager
def ranks_of(relay: Relay) -> Iterator[tuple[RankGroup, RankGroup]]:
    """Make two ranks that have met: the coordinator on the host of the store, and one behind the relay."""
    own = dist.PrefixStore("group", relay.store)
    coordinator = RankGroup(0, 2, own, beat_seconds=0.03)
    other = RankGroup(1, 2, relay.connect(), beat_seconds=0.03)
    try:
        assert [ended.value for ended in both(coordinator, other)] == expected(2)
        yield coordinator, other
    finally:
        other.close()
        coordinator.close()


def both(coordinator: RankGroup, other: RankGroup) -> list[Ended[tuple[int, int]]]:
    ended: list[Ended[tuple[int, int]]] = []
    thread = threading.Thread(target=lambda: ended.append(Ended(lambda: together(other, silence_seconds=2.0))))
    thread.start()
    first = Ended(lambda: together(coordinator, silence_seconds=2.0))
    thread.join(60)
    return [first, *ended]


def test_a_heartbeat_goes_on_over_another_connection(relay: Relay) -> None:
    """Cut the network for a second, heal it: the heartbeat is back, does what was queued, and no thread is stuck."""
    done: list[int] = []
    threads = set(threading.enumerate())
    heartbeat = Heartbeat(relay.connect(), 0, beat_seconds=0.02).start()
    with closing(heartbeat):
        wait_until(lambda: heartbeat._answered_count)
        relay.cut()
        heartbeat.enqueue(lambda client: client.put_first("told", b"1"))
        heartbeat.enqueue(lambda _client: done.append(1))
        wait_until(lambda: heartbeat.contact_seconds() > 1.0)
        assert not done
        relay.heal()
        wait_until(lambda: heartbeat.contact_seconds() < 0.2)
        assert heartbeat.gone is None
        wait_until(lambda: done)
        assert Client(dist.PrefixStore("group", relay.store)).get("told") == b"1"
        wait_until(lambda: [one.name for one in threading.enumerate() if one not in threads].count(HELPER) == 1)


def test_a_request_that_the_heartbeat_makes_is_made_again(relay: Relay) -> None:
    """Cut the network for a second after the request has begun, heal it: the answer comes over another connection."""
    heartbeat = Heartbeat(relay.connect(), 1, beat_seconds=0.02).start()
    connections: list[Client] = []

    def read(client: Client) -> bytes:
        connections.append(client)
        if len(connections) == 1:
            relay.cut()
            threading.Timer(1.0, relay.heal).start()
        return client.get("key")

    with closing(heartbeat):
        heartbeat.ask(lambda client: client.put_first("key", b"value"), lambda: None)  # unlike `put` with an answer
        assert heartbeat.ask(read, lambda: None) == b"value"
        assert len(set(connections)) > 1


def test_errors_of_a_request_that_the_heartbeat_makes() -> None:
    """Errors of the request, and of the look of the caller, leave the heartbeat and the next request alone.

    No request takes a heartbeat, or waits for one.
    """
    heartbeat = Heartbeat(dist.HashStore(), 1, beat_seconds=60.0)

    def fail(_client: Client | None = None) -> None:
        raise ValueError("boo")

    with pytest.raises(ValueError, match="boo"):
        heartbeat.ask(lambda client: client.put("key", b"value"), fail)
    with closing(heartbeat.start()):
        with pytest.raises(ValueError, match="boo"):
            heartbeat.ask(fail, lambda: None)
        assert heartbeat.ask(lambda client: client.get("key"), lambda: None) == b"value"
        assert heartbeat._count == 1
    assert heartbeat.gone is None


def test_requests_of_a_heartbeat_that_has_ended() -> None:
    """One that it never came to, and one that is made afterwards, are errors, for which nobody waits."""
    heartbeat = Heartbeat(dist.HashStore(), 1, beat_seconds=60.0)
    answers = [heartbeat.request(lambda client: client.get("key"))]
    heartbeat.close()
    heartbeat.start()
    wait_until(answers[0].done)
    answers.append(heartbeat.request(lambda client: client.get("key")))
    for answer in answers:
        assert isinstance(answer.exception(timeout=0.0), dist.DistNetworkError)


def test_a_heartbeat_that_is_closed_as_it_begins() -> None:
    """The thread has seen that it may go on, and is closed before it does: it waits for no further heartbeat."""

    class ClosedHeartbeat(Heartbeat):
        def _ask(self, request: Callable[[Client], None]) -> None:
            self.close(0.0)
            super()._ask(request)

    heartbeat = ClosedHeartbeat(dist.HashStore(), 0, beat_seconds=3600.0).start()
    wait_until(lambda: not heartbeat._thread or not heartbeat._thread.is_alive())
    assert heartbeat._answered_count == 1


def test_a_host_that_is_stopped_gets_few_connections(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host accepts connections, as its kernel does, and answers none."""
    monkeypatch.setattr("dcp_remote.coordination.heartbeat._SILENT_CONNECTION_SECONDS", 0.01)
    heartbeat = Heartbeat(relay.connect(), 0, beat_seconds=0.02).start()
    with closing(heartbeat):
        wait_until(lambda: heartbeat._answered_count)
        count = len(relay._accepted)
        relay.cut(accepts=True)
        wait_until(lambda: heartbeat.contact_seconds() > 3.0)
        assert 2 <= len(relay._accepted) - count <= 2 * 6


def test_ranks_of_a_store_that_is_silent_do_not_connect_at_once() -> None:
    """Thousands of them would keep it silent: each rank has a moment of its own, within a heartbeat of a rank alone."""
    seconds = {Heartbeat(dist.HashStore(), rank, beat_seconds=16.0)._spread_seconds for rank in range(64)}
    assert len(seconds) == 64
    assert min(seconds) < 4.0
    assert 12.0 < max(seconds) <= 16.0


def test_a_rank_that_was_cut_off_does_not_appear_in_another_job(relay: Relay) -> None:
    """While the network was cut, another job took the address of this one: the rank's store is gone."""
    heartbeat = Heartbeat(relay.connect(), 0, beat_seconds=0.02).start()
    with closing(heartbeat):
        wait_until(lambda: heartbeat._answered_count)
        relay.cut()
        wait_until(lambda: heartbeat.contact_seconds() > 0.2)
        relay.store = host_store()
        relay.heal()
        wait_until(lambda: heartbeat.gone)
        assert "Another key-value store answers" in str(heartbeat.gone)
        assert relay.store.list_keys() == []


def test_a_rank_that_works_hears_that_its_store_is_silent(relay: Relay) -> None:
    """The thread of the operation only looks at its deadline, as one that reads does; the rank blames no other rank."""

    def part() -> None:
        with join(other, silence_seconds=2.0) as collective:
            collective.gather(None, len)
            relay.cut()
            upload(collective)

    def coordinate() -> None:
        with join(coordinator, silence_seconds=3.0) as collective:
            collective.gather(None, len)
            upload(collective)

    with ranks_of(relay) as (coordinator, other):
        ended: list[Ended[None]] = []
        thread = threading.Thread(target=lambda: ended.append(Ended(coordinate)))
        thread.start()
        error = Ended(part).error
        thread.join(60)
        relay.heal()
        assert type(error) is SaveFailedError
        assert str(error).startswith(
            f"Rank 1 ({PROCESS}) has heard nothing from the key-value store of the process group at "
            f"127.0.0.1:{relay.port} for "
        ), error
        assert error.details["here"] == "SaveTimeoutError: The upload did not end by the deadline. key='shards/1'"
        assert re.search(rf"Rank 1 \({re.escape(PROCESS)}\) has been silent for \d+ s;", str(ended[0].error))


def test_the_first_operation_after_an_outage_succeeds(relay: Relay) -> None:
    """Cut the network for longer than `silence_seconds` between two operations."""
    with ranks_of(relay) as (coordinator, other):
        relay.cut()
        heartbeat = other.heartbeat
        assert heartbeat is not None, "each of two ranks has one"
        wait_until(lambda: heartbeat.contact_seconds() > 3.0)
        relay.heal()
        other._member.close()  # its idle connection would be in the backoff for ever, and not for the outage only
        other._member._is_closed = False
        assert [ended.value for ended in both(coordinator, other)] == expected(2)


def test_a_rank_keeps_its_name_and_last_activity_in_later_operations(relay: Relay) -> None:
    """The rank was heard in one operation, and dies before the next: it is not one without a heartbeat."""
    with ranks_of(relay) as (coordinator, other):
        relay.cut()
        assert other.heartbeat is not None
        ended = Ended(lambda: together(coordinator, seconds=0.2))
        assert type(ended.error) is SaveTimeoutError
        assert f"Rank 1 ({PROCESS}) did not report by the deadline" in str(ended.error)
        assert "no heartbeat yet" not in str(ended.error)
        assert plain(ended.error).startswith(f"Rank 1 did not report by the deadline; {WHAT} was given up.")
