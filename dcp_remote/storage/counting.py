"""A store that counts what is asked of it, for reports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dcp_remote.errors import TransientStorageError
from dcp_remote.storage.base import Content, ObjectStore
from dcp_remote.storage.rereads import is_reread
from dcp_remote.storage.wrapper import Request, WrappedStore

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests and bytes so far.

    Attributes:
        requests: Those that failed and were sent again included; a list counts as one, however many pages it has.
        put_bytes: Sent.
        got_bytes: Asked for, or received.
        failed: Requests that failed for now, and so were sent again or were the last attempt.
        reread: Requests that repeat a read whose bytes did not match their digest.
    """

    requests: int = 0
    put_bytes: int = 0
    got_bytes: int = 0
    failed: int = 0
    reread: int = 0

    def plus(self, more: Counts) -> Counts:
        """Both together."""
        return Counts(
            self.requests + more.requests,
            self.put_bytes + more.put_bytes,
            self.got_bytes + more.got_bytes,
            self.failed + more.failed,
            self.reread + more.reread,
        )

    def since(self, earlier: Counts) -> Counts:
        """What came on top."""
        return Counts(
            self.requests - earlier.requests,
            self.put_bytes - earlier.put_bytes,
            self.got_bytes - earlier.got_bytes,
            self.failed - earlier.failed,
            self.reread - earlier.reread,
        )


class _Tally:
    """What a store and its children share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts = Counts()

    def __reduce__(self) -> tuple[object, ...]:
        return _Tally, ()


class CountingStore(WrappedStore):
    """Counts every request, its children's too, from any thread. Pickled with its counts at zero."""

    def __init__(self, store: ObjectStore) -> None:
        """Wrap a store."""
        super().__init__(store)
        self._tally = _Tally()

    @property
    def uncounted(self) -> ObjectStore:
        """Store that is wrapped: for requests that no report is to count."""
        return self._store

    @property
    def counts(self) -> Counts:
        """So far."""
        with self._tally.lock:
            return self._tally.counts

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        put = request.verb == "put"
        size_bytes = request.size_bytes
        put_bytes, got_bytes = (size_bytes, 0) if put else (0, size_bytes)
        self._count(Counts(requests=1, put_bytes=put_bytes, got_bytes=got_bytes, reread=int(is_reread())))
        try:
            answer = send()
        except TransientStorageError:
            self._count(Counts(failed=1))
            raise
        if isinstance(answer, Content):
            self._count(Counts(got_bytes=len(answer.data)))
        return answer

    def _count(self, more: Counts) -> None:
        with self._tally.lock:
            self._tally.counts = self._tally.counts.plus(more)
