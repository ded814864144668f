"""torch's `Metadata` and our manifest: one into the other.

torch plans with `Metadata` (torch/distributed/checkpoint/metadata.py); the coordinator turns it and the ranks' reports
into a manifest, and a reader turns the manifest back. Nothing of torch's is changed: it may be cached (plan caching).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_remote.assembly import Planned
from dcp_remote.chunk_list import ChunkList, Shelf
from dcp_remote.errors import InvalidArgumentError, UnsupportedFormatError
from dcp_remote.manifest import Manifest, TensorKind
from dcp_remote.ranges import I64
from dcp_remote.serialization import dtype_name, dtype_of

# As torch's own writers say (CURRENT_DCP_VERSION in filesystem.py of torch 2.13).
_DCP_METADATA_VERSION = "1.0.0"

# Looked up here and not in torch, which imports some of what it is asked for by name.
_LAYOUTS = {
    str(layout).removeprefix("torch."): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)
}
_MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}


def to_dcp_metadata(manifest: Manifest) -> Metadata:
    """The `Metadata` that was saved, without `storage_data`: where bytes are is the reader's own business.

    Makes no object per chunk, but a sequence that makes them of one tensor at a time (`ChunkList`).

    Raises:
        UnsupportedFormatError: A tensor has a layout or memory format that this torch does not know.
    """
    tensors = manifest.tensors
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    properties, shelf = [_properties(kind) for kind in tensors.kinds], Shelf()
    for name in manifest.names():
        number = tensors.index.get(name)
        if number is None:
            entries[name] = BytesStorageMetadata()
            continue
        offsets, sizes = tensors.boxes_of(number)
        entries[name] = TensorStorageMetadata(
            properties=properties[int(tensors.kind[number])],
            size=torch.Size(tensors.shape_of(number)),
            chunks=ChunkList(offsets, sizes, shelf),  # type: ignore[arg-type]  # torch asks for no more than a sequence
        )
    return Metadata(
        state_dict_metadata=entries, planner_data=_planner_data(manifest.flatten), version=_DCP_METADATA_VERSION
    )


def _planner_data(flatten: Mapping[str, tuple[str | int, ...]] | None) -> object:
    return None if flatten is None else dict(flatten)


def _properties(kind: TensorKind) -> TensorProperties:
    layout = _LAYOUTS.get(kind.layout)
    memory_format = _MEMORY_FORMATS.get(kind.memory_format)
    if layout is None or memory_format is None:
        # The manifest's digest was right: a newer torch, or a newer version of ours, has more of them.
        raise UnsupportedFormatError(
            "A tensor has a layout or memory format that is unknown here; load it with a newer torch or dcp_remote.",
            layout=kind.layout[:100],
            memory_format=kind.memory_format[:100],
        )
    return TensorProperties(
        dtype=dtype_of(kind.dtype),
        layout=layout,
        requires_grad=kind.requires_grad,
        memory_format=memory_format,
        pin_memory=kind.pin_memory,
    )


def planned_of(dcp_metadata: Metadata) -> Planned:
    """What torch planned, as columns; it is not changed, and no reference to it is kept: torch may have cached it.

    Raises:
        InvalidArgumentError: The planner's own data is not a flatten mapping and cannot be stored safely; or a
            tensor has a memory format that the format has no word for.
    """
    tensors = {n: m for n, m in dcp_metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    objects = {n: p for p, n in enumerate(dcp_metadata.state_dict_metadata) if n not in tensors}
    metas = list(tensors.values())
    return Planned(
        names=tuple(tensors),
        kinds=tuple(kind_of(name, meta.properties) for name, meta in tensors.items()),
        dimensions=np.array([len(meta.size) for meta in metas], dtype=np.int64),
        shape=_flat(meta.size for meta in metas),
        chunks=np.array([len(meta.chunks) for meta in metas], dtype=np.int64),
        chunk_offsets=_flat(chunk.offsets for meta in metas for chunk in meta.chunks),
        chunk_sizes=_flat(chunk.sizes for meta in metas for chunk in meta.chunks),
        objects=tuple(objects),
        positions=objects,
        flatten=flatten_of(dcp_metadata.planner_data),
    )


def kind_of(tensor: str, properties: TensorProperties) -> TensorKind:
    """A tensor's properties by name.

    Args:
        tensor: For the error.
        properties: Its own.

    Raises:
        InvalidArgumentError: It has a memory format that the format has no word for.
    """
    memory_format = next((name for name, value in _MEMORY_FORMATS.items() if value == properties.memory_format), None)
    if memory_format is None:
        raise InvalidArgumentError(
            "A tensor has a memory format that a checkpoint cannot hold.",
            tensor=tensor,
            memory_format=properties.memory_format,
            known=", ".join(_MEMORY_FORMATS),
        )
    return TensorKind(
        dtype=dtype_name(properties.dtype),
        layout=str(properties.layout).removeprefix("torch."),
        requires_grad=bool(properties.requires_grad),
        memory_format=memory_format,
        pin_memory=bool(properties.pin_memory),
    )


def _flat(values: Iterable[Iterable[int]]) -> I64:
    return np.fromiter(chain.from_iterable(values), dtype=np.int64)


def flatten_of(planner_data: object) -> dict[str, tuple[str | int, ...]] | None:
    """The mapping of flat names to places in a nested state dict; None if nothing was flattened.

    Raises:
        InvalidArgumentError: The planner's own data is none, and cannot be stored safely.
    """
    if planner_data is None:
        return None
    if not isinstance(planner_data, Mapping) or not all(
        type(name) is str and isinstance(path, tuple) and all(type(part) in (str, int) for part in path)
        for name, path in planner_data.items()
    ):
        raise InvalidArgumentError(
            "The planner's data is not a flatten mapping (name to a tuple of str and int), which is all that a "
            "manifest can hold without pickle.",
            type=type(planner_data).__name__,
        )
    return dict(planner_data)
