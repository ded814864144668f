"""Bytes of a run by shard: which its checkpoints share, and which are freed when some of them go.

A shard that several checkpoints name is stored once, and freed with the last of them. The bytes are those of shards:
manifests and the catalog add little.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dcp_remote.common.arrays import I64
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpRemoteError,
    PermissionDeniedError,
    UnsupportedFormatError,
)
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.format.entry_names import top_level_key
from dcp_remote.format.keys import revision_of
from dcp_remote.format.manifest import Manifest
from dcp_remote.run.deletions import Applied, Deletions
from dcp_remote.run.live_shards import in_parallel
from dcp_remote.run.lookup import read_entry
from dcp_remote.run.retention import Decision
from dcp_remote.run.thinning import drop_keys
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.deletion_queue import Deleted
from dcp_remote.storage.retrying import RetryingStore


@dataclass(frozen=True)
class Usage:
    """Shards that live checkpoints name. Shards are numbered; a set of shards is an array of their numbers.

    Attributes:
        index: Number of each shard by its key.
        sizes: Bytes of each shard.
        tops: Top-level key of the state dict to which each shard belongs; "" for values at the top itself.
        named: Shards of each checkpoint, by its manifest's key.
        thinned: Shards that a checkpoint would name without the keys that retention drops, by its manifest's key.
        unreadable: Errors of manifests that cannot be read, by step.
    """

    index: Mapping[str, int]
    sizes: I64
    tops: tuple[str, ...]
    named: Mapping[str, I64]
    thinned: Mapping[str, I64]
    unreadable: Mapping[int, DcpRemoteError]

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards, each counted once."""
        return int(self.sizes.sum())

    @cached_property
    def uses(self) -> I64:
        """Number of checkpoints that name each shard."""
        uses = np.zeros(len(self.sizes), dtype=np.int64)
        for shards in self.named.values():
            uses[shards] += 1
        return uses

    def own_bytes(self, entry: Entry) -> int | None:
        """Return the bytes that only this checkpoint names; None if that is not known."""
        shards = self.named.get(entry.manifest)
        return None if shards is None or self.unreadable else int(self.sizes[shards][self.uses[shards] == 1].sum())

    def sum_by_top(self) -> dict[str, tuple[int, int]]:
        """Return the bytes of the shards of each top-level key: of all, and of those that one checkpoint names.

        Only the manifests that can be read count.
        """
        totals: dict[str, tuple[int, int]] = {}
        for top, size_bytes, uses in zip(self.tops, self.sizes.tolist(), self.uses.tolist(), strict=True):
            stored, own = totals.get(top, (0, 0))
            totals[top] = stored + size_bytes, own + size_bytes * (uses == 1)
        return totals

    def freed_bytes(self, catalog: Catalog, decision: Decision) -> int:
        """Return the bytes that are freed when these checkpoints go, or are thinned.

        0 if the manifest of a checkpoint that stays cannot be read, since that one may name the same shards.
        """
        if not set(self.unreadable).issubset(decision.retire):
            return 0
        stays = np.zeros(len(self.sizes), dtype=np.bool_)
        retiring, thinning = frozenset(decision.retire), frozenset(decision.thin)
        for entry in catalog.entries:
            if entry.step not in retiring and entry.manifest in self.named:
                shards = self.thinned.get(entry.manifest) if entry.step in thinning else None
                stays[self.named[entry.manifest] if shards is None else shards] = True
        return int(self.sizes[~stays].sum())

    def size_of(self, keys: Iterable[str]) -> int:
        """Return the bytes of these objects; those that are no known shards count nothing."""
        return sum(int(self.sizes[self.index[key]]) for key in keys if key in self.index)


