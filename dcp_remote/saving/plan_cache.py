"""torch's plans, kept for as long as only values change; and converted to columns, for `plan_table`.

torch can cache plans itself, in class attributes keyed by the name of the planner's class: two models in one process
share them, and a changed dtype goes unnoticed (torch 2.13, planner_helpers.py). The cache here belongs to one manager,
and compares everything that a plan says.

A checkpoint holds one rank's values of a replica, which torch never compares with the others'. Here digests of all
values are compared in the first save with a name, before anything is written. Several ranks may each write a part of
one replica; then every save compares its values, and where they have come to differ, one rank writes the whole tensor.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from dcp_remote.common.digests import BLOCK_BYTES_MAX, digest
from dcp_remote.common.geometry import Box
from dcp_remote.common.overrides import inherits_methods
from dcp_remote.format.empty_dicts import to_flatten_items
from dcp_remote.format.manifest import TensorKind
from dcp_remote.saving.dcp_metadata import get_flatten_mapping, to_kind
from dcp_remote.saving.device_copy import Run, host_views
from dcp_remote.saving.plan_table import (
    BUFFER,
    REPLICA,
    VALUE,
    Chunk,
    Integers,
    PlanTable,
    Share,
    pack_names,
    shrink_integers,
)
from dcp_remote.saving.rank_differences import Described
from dcp_remote.serialization.objects import digest_object
from dcp_remote.serialization.state_dict import PER_RANK_KEY, TensorRoles, empty_places
from dcp_remote.serialization.tensors import PLAIN_TYPES, dtype_name, is_plain
from dcp_remote.serialization.torch_tags import lacks_memory

# A planner with all of these methods of torch's makes plans that depend only on the state and its flags, and resolves
# items to the state's own tensors. An older torch may not have all of them.
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
    """Part of a replica that several ranks write.

    Attributes:
        whole: Item of the whole replica, as this rank planned it.
        box: Box of the part, in the replica's chunk.
    """

    whole: WriteItem
    box: Box


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Plan of one rank.

    Attributes:
        plan: torch's plan.
        shared: Items of the plan that are parts of replicas, by index.
    """

    plan: SavePlan
    shared: Mapping[MetadataIndex, SharedPart] = field(default_factory=dict)

    def finish(self, planner: SavePlanner) -> RankPlan:
        """Return the plan as the planner finishes it."""
        return replace(self, plan=planner.finish_plan(self.plan))


# Digest of all values of each replica that a rank writes a part of.
Digests: TypeAlias = Mapping[Chunk, bytes]

# Items of each set that a rank compares with others, in the same order on all ranks; by the number of the set.
ItemSets: TypeAlias = Mapping[int, Sequence[WriteItem]]

# Bytes of the digest of one tensor in the message that lists those of a set.
LISTED_BYTES = 8


@dataclass(frozen=True, slots=True)
class Proposal:
    """Plan of a rank before the ranks agree: all that the rank would write if it were alone.

    Attributes:
        plan: torch's plan.
        is_regular: True if a `PlanTable` can hold the plan.
        large: Items that are larger than a shard and may be written in parts.
        flags: Flags of the planner.
        roles: Roles of the tensors that may differ between ranks: `BUFFER` or `VALUE`.
    """

    plan: SavePlan
    is_regular: bool = False
    large: frozenset[MetadataIndex] = frozenset()
    flags: tuple[bool, ...] = ()
    roles: Mapping[MetadataIndex, int] = field(default_factory=dict)

    @property
    def hints(self) -> list[int | None]:
        """Hint of each item, which the comparison of two `MetadataIndex` leaves out."""
        return [item.index.index for item in self.plan.items]


