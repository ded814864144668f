"""Which piece goes into which shard: a function from the sizes of a rank's items to shards. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from dcp_remote.dtypes import ITEM_BYTES
from dcp_remote.ranges import boxes_of_run, cut_chunk
from dcp_remote.shard import ITEMS_PER_SHARD_MAX, SHARD_BYTES_MAX

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Item(Generic[S]):
    """A chunk of a tensor, or bytes (as a one-dimensional chunk of uint8), to be placed.

    Attributes:
        top: Top-level key of the state dict. Items of two of them never share a shard, so that dropping the optimizer
            later frees whole objects.
        name: For the shard's own header.
        dtype: torch's name of it.
        offsets: Of the chunk in its tensor.
        sizes: Of the chunk.
        whole: The chunk is the whole tensor.
        source: Where its bytes are; the caller's own business.
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
    """A run of an item: elements `start` to `stop` of its chunk, in row-major order."""

    item: Item[S]
    number: int  # of the item, in the order given
    start: int
    stop: int

    @property
    def length(self) -> int:
        """In bytes."""
        return (self.stop - self.start) * ITEM_BYTES[self.item.dtype]


def pack(
    items: Iterable[Item[S]],
    *,
    shard_bytes_max: int = SHARD_BYTES_MAX,
    items_per_shard_max: int = ITEMS_PER_SHARD_MAX,
) -> Iterator[list[Piece[S]]]:
    """Place items into shards, one after another; the first item of a shard is drawn before the last shard is given.

    Chunks larger than a shard are cut into pieces of nearly equal length; the rest is packed in the order given, so
    that what is saved together is read together. The pieces of an item come in order. Items without elements have none.

    Args:
        items: What a rank writes; a shard ends where the top-level key changes.
        shard_bytes_max: Bytes of data in a shard; its header and block table come on top.
        items_per_shard_max: Pieces in a shard.
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
    """What a piece is called in its shard's own header, and its shape there.

    A whole tensor goes by its name. A part is called `name@offsets` after where it begins in the tensor, and has its
    box's shape where it is one box; a run that is no box is shown flat, as `name@offsets+first`.
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
