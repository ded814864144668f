"""Arrays of int64, and buffers of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Integers: TypeAlias = npt.NDArray[Any]

# One-dimensional contiguous bytes that can be sent or read into.
Buffer: TypeAlias = bytes | bytearray | memoryview


# Arrays that are joined in a call, which keeps the interpreter from other threads if they are small and many.
_JOINED_AT_ONCE = 128


def concat_arrays(arrays: Sequence[Integers]) -> I64:
    """Concatenate arrays of any integer type along their last axis; numpy would make floats of some."""
    starts = range(0, len(arrays), _JOINED_AT_ONCE)
    some = [np.concatenate(arrays[at : at + _JOINED_AT_ONCE], axis=-1, dtype=np.int64) for at in starts]
    if not some:
        return np.zeros(0, dtype=np.int64)
    return some[0] if len(some) == 1 else np.concatenate(some, axis=-1)


def shrink_integers(values: I64) -> Integers:
    """Return the values, none of them negative, in the smallest integer type that holds all of them; not in uint64."""
    narrow = np.min_scalar_type(int(values.max(initial=0)))
    return values.astype(narrow) if narrow.itemsize < values.itemsize else values


def concat_ranges(starts: I64, counts: I64) -> I64:
    """Concatenate `range(start, start + count)` of each pair; int64, shape [sum(counts)].

    Made without `np.repeat`, which keeps the interpreter from other threads.
    """
    filled = np.flatnonzero(counts)
    starts, counts = starts[filled], counts[filled]
    steps = np.ones(int(counts.sum()), dtype=np.int64)
    if len(filled):
        steps[0] = starts[0]
        steps[np.cumsum(counts[:-1], dtype=np.int64)] = starts[1:] - (starts[:-1] + counts[:-1] - 1)
    return np.cumsum(steps, out=steps)


def group_offsets(counts: I64) -> I64:
    """Return where each of several consecutive groups begins, and where the last one ends; shape [len(counts) + 1]."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])


def sorted_unique(values: I64) -> I64:
    """Return each value once, ascending; shape [at most len(values)].

    Replaces `np.unique`, which imports `numpy.ma` to check for masked arrays and so delays the first save.
    """
    if len(values) and 0 <= int(values.min()) <= int(values.max()) < len(values):  # a sort takes five times as long
        is_present = np.zeros(len(values), dtype=np.bool_)
        is_present[values] = True
        return np.flatnonzero(is_present)
    ordered: I64 = np.sort(values, axis=None)
    first: I64 = ordered[np.concatenate([np.ones(min(1, len(ordered)), dtype=bool), ordered[1:] != ordered[:-1]])]
    return first
