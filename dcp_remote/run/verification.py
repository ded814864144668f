"""Verification of stored checkpoints: every shard that they name, each once, and which entries are damaged.

Checkpoints are read by ascending step, and the shards of each by key. So the place at which a verification was
interrupted is a step and a key, whatever was deleted, or saved at higher steps, meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias, get_args

import numpy as np
import xxhash

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.digests import BLOCK_BYTES_MIN
from dcp_remote.common.threads import CALLS_IN_FLIGHT, Cancellation, in_parallel
from dcp_remote.errors import (
    CheckpointGoneError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    UnsupportedFormatError,
)
from dcp_remote.format.catalog import Entry
from dcp_remote.format.manifest import MANIFEST_KEY, Manifest
from dcp_remote.run.catalog_store import require_catalog
from dcp_remote.run.info import catalog_of
from dcp_remote.run.lookup import find_entry, join_segments, no_run, read_entry, read_manifest
from dcp_remote.run.shard_check import Damage, Depth, ShardChecker, ShardPart, group_pieces
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS, RetryingStore

# Shards that are checked at a time, each with two copies of a range of 4 MiB: 128 MiB together.
_CHECKS_IN_FLIGHT = 16

# Shards after which the place to go on from is reported; so many that threads seldom wait for the last of them.
_BATCH = 32

# Place in a run: a step, with the digits of the highest one that there can be, and the key of a shard.
_PLACE = re.compile(r"\d{16}:shards/", re.ASCII)

# Entries of checkpoints; None stands for a checkpoint by itself.
_Entries: TypeAlias = Sequence[Entry | None]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of a verification.

    Attributes:
        steps: Steps of the checkpoints that were verified, ascending; () for a checkpoint by itself.
        changed: Steps of checkpoints that were found damaged or gone because they were deleted, replaced or thinned
            meanwhile, and so say nothing.
        shards: Number of shards that were checked; one counts again if a later checkpoint names further bytes of it.
        read_bytes: Bytes that were read, manifests and repeated reads included.
        damage: Damaged objects; () if nothing is damaged.
    """

    steps: tuple[int, ...]
    changed: tuple[int, ...]
    shards: int
    read_bytes: int
    damage: tuple[Damage, ...]


def verify(
    store: ObjectStore,
    *,
    step: int | str | None = None,
    depth: Depth = "sample",
    after: str = "",
    retry_seconds: float = RANGE_RETRY_SECONDS,
    report_progress: Callable[[str, Damage | None, int], None] | None = None,
) -> VerifyReport:
    """Verify checkpoints of a run, or a checkpoint by itself, as `Run.verify` says; only reads.

    Shards up to the place `after`, which an interrupted call has reported, are not checked. `report_progress` is called
    in this thread when all shards up to a place were checked, with the place, the damage of its shard (perhaps of a
    checkpoint that was deleted meanwhile), and the bytes that were read so far. Each request is retried for
    `retry_seconds`.
    """
    if depth not in get_args(Depth):
        raise InvalidArgumentError("depth must be 'quick', 'sample' or 'deep'.", depth=depth)
    if after and "shards/" not in after:
        raise InvalidArgumentError("after must be the place that an interrupted verification has named.", after=after)
    counting, cancellation = CountingStore(store), Cancellation()
    catalog = catalog_of(counting, retry_seconds=retry_seconds)
    entries: _Entries = [None]
    if after and catalog is not None and _PLACE.match(after) is None:
        raise InvalidArgumentError("after must be a place in a run, such as 0000000000000100:shards/….", after=after)
    if catalog is not None:
        entries = catalog.entries if step is None else [find_entry(catalog, step, url=store.url)]
    elif step is not None:
        raise no_run(RetryingStore(counting, Deadline(retry_seconds)), step)
    walk = _Walk(counting, entries, retry_seconds=retry_seconds)
    checker = ShardChecker(counting, depth=depth, make_deadline=lambda: Deadline(retry_seconds, cancellation.clock))
    parts = walk.parts(after)
    shards = 0
    damaged: dict[str, Damage] = {}
    try:
        while batch := list(islice(parts, _BATCH)):
            found = in_parallel(lambda one: checker.check(one[1]), batch, threads=_CHECKS_IN_FLIGHT)
            for (place, _), damage in zip(batch, found, strict=True):
                shards += 1
                if damage is not None:
                    before = damaged[damage.key].ranges if damage.key in damaged else ()
                    damaged[damage.key] = replace(damage, ranges=before + damage.ranges)
                if report_progress is not None:
                    report_progress(place, damage, counting.counts.got_bytes)
    finally:
        cancellation.cancel()
    changed, live_damage = walk.judge(damaged)
    steps = tuple(entry.step for entry in entries if entry is not None)
    return VerifyReport(steps, changed, shards, counting.counts.got_bytes, live_damage)


