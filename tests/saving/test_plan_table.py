"""Plans of all ranks as columns, compared with what torch's planner decides; plans that are refused."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_remote import LocalBoxes
from dcp_remote.common.arrays import shrink_integers
from dcp_remote.common.geometry import Box
from dcp_remote.common.units import KiB
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.saving import plan_table
from dcp_remote.saving.dcp_metadata import to_columns
from dcp_remote.saving.manifest_assembly import Planned
from dcp_remote.saving.plan_cache import (
    Proposal,
    RunPlanner,
    describe_tensors,
    digest_objects,
    propose,
    to_rank_plan,
    to_table,
)
from dcp_remote.saving.plan_table import Arrangement, arrange
from dcp_remote.saving.rank_differences import require_equal_tensors
from tests.support.simulated_ranks import LocalShards, shard

State = dict[str, Any]


def proposal(state: State) -> Proposal:
    planner = RunPlanner()
    planner.set_up_planner(state)
    return propose(planner)


def arranged(proposals: Sequence[Proposal], **options: Any) -> tuple[list[SavePlan], Arrangement]:
    tables = [pickle.loads(pickle.dumps(to_table(proposed))) for proposed in proposals]
    arrangement = arrange(tables, **options)
    with mock.patch.object(plan_table, "_ALIKE_MIN", 0):
        alike = arrange(tables, **options)
    assert repr(alike.shares) == repr(arrangement.shares)
    assert described(alike.planned) == described(arrangement.planned)
    assert list(map(repr, (alike.planned.tensors.names, alike.differing))) == list(
        map(repr, (arrangement.planned.tensors.names, arrangement.differing))
    )
    assert chunks_of(alike.planned) == chunks_of(arrangement.planned)
    assert repr(alike.sets) == repr(arrangement.sets)
    shares = pickle.loads(pickle.dumps(arrangement.shares))
    return [to_rank_plan(proposed, share) for proposed, share in zip(proposals, shares, strict=True)], arrangement


def test_objects_of_single_ranks_leave_the_names_of_ranks_alike() -> None:
    """Each rank's random states have a name of their own: the coordinator would unpack and compare those of all ranks.

    So are empty dicts of single ranks. Tensors of single ranks are items like others.
    """
    ranks = 40
    cut = shard(torch.randn(2 * ranks, 4), ranks, (ranks, 1))
    states: list[State] = [
        {"w": part, "v": part, "per_rank": {str(rank): {"random": (rank,), "loader": {"at": {}, "seed": "s"}}}}
        for rank, part in enumerate(cut)
    ]
    proposals = [proposal(state) for state in states]
    assert len({to_table(proposed).packed_names for proposed in proposals}) == 1
    plans, arrangement = arranged(proposals)
    planned = arrangement.planned
    assert planned.tensors.names == ("w", "v")
    assert set(planned.positions) == {f"per_rank.{rank}.{name}" for rank in range(ranks) for name in OWN}
    assert len({*planned.positions.values()}) == 2 * ranks
    for rank, plan in enumerate(plans):
        assert [item.index.fqn for item in plan.items[-2:]] == [f"per_rank.{rank}.{name}" for name in OWN]
        assert planned.flatten is not None
        assert planned.flatten[f"per_rank.{rank}.loader.seed"] == ("per_rank", str(rank), "loader", "seed")
        assert set(proposals[rank].plan.planner_data or {}) <= set(planned.flatten)
    with pytest.raises(InvalidArgumentError, match="that of a PerRank value"):
        arranged([*proposals[1:], proposal({"per_rank.3.random": torch.ones(2)})])
    states[3]["per_rank"]["3"]["of one"] = torch.ones(2)
    plans, arrangement = arranged([proposal(state) for state in states])
    assert arrangement.planned.tensors.names == ("w", "v", "per_rank.3.of one")
    assert [rank for rank, plan in enumerate(plans) for item in plan.items if "of one" in item.index.fqn] == [3]


OWN = ("random", "loader.seed")


def test_tensors_that_are_cut_alike() -> None:
    """The chunks of one of them are planned, and those of another shape; replicas are dealt out one by one."""
    ranks = 40
    parts = shard(torch.randn(2 * ranks, 4), ranks, (ranks, 2))
    others = shard(torch.randn(3 * ranks, 2), ranks, (ranks, 1))
    states = [
        {f"w{number}": part for number in range(9)} | {"v": other, "a": torch.ones(2), "b": torch.ones(2)}
        for part, other in zip(parts, others, strict=True)
    ]
    states[0]["step"] = torch.ones(())
    proposals = [proposal(state) for state in states]
    plans, arrangement = arranged(proposals)
    require_consistent(states, plans, arrangement.planned)
    assert described(arrangement.planned) == described(torchs(proposals)[1])
    assert len(arrangement.planned.tensors.chunk_offsets) == 2 * (2 * ranks + ranks) + 1 + 1


def torchs(proposals: Sequence[Proposal]) -> tuple[list[SavePlan], Planned]:
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, is_coordinator=True)
    plans, metadata = planner.create_global_plan([proposed.plan for proposed in proposals])
    return plans, to_columns(metadata)


def chunks_of(planned: Planned) -> dict[str, list[Box]]:
    """Return the chunks of each tensor, in the order of their hints."""
    tensors = planned.tensors
    return {
        name: [Box(tensors.offsets_of(chunk), tensors.sizes_of(chunk)) for chunk in range(*between)]
        for name, between in zip(tensors.names, itertools.pairwise(tensors.chunk_first.tolist()), strict=True)
    }


def described(planned: Planned) -> object:
    """Return all that does not depend on which rank writes an entry, or on the order of entries."""
    tensors = planned.tensors
    boxes = {name: set(found) for name, found in chunks_of(planned).items()}
    return (
        {name: (tensors.kind_of(number), tensors.shape_of(number)) for name, number in tensors.index.items()},
        boxes,
        set(planned.positions),
        planned.flatten,
    )


def require_consistent(states: Sequence[State], plans: Sequence[SavePlan], planned: Planned) -> None:
    """Check that every planned chunk is written once, by a rank that holds it, and that its hint is right."""
    boxes, written, objects = chunks_of(planned), set(), []
    for state, plan in zip(states, plans, strict=True):
        own = {item.index for item in proposal(state).plan.items}
        for item in plan.items:
            assert item.index in own
            if item.tensor_data is None:
                objects.append(item.index.fqn)
                continue
            chunk = item.tensor_data.chunk
            assert item.index.index is not None
            assert boxes[item.index.fqn][item.index.index] == Box(tuple(chunk.offsets), tuple(chunk.sizes))
            assert (item.index.fqn, item.index.index) not in written
            written.add((item.index.fqn, item.index.index))
    assert written == {(name, number) for name, found in boxes.items() for number in range(len(found))}
    assert sorted(objects) == sorted(planned.positions)
    assert all(0 <= place < len(planned.names) for place in planned.positions.values())
    assert len(set(planned.positions.values())) == len(planned.positions)


@st.composite
def worlds(draw: st.DrawFn) -> list[State]:
    """Draw states of some ranks: sharded, replicated, on one rank only, objects, empty tensors."""
    ranks = draw(st.integers(1, 6))
    states: list[State] = [{"model": {}, "step": 3} for _ in range(ranks)]
    for number in range(draw(st.integers(0, 6))):
        name = f"t{number}"
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        whole = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype)
        kind = draw(st.sampled_from(["replicated", "some", "sharded", "replicated shards", "object"]))
        if kind in ("sharded", "replicated shards") and 0 not in shape and shape:
            parts = [draw(st.integers(1, size)) for size in shape]
            shards = shard(whole, int(np.prod(parts)), parts)
            first = draw(st.integers(0, ranks - 1))
            held: list[list[Any]] = [[] for _ in range(ranks)]
            for place, one in enumerate(shards):
                held[(place + first) % ranks] += one.chunks
            if kind == "replicated shards":
                both = [held[rank] + (held[rank - 1] if rank else []) for rank in range(ranks)]
                held = [list({offsets: (offsets, chunk) for offsets, chunk in one}.values()) for one in both]
            for state, own in zip(states, held, strict=True):
                state["model"][name] = LocalShards(shape, dtype, own)
            continue
        holders = range(ranks) if kind != "some" else [draw(st.integers(0, ranks - 1))]
        for rank in holders:
            states[rank]["model"][name] = {"a": 1} if kind == "object" else whole
    return states


@given(worlds())
def test_what_is_planned_is_what_torch_plans(states: list[State]) -> None:
    """Entries, chunks and flatten mapping equal those of torch's plan; each chunk is written once."""
    proposals = [proposal(state) for state in states]
    plans, arrangement = arranged(proposals)
    _, expected = torchs(proposals)
    assert described(arrangement.planned) == described(expected)
    require_consistent(states, plans, arrangement.planned)


