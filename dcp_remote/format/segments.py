"""Segments of a large manifest: shards that hold the columns of its chunks and pieces, a part in each. Pure.

A manifest of 56 million pieces takes a gigabyte, of which a rank needs the part of its tensors. So the manifest of a
large checkpoint is an index: names, shapes, shards and objects, and for each segment the box of each tensor whose
chunks are there. `split` makes the segments, `find_segments` says which of them boxes need, and `join` puts the chunks
of some or all of them back into the manifest.

A segment has the chunks of one top-level key that neighboring shards hold, which are those of neighboring ranks. It
names no shard and no tensor itself, but counts those that the index lists for it. So a segment stays as it is where its
shards are copied under other names, and where other keys are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import msgspec
import numpy as np

from dcp_remote.common.arrays import I64, Buffer, concat_arrays, concat_ranges, group_offsets, sorted_unique
from dcp_remote.common.digests import DIGEST_BYTES, block_bytes, block_digests, digest, piece_digest
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format.columns import ENTRIES_MAX, decode_column, encode_column
from dcp_remote.format.document import VERSION, open_document, parse, seal
from dcp_remote.format.manifest import Manifest, Pieces, SegmentTable, Shards
from dcp_remote.format.manifest_validation import check
from dcp_remote.format.shard import HeaderEntry, header

FORMAT = "dcp_remote segment"

# Pieces of chunks above which a manifest is written in segments.
SEGMENT_PIECES_MAX = 200_000

# Pieces of a segment, about: 0.8 MB. A rank reads two or three, and an index that grows with their number; 1 MB for
# 56 million pieces.
_SEGMENT_PIECES = 50_000


class _Chunks(msgspec.Struct):
    counts: str
    numbers: str
    offsets: str
    sizes: str
    pieces: str


class _Pieces(msgspec.Struct):
    shard: str
    start: str
    length: str
    table: str
    digests: bytes


class _Document(msgspec.Struct):
    format: str
    version: str
    requires: list[str]
    chunks: _Chunks
    pieces: _Pieces


# Made here, in one thread: two threads that decode a type for the first time at the same moment crash msgspec 0.22.
_DOCUMENT = msgspec.json.Decoder(_Document)


@dataclass(frozen=True)
class Segment:
    """Chunks and their pieces: those of a segment, or of several."""

    tensor: I64  # index of the tensor of each chunk
    dimensions: I64  # number of dimensions of each chunk
    number: I64  # position of each chunk among the chunks of its tensor
    offsets: I64  # of all chunks, one chunk after another
    sizes: I64
    counts: I64  # number of pieces of each chunk
    pieces: Pieces

    @cached_property
    def _firsts(self) -> tuple[I64, I64]:
        """Indices of the first value and of the first piece of each chunk."""
        return group_offsets(self.dimensions)[:-1], group_offsets(self.counts)[:-1]

    def take(self, chunks: I64) -> Segment:
        """Return the chunks at these indices, in their order."""
        value_first, piece_first = self._firsts
        dimensions, counts = self.dimensions[chunks], self.counts[chunks]
        values = concat_ranges(value_first[chunks], dimensions)
        return Segment(
            tensor=self.tensor[chunks],
            dimensions=dimensions,
            number=self.number[chunks],
            offsets=self.offsets[values],
            sizes=self.sizes[values],
            counts=counts,
            pieces=self.pieces.take(concat_ranges(piece_first[chunks], counts)),
        )

    @classmethod
    def concat(cls, parts: Sequence[Segment]) -> Self:
        """Return the chunks of all parts, one part after another."""
        return cls(
            tensor=concat_arrays([part.tensor for part in parts]),
            dimensions=concat_arrays([part.dimensions for part in parts]),
            number=concat_arrays([part.number for part in parts]),
            offsets=concat_arrays([part.offsets for part in parts]),
            sizes=concat_arrays([part.sizes for part in parts]),
            counts=concat_arrays([part.counts for part in parts]),
            pieces=Pieces.concat([part.pieces for part in parts]),
        )


# ---- writing


def split(
    manifest: Manifest, make_key: Callable[[int], str], known: Mapping[bytes, str]
) -> tuple[Manifest, dict[str, list[Buffer]]]:
    """Return a large manifest with its segments, and these as objects to put, by key; a smaller one as it is.

    The manifest stays whole in memory. `make_key` returns the key of the nth segment, as `ShardNames.key`. `known` has
    the keys of segments that are there, by digest, as of `segment_keys`: they are named, and not put.
    """
    tensors = manifest.tensors
    groups = _group_chunks(manifest)
    if not groups:
        return manifest, {}
    tensor = np.repeat(np.arange(len(tensors.names)), tensors.chunks)
    number = np.arange(len(tensor)) - tensors.chunk_first[tensor]
    columns = tensors.chunk_offsets, tensors.chunk_sizes, tensors.chunk_pieces.astype(np.int64)
    whole = Segment(tensor, tensors.dimensions[tensor], number, *columns, manifest.pieces)
    objects: dict[str, list[Buffer]] = {}
    unused = dict(known)  # two segments of equal bytes are two objects
    shards, pieces, lists = [manifest.shards], [manifest.pieces], list[tuple[I64, I64, I64, I64]]()
    for nth, chunks in enumerate(groups):
        part = whole.take(chunks)
        own_shards, own_tensors = sorted_unique(part.pieces.shard), sorted_unique(part.tensor)
        owner = np.searchsorted(own_tensors, part.tensor)
        lists.append((own_shards, own_tensors, *_bound(part, owner, tensors.dimensions[own_tensors])))
        data = _encode(part, owner, np.searchsorted(own_shards, part.pieces.shard))
        front, shard, piece = _make_shard(data, number=len(manifest.shards.keys) + nth)
        key = unused.pop(piece.digests, None)
        if key is None:
            key = make_key(nth)
            objects[key] = [front, data]
        shards.append(replace(shard, keys=(key,)))
        pieces.append(piece)
    flat = [np.concatenate([listed[column] for listed in lists]) for column in range(4)]
    counts = [np.array([len(listed[column]) for listed in lists], dtype=np.int64) for column in range(2)]
    table = SegmentTable(tensors.chunks, counts[0], flat[0], counts[1], *flat[1:])
    return replace(manifest, shards=Shards.concat(shards), pieces=Pieces.concat(pieces), segments=table), objects


def _group_chunks(manifest: Manifest) -> list[I64]:
    """Return the chunks of each segment, ascending; [] for a manifest that is small enough.

    Chunks are taken by top-level key, then by the shard of their first piece. No shard of a key is divided.
    """
    tensors, count = manifest.tensors, int(manifest.tensors.piece_first[-1])
    if count <= SEGMENT_PIECES_MAX:
        return []
    group = np.repeat(manifest.tensor_groups, tensors.chunks)
    # A chunk without pieces goes with its neighbor.
    shard = manifest.pieces.shard[np.minimum(tensors.piece_first[:-1], count - 1)]
    order = np.lexsort((shard, group))
    is_first = np.concatenate([[True], np.diff(group[order]) != 0])  # of its group
    starts = np.flatnonzero(is_first | np.concatenate([[True], np.diff(shard[order]) != 0]))
    before = group_offsets(np.maximum(tensors.chunk_pieces[order], 1))[starts]
    # Pieces of the group before each shard.
    before -= np.maximum.accumulate(np.where(is_first[starts], before, 0))
    is_new = is_first[starts] | (np.diff(before // max(min(_SEGMENT_PIECES, SEGMENT_PIECES_MAX), 1), prepend=0) != 0)
    return [np.sort(chunks, kind="stable") for chunks in np.split(order, starts[is_new][1:])]  # of few ascending runs


def _bound(part: Segment, owner: I64, dimensions: I64) -> tuple[I64, I64]:
    """Return the offsets and the sizes of the box around the chunks of each tensor.

    `owner` is the position of each chunk's tensor among those of the part, which have so many dimensions.
    """
    values = concat_ranges(group_offsets(dimensions)[owner], part.dimensions)
    low = np.full(int(dimensions.sum()), np.iinfo(np.int64).max)
    high = np.zeros_like(low)
    offsets = part.offsets.astype(np.int64)  # a sum of narrower integers could wrap around
    np.minimum.at(low, values, offsets)
    np.maximum.at(high, values, offsets + part.sizes)
    return low, high - low


def _encode(part: Segment, owner: I64, shard: I64) -> bytes:
    """Return the document of a segment, with the positions of its tensors and shards among those of the index."""
    pieces = part.pieces
    document = _Document(
        format=FORMAT,
        version=VERSION,
        requires=[],
        chunks=_Chunks(
            counts=encode_column(np.bincount(owner).astype(np.int64)),
            numbers=encode_column(part.number),
            offsets=encode_column(part.offsets),
            sizes=encode_column(part.sizes),
            pieces=encode_column(part.counts),
        ),
        pieces=_Pieces(
            shard=encode_column(shard),
            start=encode_column(pieces.start),
            length=encode_column(pieces.length),
            table=encode_column(pieces.table),
            digests=pieces.digests,
        ),
    )
    return seal(msgspec.json.encode(document))


def _make_shard(data: bytes, *, number: int) -> tuple[bytes, Shards, Pieces]:
    """Return the bytes before the data of a segment's shard, the shard without a key, and its piece.

    `number` is the index of the shard.
    """
    blocks = block_digests(data, size_bytes=block_bytes(len(data)))
    table = blocks if len(blocks) > DIGEST_BYTES else b""
    front = header([HeaderEntry("segment", "uint8", (len(data),), len(data))], table_length=len(table)) + table
    size, start, table_length, length, shard = (
        np.array([value], dtype=np.int64)
        for value in (len(front) + len(data), len(front), len(table), len(data), number)
    )
    piece = Pieces(shard, start, length, np.zeros(1, dtype=np.int64), piece_digest(blocks))
    return front, Shards((), size, start, table_length, digest(table)), piece


# ---- reading


def segment_keys(manifest: Manifest) -> dict[bytes, str]:
    """Return the keys of the shards of all segments by the digests of the segments."""
    pieces = range(manifest.segment_first, len(manifest.pieces.shard))
    return {manifest.pieces.digest(piece): manifest.shards.keys[manifest.pieces.shard[piece]] for piece in pieces}


def place_of(manifest: Manifest, segment: int) -> tuple[str, int, int]:
    """Return the key of a segment's shard, its first byte in the shard, and its bytes."""
    pieces, piece = manifest.pieces, manifest.segment_first + segment
    return manifest.shards.keys[pieces.shard[piece]], int(pieces.start[piece]), int(pieces.length[piece])


