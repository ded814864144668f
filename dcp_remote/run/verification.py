"""Verification of stored checkpoints: every shard that they name, each once, and which entries are damaged.

Checkpoints are read by ascending step, and the shards of each by key. So the place at which a verification was
interrupted is a step and a key, whatever was saved or deleted meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import xxhash

from dcp_remote.common.arrays import I64
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.digests import BLOCK_BYTES_MIN
from dcp_remote.common.geometry import ByteRange
from dcp_remote.common.threads import Cancellation, map_in_order
from dcp_remote.errors import CheckpointGoneError, CorruptCheckpointError, InvalidArgumentError
from dcp_remote.format.catalog import Entry
from dcp_remote.format.json_text import from_text
from dcp_remote.format.manifest import MANIFEST_KEY, Manifest
from dcp_remote.run.catalog_store import require_catalog
from dcp_remote.run.info import catalog_of
from dcp_remote.run.live_shards import READS_IN_FLIGHT
from dcp_remote.run.lookup import find_entry, no_run, read_entry, read_manifest
from dcp_remote.run.shard_check import Depth, ShardChecker, ShardDamage, ShardPart
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS, RetryingStore

# Shards that are checked at a time, each with two copies of a range of 4 MiB: 128 MiB together.
_CHECKS_IN_FLIGHT = 16

# Shards that are held, some of which wait for one that takes longer, since results are taken in order.
_CHECKS_AHEAD = 32

_PLACE = re.compile(r"(?:(\d+):)?(shards/.+)")

_Prints: TypeAlias = npt.NDArray[np.uint64]

# Manifest, or why there is none.
_Read: TypeAlias = Manifest | CheckpointGoneError | CorruptCheckpointError


@dataclass(frozen=True, slots=True)
class Damage:
    """Damaged object of a run or checkpoint.

    Attributes:
        key: Key of the object, relative to the URL of the report.
        kind: "missing", "length" or "bytes" of a shard; "manifest" if a manifest is missing or cannot be read;
            "value" if a value that lies in a manifest cannot be read.
        reason: Text for people that says what was found.
        steps: Steps of all live checkpoints that name the object, ascending; () for a checkpoint by itself.
        entries: Names of the tensors and objects that lie in the damaged bytes, as far as these are known: of a
            shard that is too short, or was read; all of a shard that is missing.
    """

    key: str
    kind: Literal["missing", "length", "bytes", "manifest", "value"]
    reason: str
    steps: tuple[int, ...]
    entries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of a verification.

    Attributes:
        url: URL of the run or checkpoint.
        depth: "quick", "sample" or "deep", as asked for.
        steps: Steps of the checkpoints that were verified, ascending; () for a checkpoint by itself.
        changed: Steps of checkpoints that were found damaged or gone because they were deleted, replaced or thinned
            meanwhile, and so say nothing.
        shards: Number of the shards that were checked; one that several checkpoints name counts once.
        size_bytes: Size of these shards in bytes, as the manifests say.
        read_bytes: Bytes that were read, manifests and repeated reads included.
        damage: Damaged objects; () if nothing is damaged.
    """

    url: str
    depth: Depth
    steps: tuple[int, ...]
    changed: tuple[int, ...]
    shards: int
    size_bytes: int
    read_bytes: int
    damage: tuple[Damage, ...]

    @property
    def is_sound(self) -> bool:
        """True if nothing is damaged."""
        return not self.damage


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """Progress of a verification: all shards up to this one were checked."""

    step: int | None  # of the checkpoint; None outside a run
    key: str  # of the shard
    read_bytes: int  # so far
    damage: ShardDamage | None  # of this shard; perhaps of a checkpoint that was deleted meanwhile

    @property
    def place(self) -> str:
        """Place to continue from: `after` of another call."""
        return self.key if self.step is None else f"{self.step}:{self.key}"


def _ignore(_progress: VerifyProgress) -> None:
    """Do nothing."""


