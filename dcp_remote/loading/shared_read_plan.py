"""Planning of shared reads: which ranges several ranks want, and which of the ranks reads each. Pure, without torch.

Ranks send each other the blocks that they want, as runs of numbers: the blocks of all pieces of the manifest are
numbered from zero, and after them the block tables of its shards, one number each. From the same runs every rank
computes the same *units*: ranges that several ranks want. One of these ranks, the owner, reads a unit from the store.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dcp_remote.common.arrays import I64, concat_ranges, group_offsets
from dcp_remote.common.digests import BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, BLOCKS_PER_PIECE, block_count
from dcp_remote.format.manifest import Manifest
from dcp_remote.format.shard import SEPARATE_BYTES_MIN
from dcp_remote.loading.read_plan import (
    Mask,
    RangePlan,
    ReadPlan,
    Segment,
    Wanted,
    cut_blocks,
    merge_segments,
    plan_ranges,
)

# Largest number of ranks that read together; a set of them is an integer of 64 bits. A range that all ranks of a job
# want is read once per 64 ranks: no rank has connections to ten thousand others, and a rank that dies affects few.
MEMBERS_MAX = 64

Bits: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Unit:
    """Range that several ranks want."""

    range: RangePlan  # request; without segments if the range is a block table
    members: tuple[int, ...]  # numbers of the ranks that want the range, ascending; at least two
    owner: int  # number of the member that reads the range from the store


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of pieces and tables: consecutive blocks that the same ranks want; columns with one entry per part."""

    piece: I64  # number of the piece, or of the table behind the pieces
    first: I64  # number of the first block
    stop: I64  # one past the last
    size_bytes: I64
    members: Bits  # ranks that want the part


class _BlockNumbers:
    """Numbers of all blocks of a manifest. Behind the pieces, block tables count as pieces of one block."""

    def __init__(self, manifest: Manifest) -> None:
        tables = manifest.shards.table_lengths
        self.pieces = len(manifest.pieces.length)
        self.lengths = np.concatenate([manifest.pieces.length, tables])  # of each piece and table, in bytes
        self.block_bytes = np.concatenate([_block_bytes(manifest.pieces.length), np.maximum(tables, 1)])
        counts = -(-manifest.pieces.length // self.block_bytes[: self.pieces])
        # Number of the first block of each piece and table, and one past the last block of all.
        self.first = group_offsets(np.concatenate([counts, np.ones_like(tables)]))

    def pieces_of(self, numbers: I64) -> I64:
        """Return the piece, or table, that each block number belongs to."""
        return np.searchsorted(self.first, numbers, side="right") - 1


def _block_bytes(lengths: I64) -> I64:
    """Return `digests.block_bytes` of many pieces."""
    sizes = BLOCK_BYTES_MIN << np.arange((BLOCK_BYTES_MAX // BLOCK_BYTES_MIN).bit_length(), dtype=np.int64)
    return sizes[np.searchsorted(sizes[:-1] * BLOCKS_PER_PIECE, lengths)]


def encode_wanted(manifest: Manifest, wanted: Wanted) -> bytes:
    """Encode what a rank wants, to be sent to others: a few kilobytes for slices of a thousand tensors."""
    numbers = _BlockNumbers(manifest)
    edges = [numbers.pieces + np.repeat(np.array(wanted.tables, dtype=np.int64), 2)]
    edges[0] = numbers.first[edges[0]] + np.arange(2 * len(wanted.tables)) % 2
    for piece, mask in wanted.blocks.items():
        first, stop = numbers.first[piece], numbers.first[piece + 1]
        if mask is None:
            edges.append(np.array([first, stop], dtype=np.int64))
        else:
            edges.append(first + np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))))
    runs = np.concatenate(edges).reshape(-1, 2)
    runs = runs[np.argsort(runs[:, 0])]
    # Where one run ends and the next begins, both edges are removed: the runs become one.
    flat = runs.reshape(-1)
    inner = np.flatnonzero(flat[1:-1:2] == flat[2::2]) * 2 + 1
    flat = np.delete(flat, np.concatenate([inner, inner + 1]))
    return zlib.compress(np.diff(flat, prepend=np.int64(0)).astype("<i8").tobytes(), 1)


