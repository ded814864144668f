"""Planning of reads: turns what a rank wants into ranges to fetch, merged, split and sorted. Pure, without torch.

A *want* is a part of a chunk, or a whole stored object. Only whole blocks of pieces are fetched, so that every byte
that is used is verified. A piece that is fetched whole is verified by its digest in the manifest, and a part of a piece
by the block table of the shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dcp_remote.common.digests import BLOCK_BYTES_MIN, block_bytes, block_count
from dcp_remote.common.geometry import Box, ByteRange, runs_of_box
from dcp_remote.common.units import KiB
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.manifest import RAW, Manifest
from dcp_remote.format.shard import SEPARATE_BYTES_MIN
from dcp_remote.loading.downloads import RANGE_BYTES_MAX

# Largest gap between two ranges of a shard that are fetched as one: 128 KiB cost 0.1 ms of CPU, and a request 0.7 ms.
# Of a model of 8B parameters, saved by 4,096 ranks and loaded by 3,072, each rank makes 43 requests for 72 MB; with
# 16 KiB it would make 334 for 42 MB, a million in all.
GAP_BYTES = 128 * KiB

# Limit of the ranges of one load: at 8 MiB each 16 TiB, which fit into no process, and a list of half a gigabyte. Only
# forged sizes in a manifest lead beyond.
RANGES_MAX = 2**21

# Selected blocks of a piece: True for each that is selected.
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Want:
    """Part of a chunk, or whole stored object, to be read; its pieces are consecutive."""

    piece_first: int
    piece_stop: int  # one past the last
    runs: tuple[ByteRange, ...] | None  # wanted byte ranges of the chunk, ascending; None for the whole chunk


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive blocks of one piece."""

    piece: int
    block_first: int
    block_stop: int  # one past the last
    start: int  # first byte in the shard
    length: int  # in bytes

    @property
    def stop(self) -> int:
        """One past the last byte in the shard."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class RangePlan:
    """Request for a range of a shard."""

    shard: int
    start: int  # first byte in the shard
    length: int  # in bytes
    segments: tuple[Segment, ...]  # ascending; bytes between them are fetched and not used


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks that the wants of a rank touch."""

    blocks: dict[int, Mask | None]  # wanted blocks by piece; None for all blocks
    users: dict[int, list[int]]  # numbers of the wants that a piece belongs to, by piece
    sizes: tuple[int, ...]  # bytes of each want
    partial: frozenset[int]  # pieces of which not every block is wanted
    tables: tuple[int, ...]  # shards that hold partial pieces, whose block tables are needed; ascending


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Requests that read what is wanted, in their order.

    The largest wants come first, so that no large one is left at the end, and the ranges of a want together, so that
    few wants are half read, and held in memory, at a time.
    """

    wanted: Wanted  # all of whose blocks the ranges cover
    tables: tuple[int, ...]  # shards whose block tables are fetched before the ranges
    ranges: tuple[RangePlan, ...]


def want_box(manifest: Manifest, *, tensor: int, chunk: int, box: Box) -> Want:
    """Return the want of a box of a chunk of a `raw` tensor; `box` is relative to the chunk, and not empty.

    Rows that are nearer to each other than the smallest block become one run, which limits the number of runs. A block
    that lies between them is read as well: the short last block of a piece, or a short piece.
    """
    tensors = manifest.tensors
    first, stop = int(tensors.piece_first[chunk]), int(tensors.piece_first[chunk + 1])
    sizes = tensors.sizes_of(chunk)
    kind = tensors.kind_of(tensor)
    assert kind.encoding == RAW, "a stream is read whole"
    if box.sizes == sizes:
        return Want(first, stop, None)
    item = ITEM_BYTES[kind.dtype]
    runs = runs_of_box(sizes, box, gap=max(1, BLOCK_BYTES_MIN // item)) * item
    return Want(first, stop, tuple(ByteRange(a, b) for a, b in runs.tolist()))


def plan_reads(manifest: Manifest, wants: Sequence[Want]) -> ReadPlan:
    """Turn wants into requests; each block is fetched once, however many wants touch it."""
    wanted = wanted_blocks(manifest, wants)
    return ReadPlan(wanted, wanted.tables, tuple(plan_ranges(manifest, wanted, wanted.blocks)))


def wanted_blocks(manifest: Manifest, wants: Sequence[Want]) -> Wanted:
    """Return the blocks that the wants touch; refused if the list of requests would not fit into memory."""
    users: dict[int, list[int]] = {}
    blocks: dict[int, Mask | None] = {}
    for number, want in enumerate(wants):
        _mark_want(manifest, number, want, users, blocks)
    ranges = 0
    for piece, mask in blocks.items():
        length = int(manifest.pieces.length[piece])
        wanted_bytes = length if mask is None else int(mask.sum()) * block_bytes(length)
        ranges += wanted_bytes // RANGE_BYTES_MAX
        if ranges > RANGES_MAX:
            raise InvalidArgumentError(
                "The load is more than one process can read. Choose what to load by `include`, or load into the shards "
                "of several ranks.",
                limit_bytes=RANGES_MAX * RANGE_BYTES_MAX,
            )
    partial = frozenset(piece for piece, mask in blocks.items() if mask is not None and not bool(mask.all()))
    tables = sorted({int(manifest.pieces.shard[piece]) for piece in partial})
    return Wanted(blocks, users, tuple(_count_bytes(manifest, want) for want in wants), partial, tuple(tables))


def plan_ranges(manifest: Manifest, wanted: Wanted, blocks: Mapping[int, Mask | None]) -> list[RangePlan]:
    """Return the requests for these blocks, a part of the wanted ones; the largest wants first."""
    segments: list[tuple[int, Segment]] = []
    for piece, mask in blocks.items():
        shard = int(manifest.pieces.shard[piece])
        segments += ((shard, segment) for segment in _segments(manifest, piece, mask))
    # The sort is stable: requests for wants of one size stay in the order of shard and byte.
    return sorted(merge_segments(segments), key=lambda request: -max(request.length, _largest_want(wanted, request)))


def _largest_want(wanted: Wanted, request: RangePlan) -> int:
    return max(wanted.sizes[user] for user in wanted.users[request.segments[0].piece])


def _count_bytes(manifest: Manifest, want: Want) -> int:
    if want.runs is None:
        return int(manifest.pieces.length[want.piece_first : want.piece_stop].sum())
    return sum(run.length for run in want.runs)


def _mark_want(
    manifest: Manifest, number: int, want: Want, users: dict[int, list[int]], blocks: dict[int, Mask | None]
) -> None:
    """Add a want to the users of its pieces, and its blocks to the masks."""
    lengths = manifest.pieces.length[want.piece_first : want.piece_stop].tolist()
    if want.runs is None:
        for piece in range(want.piece_first, want.piece_stop):
            users.setdefault(piece, []).append(number)
            blocks[piece] = None
        return
    runs = np.array([(r.start, r.stop) for r in want.runs], dtype=np.int64)
    position = 0
    for piece, length in enumerate(lengths, want.piece_first):
        # The runs that touch the piece, relative to its first byte.
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
        # Each run adds 1 at its first block and takes it off behind its last: sums above 0 are covered blocks.
        marks = np.zeros(len(mask) + 1, dtype=np.int64)
        np.add.at(marks, starts, 1)
        np.add.at(marks, stops, -1)
        mask |= np.cumsum(marks)[:-1] > 0


def _segments(manifest: Manifest, piece: int, mask: Mask | None) -> list[Segment]:
    if mask is None:
        return cut_blocks(manifest, piece, 0, block_count(int(manifest.pieces.length[piece])))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    runs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [segment for first, stop in runs for segment in cut_blocks(manifest, piece, first, stop)]


def cut_blocks(manifest: Manifest, piece: int, first: int, stop: int) -> list[Segment]:
    """Cut consecutive blocks of a piece into segments that fit into one request each."""
    start, length = int(manifest.pieces.start[piece]), int(manifest.pieces.length[piece])
    size = block_bytes(length)
    blocks_max = max(1, RANGE_BYTES_MAX // size)
    segments: list[Segment] = []
    for block in range(first, stop, blocks_max):
        end = min(block + blocks_max, stop)
        segments.append(Segment(piece, block, end, start + block * size, min(end * size, length) - block * size))
    return segments


def merge_segments(segments: Iterable[tuple[int, Segment]]) -> list[RangePlan]:
    """Merge pairs of shard and segment into requests, sorted by shard and first byte.

    Segments that are near each other share a request of at most `RANGE_BYTES_MAX`; those of at least
    `SEPARATE_BYTES_MIN` have one of their own.
    """
    ranges: list[RangePlan] = []
    group: list[Segment] = []
    group_shard = -1

    def close() -> None:
        if group:
            ranges.append(RangePlan(group_shard, group[0].start, group[-1].stop - group[0].start, tuple(group)))
            group.clear()

    for shard, segment in sorted(segments, key=lambda entry: (entry[0], entry[1].start)):
        if segment.length >= SEPARATE_BYTES_MIN:
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
