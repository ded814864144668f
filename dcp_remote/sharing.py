"""What several ranks want, and which of them reads it from the store for all. Pure, without torch.

Ranks tell each other which blocks they want, as runs of numbers: the blocks of all pieces of the manifest count from
zero on, and after them, one number each, the block tables of its shards. From the same runs every rank works out the
same *units*: ranges that several ranks want, each of which one of those, its owner, reads from the store.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dcp_remote.digests import BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, BLOCKS_PER_PIECE
from dcp_remote.manifest import Manifest
from dcp_remote.ranges import I64, firsts, joined
from dcp_remote.read_plan import (
    ALONE_BYTES,
    Mask,
    RangePlan,
    ReadPlan,
    Segment,
    Wanted,
    cut,
    merged,
    plan_of,
    ranges_of,
)

# Ranks that read together, as bits of an integer. What all ranks of a job want is read once for each so many of them:
# so nobody has ten thousand others to speak to, and one that dies is missed by few.
MEMBERS_MAX = 64

Bits: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Unit:
    """A range that several ranks want.

    Attributes:
        range: It; without segments if it is a block table.
        members: Who want it, by their numbers, ascending; two at least.
        owner: Which of them reads it from the store.
    """

    range: RangePlan
    members: tuple[int, ...]
    owner: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of pieces and tables, one entry each: consecutive numbers that the same ranks want."""

    piece: I64
    first: I64
    stop: I64
    size_bytes: I64
    members: Bits


