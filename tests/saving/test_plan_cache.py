"""Plans of many ranks in one process: replicas written in parts, and changes that make a cached plan invalid."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_remote import load
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.units import MiB
from dcp_remote.errors import InvalidArgumentError, SaveFailedError
from dcp_remote.format import manifest_json
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.format.manifest_validation import check
from dcp_remote.saving import plan_cache
from dcp_remote.saving.device_copy import ElementRange, host_views
from dcp_remote.saving.manifest_assembly import Planned, to_manifest
from dcp_remote.saving.plan_cache import (
    PlanCache,
    Proposal,
    RankPlan,
    RunPlanner,
    find_differing_replicas,
    propose,
    replica_digests,
    to_rank_plan,
    to_table,
)
from dcp_remote.saving.plan_table import Chunk, arrange
from dcp_remote.saving.rank_report import RankReport
from dcp_remote.saving.shard_writer import write_shards
from dcp_remote.saving.uploads import Uploads
from dcp_remote.serialization.tensors import byte_view, dtype_name, view_as_integers
from dcp_remote.storage import MemoryStore
from tests.support.properties import examples
from tests.support.simulated_ranks import shard
from tests.support.strategies import DTYPES, random_whole

State: TypeAlias = dict[str, Any]

KiB = 1024
SHARD_BYTES_MAX = 16 * KiB


def rows(count: int, width: int = 64) -> torch.Tensor:
    """Return a tensor of distinct float32 values."""
    return torch.arange(count * width, dtype=torch.float32).reshape(count, width)


def proposal(state: State, planner: RunPlanner | None = None) -> Proposal:
    planner = planner if planner is not None else RunPlanner()
    planner.set_up_planner(state)
    return propose(planner, shard_bytes_max=SHARD_BYTES_MAX)


def planned(states: Sequence[State]) -> tuple[list[RankPlan], Planned]:
    """Plan as a manager does; tables and shares are pickled."""
    planners = [RunPlanner() for _ in states]
    proposals = [proposal(state, planner) for state, planner in zip(states, planners, strict=True)]
    tables = [pickle.loads(pickle.dumps(to_table(proposed))) for proposed in proposals]
    unlike: frozenset[Chunk] = frozenset()
    while True:
        arrangement = arrange(tables, shard_bytes_max=SHARD_BYTES_MAX, unlike=unlike)
        shares = [pickle.loads(pickle.dumps(share)) for share in arrangement.shares]
        plans = [to_rank_plan(proposed, share) for proposed, share in zip(proposals, shares, strict=True)]
        digests = [replica_digests(plan, planner, lambda: None) for plan, planner in zip(plans, planners, strict=True)]
        assert [bool(of_rank) for of_rank in digests if of_rank] == [True] * sum(any(share.parts) for share in shares)
        assert {share.is_cut for share in shares} == {any(digests)}
        found = find_differing_replicas(digests)
        if not found:
            return plans, arrangement.planned
        assert not found & unlike
        unlike |= found


def write(states: Sequence[State]) -> tuple[MemoryStore, Planned, list[RankReport]]:
    """Write as a manager does, each rank in turn; reports are pickled."""
    store, (plans, of_all) = MemoryStore(), planned(states)
    reports = []
    for rank, (state, plan) in enumerate(zip(states, plans, strict=True)):
        planner = RunPlanner()
        planner.set_up_planner(state)
        with Uploads[Any](store, rank=rank, deadline=Deadline(60), memory_budget_bytes=64 * KiB) as uploads:
            report = write_shards(
                plan.plan,
                planner,
                uploads,
                allow_pickle=False,
                shard_bytes_max=SHARD_BYTES_MAX,
                shared=plan.shared,
            )
        reports.append(pickle.loads(pickle.dumps(report)))
    return store, of_all, reports


def commit(store: MemoryStore, of_all: Planned, reports: Sequence[RankReport]) -> None:
    manifest = check(to_manifest(of_all, reports, save_id="1" * 32))
    store.put(MANIFEST_KEY, [manifest_json.encode(manifest)])


def bytes_of(reports: Sequence[RankReport]) -> list[int]:
    return [int(report.pieces.length.sum()) for report in reports]


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize(
    "whole",
    [
        rows(300),
        rows(1, 19_200),  # no rows to split
        rows(19_200, 1).reshape(-1),
        rows(300).reshape(3, 2, 50, 64),
        rows(300).t(),  # not contiguous
        rows(300).to(torch.bfloat16).repeat(2, 1),
    ],
    ids=lambda whole: "x".join(map(str, whole.shape)),
)
def test_a_replica_is_written_by_all_its_holders(whole: torch.Tensor, world_size: int) -> None:
    """The holders write equal bytes, to within a row, and the parts make up the same tensor."""
    store, of_all, reports = write([{"model": {"weight": whole}, "step": 3} for _ in range(world_size)])
    commit(store, of_all, reports)
    state = load(store)
    assert torch.equal(state["model"]["weight"], whole)
    assert state["step"] == 3
    written = bytes_of(reports)
    first = next(size for size in whole.shape if size > 1)
    assert sum(written) == whole.nbytes
    count = sum(size > 0 for size in written)
    assert count == min(world_size, first)
    assert max(written) <= math.ceil(first / count) * whole.nbytes // first


def test_no_part_is_smaller_than_a_quarter_of_a_shard() -> None:
    """75 KiB in shards of 16 KiB are for 18 ranks; of two such tensors, each of 40 ranks writes at most one part."""
    store, of_all, reports = write([{"one": rows(300), "two": rows(300) + 1} for _ in range(40)])
    commit(store, of_all, reports)
    written = bytes_of(reports)
    assert sum(size > 0 for size in written) == 36
    assert max(written) < 5 * KiB
    assert torch.equal(load(store)["two"], rows(300) + 1)


def test_replicas_of_shards() -> None:
    """HSDP: two replicas of a sharded tensor, each on two ranks; a tensor smaller than a shard is not cut."""
    whole, small = rows(512), rows(8)
    halves = shard(whole, 2, (2, 1))
    store, of_all, reports = write([{"w": halves[rank % 2], "small": small} for rank in range(4)])
    commit(store, of_all, reports)
    assert torch.equal(load(store)["w"], whole)
    written = bytes_of(reports)
    assert sum(written) == whole.nbytes + small.nbytes
    assert max(written) <= whole.nbytes // 4 + small.nbytes


def test_a_part_that_nobody_wrote_is_named() -> None:
    """A missing report of a rank fails the save by the name of the part."""
    states = [{"model": {"weight": rows(300)}} for _ in range(3)]
    store, of_all, reports = write(states)
    with pytest.raises(SaveFailedError, match="No rank wrote a chunk") as caught:
        commit(store, of_all, [reports[0], reports[2]])
    assert caught.value.details["tensor"] == "model.weight"
    assert caught.value.details["offsets"] == "(100, 0)"


def test_a_tensor_that_is_no_longer_what_was_planned() -> None:
    """A cached plan is refused for a state of another shape, dtype or layout."""
    plans, _ = planned([{"weight": rows(300)}, {"weight": rows(300)}])
    plan, shared = plans[1].plan, plans[1].shared
    for other in (rows(200), rows(300).double(), rows(300).to_sparse()):
        planner = RunPlanner()
        planner.set_up_planner({"weight": other})
        with (
            Uploads[Any](MemoryStore(), rank=0, deadline=Deadline(60), memory_budget_bytes=64 * KiB) as uploads,
            pytest.raises((SaveFailedError, InvalidArgumentError), match=r"not what was planned|be put together again"),
        ):
            write_shards(plan, planner, uploads, allow_pickle=False, shared=shared)


@examples(60)
@given(st.data())
def test_replicas_that_differ_are_never_mixed(data: st.DataObject) -> None:
    """Single bits differ at random places on some ranks; the loaded tensor is one rank's, bit for bit."""
    ranks = data.draw(st.integers(2, 4))
    wholes = [rows(300) for _ in range(ranks)]
    places = st.tuples(st.integers(0, ranks - 1), st.integers(0, 299), st.integers(0, 63))
    for rank, row, column in data.draw(st.lists(places, max_size=4)):
        wholes[rank].view(torch.int32)[row, column] ^= 1
    if data.draw(st.booleans()):
        wholes = [whole.t().contiguous().t() for whole in wholes]
    store, of_all, reports = write([{"w": whole, "same": rows(300) + 1} for whole in wholes])
    commit(store, of_all, reports)
    state = load(store)
    differs = any(not torch.equal(whole, wholes[0]) for whole in wholes)
    assert any(torch.equal(state["w"], whole) for whole in (wholes[:1] if differs else wholes))
    assert torch.equal(state["same"], rows(300) + 1)
    assert sum(bytes_of(reports)) == 2 * rows(300).nbytes


