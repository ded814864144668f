"""Layout of DeepSpeed's optimizers: which part of which parameter lies where in the flat partitions of this rank.

| stage | optimizer of DeepSpeed | partition of a rank |
|---|---|---|
| 0, 16-bit | `FP16_Optimizer`, `FP16_UnfusedOptimizer` | whole master copies, the same on all ranks |
| 1, 2 | `DeepSpeedZeroOptimizer`, `BF16_Optimizer` | an equal part of the flattened parameters of each group |
| 3 | `DeepSpeedZeroOptimizer_Stage3` | an equal part of each parameter, padded, one sub-group after another |

Stage 0 in fp32 has no copies: there the optimizer's parameters are those of the module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from dcp_remote import LocalBoxes
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.integrations.wrappers import canonical
from dcp_remote.integrations.zero_nvme import SwappedPartition, flush_shard, map_shard, swapped_partition


@dataclass(frozen=True, slots=True)
class Fragment:
    """Part of a parameter in a partition.

    Attributes:
        name: Canonical name of the parameter; the first one of a tied parameter.
        parameter: Parameter of the module.
        shape: Shape of the whole parameter.
        start: Number of the part's first element in the flattened parameter.
        offset: Number of the part's first element in the partition.
        elements: Number of elements; 0 if this rank has no part of the parameter.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    start: int
    offset: int
    elements: int

    def boxes_in(self, flat: torch.Tensor) -> LocalBoxes:
        """Return the part in a tensor of the partition's layout, as a view of that tensor."""
        return LocalBoxes.from_flat(self.shape, self.start, self.view_in(flat))

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements of the part in a tensor of the partition's layout, as a view of that tensor."""
        return flat.view(-1)[self.offset : self.offset + self.elements]


@dataclass(frozen=True, slots=True)
class Partition:
    """Master copies in one tensor, under which the base optimizer keeps its state.

    Attributes:
        masters: Master copies; shape [elements], or that of a parameter; empty while the partition is on NVMe.
        group: Number of the group of the base optimizer.
        fragments: Parts in the partition, with those of no elements: one of each parameter of the group or sub-group.
        swapped: Files of the partition on NVMe; None for a partition in memory.
    """

    masters: torch.Tensor
    group: int
    fragments: tuple[Fragment, ...]
    swapped: SwappedPartition | None = None

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of the masters or a state: the tensor's own memory, or its file on NVMe, mapped."""
        return tensor.detach() if self.swapped is None else self.swapped.values_of(tensor)

    def in_memory(self) -> AbstractContextManager[None]:
        """Return a context in which the partition is in memory; at its end, DeepSpeed writes it back to NVMe."""
        return nullcontext() if self.swapped is None else self.swapped.in_memory()


@dataclass(frozen=True)
class Layout:
    """Layout of an engine's optimizer, read anew for each save and restore.

    Attributes:
        optimizer: Base optimizer, whose state has the partitions' `masters` as keys.
        partitions: Partitions of this rank.
        frozen: Shards of parameters without a master copy in ZeRO-3, by name.
        refresh: Function that copies the masters into the parameters of the module; a collective of torch in ZeRO.
        owner: Optimizer of DeepSpeed that links parameters to their states; None if there are no links.
    """

    optimizer: Any
    partitions: tuple[Partition, ...]
    frozen: dict[str, LocalBoxes]
    refresh: Callable[[], None]
    owner: Any = None

    def masters(self) -> Iterator[tuple[Fragment, LocalBoxes]]:
        """Yield the parts with their master copies."""
        for partition in self.partitions:
            for fragment in partition.fragments:
                yield fragment, fragment.boxes_in(partition.values_of(partition.masters))

    def forget_state(self, partition: Partition) -> None:
        """Take the state of a partition from the optimizer, which is then as before its first step."""
        if self.optimizer.state.pop(partition.masters, None) is None:
            return
        if partition.swapped is not None:
            partition.swapped.forget_states()
        if hasattr(self.owner, "_hp_optimizer_states_linked"):
            self.owner._hp_optimizer_states_linked = False  # the next step links the parameters to their new states

    def flush(self) -> None:
        """Write changes of mapped files to NVMe, since DeepSpeed reads past the page cache."""
        for partition in self.partitions:
            if partition.swapped is not None:
                partition.swapped.flush()


