"""Garbage collection of a run: remove orphans, the manifests and shards that no live checkpoint names.

Jobs leave orphans when they are killed, in a save or while they delete, and when they may not delete. Objects of a save
under way look the same. So the catalog's floor is first raised above the revisions in the orphans' names: a save that
began below the floor can no longer commit. Abandoned checkpoints are live, and so no orphans, until they are retired.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dcp_remote.common.deadline import Deadline, jitter
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
)
from dcp_remote.format.catalog import CATALOG_KEY, Catalog, Entry, raised, refreshed
from dcp_remote.format.keys import MANIFESTS_PREFIX, SHARDS_PREFIX, revision_of
from dcp_remote.run.catalog_store import missing_catalog, read_catalog, swap
from dcp_remote.run.gc import (
    GRACE_SECONDS,
    TIMEOUT_SECONDS,
    Orphans,
    Removal,
    delete_orphans,
    is_old,
    require_grace,
)
from dcp_remote.run.live_shards import LiveShards
from dcp_remote.run.lookup import exists, has_manifests, not_found
from dcp_remote.storage.base import ObjectInfo, ObjectStore
from dcp_remote.storage.retrying import RetryingStore

# After so many attempts the checkpoints of the run are retired faster than their manifests can be read.
_LOOKS_MAX = 5


@dataclass(frozen=True, slots=True)
class RunOrphans(Orphans):
    """Manifests and shards that no live checkpoint of a run names.

    Attributes:
        abandoned: Entries of live checkpoints that a later job left behind; no orphans, and listed for information.
    """

    abandoned: tuple[Entry, ...] = ()


def run_orphans(
    listed: Iterable[ObjectInfo],
    not_named: set[str],
    *,
    revision: int,
    now_seconds: float,
    grace_seconds: float,
    abandoned: tuple[Entry, ...] = (),
) -> RunOrphans:
    """Sort the orphans in a listing of a run by age. Pure.

    Args:
        listed: Manifests and shards.
        not_named: Keys of those that no live checkpoint names.
        revision: Revision of the catalog. An object whose name has a later one belongs to a save that saw another
            catalog: it counts as young, however old it is.
        now_seconds: Unix time, by the clock that dates `listed`.
        grace_seconds: Age from which an orphan is old; with 0 every orphan is, even one dated in the future.
        abandoned: Entries of abandoned checkpoints.
    """
    old: list[ObjectInfo] = []
    young: list[ObjectInfo] = []
    for info in listed:
        if info.key in not_named:
            may_go = is_old(info, now_seconds=now_seconds, grace_seconds=grace_seconds)
            (old if may_go and _revision(info) <= revision else young).append(info)
    return RunOrphans(old=tuple(old), young=tuple(young), abandoned=abandoned)


def find_run_orphans(
    store: ObjectStore,
    *,
    grace_seconds: float = GRACE_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
    clock: Callable[[], float] = time.time,
) -> RunOrphans:
    """Find the orphans that `remove_run_orphans` would remove if this machine's clock agreed with the store's.

    Changes nothing. Costs a LIST of the whole run (a request per thousand objects; half a gigabyte of memory per
    million), a GET of the catalog, and a GET of each live manifest.

    Args:
        store: Store opened at the run.
        grace_seconds: Age from which an orphan is old.
        timeout_seconds: Seconds for which requests are retried.
        clock: Unix time in seconds; an argument for tests.

    Raises:
        CheckpointNotFoundError: There is no run here, or it has lost its catalog.
        CorruptCheckpointError: The catalog or a live manifest is damaged, so that the objects in use are not known.
        UnsupportedFormatError: A newer version wrote the catalog or a live manifest.
        CommitConflictError: Checkpoints were retired faster than their manifests were read.
        InvalidArgumentError: The grace is negative, or not finite.
        StorageError: The store refused, or did not answer in time.
    """
    require_grace(grace_seconds)
    deadline = Deadline(timeout_seconds)
    listed = _listed(RetryingStore(store, deadline))
    return _found(
        listed, *_live(store, LiveShards(), deadline, listed), now_seconds=clock(), grace_seconds=grace_seconds
    )


def remove_run_orphans(
    store: ObjectStore,
    *,
    grace_seconds: float = GRACE_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    uniform: Callable[[float, float], float] = jitter,
) -> Removal:
    """Remove the orphans of a run that are at least as old as a grace.

    Nothing is written unless an orphan is that old by this machine's clock. An orphan is removed only if it is that old
    by the store's clock, too, which is read from the catalog that was just swapped. A save that is under way, and began
    before that swap, begins again. After a crash at any moment every live checkpoint is whole, and the next call
    removes the rest.

    Costs as `find_run_orphans`; then a swap of the catalog (a GET and a PUT), a GET of the catalog and of each live
    manifest that is new, a HEAD, and a DELETE per thousand orphans.

    Args:
        store: Store opened at the run.
        grace_seconds: Age from which an orphan is removed; 0 removes all.
        timeout_seconds: Seconds for which requests are retried.
        clock: Unix time in seconds; an argument for tests.
        sleep: Waits so many seconds; an argument for tests.
        uniform: Draws a number between two; an argument for tests.

    Raises:
        CheckpointNotFoundError: There is no run here, or it has lost its catalog.
        CorruptCheckpointError: The catalog or a live manifest is damaged, so that the objects in use are not known.
        UnsupportedFormatError: A newer version wrote the catalog or a live manifest.
        CommitConflictError: Another run was begun here meanwhile, or checkpoints were retired faster than their
            manifests were read. Nothing was removed.
        CommitUnknownError: It is not known whether the catalog was swapped. Nothing was removed.
        InvalidArgumentError: The store cannot replace an object on condition; or the grace is negative, or not finite.
        StorageError: The store refused, or did not answer in time; nothing was removed. Failures to delete are
            returned.
        PermissionDeniedError: No orphan may be deleted.
    """
    require_grace(grace_seconds)
    deadline, named = Deadline(timeout_seconds), LiveShards()
    asking = RetryingStore(store, deadline, sleep=sleep, random=lambda: uniform(0, 1))
    # The listing comes before the catalog is read, so that it has no object of a save that commits in between.
    listed = _listed(asking)
    before, not_named = _live(store, named, deadline, listed)
    seen = _found(listed, before, not_named, now_seconds=clock(), grace_seconds=grace_seconds)
    if not seen.old:
        return Removal(removed=(), kept=seen.young)
    floor = 1 + max(map(_revision, seen.old))

    revisions: list[int] = []

    def change(now: Catalog) -> Catalog | None:
        if now.run_id != before.run_id:
            raise CommitConflictError("Another run was begun here meanwhile; nothing was removed.", url=store.url)
        revisions.append(now.revision)
        if now.floor >= floor and now.revision > revisions[0]:
            return None
        # Swapped even where the floor is high enough, since the swap gives the catalog a fresh date.
        return raised(now, floor) or refreshed(now)

    swap(store, change, deadline=deadline, sleep=sleep, uniform=uniform)
    # A save that committed before the swap may name a former orphan; after the swap none can.
    after, not_named = _live(store, named, deadline, seen.old)
    found = run_orphans(
        seen.old,
        not_named,
        revision=after.revision,
        now_seconds=asking.head(CATALOG_KEY).modified_seconds,
        grace_seconds=grace_seconds,
    )
    removal = delete_orphans(store, found, deadline, sleep=sleep, uniform=uniform)
    return replace(removal, kept=seen.young + removal.kept)


def is_run(store: ObjectStore, *, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
    """Return whether a run is here, perhaps without its catalog; a HEAD, and a LIST if there is no catalog."""
    asking = RetryingStore(store, Deadline(timeout_seconds))
    return exists(asking, CATALOG_KEY) or has_manifests(asking)


def _listed(store: ObjectStore) -> list[ObjectInfo]:
    prefixes = (MANIFESTS_PREFIX, SHARDS_PREFIX)
    return [info for prefix in prefixes for info in store.list(prefix) if revision_of(info.key) is not None]


def _live(
    store: ObjectStore, named: LiveShards, deadline: Deadline, listed: Sequence[ObjectInfo]
) -> tuple[Catalog, set[str]]:
    """Read the catalog; return it and the keys of a listing that none of its checkpoints names."""
    for _ in range(_LOOKS_MAX):
        seen = read_catalog(RetryingStore(store, deadline))
        if seen is None:
            raise missing_catalog(store) if listed else not_found(store)
        unreadable = named.read(store, seen.catalog.entries, deadline)
        if not unreadable:
            return seen.catalog, named.not_named((info.key for info in listed), seen.catalog.entries)
        for entry, error in unreadable.items():
            # A checkpoint retired meanwhile is no reason to stop, but the catalog must be read again: a checkpoint that
            # is not in this one may name the same shards.
            if not isinstance(error, CheckpointNotFoundError):
                raise type(error)(
                    "The manifest of a live checkpoint cannot be read, so that its shards cannot be told from orphans; "
                    "nothing was removed. To give the checkpoint up: `dcp-remote rm`.",
                    url=store.url,
                    step=entry.step,
                    cause=error,
                ) from error
    raise CommitConflictError(
        "Checkpoints are retired here again and again; nothing was removed. Run gc later.", url=store.url
    )


def _found(
    listed: Sequence[ObjectInfo], catalog: Catalog, not_named: set[str], *, now_seconds: float, grace_seconds: float
) -> RunOrphans:
    return run_orphans(
        listed,
        not_named,
        revision=catalog.revision,
        now_seconds=now_seconds,
        grace_seconds=grace_seconds,
        abandoned=tuple(entry for entry in catalog.entries if entry.abandoned),
    )


def _revision(info: ObjectInfo) -> int:
    revision = revision_of(info.key)
    assert revision is not None, "other names are not listed"
    return revision
