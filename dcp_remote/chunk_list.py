"""The chunks of a tensor as torch wants them, made when somebody looks: a checkpoint may have a million.

torch's objects for one chunk take half a kilobyte and a microsecond or two; on every rank, of which each needs a few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

from dcp_remote.ranges import I64


class Shelf:
    """Holds what was made of one list at a time: torch's planner goes over a tensor's chunks several times, in turn."""

    def __init__(self) -> None:
        """Empty."""
        self._held: tuple[ChunkList, list[ChunkStorageMetadata]] | None = None

    def chunks_of(self, one: ChunkList) -> list[ChunkStorageMetadata]:
        """All of a list; what was held of another is let go."""
        held = self._held
        if held is None or held[0] is not one:
            self._held = held = one, one.made(range(len(one)))
        return held[1]


class ChunkList(Sequence[ChunkStorageMetadata]):
    """The chunks of one tensor; equal to a list of them, and pickled as one.

    Args:
        offsets: Of each, shape [chunks, dimensions].
        sizes: Of each, likewise.
        shelf: Shared with the other tensors of a checkpoint.
    """

    def __init__(self, offsets: I64, sizes: I64, shelf: Shelf) -> None:
        """See the class."""
        self._offsets, self._sizes, self._shelf = offsets, sizes, shelf

    def __len__(self) -> int:
        """How many; makes none."""
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...

    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...

    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        """One or several."""
        return self._shelf.chunks_of(self)[index]

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        """All."""
        return iter(self._shelf.chunks_of(self))

    def __eq__(self, other: object) -> bool:
        """Whether these are the same chunks in the same order."""
        return list(self) == list(other) if isinstance(other, list | ChunkList) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __repr__(self) -> str:
        """As a list's."""
        return repr(list(self))

    def __reduce__(self) -> tuple[object, ...]:
        """As a list."""
        return list, (list(self),)

    def made(self, numbers: Iterable[int]) -> list[ChunkStorageMetadata]:
        """Some of them, as torch's objects."""
        chosen = np.fromiter(numbers, dtype=np.int64)
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in zip(self._offsets[chosen].tolist(), self._sizes[chosen].tolist(), strict=True)
        ]

    def near(self, chunks: Sequence[ChunkStorageMetadata]) -> list[int]:
        """Numbers of those that share elements with any of some chunks, ascending; makes none."""
        found = np.zeros(len(self), dtype=bool)
        for chunk in chunks:
            start = np.array(chunk.offsets, dtype=np.int64)
            stop = start + np.array(chunk.sizes, dtype=np.int64)
            found |= ((self._offsets < stop) & (start < self._offsets + self._sizes)).all(axis=1)
        numbers: list[int] = np.flatnonzero(found).tolist()
        return numbers


def local_plan(planner: LoadPlanner) -> LoadPlan:
    """`planner.create_local_plan()`, for which only chunks that this rank wants become objects.

    The items of a tensor may be in another order: torch sorts by the longest dimension of the chunks that it is shown.
    Of a planner with another method than torch's nothing is known, and it sees all chunks.

    Args:
        planner: Set up with metadata of `to_dcp_metadata`.
    """
    own = getattr(type(planner), "create_local_plan", None) is DefaultLoadPlanner.create_local_plan
    if not own or not isinstance(planner, DefaultLoadPlanner) or planner.metadata is None:
        return planner.create_local_plan()
    whole = planner.metadata
    numbers: dict[str, list[int]] = {}
    entries: dict[str, STORAGE_TYPES] = {}
    for name, entry in whole.state_dict_metadata.items():
        near = _near(entry, planner.state_dict.get(name))
        if near is None:
            entries[name] = entry
            continue
        numbers[name], entries[name] = near
    planner.metadata = replace(whole, state_dict_metadata=entries)
    try:
        plan = planner.create_local_plan()
    finally:
        planner.metadata = whole
    return replace(
        plan,
        items=[
            replace(item, storage_index=_renumbered(item.storage_index, numbers[item.storage_index.fqn]))
            if item.storage_index.fqn in numbers
            else item
            for item in plan.items
        ],
    )


def _near(entry: STORAGE_TYPES, wanted: Any) -> tuple[list[int], TensorStorageMetadata] | None:
    """The chunks of a tensor that its template wants, and an entry with these alone; None if torch is to see all."""
    if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.chunks, ChunkList):
        return None
    if len(entry.chunks) == 1:
        return None  # looking which chunk is wanted would cost more than the one object
    # What does not fit torch refuses, and says how.
    if not isinstance(wanted, torch.Tensor) or wanted.size() != entry.size:
        return None
    if isinstance(wanted, DTensor) and wanted.device_mesh.get_coordinate() is None:
        return None
    numbers = entry.chunks.near(_create_chunk_list(wanted))
    return numbers, replace(entry, chunks=entry.chunks.made(numbers))


def _renumbered(index: MetadataIndex, numbers: Sequence[int]) -> MetadataIndex:
    return index if index.index is None else replace(index, index=numbers[index.index])
