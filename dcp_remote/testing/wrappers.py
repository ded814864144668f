"""Wrapper stores for tests: one records requests, one injects faults.

Wrappers can be nested in any order: a `RecordingStore` around a `RetryingStore` records the caller's requests, inside
it every attempt, and inside a `FaultyStore` the requests that reach the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeAlias, TypeVar

from dcp_remote.common.arrays import Buffer
from dcp_remote.errors import DcpRemoteError, TransientStorageError
from dcp_remote.storage.base import Condition, Content, ObjectStore, Version
from dcp_remote.storage.wrapper import Request, SharedState, Verb, WrappedStore

_Answer = TypeVar("_Answer")

# Message that a fault loses. "request": the request is never carried out. "response": the request is carried out and
# its answer lost. "late": the answer is lost and the request, if a put or delete, is carried out later; a read is not.
Lost: TypeAlias = Literal["request", "response", "late"]

# Function of verb, key and number (among all requests of the store, from 1) that is true for requests to hit.
Predicate: TypeAlias = Callable[[Verb, str, int], bool]


class _RecordLog(SharedState):
    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []


class RecordingStore(WrappedStore):
    """Records every request to this store and its children, in the order in which they are sent.

    The records are not pickled.
    """

    def __init__(self, store: ObjectStore) -> None:
        """Wrap a store."""
        super().__init__(store)
        self._log = _RecordLog()

    @property
    def requests(self) -> list[Request]:
        """Copy of the records; sizes are bytes sent or, once a read was answered, bytes received."""
        with self._log.lock:
            return list(self._log.requests)

    @property
    def calls(self) -> list[tuple[Verb, str]]:
        """Verb and key of each record."""
        return [(request.verb, request.key) for request in self.requests]

    def count(self, verb: Verb | None = None) -> int:
        """Return the number of requests of this verb, or of all."""
        return sum(verb in (None, request.verb) for request in self.requests)

    def size_bytes(self, verb: Verb | None = None) -> int:
        """Return the bytes that requests of this verb, or all requests, carried in both directions."""
        return sum(request.size_bytes for request in self.requests if verb in (None, request.verb))

    def clear(self) -> None:
        """Delete all records. No request may be pending."""
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
    """Fault to inject.

    Attributes:
        when: Function of verb, key and number that returns whether to hit a request. A `delete` is hit if this is true
            for any of its keys.
        lost: What is lost: "request", "response", or "late".
        persistent: True to hit every such request, False to hit only the first.
        error: Function that returns the exception to raise; None for a `TransientStorageError`.
        later_by: Number of requests that overtake one that is "late"; None to hold it until `FaultyStore.settle`.
    """

    when: Predicate
    lost: Lost
    persistent: bool = False
    error: Callable[[], BaseException] | None = None
    later_by: int | None = None


def _is_nth(first: int, onwards: bool, _verb: Verb, _key: str, number: int) -> bool:  # noqa: FBT001  # bound by `nth`
    return number >= first if onwards else number == first


def nth(
    number: int,
    lost: Lost,
    *,
    persistent: bool = False,
    error: Callable[[], BaseException] | None = None,
    later_by: int | None = None,
) -> Fault:
    """Return a fault that hits the `number`-th request of a store (from 1) and, if `persistent`, all later ones.

    For a fault loop: fail the first request, then the second, and so on until the test ends before its fault is reached
    (`FaultyStore.hits` is empty). `lost`, `error` and `later_by` are those of `Fault`.
    """
    when = partial(_is_nth, number, persistent)  # unlike a lambda, it can be pickled
    return Fault(when, lost, persistent=persistent, error=error, later_by=later_by)


class _FaultState(SharedState):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.spent: set[int] = set()
        self.hits: list[Request] = []
        self.late: list[tuple[float, Callable[[], object]]] = []


class FaultyStore(WrappedStore):
    """Injects faults into the requests to a store.

    To pickle the store, the faults' predicates must be picklable; the copy counts requests from 1 again.

    Args:
        store: Store that carries out the requests.
        faults: Faults to inject; if several match a request, the first one hits.
    """

    def __init__(self, store: ObjectStore, faults: Sequence[Fault]) -> None:
        """Store the faults; nothing is sent."""
        super().__init__(store)
        self._planned_faults = tuple(faults)
        self._state = _FaultState()

    @property
    def hits(self) -> list[Request]:
        """Copy of the requests that were hit so far."""
        with self._state.lock:
            return list(self._state.hits)

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """Put an object, as `ObjectStore.put` does."""
        if any(fault.lost == "late" for fault in self._planned_faults):
            # Copied, because the caller may reuse its buffers before a late request is carried out.
            buffers = [bytes(buffer) for buffer in buffers]
        return super().put(key, buffers, condition=condition)

    def settle(self) -> None:
        """Carry out all requests that are still late."""
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
            with self._state.lock:
                self._state.late.append((due, send))
        if fault.error is not None:
            raise fault.error()
        lost = "request" if fault.lost == "request" else "response"
        raise TransientStorageError(f"An injected fault: the {lost} was lost.", verb=request.verb, key=request.key)

    def _carry_out(self, *, upto: float) -> None:
        with self._state.lock:
            due = [send for number, send in self._state.late if number <= upto]
            self._state.late = [(number, send) for number, send in self._state.late if number > upto]
        for send in due:
            with contextlib.suppress(DcpRemoteError):  # the answer of a late request is lost, even if an error
                send()

    def _next_fault(self, request: Request) -> tuple[int, Fault | None]:
        with self._state.lock:
            self._state.number += 1
            number = self._state.number
            for index, fault in enumerate(self._planned_faults):
                if index in self._state.spent:
                    continue
                if any(fault.when(request.verb, key, number) for key in request.keys):
                    if not fault.persistent:
                        self._state.spent.add(index)
                    self._state.hits.append(request)
                    return number, fault
            return number, None
