"""Client of the key-value store of torch's process group, in which no operation waits for a key.

Nothing unblocks a torch collective that waits for a rank that is dead or stopped. This client polls the store instead,
so that every wait is the caller's own, and ends when the caller wants.

A store whose host process is stopped answers nobody: `check` and `get` then block forever (torch 2.13). `HelperClient`
makes them in a helper thread, which its caller can leave behind.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from dcp_remote.common.threads import HelperThread

T = TypeVar("T")

# TCPStore's server drops a connection that sends more than 8 MiB at once (TCPStoreLibUvBackend.cpp of torch 2.13).
_PART_BYTES_MAX = 4 * 2**20

# Keys of one operation: a message of some 100 kB; its answer is as long as the values are.
_KEYS_PER_OPERATION = 1024

# Keys that `present` looks for at a time.
_KEYS_PER_LOOK = 16

# Timeout of `get` for one of several keys, or for a part of a value, that was deleted after it was seen: the only wait
# that is the store's. It prints two lines.
_GET_TIMEOUT = timedelta(seconds=5)
# Value that no key has: of four thousand million parts.
_NEVER_STORED = b"\xff\xff\xff\xff"
# Attempts to get keys that exist, from a store that is only slow.
_GET_ATTEMPTS = 3

# Longest wait for a connection of `require_reachable`, and of a client for another client to connect.
_CONNECT_SECONDS = 3.0

# Silence after which the kernel sends a packet, since load balancers and firewalls forget a connection that was silent
# for four minutes, as between saves. So many packets without an answer, the most that Linux allows, are its end.
_KEEP_ALIVE_SECONDS = 100
_KEEP_ALIVE_PACKETS = 127


_connecting = threading.Lock()


class StoreAddress(NamedTuple):
    """Address of a key-value store that a process of the job hosts: its host as the job names it, and its TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return "host:port"."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Client:
    """One thread's own connection to a store; no operation waits for a key.

    Values have any size: a large value is cut into parts, the first of which is written last.

    Args:
        store: Store to connect to. TCPStore and FileStore have one connection per clone, since a blocked operation
            holds up all others of its connection. HashStore, and a store without `clone`, is used as it is.
        on_answer: Called after each operation that the store answered.
    """

    def __init__(self, store: dist.Store, on_answer: Callable[[], None] = lambda: None) -> None:
        """Connect to the store."""
        self._on_answer = on_answer
        address = address_of(store)
        # One at a time, so that the socket is found; not for long, since a host that is stopped may keep one here.
        is_alone = address is not None and _connecting.acquire(timeout=_CONNECT_SECONDS)
        try:
            before = _sockets_to(address) if address is not None else {}
            self._store = open_connection(store)
            after = _sockets_to(address) if address is not None else {}
            new = after.keys() - before.keys()
            _keep_alive([after[inode] for inode in new])
        finally:
            if is_alone:
                _connecting.release()
        self._socket_inode = new.pop() if len(new) == 1 else None

    def shut_down(self) -> None:
        """End the connection from another thread: a request that waits for an answer raises at once.

        A thread left behind in a request would end the process by SIGABRT if its answer came while the
        interpreter shuts down. Does nothing where the socket was not found, which torch does not give away.
        """
        address = address_of(self._store)
        descriptor = None
        with contextlib.suppress(OSError):  # no file descriptor is free
            descriptor = _sockets_to(address).get(self._socket_inode or 0) if address is not None else None
        if descriptor is not None:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:
                if os.fstat(own.fileno()).st_ino == self._socket_inode:
                    own.shutdown(socket.SHUT_RDWR)

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        found = all(self._store.check(list(some_keys)) for some_keys in _slices(keys))
        self._on_answer()
        return found

    def present(self, keys: Sequence[str]) -> set[str]:
        """Return those keys that exist; one operation for 16 keys that exist, 17 where one of the 16 is missing."""
        found: set[str] = set()
        for first in range(0, len(keys), _KEYS_PER_LOOK):
            some_keys = keys[first : first + _KEYS_PER_LOOK]
            if self.has(some_keys):
                found.update(some_keys)
            elif len(some_keys) > 1:
                found.update(key for key in some_keys if self.has([key]))
        return found

    def get(self, key: str) -> bytes:
        """Return the value of a key, or b"" at once if the key does not exist; one operation for up to 4 MiB."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist.

        If one of several keys is deleted meanwhile, all values are b"", after `_GET_TIMEOUT`; a single one, at once.
        """
        if len(keys) == 1:
            # Without the wait of `Store.get` for a key: a store returns what is there, or else the expected value.
            head = self._store.compare_set(keys[0], _NEVER_STORED, _NEVER_STORED)  # type: ignore[arg-type]  # as above
            if head == _NEVER_STORED:
                self._on_answer()
                return [b""]
            if int.from_bytes(head[:4], "little") == 1:
                self._on_answer()
                return [bytes(head[4:])]
        for attempt in range(1, _GET_ATTEMPTS + 1):
            try:
                heads = [head for some_keys in _slices(keys) for head in self._store.multi_get(list(some_keys))]
                values = [self._read_whole(key, head) for key, head in zip(keys, heads, strict=True)]
            except dist.DistStoreError:  # a TCPStore waited for a key until its timeout
                if not self.has(keys):
                    return [b"" for _ in keys]
                if attempt == _GET_ATTEMPTS:
                    raise
            else:
                self._on_answer()
                return values
        raise AssertionError("the last attempt returns or raises")

    def get_present(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those keys that exist and are not empty, by key: as `present` and `get_many`."""
        found = list(keys if len(keys) == 1 else self.present(keys))
        return {key: value for key, value in zip(found, self.get_many(found), strict=True) if value}

    def put(self, key: str, value: bytes) -> None:
        """Set the value of a key; a value of several parts must not replace another.

        A TCPStore does not answer, so nothing says that the value has arrived; the next request of this client is
        carried out after it.
        """
        parts = [value[first : first + _PART_BYTES_MAX] for first in range(0, len(value), _PART_BYTES_MAX)] or [b""]
        for number, part in enumerate(parts[1:], start=1):
            self._store.set(_part_key(key, number), part)  # type: ignore[arg-type]  # bytes are taken
            self.has([key])  # an answer: a connection that carries much is not silent
        self._store.set(key, len(parts).to_bytes(4, "little") + parts[0])  # type: ignore[arg-type]  # as above

    def put_first(self, key: str, value: bytes) -> bytes:
        """Set the value of a key unless the key exists, and return its value; at most 4 MiB."""
        assert len(value) <= _PART_BYTES_MAX, "a value of several parts cannot be set at once"
        head = (1).to_bytes(4, "little") + value
        now = self._store.compare_set(key, b"", head)  # type: ignore[arg-type]  # as above
        self._on_answer()
        return bytes(now[4:])

    def add(self, key: str, number: int) -> int:
        """Add to a counter, which begins with 0, and return its value; no other method takes the key but `present`."""
        total = self._store.add(key, number)
        self._on_answer()
        return total

    def append(self, series: str, value: bytes, *, is_confirmed: bool = False) -> None:
        """Put a value under the next key of a series, whose counter has the name of the series: two operations.

        If it is to be confirmed, a third: its answer says that the value has arrived.
        """
        self.put(series_key(series, self.add(series, 1)), value)
        if is_confirmed:
            self.has([series])

    def replace(self, key: str, value: bytes, by: bytes) -> bool:
        """Replace the value of a key if it is `value`, and return whether it was; both at most 4 MiB."""
        head = (1).to_bytes(4, "little")
        now = self._store.compare_set(key, head + value, head + by)  # type: ignore[arg-type]  # as above
        self._on_answer()
        return now == head + by

    def delete(self, keys: Iterable[str], sizes: Mapping[str, int] | None = None) -> None:
        """Delete those keys that exist, with all parts of their values.

        `sizes` has the bytes of values whose sizes are known: they cost one operation for each part, others one more.
        """
        for key in keys:
            size = (sizes or {}).get(key)
            self._store.delete_key(key)
            number = 1
            while self._store.check([_part_key(key, number)]) if size is None else number * _PART_BYTES_MAX < size:
                self._store.delete_key(_part_key(key, number))
                number += 1
            self._on_answer()

    def delete_series(self, series: str) -> None:
        """Delete the keys of a series that were appended so far, and the counter."""
        count = self.add(series, 0)
        self.delete([series_key(series, number) for number in range(1, count + 1)])
        self.delete([series], {series: 0})

    def _read_whole(self, key: str, head: bytes) -> bytes:
        count = int.from_bytes(head[:4], "little")
        parts = [head[4:]]
        for number in range(1, count):
            parts.append(self._store.get(_part_key(key, number)))
            self._on_answer()
        return b"".join(parts)


class HelperClient:
    """Client in a helper thread, for a thread that must not block on a store that does not answer.

    Args:
        connect: Makes the client; called in the helper thread, by the first request.
    """

    def __init__(self, connect: Callable[[], Client]) -> None:
        """Store `connect`; no thread is started."""
        self._connect = connect
        self._client: Client | None = None
        self._helper = HelperThread("dcp_remote-store")

    def ask(self, request: Callable[[Client], T], look: Callable[[], None]) -> T:
        """Make a request in the helper thread and return its answer; see `HelperThread.run`.

        After `look` has raised, the helper thread may still use the client: abandon this object and make another.
        """

        def make_request() -> T:
            if self._client is None:
                self._client = self._connect()
            return request(self._client)

        return self._helper.run(make_request, look)

    def close(self) -> None:
        """End the helper thread, and the connection."""
        self._client = None
        self._helper.close()

    def abandon(self) -> None:
        """End the connection and the helper thread, which may wait for an answer."""
        if self._client is not None:
            self._client.shut_down()
        self._helper.close()


def open_connection(store: dist.Store) -> dist.Store:
    """Return another connection to a store, for another thread; the store itself if it cannot be cloned."""
    try:
        clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stub
    except (AttributeError, NotImplementedError):
        return store  # a user's own class, or an older torch
    if address_of(clone) is not None:  # the clone of another class may be the original
        clone.set_timeout(_GET_TIMEOUT)
    return clone


def address_of(store: dist.Store | None) -> StoreAddress | None:
    """Return the address of a TCPStore; None for a store of another class."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return StoreAddress(str(store.host), store.port) if isinstance(store, dist.TCPStore) else None


def require_reachable(address: StoreAddress) -> None:
    """Open a connection to a store and close it again; within some three seconds.

    A clone of a TCPStore that cannot connect blocks for as long as the timeout of the original: half an hour.

    Raises:
        OSError: There is no way to the host now; `ConnectionRefusedError` if the process of the store has ended.
    """
    socket.create_connection(address, timeout=_CONNECT_SECONDS).close()


def _sockets_to(address: StoreAddress) -> dict[int, int]:
    """Return the file descriptors of this process's connections to the port of a store, by inode.

    Empty where `socket.setdefaulttimeout` was called: Python would make sockets that torch uses non-blocking.
    """
    found: dict[int, int] = {}
    if socket.getdefaulttimeout() is not None:
        return found
    with contextlib.suppress(FileNotFoundError):  # a system without this folder
        for descriptor in [int(path.name) for path in Path("/dev/fd").iterdir()]:
            with contextlib.suppress(OSError):  # no socket, not connected, or closed meanwhile
                status = os.fstat(descriptor)
                if stat.S_ISSOCK(status.st_mode):
                    with socket.socket(fileno=os.dup(descriptor)) as own:
                        peer = own.getpeername()
                        if isinstance(peer, tuple) and peer[1] == address.port:
                            found[status.st_ino] = descriptor
    return found


def _keep_alive(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors if sys.platform == "linux" else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_SECONDS)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVE_PACKETS)


def series_key(series: str, number: int) -> str:
    """Return a key of a series, counted from 1."""
    return f"{series}/{number}"


def _part_key(key: str, number: int) -> str:
    return f"{key}+{number}" if number else key


def _slices(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(keys), _KEYS_PER_OPERATION):
        yield keys[first : first + _KEYS_PER_OPERATION]
