"""Saves and loads that overlap, fail in unusual ways, or have a state that changes meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError, SaveFailedError
from dcp_remote.storage import LocalStore
from dcp_remote.storage.base import Condition, Version
from dcp_remote.storage.memory import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.simulated_ranks import save_as_ranks

WAIT_SECONDS = 30.0


class GatedSavePlanner(DefaultSavePlanner):
    """Planner that waits in the middle of a save until its gate is opened."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._wait()
        return super().finish_plan(new_plan)


class GatedLoadPlanner(DefaultLoadPlanner):
    """Planner that waits in the middle of a load until its gate is opened."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self._wait()
        return super().finish_plan(new_plan)


def meanwhile(first: Callable[[Callable[[], None]], Any], second: Callable[[], Any]) -> None:
    """Run `second` in this thread while `first` waits in the middle of its work in another."""
    reached, gate = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert gate.wait(WAIT_SECONDS)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(first, wait)
        try:
            assert reached.wait(WAIT_SECONDS)
            second()
        finally:
            gate.set()
        future.result()


def test_two_saves_by_one_writer_are_never_mixed(tmp_path: Path) -> None:
    """Two saves by one writer to two URLs, one within the other, give two checkpoints."""
    writer = RemoteWriter(tmp_path / "base")

    def first(wait: Callable[[], None]) -> None:
        dcp.save(
            {"x": torch.full((3,), 1.0)},
            checkpoint_id=tmp_path / "1",
            storage_writer=writer,
            planner=GatedSavePlanner(wait),
            no_dist=True,
        )

    def second() -> None:
        dcp.save({"x": torch.full((3,), 2.0)}, checkpoint_id=tmp_path / "2", storage_writer=writer, no_dist=True)

    meanwhile(first, second)
    assert load(tmp_path / "1")["x"].tolist() == [1.0] * 3
    assert load(tmp_path / "2")["x"].tolist() == [2.0] * 3


def test_two_saves_by_one_writer_to_one_url_are_one_checkpoint(tmp_path: Path) -> None:
    """Two overlapping saves by one writer to one URL: the later commit is refused; the earlier one stays."""
    writer = RemoteWriter(tmp_path)

    def first(wait: Callable[[], None]) -> None:
        with pytest.raises(CheckpointException, match="Another save was committed"):
            dcp.save({"x": 1}, storage_writer=writer, planner=GatedSavePlanner(wait), no_dist=True)

    meanwhile(first, lambda: dcp.save({"x": 2}, storage_writer=writer, no_dist=True))
    assert load(tmp_path) == {"x": 2}


def test_two_loads_by_one_reader_are_never_mixed(tmp_path: Path) -> None:
    """Two overlapping loads by one reader each get their own checkpoint."""
    for number in (1, 2):
        dcp.save(
            {"x": torch.full((3,), float(number))}, storage_writer=RemoteWriter(tmp_path / str(number)), no_dist=True
        )
    reader = RemoteReader(tmp_path / "base")
    found = {1: {"x": torch.zeros(3)}, 2: {"x": torch.zeros(3)}}

    def first(wait: Callable[[], None]) -> None:
        planner = GatedLoadPlanner(wait)
        dcp.load(found[1], checkpoint_id=tmp_path / "1", storage_reader=reader, planner=planner, no_dist=True)

    meanwhile(first, lambda: dcp.load(found[2], checkpoint_id=tmp_path / "2", storage_reader=reader, no_dist=True))
    assert found[1]["x"].tolist() == [1.0] * 3
    assert found[2]["x"].tolist() == [2.0] * 3


def test_a_background_save_outlives_the_script(tmp_path: Path) -> None:
    """After `async_save` as the last statement of a script, the interpreter exits with the checkpoint saved."""
    script = """
import sys, torch, torch.distributed.checkpoint as dcp
from dcp_remote import RemoteWriter
dcp.async_save({"x": torch.arange(300_000)}, storage_writer=RemoteWriter(sys.argv[1]), no_dist=True)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], check=True, timeout=120)
    assert torch.equal(load(tmp_path)["x"], torch.arange(300_000))


