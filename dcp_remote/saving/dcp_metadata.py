"""Conversion of torch's `Metadata` to the contents of a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from dcp_remote.common.arrays import I64
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.manifest import TensorKind, Tensors
from dcp_remote.saving.manifest_assembly import Planned
from dcp_remote.serialization.tensors import MEMORY_FORMATS, dtype_name


def to_columns(dcp_metadata: Metadata) -> Planned:
    """Return torch's plan of a checkpoint as columns. torch may cache `dcp_metadata`: no reference to it is kept."""
    tensors = {n: m for n, m in dcp_metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    objects = {n: p for p, n in enumerate(dcp_metadata.state_dict_metadata) if n not in tensors}
    metas = list(tensors.values())
    kinds: dict[TensorKind, int] = {}
    kind = [kinds.setdefault(to_kind(name, meta.properties), len(kinds)) for name, meta in tensors.items()]
    chunks = [chunk for meta in metas for chunk in meta.chunks]
    columns = Tensors(
        names=tuple(tensors),
        kinds=tuple(kinds),
        kind=np.array(kind, dtype=np.int64),
        dimensions=np.array([len(meta.size) for meta in metas], dtype=np.int64),
        shape=concat_integers(meta.size for meta in metas),
        chunks=np.array([len(meta.chunks) for meta in metas], dtype=np.int64),
        chunk_offsets=concat_integers(chunk.offsets for chunk in chunks),
        chunk_sizes=concat_integers(chunk.sizes for chunk in chunks),
        chunk_pieces=np.zeros(len(chunks), dtype=np.int64),
    )
    return Planned(columns, positions=objects, flatten=get_flatten_mapping(dcp_metadata.planner_data))


def to_kind(tensor: str, properties: TensorProperties) -> TensorKind:
    """Convert the properties of a tensor to names."""
    memory_format = next((name for name, value in MEMORY_FORMATS.items() if value == properties.memory_format), None)
    if memory_format is None:
        raise InvalidArgumentError(
            "A tensor has a memory format that a checkpoint cannot hold. Save it in a known one.",
            tensor=tensor,
            memory_format=properties.memory_format,
            known=", ".join(MEMORY_FORMATS),
        )
    return TensorKind(
        dtype=dtype_name(properties.dtype),
        layout=str(properties.layout).removeprefix("torch."),
        requires_grad=bool(properties.requires_grad),
        memory_format=memory_format,
        pin_memory=bool(properties.pin_memory),
    )


def concat_integers(values: Iterable[Iterable[int]]) -> I64:
    """Return the integers of all sizes or offsets, one after another."""
    return np.fromiter(chain.from_iterable(values), dtype=np.int64)


def get_flatten_mapping(planner_data: object) -> dict[str, tuple[str | int, ...]] | None:
    """Return the mapping of flat names to paths in the nested state dict; None if nothing was flattened."""
    if planner_data is None:
        return None
    if not isinstance(planner_data, Mapping) or not all(
        type(name) is str and isinstance(path, tuple) and all(type(part) in (str, int) for part in path)
        for name, path in planner_data.items()
    ):
        raise InvalidArgumentError(
            "The planner's data is not a flatten mapping (name to a tuple of str and int). A manifest can hold nothing "
            "else without pickle.",
            type=type(planner_data).__name__,
        )
    return dict(planner_data)
