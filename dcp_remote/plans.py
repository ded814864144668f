"""Who writes what: torch's plans, made once for as long as nothing but values changes, and large replicas shared out.

torch can cache plans itself, in dictionaries of its classes by the name of the planner's class: two models in one
process share them, and a dtype that changes goes unnoticed (torch 2.13, planner_helpers.py). These are a manager's own,
and all that a plan says is compared.

torch also has a tensor that all ranks hold written by one of them. A large one is cut here before torch plans, and each
holder writes a part. In the checkpoint it looks as if it had been sharded. That is only right where all hold the same
values, at which torch never looks: a sample of them is compared in each save, and where it differs, one rank writes the
whole, as in torch.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from dcp_remote.digests import digest
from dcp_remote.ranges import Box
from dcp_remote.serialization import byte_view, is_plain

logger = logging.getLogger(__name__)

# Of a shard: a part is no smaller, or its request would cost more than its bytes.
_PART_SHARE_MIN = 0.25

# Of a large tensor: replicas that differ at all mostly differ everywhere.
_SAMPLED_VALUES = 4096

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


Samples: TypeAlias = Mapping[MetadataIndex, bytes]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a rank would write if it were alone.

    Attributes:
        plan: torch's.
        large: Of the items that are larger than a shard and need not be written whole.
        flags: Of the planner.
        samples: Of the values of what is large, a digest; it changes with every save.
    """

    plan: SavePlan
    large: frozenset[MetadataIndex] = frozenset()
    flags: tuple[bool, ...] = ()
    samples: Samples = field(default_factory=dict, compare=False)

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
    if planner.dedup_save_to_lowest_rank:
        return Proposal(plan, flags=flags)
    tensors = {
        item.index: planner.lookup_object(item.index) for item in plan.items if _chunk_bytes(item) > shard_bytes_max
    }
    samples = {
        index: sample
        for index, tensor in tensors.items()
        if _is_divisible(tensor) and (sample := _sample(tensor)) is not None
    }
    return Proposal(plan, frozenset(samples), flags, samples)


def _sample(tensor: torch.Tensor) -> bytes | None:
    """A digest of some thousand values, spread over all of them; None of a dtype that torch cannot pick them from."""
    with torch.no_grad():
        places = torch.linspace(0, tensor.numel() - 1, _SAMPLED_VALUES, dtype=torch.float64).long()
        where = tuple(one.to(tensor.device) for one in torch.unravel_index(places, tensor.shape))
        try:
            values = tensor.detach()[where].resolve_conj().resolve_neg().cpu()
        except (NotImplementedError, RuntimeError):
            return None
    return digest(byte_view(values))


def differing(samples: Sequence[Samples]) -> frozenset[MetadataIndex]:
    """What ranks hold different values of; called on the coordinator, with what each rank has."""
    seen: dict[MetadataIndex, bytes] = {}
    found: set[MetadataIndex] = set()
    for one in samples:
        for index, value in one.items():
            if seen.setdefault(index, value) != value:
                found.add(index)
    return frozenset(found)


def shared_in(plans: Sequence[SavePlan]) -> frozenset[MetadataIndex]:
    """The items that ranks write parts of."""
    return frozenset(part.whole.index for plan in plans for part in SharedParts.in_plan(plan).values())


def plan_all(
    planner: SavePlanner, proposals: Sequence[Proposal], *, shard_bytes_max: int
) -> tuple[list[SavePlan], Metadata]:
    """Every rank's plan, and what the checkpoint will hold; called on the coordinator.

    Args:
        planner: The coordinator's; torch's own keeps nothing of it, which at a thousand ranks would be gigabytes.
        proposals: Of all ranks, in their order.
        shard_bytes_max: Bytes of data in a shard.
    """
    plans = shared_out(proposals, shard_bytes_max=shard_bytes_max)
    return (copy.copy(planner) if is_torchs(planner) else planner).create_global_plan(plans)