class _Walk:
    """Way through the manifests of some checkpoints."""

    def __init__(self, store: ObjectStore, entries: _Entries, *, retry_seconds: float) -> None:
        self._store, self._entries, self._retry_seconds = store, entries, retry_seconds
        # Fingerprints of the pieces that were seen, ascending, and an end mark.
        self._seen = np.array([2**64 - 1], dtype=np.uint64)
        self._damage: list[tuple[str, Damage]] = []  # of manifests and segments, by the key of the manifest

    def parts(self, after: str) -> Iterator[tuple[str, ShardPart]]:
        """Yield the shards behind a place, each with its place and the pieces that no earlier checkpoint names."""
        for entry, manifest in self._manifests(self._entries):
            if not isinstance(manifest, Manifest):
                key = MANIFEST_KEY if entry is None else entry.manifest
                damaged = str(manifest.details.get("shard") or key)  # that of a segment
                reason = f"{manifest.what} Shards of this checkpoint alone were not checked."
                self._damage.append((key, Damage(damaged, "manifest", reason, steps=_steps_of(entry))))
                continue
            is_new = self._find_new(manifest)
            shards, groups = manifest.shards, group_pieces(manifest)
            for shard in sorted(range(len(groups)), key=shards.keys.__getitem__):
                own = groups[shard][is_new[groups[shard]]]
                place = shards.keys[shard] if entry is None else f"{entry.step:016d}:{shards.keys[shard]}"
                if len(own) and place > after:
                    yield place, ShardPart.of(manifest, shard, own)
            del manifest, shards, groups, is_new  # before the next one is joined: a large one takes gigabytes

    def _find_new(self, manifest: Manifest) -> np.typing.NDArray[np.bool_]:
        """Return which pieces are in no manifest before, by fingerprints of shard, start and digest."""
        pieces = manifest.pieces
        shards = np.array([xxhash.xxh3_64_intdigest(key.encode()) for key in manifest.shards.keys], dtype=np.uint64)
        prints = shards[pieces.shard] + pieces.start.astype(np.uint64)
        prints ^= np.frombuffer(pieces.digests, dtype=np.uint64)[::2]
        is_new: np.typing.NDArray[np.bool_] = self._seen[np.searchsorted(self._seen, prints)] != prints
        self._seen = np.sort(np.concatenate([self._seen, prints[is_new]]), kind="stable")
        return is_new

    def judge(self, damaged: Mapping[str, Damage]) -> tuple[tuple[int, ...], tuple[Damage, ...]]:
        """Return the steps of checkpoints that changed meanwhile, and the damage of those that are live.

        Nothing is sent if nothing was found; else one GET for the catalog, and if a shard is damaged, one for each
        manifest.
        """
        if not (damaged or self._damage):
            return (), ()
        live: _Entries = [None]
        keys = {MANIFEST_KEY}
        if self._entries != live:
            live = require_catalog(RetryingStore(self._store, Deadline(self._retry_seconds))).entries
            keys = {entry.manifest for entry in live}
        named: dict[str, Damage] = {}
        for entry, manifest in self._manifests(live if damaged else ()):
            if isinstance(manifest, Manifest):  # others were found before, deleted, or not asked for
                for key, entries in _name_damaged(manifest, damaged):
                    damage = named.get(key, damaged[key])
                    names, steps = tuple(sorted(entries.union(damage.entries))), _steps_of(entry) if entries else ()
                    named[key] = replace(damage, steps=damage.steps + steps, entries=names)
            del manifest
        if damaged and not named and live == [None]:
            raise CheckpointGoneError("The checkpoint was replaced meanwhile. Verify again.", url=self._store.url)
        changed = tuple(entry.step for entry in self._entries if entry is not None and entry.manifest not in keys)
        manifests = [damage for key, damage in self._damage if key in keys]
        return changed, (*manifests, *(named[key] for key in sorted(named)))

    def _manifests(self, entries: _Entries) -> Iterator[tuple[Entry | None, Manifest | DcpRemoteError]]:
        def read(entry: Entry | None, index: Manifest | None = None) -> Manifest | DcpRemoteError:
            try:
                if index is not None:
                    return join_segments(self._store, index, retry_seconds=self._retry_seconds)
                if entry is None:
                    return read_manifest(self._store, retry_seconds=self._retry_seconds, whole=False)
                return read_entry(self._store, entry, retry_seconds=self._retry_seconds, whole=False)
            except (CheckpointGoneError, CorruptCheckpointError, UnsupportedFormatError) as error:
                return error

        for first in range(0, len(entries), CALLS_IN_FLIGHT):  # bounds memory
            some = entries[first : first + CALLS_IN_FLIGHT]
            for entry, index in zip(some, in_parallel(read, some), strict=True):
                yield entry, read(entry, index) if isinstance(index, Manifest) else index


def _steps_of(entry: Entry | None) -> tuple[int, ...]:
    return () if entry is None else (entry.step,)


def _name_damaged(manifest: Manifest, damaged: Mapping[str, Damage]) -> Iterator[tuple[str, set[str]]]:
    """Yield the damaged shards that a manifest names, with the entries that lie in damaged bytes."""
    pieces, shards = manifest.pieces, manifest.shards
    for key, data_start, own in zip(shards.keys, shards.data_starts, group_pieces(manifest), strict=True):
        if key not in damaged:
            continue
        starts, lengths = pieces.start[own], pieces.length[own]
        is_hit = np.zeros(len(own), dtype=bool)
        for one in damaged[key].ranges:
            is_hit |= (starts < one.stop) & (starts + lengths > one.start)
            if one.start < data_start:  # the table, by which parts of longer pieces are verified
                is_hit |= lengths > BLOCK_BYTES_MIN
        yield key, {manifest.name_of_piece(piece) for piece in own[is_hit].tolist()}
