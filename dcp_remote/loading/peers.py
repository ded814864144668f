"""Exchange of units between ranks during one load: a range that several ranks want is read from the store by one.

A rank that has read a unit serves it to the ranks that want it, over plain sockets, not a process group of torch's:
each wait here has a limit, which a gloo operation cannot have; a transfer that fails affects no other; and only ranks
that share units are connected. A client knows the server's address and secret from the key-value store of the group.
The bytes are not encrypted, like those that gloo sends. There is one connection for each unit:

    request: the server's secret (16 bytes), the number of the unit (8 bytes, little-endian)
    answer: any number of bytes 2, while the server has not read the unit; then 1, and the unit follows

Correctness does not depend on an answer: where the server closes the connection, is silent, or sends more slowly than
the store would, the client reads from the store what is missing. So no load fails or hangs that would not without the
exchange. The receiver verifies the bytes as it verifies those of the store; bytes that do not match their digest are
read from the store.
"""

from __future__ import annotations

import errno
import hmac
import logging
import math
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Self, cast

import numpy as np

from dcp_remote.common.digests import digest
from dcp_remote.common.threads import WAKE_SECONDS, Workers
from dcp_remote.format.manifest import Manifest
from dcp_remote.loading.peer_sockets import configure_socket, connect, listen_on_tcp, listen_on_unix_socket
from dcp_remote.loading.read_plan import ReadPlan, Want, Wanted, wanted_blocks
from dcp_remote.loading.read_rates import ReadRates
from dcp_remote.loading.shared_read_plan import (
    decode_wanted,
    encode_wanted,
    grouping_key,
    plan_shared,
    shared_units,
    split_into_cohorts,
)
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.request_context import may_write
from dcp_remote.storage.rereads import is_reread
from dcp_remote.storage.wrapper import WrappedStore

logger = logging.getLogger(__name__)

# Time without a byte after which a client does not wait for a server any more. A server that is still reading sends a
# byte five times as often. A stopped rank costs each of the others this time once.
PATIENCE_SECONDS = 10.0

# Interval at which a client checks whether to go on waiting.
_CHECK_SECONDS = 0.1

# Part of the asked bytes that other hosts must send to be of use; at equal rates it is about half.
_USEFUL_PART = 0.25

# Time for which other hosts that were of no use are left alone.
_LEFT_ALONE_SECONDS = 600.0

# Connections that a server has at a time; a client that is turned away reads from the store.
_CONNECTIONS_MAX = 128

# Errors of `accept` that concern one connection (accept(2)); others, such as EMFILE, last.
_ERRORS_OF_ONE_CLIENT = frozenset(
    {
        *(errno.ECONNABORTED, errno.EPERM, errno.EPROTO, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN),
        *(errno.EHOSTUNREACH, errno.ENOPROTOOPT, errno.EOPNOTSUPP),
    }
)

# File descriptors that a load needs at most: these connections, those to other ranks, and those of the store.
_DESCRIPTORS_MIN = _CONNECTIONS_MAX + 64

# The budget divided by this is for copies that others have not received yet, at most; the rest for ranges in flight.
_KEPT_SHARE = 2

# The budget divided by this is one window. Where all ranks are about as fast, a rank is at most three windows ahead of
# what others have received.
_WINDOW_SHARE = 8

_SECRET_BYTES = 16
_REQUEST = struct.Struct(f"<{_SECRET_BYTES}sq")
_ACCEPTED, _WAITING = b"\1", b"\2"


@dataclass(frozen=True, slots=True)
class Address:
    """Address at which a rank serves what it has read."""

    rank: int
    host: str  # IP address
    port: int  # TCP port; 0 if only ranks of the same host are served
    name: bytes  # name of a Unix socket, for ranks of the same host; empty if there is none
    secret: bytes  # bytes that each request must contain


