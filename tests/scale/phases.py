"""Phases of a job, each called on every rank at once; see `Ranks.run`."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
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


def scatter_grouped(rank: Rank, rounds: int) -> None:
    """Take rounds with one answer for all ranks of a host."""
    with _begin(rank, "scatter by host") as collective:
        for _ in range(rounds):
            hosts = collective.scatter_grouped(rank.host, lambda values: (sorted(set(values)), values))
            assert hosts == rank.host


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
