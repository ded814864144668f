"""The base of stores that wrap a store: every request passes one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias, TypeVar

from dcp_remote.errors import StorageError
from dcp_remote.storage.base import Buffer, Capabilities, Condition, Content, ObjectInfo, ObjectStore, Version
from dcp_remote.url import check_key

Verb: TypeAlias = Literal["head", "get", "get_into", "put", "list", "delete"]

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as it is about to be sent.

    Attributes:
        verb: Which of the six.
        keys: The key; of `list` the prefix, of `delete` all keys. Relative to the outermost wrapper, not to its child.
        size_bytes: How many bytes the caller brings or has room for; 0 where only the answer tells.
    """

    verb: Verb
    keys: tuple[str, ...]
    size_bytes: int = 0

    @property
    def key(self) -> str:
        """The key, or the first of several; empty if there is none."""
        return self.keys[0] if self.keys else ""


class WrappedStore:
    """A store that forwards everything to another, and sees each request in `_request`.

    Subclasses override `_request`, and what has more than one request to it. State that children share belongs into
    an object that they refer to: `child` copies this store's attributes. So does pickling, where they allow it.
    """

    def __init__(self, store: ObjectStore) -> None:
        """Wrap a store."""
        self._store = store
        self._prefix = ""

    def __repr__(self) -> str:
        """With what is wrapped."""
        return f"{type(self).__name__}({self._store!r})"

    @property
    def url(self) -> str:
        """That of the wrapped store."""
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        """Those of the wrapped store."""
        return self._store.capabilities

    def child(self, prefix: str) -> Self:
        """A wrapper around the wrapped store's child, which shares this one's state."""
        check_key(prefix)
        child = type(self).__new__(type(self))
        vars(child).update(vars(self), _store=self._store.child(prefix), _prefix=f"{self._prefix}{prefix}/")
        return child

    def explain_missing(self) -> str | None:
        """Why nothing is there, if the wrapped store knows more than that (no such bucket)."""
        explain = getattr(self._store, "explain_missing", None)
        return explain() if callable(explain) else None

    def unproven_server(self) -> str | None:
        """The server behind the wrapped store, if nobody knows whether conditional writes hold there."""
        unproven = getattr(self._store, "unproven_server", None)
        return unproven() if callable(unproven) else None

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return self._request(self._named("head", key), lambda: self._store.head(key))

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """See `ObjectStore.get`."""
        return self._request(self._named("get", key), lambda: self._store.get(key, limit_bytes=limit_bytes))

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """See `ObjectStore.get_into`."""
        request = self._named("get_into", key, size_bytes=len(buffer))
        self._request(request, lambda: self._store.get_into(key, start, buffer))

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """See `ObjectStore.put`."""
        request = self._named("put", key, size_bytes=sum(map(len, buffers)))
        return self._request(request, lambda: self._store.put(key, buffers, condition=condition))

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. One request here, however many pages the wrapped store asks for."""
        infos, first = self._request(self._named("list", prefix), lambda: _begin(self._store.list(prefix, after=after)))
        if first is not None:
            yield first
            yield from infos

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """See `ObjectStore.delete`. One request here."""
        return self._request(self._named("delete", *keys), lambda: self._store.delete(keys))

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        """Carry out one request by calling `send` as often as this wrapper sees fit, or raise."""
        return send()

    def _named(self, verb: Verb, *keys: str, size_bytes: int = 0) -> Request:
        return Request(verb=verb, keys=tuple(self._prefix + key for key in keys), size_bytes=size_bytes)


def _begin(infos: Iterator[ObjectInfo]) -> tuple[Iterator[ObjectInfo], ObjectInfo | None]:
    """Send the first request of a listing, which an iterator puts off until it is asked."""
    return infos, next(infos, None)
