"""How often ranks wait for each other in a save or a restore, and read a manifest: counted. Ranks are threads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dcp_remote import CheckpointManager, PerRank, RandomStates, load, training_state
from dcp_remote.errors import PermissionDeniedError, StateMismatchError
from dcp_remote.manager import rank_restore
from dcp_remote.serialization.module_state import ModelState
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing import RecordingStore
from tests.support.rank_threads import ManagerThreads, counted_rounds, manager_threads

State = dict[str, Any]


class Foreign:
    """`Stateful` of the user, which may call collectives of torch."""

    def __init__(self) -> None:
        self.loaded: list[object] = []

    def state_dict(self) -> State:
        return {"value": 1}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.loaded.append(dict(state))


class RefusingStore(WrappedStore):
    """Store that gives no part of a shard to a rank."""

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        raise PermissionDeniedError("An injected refusal.", key=key)


class Renaming(nn.Linear):
    """Module that takes its values by code of its own."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


def state_of(rank: int, value: float = 0.0) -> State:
    """Return a tensor that every rank has, one of this rank, an object of all and one of this rank."""
    model = {"frozen": torch.full((2_000,), value), f"rows{rank}": torch.full((10,), value)}
    return {"model": model, "n": value, "own": PerRank([rank, value])}


def training_of(_rank: int, value: float = 0.0) -> State:
    """Return the state of a training by torch's own objects."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return training_state(model=model, optimizer=optimizer, scheduler=scheduler, extra={"epoch": 0})


def foreign_of(rank: int, value: float = 0.0) -> State:
    return state_of(rank, value) | {"foreign": Foreign()}


def save(ranks: ManagerThreads, step: int, state: Any = state_of) -> None:
    ranks.values(lambda rank, manager: manager.save(step, state(rank, float(step)), wait=True))


# ---- saves


@pytest.mark.parametrize("wait", [True, "begun", False])
def test_a_first_save_waits_three_times_and_later_ones_twice(wait: Any) -> None:
    """Plans are sent with the first question; values that several ranks hold are compared; then all report."""
    with manager_threads(2, MemoryStore()) as ranks, counted_rounds() as rounds:
        optimizers = [torch.optim.SGD([torch.ones(100_000, requires_grad=True)]) for _ in range(2)]
        for rank, manager in enumerate(ranks.managers):
            manager.watch(optimizers[rank])  # from now on what the optimizer owns is copied late

        def save_one(step: int, rank: int, manager: CheckpointManager) -> None:
            (parameter,) = optimizers[rank].param_groups[0]["params"]
            manager.save(step, {"weight": parameter.detach(), "first": parameter.detach()[0], "n": step}, wait=wait)
            manager.wait()

        for step in (1, 2):
            ranks.values(partial(save_one, step))
    assert rounds == {"the save of step 1": 3, "the save of step 2": 2}


def test_a_save_with_a_new_plan_on_one_rank_or_all() -> None:
    """If one rank alone has a new plan, the others are asked for theirs; new tensors of several ranks are compared."""
    with manager_threads(2, MemoryStore()) as ranks, counted_rounds() as rounds:
        save(ranks, 1)
        save(ranks, 2, lambda rank, value: state_of(rank, value) | ({"added": 1} if rank == 0 else {}))
        save(ranks, 3, lambda rank, value: state_of(rank, value) | {"changed": 1})
        save(ranks, 4, lambda rank, value: state_of(rank, value) | {"changed": torch.ones(2)})
        save(ranks, 5, lambda rank, value: state_of(rank, value) | ({"added": torch.ones(2)} if rank == 0 else {}))
    assert rounds == {f"the save of step {step}": count for step, count in enumerate((3, 3, 2, 3, 2), start=1)}


# ---- restores


@pytest.mark.parametrize("is_sent", [True, False], ids=["manifest sent", "manifest read by each"])
@pytest.mark.parametrize(("state", "own_rounds"), [(state_of, 0), (training_of, 0), (foreign_of, 1)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_restore_waits_three_times(
    state: Any, own_rounds: int, world_size: int, is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any world size; once more, or twice, where code of the user takes part that may call collectives."""
    memory = MemoryStore()
    with manager_threads(2, memory) as ranks:
        save(ranks, 1, state)
    monkeypatch.setattr(rank_restore, "_MANIFESTS_BYTES_MAX", rank_restore._MANIFESTS_BYTES_MAX if is_sent else 0)
    with manager_threads(world_size, memory) as ranks, counted_rounds() as rounds:
        states = [state(min(rank, 1)) for rank in range(world_size)]
        assert ranks.values(lambda rank, manager: manager.restore(states[rank])) == [1] * world_size
    assert rounds == {"the restore": 3 + own_rounds * (1 if is_sent else 2)}


