"""Deletion of objects that nothing refers to any more, in slow batches. Imports no torch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import format_count
from dcp_remote.errors import PermissionDeniedError, StorageError, TransientStorageError
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.retrying import RetryingStore

logger = logging.getLogger(__name__)

# S3 allows 1,000 keys per DeleteObjects request.
KEYS_PER_DELETE = 1000

# S3's codes for what is wrong with credentials or clock for now; none says that a grant to delete is missing.
_PASSING_CODES = ("ExpiredToken", "TokenRefreshRequired", "RequestTimeTooSkewed", "InvalidToken", "InvalidAccessKeyId")

# Pause between two requests: no caller waits for a deletion, and so the rate stays far below any limit of a store.
PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Deleted:
    """Result of `DeletionQueue.delete`."""

    removed: int = 0
    failed: Mapping[str, StorageError] = field(default_factory=dict)  # errors of what could not be deleted, by key
    left: int = 0  # objects that are still in the queue
    # Objects that left the queue without a request since the last call, because the store permits no deletion.
    given_up: int = 0


class DeletionQueue:
    """Queue of objects to delete, by keys relative to the store of the run. For one thread at a time."""

    def __init__(self, store: ObjectStore) -> None:
        """Begin with an empty queue; no request is sent."""
        self._store = store
        self._keys: dict[str, None] = {}
        self._is_permitted = True
        self._given_up = 0
        self._has_removed = False

    def __len__(self) -> int:
        """Return the number of objects in the queue."""
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys of what is still to be deleted."""
        return iter(self._keys)

    def add(self, keys: Iterable[str]) -> None:
        """Add objects, in the order of their keys: manifests before shards.

        A checkpoint whose deletion is interrupted has lost its manifest first, so no reader takes it for complete. Once
        the store permits no deletion, the objects are only counted; the next `delete` returns their number.
        """
        self._keys.update(dict.fromkeys(sorted(keys)))
        if not self._is_permitted:
            self._give_up()

    def delete(
        self,
        *,
        deadline: Deadline,
        stop: Callable[[], bool] = lambda: False,
        batch: int = KEYS_PER_DELETE,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> Deleted:
        """Delete the objects in the queue, `batch` per request.

        Objects that failed for now stay in the queue; those that failed for good leave it, for gc. If the store permits
        no deletion at all, all objects leave the queue, now and later; one warning says so.

        Failed requests are repeated until the deadline. `stop` is called before each request; once it returns True, the
        rest stays in the queue.
        """
        sender = RetryingStore(self._store, deadline)
        failed: dict[str, StorageError] = {}
        removed = 0
        while self._keys and not stop() and not deadline.expired():
            keys = list(itertools.islice(self._keys, batch))
            answer = sender.delete(keys)
            failed.update(answer)
            removed += len(keys) - len(answer)
            self._has_removed |= len(answer) < len(keys)
            for_now = {key for key, error in answer.items() if _may_pass(error)}
            for key in keys:
                if key not in for_now:
                    del self._keys[key]
            # Once any object was removed, a refusal concerns held objects (object lock), and not the permission.
            is_denied = not for_now and all(isinstance(error, PermissionDeniedError) for error in answer.values())
            if not self._has_removed and len(answer) == len(keys) and is_denied:
                self._leave_to_gc(next(iter(answer.values())))
            if for_now:
                break
            if self._keys:
                deadline.clock.sleep(pause_seconds)
        given_up, self._given_up = self._given_up, 0
        if removed or failed or given_up:
            parts = [f"deleted {format_count(removed, 'object')}"]
            if failed:
                parts.append(f"failed to delete {len(failed)}")
            if given_up:
                parts.append(f"left {given_up} to `dcp-remote gc` for lack of permission")
            logger.info("%s: %s", self._store.url, ", ".join(parts))
        return Deleted(removed=removed, failed=failed, left=len(self._keys), given_up=given_up)

    def _leave_to_gc(self, error: StorageError) -> None:
        self._is_permitted = False
        self._give_up()
        logger.warning(
            "%s: no permission to delete; orphans stay until `dcp-remote gc --yes` runs with permission. %s",
            self._store.url,
            error,
        )

    def _give_up(self) -> None:
        self._given_up += len(self._keys)
        self._keys.clear()


def _may_pass(error: StorageError) -> bool:
    return isinstance(error, TransientStorageError) or error.details.get("code") in _PASSING_CODES
