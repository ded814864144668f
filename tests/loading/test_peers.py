"""Transfer of units between ranks: the ranks are threads of this process, with real sockets between them."""

from __future__ import annotations

import contextlib
import errno
import gc
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.loading import peer_sockets, peers
from dcp_remote.loading.peer_sockets import RankSockets, check_rank_sockets
from dcp_remote.loading.peers import Address, OtherHosts, PeerClient, PeerServer, host_towards
from dcp_remote.loading.read_rates import ReadRates
from dcp_remote.storage.request_context import BufferLease
from tests.support.clocks import SleepClock

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture(params=["unix", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[PeerServer]:
    """Give a server that is reached by either kind of socket."""
    with PeerServer(HERE, kept_bytes_max=MiB) as server:
        if request.param == "unix" and not server.address.name:
            pytest.skip("this system has no Unix sockets without a file")
        if request.param == "tcp":
            server.address = replace(server.address, name=b"")
        yield server


def client_of(
    *addresses: Address,
    is_over: Callable[[], bool] = lambda: False,
    rates: ReadRates | None = None,
    hosts: OtherHosts | None = None,
) -> PeerClient:
    rates, hosts = rates or ReadRates(), hosts or OtherHosts()
    return PeerClient(dict(enumerate(addresses)), HERE, is_over=is_over, rates=rates, hosts=hosts)


def measured(bytes_per_second: float) -> ReadRates:
    """Return rates of a load that has read from its store for a second."""
    rates = ReadRates()
    rates._store.received_bytes, rates._store.seconds = bytes_per_second, 1.0
    return rates


@contextlib.contextmanager
def server_that_sends(data: bytes, host: str = HERE) -> Iterator[Address]:
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
            yield Address(host, listening.getsockname()[1], b"", bytes(16))
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


def data_of(number: int, length: int = 3 * MiB + 5) -> memoryview:
    return memoryview((number.to_bytes(4, "little") * (length // 4 + 1))[:length])


def fetch(client: PeerClient, rank: int, number: int, length: int = 3 * MiB + 5) -> bytes | None:
    into = memoryview(bytearray(length))
    return bytes(into) if client.fetch(rank, number, into) == length and not client.unreached.get(rank) else None


def test_units_are_served_to_many_at_a_time(server: PeerServer) -> None:
    """Units that are requested before they are offered, over several connections, arrive whole and unmixed."""
    found: dict[tuple[int, int], bytes | None] = {}
    with client_of(server.address) as one, client_of(server.address) as other:

        def ask(client: int, number: int) -> None:
            found[client, number] = fetch((one, other)[client], 0, number)

        threads = [threading.Thread(target=ask, args=(client, number)) for client in range(2) for number in range(4)]
        for thread in threads:
            thread.start()
        for number in (3, 0, 2, 1):
            server.offer(number, data_of(number), receivers=2, stays=True)
        for thread in threads:
            thread.join()
        assert found == {(client, number): bytes(data_of(number)) for client in range(2) for number in range(4)}
        assert one.received_bytes == other.received_bytes == 4 * len(data_of(0))
        # All receivers have unit 1: it is dropped.
        assert fetch(one, 0, 1) is None
        server.offer(7, data_of(7), receivers=2, stays=True)
        assert fetch(one, 0, 7) == bytes(data_of(7))


def test_a_copy_is_kept_of_data_that_does_not_stay(server: PeerServer) -> None:
    """Units beyond the room for copies are declined; there is room again when all receivers have a unit."""
    size = 600 * KiB
    with client_of(server.address) as client:
        memory = bytearray(data_of(1, size))
        server.offer(1, memoryview(memory), receivers=2, stays=False)
        memory[:] = data_of(9, size)
        server.offer(2, data_of(2, size), receivers=1, stays=False)
        assert fetch(client, 0, 2, size) is None
        assert fetch(client, 0, 1, size) == bytes(data_of(1, size))
        assert server._kept_bytes == size
        assert fetch(client, 0, 1, size) == bytes(data_of(1, size))
        server.offer(4, data_of(4, 0), receivers=1, stays=True)
        assert fetch(client, 0, 4, 0) == b""  # answered only when the request before has been counted
        server.offer(3, data_of(3, size), receivers=1, stays=False)
        assert fetch(client, 0, 3, size) == bytes(data_of(3, size))


def test_a_client_without_the_secret_gets_nothing(server: PeerServer) -> None:
    """The connection of a client without the secret is closed, and other clients go on."""
    server.offer(1, data_of(1), receivers=1, stays=True)
    with client_of(replace(server.address, secret=bytes(16))) as stranger, client_of(server.address) as client:
        assert fetch(stranger, 0, 1) is None
        assert fetch(client, 0, 1) == bytes(data_of(1))


def test_waiting_clients_return_when_the_server_closes(server: PeerServer) -> None:
    """When the server closes, waiting clients return at once, note it, and send it no more requests."""
    found = []
    with client_of(server.address) as client:
        threads = [threading.Thread(target=lambda: found.append(fetch(client, 0, 1))) for _ in range(3)]
        for thread in threads:
            thread.start()
        while len(server._connections) < 3:
            threads[0].join(0.01)
        server.close()
        for thread in threads:
            thread.join()
        assert found == [None] * 3
        assert fetch(client, 0, 2) is None
        assert set(client.unreached) == {0}
        server.__init__(HERE, kept_bytes_max=0)  # type: ignore[misc]  # for the fixture to close


def test_a_server_that_is_still_reading(server: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for twice the patience for a server that says that it reads; it declines when it has read all."""
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", 2.0)  # the server says so five times in it, also on a busy machine
    with client_of(server.address) as client:
        timer = threading.Timer(4.0, server.complete)
        timer.start()
        assert fetch(client, 0, 1) is None
        assert client.unreached == {}
        server.offer(2, data_of(2), receivers=1, stays=True)
        assert fetch(client, 0, 2) == bytes(data_of(2))
        timer.join()


@pytest.mark.parametrize("sent", [b"", b"abc"])
def test_patience_ends(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that falls silent in a unit is given up after a while, or at once when the load is over."""
    over = threading.Event()
    with server_that_sends(sent) as address:
        monkeypatch.setattr(peers, "PATIENCE_SECONDS", 0.1)
        with client_of(address, is_over=over.is_set) as client:
            assert fetch(client, 0, 1) is None
            assert client.unreached == {0: "The other rank has sent nothing for 0 s."}
        monkeypatch.setattr(peers, "PATIENCE_SECONDS", 1e9)
        with client_of(address, is_over=over.is_set) as client:
            over.set()
            assert fetch(client, 0, 1) is None
            assert client.unreached == {}


# ---- other hosts


def test_the_rest_of_a_slow_unit_is_left_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts send a third of a unit and stall: what has arrived is kept, and the slow hosts are not asked again."""
    unit, hosts = bytes(data_of(5, 3 * KiB)), OtherHosts()
    with server_that_sends(unit[:KiB], ELSEWHERE) as one, server_that_sends(unit[:KiB], "127.0.0.3") as other:
        with client_of(one, other, one, rates=measured(100 * MiB), hosts=hosts) as client:
            for rank in (0, 1):
                into = memoryview(bytearray(3 * KiB))
                assert client.fetch(rank, 1, into) == KiB
                assert bytes(into[:KiB]) == unit[:KiB]
            assert client.fetch(2, 1, into) == 0
            assert client.received_bytes == 2 * KiB
            assert client.unreached == {}
        assert hosts.are_slow()
    # A rank that does not know the rate of its store asks the store once a second has passed.
    with server_that_sends(unit[:KiB], ELSEWHERE) as address, client_of(address) as client:
        monkeypatch.setattr("dcp_remote.loading.read_rates._UNKNOWN_SECONDS", 0.2)
        assert client.fetch(0, 1, into) == KiB


def test_a_unit_that_comes_as_soon_is_taken(server: PeerServer) -> None:
    """Receive from another host, with a store of the slowest kind: the host is useful."""
    server.offer(1, data_of(1), receivers=1, stays=True)
    hosts = OtherHosts()
    address = replace(server.address, name=b"")
    with PeerClient({0: address}, ELSEWHERE, is_over=lambda: False, rates=measured(1000), hosts=hosts) as client:
        assert fetch(client, 0, 1) == bytes(data_of(1))
    assert hosts.find_cause(HERE) is None
    assert not hosts.are_slow()


def test_hosts_that_are_not_reached_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hosts do not answer: a fourth is not tried, nor any of them in the next load; after a while one is."""
    tried: list[str] = []

    def never(place: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(place[0])
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", never)
    addresses = [Address(f"127.0.0.{n}", 9, b"", bytes(16)) for n in (2, 3, 4, 5)]
    clock = SleepClock()
    hosts = OtherHosts(clock)
    with client_of(*addresses, hosts=hosts) as client:
        assert [fetch(client, number, 1) for number in range(4)] == [None] * 4
        assert client.unreached == dict.fromkeys(range(3), "timed out")
    assert tried == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    with client_of(*addresses, hosts=hosts) as client:
        assert [fetch(client, number, 1) for number in range(4)] == [None] * 4
        assert client.unreached == dict.fromkeys(range(4), "timed out")
    assert len(tried) == 3
    assert not hosts.are_slow()  # the next report still says that hosts are not reached
    clock.sleep(601.0)
    with client_of(*addresses, hosts=hosts) as client:
        assert fetch(client, 3, 1) is None
    assert tried[3:] == ["127.0.0.5"]


def test_a_refused_connection_is_not_remembered() -> None:
    """A rank has gone: it is not asked again in this load, the others of its host are."""
    with socket.create_server((ELSEWHERE, 0)) as closed:
        gone = Address(ELSEWHERE, closed.getsockname()[1], b"", bytes(16))
    hosts = OtherHosts()
    with server_that_sends(b"abcd", ELSEWHERE) as other, client_of(gone, other, hosts=hosts) as client:
        assert [fetch(client, number, 1, 4) for number in (0, 0, 1)] == [None, None, b"abcd"]
        assert set(client.unreached) == {0}
    assert hosts.find_cause(ELSEWHERE) is None


def test_a_host_is_useful_that_gives_more_than_it_leaves() -> None:
    """Reach one of three hosts: a fourth is tried."""
    hosts = OtherHosts(SleepClock())
    for host, cause in (("a", ""), ("b", "timed out"), ("c", None)):
        hosts.note(host, cause)
    assert [hosts.find_cause(host) for host in "abcd"] == ["", "timed out", None, None]
    hosts.note("c", "")
    assert hosts.find_cause("d") is not None
    assert hosts.are_slow()


def test_a_rank_without_a_port_serves_its_own_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Occupy the only port: ranks of this host are served over a Unix socket, those of others are told."""
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with PeerServer(HERE, kept_bytes_max=0, ports=(port, port)) as server:
            server.offer(1, data_of(1), receivers=2, stays=True)
            assert server.address.port == 0
            with client_of(server.address) as client:
                assert fetch(client, 0, 1) == bytes(data_of(1))
            with client_of(replace(server.address, host=ELSEWHERE)) as client:
                assert fetch(client, 0, 1) is None
                assert "only ranks of its own host" in client.unreached[0]
        assert "cannot listen at a TCP port" in caplog.text
        monkeypatch.setattr(peers, "listen_on_unix_socket", lambda: None)
        with pytest.raises(OSError, match="are in use"):
            PeerServer(HERE, kept_bytes_max=0, ports=(port, port))
    with PeerServer(HERE, kept_bytes_max=0, serves_other_hosts=False) as server:
        assert server.address.port > 0  # this host has no Unix sockets


def test_a_load_that_failed_waits_for_no_server(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When the buffers are reclaimed after a failure, a pending request ends, without a warning about the server."""
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", 1e9)
    lease, asking = BufferLease(), threading.Event()
    found: list[bytes | None] = []

    def ask() -> None:
        with lease.used():
            asking.set()
            found.append(fetch(client, 0, 1))

    with client_of(server.address) as client:
        thread = threading.Thread(target=ask)
        thread.start()
        assert asking.wait(30)
        lease.close()
        thread.join()
    assert found == [None]
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
    monkeypatch.setattr(peers, "_address_towards", ways.get)
    assert host_towards(host) == own


@pytest.mark.parametrize("refused", ["listen_on_unix_socket", "socket.socketpair"])
def test_a_server_that_cannot_open_all_its_sockets(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a socket after the first: the error is raised, and the sockets opened before are closed."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(f"dcp_remote.loading.peers.{refused}", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        PeerServer(HERE, kept_bytes_max=0)
    gc.collect()  # a socket that was left open is a ResourceWarning


def test_too_few_descriptors_for_connections() -> None:
    """With a limit of a hundred more open files, no server starts: it would leave none for the store."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = sum(1 for _ in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, hard))
    try:
        with pytest.raises(OSError, match="too few files may be opened"):
            PeerServer("127.0.0.1", kept_bytes_max=0)
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
    with PeerServer(HERE, kept_bytes_max=0, ports=ports) as server:
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