@dataclass(slots=True)
class PlanCache:
    """Last plan on which all ranks agreed, as one rank keeps it; empty before the first.

    Attributes:
        key: ID of the save in which the ranks agreed. Ranks with equal keys hold plans of the same save.
        proposal: Proposal of this rank in that save.
        plan: Resulting plan of this rank.
    """

    key: str | None = None
    proposal: Proposal | None = None
    plan: RankPlan = field(default_factory=lambda: RankPlan(SavePlan([])))

    def key_of(self, proposal: Proposal | None) -> str | None:
        """Return the key if this rank proposes what it proposed then, else None."""
        last = self.proposal
        is_same = proposal is not None and last is not None and proposal == last and proposal.hints == last.hints
        return self.key if is_same else None


def plans_as_torch(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Return whether a planner plans exactly as torch's `DefaultSavePlanner` does."""
    return inherits_methods(planner, DefaultSavePlanner, _METHODS)


def without_torchs_cache(planner: SavePlanner) -> SavePlanner:
    """Return torch's planner without torch's own cache, which may hold plans of another model; others unchanged."""
    if not plans_as_torch(planner) or not planner._enable_plan_caching:
        return planner
    planner = copy.copy(planner)
    planner._enable_plan_caching = False
    return planner


def set_up(planner: SavePlanner, state: dict[str, Any], meta: StorageMeta, *, is_coordinator: bool) -> None:
    """Set a planner up for a state; called on every rank. With torch's planner, also keep the state's empty dicts.

    The mappings of a user's planner are left as they are.
    """
    planner.set_up_planner(state, meta, is_coordinator)
    if plans_as_torch(planner) and planner.flatten_state_dict:
        planner.mappings = to_flatten_items(empty_places(state)) | planner.mappings


def propose(planner: SavePlanner, *, shard_bytes_max: int, roles: TensorRoles | None = None) -> Proposal:
    """Return a rank's proposal; called on every rank, once the planner is set up.

    Args:
        planner: torch's planner or a user's. Items of a user's planner are never written in parts, since it may resolve
            them differently on each rank.
        shard_bytes_max: Bytes of data in a shard.
        roles: Names of the tensors whose role is known; None if all tensors are replicas.
    """
    plan = planner.create_local_plan()
    if not plans_as_torch(planner):
        return Proposal(plan)
    flags = (planner.flatten_state_dict, planner.flatten_sharded_tensors, planner.dedup_save_to_lowest_rank)
    is_regular = _is_regular(plan)
    found = {item.index: _role_of(item, roles) for item in plan.items if item.tensor_data is not None} if roles else {}
    unequal = {index: role for index, role in found.items() if role != REPLICA}
    if planner.dedup_save_to_lowest_rank or not is_regular:
        return Proposal(plan, is_regular, flags=flags, roles=unequal)
    large = frozenset(
        item.index
        for item in plan.items
        if _chunk_bytes(item) > shard_bytes_max
        and item.index not in unequal
        and _is_divisible(planner.lookup_object(item.index))
    )
    return Proposal(plan, is_regular, large, flags, unequal)


def _role_of(item: WriteItem, roles: TensorRoles) -> int:
    """Return the role of a tensor; a number that belongs to no module and no optimizer, as a loss, is a value."""
    assert item.tensor_data is not None, "objects are values"
    if roles.is_buffer(item.index.fqn):
        return BUFFER
    return REPLICA if item.tensor_data.size or item.index.fqn in roles.trained else VALUE


def _is_regular(plan: SavePlan) -> bool:
    """Return whether all items are different, and each is an object, or a chunk that begins where its index says.

    A tensor subclass that plans itself may produce any other items.
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
    plan: RankPlan,
    planner: SavePlanner,
    check: Callable[[], object],
    *,
    known: Digests = MappingProxyType({}),
    sets: ItemSets = MappingProxyType({}),
) -> Digests:
    """Digest all values of every replica of which this rank writes a part; no request.

    Costs 0.05 s of CPU per GiB, without the GIL. Tensors on a device are copied to the host, a MiB at a time.

    Args:
        plan: Plan of this rank, as `to_rank_plan` returned it.
        planner: Planner that resolves its items.
        check: Called before each MiB; raises when the save is over.
        known: Digests of the same values, which are not computed again.
        sets: Sets that are compared; their tensors are left out here.
    """
    others = {chunk_key(item.index) for items in sets.values() for item in items}
    wholes = {chunk_key(part.whole.index): part.whole for part in plan.shared.values()}
    wholes = {chunk: whole for chunk, whole in wholes.items() if chunk not in others}
    return {
        chunk: known[chunk] if chunk in known else _digest_tensor(planner.resolve_data(whole), check)
        for chunk, whole in wholes.items()
    }


def compared_items(proposal: Proposal, share: Share) -> ItemSets:
    """Return the items of a regular proposal whose values this rank compares with others'."""
    sets: dict[int, list[WriteItem]] = {}
    for number in np.flatnonzero(share.compared).tolist():
        sets.setdefault(int(share.compared[number]), []).append(proposal.plan.items[number])
    return {number: sorted(items, key=lambda item: chunk_key(item.index)) for number, items in sets.items()}


def digest_sets(sets: ItemSets, planner: SavePlanner, check: Callable[[], object]) -> dict[int, bytes]:
    """Return a digest of all values of each set; no request. Costs as `replica_digests`, which has the arguments."""
    return {
        number: digest(b"".join(_digest_tensor(planner.resolve_data(item), check) for item in items))
        for number, items in sets.items()
    }


def list_digests(items: Sequence[WriteItem], planner: SavePlanner, check: Callable[[], object]) -> bytes:
    """Return the digest of each tensor of a set, 8 bytes each, which does not depend on the order in memory."""
    found = (_digest_tensor(planner.resolve_data(item), check, in_index_order=True) for item in items)
    return b"".join(value[:LISTED_BYTES] for value in found)


def _digest_tensor(tensor: object, check: Callable[[], object], *, in_index_order: bool = False) -> bytes:
    """Return the digest of a tensor's bits and of the order of its dimensions in memory.

    Elements are read in memory order, because in index order a transposed matrix would be copied block by block, at
    0.2 GiB/s. Sparse and quantized tensors are copied, and digested as torch saves them. The digest of a tensor of
    another kind, such as a subclass, is a constant: such tensors are not compared.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        return digest(b"")
    if type(tensor) in PLAIN_TYPES and (tensor.layout != torch.strided or tensor.is_quantized):
        own = tensor.detach().cpu().clone()
        stream = io.BytesIO()
        torch.save(own.coalesce() if own.layout == torch.sparse_coo else own, stream)
        return digest(stream.getbuffer())
    if not _is_divisible(tensor) or lacks_memory(tensor):
        return digest(b"")
    strides = [stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    order = sorted(range(tensor.dim()), key=lambda n: -strides[n]) if not in_index_order else list(range(tensor.dim()))
    ordered = tensor.detach().permute(order)
    block = BLOCK_BYTES_MAX // tensor.element_size()
    digests = [repr(order).encode()]
    for start in range(0, tensor.numel(), block):
        check()
        digests.append(digest(host_views([Run(ordered, start, min(start + block, tensor.numel()))])[0]))
    return digest(b"".join(digests))


def find_differing_replicas(digests: Sequence[Digests]) -> frozenset[Chunk]:
    """Return the replicas of which ranks hold different values; coordinator only.

    Args:
        digests: Digests of each rank.
    """
    seen: dict[Chunk, bytes] = {}
    return frozenset(
        chunk for of_rank in digests for chunk, value in of_rank.items() if seen.setdefault(chunk, value) != value
    )


def plan_all(planner: SavePlanner, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Return every rank's plan and the checkpoint's metadata, as the planner decides them; coordinator only.

    Args:
        planner: Planner of the coordinator. torch's own keeps no reference to the result, which at a thousand ranks
            would be gigabytes.
        plans: Plans of all ranks, in their order.
    """
    if plans_as_torch(planner):
        planner = copy.copy(planner)
        # Of buffers, the lowest rank's values are saved, and no column says here what a buffer is.
        planner.dedup_save_to_lowest_rank = True
    own_plans, metadata = planner.create_global_plan(list(plans))
    return move_objects(own_plans, [object_names(plan) for plan in plans]), metadata


def move_objects(plans: Sequence[SavePlan], held: Sequence[Collection[str]]) -> list[SavePlan]:
    """Return final plans in which each object is written by the lowest of the ranks that planned to; coordinator only.

    Args:
        plans: Final plans of all ranks, in their order.
        held: Names of the objects that each rank planned to write.
    """
    lowest: dict[str, int] = {}
    for rank, names in enumerate(held):
        for name in names:
            lowest.setdefault(name, rank)
    items, moved = [list[WriteItem]() for _ in plans], set[int]()
    for rank, plan in enumerate(plans):
        for item in plan.items:
            writer = lowest.get(item.index.fqn, rank) if _is_object(item) else rank
            items[writer].append(item)
            moved |= {rank, writer} if writer != rank else set()
    return [replace(plan, items=items[rank]) if rank in moved else plan for rank, plan in enumerate(plans)]


def are_cached_by_torch(plans: Sequence[SavePlan]) -> bool:
    """Return whether torch's planner keeps final plans for later saves (`enable_plan_caching`); coordinator only."""
    cached = {id(plan) for of_all in getattr(SavePlanner, "_cached_global_plan", {}).values() for plan in of_all}
    return any(id(plan) in cached or not getattr(plan, "usable", True) for plan in plans)


def object_names(plan: SavePlan) -> tuple[str, ...]:
    """Return the names of the objects of a plan."""
    return tuple(item.index.fqn for item in plan.items if _is_object(item))


def _is_object(item: WriteItem) -> bool:
    return item.type == WriteItemType.BYTE_IO


def chunk_key(index: MetadataIndex) -> Chunk:
    """Return the key under which plan tables know an item."""
    return index.fqn, tuple(index.offset or ())


def describe_tensors(plan: SavePlan) -> Described:
    """Return name, dtype and global shape of each tensor of a rank's plan, for `require_equal_tensors`."""
    found = ((item.index.fqn, item.tensor_data) for item in plan.items if item.tensor_data is not None)
    return tuple(dict.fromkeys((name, dtype_name(data.properties.dtype), tuple(data.size)) for name, data in found))


def describe_entries(plan: SavePlan) -> Described:
    """Return what `describe_tensors` returns, and the objects of a rank's plan."""
    return describe_tensors(plan) + tuple((name, "object", ()) for name in object_names(plan))


def digest_objects(proposal: Proposal, planner: SavePlanner) -> NDArray[np.uint32]:
    """Digest the objects and numbers of a regular proposal, 32 bits each, by which ranks compare them; no request.

    Costs 10 µs of CPU per small object, and 0.05 s per GiB of arrays. Objects of single ranks (`PerRank`), and those
    that have no encoding without pickle, get 0: they are not compared.
    """
    assert plans_as_torch(planner), "only torch's planner makes regular proposals"
    paths = planner.mappings if planner.flatten_state_dict else {}

    def digest_value(item: WriteItem) -> int:
        if item.tensor_data is not None:
            return int.from_bytes(_digest_tensor(planner.resolve_data(item), lambda: None)[:4]) or 1
        is_own = paths.get(item.index.fqn, ("",))[0] == PER_RANK_KEY
        return 0 if is_own else digest_object(planner.lookup_object(item.index))

    values = [
        item for item in proposal.plan.items if item.tensor_data is None or proposal.roles.get(item.index) == VALUE
    ]
    return np.array([digest_value(item) for item in values], dtype=np.uint32)


# Digests of a proposal whose objects are not compared.
_NOT_DIGESTED: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)


