"""A rank's plan: digests of the values that ranks compare, and changes that make a kept plan another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.units import MiB
from dcp_remote.errors import InvalidArgumentError, SaveFailedError
from dcp_remote.saving import plan_cache
from dcp_remote.saving.device_copy import ElementRange, host_views
from dcp_remote.saving.plan_cache import (
    PlanCache,
    Proposal,
    RunPlanner,
    digest_sets,
    propose,
    to_rank_plan,
    to_table,
)
from dcp_remote.saving.plan_table import arrange
from dcp_remote.saving.shard_writer import write_shards
from dcp_remote.saving.uploads import Uploads
from dcp_remote.serialization.tensors import byte_view, dtype_name, view_as_integers
from dcp_remote.storage import MemoryStore
from tests.support.simulated_ranks import LocalShards
from tests.support.strategies import DTYPES, random_whole

State: TypeAlias = dict[str, Any]

KiB = 1024


def rows(count: int, width: int = 64) -> torch.Tensor:
    """Return a tensor of distinct float32 values."""
    return torch.arange(count * width, dtype=torch.float32).reshape(count, width)


def proposal(state: State, planner: RunPlanner | None = None) -> Proposal:
    planner = planner if planner is not None else RunPlanner()
    planner.set_up_planner(state)
    return propose(planner)


def test_a_tensor_that_is_no_longer_what_was_planned() -> None:
    """A kept plan is refused for a state of another shape or dtype, and a part of a tensor for another layout."""

    def part(chunk: torch.Tensor) -> LocalShards:
        return LocalShards((600, 64), torch.float32, [((0, 0), chunk)])

    plan = proposal({"weight": part(rows(300))}).plan
    for other in (rows(200), rows(300).double(), rows(300).to_sparse()):
        planner = RunPlanner()
        planner.set_up_planner({"weight": part(other)})
        with (
            Uploads[Any](MemoryStore(), rank=0, deadline=Deadline(60), memory_budget_bytes=64 * KiB) as uploads,
            pytest.raises((SaveFailedError, InvalidArgumentError), match=r"not what was planned|be put together again"),
        ):
            write_shards(plan, planner, uploads, allow_pickle=False)


# ---- digests of values


def digest_of(tensor: torch.Tensor) -> bytes:
    """Return the digest by which two ranks that hold the tensor compare it."""
    planner = RunPlanner()
    one = proposal({"w": tensor}, planner)
    return digest_sets({1: one.plan.items}, planner, lambda: None)[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_equal_bits_are_equal_replicas(dtype: torch.dtype) -> None:
    """Every dtype, contiguous or not; one bit of the last element makes the replicas differ."""
    whole = view_as_integers(random_whole(dtype, (97, 353), seed=1).tensor())
    for elements in (whole, whole.t().contiguous().t()):
        other = elements.clone()
        assert digest_of(other.view(dtype)) == digest_of(elements.view(dtype))
        byte_view(other if other.is_contiguous() else other.t())[-1] ^= 1
        assert digest_of(other.view(dtype)) != digest_of(elements.view(dtype))


def test_values_that_compare_equal_or_never_do() -> None:
    """0.0 and -0.0 differ, equal NaNs do not; a conjugated view is compared by its own values."""
    zeros = torch.zeros(300, 64)
    assert digest_of(zeros) != digest_of(-zeros)
    nans, others = torch.full((300, 64), math.nan), torch.full((300, 64), math.nan)
    assert digest_of(nans) == digest_of(others)
    others.view(torch.int32)[7, 7] ^= 1
    assert torch.isnan(others).all()
    assert digest_of(nans) != digest_of(others)
    pairs = torch.complex(rows(300), rows(300))
    assert digest_of(pairs.conj()) == digest_of(pairs.conj().resolve_conj()) != digest_of(pairs)


def test_a_square_matrix_is_not_its_transpose() -> None:
    """Both are the same bytes in memory."""
    whole = rows(100, 100)
    assert digest_of(whole) != digest_of(whole.t())


# ---- what makes a plan another one


def base() -> State:
    return {"model": {"weight": rows(300), "bias": rows(1)}, "step": 1}


CHANGES: dict[str, Callable[[State], object]] = {
    "dtype": lambda state: state["model"].update(bias=rows(1).to(torch.int32)),
    "shape": lambda state: state["model"].update(bias=rows(2)),
    "equal shape, transposed": lambda state: state["model"].update(bias=rows(1).t()),
    "new key": lambda state: state["model"].update(more=1),
    "key gone": lambda state: state["model"].pop("bias"),
    "an object becomes a tensor": lambda state: state.update(step=torch.tensor(1)),
    "a tensor becomes an object": lambda state: state["model"].update(bias="none"),
    "another name for a place": lambda state: state.update({"model.weight": state["model"].pop("weight")}),
    "a large tensor is stored otherwise": lambda state: state["model"].update(weight=rows(300).to_sparse()),
    "gradients": lambda state: state["model"].update(bias=rows(1).requires_grad_()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_kept_for_as_long_as_the_structure_is(change: str) -> None:
    """Values and objects may change, with a fresh planner each time. A change that is undone restores the plan."""
    kept = PlanCache("first", proposal(base()))
    state = base()
    state["model"]["weight"] += 1
    state["step"] = "something else"
    assert kept.key_of(proposal(state)) == "first"
    CHANGES[change](state)
    assert kept.key_of(proposal(state)) is None
    assert kept.key_of(proposal(base())) == "first"


def test_without_a_plan_nothing_is_kept() -> None:
    """Before the first save there is no key."""
    assert PlanCache().key_of(proposal({"weight": rows(1)})) is None


# ---- fields of a newer torch


@dataclass(frozen=True)
class NewerPlan(SavePlan):
    """Plan with a field that this package does not know."""

    priority: int = 0


@dataclass(frozen=True)
class NewerData(TensorWriteData):
    """Description of a tensor with a field that this package does not know."""

    shared: str = ""


@dataclass(frozen=True)
class NewerItem(WriteItem):
    """Item with a field that this package does not know."""

    checksum: str = ""


class NewerPlanner(RunPlanner):
    """Planner of a newer torch."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            data = NewerData(**vars(item.tensor_data), shared="yes") if item.tensor_data is not None else None
            items.append(NewerItem(**vars(item) | {"tensor_data": data}, checksum=item.index.fqn))
        return NewerPlan(**vars(plan) | {"items": items}, priority=7)


