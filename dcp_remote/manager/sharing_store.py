"""A wrapper store whose documents one rank of a host reads for all ranks of the host."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from dcp_remote.format.keys import MANIFESTS_PREFIX
from dcp_remote.storage.base import Content, ObjectStore
from dcp_remote.storage.rereads import is_reread
from dcp_remote.storage.wrapper import WrappedStore


class SharingStore(WrappedStore):
    """Store that gets manifests and segments by `Collective.share`; all else, and rereads, from the wrapped store.

    For reads that all ranks make between the same two rounds. The content of these objects never changes.
    """

    def __init__(self, store: ObjectStore, share: Callable[[str, Callable[[], bytes]], bytes]) -> None:
        """Wrap a store."""
        super().__init__(store)
        self._share = share

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """Implement `ObjectStore.get`."""
        if is_reread() or not key.startswith(MANIFESTS_PREFIX):
            return self._store.get(key, limit_bytes=limit_bytes)
        found = self._share(f"{self.url}/{key}", lambda: pickle.dumps(self._store.get(key, limit_bytes=limit_bytes)))
        content: Content = pickle.loads(found)  # noqa: S301  # of this user's process
        return content

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Implement `ObjectStore.get_into`."""

        def read() -> bytes:
            self._store.get_into(key, start, buffer)
            return bytes(buffer)

        if is_reread():
            read()
        else:
            buffer[:] = self._share(f"{self.url}/{key} {start}+{len(buffer)}", read)
