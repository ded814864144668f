"""Chunk lists: equal to torch's lists, and few objects are built for a rank that reads its slice."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp_remote import RemoteLoadPlanner
from dcp_remote.common.geometry import Box
from dcp_remote.format.manifest import Manifest, TensorKind
from dcp_remote.loading import dcp_metadata
from dcp_remote.loading.dcp_metadata import ChunkList, to_dcp_metadata
from tests.support.manifests import Layout, build
from tests.support.simulated_ranks import LocalShards, grid

TENSORS, CHUNKS, ROWS = 30, 50, 3


def manifest_of(shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> Manifest:
    """Build a manifest of tensors of these shapes, each cut into a grid of this many parts per dimension."""
    layouts = []
    for number, (shape, parts) in enumerate(shapes):
        boxes = tuple(Box(*cell) for cell in grid(shape, parts))
        pieces = tuple((4 * box.elements,) if box.elements else () for box in boxes)
        layouts.append(Layout(f"t{number}", TensorKind("float32"), shape, boxes, pieces))
    return build(layouts)


def wants(shape: tuple[int, ...], parts: tuple[int, ...], rank: int, world_size: int) -> LocalShards:
    """Return the template of a rank: every `world_size`-th part of a tensor."""
    cells = grid(shape, parts)[rank::world_size]
    return LocalShards(shape, torch.float32, [(offsets, torch.zeros(sizes)) for offsets, sizes in cells])


def set_up(state: dict[str, Any], manifest: Manifest, **options: Any) -> DefaultLoadPlanner:
    planner = DefaultLoadPlanner(**options)
    planner.set_up_planner(state, to_dcp_metadata(manifest), is_coordinator=True)
    return planner


def planned(state: dict[str, Any], manifest: Manifest) -> LoadPlan:
    """Return the plan of a `RemoteLoadPlanner`."""
    planner = RemoteLoadPlanner()
    planner.set_up_planner(state, to_dcp_metadata(manifest), is_coordinator=True)
    return planner.create_local_plan()


def in_order(plan: LoadPlan) -> list[ReadItem]:
    """Return the items of a plan, sorted by destination and source."""
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
    """Return the indices of the chunks, which torch ignores when it compares items."""
    return [item.storage_index.index for item in in_order(plan)]


@contextmanager
def counting_objects() -> Iterator[list[int]]:
    """Count the objects that are built for saved chunks; yields a list of one number."""
    count = [0]

    def build(**fields: torch.Size) -> ChunkStorageMetadata:
        count[0] += 1
        return ChunkStorageMetadata(**fields)

    with mock.patch.object(dcp_metadata, "ChunkStorageMetadata", build):
        yield count


def test_a_list_in_all_but_name() -> None:
    """Compare with torch's own objects in a list."""
    offsets, sizes = np.array([[0, 0], [2, 0], [4, 0]]), np.array([[2, 5], [2, 5], [1, 5]])
    chunks = ChunkList(offsets, sizes, [])
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
    """Load any grid into any other, on ranks with one chunk, several or none; whole templates beside them.

    The plans are equal but for the order of a tensor's items: torch sorts by the longest dimension of the chunks that
    it is shown.
    """
    shape, saved, loaded = cut
    manifest = manifest_of([(shape, saved), ((5,), (2,))])
    for rank in range(world_size):
        state = {"t0": wants(shape, loaded, rank, world_size), "t1": torch.zeros(5)}
        ours, torchs = planned(dict(state), manifest), set_up(dict(state), manifest).create_local_plan()
        assert in_order(ours) == in_order(torchs)
        assert hints(ours) == hints(torchs)


def count_alive() -> int:
    return sum(type(alive) is ChunkStorageMetadata for alive in gc.get_objects())


def test_torchs_planner_holds_the_chunks_of_one_tensor_at_a_time() -> None:
    """With torch's own plan, as in `dcp.load`, each object is built once; those of one tensor are alive at a time."""
    shape = (CHUNKS * ROWS, 2)
    manifest = manifest_of([(shape, (CHUNKS, 1))] * TENSORS)
    planner = set_up({f"t{n}": torch.zeros(shape) for n in range(TENSORS)}, manifest)
    gc.collect()
    before = count_alive()
    with counting_objects() as built:
        plan = planner.create_local_plan()
    assert len(plan.items) == TENSORS * CHUNKS
    assert built == [TENSORS * CHUNKS]
    gc.collect()
    assert count_alive() - before <= CHUNKS


def test_objects_are_built_for_the_slice_of_a_rank_alone() -> None:
    """The plan of a rank that reads rows of two chunks builds only these of fifty, for each tensor."""
    shape = (CHUNKS * ROWS, 2)
    manifest = manifest_of([(shape, (CHUNKS, 1))] * TENSORS)
    rows = [((10 * ROWS + 1, 0), torch.zeros(ROWS + 1, 2))]
    state = {f"t{n}": LocalShards(shape, torch.float32, rows) for n in range(TENSORS)}
    with counting_objects() as built:
        plan = planned(dict(state), manifest)
    assert built == [2 * TENSORS]
    torchs = set_up(dict(state), manifest).create_local_plan()
    assert (in_order(plan), hints(plan)) == (in_order(torchs), hints(torchs))
