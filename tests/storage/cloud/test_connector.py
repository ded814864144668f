"""Hosts with several addresses: which are tried, in which order, and which connection is taken."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self

import pytest

from dcp_remote.storage.cloud.connector import AddressInfo, Connector
from dcp_remote.storage.cloud.range_reader import DirectRangeReader
from tests.storage.cloud.range_server import range_server

V4, V6 = socket.AF_INET, socket.AF_INET6


class Network:
    """Fake network whose addresses answer, refuse or never answer.

    Args:
        found: Results of the resolver: family and name.
        answers: Behaviour of an address: "yes", "never", an errno raised at once, or a negative one raised later.

    Attributes:
        tried: Names of the addresses that were tried, in order.
        sockets: Sockets that were opened.
    """

    def __init__(self, found: Sequence[tuple[int, str]], answers: dict[str, str | int]) -> None:
        self.found = found
        self.answers = answers
        self.tried: list[str] = []
        self.sockets: list[socket.socket] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def connector(self, next_address_seconds: float = 0.0) -> Connector:
        return Connector(resolve=self._resolve, begin=self._begin, next_address_seconds=next_address_seconds)

    def _resolve(self, host: str, port: int, *, type: int) -> list[AddressInfo]:  # noqa: A002  # getaddrinfo's name
        return [(family, type, 0, "", (name, port)) for family, name in self.found]

    def _begin(self, info: AddressInfo) -> socket.socket:
        family, _, _, _, (name, _) = info
        self.tried.append(name)
        answer = self.answers[name]
        if isinstance(answer, int) and answer > 0:
            raise OSError(answer, "as the test says")
        sock, other = socket.socketpair()
        self._stack.callback(other.close)
        sock.setblocking(False)
        if answer == "never":  # a full buffer is not writable
            while True:
                try:
                    sock.send(bytes(65536))
                except BlockingIOError:
                    break
        fake = _FakeSocket(sock, family, -answer if isinstance(answer, int) else 0)
        self._stack.callback(fake.close)
        self.sockets.append(fake)
        return fake


class _FakeSocket(socket.socket):
    """Socket with the family and the error that the test gives it."""

    def __init__(self, sock: socket.socket, family: int, code: int) -> None:
        super().__init__(fileno=sock.detach())
        self._said_family, self._code = family, code

    @property
    def family(self) -> int:  # type: ignore[override]  # a number is enough
        return self._said_family

    def getsockopt(self, *_: object) -> int:  # type: ignore[override]  # of errors alone
        return self._code


def test_an_address_that_never_answers_costs_little() -> None:
    """Resolve to an IPv6 address that never answers, then IPv4: IPv4 is tried in parallel and taken."""
    with Network([(V6, "six"), (V4, "four")], {"six": "never", "four": "yes"}) as network:
        sock = network.connector().connect("host", 80, seconds=60)
        assert sock.family == V4
        assert network.tried == ["six", "four"]
        assert [opened.fileno() == -1 for opened in network.sockets] == [True, False]


def test_the_family_that_answered_is_tried_first() -> None:
    """Connect again: the family that answered comes first, for this host only, until it stops answering."""
    with Network([(V6, "six"), (V4, "four")], {"six": "never", "four": "yes"}) as network:
        connector = network.connector()
        connector.connect("host", 80, seconds=60)
        network.tried.clear()
        connector.connect("host", 80, seconds=60)
        assert network.tried == ["four"]
        network.tried.clear()
        connector.connect("another", 80, seconds=60)
        assert network.tried == ["six", "four"]
        network.answers = {"six": "yes", "four": "never"}
        network.tried.clear()
        for _ in range(2):
            connector.connect("host", 80, seconds=60)
        assert network.tried == ["four", "six", "six"]


def test_an_address_that_answers_is_the_only_one_tried() -> None:
    """Answer at once: within the usual pause no second address is tried."""
    with Network([(V6, "six"), (V4, "four")], {"six": "yes", "four": "yes"}) as network:
        assert network.connector(next_address_seconds=60).connect("host", 80, seconds=60).family == V6
        assert network.tried == ["six"]


@pytest.mark.parametrize("code", [errno.ENETUNREACH, -errno.ECONNREFUSED], ids=["at once", "a moment later"])
def test_a_refusal_tries_the_next_address_at_once(code: int) -> None:
    """Refuse with a pause of an hour: the next address is tried before the pause ends."""
    with Network([(V6, "six"), (V4, "four")], {"six": code, "four": "yes"}) as network:
        assert network.connector(next_address_seconds=3600).connect("host", 80, seconds=7200).family == V4


def test_families_take_turns() -> None:
    """Resolve to three addresses of one family, then two of the other: they are tried alternately."""
    found = [(V6, "a"), (V6, "b"), (V6, "c"), (V4, "x"), (V4, "y")]
    with (
        Network(found, {name: errno.ENETUNREACH for _, name in found}) as network,
        pytest.raises(OSError, match="as the test says"),
    ):
        network.connector().connect("host", 80, seconds=60)
    assert network.tried == ["a", "x", "b", "y", "c"]


@pytest.mark.parametrize(
    ("found", "answers", "kind"),
    [
        ([(V6, "six"), (V4, "four")], {"six": "never", "four": "never"}, TimeoutError),
        ([(V6, "six"), (V4, "four")], {"six": errno.ENETUNREACH, "four": -errno.ECONNREFUSED}, ConnectionRefusedError),
        ([], {}, OSError),
    ],
    ids=["silence", "refusals", "no address"],
)
def test_no_address_answers(
    found: Sequence[tuple[int, str]], answers: dict[str, str | int], kind: type[OSError]
) -> None:
    """Let all addresses fail: the error is the last one or a timeout, and no socket stays open."""
    with Network(found, answers) as network:
        with pytest.raises(kind, match=r"too long|refused|no address"):
            network.connector().connect("host", 80, seconds=0.01)
        assert all(opened.fileno() == -1 for opened in network.sockets)


@contextmanager
def with_a_dead_address(port: int) -> Iterator[Callable[..., list[AddressInfo]]]:
    """Yield a resolver whose first address never answers, because the queue of its listener is full."""
    with socket.socket() as listener, ExitStack() as stack:
        listener.bind(("127.0.0.2", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        alive = (V4, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))
        yield lambda *_, **__: [(V4, socket.SOCK_STREAM, 0, "", listener.getsockname()), alive]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback has one address")
def test_a_range_from_a_host_with_a_dead_address() -> None:
    """Read a range over real sockets: the second address is tried in parallel and answers."""
    with range_server(b"0123456789") as server:
        port = int(server.endpoint_url.rpartition(":")[2])
        with with_a_dead_address(port) as resolve:
            reads = DirectRangeReader(
                verify=None,
                connect_seconds=60,
                silence_seconds=60,
                connector=Connector(resolve=resolve, next_address_seconds=0.01),
            )
            buffer = bytearray(4)
            assert reads.read("http://host/key", 2, memoryview(buffer), seconds=60, hedge=None)
            assert buffer == b"2345"