def names_of(module: nn.Module) -> dict[int, list[str]]:
    """Return the canonical names of each parameter by its `id`: several if it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical(name))
    return names


def has_layout(engine: Any) -> bool:
    """Return whether the engine's optimizer keeps master copies or partitions, which a plain optimizer does not."""
    return engine.optimizer is not None and not isinstance(engine.optimizer, torch.optim.Optimizer)


def read_layout(engine: Any) -> Layout:
    """Return the layout of an engine's optimizer; copies nothing and calls no collective.

    Raises:
        InvalidArgumentError: The optimizer is of a class that is not known here, or is one of two (`ratio` below 1).
    """
    optimizer, names = engine.optimizer, names_of(engine.module)
    kind = type(optimizer)
    if kind is DeepSpeedZeroOptimizer_Stage3:
        if getattr(optimizer, "partial_offload", 1.0) < 1.0:
            raise InvalidArgumentError(
                "Partial offload, whose states are in two optimizers, is not supported. Set offload_optimizer.ratio "
                "to 1.",
                ratio=optimizer.partial_offload,
            )
        return _read_stage3(engine.module, optimizer, names)
    if kind is DeepSpeedZeRoOffload:
        parameters = list(engine.module.parameters())
        return Layout(None, (), _shards(parameters, names), lambda: _refresh_shards(optimizer, parameters))
    if kind in {DeepSpeedZeroOptimizer, BF16_Optimizer}:
        partitions = _read_flat_groups(optimizer, names)
        return Layout(optimizer.optimizer, partitions, {}, lambda: _refresh_flat(optimizer), optimizer)
    if kind in {FP16_Optimizer, FP16_UnfusedOptimizer}:
        partitions = _read_whole_groups(optimizer, names)
        return Layout(optimizer.optimizer, partitions, {}, lambda: _refresh_whole(partitions))
    raise InvalidArgumentError(
        "The layout of this optimizer of DeepSpeed is not known: ZeRO stages 0 to 3 and offload are supported; MiCS, "
        "ZenFlow and SuperOffload are not. Save to a local folder with DeepSpeed's own checkpoints.",
        optimizer=f"{kind.__module__}.{kind.__qualname__}",
    )


def _read_stage3(module: nn.Module, optimizer: Any, names: dict[int, list[str]]) -> Layout:
    partitions = []
    for number, (parameters, flat) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        offset, fragments = 0, []
        for parameter in parameters:
            start, elements, padded = _shard_range(parameter)
            fragments.append(_fragment(parameter, names, start, offset, elements))
            offset += padded
        group = optimizer.sub_group_to_group_id[number]
        partitions.append(Partition(flat, group, tuple(fragments), swapped_partition(optimizer, number)))
    trained = {id(parameter) for parameters in optimizer.fp16_groups for parameter in parameters}
    frozen = [parameter for parameter in module.parameters() if id(parameter) not in trained]
    return Layout(
        optimizer.optimizer,
        tuple(partitions),
        _shards(frozen, names),
        lambda: _refresh_stage3(optimizer, partitions, frozen),
    )


def _shard_range(parameter: Any) -> tuple[int, int, int]:
    """Return the first element of this rank's shard of a parameter of ZeRO-3, its elements, and those with padding."""
    padded = parameter.partition_numel()
    rank = dist.get_rank(parameter.ds_process_group)
    start = min(rank * padded, parameter.ds_numel)
    return start, min(padded, parameter.ds_numel - start), padded


def _shards(parameters: Iterable[Any], names: dict[int, list[str]]) -> dict[str, LocalBoxes]:
    """Return the shards of parameters of ZeRO-3, under all their names, as views of DeepSpeed's memory or files."""
    shards = {}
    for parameter in parameters:
        start, elements, _ = _shard_range(parameter)
        shard = map_shard(parameter)
        if not shard.is_floating_point() or shard.numel() < elements:
            raise InvalidArgumentError(
                "This shard of a frozen parameter is quantized, which is not supported.",
                parameter=_name(parameter, names),
                dtype=str(shard.dtype),
            )
        boxes = LocalBoxes.from_flat(tuple(parameter.ds_shape), start, shard.detach().view(-1)[:elements])
        shards.update(dict.fromkeys(names[id(parameter)], boxes))
    return shards


