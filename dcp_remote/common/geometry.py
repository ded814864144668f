"""Byte ranges, and boxes and runs of elements, in which tensors are cut into pieces. Pure, without torch.

A *box* has offsets and sizes, one per dimension, as a chunk in torch. The elements of a chunk are numbered in row-major
order; a *run* is a half-open range of these numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_remote.common.arrays import I64


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes from `start` to `stop`, excluded."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Box:
    """Rectangular part of a tensor: `sizes[d]` elements from `offsets[d]` on in each dimension `d`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a box without dimensions."""
        return math.prod(self.sizes)

    def intersection(self, other: Box) -> Box | None:
        """Return the part that both boxes share; None if they share no element."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(offsets, stops, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Return the box with its offsets counted from `origin`."""
        return Box(tuple(a - o for a, o in zip(self.offsets, origin, strict=True)), self.sizes)


def boxes_of_run(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cut a run of a row-major chunk, of at least one element, into at most `2 * dimensions - 1` boxes.

    Yields (first element of the box, box) in ascending order; the elements of each box are one run.
    """
    if not sizes:
        yield start, Box((), ())
        return
    row = math.prod(sizes[1:])
    first, last = start // row, (stop - 1) // row
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
    """Return the runs of a row-major chunk that contain the elements of a box of at least one element.

    Runs less than `gap` elements apart are joined (1 joins only adjacent ones), so that there are at most
    `prod(sizes) / gap + 1`. Returns int64 of shape [runs, 2]: start and stop of each run, ascending.
    """
    dimension = len(sizes)
    length, stride, base = 1, 1, 0
    # Merge dimensions from the innermost outwards, as long as the gap between rows is below `gap`.
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


def find_single_run(sizes: Sequence[int], box: Box) -> int | None:
    """Return the first element of a box inside a row-major chunk; None if its elements are several runs."""
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


def cut_to_fill(
    sizes: Sequence[int], *, item_bytes: int, room_bytes: int, piece_bytes_max: int, row_bytes_max: int
) -> list[tuple[int, int]]:
    """Cut a chunk into a run of at most `room_bytes`, if that is not 0, runs of `piece_bytes_max`, and the rest.

    The runs end at whole rows, of the largest kind that has at most `row_bytes_max`. Returns (start, stop) of each in
    elements, ascending, without gaps; none for a chunk without elements. An element must not be larger than a piece.
    """
    elements = math.prod(sizes)
    if elements == 0:
        return []
    limit = piece_bytes_max // item_bytes
    assert limit > 0, "an element is larger than a piece"
    row = _largest_row(sizes, max(1, min(limit, row_bytes_max // item_bytes)))
    first = room_bytes // item_bytes // row * row
    return list(itertools.pairwise(sorted({0, *range(first, elements, limit // row * row), elements})))


def _largest_row(sizes: Sequence[int], limit: int) -> int:
    """Return the elements of the largest kind of row with at most `limit` elements: 1, or all of the chunk perhaps."""
    row = math.prod(sizes)
    for size in sizes:
        if row <= limit:
            break
        row //= size
    return row