def verify(
    store: ObjectStore,
    *,
    steps: Sequence[int | str] = (),
    depth: Depth = "sample",
    after: str | None = None,
    look_seconds: float = RANGE_RETRY_SECONDS,
    retry_seconds: float = RANGE_RETRY_SECONDS,
    report_progress: Callable[[VerifyProgress], None] = _ignore,
) -> VerifyReport:
    """Verify the checkpoints of a run, or a checkpoint by itself; only reads. `Run.verify` says more.

    Holds up to 256 MiB of shards and their digests, five decoded manifests, 8 bytes for each shard and piece that was
    checked, and the damage.

    Args:
        store: Store at the URL of the run or checkpoint.
        steps: Steps or names of the checkpoints; () for all that are live.
        depth: "quick", "sample" or "deep".
        after: `VerifyProgress.place` of an interrupted call: shards up to there are not checked, manifests are.
        look_seconds: Time for which the first request is retried while the store fails, in seconds.
        retry_seconds: Time for which each later request is retried, in seconds.
        report_progress: Called after each shard, in the caller's thread.
    """
    if depth not in get_args(Depth):
        raise InvalidArgumentError("depth must be 'quick', 'sample' or 'deep'.", depth=depth)
    place = _parse_place(after)
    counting, cancellation = CountingStore(store), Cancellation()
    catalog = catalog_of(counting, retry_seconds=look_seconds)
    entries: list[Entry | None] = [None]
    if catalog is not None:
        chosen = {entry.step: entry for entry in (find_entry(catalog, step, url=store.url) for step in steps)}
        entries = [*(chosen[step] for step in sorted(chosen))] if steps else [*catalog.entries]
    elif steps:
        raise no_run(RetryingStore(counting, Deadline(look_seconds)), steps[0])
    walk = _Walk(counting, entries, depth=depth, after=place, retry_seconds=retry_seconds)
    checker = ShardChecker(counting, depth=depth, make_deadline=lambda: Deadline(retry_seconds, cancellation.clock))
    checks = map_in_order(
        checker.check, walk.parts(), threads=_CHECKS_IN_FLIGHT, ahead=_CHECKS_AHEAD, name="dcp_remote-verify"
    )
    damaged: dict[str, ShardDamage] = {}
    try:
        for part, damage in checks:
            if damage is not None:
                before = damaged[part.key].ranges if part.key in damaged else ()
                damaged[part.key] = replace(damage, ranges=before + damage.ranges)
            report_progress(VerifyProgress(part.step, part.key, counting.counts.got_bytes, damage))
    finally:
        cancellation.cancel()
        checks.close()
    changed, found = walk.judge(damaged)
    return VerifyReport(
        url=store.url,
        depth=depth,
        steps=tuple(entry.step for entry in entries if entry is not None),
        changed=changed,
        shards=walk.shards,
        size_bytes=walk.size_bytes,
        read_bytes=counting.counts.got_bytes,
        damage=found,
    )


def _parse_place(text: str | None) -> tuple[int, str]:
    if text is None:
        return -1, ""
    match = _PLACE.fullmatch(text)
    if match is None:
        raise InvalidArgumentError("after must be the place that an interrupted verification has named.", after=text)
    return int(match[1] or -1), match[2]


class _Seen:
    """Fingerprints of what was seen before, of 8 bytes each."""

    def __init__(self) -> None:
        self._known: _Prints = np.zeros(0, dtype=np.uint64)

    def add(self, prints: _Prints) -> npt.NDArray[np.bool_]:
        """Add fingerprints; return which of them are new."""
        places = np.searchsorted(self._known, prints)
        is_new = np.ones(len(prints), dtype=bool)
        inside = places < len(self._known)
        is_new[inside] = self._known[places[inside]] != prints[inside]
        self._known = np.sort(np.concatenate([self._known, prints[is_new]]), kind="stable")
        return is_new


class _PiecesByShard:
    """Pieces of a manifest by their shard, each group by ascending start."""

    def __init__(self, manifest: Manifest) -> None:
        pieces = manifest.pieces
        self._order = np.lexsort((pieces.start, pieces.shard))
        self._bounds = np.searchsorted(pieces.shard[self._order], np.arange(len(manifest.shards.keys) + 1))

    def of(self, shard: int) -> I64:
        """Return the indices of the pieces in a shard."""
        pieces: I64 = self._order[self._bounds[shard] : self._bounds[shard + 1]]
        return pieces


