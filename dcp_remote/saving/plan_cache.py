"""Plans of a manager's ranks, kept for as long as only values change; and converted to columns, for `plan_table`.

A manager plans by itself, with `RunPlanner`; planners of users belong to `RemoteWriter`. torch's own cache of plans is
not used: it is in class attributes, keyed by the name of the planner's class, so that two models in one process share
it, and a changed dtype goes unnoticed (torch 2.13, planner_helpers.py). The cache here belongs to one manager, and
compares everything that a plan says.

A checkpoint holds one rank's values of a replica, which torch never compares with the others'. Here digests of all
values are compared in the first save with a name, before anything is written. Later saves compare none.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dcp_remote.common.arrays import shrink_integers
from dcp_remote.common.digests import BLOCK_BYTES_MAX, digest
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.manifest import TensorKind
from dcp_remote.saving.dcp_metadata import concat_integers, get_flatten_mapping, to_kind
from dcp_remote.saving.device_copy import ElementRange, host_views
from dcp_remote.saving.manifest_assembly import Planned
from dcp_remote.saving.plan_table import BUFFER, REPLICA, VALUE, Chunk, PlanTable, Share, pack_names
from dcp_remote.saving.rank_differences import Described
from dcp_remote.serialization.leaves import FlatState, flatten_state
from dcp_remote.serialization.objects import digest_object
from dcp_remote.serialization.state_dict import PER_RANK_KEY, TensorRoles
from dcp_remote.serialization.tensors import PLAIN_TYPES, dtype_name, is_plain
from dcp_remote.serialization.torch_tags import lacks_memory

# Items of each set that a rank compares with others, in the same order on all ranks; by the number of the set.
ItemSets: TypeAlias = Mapping[int, Sequence[WriteItem]]

# Bytes of the digest of one tensor in the message that lists those of a set.
LISTED_BYTES = 8


@dataclass(frozen=True, slots=True)
class Proposal:
    """Plan of a rank before the ranks agree: all that the rank would write if it were alone.

    Its objects of single ranks (`PerRank`) come last, since nobody else decides on them. `roles` has the role (`BUFFER`
    or `VALUE`) of the tensors that may differ between ranks, by the number of the item.
    """

    plan: SavePlan
    own: int  # objects of this rank alone
    roles: Mapping[int, int] = field(default_factory=dict)

    @property
    def shared(self) -> list[WriteItem]:
        """Items on which the coordinator decides."""
        return self.plan.items[: len(self.plan.items) - self.own]


@dataclass(frozen=True, slots=True)
class PlanCache:
    """Last plan on which all ranks agreed, as one rank keeps it; empty before the first.

    Ranks with equal keys, which are IDs of saves, hold plans of the same save.
    """

    key: str | None = None
    proposal: Proposal | None = None
    plan: SavePlan = field(default_factory=lambda: SavePlan([]))  # of this rank
    planned: Planned | None = None  # contents of the checkpoint; None on other ranks than the coordinator

    def key_of(self, proposal: Proposal) -> str | None:
        """Return the key if this rank proposes what it proposed then, else None."""
        return self.key if proposal == self.proposal else None


class RunPlanner(DefaultSavePlanner):
    """Planner of a manager's saves: torch's own, for a state that is taken apart already."""

    def set_up_planner(self, state_dict: dict[str, Any] | FlatState, *args: Any, **options: Any) -> None:
        """Keep the values of a state, and its paths, among them those of empty dicts; take it apart if it is not."""
        flat = state_dict if isinstance(state_dict, FlatState) else flatten_state(state_dict)
        # torch would visit all values of the flat dict twice more, to take nothing apart.
        self.flatten_state_dict = False
        self.flatten_sharded_tensors = any(isinstance(value, ShardedTensor) for value in flat.values.values())
        super().set_up_planner(flat.values, *args, **options)
        self.flatten_state_dict, self.mappings = True, flat.paths


def propose(planner: RunPlanner, roles: TensorRoles | None = None) -> Proposal:
    """Return a rank's proposal; called on every rank, once the planner is set up. Without `roles`, all are replicas."""
    plan = planner.create_local_plan()
    distinct: dict[object, WriteItem] = {}
    for item in plan.items:
        before = distinct.setdefault(_distinct_key(item), item)
        if before.tensor_data != item.tensor_data:
            raise InvalidArgumentError(
                "A tensor plans parts that overlap. Correct its __create_write_items__, or save its plain parts.",
                tensor=item.index.fqn,
            )
    shared, own = list[WriteItem](), list[WriteItem]()
    for item in distinct.values():  # fewer than items: a tensor subclass may plan a chunk twice
        is_own = item.tensor_data is None and _is_own(planner.mappings[item.index.fqn])
        (own if is_own else shared).append(item)
    plan = replace(plan, items=shared + own)
    found = {n: _role_of(item, roles) for n, item in enumerate(plan.items) if item.tensor_data is not None and roles}
    return Proposal(plan, len(own), {number: role for number, role in found.items() if role != REPLICA})