class PeerServer:
    """Serves units to other ranks as soon as they are offered; one thread per connection, and one that accepts.

    The copies of units that do not stay in place are bounded by `kept_bytes_max`. Without `serves_other_hosts` the
    server listens at no TCP port if this host has Unix sockets. Clients connect to `address`.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        *,
        kept_bytes_max: int,
        ports: tuple[int, int] | None = None,
        serves_other_hosts: bool = True,
    ) -> None:
        """Start to listen; raises OSError, also for few file descriptors, and RuntimeError if no thread starts."""
        if sum(1 for _ in Path("/dev/fd").iterdir()) + _DESCRIPTORS_MIN > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            raise OSError(errno.EMFILE, "too few files may be opened (ulimit -n) for connections to other ranks")
        self._kept_bytes_max = kept_bytes_max
        self._kept_bytes = 0
        self._changed = threading.Condition()
        # By number of the unit: its bytes, None where it is declined; and for a copy the ranks that have not got it.
        self._offers: dict[int, memoryview | None] = {}
        self._receivers: dict[int, int] = {}
        self._is_complete = self._is_closed = False
        self._connections: set[socket.socket] = set()
        self._workers = Workers(_CONNECTIONS_MAX + 1, "dcp_remote-peer")
        with ExitStack() as opened:  # closed again if the next socket or the thread fails
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
                        "This rank cannot listen at a TCP port, so that ranks send what they have read only to ranks "
                        "of their own host. Give it a free port: rank_sockets=RankSockets(ports=…). host=%s cause=%s",
                        host,
                        error,
                    )
            name = bytes(unix.getsockname()) if unix is not None else b""
            self.address = Address(rank, host, port, name, os.urandom(_SECRET_BYTES))
            self._workers.submit(self._accept)
            opened.pop_all()  # the accepting thread closes them

    def close(self) -> None:
        """Close all connections, which tells the clients that wait, and wait for all threads to end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for connection in (*self._listening, *self._connections):
                with suppress(OSError):  # the other side has closed it
                    connection.shutdown(socket.SHUT_RDWR)
        self._workers.shutdown(wait=True)
        for connection in self._connections:  # those that no thread has begun to serve
            connection.close()

    def offer(self, number: int, data: memoryview, *, receivers: int, stays: bool) -> None:
        """Offer a unit to the clients, of which that many ranks want it.

        Unless the data stays valid until this server is closed, a copy is kept until all receivers have it; if there is
        no room for a copy, requests for the unit are declined.
        """
        with self._changed:
            if stays:
                self._offers[number] = data
            elif self._kept_bytes + len(data) <= self._kept_bytes_max:
                self._kept_bytes += len(data)
                self._offers[number], self._receivers[number] = memoryview(bytes(data)), receivers
            else:
                self._offers[number] = None
            self._changed.notify_all()

    def complete(self) -> None:
        """Decline requests for units that were not offered: no more will be."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def _accept(self) -> None:
        try:
            while not self._is_closed:
                for listening in wait(self._listening, WAKE_SECONDS):
                    self._accept_one(cast("socket.socket", listening))
        except OSError as error:  # such as too many open files
            logger.debug("no more connections of other ranks are accepted: %s", error)
        finally:
            # Clients that wait to be accepted learn it at once, and read from the store.
            for listening in self._listening:
                listening.close()

    def _accept_one(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError as error:
            if error.errno not in _ERRORS_OF_ONE_CLIENT:
                raise
            logger.debug("a connection of another rank was not accepted: %s", error)
            return
        with self._changed:
            if self._is_closed or len(self._connections) >= _CONNECTIONS_MAX:
                connection.close()
                return
            self._connections.add(connection)
        try:
            self._workers.submit(partial(self._serve, connection))
        except RuntimeError as error:  # no thread can be started: the client reads from the store
            logger.debug("a connection of another rank is not served: %s", error)
            with suppress(OSError):  # the other side has closed it
                connection.shutdown(socket.SHUT_RDWR)
            self._drop(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            configure_socket(connection, receive_seconds=PATIENCE_SECONDS, send_seconds=PATIENCE_SECONDS)
            request = connection.recv(_REQUEST.size, socket.MSG_WAITALL)
            if len(request) == _REQUEST.size:
                secret, number = _REQUEST.unpack(request)
                if hmac.compare_digest(secret, self.address.secret):
                    self._answer(connection, number)
        except OSError as error:
            logger.debug("a connection of another rank ended: %s", error)
        finally:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        with self._changed:
            self._connections.discard(connection)
        connection.close()

    def _answer(self, connection: socket.socket, number: int) -> None:
        """Wait until a unit is offered, and meanwhile tell the client that this rank is still reading; then send it."""

        def is_decided() -> bool:
            return self._is_closed or self._is_complete or number in self._offers

        while True:
            with self._changed:
                if self._changed.wait_for(is_decided, PATIENCE_SECONDS / 5):
                    data = self._offers.get(number)
                    break
            connection.sendall(_WAITING)
        if data is None:
            return
        try:
            connection.sendall(_ACCEPTED)
            connection.sendall(data)
        finally:  # a client that breaks off reads the rest from the store
            self._count_sent(number, len(data))

    def _count_sent(self, number: int, size_bytes: int) -> None:
        """Count one receiver of a copy less, and drop the copy after the last."""
        with self._changed:
            if number in self._receivers:
                self._receivers[number] -= 1
                if not self._receivers[number]:
                    del self._receivers[number]
                    self._offers[number] = None
                    self._kept_bytes -= size_bytes


class OtherHosts:
    """Record of the use of other hosts to this process. Hosts of no use are left alone for ten minutes. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._alone_until_seconds = -math.inf

    def note(self, *, are_useful: bool) -> None:
        """Note whether other hosts send enough of what a load asks them for."""
        self._alone_until_seconds = -math.inf if are_useful else self._clock() + _LEFT_ALONE_SECONDS

    def are_useful(self) -> bool:
        """Return whether to ask other hosts."""
        return self._clock() >= self._alone_until_seconds


