"""Retire and thin checkpoints of a run: first in the catalog, then in the store.

An object that a live checkpoint named, and none names any more, can never be named again: a save that began before is
below the floor, and a save that reuses shards commits only if their checkpoint is still live. So the objects can be
deleted at any time, in any order, by any process; a crash before that leaves orphans, which gc removes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dcp_remote.common.deadline import Deadline, jitter
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    StorageError,
    UnsupportedFormatError,
)
from dcp_remote.format import manifest_json
from dcp_remote.format.catalog import (
    BeginAgainError,
    Catalog,
    Entry,
    Owner,
    require_owner,
    retire_entries,
    thin_entry,
)
from dcp_remote.format.keys import manifest_key
from dcp_remote.run.catalog_store import require_catalog, swap
from dcp_remote.run.leftovers import Leftovers
from dcp_remote.run.lookup import find_entry, read_entry
from dcp_remote.run.retention import Candidate, ChooseToDelete, Decision, Retention, decide, decide_by
from dcp_remote.run.thinning import drop_keys
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.deletion_queue import KEYS_PER_DELETE, PAUSE_SECONDS, Deleted
from dcp_remote.storage.retrying import RetryingStore

# Bounds memory: the new manifests are held until all others were read. The other checkpoints are thinned next time.
_THINNED_AT_ONCE_MAX = 16

# Function from a catalog to the decision about its checkpoints, called with each that a swap finds; raises to refuse.
Choose = Callable[[Catalog], Decision]


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of retiring and thinning.

    Attributes:
        catalog: Catalog of the run afterwards.
        retired: Steps of the checkpoints that were retired, ascending.
        thinned: Steps of the checkpoints that lost their optimizer, ascending.
        reason: Reason why not everything was done; None if it was.
    """

    catalog: Catalog
    retired: tuple[int, ...] = ()
    thinned: tuple[int, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class _Thin:
    """Thinned manifest, ready to be put."""

    key: str
    body: bytes
    keys: tuple[str, ...]
    size_bytes: int
    began: int


class Maintenance:
    """Retention and deletion of a run by one process: a manager's coordinator, or a command. For one thread at a time.

    The shards that each live manifest names are remembered, so that a manifest is read at most once (and once more to
    be thinned).

    Args:
        store: Store opened at the run.
        sleep: Waits so many seconds; an argument for tests.
        uniform: Draws a number between two; an argument for tests.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = jitter,
    ) -> None:
        """Store the settings; no request."""
        self._store = store
        self._sleep, self._uniform = sleep, uniform
        self._leftovers = Leftovers(store, sleep=sleep, uniform=uniform)
        self._named = self._leftovers.named
        # Keys of manifests without any of these top-level keys of the state dict, so that there is nothing to thin.
        self._bare: set[tuple[str, tuple[str, ...]]] = set()

    @property
    def pending(self) -> int:
        """Number of objects that may be deleted and are not yet."""
        return len(self._leftovers.pending)

    @property
    def is_done(self) -> bool:
        """True if nothing is left to look up or to delete."""
        return not self._leftovers and not self.pending

    def remember(self, manifest_key: str, shard_keys: Iterable[str]) -> None:
        """Remember the shards that a manifest of this process names, so that it need not be read."""
        self._named.remember(manifest_key, shard_keys)

    def note(self, run_id: str, entry: Entry, keys: Iterable[str] | None = None) -> None:
        """Note a checkpoint that was replaced, or an attempt that may not be committed; see `Leftovers.note`."""
        self._leftovers.note(run_id, entry, keys)

    def queue_deletion(self, keys: Iterable[str]) -> None:
        """Queue objects for deletion; no checkpoint names them, nor can any later."""
        self._leftovers.pending.add(keys)

    def settle(self, *, deadline: Deadline, catalog: Catalog | None = None) -> None:
        """Queue for deletion what was noted and cannot become live; see `Leftovers.settle`. Nothing is deleted yet."""
        self._leftovers.settle(deadline=deadline, catalog=catalog)

    def apply(
        self,
        retention: Retention | ChooseToDelete,
        *,
        deadline: Deadline,
        catalog: Catalog | None = None,
        owner: Owner | None = None,
    ) -> Applied:
        """Retire and thin the checkpoints that a retention does not keep (whole); nothing is deleted yet.

        The decision is made on the very catalog that is swapped, so that a pin or a checkpoint that came in between
        counts. While the manifest of a live checkpoint cannot be read, nothing is retired or thinned, since the other
        checkpoints may be needed in its place.

        Costs a GET and, if there is something to do, a GET and a PUT, a GET for each live manifest that is not known
        yet, and a GET and a PUT for each checkpoint that is thinned. After a crash at any moment the catalog is the old
        or the new one, and objects that no live checkpoint names are orphans.

        Args:
            retention: Checkpoints to keep, and top-level keys of the state dict that thinning drops (a checkpoint
                without one of these keys counts as thinned); or a function that returns the steps to delete, which
                is called with each catalog that a swap finds.
            deadline: Deadline of all requests.
            catalog: Catalog that the caller knows to be there, which saves the first GET.
            owner: Job whose retention this is; None for a tool.

        Raises:
            CheckpointNotFoundError: There is no run here.
            FencedError: A newer job owns the run, and its retention decides; nothing was retired or thinned.
            CommitUnknownError: It is not known whether the catalog was swapped; `settle` finds out.
            StorageError: The store refused, or did not answer by the deadline.
            CorruptCheckpointError: The catalog is damaged.
            Exception: Whatever a function of the user raises; nothing was changed.
        """
        if not isinstance(retention, Retention):
            choose = partial(decide_by, retention)
            return self._carry_out(choose, keys=(), deadline=deadline, catalog=catalog, owner=owner)
        keys = retention.optimizer_keys

        def choose_by_rules(now: Catalog) -> Decision:
            return decide(retention, [self._candidate(entry, keys) for entry in now.entries])

        return self._carry_out(choose_by_rules, keys=keys, deadline=deadline, catalog=catalog, owner=owner)

    def retire(
        self, steps: Sequence[int | str], *, deadline: Deadline, force: bool = False, owner: Owner | None = None
    ) -> Applied:
        """Retire checkpoints by their steps or names; nothing is deleted yet.

        Works on a damaged checkpoint, too, and beside one. Shards that an unreadable manifest may name are left to gc.

        Costs as `apply`. After a crash at any moment the catalog is the old or the new one.

        Args:
            steps: Steps or names of live checkpoints, abandoned ones included.
            deadline: Deadline of all requests.
            force: Retire pinned checkpoints, too, and the newest.
            owner: Job that asks; None for a person or a tool.

        Raises:
            FencedError: The job that asks was fenced; nothing was changed.
            CheckpointNotFoundError: No checkpoint of one of the steps or names is live; nothing was changed.
            InvalidArgumentError: One of the checkpoints is pinned, or the newest; nothing was changed.
            CommitUnknownError: It is not known whether the catalog was swapped.
            StorageError: The store refused, or did not answer by the deadline.
        """
        save_ids: set[str] = set()

        def choose(now: Catalog) -> Decision:
            # The checkpoints of the first catalog are meant, and not those that are saved at their steps meanwhile.
            if not save_ids:
                save_ids.update(find_entry(now, step, url=self._store.url).save_id for step in steps)
            entries = [entry for entry in now.entries if entry.save_id in save_ids]
            if not force:
                require_expendable(now, entries)
            return Decision(retire=tuple(entry.step for entry in entries), thin=())

        return self._carry_out(choose, keys=(), deadline=deadline, owner=owner, explicit=True)

    def delete(
        self,
        *,
        deadline: Deadline,
        stop: Callable[[], bool] = lambda: False,
        batch: int = KEYS_PER_DELETE,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> Deleted:
        """Delete the queued objects; one DELETE per batch.

        Objects whose deletion fails for now stay queued for the next call; those that fail for good are left to gc. If
        deleting is not permitted, all are left to gc; the first call logs so, and each call returns their number.

        Args:
            deadline: Deadline of all requests.
            stop: Called before each request; if it returns True, the rest stays queued.
            batch: Objects per request.
            pause_seconds: Pause between two requests, in seconds.
        """
        return self._leftovers.pending.delete(deadline=deadline, stop=stop, batch=batch, pause_seconds=pause_seconds)

    def _carry_out(
        self,
        choose: Choose,
        *,
        keys: tuple[str, ...],
        deadline: Deadline,
        catalog: Catalog | None = None,
        owner: Owner | None = None,
        explicit: bool = False,
    ) -> Applied:
        now = catalog or require_catalog(self._retrying(deadline)).catalog
        require_owner(now, owner)
        decision = choose(now)
        if not decision.retire and not decision.thin:
            return Applied(now)
        ready, unreadable = self._prepared(now, decision.thin, keys, deadline)
        # The manifests of those to be retired are read, too: their shards are what may be deleted.
        known = [entry for entry in now.entries if entry not in unreadable]
        unreadable |= self._named.read(self._store, known, deadline)
        damaged = [entry for entry, error in unreadable.items() if not isinstance(error, CheckpointNotFoundError)]
        if not explicit and any(entry.step not in decision.retire for entry in damaged):
            return Applied(now, reason=self._leftovers.why(unreadable, "retention lets nothing go"))
        if not decision.retire and not ready:
            return Applied(now)
        for replaced, thin in ready.items():
            entry = next(entry for entry in now.entries if entry.manifest == replaced)
            self.note(now.run_id, replace(entry, manifest=thin.key, began_revision=thin.began), ())
            # No other save writes this key, and none reads it before the swap, so that the PUT can be repeated.
            self._retrying(deadline).put(thin.key, [thin.body])
        to_retire: dict[str, Entry] = {}
        to_thin: dict[str, Entry] = {}

        def change(run: Catalog) -> Catalog | None:
            require_owner(run, owner)
            decided = choose(run)
            after = _changed(run, decided, ready)
            kept, retiring = {entry.manifest for entry in (after or run).entries}, frozenset(decided.retire)
            for entry in run.entries:
                if entry.manifest in kept:
                    continue
                # By the save, since another job may thin the checkpoint before the swap, and deletes what it thinned.
                if entry.step in retiring:
                    to_retire[entry.save_id] = entry
                else:
                    to_thin[entry.manifest] = entry
            return after

        try:
            after = swap(self._store, change, deadline=deadline, sleep=self._sleep, uniform=self._uniform)
        finally:
            # Even if the swap raised, the catalog may have been swapped.
            for entry in (*to_retire.values(), *to_thin.values()):
                self.note(now.run_id, entry)
        return self._settled(after, to_retire, to_thin, ready, deadline)

    def _prepared(
        self, now: Catalog, steps: Sequence[int], keys: tuple[str, ...], deadline: Deadline
    ) -> tuple[dict[str, _Thin], dict[Entry, DcpRemoteError]]:
        """Make thinned manifests, by the key of the one that each replaces; and errors of those that are unreadable."""
        ready: dict[str, _Thin] = {}
        unreadable: dict[Entry, DcpRemoteError] = {}
        chosen = frozenset(steps)
        for entry in now.entries:
            if entry.step not in chosen or len(ready) == _THINNED_AT_ONCE_MAX:
                continue
            try:
                manifest = read_entry(self._store, entry, retry_seconds=deadline.remaining_seconds())
            except (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError) as error:
                unreadable[entry] = error
                continue
            self._named.remember(entry.manifest, manifest.shards.keys)
            thin = drop_keys(manifest, keys)
            if thin is manifest or thin.run is None:
                self._bare.add((entry.manifest, keys))
                continue
            # The key has the revision of the catalog that was read, not that of the checkpoint: gc goes by it.
            ready[entry.manifest] = _Thin(
                key=manifest_key(revision=now.revision, step=entry.step),
                body=manifest_json.encode(thin),
                keys=thin.run.thinned,
                size_bytes=thin.total_bytes,
                began=now.revision,
            )
            self._named.remember(ready[entry.manifest].key, thin.shards.keys)
        return ready, unreadable

    def _settled(
        self,
        after: Catalog,
        to_retire: Mapping[str, Entry],
        to_thin: Mapping[str, Entry],
        ready: Mapping[str, _Thin],
        deadline: Deadline,
    ) -> Applied:
        """Tell what was retired and thinned, and queue for deletion what may be deleted."""
        live, live_saves = {entry.manifest for entry in after.entries}, {entry.save_id for entry in after.entries}
        reason: str | None = None
        try:
            # Whichever process carried it out, perhaps this one by a swap whose answer was lost: an object that is
            # named no more can never be named again.
            mine = {*(entry.manifest for entry in to_retire.values()), *to_thin, *(thin.key for thin in ready.values())}
            reason = self._leftovers.collect(after, mine, deadline=deadline)
        except StorageError as error:
            reason = f"not all manifests of live checkpoints could be read, so that shards are deleted later: {error}"
        self._bare = {(manifest, keys) for manifest, keys in self._bare if manifest in live}
        return Applied(
            after,
            retired=tuple(sorted(entry.step for save_id, entry in to_retire.items() if save_id not in live_saves)),
            thinned=tuple(sorted(to_thin[manifest].step for manifest, thin in ready.items() if thin.key in live)),
            reason=reason,
        )

    def _candidate(self, entry: Entry, keys: tuple[str, ...]) -> Candidate:
        return Candidate(
            step=entry.step,
            pinned=entry.pinned,
            abandoned=entry.abandoned,
            thinned=not set(keys).isdisjoint(entry.thinned) or (entry.manifest, keys) in self._bare,
            metrics=entry.metrics,
            names=entry.names,
        )

    def _retrying(self, deadline: Deadline) -> RetryingStore:
        return RetryingStore(self._store, deadline, sleep=self._sleep, random=lambda: self._uniform(0, 1))


def _changed(run: Catalog, decision: Decision, ready: Mapping[str, _Thin]) -> Catalog | None:
    """Return the catalog after a decision; None if nothing is left to do. Thins only where a new manifest is ready."""
    after = run
    thinning, retiring = frozenset(decision.thin), frozenset(decision.retire)
    for entry in run.entries:
        thin = ready.get(entry.manifest)
        if thin is None or entry.step not in thinning:
            continue
        try:
            made = thin_entry(
                after,
                entry.save_id,
                began=thin.began,
                seen=entry.manifest,
                manifest=thin.key,
                keys=thin.keys,
                size_bytes=thin.size_bytes,
            )
        except BeginAgainError:
            # gc may have removed the new manifest, taking it for an orphan; the next call thins.
            continue
        after = made or after
    after = retire_entries(after, [entry.save_id for entry in run.entries if entry.step in retiring]) or after
    # A swap is one revision, however many changes it makes.
    return None if after is run else replace(after, revision=run.revision + 1)


def require_expendable(now: Catalog, entries: Iterable[Entry]) -> None:
    """Refuse to retire a pinned checkpoint, or the newest.

    Raises:
        InvalidArgumentError: One of the checkpoints is pinned, or the newest.
    """
    newest = now.latest()
    for entry in entries:
        if entry.pinned:
            raise InvalidArgumentError(
                "The checkpoint is pinned. Unpin it first (`dcp-remote pin --undo`), or pass force=True (`--force`).",
                step=entry.step,
            )
        if entry == newest:
            raise InvalidArgumentError(
                "This is the newest checkpoint, from which a job would go on. To delete it: force=True (`--force`).",
                step=entry.step,
            )
