"""Chunks of a tensor as torch wants them, built on access: a checkpoint may have a million.

torch's object for one chunk takes half a kilobyte and one to two microseconds, on every rank, and each rank needs few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor

from dcp_remote.common.arrays import I64
from dcp_remote.common.overrides import inherits_methods


class ChunkCache:
    """One-entry cache of the objects of a `ChunkList`, shared by all tensors of a checkpoint.

    torch's planner goes over the chunks of one tensor several times before it goes on to the next.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._entry: tuple[ChunkList, list[ChunkStorageMetadata]] | None = None

    def get_objects(self, chunks: ChunkList) -> list[ChunkStorageMetadata]:
        """Return all objects of a list; on a miss they are built, and replace the entry."""
        entry = self._entry
        if entry is None or entry[0] is not chunks:
            self._entry = entry = chunks, chunks.build_objects(range(len(chunks)))
        return entry[1]


class ChunkList(Sequence[ChunkStorageMetadata]):
    """Chunks of one tensor; equal to a list of them, and pickled as one.

    Args:
        offsets: Offsets of each chunk, shape [chunks, dimensions].
        sizes: Sizes of each chunk, shape [chunks, dimensions].
        cache: Cache shared with the other tensors of the checkpoint.
    """

    def __init__(self, offsets: I64, sizes: I64, cache: ChunkCache) -> None:
        """Store the arrays; no object is built."""
        self._offsets, self._sizes, self._cache = offsets, sizes, cache

    def __len__(self) -> int:
        """Return the number of chunks; builds no object."""
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...

    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...

    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        """Return one chunk, or a list of several; builds all of them."""
        return self._cache.get_objects(self)[index]

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        """Iterate over all chunks; builds all of them at once."""
        return iter(self._cache.get_objects(self))

    def __eq__(self, other: object) -> bool:
        """Compare with a list or another `ChunkList`: same chunks in the same order."""
        return list(self) == list(other) if isinstance(other, list | ChunkList) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __repr__(self) -> str:
        """Return the representation of the list."""
        return repr(list(self))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as a list."""
        return list, (list(self),)

    def build_objects(self, numbers: Iterable[int]) -> list[ChunkStorageMetadata]:
        """Build torch's objects for the chunks of these numbers; they are not cached."""
        chosen = np.fromiter(numbers, dtype=np.int64)
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in zip(self._offsets[chosen].tolist(), self._sizes[chosen].tolist(), strict=True)
        ]

    def find_overlapping(self, boxes: Sequence[ChunkStorageMetadata]) -> list[int]:
        """Return the numbers of the chunks that share elements with any of the boxes, ascending; builds no object."""
        overlaps = np.zeros(len(self), dtype=bool)
        for box in boxes:
            start = np.array(box.offsets, dtype=np.int64)
            stop = start + np.array(box.sizes, dtype=np.int64)
            overlaps |= ((self._offsets < stop) & (start < self._offsets + self._sizes)).all(axis=1)
        numbers: list[int] = np.flatnonzero(overlaps).tolist()
        return numbers


def local_plan(planner: LoadPlanner) -> LoadPlan:
    """Return `planner.create_local_plan()`, but build objects only for the chunks that this rank reads.

    The items of a tensor may be in another order than torch's: torch sorts by the longest dimension of the chunks that
    it is shown. A planner with a `create_local_plan` of its own is shown all chunks.

    Args:
        planner: Planner, set up with metadata of `to_dcp_metadata`.
    """
    if not inherits_methods(planner, DefaultLoadPlanner, ("create_local_plan",)) or planner.metadata is None:
        return planner.create_local_plan()
    metadata = planner.metadata
    entries, numbers = reduce_chunks(metadata.state_dict_metadata, planner.state_dict)
    planner.metadata = replace(metadata, state_dict_metadata=entries)
    try:
        plan = planner.create_local_plan()
    finally:
        planner.metadata = metadata
    return renumber_chunks(plan, numbers)


def reduce_chunks(
    entries: Mapping[str, STORAGE_TYPES], state: Mapping[str, Any]
) -> tuple[dict[str, STORAGE_TYPES], dict[str, list[int]]]:
    """Return entries with the chunks alone that the templates overlap, and the numbers of these chunks.

    Args:
        entries: Entries of the checkpoint by name; few objects are built for those with a `ChunkList`.
        state: Templates by name.
    """
    reduced: dict[str, STORAGE_TYPES] = {}
    numbers: dict[str, list[int]] = {}
    for name, entry in entries.items():
        kept = _keep_overlapping(entry, state.get(name))
        if kept is None:
            reduced[name] = entry
        else:
            numbers[name], reduced[name] = kept
    return reduced, numbers


def renumber_chunks(plan: LoadPlan, numbers: Mapping[str, Sequence[int]]) -> LoadPlan:
    """Return a plan for the entries of `reduce_chunks` with the numbers that the chunks have in the checkpoint."""
    return replace(
        plan,
        items=[
            replace(item, storage_index=_renumber(item.storage_index, numbers[item.storage_index.fqn]))
            if item.storage_index.fqn in numbers
            else item
            for item in plan.items
        ],
    )


def _keep_overlapping(entry: STORAGE_TYPES, template: Any) -> tuple[list[int], TensorStorageMetadata] | None:
    """Return the chunks that a template overlaps: their numbers, and an entry with these chunks alone.

    None if torch is to be shown the entry as it is.
    """
    if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.chunks, ChunkList):
        return None
    if len(entry.chunks) == 1:
        return None  # the search would cost more than the one object
    # torch refuses a template that does not fit, and its error says why.
    if not isinstance(template, torch.Tensor) or template.size() != entry.size:
        return None
    if isinstance(template, DTensor) and template.device_mesh.get_coordinate() is None:
        return None
    numbers = entry.chunks.find_overlapping(_create_chunk_list(template))
    return numbers, replace(entry, chunks=entry.chunks.build_objects(numbers))


def _renumber(index: MetadataIndex, numbers: Sequence[int]) -> MetadataIndex:
    return index if index.index is None else replace(index, index=numbers[index.index])
