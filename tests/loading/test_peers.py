"""Transfer of units between ranks: the ranks are threads of this process, with real sockets between them."""

from __future__ import annotations

import contextlib
import errno
import gc
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcp_remote.common.geometry import Box
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.manifest import TensorKind
from dcp_remote.loading import peer_sockets, peers
from dcp_remote.loading.peer_sockets import RankSockets, check_rank_sockets, host_towards
from dcp_remote.loading.peers import Address, OtherHosts, PeerExchange, PeerServer, PeerStore, cohorts_of
from dcp_remote.loading.read_plan import Want
from dcp_remote.storage.memory import MemoryStore
from dcp_remote.storage.request_context import BufferLease
from tests.support.clocks import SleepClock
from tests.support.manifests import Layout, build
from tests.support.rank_threads import wait_until

HERE, ELSEWHERE, FAR_AWAY = "127.0.0.1", "127.0.0.2", "127.0.0.3"
UNIT_BYTES = 3 * MiB + 5


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def serving(**options: Any) -> closing[PeerServer]:
    return closing(PeerServer(0, HERE, **{"kept_bytes_max": 0} | options))


@pytest.fixture(params=["unix", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[PeerServer]:
    """Give a server that is reached by either kind of socket."""
    with serving(kept_bytes_max=MiB) as server:
        if request.param == "unix" and not server.address.name:
            pytest.skip("this system has no Unix sockets without a file")
        if request.param == "tcp":
            server.address = replace(server.address, name=b"")
        yield server


class Reader:
    """Rank that reads unit after unit, each of which a store has too, and compares what it gets.

    Attributes:
        store: Store that asks other ranks first.
        hosts: What the reader has found of other hosts.
    """

    def __init__(
        self,
        host: str = HERE,
        *,
        is_over: Callable[[], bool] = lambda: False,
        store_rate: float = 0.0,  # bytes per second at which it has read from its store for a second
        hosts: OtherHosts | None = None,
    ) -> None:
        self._units: dict[tuple[str, int], tuple[int, Address]] = {}
        self._objects = MemoryStore()
        self.hosts = hosts or OtherHosts()
        self.store = PeerStore(self._objects, self._units, host=host, is_over=is_over, hosts=self.hosts)
        if store_rate:
            measured = self.store._rates._store
            measured.received_bytes, measured.seconds, measured.marked_seconds = store_rate, 1.0, time.monotonic()

    def read(self, address: Address, number: int, length: int = UNIT_BYTES) -> int:
        """Read a unit; return the number of bytes that came from the other rank."""
        key, into = str(number), memoryview(bytearray(length))
        self._units[key, 0] = number, address
        self._objects.put(key, [data_of(number, length)])
        self.store.get_into(key, 0, into)
        assert into == data_of(number, length)
        return self.store.received_bytes[number]

    @property
    def unreached(self) -> dict[int, str]:
        """Cause by number of the rank."""
        return {address.rank: cause for address, cause in self.store.unreached.items()}


@contextlib.contextmanager
def server_that_sends(data: bytes, host: str = HERE, rank: int = 0) -> Iterator[Address]:
    """Accept the unit of each request, send these bytes of it, and nothing more until the client closes."""
    connections = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connections.append(listening.accept()[0])
                connections[-1].sendall(b"\1" + data)

    with socket.create_server((host, 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Address(rank, host, listening.getsockname()[1], b"", bytes(16))
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


def data_of(number: int, length: int = UNIT_BYTES) -> memoryview:
    return memoryview((number.to_bytes(4, "little") * (length // 4 + 1))[:length])


def test_units_are_served_to_many_at_a_time(server: PeerServer) -> None:
    """Units that are requested before they are offered, over several connections, arrive whole and unmixed."""
    readers = Reader(), Reader()
    threads = [
        threading.Thread(target=reader.read, args=(server.address, number)) for reader in readers for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for number in (3, 0, 2, 1):
        server.offer(number, data_of(number), receivers=2, stays=True)
    for thread in threads:
        thread.join()
    for reader in readers:
        assert reader.store.received_bytes == dict.fromkeys(range(4), UNIT_BYTES)


def test_a_copy_is_kept_of_data_that_does_not_stay(server: PeerServer) -> None:
    """Units beyond the room for copies are declined; there is room again when all receivers have a unit."""
    size, reader = 600 * KiB, Reader()
    memory = bytearray(data_of(1, size))
    server.offer(1, memoryview(memory), receivers=2, stays=False)
    memory[:] = data_of(9, size)
    server.offer(2, data_of(2, size), receivers=1, stays=False)
    assert [reader.read(server.address, number, size) for number in (2, 1)] == [0, size]
    assert server._kept_bytes == size
    assert reader.read(server.address, 1, size) == size
    while server._kept_bytes:  # counted when all is sent, which may be after all has arrived
        threading.Event().wait(0.01)
    server.offer(3, data_of(3, size), receivers=1, stays=False)
    assert [reader.read(server.address, number, size) for number in (3, 1)] == [size, 0]
    assert reader.unreached == {}


def test_a_client_without_the_secret_gets_nothing(server: PeerServer) -> None:
    """The connection of a client without the secret is closed, and other clients go on."""
    server.offer(1, data_of(1), receivers=1, stays=True)
    assert Reader().read(replace(server.address, secret=bytes(16)), 1) == 0
    assert Reader().read(server.address, 1) == UNIT_BYTES


def test_waiting_clients_return_when_the_server_closes(server: PeerServer) -> None:
    """When the server closes, waiting clients return at once, and read from the store what they ask for next."""
    reader = Reader()
    threads = [threading.Thread(target=reader.read, args=(server.address, number)) for number in range(3)]
    for thread in threads:
        thread.start()
    while len(server._connections) < 3:
        threads[0].join(0.01)
    server.close()
    for thread in threads:
        thread.join()
    assert reader.read(server.address, 4) == 0
    assert set(reader.unreached) == {0}
    assert sum(reader.store.received_bytes.values()) == 0


def test_a_server_that_is_still_reading(server: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for twice the patience for a server that says that it reads; it declines when it has read all."""
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", 2.0)  # the server says so five times in it, also on a busy machine
    reader, timer = Reader(), threading.Timer(4.0, server.complete)
    timer.start()
    assert reader.read(server.address, 1) == 0
    server.offer(2, data_of(2), receivers=1, stays=True)
    assert reader.read(server.address, 2) == UNIT_BYTES
    assert reader.unreached == {}
    timer.join()


def test_a_server_whose_way_to_the_store_is_cut(server: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it reads, long after this rank has read its own part: the rest of its units come from the store."""
    reader = Reader(store_rate=100 * MiB)
    monkeypatch.setattr("dcp_remote.loading.read_rates._WINDOW_SECONDS", -0.4)
    assert reader.read(server.address, 1) == 0
    monkeypatch.setattr("dcp_remote.loading.read_rates._WINDOW_SECONDS", 1e9)
    assert reader.read(server.address, 2) == 0  # at once: is not asked again
    assert reader.unreached == {}


@pytest.mark.parametrize("sent", [b"", b"abc"])
def test_patience_ends(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that falls silent in a unit is given up after a while, or at once when the load is over."""
    over = threading.Event()
    with server_that_sends(sent) as address:
        monkeypatch.setattr(peers, "PATIENCE_SECONDS", 0.1)
        reader = Reader()
        assert reader.read(address, 1) == 0
        assert reader.unreached == {0: "The other rank has sent nothing for 0 s."}
        monkeypatch.setattr(peers, "PATIENCE_SECONDS", 1e9)
        assert reader.read(address, 1) == 0  # is not asked again
        reader = Reader(is_over=over.is_set)
        over.set()
        assert reader.read(address, 1) == 0
        assert reader.unreached == {}


# ---- other hosts


def test_the_rest_of_a_slow_unit_is_left_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host sends an eighth of a unit and stalls: what has arrived is kept, and other hosts are not asked again."""
    sent = bytes(data_of(5, KiB))
    with server_that_sends(sent, ELSEWHERE) as address:
        reader = Reader(store_rate=100 * MiB)
        assert [reader.read(address, 5, 8 * KiB) for _ in range(2)] == [KiB, 0]
        assert reader.unreached == {}
        assert not reader.hosts.are_useful()
        # A rank that does not know the rate of its store asks the store once a second has passed.
        monkeypatch.setattr("dcp_remote.loading.read_rates._WINDOW_SECONDS", 0.4)
        assert Reader().read(address, 5, 8 * KiB) == KiB


def test_other_hosts_that_are_not_reached_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host does not answer: none is asked again in this load and the next ones; after ten minutes they are."""
    tried: list[str] = []

    def never(place: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(place[0])
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", never)
    addresses = [Address(n, host, 9, b"", bytes(16)) for n, host in enumerate((ELSEWHERE, FAR_AWAY))]
    clock = SleepClock()
    hosts = OtherHosts(clock)
    for _ in range(2):
        reader = Reader(hosts=hosts)
        assert [reader.read(address, 1) for address in addresses] == [0, 0]
        clock.sleep(599.0)
    assert tried == [ELSEWHERE]
    clock.sleep(1.0)
    reader = Reader(hosts=hosts)
    assert reader.read(addresses[1], 1) == 0
    assert reader.unreached == {1: "timed out"}


def test_a_rank_that_has_gone_says_nothing_of_its_host() -> None:
    """A connection is refused: the rank is not asked again in this load, the others of its host are."""
    with socket.create_server((ELSEWHERE, 0)) as closed:
        gone = Address(0, ELSEWHERE, closed.getsockname()[1], b"", bytes(16))
    reader = Reader()
    with server_that_sends(bytes(data_of(1, 4)), ELSEWHERE, rank=1) as other:
        assert [reader.read(address, 1, 4) for address in (gone, gone, other)] == [0, 0, 4]
    assert set(reader.unreached) == {0}
    assert reader.hosts.are_useful()


def test_a_client_that_waits_for_hosts_that_prove_slow(server: PeerServer) -> None:
    """Other hosts prove slow in another thread: a client that waits for one to read a unit reads from the store."""
    reader = Reader(ELSEWHERE)
    thread = threading.Thread(target=reader.read, args=(server.address, 1))
    thread.start()
    while not server._connections:
        thread.join(0.01)
    reader.hosts.note(are_useful=False)
    thread.join()
    assert reader.store.received_bytes == {1: 0}


def test_other_hosts_are_asked_while_they_send_a_quarter() -> None:
    """After a whole unit, other hosts send an eighth of each: the eighth such unit is not asked for."""
    data, size = bytes(data_of(1, 4 * KiB)), 4 * KiB
    reader = Reader(store_rate=100 * MiB)
    with server_that_sends(data, ELSEWHERE) as good, server_that_sends(data[: size // 8], FAR_AWAY) as slow:
        assert reader.read(good, 1, size) == size
        assert [reader.read(slow, 1, size) for _ in range(8)] == [size // 8] * 7 + [0]


def test_a_rank_without_a_port_serves_its_own_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Occupy the only port: ranks of this host are served over a Unix socket."""
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with serving(ports=(port, port)) as server:
            server.offer(1, data_of(1), receivers=2, stays=True)
            assert server.address.port == 0
            assert Reader().read(server.address, 1) == UNIT_BYTES
        assert "cannot listen at a TCP port" in caplog.text
        with serving(serves_other_hosts=False) as server:
            assert server.address.port == 0
        monkeypatch.setattr(peers, "listen_on_unix_socket", lambda: None)
        with pytest.raises(OSError, match="are in use"):
            serving(ports=(port, port))
    with serving(serves_other_hosts=False) as server:
        assert server.address.port > 0  # this host has no Unix sockets


@pytest.mark.parametrize("without_port", [False, True])
def test_hosts_read_for_themselves_if_a_rank_has_no_port(without_port: bool) -> None:
    """Three ranks on two hosts want the same: all is read once, or once by each host."""
    size = 8 * MiB
    layouts = [Layout(f"w{n}", TensorKind("uint8"), (size,), (Box((0,), (size,)),), ((size,),)) for n in range(6)]
    manifest = build(layouts)
    wants = [Want(0, 6, None)]
    with contextlib.ExitStack() as opened:
        exchanges = [
            opened.enter_context(PeerExchange(rank, host, memory_budget_bytes=MiB, is_over=lambda: False))
            for rank, host in enumerate((HERE, ELSEWHERE, HERE))
        ]
        announced = [exchange.listen(manifest, wants) for exchange in exchanges]
        if without_port:
            assert announced[2].address is not None
            announced[2] = replace(announced[2], address=replace(announced[2].address, port=0))
        cohort = cohorts_of(announced)[0]
        plans = [exchange.begin(MemoryStore(), manifest, cohort)[1] for exchange in exchanges]
        assert {sum(request.length for request in plan.ranges) for plan in plans} == {6 * size}
        awaited = [exchange.fallback_bytes // size for exchange in exchanges]
        assert awaited == ([3, 0, 3] if without_port else [4, 4, 4])
        assert [exchange.budget_bytes < MiB for exchange in exchanges] == [True, not without_port, True]


def test_what_a_rank_cannot_keep_is_left_to_its_reads() -> None:
    """A rank that reads 4 KiB for others keeps 4 KiB at most, so that the rest of the budget is for its reads."""
    kind, size = TensorKind("uint8"), 4096
    manifest = build([Layout("w", kind, (size,), (Box((0,), (size,)),), ((size,),))])
    wants = [Want(0, 1, None)]
    with contextlib.ExitStack() as opened:
        exchanges = [
            opened.enter_context(PeerExchange(rank, HERE, memory_budget_bytes=MiB, is_over=lambda: False))
            for rank in range(2)
        ]
        cohort, _ = cohorts_of([exchange.listen(manifest, wants) for exchange in exchanges])
        for exchange in exchanges:
            exchange.begin(MemoryStore(), manifest, cohort)
        assert sorted(exchange.budget_bytes for exchange in exchanges) == [MiB - size, MiB]


def test_a_load_that_failed_waits_for_no_server(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When the buffers are reclaimed after a failure, a pending request ends, without a word about the server."""
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", 1e9)
    lease, asking, reader = BufferLease(), threading.Event(), Reader(ELSEWHERE)

    def ask() -> None:
        with lease.used():
            asking.set()
            reader.read(server.address, 1)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asking.wait(30)
    lease.close()
    thread.join()
    assert reader.store.received_bytes == {1: 0}
    assert reader.unreached == {}
    assert reader.hosts.are_useful()
    assert not caplog.records


def test_the_address_towards_a_host() -> None:
    """The address is that of the interface on the route; the loopback address if the host is unknown."""
    assert host_towards(HERE) == HERE
    assert host_towards("localhost") in {HERE, "::1"}
    assert host_towards(None) == HERE
    assert host_towards("no-such-host.invalid") == HERE


@pytest.mark.parametrize(
    ("host", "ways", "own"),
    [
        ("node1", {"node1": HERE, "192.0.2.1": "10.1.2.3"}, "10.1.2.3"),
        ("node1", {"node1": HERE, "2001:db8::1": "fd00::2"}, "fd00::2"),
        ("node1", {"node1": HERE}, HERE),
        ("node2", {"node2": "10.1.2.3", "192.0.2.1": "10.9.9.9"}, "10.1.2.3"),
        ("localhost", {"localhost": "::1", "192.0.2.1": "10.1.2.3"}, "::1"),
        ("127.0.0.1", {"127.0.0.1": HERE, "192.0.2.1": "10.1.2.3"}, HERE),
    ],
)
def test_a_host_whose_own_name_is_a_loopback_address(
    host: str, ways: dict[str, str], own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a host's name is a loopback address, as in Debian, the default route's address is used, if there is one."""
    monkeypatch.setattr(peer_sockets, "_address_towards", ways.get)
    assert host_towards(host) == own


def test_a_server_that_cannot_start_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse the first thread: the error is raised, and the sockets opened before are closed."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        serving()
    gc.collect()  # a socket that was left open is a ResourceWarning


def test_one_connection_that_fails_ends_no_other(server: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose one connection before it is accepted, and find no thread for another: the third one is served."""
    accept, start, refused = socket.socket.accept, threading.Thread.start, list[str]()

    def lose_first(listening: socket.socket) -> Any:
        accepted = accept(listening)
        if not refused:
            refused.append("connection")
            accepted[0].close()
            raise ConnectionAbortedError(errno.ECONNABORTED, "Software caused connection abort")
        return accepted

    def refuse_once(thread: threading.Thread) -> None:
        if len(refused) == 1:
            refused.append("thread")
            threading._limbo.pop(thread, None)  # type: ignore[attr-defined]  # as CPython does itself
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(socket.socket, "accept", lose_first)
    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    server.offer(1, data_of(1), receivers=3, stays=True)
    assert [Reader().read(server.address, 1) for _ in range(3)] == [0, 0, UNIT_BYTES]
    assert refused == ["connection", "thread"]
    wait_until(lambda: not server._connections)  # each connection ends in a thread of its own


def test_too_few_descriptors_for_connections() -> None:
    """With a limit of a hundred more open files, no server starts: it would leave none for the store."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = sum(1 for _ in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, hard))
    try:
        with pytest.raises(OSError, match="too few files may be opened"):
            serving()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- the interface and the ports that a site allows


def is_free(port: int) -> bool:
    try:
        socket.create_server((HERE, port)).close()
    except OSError:
        return False
    return True


def test_ports_of_a_range() -> None:
    """Listen twice in a range of two ports, and once more: the third finds no port, and says which were in use."""
    # Below the ports that the system gives to other sockets, which could take one of the two meanwhile.
    first = next(port for port in range(21_000, 29_000, 2) if is_free(port) and is_free(port + 1))
    ports = (first, first + 1)
    with peer_sockets.listen_on_tcp(HERE, ports) as one, peer_sockets.listen_on_tcp(HERE, ports) as other:
        assert {one.getsockname()[1], other.getsockname()[1]} == set(ports)
        with pytest.raises(OSError, match=f"all ports from {first} to {first + 1} are in use"):
            peer_sockets.listen_on_tcp(HERE, ports)
    with serving(ports=ports) as server:
        assert server.address.port in ports


def test_the_address_of_an_interface() -> None:
    """Name the loopback interface, and one that does not exist."""
    assert RankSockets(interface="lo").find_address() == HERE
    assert RankSockets().find_address() is None
    with pytest.raises(InvalidArgumentError, match=r"no network interface of this name.*interface='eht0' known='.*lo"):
        RankSockets(interface="eht0")


@pytest.mark.parametrize("ports", [(0, 5), (9, 8), (1, 70_000), (1,), 29500, ("1", "2")])
def test_ports_that_are_no_range(ports: object) -> None:
    """Refuse a port, a range upside down, and ports that do not exist."""
    with pytest.raises(InvalidArgumentError, match="the first and the last port of a range"):
        RankSockets(ports=ports)  # type: ignore[arg-type]


def test_the_argument_of_a_manager() -> None:
    """Pass each kind of value."""
    assert check_rank_sockets(given=False) is None
    assert check_rank_sockets(given=True) == RankSockets()
    sockets = RankSockets(ports=(29_600, 29_700))
    assert check_rank_sockets(sockets) is sockets
    with pytest.raises(InvalidArgumentError, match="rank_sockets must be True, False, or a RankSockets"):
        check_rank_sockets("eth0")
