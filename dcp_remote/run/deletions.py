"""Deletions in a run: first checkpoints from the catalog, then objects from the store.

An object that a live checkpoint named, and none names any more, can never be named again: a save that began before is
below the floor, and a save that reuses shards commits only if their checkpoint is still live. So the objects can be
deleted at any time, in any order, by any process; a crash before that leaves orphans, which gc removes.

An attempt that can still be committed must keep its objects. So the floor is first raised above replaced checkpoints
and failed attempts; one that is not in the catalog after that swap can never become live again. A shard stays if a live
checkpoint names it, because its save reused the shard meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dcp_remote.common.deadline import Deadline
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
    raise_floor,
    require_owner,
    retire_entries,
    thin_entry,
)
from dcp_remote.format.keys import manifest_key, revision_of
from dcp_remote.run.catalog_store import require_catalog, swap
from dcp_remote.run.live_shards import LiveShards
from dcp_remote.run.lookup import find_entry, read_entry
from dcp_remote.run.retention import ChooseToDelete, Decision, Retention, decide, decide_by
from dcp_remote.run.thinning import drop_keys
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.deletion_queue import DeletionQueue
from dcp_remote.storage.retrying import RetryingStore

logger = logging.getLogger(__name__)

# Bounds memory: the new manifests are held until all others were read. The other checkpoints are thinned next time.
_THINNED_AT_ONCE_MAX = 16

# Function from a catalog to the decision about its checkpoints, called with each that a swap finds; raises to refuse.
Choose = Callable[[Catalog], Decision]


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of retiring and thinning."""

    retired: tuple[int, ...] = ()  # steps, ascending
    thinned: tuple[int, ...] = ()  # steps of the checkpoints that lost their optimizer, ascending
    reason: str | None = None  # why not everything was done; None if it was


def describe_unreadable(entry: Entry, error: object, consequence: str = "retention deletes nothing") -> str:
    """Return that the manifest of a checkpoint cannot be read, what follows, and the error."""
    return f"the manifest of step {entry.step} cannot be read, so that {consequence}: {error}"


@dataclass(frozen=True, slots=True)
class _Noted:
    """Checkpoint or attempt that may not be live: its run, the entry that it has or would have in the catalog."""

    run_id: str
    entry: Entry
    keys: frozenset[str] | None  # shards that its save put; None if its manifest is to be read for them


