"""Plans of torch's, made once for as long as nothing but values changes; and as columns, for `plan_table`.

torch can cache plans itself, in dictionaries of its classes by the name of the planner's class: two models in one
process share them, and a dtype that changes goes unnoticed (torch 2.13, planner_helpers.py). These are a manager's own,
and all that a plan says is compared.

Several ranks may write one replica, a part each. That is only right where all of them hold the same values, at which
torch never looks: in each save, digests of all values are compared before anything is written, and where they differ,
one rank writes the whole, as in torch.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from dcp_remote.dcp_metadata import flatten_of, kind_of
from dcp_remote.devices import Run, host_views
from dcp_remote.digests import BLOCK_BYTES_MAX, digest
from dcp_remote.empty_dicts import named
from dcp_remote.manifest import TensorKind
from dcp_remote.plan_table import Chunk, Integers, PlanTable, Share, said, small
from dcp_remote.ranges import Box
from dcp_remote.serialization import is_plain
from dcp_remote.text_keys import empty_places

# What makes a planner's plan depend on nothing but the state and its flags, and its tensors those of the state. An
# older torch may not have all of them.
_METHODS = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "resolve_data",
    "lookup_object",
    "transform_object",
    "_dedup_save_plans",
    "_create_global_plan",
)


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part of an item that several ranks hold.

    Attributes:
        whole: The item, as the rank planned it.
        box: Of its chunk.
    """

    whole: WriteItem
    box: Box


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What a rank's plan says, as its `storage_data`, of the items that are parts of others."""

    of: Mapping[MetadataIndex, SharedPart]

    @staticmethod
    def in_plan(plan: SavePlan) -> Mapping[MetadataIndex, SharedPart]:
        """By the index of the item; a planner may have put anything else there."""
        return plan.storage_data.of if isinstance(plan.storage_data, SharedParts) else {}


# Of all values of replicas that a rank writes parts of.
Digests: TypeAlias = Mapping[Chunk, bytes]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a rank would write if it were alone.

    Attributes:
        plan: torch's.
        is_regular: Whether a table says all that it does.
        large: Of the items that are larger than a shard and need not be written whole.
        flags: Of the planner.
    """

    plan: SavePlan
    is_regular: bool = False
    large: frozenset[MetadataIndex] = frozenset()
    flags: tuple[bool, ...] = ()

    @property
    def hints(self) -> list[int | None]:
        """Which torch leaves out where it compares items."""
        return [item.index.index for item in self.plan.items]


@dataclass(slots=True)
class PlanCache:
    """What one rank keeps of the last plan that all agreed on; nothing before.

    Attributes:
        key: The save in which that was; every rank that has it has the plans of that very save.
        proposal: This rank's.
        plan: What came of it.
    """

    key: str | None = None
    proposal: Proposal | None = None
    plan: SavePlan = field(default_factory=lambda: SavePlan([]))

    def key_of(self, proposal: Proposal | None) -> str | None:
        """The save whose plan is right for this, as far as this rank can tell; None if there is none."""
        last = self.proposal
        is_same = proposal is not None and last is not None and proposal == last and proposal.hints == last.hints
        return self.key if is_same else None


def is_torchs(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether it plans just as torch's own does."""
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), name, None) is getattr(DefaultSavePlanner, name, None) for name in _METHODS
    )


def uncached(planner: SavePlanner) -> SavePlanner:
    """The planner, without torch's own cache if it is torch's: its entries may be those of another model."""
    if not is_torchs(planner) or not planner._enable_plan_caching:
        return planner
    planner = copy.copy(planner)
    planner._enable_plan_caching = False
    return planner


def set_up(planner: SavePlanner, state: dict[str, Any], meta: StorageMeta, *, is_coordinator: bool) -> None:
    """Set a planner up for a state; called on every rank. torch's own also notes where the state has empty dicts.

    What a user's planner notes is its own.
    """
    planner.set_up_planner(state, meta, is_coordinator)
    if is_torchs(planner) and planner.flatten_state_dict:
        planner.mappings = named(empty_places(state)) | planner.mappings


def propose(planner: SavePlanner, *, shard_bytes_max: int) -> Proposal:
    """A rank's proposal; called on every rank, once the planner is set up.

    Args:
        planner: torch's or a user's; of a user's, nothing is shared out, as it may give each rank something else.
        shard_bytes_max: Bytes of data in a shard.
    """
    plan = planner.create_local_plan()
    if not is_torchs(planner):
        return Proposal(plan)
    flags = (planner.flatten_state_dict, planner.flatten_sharded_tensors, planner.dedup_save_to_lowest_rank)
    is_regular = _is_regular(plan)
    if planner.dedup_save_to_lowest_rank or not is_regular:
        return Proposal(plan, is_regular, flags=flags)
    large = frozenset(
        item.index
        for item in plan.items
        if _chunk_bytes(item) > shard_bytes_max and _is_divisible(planner.lookup_object(item.index))
    )
    return Proposal(plan, is_regular, large, flags)


def _is_regular(plan: SavePlan) -> bool:
    """Whether each item is a chunk that begins where its index says, or an object; and each another one.

    A tensor of a class with rules of its own may have planned anything.
    """
    return len({item.index for item in plan.items}) == len(plan.items) and all(map(_is_chunk_or_object, plan.items))


def _is_chunk_or_object(item: WriteItem) -> bool:
    data = item.tensor_data
    if item.type == WriteItemType.BYTE_IO or data is None:
        return item.type == WriteItemType.BYTE_IO and data is None and item.index.offset is None
    return item.index.offset == data.chunk.offsets and len(data.chunk.offsets) == len(data.chunk.sizes) == len(
        data.size
    )


