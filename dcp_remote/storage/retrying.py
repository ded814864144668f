"""A wrapper store that repeats failed requests until a deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self, TypeVar

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline, RetryPolicy
from dcp_remote.common.descriptors import find_shortage
from dcp_remote.errors import (
    ConditionFailedError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import Condition, ObjectInfo, ObjectStore, Version
from dcp_remote.storage.outages import Outage, outage_of
from dcp_remote.storage.request_context import limit_requests
from dcp_remote.storage.wrapper import Request, Verb, WrappedStore

logger = logging.getLogger(__name__)

# Default time for which one small read, or one range, is repeated.
RANGE_RETRY_SECONDS = 300.0

# Time for which a request is repeated while this process can open no file: files that a program opens in passing, as at
# the beginning of an epoch, are closed sooner; the others stay open until the deadline.
SHORTAGE_SECONDS = 5.0

# Errors that only a store that answers can cause.
_ANSWERS = (ObjectNotFoundError, ConditionFailedError, PermissionDeniedError)

_Answer = TypeVar("_Answer")


class RetryingStore(WrappedStore):
    """Store that repeats requests that raised `TransientStorageError`, until one deadline.

    Repeated: `head`, `get`, `get_into`; `put` with the condition "any"; `delete`, for the keys that failed for now;
    `list`, from the last key on that was yielded. A conditional `put` is sent once: after a lost answer only the caller
    can tell its own earlier attempt from another writer's (`dcp_remote.run.commit` does).

    Each retry is logged at DEBUG; of an outage that lasts, a warning about every half minute (`outages`). When the
    deadline allows no further attempt, the last `TransientStorageError` is raised anew, with the number of attempts and
    their seconds. While this process can open no file or connection, a request is repeated for five seconds only; then
    a `StorageError` names the limit.

    After the deadline nothing is repeated; no pause reaches it, and requests to a cloud are limited to what is left of
    it. Pauses are by its clock. `on_retry` is called before each pause with verb, key and error, from the thread that
    pauses. `outage` warns; None is the one that all stores of the URL share.
    """

    def __init__(
        self,
        store: ObjectStore,
        deadline: Deadline,
        policy: RetryPolicy | None = None,
        *,
        on_retry: Callable[[Verb, str, StorageError], None] | None = None,
        outage: Outage | None = None,
    ) -> None:
        """Store the settings; no request is sent."""
        super().__init__(store)
        self._deadline = deadline
        self._policy = policy or RetryPolicy()
        self._on_retry = on_retry
        self._outage = outage or outage_of(store.url)

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """Implement `ObjectStore.put`. Repeated only if `condition` is "any"."""
        if condition != "any":
            with limit_requests(self._deadline.remaining_seconds):
                return self._store.put(key, buffers, condition=condition)
        return super().put(key, buffers)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Implement `ObjectStore.list`. After a failure it resumes after the last key; no object is yielded twice."""
        with _Attempts(self, self._named("list", prefix)) as attempts:
            while True:
                try:
                    infos = iter(self._store.list(prefix, after=after))
                    while (info := self._next(infos)) is not None:
                        after = info.key
                        attempts.begin_again()
                        yield info
                    return
                except TransientStorageError as error:
                    attempts.pause_or_raise(error)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """Implement `ObjectStore.delete`. Returns the errors of keys that fail for good, or until the deadline."""
        failed: dict[str, StorageError] = {}
        with _Attempts(self, self._named("delete", *keys)) as attempts:
            while True:
                try:
                    with limit_requests(self._deadline.remaining_seconds):
                        answer = self._store.delete(keys)
                except StorageError as error:
                    answer = dict.fromkeys(keys, error)
                for_now = {key: error for key, error in answer.items() if isinstance(error, TransientStorageError)}
                failed.update((key, error) for key, error in answer.items() if key not in for_now)
                if not for_now:
                    return failed
                try:
                    attempts.pause_or_raise(next(iter(for_now.values())))
                except StorageError:
                    return failed | {key: attempts.last_error(error, key=key) for key, error in for_now.items()}
                keys = list(for_now)

    def repeat(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        """Call `send`, which sends a request to the wrapped store, until it raises no `TransientStorageError`."""
        with _Attempts(self, request) as attempts:
            while True:
                try:
                    with limit_requests(self._deadline.remaining_seconds):
                        return send()
                except TransientStorageError as error:
                    attempts.pause_or_raise(error)

    _request = repeat

    def _next(self, infos: Iterator[ObjectInfo]) -> ObjectInfo | None:
        with limit_requests(self._deadline.remaining_seconds):
            return next(infos, None)


class _Attempts:
    """Attempts of one request, and the pauses between them; a context manager that tells the outage of the end."""

    def __init__(self, store: RetryingStore, request: Request) -> None:
        self._store, self._deadline, self._outage = store, store._deadline, store._outage
        self._request = request
        self._failed = 0
        self._shortage: str | None = None
        self._short_seconds = 0.0
        self._begin_seconds = self._deadline.elapsed_seconds()
        self._sent_seconds = self._outage.clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._failed:
            self._outage.note_end(id(self), is_answered=kind is None or issubclass(kind, _ANSWERS))

    def begin_again(self) -> None:
        """Restart the count of failures, after progress."""
        if self._failed:
            self._failed = 0
            self._outage.note_end(id(self), is_answered=True)
        self._sent_seconds = self._outage.clock()

    def pause_or_raise(self, error: TransientStorageError) -> None:
        """Count a failure and pause; or raise the last error, if the deadline allows no further attempt."""
        store, request = self._store, self._request
        self._failed += 1
        left_seconds = self._deadline.remaining_seconds()
        was_short, self._shortage = self._shortage is not None, find_shortage()
        if self._shortage is not None:
            now_seconds = self._deadline.elapsed_seconds()
            self._short_seconds = self._short_seconds if was_short else now_seconds
            left_seconds = min(left_seconds, self._short_seconds + SHORTAGE_SECONDS - now_seconds)
        clock = self._deadline.clock
        delay_seconds = store._policy.delay_seconds(
            self._failed, remaining_seconds=left_seconds, random=clock.uniform(0.0, 1.0)
        )
        if delay_seconds is not None:
            self._note_failure(error)
            if store._on_retry is not None:
                store._on_retry(request.verb, request.key, error)
            clock.sleep(delay_seconds)
        if delay_seconds is None or self._deadline.expired():  # e.g. cancelled during the pause
            self._outage.note_end(id(self), is_answered=False)
            raise self.last_error(error)

    def _note_failure(self, error: TransientStorageError) -> None:
        verb, key = self._request.verb, self._request.key
        logger.debug("The store failed; trying again. verb=%s key=%s cause=%s", verb, key, error)
        if self._shortage is not None:
            return  # no outage of the store
        left_seconds = self._deadline.remaining_seconds
        self._outage.note_failure(
            id(self), self._request, error, sent_seconds=self._sent_seconds, left_seconds=left_seconds
        )

    def last_error(self, error: TransientStorageError, **details: object) -> StorageError:
        """Return the error with the request, the number of attempts and their seconds added to its details.

        Verb and key that the store itself reported are kept, since they belong to the URL that it reported, which may
        be a child's; `details` override them.
        """
        seconds = round(self._deadline.elapsed_seconds() - self._begin_seconds, 3)
        request_details = {"verb": self._request.verb, "key": self._request.key} | error.details | details
        kind, what = (type(error), error.what) if self._shortage is None else (StorageError, self._shortage)
        last = kind(what, **request_details | {"attempts": self._failed, "seconds": seconds})
        last.__cause__ = error
        return last
