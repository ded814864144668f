"""Sockets between the ranks of a group: made, and read from with an end to each wait."""

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

from dcp_remote.ranges import MiB

# Ranks of a group reach each other in milliseconds, or not at all.
CONNECT_SECONDS = 3.0

# So often those who wait look whether it makes sense.
LOOK_SECONDS = 1.0

# As for a store: what is slower is taken for stalled.
_SLOWEST_BYTES_PER_SECOND = 500_000

# Connections that wait to be accepted: sixteen of each rank that may ask.
BACKLOG = 1024

# In the kernel, of a Unix socket: at its default of 200 KiB two processes wake each other twenty times as often.
_BUFFER_BYTES = 4 * MiB

_NAME_BYTES = 16


def free_descriptors() -> float:
    """How many files this process may still open; infinite where that cannot be seen."""
    try:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return math.inf if limit == resource.RLIM_INFINITY else limit - sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return math.inf


def listening_here() -> socket.socket | None:
    """A Unix socket without a file, as Linux has them: between ranks of a host it costs half of what TCP does."""
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


def connected_here(name: bytes) -> socket.socket | None:
    """None if it is not of this host, or of another container."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(name)
    except OSError:
        connection.close()
        return None
    return connection


def prepare(connection: socket.socket, *, patience_seconds: float) -> None:
    """To block in the kernel, which wakes it now and then: no poll before each of many small reads.

    Args:
        connection: New.
        patience_seconds: After which a send fails that nobody receives.
    """
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(LOOK_SECONDS))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(patience_seconds))


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def receive(connection: socket.socket, into: memoryview, is_hopeless: Callable[[float], bool]) -> None:
    """All of it; `is_hopeless` is asked every second, with how many of them have passed for which nothing came.

    What came pays for as many as the slowest network would have taken: who sends a byte now and then is as silent.

    Raises:
        TimeoutError: It is hopeless.
        EOFError: The other side has closed.
        OSError: The connection broke.
    """
    paid_seconds = time.monotonic()
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
        paid_seconds = min(now_seconds, paid_seconds + count / _SLOWEST_BYTES_PER_SECOND)
        if into and is_hopeless(now_seconds - paid_seconds):
            raise TimeoutError("Too little came for too long, or it is over.")
