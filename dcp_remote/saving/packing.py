"""Packing: place the pieces of a rank's items into shards. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from dcp_remote.common.geometry import boxes_of_run, cut_to_fill
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.shard import ITEMS_PER_SHARD_MAX, SHARD_BYTES_MAX

S = TypeVar("S")

# A shard is no larger than the memory budget, because it may be copied whole. Below this size, more requests would cost
# more than the saved memory is worth.
_BUDGET_BYTES_MIN = 1 * MiB

# Shards below this size take about as long for the answer as for their bytes, at 100 ms and 50 MB/s a connection.
_SPREAD_BYTES_MIN = 8 * MiB

# Multiple of the size of shards: it leaves the room that is lost where shards end at whole rows.
_SPREAD_BYTES_STEP = 256 * KiB

# Shards beyond those of `spread`: each top-level key of the state but the first may end in one more.
_LAST_SHARDS = 2

# Room in a shard for which a chunk is cut. Below it, one more piece to read costs more than the room.
_FILL_BYTES_MIN = 1 * MiB


def require_shard_bytes(shard_bytes: object, memory_budget_bytes: int) -> None:
    """Refuse a size of shards that is neither None nor an integer from 1 MiB to 64 MiB within the memory budget."""
    largest = choose_shard_bytes(memory_budget_bytes)
    if shard_bytes is not None and (type(shard_bytes) is not int or not _BUDGET_BYTES_MIN <= shard_bytes <= largest):
        raise InvalidArgumentError(
            "shard_bytes must be None or an integer from 1 MiB to 64 MiB, and at most memory_budget_bytes.",
            shard_bytes=shard_bytes,
            memory_budget_bytes=memory_budget_bytes,
        )


def choose_shard_bytes(memory_budget_bytes: int) -> int:
    """Return the largest number of bytes of data in a shard, given a memory budget."""
    return min(SHARD_BYTES_MAX, max(memory_budget_bytes, _BUDGET_BYTES_MIN))


def limit_pinned(memory_budget_bytes: int, in_flight: int) -> int:
    """Return the bytes of a shard of which so many fit into the budget as pinned memory; a power of two, from 8 MiB up.

    Pinned memory comes in powers of two: of shards of 33 MiB, a budget of 256 MiB would hold four.
    """
    return 1 << (max(memory_budget_bytes // in_flight, _SPREAD_BYTES_MIN).bit_length() - 1)


def spread(size_bytes: int, in_flight: int, limit: int = SHARD_BYTES_MAX) -> int:
    """Return the number of bytes of data in a shard with which a rank's shards are sent in full waves, from 8 MiB up.

    A wave is as many shards as are in flight. With few large shards, the last wave would take as long as a full one.
    """
    waves = -(-(-(-size_bytes // limit) + _LAST_SHARDS) // in_flight)
    step = (waves * in_flight - _LAST_SHARDS) * _SPREAD_BYTES_STEP
    return min(limit, max(-(-size_bytes // step) * _SPREAD_BYTES_STEP, _SPREAD_BYTES_MIN))


@dataclass(frozen=True, slots=True)
class Item(Generic[S]):
    """Chunk of a tensor, or bytes (as a one-dimensional chunk of uint8), to be placed."""

    # Top-level key of the state dict. Items of different keys never share a shard, so that dropping the optimizer later
    # frees whole objects.
    top: str
    name: str  # name in the shard's header
    dtype: str
    offsets: tuple[int, ...]  # offsets of the chunk in its tensor, in elements
    sizes: tuple[int, ...]  # sizes of the chunk, in elements
    whole: bool  # True if the chunk is the whole tensor
    source: S  # bytes of the chunk, in any form; only the caller reads them
    # True for a changed piece of an entry that is reused otherwise: cut again at each save, it would fall into ever
    # smaller pieces.
    keeps_bounds: bool = False


@dataclass(frozen=True, slots=True)
class Piece(Generic[S]):
    """Elements `start` to `stop` of an item's chunk, in row-major order."""

    item: Item[S]
    number: int  # index of the item, in the order in which items are given
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Length in bytes."""
        return (self.stop - self.start) * ITEM_BYTES[self.item.dtype]


def pack(
    items: Iterable[Item[S]],
    *,
    shard_bytes_max: int = SHARD_BYTES_MAX,
    items_per_shard_max: int = ITEMS_PER_SHARD_MAX,
    fill_bytes_min: int = _FILL_BYTES_MIN,
) -> Iterator[list[Piece[S]]]:
    """Place items into shards. Items are drawn lazily: a shard is yielded when the first item of the next is drawn.

    A chunk for which a shard has too little room is cut, at whole rows where these are small: its first piece fills the
    shard, if there is room for `fill_bytes_min`, and the next ones fill a shard each. The order of the items is kept,
    so that neighbors are read together; a shard ends where the top-level key changes. The pieces of an item come in
    order; an item without elements has none. Header and block table of a shard come on top of `shard_bytes_max`.
    """
    shard: list[Piece[S]] = []
    filled = 0
    for number, item in enumerate(items):
        is_open = shard and shard[-1].item.top == item.top and len(shard) < items_per_shard_max
        room_bytes = shard_bytes_max - filled if is_open else 0
        for start, stop in _cut(item, room_bytes, shard_bytes_max, fill_bytes_min):
            piece = Piece(item, number, start, stop)
            full = filled + piece.length > shard_bytes_max or len(shard) >= items_per_shard_max
            if shard and (full or shard[-1].item.top != item.top):
                yield shard
                shard, filled = [], 0
            shard.append(piece)
            filled += piece.length
    if shard:
        yield shard


def _cut(item: Item[S], room_bytes: int, shard_bytes_max: int, fill_bytes_min: int) -> list[tuple[int, int]]:
    """Return the first element of each piece of an item, and the one after its last."""
    item_bytes, piece_bytes_max = ITEM_BYTES[item.dtype], shard_bytes_max
    if item.keeps_bounds:  # cut into nearly equal pieces, or each smaller size of shards would leave a small rest
        item_size = math.prod(item.sizes) * item_bytes
        pieces = max(1, -(-item_size // shard_bytes_max))
        piece_bytes_max = min(shard_bytes_max, -(-item_size // pieces) + fill_bytes_min)
    return cut_to_fill(
        item.sizes,
        item_bytes=item_bytes,
        room_bytes=0 if item.keeps_bounds or room_bytes < fill_bytes_min else room_bytes,
        piece_bytes_max=piece_bytes_max,
        row_bytes_max=fill_bytes_min,
    )


def piece_label(piece: Piece[S]) -> tuple[str, tuple[int, ...]]:
    """Return the name and shape of a piece in its shard's header.

    A whole tensor has its own name. A piece that is one box of the tensor is named `name@offsets`, after its offsets in
    the tensor, and has the shape of the box. Any other piece is flat, and named `name@offsets+first`, after the offsets
    of its chunk and its first element in the chunk.
    """
    item = piece.item
    if item.whole and piece.stop - piece.start == math.prod(item.sizes):
        return item.name, item.sizes
    boxes = list(boxes_of_run(item.sizes, piece.start, piece.stop))
    if len(boxes) == 1:
        box = boxes[0][1]
        offsets = ",".join(str(a + b) for a, b in zip(item.offsets, box.offsets, strict=True))
        return f"{item.name}@{offsets}", box.sizes
    offsets = ",".join(map(str, item.offsets))
    return f"{item.name}@{offsets}+{piece.start}", (piece.stop - piece.start,)