def decode_wanted(data: bytes) -> I64:
    """Decode the runs of `encode_wanted`: int64, shape [runs, 2], ascending, with a gap between any two."""
    return np.cumsum(np.frombuffer(zlib.decompress(data), dtype="<i8")).astype(np.int64).reshape(-1, 2)


def grouping_key(runs: I64) -> int:
    """Return the first block of the longest run, -1 if there is none: ranks with the same key want much the same.

    All replicas of a shard have the same key, and so have all ranks that want everything.
    """
    return int(runs[np.argmax(runs[:, 1] - runs[:, 0]), 0]) if len(runs) else -1


def split_into_cohorts(keys: Sequence[int]) -> list[list[int]]:
    """Split ranks into cohorts, which read together: at most `MEMBERS_MAX` ranks, neighbours by their grouping keys.

    The ranks of each cohort are ascending; cohorts differ by one rank at most.
    """
    ranks = sorted(range(len(keys)), key=lambda rank: (keys[rank], rank))
    count = -(-len(ranks) // MEMBERS_MAX)
    bounds = [len(ranks) * n // count for n in range(count + 1)]
    return [sorted(ranks[first:stop]) for first, stop in itertools.pairwise(bounds)]


def shared_units(manifest: Manifest, wants: Sequence[I64], groups: Sequence[str]) -> tuple[Unit, ...]:
    """Return the ranges that at least two ranks want, each with its owner; the same on all ranks.

    Each rank reads a small part of a piece for itself if another rank alone wants a neighboring part: cutting the part
    out would cost that other rank a request. Owners are chosen so that all ranks read about as many bytes from the
    store, including the bytes that a rank wants alone. Ranks of different groups cannot connect to each other: a range
    that ranks of several groups want is a unit of each. `wants` are the runs of each rank; the largest unit is first.
    """
    assert len(wants) <= MEMBERS_MAX, "a set of ranks is an integer of 64 bits"
    numbers = _BlockNumbers(manifest)
    parts = _find_parts(numbers, wants)
    has_several = (parts.members & (parts.members - np.uint64(1))) != 0
    has_lone_part = np.zeros(len(numbers.lengths), dtype=bool)  # by piece
    has_lone_part[parts.piece[~has_several]] = True
    is_whole = (parts.first == numbers.first[parts.piece]) & (parts.stop == numbers.first[parts.piece + 1])
    is_shared = has_several & (is_whole | (parts.size_bytes >= SEPARATE_BYTES_MIN) | ~has_lone_part[parts.piece])
    loads = _count_bytes(parts, ~is_shared, len(wants))
    ranges = _make_ranges(manifest, numbers, parts, np.flatnonzero(is_shared).tolist())
    units: list[Unit] = []
    for request, members in sorted(ranges, key=lambda pair: (-pair[0].length, pair[0].shard, pair[0].start)):
        for group in sorted({groups[member] for member in members}):
            sharing = tuple(member for member in members if groups[member] == group)
            owner = min(sharing, key=loads.__getitem__)
            loads[owner] += request.length
            if len(sharing) > 1:
                units.append(Unit(request, sharing, owner))
    return tuple(units)


def plan_shared(
    manifest: Manifest, wanted: Wanted, units: Sequence[Unit], *, member: int, window_bytes: int
) -> ReadPlan:
    """Return the plan of one rank: its units as they are, and the rest as `plan_reads` would plan it.

    Per window, which is that many bytes of the units that one rank owns, the rank reads what it owns before it receives
    from others. So no rank keeps more than two or three windows for the others, and no ranks wait for each other in a
    circle.
    """
    mine = [(window, unit) for window, unit in _windows(units, window_bytes) if member in unit.members]
    left: dict[int, Mask | None] = dict(wanted.blocks)
    for _, unit in mine:
        for segment in unit.range.segments:
            mask = left[segment.piece]
            if mask is wanted.blocks[segment.piece]:
                blocks = block_count(int(manifest.pieces.length[segment.piece]))
                mask = left[segment.piece] = np.ones(blocks, dtype=bool) if mask is None else mask.copy()
            assert mask is not None
            mask[segment.block_first : segment.block_stop] = False
    alone = plan_ranges(manifest, wanted, {piece: mask for piece, mask in left.items() if mask is None or mask.any()})
    last = max((window for window, _ in mine), default=0)
    ordered = [((last + 1, 0), request) for request in alone]
    for window, unit in mine:
        # What this rank owns, 0, comes first; then the next owner after itself, so that not all ask one at a time.
        turn = (unit.owner - member) % MEMBERS_MAX
        ordered.append(((window + (turn > 0), turn), unit.range))
    ordered.sort(key=lambda pair: pair[0])
    # Tables that others own come last.
    late = {unit.range.shard for _, unit in mine if not unit.range.segments and unit.owner != member}
    tables = sorted(wanted.tables, key=lambda shard: shard in late)
    return ReadPlan(wanted, tuple(tables), tuple(request for _, request in ordered if request.segments))


def _windows(units: Iterable[Unit], window_bytes: int) -> Iterable[tuple[int, Unit]]:
    """Yield each unit with the number of its window."""
    owned: dict[int, int] = {}
    for unit in units:
        before = owned.get(unit.owner, 0)
        owned[unit.owner] = before + unit.range.length
        yield before // window_bytes, unit


def _find_parts(numbers: _BlockNumbers, wants: Sequence[I64]) -> _Parts:
    """Cut the wanted blocks where the set of ranks changes and where a piece ends: a sweep over all edges."""
    edges = np.concatenate([runs.reshape(-1) for runs in wants])
    rank_bits = np.left_shift(np.uint64(1), np.arange(len(wants), dtype=np.uint64))
    bits = np.repeat(rank_bits, [runs.size for runs in wants])
    order = np.argsort(edges, kind="stable")
    edges = edges[order]
    # The runs of a rank do not touch, so each of its edges toggles its bit.
    members = np.bitwise_xor.accumulate(bits[order])
    intervals = np.flatnonzero((edges[:-1] != edges[1:]) & (members[:-1] != 0))
    first, stop, members = edges[intervals], edges[intervals + 1], members[intervals]
    # Cut each interval where a piece ends.
    pieces = numbers.pieces_of(first)
    counts = numbers.pieces_of(stop - 1) - pieces + 1
    piece = concat_ranges(pieces, counts)
    first = np.maximum(np.repeat(first, counts), numbers.first[piece])
    stop = np.minimum(np.repeat(stop, counts), numbers.first[piece + 1])
    members = np.repeat(members, counts)
    has_blocks = first < stop  # a piece without bytes has none
    piece, first, stop, members = piece[has_blocks], first[has_blocks], stop[has_blocks], members[has_blocks]
    size = numbers.block_bytes[piece]
    ends = np.minimum((stop - numbers.first[piece]) * size, numbers.lengths[piece])
    return _Parts(piece, first, stop, ends - (first - numbers.first[piece]) * size, members)


def _count_bytes(parts: _Parts, chosen: Mask, count: int) -> list[int]:
    """Return the bytes of the chosen parts that each of `count` ranks wants."""
    bits = [np.left_shift(np.uint64(1), np.uint64(n)) for n in range(count)]
    return [int(parts.size_bytes[chosen & (parts.members & bit != 0)].sum()) for bit in bits]


def _make_ranges(
    manifest: Manifest, numbers: _BlockNumbers, parts: _Parts, chosen: Sequence[int]
) -> Iterable[tuple[RangePlan, tuple[int, ...]]]:
    """Yield requests for the chosen parts, each with the numbers of the ranks that want it."""
    segments: dict[int, list[tuple[int, Segment]]] = {}
    for part in chosen:
        piece, bits = int(parts.piece[part]), int(parts.members[part])
        if piece >= numbers.pieces:
            shard = piece - numbers.pieces
            length = int(manifest.shards.table_lengths[shard])
            table = RangePlan(shard, int(manifest.shards.data_starts[shard]) - length, length, ())
            yield table, _members(bits)
            continue
        first = int(numbers.first[piece])
        shard = int(manifest.pieces.shard[piece])
        cuts = cut_blocks(manifest, piece, int(parts.first[part]) - first, int(parts.stop[part]) - first)
        segments.setdefault(bits, []).extend((shard, segment) for segment in cuts)
    for bits, members_segments in segments.items():
        members = _members(bits)
        for request in merge_segments(members_segments):
            yield request, members


def _members(bits: int) -> tuple[int, ...]:
    """Return the numbers of the bits that are set, ascending."""
    return tuple(n for n in range(bits.bit_length()) if bits >> n & 1)