class _Walk:
    """Way through the manifests of some checkpoints; None stands for that of a checkpoint by itself."""

    def __init__(
        self,
        store: ObjectStore,
        entries: Sequence[Entry | None],
        *,
        depth: Depth,
        after: tuple[int, str],
        retry_seconds: float,
    ) -> None:
        self._store, self._entries, self._depth, self._after = store, entries, depth, after
        self._retry_seconds = retry_seconds
        self._shards, self._pieces = _Seen(), _Seen()
        self.shards = self.size_bytes = 0  # that were yielded, each once
        self._save_id: str | None = None  # of a checkpoint by itself
        self._is_gone = False  # a manifest was deleted before it was read
        self._damage: list[Damage] = []  # of manifests

    def parts(self) -> Iterator[ShardPart]:
        """Yield the shards to check, each once; of a deep check also pieces that an earlier checkpoint did not name."""
        with closing(self._manifests(self._entries)) as manifests:
            for entry, manifest in manifests:
                steps = () if entry is None else (entry.step,)
                key = MANIFEST_KEY if entry is None else entry.manifest
                if isinstance(manifest, CheckpointGoneError):
                    self._is_gone = True
                elif isinstance(manifest, CorruptCheckpointError):
                    self._damage.append(Damage(key, "manifest", manifest.what, steps, ()))
                else:
                    self._save_id = manifest.save_id
                    for name, data in manifest.inline.items():
                        try:
                            from_text(name, data)
                        except CorruptCheckpointError as error:
                            self._damage.append(Damage(key, "value", error.what, steps, (name,)))
                    yield from self._parts_of(manifest)

    def _parts_of(self, manifest: Manifest) -> Iterator[ShardPart]:
        shards, pieces = manifest.shards, manifest.pieces
        step = manifest.run.step if manifest.run is not None else None
        columns = (shards.sizes.tolist(), shards.data_starts.tolist(), shards.table_lengths.tolist())
        prints = np.array(
            [
                xxhash.xxh3_64_intdigest(repr((row, shards.table_digest(shard))).encode())
                for shard, row in enumerate(zip(shards.keys, *columns, strict=True))
            ],
            dtype=np.uint64,
        )
        is_new_shard = self._shards.add(prints)
        groups = _PiecesByShard(manifest)
        is_new_piece = np.zeros(len(pieces.shard), dtype=bool)
        if self._depth == "deep":
            halves = np.frombuffer(pieces.digests, dtype=np.uint64).reshape(-1, 2)
            # Multiplied by an odd number, so that the start changes all bits.
            starts = pieces.start.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            is_new_piece = self._pieces.add(halves[:, 0] ^ prints[pieces.shard] ^ starts)
        for shard in sorted(range(len(shards.keys)), key=shards.keys.__getitem__):
            own = groups.of(shard)
            if self._depth != "sample":
                own = own[is_new_piece[own]]
            key, size_bytes, data_start = shards.keys[shard], int(shards.sizes[shard]), int(shards.data_starts[shard])
            is_new = bool(is_new_shard[shard])
            if not is_new and (self._depth != "deep" or not len(own)):
                continue
            if (-1 if step is None else step, key) <= self._after:
                continue
            self.shards += is_new
            self.size_bytes += size_bytes * is_new
            table = ByteRange(data_start - int(shards.table_lengths[shard]), data_start)
            yield ShardPart(step, key, size_bytes, table, shards.table_digest(shard), pieces.take(own))

    def judge(self, damaged: Mapping[str, ShardDamage]) -> tuple[tuple[int, ...], tuple[Damage, ...]]:
        """Return the steps of checkpoints that changed meanwhile, and the damage of those that are live.

        Nothing is sent if nothing was found; else one GET for the catalog, and if a shard is damaged, one for each
        manifest.
        """
        if not (damaged or self._damage or self._is_gone):
            return (), ()
        live: Sequence[Entry | None] = [None]
        if self._entries != [None]:
            live = require_catalog(RetryingStore(self._store, Deadline(self._retry_seconds))).entries
        keys = {MANIFEST_KEY if entry is None else entry.manifest for entry in live}
        changed = tuple(entry.step for entry in self._entries if entry is not None and entry.manifest not in keys)
        found = [damage for damage in self._damage if damage.key in keys]
        names: dict[str, set[str]] = {}
        steps: dict[str, tuple[int, ...]] = {}
        with closing(self._manifests(live if damaged else ())) as manifests:
            for entry, manifest in manifests:
                if not isinstance(manifest, Manifest):
                    continue  # found before, deleted, or of a checkpoint that was not asked for
                if entry is None and manifest.save_id != self._save_id:
                    raise CheckpointGoneError(
                        "The checkpoint was replaced while it was verified. Verify again.", url=self._store.url
                    )
                own = () if entry is None else (entry.step,)
                for key, entries in _name_damaged(manifest, damaged):
                    names.setdefault(key, set()).update(entries)
                    steps[key] = steps.get(key, ()) + own
        for key in sorted(names):
            damage = damaged[key]
            found.append(Damage(key, damage.kind, damage.reason, steps[key], tuple(sorted(names[key]))))
        return changed, tuple(found)

    def _manifests(self, entries: Sequence[Entry | None]) -> Generator[tuple[Entry | None, _Read], None, None]:
        def read(entry: Entry | None) -> _Read:
            try:
                if entry is None:
                    return read_manifest(self._store, retry_seconds=self._retry_seconds)
                return read_entry(self._store, entry, retry_seconds=self._retry_seconds)
            except (CheckpointGoneError, CorruptCheckpointError) as error:
                return error

        return map_in_order(read, entries, threads=READS_IN_FLIGHT, ahead=READS_IN_FLIGHT, name="dcp_remote-manifests")


def _name_damaged(manifest: Manifest, damaged: Mapping[str, ShardDamage]) -> Iterator[tuple[str, list[str]]]:
    """Yield the damaged shards that a manifest names, with the entries that lie in damaged bytes."""
    shards, pieces = manifest.shards, manifest.pieces
    groups: _PiecesByShard | None = None
    for shard, key in enumerate(shards.keys):
        if key not in damaged:
            continue
        groups = groups or _PiecesByShard(manifest)
        own = groups.of(shard)
        starts, stops = pieces.start[own], pieces.start[own] + pieces.length[own]
        table_stop = int(shards.data_starts[shard])
        table_start = table_stop - int(shards.table_lengths[shard])
        is_hit = np.zeros(len(own), dtype=bool)
        for one in damaged[key].ranges:
            is_hit |= (starts < one.stop) & (stops > one.start)
            if one.start < table_stop and one.stop > table_start:  # parts of longer pieces cannot be verified
                is_hit |= pieces.length[own] > BLOCK_BYTES_MIN
        yield key, manifest.names_of_pieces(own[is_hit])