def to_table(proposal: Proposal, value_digests: NDArray[np.uint32] = _NOT_DIGESTED) -> PlanTable:
    """Convert a regular proposal to columns.

    Args:
        proposal: Regular proposal.
        value_digests: Digests of its objects and numbers (`digest_objects`); empty if these are not compared.

    Raises:
        InvalidArgumentError: A tensor has a memory format that the checkpoint format cannot hold.
    """
    items = proposal.plan.items
    data = [item.tensor_data for item in items]
    chunks = [chunk for chunk in data if chunk is not None]
    kinds: dict[tuple[TensorKind, int], int] = {}
    known: dict[tuple[object, ...], int] = {}
    kind = []
    for item, chunk in zip(items, data, strict=True):
        if chunk is None:
            kind.append(0)
            continue
        properties = chunk.properties
        key = tuple(vars(properties).values())
        if key not in known:
            made = to_kind(item.index.fqn, properties), properties.dtype.itemsize
            known[key] = kinds.setdefault(made, len(kinds))
        kind.append(known[key])
    return PlanTable(
        packed_names=pack_names([item.index.fqn for item in items], get_flatten_mapping(proposal.plan.planner_data)),
        is_object=np.array([chunk is None for chunk in data], dtype=bool),
        is_large=np.array([item.index in proposal.large for item in items], dtype=bool),
        role=np.array(
            [VALUE if item.tensor_data is None else proposal.roles.get(item.index, REPLICA) for item in items],
            dtype=np.uint8,
        ),
        kind=shrink_integers(np.array(kind, dtype=np.int64)),
        dimensions=_flatten([len(chunk.size) if chunk is not None else 0] for chunk in data),
        shapes=_flatten(chunk.size for chunk in chunks),
        offsets=_flatten(chunk.chunk.offsets for chunk in chunks),
        sizes=_flatten(chunk.chunk.sizes for chunk in chunks),
        kinds=tuple(kinds),
        value_digests=value_digests,
    )


