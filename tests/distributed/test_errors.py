"""Failures of one rank are raised on all, at once, with their cause; and afterwards the ranks can save again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptCheckpointError,
    PermissionDeniedError,
    SaveFailedError,
    UnsafeObjectError,
)
from dcp_remote.storage import LocalStore, ObjectStore
from dcp_remote.storage.wrapper import Request, Verb, WrappedStore
from dcp_remote.testing import FaultyStore, matching
from tests.support.rank_pool import RankPool, RanksFailedError
from tests.support.training import assert_same, full

State = dict[str, Any]
_Answer = TypeVar("_Answer")

RANKS = range(3)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save or load ended on a rank: what `CheckpointException.failures` holds, by rank."""

    failures: dict[int, BaseException]

    def only(self, rank: int) -> BaseException:
        """The failure of this rank, which is the only one."""
        assert list(self.failures) == [rank]
        return self.failures[rank]


class NeedsCode:
    """Object that only code can load."""


def sharded(factor: int) -> State:
    """Rows that every rank has some of, and a tensor and an object that only this rank knows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(60.0).reshape(6, 10) * factor
    own = {"tensor": torch.full((3,), dist.get_rank() * factor), "object": [dist.get_rank()]}
    return {"rows": distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None), f"rank_{dist.get_rank()}": own}


def whole(factor: int) -> State:
    leaves: State = {"/rows": torch.arange(60.0).reshape(6, 10) * factor}
    for rank in RANKS:
        leaves |= {f"/rank_{rank}/tensor": torch.full((3,), rank * factor), f"/rank_{rank}/object/0": rank}
    return leaves


def outcome(path: Path, attempt: Callable[[], object]) -> Outcome:
    """Make an attempt that fails on every rank; then save and load in the same group, where no rank may be adrift."""
    try:
        attempt()
    except CheckpointException as error:
        failures = {rank: cause for rank, (cause, _) in error.failures.items()}
    else:
        raise AssertionError("nothing was raised")
    elsewhere = path.with_name(f"{path.name}-elsewhere")
    dcp.save(sharded(4), storage_writer=RemoteWriter(elsewhere))
    state = sharded(0)
    dcp.load(state, storage_reader=RemoteReader(elsewhere))
    assert_same(full(state["rows"]), full(sharded(4)["rows"]))
    return Outcome(failures)


def save(path: Path, factor: int) -> None:
    dcp.save(sharded(factor), storage_writer=RemoteWriter(path))


def assert_saves_again(rank_pool: RankPool, path: Path) -> None:
    """There is no checkpoint here; the same ranks save one, and a process without ranks reads it."""
    with pytest.raises(CheckpointNotFoundError):
        load(path)
    pids = rank_pool.pids
    rank_pool.run(save, path, 5, ranks=RANKS)
    assert rank_pool.pids == pids
    assert_same(full(load(path)), whole(5))


def keys(path: Path) -> list[str]:
    return [info.key for info in LocalStore(str(path)).list()]


# ---- a save that fails


def save_unsafe(path: Path, rank: int) -> Outcome:
    state = sharded(1)
    if dist.get_rank() == rank:
        state[f"rank_{rank}"]["unsafe"] = NeedsCode()
    return outcome(path, lambda: dcp.save(state, storage_writer=RemoteWriter(path)))


@pytest.mark.parametrize("rank", RANKS)
def test_an_object_that_one_rank_cannot_save_safely(rank: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """That rank uploads nothing; every rank learns key and type."""
    for result in rank_pool.run(save_unsafe, tmp_path, rank, ranks=RANKS):
        error = result.only(rank)
        assert isinstance(error, UnsafeObjectError)
        assert f"rank_{rank}.unsafe" in str(error)
        assert "NeedsCode" in str(error)
    assert not [key for key in keys(tmp_path) if f"rank-0000{rank}" in key]
    assert_saves_again(rank_pool, tmp_path)


def is_shard_put(verb: Verb, key: str, number: int) -> bool:
    return verb == "put" and key.startswith("shards/")


def denied() -> BaseException:
    return PermissionDeniedError("An injected refusal.")


def save_denied(path: Path, rank: int) -> Outcome:
    store: ObjectStore = LocalStore(str(path))
    if dist.get_rank() == rank:
        store = FaultyStore(store, [matching(is_shard_put, "request", persistent=True, error=denied)])
    return outcome(path, lambda: dcp.save(sharded(1), storage_writer=RemoteWriter(store)))


@pytest.mark.parametrize("rank", RANKS)
def test_a_store_that_refuses_one_rank(rank: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """The error names rank, shard, attempts and cause; a refusal is not repeated."""
    for result in rank_pool.run(save_denied, tmp_path, rank, ranks=RANKS):
        error = result.only(rank)
        assert type(error) is SaveFailedError
        assert (error.details["rank"], error.details["attempts"]) == (rank, 1)
        assert f"rank-0000{rank}" in str(error.details["shard"])
        assert error.details["cause"] == "PermissionDeniedError"
        assert "An injected refusal." in str(error)
    assert not [key for key in keys(tmp_path) if f"rank-0000{rank}" in key]
    assert_saves_again(rank_pool, tmp_path)


def save_unanswered(path: Path, lost: Literal["request", "response"]) -> Outcome:
    store: ObjectStore = LocalStore(str(path))
    if dist.get_rank() == 1:
        store = FaultyStore(store, [matching(is_shard_put, lost, persistent=True)])
    return outcome(path, lambda: dcp.save(sharded(1), storage_writer=RemoteWriter(store, timeout_seconds=1.5)))


@pytest.mark.parametrize("lost", ["request", "response"])
def test_a_store_that_answers_one_rank_no_more(
    lost: Literal["request", "response"], rank_pool: RankPool, tmp_path: Path
) -> None:
    """Requests are repeated until the deadline of the save; what arrived unanswered is deleted again."""
    for result in rank_pool.run(save_unanswered, tmp_path, lost, ranks=RANKS):
        error = result.only(1)
        assert isinstance(error, SaveFailedError)
        attempts = error.details["attempts"]
        assert isinstance(attempts, int)
        assert attempts > 1
        assert error.details["rank"] == 1
    assert not [key for key in keys(tmp_path) if "rank-00001" in key]
    assert_saves_again(rank_pool, tmp_path)


def save_denied_in_background(path: Path) -> Outcome:
    store: ObjectStore = LocalStore(str(path))
    if dist.get_rank() == 1:
        store = FaultyStore(store, [matching(is_shard_put, "request", persistent=True, error=denied)])
    group = dist.new_group(backend="gloo")
    saving = cast("Future[object]", dcp.async_save(sharded(1), storage_writer=RemoteWriter(store), process_group=group))
    return outcome(path, saving.result)


def test_a_background_save_that_fails(rank_pool: RankPool, tmp_path: Path) -> None:
    """The future of `async_save` raises on every rank what one of them met."""
    for result in rank_pool.run(save_denied_in_background, tmp_path, ranks=RANKS):
        error = result.only(1)
        assert isinstance(error, SaveFailedError)
        assert error.details["rank"] == 1
    assert_saves_again(rank_pool, tmp_path)


def save_over(path: Path) -> Outcome:
    return outcome(path, lambda: dcp.save(sharded(7), storage_writer=RemoteWriter(path)))


def test_a_checkpoint_that_is_there_already(rank_pool: RankPool, tmp_path: Path) -> None:
    """The coordinator sees it before anything is uploaded, and all ranks raise."""
    rank_pool.run(save, tmp_path, 5, ranks=RANKS)
    before = keys(tmp_path)
    for result in rank_pool.run(save_over, tmp_path, ranks=RANKS):
        error = result.only(0)
        assert isinstance(error, CheckpointExistsError)
        assert "overwrite=True" in str(error)
    assert keys(tmp_path) == before
    assert_same(full(load(tmp_path)), whole(5))


class ForgetfulPlanner(DefaultSavePlanner):
    """Loses what rank 1 should write of the rows."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        if dist.get_rank() == 1:
            plan.items[:] = [item for item in plan.items if item.index.fqn != "rows"]
        return plan