def shared_out(proposals: Sequence[Proposal], *, shard_bytes_max: int) -> list[SavePlan]:
    """The ranks' plans, with what several of them hold and is larger than a shard cut up among them.

    Such an item is cut along its first dimension into rows for as many of its holders as get a quarter of a shard; of
    more holders, those that have the least so far. An item of which holders plan something different, or have other
    values, is left to torch.

    Args:
        proposals: Of all ranks, in their order.
        shard_bytes_max: Bytes of data in a shard.
    """
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, proposal in enumerate(proposals):
        for index in proposal.large:
            holders.setdefault(index, []).append(rank)
    items = _items_of([one.plan for one in proposals], {index for index, ranks in holders.items() if len(ranks) > 1})
    filled = [0] * len(proposals)
    parts: list[dict[MetadataIndex, WriteItem]] = [{} for _ in proposals]
    gone: set[MetadataIndex] = set()
    unlike = differing([one.samples for one in proposals])
    for index in unlike:
        logger.warning(
            "Ranks hold different values of a tensor that each has whole; one rank's are saved. tensor=%s", index.fqn
        )
    for index, found in items.items():
        if index in unlike:
            continue
        ranks, item = [rank for rank, _ in found], found[0][1]
        if ranks != holders[index] or any(other.tensor_data != item.tensor_data for _, other in found):
            continue
        boxes = _cut(item, min(len(ranks), int(_chunk_bytes(item) / (_PART_SHARE_MIN * shard_bytes_max))))
        if len(boxes) < 2:  # noqa: PLR2004  # one is the whole
            continue
        gone.add(index)
        writers = sorted(sorted(ranks, key=filled.__getitem__)[: len(boxes)])
        for rank, box in zip(writers, boxes, strict=True):
            part = _part(item, box)
            filled[rank] += _chunk_bytes(part)
            parts[rank][index] = part
    if not gone:
        return [proposal.plan for proposal in proposals]
    return [_with_parts(one.plan, own, gone) for one, own in zip(proposals, parts, strict=True)]


def _items_of(
    plans: Sequence[SavePlan], wanted: set[MetadataIndex]
) -> dict[MetadataIndex, list[tuple[int, WriteItem]]]:
    """Who plans what of some items, large there or not; in the order of the plans."""
    found: dict[MetadataIndex, list[tuple[int, WriteItem]]] = {}
    names = {index.fqn for index in wanted}
    for rank, plan in enumerate(plans):
        for item in plan.items if names else ():
            if item.index.fqn in names and item.index in wanted:
                found.setdefault(item.index, []).append((rank, item))
    return found


def _with_parts(plan: SavePlan, own: Mapping[MetadataIndex, WriteItem], gone: set[MetadataIndex]) -> SavePlan:
    items: list[WriteItem] = []
    of: dict[MetadataIndex, SharedPart] = {}
    for item in plan.items:
        if item.index not in gone:
            items.append(item)
        elif (part := own.get(item.index)) is not None:
            items.append(part)
            of[part.index] = SharedPart(item, _box_within(item, part))
    return replace(plan, items=items, storage_data=SharedParts(of))


def _cut(item: WriteItem, count: int) -> list[Box]:
    """Boxes of an item's chunk, of nearly equal size, along the first dimension that can be cut: each is one run."""
    sizes = _chunk(item).sizes
    dimension = next((n for n, size in enumerate(sizes) if size > 1), None)
    if dimension is None:
        return []
    count = min(count, sizes[dimension])
    bounds = [sizes[dimension] * k // count for k in range(count + 1)] if count else []
    return [
        Box(
            tuple(start if n == dimension else 0 for n in range(len(sizes))),
            tuple(stop - start if n == dimension else size for n, size in enumerate(sizes)),
        )
        for start, stop in itertools.pairwise(bounds)
    ]


def _part(item: WriteItem, box: Box) -> WriteItem:
    """What torch plans for a chunk of its own."""
    chunk, data = _chunk(item), item.tensor_data
    assert data is not None
    offsets = torch.Size(a + b for a, b in zip(chunk.offsets, box.offsets, strict=True))
    return WriteItem(
        index=MetadataIndex(item.index.fqn, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, torch.Size(box.sizes)), properties=data.properties, size=data.size
        ),
    )


def _box_within(item: WriteItem, part: WriteItem) -> Box:
    whole, chunk = _chunk(item), _chunk(part)
    return Box(tuple(chunk.offsets), tuple(chunk.sizes)).relative_to(whole.offsets)


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None, "of a tensor"
    return item.tensor_data.chunk


def _chunk_bytes(item: WriteItem) -> int:
    """Of an item of a tensor; 0 of an object."""
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


def _is_divisible(tensor: object) -> bool:
    """Whether rows of it say all that it is; what is stored as a stream goes in one piece."""
    return isinstance(tensor, torch.Tensor) and is_plain(tensor) and not tensor.is_quantized and not tensor.is_nested