def _read_flat_groups(optimizer: Any, names: dict[int, list[str]]) -> tuple[Partition, ...]:
    """Return the partitions of ZeRO-1 and 2: each rank has an equal range of the flattened group."""
    is_bf16 = isinstance(optimizer, BF16_Optimizer)
    groups = optimizer.bf16_groups if is_bf16 else optimizer.round_robin_bit16_groups
    # Given, since parameters may be aligned to 16 bytes, with padding between them.
    given = getattr(optimizer, "round_robin_bit16_offsets", None) or [None] * len(groups)
    partitions = []
    for group, (parameters, flat, process_group, offsets) in enumerate(
        zip(groups, _flat_masters(optimizer), optimizer.real_dp_process_group, given, strict=False)
    ):
        first = dist.get_rank(process_group) * flat.numel()
        numels = [parameter.numel() for parameter in parameters]
        fragments = []
        for parameter, begin, elements in zip(parameters, offsets or _begins(numels), numels, strict=True):
            start = min(max(first - begin, 0), elements)
            stop = min(max(first + flat.numel() - begin, 0), elements)
            offset = max(begin - first, 0) if stop > start else 0
            fragments.append(_fragment(parameter, names, start, offset, stop - start))
        partitions.append(Partition(flat, group, tuple(fragments)))
    return tuple(partitions)


def _flat_masters(optimizer: Any) -> Any:
    """Return this rank's part of the flattened masters of each group in ZeRO-1 and 2."""
    is_bf16 = isinstance(optimizer, BF16_Optimizer)
    return optimizer.fp32_groups_flat_partition if is_bf16 else optimizer.single_partition_of_fp32_groups


def _read_whole_groups(optimizer: Any, names: dict[int, list[str]]) -> tuple[Partition, ...]:
    """Return the partitions of stage 0 in 16 bits: whole parameters, one after another, or one in each."""
    is_flat = isinstance(optimizer, FP16_Optimizer)
    masters = optimizer.fp32_groups_flat if is_flat else optimizer.fp32_groups
    partitions = []
    for group, (parameters, own) in enumerate(zip(optimizer.fp16_groups, masters, strict=True)):
        held = [(own, parameters)] if is_flat else [(one, [each]) for one, each in zip(own, parameters, strict=True)]
        for values, parts in held:
            numels = [parameter.numel() for parameter in parts]
            rows = zip(parts, _begins(numels), numels, strict=True)
            fragments = [_fragment(parameter, names, 0, begin, elements) for parameter, begin, elements in rows]
            partitions.append(Partition(values, group, tuple(fragments)))
    return tuple(partitions)


def _begins(numels: list[int]) -> list[int]:
    """Return the number of each parameter's first element where all lie one after another."""
    return [0, *itertools.accumulate(numels)][:-1]


def _fragment(parameter: Any, names: dict[int, list[str]], start: int, offset: int, elements: int) -> Fragment:
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    return Fragment(_name(parameter, names), parameter, shape, start, offset, elements)


def _name(parameter: nn.Parameter, names: dict[int, list[str]]) -> str:
    if id(parameter) not in names:
        raise InvalidArgumentError(
            "The optimizer has a parameter that the module does not have. Make the optimizer after the module.",
            shape=tuple(getattr(parameter, "ds_shape", parameter.shape)),
        )
    return names[id(parameter)][0]


# ---- from the master copies to the parameters of the module


@torch.no_grad()
def _refresh_flat(optimizer: Any) -> None:
    optimizer.update_lp_params()
    # Views of the states by parameter, which DeepSpeed makes after the first step only, and then of one group.
    masters = _flat_masters(optimizer)
    if masters and all(optimizer.optimizer.state.get(flat) for flat in masters):  # none in an engine for evaluation
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


@torch.no_grad()
def _refresh_whole(partitions: Iterable[Partition]) -> None:
    for partition in partitions:
        for fragment in partition.fragments:
            fragment.parameter.data.copy_(fragment.view_in(partition.masters.detach()).view(fragment.shape))


def _refresh_shards(optimizer: Any, parameters: Iterable[Any]) -> None:
    optimizer.partition_all_parameters()
    for parameter in parameters:
        flush_shard(parameter)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


@torch.no_grad()
def _refresh_stage3(optimizer: Any, partitions: Iterable[Partition], frozen: Iterable[Any]) -> None:
    optimizer.checkpoint_event_prologue()  # small parameters, which are kept gathered, are made shards again
    for parameter in frozen:
        flush_shard(parameter)
    for number, partition in enumerate(partitions):
        if partition.swapped is not None:
            partition.swapped.flush()
            optimizer._optimizer_states_and_gradient_swap_in(number)
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if partition.swapped is not None:
            optimizer._release_swap_buffers(number)
    optimizer.checkpoint_event_epilogue()