class RivalPlanner(DefaultSavePlanner):
    """Lets another save be committed in the middle of this one."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        dcp.save({"rival": torch.ones(2)}, storage_writer=RemoteWriter(self._path), no_dist=True)
        return super().create_global_plan(all_plans)


def save_planned(path: Path, kind: str) -> Outcome:
    planner: SavePlanner = ForgetfulPlanner() if kind == "forgetful" else RivalPlanner(path)
    return outcome(path, lambda: dcp.save(sharded(1), storage_writer=RemoteWriter(path), planner=planner))


def test_a_chunk_that_nobody_wrote(rank_pool: RankPool, tmp_path: Path) -> None:
    """A planner that drops an item: the coordinator sees the gap, names the tensor, and does not commit."""
    for result in rank_pool.run(save_planned, tmp_path, "forgetful", ranks=RANKS):
        error = result.only(0)
        assert isinstance(error, SaveFailedError)
        assert error.details["tensor"] == "rows"
    assert_saves_again(rank_pool, tmp_path)


def test_another_save_that_is_committed_first(rank_pool: RankPool, tmp_path: Path) -> None:
    """A rival commits between this save's look and its commit: this one fails, the rival's checkpoint stays."""
    for result in rank_pool.run(save_planned, tmp_path, "rival", ranks=RANKS):
        assert isinstance(result.only(0), CommitConflictError)
    assert_same(full(load(tmp_path)), {"/rival": torch.ones(2)})


# ---- a load that fails


def read(path: Path) -> Outcome:
    """Load what this rank saved."""
    return outcome(path, lambda: dcp.load(sharded(0), storage_reader=RemoteReader(path)))


def reload(path: Path) -> State:
    state = sharded(0)
    dcp.load(state, storage_reader=RemoteReader(path))
    return full(state)


def shard_of(path: Path, rank: int) -> Path:
    """The shard of this rank that holds the rows, its first top-level key being another."""
    (shard,) = [file for file in path.glob(f"shards/*/rank-0000{rank}-*") if b'"rows' in file.read_bytes()]
    return shard


def assert_only_one_rank_was_concerned(rank_pool: RankPool, path: Path, results: list[Outcome], shard: Path) -> None:
    for result in results:
        error = result.only(1)
        assert isinstance(error, CorruptCheckpointError)
        assert shard.name in str(error)
    state, *_ = rank_pool.run(reload, path, ranks=RANKS)
    assert torch.equal(state["/rows"], whole(5)["/rows"])


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_shard_that_one_rank_reads(damage: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """Every rank raises what rank 1 found, with the shard; when it is put right, the same ranks load."""
    rank_pool.run(save, tmp_path, 5, ranks=RANKS)
    shard = shard_of(tmp_path, 1)
    data = shard.read_bytes()
    if damage == "flipped":
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "truncated":
        shard.write_bytes(data[:-1])
    else:
        shard.unlink()
    results = rank_pool.run(read, tmp_path, ranks=RANKS)
    shard.write_bytes(data)
    assert_only_one_rank_was_concerned(rank_pool, tmp_path, results, shard)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_manifest_that_is_missing_or_damaged(damage: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """Every rank reads it, finds the same, and raises it as what it is: who resumes must tell absence from damage."""
    rank_pool.run(save, tmp_path, 5, ranks=RANKS)
    manifest = tmp_path / "manifest.json"
    data = manifest.read_bytes()
    manifest.write_bytes(data[: len(data) // 2])
    if damage == "missing":
        manifest.unlink()
    kind = CheckpointNotFoundError if damage == "missing" else CorruptCheckpointError
    for result in rank_pool.run(read, tmp_path, ranks=RANKS):
        assert sorted(result.failures) == list(RANKS)
        assert [type(error) for error in result.failures.values()] == [kind] * len(RANKS)
    manifest.write_bytes(data)
    assert torch.equal(rank_pool.run(reload, tmp_path, ranks=RANKS)[2]["/rows"], whole(5)["/rows"])


# ---- a job that is killed

KillPoint = Literal["before-shard", "after-shard", "before-commit", "after-commit"]


class DeadlyStore(WrappedStore):
    """Kills its process, as a scheduler does, before or after a certain put."""

    def __init__(self, store: ObjectStore, point: KillPoint) -> None:
        super().__init__(store)
        self._point = point

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        where = "commit" if request.key == "manifest.json" else "shard"
        if request.verb != "put" or not self._point.endswith(where):
            return send()
        if self._point.startswith("after"):
            send()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def save_and_die(path: Path, point: KillPoint) -> None:
    """Each rank dies at its own first shard; or the coordinator at the commit, and the others when it is gone."""
    store = DeadlyStore(LocalStore(str(path)), point)
    try:
        dcp.save(sharded(3), storage_writer=RemoteWriter(store, overwrite=True))
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_in_save(rank_pool: RankPool, path: Path, point: KillPoint) -> None:
    with pytest.raises(RanksFailedError) as caught:
        rank_pool.run(save_and_die, path, point, ranks=RANKS)
    signals = {rank: failure.signal for rank, failure in caught.value.failures.items()}
    assert signals == dict.fromkeys(RANKS, signal.SIGKILL)


@pytest.mark.torture(smoke=False)
@pytest.mark.parametrize("point", ["before-shard", "after-shard", "before-commit", "after-commit"])
def test_a_job_that_is_killed(point: KillPoint, rank_pool: RankPool, tmp_path: Path) -> None:
    """SIGKILL of all ranks: no checkpoint before the commit, a whole one after; other processes go on."""
    kill_in_save(rank_pool, tmp_path, point)
    assert any(key.startswith("shards/") for key in keys(tmp_path)) == (point != "before-shard")
    if point == "after-commit":
        assert_same(full(load(tmp_path)), whole(3))
    else:
        with pytest.raises(CheckpointNotFoundError):
            load(tmp_path)
        rank_pool.run(save, tmp_path, 5, ranks=RANKS)
        assert_same(full(load(tmp_path)), whole(5))


@pytest.mark.torture
@pytest.mark.parametrize("point", ["after-shard", "after-commit"])
def test_a_job_that_is_killed_while_it_overwrites(point: KillPoint, rank_pool: RankPool, tmp_path: Path) -> None:
    """Before the commit the old checkpoint is whole, after it the new one; nothing lies between."""
    rank_pool.run(save, tmp_path, 5, ranks=RANKS)
    kill_in_save(rank_pool, tmp_path, point)
    assert_same(full(load(tmp_path)), whole(3 if point == "after-commit" else 5))
