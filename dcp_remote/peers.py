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
import ipaddress
import logging
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self, cast

from dcp_remote.peer_sockets import (
    BACKLOG,
    CONNECT_SECONDS,
    connected_here,
    free_descriptors,
    listening_here,
    prepare,
    receive,
)
from dcp_remote.storage.landing import is_wanted

logger = logging.getLogger(__name__)

# Of somebody who is asked for what he has read or is about to read: without a byte, or behind what the slowest network
# would have brought. A rank that was stopped costs each of the others so long, once.
PATIENCE_SECONDS = 15.0

# If none of the first of other hosts could be reached, none can: a firewall between them. And so of this host.
_UNREACHED_MAX = 3

# Of no machine, but on the way to the world, for each family of addresses (RFC 5737, RFC 3849).
_FAR_AWAY = ("192.0.2.1", "2001:db8::1")

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


def host_towards(host: str | None) -> str:
    """The address of this host by which it reaches another one, and so can be reached from there; sends nothing.

    A host that finds itself under a name of its own may find the loopback interface (Debian calls a host 127.0.1.1 in
    its /etc/hosts), where nobody else reaches it: then it is the address by which it would reach the world.

    Args:
        host: Where all ranks meet. None, or one that cannot be found, gives the loopback interface.
    """
    own = _address_towards(host) if host else None
    if own is not None and host is not None and _is_loopback(own) and not _means_loopback(host):
        own = next(filter(None, map(_address_towards, _FAR_AWAY)), own)
    return own or "127.0.0.1"


def _address_towards(host: str) -> str | None:
    with contextlib.suppress(OSError):
        for family, kind, *_, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _means_loopback(host: str) -> bool:
    try:
        return _is_loopback(host)
    except ValueError:
        return host == "localhost"


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
        if free_descriptors() < _DESCRIPTORS_MIN:
            raise OSError(errno.EMFILE, "too few files may be opened (ulimit -n) for connections to other ranks")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = [socket.create_server((host, 0), family=family, backlog=BACKLOG)]
        here = listening_here()
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
            prepare(connection, patience_seconds=PATIENCE_SECONDS)
            while not self._closed.is_set():
                asked = memoryview(bytearray(_REQUEST.size))
                receive(connection, asked, lambda _idle_seconds: self._closed.is_set())
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
        self._reached: set[bool] = set()  # whether here, or on other hosts
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
            if giver in self._lost or self._is_out_of_reach(giver):
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
            self._reached.add(self._is_here(giver))
            self._taken_bytes += len(into) if given else 0
        if not is_kept:
            connection.close()
        return given

    def _is_here(self, giver: int) -> bool:
        return self._addresses[giver].host == self._host

    def _is_out_of_reach(self, giver: int) -> bool:
        here = self._is_here(giver)
        return here not in self._reached and sum(self._is_here(n) == here for n in self._lost) >= _UNREACHED_MAX

    def _connect(self, giver: int) -> socket.socket:
        address = self._addresses[giver]
        connection = connected_here(address.name) if address.name and self._is_here(giver) else None
        if connection is None:
            connection = socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS)
        prepare(connection, patience_seconds=PATIENCE_SECONDS)
        return connection

    def _ask(self, connection: socket.socket, giver: int, number: int, into: memoryview) -> bool:
        connection.sendall(_REQUEST.pack(self._addresses[giver].secret, number))
        answer = memoryview(bytearray(1))
        receive(connection, answer, self._is_hopeless)
        if bytes(answer) != _GIVEN:
            return False
        receive(connection, into, self._is_hopeless)
        return True

    def _is_hopeless(self, idle_seconds: float) -> bool:
        return idle_seconds >= PATIENCE_SECONDS or self._makes_no_sense()

    def _makes_no_sense(self) -> bool:
        return self._is_over() or not is_wanted()

    def _lose(self, giver: int, error: Exception) -> None:
        with self._lock:
            known = giver in self._lost
            self._lost.add(giver)
        if not known and not self._makes_no_sense():
            logger.warning("Another rank does not give what it has read; it is read from the store. cause=%s", error)
