"""Removing orphans: shards that no manifest names, left by saves that were cut off, failed or replaced. No torch.

A shard of a save under way looks just the same. So the manifest is moved to a new version first, or a tombstone put
where there is none: a save that began before can no longer commit, since it will find another version than it saw. What
was listed before that belongs to such a save, or to the checkpoint, or to nobody.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dcp_remote import manifest_json
from dcp_remote.catalog import CATALOG_KEY
from dcp_remote.checkpoint import Stored, not_found, read_stored
from dcp_remote.errors import (
    CommitConflictError,
    ConditionFailedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.manifest import MANIFEST_KEY
from dcp_remote.pending import delete_all
from dcp_remote.shard import SHARDS_PREFIX, is_written_key
from dcp_remote.storage.base import ObjectInfo, ObjectStore
from dcp_remote.storage.conditional_writes import require_conditional_writes
from dcp_remote.storage.retrying import Deadline, RetryingStore, jitter

logger = logging.getLogger(__name__)

# Far longer than a save: what is younger may be a save under way, which removing orphans would make fail.
GRACE_SECONDS = 24 * 3600.0

# As long as a save: nobody waits for either, and a store that is down for minutes comes back.
TIMEOUT_SECONDS = 1500.0

# A place whose manifest changes that often is in use.
_REFUSALS_MAX = 5

# Before the next look, doubled each time, with full jitter.
_FIRST_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Orphans:
    """Shards that no manifest names.

    Attributes:
        old: Older than the grace; these are removed.
        young: Not older: perhaps of a save under way.
    """

    old: tuple[ObjectInfo, ...]
    young: tuple[ObjectInfo, ...]


@dataclass(frozen=True, slots=True)
class Removal:
    """What `remove_orphans` did.

    Attributes:
        removed: Is gone.
        kept: The young.
        failed: Could not be deleted, with the reason, by key.
    """

    removed: tuple[ObjectInfo, ...]
    kept: tuple[ObjectInfo, ...]
    failed: dict[str, StorageError] = field(default_factory=dict)


def orphans(listed: Iterable[ObjectInfo], named: Iterable[str], *, now_seconds: float, grace_seconds: float) -> Orphans:
    """Sort what lies below `shards/`. Pure.

    Args:
        listed: All objects there; one that has no name of a shard of ours is not ours to remove.
        named: Keys in the manifest.
        now_seconds: Unix time, by the clock that dates `listed`.
        grace_seconds: Age from which an orphan is old; 0 takes each for old, also one whose date is yet to come.

    Raises:
        InvalidArgumentError: The grace is negative, or not finite.
    """
    require_grace(grace_seconds)

    living = frozenset(named)
    found = [info for info in listed if info.key not in living and is_written_key(info.key)]

    def is_old(info: ObjectInfo) -> bool:
        return grace_seconds == 0 or now_seconds - info.modified_seconds >= grace_seconds

    return Orphans(
        old=tuple(info for info in found if is_old(info)), young=tuple(info for info in found if not is_old(info))
    )


def find_orphans(
    store: ObjectStore,
    *,
    grace_seconds: float = GRACE_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
    clock: Callable[[], float] = time.time,
) -> Orphans:
    """What `remove_orphans` would remove, if this machine's clock agrees with the store's. Changes nothing.

    Costs a LIST (a request per thousand shards) and a GET.

    Args:
        store: Opened at the checkpoint's URL (`dcp_remote.storage.open_store`).
        grace_seconds: Age from which an orphan is old.
        timeout_seconds: Until when requests are repeated.
        clock: For tests.

    Raises:
        CheckpointNotFoundError: Nothing of a checkpoint is here: no manifest, and no shard of ours.
        InvalidArgumentError: A run is here; or the grace is negative, or not finite.
        StorageError: The store refused, or did not answer until the time was over.
        CorruptCheckpointError: The manifest is damaged: what it named cannot be known.
        UnsupportedFormatError: A newer version wrote it.
    """
    require_grace(grace_seconds)
    store = RetryingStore(store, Deadline(timeout_seconds))
    # Listed first: what a save puts after this is not in the list, whatever it commits.
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
    """Remove the shards that no manifest names and that are older than a grace.

    Where nothing is that old by this machine's clock, nothing is written. What is then removed is that old by the
    store's clock as well, which has dated an object just before. A save that is under way here when something is
    written fails with `CommitConflictError`. The checkpoint stays as it is: only the version of its manifest changes.
    Killed at any moment, this leaves the checkpoint whole, and the rest of the orphans for the next time.

    Costs beside the LIST and the GET: a conditional PUT of the manifest, a HEAD, a DELETE per thousand orphans.

    Args:
        store: Opened at the checkpoint's URL (`dcp_remote.storage.open_store`).
        grace_seconds: Age from which an orphan is removed; 0 removes all.
        timeout_seconds: Until when requests are repeated.
        clock: For tests.
        sleep: For tests.
        uniform: For tests.

    Raises:
        CheckpointNotFoundError: Nothing of a checkpoint is here: no manifest, and no shard of ours.
        InvalidArgumentError: The store cannot replace an object on condition; a run is here; or the grace is negative,
            or not finite.
        CommitConflictError: The manifest changed again and again: somebody is saving here. Nothing was removed.
        StorageError: The store refused, ignores the condition of a write, or did not answer until the time was over.
            What could not be deleted for other reasons is returned.
        CorruptCheckpointError: The manifest is damaged: what it named cannot be known.
        UnsupportedFormatError: A newer version wrote it.
    """
    if not store.capabilities.compare_and_swap:
        raise InvalidArgumentError(
            "This store cannot replace an object on condition, and so cannot tell orphans from a save under way.",
            url=store.url,
            reason=store.capabilities.swap_refusal,
        )
    require_grace(grace_seconds)
    deadline = Deadline(timeout_seconds)
    store = RetryingStore(store, deadline)
    pause, refusals = _FIRST_PAUSE_SECONDS, 0
    while True:
        listed = list(store.list(SHARDS_PREFIX))
        stored = _stored(store, listed)
        seen = _orphans(listed, stored, now_seconds=clock(), grace_seconds=grace_seconds)
        if not seen.old:
            return Removal(removed=(), kept=seen.young)
        if stored is None:
            _require_no_run(store)
        require_conditional_writes(store, deadline, swaps=True)
        nonce = uuid.uuid4().hex
        body = manifest_json.tombstone(nonce, ()) if stored is None else manifest_json.renewed(stored.data, nonce)
        try:
            store.put(MANIFEST_KEY, [body], condition="absent" if stored is None else stored.version)
        # Refused, or not answered: whether it was carried out does not matter to whoever begins again.
        except ConditionFailedError as error:
            refusals += 1
            if refusals >= _REFUSALS_MAX:
                raise CommitConflictError(
                    "The manifest changed again and again; nothing was removed. Is a job saving here?",
                    url=store.url,
                    cause=error,
                ) from error
        except TransientStorageError:
            if deadline.remaining_seconds() <= pause:
                raise
        else:
            now_seconds = store.head(MANIFEST_KEY).modified_seconds
            return _removed(store, _orphans(listed, stored, now_seconds=now_seconds, grace_seconds=grace_seconds))
        sleep(uniform(0, pause))
        pause = min(2 * pause, _PAUSE_SECONDS_MAX)


def require_grace(grace_seconds: float) -> None:
    """Refuse what is no age.

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
            raise not_found(store) from error  # a wrong URL, most likely, which must not look like a clean one
        return None


def _require_no_run(store: ObjectStore) -> None:
    """Refuse a run, which no tombstone shall be put in. Asked where there is no manifest; a HEAD."""
    try:
        store.head(CATALOG_KEY)
    except ObjectNotFoundError:
        return
    raise InvalidArgumentError(
        "This is a run (it has a catalog.json), and no checkpoint by itself: `run_gc` removes its orphans.",
        url=store.url,
    )


def _orphans(
    listed: Iterable[ObjectInfo], stored: Stored | None, *, now_seconds: float, grace_seconds: float
) -> Orphans:
    named = () if stored is None else stored.shard_keys
    return orphans(listed, named, now_seconds=now_seconds, grace_seconds=grace_seconds)


def _removed(store: ObjectStore, found: Orphans) -> Removal:
    failed = delete_all(store, [info.key for info in found.old])
    removed = tuple(info for info in found.old if info.key not in failed)
    logger.info("%s: removed %d orphans, %d failed", store.url, len(removed), len(failed))
    return Removal(removed=removed, kept=found.young, failed=failed)
