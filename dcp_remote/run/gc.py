"""Garbage collection: remove orphans, the manifests and shards that no live checkpoint names.

Interrupted, failed and replaced saves leave orphans, and so do jobs that may not delete. Objects of a save under way
look the same. So no save that began before may commit any more when orphans are deleted:

- In a run, the catalog's floor is raised above the revisions in the orphans' names; a save that began below the floor
  cannot commit. Abandoned checkpoints are live, and so no orphans, until they are retired.
- The manifest of a checkpoint by itself is put again under a new version, or a tombstone where there is none; a save
  that began before finds another version than it saw.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    ConditionFailedError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.format import manifest_json
from dcp_remote.format.catalog import CATALOG_KEY, Catalog, Entry, raise_floor, raise_revision
from dcp_remote.format.keys import MANIFESTS_PREFIX, SHARDS_PREFIX, is_written_key, revision_of
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.run.catalog_store import Change, missing_catalog, read_catalog, swap
from dcp_remote.run.conditional_put import find_object, pause, require_compare_and_swap
from dcp_remote.run.live_shards import LiveShards
from dcp_remote.run.lookup import not_found, read_stored
from dcp_remote.storage.base import Content, ObjectInfo, ObjectStore
from dcp_remote.storage.conditional_writes import require_conditional_writes
from dcp_remote.storage.deletion_queue import DeletionQueue
from dcp_remote.storage.retrying import RetryingStore

# Far longer than a save, since removing objects of a save under way makes it fail.
GRACE_SECONDS = 24 * 3600.0

# As long as a save may take, since an outage of the store lasts minutes and no user waits for gc.
TIMEOUT_SECONDS = 1500.0

# After so many attempts the checkpoints of the run are retired faster than their manifests can be read.
_LOOKS_MAX = 5

# A manifest that changes this often belongs to a checkpoint in use.
_REFUSALS_MAX = 5


@dataclass(frozen=True, slots=True)
class Orphans:
    """Objects that no live checkpoint names."""

    old: tuple[ObjectInfo, ...]  # at least as old as the grace; of `remove_orphans` those that were removed
    young: tuple[ObjectInfo, ...]  # younger than the grace, or of a later catalog; perhaps of a save under way
    abandoned: tuple[Entry, ...] = ()  # live checkpoints that a later job left behind; no orphans, for information
    is_run: bool = False  # False for a checkpoint by itself, whose orphans are all shards
    failed: Mapping[str, StorageError] = field(default_factory=dict)  # errors of old ones that stay, by key


def find_orphans(
    store: ObjectStore,
    *,
    grace_seconds: float = GRACE_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Orphans:
    """Find the orphans that `remove_orphans` would remove if this machine's clock agreed with the store's; only reads.

    Costs two LISTs (a request per thousand objects; half a gigabyte of memory per million) and a GET of the catalog; in
    a run also a GET of each live manifest, else a GET of the manifest. If one of these is damaged, or of a newer
    version, the objects in use are not known, and the error says so.
    """
    deadline = Deadline(timeout_seconds)
    seen = _look(store, RetryingStore(store, deadline), LiveShards(), deadline)
    return seen.orphans(now_seconds=time.time(), grace_seconds=grace_seconds)


def remove_orphans(
    store: ObjectStore,
    *,
    grace_seconds: float = GRACE_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
    clock: Callable[[], float] = time.time,
) -> Orphans:
    """Remove the orphans that are at least as old as a grace, and return them; `clock` is Unix time, for tests.

    Nothing is written unless an orphan is that old by this machine's clock. An orphan is removed only if it is that old
    by the store's clock, too, which is read from the catalog or manifest that was just put. A save that is under way at
    that PUT begins again in a run, and else fails with `CommitConflictError`. Of a checkpoint by itself only the
    manifest's version changes. After a crash at any moment every live checkpoint is whole, and the next call removes
    the rest.

    Costs as `find_orphans`; then in a run a swap of the catalog (a GET and a PUT) and a GET of the catalog and of each
    live manifest that is new, else a conditional PUT of the manifest, and all again after a PUT that failed; then a
    HEAD, and a DELETE per thousand orphans.

    Errors are those of `find_orphans`; also `CommitConflictError` (other saves changed the manifest at each attempt, or
    another run was begun here), `CommitUnknownError` (of the swap), and `PermissionDeniedError` (no orphan may be
    deleted). Nothing was removed then; other failures to delete are returned.
    """
    require_compare_and_swap(
        store, "This store cannot replace an object on condition, and so gc cannot tell orphans from a save under way."
    )
    deadline, live = Deadline(timeout_seconds), LiveShards()
    reading, refusals = RetryingStore(store, deadline), 0
    for attempt in itertools.count(1):
        seen = _look(store, reading, live, deadline)
        found = seen.orphans(now_seconds=clock(), grace_seconds=grace_seconds)
        if not found.old:
            return found
        if seen.catalog is not None:
            swap(store, _raise_floor(store, seen.catalog, found.old), deadline=deadline)
            # A save that committed before the swap may name a former orphan; after the swap none can.
            after = _live(store, live, deadline, found.old)
            if after is None:
                raise missing_catalog(store)
            seen = after
            break
        # Not settled by reading: after a failure all begins again with the listing, whatever became of the PUT.
        try:
            _put_again(reading, seen.stored, deadline)
            break
        except ConditionFailedError as error:
            refusals += 1
            if refusals >= _REFUSALS_MAX:
                raise CommitConflictError(
                    "The manifest changed again and again; nothing was removed. Run gc when no job saves here.",
                    url=store.url,
                    cause=error,
                ) from error
            pause(deadline, attempt)
        except TransientStorageError:
            if not pause(deadline, attempt):
                raise
    now_seconds = reading.head(MANIFEST_KEY if seen.catalog is None else CATALOG_KEY).modified_seconds
    removable = replace(seen, listed=found.old).orphans(now_seconds=now_seconds, grace_seconds=grace_seconds)
    return delete_orphans(store, replace(removable, young=found.young + removable.young), deadline)


def delete_orphans(store: ObjectStore, found: Orphans, deadline: Deadline) -> Orphans:
    """Delete the old orphans, which no save can name any more, and return the result; a DELETE per thousand.

    If none of the first thousand may be deleted, no more is tried, and the error is raised.
    """
    queue = DeletionQueue(store)
    queue.add(info.key for info in found.old)
    deleted = queue.delete(deadline=deadline, pause_seconds=0)
    errors = list(deleted.failed.values())
    if errors and not deleted.removed and all(isinstance(error, PermissionDeniedError) for error in errors):
        raise errors[0]
    late = TransientStorageError("The deadline passed before the object was deleted; run gc again.", url=store.url)
    failed = {**dict.fromkeys(queue, late), **deleted.failed}
    return replace(found, old=tuple(info for info in found.old if info.key not in failed), failed=failed)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Objects at a URL, and which of them are in use."""

    listed: Sequence[ObjectInfo]  # manifests and shards of a run, or shards of a checkpoint by itself
    not_named: Collection[str]  # keys of those that no live checkpoint names
    catalog: Catalog | None = None  # of the run, if there is one
    stored: Content | None = None  # object at the key of the manifest of a checkpoint by itself

    def orphans(self, *, now_seconds: float, grace_seconds: float) -> Orphans:
        """Sort the orphans by age, by the clock that dates the objects and gives `now_seconds`. Pure.

        An orphan is old from the grace on; with 0 every orphan is, even one dated in the future. An object whose name
        has a later revision than the catalog belongs to a save that saw another catalog: it counts as young.
        """
        old: list[ObjectInfo] = []
        young: list[ObjectInfo] = []
        for info in self.listed:
            if info.key in self.not_named:
                is_old = grace_seconds == 0 or now_seconds - info.modified_seconds >= grace_seconds
                is_later = self.catalog is not None and _revision(info) > self.catalog.revision
                (old if is_old and not is_later else young).append(info)
        entries = self.catalog.entries if self.catalog is not None else ()
        abandoned = tuple(entry for entry in entries if entry.abandoned)
        return Orphans(tuple(old), tuple(young), abandoned, is_run=self.catalog is not None)


