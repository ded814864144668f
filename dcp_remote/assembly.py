"""What was planned and what ranks wrote, put together: the manifest of a save. Pure, without torch.

Called by the coordinator, which may hold a million chunks of a thousand ranks: all is in columns, and nothing is done
chunk by chunk that numpy does for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcp_remote.digests import DIGEST_BYTES
from dcp_remote.empty_dicts import fitted
from dcp_remote.errors import SaveFailedError
from dcp_remote.manifest import RAW, Manifest, Pieces, Shards, StoredObject, TensorKind, Tensors
from dcp_remote.ranges import I64, firsts, joined
from dcp_remote.report import RankReport


@dataclass(frozen=True, slots=True)
class SaveInfo:
    """What a manifest says of the save itself; the fields of `Manifest` of the same names."""

    save_id: str
    replaces: tuple[str, ...]
    created: str
    writer: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Planned:
    """What a checkpoint is to hold; made of torch's `Metadata`, which takes ten times the memory for it.

    Attributes:
        names: Of the tensors.
        kinds: Of each tensor; how it is encoded only those know that write it.
        dimensions: As in `Tensors`; so are the following.
        shape: See there.
        chunks: See there.
        chunk_offsets: See there.
        chunk_sizes: See there.
        objects: Names of what is no tensor.
        positions: Of each object, where it stands among all entries of the state dict.
        flatten: As in `Manifest`.
    """

    names: tuple[str, ...]
    kinds: tuple[TensorKind, ...]
    dimensions: I64
    shape: I64
    chunks: I64
    chunk_offsets: I64
    chunk_sizes: I64
    objects: tuple[str, ...]
    positions: Mapping[str, int]
    flatten: Mapping[str, tuple[str | int, ...]] | None


def to_manifest(planned: Planned, reports: Sequence[RankReport], info: SaveInfo) -> Manifest:
    """Put together what was planned and what was written; called by the coordinator.

    Every chunk of every tensor, and every object, must have been written by some rank, with the dtype that was planned:
    torch itself does not check that. The first rank that wrote a chunk counts; shards of which then nothing is needed
    are left out, and are orphans.

    Args:
        planned: May be that of an earlier save, if nothing but values has changed since.
        reports: In the order of the ranks.
        info: What the manifest says of the save.

    Raises:
        SaveFailedError: A gap, or another dtype than planned; names the tensor. Or reports that disagree of a shard.
    """
    tensors, written = _tensors(planned, reports)
    shard_first = firsts(np.array([len(report.shards.keys) for report in reports], dtype=np.int64))
    shards, same_shard = _merged_shards(reports)
    piece_first = firsts(np.array([len(report.pieces.shard) for report in reports], dtype=np.int64))
    inline, stored, object_pieces = _objects(planned.objects, reports, piece_first, first=len(written))
    pieces = _pieces(reports, shard_first, np.concatenate([written, object_pieces]))
    named, shard = np.unique(same_shard[pieces.shard], return_inverse=True)
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
        positions=tuple(planned.positions[name] for name in (*inline, *(item.name for item in stored))),
        flatten=fitted(planned.flatten, {*planned.names, *planned.objects}),
    )


def _tensors(planned: Planned, reports: Sequence[RankReport]) -> tuple[Tensors, I64]:
    """The planned tensors, and for each of their pieces its number among those of all reports."""
    index = {name: number for number, name in enumerate(planned.names)}
    reported = [_tensor_numbers(index, report) for report in reports]
    encodings = _checked_encodings(planned, reports, reported)
    kinds: dict[TensorKind, int] = {}
    kind = [
        kinds.setdefault(one if encoding == one.encoding else replace(one, encoding=encoding), len(kinds))
        for one, encoding in zip(planned.kinds, encodings, strict=True)
    ]
    located = _locate(planned, reports, reported)
    piece_counts = np.concatenate([np.zeros(0, dtype=np.int64), *(report.chunk_pieces for report in reports)])
    piece_firsts = firsts(np.array([len(report.pieces.shard) for report in reports], dtype=np.int64))
    starts = np.concatenate(
        [np.zeros(0, dtype=np.int64)]
        + [report.chunk_piece_first + first for report, first in zip(reports, piece_firsts[:-1], strict=True)]
    )
    counts = np.where(located >= 0, piece_counts[located] if len(piece_counts) else 0, 0)
    tensors = Tensors(
        names=planned.names,
        kinds=tuple(kinds),
        kind=np.array(kind, dtype=np.int64),
        dimensions=planned.dimensions,
        shape=planned.shape,
        chunks=planned.chunks,
        chunk_offsets=planned.chunk_offsets,
        chunk_sizes=planned.chunk_sizes,
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


def _tensor_numbers(index: Mapping[str, int], report: RankReport) -> list[int]:
    """The number of each tensor that a rank wrote chunks of."""
    numbers: list[int] = []
    for name in report.names:
        number = index.get(name)
        if number is None:
            raise SaveFailedError("A rank wrote a tensor that nobody planned.", tensor=name, rank=report.rank)
        numbers.append(number)
    return numbers


def _checked_encodings(
    planned: Planned, reports: Sequence[RankReport], reported: Sequence[Sequence[int]]
) -> Sequence[str]:
    """How each tensor is encoded, on which all ranks agree."""
    dtypes = [kind.dtype for kind in planned.kinds]
    encodings: list[str | None] = [None] * len(dtypes)
    for report, numbers in zip(reports, reported, strict=True):
        for number, dtype, encoding in zip(numbers, report.dtypes, report.encodings, strict=True):
            if dtype != dtypes[number]:
                raise SaveFailedError(
                    "A rank wrote a tensor with another dtype than was planned; nothing was committed.",
                    tensor=planned.names[number],
                    rank=report.rank,
                    written=dtype,
                    planned=dtypes[number],
                )
            if encodings[number] != encoding:
                if encodings[number] is not None:
                    raise SaveFailedError(
                        "Ranks stored a tensor in different ways.", tensor=planned.names[number], rank=report.rank
                    )
                encodings[number] = encoding
    # Nobody wrote of a tensor without elements.
    return [RAW if encoding is None else encoding for encoding in encodings]


def _locate(planned: Planned, reports: Sequence[RankReport], reported: Sequence[Sequence[int]]) -> I64:
    """For each planned chunk, the number of the reported one that holds it; -1 where there is none.

    The plan says at which place a chunk stands among those of its tensor; that hint is checked, and only where it is
    missing or wrong (a planner of the user's own) the chunk is looked up by its offsets.
    """
    dimensions, chunks, offsets = planned.dimensions, planned.chunks, planned.chunk_offsets
    chunk_first = firsts(chunks)
    box_first = firsts(np.repeat(dimensions, chunks))
    located = np.full(int(chunk_first[-1]), -1, dtype=np.int64)
    base = 0
    by_offsets: dict[int, dict[tuple[int, ...], int]] = {}
    for report, numbers in zip(reports, reported, strict=True):
        tensor = np.array(numbers, dtype=np.int64)[report.chunk_name]
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
                    "A rank wrote a chunk that nobody planned.", tensor=planned.names[number], rank=report.rank
                )
            candidate[chunk] = where
        # The first rank that wrote a chunk counts: assigned in reverse, so that it comes last.
        fresh = located[candidate] < 0
        located[candidate[fresh][::-1]] = (base + np.flatnonzero(fresh))[::-1]
        base += len(tensor)
    return located


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
