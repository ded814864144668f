"""Chunks that are made when somebody looks: equal to torch's lists, and few of them for a rank that wants its slice."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp_remote import chunk_list
from dcp_remote.chunk_list import ChunkList, Shelf, local_plan
from dcp_remote.dcp_metadata import to_dcp_metadata
from dcp_remote.manifest import Manifest, TensorKind
from dcp_remote.ranges import Box
from dcp_remote.testing.ranks import LocalShards, grid
from tests.manifests import Layout, build

TENSORS, CHUNKS, ROWS = 30, 50, 3


def manifest_of(shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> Manifest:
    """Of tensors of these shapes, each cut into a grid of so many parts."""
    layouts = []
    for number, (shape, parts) in enumerate(shapes):
        boxes = tuple(Box(*cell) for cell in grid(shape, parts))
        pieces = tuple((4 * box.elements,) if box.elements else () for box in boxes)
        layouts.append(Layout(f"t{number}", TensorKind("float32"), shape, boxes, pieces))
    return build(layouts)


def wants(shape: tuple[int, ...], parts: tuple[int, ...], rank: int, world_size: int) -> LocalShards:
    """What a rank has of a tensor: every so many-th part."""
    cells = grid(shape, parts)[rank::world_size]
    return LocalShards(shape, torch.float32, [(offsets, torch.zeros(sizes)) for offsets, sizes in cells])


def set_up(state: dict[str, Any], manifest: Manifest, **options: Any) -> DefaultLoadPlanner:
    planner = DefaultLoadPlanner(**options)
    planner.set_up_planner(state, to_dcp_metadata(manifest), is_coordinator=True)
    return planner


def in_order(plan: LoadPlan) -> list[ReadItem]:
    """Its items, by where they go and where they come from."""
    return sorted(
        plan.items,
        key=lambda item: (
            item.dest_index.fqn,
            item.dest_index.offset or (),
            item.dest_offsets,
            item.storage_index.offset or (),
        ),
    )


def hints(plan: LoadPlan) -> list[int | None]:
    """Which torch leaves out where it compares items."""
    return [item.storage_index.index for item in in_order(plan)]


@contextmanager
def made_counted() -> Iterator[list[int]]:
    """How many of torch's objects are made of chunks that were saved: a list of one number."""
    count = [0]

    def made(**fields: torch.Size) -> ChunkStorageMetadata:
        count[0] += 1
        return ChunkStorageMetadata(**fields)

    with mock.patch.object(chunk_list, "ChunkStorageMetadata", made):
        yield count


def test_a_list_in_all_but_name() -> None:
    """Against torch's own objects in a list."""
    offsets, sizes = np.array([[0, 0], [2, 0], [4, 0]]), np.array([[2, 5], [2, 5], [1, 5]])
    chunks = ChunkList(offsets, sizes, Shelf())
    expected = [
        ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
    ]
    assert len(chunks) == 3
    assert list(chunks) == expected
    assert (chunks[1], chunks[-1], chunks[1:]) == (expected[1], expected[-1], expected[1:])
    assert chunks == expected
    assert expected == chunks
    assert chunks != expected[:2]
    assert chunks != tuple(expected)
    assert repr(chunks) == repr(expected)
    assert pickle.loads(pickle.dumps(chunks)) == expected
    assert type(pickle.loads(pickle.dumps(chunks))) is list
    assert all(type(chunk.offsets) is torch.Size for chunk in chunks)
    with pytest.raises(IndexError):
        chunks[3]
    with pytest.raises(TypeError):
        hash(chunks)


@given(
    st.integers(0, 2).flatmap(
        lambda d: st.tuples(*[st.tuples(*[st.integers(lo, hi)] * d) for lo, hi in ((0, 7), (1, 4), (1, 5))])
    ),
    st.integers(1, 3),
)
@example(((3, 3), (3, 2), (2, 1)), 2)
def test_the_plan_is_torchs(cut: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], world_size: int) -> None:
    """Any grid loaded by any other, by ranks of one chunk, several or none; whole templates beside them.

    But for the order of a tensor's items: torch sorts by the longest dimension of the chunks that it is shown.
    """
    shape, saved, loaded = cut
    manifest = manifest_of([(shape, saved), ((5,), (2,))])
    for rank in range(world_size):
        state = {"t0": wants(shape, loaded, rank, world_size), "t1": torch.zeros(5)}
        ours = local_plan(set_up(dict(state), manifest))
        torchs = set_up(dict(state), manifest).create_local_plan()
        assert replace(ours, items=in_order(ours)) == replace(torchs, items=in_order(torchs))
        assert hints(ours) == hints(torchs)


