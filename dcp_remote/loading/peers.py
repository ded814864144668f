"""Transfer of units between ranks during one load: a rank that has read a unit serves it to the ranks that want it.

Over plain sockets, not a process group of torch's: each wait here has a limit, which a gloo operation cannot have; a
transfer that fails affects no other; and only ranks that share units are connected. A client knows the server's address
and secret from the key-value store of the group. The bytes are not encrypted, like those that gloo sends.

    request: the server's secret (16 bytes), the number of the unit (8 bytes, little-endian)
    answer: one byte: 1, and the unit follows; or 0, and the client reads the unit from the store

Correctness does not depend on an answer: a client that gets none reads from the store.
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

from dcp_remote.loading.peer_sockets import (
    CONNECT_SECONDS,
    configure_socket,
    connect_to_unix_socket,
    count_free_descriptors,
    listen_on_tcp,
    listen_on_unix_socket,
    receive,
)
from dcp_remote.storage.request_context import may_write

logger = logging.getLogger(__name__)

# Time for which a client waits for a silent server, or one slower than the slowest network. A stopped rank costs each
# of the others this time once.
PATIENCE_SECONDS = 15.0

# Failed ranks of other hosts after which no rank of another host is tried, unless one was reached: a firewall lies in
# between. The same holds for ranks of this host.
_UNREACHED_MAX = 3

# Addresses of no machine whose route is the default route, one per address family (RFC 5737, RFC 3849).
_FAR_AWAY = ("192.0.2.1", "2001:db8::1")

# Connections that a server has at a time; a client that is turned away reads from the store.
_CONNECTIONS_MAX = 128

# File descriptors that a load needs at most: these connections, one or two idle ones to each of 63 others, and those of
# the store.
_DESCRIPTORS_MIN = 2 * _CONNECTIONS_MAX + 64

# Idle connections to one rank that are kept for the next unit.
_IDLE_MAX = 2

_SECRET_BYTES = 16
_REQUEST = struct.Struct(f"<{_SECRET_BYTES}sq")
_ACCEPTED, _DECLINED = b"\1", b"\0"


@dataclass(frozen=True, slots=True)
class Address:
    """Address at which a rank serves what it has read.

    Attributes:
        host: IP address of the rank's host.
        port: TCP port.
        name: Name of a Unix socket, for ranks of the same host; empty if there is none.
        secret: Secret that each request must contain.
    """

    host: str
    port: int
    name: bytes
    secret: bytes


def host_towards(host: str | None) -> str:
    """Return the address of this host on the route to another, by which it can be reached from there; sends nothing.

    A host that resolves its own name may get a loopback address (Debian maps it to 127.0.1.1 in /etc/hosts), which no
    other host reaches. The result is the address on the default route then.

    Args:
        host: Host at which all ranks meet. None, or a name that cannot be resolved, gives the loopback interface.
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
    """Unit that is ready to be served.

    Attributes:
        data: Bytes of the unit; None if requests for it are declined.
        receivers: Number of ranks that have not received the unit yet.
        kept_bytes: Size of the copy in bytes; 0 if `data` is no copy.
    """

    data: memoryview | None
    receivers: int = 0
    kept_bytes: int = 0


