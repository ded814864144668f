"""Runs, boxes and cuts against numpy's own numbering of the elements of small arrays."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.common.arrays import concat_ranges, group_offsets, sorted_unique
from dcp_remote.common.geometry import Box, boxes_of_run, cut_to_fill, find_single_run, runs_of_box

SIZES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def numbered(sizes: tuple[int, ...]) -> np.ndarray:
    """Return the row-major numbers of a chunk's elements: the oracle of all tests here."""
    return np.arange(math.prod(sizes), dtype=np.int64).reshape(sizes)


def elements_of(numbers: np.ndarray, box: Box) -> list[int]:
    part = numbers[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
    return sorted(np.asarray(part).reshape(-1).tolist())


@st.composite
def boxes(draw: st.DrawFn, sizes: tuple[int, ...], *, empty: bool = False) -> Box:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in sizes)
    lengths = tuple(draw(st.integers(0 if empty else 1, size - o)) for size, o in zip(sizes, offsets, strict=True))
    return Box(offsets, lengths)


@given(st.data())
def test_boxes_of_a_run_are_the_run(data: st.DataObject) -> None:
    """Each box, read in row-major order, continues where the previous one ended; there are at most 2d - 1 boxes."""
    sizes = data.draw(SIZES)
    elements = math.prod(sizes)
    start = data.draw(st.integers(0, elements - 1))
    stop = data.draw(st.integers(start + 1, elements))
    staircase = list(boxes_of_run(sizes, start, stop))
    seen: list[int] = []
    for first, box in staircase:
        part = numbered(sizes)[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        assert first == start + len(seen)
        assert part.shape == box.sizes
        seen += np.asarray(part).reshape(-1).tolist()
    assert seen == list(range(start, stop))
    assert len(staircase) <= max(1, 2 * len(sizes) - 1)


@given(st.data())
def test_runs_of_a_box_cover_it_and_no_more_than_the_gaps(data: st.DataObject) -> None:
    """With `gap=1` the runs are the maximal runs of the box's numbers; otherwise those, joined where near."""
    sizes = data.draw(SIZES)
    box = data.draw(boxes(sizes))
    gap = data.draw(st.integers(1, 30))
    numbers = elements_of(numbered(sizes), box)
    maximal: list[list[int]] = []
    for number in numbers:
        if maximal and number == maximal[-1][1]:
            maximal[-1][1] += 1
        else:
            maximal.append([number, number + 1])
    assert runs_of_box(sizes, box, gap=1).tolist() == maximal

    runs = runs_of_box(sizes, box, gap=gap)
    assert runs.dtype == np.int64
    covered = [number for start, stop in runs.tolist() for number in range(start, stop)]
    assert covered == sorted(set(covered))
    assert set(numbers) <= set(covered)
    assert {runs[0, 0], runs[-1, 1] - 1} <= set(numbers)
    assert len(runs) <= math.prod(sizes) / gap + 1
    edges = {edge for pair in maximal for edge in pair}
    assert set(runs.reshape(-1).tolist()) <= edges, "a run begins and ends where one of the exact ones does"
    for run in runs.tolist():
        inside = [pair for pair in maximal if run[0] <= pair[0] < run[1]]
        assert all(b[0] - a[1] < gap for a, b in itertools.pairwise(inside)), "only near ones are joined"


@given(st.data())
def test_the_only_run_of_a_box(data: st.DataObject) -> None:
    """A box has one run if and only if its numbers are consecutive; the result is the smallest number."""
    sizes = data.draw(SIZES)
    box = data.draw(boxes(sizes))
    found = elements_of(numbered(sizes), box)
    one = found == list(range(found[0], found[0] + len(found)))
    assert find_single_run(sizes, box) == (found[0] if one else None)


@given(st.data())
def test_intersection_and_origin(data: st.DataObject) -> None:
    """The intersection has exactly the common elements; a box relative to an origin keeps its elements."""
    sizes = data.draw(SIZES)
    a, b = data.draw(boxes(sizes)), data.draw(boxes(sizes, empty=True))
    numbers = numbered(sizes)
    common = a.intersection(b)
    assert common == b.intersection(a)
    expected = sorted(set(elements_of(numbers, a)) & set(elements_of(numbers, b)))
    assert (elements_of(numbers, common) if common else []) == expected
    if common:
        inside = numbers[tuple(slice(o, o + n) for o, n in zip(a.offsets, a.sizes, strict=True))]
        assert elements_of(inside, common.relative_to(a.offsets)) == expected
        assert common.elements == len(expected)


@given(
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(16, 300),
    st.integers(0, 300),
    st.integers(1, 300),
)
def test_cut_to_fill(
    sizes: tuple[int, ...], item_bytes: int, piece_bytes_max: int, room_bytes: int, row_bytes_max: int
) -> None:
    """Pieces are consecutive, and as long as the room, then as a piece may be, less than a row shorter."""
    room_bytes = min(room_bytes, piece_bytes_max)
    pieces = cut_to_fill(
        sizes,
        item_bytes=item_bytes,
        room_bytes=room_bytes,
        piece_bytes_max=piece_bytes_max,
        row_bytes_max=row_bytes_max,
    )
    assert [n for start, stop in pieces for n in range(start, stop)] == list(range(math.prod(sizes)))
    rows = [math.prod(sizes[dimension:]) for dimension in range(len(sizes) + 1)]
    row_bytes = max((r * item_bytes for r in rows if r * item_bytes <= min(row_bytes_max, piece_bytes_max)), default=0)
    row_bytes = row_bytes or item_bytes
    assert all(start * item_bytes % row_bytes == 0 for start, _ in pieces)
    lengths = [(stop - start) * item_bytes for start, stop in pieces]
    if room_bytes >= row_bytes and lengths:
        first = lengths.pop(0)
        assert first <= room_bytes
        assert not lengths or first > room_bytes - row_bytes
    assert all(0 < length <= piece_bytes_max for length in lengths)
    assert all(length > piece_bytes_max - row_bytes for length in lengths[:-1])
    if math.prod(sizes) * item_bytes <= piece_bytes_max and room_bytes < row_bytes:
        assert len(pieces) == (math.prod(sizes) > 0), "a chunk that fits is not cut"


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 5)), max_size=8))
def test_joined_and_firsts(groups: list[tuple[int, int]]) -> None:
    """`concat_ranges` agrees with `range`, `group_offsets` with sums of lists."""
    starts = np.array([start for start, _ in groups], dtype=np.int64)
    counts = np.array([count for _, count in groups], dtype=np.int64)
    assert concat_ranges(starts, counts).tolist() == [n for start, count in groups for n in range(start, start + count)]
    assert group_offsets(counts).tolist() == [sum(counts[:i].tolist()) for i in range(len(groups) + 1)]
    assert concat_ranges(starts, counts).dtype == group_offsets(counts).dtype == np.int64


@given(st.lists(st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1)))
def test_distinct(values: list[int]) -> None:
    found = sorted_unique(np.array(values, dtype=np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == sorted(set(values))
