"""`import_checkpoint`: saves a checkpoint of another format to a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_remote.common.geometry import Box
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.loading.load import load
from dcp_remote.manager.manager import CheckpointManager
from dcp_remote.transfer.sources import Source, open_source


def import_checkpoint(
    source: str | os.PathLike[str],
    run_url: str | os.PathLike[str],
    *,
    step: int,
    name: str | None = None,
    is_verified: bool = True,
    source_options: Mapping[str, object] | None = None,
    **settings: Any,
) -> int:
    """Save a checkpoint of another format to a run, in one process; return the step.

    Args:
        source: URL or path of a folder that torch's distributed checkpoint or Hugging Face wrote, or path of a file of
            `torch.save`. Weights of Hugging Face and state dicts are entries below `model`; others keep their names.
        run_url: URL of the run, as for `CheckpointManager`.
        step: Step of the new checkpoint.
        name: Name of the new checkpoint.
        is_verified: True to read both checkpoints once more and compare all bits.
        source_options: Options of the source's store.
        settings: Keyword arguments of `CheckpointManager`, such as `storage_options`, `start_over`, `allow_pickle`.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of a known format.
        UnsafeObjectError: An object needs code to load, and `allow_pickle` is False.
        CorruptCheckpointError: What was saved differs from the source.
    """
    opened = open_source(source, storage_options=source_options, allow_pickle=bool(settings.get("allow_pickle", False)))
    with CheckpointManager(run_url, **settings) as checkpoints:
        planner = _SourcePlanner(opened)
        checkpoints.save(step, opened.state, name=name, planner=planner, wait=True, user={"imported_from": str(source)})
    if is_verified:
        _compare(opened, planner.tensors, str(run_url), step, settings.get("storage_options"))
    return step


class _SourcePlanner(DefaultSavePlanner):
    """Planner whose tensors are read from a source when they are sent."""

    def __init__(self, source: Source) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._source = source
        self.tensors: list[str] = []

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.tensors = [item.index.fqn for item in plan.items if _is_read(item, self.state_dict)]
        items = [part for item in plan.items for part in self._split(item)]
        self.plan = replace(plan, items=items)
        return self.plan

    def _split(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        if data is None or not _is_read(item, self.state_dict):
            return [item]
        boxes = self._source.pieces(item.index.fqn)
        if len(boxes) == 1:
            return [item]
        return [
            WriteItem(
                index=MetadataIndex(item.index.fqn, torch.Size(box.offsets), number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties=data.properties,
                    size=data.size,
                ),
            )
            for number, box in enumerate(boxes)
        ]

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = write_item.tensor_data
        if data is None or not _is_read(write_item, self.state_dict):
            return super().resolve_data(write_item)
        return self._source.read(write_item.index.fqn, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))


def _is_read(item: WriteItem, state: Mapping[str, Any]) -> bool:
    value = state.get(item.index.fqn)
    return isinstance(value, torch.Tensor) and value.is_meta


def _compare(
    source: Source, names: list[str], run_url: str, step: int, storage_options: Mapping[str, object] | None
) -> None:
    """Read each tensor of both checkpoints, and compare all bits."""
    for name in names:
        value: Any = load(run_url, step=step, keys=[name], storage_options=storage_options)
        while isinstance(value, (dict, list)):
            value = next(one for one in (value.values() if isinstance(value, dict) else value) if one is not None)
        for box in source.pieces(name):
            part = value[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
            expected = source.read(name, box)
            if not torch.equal(
                part.contiguous().flatten().view(torch.uint8), expected.contiguous().flatten().view(torch.uint8)
            ):
                raise CorruptCheckpointError("What was saved differs from the source.", url=run_url, tensor=name)