def test_entries_stand_in_the_order_of_the_state() -> None:
    """The order does not depend on which rank writes an entry."""
    state = {"a": torch.ones(1), "b": 2, "c": torch.ones(4), "d": None, "e": torch.ones(2)}
    _, arrangement = arranged([proposal(state)] * 3)
    planned = arrangement.planned
    assert planned.tensors.names == ("a", "c", "e")
    assert planned.positions == {"b": 1, "d": 3}


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_replicas_are_spread_evenly(ranks: int) -> None:
    """Under DDP the ranks' bytes differ by at most a tenth of the largest tensor."""
    state = {str(n): torch.zeros(1 + n * 7 % 300) for n in range(90)}
    plans, arrangement = arranged([proposal(state)] * ranks)
    require_consistent([state] * ranks, plans, arrangement.planned)
    written = [sum(4 * item.tensor_data.chunk.sizes[0] for item in plan.items if item.tensor_data) for plan in plans]
    assert max(written) - min(written) <= 4 * 300 // 10


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([160, 160] + 96 * [10], 8 * [160]),  # embeddings of a language model, and its layers
        ([160, 5, 3], [160, 5, 3, 0]),
    ],
    ids=["embeddings", "one huge tensor"],
)
def test_a_large_replica_is_written_whole(sizes: list[int], expected: list[int]) -> None:
    """Sizes in thousands; no rank writes more than the mean plus the largest tensor."""
    state = {str(n): torch.zeros(1000 * size) for n, size in enumerate(sizes)}
    plans, arrangement = arranged([proposal(state)] * len(expected))
    require_consistent([state] * len(expected), plans, arrangement.planned)
    written = [sum(item.tensor_data.chunk.sizes[0] for item in plan.items if item.tensor_data) for plan in plans]
    assert written == [1000 * size for size in expected]


