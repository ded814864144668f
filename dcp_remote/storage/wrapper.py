"""The base class of wrapper stores, which pass every request through one method."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias, TypeVar

from dcp_remote.common.arrays import Buffer
from dcp_remote.errors import DcpRemoteError, StorageError
from dcp_remote.storage.base import Capabilities, Condition, Content, ObjectInfo, ObjectStore, Version
from dcp_remote.storage.url import check_key

Verb: TypeAlias = Literal["head", "get", "get_into", "put", "list", "delete"]

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Request:
    """Request that is about to be sent. Keys are relative to the topmost wrapper, also in requests of its children."""

    verb: Verb
    keys: tuple[str, ...]  # key; for `list` the prefix, for `delete` all keys
    size_bytes: int = 0  # to send or to read; 0 where only the answer shows the size

    @property
    def key(self) -> str:
        """First key; empty if there is none."""
        return self.keys[0] if self.keys else ""


class SharedState:
    """Lock and state that a wrapper store shares with its children; a pickled copy begins anew."""

    def __init__(self) -> None:
        """Make the lock."""
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle no state."""
        return type(self), ()


class WrappedStore:
    """Store that forwards every request to the store that it wraps, through `_request`.

    Subclasses override `_request`, and those verbs that they send as more than one request. `child` and pickling copy
    the attributes, so state that children share belongs in an object that the attributes refer to.
    """

    def __init__(self, store: ObjectStore) -> None:
        """Wrap a store."""
        self._store = store
        self._prefix = ""

    def __repr__(self) -> str:
        """Return the class and the wrapped store."""
        return f"{type(self).__name__}({self._store!r})"

    @property
    def url(self) -> str:
        """URL of the wrapped store."""
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of the wrapped store."""
        return self._store.capabilities

    @property
    def latency_seconds(self) -> float:
        """Latency of the wrapped store; 0 if it measures none."""
        seconds: float = getattr(self._store, "latency_seconds", 0.0)
        return seconds

    def child(self, prefix: str) -> Self:
        """Return a wrapper of the wrapped store's child, which shares this wrapper's state."""
        check_key(prefix)
        return self._wrap(self._store.child(prefix), f"{prefix}/")

    def parent(self) -> Self | None:
        """Return a wrapper of the store of the folder above the wrapped store; None if there is none, or unknown."""
        make_parent = getattr(self._store, "parent", None)
        above = make_parent() if callable(make_parent) else None
        return self._wrap(above, "../") if above is not None else None

    def _wrap(self, store: ObjectStore, path: str) -> Self:
        wrapper = type(self).__new__(type(self))
        vars(wrapper).update(vars(self), _store=store, _prefix=f"{self._prefix}{path}")
        return wrapper

    def explain_missing(self) -> DcpRemoteError | None:
        """Return the wrapped store's error for a missing bucket, or another cause of missing objects; else None."""
        explain = getattr(self._store, "explain_missing", None)
        return explain() if callable(explain) else None

    def find_unproven_server(self) -> str | None:
        """Return the server of the wrapped store if its conditional writes are unproven, else None."""
        unproven = getattr(self._store, "find_unproven_server", None)
        return unproven() if callable(unproven) else None

    def head(self, key: str) -> ObjectInfo:
        """Implement `ObjectStore.head`."""
        return self._request(self._named("head", key), lambda: self._store.head(key))

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """Implement `ObjectStore.get`."""
        return self._request(self._named("get", key), lambda: self._store.get(key, limit_bytes=limit_bytes))

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Implement `ObjectStore.get_into`."""
        request = self._named("get_into", key, size_bytes=len(buffer))
        self._request(request, lambda: self._store.get_into(key, start, buffer))

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """Implement `ObjectStore.put`."""
        request = self._named("put", key, size_bytes=sum(map(len, buffers)))
        return self._request(request, lambda: self._store.put(key, buffers, condition=condition))

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Implement `ObjectStore.list`. Passes `_request` once, whatever the number of pages."""
        infos, first = self._request(self._named("list", prefix), lambda: _begin(self._store.list(prefix, after=after)))
        if first is not None:
            yield first
            yield from infos

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """Implement `ObjectStore.delete`. Passes `_request` once."""
        return self._request(self._named("delete", *keys), lambda: self._store.delete(keys))

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        """Carry out one request by calling `send` any number of times, or raise."""
        return send()

    def _named(self, verb: Verb, *keys: str, size_bytes: int = 0) -> Request:
        return Request(verb=verb, keys=tuple(self._prefix + key for key in keys), size_bytes=size_bytes)


def _begin(infos: Iterator[ObjectInfo]) -> tuple[Iterator[ObjectInfo], ObjectInfo | None]:
    """Send the first request of a listing, which its iterator delays until the first item is requested."""
    return infos, next(infos, None)