class PeerServer:
    """Serves units to other ranks as soon as they are offered; one thread per connection, and one that accepts.

    Use as a context manager, at whose end all threads have ended. A unit is dropped when all receivers have it.

    Args:
        host: Address of this host to listen at.
        kept_bytes_max: Limit of the copies of units that do not stay in place, in bytes.
        ports: First and last TCP port to listen at; None for any free port.

    Attributes:
        address: Address for the clients.

    Raises:
        OSError: The address cannot be listened at, or the process may open too few files.
        RuntimeError: No thread can be started.
    """

    def __init__(self, host: str, *, kept_bytes_max: int, ports: tuple[int, int] | None = None) -> None:
        """Start to listen, and start the accepting thread."""
        if count_free_descriptors() < _DESCRIPTORS_MIN:
            raise OSError(errno.EMFILE, "too few files may be opened (ulimit -n) for connections to other ranks")
        self._kept_bytes_max = kept_bytes_max
        self._kept_bytes = 0
        self._changed = threading.Condition()
        self._offers: dict[int, _Offer] = {}
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, name="dcp_remote-peer-accept", daemon=True)
        with contextlib.ExitStack() as opened:  # closed again if the next socket or the thread fails
            tcp = opened.enter_context(listen_on_tcp(host, ports))
            unix = listen_on_unix_socket()
            self._listening = [tcp] if unix is None else [tcp, opened.enter_context(unix)]
            name = bytes(unix.getsockname()) if unix is not None else b""
            self.address = Address(host, tcp.getsockname()[1], name, os.urandom(_SECRET_BYTES))
            self._woken, self._wake = map(opened.enter_context, socket.socketpair())
            self._accepting.start()
            self._sockets = opened.pop_all()

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the server."""
        self.close()

    def close(self) -> None:
        """Close all connections, which tells the clients that wait, and wait for all threads to end."""
        with self._changed:
            self._closed.set()
            self._offers.clear()
            self._changed.notify_all()
            connections = list(self._connections)
        self._wake.send(b"x")
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        for thread in self._threads:  # complete, since the accepting thread has ended
            thread.join()
        self._sockets.close()

    def offer(self, number: int, data: memoryview, *, receivers: int, stays: bool) -> None:
        """Offer a unit to the clients.

        Args:
            number: Number of the unit.
            data: Bytes of the unit.
            receivers: Number of ranks that want the unit.
            stays: True if `data` is valid until this server is closed. Otherwise a copy is kept; if there is no room
                for a copy, requests for the unit are declined.
        """
        with self._changed:
            has_room = stays or self._kept_bytes + len(data) <= self._kept_bytes_max
            if not stays and has_room:
                data = memoryview(bytes(data))
                self._kept_bytes += len(data)
            self._offers[number] = _Offer(data, receivers, 0 if stays else len(data)) if has_room else _Offer(None)
            self._changed.notify_all()

    def _accept(self) -> None:
        try:
            self._accept_all()
        except OSError as error:  # such as too many open files
            logger.debug("no more connections of other ranks are accepted: %s", error)
        finally:
            # Clients that wait to be accepted learn it at once, and read from the store.
            for listening in self._listening:
                listening.close()

    def _accept_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            for source in (*self._listening, self._woken):
                source.settimeout(0)
                selector.register(source, selectors.EVENT_READ)
            while not self._closed.is_set():
                for key, _ in selector.select():
                    if key.fileobj is not self._woken:
                        self._accept_one(cast("socket.socket", key.fileobj))

    def _accept_one(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, ConnectionError):
            return  # the client has closed it again
        if len(self._connections) >= _CONNECTIONS_MAX:
            connection.close()
            return
        with self._changed:
            thread = threading.Thread(target=self._serve, args=(connection,), name="dcp_remote-peer-serve", daemon=True)
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
            configure_socket(connection, send_timeout_seconds=PATIENCE_SECONDS)
            while not self._closed.is_set():
                request = memoryview(bytearray(_REQUEST.size))
                receive(connection, request, lambda _idle_seconds: self._closed.is_set())
                secret, number = _REQUEST.unpack(request)
                if not hmac.compare_digest(secret, self.address.secret):
                    return
                offer = self._wait_for(number)
                if offer is None or offer.data is None:
                    connection.sendall(_DECLINED)
                    continue
                connection.sendall(_ACCEPTED)
                connection.sendall(offer.data)
                self._count_sent(number, offer)
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

    def _count_sent(self, number: int, offer: _Offer) -> None:
        """Count one receiver less, and drop the unit after the last."""
        with self._changed:
            offer.receivers -= 1
            if offer.receivers <= 0 and number in self._offers:
                self._kept_bytes -= offer.kept_bytes
                self._offers[number] = _Offer(None)


class PeerClient:
    """Fetches units from other ranks; from any thread, with a connection per thread and request.

    A rank that does not answer, refuses, or is silent for `PATIENCE_SECONDS` is not asked again.

    Args:
        addresses: Addresses of the servers, by number of the rank.
        host: Address of this host, by which ranks of the same host are recognized.
        is_over: Function that tells whether the load was cancelled; called every second.
    """

    def __init__(self, addresses: Mapping[int, Address], host: str, *, is_over: Callable[[], bool]) -> None:
        """Store the addresses; no connection is made."""
        self._addresses = addresses
        self._host = host
        self._is_over = is_over
        self._lock = threading.Lock()
        self._idle: dict[int, list[socket.socket]] = {}
        self._failed: set[int] = set()
        self._reached: set[bool] = set()  # True: a rank of this host was reached; False: one of another host
        self._received_bytes = 0

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the client."""
        self.close()

    @property
    def received_bytes(self) -> int:
        """Number of bytes received from other ranks."""
        return self._received_bytes

    def close(self) -> None:
        """Close all connections; no thread may be in `fetch` any more."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def fetch(self, rank: int, number: int, into: memoryview) -> bool:
        """Fetch a unit from another rank; waits until that rank has read it.

        Returns:
            False if the unit must be read from the store; `into` holds any bytes then.
        """
        with self._lock:
            if rank in self._failed or self._is_out_of_reach(rank):
                return False
            idle = self._idle.get(rank, [])
            connection = idle.pop() if idle else None
        try:
            if connection is None:
                connection = self._connect(rank)
            has_received = self._request(connection, rank, number, into)
        except (OSError, EOFError) as error:
            if connection is not None:
                connection.close()
            self._mark_failed(rank, error)
            return False
        with self._lock:
            idle = self._idle.setdefault(rank, [])
            is_kept = len(idle) < _IDLE_MAX
            if is_kept:
                idle.append(connection)
            self._reached.add(self._is_on_this_host(rank))
            self._received_bytes += len(into) if has_received else 0
        if not is_kept:
            connection.close()
        return has_received

    def _is_on_this_host(self, rank: int) -> bool:
        return self._addresses[rank].host == self._host

    def _is_out_of_reach(self, rank: int) -> bool:
        here = self._is_on_this_host(rank)
        failed_count = sum(self._is_on_this_host(failed) == here for failed in self._failed)
        return here not in self._reached and failed_count >= _UNREACHED_MAX

    def _connect(self, rank: int) -> socket.socket:
        address = self._addresses[rank]
        connection = connect_to_unix_socket(address.name) if address.name and self._is_on_this_host(rank) else None
        if connection is None:
            connection = socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS)
        configure_socket(connection, send_timeout_seconds=PATIENCE_SECONDS)
        return connection

    def _request(self, connection: socket.socket, rank: int, number: int, into: memoryview) -> bool:
        connection.sendall(_REQUEST.pack(self._addresses[rank].secret, number))
        answer = memoryview(bytearray(1))
        receive(connection, answer, self._should_stop)
        if bytes(answer) != _ACCEPTED:
            return False
        receive(connection, into, self._should_stop)
        return True

    def _should_stop(self, idle_seconds: float) -> bool:
        return idle_seconds >= PATIENCE_SECONDS or self._is_abandoned()

    def _is_abandoned(self) -> bool:
        """Return whether the load was cancelled, or the caller has taken its buffer back."""
        return self._is_over() or not may_write()

    def _mark_failed(self, rank: int, error: Exception) -> None:
        with self._lock:
            is_known = rank in self._failed
            self._failed.add(rank)
        if not is_known and not self._is_abandoned():
            address = self._addresses[rank]
            logger.warning(
                "Another rank does not send what it has read: read from the store instead. address=%s:%d cause=%s",
                address.host,
                address.port,
                error,
            )
