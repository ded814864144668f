"""torch's `Metadata` and our manifest: one into the other.

torch plans with `Metadata` (torch/distributed/checkpoint/metadata.py); the coordinator turns it and the ranks' reports
into a manifest, and a reader turns the manifest back. Nothing of torch's is changed: it may be cached (plan caching).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_remote.digests import DIGEST_BYTES
from dcp_remote.errors import InvalidArgumentError, SaveFailedError, UnsupportedFormatError
from dcp_remote.manifest import RAW, Manifest, Pieces, Shards, StoredObject, TensorKind, Tensors
from dcp_remote.ranges import I64, firsts, joined
from dcp_remote.report import RankReport
from dcp_remote.serialization import dtype_name, dtype_of

# Looked up here and not in torch, which imports some of what it is asked for by name.
_LAYOUTS = {
    str(layout).removeprefix("torch."): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)
}
_MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}


@dataclass(frozen=True, slots=True)
class SaveInfo:
    """What a manifest says of the save itself; the fields of `Manifest` of the same names."""

    save_id: str
    replaces: tuple[str, ...]
    created: str
    writer: Mapping[str, str]


def to_dcp_metadata(manifest: Manifest) -> Metadata:
    """The `Metadata` that was saved, without `storage_data`: where bytes are is the reader's own business.

    Raises:
        UnsupportedFormatError: A tensor has a layout or memory format that this torch does not know.
    """
    tensors = manifest.tensors
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    properties = [_properties(kind) for kind in tensors.kinds]
    for name in manifest.names():
        number = tensors.index.get(name)
        if number is None:
            entries[name] = BytesStorageMetadata()
            continue
        offsets, sizes = tensors.boxes_of(number)
        entries[name] = TensorStorageMetadata(
            properties=properties[int(tensors.kind[number])],
            size=torch.Size(tensors.shape_of(number)),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(o), sizes=torch.Size(s))
                for o, s in zip(offsets.tolist(), sizes.tolist(), strict=True)
            ],
        )
    return Metadata(state_dict_metadata=entries, planner_data=_planner_data(manifest.flatten))


def _planner_data(flatten: Mapping[str, tuple[str | int, ...]] | None) -> object:
    return None if flatten is None else dict(flatten)


def _properties(kind: TensorKind) -> TensorProperties:
    layout = _LAYOUTS.get(kind.layout)
    memory_format = _MEMORY_FORMATS.get(kind.memory_format)
    if layout is None or memory_format is None:
        # The manifest's digest was right: a newer torch, or a newer version of ours, has more of them.
        raise UnsupportedFormatError(
            "A tensor has a layout or memory format that is unknown here; load it with a newer torch or dcp_remote.",
            layout=kind.layout[:100],
            memory_format=kind.memory_format[:100],
        )
    return TensorProperties(
        dtype=dtype_of(kind.dtype),
        layout=layout,
        requires_grad=kind.requires_grad,
        memory_format=memory_format,
        pin_memory=kind.pin_memory,
    )


def to_manifest(dcp_metadata: Metadata, reports: Sequence[RankReport], info: SaveInfo) -> Manifest:
    """Put together what was planned and what was written; called by the coordinator.

    Every chunk of every tensor, and every object, must have been written by some rank, with the dtype that was planned:
    torch itself does not check that. The first rank that wrote a chunk counts; shards of which then nothing is needed
    are left out, and are orphans.

    Args:
        dcp_metadata: torch's; not changed, and no reference to it is kept.
        reports: In the order of the ranks.
        info: What the manifest says of the save.

    Raises:
        SaveFailedError: A gap, or another dtype than planned; names the tensor. Or reports that disagree of a shard.
        InvalidArgumentError: The planner's own data is not a flatten mapping and cannot be stored safely; or a
            tensor has a memory format that the format has no word for.
    """
    planned = {n: m for n, m in dcp_metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    objects = [n for n in dcp_metadata.state_dict_metadata if n not in planned]
    tensors, written = _tensors(planned, reports)
    shard_first = firsts(np.array([len(report.shards.keys) for report in reports], dtype=np.int64))
    shards, same_shard = _merged_shards(reports)
    piece_first = firsts(np.array([len(report.pieces.shard) for report in reports], dtype=np.int64))
    inline, stored, object_pieces = _objects(objects, reports, piece_first, first=len(written))
    pieces = _pieces(reports, shard_first, np.concatenate([written, object_pieces]))
    named, shard = np.unique(same_shard[pieces.shard], return_inverse=True)
    order = {name: position for position, name in enumerate(dcp_metadata.state_dict_metadata)}
    return Manifest(
        save_id=info.save_id,
        replaces=info.replaces,
        created=info.created,
        writer=info.writer,
        world_size=len(reports),
        shards=_chosen(shards, named),
        tensors=tensors,
        pieces=replace(pieces, shard=shard),
        inline=inline,
        stored=stored,
        positions=tuple(order[name] for name in (*inline, *(item.name for item in stored))),
        flatten=_flatten(dcp_metadata.planner_data),
    )


def _tensors(planned: Mapping[str, TensorStorageMetadata], reports: Sequence[RankReport]) -> tuple[Tensors, I64]:
    """The planned tensors, and for each of their pieces its number among those of all reports."""
    encodings = _checked_encodings(planned, reports)
    kinds: dict[TensorKind, int] = {}
    kind = [
        kinds.setdefault(_kind(name, meta.properties, encodings.get(name, RAW)), len(kinds))
        for name, meta in planned.items()
    ]
    metas = list(planned.values())
    dimensions = np.array([len(meta.size) for meta in metas], dtype=np.int64)
    chunks = np.array([len(meta.chunks) for meta in metas], dtype=np.int64)
    offsets = _flat(chunk.offsets for meta in metas for chunk in meta.chunks)
    sizes = _flat(chunk.sizes for meta in metas for chunk in meta.chunks)
    located = _locate(list(planned), dimensions, chunks, offsets, reports)
    piece_counts = np.concatenate([np.zeros(0, dtype=np.int64), *(report.chunk_pieces for report in reports)])
    piece_firsts = firsts(np.array([len(report.pieces.shard) for report in reports], dtype=np.int64))
    starts = np.concatenate(
        [np.zeros(0, dtype=np.int64)]
        + [report.chunk_piece_first + first for report, first in zip(reports, piece_firsts[:-1], strict=True)]
    )
    counts = np.where(located >= 0, piece_counts[located] if len(piece_counts) else 0, 0)
    tensors = Tensors(
        names=tuple(planned),
        kinds=tuple(kinds),
        kind=np.array(kind, dtype=np.int64),
        dimensions=dimensions,
        shape=_flat(meta.size for meta in metas),
        chunks=chunks,
        chunk_offsets=offsets,
        chunk_sizes=sizes,
        chunk_pieces=counts,
    )
    for chunk in np.flatnonzero(located < 0).tolist():
        if all(tensors.sizes_of(chunk)):
            number = int(np.searchsorted(tensors.chunk_first, chunk, side="right")) - 1
            raise SaveFailedError(
                "No rank wrote a chunk of a tensor; nothing was committed.",
                tensor=tensors.names[number],
                offsets=tensors.offsets_of(chunk),
                sizes=tensors.sizes_of(chunk),
                ranks=len(reports),
            )
    return tensors, joined(starts[located] if len(starts) else counts, counts)


def _kind(tensor: str, properties: TensorProperties, encoding: str) -> TensorKind:
    memory_format = next((name for name, value in _MEMORY_FORMATS.items() if value == properties.memory_format), None)
    if memory_format is None:
        raise InvalidArgumentError(
            "A tensor has a memory format that a checkpoint cannot hold.",
            tensor=tensor,
            memory_format=properties.memory_format,
            known=", ".join(_MEMORY_FORMATS),
        )
    return TensorKind(
        dtype=dtype_name(properties.dtype),
        encoding=encoding,
        layout=str(properties.layout).removeprefix("torch."),
        requires_grad=bool(properties.requires_grad),
        memory_format=memory_format,
        pin_memory=bool(properties.pin_memory),
    )


def _checked_encodings(planned: Mapping[str, TensorStorageMetadata], reports: Sequence[RankReport]) -> dict[str, str]:
    encodings: dict[str, str] = {}
    for report in reports:
        for name, dtype, encoding in zip(report.names, report.dtypes, report.encodings, strict=True):
            meta = planned.get(name)
            if meta is None:
                raise SaveFailedError("A rank wrote a tensor that nobody planned.", tensor=name, rank=report.rank)
            if dtype != dtype_name(meta.properties.dtype):
                raise SaveFailedError(
                    "A rank wrote a tensor with another dtype than was planned; nothing was committed.",
                    tensor=name,
                    rank=report.rank,
                    written=dtype,
                    planned=dtype_name(meta.properties.dtype),
                )
            if encodings.setdefault(name, encoding) != encoding:
                raise SaveFailedError("Ranks stored a tensor in different ways.", tensor=name, rank=report.rank)
    return encodings


def _locate(names: Sequence[str], dimensions: I64, chunks: I64, offsets: I64, reports: Sequence[RankReport]) -> I64:
    """For each planned chunk, the number of the reported one that holds it; -1 where there is none.

    The plan says at which place a chunk stands among those of its tensor; that hint is checked, and only where it is
    missing or wrong (a planner of the user's own) the chunk is looked up by its offsets.
    """
    index = {name: number for number, name in enumerate(names)}
    chunk_first = firsts(chunks)
    box_first = firsts(np.repeat(dimensions, chunks))
    located = np.full(int(chunk_first[-1]), -1, dtype=np.int64)
    base = 0
    by_offsets: dict[int, dict[tuple[int, ...], int]] = {}
    for report in reports:
        tensor = np.array([index[name] for name in report.names], dtype=np.int64)[report.chunk_name]
        hinted = (report.chunk_hint >= 0) & (report.chunk_hint < chunks[tensor])
        hinted &= report.chunk_dimensions == dimensions[tensor]
        candidate = np.where(hinted, chunk_first[tensor] + report.chunk_hint, 0)
        first = firsts(report.chunk_dimensions)
        expected = offsets[joined(box_first[candidate], np.where(hinted, report.chunk_dimensions, 0))]
        given = report.chunk_offsets[joined(first[:-1], np.where(hinted, report.chunk_dimensions, 0))]
        owner = np.repeat(np.arange(len(tensor)), np.where(hinted, report.chunk_dimensions, 0))
        hinted[owner[expected != given]] = False
        for chunk in np.flatnonzero(~hinted).tolist():
            number = int(tensor[chunk])
            known = by_offsets.setdefault(number, {})
            if not known:
                span = range(int(chunk_first[number]), int(chunk_first[number + 1]))
                known.update({tuple(offsets[box_first[c] : box_first[c + 1]].tolist()): c for c in reversed(span)})
            where = known.get(tuple(report.chunk_offsets[first[chunk] : first[chunk + 1]].tolist()))
            if where is None:
                raise SaveFailedError(
                    "A rank wrote a chunk that nobody planned.", tensor=names[number], rank=report.rank
                )
            candidate[chunk] = where
        # The first rank that wrote a chunk counts: assigned in reverse, so that it comes last.
        fresh = located[candidate] < 0
        located[candidate[fresh][::-1]] = (base + np.flatnonzero(fresh))[::-1]
        base += len(tensor)
    return located


def _flat(values: Iterable[Iterable[int]]) -> I64:
    return np.fromiter(chain.from_iterable(values), dtype=np.int64)


def _objects(
    names: Sequence[str], reports: Sequence[RankReport], piece_first: I64, *, first: int
) -> tuple[dict[str, bytes], tuple[StoredObject, ...], I64]:
    inline_by_name = {name: text for report in reversed(reports) for name, text in report.inline.items()}
    stored_by_name = {
        item.name: (item, base)
        for report, base in zip(reversed(reports), reversed(piece_first[:-1].tolist()), strict=True)
        for item in report.stored
    }
    inline: dict[str, bytes] = {}
    stored: list[StoredObject] = []
    pieces: list[I64] = [np.zeros(0, dtype=np.int64)]
    for name in names:
        if name in inline_by_name:
            inline[name] = inline_by_name[name]
        elif name in stored_by_name:
            item, base = stored_by_name[name]
            stored.append(StoredObject(name, item.encoding, first, item.pieces))
            pieces.append(base + item.piece_first + np.arange(item.pieces, dtype=np.int64))
            first += item.pieces
        else:
            raise SaveFailedError("No rank wrote an object; nothing was committed.", object=name, ranks=len(reports))
    return inline, tuple(stored), np.concatenate(pieces)


def _pieces(reports: Sequence[RankReport], shard_first: I64, chosen: I64) -> Pieces:
    none = np.zeros(0, dtype=np.int64)
    shard = np.concatenate(
        [none, *(report.pieces.shard + first for report, first in zip(reports, shard_first[:-1], strict=True))]
    )
    start = np.concatenate([none, *(report.pieces.start for report in reports)])
    length = np.concatenate([none, *(report.pieces.length for report in reports)])
    table = np.concatenate([none, *(report.pieces.table for report in reports)])
    digests = np.frombuffer(b"".join(report.pieces.digests for report in reports), dtype=np.uint8)
    return Pieces(
        shard=shard[chosen],
        start=start[chosen],
        length=length[chosen],
        table=table[chosen],
        digests=digests.reshape(-1, DIGEST_BYTES)[chosen].tobytes(),
    )


def _merged_shards(reports: Sequence[RankReport]) -> tuple[Shards, I64]:
    """The shards of all reports, and of each the first that has its key: several ranks may borrow from one shard."""
    none = np.zeros(0, dtype=np.int64)
    keys = tuple(key for report in reports for key in report.shards.keys)
    shards = Shards(
        keys=keys,
        sizes=np.concatenate([none, *(report.shards.sizes for report in reports)]),
        data_starts=np.concatenate([none, *(report.shards.data_starts for report in reports)]),
        table_lengths=np.concatenate([none, *(report.shards.table_lengths for report in reports)]),
        table_digests=b"".join(report.shards.table_digests for report in reports),
    )
    first: dict[str, int] = {}
    same = np.array([first.setdefault(key, number) for number, key in enumerate(keys)], dtype=np.int64)
    digests = np.frombuffer(shards.table_digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    differs = (digests != digests[same]).any(axis=1)
    for column in (shards.sizes, shards.data_starts, shards.table_lengths):
        differs |= column != column[same]
    if bool(differs.any()):
        raise SaveFailedError(
            "Ranks report different things of one shard; nothing was committed.",
            shard=keys[int(np.flatnonzero(differs)[0])],
        )
    return shards, same


def _chosen(shards: Shards, numbers: I64) -> Shards:
    digests = np.frombuffer(shards.table_digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    return Shards(
        keys=tuple(shards.keys[number] for number in numbers.tolist()),
        sizes=shards.sizes[numbers],
        data_starts=shards.data_starts[numbers],
        table_lengths=shards.table_lengths[numbers],
        table_digests=digests[numbers].tobytes(),
    )


def left_out(manifest: Manifest, reports: Sequence[RankReport]) -> frozenset[str]:
    """Keys of the reported shards that the manifest does not name, as what lies in them was written twice.

    Once it is committed they are orphans: each rank has to be told before it borrows from its own report.
    """
    return frozenset(key for report in reports for key in report.shards.keys) - frozenset(manifest.shards.keys)


def _flatten(planner_data: object) -> dict[str, tuple[str | int, ...]] | None:
    if planner_data is None:
        return None
    if not isinstance(planner_data, Mapping) or not all(
        type(name) is str and isinstance(path, tuple) and all(type(part) in (str, int) for part in path)
        for name, path in planner_data.items()
    ):
        raise InvalidArgumentError(
            "The planner's data is not a flatten mapping (name to a tuple of str and int), which is all that a "
            "manifest can hold without pickle.",
            type=type(planner_data).__name__,
        )
    return dict(planner_data)
