"""`dcp.async_save` with both of torch's executors, and saves that run at once: refused or in turn, never mixed."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, _async_process_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.errors import (
    BucketNotFoundError,
    CheckpointExistsError,
    InvalidArgumentError,
)
from dcp_remote.storage import MemoryStore
from dcp_remote.testing.servers import S3Server
from tests.support.rank_pool import RankPool
from tests.support.training import assert_same, full

pytestmark = pytest.mark.torture(smoke=False)

State: TypeAlias = dict[str, Any]
Failures: TypeAlias = dict[int, BaseException]


WAIT_SECONDS = 60.0

# What nobody may find in a log, an error or a representation.
SECRET = "not-to-be-told-5b1f"


def sharded(factor: int) -> State:
    """Rows that the ranks share, a tensor that they all have, and objects; the ranks build it together."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(50_000.0).reshape(500, 100) * factor
    return {
        "model": {"rows": distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None)},
        "optim": {"same": torch.full((4,), factor), "nested": [factor, {"text": "a"}]},
    }


def whole(factor: int) -> State:
    return {
        "/model/rows": torch.arange(50_000.0).reshape(500, 100) * factor,
        "/optim/same": torch.full((4,), factor),
        "/optim/nested/0": factor,
        "/optim/nested/1/text": "a",
    }


def ruin(state: State) -> None:
    """Overwrite a state, as training does as soon as the save has returned."""
    state["model"]["rows"].to_local().fill_(-1)
    state["optim"]["same"].fill_(-1)
    state["optim"]["nested"].append("more")


def in_child(state: State, writer: RemoteWriter, **settings: Any) -> Future[object]:
    """Save from the process that torch keeps for it."""
    answer = dcp.async_save(
        state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS, **settings
    )
    return cast("Future[object]", answer)


def failures(future: Future[object]) -> Failures:
    """Return the error of a save by rank; empty if the save was committed."""
    try:
        future.result(WAIT_SECONDS)
    except CheckpointException as error:
        return {rank: cause for rank, (cause, _) in error.failures.items()}
    return {}


