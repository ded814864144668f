"""Do boxes cover a tensor, each element exactly once? Bounded in time, whatever the boxes.

If boxes lie inside the tensor, no two of them overlap and their volumes add up to its volume, they tile it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcp_remote.ranges import I64, distinct

# Comparing boxes pairwise is refused beyond this: about a second. Grids (every sharding by mesh dimensions) never
# get there, nor do FSDP1's flat parameters; only a hostile manifest does.
COMPARISONS_MAX = 100_000_000


@dataclass(slots=True)
class Comparisons:
    """How many pairs of boxes may still be compared; shared by all tensors of a manifest, as its time is bounded."""

    left: int = COMPARISONS_MAX


def why_not_tiled(shape: Sequence[int], offsets: I64, sizes: I64, comparisons: Comparisons | None = None) -> str | None:
    """Check that boxes tile a tensor.

    Args:
        shape: The tensor's, of d dimensions.
        offsets: Of the boxes, shape [boxes, d], not negative.
        sizes: Of the boxes, shape [boxes, d], not negative. Boxes without elements are ignored.
        comparisons: What an irregular layout may cost, and is charged to.

    Returns:
        None if they do, else the reason in a few words.
    """
    if _is_stack(shape, offsets, sizes):
        return None
    elements = math.prod(shape)
    if bool((offsets + sizes > np.asarray(shape, dtype=np.int64)).any()):
        return "a chunk reaches outside the tensor"
    filled = (sizes > 0).all(axis=1)
    offsets, sizes = offsets[filled], sizes[filled]
    volumes = sizes.prod(axis=1, dtype=np.int64) if len(shape) else np.ones(len(sizes), dtype=np.int64)
    # Inside the tensor, a volume is at most `elements`; the sum is taken in Python's integers only if it could wrap.
    total = int(volumes.sum()) if len(volumes) * max(elements, 1) < 2**62 else sum(volumes.tolist())
    if total < elements:
        return f"{elements - total} of {elements} elements are in no chunk"
    if total > elements:
        return "chunks overlap"
    if len(sizes) <= 1:
        return None
    return _why_overlapping(offsets, sizes, comparisons or Comparisons())


def _is_stack(shape: Sequence[int], offsets: I64, sizes: I64) -> bool:
    """Whether the boxes are slices of one dimension in order, as nearly all are: a tenth of the time to look for more.

    Each begins where the one before ends, from the tensor's first element to its last, and is whole in all else.
    """
    if not len(sizes) or not len(shape):
        return False
    whole = sizes == np.asarray(shape, dtype=np.int64)
    cut = np.flatnonzero(~whole[0])
    dimension = int(cut[0]) if len(cut) else 0
    starts = offsets[:, dimension]
    stops = starts + sizes[:, dimension]
    if int(starts[0]) or int(stops[-1]) != shape[dimension] or bool((starts[1:] != stops[:-1]).any()):
        return False
    whole[:, dimension] = True
    # Where nothing else is cut, an offset anywhere else would lead outside.
    return bool(whole.all()) and int(np.count_nonzero(offsets)) == int(np.count_nonzero(starts))


def _why_overlapping(offsets: I64, sizes: I64, comparisons: Comparisons) -> str | None:
    cells = _grid_cells(offsets, sizes)
    if cells is not None:
        return None if len(distinct(cells)) == len(cells) else "chunks overlap"
    dimension, depths = _sweep_dimension(offsets, sizes)
    comparisons.left -= int(depths.sum())
    if comparisons.left < 0:
        return "the layout of the chunks is too irregular to be checked"
    order = np.argsort(offsets[:, dimension], kind="stable")
    starts, stops = offsets[order], (offsets + sizes)[order]
    ends = np.searchsorted(starts[:, dimension], stops[:, dimension], side="left")
    for i in range(len(starts)):
        later = slice(i + 1, int(ends[i]))
        if bool(((starts[later] < stops[i]) & (starts[i] < stops[later])).all(axis=1).any()):
            return "chunks overlap"
    return None


def _grid_cells(offsets: I64, sizes: I64) -> I64 | None:
    """The cell of each box in the grid of all distinct offsets, if every box fills exactly one cell; else None."""
    cells = np.zeros(len(offsets), dtype=np.int64)
    total = 1
    for dimension in range(offsets.shape[1]):
        lines = distinct(offsets[:, dimension])
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
    """The dimension along which the fewest pairs of boxes have to be compared, and how many for each box."""
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
