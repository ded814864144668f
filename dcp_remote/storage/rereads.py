"""Reads repeated because the bytes did not match their digest.

A bit that flips on the way is no damage. The bytes are read once more before they are called damaged, by another way
where there is one: by obstore instead of a direct read, from the store instead of another rank.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.storage.base import Content, ObjectStore
from dcp_remote.storage.wrapper import Request, WrappedStore

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_Decoded = TypeVar("_Decoded")


class _Own(threading.local):
    """State of each thread: the kind of the read under way."""

    is_reread: bool = False


_own = _Own()


def is_reread() -> bool:
    """Return whether this thread repeats a read, which must not take the way of the first one."""
    return _own.is_reread


class RereadingStore(WrappedStore):
    """Store whose requests are rereads for all stores below it; logs the first of them as a warning."""

    def __init__(self, store: ObjectStore) -> None:
        """Wrap a store."""
        super().__init__(store)
        self._level = logging.WARNING

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        level, self._level = self._level, logging.DEBUG
        logger.log(
            level,
            "Bytes do not match their digest and are read once more: they changed on the way, or in the store. "
            "url=%s key=%s",
            self.url,
            request.key,
        )
        before, _own.is_reread = _own.is_reread, True
        try:
            return send()
        finally:
            _own.is_reread = before


def get_decoded(
    store: ObjectStore, key: str, decode: Callable[[bytes], _Decoded], *, limit_bytes: int
) -> tuple[Content, _Decoded]:
    """Read a whole object and decode it; one GET, and one more if the first answer is damaged.

    Args:
        store: Store to ask.
        key: Name of the object.
        decode: Decoder, called with the bytes; raises CorruptCheckpointError if they are damaged.
        limit_bytes: Size in bytes above which an object is refused.

    Raises:
        ObjectNotFoundError: There is no such object.
        CorruptCheckpointError: The object is larger than `limit_bytes`, or both answers are damaged.
    """
    content = store.get(key, limit_bytes=limit_bytes)
    try:
        return content, decode(content.data)
    except CorruptCheckpointError:
        content = RereadingStore(store).get(key, limit_bytes=limit_bytes)
        return content, decode(content.data)