def raised(future: Future[object]) -> str:
    """Return the text of the error of a save, as a user reads the error."""
    try:
        future.result(WAIT_SECONDS)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # whatever it is, the test wants to see it
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.fixture
def rendezvous() -> Iterator[int]:
    """The port of a server where torch's child processes find each other.

    By default torch probes a port, and one of the children binds it seconds later, when somebody else may have it.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    port: int = listening.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    yield port
    del store


@contextmanager
def children(port: int) -> Iterator[None]:
    """Within this block, torch may keep a child of this process; after it there is none."""
    os.environ |= {"DCP_USE_PREFIX_STORE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        yield
    finally:
        # torch keeps it for the life of the process, and ends it when nobody refers to it any more.
        _async_process_executor._CHECKPOINT_PROCESS = None


@contextmanager
def standard_error_in(path: str) -> Iterator[None]:
    """Append the standard error of this process, and of those that this process starts meanwhile, to a file."""
    before = os.dup(2)
    with open(path, "ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


# ---- in a process


def save_in_children(port: int, folder: str, bucket: str, options: dict[str, str], log: str) -> list[Failures]:
    """Save after save from one child per rank; what those raised that had to fail."""
    logging.basicConfig(level=logging.DEBUG)
    # botocore's own DEBUG log is not ours to keep quiet.
    logging.getLogger("botocore").setLevel(logging.INFO)
    with standard_error_in(log), children(port):
        # A client that this process has used is of no use in a child, and must not get there.
        dcp.save(sharded(0), storage_writer=RemoteWriter(f"{bucket}/0", storage_options=options))
        for number, url in enumerate([f"{bucket}/1", f"{folder}/2", f"{bucket}/3"], 1):
            settings = {"storage_options": options} if url.startswith("s3:") else {}
            state = sharded(number)
            future = in_child(state, RemoteWriter(url, **cast("Any", settings)))
            ruin(state)
            assert failures(future) == {}
        refused = [
            failures(in_child(sharded(9), RemoteWriter(url, storage_options=options)))
            for url in (f"{bucket}/1", f"s3://no-such-{uuid.uuid4().hex}/x")
        ]
        writer = RemoteWriter(f"{bucket}/unused", storage_options=options)
        assert failures(in_child(sharded(4), writer, checkpoint_id=f"{bucket}/4")) == {}
        child = _async_process_executor._CHECKPOINT_PROCESS
        assert child is not None
        assert child._save_process.pid != os.getpid()
        for number in range(5):
            state = sharded(99)
            dcp.load(
                state,
                storage_reader=RemoteReader(f"{folder}/2")
                if number == 2
                else RemoteReader(f"{bucket}/{number}", storage_options=options),
            )
            assert_same(full(state), whole(number))
    return refused


def test_saves_from_processes_of_their_own(rendezvous: int, s3_server: S3Server, tmp_path: Path) -> None:
    """Two ranks, a child each, six saves to S3 and a folder, whose state changes as soon as it is staged.

    What two of them raise in the children is raised here, by class and details, and the next save is as good as any.
    Credentials reach the children, and no log of parents or children, no error and no representation.
    """
    bucket = f"test-{uuid.uuid4().hex}"
    s3_server.create_bucket(bucket)
    options = s3_server.storage_options | {"aws_secret_access_key": SECRET}
    log = tmp_path / "log"
    with RankPool(2) as pool:
        results = pool.run(save_in_children, rendezvous, str(tmp_path), f"s3://{bucket}", options, str(log))
    for exists, missing in results:
        assert list(exists) == [0]
        assert isinstance(exists[0], CheckpointExistsError)
        assert exists[0].details["url"] == f"s3://{bucket}/1"
        assert list(missing) == [0]  # before anything is uploaded: the server's conditions are tried there
        assert isinstance(missing[0], BucketNotFoundError)
        assert "never created implicitly" in str(missing[0])
        assert SECRET not in repr([exists, missing])
    assert SECRET not in repr(RemoteWriter(f"s3://{bucket}/1", storage_options=options))
    text = log.read_text()
    assert text.count(f"committed s3://{bucket}/1") == 1
    assert "Checkpoint already exists" in text
    assert SECRET not in text


def save_to_memory(port: int, folder: str) -> None:
    """One rank: what only this process sees is refused, by name and without one; and the child lives on."""
    with children(port):
        name = f"memory://{uuid.uuid4().hex}"
        refused = failures(in_child({"x": torch.ones(3)}, RemoteWriter(name)))
        moved = failures(in_child({"x": torch.ones(3)}, RemoteWriter(f"{name}/a"), checkpoint_id=f"{name}/b"))
        for causes in (refused, moved):
            assert isinstance(causes[0], InvalidArgumentError)
            assert "visible only to the process that opened it" in str(causes[0])
        anonymous = in_child({"x": torch.ones(3)}, RemoteWriter(MemoryStore()))
        assert "without a name cannot be pickled" in raised(anonymous)
        assert failures(in_child({"x": torch.ones(3)}, RemoteWriter(folder))) == {}


def test_memory_is_no_place_to_save_to_from_another_process(rendezvous: int, tmp_path: Path) -> None:
    """The child would commit to a memory of its own: told to be there, and seen by nobody."""
    with RankPool(1) as pool:
        pool.run(save_to_memory, rendezvous, str(tmp_path / "kept"))
    assert load(tmp_path / "kept")["x"].tolist() == [1.0] * 3


# ---- saves that run at once


def save_in_opposite_orders(folder: str) -> list[Failures]:
    """Rank 0 saves one checkpoint and then another, rank 1 the other way round."""
    ends: list[Failures] = []
    for number in (1, 2) if dist.get_rank() == 0 else (2, 1):
        try:
            dcp.save(sharded(number), storage_writer=RemoteWriter(f"{folder}/{number}"))
        except CheckpointException as error:
            ends.append({rank: cause for rank, (cause, _) in error.failures.items()})
    return ends


def test_saves_whose_ranks_cross_commit_nothing(rank_pool: RankPool, tmp_path: Path) -> None:
    """Two threads that save in one group at a time are so crossed: torch pairs collectives in the order they begin.

    Each manifest would name shards that lie under the other URL. The same happens to a URL that each rank makes for
    itself, of the time, say. (Two such saves to one URL nobody can tell apart: overlapping saves need a group each.)
    """
    for ends in rank_pool.run(save_in_opposite_orders, str(tmp_path), ranks=(0, 1)):
        for end in ends:
            assert isinstance(end[0], InvalidArgumentError)
            assert "Ranks save to different URLs" in str(end[0])
        assert len(ends) == 2
    assert list(tmp_path.rglob("manifest.json")) == []
