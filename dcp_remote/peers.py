"""Bytes from one rank to another, for as long as one load lasts: who has read something gives it to who asks.

Plain sockets, and not a process group of torch's: a wait here has an end, which nothing gives an operation of gloo; one
that fails spoils nothing but itself; and only those are connected that have something for each other. Who asks knows
the address and a secret number, which the ranks tell each other over the store of their group. What is sent is not
encrypted, as little as what gloo sends.

    request: the giver's secret (16 bytes), the number of the unit (8 bytes, little-endian)
    answer: one byte, 1 if the unit follows, 0 if it must be got elsewhere

Nothing depends on an answer: whoever gets none reads from the store.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import math
import os
import resource
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from dcp_remote.ranges import MiB

logger = logging.getLogger(__name__)

# Without a byte, of somebody who is asked for what he has read or is about to read. A rank that was stopped costs each
# of the others so long, once.
PATIENCE_SECONDS = 15.0

# Ranks of a group reach each other in milliseconds, or not at all.
_CONNECT_SECONDS = 3.0

# So often those who wait look whether it makes sense.
_LOOK_SECONDS = 1.0

# If none of the first could be reached, none can: a firewall between hosts.
_UNREACHED_MAX = 3

# Connections that wait to be accepted: sixteen of each rank that may ask.
_BACKLOG = 1024

# In the kernel, of a Unix socket: at its default of 200 KiB two processes wake each other twenty times as often.
_BUFFER_BYTES = 4 * MiB

# Accepted at a time; who is turned away reads from the store.
_CONNECTIONS_MAX = 128

# What a load needs at most: these, one or two kept to each of 63 others, and those of the store.
_DESCRIPTORS_MIN = 2 * _CONNECTIONS_MAX + 64

# Connections to one rank that are kept for the next unit.
_IDLE_MAX = 2

_SECRET_BYTES = 16
_REQUEST = struct.Struct(f"<{_SECRET_BYTES}sq")
_GIVEN, _DECLINED = b"\1", b"\0"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank gives what it has read.

    Attributes:
        host: An IP address of its own.
        port: TCP.
        name: Of a Unix socket, for ranks of the same host; empty if there is none.
        secret: Without which nothing is given.
    """

    host: str
    port: int
    name: bytes
    secret: bytes


def _free_descriptors() -> float:
    """How many files this process may still open; infinite where that cannot be seen."""
    try:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return math.inf if limit == resource.RLIM_INFINITY else limit - sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return math.inf


def host_towards(host: str | None) -> str:
    """The address of this host by which it reaches another one, and so can be reached from there; sends nothing.

    Args:
        host: Where all ranks meet. None, or one that cannot be found, gives the loopback interface.
    """
    with contextlib.suppress(OSError):
        for family, kind, *_, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else ():
            with socket.socket(family, kind) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
    return "127.0.0.1"


@dataclass(slots=True)
class _Offer:
    """A unit, and for how many.

    Attributes:
        data: None if it has to be got elsewhere.
        takers: Who have not asked for it yet.
        kept_bytes: Of a copy of its own.
    """

    data: memoryview | None
    takers: int = 0
    kept_bytes: int = 0


