"""Which ranks take part in a save or load, and when: groups, single ranks, threads, one writer for several saves."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.run.lookup import read_manifest
from dcp_remote.storage import open_store
from tests.support.rank_pool import RankPool
from tests.support.training import assert_same, full

State = dict[str, Any]


def sharded(mesh: DeviceMesh, factor: int) -> State:
    """A tensor whose 7 rows the ranks share, one that they all have, and an object."""
    rows = torch.arange(21.0).reshape(7, 3) * factor
    return {
        "rows": distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None),
        "same": torch.full((4,), factor),
        "nested": {"list": [factor, "text"]},
    }


def whole(factor: int) -> State:
    return {
        "/rows": torch.arange(21.0).reshape(7, 3) * factor,
        "/same": torch.full((4,), factor),
        "/nested/list/0": factor,
        "/nested/list/1": "text",
    }


def world() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def loaded(url: str) -> State:
    """Load on all ranks of the default group, and return the state; a collective."""
    state = sharded(world(), factor=0)
    dcp.load(state, storage_reader=RemoteReader(url))
    return full(state)


def save_in_subgroup(url: str) -> None:
    """Ranks 1 and 2 of 4; the others have no part in it, and wait for nothing."""
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        mesh = DeviceMesh.from_group(group, "cpu")
        dcp.save(sharded(mesh, factor=2), storage_writer=RemoteWriter(url), process_group=group)
        state = sharded(mesh, factor=0)
        dcp.load(state, storage_reader=RemoteReader(url), process_group=group)
        assert_same(full(state), whole(2))


def test_some_ranks_save_in_a_group_of_their_own(rank_pool: RankPool, tmp_path: Path) -> None:
    """The manifest knows a world of two; all four ranks load it afterwards."""
    rank_pool.run(save_in_subgroup, str(tmp_path))
    assert read_manifest(open_store(tmp_path)).world_size == 2
    for state in rank_pool.run(loaded, str(tmp_path)):
        assert_same(state, whole(2))


def save_alone(url: str) -> None:
    """Rank 1 saves and loads without collectives while the others meet in one."""
    if dist.get_rank() == 1:
        state = {"weight": torch.arange(5), "object": {"a": 1}}
        dcp.save(state, storage_writer=RemoteWriter(url), no_dist=True)
        template = {"weight": torch.zeros(5, dtype=torch.int64), "object": {"a": 0}}
        dcp.load(template, storage_reader=RemoteReader(url), no_dist=True)
        assert_same(full(template), full(state))
    dist.barrier()


def test_one_rank_of_several_saves_without_the_others(rank_pool: RankPool, tmp_path: Path) -> None:
    """`no_dist=True` on rank 1 of 3."""
    rank_pool.run(save_alone, str(tmp_path), ranks=(0, 1, 2))
    assert torch.equal(load(tmp_path)["weight"], torch.arange(5))


def save_while_training(url: str, saves: int) -> list[int]:
    """Saves run in a thread, on a group of their own; the main thread uses the default group and changes the state."""
    group = dist.new_group(backend="gloo")
    mesh = world()
    sums = []
    for number in range(1, saves + 1):
        state = sharded(mesh, factor=number)
        future = cast(
            "Future[object]",
            dcp.async_save(state, storage_writer=RemoteWriter(f"{url}/{number}"), process_group=group),
        )
        state["same"].zero_()
        state["rows"].to_local().zero_()
        agreed = torch.tensor(0)
        # All ranks leave in the same round: one that left alone would keep the others waiting in the next.
        while not agreed:
            total = torch.tensor(dist.get_rank())
            dist.all_reduce(total)
            sums.append(int(total))
            agreed = torch.tensor(int(future.done()))
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        future.result()
    return sums


def test_background_saves_beside_collectives_of_the_main_thread(rank_pool: RankPool, tmp_path: Path) -> None:
    """`async_save` with its thread: what is committed is the state at the call, although it changed at once."""
    for sums in rank_pool.run(save_while_training, str(tmp_path), 3, ranks=(0, 1, 2)):
        assert set(sums) == {3}
    for number in (1, 2, 3):
        assert_same(full(load(tmp_path / str(number))), whole(number))


def save_again(url: str, caching: bool) -> list[str]:
    """One writer, three saves: its own URL, another by `checkpoint_id`, and the first again."""
    mesh = world()
    writer = RemoteWriter(f"{url}/first", overwrite=True)
    planner = DefaultSavePlanner(enable_plan_caching=caching)
    save_ids = []
    for factor, where in ((1, None), (2, f"{url}/second"), (3, f"{url}/first")):
        dcp.save(sharded(mesh, factor), checkpoint_id=where, storage_writer=writer, planner=planner)
        save_ids.append(str(writer.save_id))
    return save_ids


def read_again(url: str) -> list[State]:
    """One reader, three loads."""
    mesh = world()
    reader = RemoteReader(f"{url}/first")
    states = []
    for where in (None, f"{url}/second", f"{url}/first"):
        state = sharded(mesh, factor=0)
        dcp.load(state, checkpoint_id=where, storage_reader=reader)
        states.append(full(state))
    return states


@pytest.mark.parametrize("caching", [False, True])
def test_a_writer_and_a_reader_are_used_several_times(caching: bool, rank_pool: RankPool, tmp_path: Path) -> None:
    """With and without torch's cache of plans, which replays what a writer returned at the first save."""
    save_ids = rank_pool.run(save_again, str(tmp_path), caching)[0]
    for states in rank_pool.run(read_again, str(tmp_path)):
        for state, factor in zip(states, (3, 2, 3), strict=True):
            assert_same(state, whole(factor))
    assert len(set(save_ids)) == 3
    assert read_manifest(open_store(tmp_path / "first")).save_id == save_ids[2]
    assert read_manifest(open_store(tmp_path / "first")).replaces == (save_ids[0],)


def refused_by_memory() -> list[dict[int, str]]:
    """The failures of a save and of a load through a store that only this process sees."""
    failures = []
    state = sharded(world(), factor=1)
    attempts: list[Callable[[], object]] = [
        lambda: dcp.save(state, storage_writer=RemoteWriter("memory://refused")),
        lambda: dcp.load(state, storage_reader=RemoteReader("memory://refused")),
    ]
    for attempt in attempts:
        try:
            attempt()
        except CheckpointException as error:
            failures.append({rank: str(cause) for rank, (cause, _) in error.failures.items()})
    dist.barrier()
    return failures


def test_a_store_of_one_process_is_refused_by_all_ranks(rank_pool: RankPool) -> None:
    """Every rank raises, with the reason of every rank, and the group still works."""
    for failures in rank_pool.run(refused_by_memory):
        assert len(failures) == 2
        for by_rank in failures:
            assert sorted(by_rank) == [0, 1, 2, 3]
            for message in by_rank.values():
                assert "visible to one process only" in message


def refused_without_collectives(url: str) -> tuple[str, str]:
    error: BaseException
    try:
        dcp.save(sharded(world(), factor=1), storage_writer=RemoteWriter(url), use_collectives=False)
    except (CheckpointException, InvalidArgumentError) as caught:
        error = caught
    dist.barrier()
    return type(error).__name__, str(error)


def test_a_save_without_collectives_is_refused_by_all_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    """`use_collectives=False` raises on every rank before anything is written; nobody waits for anybody."""
    for name, message in rank_pool.run(refused_without_collectives, str(tmp_path / "none")):
        assert name == "InvalidArgumentError"
        assert "use_collectives=False is not supported" in message
    assert not (tmp_path / "none").exists()