def test_who_has_much_of_its_own_gets_no_replicas() -> None:
    """Pipeline stages: the rank with the least to write gets the replica."""
    shared = {"norm": torch.ones(100)}
    states = [{**shared, "stage0": torch.ones(500)}, {**shared, "stage1": torch.ones(50)}, shared]
    plans, _ = arranged([proposal(state) for state in states])
    assert [[item.index.fqn for item in plan.items] for plan in plans] == [["stage0"], ["stage1"], ["norm"]]


def test_of_several_holders_the_first_writes_if_that_is_asked_for() -> None:
    """With `to_lowest_rank` the first holder writes."""
    state = {"small": torch.ones(3), "large": torch.ones(4 * KiB), "step": 1}
    plans, _ = arranged([proposal(state)] * 3, to_lowest_rank=True)
    assert [len(plan.items) for plan in plans] == [3, 0, 0]


def test_what_has_no_elements_is_not_what_begins_at_the_same_place() -> None:
    """A rank without rows of a tensor may give offset 0 for its empty chunk: torch takes both for the same chunk."""
    full, none = torch.ones(4, 2), torch.ones(0, 2)
    states = [{"w": LocalShards((4, 2), torch.float32, [((0, 0), chunk)])} for chunk in (none, full, none)]
    plans, arrangement = arranged([proposal(state) for state in states])
    written = [item.tensor_data.chunk.sizes for plan in plans for item in plan.items if item.tensor_data]
    assert torch.Size((4, 2)) in written
    assert len(written) == 2
    assert arrangement.planned.tensors.chunks.tolist() == [2]


