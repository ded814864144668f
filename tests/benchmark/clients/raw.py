"""The socket itself: what any client must spend to move these bytes. Others' CPU is told as a multiple of its CPU.

It signs nothing, digests nothing, tries nothing again; it knows the benchmark's server and no other.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from dcp_remote.common.units import MiB
from dcp_remote.errors import StorageError

# As ours: what is compared differs in nothing but the client.
SHARD_BYTES = 64 * MiB
RANGE_BYTES = 8 * MiB
THREADS = 8

# A head of the benchmark's server is a few hundred bytes; what comes behind it in one piece is copied.
_HEAD_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class RawShard:
    """An object, and where its bytes are or belong."""

    path: str
    views: Sequence[memoryview]


def pack(views: Sequence[memoryview], prefix: str) -> list[RawShard]:
    """Fill shards with views in their order, cut where a shard is full. Pure: the same sizes give the same shards."""
    shards: list[RawShard] = []
    for part in _cut(views, SHARD_BYTES):
        shards.append(RawShard(f"{prefix}/{len(shards)}", part))
    return shards


def _cut(views: Sequence[memoryview], size_bytes: int) -> Iterator[list[memoryview]]:
    """The bytes of these views, in parts of that many; the last one may be shorter."""
    part: list[memoryview] = []
    room = size_bytes
    for whole in views:
        view = whole
        while view.nbytes:
            taken = view[:room]
            part.append(taken)
            view = view[taken.nbytes :]
            room -= taken.nbytes
            if not room:
                yield part
                part, room = [], size_bytes
    if part:
        yield part


def put_all(endpoint_url: str, shards: Sequence[RawShard], *, ca_file: str | None) -> None:
    _at_once(endpoint_url, [partial(_put, shard=shard) for shard in shards], ca_file=ca_file)


def get_all(endpoint_url: str, shards: Sequence[RawShard], *, ca_file: str | None) -> None:
    """One GET for each 8 MiB of each shard, received where it belongs."""
    asks = [
        partial(_get, path=shard.path, start=number * RANGE_BYTES, views=part)
        for shard in shards
        for number, part in enumerate(_cut(shard.views, RANGE_BYTES))
    ]
    _at_once(endpoint_url, asks, ca_file=ca_file)


def _at_once(endpoint_url: str, asks: Sequence[Callable[[_Connection], None]], *, ca_file: str | None) -> None:
    local = threading.local()
    opened: list[_Connection] = []

    def ask(one: Callable[[_Connection], None]) -> None:
        if not hasattr(local, "connection"):
            local.connection = _Connection(endpoint_url, ca_file)
            opened.append(local.connection)
        one(local.connection)

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(ask, asks):
                pass
    finally:
        for connection in opened:
            connection.socket.close()


class _Connection:
    """A connected socket; blocking, without a timeout: then one call receives a whole range."""

    def __init__(self, endpoint_url: str, ca_file: str | None) -> None:
        parts = urlsplit(endpoint_url)
        assert parts.hostname is not None
        self.host = parts.netloc
        self.socket = socket.create_connection((parts.hostname, parts.port))
        self.socket.settimeout(None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._flags = int(socket.MSG_WAITALL)
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=ca_file)
            self.socket = context.wrap_socket(self.socket, server_hostname=parts.hostname)
            self._flags = 0

    def ask(self, method: str, path: str, **headers: object) -> None:
        named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self.socket.sendall(f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\n{named}\r\n".encode())

    def answer(self, *, status: int) -> memoryview:
        """Read a head; what of the body came with it."""
        buffer = bytearray(_HEAD_BYTES_MAX)
        got = 0
        while (end := buffer.find(b"\r\n\r\n", 0, got)) < 0:
            count = self.socket.recv_into(memoryview(buffer)[got:])
            if not count:  # or the buffer is full
                raise StorageError("The server's answer has no head.", got_bytes=got)
            got += count
        if int(buffer.split(b" ", 2)[1]) != status:
            raise StorageError("The server refused.", answer=bytes(buffer[:end]))
        return memoryview(buffer)[end + 4 : got]

    def fill(self, view: memoryview) -> None:
        while view:
            count = self.socket.recv_into(view, len(view), self._flags)
            if not count:
                raise StorageError("The server closed the connection.")
            view = view[count:]


def _put(connection: _Connection, *, shard: RawShard) -> None:
    connection.ask("PUT", shard.path, Content_Length=sum(view.nbytes for view in shard.views))
    for view in shard.views:
        connection.socket.sendall(view)
    connection.answer(status=200)


def _get(connection: _Connection, *, path: str, start: int, views: Sequence[memoryview]) -> None:
    stop = start + sum(view.nbytes for view in views)
    connection.ask("GET", path, Range=f"bytes={start}-{stop - 1}")
    early = connection.answer(status=206)
    for view in views:
        count = min(len(early), len(view))
        view[:count] = early[:count]
        early = early[count:]
        connection.fill(view[count:])