def find_segments(manifest: Manifest, boxes: Mapping[str, Iterable[tuple[Sequence[int], Sequence[int]]]]) -> list[int]:
    """Return the segments that may have chunks inside these boxes (offsets and sizes) of tensors, by name.

    Boxes of tensors that the manifest does not have, or has with another number of dimensions, are ignored.
    """
    segments, tensors = manifest.segments, manifest.tensors
    if segments is None:
        return []
    order = np.argsort(segments.tensor, kind="stable")
    bounds = np.searchsorted(segments.tensor[order], np.arange(len(tensors.names) + 1))
    value_first = group_offsets(tensors.dimensions[segments.tensor])
    is_needed = np.zeros(len(segments.tensors), dtype=bool)
    owner = segments.owner
    for name, wanted in boxes.items():
        tensor = tensors.index.get(name)
        if tensor is None:
            continue
        own = order[bounds[tensor] : bounds[tensor + 1]]
        places = value_first[own][:, None] + np.arange(tensors.dimensions[tensor])
        low, high = segments.offsets[places], segments.offsets[places] + segments.sizes[places]
        for offsets, sizes in (box for box in wanted if len(box[0]) == low.shape[1]):
            start = np.array(offsets, dtype=np.int64)
            touched = (low < start + np.array(sizes, dtype=np.int64)) & (start < high)
            is_needed[owner[own[touched.all(axis=1)]]] = True
    numbers: list[int] = np.flatnonzero(is_needed).tolist()
    return numbers


