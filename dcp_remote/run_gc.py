"""Removing orphans of a run: manifests and shards that no live checkpoint names. No torch.

They are left by jobs that were killed, in a save or while they deleted, and by those that may not delete. What a save
under way has written looks just the same. So the catalog's floor is raised above the revisions that the orphans' names
carry: a save that began below can no longer commit. A run whose checkpoints were abandoned keeps them: they are live
until somebody retires them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dcp_remote.catalog import CATALOG_KEY, Catalog, Entry, raised, refreshed
from dcp_remote.catalog_store import read_catalog, swap
from dcp_remote.checkpoint import not_found
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    ObjectNotFoundError,
)
from dcp_remote.gc import GRACE_SECONDS, TIMEOUT_SECONDS, Orphans, Removal, require_grace
from dcp_remote.named import Named
from dcp_remote.pending import delete_all
from dcp_remote.run_names import MANIFESTS_PREFIX, revision_of
from dcp_remote.shard import SHARDS_PREFIX
from dcp_remote.storage.base import ObjectInfo, ObjectStore
from dcp_remote.storage.retrying import Deadline, RetryingStore, jitter

logger = logging.getLogger(__name__)

# A run whose checkpoints are retired faster than their manifests are read is no matter of trying once more.
_LOOKS_MAX = 5


@dataclass(frozen=True, slots=True)
class RunOrphans(Orphans):
    """What no live checkpoint of a run names.

    Attributes:
        abandoned: Live checkpoints that a later job left behind. They are no orphans: who retires them says so.
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
    """Sort what no live checkpoint names. Pure.

    Args:
        listed: Objects that have a name of ours.
        not_named: Keys of those that no live checkpoint names.
        revision: Of the catalog. A name of a later one belongs to somebody whose catalog we have not seen: it counts as
            young, however old it is.
        now_seconds: Unix time, by the clock that dates `listed`.
        grace_seconds: Age from which an orphan is old; 0 takes each for old, also one whose date is yet to come.
        abandoned: What to list apart.
    """
    old: list[ObjectInfo] = []
    young: list[ObjectInfo] = []
    for info in listed:
        if info.key in not_named:
            is_old = grace_seconds == 0 or now_seconds - info.modified_seconds >= grace_seconds
            (old if is_old and _revision(info) <= revision else young).append(info)
    return RunOrphans(old=tuple(old), young=tuple(young), abandoned=abandoned)


def find_run_orphans(
    store: ObjectStore,
    *,
    grace_seconds: float = GRACE_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
    clock: Callable[[], float] = time.time,
) -> RunOrphans:
    """What `remove_run_orphans` would remove, if this machine's clock agrees with the store's. Changes nothing.

    Costs a LIST of the whole run (a request per thousand objects; half a gigabyte of memory per million), a GET of the
    catalog, and one of each live manifest.

    Args:
        store: Opened at the run.
        grace_seconds: Age from which an orphan is old.
        timeout_seconds: Until when requests are repeated.
        clock: For tests.

    Raises:
        CheckpointNotFoundError: There is no run here, or it has lost its catalog.
        CorruptCheckpointError: The catalog or a live manifest is damaged: what is named cannot be known.
        UnsupportedFormatError: A newer version wrote one of them.
        CommitConflictError: Checkpoints were retired faster than their manifests were read.
        InvalidArgumentError: The grace is negative, or not finite.
        StorageError: The store refused, or did not answer until the time was over.
    """
    require_grace(grace_seconds)
    deadline = Deadline(timeout_seconds)
    listed = _listed(RetryingStore(store, deadline))
    return _found(listed, *_live(store, Named(), deadline, listed), now_seconds=clock(), grace_seconds=grace_seconds)


