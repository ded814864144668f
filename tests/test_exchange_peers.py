"""Bytes from rank to rank: threads of this process are the ranks, and real sockets between them."""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dcp_remote import peer_sockets, peers
from dcp_remote.peers import Address, Giver, Taker, host_towards
from dcp_remote.ranges import KiB, MiB
from dcp_remote.storage.landing import Landing

HERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture(params=["unix", "tcp"])
def giver(request: pytest.FixtureRequest) -> Iterator[Giver]:
    """Reached by either kind of socket."""
    with Giver(HERE, kept_bytes_max=MiB) as one:
        if request.param == "unix" and not one.address.name:
            pytest.skip("this system has no Unix sockets without a file")
        if request.param == "tcp":
            one.address = replace(one.address, name=b"")
        yield one


def taker_of(*addresses: Address) -> Taker:
    return Taker(dict(enumerate(addresses)), HERE, is_over=lambda: False)


def data_of(number: int, length: int = 3 * MiB + 5) -> memoryview:
    return memoryview((number.to_bytes(4, "little") * (length // 4 + 1))[:length])


def take(taker: Taker, giver: int, number: int, length: int = 3 * MiB + 5) -> bytes | None:
    into = memoryview(bytearray(length))
    return bytes(into) if taker.take(giver, number, into) else None


def test_units_are_given_to_many_at_a_time(giver: Giver) -> None:
    """Asked for before they are there, over a connection for each that asks; whole, and the right ones."""
    found: dict[tuple[int, int], bytes | None] = {}
    with taker_of(giver.address) as one, taker_of(giver.address) as other:

        def ask(who: int, number: int) -> None:
            found[who, number] = take((one, other)[who], 0, number)

        threads = [threading.Thread(target=ask, args=(who, number)) for who in range(2) for number in range(4)]
        for thread in threads:
            thread.start()
        for number in (3, 0, 2, 1):
            giver.offer(number, data_of(number), takers=2, stays=True)
        for thread in threads:
            thread.join()
        assert found == {(who, number): bytes(data_of(number)) for who in range(2) for number in range(4)}
        assert one.taken_bytes == other.taken_bytes == 4 * len(data_of(0))
        # All who want it have it.
        assert take(one, 0, 1) is None
        giver.offer(7, data_of(7), takers=2, stays=True)
        assert take(one, 0, 7) == bytes(data_of(7))


def test_of_what_does_not_stay_a_copy_is_kept(giver: Giver) -> None:
    """Of as much as there is room for; the rest is declined; and there is room again when all have it."""
    size = 600 * KiB
    with taker_of(giver.address) as taker:
        memory = bytearray(data_of(1, size))
        giver.offer(1, memoryview(memory), takers=2, stays=False)
        memory[:] = data_of(9, size)
        giver.offer(2, data_of(2, size), takers=1, stays=False)
        assert take(taker, 0, 2, size) is None
        assert take(taker, 0, 1, size) == bytes(data_of(1, size))
        assert giver._kept_bytes == size
        assert take(taker, 0, 1, size) == bytes(data_of(1, size))
        giver.offer(4, data_of(4, 0), takers=1, stays=True)
        assert take(taker, 0, 4, 0) == b""  # answered when what was before it is done with
        giver.offer(3, data_of(3, size), takers=1, stays=False)
        assert take(taker, 0, 3, size) == bytes(data_of(3, size))


def test_who_does_not_know_the_secret_gets_nothing(giver: Giver) -> None:
    """The connection ends, and others go on."""
    giver.offer(1, data_of(1), takers=1, stays=True)
    with taker_of(replace(giver.address, secret=bytes(16))) as stranger, taker_of(giver.address) as taker:
        assert take(stranger, 0, 1) is None
        assert take(taker, 0, 1) == bytes(data_of(1))


def test_who_waits_is_let_go_when_the_other_closes(giver: Giver, caplog: pytest.LogCaptureFixture) -> None:
    """At once, and is told once; nobody asks there again."""
    found = []
    with taker_of(giver.address) as taker:
        threads = [threading.Thread(target=lambda: found.append(take(taker, 0, 1))) for _ in range(3)]
        for thread in threads:
            thread.start()
        while len(giver._connections) < 3:
            threads[0].join(0.01)
        giver.close()
        for thread in threads:
            thread.join()
        assert found == [None] * 3
        assert take(taker, 0, 2) is None
        assert len(caplog.records) == 1
        giver.__init__(HERE, kept_bytes_max=0)  # type: ignore[misc]  # what the fixture closes


def test_patience_ends(giver: Giver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of somebody who is there and never has what is asked for; and at once when all is over."""
    monkeypatch.setattr(peer_sockets, "LOOK_SECONDS", 0.02)
    over = threading.Event()
    with Taker({0: giver.address}, HERE, is_over=over.is_set) as taker:
        monkeypatch.setattr(peers, "PATIENCE_SECONDS", 0.1)
        assert take(taker, 0, 1) is None
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", 1e9)
    with Taker({0: giver.address}, HERE, is_over=over.is_set) as taker:
        over.set()
        assert take(taker, 0, 1) is None


def test_who_cannot_be_reached_is_not_asked_for_ever(giver: Giver, caplog: pytest.LogCaptureFixture) -> None:
    """After three in vain nobody is; unless somebody was reached."""
    giver.offer(1, data_of(1), takers=2, stays=True)
    with socket.create_server((HERE, 0)) as closed:
        nobody = Address(HERE, closed.getsockname()[1], b"", bytes(16))
    with taker_of(nobody, nobody, nobody, giver.address) as taker:
        assert [take(taker, number, 1) for number in range(4)] == [None] * 4
    with taker_of(giver.address, nobody, nobody, nobody) as taker:
        assert take(taker, 0, 1) == bytes(data_of(1))
        assert [take(taker, number, 1) for number in (1, 2, 3)] == [None] * 3
        giver.offer(2, data_of(2), takers=1, stays=True)
        assert take(taker, 0, 2) == bytes(data_of(2))
    assert len(caplog.records) == 6


def test_who_has_failed_waits_for_nobody(
    giver: Giver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read of the same rank has failed, and the memory is wanted back: nobody waits for what the other has not got.

    Without a word about the other.
    """
    monkeypatch.setattr(peer_sockets, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", 1e9)
    landing, asking = Landing(), threading.Event()
    found: list[bytes | None] = []

    def ask() -> None:
        with landing.used():
            asking.set()
            found.append(take(taker, 0, 1))

    with taker_of(giver.address) as taker:
        thread = threading.Thread(target=ask)
        thread.start()
        assert asking.wait(30)
        landing.close()
        thread.join()
    assert found == [None]
    assert not caplog.records


@pytest.mark.parametrize("patience_seconds", [0.1, 1e9])
def test_a_trickle_is_silence(patience_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A giver that sends a byte every few milliseconds, for ever: patience ends, or the load does."""
    monkeypatch.setattr(peer_sockets, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", patience_seconds)
    over = threading.Event()

    def trickle() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            while True:
                connection.sendall(b"\1")
                if over.wait(0.005):
                    raise ConnectionAbortedError

    with socket.create_server((HERE, 0)) as listening:
        thread = threading.Thread(target=trickle)
        thread.start()
        address = Address(HERE, listening.getsockname()[1], b"", bytes(16))
        asked = itertools.count()
        with Taker({0: address}, HERE, is_over=lambda: patience_seconds > 1 and next(asked) > 2) as taker:
            assert take(taker, 0, 1) is None
        over.set()
        thread.join()


def test_hosts_out_of_reach_do_not_speak_for_this_one(giver: Giver) -> None:
    """And the other way round: after three of other hosts in vain none of those is asked, but all that are here."""
    giver.offer(1, data_of(1), takers=9, stays=True)
    with socket.create_server(("127.0.0.2", 0)) as closed:
        nobody = Address("127.0.0.2", closed.getsockname()[1], b"", bytes(16))
    with socket.create_server(("127.0.0.2", 0)) as waiting:
        far = Address("127.0.0.2", waiting.getsockname()[1], b"", bytes(16))
        with taker_of(giver.address, nobody, nobody, nobody, far) as taker:
            assert take(taker, 0, 1) == bytes(data_of(1))
            assert [take(taker, number, 1) for number in (1, 2, 3, 4)] == [None] * 4
            assert take(taker, 0, 1) == bytes(data_of(1))
        waiting.settimeout(0)
        with pytest.raises(BlockingIOError):  # nobody has asked there
            waiting.accept()


def test_the_address_towards_a_host() -> None:
    """Its own, of the interface that leads there; the loopback's, where nothing is known."""
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
def test_a_host_that_finds_itself_on_the_loopback_interface(
    host: str, ways: dict[str, str], own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian has it, by its own name: its address is the one that leads to the world, if one does."""
    monkeypatch.setattr(peers, "_address_towards", ways.get)
    assert host_towards(host) == own


def test_too_few_descriptors_for_connections() -> None:
    """A limit a hundred above what is open: no connections to others, which would take those of the store's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = sum(1 for _ in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, hard))
    try:
        with pytest.raises(OSError, match="too few files may be opened"):
            Giver("127.0.0.1", kept_bytes_max=0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
