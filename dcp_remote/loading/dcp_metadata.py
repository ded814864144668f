"""Conversion of a manifest into torch's `Metadata`, and the items of torch's load plan for one of its entries.

torch's object for one chunk takes half a kilobyte and one to two microseconds, on every rank. A checkpoint may have a
million chunks, of which each rank needs few; so they are built on access.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_read_items
from torch.distributed.tensor import DTensor

from dcp_remote.common.arrays import I64
from dcp_remote.errors import UnsupportedFormatError
from dcp_remote.format.manifest import Manifest, TensorKind
from dcp_remote.loading.load_options import LoadOptions
from dcp_remote.serialization.tensors import MEMORY_FORMATS, parse_dtype

# Version that torch's own writers give (CURRENT_DCP_VERSION in filesystem.py of torch 2.13).
_DCP_METADATA_VERSION = "1.0.0"

# Layouts by name. `getattr(torch, name)` would import modules for some names.
_LAYOUTS = {
    str(layout).removeprefix("torch."): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)
}


@dataclass
class SourceMeta(StorageMeta):
    """torch's `StorageMeta` with what `RemoteLoadPlanner` needs to know of a checkpoint.

    Attributes:
        step: Step of the checkpoint; None outside a run.
        thinned: Top-level keys that retention deleted.
        rank: This rank, whose `PerRank` values may be loaded; None if the state cannot hold any.
        renamed: Name in the state of each entry that is loaded; None if the planner is to apply `rename`.
        options: Options of the planner that was set up with this metadata; None before, and with another planner.
    """

    step: int | None = None
    thinned: tuple[str, ...] = ()
    rank: int | None = None
    renamed: Mapping[str, str] | None = None
    options: LoadOptions | None = None


def to_dcp_metadata(manifest: Manifest) -> Metadata:
    """Return the `Metadata` that was saved, without `storage_data`: the reader finds bytes by the manifest.

    Builds no object per chunk. A layout or memory format that this torch does not know is an `UnsupportedFormatError`.
    """
    tensors = manifest.tensors
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    properties, cache = [_properties(kind) for kind in tensors.kinds], list[Any]()
    for name in manifest.names():
        number = tensors.index.get(name)
        if number is None:
            entries[name] = BytesStorageMetadata()
            continue
        offsets, sizes = tensors.boxes_of(number)
        entries[name] = TensorStorageMetadata(
            properties=properties[int(tensors.kind[number])],
            size=torch.Size(tensors.shape_of(number)),
            chunks=ChunkList(offsets, sizes, cache),  # type: ignore[arg-type]  # torch needs no more than a sequence
        )
    planner_data = None if manifest.flatten is None else dict(manifest.flatten)
    return Metadata(state_dict_metadata=entries, planner_data=planner_data, version=_DCP_METADATA_VERSION)


def _properties(kind: TensorKind) -> TensorProperties:
    layout = _LAYOUTS.get(kind.layout)
    memory_format = MEMORY_FORMATS.get(kind.memory_format)
    if layout is None or memory_format is None:
        # The manifest's digest matched, so this is no damage: a newer torch or dcp_remote wrote it.
        raise UnsupportedFormatError(
            "A tensor has a layout or memory format that this version does not know. Load it with a newer torch or "
            "dcp_remote.",
            layout=kind.layout[:100],
            memory_format=kind.memory_format[:100],
        )
    return TensorProperties(
        dtype=parse_dtype(kind.dtype),
        layout=layout,
        requires_grad=kind.requires_grad,
        memory_format=memory_format,
        pin_memory=kind.pin_memory,
    )


class ChunkList(Sequence[ChunkStorageMetadata]):
    """Chunks of one tensor; equal to a list of them, and pickled as one. Access to a chunk builds all of them."""

    def __init__(self, offsets: I64, sizes: I64, cache: list[Any]) -> None:
        """Store the arrays, of shape [chunks, dimensions]; no object is built.

        The cache, one for all tensors of a checkpoint, has the list that was used last, and its objects: torch's
        planner goes over the chunks of one tensor several times before it goes on to the next.
        """
        self._offsets, self._sizes, self._cache = offsets, sizes, cache

    def __len__(self) -> int:
        """Return the number of chunks; builds no object."""
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        held = self._cache[:]  # another thread may replace it
        if not held or held[0] is not self:
            self._cache[:] = held = [self, self.build_objects(range(len(self)))]
        return held[1][index]

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | ChunkList) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[object, ...]:
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


def held_boxes(value: Any) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return the offsets and sizes of the boxes that a tensor of the state holds on this rank."""
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return []
    return [(chunk.offsets, chunk.sizes) for chunk in _create_chunk_list(value)]


def plan_value(name: str, value: Any, source: str, entry: STORAGE_TYPES) -> list[ReadItem]:
    """Return torch's items that read the entry `source` of a checkpoint into a value that fits it.

    Of a tensor in several chunks, torch is shown those alone that the value overlaps. Their items may be in another
    order than torch's: torch sorts by the longest dimension of the chunks that it is shown.
    """
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return []  # this rank has no part of the tensor
    numbers: list[int] | None = None
    # For one chunk, the search would cost more than the one object.
    if isinstance(entry, TensorStorageMetadata) and isinstance(entry.chunks, ChunkList) and len(entry.chunks) > 1:
        numbers = entry.chunks.find_overlapping(_create_chunk_list(value))
        entry = replace(entry, chunks=entry.chunks.build_objects(numbers))
    items = _create_read_items(source, entry, value)
    if numbers is None and name == source:
        return items
    renamed: list[ReadItem] = []
    for item in items:
        index = item.storage_index
        if numbers is not None and index.index is not None:
            index = replace(index, index=numbers[index.index])
        renamed.append(replace(item, dest_index=replace(item.dest_index, fqn=name), storage_index=index))
    return renamed