def test_code_of_the_user() -> None:
    """Overridden methods, hooks, other `Stateful`s, and optimizers whose step may send messages."""
    own = [Renaming(2, 2), _hooked(nn.Linear(2, 2)), PerRank(Foreign()), torch.optim.Muon([torch.zeros(2, 2)])]
    sgd = torch.optim.SGD([torch.zeros(2)])
    own.append(torch.optim.lr_scheduler.SequentialLR(sgd, [OwnScheduler(sgd), OwnScheduler(sgd)], [1]))
    own.append(OwnModelState(nn.Linear(2, 2)))
    own.append(_with_load_hook(torch.optim.SGD([torch.zeros(2)])))
    of_torch = [nn.Linear(2, 2), torch.optim.SGD([torch.zeros(2)]), PerRank(RandomStates()), {"a": 1}, torch.zeros(1)]
    assert [rank_restore.runs_foreign_code({"first": 1, "deep": [{"value": one}]}) for one in own] == [True] * 7
    assert [rank_restore.runs_foreign_code({"first": 1, "deep": [{"value": one}]}) for one in of_torch] == [False] * 5


class OwnModelState(ModelState):
    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError


class OwnScheduler(torch.optim.lr_scheduler.ConstantLR):
    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError


def _hooked(module: nn.Module) -> nn.Module:
    module.register_load_state_dict_post_hook(lambda *_: None)
    return module