class Deletions:
    """Deletions in a run by one process: a manager's coordinator, or a command. For one thread at a time.

    The shards that each live manifest names are remembered, so that a manifest is read at most once (and once more to
    be thinned).
    """

    def __init__(self, store: ObjectStore) -> None:
        """Store the settings; no request."""
        self._store = store
        self.queue = DeletionQueue(store)  # objects that may be deleted, since no checkpoint names them, nor can later
        self.named = LiveShards()  # shards that each manifest names, as far as they were read or remembered
        self._noted: dict[str, _Noted] = {}  # by the key of the manifest
        self._told: set[str] = set()  # keys of unreadable manifests of which the log tells
        # Keys of manifests without any of these top-level keys of the state dict, so that there is nothing to thin.
        self._bare: set[tuple[str, tuple[str, ...]]] = set()

    @property
    def is_done(self) -> bool:
        """True if nothing is left to look up or to delete."""
        return not self._noted and not self.queue

    def note(self, run_id: str, entry: Entry, keys: Iterable[str] | None = None) -> None:
        """Note a checkpoint or an attempt that may not be live, for `settle`.

        The entry of an attempt is the one that it would have had. `keys` are those of the shards that its save put; if
        None, its manifest is read for them.
        """
        before = self._noted.get(entry.manifest)
        if keys is not None:
            keys = frozenset(keys) | (before.keys or frozenset() if before is not None else frozenset())
        self._noted[entry.manifest] = _Noted(run_id, entry, keys)

    def settle(self, *, deadline: Deadline, catalog: Catalog | None = None) -> None:
        """Queue for deletion the objects of what was noted and can never become live. Nothing is deleted yet.

        Costs no request if nothing is noted; a GET and a PUT if the floor of `catalog`, which the caller knows to be
        there, is too low; and a GET for each manifest that may name the same shards and is not known yet. After an
        error all stays noted.
        """
        if not self._noted:
            return
        if catalog is None or catalog.floor < self._floor(catalog):
            catalog = swap(self._store, lambda now: raise_floor(now, self._floor(now)), deadline=deadline)
        # The catalog does not tell what became of attempts of another run, or of a history that was lost.
        self._noted = {
            key: noted
            for key, noted in self._noted.items()
            if noted.run_id == catalog.run_id and noted.entry.began_revision < catalog.floor
        }
        self._collect(catalog, set(self._noted), deadline)

    def apply(
        self,
        retention: Retention | ChooseToDelete,
        *,
        deadline: Deadline,
        catalog: Catalog | None = None,
        owner: Owner | None = None,
        planned: tuple[Catalog, Decision] | None = None,
    ) -> Applied:
        """Retire and thin the checkpoints that a retention does not keep (whole); nothing is deleted yet.

        The decision is made on the very catalog that is swapped, so that a pin or a checkpoint that came in between
        counts; a function of the user is called with each. While the manifest of a live checkpoint cannot be read,
        nothing is retired or thinned, since the other checkpoints may be needed in its place.

        `catalog` is one that the caller knows to be there, which saves a GET. `owner` is the job whose retention this
        is, None for a tool; a newer job's retention decides instead (`FencedError`). `planned` is an earlier catalog
        and the decision on it, which a user has seen: nothing else is retired or thinned.

        Costs a GET and, if there is something to do, a GET and a PUT, a GET for each live manifest that is not known
        yet, and a GET and a PUT for each checkpoint that is thinned. After a crash at any moment the catalog is the old
        or the new one, and objects that no live checkpoint names are orphans. After `CommitUnknownError`, `settle`
        finds out whether the catalog was swapped.
        """
        if isinstance(retention, Retention):
            choose: Choose = partial(self.decide, retention)
            keys = retention.optimizer_keys
        else:
            choose, keys = partial(decide_by, retention), ()
        if planned is not None:
            choose = partial(_choose_planned, *planned, choose)
        return self._carry_out(choose, keys=keys, deadline=deadline, catalog=catalog, owner=owner)

    def decide(self, retention: Retention, now: Catalog) -> Decision:
        """Return what `apply` would retire and thin in this catalog. No request."""
        bare = {manifest for manifest, keys in self._bare if keys == retention.optimizer_keys}
        return decide(retention, now.entries, bare=bare)

    def retire(
        self,
        steps: Sequence[int | str],
        *,
        deadline: Deadline,
        force: bool = False,
        catalog: Catalog | None = None,
        owner: Owner | None = None,
    ) -> Applied:
        """Retire live checkpoints by their steps or names in `catalog`, abandoned ones too; nothing is deleted yet.

        Pinned checkpoints, the newest, and those that get a name meanwhile are refused without `force`; after an error
        nothing is changed, but after `CommitUnknownError` that is not known. Works on a damaged checkpoint, too, and
        beside one. Shards that an unreadable manifest may name are left to gc. Costs as `apply`.
        """
        names: dict[str, tuple[str, ...]] = {}  # by save_id

        def choose(now: Catalog) -> Decision:
            # The checkpoints of the first catalog are meant, and not those that are saved at their steps meanwhile.
            if not names:
                chosen = [find_entry(now, step, url=self._store.url) for step in steps]
                names.update((entry.save_id, entry.names) for entry in chosen)
            entries = [entry for entry in now.entries if entry.save_id in names]
            if not force:
                require_expendable(now, entries)
                _require_no_new_name(entries, names)
            return Decision(retire=tuple(entry.step for entry in entries), thin=())

        return self._carry_out(choose, keys=(), deadline=deadline, catalog=catalog, owner=owner, explicit=True)

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
        now = catalog or require_catalog(RetryingStore(self._store, deadline))
        require_owner(now, owner)
        decision = choose(now)
        if not decision.retire and not decision.thin:
            return Applied()
        ready, unreadable = self._prepared(now, frozenset(decision.thin), keys, deadline)
        # The manifests of those to be retired are read, too: their shards are what may be deleted.
        known = [entry for entry in now.entries if entry not in unreadable]
        unreadable |= self.named.read(self._store, known, deadline)
        damaged = {entry.step for entry, error in unreadable.items() if not isinstance(error, CheckpointNotFoundError)}
        if not explicit and not damaged.issubset(decision.retire):
            return Applied(reason=self._tell(unreadable))
        if not decision.retire and not ready:
            return Applied()
        for thin, body in ready.values():
            self.note(now.run_id, thin, ())
            # No other save writes this key, and none reads it before the swap, so that the PUT can be repeated.
            RetryingStore(self._store, deadline).put(thin.manifest, [body])
        thinned = {replaced: thin for replaced, (thin, _) in ready.items()}
        # Checkpoints that go: by save if retired, since another job may thin the checkpoint before the swap, and then
        # deletes what it thinned; by manifest if thinned.
        gone: dict[str, Entry] = {}

        def change(run: Catalog) -> Catalog | None:
            require_owner(run, owner)
            decided = choose(run)
            after = _changed(run, decided, thinned)
            kept, retiring = {entry.manifest for entry in (after or run).entries}, frozenset(decided.retire)
            for entry in run.entries:
                if entry.manifest not in kept:
                    gone[entry.save_id if entry.step in retiring else entry.manifest] = entry
            return after

        try:
            after = swap(self._store, change, deadline=deadline)
        finally:
            # Even if the swap raised, the catalog may have been swapped.
            for entry in gone.values():
                self.note(now.run_id, entry)
        return self._applied(after, gone, thinned, deadline)

    def _prepared(
        self, now: Catalog, steps: Collection[int], keys: tuple[str, ...], deadline: Deadline
    ) -> tuple[dict[str, tuple[Entry, bytes]], dict[Entry, DcpRemoteError]]:
        """Make thinned manifests, by the key of the one that each replaces; and errors of those that are unreadable.

        The entry of one has its key, and the revision at which thinning began, for `note`.
        """
        ready: dict[str, tuple[Entry, bytes]] = {}
        unreadable: dict[Entry, DcpRemoteError] = {}
        for entry in now.entries:
            if entry.step not in steps or len(ready) == _THINNED_AT_ONCE_MAX:
                continue
            try:
                manifest = read_entry(self._store, entry, retry_seconds=deadline.remaining_seconds(), whole=False)
            except (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError) as error:
                unreadable[entry] = error
                continue
            self.named.remember(entry.manifest, manifest.shards.keys)
            thin = drop_keys(manifest, keys)
            if thin is manifest or thin.run is None:
                self._bare.add((entry.manifest, keys))
                continue
            # The key has the revision of the catalog that was read, not that of the checkpoint: gc goes by it.
            key = manifest_key(revision=now.revision, step=entry.step)
            made = replace(
                entry,
                manifest=key,
                thinned=thin.run.thinned,
                size_bytes=thin.total_bytes,
                began_revision=now.revision,
            )
            ready[entry.manifest] = made, manifest_json.encode(thin)
            self.named.remember(key, thin.shards.keys)
        return ready, unreadable

    def _applied(
        self, after: Catalog, gone: Mapping[str, Entry], ready: Mapping[str, Entry], deadline: Deadline
    ) -> Applied:
        """Queue for deletion what may be deleted after a swap, and tell what was retired and thinned."""
        live, live_saves = {entry.manifest for entry in after.entries}, {entry.save_id for entry in after.entries}
        try:
            # Whichever process carried it out, perhaps this one by a swap whose answer was lost: an object that is
            # named no more can never be named again.
            mine = {*(entry.manifest for entry in gone.values()), *(thin.manifest for thin in ready.values())}
            reason = self._collect(after, mine, deadline)
        except StorageError as error:
            reason = f"not all manifests of live checkpoints could be read, so that shards are deleted later: {error}"
        self._bare = {(manifest, keys) for manifest, keys in self._bare if manifest in live}
        return Applied(
            retired=tuple(
                sorted(entry.step for key, entry in gone.items() if key == entry.save_id and key not in live_saves)
            ),
            thinned=tuple(sorted(gone[manifest].step for manifest, thin in ready.items() if thin.manifest in live)),
            reason=reason,
        )

    def _collect(self, after: Catalog, manifests: Iterable[str], deadline: Deadline) -> str | None:
        """Queue for deletion what was noted under these manifests, is not live, and no live checkpoint names.

        `after` is a catalog after which none of it can become live. Returns the reason why shards are left to gc; None
        if none are. After a `StorageError` what is not settled stays noted.
        """
        live = {entry.manifest for entry in after.entries}
        asked = {key: self._noted[key] for key in manifests if key in self._noted}
        gone = {key: noted for key, noted in asked.items() if key not in live}
        unknown = [noted.entry for noted in gone.values() if noted.keys is None]
        unreadable = self.named.read(self._store, unknown, deadline)
        shards: set[str] = set()
        for key, noted in gone.items():
            shards.update(noted.keys if noted.keys is not None else self.named.shards_of(key))
        # A checkpoint that names a shard began no earlier than the shard's own save.
        oldest = min((revision_of(key) or 0 for key in shards), default=0)
        later = [entry for entry in after.entries if entry.began_revision >= oldest] if shards else []
        # Before the next read, which can raise: the manifests may be deleted whatever it finds.
        self.queue.add(gone)
        unreadable_live = self.named.read(self._store, later, deadline)
        if not unreadable_live:
            self.queue.add(self.named.not_named(shards, later))
        for key in asked:
            del self._noted[key]
        self.named.forget_others(live | set(self._noted))
        unreadable |= unreadable_live
        return self._tell(unreadable, "shards that it may name are left to gc") if unreadable else None

    def _tell(self, unreadable: Mapping[Entry, DcpRemoteError], *consequence: str) -> str:
        """Return the reason why manifests cannot be read and what follows; log it once for each checkpoint."""
        reason = describe_unreadable(*next(iter(unreadable.items())), *consequence)
        new = {entry.manifest for entry in unreadable} - self._told
        if new:
            self._told |= new
            logger.warning("%s: %s", self._store.url, reason)
        return reason

    def _floor(self, now: Catalog) -> int:
        """Return the floor below which nothing noted here can be committed any more."""
        began = [noted.entry.began_revision for noted in self._noted.values() if noted.run_id == now.run_id]
        return max((revision + 1 for revision in began if revision <= now.revision), default=0)


