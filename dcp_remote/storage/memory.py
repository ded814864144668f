"""A store in the memory of this process, and the model that other stores are tested against."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dcp_remote.common.arrays import Buffer
from dcp_remote.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
)
from dcp_remote.storage.base import (
    Capabilities,
    Condition,
    Content,
    ObjectInfo,
    PlacedStore,
    Version,
    make_oversize_error,
    make_short_error,
)
from dcp_remote.storage.url import ParsedUrl, check_list_prefix


@dataclass(frozen=True, slots=True)
class MemoryObject:
    """One object as it was put."""

    data: bytes
    version: Version
    modified_seconds: float


class MemorySpace:
    """Objects by full key that all `MemoryStore`s of one name share, under a lock. Tests read them past the store."""

    def __init__(self) -> None:
        """Begin empty."""
        self.objects: dict[str, MemoryObject] = {}
        self.lock = threading.Lock()
        self._writes = 0

    def put(self, key: str, data: bytes, *, condition: Condition, modified_seconds: float) -> Version:
        """Write an object if the key is in the state that `condition` names; return its version, always a new one."""
        with self.lock:
            found = self.objects.get(key)
            state: Condition = found.version if found is not None else "absent"
            if condition not in ("any", state):
                raise ConditionFailedError(
                    "The object is not in the state that the condition of this write names.",
                    key=key,
                    condition=condition,
                )
            self._writes += 1
            version = Version(etag=f'"{self._writes}"')
            self.objects[key] = MemoryObject(data, version, modified_seconds)
            return version


_spaces: dict[str, MemorySpace] = {}


class MemoryStore(PlacedStore):
    """Store in this process, whose objects live as long as the process, or until they are deleted.

    Args:
        name: Name in `memory://name`, by which stores share their objects. Without a name only the store and its
            children share objects, and cannot be pickled.
        prefix: Prefix of all keys, without slashes at its ends.
        clock: Returns the time in seconds since 1970, for modification times. Not pickled: a copy uses `time.time`.
    """

    capabilities = Capabilities(compare_and_swap=True, shared=False)

    def __init__(self, name: str | None = None, prefix: str = "", *, clock: Callable[[], float] = time.time) -> None:
        """Open the objects of that name, or an empty store."""
        self._name = name
        # The name of an anonymous store is not valid in a URL, so that the URL opens no other store.
        self._place = ParsedUrl("memory", "(anonymous)" if name is None else name, prefix)
        self._clock = clock
        self.space = MemorySpace() if name is None else _spaces.setdefault(name, MemorySpace())

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the name and prefix only: in another process the copy has the objects of that name there.

        Raises:
            InvalidArgumentError: The store has no name.
        """
        if self._name is None:
            raise InvalidArgumentError(
                "A MemoryStore without a name cannot be pickled: create it with one, MemoryStore(name)."
            )
        return MemoryStore, (self._name, self._place.prefix)

    def head(self, key: str) -> ObjectInfo:
        """Implement `ObjectStore.head`."""
        return _info(key, self._find(key))

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """Implement `ObjectStore.get`."""
        found = self._find(key)
        if len(found.data) > limit_bytes:
            raise make_oversize_error(self._named(key), size_bytes=len(found.data), limit_bytes=limit_bytes)
        return Content(data=found.data, version=found.version)

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Implement `ObjectStore.get_into`."""
        found = self._find(key)
        stop = start + len(buffer)
        if stop > len(found.data):
            raise make_short_error(self._named(key), size_bytes=len(found.data), start=start, stop=stop)
        buffer[:] = memoryview(found.data)[start:stop]

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """Implement `ObjectStore.put`. The buffers are copied once."""
        data = b"".join(buffers)
        return self.space.put(self._place.key(key), data, condition=condition, modified_seconds=self._clock())

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Implement `ObjectStore.list`. Yields the objects that exist when the first one is requested."""
        check_list_prefix(prefix)
        below = f"{self._place.prefix}/" if self._place.prefix else ""
        with self.space.lock:
            found = sorted(self.space.objects.items(), key=lambda item: item[0])
        for full_key, item in found:
            key = full_key.removeprefix(below)
            if full_key.startswith(below + prefix) and key > after:
                yield _info(key, item)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """Implement `ObjectStore.delete`. Never fails."""
        full_keys = [self._place.key(key) for key in keys]
        with self.space.lock:
            for full_key in full_keys:
                self.space.objects.pop(full_key, None)
        return {}

    def _find(self, key: str) -> MemoryObject:
        found = self.space.objects.get(self._place.key(key))
        if found is None:
            raise ObjectNotFoundError("There is no such object.", key=key, url=self.url)
        return found


def _info(key: str, found: MemoryObject) -> ObjectInfo:
    return ObjectInfo(
        key=key, size_bytes=len(found.data), version=found.version, modified_seconds=found.modified_seconds
    )
