"""Segments of a large manifest: shards that hold the columns of its chunks and pieces, a part in each. Pure.

A manifest of 56 million pieces takes a gigabyte, of which a rank needs the part of its tensors. So the manifest of a
large checkpoint is an index: names, shapes, shards and objects, and for each segment the box of each tensor whose
chunks are there. `draft_segments` and `put_segments` make the segments, `find_segments` says which of them boxes need,
and `join` puts the chunks of some or all of them back into the manifest.

A segment has the chunks of one top-level key that neighboring shards hold, which are those of neighboring ranks. Where
many tensors would make too many boxes, a larger band of neighbors is divided by tensor. A segment names no shard and no
tensor itself, but counts those that the index lists for it. So a segment stays as it is where its shards are copied
under other names, and where other keys are dropped.
"""

from __future__ import annotations

import binascii
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import msgspec
import numpy as np
import zstandard

from dcp_remote.common.arrays import (
    I64,
    Buffer,
    Integers,
    concat_arrays,
    concat_ranges,
    group_offsets,
    shrink_integers,
    sorted_unique,
)
from dcp_remote.common.digests import DIGEST_BYTES, block_bytes, block_digests, digest, piece_digest
from dcp_remote.common.threads import in_parallel
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format.columns import ENTRIES_MAX, encode_column, sum_column, sum_counts, unpack_column
from dcp_remote.format.document import VERSION, open_document, parse, seal
from dcp_remote.format.manifest import Manifest, Pieces, SegmentTable, Shards, Table, Tensors
from dcp_remote.format.manifest_validation import check
from dcp_remote.format.shard import HeaderEntry, header

FORMAT = "dcp_remote segment"

# Pieces of chunks, as ranks report them, above which a manifest is written in segments.
SEGMENT_PIECES_MAX = 200_000

# Pieces of a segment, about: 0.8 MB. A rank reads two or three (33 of 207,000 tensors on 128 ranks), and an index of 22
# bytes for each shard: 2.2 MB for 56 million pieces.
SEGMENT_PIECES = 50_000

# Values of the boxes of all segments, about, a quarter of a column: a rank takes 70 bytes for each to decode the index.
BOX_VALUES = ENTRIES_MAX // 4

# Segments that are put at a time, and that are encoded at a time: other threads wait for the interpreter meanwhile.
_SEGMENTS_IN_FLIGHT = 16
_SEGMENTS_ENCODED = 2

# What follows the digests in the document of a segment.
_END = b'"}}'


class _Chunks(msgspec.Struct):
    counts: I64
    numbers: I64
    offsets: I64
    sizes: I64
    pieces: I64


class _Document(msgspec.Struct):
    format: str
    version: str
    requires: list[str]
    chunks: _Chunks
    pieces: Pieces


# Made here, in one thread: two threads that decode a type for the first time at the same moment crash msgspec 0.22.
_DOCUMENT = msgspec.json.Decoder(_Document, dec_hook=unpack_column)


@dataclass(frozen=True)
class Segment(Table):
    """Chunks and their pieces: those of a segment, or of several."""

    tensor: I64  # index of the tensor of each chunk
    dimensions: I64  # number of dimensions of each chunk
    number: I64  # position of each chunk among the chunks of its tensor
    offsets: I64  # of all chunks, one chunk after another
    sizes: I64
    counts: I64  # number of pieces of each chunk
    pieces: Pieces

    @cached_property
    def value_first(self) -> I64:
        """Index of the first value of each chunk."""
        return group_offsets(self.dimensions)[:-1]

    @cached_property
    def piece_first(self) -> I64:
        """Index of the first piece of each chunk."""
        return group_offsets(self.counts)[:-1]

    def take(self, indices: I64) -> Self:
        """Return the chunks at these indices, in their order."""
        dimensions = self.dimensions[indices]
        values = concat_ranges(self.value_first[indices], dimensions)
        return type(self)(
            tensor=self.tensor[indices],
            dimensions=dimensions,
            number=self.number[indices],
            offsets=self.offsets[values],
            sizes=self.sizes[values],
            counts=self.counts[indices],
            pieces=self.pieces.take(self.pieces_of(indices)),
        )

    def pieces_of(self, chunks: I64) -> I64:
        """Return the indices of the pieces of the chunks at these indices."""
        return concat_ranges(self.piece_first[chunks], self.counts[chunks])

    def within(self, tensors: Tensors) -> Tensors:
        """Return the tensors with these chunks, which are in the order of tensor and number."""
        return Tensors(
            names=tensors.names,
            kinds=tensors.kinds,
            kind=tensors.kind,
            dimensions=tensors.dimensions,
            shape=tensors.shape,
            chunks=np.bincount(self.tensor, minlength=len(tensors.names)).astype(np.int64),
            chunk_offsets=self.offsets,
            chunk_sizes=self.sizes,
            chunk_pieces=self.counts,
        )