class _Numbers:
    """The numbers of the blocks of a manifest. Behind the pieces, tables count as pieces of one block."""

    def __init__(self, manifest: Manifest) -> None:
        self.lengths = np.concatenate([manifest.pieces.length, manifest.shards.table_lengths])
        self.pieces = len(manifest.pieces.length)
        self.block_bytes = _block_bytes(manifest.pieces.length)
        counts = -(-manifest.pieces.length // self.block_bytes)
        self.block_bytes = np.concatenate([self.block_bytes, np.maximum(manifest.shards.table_lengths, 1)])
        self.first = firsts(np.concatenate([counts, np.ones(len(manifest.shards.keys), dtype=np.int64)]))

    def pieces_of(self, numbers: I64) -> I64:
        """Which piece, or table, each number is of."""
        return np.searchsorted(self.first, numbers, side="right") - 1


def _block_bytes(lengths: I64) -> I64:
    """`digests.block_bytes` of many pieces."""
    sizes = np.full(len(lengths), BLOCK_BYTES_MIN, dtype=np.int64)
    size = BLOCK_BYTES_MIN
    while size < BLOCK_BYTES_MAX:
        sizes[lengths > size * BLOCKS_PER_PIECE] *= 2
        size *= 2
    return sizes


def encode_wanted(manifest: Manifest, wanted: Wanted) -> bytes:
    """What a rank wants, to be told to others: some kilobytes for a thousand tensors of which it wants a slice each."""
    numbers = _Numbers(manifest)
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
    # Where one ends as the next begins, both edges go.
    flat = runs.reshape(-1)
    inner = np.flatnonzero(flat[1:-1:2] == flat[2::2]) * 2 + 1
    flat = np.delete(flat, np.concatenate([inner, inner + 1]))
    return zlib.compress(np.diff(flat, prepend=np.int64(0)).astype("<i8").tobytes(), 1)


def decode_wanted(data: bytes) -> I64:
    """The runs: int64, shape [runs, 2], ascending, no two of them touching."""
    return np.cumsum(np.frombuffer(zlib.decompress(data), dtype="<i8")).astype(np.int64).reshape(-1, 2)


def place_of(runs: I64) -> int:
    """By which ranks that want much of the same are found: where the longest of their runs begins.

    All replicas of a shard begin it at the same place, and whoever wants everything, too.
    """
    return int(runs[np.argmax(runs[:, 1] - runs[:, 0]), 0]) if len(runs) else -1


def cohorts(places: Sequence[int]) -> list[list[int]]:
    """Ranks that read together: `MEMBERS_MAX` at most, those of one place beside each other; by their places.

    Returns:
        The ranks of each, ascending; about as many in one as in another.
    """
    ranks = sorted(range(len(places)), key=lambda rank: (places[rank], rank))
    count = -(-len(ranks) // MEMBERS_MAX)
    bounds = [len(ranks) * n // count for n in range(count + 1)]
    return [sorted(ranks[first:stop]) for first, stop in itertools.pairwise(bounds)]


def shared_units(manifest: Manifest, wants: Sequence[I64]) -> tuple[Unit, ...]:
    """What at least two of them want, in ranges, each with its owner; the same on all ranks.

    A small part of a piece of which somebody else wants a neighboring part alone is left to each: to cut it out would
    cost that rank a request. Owners are chosen so that all ranks read about as many bytes from the store, what each
    wants alone included.

    Args:
        manifest: Of the checkpoint.
        wants: What each rank wants, as `decode_wanted` gives it; `MEMBERS_MAX` at most.

    Returns:
        The largest first.
    """
    assert len(wants) <= MEMBERS_MAX, "a set of ranks is an integer of 64 bits"
    numbers = _Numbers(manifest)
    parts = _parts(numbers, wants)
    several = (parts.members & (parts.members - np.uint64(1))) != 0
    alone = np.zeros(len(numbers.lengths), dtype=bool)
    alone[parts.piece[~several]] = True
    whole = (parts.first == numbers.first[parts.piece]) & (parts.stop == numbers.first[parts.piece + 1])
    shared = several & (whole | (parts.size_bytes >= ALONE_BYTES) | ~alone[parts.piece])
    loads = _loads(parts, ~shared, len(wants))
    ranges = _ranges(manifest, numbers, parts, np.flatnonzero(shared).tolist())
    units: list[Unit] = []
    for request, members in sorted(ranges, key=lambda one: (-one[0].length, one[0].shard, one[0].start)):
        owner = min(members, key=loads.__getitem__)
        loads[owner] += request.length
        units.append(Unit(request, members, owner))
    return tuple(units)


def plan_shared(
    manifest: Manifest, wanted: Wanted, units: Sequence[Unit], *, member: int, window_bytes: int
) -> ReadPlan:
    """The plan of one of them, which has its units as they are, and what is left as it would be otherwise.

    What it owns comes before what it gets from others, `window_bytes` at a time: then nobody has to keep more than two
    or three windows for the others, and no rank waits for another in a circle.

    Args:
        manifest: Of the checkpoint.
        wanted: By this rank.
        units: Of all ranks.
        member: The number of this rank.
        window_bytes: How much of what each rank owns makes a window.
    """
    mine = [(window, unit) for window, unit in _windows(units, window_bytes) if member in unit.members]
    left: dict[int, Mask | None] = dict(wanted.blocks)
    for _, unit in mine:
        for segment in unit.range.segments:
            mask = left[segment.piece]
            if mask is wanted.blocks[segment.piece]:
                mask = left[segment.piece] = _every_block(manifest, segment.piece) if mask is None else mask.copy()
            assert mask is not None
            mask[segment.block_first : segment.block_stop] = False
    alone = ranges_of(manifest, wanted, {piece: mask for piece, mask in left.items() if mask is None or mask.any()})
    own: dict[int, list[RangePlan]] = {}
    others: dict[int, list[Unit]] = {}
    for window, unit in mine:
        if unit.owner == member:
            own.setdefault(window, []).append(unit.range)
        else:
            others.setdefault(window, []).append(unit)
    ordered: list[RangePlan] = []
    last = max([*own, *others], default=0)
    for window in range(last + 2):
        ordered += alone if window == last + 1 else own.get(window, [])
        # From whom it gets them in turn, beginning with the next: not all from one at a time.
        turns = sorted(others.get(window - 1, []), key=lambda unit: (unit.owner - member) % MEMBERS_MAX)
        ordered += (unit.range for unit in turns)
    late = {unit.range.shard for _, unit in mine if not unit.range.segments and unit.owner != member}
    tables = sorted(wanted.tables, key=lambda shard: shard in late)
    return plan_of(wanted, tables, [request for request in ordered if request.segments])


def _windows(units: Iterable[Unit], window_bytes: int) -> Iterable[tuple[int, Unit]]:
    owned: dict[int, int] = {}
    for unit in units:
        before = owned.get(unit.owner, 0)
        owned[unit.owner] = before + unit.range.length
        yield before // window_bytes, unit


def _every_block(manifest: Manifest, piece: int) -> Mask:
    length = manifest.pieces.length[piece : piece + 1]
    return np.ones(int((-(-length // _block_bytes(length)))[0]), dtype=bool)


def _parts(numbers: _Numbers, wants: Sequence[I64]) -> _Parts:
    """Where the set of those who want changes, and at each piece: a sweep over all edges."""
    edges = np.concatenate([runs.reshape(-1) for runs in wants])
    one = np.left_shift(np.uint64(1), np.arange(len(wants), dtype=np.uint64))
    bits = np.repeat(one, [runs.size for runs in wants])
    order = np.argsort(edges, kind="stable")
    edges = edges[order]
    # A rank's runs do not touch: each of its edges toggles its bit.
    members = np.bitwise_xor.accumulate(bits[order])
    places = np.flatnonzero((edges[:-1] != edges[1:]) & (members[:-1] != 0))
    first, stop, members = edges[places], edges[places + 1], members[places]
    # An interval is cut where a piece ends.
    pieces = numbers.pieces_of(first)
    counts = numbers.pieces_of(stop - 1) - pieces + 1
    piece = joined(pieces, counts)
    first = np.maximum(np.repeat(first, counts), numbers.first[piece])
    stop = np.minimum(np.repeat(stop, counts), numbers.first[piece + 1])
    members = np.repeat(members, counts)
    there = first < stop  # pieces without bytes have no blocks
    piece, first, stop, members = piece[there], first[there], stop[there], members[there]
    size = numbers.block_bytes[piece]
    ends = np.minimum((stop - numbers.first[piece]) * size, numbers.lengths[piece])
    return _Parts(piece, first, stop, ends - (first - numbers.first[piece]) * size, members)


def _loads(parts: _Parts, chosen: Mask, count: int) -> list[int]:
    """The bytes that each rank reads for itself."""
    bits = [np.left_shift(np.uint64(1), np.uint64(n)) for n in range(count)]
    return [int(parts.size_bytes[chosen & (parts.members & bit != 0)].sum()) for bit in bits]


def _ranges(
    manifest: Manifest, numbers: _Numbers, parts: _Parts, chosen: Sequence[int]
) -> Iterable[tuple[RangePlan, tuple[int, ...]]]:
    """As requests, with those who want them."""
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
        cuts = cut(manifest, piece, int(parts.first[part]) - first, int(parts.stop[part]) - first)
        segments.setdefault(bits, []).extend((shard, segment) for segment in cuts)
    for bits, some in segments.items():
        members = _members(bits)
        for request in merged(some):
            yield request, members


def _members(bits: int) -> tuple[int, ...]:
    return tuple(n for n in range(bits.bit_length()) if bits >> n & 1)
