"""Phases of a job, each called on every rank at once; see `Ranks.run`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_remote import CheckpointManager
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.outcome import Terms
from dcp_remote.errors import SaveFailedError, SaveTimeoutError
from tests.scale.processes import Rank

_TERMS = Terms(SaveFailedError, SaveTimeoutError, seconds=300.0)

# Of a rank's chunk of one tensor: values cost the store nothing.
_WIDTH = 16

# Of `ask_store`: size of a value, keys of one `multi_get`, and requests between two looks at the clock.
_VALUE_BYTES, _KEYS_AT_ONCE, _REQUESTS_BETWEEN_LOOKS = 100, 16, 20


# ---- a group alone


def first_use(rank: Rank) -> float:
    """Make a group, number its use and meet once; return the seconds between two heartbeats."""
    rank.kept["group"] = RankGroup.from_process_group(None, "scale")
    gather(rank, 1)
    return _group(rank).beat_seconds


def gather(rank: Rank, rounds: int) -> None:
    """Take rounds in one operation, each with one small value from each rank and one answer to all."""
    with _begin(rank, "gather") as collective:
        for _ in range(rounds):
            assert collective.gather(rank.rank, sum) == sum(range(rank.world_size))


def scatter(rank: Rank, rounds: int) -> None:
    """Take rounds with an answer of its own for each rank."""
    with _begin(rank, "scatter") as collective:
        for _ in range(rounds):
            assert collective.scatter(rank.rank, lambda values: [-value for value in values]) == -rank.rank


def scatter_by_host(rank: Rank, rounds: int) -> None:
    """Take rounds with one answer for all ranks of a host."""
    with _begin(rank, "scatter by host") as collective:
        for _ in range(rounds):
            assert collective.scatter(rank.host, lambda values: values) == rank.host


def rest(rank: Rank, beats: int) -> None:
    """Do nothing for some heartbeats, outside any operation."""
    time.sleep(beats * _group(rank).beat_seconds)


def rest_inside(rank: Rank, beats: int) -> None:
    """Do nothing for some heartbeats, in an operation in which all ranks have met."""
    with _begin(rank, "a rest") as collective:
        collective.gather(None, len)
        rest(rank, beats)


def close_group(rank: Rank) -> None:
    """Close the group."""
    rank.kept.pop("group").close()


def _group(rank: Rank) -> RankGroup:
    group: RankGroup = rank.kept["group"]
    return group


def _begin(rank: Rank, what: str) -> Collective:
    collective = _group(rank).prepare(what, _TERMS)
    _group(rank).begin(collective)
    return collective


# ---- a manager


def open_manager(rank: Rank, folder: str, tensors: int) -> None:
    """Make a manager and a state: tensors sharded over all ranks, and a replicated one; no operation."""
    members = dist.group.WORLD
    assert members is not None
    mesh = DeviceMesh.from_group(members, "cpu")
    weights = {
        f"layers.{number}.weight": DTensor.from_local(
            torch.full((1, _WIDTH), float(rank.rank)), mesh, [Shard(0)], run_check=False
        )
        for number in range(tensors)
    }
    norm = DTensor.from_local(torch.zeros(_WIDTH), mesh, [Replicate()], run_check=False)
    rank.kept["state"] = {"model": weights | {"norm.weight": norm}, "step": 0}
    rank.kept["manager"] = CheckpointManager(folder, progress=False, timeout_seconds=300.0, arrival_seconds=120.0)


def restore_nothing(rank: Rank) -> None:
    """Restore from an empty run, the first operation of the manager."""
    assert rank.kept["manager"].restore(rank.kept["state"]) is None


def save(rank: Rank, step: int) -> int:
    """Save the state, all of whose values have changed; return the requests of all ranks to the object store."""
    state: dict[str, Any] = rank.kept["state"]
    for weight in state["model"].values():
        weight.to_local().add_(1.0)
    state["step"] = step
    manager: CheckpointManager = rank.kept["manager"]
    manager.save(step, state, wait=True)
    assert manager.last_save is not None
    return manager.last_save.requests


def restore(rank: Rank, step: int) -> int:
    """Restore the newest checkpoint; return the requests of this rank to the object store."""
    manager: CheckpointManager = rank.kept["manager"]
    assert manager.restore(rank.kept["state"]) == step
    assert manager.last_load is not None
    return manager.last_load.requests


def close_manager(rank: Rank) -> None:
    """Close the manager."""
    rank.kept.pop("manager").close()


# ---- the store alone


def ask_store(rank: Rank, method: str, seconds: float) -> int:
    """Ask the store as often as this rank can, one request after another; return the number of operations."""
    store, key = _get_default_store(), f"rate/{rank.rank}"
    keys = [f"{key}/{number}" for number in range(_KEYS_AT_ONCE)]
    for one in (key, *keys):
        store.set(one, "0" * _VALUE_BYTES)
    requests: dict[str, tuple[Callable[[], object], int]] = {
        "set": (lambda: store.set(key, "0" * _VALUE_BYTES), 1),
        "get": (lambda: store.get(key), 2),
        "check": (lambda: store.check([key]), 1),
        "check of a missing key": (lambda: store.check([f"{key}/missing"]), 1),
        "add": (lambda: store.add(f"{key}/counter", 1), 1),
        f"multi_get of {_KEYS_AT_ONCE}": (lambda: store.multi_get(keys), 2),
    }
    request, operations = requests[method]
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(_REQUESTS_BETWEEN_LOOKS):
            request()
        store.check([key])  # a `set` has no answer: only now have all arrived
        count += operations * _REQUESTS_BETWEEN_LOOKS + 1
    return count