def _with_load_hook(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    return optimizer


def test_a_function_of_the_step_that_is_restored() -> None:
    """The step is known to all ranks when it is called; in one restore, where two were needed. None without a run."""
    memory = MemoryStore()
    with manager_threads(2, memory) as ranks:
        assert ranks.values(lambda _rank, manager: manager.restore(lambda step: {"uncalled": 1 / 0})) == [None] * 2
        save(ranks, 3)
    with manager_threads(2, memory) as ranks, counted_rounds() as rounds:
        states = [state_of(rank) for rank in range(2)]

        def restore(rank: int, manager: CheckpointManager, fails: bool = False) -> int | None:
            def choose(step: int) -> State:
                if rank == 1 and fails:
                    raise ZeroDivisionError(f"in choose {step}")
                return states[rank]

            return manager.restore(choose)

        assert ranks.values(restore) == [3, 3]
        assert rounds == {"the restore": 5}
        ended = ranks.run(lambda rank, manager: restore(rank, manager, fails=True))
        assert rounds == {"the restore": 6}  # rank 1 has failed before the second, and rank 0 after it
        assert isinstance(ended[1].error, ZeroDivisionError)
        assert "in choose 3" in str(ended[0].error)
    assert [state["own"].value for state in states] == [[rank, 3.0] for rank in range(2)]


def test_one_rank_with_code_of_the_user_is_enough() -> None:
    """All ranks meet as often as each other, although only one of them has such an object."""
    memory = MemoryStore()

    def state(rank: int, value: float = 0.0) -> State:
        return state_of(rank, value) | ({"own": PerRank(Foreign())} if rank == 0 else {})

    with manager_threads(2, memory) as ranks:
        save(ranks, 1, state)
    with manager_threads(2, memory) as ranks, counted_rounds() as rounds:
        assert ranks.values(lambda rank, manager: manager.restore(state(rank))) == [1, 1]
    assert rounds == {"the restore": 4}


@pytest.mark.parametrize(("bytes_max", "more"), [(rank_restore._CHECK_BYTES_MAX, 0), (0, 1)])
def test_values_that_are_kept(bytes_max: int, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that report what differs wait no more often, unless the reports are large."""
    monkeypatch.setattr(rank_restore, "_CHECK_BYTES_MAX", bytes_max)
    memory = MemoryStore()
    with manager_threads(2, memory) as ranks:
        save(ranks, 1)

    def restore(rank: int, manager: CheckpointManager) -> State:
        state = state_of(rank) | ({"added": 7} if rank == 1 else {})
        manager.restore(state, missing="keep")
        return state

    with manager_threads(2, memory) as ranks, counted_rounds() as rounds:
        states = ranks.values(restore)
        assert [(state["n"], state.get("added")) for state in states if state] == [(1.0, None), (1.0, 7)]
    assert rounds == {"the restore": 3 + more}


def test_nothing_is_put_into_a_state_if_that_of_another_rank_does_not_fit() -> None:
    """Not even an object that the manifest holds."""
    memory = MemoryStore()
    with manager_threads(2, memory) as ranks:
        save(ranks, 1)
    with manager_threads(2, memory) as ranks:
        states = [state_of(rank) for rank in range(2)]
        states[1]["unknown"] = 1
        ended = ranks.run(lambda rank, manager: manager.restore(states[rank]))
        assert [type(one.error) for one in ended] == [StateMismatchError] * 2
    assert [(state["n"], state["model"]["frozen"][0].item()) for state in states] == [(0.0, 0.0)] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_no_rank_is_given_its_values_if_one_cannot_read_them(victim: int) -> None:
    """`load_state_dict` is called only once every rank has all that it wants, and all hear who has not."""
    memory = MemoryStore()
    with manager_threads(2, memory) as ranks:
        save(ranks, 1, foreign_of)
    stores = [RefusingStore(memory) if rank == victim else memory for rank in range(2)]
    with manager_threads(2, stores, rank_sockets=False) as ranks:
        states = [foreign_of(rank) for rank in range(2)]
        ended = ranks.run(lambda rank, manager: manager.restore(states[rank]))
        assert [type(one.error) for one in ended] == [PermissionDeniedError] * 2
        assert f"rank={victim}" in str(ended[1 - victim].error)
    assert [(state["foreign"].loaded, state["own"].value) for state in states] == [([], [rank, 0.0]) for rank in (0, 1)]


# ---- what the next save knows


@pytest.mark.parametrize("is_sent", [True, False], ids=["manifest sent", "manifest read by each"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_first_save_after_a_restore_does_not_read_the_manifest(
    world_size: int, is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank keeps what it has read of the checkpoint, and sends again only what has changed."""
    memory = MemoryStore()
    with manager_threads(2, memory) as ranks:
        save(ranks, 1)
    monkeypatch.setattr(rank_restore, "_MANIFESTS_BYTES_MAX", rank_restore._MANIFESTS_BYTES_MAX if is_sent else 0)
    stores = [RecordingStore(memory) for _ in range(world_size)]
    with manager_threads(world_size, stores) as ranks:
        states = [state_of(min(rank, 1)) for rank in range(world_size)]
        if world_size == 1:
            states[0]["model"] |= state_of(1)["model"]
        ranks.values(lambda rank, manager: manager.restore(states[rank]))
        gets = [manifest_gets(store) for store in stores]
        assert gets == [1, *[0 if is_sent else 1] * (world_size - 1)]
        states[0]["model"]["rows0"] += 1
        ranks.values(lambda rank, manager: manager.save(2, states[rank], wait=True))
        assert [manifest_gets(store) for store in stores] == gets
        report = ranks.managers[0].last_save
        assert report is not None
        assert report.written_bytes < 2_000
        assert report.deduplicated_bytes > 8_000
    found = load(memory)["model"]
    assert [found[name][0].item() for name in ("frozen", "rows0", "rows1")] == [1.0, 2.0, 1.0]


def test_the_first_save_after_a_restore_of_a_part_reads_the_manifest() -> None:
    """It may write what was not restored, and finds out what of it is the same."""
    memory = MemoryStore()
    with manager_threads(2, memory) as ranks:
        save(ranks, 1)
    stores = [RecordingStore(memory) for _ in range(2)]
    with manager_threads(2, stores) as ranks:
        states = [state_of(rank, 1.0) for rank in range(2)]
        ranks.values(lambda rank, manager: manager.restore(states[rank], exclude="model.frozen"))
        ranks.values(lambda rank, manager: manager.save(2, states[rank], wait=True))
        assert [manifest_gets(store) for store in stores] == [2, 1]
        report = ranks.managers[0].last_save
        assert report is not None
        assert report.deduplicated_bytes > 8_000


def test_another_checkpoint_than_the_newest() -> None:
    """A save reads the manifest of the checkpoint that it compares with, if the rank read another one last."""
    memory = MemoryStore()
    with manager_threads(1, memory) as ranks:
        save(ranks, 1)
        save(ranks, 2)
    store = RecordingStore(memory)
    with manager_threads(1, store) as ranks:
        (manager,) = ranks.managers
        state = state_of(0)
        manager.restore(state, 1)
        manager.restore(state_of(0), 2, go_on=False)
        manager.save(3, state, wait=True)
        assert manifest_gets(store) == 2
        assert manager.last_save is not None
        assert manager.last_save.written_bytes < 1_000
    assert load(memory)["model"]["frozen"][0].item() == 1.0


def manifest_gets(store: RecordingStore) -> int:
    return sum(verb == "get" and key.startswith("manifests/") for verb, key in store.calls)
