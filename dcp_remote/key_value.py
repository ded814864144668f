"""The key-value store of torch's process group, through a connection of one thread's own, without waiting for a key.

Nothing unblocks a collective that waits for a rank that is dead or stopped. The store can be asked instead: whether a
key is there yet, without waiting, so that every wait is the caller's own, and ends when the caller wants it to.

A store that is hosted by a process that was stopped answers nobody: `check` and `get` then block for ever (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from dcp_remote.helper_thread import HelperThread

_Key = TypeVar("_Key")
T = TypeVar("T")

# TCPStore's server drops a connection that sends more than 8 MiB at once (TCPStoreLibUvBackend.cpp of torch 2.13).
_PART_BYTES_MAX = 4 * 2**20

# Keys of one operation: a message of some 100 kB; its answer is as long as the values are.
_KEYS_PER_OPERATION = 1024

# Of `get`, for a key that vanished after it was seen: the only wait here that is the store's. It prints two lines.
_GET_TIMEOUT = timedelta(seconds=5)
# Of keys that are there: a store that is only slow.
_GET_ATTEMPTS = 3


class Client:
    """One thread's own access to a store: no operation here waits for a key.

    Values of any size are taken: they are cut into parts, the first of which is written last.

    Args:
        store: Of which this makes itself a connection. TCPStore and FileStore have one for each clone, since a blocked
            operation holds up all others of its connection. HashStore, and what has no `clone`, is used as it is.
        answered: Called after each operation that was answered.
    """

    def __init__(self, store: dist.Store, answered: Callable[[], None] = lambda: None) -> None:
        """See the class; connects."""
        self._store = connection(store)
        self._answered = answered

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        found = all(self._store.check(list(some)) for some in _slices(keys))
        self._answered()
        return found

    def present(self, keys: Sequence[str]) -> set[str]:
        """Which of them are there; one operation for sixteen that are, seventeen where one is missing."""
        found: set[str] = set()
        for first in range(0, len(keys), 16):
            some = keys[first : first + 16]
            found.update(some if self.has(some) else [key for key in some if self.has([key])])
        return found

    def get(self, key: str) -> bytes:
        """A value that is there; empty if it vanishes meanwhile."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        """Values that are all there; all empty if one of them vanishes meanwhile, which takes some seconds to see."""
        return self._found(keys) or [b"" for _ in keys]

    def take_many(self, keys: Sequence[str]) -> list[bytes]:
        """Values that are all there, and are no more; as `get_many`, and then they stay."""
        values = self._found(keys)
        if values is None:
            return [b"" for _ in keys]
        for key, value in zip(keys, values, strict=True):
            for number in range(max(1, -(-len(value) // _PART_BYTES_MAX))):
                self._store.delete_key(_part(key, number))
        self._answered()
        return values

    def _found(self, keys: Sequence[str]) -> list[bytes] | None:
        """Of all, or none if one has vanished."""
        for attempt in range(1, _GET_ATTEMPTS + 1):
            try:
                heads = [head for some in _slices(keys) for head in self._store.multi_get(list(some))]
                values = [self._whole(key, head) for key, head in zip(keys, heads, strict=True)]
            except dist.DistStoreError:  # what a TCPStore raises that has waited for a key
                if not self.has(keys):
                    return None
                if attempt == _GET_ATTEMPTS:
                    raise
            else:
                self._answered()
                return values
        raise AssertionError("the last attempt returns or raises")

    def put(self, key: str, value: bytes) -> None:
        """Set it, and forget what was there; not to be done twice with values of several parts.

        Nothing says whether it has arrived: a TCPStore does not answer. What this client asks next is asked after that.
        """
        parts = [value[first : first + _PART_BYTES_MAX] for first in range(0, len(value), _PART_BYTES_MAX)] or [b""]
        for number, part in enumerate(parts[1:], start=1):
            self._store.set(_part(key, number), part)  # type: ignore[arg-type]  # bytes are taken
        self._store.set(key, len(parts).to_bytes(4, "little") + parts[0])  # type: ignore[arg-type]

    def put_first(self, key: str, value: bytes) -> None:
        """Set it unless it is there already; at most 4 MiB."""
        assert len(value) <= _PART_BYTES_MAX, "a value of several parts cannot be set at once"
        head = (1).to_bytes(4, "little") + value
        self._store.compare_set(key, b"", head)  # type: ignore[arg-type]
        self._answered()

    def delete(self, keys: Iterable[str]) -> None:
        """Delete them, with all their parts, if they are there."""
        for key in keys:
            self._store.delete_key(key)
            number = 1
            while self._store.check([_part(key, number)]):
                self._store.delete_key(_part(key, number))
                number += 1
        self._answered()

    def _whole(self, key: str, head: bytes) -> bytes:
        count = int.from_bytes(head[:4], "little")
        rest = [self._store.get(_part(key, number)) for number in range(1, count)]
        return b"".join([head[4:], *rest])


class Line:
    """A client that a helper thread uses, for a thread that must not wait for ever for a store that does not answer.

    Args:
        connect: Makes the client, in the helper thread.
    """

    def __init__(self, connect: Callable[[], Client]) -> None:
        """See the class; connects with the first question."""
        self._connect = connect
        self._client: Client | None = None
        self._helper = HelperThread("dcp_remote-store")

    def ask(self, question: Callable[[Client], T], look: Callable[[], None]) -> T:
        """Ask in the helper thread; see `HelperThread.run`. One of which this raised is not to be used any more."""

        def asked() -> T:
            if self._client is None:
                self._client = self._connect()
            return question(self._client)

        return self._helper.run(asked, look)

    def close(self) -> None:
        """End its thread."""
        self._helper.close()


def _part(key: str, number: int) -> str:
    return f"{key}+{number}" if number else key


def _slices(keys: Sequence[_Key]) -> Iterator[Sequence[_Key]]:
    for first in range(0, len(keys), _KEYS_PER_OPERATION):
        yield keys[first : first + _KEYS_PER_OPERATION]


def connection(store: dist.Store) -> dist.Store:
    """Another connection to it, for another thread; where there is no such thing, the store itself."""
    try:
        clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stub
    except (AttributeError, NotImplementedError):
        return store  # of somebody's own, or of an older torch
    below = clone
    while isinstance(below, dist.PrefixStore):
        below = below.underlying_store
    if isinstance(below, dist.TCPStore):  # a clone of another kind may be the original
        clone.set_timeout(_GET_TIMEOUT)
    return clone