def read_usage(
    store: ObjectStore, catalog: Catalog, deadline: Deadline, *, dropped_keys: Collection[str] = ()
) -> Usage:
    """Read which shards the checkpoints of a catalog name; one GET each, a few at a time.

    `dropped_keys` are the top-level keys that thinning would drop. Checkpoints that are retired or thinned meanwhile
    are left out. Memory is about 200 bytes for each shard, and 8 for each shard of each checkpoint.
    """
    lock = threading.Lock()
    index: dict[str, int] = {}
    sizes: list[int] = []
    tops: list[str] = []
    named: dict[str, I64] = {}
    thinned: dict[str, I64] = {}
    unreadable: dict[int, DcpRemoteError] = {}

    def read(entry: Entry) -> None:
        try:
            manifest = read_entry(store, entry, retry_seconds=deadline.remaining_seconds())
        except CheckpointGoneError:
            return
        except (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError) as error:
            with lock:
                unreadable[entry.step] = error
            return
        left = drop_keys(manifest, dropped_keys) if dropped_keys else manifest
        rows = zip(manifest.shards.keys, manifest.shards.sizes.tolist(), _find_tops(manifest), strict=True)
        with lock:
            for key, size_bytes, top in rows:
                if index.setdefault(key, len(sizes)) == len(sizes):
                    sizes.append(size_bytes)
                    tops.append(top)
            named[entry.manifest] = np.array([index[key] for key in manifest.shards.keys], dtype=np.int64)
            if left is not manifest:
                thinned[entry.manifest] = np.array([index[key] for key in left.shards.keys], dtype=np.int64)

    in_parallel(read, catalog.entries)
    return Usage(index, np.array(sizes, dtype=np.int64), tuple(tops), named, thinned, unreadable)


def _find_tops(manifest: Manifest) -> list[str]:
    """Return the top-level key of each shard; of a shard with several keys, one of them."""
    tensors, paths = manifest.tensors, manifest.flatten or {}
    numbers: dict[str, int] = {"": 0}
    names = (*tensors.names, *(item.name for item in manifest.stored))
    top_of_name = [numbers.setdefault(top_level_key(paths.get(name)), len(numbers)) for name in names]
    pieces = [*np.diff(tensors.piece_first[tensors.chunk_first]).tolist(), *(item.pieces for item in manifest.stored)]
    top_of_shard = np.zeros(len(manifest.shards.keys), dtype=np.int64)
    top_of_shard[manifest.pieces.shard] = np.repeat(np.array(top_of_name, dtype=np.int64), pieces)
    tops = list(numbers)
    return [tops[number] for number in top_of_shard.tolist()]


def list_sizes(store: ObjectStore, deadline: Deadline) -> dict[str, int] | None:
    """Return the bytes of all objects of a run by key; None if the store refuses to list them.

    Costs a LIST, of a request per thousand objects, and 200 bytes of memory for each object.
    """
    try:
        return {info.key: info.size_bytes for info in RetryingStore(store, deadline).list()}
    except PermissionDeniedError:
        return None


def sum_orphans(listed: Mapping[str, int], catalog: Catalog, usage: Usage) -> int | None:
    """Return the bytes of the manifests and shards that no live checkpoint names; None if a manifest is unreadable."""
    live = {entry.manifest for entry in catalog.entries}
    orphans = (key for key in listed if revision_of(key) is not None and key not in usage.index and key not in live)
    return None if usage.unreadable else sum(listed[key] for key in orphans)


@dataclass(frozen=True, slots=True)
class Cleared:
    """Result of deleting checkpoints and their objects."""

    retired: tuple[int, ...]  # steps
    thinned: tuple[int, ...]  # steps
    deleted: Deleted  # objects
    freed_bytes: int  # of the shards that were deleted
    reason: str | None  # why not everything was done; None if it was


def clear(
    store: ObjectStore, usage: Usage, apply: Callable[[Deletions, Deadline], Applied], *, timeout_seconds: float
) -> Cleared:
    """Retire or thin checkpoints by `apply`, then delete what none names any more, and count the bytes.

    Beside a job that saves: each change is a swap of the catalog, and only what no live checkpoint names after the swap
    is deleted. Manifests that `usage` knows are not read again. `apply` is called until nothing more is thinned, with
    the deadline of both; another such time is for the objects.
    """
    deletions, deadline = Deletions(store), Deadline(timeout_seconds)
    keys = list(usage.index)
    for manifest, shards in usage.named.items():
        deletions.remember(manifest, (keys[number] for number in shards.tolist()))
    retired: list[int] = []
    thinned: list[int] = []
    while True:
        applied = apply(deletions, deadline)
        retired += applied.retired
        thinned += applied.thinned
        if applied.reason is not None or not applied.thinned:
            break
    queued = deletions.queued
    deleted = deletions.delete(deadline=Deadline(timeout_seconds))
    gone = queued - deletions.queued - set(deleted.failed) if deleted.removed else frozenset()
    return Cleared(tuple(sorted(retired)), tuple(sorted(thinned)), deleted, usage.size_of(gone), applied.reason)
