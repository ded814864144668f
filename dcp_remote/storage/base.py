"""The store contract: everything that dcp_remote requires of an object store.

A store has six synchronous verbs and gives two guarantees. Every `get` that begins after a `put` was answered returns
the whole object; and of all conditional puts of one key that name the same state, at most one succeeds. Retries,
faults, latency and counting are wrapper stores.

Keys are relative to the URL that the store was opened with: `/`-separated, without a leading or trailing slash, `.`,
`..` or empty parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self, TypeAlias, runtime_checkable

from dcp_remote.common.arrays import Buffer
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, StorageError
from dcp_remote.storage.url import ParsedUrl, check_key


@dataclass(frozen=True, slots=True)
class Version:
    """Opaque identity of an object's content: passed back to the store that returned it, never interpreted.

    Attributes:
        etag: ETag in quotes, also if the store returned it without (Azure's listings).
        generation: Generation of Google Cloud Storage, whose listings do not include it; None elsewhere.
    """

    etag: str | None
    generation: str | None = None


# State that a key must be in for a put to be carried out: absent, exactly this version, or any.
Condition: TypeAlias = Version | Literal["absent", "any"]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Metadata of an object.

    Attributes:
        key: Name of the object.
        size_bytes: Size of its content.
        version: Identity of its content.
        modified_seconds: Time of the last write, in seconds since 1970 by the clock of the store.
    """

    key: str
    size_bytes: int
    version: Version
    modified_seconds: float


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a whole object, and its version."""

    data: bytes
    version: Version


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of a store beyond the contract's minimum.

    Attributes:
        compare_and_swap: True if `put(condition=Version)` is atomic. Without it a store serves single
            checkpoints that are never replaced; runs, `overwrite=True` and gc are refused.
        shared: True if other processes of this job, on any host, see the same objects.
        swap_refusal: Reason why `compare_and_swap` is False, for error messages; empty otherwise.
    """

    compare_and_swap: bool
    shared: bool
    swap_refusal: str = ""


@runtime_checkable
class ObjectStore(Protocol):
    """Flat space of immutable byte strings under one URL; safe to use from many threads.

    Pickles its configuration, never a connection. Every verb may raise `TransientStorageError` (the outcome is unknown,
    and the same request may be sent again), `PermissionDeniedError` or `StorageError`.
    """

    @property
    def url(self) -> str:
        """URL that keys are relative to, in canonical form and without credentials."""

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of this store. Sends no request."""

    def child(self, prefix: str) -> ObjectStore:
        """Return this store with keys relative to `prefix`. Sends no request."""

    def head(self, key: str) -> ObjectInfo:
        """Return the metadata of one object.

        Raises:
            ObjectNotFoundError: There is no such object.
        """

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """Read a whole object in one request.

        Args:
            key: Name of the object.
            limit_bytes: Size above which an object is refused before its body is read.

        Raises:
            ObjectNotFoundError: There is no such object.
            CorruptCheckpointError: The object is larger than `limit_bytes`.
        """

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Read `len(buffer)` bytes, at least 1, from offset `start` into `buffer`, in one request.

        After an error the content of `buffer` is undefined.

        Raises:
            ObjectNotFoundError: There is no such object.
            CorruptCheckpointError: The object ends before `start + len(buffer)`.
        """

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """Write one object atomically, in one request: readers see the whole object or the state before.

        The buffers are sent one after another, without a copy where the store allows it; they must not change until
        the call returns.

        Raises:
            ConditionFailedError: The key is not in the state that `condition` names. If an earlier answer was lost, an
                earlier attempt of this same put may be the reason.
            InvalidArgumentError: `condition` is a `Version`, and the store cannot compare and swap.
        """

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose keys begin with `prefix` and are greater than `after`, ordered by key.

        The order is that of Unicode code points; keys beyond ASCII, which dcp_remote never writes, come in the store's
        own order (see `may_follow`). Never called on the path of a save or a load.
        """

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """Delete many objects; a missing object counts as deleted.

        Returns:
            Errors of the keys that could not be deleted, by key.
        """


class PlacedStore:
    """Base class of stores that have a URL in parts, `_place`: the URL as text, for objects, and for children."""

    _place: ParsedUrl

    def __repr__(self) -> str:
        """Return the class and the URL, without options: some are secrets."""
        return f"{type(self).__name__}({self.url!r})"

    @property
    def url(self) -> str:
        """URL of this store in canonical form: percent-encoded for files, without the endpoint for clouds."""
        return self._place.canonical

    def child(self, prefix: str) -> Self:
        """Implement `ObjectStore.child`. The child has all attributes of this store but the URL."""
        child = type(self).__new__(type(self))
        vars(child).update(vars(self), _place=self._place.child(prefix))
        return child

    def _named(self, key: str) -> str:
        """Return the URL of an object or prefix; that of the store if `key` is empty."""
        return f"{self.url}/{key}" if key else self.url


FOREIGN_KEY = (
    "An object below this URL has a key that no checkpoint has, with empty, `.` or `..` parts, a backslash or a "
    "control character. Remove it."
)


def make_oversize_error(url: str, *, size_bytes: int, limit_bytes: int) -> CorruptCheckpointError:
    """Return the error for an object that is larger than `limit_bytes`, the limit for its kind."""
    return CorruptCheckpointError(
        "The object is larger than any object of dcp_remote with this key.",
        url=url,
        size_bytes=size_bytes,
        limit_bytes=limit_bytes,
    )


def make_short_error(url: str, *, size_bytes: int | None, start: int, stop: int) -> CorruptCheckpointError:
    """Return the error for an object of `size_bytes` (None: unknown) that ends before the bytes from start to stop."""
    return CorruptCheckpointError(
        "The object ends before the range that is to be read.",
        url=url,
        size_bytes=size_bytes,
        start=start,
        stop=stop,
    )


def quote_etag(etag: str | None) -> str | None:
    """Return an ETag in quotes."""
    return etag if etag is None or etag.endswith('"') else f'"{etag}"'


def may_follow(key: str, last: str) -> bool:
    """Return whether a listing may give `key` after `last`, by code points or by UTF-16, as some stores order keys.

    The two orders differ only where both keys go beyond ASCII, so a listing that resumes after a key misses no key of
    dcp_remote.
    """
    return key > last or key.encode("utf-16-be", "surrogatepass") > last.encode("utf-16-be", "surrogatepass")


def check_listing(
    infos: Iterable[ObjectInfo], *, url: str, prefix: str, after: str, checks_keys: bool = True
) -> Iterator[ObjectInfo]:
    """Yield the objects of a listing, and refuse a wrong one: what it leaves out, or adds, could be deleted by mistake.

    Raises:
        StorageError: A key is out of order, does not begin with `prefix`, or is one that no checkpoint has, unless
            `checks_keys` is False.
    """
    for info in infos:
        if not may_follow(info.key, after) or not info.key.startswith(prefix):
            raise StorageError("The store does not list its keys in order.", url=f"{url}/{info.key}", after=after)
        try:
            if checks_keys:
                check_key(info.key)
        except InvalidArgumentError as error:
            raise StorageError(FOREIGN_KEY, url=url, key=info.key) from error
        after = info.key
        yield info
