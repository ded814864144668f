"""Thinning: a manifest without some top-level keys of the state dict, so that the optimizer's shards can be deleted.

Pure; no data moves. Two top-level keys never share a shard, so that whole objects can be deleted. Values at the top of
the state dict itself do share shards, which then stay.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dcp_remote.common.arrays import sorted_unique
from dcp_remote.format.entry_names import top_level_key
from dcp_remote.format.manifest import Manifest, Pieces, SegmentTable, Shards, StoredObject, Tensors

_Mask = npt.NDArray[np.bool_]


def drop_keys(manifest: Manifest, keys: Collection[str]) -> Manifest:
    """Return a manifest without these top-level keys; the very same manifest if it has none of them.

    The other entries keep their order and their places in the shards. Shards without any of them are left out.
    `run.thinned` lists the keys that were dropped. Segments need not be joined. They go with the tensors of a key, and
    tensors at the top of the state dict, which share segments, stay.
    """
    paths = manifest.flatten or {}
    tops = {name: top_level_key(paths.get(name)) or name for name in manifest.names()}
    gone = {name for name, top in tops.items() if top in keys}
    if manifest.segments is not None:
        gone = {name for name in gone if name not in manifest.tensors.index or top_level_key(paths.get(name))}
    if not gone:
        return manifest
    tensors, chunk_pieces = _take_tensors(manifest.tensors, gone)
    stays = [item.name not in gone for item in manifest.stored]
    stored_pieces = np.repeat(_mask(stays), np.array([item.pieces for item in manifest.stored], dtype=np.int64))
    segments, segment_pieces = _take_segments(manifest, gone)
    shards, pieces, segments = _take_pieces(
        manifest, np.concatenate([chunk_pieces, stored_pieces, segment_pieces]), segments
    )
    inline = {name: text for name, text in manifest.inline.items() if name not in gone}
    stored: list[StoredObject] = []
    first = int(chunk_pieces.sum())
    for item, stay in zip(manifest.stored, stays, strict=True):
        if stay:
            stored.append(replace(item, piece_first=first))
            first += item.pieces
    place = {name: position for position, name in enumerate(name for name in manifest.names() if name not in gone)}
    flatten, run = manifest.flatten, manifest.run
    return replace(
        manifest,
        shards=shards,
        tensors=tensors,
        pieces=pieces,
        segments=segments,
        inline=inline,
        stored=tuple(stored),
        positions=tuple(place[name] for name in [*inline, *(item.name for item in stored)]),
        # Filtered by path, since some flattened values have no entry, such as an empty dict.
        flatten=None if flatten is None else {name: path for name, path in flatten.items() if path[0] not in keys},
        run=None
        if run is None
        else replace(run, thinned=tuple(sorted({*run.thinned, *(tops[name] for name in gone)}))),
    )


def _take_tensors(tensors: Tensors, gone: Collection[str]) -> tuple[Tensors, _Mask]:
    """Return the tensors that stay, and a mask of the pieces of chunks that do."""
    stays = _mask([name not in gone for name in tensors.names])
    chunks = np.repeat(stays, tensors.chunks)
    values = np.repeat(chunks, np.repeat(tensors.dimensions, tensors.chunks))
    left = Tensors(
        names=tuple(name for name in tensors.names if name not in gone),
        kinds=tensors.kinds,
        kind=tensors.kind[stays],
        dimensions=tensors.dimensions[stays],
        shape=tensors.shape[np.repeat(stays, tensors.dimensions)],
        chunks=tensors.chunks[stays],
        chunk_offsets=tensors.chunk_offsets[values],
        chunk_sizes=tensors.chunk_sizes[values],
        chunk_pieces=tensors.chunk_pieces[chunks],
    )
    return left, np.repeat(chunks, tensors.chunk_pieces)


def _take_segments(manifest: Manifest, gone: Collection[str]) -> tuple[SegmentTable | None, _Mask]:
    """Return the segments of tensors that stay, and a mask of them; their shards are numbered as before."""
    table, tensors = manifest.segments, manifest.tensors
    if table is None:
        return None, _mask([])
    stays = _mask([name not in gone for name in tensors.names])
    left = _mask([bool(stays[tensors[0]]) for _, tensors in table.parts()])
    pairs = stays[table.tensor]
    values = np.repeat(pairs, tensors.dimensions[table.tensor])
    return SegmentTable(
        chunks=table.chunks[stays],
        shards=table.shards[left],
        shard=table.shard[np.repeat(left, table.shards)],
        tensors=table.tensors[left],
        tensor=(np.cumsum(stays) - 1)[table.tensor[pairs]],
        offsets=table.offsets[values],
        sizes=table.sizes[values],
    ), left


def _take_pieces(
    manifest: Manifest, stays: _Mask, segments: SegmentTable | None
) -> tuple[Shards, Pieces, SegmentTable | None]:
    """Return the shards of the pieces and segments that stay, those pieces, in their order, and the segments."""
    left = manifest.pieces.take(np.flatnonzero(stays))
    used = sorted_unique(left.shard if segments is None else np.concatenate([left.shard, segments.shard]))
    if segments is not None:
        segments = replace(segments, shard=np.searchsorted(used, segments.shard).astype(np.int64))
    left = replace(left, shard=np.searchsorted(used, left.shard).astype(np.int64))
    return manifest.shards.take(used), left, segments


def _mask(values: list[bool]) -> _Mask:
    return np.array(values, dtype=np.bool_)
