"""Reads repeated because the bytes did not match their digest.

A bit that flipped in transit is no damage of the checkpoint. So the bytes are read once more before they are reported
as damaged, by another path if there is one: by obstore instead of a direct read, from the store instead of a rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.storage.base import Content, ObjectStore
from dcp_remote.storage.wrapper import Request, WrappedStore

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_Decoded = TypeVar("_Decoded")


# A context variable: a thread that sends a request for another one runs in a copy of that thread's context.
_is_reread: ContextVar[bool] = ContextVar("dcp_remote_is_reread", default=False)


def is_reread() -> bool:
    """Return whether this request repeats a read, and so must not take the path of the first one."""
    return _is_reread.get()


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
            "Bytes do not match their digest and are read once more: they changed in transit, or in the store. "
            "url=%s key=%s",
            self.url,
            request.key,
        )
        token = _is_reread.set(True)
        try:
            return send()
        finally:
            _is_reread.reset(token)


def get_decoded(
    store: ObjectStore, key: str, decode: Callable[[bytes], _Decoded], *, limit_bytes: int
) -> tuple[Content, _Decoded]:
    """Read a whole object and decode it; one GET, and one more if `decode` finds the first answer damaged."""
    content = store.get(key, limit_bytes=limit_bytes)
    try:
        return content, decode(content.data)
    except CorruptCheckpointError:
        content = RereadingStore(store).get(key, limit_bytes=limit_bytes)
        return content, decode(content.data)
