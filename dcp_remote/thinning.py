"""A manifest without some top-level keys of the state dict, so that the shards of the optimizer can go. Pure.

No data moves. Shards of two top-level keys are never the same, so that what goes is whole objects; only what lies at
the top of the state dict itself shares its shards, which then stay.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dcp_remote.digests import DIGEST_BYTES
from dcp_remote.manifest import Manifest, Pieces, Shards, StoredObject, Tensors
from dcp_remote.ranges import I64, distinct

_Mask = npt.NDArray[np.bool_]


def without(manifest: Manifest, keys: Collection[str]) -> Manifest:
    """The same save without what lies at or below these keys of the state dict; the very same manifest if nothing does.

    What is left stays where it is, in its order. Shards that nothing of it lies in are named no more. `run.thinned`
    says which of the keys were there.
    """
    tops = {name: _top(manifest, name) for name in manifest.names()}
    gone = {name for name, top in tops.items() if top in keys}
    if not gone:
        return manifest
    tensors, chunk_pieces = _tensors(manifest.tensors, gone)
    stays = [item.name not in gone for item in manifest.stored]
    stored_pieces = np.repeat(_mask(stays), np.array([item.pieces for item in manifest.stored], dtype=np.int64))
    shards, pieces = _laid(manifest.shards, manifest.pieces, np.concatenate([chunk_pieces, stored_pieces]))
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
        inline=inline,
        stored=tuple(stored),
        positions=tuple(place[name] for name in [*inline, *(item.name for item in stored)]),
        # Also of what was flattened and has no entry, such as an empty dict.
        flatten=None if flatten is None else {name: path for name, path in flatten.items() if path[0] not in keys},
        run=None
        if run is None
        else replace(run, thinned=tuple(sorted({*run.thinned, *(tops[name] for name in gone)}))),
    )


def _top(manifest: Manifest, name: str) -> str:
    """The key of the state dict that an entry lies at or below."""
    path = manifest.flatten.get(name) if manifest.flatten is not None else None
    return str(path[0]) if path else name


def _tensors(tensors: Tensors, gone: Collection[str]) -> tuple[Tensors, _Mask]:
    """Those that stay; and of each piece of a chunk, whether it does."""
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


def _laid(shards: Shards, pieces: Pieces, stays: _Mask) -> tuple[Shards, Pieces]:
    """The pieces that stay, and the shards that they lie in, in their order."""
    used = distinct(pieces.shard[stays])
    left = Shards(
        keys=tuple(shards.keys[number] for number in used.tolist()),
        sizes=shards.sizes[used],
        data_starts=shards.data_starts[used],
        table_lengths=shards.table_lengths[used],
        table_digests=_digests(shards.table_digests, used),
    )
    return left, Pieces(
        shard=np.searchsorted(used, pieces.shard[stays]).astype(np.int64),
        start=pieces.start[stays],
        length=pieces.length[stays],
        table=pieces.table[stays],
        digests=_digests(pieces.digests, np.flatnonzero(stays)),
    )


def _digests(digests: bytes, numbers: I64) -> bytes:
    return np.frombuffer(digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)[numbers].tobytes()


def _mask(values: list[bool]) -> _Mask:
    return np.array(values, dtype=np.bool_)