def _flatten(values: Iterable[Iterable[int]]) -> Integers:
    return shrink_integers(np.fromiter(itertools.chain.from_iterable(values), dtype=np.int64))


def to_rank_plan(proposal: Proposal, share: Share) -> RankPlan:
    """Return the part of a rank's proposal that the rank writes."""
    parts = {part.item: part.box for part in share.parts}
    items: list[WriteItem] = []
    shared: dict[MetadataIndex, SharedPart] = {}
    for number, hint in zip(share.items.tolist(), share.hints.tolist(), strict=True):
        item = proposal.plan.items[number]
        if item.tensor_data is None:
            items.append(item)
            continue
        box = parts.get(number)
        own = item if box is None else _part_item(item, box)
        index = MetadataIndex(own.index.fqn, own.index.offset, hint)
        # Not by `replace`, which takes three times as long: a state may have a hundred thousand tensors.
        items.append(WriteItem(index, own.type, tensor_data=own.tensor_data))
        if box is not None:
            shared[own.index] = SharedPart(item, box.relative_to(item.tensor_data.chunk.offsets))
    return RankPlan(replace(proposal.plan, items=items), shared)


def _part_item(item: WriteItem, box: Box) -> WriteItem:
    """Return the item that torch would plan for the box if it were a shard."""
    data = item.tensor_data
    assert data is not None, "only tensors are written in parts"
    offsets = torch.Size(box.offsets)
    return WriteItem(
        index=MetadataIndex(item.index.fqn, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, torch.Size(box.sizes)), properties=data.properties, size=data.size
        ),
    )


def _chunk_bytes(item: WriteItem) -> int:
    """Return the bytes of an item's chunk; 0 for an object."""
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


def _is_divisible(tensor: object) -> bool:
    """Return whether rows of a tensor describe it completely; a tensor that is stored as a stream is not divisible."""
    return isinstance(tensor, torch.Tensor) and is_plain(tensor) and not tensor.is_quantized and not tensor.is_nested