@pytest.mark.parametrize("ranks", [1, 3])
def test_fields_that_a_newer_torch_adds_survive(ranks: int) -> None:
    """A plan, its items and their descriptions keep classes and fields."""
    proposals = [proposal({"w": rows(300), "small": rows(1), "n": 3}, NewerPlanner()) for _ in range(ranks)]
    shares = arrange([to_table(one) for one in proposals]).shares
    plans = [to_rank_plan(one, share) for one, share in zip(proposals, shares, strict=True)]
    items = [item for plan in plans for item in plan.items]
    assert len(items) == 3
    for plan in plans:
        assert isinstance(plan, NewerPlan)
        assert plan.priority == 7
    for item in items:
        assert isinstance(item, NewerItem)
        assert item.checksum == item.index.fqn
        if item.tensor_data is not None:
            assert isinstance(item.tensor_data, NewerData)
            assert item.tensor_data.shared == "yes"


class Overlapping(torch.Tensor):
    """Tensor that plans two parts with one origin."""

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size([0])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([size])),
                    properties=TensorProperties.create_from_tensor(torch.zeros(1)),
                    size=torch.Size([4]),
                ),
            )
            for size in (2, 4)
        ]


def test_parts_that_overlap_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="parts that overlap"):
        proposal({"w": torch.zeros(4).as_subclass(Overlapping)})


def test_digesting_can_stop_after_a_mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are read once, a MiB at a time; the save may end before each."""
    digested: list[int] = []

    def counted(ranges: Sequence[ElementRange]) -> list[memoryview]:
        found = host_views(ranges)
        digested.extend(len(view) for view in found)
        return found

    monkeypatch.setattr(plan_cache, "host_views", counted)
    planner = RunPlanner()
    items = proposal({"w": rows(3 * 4096 + 1)}, planner).plan.items
    digest_sets({1: items}, planner, lambda: None)
    assert digested == [MiB, MiB, MiB, 256]
    with pytest.raises(KeyboardInterrupt):
        digest_sets({1: items}, planner, mock.Mock(side_effect=[None, KeyboardInterrupt]))
    assert len(digested) == 5
