"""Packing: place the pieces of a rank's items into shards. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from dcp_remote.common.geometry import boxes_of_run, cut_chunk
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.shard import ITEMS_PER_SHARD_MAX, SHARD_BYTES_MAX

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Item(Generic[S]):
    """Chunk of a tensor, or bytes (as a one-dimensional chunk of uint8), to be placed.

    Attributes:
        top: Top-level key of the state dict. Items of different keys never share a shard, so that dropping the
            optimizer later frees whole objects.
        name: Name in the shard's header.
        dtype: torch's name of the dtype.
        offsets: Offsets of the chunk in its tensor, in elements.
        sizes: Sizes of the chunk, in elements.
        whole: True if the chunk is the whole tensor.
        source: Bytes of the chunk, in any form; only the caller reads them.
    """

    top: str
    name: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: bool
    source: S


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
) -> Iterator[list[Piece[S]]]:
    """Place items into shards. Items are drawn lazily: a shard is yielded when the first item of the next is drawn.

    Chunks larger than a shard are cut into pieces of nearly equal length. The order of the items is kept, so that
    neighbors are read together. The pieces of an item come in order; an item without elements has none.

    Args:
        items: Items that a rank writes; a shard ends where the top-level key changes.
        shard_bytes_max: Largest number of bytes of data in a shard; its header and block table come on top.
        items_per_shard_max: Largest number of pieces in a shard.
    """
    shard: list[Piece[S]] = []
    filled = 0
    for number, item in enumerate(items):
        item_bytes = ITEM_BYTES[item.dtype]
        for start, stop in cut_chunk(item.sizes, item_bytes=item_bytes, piece_bytes_max=shard_bytes_max):
            piece = Piece(item, number, start, stop)
            full = filled + piece.length > shard_bytes_max or len(shard) >= items_per_shard_max
            if shard and (full or shard[-1].item.top != item.top):
                yield shard
                shard, filled = [], 0
            shard.append(piece)
            filled += piece.length
    if shard:
        yield shard


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
