"""Stores that watch another store, or make it fail.

Both wrap any store and are wrapped by any: outside a `RetryingStore` a `RecordingStore` counts what its caller asks,
inside what is sent, and inside a `FaultyStore` what arrives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypeVar

from dcp_remote.errors import DcpRemoteError, TransientStorageError
from dcp_remote.storage.base import Buffer, Condition, Content, ObjectStore, Version
from dcp_remote.storage.wrapper import Request, Verb, WrappedStore

_Answer = TypeVar("_Answer")

# What is lost: the request, which then is never carried out; the response, after it was; or, of a put or a delete, the
# response of a request that is still on its way, and is carried out later. What is read late is read for nobody.
Lost: TypeAlias = Literal["request", "response", "late"]

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
        lost: See `Lost`.
        when: Which requests are hit. Of a `delete` the request is hit if one of its keys is.
        persistent: Hit every such request, not only the first.
        error: Makes what is raised instead of a `TransientStorageError`.
        later_by: How many requests come before one that is "late"; None if it waits for `FaultyStore.settle`.
    """

    lost: Lost
    when: Predicate
    persistent: bool = False
    error: Callable[[], BaseException] | None = None
    later_by: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Nth:
    number: int
    onwards: bool

    def __call__(self, verb: Verb, key: str, number: int) -> bool:
        return number >= self.number if self.onwards else number == self.number


def nth(
    number: int,
    lost: Lost,
    *,
    persistent: bool = False,
    error: Callable[[], BaseException] | None = None,
    later_by: int | None = None,
) -> Fault:
    """The `number`-th request of a store is hit (from 1); if `persistent`, every later one as well.

    For a fault loop: fail the first request, then the second, until a run is through before its fault is reached
    (`FaultyStore.hits` is empty).
    """
    when = _Nth(number, onwards=persistent)
    return Fault(lost=lost, when=when, persistent=persistent, error=error, later_by=later_by)


def matching(
    when: Predicate,
    lost: Lost,
    *,
    persistent: bool = False,
    error: Callable[[], BaseException] | None = None,
    later_by: int | None = None,
) -> Fault:
    """The first request for which `when(verb, key, number)` is true is hit; if `persistent`, every one."""
    return Fault(lost=lost, when=when, persistent=persistent, error=error, later_by=later_by)


class _Faults:
    """What a `FaultyStore` and its children share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.spent: set[int] = set()
        self.hits: list[Request] = []
        self.late: list[tuple[float, Callable[[], object]]] = []

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

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """See `ObjectStore.put`. What may be carried out late has left its buffers behind."""
        if any(fault.lost == "late" for fault in self._plan):
            buffers = [bytes(buffer) for buffer in buffers]
        return super().put(key, buffers, condition=condition)

    def settle(self) -> None:
        """Carry out what is late: nothing is on its way any more."""
        self._carry_out(upto=math.inf)

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        number, fault = self._next_fault(request)
        self._carry_out(upto=number)
        if fault is None:
            return send()
        if fault.lost == "response":
            send()
        if fault.lost == "late" and request.verb in ("put", "delete"):
            due = math.inf if fault.later_by is None else number + fault.later_by + 1
            with self._faults.lock:
                self._faults.late.append((due, send))
        if fault.error is not None:
            raise fault.error()
        lost = "request" if fault.lost == "request" else "response"
        raise TransientStorageError(f"An injected fault: the {lost} was lost.", verb=request.verb, key=request.key)

    def _carry_out(self, *, upto: float) -> None:
        with self._faults.lock:
            due = [send for number, send in self._faults.late if number <= upto]
            self._faults.late = [(number, send) for number, send in self._faults.late if number > upto]
        for send in due:
            with contextlib.suppress(DcpRemoteError):  # whatever it is answered, nobody hears it
                send()

    def _next_fault(self, request: Request) -> tuple[int, Fault | None]:
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
                    return number, fault
            return number, None