def _is_own(path: Sequence[str | int]) -> bool:
    return path[0] == PER_RANK_KEY


def _distinct_key(item: WriteItem) -> object:
    """Return a key that no other item of a rank has; a chunk without elements may begin where another chunk does."""
    data = item.tensor_data
    if data is None and item.type == WriteItemType.BYTE_IO:
        return item.index.fqn
    if data is None or not len(data.chunk.offsets) == len(data.chunk.sizes) == len(data.size):
        raise InvalidArgumentError(
            "A tensor plans a part that is no box of the tensor. Correct its __create_write_items__, or save its plain "
            "parts.",
            tensor=item.index.fqn,
        )
    return item.index.fqn, data.chunk.offsets, 0 in data.chunk.sizes


def _role_of(item: WriteItem, roles: TensorRoles) -> int:
    """Return the role of a tensor; a number that belongs to no module and no optimizer, as a loss, is a value."""
    assert item.tensor_data is not None, "objects are values"
    if roles.is_buffer(item.index.fqn):
        return BUFFER
    return REPLICA if item.tensor_data.size or item.index.fqn in roles.trained else VALUE


def compared_items(proposal: Proposal, share: Share) -> ItemSets:
    """Return the items whose values this rank compares with others'."""
    sets: dict[int, list[WriteItem]] = {}
    for number in np.flatnonzero(share.compared).tolist():
        sets.setdefault(int(share.compared[number]), []).append(proposal.plan.items[number])
    return {number: sorted(items, key=chunk_key) for number, items in sets.items()}


