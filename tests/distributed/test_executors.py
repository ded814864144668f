"""`dcp.async_save` with both of torch's executors, and saves that run at once: refused or in turn, never mixed."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

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
    CommitConflictError,
    InvalidArgumentError,
)
from dcp_remote.storage import LocalStore, MemoryStore, ObjectStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from dcp_remote.testing.servers import S3Server
from tests.support.figures import count
from tests.support.histories import first_seed
from tests.support.rank_pool import RankPool
from tests.support.training import assert_same, full

pytestmark = pytest.mark.torture(smoke=False)

State: TypeAlias = dict[str, Any]
Failures: TypeAlias = dict[int, BaseException]

_Answer = TypeVar("_Answer")

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


def test_saves_from_a_thread(s3_server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    """One process without a group, save after save to S3, by one writer; two must fail, and leave the next alone."""
    bucket = f"test-{uuid.uuid4().hex}"
    s3_server.create_bucket(bucket)
    options = s3_server.storage_options | {"aws_secret_access_key": SECRET}
    writer = RemoteWriter(f"s3://{bucket}/unused", storage_options=options)
    caplog.set_level(logging.DEBUG, "dcp_remote")
    refused = {}
    state: State = {"w": torch.zeros(50_000), "list": [0]}
    for number, url in enumerate([f"{bucket}/1", f"{bucket}/1", f"no-such-{bucket}/3", f"{bucket}/4"], 1):
        state["w"].fill_(number)
        state["list"].append(number)
        future = dcp.async_save(state, checkpoint_id=f"s3://{url}", storage_writer=writer, no_dist=True)
        state["w"].fill_(-1)
        refused[number] = failures(cast("Future[object]", future))
    assert [type(causes.get(0)) for causes in refused.values()] == [
        type(None),
        CheckpointExistsError,
        BucketNotFoundError,
        type(None),
    ]
    for number in (1, 4):
        found = load(f"s3://{bucket}/{number}", storage_options=options)
        assert torch.equal(found["w"], torch.full((50_000,), float(number)))
        assert found["list"] == list(range(number + 1))
    assert f"committed s3://{bucket}/4" in caplog.text
    assert SECRET not in f"{caplog.text} {refused} {writer!r}"


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


class FatefulStore(WrappedStore):
    """Store in which rank 1, about to put its first shard, reports that and waits to be killed."""

    def __init__(self, store: ObjectStore, pipe: str) -> None:
        super().__init__(store)
        self._pipe = pipe

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        if request.verb == "put" and "rank-00001" in request.key and "-0000." in request.key:
            with open(self._pipe, "w", encoding="ascii") as pipe:
                pipe.write("now")
            threading.Event().wait(WAIT_SECONDS)
        return send()


def save_beside_a_death(port: int, folder: str, pipe: str) -> list[str]:
    """The child of rank 1 is killed in the middle of a save; how that one ends, the next, and then one in a thread."""
    with children(port):
        assert failures(in_child(sharded(1), RemoteWriter(folder))) == {}
        store = FatefulStore(LocalStore(folder), pipe)
        future = in_child(sharded(2), RemoteWriter(store, overwrite=True))
        if dist.get_rank() == 1:
            child = _async_process_executor._CHECKPOINT_PROCESS
            assert child is not None
            assert child._save_process.pid is not None
            with open(pipe, encoding="ascii") as told:
                assert told.read() == "now"
            os.kill(child._save_process.pid, signal.SIGKILL)
        ends = [raised(future)]
        ends.append(raised(in_child(sharded(3), RemoteWriter(f"{folder}/other"))))
        answer = dcp.async_save(sharded(4), storage_writer=RemoteWriter(f"{folder}/thread"))
        ends.append(raised(cast("Future[object]", answer)))
    return ends


def test_a_child_that_is_killed_in_the_middle_of_a_save(rendezvous: int, tmp_path: Path) -> None:
    """SIGKILL to the child of rank 1, in its put: both ranks are told, and the old checkpoint is what there is.

    torch never starts another child: every later save from it fails at once, and one from a thread is as good as ever.
    """
    folder, pipe = tmp_path / "saved", tmp_path / "pipe"
    os.mkfifo(pipe)
    with RankPool(2) as pool:
        results = pool.run(save_beside_a_death, rendezvous, str(folder), str(pipe))
    count("ranks killed")
    assert "Checkpoint background process is dead" in results[1][0]
    for killed, after, thread in results:
        assert killed != "nothing"
        assert after != "nothing"
        assert thread == "nothing"
    assert_same(full(load(folder)), whole(1))
    assert_same(full(load(folder / "thread")), whole(4))
    assert not (folder / "other" / "manifest.json").exists()


# ---- saves that run at once


def test_the_process_executor_needs_a_group(tmp_path: Path) -> None:
    """One process without one is refused by torch, whatever `no_dist` says, and nothing is written."""
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        in_child({"x": torch.ones(3)}, RemoteWriter(tmp_path / "none"), no_dist=True)
    assert list(tmp_path.iterdir()) == []


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


@dataclass(frozen=True, slots=True)
class Attempt:
    """One of several saves that run at once; `number` fills its state."""

    number: int
    url: str
    future: Future[object]


def storm(folder: str, dice: random.Random, *, overwrite: bool) -> list[Attempt]:
    """Begin eight saves at once, each in a thread of torch's, by two writers and to two URLs."""
    writers = [RemoteWriter(f"{folder}/unused", overwrite=overwrite) for _ in range(2)]
    attempts = []
    for number in range(1, 9):
        url = f"{folder}/{dice.randrange(2)}"
        state = {top: {"w": torch.full((dice.choice([3, 9_000]),), number), "step": number} for top in "abc"}
        answer = dcp.async_save(state, checkpoint_id=url, storage_writer=dice.choice(writers), no_dist=True)
        attempts.append(Attempt(number, url, cast("Future[object]", answer)))
    return attempts


def numbers_in(state: State) -> set[int]:
    return {int(n) for part in state.values() for n in [part["step"], *part["w"].tolist()]}


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_saves_at_once_are_refused_or_follow_each_other(
    scheme: str, overwrite: bool, tmp_path: Path, torture_seconds: float
) -> None:
    """Eight background saves by two writers to two URLs, again and again until the time is over.

    What is loaded is one of those that said so, whole; every other says why not. Without `overwrite` it is the only
    one. At least one is committed: nobody loses to a save that fails.
    """
    end_seconds = time.monotonic() + torture_seconds / 4
    first = first_seed(torture_seconds)
    for seed in itertools.count(first):
        if seed > first and time.monotonic() >= end_seconds:
            break
        folder = f"file://{tmp_path}/{seed}" if scheme == "file" else f"memory://{uuid.uuid4().hex}"
        attempts = storm(folder, random.Random(seed), overwrite=overwrite)
        committed: dict[str, list[int]] = {attempt.url: [] for attempt in attempts}
        for attempt in attempts:
            causes = failures(attempt.future)
            assert all(isinstance(e, CheckpointExistsError | CommitConflictError) for e in causes.values()), (
                seed,
                causes,
            )
            if not causes:
                committed[attempt.url].append(attempt.number)
        for url, numbers in committed.items():
            found = numbers_in(load(url))
            assert len(found) == 1, (seed, url, found)
            assert found <= set(numbers), (seed, url, found, numbers)
            assert overwrite or len(numbers) == 1, (seed, url, numbers)
