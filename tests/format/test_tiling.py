"""Tilings against counting: every box is painted on a small array, and each element must be painted once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.common.geometry import Box
from dcp_remote.format.tiling import COMPARISONS_MAX, Comparisons, why_not_tiled
from tests.support.manifests import boxes
from tests.support.properties import examples


def reason(shape: tuple[int, ...], boxes: list[Box], comparisons: Comparisons | None = None) -> str | None:
    form = (len(boxes), len(shape))
    offsets = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(form)
    sizes = np.array([box.sizes for box in boxes], dtype=np.int64).reshape(form)
    return why_not_tiled(shape, offsets, sizes, comparisons)


def painted_once(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    canvas = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        if any(o + n > size for o, n, size in zip(box.offsets, box.sizes, shape, strict=True)):
            return False
        canvas[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    return bool((canvas == 1).all())


SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)
# Irregular tilings as well as grids, in any order.
TILINGS = SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), boxes(shape, cuts_max=10).flatmap(st.permutations)))


@given(TILINGS)
def test_tilings_pass(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    """Any tiling passes: irregular, in any order, with boxes without elements."""
    shape, boxes = tiling
    assert painted_once(shape, boxes)
    assert reason(shape, boxes) is None


@examples(300)
@given(TILINGS, st.data())
def test_anything_else_does_not(tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    """A tiling with a box moved, resized, doubled or removed passes if and only if painting says so."""
    shape, boxes = tiling
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, len(boxes) - 1))
        box = boxes[where]
        offsets = tuple(data.draw(st.integers(0, o + 2)) for o in box.offsets)
        sizes = tuple(data.draw(st.integers(0, n + 2)) for n in box.sizes)
        change = data.draw(st.sampled_from(["move", "resize", "double", "remove", "swap"]))
        if change == "remove" and len(boxes) > 1:
            del boxes[where]
        elif change == "double":
            boxes.append(box)
        elif change == "swap":
            other = data.draw(st.integers(0, len(boxes) - 1))
            boxes[where], boxes[other] = Box(box.offsets, boxes[other].sizes), Box(boxes[other].offsets, box.sizes)
        else:
            boxes[where] = Box(offsets if change == "move" else box.offsets, sizes if change == "resize" else box.sizes)
    assert (reason(shape, boxes) is None) == painted_once(shape, boxes)


def test_equal_volume_is_not_enough() -> None:
    """Two boxes overlap beside a hole: the volumes add up, so that only geometry finds the overlap."""
    assert reason((4, 4), [Box((0, 0), (4, 2)), Box((0, 1), (4, 2))]) == "chunks overlap"
    assert reason((), [Box((), ()), Box((), ())]) == "chunks overlap"


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((), [], "1 of 1 elements are in no chunk"),
        ((0, 5), [], None),
        ((3,), [Box((0,), (2,))], "1 of 3 elements are in no chunk"),
        ((3,), [Box((2,), (2,))], "a chunk reaches outside the tensor"),
        ((3,), [Box((9,), (0,))], "a chunk reaches outside the tensor"),
        ((2**53,), [Box((0,), (2**52,)), Box((2**52,), (2**52,))], None),
        ((2**53,), [Box((0,), (2**53,))] * 2000, "chunks overlap"),
    ],
)
def test_edges(shape: tuple[int, ...], boxes: list[Box], expected: str | None) -> None:
    """Tensors without dimensions or elements, and volumes whose sum exceeds 64 bits, are judged as listed."""
    assert reason(shape, boxes) == expected


def test_large_grids_cost_no_comparisons() -> None:
    """200,000 chunks of an uneven mesh are checked without comparing boxes pairwise."""
    rows = [Box((3 * i, 7 * j), (min(3, 1000 - 3 * i), 7)) for i in range(334) for j in range(600)]
    comparisons = Comparisons()
    assert reason((1000, 4200), rows, comparisons) is None
    assert comparisons.left == COMPARISONS_MAX


def pinwheel(height: int) -> list[Box]:
    """Return five boxes that tile a matrix of three columns, but are no grid."""
    above, below = Box((0, 0), (1, 2)), Box((height + 1, 1), (1, 2))
    return [above, Box((0, 2), (height + 1, 1)), below, Box((1, 0), (height + 1, 1)), Box((1, 1), (height, 1))]


def test_equal_layouts_are_compared_once() -> None:
    """Tensors of many layers are alike: only the first is charged; the memory for layouts has a bound."""
    comparisons = Comparisons()
    assert reason((3, 3), pinwheel(1), comparisons) is None
    left = comparisons.left
    assert left < COMPARISONS_MAX
    assert all(reason((3, 3), pinwheel(1), comparisons) is None for _ in range(10))
    assert comparisons.left == left
    assert reason((4, 3), pinwheel(1), comparisons) == "3 of 12 elements are in no chunk"
    assert reason((3, 3), pinwheel(1)[1:], comparisons) == "2 of 9 elements are in no chunk"
    for height in range(2, 200):
        assert reason((height + 2, 3), pinwheel(height), comparisons) is None
    assert len(comparisons.tiled) < 100


def test_irregular_layouts_are_refused_past_one_budget() -> None:
    """A pinwheel is no grid; many of them exhaust their shared budget, and are refused."""
    comparisons = Comparisons(left=100)
    answers = [reason((n + 2, 3), pinwheel(n), comparisons) for n in range(1, 101)]
    assert answers[0] is None
    assert answers[-1] == "the layout of the chunks is too irregular to check"
    assert set(answers) == {answers[0], answers[-1]}


def test_a_hostile_layout_is_refused_before_it_is_compared() -> None:
    """Vertical stripes beside horizontal ones: along either dimension, half of the boxes overlap in projection."""
    count = 10_500
    upright = [Box((0, i), (count, 1)) for i in range(count)]
    lying = [Box((i, count), (1, count)) for i in range(count)]
    refused = reason((count, 2 * count), upright + lying)
    assert refused == "the layout of the chunks is too irregular to check"
    assert reason((100, 200), [Box((0, i), (100, 1)) for i in range(100)] + [Box((0, 100), (100, 100))]) is None
