"""Keeping a run tidy: what retention, or a person, lets go leaves the catalog first and the store after. No torch.

What was named by a live checkpoint and is no more can never be named again: a save that began before is below the
floor, and a save that borrows must find what it borrows from live. So deleting is safe at leisure, in any order, by
anybody; a crash in between leaves orphans, which gc finds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dcp_remote import manifest_json
from dcp_remote.catalog import BeginAgainError, Catalog, Entry, retired, thinned
from dcp_remote.catalog_store import read_catalog, swap
from dcp_remote.checkpoint import read_entry
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    StorageError,
    UnsupportedFormatError,
)
from dcp_remote.leftovers import Leftovers
from dcp_remote.pending import KEYS_PER_DELETE, PAUSE_SECONDS, Deleted
from dcp_remote.retention import Candidate, Decision, Retention, decide
from dcp_remote.run_names import manifest_key
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.retrying import Deadline, RetryingStore, jitter
from dcp_remote.thinning import without

# Top-level keys of the state dict that are the optimizer's, where nobody says otherwise.
OPTIMIZER_KEYS = Retention().optimizer_keys

# Their new manifests are held until all others are known to be readable. What is left is thinned the next time.
_THINNED_AT_ONCE_MAX = 16

# What is to become of the checkpoints of a catalog; asked again on each that a swap finds. A refusal is raised.
Choose = Callable[[Catalog], Decision]


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a run.

    Attributes:
        catalog: Of the run after it.
        retired: Steps whose checkpoint is live no more, ascending.
        thinned: Steps whose checkpoint lost its optimizer, ascending.
        reason: Why not everything could be done that was to be; None if it was.
    """

    catalog: Catalog
    retired: tuple[int, ...] = ()
    thinned: tuple[int, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class _Thin:
    """A thinned manifest, before it is put."""

    key: str
    body: bytes
    keys: tuple[str, ...]
    size_bytes: int
    began: int


class Upkeep:
    """What one process does to keep a run tidy: a manager's coordinator, or a command. For one thread at a time.

    It remembers which shards each live manifest names, so that each is read at most once (and once more to be thinned).

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
        self._leftovers = Leftovers(store, sleep=sleep, uniform=uniform)
        self._named = self._leftovers.named
        # Manifests that have none of these keys of the state dict: nothing to thin, whatever retention would like.
        self._bare: set[tuple[str, tuple[str, ...]]] = set()

    @property
    def pending(self) -> int:
        """Number of objects that may be deleted and are not yet."""
        return len(self._leftovers.pending)

    @property
    def is_done(self) -> bool:
        """Nothing is left to look up or to delete."""
        return not self._leftovers and not self.pending

    def remember(self, manifest_key: str, shard_keys: Iterable[str]) -> None:
        """What a manifest names, of a checkpoint that this process committed: it need not be read."""
        self._named.remember(manifest_key, shard_keys)

    def note(self, run_id: str, entry: Entry, keys: Iterable[str] | None = None) -> None:
        """Note a checkpoint that was replaced, or an attempt that may not have been committed; see `Leftovers.note`."""
        self._leftovers.note(run_id, entry, keys)

    def let_go(self, keys: Iterable[str]) -> None:
        """Note objects that no checkpoint names or ever will: of a save that ended before its commit began."""
        self._leftovers.pending.add(keys)

    def settle(self, *, deadline: Deadline, catalog: Catalog | None = None) -> None:
        """Find out what of that which was noted can be deleted; nothing is deleted yet. See `Leftovers.settle`."""
        self._leftovers.settle(deadline=deadline, catalog=catalog)

    def apply(
        self,
        retention: Retention,
        *,
        optimizer_keys: tuple[str, ...] | None = None,
        deadline: Deadline,
        catalog: Catalog | None = None,
    ) -> Applied:
        """Let go what a retention does not keep; nothing is deleted yet.

        It is decided on the very catalog that is swapped: a pin, or a checkpoint, that came in between counts. While
        the manifest of a live checkpoint cannot be read, nothing goes that this retention lets go: who has lost one
        checkpoint needs the others.

        Costs a GET and, where something goes, a GET and a PUT, a GET for each live manifest that is not known yet, and
        a GET and a PUT for each checkpoint that is thinned. Killed at any moment, the catalog is the old or the new
        one, and what no live checkpoint names is orphans.

        Args:
            retention: What to keep.
            optimizer_keys: Top-level keys of the state dict that thinning lets go; None asks the retention. A
                checkpoint that lost one of them is taken for thinned.
            deadline: Until when requests are repeated.
            catalog: What the caller knows to lie there, which spares the first GET.

        Raises:
            CheckpointNotFoundError: There is no run here.
            CommitUnknownError: The store never said whether the catalog was swapped; `settle` finds out.
            StorageError: The store refused, or did not answer by the deadline.
            CorruptCheckpointError: The catalog is damaged.
        """
        keys = retention.optimizer_keys if optimizer_keys is None else tuple(optimizer_keys)

        def choose(now: Catalog) -> Decision:
            return decide(retention, [self._candidate(entry, keys) for entry in now.entries])

        return self._carry_out(choose, keys=keys, deadline=deadline, catalog=catalog)

    def retire(self, steps: Sequence[int], *, deadline: Deadline, force: bool = False) -> Applied:
        """Let these checkpoints go, as they are when this is called; nothing is deleted yet.

        Works on a damaged checkpoint, too, and beside one. What a manifest names that cannot be read is left to gc.

        Costs as `apply`. Killed at any moment, the catalog is the old or the new one.

        Args:
            steps: Of live checkpoints, abandoned ones included.
            deadline: Until when requests are repeated.
            force: Also if one is pinned, or the newest.

        Raises:
            CheckpointNotFoundError: One of the steps is not live; nothing was changed.
            InvalidArgumentError: One is pinned, or the newest; nothing was changed.
            CommitUnknownError: The store never said whether the catalog was swapped.
            StorageError: The store refused, or did not answer by the deadline.
        """
        wanted: dict[str, int] = {}

        def choose(now: Catalog) -> Decision:
            # Meant are those that were seen first, not what takes their steps meanwhile.
            if not wanted:
                wanted.update((_live(now, step).save_id, step) for step in steps)
            entries = [entry for entry in now.entries if entry.save_id in wanted]
            if not force:
                require_expendable(now, entries)
            return Decision(retire=tuple(entry.step for entry in entries), thin=())

        return self._carry_out(choose, keys=(), deadline=deadline, explicit=True)

    def thin(
        self, steps: Sequence[int], *, optimizer_keys: tuple[str, ...] = OPTIMIZER_KEYS, deadline: Deadline
    ) -> Applied:
        """Let these checkpoints lose their optimizer; nothing is deleted yet. As `apply` does it, at most 16 at once.

        Raises:
            CheckpointNotFoundError: One of the steps is not live; nothing was changed.
            InvalidArgumentError: One is pinned, or the newest; nothing was changed.
            CommitUnknownError: The store never said whether the catalog was swapped.
            StorageError: The store refused, or did not answer by the deadline.
        """
        keys = tuple(optimizer_keys)
        wanted: dict[str, int] = {}

        def choose(now: Catalog) -> Decision:
            if not wanted:
                wanted.update((_live(now, step).save_id, step) for step in steps)
            whole = [
                entry for entry in now.entries if entry.save_id in wanted and not self._candidate(entry, keys).thinned
            ]
            require_expendable(now, whole)
            return Decision(retire=(), thin=tuple(entry.step for entry in whole))

        return self._carry_out(choose, keys=keys, deadline=deadline)

    def delete(
        self,
        *,
        deadline: Deadline,
        stop: Callable[[], bool] = lambda: False,
        batch: int = KEYS_PER_DELETE,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> Deleted:
        """Delete what may be deleted, so many objects a request; one DELETE each.

        What fails for now is tried again the next time, what fails for good is left to gc. So is everything where
        deleting is not permitted, which is said once.

        Args:
            deadline: Until when requests are repeated.
            stop: Asked before each request; when it says so, the rest stays for the next time.
            batch: Objects a request.
            pause_seconds: Between two requests.
        """
        return self._leftovers.pending.delete(deadline=deadline, stop=stop, batch=batch, pause_seconds=pause_seconds)

    def _carry_out(
        self,
        choose: Choose,
        *,
        keys: tuple[str, ...],
        deadline: Deadline,
        catalog: Catalog | None = None,
        explicit: bool = False,
    ) -> Applied:
        now = self._catalog(deadline) if catalog is None else catalog
        decision = choose(now)
        if not decision.retire and not decision.thin:
            return Applied(now)
        ready, unreadable = self._prepared(now, decision.thin, keys, deadline)
        # Also those that go: what they name is what may be deleted.
        known = [entry for entry in now.entries if entry not in unreadable]
        unreadable |= self._named.read(self._store, known, deadline)
        damaged = [entry for entry, error in unreadable.items() if not isinstance(error, CheckpointNotFoundError)]
        if not explicit and any(entry.step not in decision.retire for entry in damaged):
            return Applied(now, reason=self._leftovers.why(unreadable, "retention lets nothing go"))
        if not decision.retire and not ready:
            return Applied(now)
        for replaced, one in ready.items():
            entry = next(entry for entry in now.entries if entry.manifest == replaced)
            self.note(now.run_id, replace(entry, manifest=one.key, began=one.began), ())
            # Nobody else writes this name, and nobody reads it before the swap: it may be sent as often as it takes.
            self._retrying(deadline).put(one.key, [one.body])
        to_retire: dict[str, Entry] = {}
        to_thin: dict[str, Entry] = {}

        def change(run: Catalog) -> Catalog | None:
            decided = choose(run)
            after = _changed(run, decided, ready)
            kept, retiring = {entry.manifest for entry in (after or run).entries}, frozenset(decided.retire)
            for entry in run.entries:
                if entry.manifest not in kept:
                    (to_retire if entry.step in retiring else to_thin)[entry.manifest] = entry
            return after

        try:
            after = swap(self._store, change, deadline=deadline, sleep=self._sleep, uniform=self._uniform)
        finally:
            # Also if it raises: the catalog may have been swapped.
            for entry in (*to_retire.values(), *to_thin.values()):
                self.note(now.run_id, entry)
        return self._settled(after, to_retire, to_thin, ready, deadline)

    def _prepared(
        self, now: Catalog, steps: Sequence[int], keys: tuple[str, ...], deadline: Deadline
    ) -> tuple[dict[str, _Thin], dict[Entry, DcpRemoteError]]:
        """Thinned manifests, by the key of that which each replaces; and why some could not be read, for ever."""
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
            thin = without(manifest, keys)
            if thin is manifest or thin.run is None:
                self._bare.add((entry.manifest, keys))
                continue
            # By its name gc knows that it is as young as the catalog that was read, not as old as the checkpoint.
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
        """See what of it went, and what may be deleted."""
        live = {entry.manifest for entry in after.entries}
        reason: str | None = None
        try:
            # Whoever carried it out, perhaps we by a swap whose answer was lost: what went can never be named again.
            mine = {*to_retire, *to_thin, *(one.key for one in ready.values())}
            reason = self._leftovers.collect(after, mine, deadline=deadline)
        except StorageError as error:
            reason = f"the manifests of what is live could not all be read, so that shards are deleted later: {error}"
        self._bare = {(manifest, keys) for manifest, keys in self._bare if manifest in live}
        return Applied(
            after,
            retired=tuple(sorted(entry.step for manifest, entry in to_retire.items() if manifest not in live)),
            thinned=tuple(sorted(to_thin[manifest].step for manifest, one in ready.items() if one.key in live)),
            reason=reason,
        )

    def _catalog(self, deadline: Deadline) -> Catalog:
        seen = read_catalog(self._retrying(deadline))
        if seen is None:
            raise CheckpointNotFoundError("There is no run here: it has no catalog.json.", url=self._store.url)
        return seen.catalog

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
    """The catalog after a decision; None if nothing of it is left to do. Checkpoints without a new manifest stay."""
    after = run
    thinning, retiring = frozenset(decision.thin), frozenset(decision.retire)
    for entry in run.entries:
        one = ready.get(entry.manifest)
        if one is None or entry.step not in thinning:
            continue
        try:
            made = thinned(
                after,
                entry.save_id,
                began=one.began,
                seen=entry.manifest,
                manifest=one.key,
                keys=one.keys,
                size_bytes=one.size_bytes,
            )
        except BeginAgainError:  # orphans were removed since it was put, perhaps it among them: the next time
            continue
        after = made or after
    after = retired(after, [entry.save_id for entry in run.entries if entry.step in retiring]) or after
    # One swap, one revision.
    return None if after is run else replace(after, revision=run.revision + 1)


def _live(now: Catalog, step: int) -> Entry:
    entry = now.at(step)
    if entry is None:
        raise CheckpointNotFoundError("No checkpoint of this step is live.", step=step)
    return entry


def require_expendable(now: Catalog, entries: Iterable[Entry]) -> None:
    """Refuse to let go what is pinned, or the newest.

    Raises:
        InvalidArgumentError: Says which.
    """
    newest = now.latest()
    for entry in entries:
        if entry.pinned:
            raise InvalidArgumentError(
                "The checkpoint is pinned: unpin it first (`dcp-remote pin --undo`), or force it (`rm --force`).",
                step=entry.step,
            )
        if entry == newest:
            raise InvalidArgumentError(
                "This is the newest checkpoint, from which a job would go on; `rm --force` if it is to go.",
                step=entry.step,
            )
