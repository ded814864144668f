"""Validation of a manifest: counts, ranges, overlaps, keys and names, checked against each other. Pure.

The same checks run before a manifest is written, which finds bugs, and after one is read, which finds damage and forged
documents. Memory and time are bounded by the size of the document, whatever numbers it claims.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from dcp_remote.common.arrays import I64, concat_ranges, group_offsets, sorted_unique
from dcp_remote.common.digests import BLOCK_BYTES_MIN, DIGEST_BYTES, table_entries
from dcp_remote.common.units import MiB
from dcp_remote.errors import UnsupportedFormatError
from dcp_remote.format.columns import VALUE_MAX, damaged
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.manifest import (
    JSON,
    JSON_RAW,
    PICKLE,
    RAW,
    REPLACES_MAX,
    TORCH,
    Manifest,
    Pieces,
    RunInfo,
    SegmentTable,
    Shards,
    TensorKind,
    Tensors,
    tensor_groups,
)
from dcp_remote.format.tiling import Comparisons, why_not_tiled

# Keys are relative to the checkpoint or run; no key that matches can lead out of it.
_SHARD_KEY = re.compile(r"shards/[0-9a-f]{2}/[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\.safetensors")

_SAVE_ID = re.compile(r"[0-9a-f]{32}")

# The 8 bytes of the header length, and "{}".
_HEADER_BYTES_MIN = 10

# An index in the flatten mapping makes a list of that length, of which every missing entry costs 8 bytes.
LIST_ENTRIES_MAX = 10_000_000

# torch walks a state dict recursively, and Python's recursion limit is 1,000.
PATH_PARTS_MAX = 1_000

# Objects and streams are read whole, and only the manifest states their length: 4 TiB at 8 MiB a request are half a
# million requests.
STREAM_BYTES_MAX = 4 * 1024**4

# A segment is read whole; dcp_remote writes 0.8 MB for 50,000 pieces.
SEGMENT_BYTES_MAX = 64 * MiB


def check(manifest: Manifest, *, is_known: bool = False) -> Manifest:
    """Check a manifest and return it. Called before a manifest is written, and after one is read.

    `is_known` is true if only names of shards, digests and inline objects differ from a manifest that was checked.
    Tensors with chunks in segments that are not joined need not be covered. Takes time linear in the
    number of chunks and pieces for every regular layout, and refuses irregular layouts that would take much longer. A
    dtype or an encoding that this version does not know is no damage
    (`UnsupportedFormatError`).
    """
    check_saves(manifest.save_id, manifest.replaces)
    _check_shards(manifest.shards)
    if not is_known:
        check_tensors(manifest.tensors, manifest.chunk_counts)
        objects = 0
        for item in manifest.stored:
            # Checked before the sum, in which a negative count could hide surplus pieces of chunks.
            if item.pieces < 1:
                raise damaged("a stored object has no pieces", object=item.name)
            objects += item.pieces
        others = objects + len(manifest.pieces.shard) - manifest.segment_first
        check_pieces(manifest.shards, manifest.tensors, manifest.pieces, others=others)
        _check_objects(manifest)
        _check_flatten(manifest)
    if manifest.segments is not None:
        _check_segments(manifest, manifest.segments)
    if not 1 <= manifest.world_size <= VALUE_MAX:
        raise damaged("the number of ranks is out of bounds", world_size=manifest.world_size)
    if manifest.run is not None:
        _check_run(manifest.run)
    return manifest


def check_saves(save_id: str, replaces: Sequence[str]) -> None:
    """Check the save_ids of a manifest or a tombstone."""
    if len(replaces) > REPLACES_MAX:
        raise damaged("it replaces more saves than allowed", replaces=len(replaces), replaces_max=REPLACES_MAX)
    for identity in (save_id, *replaces):
        if not _SAVE_ID.fullmatch(identity):
            raise damaged("a save_id is not 32 lower-case hex digits", save_id=identity[:100])


def _check_run(run: RunInfo) -> None:
    if not all(0 <= number <= VALUE_MAX for number in (run.step, run.token, run.revision)):
        raise damaged("a number of the run is out of bounds", step=run.step, token=run.token, revision=run.revision)
    if not _SAVE_ID.fullmatch(run.run_id):
        raise damaged("a run_id is not 32 lower-case hex digits", run_id=run.run_id[:100])
    if not all(math.isfinite(value) for _, value in run.metrics):
        raise damaged("a metric is not a finite number", step=run.step)


def _check_shards(shards: Shards) -> None:
    for key in shards.keys:
        if not _SHARD_KEY.fullmatch(key) or ".." in key:
            raise damaged("a shard's key is not of the form shards/<hh>/<name>.safetensors", key=key[:300])
    if len(set(shards.keys)) != len(shards.keys):
        raise damaged("two shards have the same key")
    if bool((shards.table_lengths % DIGEST_BYTES != 0).any()):
        raise damaged("the length of a block table is not a multiple of that of a digest")
    headers = shards.data_starts - shards.table_lengths
    if bool((headers < _HEADER_BYTES_MIN).any() or (shards.data_starts > shards.sizes).any()):
        raise damaged("a block table lies outside its shard")
    # A table is read whole, so its size needs a bound: a piece of n > 1 blocks is longer than n / 2 blocks.
    entries_max = (shards.sizes - shards.data_starts) // (BLOCK_BYTES_MIN // 2)
    if bool((shards.table_lengths // DIGEST_BYTES > entries_max).any()):
        raise damaged("a block table is too large for the data of its shard")
    # Floats do not wrap around. Under this bound no sum of the lengths of pieces inside their shards does, either.
    if float(shards.sizes.sum(dtype=np.float64)) > VALUE_MAX:
        raise damaged("the shards together are too large", limit_bytes=VALUE_MAX)


def _check_kinds(kinds: tuple[TensorKind, ...]) -> None:
    for kind in kinds:
        if kind.dtype not in ITEM_BYTES:
            raise UnsupportedFormatError(
                "A tensor has a dtype that this version does not know. Upgrade dcp_remote.", dtype=kind.dtype
            )
        if kind.encoding not in (RAW, TORCH, PICKLE):
            raise UnsupportedFormatError(
                "A tensor has an encoding that this version does not know. Upgrade dcp_remote.", encoding=kind.encoding
            )


def check_tensors(tensors: Tensors, chunk_counts: I64) -> None:
    """Check the chunks of tensors; those of a tensor that has fewer than `chunk_counts` need not cover the tensor."""
    _check_kinds(tensors.kinds)
    if len(tensors.index) != len(tensors.names):
        raise damaged("two tensors have the same name")
    if tensors.names and int(tensors.kind.max()) >= len(tensors.kinds):
        raise damaged("a tensor has a kind that is not listed")
    comparisons = Comparisons()
    # Most tensors of a large state dict are one chunk, which needs no check of the tiling.
    has_all = tensors.chunks == chunk_counts
    whole = has_all & (tensors.chunks == 1)
    for number in np.flatnonzero(~whole).tolist():
        shape = _checked_shape(tensors, number)
        offsets, sizes = tensors.boxes_of(number)
        if tensors.kind_of(number).encoding != RAW and chunk_counts[number] != 1:
            raise damaged("a tensor stored as a stream does not have exactly one chunk", tensor=tensors.names[number])
        reason = why_not_tiled(shape, offsets, sizes, comparisons, is_part=not has_all[number])
        if reason:
            raise damaged(reason, tensor=tensors.names[number], shape=shape, chunks=len(sizes))
    for number in find_doubtful(tensors, np.flatnonzero(whole)).tolist():
        shape = _checked_shape(tensors, number)
        chunk = int(tensors.chunk_first[number])
        if tensors.sizes_of(chunk) != shape or any(tensors.offsets_of(chunk)):
            raise damaged("a tensor's only chunk is not the whole of it", tensor=tensors.names[number], shape=shape)


def find_doubtful(tensors: Tensors, whole: I64) -> I64:
    """Return those of the tensors of one chunk whose chunk is not the whole of them, or whose size may be too large.

    Looked at all at once: one at a time, they take 5 us each. Sums of logarithms are exact to far less than a bit.
    """
    dimensions = tensors.dimensions[whole]
    shape = tensors.shape[concat_ranges(tensors.shape_first[whole], dimensions)]
    places = concat_ranges(tensors.value_first[whole], dimensions)
    owner = np.repeat(np.arange(len(whole)), dimensions)
    bits = np.bincount(owner, np.log2(np.maximum(shape, 1)), minlength=len(whole))
    is_doubtful = bits > math.log2(VALUE_MAX / max(ITEM_BYTES.values())) - 1
    is_doubtful[owner[(shape != tensors.chunk_sizes[places]) | (tensors.chunk_offsets[places] != 0)]] = True
    return whole[is_doubtful]


def _checked_shape(tensors: Tensors, number: int) -> tuple[int, ...]:
    shape = tensors.shape_of(number)
    # Sizes of 0 count as 1, so that no product of some of the sizes can wrap around.
    if math.prod(max(size, 1) for size in shape) * ITEM_BYTES[tensors.kind_of(number).dtype] > VALUE_MAX:
        raise damaged("a tensor is too large", tensor=tensors.names[number], shape=shape, limit_bytes=VALUE_MAX)
    return shape


def check_pieces(shards: Shards, tensors: Tensors, pieces: Pieces, *, others: int = 0, stream_bytes: int = 0) -> int:
    """Check the pieces of chunks, and so many others behind them.

    Returns the bytes of all streams and of the other pieces; to `stream_bytes`, those of pieces that were checked
    before, they are added.
    """
    count = len(pieces.shard)
    if count != int(tensors.piece_first[-1]) + others:
        raise damaged("the number of pieces is not that of the chunks and objects", pieces=count)
    if count and int(pieces.shard.max()) >= len(shards.sizes):
        raise damaged("a piece is in a shard that is not listed")
    stops = pieces.start + pieces.length
    if bool((pieces.length < 1).any()):
        raise damaged("a piece is empty")
    if bool((pieces.start < shards.data_starts[pieces.shard]).any() or (stops > shards.sizes[pieces.shard]).any()):
        raise damaged("a piece reaches outside the data of its shard")
    # Offsets in all shards, laid end to end. The ranges are disjoint if and only if the (n + 1)th smallest start is not
    # below the nth smallest stop, so that starts and stops are sorted independently.
    shard_first = group_offsets(shards.sizes)[pieces.shard]
    if bool((np.sort(shard_first + pieces.start)[1:] < np.sort(shard_first + stops)[:-1]).any()):
        raise damaged("two pieces overlap")
    _check_tables(shards, pieces)
    return _check_chunk_lengths(tensors, pieces, stream_bytes)


def _check_segments(manifest: Manifest, segments: SegmentTable) -> None:
    tensors, owner = manifest.tensors, segments.owner
    if len(segments.shard) and int(segments.shard.max()) >= len(manifest.shards.keys):
        raise damaged("a segment has a shard that is not listed")
    is_same = owner[1:] == owner[:-1]
    if bool((segments.tensors < 1).any() or (is_same & (np.diff(segments.tensor) < 1)).any()):
        raise damaged("the tensors of a segment are not in order")
    groups = tensor_groups(tensors.names, manifest.flatten)
    # Otherwise a key could not be dropped from the checkpoint without writing the segment anew.
    if bool((is_same & (np.diff(groups[segments.tensor]) != 0)).any()):
        raise damaged("a segment has tensors of several top-level keys")
    shape = tensors.shape[concat_ranges(tensors.shape_first[segments.tensor], tensors.dimensions[segments.tensor])]
    if bool((segments.offsets + segments.sizes > shape).any()):
        raise damaged("a segment has a box outside its tensor")
    if bool((manifest.pieces.length[manifest.segment_first :] > SEGMENT_BYTES_MAX).any()):
        raise damaged("a segment is too large", limit_bytes=SEGMENT_BYTES_MAX)
    if bool((tensors.chunks > segments.chunks).any()):
        raise damaged("a tensor has more chunks in the segments than in the manifest")


def _check_tables(shards: Shards, pieces: Pieces) -> None:
    lengths = sorted_unique(pieces.length)
    of_lengths = np.array([table_entries(length) for length in lengths.tolist()], dtype=np.int64)
    entries = of_lengths[np.searchsorted(lengths, pieces.length)]
    # Only the bounds of each piece are checked: the table may hold digests of pieces that the manifest does not name.
    outside = pieces.table + entries > shards.table_lengths[pieces.shard] // DIGEST_BYTES
    if bool(np.where(entries > 0, outside, pieces.table != 0).any()):
        raise damaged("the block digests of a piece are outside the block table of its shard")


def _check_chunk_lengths(tensors: Tensors, pieces: Pieces, stream_bytes: int) -> int:
    item = np.array([ITEM_BYTES[kind.dtype] for kind in tensors.kinds], dtype=np.int64)
    raw = np.array([kind.encoding == RAW for kind in tensors.kinds], dtype=bool)
    tensor_of = np.repeat(np.arange(len(tensors.names)), tensors.chunks)
    kind_of = tensors.kind[tensor_of]
    # The product of each chunk's sizes. `reduceat` cannot reduce empty groups, so that each group gets a leading 1.
    padded = np.ones(len(tensors.chunk_sizes) + len(tensor_of), dtype=np.int64)
    starts = tensors.box_first[:-1] + np.arange(len(tensor_of))
    padded[concat_ranges(starts + 1, tensors.dimensions[tensor_of])] = tensors.chunk_sizes
    elements = np.multiply.reduceat(padded, starts)
    lengths = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(pieces.length[: int(tensors.piece_first[-1])])])
    stored = lengths[tensors.piece_first[1:]] - lengths[tensors.piece_first[:-1]]
    # A stream is never empty, also that of a tensor without elements.
    wrong = np.where(raw[kind_of], stored != elements * item[kind_of], stored == 0)
    stream_bytes += int(stored[~raw[kind_of]].sum()) + int(pieces.length[int(tensors.piece_first[-1]) :].sum())
    if stream_bytes > STREAM_BYTES_MAX:
        raise damaged("its objects and streams together are too large", limit_bytes=STREAM_BYTES_MAX)
    if bool(wrong.any()):
        name = tensors.names[int(tensor_of[int(np.flatnonzero(wrong)[0])])]
        raise damaged("the pieces of a chunk are not as long as the chunk", tensor=name)
    chunk_of_piece = np.cumsum(np.bincount(tensors.piece_first[1:], minlength=1))[: int(tensors.piece_first[-1])]
    kind_of_piece = kind_of[chunk_of_piece]
    is_split = pieces.length[: len(kind_of_piece)] % item[kind_of_piece] != 0
    if bool((raw[kind_of_piece] & is_split).any()):
        raise damaged("a piece splits an element")
    return stream_bytes


def _check_objects(manifest: Manifest) -> None:
    names = [*manifest.inline, *(item.name for item in manifest.stored)]
    if len(set(names)) != len(names) or any(name in manifest.tensors.index for name in names):
        raise damaged("two entries have the same name")
    first = int(manifest.tensors.piece_first[-1])
    for item in manifest.stored:
        if item.encoding not in (JSON, JSON_RAW, TORCH, PICKLE):
            raise UnsupportedFormatError(
                "An object has an encoding that this version does not know. Upgrade dcp_remote.",
                object=item.name,
                encoding=item.encoding,
            )
        if item.piece_first != first:
            raise damaged("the pieces of stored objects are not consecutive", object=item.name)
        first += item.pieces
    total = len(names) + len(manifest.tensors.names)
    positions = manifest.positions
    if len(positions) != len(names) or len(set(positions)) != len(names) or any(p >= total for p in positions):
        raise damaged("the positions of the objects are not distinct positions of entries")


def _check_flatten(manifest: Manifest) -> None:
    """Check that the paths form one nested state dict: all differ, and no path leads through the value of another."""
    if manifest.flatten is None:
        return
    root: dict[str | int, Any] = {}
    paths = [*manifest.flatten.values(), *((name,) for name in manifest.names() if name not in manifest.flatten)]
    for path in paths:
        if len(path) > PATH_PARTS_MAX:
            raise damaged("an entry is nested too deep in the state dict", path=path[:3], parts=len(path))
        node: dict[str | int, Any] | None = root
        for part in path[:-1]:
            node = node.setdefault(part, {}) if node is not None else None
        if node is None or not path or path[-1] in node:
            raise damaged("an entry has an empty path, or the same place in the state dict as another", path=path)
        node[path[-1]] = None
    if any(isinstance(part, int) for part in root):
        raise damaged("the state dict is a list")
    entries = 0
    nodes = [root]
    while nodes:
        node = nodes.pop()
        indices = [part for part in node if isinstance(part, int)]
        if indices:
            entries += max(indices) + 1
            if len(indices) != len(node) or min(indices) < 0 or entries > LIST_ENTRIES_MAX:
                raise damaged("a list in the state dict is too long, or has keys that are no indices", keys=[*node][:3])
        nodes += (child for child in node.values() if child is not None)
