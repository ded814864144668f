"""Bytes of a run by shard: which its checkpoints share, and which are freed when some of them go.

A shard that several checkpoints name is stored once, and freed with the last of them. The bytes are those of shards:
manifests and the catalog add little.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.threads import in_parallel
from dcp_remote.errors import (
    CheckpointGoneError,
    CorruptCheckpointError,
    DcpRemoteError,
    UnsupportedFormatError,
)
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.format.entry_names import top_level_key
from dcp_remote.format.keys import revision_of
from dcp_remote.format.manifest import Manifest
from dcp_remote.run.deletions import Applied, Deletions
from dcp_remote.run.lookup import read_entry
from dcp_remote.run.retention import Decision
from dcp_remote.run.thinning import drop_keys
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.deletion_queue import Deleted


@dataclass(frozen=True)
class Usage:
    """Shards that live checkpoints name, by their keys.

    Attributes:
        sizes: Bytes of each shard.
        tops: Top-level key of the state dict to which each shard belongs; "" for values at the top itself, and absent
            for a shard of which nothing is named.
        named: Shards of each checkpoint whose manifest can be read.
        thinned: Shards that a checkpoint would name without the keys that retention drops, if it has any of those.
        writers: Software that wrote each checkpoint: versions, a git commit and device meshes, by name.
        world_sizes: Number of ranks that saved each checkpoint.
        unreadable: Errors of the other manifests.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    tops: dict[str, str] = field(default_factory=dict)
    named: dict[Entry, tuple[str, ...]] = field(default_factory=dict)
    thinned: dict[Entry, tuple[str, ...]] = field(default_factory=dict)
    writers: dict[Entry, Mapping[str, str]] = field(default_factory=dict)
    world_sizes: dict[Entry, int] = field(default_factory=dict)
    unreadable: dict[Entry, DcpRemoteError] = field(default_factory=dict)

    @cached_property
    def uses(self) -> Counter[str]:
        """Number of checkpoints that name each shard."""
        return Counter(chain.from_iterable(self.named.values()))

    def size_of(self, keys: Iterable[str]) -> int:
        """Return the bytes of these objects; those that are no known shards count nothing."""
        return sum(self.sizes.get(key, 0) for key in keys)

    def own_bytes(self, entry: Entry) -> int | None:
        """Return the bytes that only this checkpoint names; None if that is not known."""
        if self.unreadable or entry not in self.named:
            return None
        return self.size_of(key for key in self.named[entry] if self.uses[key] == 1)

    def sum_by_top(self) -> dict[str, tuple[int, int]]:
        """Return the bytes of the shards of each top-level key: of all, and of those that one checkpoint names.

        Only the manifests that can be read count.
        """
        totals: dict[str, tuple[int, int]] = {}
        for key, size_bytes in self.sizes.items():
            top = self.tops.get(key, "")
            stored, own = totals.get(top, (0, 0))
            totals[top] = stored + size_bytes, own + (size_bytes if self.uses[key] == 1 else 0)
        return totals

    def orphan_bytes(self, listed: Mapping[str, int]) -> int | None:
        """Return the bytes of the listed manifests and shards that no checkpoint names; None if that is not known."""
        live = self.sizes.keys() | {entry.manifest for entry in self.named}
        orphans = [size for key, size in listed.items() if revision_of(key) is not None and key not in live]
        return None if self.unreadable else sum(orphans)

    def freed_bytes(self, decision: Decision) -> int | None:
        """Return the bytes that are freed when these checkpoints go, or are thinned.

        None if that is not known, since a manifest cannot be read, which may name the same shards.
        """
        retiring, thinning = frozenset(decision.retire), frozenset(decision.thin)
        if self.unreadable and (retiring or thinning):
            return None
        stays: set[str] = set()
        for entry, keys in self.named.items():
            if entry.step not in retiring:
                stays.update(self.thinned.get(entry, keys) if entry.step in thinning else keys)
        return self.size_of(self.sizes.keys() - stays)


def read_usage(
    store: ObjectStore, catalog: Catalog, deadline: Deadline, *, dropped_keys: Collection[str] = ()
) -> Usage:
    """Read which shards the checkpoints of a catalog name; one GET each, a few at a time.

    `dropped_keys` are the top-level keys that thinning would drop. Checkpoints that are retired or thinned meanwhile
    are left out. Memory is about 300 bytes for each shard, and 8 for each shard of each checkpoint.
    """
    usage = Usage()

    def read(entry: Entry) -> None:
        try:
            manifest = read_entry(store, entry, retry_seconds=deadline.remaining_seconds(), whole=False)
        except CheckpointGoneError:
            return
        except (CorruptCheckpointError, UnsupportedFormatError) as error:
            usage.unreadable[entry] = error
            return
        # Interned, since most checkpoints of a run name the same shards.
        keys = tuple(map(sys.intern, manifest.shards.keys))
        usage.sizes.update(zip(keys, manifest.shards.sizes.tolist(), strict=True))
        usage.tops.update((keys[shard], top) for shard, top in _find_tops(manifest).items())
        usage.named[entry] = keys
        usage.writers[entry], usage.world_sizes[entry] = manifest.writer, manifest.world_size
        left = drop_keys(manifest, dropped_keys)
        if left is not manifest:
            usage.thinned[entry] = tuple(map(sys.intern, left.shards.keys))

    in_parallel(read, catalog.entries)
    return usage


def _find_tops(manifest: Manifest) -> dict[int, str]:
    """Return the top-level key of each shard, by its number: that of any piece, since two keys never share a shard."""
    paths, found = manifest.flatten or {}, dict[int, str]()
    shards, pieces = np.unique(manifest.pieces.shard, return_index=True)
    for shard, piece in zip(shards.tolist(), pieces.tolist(), strict=True):
        found[shard] = top_level_key(paths.get(manifest.name_of_piece(piece)))
    for segment, (own, tensors) in enumerate(manifest.segments.parts() if manifest.segments is not None else ()):
        named = [int(manifest.pieces.shard[manifest.segment_first + segment]), *own.tolist()]
        found.update(dict.fromkeys(named, top_level_key(paths.get(manifest.tensors.names[tensors[0]]))))
    return found


def clear(
    store: ObjectStore, usage: Usage, apply: Callable[[Deletions, Deadline], Applied], *, timeout_seconds: float
) -> tuple[Applied, Deleted, int]:
    """Retire or thin checkpoints by `apply`, then delete what none names any more.

    Returns what was applied in all, what became of the objects, and the bytes of the shards that were deleted.

    Beside a job that saves: each change is a swap of the catalog, and only what no live checkpoint names after the swap
    is deleted. Manifests that `usage` knows are not read again. `apply` is called until nothing more is thinned, with
    the deadline of both; another such time is for the objects.
    """
    deletions, deadline = Deletions(store), Deadline(timeout_seconds)
    for entry, keys in usage.named.items():
        deletions.named.remember(entry.manifest, keys)
    total, has_thinned = Applied(), True
    while total.reason is None and has_thinned:
        applied = apply(deletions, deadline)
        retired, thinned = sorted(total.retired + applied.retired), sorted(total.thinned + applied.thinned)
        total, has_thinned = Applied(tuple(retired), tuple(thinned), applied.reason), bool(applied.thinned)
    queued = frozenset(deletions.queue)
    deleted = deletions.queue.delete(deadline=Deadline(timeout_seconds))
    gone = queued.difference(deletions.queue, deleted.failed) if deleted.removed else frozenset()
    return total, deleted, usage.size_of(gone)
