"""Transfer of units between ranks during one load: a rank that has read a unit serves it to the ranks that want it.

Over plain sockets, not a process group of torch's: each wait here has a limit, which a gloo operation cannot have; a
transfer that fails affects no other; and only ranks that share units are connected. A client knows the server's address
and secret from the key-value store of the group. The bytes are not encrypted, like those that gloo sends.

    request: the server's secret (16 bytes), the number of the unit (8 bytes, little-endian)
    answer: any number of bytes 2, while the server has not read the unit; then 1, and the unit follows; or 0, and the
        client reads the unit from the store

Correctness does not depend on an answer: a client that gets none, or only a part of the unit in the time in which the
store would have sent the rest, reads from the store.
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
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self, cast

from dcp_remote.loading.peer_sockets import (
    CHECK_SECONDS,
    CONNECT_SECONDS,
    configure_socket,
    connect_to_unix_socket,
    count_free_descriptors,
    listen_on_tcp,
    listen_on_unix_socket,
    receive,
)
from dcp_remote.loading.read_rates import ReadRates
from dcp_remote.storage.request_context import may_write

logger = logging.getLogger(__name__)

# Time without a byte after which a client does not wait for a server any more. A server that is still reading sends a
# byte five times as often. A stopped rank costs each of the others this time once.
PATIENCE_SECONDS = 10.0

# Hosts that did not prove useful after which no other host is tried, unless one did: a firewall, or a slow network,
# lies in between.
_USELESS_MAX = 3

# Time for which a host that did not prove useful is left alone.
_AVOIDED_SECONDS = 600.0

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
_ACCEPTED, _DECLINED, _WAITING = b"\1", b"\0", b"\2"


@dataclass(frozen=True, slots=True)
class Address:
    """Address at which a rank serves what it has read.

    Attributes:
        host: IP address of the rank's host.
        port: TCP port; 0 if only ranks of the same host are served.
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
        serves_other_hosts: False to listen at no TCP port if this host has Unix sockets.

    Attributes:
        address: Address for the clients.

    Raises:
        OSError: The address cannot be listened at, or the process may open too few files.
        RuntimeError: No thread can be started.
    """

    def __init__(
        self,
        host: str,
        *,
        kept_bytes_max: int,
        ports: tuple[int, int] | None = None,
        serves_other_hosts: bool = True,
    ) -> None:
        """Start to listen, and start the accepting thread."""
        if count_free_descriptors() < _DESCRIPTORS_MIN:
            raise OSError(errno.EMFILE, "too few files may be opened (ulimit -n) for connections to other ranks")
        self._kept_bytes_max = kept_bytes_max
        self._kept_bytes = 0
        self._changed = threading.Condition()
        self._offers: dict[int, _Offer] = {}
        self._is_complete = False
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, name="dcp_remote-peer-accept", daemon=True)
        with contextlib.ExitStack() as opened:  # closed again if the next socket or the thread fails
            unix = listen_on_unix_socket()
            self._listening = [] if unix is None else [opened.enter_context(unix)]
            port = 0
            if serves_other_hosts or unix is None:
                try:
                    self._listening.append(opened.enter_context(listen_on_tcp(host, ports)))
                    port = self._listening[-1].getsockname()[1]
                except OSError as error:
                    if unix is None:
                        raise
                    logger.warning(
                        "This rank serves only ranks of its own host: it cannot listen at a TCP port. Give it a free "
                        "one: rank_sockets=RankSockets(ports=…). host=%s cause=%s",
                        host,
                        error,
                    )
            name = bytes(unix.getsockname()) if unix is not None else b""
            self.address = Address(host, port, name, os.urandom(_SECRET_BYTES))
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

    def complete(self) -> None:
        """Decline requests for units that were not offered: no more will be."""
        with self._changed:
            self._is_complete = True
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
            configure_socket(connection, check_seconds=1.0, send_timeout_seconds=PATIENCE_SECONDS)
            request = memoryview(bytearray(_REQUEST.size))
            while receive(connection, request, lambda *_: self._closed.is_set()) == len(request):
                secret, number = _REQUEST.unpack(request)
                if not hmac.compare_digest(secret, self.address.secret):
                    return
                offer = self._wait_for(number, connection)
                if offer is None or offer.data is None:
                    connection.sendall(_DECLINED)
                    continue
                try:
                    connection.sendall(_ACCEPTED)
                    connection.sendall(offer.data)
                finally:  # a client that breaks off reads the rest from the store
                    self._count_sent(number, offer)
        except (OSError, EOFError) as error:
            logger.debug("a connection of another rank ended: %s", error)
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()

    def _wait_for(self, number: int, connection: socket.socket) -> _Offer | None:
        """Wait until a unit is offered, and meanwhile tell the client that this rank is still reading."""

        def is_decided() -> bool:
            return self._closed.is_set() or self._is_complete or number in self._offers

        while True:
            with self._changed:
                if self._changed.wait_for(is_decided, PATIENCE_SECONDS / 5):
                    return self._offers.get(number)
            connection.sendall(_WAITING)

    def _count_sent(self, number: int, offer: _Offer) -> None:
        """Count one receiver less, and drop the unit after the last."""
        with self._changed:
            offer.receivers -= 1
            if offer.receivers <= 0 and number in self._offers:
                self._kept_bytes -= offer.kept_bytes
                self._offers[number] = _Offer(None)


class OtherHosts:
    """Other hosts as the loads of this process found them. Thread-safe.

    A host is avoided for ten minutes if a load did not reach it, or left more of its units to the store than it took.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with no host."""
        self._clock = clock
        self._lock = threading.Lock()
        # By host: the time of the finding, and the cause to avoid the host: None if it is useful, "" if it is slow.
        self._found: dict[str, tuple[float, str | None]] = {}

    def note(self, host: str, cause: str | None) -> None:
        """Note whether a host is useful.

        Args:
            host: Address of the host.
            cause: None if it is useful; "" if it sends more slowly than the store; otherwise why it was not reached.
        """
        with self._lock:
            self._found[host] = self._clock(), cause

    def find_cause(self, host: str) -> str | None:
        """Return the cause to avoid a host, as for `note`; None if there is none."""
        with self._lock:
            causes = self._causes()
            if host not in causes and len(causes) >= _USELESS_MAX and self._are_useless(causes):
                return next(reversed(causes.values()))
            return causes.get(host)

    def are_slow(self) -> bool:
        """Return whether all hosts that are known send more slowly than the store; False if none is known."""
        with self._lock:
            causes = self._causes()
            return "" in causes.values() and self._are_useless(causes)

    def _causes(self) -> dict[str, str | None]:
        since_seconds = self._clock() - _AVOIDED_SECONDS
        return {host: cause for host, (seconds, cause) in self._found.items() if seconds > since_seconds}

    @staticmethod
    def _are_useless(causes: Mapping[str, str | None]) -> bool:
        return None not in causes.values()


class PeerClient:
    """Fetches units from other ranks; from any thread, with a connection per thread and request.

    A rank that refuses, or is silent for `PATIENCE_SECONDS`, is not asked again; nor is a host that is not reached, or
    sends more slowly than the store.

    Args:
        addresses: Addresses of the servers, by number of the rank.
        host: Address of this host, by which ranks of the same host are recognized.
        is_over: Function that tells whether the load was cancelled; called ten times a second while a thread waits.
        rates: Rate of the store in this load.
        hosts: Other hosts as earlier loads found them; told what this load finds.

    Attributes:
        unreached: Cause by number of the rank: ranks that were not reached, broke off or fell silent, and those of
            hosts that an earlier load did not reach.
    """

    def __init__(
        self,
        addresses: Mapping[int, Address],
        host: str,
        *,
        is_over: Callable[[], bool],
        rates: ReadRates,
        hosts: OtherHosts,
    ) -> None:
        """Store the addresses; no connection is made."""
        self._addresses = addresses
        self._host = host
        self._is_over = is_over
        self._rates = rates
        self._hosts = hosts
        self._lock = threading.Lock()
        self._idle: dict[int, list[socket.socket]] = {}
        self._failed: set[int] = set()
        self._received_bytes = 0
        # By host: bytes received, less those of the same units that were left to the store.
        self._balance: Counter[str] = Counter()
        self.unreached: dict[int, str] = {}
        for rank, address in addresses.items():
            if address.host != host and (cause := hosts.find_cause(address.host)):
                self.unreached[rank] = cause

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

    def fetch(self, rank: int, number: int, into: memoryview) -> int:
        """Fetch a unit from another rank; waits until that rank has read it.

        Returns:
            Number of bytes received, from the first on; the others must be read from the store.
        """
        with self._lock:
            if rank in self._failed or self._is_avoided(rank):
                return 0
            idle = self._idle.get(rank, [])
            connection = idle.pop() if idle else None
        is_connected = connection is not None
        try:
            if connection is None:
                connection = self._connect(rank)
                is_connected = True
            received = self._request(connection, rank, number, into)
        except (OSError, EOFError) as error:
            if connection is not None:
                connection.close()
            self._mark_failed(rank, error, is_blocked=not is_connected and not isinstance(error, ConnectionError))
            return 0
        with self._lock:
            idle = self._idle.setdefault(rank, [])
            is_kept = len(idle) < _IDLE_MAX and (received is None or received == len(into))
            if is_kept:
                idle.append(connection)
            if received is not None:
                self._received_bytes += received
                if not self._is_on_this_host(rank):
                    host = self._addresses[rank].host
                    self._balance[host] += 2 * received - len(into)
                    self._hosts.note(host, None if self._balance[host] >= 0 else "")
        if not is_kept:
            connection.close()
        return received or 0

    def _is_on_this_host(self, rank: int) -> bool:
        return self._addresses[rank].host == self._host

    def _is_avoided(self, rank: int) -> bool:
        return not self._is_on_this_host(rank) and self._hosts.find_cause(self._addresses[rank].host) is not None

    def _connect(self, rank: int) -> socket.socket:
        address = self._addresses[rank]
        connection = connect_to_unix_socket(address.name) if address.name and self._is_on_this_host(rank) else None
        if connection is None:
            if not address.port:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "the rank serves only ranks of its own host")
            connection = socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS)
        configure_socket(connection, check_seconds=CHECK_SECONDS, send_timeout_seconds=PATIENCE_SECONDS)
        return connection

    def _request(self, connection: socket.socket, rank: int, number: int, into: memoryview) -> int | None:
        """Return the number of bytes received; None if the rank declines."""
        connection.sendall(_REQUEST.pack(self._addresses[rank].secret, number))
        answer = memoryview(bytearray(_WAITING))
        while bytes(answer) == _WAITING:
            # The host may have proved slow meanwhile, in another thread.
            if receive(connection, answer, lambda _, idle: self._check(idle) or self._is_avoided(rank)) == 0:
                return 0
        if bytes(answer) != _ACCEPTED:
            return None
        if self._is_on_this_host(rank):
            return receive(connection, into, lambda _, idle: self._check(idle))
        with self._rates.receiving() as comes_sooner:
            received = receive(connection, into, lambda received, idle: self._check(idle) or comes_sooner(received))
            comes_sooner(received)
        return received

    def _check(self, idle_seconds: float) -> bool:
        """Return False while it is worth waiting for a rank; else raise TimeoutError."""
        if self._is_abandoned():
            raise TimeoutError("The load is over.")
        if idle_seconds >= PATIENCE_SECONDS:
            raise TimeoutError(f"The other rank has sent nothing for {idle_seconds:.0f} s.")
        return False

    def _is_abandoned(self) -> bool:
        """Return whether the load was cancelled, or the caller has taken its buffer back."""
        return self._is_over() or not may_write()

    def _mark_failed(self, rank: int, error: Exception, *, is_blocked: bool) -> None:
        address = self._addresses[rank]
        with self._lock:
            self._failed.add(rank)
            if self._is_abandoned():
                return
            self.unreached.setdefault(rank, str(error))
            if is_blocked and address.host != self._host:
                self._hosts.note(address.host, str(error) or type(error).__name__)
        logger.debug("A rank does not send what it has read. address=%s:%d cause=%s", address.host, address.port, error)
