"""Garbage collection of a checkpoint by itself: remove orphans, the shards that no manifest names.

Interrupted, failed and replaced saves leave orphans. A shard of a save under way looks the same. So the manifest is
first put again under a new version, or a tombstone where there is none: a save that began before can no longer commit,
since it finds another version than it saw. A shard that was listed before that PUT, and that the manifest does not
name, can then never become part of a checkpoint.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dcp_remote.common.deadline import Deadline, jitter
from dcp_remote.errors import (
    CommitConflictError,
    ConditionFailedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.format import manifest_json
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.format.keys import SHARDS_PREFIX, is_written_key
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.run.conditional_put import Backoff
from dcp_remote.run.lookup import Stored, exists, not_found, read_stored
from dcp_remote.storage.base import ObjectInfo, ObjectStore
from dcp_remote.storage.conditional_writes import require_conditional_writes
from dcp_remote.storage.deletion_queue import DeletionQueue
from dcp_remote.storage.retrying import RetryingStore

# Far longer than a save, since removing shards of a save under way makes it fail.
GRACE_SECONDS = 24 * 3600.0

# As long as a save may take, since an outage of the store lasts minutes and no user waits for gc.
TIMEOUT_SECONDS = 1500.0

# A manifest that changes this often belongs to a checkpoint in use.
_REFUSALS_MAX = 5


@dataclass(frozen=True, slots=True)
class Orphans:
    """Shards that no manifest names.

    Attributes:
        old: Orphans at least as old as the grace, which are removed.
        young: Orphans younger than the grace, perhaps of a save under way.
    """

    old: tuple[ObjectInfo, ...]
    young: tuple[ObjectInfo, ...]


@dataclass(frozen=True, slots=True)
class Removal:
    """Result of removing orphans.

    Attributes:
        removed: Orphans that were deleted.
        kept: Orphans younger than the grace.
        failed: Errors of orphans that could not be deleted, by key.
    """

    removed: tuple[ObjectInfo, ...]
    kept: tuple[ObjectInfo, ...]
    failed: dict[str, StorageError] = field(default_factory=dict)


def orphans(listed: Iterable[ObjectInfo], named: Iterable[str], *, now_seconds: float, grace_seconds: float) -> Orphans:
    """Find the orphans in a listing of `shards/`. Pure.

    Args:
        listed: All objects there; one whose name is not that of a shard is no orphan.
        named: Keys of the shards that the manifest names.
        now_seconds: Unix time, by the clock that dates `listed`.
        grace_seconds: Age from which an orphan is old; with 0 every orphan is, even one dated in the future.

    Raises:
        InvalidArgumentError: The grace is negative, or not finite.
    """
    require_grace(grace_seconds)
    living = frozenset(named)
    found = [info for info in listed if info.key not in living and is_written_key(info.key)]
    old = [info for info in found if is_old(info, now_seconds=now_seconds, grace_seconds=grace_seconds)]
    young = [info for info in found if not is_old(info, now_seconds=now_seconds, grace_seconds=grace_seconds)]
    return Orphans(old=tuple(old), young=tuple(young))


def find_orphans(
    store: ObjectStore,
    *,
    grace_seconds: float = GRACE_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
    clock: Callable[[], float] = time.time,
) -> Orphans:
    """Find the orphans that `remove_orphans` would remove if this machine's clock agreed with the store's; only reads.

    Costs a LIST (a request per thousand shards) and a GET.

    Args:
        store: Store opened at the checkpoint's URL (`dcp_remote.storage.open_store`).
        grace_seconds: Age from which an orphan is old.
        timeout_seconds: Seconds for which requests are retried.
        clock: Unix time in seconds; an argument for tests.

    Raises:
        CheckpointNotFoundError: There is neither a manifest nor a shard.
        InvalidArgumentError: A run is here; or the grace is negative, or not finite.
        StorageError: The store refused, or did not answer in time.
        CorruptCheckpointError: The manifest is damaged, so that the shards that it names are not known.
        UnsupportedFormatError: A newer version wrote the manifest.
    """
    require_grace(grace_seconds)
    store = RetryingStore(store, Deadline(timeout_seconds))
    # The listing comes before the manifest is read, so that it has no shard of a save that commits in between.
    listed = list(store.list(SHARDS_PREFIX))
    return _orphans(listed, _stored(store, listed), now_seconds=clock(), grace_seconds=grace_seconds)


def remove_orphans(
    store: ObjectStore,
    *,
    grace_seconds: float = GRACE_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    uniform: Callable[[float, float], float] = jitter,
) -> Removal:
    """Remove the orphans that are at least as old as a grace.

    Nothing is written unless an orphan is that old by this machine's clock. An orphan is removed only if it is that old
    by the store's clock, too, which is read from the manifest that was just put. A save that is under way at that PUT
    fails with `CommitConflictError`. Of the checkpoint only the manifest's version changes. After a crash at any moment
    the checkpoint is whole, and the next call removes the rest.

    Costs a LIST (a request per thousand shards), a GET, a conditional PUT of the manifest, a HEAD, and a DELETE per
    thousand orphans; after a PUT that failed, the LIST, the GET and the PUT again.

    Args:
        store: Store opened at the checkpoint's URL (`dcp_remote.storage.open_store`).
        grace_seconds: Age from which an orphan is removed; 0 removes all.
        timeout_seconds: Seconds for which requests are retried.
        clock: Unix time in seconds; an argument for tests.
        sleep: Waits so many seconds; an argument for tests.
        uniform: Draws a number between two; an argument for tests.

    Raises:
        CheckpointNotFoundError: There is neither a manifest nor a shard.
        InvalidArgumentError: The store cannot replace an object on condition; a run is here; or the grace is negative,
            or not finite.
        CommitConflictError: Other saves changed the manifest at each attempt. Nothing was removed.
        StorageError: The store refused, ignores the condition of a write, or did not answer in time; nothing was
            removed. Failures to delete are returned.
        PermissionDeniedError: No orphan may be deleted.
        CorruptCheckpointError: The manifest is damaged, so that the shards that it names are not known.
        UnsupportedFormatError: A newer version wrote the manifest.
    """
    if not store.capabilities.compare_and_swap:
        raise InvalidArgumentError(
            "This store cannot replace an object on condition, and so gc cannot tell orphans from a save under way.",
            url=store.url,
            reason=store.capabilities.swap_refusal,
        )
    require_grace(grace_seconds)
    deadline = Deadline(timeout_seconds)
    asking = RetryingStore(store, deadline)
    backoff, refusals = Backoff(deadline, sleep=sleep, uniform=uniform), 0
    while True:
        listed = list(asking.list(SHARDS_PREFIX))
        stored = _stored(asking, listed)
        seen = _orphans(listed, stored, now_seconds=clock(), grace_seconds=grace_seconds)
        if not seen.old:
            return Removal(removed=(), kept=seen.young)
        if stored is None:
            _require_no_run(asking)
        require_conditional_writes(asking, deadline, swaps=True)
        nonce = uuid.uuid4().hex
        body = manifest_json.tombstone(nonce, ()) if stored is None else manifest_json.renewed(stored.data, nonce)
        # Not settled by reading: after a failure all begins again with the listing, whatever became of the PUT.
        try:
            asking.put(MANIFEST_KEY, [body], condition="absent" if stored is None else stored.version)
        except ConditionFailedError as error:
            refusals += 1
            if refusals >= _REFUSALS_MAX:
                raise CommitConflictError(
                    "The manifest changed again and again; nothing was removed. Run gc when no job saves here.",
                    url=store.url,
                    cause=error,
                ) from error
        except TransientStorageError:
            if backoff.is_exhausted():
                raise
        else:
            now_seconds = asking.head(MANIFEST_KEY).modified_seconds
            found = _orphans(listed, stored, now_seconds=now_seconds, grace_seconds=grace_seconds)
            return delete_orphans(store, found, deadline)
        backoff.pause()


def is_old(info: ObjectInfo, *, now_seconds: float, grace_seconds: float) -> bool:
    """Return whether an orphan is at least as old as the grace; with a grace of 0 even one dated in the future is."""
    return grace_seconds == 0 or now_seconds - info.modified_seconds >= grace_seconds


def delete_orphans(
    store: ObjectStore,
    found: Orphans,
    deadline: Deadline,
    *,
    sleep: Callable[[float], None] = time.sleep,
    uniform: Callable[[float, float], float] = jitter,
) -> Removal:
    """Delete the old orphans; a DELETE per thousand.

    Args:
        store: Store opened at the checkpoint or run.
        found: Orphans; no save can name them any more.
        deadline: Deadline of all requests.
        sleep: Waits so many seconds; an argument for tests.
        uniform: Draws a number between two; an argument for tests.

    Raises:
        PermissionDeniedError: None of the first thousand may be deleted; no more is tried.
    """
    queue = DeletionQueue(store, sleep=sleep, uniform=uniform)
    queue.add(info.key for info in found.old)
    deleted = queue.delete(deadline=deadline, pause_seconds=0)
    errors = list(deleted.failed.values())
    if errors and not deleted.removed and all(isinstance(error, PermissionDeniedError) for error in errors):
        raise errors[0]
    late = TransientStorageError("The deadline passed before the object was deleted; run gc again.", url=store.url)
    failed = {**dict.fromkeys(queue, late), **deleted.failed}
    removed = tuple(info for info in found.old if info.key not in failed)
    return Removal(removed=removed, kept=found.young, failed=failed)


def require_grace(grace_seconds: float) -> None:
    """Refuse a grace that is no age.

    Raises:
        InvalidArgumentError: The grace is negative, or not finite.
    """
    if not (math.isfinite(grace_seconds) and grace_seconds >= 0):
        raise InvalidArgumentError("The grace must be at least 0, and finite.", grace_seconds=grace_seconds)


def _stored(store: ObjectStore, listed: Iterable[ObjectInfo]) -> Stored | None:
    try:
        return read_stored(store)
    except ObjectNotFoundError as error:
        if not any(is_written_key(info.key) for info in listed):
            _require_no_run(store)
            raise not_found(store) from error  # most likely a wrong URL, which must not look like a clean checkpoint
        return None


def _require_no_run(store: ObjectStore) -> None:
    """Refuse a run, where a tombstone would hide the catalog; called where there is no manifest. One HEAD."""
    if exists(store, CATALOG_KEY):
        raise InvalidArgumentError(
            "This is a run (it has a catalog.json), and no checkpoint by itself. Use `dcp-remote gc`, or "
            "remove_run_orphans.",
            url=store.url,
        )


def _orphans(
    listed: Iterable[ObjectInfo], stored: Stored | None, *, now_seconds: float, grace_seconds: float
) -> Orphans:
    named = () if stored is None else stored.shard_keys
    return orphans(listed, named, now_seconds=now_seconds, grace_seconds=grace_seconds)