_OTHER_HOSTS = OtherHosts()


class PeerStore(WrappedStore):
    """Store that requests units that other ranks own from these first, and measures how fast both ways are.

    A rank that is not reached, or is silent for `PATIENCE_SECONDS`, is not asked again; nor are other hosts once they
    have left most of what they were asked for to the store.
    """

    def __init__(
        self,
        store: ObjectStore,
        units: Mapping[tuple[str, int], tuple[int, Address]],
        *,
        host: str,
        is_over: Callable[[], bool],
        hosts: OtherHosts,
    ) -> None:
        """Store the settings; no connection is made."""
        super().__init__(store)
        self._units = units  # by key and first byte, each with its number and the address of its owner
        self._host = host  # host of this rank, by which ranks of the same host are recognized
        self._is_over = is_over  # True once the load was cancelled; called ten times a second while a thread waits
        self._hosts = hosts  # as earlier loads found them; told what this load finds
        self._rates = ReadRates()
        self._lock = threading.Lock()
        self._balance_bytes = 0.0  # received from other hosts, less the part of the asked bytes that makes them useful
        self._overdue: set[Address] = set()
        self.received_bytes: dict[int, int] = {}  # from other ranks, by number of the unit
        self.unreached: dict[Address, str] = {}  # ranks that were not reached, or fell silent, with the cause

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Read a unit from its owner, and from the store what the owner does not send; other ranges from the store."""
        # On a reread the bytes of the other rank did not match their digest.
        unit = None if is_reread() else self._units.get((self._prefix + key, start))
        if unit is not None:
            number, address = unit
            count = self.received_bytes[number] = self._fetch(address, number, buffer)
            start, buffer = start + count, buffer[count:]
        if buffer:
            with self._rates.reading(len(buffer)):
                super().get_into(key, start, buffer)

    def _fetch(self, address: Address, number: int, into: memoryview) -> int:
        """Fetch a unit from another rank, when that rank has read it; return the number of bytes received."""
        is_far = address.host != self._host
        if address in self.unreached or address in self._overdue or (is_far and not self._hosts.are_useful()):
            return 0
        received = 0
        try:
            with connect(address.host, address.port, b"" if is_far else address.name) as connection:
                configure_socket(connection, receive_seconds=_CHECK_SECONDS, send_seconds=PATIENCE_SECONDS)
                connection.sendall(_REQUEST.pack(address.secret, number))
                if not self._is_accepted(connection, address, is_far=is_far):
                    return 0
                # A rank of the same host sends as fast as memory is copied.
                with self._rates.receiving() if is_far else nullcontext(lambda _: False) as comes_sooner:
                    received = self._receive(connection, into, comes_sooner)
                    comes_sooner(received)
        except OSError as error:
            if self._is_abandoned():
                return 0
            self.unreached[address] = str(error) or type(error).__name__
            logger.debug("A rank does not send what it has read. address=%s cause=%s", address, error)
            if isinstance(error, ConnectionError):  # the rank has gone; others of its host have not
                return 0
        if is_far:
            with self._lock:
                self._balance_bytes += received - _USEFUL_PART * len(into)
                self._hosts.note(are_useful=self._balance_bytes >= 0)
        return received

    def _is_accepted(self, connection: socket.socket, address: Address, *, is_far: bool) -> bool:
        """Wait until the server has read the unit; return False if it does not send it, or takes too long to read."""

        def should_stop(_received: int) -> bool:
            if self._rates.is_overdue():
                self._overdue.add(address)
            # Other hosts may prove slow meanwhile, in another thread.
            return address in self._overdue or (is_far and not self._hosts.are_useful())

        answer = memoryview(bytearray(_WAITING))
        while bytes(answer) == _WAITING:
            if not self._receive(connection, answer, should_stop):
                return False
        return bytes(answer) == _ACCEPTED

    def _receive(self, connection: socket.socket, into: memoryview, should_stop: Callable[[int], bool]) -> int:
        """Fill a buffer; return the number of bytes received, which is smaller if the server closes the connection.

        `should_stop` tells by the number of bytes received whether to leave the rest. A load that is over, and a server
        that has sent nothing for `PATIENCE_SECONDS`, are a TimeoutError.
        """
        received, heard_seconds = 0, time.monotonic()
        while received < len(into):
            try:
                count = connection.recv_into(into[received:], 0, socket.MSG_WAITALL)
                if not count:
                    break
                received, heard_seconds = received + count, time.monotonic()
            except BlockingIOError:
                idle_seconds = time.monotonic() - heard_seconds
                if idle_seconds >= PATIENCE_SECONDS:
                    raise TimeoutError(f"The other rank has sent nothing for {idle_seconds:.0f} s.") from None
            if self._is_abandoned():
                raise TimeoutError("The load is over.")
            if received < len(into) and should_stop(received):
                break
        return received

    def _is_abandoned(self) -> bool:
        """Return whether the load was cancelled, or the caller has taken its buffer back."""
        return self._is_over() or not may_write()


@dataclass(frozen=True, slots=True)
class Announcement:
    """Message of a rank to the others before a load."""

    address: Address | None  # address at which the rank serves what it has read; None if it takes no part
    wanted: bytes  # blocks that the rank wants, as `encode_wanted` returns them
    # Digest of the chunks in the rank's manifest; b"" if it has all. Others number the blocks of other chunks.
    chunks: bytes = b""


def cohorts_of(announcements: Sequence[Announcement]) -> list[dict[int, Announcement]]:
    """Return for each rank its cohort, which is one object for all its ranks; called on the coordinator. Pure.

    A cohort is the ranks that read together, ascending, each with its announcement; all have the same segments of the
    manifest. Equal `wanted` become one object, which pickle writes once.
    """
    interned = {announcement.wanted: announcement.wanted for announcement in announcements}
    keys = {wanted: grouping_key(decode_wanted(wanted)) for wanted in interned}
    alike: dict[bytes, list[int]] = {}
    for rank, announcement in enumerate(announcements):
        alike.setdefault(announcement.chunks, []).append(rank)
    split = [
        [ranks[number] for number in numbers]
        for ranks in alike.values()
        for numbers in split_into_cohorts([keys[announcements[rank].wanted] for rank in ranks])
    ]
    cohorts = [
        {rank: Announcement(announcements[rank].address, interned[announcements[rank].wanted]) for rank in ranks}
        for ranks in split
    ]
    cohort_of_rank = {rank: cohort for cohort in cohorts for rank in cohort}
    return [cohort_of_rank[rank] for rank in range(len(announcements))]


class PeerExchange:
    """This rank's part in an exchange, used as a context manager; leave it when all ranks have what they want.

    First `listen`, then `begin` with the cohort of this rank, which returns the store and the plan to read with. What
    this rank has read must stay unchanged until the end. Without a host, at whose address the other ranks reach this
    rank, it takes no part: it opens no socket and reads everything from the store. The budget bounds the ranges in
    flight and the copies kept for others; `is_over` tells whether the load was cancelled.
    """

    def __init__(
        self,
        rank: int,
        host: str | None,
        *,
        memory_budget_bytes: int,
        is_over: Callable[[], bool],
        ports: tuple[int, int] | None = None,
    ) -> None:
        """Store the settings; nothing is opened before `listen`."""
        self._rank = rank
        self._host = host
        self._ports = ports
        self._budget_bytes = memory_budget_bytes
        self._is_over = is_over
        self._server: PeerServer | None = None
        self._store: PeerStore | None = None
        self._wanted: Wanted | None = None
        self._owned: dict[tuple[str, int], tuple[int, int]] = {}  # number and receivers, by key and first byte
        self._owned_bytes = self._awaited_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Close all connections and end all threads; the other ranks read from the store what they still want."""
        if self._server is not None:
            self._server.close()

    @property
    def received_bytes(self) -> int:
        """Number of bytes received from other ranks."""
        return sum(self._store.received_bytes.values()) if self._store is not None else 0

    @property
    def fallback_bytes(self) -> int:
        """Number of bytes that another rank was to send, and that this rank read from the store; once all is read."""
        return self._awaited_bytes - self.received_bytes

    @property
    def unreached(self) -> list[tuple[Address, str]]:
        """Ranks from which this rank got nothing, or nothing more, each with the cause."""
        return list(self._store.unreached.items()) if self._store is not None else []

    @property
    def budget_bytes(self) -> int:
        """Limit of the memory of ranges in flight, in bytes."""
        return self._budget_bytes - min(self._owned_bytes, self._budget_bytes // _KEPT_SHARE)

    def listen(self, manifest: Manifest, wants: Sequence[Want]) -> Announcement:
        """Start to listen, and return the announcement for the other ranks."""
        self._wanted = wanted_blocks(manifest, wants)
        try:
            if self._host is not None:
                self._server = PeerServer(
                    self._rank,
                    self._host,
                    kept_bytes_max=self._budget_bytes // _KEPT_SHARE,
                    ports=self._ports,
                    serves_other_hosts=_OTHER_HOSTS.are_useful(),
                )
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            logger.warning(
                "This rank cannot serve other ranks, and reads everything from the store. host=%s cause=%s",
                self._host,
                error,
            )
        address = self._server.address if self._server is not None else None
        tensors, chunks = manifest.tensors, b""
        if manifest.segments is not None:
            chunks = digest(tensors.chunks.tobytes() + tensors.chunk_offsets.tobytes())
        return Announcement(address, encode_wanted(manifest, self._wanted), chunks)

    def begin(
        self, store: ObjectStore, manifest: Manifest, cohort: Mapping[int, Announcement]
    ) -> tuple[ObjectStore, ReadPlan]:
        """Plan the shared read, and return the store and the plan to read with; connects when a unit is requested."""
        assert self._wanted is not None, "`listen` comes first"
        # A rank that takes no part shares nothing, as if it wanted nothing.
        addresses = [announcement.address for announcement in cohort.values()]
        wants = [
            decode_wanted(announcement.wanted) if announcement.address else np.zeros((0, 2), dtype=np.int64)
            for announcement in cohort.values()
        ]
        # Where a rank serves only its own host, all do, so that each unit can be had from its owner.
        is_connected = all(address is None or address.port for address in addresses)
        groups = ["" if is_connected or address is None else address.host for address in addresses]
        member = list(cohort).index(self._rank)
        units = shared_units(manifest, wants, groups)
        awaited: dict[tuple[str, int], tuple[int, Address]] = {}
        for number, unit in enumerate(units):
            place = manifest.shards.keys[unit.range.shard], unit.range.start
            owner = addresses[unit.owner]
            if unit.owner == member:
                self._owned[place] = number, len(unit.members) - 1
                self._owned_bytes += unit.range.length
            elif member in unit.members and owner is not None:
                awaited[place] = number, owner
                self._awaited_bytes += unit.range.length
        self._store = PeerStore(store, awaited, host=self._host or "", is_over=self._is_over, hosts=_OTHER_HOSTS)
        window_bytes = max(1, self._budget_bytes // _WINDOW_SHARE)
        return self._store, plan_shared(manifest, self._wanted, units, member=member, window_bytes=window_bytes)

    def complete(self) -> None:
        """Tell the other ranks that this rank has read all that it owns."""
        if self._server is not None:
            self._server.complete()

    def arrived(self, key: str, start: int, data: memoryview, stays: bool) -> None:  # noqa: FBT001  # `engine.Arrived`
        """Offer a range to the other ranks if this rank owns it; the callback of `read_targets`."""
        if self._server is not None and (key, start) in self._owned:
            number, receivers = self._owned[key, start]
            self._server.offer(number, data, receivers=receivers, stays=stays)
