"""Conversion of a manifest into torch's `Metadata`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_remote.errors import UnsupportedFormatError
from dcp_remote.format.manifest import Manifest, TensorKind
from dcp_remote.loading.chunk_list import ChunkCache, ChunkList
from dcp_remote.loading.selection import Selection
from dcp_remote.serialization.tensors import parse_dtype

# Version that torch's own writers give (CURRENT_DCP_VERSION in filesystem.py of torch 2.13).
_DCP_METADATA_VERSION = "1.0.0"

# Layouts by name. `getattr(torch, name)` would import modules for some names.
_LAYOUTS = {
    str(layout).removeprefix("torch."): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)
}
_MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}


@dataclass
class SourceMeta(StorageMeta):
    """torch's `StorageMeta` with what `RemoteLoadPlanner` needs to know of a checkpoint.

    Attributes:
        step: Step of the checkpoint; None outside a run.
        thinned: Top-level keys that retention deleted.
        rank: This rank, whose `PerRank` values may be loaded; None if the state cannot hold any.
        selection: Options of the planner that was set up with this metadata; None before, and with another planner.
    """

    step: int | None = None
    thinned: tuple[str, ...] = ()
    rank: int | None = None
    selection: Selection | None = None


def to_dcp_metadata(manifest: Manifest) -> Metadata:
    """Return the `Metadata` that was saved, without `storage_data`: the reader finds bytes by the manifest.

    Builds no object per chunk: `ChunkList` builds those of one tensor at a time, on access.

    Raises:
        UnsupportedFormatError: A tensor has a layout or memory format that this torch does not know.
    """
    tensors = manifest.tensors
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    properties, cache = [_properties(kind) for kind in tensors.kinds], ChunkCache()
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
    memory_format = _MEMORY_FORMATS.get(kind.memory_format)
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