class MeddlingStore(LocalStore):
    """Store that changes a tensor of the state while its shard is uploaded, as a careless training loop does."""

    tensor: torch.Tensor

    def put(self, key: str, buffers: Any, *, condition: Condition = "any") -> Version:
        if key.startswith("shards/"):
            self.tensor.add_(1)
        return super().put(key, buffers, condition=condition)


def test_a_state_that_changes_while_it_is_saved_is_refused(tmp_path: Path) -> None:
    """A tensor that changes during its upload fails the save, since its digests would not match the bytes."""
    store = MeddlingStore(tmp_path)
    store.tensor = torch.zeros(100_000)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"model": {"w": store.tensor}}, storage_writer=RemoteWriter(store), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, SaveFailedError)
    assert "changed while it was being saved" in str(error)
    assert "model.w" in str(error)
    assert list(store.list()) == []


class BadError(Exception):
    """Error that can be pickled, and not unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


class BadPlanner(DefaultSavePlanner):
    """Planner that raises BadError in the writer."""

    def resolve_data(self, _write_item: object) -> Any:
        raise BadError("bro", "ken")


class BadStore(MemoryStore):
    """Store that raises BadError at the first request."""

    def get(self, key: str, *, limit_bytes: int) -> Any:
        raise BadError("bro", "ken")


@pytest.mark.parametrize("what", ["planner", "store"])
def test_what_cannot_cross_ranks_is_told_as_an_error_of_ours(what: str) -> None:
    """An error that cannot be pickled is raised as a typed one: torch would leave the other ranks in a collective."""
    planner = BadPlanner() if what == "planner" else DefaultSavePlanner()
    store = MemoryStore() if what == "planner" else BadStore()
    with pytest.raises(DcpRemoteError, match="BadError: broken"):
        save_as_ranks([{"x": torch.zeros(3)}], lambda: RemoteWriter(store), lambda: planner)


def test_a_flat_state_dict_is_packed_like_any_other() -> None:
    """`module.state_dict()` has hundreds of top-level names, and makes no hundreds of shards."""
    store = RecordingStore(MemoryStore())
    save_as_ranks([{f"layers.{n}.weight": torch.zeros(10) for n in range(300)}], lambda: RemoteWriter(store))
    assert store.count("put") == 2


class CountingStore(MemoryStore):
    """Store that records the most bytes in pending puts."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._counting = threading.Lock()

    def put(self, key: str, buffers: Any, *, condition: Condition = "any") -> Version:
        size = sum(len(memoryview(buffer).cast("B")) for buffer in buffers)
        with self._counting:
            self._now += size
            self.most = max(self.most, self._now)
        try:
            return super().put(key, buffers, condition=condition)
        finally:
            with self._counting:
                self._now -= size


def test_streams_count_against_the_budget() -> None:
    """Sparse tensors, encoded for the upload, never have more bytes pending than the budget."""
    store = CountingStore()
    budget_bytes = 4 << 20
    state = {f"s{n}": torch.ones(1 << 17).to_sparse() for n in range(12)}  # 1.5 MiB each, as a stream
    save_as_ranks([state], lambda: RemoteWriter(store, memory_budget_bytes=budget_bytes))
    assert budget_bytes / 4 < store.most <= budget_bytes


@pytest.mark.parametrize(
    ("state", "says"),
    [({"a\ud800": torch.zeros(3)}, "not Unicode"), ({"many": torch.zeros([1] * 65)}, "more dimensions")],
)
def test_what_no_manifest_could_say_is_refused_before_it_is_uploaded(state: dict[str, Any], says: str) -> None:
    """Names and shapes that no manifest can hold are refused on each rank, before any upload."""
    store = RecordingStore(MemoryStore())
    with pytest.raises(InvalidArgumentError, match=says):
        save_as_ranks([state], lambda: RemoteWriter(store))
    assert store.count("put") == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("timeout_seconds", value) for value in (0, -1, float("inf"), float("nan"), 1e12)),
        *(("memory_budget_bytes", value) for value in (0, -1, 1.5e6, True, None)),
    ],
)
def test_limits_that_are_none(option: str, value: Any, tmp_path: Path) -> None:
    for make in (RemoteWriter, RemoteReader, load):
        with pytest.raises(InvalidArgumentError, match=option):
            make(tmp_path, **{option: value})
