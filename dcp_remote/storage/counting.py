"""A wrapper store that counts requests and bytes, for reports."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

from dcp_remote.errors import TransientStorageError
from dcp_remote.storage.base import Content, ObjectStore
from dcp_remote.storage.rereads import is_reread
from dcp_remote.storage.wrapper import Request, SharedState, WrappedStore

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of requests and bytes."""

    requests: int = 0  # with failed attempts; a listing counts as one, whatever its number of pages
    put_bytes: int = 0  # of the buffers of all `put` requests
    got_bytes: int = 0  # requested by `get_into`, and received by `get`
    failed: int = 0  # requests that raised `TransientStorageError`, whether or not they were repeated
    reread: int = 0  # requests that repeat a read whose bytes did not match their digest

    def plus(self, more: Counts) -> Counts:
        """Return the sums of these counts and others."""
        return Counts(*map(operator.add, _values_of(self), _values_of(more)))

    def since(self, earlier: Counts) -> Counts:
        """Return the increase from earlier counts to these."""
        return Counts(*map(operator.sub, _values_of(self), _values_of(earlier)))


_values_of = operator.attrgetter(*(field.name for field in fields(Counts)))  # `astuple` takes ten times as long


class _Tally(SharedState):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.under_way = 0


class CountingStore(WrappedStore):
    """Store that counts its requests and those of its children, from any thread. Pickled with its counts at zero."""

    def __init__(self, store: ObjectStore) -> None:
        """Wrap a store."""
        super().__init__(store)
        self._tally = _Tally()

    @property
    def uncounted(self) -> ObjectStore:
        """Wrapped store, for requests that belong in no report."""
        return self._store

    @property
    def counts(self) -> Counts:
        """Requests and bytes since this store was created or unpickled."""
        with self._tally.lock:
            return self._tally.counts

    @property
    def requests_under_way(self) -> int:
        """Number of requests that have begun and not ended."""
        with self._tally.lock:
            return self._tally.under_way

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        put_bytes, got_bytes = (request.size_bytes, 0) if request.verb == "put" else (0, request.size_bytes)
        self._count(Counts(requests=1, put_bytes=put_bytes, got_bytes=got_bytes, reread=int(is_reread())), begun=1)
        try:
            answer = send()
        except TransientStorageError:
            self._count(Counts(failed=1))
            raise
        finally:
            self._count(Counts(), begun=-1)
        if isinstance(answer, Content):
            self._count(Counts(got_bytes=len(answer.data)))
        return answer

    def _count(self, more: Counts, *, begun: int = 0) -> None:
        with self._tally.lock:
            self._tally.counts = self._tally.counts.plus(more)
            self._tally.under_way += begun
