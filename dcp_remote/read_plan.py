"""From what a rank wants to the ranges that it fetches: blocks of pieces, merged, split, sorted. Pure, without torch.

A *want* is a part of a chunk, or a whole stored object. It touches blocks of pieces; only whole blocks are fetched, so
that every byte that is used is verified. A piece that is fetched whole is verified by its digest in the manifest; a
part of one by the shard's block table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dcp_remote.digests import BLOCK_BYTES_MIN, block_bytes, block_count
from dcp_remote.downloads import RANGE_BYTES_MAX
from dcp_remote.dtypes import ITEM_BYTES
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.manifest import RAW, Manifest
from dcp_remote.ranges import Box, ByteRange, KiB, MiB, runs_of_box

# Ranges of one shard that are this near are fetched as one: 16 KiB cost less than a request.
GAP_BYTES = 16 * KiB

# At 8 MiB each these are 16 TiB, which no process takes in at once; their list takes half a gigabyte. What asks for
# more was led to do so by sizes that somebody made up.
RANGES_MAX = 2**21

# Which blocks of a piece; one entry each.
Mask: TypeAlias = npt.NDArray[np.bool_]

# A range of this size goes alone, so that it can be read straight into its destination.
ALONE_BYTES = 1 * MiB


@dataclass(frozen=True, slots=True)
class Want:
    """Something to be read.

    Attributes:
        piece_first: Its first piece; the pieces of a chunk are consecutive.
        piece_stop: One past its last piece.
        runs: The bytes of the chunk that are wanted, as ranges of its bytes, ascending; None for all of them.
    """

    piece_first: int
    piece_stop: int
    runs: tuple[ByteRange, ...] | None


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive blocks of one piece.

    Attributes:
        piece: Which.
        block_first: Its first block.
        block_stop: One past its last block.
        start: Of its bytes, in the shard.
        length: Of its bytes.
    """

    piece: int
    block_first: int
    block_stop: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        """One past its last byte in the shard."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class RangePlan:
    """One request: a range of a shard, and the segments in it, ascending."""

    shard: int
    start: int
    length: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What wants come to.

    Attributes:
        blocks: For each piece, which of its blocks are wanted (bool, one per block); None for all of them.
        users: For each piece, the numbers of the wants that it belongs to.
        sizes: Bytes of each want.
        partial: Pieces of which not every block is wanted.
        tables: Shards of which such pieces are: their block tables are needed. Ascending.
    """

    blocks: dict[int, Mask | None]
    users: dict[int, list[int]]
    sizes: tuple[int, ...]
    partial: frozenset[int]
    tables: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to fetch.

    Attributes:
        tables: Shards whose block tables are needed, to be fetched first.
        ranges: The requests, those of what is largest first, so that none of them is still under way when all others
            are done; but what belongs together together, so that few objects are half read, and held, at a time.
        segments: How many segments of each wanted piece there are.
        partial: Pieces of which not every block is fetched.
        users: For each piece, the numbers of the wants that it belongs to.
    """

    tables: tuple[int, ...]
    ranges: tuple[RangePlan, ...]
    segments: dict[int, int]
    partial: frozenset[int]
    users: dict[int, list[int]]


def want_box(manifest: Manifest, *, tensor: int, chunk: int, box: Box) -> Want:
    """A part of a chunk of a `raw` tensor; `box` is relative to the chunk, and not empty.

    Rows that are nearer to each other than the smallest block are wanted as one, so that there are not too many. Blocks
    that lie between them, the short last one of a piece or a short piece, are read as well.
    """
    tensors = manifest.tensors
    first, stop = int(tensors.piece_first[chunk]), int(tensors.piece_first[chunk + 1])
    sizes = tensors.sizes_of(chunk)
    kind = tensors.kind_of(tensor)
    assert kind.encoding == RAW, "a stream can only be read whole"
    if box.sizes == sizes:
        return Want(first, stop, None)
    item = ITEM_BYTES[kind.dtype]
    runs = runs_of_box(sizes, box, gap=max(1, BLOCK_BYTES_MIN // item)) * item
    return Want(first, stop, tuple(ByteRange(a, b) for a, b in runs.tolist()))


def plan_reads(manifest: Manifest, wants: Sequence[Want]) -> ReadPlan:
    """Turn wants into requests; each block is fetched once, however many wants touch it.

    Raises:
        InvalidArgumentError: So much is wanted that the list of requests would not fit into memory.
    """
    wanted = wanted_blocks(manifest, wants)
    return plan_of(wanted, wanted.tables, ranges_of(manifest, wanted, wanted.blocks))


def wanted_blocks(manifest: Manifest, wants: Sequence[Want]) -> Wanted:
    """Which blocks of which pieces somebody wants.

    Raises:
        InvalidArgumentError: So much is wanted that the list of requests would not fit into memory.
    """
    users: dict[int, list[int]] = {}
    blocks: dict[int, Mask | None] = {}
    for number, want in enumerate(wants):
        _touch(manifest, number, want, users, blocks)
    ranges = 0
    for piece, mask in blocks.items():
        length = int(manifest.pieces.length[piece])
        wanted_bytes = length if mask is None else int(mask.sum()) * block_bytes(length)
        ranges += wanted_bytes // RANGE_BYTES_MAX
        if ranges > RANGES_MAX:
            raise InvalidArgumentError(
                "This is more than one process can read at once. Choose what to load by `keys`, or load into the "
                "shards of several ranks.",
                limit_bytes=RANGES_MAX * RANGE_BYTES_MAX,
            )
    partial = frozenset(piece for piece, mask in blocks.items() if mask is not None and not bool(mask.all()))
    tables = sorted({int(manifest.pieces.shard[piece]) for piece in partial})
    return Wanted(blocks, users, tuple(_bytes_of(manifest, want) for want in wants), partial, tuple(tables))


def ranges_of(manifest: Manifest, wanted: Wanted, blocks: Mapping[int, Mask | None]) -> list[RangePlan]:
    """The requests for those of the wanted blocks, those of what is largest first."""
    segments: list[tuple[int, Segment]] = []
    for piece, mask in blocks.items():
        shard = int(manifest.pieces.shard[piece])
        segments += ((shard, segment) for segment in _segments(manifest, piece, mask))
    # What has the same size stays in the order of its place.
    return sorted(merged(segments), key=lambda one: -max(one.length, _largest(wanted, one)))


def plan_of(wanted: Wanted, tables: Sequence[int], ranges: Sequence[RangePlan]) -> ReadPlan:
    """The plan that has these requests, in this order; together they are all blocks that are wanted."""
    counts = Counter(segment.piece for request in ranges for segment in request.segments)
    return ReadPlan(tuple(tables), tuple(ranges), dict(counts), wanted.partial, wanted.users)


def _largest(wanted: Wanted, request: RangePlan) -> int:
    return max(wanted.sizes[user] for user in wanted.users[request.segments[0].piece])


def _bytes_of(manifest: Manifest, want: Want) -> int:
    if want.runs is None:
        return int(manifest.pieces.length[want.piece_first : want.piece_stop].sum())
    return sum(run.length for run in want.runs)


def _touch(
    manifest: Manifest, number: int, want: Want, users: dict[int, list[int]], blocks: dict[int, Mask | None]
) -> None:
    lengths = manifest.pieces.length[want.piece_first : want.piece_stop].tolist()
    if want.runs is None:
        for piece in range(want.piece_first, want.piece_stop):
            users.setdefault(piece, []).append(number)
            blocks[piece] = None
        return
    runs = np.array([(r.start, r.stop) for r in want.runs], dtype=np.int64)
    position = 0
    for piece, length in enumerate(lengths, want.piece_first):
        inside = runs[(runs[:, 0] < position + length) & (runs[:, 1] > position)] - position
        position += length
        if not len(inside):
            continue
        users.setdefault(piece, []).append(number)
        mask = blocks.get(piece, np.zeros(0, dtype=bool))
        if mask is None:
            continue
        if not len(mask):
            mask = blocks[piece] = np.zeros(block_count(length), dtype=bool)
        size = block_bytes(length)
        starts = np.maximum(inside[:, 0], 0) // size
        stops = -(-np.minimum(inside[:, 1], length) // size)
        marks = np.zeros(len(mask) + 1, dtype=np.int64)
        np.add.at(marks, starts, 1)
        np.add.at(marks, stops, -1)
        mask |= np.cumsum(marks)[:-1] > 0


def _segments(manifest: Manifest, piece: int, mask: Mask | None) -> list[Segment]:
    if mask is None:
        return cut(manifest, piece, 0, block_count(int(manifest.pieces.length[piece])))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    runs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [segment for first, stop in runs for segment in cut(manifest, piece, first, stop)]


def cut(manifest: Manifest, piece: int, first: int, stop: int) -> list[Segment]:
    """Consecutive blocks of a piece, in parts that one request can ask for."""
    start, length = int(manifest.pieces.start[piece]), int(manifest.pieces.length[piece])
    size = block_bytes(length)
    at_most = max(1, RANGE_BYTES_MAX // size)
    parts: list[Segment] = []
    for block in range(first, stop, at_most):
        end = min(block + at_most, stop)
        parts.append(Segment(piece, block, end, start + block * size, min(end * size, length) - block * size))
    return parts


def merged(segments: Iterable[tuple[int, Segment]]) -> list[RangePlan]:
    """Segments, each with its shard, as requests, by shard and place.

    Neighbors become one request, while it stays within a range; what is large enough stays alone.
    """
    ranges: list[RangePlan] = []
    group: list[Segment] = []
    group_shard = -1

    def close() -> None:
        if group:
            ranges.append(RangePlan(group_shard, group[0].start, group[-1].stop - group[0].start, tuple(group)))
            group.clear()

    for shard, segment in sorted(segments, key=lambda entry: (entry[0], entry[1].start)):
        if segment.length >= ALONE_BYTES:
            close()
            ranges.append(RangePlan(shard, segment.start, segment.length, (segment,)))
            continue
        if group and (
            shard != group_shard
            or segment.start - group[-1].stop > GAP_BYTES
            or segment.stop - group[0].start > RANGE_BYTES_MAX
        ):
            close()
        group_shard = shard
        group.append(segment)
    close()
    return ranges
