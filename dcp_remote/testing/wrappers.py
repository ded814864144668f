"""Stores that watch another store, or make it fail.

Both wrap any store and are wrapped by any: outside a `RetryingStore` a `RecordingStore` counts what its caller asks,
inside what is sent, and inside a `FaultyStore` what arrives.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypeVar

from dcp_remote.errors import TransientStorageError
from dcp_remote.storage.base import Content, ObjectStore
from dcp_remote.storage.wrapper import Request, Verb, WrappedStore

_Answer = TypeVar("_Answer")

# Whether a request is hit, by verb, key and its number among all requests of the store (from 1).
Predicate: TypeAlias = Callable[[Verb, str, int], bool]


class _Log:
    """What a `RecordingStore` and its children share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests: list[Request] = []

    def __reduce__(self) -> tuple[object, ...]:
        return _Log, ()


class RecordingStore(WrappedStore):
    """Keeps a record of every request, its children's too, in the order in which they were sent.

    Pickled without its records.
    """

    def __init__(self, store: ObjectStore) -> None:
        """Wrap a store."""
        super().__init__(store)
        self._log = _Log()

    @property
    def requests(self) -> list[Request]:
        """A copy of the record: sizes are those of what was sent or, once it was answered, received."""
        with self._log.lock:
            return list(self._log.requests)

    @property
    def calls(self) -> list[tuple[Verb, str]]:
        """The record as pairs of verb and key."""
        return [(request.verb, request.key) for request in self.requests]

    def count(self, verb: Verb | None = None) -> int:
        """How many requests there were, of this verb or of all."""
        return sum(verb in (None, request.verb) for request in self.requests)

    def size_bytes(self, verb: Verb | None = None) -> int:
        """How many bytes they carried, both ways."""
        return sum(request.size_bytes for request in self.requests if verb in (None, request.verb))

    def clear(self) -> None:
        """Forget. For use between requests, not during them."""
        with self._log.lock:
            self._log.requests.clear()

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        with self._log.lock:
            number = len(self._log.requests)
            self._log.requests.append(request)
        answer = send()
        if isinstance(answer, Content):
            with self._log.lock:
                self._log.requests[number] = dataclasses.replace(request, size_bytes=len(answer.data))
        return answer


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        lost: The "request", which then is not carried out; or the "response", after it was.
        when: Which requests are hit. Of a `delete` the request is hit if one of its keys is.
        persistent: Hit every such request, not only the first.
        error: Makes what is raised instead of a `TransientStorageError`.
    """

    lost: Literal["request", "response"]
    when: Predicate
    persistent: bool = False
    error: Callable[[], BaseException] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Nth:
    number: int
    onwards: bool

    def __call__(self, verb: Verb, key: str, number: int) -> bool:
        return number >= self.number if self.onwards else number == self.number


def nth(
    number: int,
    lost: Literal["request", "response"],
    *,
    persistent: bool = False,
    error: Callable[[], BaseException] | None = None,
) -> Fault:
    """The `number`-th request of a store is hit (from 1); if `persistent`, every later one as well.

    For a fault loop: fail the first request, then the second, until a run is through before its fault is reached
    (`FaultyStore.hits` is empty).
    """
    return Fault(lost=lost, when=_Nth(number, onwards=persistent), persistent=persistent, error=error)


def matching(
    when: Predicate,
    lost: Literal["request", "response"],
    *,
    persistent: bool = False,
    error: Callable[[], BaseException] | None = None,
) -> Fault:
    """The first request for which `when(verb, key, number)` is true is hit; if `persistent`, every one."""
    return Fault(lost=lost, when=when, persistent=persistent, error=error)


class _Faults:
    """What a `FaultyStore` and its children share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.spent: set[int] = set()
        self.hits: list[Request] = []

    def __reduce__(self) -> tuple[object, ...]:
        return _Faults, ()


class FaultyStore(WrappedStore):
    """Fails as it is told.

    Pickled with its faults (whose predicates must be picklable then), its counter anew.

    Args:
        store: What answers when nothing goes wrong.
        faults: The first that hits a request is what happens to it.
    """

    def __init__(self, store: ObjectStore, faults: Sequence[Fault]) -> None:
        """See the class."""
        super().__init__(store)
        self._plan = tuple(faults)
        self._faults = _Faults()

    @property
    def hits(self) -> list[Request]:
        """The requests that were hit so far."""
        with self._faults.lock:
            return list(self._faults.hits)

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        fault = self._next_fault(request)
        if fault is None:
            return send()
        if fault.lost == "response":
            send()
        if fault.error is not None:
            raise fault.error()
        raise TransientStorageError(
            f"An injected fault: the {fault.lost} was lost.", verb=request.verb, key=request.key
        )

    def _next_fault(self, request: Request) -> Fault | None:
        with self._faults.lock:
            self._faults.number += 1
            number = self._faults.number
            for index, fault in enumerate(self._plan):
                if index in self._faults.spent:
                    continue
                if any(fault.when(request.verb, key, number) for key in request.keys):
                    if not fault.persistent:
                        self._faults.spent.add(index)
                    self._faults.hits.append(request)
                    return fault
        return None