def test_boxes_of_flat_partitions() -> None:
    """Plans of `LocalBoxes` are tables: a box is written once, by a rank that holds it; an empty tensor, by one."""
    flat = torch.arange(60.0)
    states: list[State] = [
        {
            "w": LocalBoxes.from_flat((3, 4, 5), start, flat[start:stop]),
            "replicated": LocalBoxes((4,), [((0,), flat[:4])]),
            "empty": LocalBoxes((0, 4), dtype=torch.float32),
            "of one": LocalBoxes((3,), [((0,), flat[:3])] if not start else [], dtype=torch.float32),
        }
        for start, stop in ((0, 13), (13, 14), (14, 14), (14, 60))
    ]
    proposals = [proposal(state) for state in states]
    plans, arrangement = arranged(proposals)
    _, expected = torchs(proposals)
    assert described(arrangement.planned) == described(expected)
    require_consistent(states, plans, arrangement.planned)
    chunks = dict(zip(arrangement.planned.tensors.names, arrangement.planned.tensors.chunks.tolist(), strict=True))
    assert chunks == {"w": 2 + 1 + 3, "replicated": 1, "empty": 1, "of one": 1}


# ---- what is refused


def shards(shape: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> LocalShards:
    return LocalShards(shape, torch.float32, [(offsets, torch.ones(sizes)) for offsets, sizes in chunks])


REFUSED: dict[str, tuple[list[State], str]] = {
    "a gap": ([{"w": shards((4,), ((0,), (1,)))}, {"w": shards((4,), ((2,), (2,)))}], "in no chunk"),
    "overlapping": ([{"w": shards((4,), ((0,), (3,)))}, {"w": shards((4,), ((2,), (2,)))}], "overlap"),
    "outside": ([{"w": shards((4,), ((0,), (2,)))}, {"w": shards((4,), ((2,), (3,)))}], "outside"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plans_that_make_no_tensor_are_refused(case: str) -> None:
    """Plans that make no tensor are refused before anything is sent; torch refuses all of these, too."""
    states, why = REFUSED[case]
    proposals = [proposal(state) for state in states]
    with pytest.raises(InvalidArgumentError, match=why) as caught:
        arranged(proposals)
    assert caught.value.details["tensor"] == "w"
    with pytest.raises((AssertionError, ValueError, IndexError)):
        torchs(proposals)


DIFFERENT: dict[str, tuple[list[State], str]] = {
    "shapes": (
        [{"w": torch.ones(2)}, {"w": torch.ones(3)}, {"w": torch.ones(2)}],
        "w: float32 (2,) on ranks 0, 2, float32 (3,) on rank 1",
    ),
    "dtypes": (
        [{"w": torch.ones(2)}, {"w": torch.ones(2).double()}],
        "w: float32 (2,) on rank 0, float64 (2,) on rank 1",
    ),
    "an empty one": ([{"w": torch.ones(2)}, {"w": torch.ones(0)}], "w: float32 (2,) on rank 0, float32 (0,) on rank 1"),
    "dimensions": (
        [{"w": torch.ones(2)}, {"w": torch.ones(2, 1)}],
        "w: float32 (2,) on rank 0, float32 (2, 1) on rank 1",
    ),
    "an object and a tensor": (
        [{"w": torch.ones(4)}, {"w": "four"}],
        "w: float32 (4,) on rank 0, an object on rank 1",
    ),
    "a part of a larger one": (
        [{"w": torch.ones(4)}, {"w": shards((8,), ((4,), (4,)))}],
        "w: float32 (4,) on rank 0, float32 (8,) on rank 1",
    ),
    "global shapes of which the first is tiled": (
        [{"w": shards((4,), ((0,), (2,)))}, {"w": shards((6,), ((2,), (1,)), ((3,), (1,)))}],
        "w: float32 (4,) on rank 0, float32 (6,) on rank 1",
    ),
    "parts of different dtypes": (
        [{"w": shards((4,), ((0,), (2,)))}, {"w": LocalShards((4,), torch.int8, [((2,), torch.ones(2).char())])}],
        "w: float32 (4,) on rank 0, int8 (4,) on rank 1",
    ),
    "several, of many ranks": (
        [{"a": 1, "same": torch.ones(1), "w": torch.ones(rank // 6), "v": torch.ones(rank)} for rank in range(12)],
        (
            "v: float32 (0,) on rank 0, float32 (1,) on rank 1, float32 (2,) on rank 2, and 9 more; "
            "w: float32 (0,) on 6 ranks (0, 1, 2, 3, …), float32 (1,) on 6 ranks (6, 7, 8, 9, …)"
        ),
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_save_different_tensors_are_refused(case: str) -> None:
    """One error names all names, what ranks hold under them, and PerRank; the same by columns and by torch's plans."""
    states, differing = DIFFERENT[case]
    proposals = [proposal(state) for state in states]
    errors: list[InvalidArgumentError] = []
    with pytest.raises(InvalidArgumentError, match=r"different things.*PerRank\(") as caught:
        arranged(proposals)
    errors.append(caught.value)
    if "an object" not in differing:
        with pytest.raises(InvalidArgumentError, match="different things") as caught:
            require_equal_tensors([describe_tensors(proposed.plan) for proposed in proposals])
        errors.append(caught.value)
    for error in errors:
        assert isinstance(error.details["differing"], str)
        assert sorted(error.details["differing"].split("; ")) == differing.split("; ")
        assert error.details["names"] == differing.count(";") + 1


def test_an_error_of_many_names_is_short() -> None:
    """All names are counted, and ten are listed."""
    states = [{str(n): torch.ones(1 + rank) for n in range(50)} for rank in range(3)]
    with pytest.raises(InvalidArgumentError) as caught:
        arranged([proposal(state) for state in states])
    assert caught.value.details["names"] == 50
    assert str(caught.value.details["differing"]).count(";") == 9


def test_tensors_that_differ_in_flags_are_saved() -> None:
    """Gradients and pinned memory are no part of a value."""
    states: list[State] = [{"w": torch.ones(2)}, {"w": torch.ones(2, requires_grad=True)}]
    assert arranged([proposal(state) for state in states])[1].planned.tensors.names == ("w",)


# ---- objects that differ


def arranged_objects(states: Sequence[State], **options: Any) -> tuple[list[SavePlan], Arrangement]:
    """Arrange with digests of the objects, as a `CheckpointManager` of several ranks does."""
    tables = []
    for state in states:
        planner = RunPlanner()
        planner.set_up_planner(state)
        proposed = propose(planner)
        tables.append(pickle.loads(pickle.dumps(to_table(proposed, digest_objects(proposed, planner)))))
    arrangement = arrange(tables, **options)
    return [
        to_rank_plan(proposal(state), share) for state, share in zip(states, arrangement.shares, strict=True)
    ], arrangement


def test_objects_that_differ_between_ranks_are_found() -> None:
    """Name, number of values and of ranks, and the rank that writes; equal values of any type are none."""
    array = np.arange(100_000)
    states: list[State] = [
        {
            "step": 7,
            "own": {"seed": 100 + rank},
            "betas": (0.9, 0.999),
            "set": {"b", "a"} if rank else {"a", "b"},
            "options": ({"b": 1, "a": {"x": array.copy()}},) if rank else ({"a": {"x": array}, "b": 1},),
            "nan": float("nan"),
            "half": None if rank < 2 else "late",
            "arrays": (array + rank // 3,),
            "refused": print if rank else 5,
            "tensor": torch.ones(2),
            "of one": [rank] if rank == 1 else None,
            "per_rank": {str(rank): {"random": (rank,)}},
        }
        for rank in range(4)
    ]
    for state in states:
        if state["of one"] is None:
            del state["of one"]
    plans, arrangement = arranged_objects(states)
    writers = {item.index.fqn: rank for rank, plan in enumerate(plans) for item in plan.items}
    assert [(one.name, one.values, one.ranks) for one in arrangement.differing] == [
        ("own.seed", 4, 4),
        ("half", 2, 4),
        ("arrays", 2, 4),
    ]
    assert all(one.writer == writers[one.name] for one in arrangement.differing)
    assert str(arrangement.differing[0]) == f"own.seed (4 values on 4 ranks; rank {writers['own.seed']}'s is saved)"
    lowest = arranged_objects(states, to_lowest_rank=True)[1].differing
    assert {one.writer for one in lowest} == {0}
    assert not arranged([proposal(state) for state in states])[1].differing
    assert not arranged_objects(states[:1])[1].differing


def test_a_tensor_that_no_rank_holds_is_refused() -> None:
    """All such tensors are named; empty dicts have no entries either, and are none."""
    none = {"a": {"w": shards((4,)), "v": shards((2,))}, "b": torch.ones(2), "c": {}}
    with pytest.raises(InvalidArgumentError, match="No rank holds any part") as caught:
        arranged([proposal(none), proposal({"b": torch.ones(2)})])
    assert caught.value.details == {"tensor": "a.v, a.w", "tensors": 2}
    arranged([proposal(none), proposal({"a": {"w": torch.ones(4), "v": torch.ones(2)}})])


def test_numbers_of_any_size_are_joined_as_they_are() -> None:
    """Ranks' columns may differ in integer type, which numpy would concatenate as floats."""
    huge = 2**53 + 1
    tensor = torch.empty(0, huge, dtype=torch.int8)
    _, arrangement = arranged([proposal({"w": tensor}), proposal({"v": torch.ones(3)})])
    assert arrangement.planned.tensors.shape.tolist() == [0, huge, 3]


# ---- items of tensors that plan themselves


def item(*, offset: tuple[int, ...] | None, sizes: tuple[int, ...] = (4,), name: str = "w") -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([0] * len(sizes)), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size((4,)))
    index = MetadataIndex(name, None if offset is None else torch.Size(offset))
    return WriteItem(index, WriteItemType.TENSOR, tensor_data=data)


def proposal_of(items: Sequence[WriteItem]) -> Proposal:
    """Return the proposal of a rank whose tensors plan these items."""
    planner = RunPlanner()
    planner.set_up_planner({"w": torch.ones(4), "v": torch.ones(4)})
    with mock.patch.object(planner, "create_local_plan", return_value=SavePlan(list(items), planner_data={})):
        return propose(planner)


@pytest.mark.parametrize(
    "items",
    [
        [item(offset=(0,)), item(offset=(0,))],
        [item(offset=None)],
        [item(offset=(1,))],
    ],
    ids=["twice", "without an offset", "another index than the chunk's"],
)
def test_a_chunk_is_known_by_its_own_offsets(items: list[WriteItem]) -> None:
    """It is planned once, by one of two ranks, whatever its index says, and is found by this index."""
    plans, arrangement = arranged([proposal_of(items)] * 2)
    (written,) = (item for plan in plans for item in plan.items)
    assert written.index == items[0].index
    assert chunks_of(arrangement.planned) == {"w": [Box((0,), (4,))]}


@pytest.mark.parametrize(
    "wrong",
    [
        item(offset=(0, 0), sizes=(4, 1)),
        WriteItem(MetadataIndex("w", torch.Size((0,))), WriteItemType.SHARD),
    ],
    ids=["other dimensions", "no data"],
)
def test_what_is_no_box_of_its_tensor_is_refused(wrong: WriteItem) -> None:
    """The error names the tensor."""
    with pytest.raises(InvalidArgumentError, match="no box of the tensor") as caught:
        proposal_of([item(offset=(0,), name="v"), wrong])
    assert caught.value.details == {"tensor": "w"}


@pytest.mark.parametrize("values", [[], [0], [255], [256, 3], [2**31], [2**32 + 1, 0]])
def test_numbers_are_small(values: list[int]) -> None:
    """Numbers are stored unchanged, in the smallest type that holds them."""
    packed = shrink_integers(np.array(values, dtype=np.int64))
    assert packed.tolist() == values
    assert packed.itemsize <= 8
    assert not values or packed.itemsize == np.min_scalar_type(max(values)).itemsize


def test_tables_and_shares_are_small() -> None:
    """Tables that ranks send take at most a sixth of torch's plans, and the shares that they get a twentieth."""
    tensors = [shard(torch.ones(64, 8), 16, (16, 1)) for _ in range(60)]
    proposals = [proposal({f"layers.{n}.weight": cut[rank] for n, cut in enumerate(tensors)}) for rank in range(16)]
    _, arrangement = arranged(proposals)
    plans = len(pickle.dumps([proposed.plan for proposed in proposals]))
    assert 6 * len(pickle.dumps([to_table(proposed) for proposed in proposals])) < plans
    assert 20 * len(pickle.dumps(arrangement.shares)) < plans
