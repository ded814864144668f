"""The GIL switch interval while bytes move, and after."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from dcp_remote import CheckpointManager, RemoteWriter
from dcp_remote.common.gil import short_switch_interval
from dcp_remote.saving.plan_cache import RunPlanner


@pytest.fixture(autouse=True)
def _default() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def seconds() -> float:
    return round(sys.getswitchinterval() + 0.1e-6, 6)


def test_the_last_block_restores_the_interval() -> None:
    """Overlap blocks of two threads, of which the first ends first, by raising: the last one restores the interval."""
    inside, go = threading.Event(), threading.Event()

    def other() -> None:
        with short_switch_interval():
            inside.set()
            assert go.wait(30)

    thread = threading.Thread(target=other)

    def raising() -> None:
        with short_switch_interval():
            thread.start()
            assert inside.wait(30)
            assert seconds() == 0.001
            raise KeyError

    with pytest.raises(KeyError):
        raising()
    assert seconds() == 0.001
    go.set()
    thread.join(30)
    assert seconds() == 0.005


def test_intervals_of_the_user_are_kept() -> None:
    """Set a shorter interval before a block, and another one within it: both are kept."""
    with short_switch_interval():
        sys.setswitchinterval(0.01)
    assert seconds() == 0.01
    sys.setswitchinterval(0.0005)
    with short_switch_interval():
        assert seconds() == 0.0005
    assert seconds() == 0.0005


def test_rounding_does_not_accumulate() -> None:
    """Repeat blocks: Python rounds down, and a thousand saves would lose a millisecond."""
    for microseconds in (1001, 2999, 3000, 4097, 5000):
        sys.setswitchinterval(microseconds * 1e-6)
        before = sys.getswitchinterval()
        for _ in range(20):
            with short_switch_interval():
                assert seconds() == 0.001
        assert sys.getswitchinterval() == before


def test_a_save_lowers_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the interval in the planner, which is called for each tensor that is read from the state."""
    seen = []

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            seen.append(seconds())
            return super().resolve_data(write_item)

    class Recording(Planner, RunPlanner):
        """The same for a manager."""

    dcp.save({"w": torch.ones(3)}, storage_writer=RemoteWriter(tmp_path / "alone"), planner=Planner(), no_dist=True)
    monkeypatch.setattr(CheckpointManager, "_make_planner", lambda _: Recording())
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, wait=True)
    assert seen == [0.001] * 2
    assert seconds() == 0.005