def test_what_does_not_fit_is_told_by_torch() -> None:
    """The same errors, whatever is left out before: another shape, an object, a name that is missing or too much."""
    manifest = manifest_of([((6, 2), (3, 1)), ((5,), (2,))])
    good = {"t0": torch.zeros(6, 2), "t1": torch.zeros(5)}
    for bad in (good | {"t0": torch.zeros(5, 2)}, good | {"t1": torch.zeros(5, 1)}, good | {"t1": 3}, good | {"x": 1}):
        with pytest.raises((ValueError, RuntimeError)) as expected:
            set_up(dict(bad), manifest).create_local_plan()
        with pytest.raises(expected.type) as caught:
            local_plan(set_up(dict(bad), manifest))
        assert str(caught.value) == str(expected.value)
    partly = good | {"x": 1}
    ours = local_plan(set_up(dict(partly), manifest, allow_partial_load=True))
    assert ours == set_up(dict(partly), manifest, allow_partial_load=True).create_local_plan()
    assert local_plan(set_up({"t1": torch.zeros(5)}, manifest)).items


def test_a_planner_of_the_user_sees_all_chunks() -> None:
    """What it makes of them nobody knows."""
    seen = []

    class Own(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            assert self.metadata is not None
            entry = self.metadata.state_dict_metadata["t0"]
            assert isinstance(entry, TensorStorageMetadata)
            seen.extend(entry.chunks)
            return super().create_local_plan()

    planner = Own()
    manifest = manifest_of([((6, 2), (3, 1))])
    planner.set_up_planner({"t0": wants((6, 2), (3, 1), 0, 3)}, to_dcp_metadata(manifest), is_coordinator=True)
    assert len(local_plan(planner).items) == 1
    assert len(seen) == 3


def test_a_rank_that_wants_its_slice_makes_little_more() -> None:
    """Counted: of 30 tensors in 50 chunks each two objects, for the two chunks that the slice lies in; none remain."""
    shape = (CHUNKS * ROWS, 2)
    manifest = manifest_of([(shape, (CHUNKS, 1))] * TENSORS)
    # One more row than a chunk has, from the second row of a chunk on.
    state = {
        f"t{n}": LocalShards(shape, torch.float32, [((10 * ROWS + 1, 0), torch.zeros(ROWS + 1, 2))])
        for n in range(TENSORS)
    }
    with made_counted() as made:
        planner = set_up(state, manifest)
        assert made == [0]
        plan = local_plan(planner)
    assert len(plan.items) == 2 * TENSORS
    assert made == [2 * TENSORS]


def test_torchs_planner_holds_the_chunks_of_one_tensor_at_a_time() -> None:
    """Counted among all living objects, where `dcp.load` plans by itself; each is made once."""
    shape = (CHUNKS * ROWS, 2)
    manifest = manifest_of([(shape, (CHUNKS, 1))] * TENSORS)
    planner = set_up({f"t{n}": torch.zeros(shape) for n in range(TENSORS)}, manifest)
    gc.collect()
    before = sum(type(one) is ChunkStorageMetadata for one in gc.get_objects())
    with made_counted() as made:
        plan = planner.create_local_plan()
    assert len(plan.items) == TENSORS * CHUNKS
    assert made == [TENSORS * CHUNKS]
    gc.collect()
    after = sum(type(one) is ChunkStorageMetadata for one in gc.get_objects())
    assert after - before <= CHUNKS


def test_a_tensor_in_one_chunk_is_not_searched() -> None:
    """Of fifty thousand small tensors that was a fifth of a load: one object of torch's is made of each instead."""
    manifest = manifest_of([((3,), (1,))] * TENSORS)
    planner = set_up({name: torch.zeros(3) for name in manifest.tensors.names}, manifest)
    with mock.patch.object(ChunkList, "near") as near, made_counted() as made:
        plan = local_plan(planner)
    assert (near.call_count, made[0]) == (0, TENSORS)
    expected = planner.create_local_plan()
    assert (plan, hints(plan)) == (expected, hints(expected))
