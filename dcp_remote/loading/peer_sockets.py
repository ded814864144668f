"""Sockets between the ranks of a group: opened, configured, and read from with a limit to each wait."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dcp_remote.common.units import MiB
from dcp_remote.errors import InvalidArgumentError

# Time-out of a connection attempt: ranks of a group reach each other in milliseconds, after a lost packet in a second,
# or not at all.
CONNECT_SECONDS = 1.5

# Interval at which a receiver checks whether to go on waiting.
CHECK_SECONDS = 0.1

# Connections that wait to be accepted: sixteen from each of 64 ranks.
BACKLOG = 1024

# Kernel buffer of a Unix socket: at its default of 200 KiB, two processes wake each other twenty times as often.
_BUFFER_BYTES = 4 * MiB

_NAME_BYTES = 16

# Linux: request for the IPv4 address of an interface, and the layout of its argument.
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s24s")
_IFREQ_ADDRESS = slice(20, 24)

_PORT_MAX = 65535


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
        if self.ports is not None:
            try:
                first, last = self.ports
                is_range = type(first) is int and type(last) is int and 0 < first <= last <= _PORT_MAX
            except (TypeError, ValueError):
                is_range = False
            if not is_range:
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
    """Return the sockets that an argument of `CheckpointManager` stands for; None if there are to be none.

    Raises:
        InvalidArgumentError: The argument is neither a boolean nor a `RankSockets`.
    """
    if isinstance(given, RankSockets):
        return given
    if not isinstance(given, bool):
        raise InvalidArgumentError(
            "rank_sockets must be True, False, or a RankSockets such as RankSockets(interface='eth1').",
            rank_sockets=given,
            type=type(given).__name__,
        )
    return RankSockets() if given else None


def listen_on_tcp(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """Open a listening TCP socket, at any free port or at a free one of a range.

    Args:
        host: Address to listen at.
        ports: First and last port; None for any.

    Raises:
        OSError: The address cannot be listened at, or every port of the range is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if ports is None:
        return socket.create_server((host, 0), family=family, backlog=BACKLOG)
    first, last = ports
    count = last - first + 1
    for number in range(count):
        # Each rank of a host begins elsewhere, so that few ports are tried twice.
        port = first + (os.getpid() + number) % count
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"all ports from {first} to {last} are in use (rank_sockets)")


def count_free_descriptors() -> float:
    """Return the number of files that this process may still open; infinite where the system does not tell."""
    try:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return math.inf if limit == resource.RLIM_INFINITY else limit - sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return math.inf


def listen_on_unix_socket() -> socket.socket | None:
    """Open a listening Unix socket in Linux's abstract namespace, without a file; None on other systems.

    Between ranks of a host it costs half of what TCP does.
    """
    if sys.platform != "linux":
        return None
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(b"\0dcp_remote/" + os.urandom(_NAME_BYTES).hex().encode())
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        return None
    return listening


def connect_to_unix_socket(name: bytes) -> socket.socket | None:
    """Connect to a Unix socket; None if this fails, as for a socket of another host or container."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(name)
    except OSError:
        connection.close()
        return None
    return connection


def configure_socket(connection: socket.socket, *, check_seconds: float, send_timeout_seconds: float) -> None:
    """Set time-outs in the kernel, which spares a poll before each of many small reads.

    Args:
        connection: New connection.
        check_seconds: Interval at which `receive` checks whether to go on, in seconds.
        send_timeout_seconds: Time after which a send fails if nothing is received, in seconds.
    """
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(check_seconds))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_timeout_seconds))


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def receive(connection: socket.socket, into: memoryview, should_stop: Callable[[int, float], bool]) -> int:
    """Fill a buffer from a socket; return the number of bytes received, which is smaller if `should_stop` said so.

    Args:
        connection: Configured connection.
        into: Buffer to fill.
        should_stop: Called with the number of bytes received and the seconds since the last of them, at each interval
            of the connection; what it raises is raised.

    Raises:
        EOFError: The other side has closed the connection.
        OSError: The connection broke.
    """
    received, heard_seconds = 0, time.monotonic()
    while received < len(into):
        try:
            count = connection.recv_into(into[received:], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            count = 0
        else:
            if not count:
                raise EOFError("The other rank has closed the connection.")
            received, heard_seconds = received + count, time.monotonic()
        if received < len(into) and should_stop(received, time.monotonic() - heard_seconds):
            break
    return received