def digest_sets(sets: ItemSets, planner: SavePlanner, check: Callable[[], object]) -> dict[int, bytes]:
    """Return a digest of all values of each set; no request.

    Costs 0.05 s of CPU per GiB, without the GIL. Tensors on a device are copied to the host, a MiB at a time, and
    `check`, which raises when the save is over, is called before each.
    """
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
    if not is_plain(tensor) or tensor.is_nested or lacks_memory(tensor):
        return digest(b"")
    strides = [stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    order = sorted(range(tensor.dim()), key=lambda n: -strides[n]) if not in_index_order else list(range(tensor.dim()))
    ordered = tensor.detach().permute(order)
    block = BLOCK_BYTES_MAX // tensor.element_size()
    digests = [repr(order).encode()]
    for start in range(0, tensor.numel(), block):
        check()
        digests.append(digest(host_views([ElementRange(ordered, start, min(start + block, tensor.numel()))])[0]))
    return digest(b"".join(digests))


def chunk_key(item: WriteItem) -> Chunk:
    """Return the key under which plan tables know an item."""
    return item.index.fqn, tuple(item.tensor_data.chunk.offsets) if item.tensor_data is not None else ()


def describe_tensors(plan: SavePlan) -> Described:
    """Return name, dtype and global shape of each tensor of a rank's plan, for `require_equal_tensors`."""
    found = ((item.index.fqn, item.tensor_data) for item in plan.items if item.tensor_data is not None)
    return tuple(dict.fromkeys((name, dtype_name(data.properties.dtype), tuple(data.size)) for name, data in found))


def describe_entries(plan: SavePlan) -> Described:
    """Return what `describe_tensors` returns, and the objects of a rank's plan."""
    objects = (item.index.fqn for item in plan.items if item.tensor_data is None)
    return describe_tensors(plan) + tuple((name, "object", ()) for name in objects)


def digest_objects(proposal: Proposal, planner: RunPlanner) -> NDArray[np.uint32]:
    """Digest the objects and numbers of a proposal, 32 bits each, by which ranks compare them; no request.

    Costs 10 µs of CPU per small object, and 0.05 s per GiB of arrays. Objects that have no encoding without pickle get
    0: they are not compared. Those of single ranks are left out.
    """

    def digest_value(item: WriteItem) -> int:
        if item.tensor_data is not None:
            return int.from_bytes(_digest_tensor(planner.resolve_data(item), lambda: None)[:4]) or 1
        return digest_object(planner.lookup_object(item.index))

    values = [
        item
        for number, item in enumerate(proposal.shared)
        if item.tensor_data is None or proposal.roles.get(number) == VALUE
    ]
    return np.array([digest_value(item) for item in values], dtype=np.uint32)


def to_table(proposal: Proposal, value_digests: NDArray[np.uint32] | None = None) -> PlanTable:
    """Convert a proposal to columns; with the digests of its objects and numbers, if these are compared."""
    items, paths = proposal.shared, get_flatten_mapping(proposal.plan.planner_data) or {}
    names = [item.index.fqn for item in items]
    # Objects and empty dicts of this rank alone.
    own = {name: paths[name] for name in paths.keys() - set(names) if _is_own(paths[name])}
    objects = {item.index.fqn for item in proposal.plan.items[len(items) :]}
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
        packed_names=pack_names(names, {name: path for name, path in paths.items() if name not in own}),
        is_object=np.array([chunk is None for chunk in data], dtype=bool),
        role=np.array(
            [VALUE if chunk is None else proposal.roles.get(number, REPLICA) for number, chunk in enumerate(data)],
            dtype=np.uint8,
        ),
        kind=shrink_integers(np.array(kind, dtype=np.int64)),
        dimensions=shrink_integers(concat_integers([len(chunk.size) if chunk is not None else 0] for chunk in data)),
        shapes=shrink_integers(concat_integers(chunk.size for chunk in chunks)),
        offsets=shrink_integers(concat_integers(chunk.chunk.offsets for chunk in chunks)),
        sizes=shrink_integers(concat_integers(chunk.chunk.sizes for chunk in chunks)),
        kinds=tuple(kinds),
        value_digests=np.zeros(0, dtype=np.uint32) if value_digests is None else value_digests,
        own={name: (path, name in objects) for name, path in sorted(own.items())},
    )


def to_rank_plan(proposal: Proposal, share: Share) -> SavePlan:
    """Return the part of a rank's proposal that the rank writes.

    Plan and items are copied with all their fields and classes, whatever a newer torch or a tensor subclass adds.
    """
    items: list[WriteItem] = []
    for number, hint in zip(share.items.tolist(), share.hints.tolist(), strict=True):
        item = proposal.plan.items[number]
        items.append(item if item.tensor_data is None else replace(item, index=replace(item.index, index=hint)))
    return replace(proposal.plan, items=items + proposal.plan.items[len(proposal.shared) :])


def chunk_bytes(item: WriteItem) -> int:
    """Return the bytes of an item's chunk; 0 for an object."""
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


def planned_boxes(plan: SavePlan) -> dict[str, list[tuple[Sequence[int], Sequence[int]]]]:
    """Return the offsets and sizes of the chunks that a plan writes, by the name of the tensor."""
    boxes: dict[str, list[tuple[Sequence[int], Sequence[int]]]] = {}
    for item in plan.items:
        if item.tensor_data is not None:
            chunk = item.tensor_data.chunk
            boxes.setdefault(item.index.fqn, []).append((chunk.offsets, chunk.sizes))
    return boxes
