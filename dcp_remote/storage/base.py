"""What is demanded of a store, and nothing more.

A checkpoint needs six synchronous verbs and two guarantees. The guarantees: a `put` that was answered is seen by every
later `get`, whole; and of any number of conditional puts of one key, at most one that names a given state succeeds.
Retries, faults, latency and counting are stores that wrap a store.

Keys are relative to the URL that the store was opened with: `/`-separated, without a leading or trailing slash, `.`,
`..` or empty parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from dcp_remote.errors import StorageError

# What can be sent or read into: one-dimensional, contiguous, of bytes. `memoryview` and uint8 numpy arrays are such.
Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Version:
    """Opaque identity of an object's content: passed back whole to the store that gave it, never looked into.

    Attributes:
        etag: In quotes, also where the store gave it without (Azure's listings).
        generation: Google Cloud's generation, which its listings do not tell; None elsewhere.
    """

    etag: str | None
    generation: str | None = None


# The state that a key must be in for a put to be carried out: absent, exactly this version, or any.
Condition: TypeAlias = Version | Literal["absent", "any"]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object without giving its content."""

    key: str
    size_bytes: int
    version: Version
    modified_seconds: float  # since 1970, by the clock of the store


@dataclass(frozen=True, slots=True)
class Content:
    """A whole object."""

    data: bytes
    version: Version


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do beyond the contract's minimum, and where it can be seen from.

    Attributes:
        compare_and_swap: `put(condition=Version)` is atomic. Without it a store serves plain saves and loads, and
            refuses overwrite, retire and gc.
        shared: Other processes of this job, on this host or another, see the same objects.
        swap_refusal: Why `compare_and_swap` is False, for the error message; empty otherwise.
    """

    compare_and_swap: bool
    shared: bool
    swap_refusal: str = ""


@runtime_checkable
class ObjectStore(Protocol):
    """A flat space of immutable byte strings under one URL. Implementations are safe to call from many threads.

    A store pickles its configuration, never a connection. Every verb may raise `TransientStorageError` (the outcome is
    not known; the same request may be sent again), `PermissionDeniedError` or `StorageError`.
    """

    @property
    def url(self) -> str:
        """Where keys are relative to, in canonical form, without credentials."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do; never costs a request."""
        ...

    def child(self, prefix: str) -> ObjectStore:
        """The same store, with keys relative to `prefix` below this one's. Costs nothing."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Describe one object.

        Raises:
            ObjectNotFoundError: There is none.
        """
        ...

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """Read a whole object in one request.

        Args:
            key: Its name.
            limit_bytes: An object larger than this is refused before its body is read.

        Raises:
            ObjectNotFoundError: There is none.
            CorruptCheckpointError: It is larger than `limit_bytes`.
        """
        ...

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Read `len(buffer)` bytes from `start` on into `buffer`, in one request; `len(buffer)` is at least 1.

        On an error the content of `buffer` is undefined.

        Raises:
            ObjectNotFoundError: There is no such object.
            CorruptCheckpointError: The object ends before `start + len(buffer)`.
        """
        ...

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """Write one object whole, in one request; nobody ever sees a part of it.

        The buffers are sent one after another and not copied where the store can help it; they must not change until
        the call returns.

        Raises:
            ConditionFailedError: The key is not in the state that `condition` asks for. After a lost answer that may
                be this very put, carried out earlier.
            InvalidArgumentError: The store cannot compare and swap, and `condition` is a `Version`.
        """
        ...

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose keys begin with `prefix` and come after `after` (Unicode code points), ordered by key.

        Keys beyond ASCII, which are not ours, come in the store's own order: see `may_follow`. Never called on the path
        of a save or a load.
        """
        ...

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """Delete many objects; one that does not exist counts as deleted.

        Returns:
            The keys that could not be deleted, each with its reason.
        """
        ...


def quoted(etag: str | None) -> str | None:
    """An ETag in its one form, which is in quotes."""
    return etag if etag is None or etag.endswith('"') else f'"{etag}"'


def may_follow(key: str, last: str) -> bool:
    """Whether a listing may give `key` behind `last`: by code points, or by UTF-16 as some stores order their keys.

    The two differ only where both keys go beyond ASCII. So whoever goes on behind a key misses none of ours.
    """
    return key > last or key.encode("utf-16-be", "surrogatepass") > last.encode("utf-16-be", "surrogatepass")