def _choose_planned(before: Catalog, planned: Decision, choose: Choose, now: Catalog) -> Decision:
    """Return what is chosen now, without what was not planned: other steps, and steps that were saved again since."""
    decided, known = choose(now), {entry.save_id for entry in before.entries}
    meant = {entry.step for entry in now.entries if entry.save_id in known}
    return Decision(
        retire=tuple(step for step in decided.retire if step in meant.intersection(planned.retire)),
        thin=tuple(step for step in decided.thin if step in meant.intersection(planned.thin)),
    )


def _changed(run: Catalog, decision: Decision, ready: Mapping[str, Entry]) -> Catalog | None:
    """Return the catalog after a decision; None if nothing is left to do. Thins only where a new manifest is ready."""
    after = run
    thinning, retiring = frozenset(decision.thin), frozenset(decision.retire)
    for entry in run.entries:
        thin = ready.get(entry.manifest)
        if thin is None or entry.step not in thinning:
            continue
        try:
            after = thin_entry(after, thin, seen=entry.manifest) or after
        except BeginAgainError:
            # gc may have removed the new manifest, taking it for an orphan; the next call thins.
            continue
    after = retire_entries(after, [entry.save_id for entry in run.entries if entry.step in retiring]) or after
    # A swap is one revision, however many changes it makes.
    return None if after is run else replace(after, revision=run.revision + 1)


def _require_no_new_name(entries: Iterable[Entry], before: Mapping[str, Collection[str]]) -> None:
    for entry in entries:
        if not set(entry.names).issubset(before[entry.save_id]):
            raise InvalidArgumentError(
                "The checkpoint got a name meanwhile; nothing was deleted. Look at the run, then delete again.",
                step=entry.step,
                names=", ".join(entry.names),
            ).advise(force="force=True deletes it")


def require_expendable(now: Catalog, entries: Iterable[Entry]) -> None:
    """Refuse to retire a pinned checkpoint, or the newest."""
    newest = now.latest()
    for entry in entries:
        if entry.pinned:
            raise InvalidArgumentError(
                "The checkpoint is pinned. Unpin it first (`dcp-remote pin --undo`).", step=entry.step
            ).advise(force="force=True deletes it")
        if entry == newest:
            raise InvalidArgumentError(
                "This is the newest checkpoint, from which a job would go on.", step=entry.step
            ).advise(force="force=True deletes it")