def _look(store: ObjectStore, reading: ObjectStore, live: LiveShards, deadline: Deadline) -> _Seen:
    # The listing comes before the catalog or manifest is read, so that it has no object of a save that commits in
    # between.
    manifests = [info for info in reading.list(MANIFESTS_PREFIX) if revision_of(info.key) is not None]
    shards = list(reading.list(SHARDS_PREFIX))
    listed = [*manifests, *(info for info in shards if revision_of(info.key) is not None)]
    in_run = _live(store, live, deadline, listed)
    if in_run is not None:
        return in_run
    if manifests:
        raise missing_catalog(store)
    listed = [info for info in shards if is_written_key(info.key)]
    not_named = {info.key for info in listed}
    stored, manifest = read_stored(reading)
    if stored is None and not listed:
        raise not_found(reading)  # most likely a wrong URL, which must not look like a clean checkpoint
    named = manifest.shards.keys if manifest is not None else ()
    return _Seen(listed, not_named.difference(named), stored=stored)


def _live(store: ObjectStore, live: LiveShards, deadline: Deadline, listed: Sequence[ObjectInfo]) -> _Seen | None:
    """Read the catalog and the live manifests; return which objects of a listing they name; None without a catalog."""
    for _ in range(_LOOKS_MAX):
        catalog = read_catalog(RetryingStore(store, deadline))
        if catalog is None:
            return None
        unreadable = live.read(store, catalog.entries, deadline)
        if not unreadable:
            return _Seen(listed, live.not_named((info.key for info in listed), catalog.entries), catalog=catalog)
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


def _raise_floor(store: ObjectStore, before: Catalog, old: Iterable[ObjectInfo]) -> Change:
    """Return the change of a run's catalog after which no save that may name these orphans can commit."""
    floor = 1 + max(map(_revision, old))
    revisions: list[int] = []

    def change(now: Catalog) -> Catalog | None:
        if now.run_id != before.run_id:
            raise CommitConflictError("Another run was begun here meanwhile; nothing was removed.", url=store.url)
        revisions.append(now.revision)
        if now.floor >= floor and now.revision > revisions[0]:
            return None
        # Swapped even where the floor is high enough, since the swap gives the catalog a fresh date.
        return raise_floor(now, floor) or raise_revision(now)

    return change


def _put_again(store: ObjectStore, stored: Content | None, deadline: Deadline) -> None:
    """Put the manifest again under a new version, or a tombstone where there is none.

    Refused where a run was begun meanwhile, whose catalog a tombstone would hide.
    """
    if stored is None and find_object(store, CATALOG_KEY) is not None:
        raise CommitConflictError("A run was begun here meanwhile; nothing was removed. Run gc again.", url=store.url)
    require_conditional_writes(store, deadline, swaps=True)
    nonce = uuid.uuid4().hex
    body = manifest_json.make_tombstone(nonce, ()) if stored is None else manifest_json.reencode(stored.data, nonce)
    store.put(MANIFEST_KEY, [body], condition="absent" if stored is None else stored.version)


def _revision(info: ObjectInfo) -> int:
    revision = revision_of(info.key)
    assert revision is not None, "other names are not listed"
    return revision