def digest_of(tensor: torch.Tensor) -> bytes:
    """Return the digest by which two ranks that hold the tensor compare it."""
    planner = RunPlanner()
    one = proposal({"w": tensor}, planner)
    (share, _) = arrange([to_table(one)] * 2, shard_bytes_max=SHARD_BYTES_MAX).shares
    (digest,) = replica_digests(to_rank_plan(one, share), planner, lambda: None).values()
    return digest


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
    kept = PlanCache("first", proposal(base()), RankPlan(SavePlan([])))
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
    """A plan, its items, whole or written in parts, and their descriptions keep classes and fields."""
    proposals = [proposal({"w": rows(300), "small": rows(1), "n": 3}, NewerPlanner()) for _ in range(ranks)]
    shares = arrange([to_table(one) for one in proposals], shard_bytes_max=SHARD_BYTES_MAX).shares
    plans = [to_rank_plan(one, share).plan for one, share in zip(proposals, shares, strict=True)]
    items = [item for plan in plans for item in plan.items]
    assert len(items) == ranks + 2
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


def test_each_value_is_digested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas written in parts are digested once, even if the plan is made again; digesting can stop after a MiB."""
    digested: list[int] = []

    def counted(ranges: Sequence[ElementRange]) -> list[memoryview]:
        found = host_views(ranges)
        digested.extend(len(view) for view in found)
        return found

    monkeypatch.setattr(plan_cache, "host_views", counted)
    planner, state = RunPlanner(), {"w": rows(3 * 4096 + 1), "small": rows(8)}
    one = proposal(state, planner)
    plan = to_rank_plan(one, arrange([to_table(one)] * 3, shard_bytes_max=SHARD_BYTES_MAX).shares[1])
    known = replica_digests(plan, planner, lambda: None)
    assert digested == [MiB, MiB, MiB, 256]
    assert replica_digests(plan, planner, lambda: None, known=known) == known
    assert len(digested) == 4
    with pytest.raises(KeyboardInterrupt):
        replica_digests(plan, planner, mock.Mock(side_effect=[None, KeyboardInterrupt]))
    assert len(digested) == 5
    replica_digests(RankPlan(one.plan), planner, lambda: None)  # a plan without parts
    assert len(digested) == 5