def decode_segment(manifest: Manifest, segment: int, data: memoryview) -> Segment:
    """Decode a segment, and compare its digest and its counts with the manifest.

    Raises:
        CorruptCheckpointError: The segment is damaged; the message names its shard.
    """
    blocks = block_digests(data, size_bytes=block_bytes(len(data)))
    try:
        if piece_digest(blocks) != manifest.pieces.digest(manifest.segment_first + segment):
            raise _damaged("its digest does not match")
        return _decode(manifest, segment, open_document(bytes(data), FORMAT))
    except CorruptCheckpointError as error:
        raise error.with_details(shard=place_of(manifest, segment)[0]) from error


def _decode(manifest: Manifest, segment: int, text: bytes) -> Segment:
    segments, dimensions = manifest.segments, manifest.tensors.dimensions
    assert segments is not None
    first, stop = (int(segments.tensors[: segment + i].sum()) for i in (0, 1))
    tensors = segments.tensor[first:stop]
    document = parse(text, _DOCUMENT, FORMAT)
    chunks, columns = document.chunks, document.pieces
    counts = decode_column(chunks.counts, name="chunks.counts", count=len(tensors))
    if _total(counts) > ENTRIES_MAX:
        raise _damaged("it has too many chunks")
    owner = np.repeat(np.arange(len(tensors)), counts)
    tensor = tensors[owner]
    numbers = decode_column(chunks.numbers, name="chunks.numbers", count=len(tensor))
    if bool((numbers >= segments.chunks[tensor]).any()):
        raise _damaged("a chunk has a number that its tensor does not have")
    values = int(dimensions[tensor].sum())
    offsets = decode_column(chunks.offsets, name="chunks.offsets", count=values)
    sizes = decode_column(chunks.sizes, name="chunks.sizes", count=values)
    piece_counts = decode_column(chunks.pieces, name="chunks.pieces", count=len(tensor))
    # Chunks outside of the box would not be found by a reader of a part.
    box = int(dimensions[segments.tensor[:first]].sum()) + group_offsets(dimensions[tensors])
    places = concat_ranges(box[owner], dimensions[tensor])
    low, high = segments.offsets[places], segments.offsets[places] + segments.sizes[places]
    if bool((offsets < low).any() or (offsets + sizes > high).any()):
        raise _damaged("a chunk lies outside the box of its segment")
    total = _total(piece_counts)
    local = decode_column(columns.shard, name="pieces.shard", count=total)
    begin, end = (int(segments.shards[: segment + i].sum()) for i in (0, 1))
    if len(columns.digests) != total * DIGEST_BYTES or (total and int(local.max()) >= end - begin):
        raise _damaged("its digests or shards are not those of its pieces")
    pieces = Pieces(
        shard=segments.shard[begin:end][local],
        start=decode_column(columns.start, name="pieces.start", count=total),
        length=decode_column(columns.length, name="pieces.length", count=total),
        table=decode_column(columns.table, name="pieces.table", count=total),
        digests=columns.digests,
    )
    return Segment(tensor, dimensions[tensor], numbers, offsets, sizes, piece_counts, pieces)


