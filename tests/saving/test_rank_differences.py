"""Values under one name that differ between ranks: tensors are refused before an upload, objects are reported once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from dcp_remote import CheckpointManager, PerRank, RemoteWriter, load
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.rank_threads import RankThreads, managers_of, rank_threads
from tests.support.simulated_ranks import save_as_ranks, shard

RANKS = 3


class OwnPlanner(DefaultSavePlanner):
    """Planner of a user, of which nothing is known."""

    def create_local_plan(self) -> SavePlan:
        """Plan as torch does."""
        return super().create_local_plan()


class Renaming(DefaultSavePlanner):
    """Planner of a user that gives the tensors of each rank names of their own."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Rename the items; nothing is flattened."""
        renamed = [
            replace(
                plan,
                items=[replace(item, index=replace(item.index, fqn=f"{rank}.{item.index.fqn}")) for item in plan.items],
            )
            for rank, plan in enumerate(all_plans)
        ]
        return super().create_global_plan(renamed)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value under its old name."""
        return super().lookup_object(replace(index, fqn=index.fqn.partition(".")[2]))


def save_all(
    them: RankThreads, managers: list[CheckpointManager], step: int, state: Callable[[int], dict[str, Any]], **more: Any
) -> list[BaseException | None]:
    """Save the state of each rank; return the ranks' errors."""
    ended = them.run(lambda group: managers[group.rank].save(step, state(group.rank), wait=True, **more))
    return [one.error for one in ended]


def test_tensors_of_different_shapes_are_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank raises the same error, no shard is put, and the next save works; per rank all values are saved."""
    store = RecordingStore(MemoryStore())
    with rank_threads(RANKS) as them:
        managers = managers_of(them, store, monkeypatch)
        errors = save_all(them, managers, 1, lambda rank: {"same": torch.ones(2), "x": torch.ones(2 + rank)})
        for error in errors:
            assert type(error) is InvalidArgumentError
            assert "x: float32 (2,) on rank 0, float32 (3,) on rank 1, float32 (4,) on rank 2" in str(error)
            assert "PerRank(...)" in str(error)
        assert not [request for request in store.requests if "shards/" in str(request)]
        assert not save_all(them, managers, 2, lambda rank: {"x": PerRank(torch.ones(2 + rank))})[0]
        for manager in reversed(managers):
            manager.close()
    assert [len(load(store, step=2)["per_rank"][str(rank)]["x"]) for rank in range(RANKS)] == [2, 3, 4]


# ---- dcp.save


def test_dcp_save_refuses_tensors_of_different_shapes() -> None:
    """All names in one error, before an upload; the same ranks then save tensors of one shape."""
    store = MemoryStore()
    parts = shard(torch.ones(6, 2), 2, (2, 1))
    states: list[dict[str, Any]] = [
        {"x": torch.ones(2 + rank), "w": parts[rank], "y": torch.ones(2, dtype=torch.int8 if rank else torch.int16)}
        for rank in range(2)
    ]
    with pytest.raises(InvalidArgumentError, match="different things") as caught:
        save_as_ranks(states, lambda: RemoteWriter(store))
    assert caught.value.details["names"] == 2
    assert "x: float32 (2,) on rank 0, float32 (3,) on rank 1" in str(caught.value)
    assert "y: int16 (2,) on rank 0, int8 (2,) on rank 1" in str(caught.value)
    assert not list(store.list(""))
    save_as_ranks([{"x": torch.ones(2), "w": parts[rank]} for rank in range(2)], lambda: RemoteWriter(store))
    assert load(store)["w"].shape == (6, 2)


def test_dcp_save_leaves_the_names_to_the_planner() -> None:
    """A planner of the user renames what the ranks hold under one name: nothing is lost, and nothing is refused."""
    store, states = MemoryStore(), [{"x": torch.ones(2 + rank)} for rank in range(2)]
    metadata = save_as_ranks(states, lambda: RemoteWriter(store), lambda: Renaming(flatten_state_dict=False))
    assert set(metadata.state_dict_metadata) == {"0.x", "1.x"}
