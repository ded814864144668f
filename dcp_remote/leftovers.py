"""Objects of checkpoints and attempts that may be live no more: looked up in the catalog, then deleted. No torch.

Nothing that can still be committed may be deleted. So the catalog's floor is first raised above what is noted here, and
the catalog that this swap leaves decides: what it does not hold can never become live again. Shards that a checkpoint
in it names, because its save borrowed them meanwhile, stay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dcp_remote.catalog import Catalog, Entry, raised
from dcp_remote.catalog_store import swap
from dcp_remote.errors import DcpRemoteError
from dcp_remote.named import Named
from dcp_remote.pending import Pending
from dcp_remote.run_names import revision_of
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.retrying import Deadline, jitter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Noted:
    """A checkpoint or an attempt that may be live no more.

    Attributes:
        run_id: Run that it belongs to.
        entry: Entry that it has, or would have, in the catalog.
        keys: Shards that its save put; None if its manifest says.
    """

    run_id: str
    entry: Entry
    keys: frozenset[str] | None


class Leftovers:
    """What may be left of checkpoints and attempts. For one thread at a time.

    Args:
        store: Opened at the run.
        sleep: For tests.
        uniform: For tests.

    Attributes:
        named: Shards that manifests name, as far as they were read.
        pending: Objects that are to be deleted.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = jitter,
    ) -> None:
        """Make no request."""
        self._store = store
        self._sleep, self._uniform = sleep, uniform
        self.named = Named()
        self.pending = Pending(store, sleep=sleep, uniform=uniform)
        self._noted: dict[str, _Noted] = {}
        self._told: set[str] = set()

    def __len__(self) -> int:
        """Count what is noted and not looked up yet."""
        return len(self._noted)

    def note(self, run_id: str, entry: Entry, keys: Iterable[str] | None = None) -> None:
        """Note what may be live no more.

        Args:
            run_id: Run that it belongs to.
            entry: Entry of it; of an attempt, the one that it would have had.
            keys: Shards that its save put; None if its manifest is to be read for them.
        """
        before = self._noted.get(entry.manifest)
        if keys is not None:
            keys = frozenset(keys) | (before.keys or frozenset() if before is not None else frozenset())
        self._noted[entry.manifest] = _Noted(run_id, entry, keys)

    def settle(self, *, deadline: Deadline, catalog: Catalog | None = None) -> None:
        """Find out what of it is gone for good, and hand that to `pending`.

        Costs nothing where nothing is noted; a GET and a PUT where the floor of `catalog` is not high enough; and a GET
        for each manifest that may name the same shards and is not known yet.

        Args:
            deadline: Until when requests are repeated.
            catalog: Catalog that the caller knows to lie there.

        Raises:
            DcpRemoteError: As `swap`, or a manifest could not be read by the deadline; all stays noted.
        """
        if not self._noted:
            return
        if catalog is None or catalog.floor < self._floor(catalog):
            catalog = swap(
                self._store,
                lambda now: raised(now, self._floor(now)),
                deadline=deadline,
                sleep=self._sleep,
                uniform=self._uniform,
            )
        settled = catalog
        # Of another run, or of a history that was lost: nothing tells what became of that.
        self._noted = {key: one for key, one in self._noted.items() if _can_be_settled(one, settled)}
        self.collect(settled, set(self._noted), deadline=deadline)

    def collect(self, after: Catalog, manifests: Iterable[str], *, deadline: Deadline) -> str | None:
        """Hand to `pending` what was noted under these manifests, is not live, and no live checkpoint names.

        Args:
            after: Catalog in which what is not live can never become live again.
            manifests: Keys of manifests.
            deadline: Until when requests are repeated.

        Returns:
            Why shards are left to gc; None if none are.

        Raises:
            StorageError: A manifest could not be read; what is not known stays noted.
        """
        live = {entry.manifest for entry in after.entries}
        asked = {key: self._noted[key] for key in manifests if key in self._noted}
        gone = {key: one for key, one in asked.items() if key not in live}
        unreadable = self.named.read(self._store, (one.entry for one in gone.values() if one.keys is None), deadline)
        shards: set[str] = set()
        for one in gone.values():
            shards |= one.keys if one.keys is not None else self.named.objects_of([one.entry]) - {one.entry.manifest}
        # A checkpoint that names a shard began no earlier than the shard's own save.
        oldest = min((revision_of(key) or 0 for key in shards), default=0)
        later = [entry for entry in after.entries if entry.began >= oldest] if shards else []
        # First, as what cannot be read of these is noted again.
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
        """Say once of each checkpoint that it cannot be read, and what follows."""
        entry, error = next(iter(unreadable.items()))
        reason = f"the manifest of step {entry.step} cannot be read, so that {consequence}: {error}"
        new = [one.manifest for one in unreadable if one.manifest not in self._told]
        if new:
            self._told.update(new)
            logger.warning("%s: %s", self._store.url, reason)
        return reason

    def _floor(self, now: Catalog) -> int:
        """Return the floor below which nothing noted here can be committed any more."""
        began = [one.entry.began for one in self._noted.values() if one.run_id == now.run_id]
        return max((revision + 1 for revision in began if revision <= now.revision), default=0)


def _can_be_settled(one: _Noted, now: Catalog) -> bool:
    return one.run_id == now.run_id and one.entry.began < now.floor