def remove_run_orphans(
    store: ObjectStore,
    *,
    grace_seconds: float = GRACE_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    uniform: Callable[[float, float], float] = jitter,
) -> Removal:
    """Remove what no live checkpoint names and is older than a grace.

    Where nothing is that old by this machine's clock, nothing is written. What is then removed is that old by the
    store's clock as well, which has dated the catalog just before. A save that is under way here and began before
    begins again. Killed at any moment, this leaves every live checkpoint whole, and the rest of the orphans for the
    next time.

    Costs beside what `find_run_orphans` does: a swap of the catalog (a GET and a PUT), a HEAD, a DELETE per thousand
    orphans.

    Args:
        store: Opened at the run.
        grace_seconds: Age from which an orphan is removed; 0 removes all.
        timeout_seconds: Until when requests are repeated.
        clock: For tests.
        sleep: For tests.
        uniform: For tests.

    Raises:
        CheckpointNotFoundError: There is no run here, or it has lost its catalog.
        CorruptCheckpointError: The catalog or a live manifest is damaged: what is named cannot be known.
        UnsupportedFormatError: A newer version wrote one of them.
        CommitConflictError: Another run was begun here meanwhile, or checkpoints were retired faster than their
            manifests were read. Nothing was removed.
        CommitUnknownError: The store never said whether the catalog was swapped. Nothing was removed.
        InvalidArgumentError: The store cannot replace an object on condition; or the grace is negative, or not finite.
        StorageError: The store refused, or did not answer until the time was over. What could not be deleted for other
            reasons is returned.
    """
    require_grace(grace_seconds)
    deadline, named = Deadline(timeout_seconds), Named()
    asking = RetryingStore(store, deadline, sleep=sleep, random=lambda: uniform(0, 1))
    # Before the catalog is read: what a save puts after this is not in the list, whatever it commits.
    listed = _listed(asking)
    before, not_named = _live(store, named, deadline, listed)
    seen = _found(listed, before, not_named, now_seconds=clock(), grace_seconds=grace_seconds)
    if not seen.old:
        return Removal(removed=(), kept=seen.young)
    floor = 1 + max(map(_revision, seen.old))

    asked: list[int] = []

    def change(now: Catalog) -> Catalog | None:
        if now.run_id != before.run_id:
            raise CommitConflictError("Another run was begun here meanwhile; nothing was removed.", url=store.url)
        asked.append(now.revision)
        if now.floor >= floor and now.revision > asked[0]:
            return None
        # Swapped also where the floor is high enough: that dates the catalog.
        return raised(now, floor) or refreshed(now)

    swap(store, change, deadline=deadline, sleep=sleep, uniform=uniform)
    # Whoever committed before that may name what was an orphan; after it nobody can.
    after, not_named = _live(store, named, deadline, seen.old)
    found = run_orphans(
        seen.old,
        not_named,
        revision=after.revision,
        now_seconds=asking.head(CATALOG_KEY).modified_seconds,
        grace_seconds=grace_seconds,
    )
    # Manifests first: what is half removed is no checkpoint to anybody, not even to `recover`.
    failed = delete_all(asking, sorted(info.key for info in found.old))
    removed = tuple(info for info in found.old if info.key not in failed)
    logger.info("%s: removed %d orphans, %d failed", store.url, len(removed), len(failed))
    return Removal(removed=removed, kept=seen.young + found.young, failed=failed)


def is_run(store: ObjectStore, *, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
    """Whether a run is here: a catalog, or manifests of one that lost it. A HEAD; a LIST if there is no catalog."""
    asking = RetryingStore(store, Deadline(timeout_seconds))
    try:
        asking.head(CATALOG_KEY)
    except ObjectNotFoundError:
        return any(revision_of(info.key) is not None for info in asking.list(MANIFESTS_PREFIX))
    return True


def _listed(store: ObjectStore) -> list[ObjectInfo]:
    prefixes = (MANIFESTS_PREFIX, SHARDS_PREFIX)
    return [info for prefix in prefixes for info in store.list(prefix) if revision_of(info.key) is not None]


def _live(
    store: ObjectStore, named: Named, deadline: Deadline, listed: Sequence[ObjectInfo]
) -> tuple[Catalog, set[str]]:
    """The catalog as it is now, and which keys of a list none of its checkpoints names."""
    for _ in range(_LOOKS_MAX):
        seen = read_catalog(RetryingStore(store, deadline))
        if seen is None:
            raise _lost(store) if listed else not_found(store)
        unreadable = named.read(store, seen.catalog.entries, deadline)
        if not unreadable:
            return seen.catalog, named.not_named((info.key for info in listed), seen.catalog.entries)
        for entry, error in unreadable.items():
            # Retired while it was looked for. What it shared with others may be named by one that is newer still.
            if not isinstance(error, CheckpointNotFoundError):
                raise type(error)(
                    "A live checkpoint's manifest cannot be read, so that what it names cannot be told from orphans; "
                    "nothing was removed. `dcp-remote rm` gives the checkpoint up.",
                    url=store.url,
                    step=entry.step,
                    cause=error,
                ) from error
    raise CommitConflictError("Checkpoints are retired here again and again; nothing was removed.", url=store.url)


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
    assert revision is not None, "only names of ours are listed"
    return revision


def _lost(store: ObjectStore) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        "This run has lost its catalog.json, so that what is live cannot be known; nothing was removed. `dcp-remote "
        "recover` makes it again from the manifests.",
        url=store.url,
    )