class Giver:
    """Gives units to others as soon as it has them; a thread for each connection, and one that waits for them.

    Use as a context manager, after which there is none of them. A unit is let go of when as many have it as want it.

    Args:
        host: An address of this host, where it listens.
        kept_bytes_max: Of copies of what does not stay where it is.

    Raises:
        OSError: It cannot listen there, or too few files may be opened.
        RuntimeError: No thread can be started.
    """

    def __init__(self, host: str, *, kept_bytes_max: int) -> None:
        """See the class."""
        if _free_descriptors() < _DESCRIPTORS_MIN:
            raise OSError(errno.EMFILE, "too few files may be opened (ulimit -n) for connections to other ranks")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = [socket.create_server((host, 0), family=family, backlog=_BACKLOG)]
        here = _listening_here()
        if here is not None:
            self._listening.append(here)
        name = bytes(here.getsockname()) if here is not None else b""
        self.address = Address(host, self._listening[0].getsockname()[1], name, os.urandom(_SECRET_BYTES))
        self._kept_bytes_max = kept_bytes_max
        self._kept_bytes = 0
        self._changed = threading.Condition()
        self._offers: dict[int, _Offer] = {}
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._woken, self._wake = socket.socketpair()
        self._accepting = threading.Thread(target=self._accept, name="dcp_remote-giver", daemon=True)
        try:
            self._accepting.start()
        except RuntimeError:
            for one in (*self._listening, self._woken, self._wake):
                one.close()
            raise

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Give nothing any more; who waits for something is told by the end of the connection."""
        with self._changed:
            self._closed.set()
            self._offers.clear()
            self._changed.notify_all()
            connections = list(self._connections)
        self._wake.send(b"x")
        for one in connections:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        for thread in self._threads:  # there will be no more of them
            thread.join()
        for one in (*self._listening, self._woken, self._wake):
            one.close()

    def offer(self, number: int, data: memoryview, *, takers: int, stays: bool) -> None:
        """Have a unit to give.

        Args:
            number: Of the unit.
            data: Its bytes.
            takers: How many want it.
            stays: It can be read until this is closed. A copy is kept of what does not, where there is room for it;
                where there is none, the others get it elsewhere.
        """
        with self._changed:
            has_room = stays or self._kept_bytes + len(data) <= self._kept_bytes_max
            if not stays and has_room:
                data = memoryview(bytes(data))
                self._kept_bytes += len(data)
            self._offers[number] = _Offer(data, takers, 0 if stays else len(data)) if has_room else _Offer(None)
            self._changed.notify_all()

    def _accept(self) -> None:
        try:
            self._accept_all()
        except OSError as error:  # too many open files, for one
            logger.debug("no more connections of other ranks are accepted: %s", error)
        finally:
            # Who waits to be accepted is told at once, and reads elsewhere.
            for one in self._listening:
                one.close()

    def _accept_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            for one in (*self._listening, self._woken):
                one.settimeout(0)
                selector.register(one, selectors.EVENT_READ)
            while not self._closed.is_set():
                for key, _ in selector.select():
                    if key.fileobj is not self._woken:
                        self._welcome(cast("socket.socket", key.fileobj))

    def _welcome(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, ConnectionError):
            return  # it went away again
        if len(self._connections) >= _CONNECTIONS_MAX:
            connection.close()
            return
        with self._changed:
            thread = threading.Thread(target=self._serve, args=(connection,), name="dcp_remote-gift", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # too many threads, or the interpreter is about to exit
                logger.debug("a connection of another rank was closed again: %s", error)
                connection.close()
                return
            self._connections.add(connection)
            self._threads.append(thread)

    def _serve(self, connection: socket.socket) -> None:
        try:
            _prepare(connection)
            while not self._closed.is_set():
                asked = memoryview(bytearray(_REQUEST.size))
                _receive(connection, asked, lambda _idle_seconds: self._closed.is_set())
                secret, number = _REQUEST.unpack(asked)
                if not hmac.compare_digest(secret, self.address.secret):
                    return
                offer = self._wait_for(number)
                if offer is None or offer.data is None:
                    connection.sendall(_DECLINED)
                    continue
                connection.sendall(_GIVEN)
                connection.sendall(offer.data)
                self._given(number, offer)
        except (OSError, EOFError) as error:
            logger.debug("a connection of another rank ended: %s", error)
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()

    def _wait_for(self, number: int) -> _Offer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed.is_set() or number in self._offers)
            return self._offers.get(number)

    def _given(self, number: int, offer: _Offer) -> None:
        with self._changed:
            offer.takers -= 1
            if offer.takers <= 0 and number in self._offers:
                self._kept_bytes -= offer.kept_bytes
                self._offers[number] = _Offer(None)


class Taker:
    """Gets units from others, into memory of the caller's; from any thread, each of which has a connection meanwhile.

    A rank that does not answer, refuses, or says nothing for `PATIENCE_SECONDS` is not asked again.

    Args:
        addresses: Of those who can be asked, by number.
        host: An address of this host, by which it knows its neighbors.
        is_over: Whether all this makes no sense any more; asked every second.
    """

    def __init__(self, addresses: Mapping[int, Address], host: str, *, is_over: Callable[[], bool]) -> None:
        """See the class."""
        self._addresses = addresses
        self._host = host
        self._is_over = is_over
        self._lock = threading.Lock()
        self._idle: dict[int, list[socket.socket]] = {}
        self._lost: set[int] = set()
        self._reached = False
        self._taken_bytes = 0

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close it."""
        self.close()

    @property
    def taken_bytes(self) -> int:
        """How much was got from others."""
        return self._taken_bytes

    def close(self) -> None:
        """Leave all of them; when nobody is in `take` any more."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connection in (one for some in idle.values() for one in some):
            connection.close()

    def take(self, giver: int, number: int, into: memoryview) -> bool:
        """Get a unit; False if it has to be got elsewhere, and then `into` holds anything.

        Waits until the other has it.
        """
        with self._lock:
            if giver in self._lost or (len(self._lost) >= _UNREACHED_MAX and not self._reached):
                return False
            idle = self._idle.get(giver, [])
            connection = idle.pop() if idle else None
        try:
            if connection is None:
                connection = self._connect(giver)
            given = self._ask(connection, giver, number, into)
        except (OSError, EOFError) as error:
            if connection is not None:
                connection.close()
            self._lose(giver, error)
            return False
        with self._lock:
            idle = self._idle.setdefault(giver, [])
            is_kept = len(idle) < _IDLE_MAX
            if is_kept:
                idle.append(connection)
            self._reached = True
            self._taken_bytes += len(into) if given else 0
        if not is_kept:
            connection.close()
        return given

    def _connect(self, giver: int) -> socket.socket:
        address = self._addresses[giver]
        connection = _connected_here(address.name) if address.name and address.host == self._host else None
        if connection is None:
            connection = socket.create_connection((address.host, address.port), timeout=_CONNECT_SECONDS)
        _prepare(connection)
        return connection

    def _ask(self, connection: socket.socket, giver: int, number: int, into: memoryview) -> bool:
        connection.sendall(_REQUEST.pack(self._addresses[giver].secret, number))
        answer = memoryview(bytearray(1))
        _receive(connection, answer, self._is_hopeless)
        if bytes(answer) != _GIVEN:
            return False
        _receive(connection, into, self._is_hopeless)
        return True

    def _is_hopeless(self, idle_seconds: float) -> bool:
        return idle_seconds >= PATIENCE_SECONDS or self._is_over()

    def _lose(self, giver: int, error: Exception) -> None:
        with self._lock:
            known = giver in self._lost
            self._lost.add(giver)
        if not known and not self._is_over():
            logger.warning("Another rank does not give what it has read; it is read from the store. cause=%s", error)


def _listening_here() -> socket.socket | None:
    """A Unix socket without a file, as Linux has them: between ranks of a host it costs half of what TCP does."""
    if sys.platform != "linux":
        return None
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(b"\0dcp_remote/" + os.urandom(_SECRET_BYTES).hex().encode())
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        return None
    return listening


def _connected_here(name: bytes) -> socket.socket | None:
    """None if it is not of this host, or of another container."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect(name)
    except OSError:
        connection.close()
        return None
    return connection


def _prepare(connection: socket.socket) -> None:
    """To block in the kernel, which wakes it now and then: no poll before each of many small reads."""
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(_LOOK_SECONDS))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(PATIENCE_SECONDS))


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _receive(connection: socket.socket, into: memoryview, is_hopeless: Callable[[float], bool]) -> None:
    """All of it; `is_hopeless` is asked every second in which nothing came, with how many of them there were."""
    last_seconds = time.monotonic()
    while into:
        try:
            count = connection.recv_into(into, len(into), socket.MSG_WAITALL)
        except BlockingIOError as error:
            if is_hopeless(time.monotonic() - last_seconds):
                raise TimeoutError("Nothing came for too long, or it is over.") from error
            continue
        if not count:
            raise EOFError("The other rank has closed the connection.")
        into = into[count:]
        last_seconds = time.monotonic()