def replica_digests(
    plan: SavePlan, planner: SavePlanner, look: Callable[[], object], *, known: Digests = MappingProxyType({})
) -> Digests:
    """Digest all values of every replica of which this rank writes a part; no request.

    Costs 0.05 s of CPU per GiB, without Python's lock. What is on a device is copied to the host, a MiB at a time.

    Args:
        plan: Of this rank, as `plan_of` gave it.
        planner: Resolves its items.
        look: Called before each MiB; raises when the save is over.
        known: Digests of the same values, which are not made again.
    """
    wholes = {chunk_of(part.whole.index): part.whole for part in SharedParts.in_plan(plan).values()}
    return {
        chunk: known[chunk] if chunk in known else _digest(planner.resolve_data(whole), look)
        for chunk, whole in wholes.items()
    }


def _digest(tensor: object, look: Callable[[], object]) -> bytes:
    """The digest of a tensor's bits and of the order of its dimensions in memory.

    Elements are taken as they lie in memory: a transposed matrix is copied for each block otherwise, at 0.2 GiB/s.
    """
    assert isinstance(tensor, torch.Tensor), "large items are tensors"
    strides = [stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    order = sorted(range(tensor.dim()), key=lambda n: -strides[n])
    as_it_lies = tensor.detach().permute(order)
    block = BLOCK_BYTES_MAX // tensor.element_size()
    digests = [repr(order).encode()]
    for start in range(0, tensor.numel(), block):
        look()
        digests.append(digest(host_views([Run(as_it_lies, start, min(start + block, tensor.numel()))])[0]))
    return digest(b"".join(digests))


def differing(digests: Sequence[Digests]) -> frozenset[Chunk]:
    """The replicas that ranks hold with different values; called on the coordinator, with the digests of each rank."""
    seen: dict[Chunk, bytes] = {}
    return frozenset(chunk for one in digests for chunk, value in one.items() if seen.setdefault(chunk, value) != value)


def plan_all(planner: SavePlanner, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Every rank's plan, and what the checkpoint will hold, as the planner has it; called on the coordinator.

    Args:
        planner: The coordinator's; torch's own keeps nothing of it, which at a thousand ranks would be gigabytes.
        plans: Of all ranks, in their order.
    """
    return (copy.copy(planner) if is_torchs(planner) else planner).create_global_plan(list(plans))


def chunk_of(index: MetadataIndex) -> Chunk:
    """What tables know an item by."""
    return index.fqn, tuple(index.offset or ())


def table_of(proposal: Proposal) -> PlanTable:
    """Put a regular proposal into columns.

    Raises:
        InvalidArgumentError: A tensor has a memory format that the format has no word for.
    """
    items = proposal.plan.items
    data = [item.tensor_data for item in items]
    chunks = [one for one in data if one is not None]
    kinds: dict[tuple[TensorKind, int], int] = {}
    known: dict[tuple[object, ...], int] = {}
    kind = []
    for item, one in zip(items, data, strict=True):
        if one is None:
            kind.append(0)
            continue
        properties = one.properties
        key = tuple(vars(properties).values())
        if key not in known:
            made = kind_of(item.index.fqn, properties), properties.dtype.itemsize
            known[key] = kinds.setdefault(made, len(kinds))
        kind.append(known[key])
    return PlanTable(
        said=said([item.index.fqn for item in items], flatten_of(proposal.plan.planner_data)),
        is_object=np.array([one is None for one in data], dtype=bool),
        is_large=np.array([item.index in proposal.large for item in items], dtype=bool),
        kind=small(np.array(kind, dtype=np.int64)),
        dimensions=small(np.array([len(one.size) if one is not None else 0 for one in data], dtype=np.int64)),
        shapes=_flat(one.size for one in chunks),
        offsets=_flat(one.chunk.offsets for one in chunks),
        sizes=_flat(one.chunk.sizes for one in chunks),
        kinds=tuple(kinds),
    )


def _flat(values: Iterable[Iterable[int]]) -> Integers:
    return small(np.fromiter(itertools.chain.from_iterable(values), dtype=np.int64))


def plan_of(proposal: Proposal, share: Share) -> SavePlan:
    """What is left to a rank of what it proposed."""
    parts = {part.item: part.box for part in share.parts}
    items: list[WriteItem] = []
    of: dict[MetadataIndex, SharedPart] = {}
    for number, hint in zip(share.items.tolist(), share.hints.tolist(), strict=True):
        item = proposal.plan.items[number]
        if item.tensor_data is None:
            items.append(item)
            continue
        box = parts.get(number)
        own = item if box is None else _part(item, box)
        index = MetadataIndex(own.index.fqn, own.index.offset, hint)
        # Not by `replace`, which takes three times as long: a state may have a hundred thousand tensors.
        items.append(WriteItem(index, own.type, tensor_data=own.tensor_data))
        if box is not None:
            of[own.index] = SharedPart(item, box.relative_to(item.tensor_data.chunk.offsets))
    return replace(proposal.plan, items=items, storage_data=SharedParts(of))


def _part(item: WriteItem, box: Box) -> WriteItem:
    """What torch plans for a chunk of its own."""
    data = item.tensor_data
    assert data is not None, "of a tensor"
    offsets = torch.Size(box.offsets)
    return WriteItem(
        index=MetadataIndex(item.index.fqn, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, torch.Size(box.sizes)), properties=data.properties, size=data.size
        ),
    )


def _chunk_bytes(item: WriteItem) -> int:
    """Of an item of a tensor; 0 of an object."""
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


def _is_divisible(tensor: object) -> bool:
    """Whether rows of it say all that it is; what is stored as a stream goes in one piece."""
    return isinstance(tensor, torch.Tensor) and is_plain(tensor) and not tensor.is_quantized and not tensor.is_nested