# ---- writing


@dataclass(frozen=True, slots=True)
class Draft:
    """Segment without the digests of its pieces: what stays while only values change."""

    shards: I64  # indices of the shards that hold its pieces, ascending
    tensors: Integers  # indices of the tensors of its chunks, ascending
    # Box around its chunks of each of these tensors: its values, one tensor after another.
    offsets: Integers
    sizes: Integers
    pieces: bytes  # indices of its pieces, compressed
    document: bytes  # compressed


def choose_band_pieces(pieces: int, tensors: Tensors) -> int:
    """Return about how many pieces of neighboring shards are taken together, so that all boxes have `BOX_VALUES`."""
    values = int(np.maximum(tensors.dimensions, 1).sum())  # if each tensor had one box
    # By powers of two: a later save with a few pieces more or less seldom has other segments.
    return SEGMENT_PIECES << (pieces * values // (SEGMENT_PIECES * BOX_VALUES)).bit_length()


def draft_segments(chunks: Segment, groups: I64, pieces: I64, *, band_pieces: int) -> Iterator[Draft]:
    """Yield the segments of some chunks, whose pieces have no digests yet.

    `groups` is the number of the top-level key of each tensor, as of `tensor_groups`. `pieces` is the index of
    each piece by which `put_segments` asks for its digest. `band_pieces` is that of `choose_band_pieces`.
    """
    if not len(chunks.tensor):
        return
    for numbers in _group_chunks(chunks, groups, band_pieces):
        part = chunks.take(numbers)
        shards, tensors = sorted_unique(part.pieces.shard), sorted_unique(part.tensor)
        owner = np.searchsorted(tensors, part.tensor)
        text = _encode(part, owner, np.searchsorted(shards, part.pieces.shard))
        own = np.diff(pieces[chunks.pieces_of(numbers)], prepend=0)
        offsets, sizes = map(shrink_integers, _bound(part, owner))
        yield Draft(shards, shrink_integers(tensors), offsets, sizes, _compress(own.tobytes()), _compress(text))


def put_segments(
    manifest: Manifest,
    chunk_counts: I64,
    drafts: Sequence[Draft],
    *,
    digests_of: Callable[[I64], bytes],
    make_key: Callable[[int], str],
    known: Mapping[bytes, str],
    put: Callable[[str, Sequence[Buffer]], object],
) -> Manifest:
    """Put segments, and return the index, which is the manifest with their shards and their pieces.

    A few are in memory at a time.

    Args:
        manifest: Manifest without chunks.
        chunk_counts: Number of the chunks of each tensor in all segments.
        drafts: Segments; their tensors and shards are those of the manifest.
        digests_of: Returns the digests of the pieces with these indices.
        make_key: Returns the key of the nth segment, as `ShardNames.key`.
        known: Keys of segments that are there, by digest, as of `segment_keys`: they are named, and not put.
        put: Puts an object of these buffers under a key.
    """
    unused = dict(known)  # two segments of equal bytes are two objects
    turns = threading.Semaphore(_SEGMENTS_ENCODED)

    def put_one(nth: int) -> tuple[Shards, Pieces]:
        draft, decompress = drafts[nth], zstandard.ZstdDecompressor().decompress
        with turns:
            pieces = np.frombuffer(decompress(draft.pieces), dtype=np.int64).cumsum()
            digests = binascii.b2a_base64(digests_of(pieces), newline=False)
            data = seal(b"".join([decompress(draft.document).removesuffix(_END), digests, _END]))
        front, shard, piece = _make_shard(data, number=len(manifest.shards.keys) + nth)
        key = unused.pop(piece.digests, None)
        if key is None:
            put(key := make_key(nth), [front, data])
        return replace(shard, keys=(key,)), piece

    made = in_parallel(put_one, range(len(drafts)), threads=_SEGMENTS_IN_FLIGHT)
    counts = [[len(draft.shards) for draft in drafts], [len(draft.tensors) for draft in drafts]]
    return replace(
        manifest,
        shards=Shards.concat([manifest.shards, *(shard for shard, _ in made)]),
        pieces=Pieces.concat([manifest.pieces, *(piece for _, piece in made)]),
        segments=SegmentTable(
            chunks=chunk_counts,
            shards=np.array(counts[0], dtype=np.int64),
            shard=concat_arrays([draft.shards for draft in drafts]),
            tensors=np.array(counts[1], dtype=np.int64),
            tensor=concat_arrays([draft.tensors for draft in drafts]),
            offsets=concat_arrays([draft.offsets for draft in drafts]),
            sizes=concat_arrays([draft.sizes for draft in drafts]),
        ),
    )


def _group_chunks(chunks: Segment, groups: I64, band_pieces: int) -> list[I64]:
    """Return the indices of the chunks of each segment, ascending.

    Chunks are taken by top-level key, then by the shard of their first piece, and then, if there are more than a
    segment has, by tensor.
    """
    group, counts = groups[chunks.tensor], np.maximum(chunks.counts, 1)
    # A chunk without pieces goes with its neighbor.
    shard = np.append(chunks.pieces.shard, chunks.pieces.shard.max(initial=0))[chunks.piece_first]
    bands = _cut(group, shard, counts, band_pieces)
    if band_pieces == SEGMENT_PIECES:
        return bands
    return [band[own] for band in bands for own in _cut(group[band], chunks.tensor[band], counts[band], SEGMENT_PIECES)]


def _cut(group: I64, owner: I64, counts: I64, size: int) -> list[I64]:
    """Return the indices of the chunks of some owners in each group, ascending, in parts of about `size` pieces."""
    order = np.lexsort((owner, group))
    is_first = np.concatenate([[True], np.diff(group[order]) != 0])  # of its group
    starts = np.flatnonzero(is_first | np.concatenate([[True], np.diff(owner[order]) != 0]))
    before = group_offsets(counts[order])[starts]
    # Pieces of the group before each owner.
    before -= np.maximum.accumulate(np.where(is_first[starts], before, 0))
    pieces = np.bincount(group, counts)
    equal = pieces / np.maximum(np.round(pieces / size), 1)
    is_new = is_first[starts] | (np.diff(before // equal[group[order[starts]]], prepend=0) != 0)
    return [np.sort(numbers, kind="stable") for numbers in np.split(order, starts[is_new][1:])]  # of few ascending runs


def _bound(part: Segment, owner: I64) -> tuple[I64, I64]:
    """Return offsets and sizes of the box around the chunks of each tensor; `owner` is its position for each chunk."""
    dimensions = part.dimensions[np.searchsorted(owner, np.arange(owner[-1] + 1))]
    values = concat_ranges(group_offsets(dimensions)[owner], part.dimensions)
    low = np.full(int(dimensions.sum()), np.iinfo(np.int64).max)
    high = np.zeros_like(low)
    np.minimum.at(low, values, part.offsets)
    np.maximum.at(high, values, part.offsets + part.sizes)
    return low, high - low


def _encode(part: Segment, owner: I64, shard: I64) -> bytes:
    """Return the document of a segment without digests, with positions of its tensors and shards in the index."""
    document = _Document(
        format=FORMAT,
        version=VERSION,
        requires=[],
        chunks=_Chunks(np.bincount(owner), part.number, part.offsets, part.sizes, part.counts),
        pieces=replace(part.pieces, shard=shard, digests=b""),
    )
    return msgspec.json.encode(document, enc_hook=encode_column)


def _compress(data: bytes) -> bytes:
    # A copy: the compressor returns bytes that keep the memory for the worst case.
    return bytes(memoryview(zstandard.ZstdCompressor().compress(data)))


def _make_shard(data: bytes, *, number: int) -> tuple[bytes, Shards, Pieces]:
    """Return the bytes before the data of a segment's shard, the shard of this index without a key, and its piece."""
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
        # A tensor without elements may have a stream, in a box without a size.
        low, high = segments.offsets[places], segments.offsets[places] + np.maximum(segments.sizes[places], 1)
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
    counts = sum_column(chunks.counts, name="chunks.counts", count=len(tensors))
    if sum_counts(counts) > ENTRIES_MAX:
        raise _damaged("it has too many chunks")
    owner = np.repeat(np.arange(len(tensors)), counts)
    tensor = tensors[owner]
    numbers = sum_column(chunks.numbers, name="chunks.numbers", count=len(tensor))
    if bool((numbers >= segments.chunks[tensor]).any()):
        raise _damaged("a chunk has a number that its tensor does not have")
    values = int(dimensions[tensor].sum())
    offsets = sum_column(chunks.offsets, name="chunks.offsets", count=values)
    sizes = sum_column(chunks.sizes, name="chunks.sizes", count=values)
    piece_counts = sum_column(chunks.pieces, name="chunks.pieces", count=len(tensor))
    # Chunks outside of the box would not be found by a reader of a part.
    box = int(dimensions[segments.tensor[:first]].sum()) + group_offsets(dimensions[tensors])
    places = concat_ranges(box[owner], dimensions[tensor])
    low, high = segments.offsets[places], segments.offsets[places] + segments.sizes[places]
    if bool((offsets < low).any() or (offsets + sizes > high).any()):
        raise _damaged("a chunk lies outside the box of its segment")
    total = sum_counts(piece_counts)
    local = sum_column(columns.shard, name="pieces.shard", count=total)
    begin, end = (int(segments.shards[: segment + i].sum()) for i in (0, 1))
    if len(columns.digests) != total * DIGEST_BYTES or (total and int(local.max()) >= end - begin):
        raise _damaged("its digests or shards are not those of its pieces")
    pieces = Pieces(
        shard=segments.shard[begin:end][local],
        start=sum_column(columns.start, name="pieces.start", count=total),
        length=sum_column(columns.length, name="pieces.length", count=total),
        table=sum_column(columns.table, name="pieces.table", count=total),
        digests=columns.digests,
    )
    return Segment(tensor, dimensions[tensor], numbers, offsets, sizes, piece_counts, pieces)


def join(manifest: Manifest, found: list[Segment], *, is_whole: bool = False) -> Manifest:
    """Return a manifest with the chunks of these segments, checked; `manifest` is as it was decoded.

    If these are all segments, `is_whole`, they must have all chunks. `found` is emptied, to free its memory.
    """
    joined = Segment.concat(found)
    found.clear()
    joined = joined.take(np.lexsort((joined.number, joined.tensor)))
    if bool(((np.diff(joined.tensor) == 0) & (np.diff(joined.number) == 0)).any()):
        raise _damaged("a chunk is in it twice, or in another one")
    tensors = joined.within(manifest.tensors)
    if is_whole and bool((tensors.chunks != manifest.chunk_counts).any()):
        raise _damaged("chunks of a tensor are in no segment")
    count = len(joined.pieces.shard)
    stored = tuple(replace(item, piece_first=item.piece_first + count) for item in manifest.stored)
    pieces = Pieces.concat([joined.pieces, manifest.pieces])
    return check(replace(manifest, tensors=tensors, pieces=pieces, stored=stored))


def _damaged(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"A segment of the manifest is damaged: {what}. Use another checkpoint.")
