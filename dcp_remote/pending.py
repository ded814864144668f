"""Objects that nobody names any more and nobody can name again, deleted at leisure. No torch."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dcp_remote.errors import PermissionDeniedError, StorageError, TransientStorageError
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.retrying import Deadline, RetryingStore, jitter

logger = logging.getLogger(__name__)

# S3 takes a thousand a request.
KEYS_PER_DELETE = 1000

# Between two requests: far below what a store takes, and nobody waits.
PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Deleted:
    """What `Upkeep.delete` did.

    Attributes:
        removed: Objects that are gone.
        failed: Could not be deleted, with the reason, by key.
        left: Objects that are still to be deleted, by this process.
    """

    removed: int = 0
    failed: Mapping[str, StorageError] = field(default_factory=dict)
    left: int = 0


class Pending:
    """What may be deleted and is not yet. For one thread at a time.

    Args:
        store: Opened at the run.
        sleep: For tests.
        uniform: For tests.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = jitter,
    ) -> None:
        """See the class; no request is made."""
        self._store = store
        self._sleep, self._uniform = sleep, uniform
        self._keys: dict[str, None] = {}
        self._permitted = True
        self._has_removed = False

    def __len__(self) -> int:
        """How many objects."""
        return len(self._keys)

    def add(self, keys: Iterable[str]) -> None:
        """Delete these, too: manifests before shards, so that what is half deleted is no checkpoint to anybody."""
        if self._permitted:
            self._keys.update(dict.fromkeys(sorted(keys)))

    def delete(
        self,
        *,
        deadline: Deadline,
        stop: Callable[[], bool] = lambda: False,
        batch: int = KEYS_PER_DELETE,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> Deleted:
        """See `Upkeep.delete`."""
        sender = RetryingStore(self._store, deadline, sleep=self._sleep, random=lambda: self._uniform(0, 1))
        failed: dict[str, StorageError] = {}
        removed = 0
        while self._keys and not stop() and not deadline.expired():
            keys = list(itertools.islice(self._keys, batch))
            answer = _deleted(sender, keys)
            failed.update(answer)
            removed += len(keys) - len(answer)
            self._has_removed |= len(answer) < len(keys)
            for_now = {key for key, error in answer.items() if isinstance(error, TransientStorageError)}
            for key in keys:
                if key not in for_now:
                    del self._keys[key]
            # A store may also hold single objects; then it has let others go.
            if not self._has_removed and _is_refused(keys, answer):
                self._leave_to_gc(next(iter(answer.values())))
            if for_now:
                break
            if self._keys:
                self._sleep(pause_seconds)
        if removed or failed:
            logger.info("%s: deleted %d objects, %d failed", self._store.url, removed, len(failed))
        return Deleted(removed=removed, failed=failed, left=len(self._keys))

    def _leave_to_gc(self, error: StorageError) -> None:
        self._permitted = False
        self._keys.clear()
        logger.warning(
            "%s: this job may not delete; `dcp-remote gc --delete` removes what is let go. %s", self._store.url, error
        )


def delete_all(store: ObjectStore, keys: Sequence[str]) -> dict[str, StorageError]:
    """Delete objects in this order, a thousand a request, and return why some could not be deleted.

    Raises:
        PermissionDeniedError: None of the first request may be deleted; no other is sent.
        StorageError: The store refused a request as a whole.
    """
    failed: dict[str, StorageError] = {}
    for first in range(0, len(keys), KEYS_PER_DELETE):
        some = keys[first : first + KEYS_PER_DELETE]
        answer = store.delete(some)
        if first == 0 and _is_refused(some, answer):
            raise next(iter(answer.values()))
        failed.update(answer)
    return failed


def _is_refused(keys: Sequence[str], answer: Mapping[str, StorageError]) -> bool:
    return len(answer) == len(keys) and all(isinstance(one, PermissionDeniedError) for one in answer.values())


def _deleted(store: ObjectStore, keys: Sequence[str]) -> Mapping[str, StorageError]:
    try:
        return store.delete(keys)
    except StorageError as error:
        return dict.fromkeys(keys, error)
