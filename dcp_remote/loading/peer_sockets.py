"""Sockets between the ranks of a group: opened, configured, and read from with a limit to each wait."""

from __future__ import annotations

import math
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dcp_remote.common.units import MiB

# Time-out of a connection attempt: ranks of a group reach each other in milliseconds, or not at all.
CONNECT_SECONDS = 3.0

# Interval at which a receiver checks whether to go on waiting.
CHECK_SECONDS = 1.0

# Slowest transfer that does not count as stalled; the same as for a store.
_SLOWEST_BYTES_PER_SECOND = 500_000

# Connections that wait to be accepted: sixteen from each of 64 ranks.
BACKLOG = 1024

# Kernel buffer of a Unix socket: at its default of 200 KiB, two processes wake each other twenty times as often.
_BUFFER_BYTES = 4 * MiB

_NAME_BYTES = 16


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


def configure_socket(connection: socket.socket, *, send_timeout_seconds: float) -> None:
    """Set time-outs in the kernel, which spares a poll before each of many small reads.

    Args:
        connection: New connection.
        send_timeout_seconds: Time after which a send fails if nothing is received, in seconds.
    """
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(CHECK_SECONDS))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_timeout_seconds))


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def receive(connection: socket.socket, into: memoryview, should_stop: Callable[[float], bool]) -> None:
    """Fill a buffer from a socket.

    `should_stop` is called every second, with the seconds for which the other side was silent. Bytes that have arrived
    count for the seconds that the slowest network would have taken, so that a byte now and then counts as silence.

    Raises:
        TimeoutError: `should_stop` has returned True.
        EOFError: The other side has closed the connection.
        OSError: The connection broke.
    """
    credited_seconds = time.monotonic()
    while into:
        try:
            count = connection.recv_into(into, len(into), socket.MSG_WAITALL)
        except BlockingIOError:
            count = 0
        else:
            if not count:
                raise EOFError("The other rank has closed the connection.")
        into = into[count:]
        now_seconds = time.monotonic()
        credited_seconds = min(now_seconds, credited_seconds + count / _SLOWEST_BYTES_PER_SECOND)
        if into and should_stop(now_seconds - credited_seconds):
            raise TimeoutError("The other rank sent too little for too long, or the load is over.")
