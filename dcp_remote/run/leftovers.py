"""Objects of replaced checkpoints and failed attempts: looked up in the catalog, then queued for deletion.

An attempt that can still be committed must keep its objects. So the catalog's floor is first raised above the
checkpoints and attempts noted here; one that is not in the catalog after that swap can never become live again. A shard
stays if a live checkpoint names it, because its save reused the shard meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dcp_remote.common.deadline import Deadline, jitter
from dcp_remote.errors import DcpRemoteError
from dcp_remote.format.catalog import Catalog, Entry, raise_floor
from dcp_remote.format.keys import revision_of
from dcp_remote.run.catalog_store import swap
from dcp_remote.run.live_shards import LiveShards
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.deletion_queue import DeletionQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Noted:
    """Checkpoint or attempt that may not be live.

    Attributes:
        run_id: Run that it belongs to.
        entry: Entry that it has, or would have, in the catalog.
        keys: Keys of the shards that its save put; None if its manifest is to be read for them.
    """

    run_id: str
    entry: Entry
    keys: frozenset[str] | None


class Leftovers:
    """Checkpoints and attempts that may not be live, and objects of theirs to delete. For one thread at a time.

    Args:
        store: Store opened at the run.
        sleep: Waits so many seconds; an argument for tests.
        uniform: Draws a number between two; an argument for tests.

    Attributes:
        named: Shards of the manifests that were read.
        pending: Objects to delete.
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
        self.named = LiveShards()
        self.pending = DeletionQueue(store, sleep=sleep, uniform=uniform)
        self._noted: dict[str, _Noted] = {}
        self._told: set[str] = set()

    def __len__(self) -> int:
        """Return the number of checkpoints and attempts that are not looked up yet."""
        return len(self._noted)

    def note(self, run_id: str, entry: Entry, keys: Iterable[str] | None = None) -> None:
        """Note a checkpoint or an attempt that may not be live.

        Args:
            run_id: Run that it belongs to.
            entry: Entry of the checkpoint; for an attempt, the one that it would have had.
            keys: Keys of the shards that its save put; None if its manifest is to be read for them.
        """
        before = self._noted.get(entry.manifest)
        if keys is not None:
            keys = frozenset(keys) | (before.keys or frozenset() if before is not None else frozenset())
        self._noted[entry.manifest] = _Noted(run_id, entry, keys)

    def settle(self, *, deadline: Deadline, catalog: Catalog | None = None) -> None:
        """Queue for deletion the objects of what is noted and can never become live.

        Costs no request if nothing is noted; a GET and a PUT if the floor of `catalog` is too low; and a GET for each
        manifest that may name the same shards and is not known yet.

        Args:
            deadline: Deadline of all requests.
            catalog: Catalog that the caller knows to be there.

        Raises:
            DcpRemoteError: As `swap`, or a manifest could not be read by the deadline; all stays noted.
        """
        if not self._noted:
            return
        if catalog is None or catalog.floor < self._floor(catalog):
            catalog = swap(
                self._store,
                lambda now: raise_floor(now, self._floor(now)),
                deadline=deadline,
                sleep=self._sleep,
                uniform=self._uniform,
            )
        settled = catalog
        # The catalog does not tell what became of attempts of another run, or of a history that was lost.
        self._noted = {key: noted for key, noted in self._noted.items() if _can_be_settled(noted, settled)}
        self.collect(settled, set(self._noted), deadline=deadline)

    def collect(self, after: Catalog, manifests: Iterable[str], *, deadline: Deadline) -> str | None:
        """Queue for deletion what was noted under these manifests, is not live, and no live checkpoint names.

        Args:
            after: Catalog after which no checkpoint or attempt noted here can become live.
            manifests: Keys of manifests.
            deadline: Deadline of all requests.

        Returns:
            Reason why shards are left to gc; None if none are.

        Raises:
            StorageError: A manifest could not be read; what is not settled stays noted.
        """
        live = {entry.manifest for entry in after.entries}
        asked = {key: self._noted[key] for key in manifests if key in self._noted}
        gone = {key: noted for key, noted in asked.items() if key not in live}
        unknown = [noted.entry for noted in gone.values() if noted.keys is None]
        unreadable = self.named.read(self._store, unknown, deadline)
        shards: set[str] = set()
        for noted in gone.values():
            entry = noted.entry
            shards |= noted.keys if noted.keys is not None else self.named.objects_of([entry]) - {entry.manifest}
        # A checkpoint that names a shard began no earlier than the shard's own save.
        oldest = min((revision_of(key) or 0 for key in shards), default=0)
        later = [entry for entry in after.entries if entry.began_revision >= oldest] if shards else []
        # Before the next read, which can raise: the manifests may be deleted whatever it finds.
        self.pending.add(gone)
        unreadable_live = self.named.read(self._store, later, deadline)
        if not unreadable_live:
            self.pending.add(self.named.not_named(shards, later))
        for key in asked:
            del self._noted[key]
        self.named.forget_others(live | set(self._noted))
        unreadable |= unreadable_live
        return self.why(unreadable, "shards that it may name are left to gc") if unreadable else None

    def why(self, unreadable: Mapping[Entry, DcpRemoteError], consequence: str) -> str:
        """Return the reason why manifests cannot be read and what follows; log it once for each checkpoint."""
        entry, error = next(iter(unreadable.items()))
        reason = f"the manifest of step {entry.step} cannot be read, so that {consequence}: {error}"
        new = [entry.manifest for entry in unreadable if entry.manifest not in self._told]
        if new:
            self._told.update(new)
            logger.warning("%s: %s", self._store.url, reason)
        return reason

    def _floor(self, now: Catalog) -> int:
        """Return the floor below which nothing noted here can be committed any more."""
        began = [noted.entry.began_revision for noted in self._noted.values() if noted.run_id == now.run_id]
        return max((revision + 1 for revision in began if revision <= now.revision), default=0)


def _can_be_settled(noted: _Noted, now: Catalog) -> bool:
    return noted.run_id == now.run_id and noted.entry.began_revision < now.floor
