"""Byte ranges, boxes and rows: the arithmetic of cutting and finding pieces of a tensor. Pure, without torch.

A *box* is what torch calls a chunk: offsets and sizes, one per dimension. Elements of a chunk are numbered in
row-major order; a *run* is a half-open range of those numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

KiB = 1024
MiB = 1024 * KiB

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """The bytes from `start` up to, and without, `stop`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many bytes these are."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: `sizes[d]` elements from `offsets[d]` on in each dimension `d`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements it holds; 1 for a box without dimensions."""
        return math.prod(self.sizes)

    def intersection(self, other: Box) -> Box | None:
        """The part that both share; None if there is none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(offsets, stops, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box, counted from `origin`."""
        return Box(tuple(a - o for a, o in zip(self.offsets, origin, strict=True)), self.sizes)


def boxes_of_run(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cut a run of a row-major chunk into boxes: a staircase of at most `2 * dimensions - 1` of them.

    Args:
        sizes: The chunk's sizes.
        start: First element of the run.
        stop: One past its last; `start < stop <= prod(sizes)`.

    Yields:
        (first element of the box, the box); the elements of each box are one run, in row-major order.
    """
    if not sizes:
        yield start, Box((), ())
        return
    row = math.prod(sizes[1:])
    first, last = start // row, (stop - 1) // row
    if len(sizes) == 1:
        yield start, Box((start,), (stop - start,))
        return
    if first == last and (start % row or stop % row):
        yield from _inside_row(sizes, first, start - first * row, stop - first * row)
        return
    if start % row:
        yield from _inside_row(sizes, first, start % row, row)
        first += 1
    whole = stop // row
    if whole > first:
        rest = tuple(sizes[1:])
        yield first * row, Box((first, *(0 for _ in rest)), (whole - first, *rest))
    if stop % row:
        yield from _inside_row(sizes, whole, 0, stop % row)


def _inside_row(sizes: Sequence[int], index: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    row = math.prod(sizes[1:])
    for first, box in boxes_of_run(sizes[1:], start, stop):
        yield index * row + first, Box((index, *box.offsets), (1, *box.sizes))


def runs_of_box(sizes: Sequence[int], box: Box, *, gap: int) -> I64:
    """The runs of a row-major chunk that a box inside it consists of.

    Runs less than `gap` elements apart are given as one, so that their number is at most `prod(sizes) / gap + 1`.

    Args:
        sizes: The chunk's sizes.
        box: A box inside the chunk, with at least one element.
        gap: In elements; 1 joins nothing but neighbors.

    Returns:
        int64 array of shape [runs, 2]: start and stop of each, ascending.
    """
    dimension = len(sizes)
    length, stride, base = 1, 1, 0
    # From the innermost dimension outwards, as long as the rows touch or nearly touch.
    while dimension and (box.sizes[dimension - 1] == 1 or stride - length < gap):
        dimension -= 1
        length += (box.sizes[dimension] - 1) * stride
        base += box.offsets[dimension] * stride
        stride *= sizes[dimension]
    starts = np.array([base], dtype=np.int64)
    for outer in range(dimension - 1, -1, -1):
        steps = (box.offsets[outer] + np.arange(box.sizes[outer], dtype=np.int64)) * stride
        starts = (steps[:, None] + starts[None, :]).reshape(-1)
        stride *= sizes[outer]
    return np.stack([starts, starts + length], axis=1)


def only_run(sizes: Sequence[int], box: Box) -> int | None:
    """The first element of a box inside a row-major chunk, if its elements are one run; None if they are several."""
    if any(
        inner != size
        for outer in range(len(sizes))
        if box.sizes[outer] > 1
        for inner, size in zip(box.sizes[outer + 1 :], sizes[outer + 1 :], strict=True)
    ):
        return None
    first = 0
    for offset, size in zip(box.offsets, sizes, strict=True):
        first = first * size + offset
    return first


def cut_chunk(sizes: Sequence[int], *, item_bytes: int, piece_bytes_max: int) -> list[tuple[int, int]]:
    """Cut a chunk into runs of at most `piece_bytes_max`, of nearly equal length, at whole rows where they fit.

    Args:
        sizes: The chunk's sizes.
        item_bytes: Bytes of one element; at most `piece_bytes_max`.
        piece_bytes_max: Limit of a piece.

    Returns:
        (start, stop) of each piece in elements, ascending, without gaps; none for a chunk without elements.
    """
    elements = math.prod(sizes)
    if elements == 0:
        return []
    limit = piece_bytes_max // item_bytes
    assert limit > 0, "an element is larger than a piece"
    if elements <= limit:
        return [(0, elements)]
    # The unit of the cut: the largest row that fits into a piece.
    unit = elements
    for size in sizes:
        if unit <= limit:
            break
        unit //= size
    rows = elements // unit
    rows_max = max(1, limit // unit)
    pieces = -(-rows // rows_max)
    bounds = [rows * i // pieces * unit for i in range(pieces + 1)]
    return list(itertools.pairwise(bounds))


def joined(starts: I64, counts: I64) -> I64:
    """Concatenate `range(start, start + count)` of each pair; int64, shape [sum(counts)]."""
    total = int(counts.sum())
    if total == 0:
        return np.zeros(0, dtype=np.int64)
    ends = np.cumsum(counts)
    shift = np.repeat(starts - (ends - counts), counts)
    result: I64 = np.arange(total, dtype=np.int64) + shift
    return result


def firsts(counts: I64) -> I64:
    """Where each of several consecutive groups begins, and where the last one ends; shape [len(counts) + 1]."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])


def distinct(values: I64) -> I64:
    """Each value once, ascending; shape [at most len(values)].

    As `np.unique`, which looks whether they are masked first, and for that imports what nobody needs at a first save.
    """
    ordered: I64 = np.sort(values, axis=None)
    first: I64 = ordered[np.concatenate([np.ones(min(1, len(ordered)), dtype=bool), ordered[1:] != ordered[:-1]])]
    return first
