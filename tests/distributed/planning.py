"""Functions for a `RankPool` that use managers which keep their plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_remote.common.units import MiB
from dcp_remote.errors import PermissionDeniedError
from dcp_remote.manager import save_planning
from dcp_remote.saving.plan_cache import Proposal, to_rank_plan
from dcp_remote.saving.plan_table import Share
from dcp_remote.storage import LocalStore, ObjectStore
from dcp_remote.storage.wrapper import Verb
from dcp_remote.testing import Fault, FaultyStore, RecordingStore
from tests.distributed.managed import Ended, State, ended, managing
from tests.support.rank_threads import counted_rounds

# Of the tensor that is sharded over all ranks.
ROWS = 12


def planned_state(change: str, step: int) -> State:
    """A state whose values are those of a step, and its structure that of a change; some are of one rank alone."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.full((ROWS if change != "other rows" else ROWS + 3, 2), float(step))
    own: Any = torch.full((rank + 1,), float(step))
    if rank == 2 and change == "dtype of one rank":
        own = own.double()
    if rank == 2 and change == "shape of one rank":
        own = own.repeat(2)
    if rank == 2 and change == "an object of one rank":
        own = f"step {step}"
    state: State = {
        "model": {"rows": distribute_tensor(rows, mesh, [Shard(0)]), "replicated": torch.full((5,), float(step))},
        "own": {str(rank): own},
        "step": step,
        "history": list(range(step % 3)),
        "note": "n" * step,
    }
    if rank == 3 and change == "a key of one rank":
        state["own"]["more"] = step
    return state


class Refusing(FaultyStore):
    """Takes no shards, for as long as it is told so."""

    def __init__(self, store: ObjectStore) -> None:
        self.refuses = [False]

        def is_refused(verb: Verb, key: str, _number: int) -> bool:
            return self.refuses[0] and verb == "put" and "shards/" in key

        super().__init__(store, [Fault(is_refused, "request", persistent=True, error=_denied)])


def _denied() -> PermissionDeniedError:
    return PermissionDeniedError("No more shards.")


@contextmanager
def plans_counted() -> Iterator[list[int]]:
    """Count of the plans on which this rank has agreed with the others: a list of one number."""
    count = [0]

    def counted(proposal: Proposal, share: Share) -> SavePlan:
        count[0] += 1
        return to_rank_plan(proposal, share)

    with mock.patch.object(save_planning, "to_rank_plan", counted):
        yield count


def plans_of_saves(path: Path, changes: Sequence[str], dedup: bool, overwrite: bool) -> list[int]:
    """Save a state of each structure in turn; how often plans were exchanged for each."""
    exchanged = []
    with managing(path, dedup=dedup) as manager, plans_counted() as count:
        for number, change in enumerate(changes, 1):
            count[0] = 0
            step = 1 if overwrite else number
            manager.save(step, planned_state(change, number), overwrite=overwrite, wait=True)
            exchanged.append(count[0])
    return exchanged


def plans_around_failures(path: Path, victim: int) -> list[tuple[int, str | None]]:
    """Saves that fail on one rank at its shards, and at its plan; how often plans were exchanged, and its error."""
    seen: list[tuple[int, str | None]] = []
    for fails_first in (True, False):
        store = Refusing(LocalStore(str(path / str(fails_first))))
        with managing(store) as manager, plans_counted() as count:
            for step in range(1, 6):
                count[0] = 0
                change = "" if step < 4 else "other rows"
                state = planned_state(change, step)
                store.refuses[0] = dist.get_rank() == victim and step in (1 if fails_first else 2, 4)
                if step == 3 and dist.get_rank() == victim:
                    state["\ud800"] = 1  # refused when it is planned
                failure = ended(partial(manager.save, step, state, wait=True))
                seen.append((count[0], failure.kind if failure is not None else None))
    return seen


def share_replicas(path: Path, strategy: str) -> tuple[list[int], Ended | None]:
    """Save four tensors of 3 MiB, of which all ranks have replicas, in shards of 1 MiB; twice.

    Returns:
        Bytes of shards that this rank put in each save, and how the third one ended, in which rank 2 can put nothing.
    """
    refusing = Refusing(LocalStore(str(path)))
    store = RecordingStore(refusing)
    wholes: list[Any] = list(torch.arange(3 * MiB, dtype=torch.float32).reshape(4, 768, 1024))
    if strategy == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        wholes = [distribute_tensor(whole, mesh, [Replicate(), Shard(0)]) for whole in wholes]
    put = []
    failure = None
    with managing(store, memory_budget_bytes=MiB) as manager:
        for step in (1, 2, 3):
            store.clear()
            if step > 1:
                for whole in wholes:
                    whole.add_(1)
            refusing.refuses[0] = step == 3 and dist.get_rank() == 2
            failure = ended(partial(manager.save, step, {"w": wholes, "step": step}, wait=True))
            put.append(sum(one.size_bytes for one in store.requests if one.verb == "put" and "shards/" in one.key))
    return put, failure


def unlike_replicas(path: Path, unlike: Sequence[bool]) -> list[tuple[int, int]]:
    """Save a tensor of 4 MiB that every rank has whole, in shards of 1 MiB; in some saves one value is the rank's own.

    Returns:
        For each save, how often all ranks met, and plans were exchanged.
    """
    seen = []
    with (
        managing(path, memory_budget_bytes=MiB) as manager,
        plans_counted() as count,
        counted_rounds(dist.get_rank()) as rounds,
    ):
        for step, differs in enumerate(unlike, start=1):
            count[0] = 0
            whole = torch.full((1024, 1024), float(step))
            whole[step * 200, 1] = 100 + dist.get_rank() if differs else 99
            manager.save(step, {"w": whole}, wait=True)
            seen.append((rounds[f"the save of step {step}"], count[0]))
    return seen
