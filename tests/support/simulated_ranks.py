"""Many ranks in one process: torch's save and load, with the collectives replaced by lists.

Makes the calls of `dcp.save` and `dcp.load` on each rank, in their order (state_dict_saver.py and state_dict_loader.py
of torch 2.13), once per rank. A test of any world size takes milliseconds, and needs no process group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

State: TypeAlias = dict[str, Any]
Chunk: TypeAlias = tuple[tuple[int, ...], torch.Tensor]


class LocalShards(torch.Tensor):
    """Chunks of one rank of a sharded tensor, as torch's planners take them, without a device mesh or process group.

    A tensor only by type, because torch's planners ask for one; follows the protocol
    `torch.distributed._checkpointable._Checkpointable`.
    """

    chunks: tuple[Chunk, ...]

    @staticmethod
    def __new__(cls: type[Self], shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[Chunk]) -> Self:
        """Make a tensor of this shape and dtype that holds nothing but `chunks`."""
        tensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        tensor.chunks = tuple(chunks)
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub declares it without `cls`
        cls, func: object, _types: object, _args: tuple[object, ...] = (), _kwargs: object = None
    ) -> object:
        """Raise: no operation is defined."""
        raise NotImplementedError(f"{func} of a LocalShards")

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        """Return one write item per chunk."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets), number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), chunk.shape),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.size(),
                ),
            )
            for number, (offsets, chunk) in enumerate(self.chunks)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), chunk.shape) for offsets, chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the chunk at an offset."""
        return next(chunk for offsets, chunk in self.chunks if torch.Size(offsets) == index.offset)


def grid(shape: Sequence[int], parts: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offsets and sizes of a tensor cut into `parts[d]` chunks along each dimension, as `torch.chunk` cuts it.

    The last chunks may be short or empty, as with an uneven `Shard` placement.
    """
    cuts = []
    for size, count in zip(shape, parts, strict=True):
        step = -(-size // count)
        cuts.append([(min(i * step, size), min((i + 1) * step, size)) for i in range(count)])
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*cuts)]


def shard(tensor: torch.Tensor, world_size: int, parts: Sequence[int]) -> list[LocalShards]:
    """Deal a tensor's grid of chunks to the ranks in turn: a rank may get none, or several."""
    cells = grid(tensor.shape, parts)
    return [
        LocalShards(
            tensor.shape,
            tensor.dtype,
            tuple(
                (offsets, tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))])
                for offsets, sizes in cells[rank::world_size]
            ),
        )
        for rank in range(world_size)
    ]


def save_as_ranks(
    states: Sequence[State],
    make_writer: Callable[[], StorageWriter],
    make_planner: Callable[[], SavePlanner] = DefaultSavePlanner,
) -> Metadata:
    """Save one state per rank, as `dcp.save` does; errors are raised as they are, not wrapped."""
    ranks = range(len(states))
    writers = [make_writer() for _ in ranks]
    planners = [make_planner() for _ in ranks]
    plans: list[SavePlan] = []
    for rank, state, writer, planner in zip(ranks, states, writers, planners, strict=True):
        planner.set_up_planner(dict(state), writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results: list[list[WriteResult]] = []
    for writer, planner, plan in zip(writers, planners, plans, strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writers[0].finish(metadata, results)
    return metadata


def load_as_ranks(
    states: Sequence[State],
    make_reader: Callable[[], StorageReader],
    make_planner: Callable[[], LoadPlanner] = DefaultLoadPlanner,
) -> None:
    """Load into one template per rank, as `dcp.load` does; errors are raised as they are, not wrapped."""
    ranks = range(len(states))
    readers = [make_reader() for _ in ranks]
    planners = [make_planner() for _ in ranks]
    plans = []
    for rank, state, reader, planner in zip(ranks, states, readers, planners, strict=True):
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0, rank=rank, use_collectives=True)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    plans = planners[0].create_global_plan(plans)
    plans = readers[0].prepare_global_plan(plans)
    for reader, planner, plan in zip(readers, planners, plans, strict=True):
        reader.read_data(planner.finish_plan(plan), planner).wait()


def assembled(states: Sequence[Mapping[str, Any]], name: str) -> torch.Tensor:
    """Return the whole sharded tensor, from all ranks' chunks."""
    first: LocalShards = states[0][name]
    whole = torch.zeros(first.shape, dtype=first.dtype)
    for state in states:
        for offsets, chunk in state[name].chunks:
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, chunk.shape, strict=True))] = chunk
    return whole
