"""Sockets between the ranks of a group: which are allowed, and how they are opened, with a limit to each wait."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from dataclasses import dataclass

from dcp_remote.common.units import MiB
from dcp_remote.errors import InvalidArgumentError

# Time-out of a connection attempt: ranks of a group reach each other in milliseconds, after a lost packet in a second,
# or not at all.
_CONNECT_SECONDS = 1.5

# Connections that wait to be accepted: sixteen from each of 64 ranks.
_BACKLOG = 1024

# Kernel buffer of a Unix socket: at its default of 200 KiB, two processes wake each other twenty times as often.
_BUFFER_BYTES = 4 * MiB

_NAME_BYTES = 16

# Linux: request for the IPv4 address of an interface, and the layout of its argument.
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s24s")
_IFREQ_ADDRESS = slice(20, 24)

_PORT_MAX = 65535

# Beginnings of the addresses and names by which only the host itself is reached.
_LOOPBACK = ("127.", "::1", "localhost")

# Addresses of no machine whose route is the default route, one per address family (RFC 5737, RFC 3849).
_FAR_AWAY = ("192.0.2.1", "2001:db8::1")


@dataclass(frozen=True, slots=True)
class RankSockets:
    """Network of the sockets over which ranks of several hosts give each other what they have read.

        CheckpointManager(url, rank_sockets=RankSockets(interface="eth1", ports=(29600, 29700)))

    Ranks of one host use Unix sockets without a file, which no other host reaches.

    Attributes:
        interface: Name of the network interface whose IPv4 address ranks listen at (Linux only); None for the address
            on the route to the store of their process group.
        ports: First and last TCP port to listen at, one for each rank of a host; None for any free port.
    """

    interface: str | None = None
    ports: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            InvalidArgumentError: This host has no such interface, or the ports are no range.
        """
        match self.ports:
            case None | (int(), int()) if self.ports is None or 0 < self.ports[0] <= self.ports[1] <= _PORT_MAX:
                pass
            case _:
                raise InvalidArgumentError(
                    "ports must be the first and the last port of a range, such as (29600, 29700).", ports=self.ports
                )
        self.find_address()

    def find_address(self) -> str | None:
        """Return the address of the interface; None if no interface is set. Sends nothing.

        Raises:
            InvalidArgumentError: This host has no such interface, or the interface has no IPv4 address.
        """
        if self.interface is None:
            return None
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                request = _IFREQ.pack(str(self.interface).encode(), b"")
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[_IFREQ_ADDRESS])
        except OSError as error:
            raise InvalidArgumentError(
                "This host has no network interface of this name with an IPv4 address. Name one that all hosts have.",
                interface=self.interface,
                known=", ".join(name for _, name in socket.if_nameindex()),
                cause=error.strerror,
            ) from error


def check_rank_sockets(given: object) -> RankSockets | None:
    """Return the sockets that an argument of `CheckpointManager` stands for; None if there are to be none."""
    if isinstance(given, RankSockets):
        return given
    if not isinstance(given, bool):
        raise InvalidArgumentError(
            "rank_sockets must be True, False, or a RankSockets such as RankSockets(interface='eth1').",
            rank_sockets=given,
            type=type(given).__name__,
        )
    return RankSockets() if given else None


def host_towards(host: str | None) -> str:
    """Return the address of this host on the route to another, by which it can be reached from there; sends nothing.

    A host that resolves its own name may get a loopback address (Debian maps it to 127.0.1.1 in /etc/hosts), which no
    other host reaches. The result is the address on the default route then. A host that is not known, or cannot be
    resolved, gives the loopback interface.
    """
    own = _address_towards(host) if host else None
    if host and own and own.startswith(_LOOPBACK) and not host.startswith(_LOOPBACK):
        own = next(filter(None, map(_address_towards, _FAR_AWAY)), own)
    return own or "127.0.0.1"


def _address_towards(host: str) -> str | None:
    with contextlib.suppress(OSError):
        for family, kind, *_, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
    return None


def listen_on_tcp(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """Open a listening TCP socket, at any free port or at a free one of a range, first and last."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if ports is None:
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    first, last = ports
    count = last - first + 1
    for number in range(count):
        # Each rank of a host begins elsewhere, so that few ports are tried twice.
        port = first + (os.getpid() + number) % count
        try:
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"all ports from {first} to {last} are in use (rank_sockets)")


def listen_on_unix_socket() -> socket.socket | None:
    """Open a listening Unix socket without a file, in Linux's abstract namespace; None on other systems.

    Between ranks of a host it costs half of what TCP does.
    """
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(b"\0dcp_remote/" + os.urandom(_NAME_BYTES).hex().encode())
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        return None
    return listening


def connect(host: str, port: int, name: bytes) -> socket.socket:
    """Connect to the Unix socket of a name, or to a TCP port if the name is empty."""
    if not name:
        return socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect(name)
    except OSError:
        connection.close()
        raise
    return connection


def configure_socket(connection: socket.socket, *, receive_seconds: float, send_seconds: float) -> None:
    """Set time-outs in the kernel, which spares a poll before each of many small reads.

    After its time-out a receiving call returns what has arrived, or raises BlockingIOError; a sending call fails if the
    other side receives nothing.
    """
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, seconds in ((socket.SO_RCVTIMEO, receive_seconds), (socket.SO_SNDTIMEO, send_seconds)):
        timeval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, option, timeval)
