"""Arrays of int64, and buffers of bytes."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

# One-dimensional contiguous bytes that can be sent or read into.
Buffer: TypeAlias = bytes | bytearray | memoryview


def concat_ranges(starts: I64, counts: I64) -> I64:
    """Concatenate `range(start, start + count)` of each pair; int64, shape [sum(counts)].

    Made without `np.repeat`, which keeps the interpreter from other threads.
    """
    filled = np.flatnonzero(counts)
    starts, counts = starts[filled], counts[filled]
    steps = np.ones(int(counts.sum()), dtype=np.int64)
    if len(filled):
        steps[0] = starts[0]
        steps[np.cumsum(counts[:-1])] = starts[1:] - (starts[:-1] + counts[:-1] - 1)
    return np.cumsum(steps, out=steps)


def group_offsets(counts: I64) -> I64:
    """Return where each of several consecutive groups begins, and where the last one ends; shape [len(counts) + 1]."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])


def sorted_unique(values: I64) -> I64:
    """Return each value once, ascending; shape [at most len(values)].

    Replaces `np.unique`, which imports `numpy.ma` to check for masked arrays and so delays the first save.
    """
    ordered: I64 = np.sort(values, axis=None)
    first: I64 = ordered[np.concatenate([np.ones(min(1, len(ordered)), dtype=bool), ordered[1:] != ordered[:-1]])]
    return first