def join(manifest: Manifest, found: Sequence[Segment], *, is_whole: bool = False) -> Manifest:
    """Return a manifest with the chunks of these segments, checked; `manifest` is as it was decoded.

    If these are all segments, `is_whole`, they must have all chunks.
    """
    joined = Segment.concat(found)
    joined = joined.take(np.lexsort((joined.number, joined.tensor)))
    if bool(((np.diff(joined.tensor) == 0) & (np.diff(joined.number) == 0)).any()):
        raise _damaged("a chunk is in it twice, or in another one")
    tensors = replace(
        manifest.tensors,
        chunks=np.bincount(joined.tensor, minlength=len(manifest.tensors.names)).astype(np.int64),
        chunk_offsets=joined.offsets,
        chunk_sizes=joined.sizes,
        chunk_pieces=joined.counts,
    )
    if is_whole and bool((tensors.chunks != manifest.chunk_counts).any()):
        raise _damaged("chunks of a tensor are in no segment")
    count = len(joined.pieces.shard)
    stored = tuple(replace(item, piece_first=item.piece_first + count) for item in manifest.stored)
    pieces = Pieces.concat([joined.pieces, manifest.pieces])
    return check(replace(manifest, tensors=tensors, pieces=pieces, stored=stored))


def _total(counts: I64) -> int:
    # A sum of larger counts could wrap around.
    if counts.size and int(counts.max()) > ENTRIES_MAX:
        raise _damaged("a count is larger than a segment")
    return int(counts.sum())


def _damaged(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"A segment of the manifest is damaged: {what}. Use another checkpoint.")
