"""Differences of the values of two checkpoints' tensors, which are read in parts of bounded size.

torch converts the values: numpy has no bfloat16, and none of the floating-point types of 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from dcp_remote.common.geometry import Box, boxes_of_run
from dcp_remote.common.units import MiB
from dcp_remote.format.manifest import RAW, Manifest
from dcp_remote.loading.engine import read_targets
from dcp_remote.loading.targets import make_box_targets
from dcp_remote.run.differences import State
from dcp_remote.serialization.tensors import empty_tensor, parse_dtype, view_as_integers
from dcp_remote.storage import ObjectStore

# Elements of a part, whose differences are computed as float64 in some copies; and tensors that are read at a time.
_PART_ELEMENTS = 2**19
_TENSORS_AT_A_TIME = 4
_BUDGET_BYTES = 16 * MiB


@dataclass(slots=True)
class ValueDifference:
    """Difference of two tensors of one shape.

    Attributes:
        elements: Number of elements.
        unequal: Number of those that differ; two NaN are equal, and so are 0.0 and -0.0.
        max_abs: Largest absolute difference of floating-point or complex numbers; None for other types.
        relative_norm: Norm of these differences divided by that of the first tensor; None for other types.
    """

    elements: int = 0
    unequal: int = 0
    max_abs: float | None = None
    relative_norm: float | None = None


def choose_comparable(a: Manifest, b: Manifest, states: Mapping[str, State]) -> list[str]:
    """Return the names of the tensors that differ, or may, and whose values can be compared.

    These have one shape, are stored as elements and not as a stream of torch, and have one dtype or two floating-point
    ones.
    """

    def is_comparable(name: str) -> bool:
        if states[name] not in ("content", "unknown", "dtype") or name not in a.tensors.index:
            return False
        (one, shape), (other, other_shape) = (
            (m.tensors.kind_of(m.tensors.index[name]), m.tensors.shape_of(m.tensors.index[name])) for m in (a, b)
        )
        is_numeric = one.dtype == other.dtype or (_is_float(one.dtype) and _is_float(other.dtype))
        return shape == other_shape and one.encoding == other.encoding == RAW and is_numeric

    return [name for name in states if is_comparable(name)]


def compare_values(
    a: tuple[ObjectStore, Manifest], b: tuple[ObjectStore, Manifest], names: Sequence[str], *, retry_seconds: float
) -> Iterator[tuple[str, ValueDifference]]:
    """Read these tensors of both checkpoints, and yield the difference of each, in the order of the names.

    Memory is bounded, whatever the size of a tensor. All bytes are verified; where the sharding differs, some are read
    more than once. A reader that stops early waits for the reads that are under way.

    Raises:
        CorruptCheckpointError: Bytes are not those that were written.
    """

    def compare(name: str) -> tuple[str, ValueDifference]:
        found, squares, squares_a = ValueDifference(), 0.0, 0.0
        for box in _cut(a[1], name):
            one, other = (_read(store, manifest, name, box, retry_seconds) for store, manifest in (a, b))
            found.elements += box.elements
            if not (_is_float(str(one.dtype)) and _is_float(str(other.dtype))):
                found.unequal += int((view_as_integers(one) != view_as_integers(other)).sum())
                continue
            wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
            one, other = one.to(wide), other.to(wide)
            is_equal = (one == other) | (one.isnan() & other.isnan())
            differences = (one - other).masked_fill_(is_equal, 0).abs()  # of two infinities, too
            found.unequal += int((~is_equal).sum())
            # torch's maximum, unlike Python's, is NaN if a value is.
            found.max_abs = float(torch.stack([differences.max(), differences.new_tensor(found.max_abs or 0.0)]).max())
            squares += float(differences.square().sum())
            squares_a += float(one.abs().square().sum())
            found.relative_norm = math.sqrt(squares / squares_a) if squares_a else (math.inf if squares else 0.0)
        return name, found

    with ThreadPoolExecutor(_TENSORS_AT_A_TIME, "dcp_remote-diff") as threads:
        yield from threads.map(compare, names)


def _cut(manifest: Manifest, name: str) -> Iterator[Box]:
    """Cut a tensor along its chunks into boxes, in the order of the bytes."""
    tensors, number = manifest.tensors, manifest.tensors.index[name]
    for chunk in range(*tensors.chunk_first[number : number + 2].tolist()):
        offsets, sizes = tensors.offsets_of(chunk), tensors.sizes_of(chunk)
        elements = math.prod(sizes)
        for start in range(0, elements, _PART_ELEMENTS):
            for _, box in boxes_of_run(sizes, start, min(start + _PART_ELEMENTS, elements)):
                yield Box(tuple(map(sum, zip(offsets, box.offsets, strict=True))), box.sizes)


def _read(store: ObjectStore, manifest: Manifest, name: str, part: Box, retry_seconds: float) -> torch.Tensor:
    """Read a part of a tensor from all chunks that have elements of the part."""
    number = manifest.tensors.index[name]
    into = empty_tensor(parse_dtype(manifest.tensors.kind_of(number).dtype), part.sizes)
    targets = make_box_targets(manifest, number, part, into)
    read_targets(store, manifest, targets, memory_budget_bytes=_BUDGET_BYTES, retry_seconds=retry_seconds)
    return into


def _is_float(dtype: str) -> bool:
    # Two values of `float4_e2m1fn_x2` are one element, which torch does not convert.
    return ("float" in dtype and "float4" not in dtype) or "complex" in dtype
