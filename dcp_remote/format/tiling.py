"""Check that boxes tile a tensor, that is, cover each element exactly once. Bounded in time for any boxes.

Boxes tile a tensor if each is inside, no two overlap, and their volumes add up to its volume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dcp_remote.common.arrays import I64, sorted_unique

# Pairs of boxes that are compared at most, which takes about a second. Grids (every sharding by mesh dimensions) and
# FSDP1's flat parameters stay below; only a forged manifest does not.
COMPARISONS_MAX = 100_000_000

# Layouts that are remembered: tensors of all layers have few different ones, each of up to a megabyte.
_LAYOUTS_MAX = 64


@dataclass(slots=True)
class Comparisons:
    """Pairs of boxes that may still be compared, and layouts that were: one budget for all tensors of a manifest."""

    left: int = COMPARISONS_MAX
    # Shapes, offsets, sizes, and whether the boxes are a part.
    tiled: set[tuple[tuple[int, ...], bytes, bytes, bool]] = field(default_factory=set)


def why_not_tiled(
    shape: Sequence[int],
    offsets: I64,
    sizes: I64,
    comparisons: Comparisons | None = None,
    *,
    is_part: bool = False,
) -> str | None:
    """Return in a few words why boxes do not tile a tensor of d dimensions; None if they do.

    Offsets and sizes have the shape [boxes, d], and are not negative; boxes without elements are ignored. Those of a
    part need not cover the tensor. An irregular layout is charged to the budget, or to a fresh one.
    """
    known = comparisons or Comparisons()
    layout = tuple(shape), offsets.tobytes(), sizes.tobytes(), is_part
    if layout in known.tiled:
        return None
    reason = _compare(shape, offsets, sizes, known, is_part=is_part)
    if reason is None and len(known.tiled) < _LAYOUTS_MAX:
        known.tiled.add(layout)
    return reason


def _compare(shape: Sequence[int], offsets: I64, sizes: I64, comparisons: Comparisons, *, is_part: bool) -> str | None:
    elements = math.prod(shape)
    if bool((offsets + sizes > np.asarray(shape, dtype=np.int64)).any()):
        return "a chunk reaches outside the tensor"
    filled = (sizes > 0).all(axis=1)
    offsets, sizes = offsets[filled], sizes[filled]
    volumes = sizes.prod(axis=1, dtype=np.int64) if len(shape) else np.ones(len(sizes), dtype=np.int64)
    # A box inside the tensor has at most `elements`; the sum needs Python's integers only if it could wrap around.
    total = int(volumes.sum()) if len(volumes) * max(elements, 1) < 2**62 else sum(volumes.tolist())
    if total < elements and not is_part:
        return f"{elements - total} of {elements} elements are in no chunk"
    if total > elements:
        return "chunks overlap"
    if len(sizes) <= 1:
        return None
    return _why_overlapping(offsets, sizes, comparisons)


def _why_overlapping(offsets: I64, sizes: I64, comparisons: Comparisons) -> str | None:
    cells = _grid_cells(offsets, sizes)
    if cells is not None:
        return None if len(sorted_unique(cells)) == len(cells) else "chunks overlap"
    dimension, depths = _sweep_dimension(offsets, sizes)
    comparisons.left -= int(depths.sum())
    if comparisons.left < 0:
        return "the layout of the chunks is too irregular to check"
    order = np.argsort(offsets[:, dimension], kind="stable")
    starts, stops = offsets[order], (offsets + sizes)[order]
    ends = np.searchsorted(starts[:, dimension], stops[:, dimension], side="left")
    for i in range(len(starts)):
        later = slice(i + 1, int(ends[i]))
        if bool(((starts[later] < stops[i]) & (starts[i] < stops[later])).all(axis=1).any()):
            return "chunks overlap"
    return None


def _grid_cells(offsets: I64, sizes: I64) -> I64 | None:
    """Return the cell of each box in the grid of all distinct offsets; None if a box reaches beyond its cell."""
    cells = np.zeros(len(offsets), dtype=np.int64)
    total = 1
    for dimension in range(offsets.shape[1]):
        lines = sorted_unique(offsets[:, dimension])
        total *= len(lines)
        if total > 2**62:
            return None
        index = np.searchsorted(lines, offsets[:, dimension])
        following = np.append(lines[1:], np.iinfo(np.int64).max)[index]
        if bool((offsets[:, dimension] + sizes[:, dimension] > following).any()):
            return None
        cells = cells * len(lines) + index
    return cells


def _sweep_dimension(offsets: I64, sizes: I64) -> tuple[int, I64]:
    """Return the dimension along which the fewest pairs of boxes must be compared, and their number for each box."""
    best, fewest = 0, None
    for dimension in range(offsets.shape[1]):
        starts = np.sort(offsets[:, dimension])
        stops = offsets[:, dimension] + sizes[:, dimension]
        depths = np.searchsorted(starts, stops, side="left") - np.searchsorted(
            starts, offsets[:, dimension], side="left"
        )
        if fewest is None or depths.sum() < fewest.sum():
            best, fewest = dimension, depths
    assert fewest is not None
    return best, fewest.astype(np.int64)
