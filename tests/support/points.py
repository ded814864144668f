"""Points of a save or a load at which a rank fails, and the states saved and found around them."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp_remote import load
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.storage import LocalStore
from tests.support.manifests import decode

State: TypeAlias = dict[str, Any]
When: TypeAlias = Literal["enter", "leave"]

OLD, NEW, THIRD, NEWEST = 1.0, 2.0, 3.0, 4.0


@contextmanager
def at(function: Callable[..., object], when: When, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` as this thread enters or leaves a function; its error is raised there.

    This is how a signal's handler interrupts code, and it needs neither a subclass nor a mock: the function itself is
    tested, with all its callers.
    """
    code = inspect.unwrap(function).__code__

    def entered(frame: FrameType, event: str, argument: Any) -> Callable[[FrameType, str, Any], Any] | None:
        if frame.f_code is not code:
            return None
        frame.f_trace_lines = False
        if when == "enter":
            action()
        return left

    def left(frame: FrameType, event: str, argument: Any) -> Callable[[FrameType, str, Any], Any]:
        if event == "return" and when == "leave":
            action()
        return left

    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(None)


def wait_until(condition: Callable[[], object]) -> None:
    """Poll for half a minute at most: another process's progress cannot be awaited otherwise."""
    deadline_seconds = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_seconds, "the condition never became true"
        time.sleep(0.002)


@dataclass(frozen=True, slots=True)
class Ending:
    """Outcome of a save or a load on a rank that raised."""

    text: str  # message for the user
    failures: dict[int, BaseException]  # errors of a `CheckpointException`, by rank
    error: BaseException | None = None  # any other error that was raised; None for a `CheckpointException`


def ending(attempt: Callable[[], object]) -> Ending | None:
    """Return the error of an attempt; None if it returned."""
    try:
        attempt()
    except CheckpointException as error:
        return Ending(str(error), {rank: cause for rank, (cause, _) in error.failures.items()})
    except Exception as error:  # noqa: BLE001  # any error is a result of the test
        return Ending(str(error), {}, error)
    return None


def state(value: float, ranks: Sequence[int] = ()) -> State:
    """Return this rank's state: two top-level keys of its own, and so two shards, with tensors and an object.

    Or the states of the given ranks, merged.
    """
    leaves: State = {}
    for rank in ranks or (dist.get_rank(),):
        leaves[f"model_{rank}"] = {"w": torch.full((rank + 2, 3), value), "b": torch.full((5,), value)}
        leaves[f"optim_{rank}"] = {"m": torch.full((4,), value), "steps": [value]}
    return leaves


def assert_is(state: State, value: float) -> None:
    """Check that every leaf of the state has this value."""
    for name, entries in state.items():
        leaves = [entries["w"], entries["b"]] if name.startswith("model") else [entries["m"], *entries["steps"]]
        for leaf in leaves:
            assert bool((leaf == value).all()) if isinstance(leaf, torch.Tensor) else leaf == value, (name, leaf)


def found(path: Path, world_size: int) -> float:
    """Load the checkpoint whole, and return its value; raises if there is no checkpoint."""
    state = load(path)
    assert sorted(state) == sorted(f"{top}_{rank}" for rank in range(world_size) for top in ("model", "optim"))
    value = state["optim_0"]["steps"][0]
    assert isinstance(value, float)
    assert_is(state, value)
    return value


def orphans(path: Path) -> set[int]:
    """Return the ranks that wrote the shards that no manifest names."""
    named = set(decode((path / MANIFEST_KEY).read_bytes()).shards.keys)
    keys = {info.key for info in LocalStore(str(path)).list() if info.key != MANIFEST_KEY}
    assert named <= keys
    return {int(Path(key).name[len("rank-") : len("rank-00000")]) for key in keys - named}
