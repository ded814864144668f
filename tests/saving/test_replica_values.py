"""Values of tensors that several ranks hold: compared in a job's first save; buffers and numbers of the lowest rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_remote import CheckpointManager, PerRank, RemoteWriter, load, training_state, writer
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.saving import plan_cache
from dcp_remote.saving.dcp_metadata import to_kind
from dcp_remote.saving.device_copy import host_views
from dcp_remote.saving.plan_table import BUFFER, REPLICA, PlanTable, arrange, pack_names
from dcp_remote.saving.rank_differences import find_unequal, group_by_digest
from dcp_remote.serialization.state_dict import TensorRoles, build_saved_state
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.testing import RecordingStore
from tests.support.rank_threads import counted_rounds, managers_of, rank_threads
from tests.support.simulated_ranks import save_as_ranks, shard

RANKS = 3
SAVED: list[BaseException | None] = [None] * RANKS
State = dict[str, Any]


class SlicedOptimizer(torch.optim.Optimizer):
    """Optimizer that keeps 1/N of each state on each rank, of one shape and under one name, as nanochat's."""

    def __init__(self, parameters: Any, rank: int) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.rank = rank

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss
        for parameter in self.param_groups[0]["params"]:
            rows = len(parameter) // RANKS
            self.state[parameter]["momentum"] = parameter.grad[self.rank * rows : (self.rank + 1) * rows].clone()


class Normed(nn.Module):
    """Module with statistics and a buffer, which each rank's forward pass sets, as under DDP."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.tensor([float(rank)]))
        self.norm(torch.arange(8.0).reshape(2, 4) * (rank + 1))


def trained(rank: int, *, seed: int = 0) -> tuple[nn.Linear, SlicedOptimizer]:
    """Return a model after a backward pass, and its optimizer, whose states are slices."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 6)
    optimizer = SlicedOptimizer(model.parameters(), rank)
    model(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def quantize(values: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)


@contextmanager
def saving(
    monkeypatch: pytest.MonkeyPatch, store: ObjectStore, **options: Any
) -> Iterator[Callable[..., list[BaseException | None]]]:
    """Yield a function that saves the state of each rank, and returns the ranks' errors."""
    with rank_threads(RANKS) as them:
        managers: list[CheckpointManager] = managers_of(them, store, monkeypatch, **options)

        def save(step: int, state: Callable[[int], State]) -> list[BaseException | None]:
            states = [state(rank) for rank in range(RANKS)]
            ended = them.run(lambda group: managers[group.rank].save(step, states[group.rank], wait=True))
            return [one.error for one in ended]

        yield save
        for manager in reversed(managers):
            manager.close()


def require_refused(errors: list[BaseException | None], *texts: str) -> None:
    for error in errors:
        assert type(error) is InvalidArgumentError, error
        for text in ("PerRank(optimizer)", 'replicas="coordinator"', *texts):
            assert text in str(error)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Return level and text of each line on values that differ."""
    told = [(record.levelno, record.getMessage()) for record in caplog.records]
    return [(level, text) for level, text in told if "different values" in text]


# ---- what is refused


def test_an_optimizer_that_keeps_a_slice_on_each_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks name states and ranks, and no shard is put. PerRank saves every slice; a new job gives each back."""
    store = RecordingStore(MemoryStore())

    def state(rank: int, *, makes_step: bool = True) -> State:
        model, optimizer = trained(rank)
        if not makes_step:
            optimizer.state.clear()
        return training_state(model=model, optimizer=optimizer, random_states=False)

    with saving(monkeypatch, store) as save:
        told = "optim.state.weight.momentum: one value on rank 0, another on rank 1, another on rank 2"
        for step in (1, 2):  # a save that was refused compares again
            require_refused(save(step, state), told, "names=2")
        assert not [request for request in store.requests if "shards/" in str(request)]
        assert save(3, lambda rank: state(rank) | {"optim": PerRank(trained(rank)[1])}) == SAVED
    with rank_threads(RANKS) as them:
        managers = managers_of(them, store, monkeypatch)
        states = [state(rank, makes_step=False) for rank in range(RANKS)]
        optimizers = [trained(rank)[1] for rank in range(RANKS)]
        for rank, optimizer in enumerate(optimizers):
            optimizer.state.clear()
            states[rank]["optim"] = PerRank(optimizer)
        assert [one.error for one in them.run(lambda group: managers[group.rank].restore(states[group.rank]))] == SAVED
        for manager in reversed(managers):
            manager.close()
    for rank, optimizer in enumerate(optimizers):
        saved = trained(rank)[1].state_dict()["state"]
        assert torch.equal(optimizer.state_dict()["state"][0]["momentum"], saved[0]["momentum"])


def test_ranks_that_trained_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without DDP, the parameters differ. With the option, all are those of rank 0, in every save."""

    def state(rank: int) -> State:
        return {"model": trained(rank, seed=rank // 2)[0], "big": torch.full((4096, 64), float(rank))}

    with saving(monkeypatch, MemoryStore()) as save:
        require_refused(save(1, state), "model.bias: one value on ranks 0, 1, another on rank 2", "names=3")
    store = MemoryStore()
    with saving(monkeypatch, store, replicas="coordinator", memory_budget_bytes=MiB) as save:
        for step in (1, 2):
            assert save(step, state) == SAVED
            saved = load(store, step=step)
            assert torch.equal(saved["model"]["weight"], trained(0)[0].weight)
            assert torch.equal(saved["big"], torch.zeros(4096, 64))


def test_stages_of_a_pipeline_have_the_same_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other options at one position are refused: a stage would restore those of another. A group may be empty."""
    store = MemoryStore()

    def stage(rank: int, *, has_empty_groups: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        layers = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 2)} | ({"embedding": nn.Linear(2, 2)} if not rank else {}))
        groups: list[State] = [{"params": layers["embedding"].parameters() if not rank else [], "lr": 0.5}]
        groups = groups if has_empty_groups or not rank else []
        groups.append({"params": layers[f"layer{rank}"].parameters(), "lr": 0.1})
        return layers, torch.optim.SGD(groups, lr=1.0)

    def state(rank: int, *, has_empty_groups: bool) -> State:
        model, optimizer = stage(rank, has_empty_groups=has_empty_groups)
        return {"model": model, "optim": optimizer}

    with saving(monkeypatch, store) as save:
        told = ("optim.param_groups.0.lr (2 values on 3 ranks", "a group may be empty")
        for error in save(1, lambda rank: state(rank, has_empty_groups=False)):
            assert type(error) is InvalidArgumentError
            assert all(text in str(error) for text in (*told, 'replicas="coordinator"'))
        assert save(1, lambda rank: state(rank, has_empty_groups=True)) == SAVED
    with rank_threads(RANKS) as them:
        managers = managers_of(them, store, monkeypatch)
        states = [state(rank, has_empty_groups=True) for rank in range(RANKS)]
        for own in states:
            for group in own["optim"].param_groups:
                group["lr"] = 0.0
        assert [one.error for one in them.run(lambda group: managers[group.rank].restore(states[group.rank]))] == SAVED
        for manager in reversed(managers):
            manager.close()
    assert [[group["lr"] for group in own["optim"].param_groups] for own in states] == [[0.5, 0.1]] * RANKS
    with saving(monkeypatch, MemoryStore(), replicas="coordinator") as save:
        assert save(1, lambda rank: state(rank, has_empty_groups=False)) == SAVED


def test_groups_that_come_to_differ_do_not_end_a_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other options on other ranks in a later save with a new tensor are told in a warning."""

    def state(rank: int, **more: torch.Tensor) -> State:
        model = nn.Linear(2, 2)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=1.0 + rank * bool(more)), **more}

    with saving(monkeypatch, MemoryStore()) as save:
        assert save(1, state) == SAVED
        assert save(2, lambda rank: state(rank, new=torch.ones(2))) == SAVED
    assert [level for level, text in lines(caplog) if "optim.param_groups.0.lr" in text] == [logging.WARNING]


def test_stages_of_a_pipeline_keep_the_names_of_their_parameters(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An optimizer that is made of `named_parameters()` has names in its groups; no warning of them."""
    store = MemoryStore()

    def state(rank: int) -> State:
        model = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 2)})
        return {"model": model, "optim": torch.optim.SGD(model.named_parameters(), lr=1.0)}

    with saving(monkeypatch, store) as save:
        assert save(1, state) == SAVED
    assert not lines(caplog)
    with rank_threads(RANKS) as them:
        managers = managers_of(them, store, monkeypatch)
        states = [state(rank) for rank in range(RANKS)]
        assert [one.error for one in them.run(lambda group: managers[group.rank].restore(states[group.rank]))] == SAVED
        for manager in reversed(managers):
            manager.close()
    for rank, own in enumerate(states):
        names = own["optim"].param_groups[0]["param_names"]
        assert names == [f"layer{rank}.weight", f"layer{rank}.bias"]


@pytest.mark.parametrize("place", ["state_dict", "extra"])
def test_plain_tensors_are_compared(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of which nothing is known is refused, unless its name is that of BatchNorm's statistics."""
    store = MemoryStore()

    def state(rank: int) -> State:
        values = dict(Normed(rank).state_dict())
        if place == "state_dict":
            del values["seen"]
        return {"model": values}

    with saving(monkeypatch, store) as save:
        if place == "extra":
            require_refused(save(1, state), "model.seen: ", "the module itself", "names=1")
        else:
            assert save(1, state) == SAVED
            assert torch.equal(load(store)["model"]["norm.running_mean"], Normed(0).state_dict()["norm.running_mean"])


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:.*TypedStorage.*:UserWarning")
@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, quantize])
def test_tensors_that_are_no_plain_elements_are_compared(
    monkeypatch: pytest.MonkeyPatch, convert: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with saving(monkeypatch, MemoryStore()) as save:
        assert save(1, lambda _rank: {"x": nn.Parameter(convert(torch.eye(2)), requires_grad=False)}) == SAVED
        require_refused(save(2, lambda rank: {"y": convert(torch.eye(2) * (rank + 1))}), "y: one value on rank 0")


def test_a_parameter_that_a_hook_renames_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer of another name is not, nor is an extra state."""

    def state(rank: int, value: int) -> State:
        model = Normed(rank)
        nn.init.constant_(model.norm.weight, value)
        known: Any = model  # not all of torch's methods have types
        known.norm.get_extra_state = lambda: torch.full((2,), rank)
        known.register_state_dict_post_hook(lambda _m, values, *_: values.update(scale=values.pop("norm.weight")))
        return {"model": model}

    with saving(monkeypatch, MemoryStore()) as save:
        assert save(1, lambda rank: state(rank, 1)) == SAVED
    with saving(monkeypatch, MemoryStore()) as save:
        require_refused(save(1, lambda rank: state(rank, rank)), "model.scale: one value on rank 0", "names=1")


def test_replicas_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the ranks that hold a shard are compared; the error names it by its tensor."""
    halves = [shard(torch.full((4, 2), value), 2, (2, 1)) for value in (1.0, 2.0)]
    with saving(monkeypatch, MemoryStore()) as save:
        assert save(1, lambda rank: {"w": halves[0][rank % 2], "own": {str(rank): torch.ones(rank)}}) == SAVED
        told = "v: one value on rank 0, another on rank 2"
        require_refused(save(2, lambda rank: {"v": halves[rank // 2][rank % 2]}), told)


# ---- what may differ


def test_buffers_of_the_lowest_rank_are_saved_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In every save, also where another rank has less to write; one line at INFO for all names of a job."""
    store = MemoryStore()

    def state(rank: int) -> State:
        return {"model": Normed(rank), "own": {str(rank): torch.ones(0 if rank else 99)}}

    with saving(monkeypatch, store) as save, caplog.at_level(logging.INFO, "dcp_remote"):
        for step in (1, 2):
            assert save(step, state) == SAVED
            saved = load(store)["model"]
            assert saved["seen"].tolist() == [0.0]
            assert torch.equal(saved["norm.running_var"], Normed(0).state_dict()["norm.running_var"])
    ((level, text),) = lines(caplog)
    assert level == logging.INFO
    assert all(name in text for name in ("3 buffers", "model.norm.running_mean", "model.seen"))
    assert "norm.weight" not in text


def test_what_a_module_and_an_optimizer_tell_of_their_tensors() -> None:
    """Names are those of the checkpoint, also below a wrapper; all names of a tied parameter are known."""
    model = Normed(0)
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.tied = model.norm
    optimizer = torch.optim.Adam(model.parameters())
    (model.scale * model.norm.weight.sum()).backward()
    optimizer.step()
    for wrapped in (model, checkpoint_wrapper(model)):
        roles = TensorRoles()
        build_saved_state({"nested": {"model": wrapped}, "optim": optimizer}, 0, roles)
        trained = {f"nested.model.{name}" for name in ("scale", "norm.weight", "norm.bias", "tied.weight", "tied.bias")}
        assert {name for name in roles.trained if name.startswith("nested")} == trained
        assert {"optim.state.scale.step", "optim.state.norm.weight.exp_avg"} <= roles.trained
        assert "nested.model.seen" in roles.buffers
        assert roles.is_buffer("nested.model.tied.running_var")
        assert not roles.is_buffer("nested.model.norm.weight")


def test_objects_and_numbers_of_the_lowest_rank_are_saved_in_each_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss as a float or a tensor is rank 0's; each job warns of it, and a new name gets a line of its own."""
    store = MemoryStore()

    def state(rank: int, **more: Any) -> State:
        best = {"best_val_loss": 1.0 + (rank == 2), "last": torch.tensor(2.0 + rank), "step": 1}
        return best | {"weights": torch.ones(100), "own": {str(rank): torch.ones(9 - rank)}} | more

    for job in range(2):
        caplog.clear()
        with (
            saving(monkeypatch, store, resumed_from=11 if job else None) as save,
            caplog.at_level(logging.WARNING, "dcp_remote"),
        ):
            for step in (10, 11, 12):
                more = {"new": 1} if step == 12 else {}
                assert save(10 * job + step, lambda rank, more=more: state(rank, **more, time=rank)) == SAVED
                saved = load(store)
                assert (saved["best_val_loss"], saved["last"].item(), saved["time"]) == (1.0, 2.0, 0)
        ((level, text),) = lines(caplog)
        assert level == logging.WARNING
        assert "best_val_loss (2 values on 3 ranks; rank 0's is saved), last (3 values on 3 ranks; rank 0's" in text


def test_dcp_save_stores_the_objects_of_the_lowest_rank() -> None:
    """Plain dcp.save does, too; an object that rank 0 lacks is rank 1's."""
    store = MemoryStore()
    states = [{"a": rank, "w": torch.ones(8), "z": rank} | ({"b": rank} if rank else {}) for rank in range(RANKS)]
    save_as_ranks(states, lambda: RemoteWriter(store))
    saved = load(store)
    assert (saved["a"], saved["b"], saved["z"]) == (0, 1, 0)


def test_plans_that_torch_keeps_are_not_changed() -> None:
    """With torch's cache of plans, a later save would lack an object that was moved, or have it twice."""

    class Caching(DefaultSavePlanner):
        """Class of its own, because torch caches by the name of the class."""

    for caches in (False, True):
        planner = Caching(enable_plan_caching=caches)
        planner.set_up_planner({"a": 1}, None, is_coordinator=True)
        plan = planner.create_local_plan()
        for _ in range(2):
            plans, _metadata = planner.create_global_plan([plan])
            assert writer._are_cached_by_torch(plans) == caches


# ---- what it costs


def test_later_saves_compare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save has one round more, and digests what several ranks hold once; a new name alone costs again."""
    digested = [0]

    def counted_views(runs: Any) -> Any:
        found = host_views(runs)
        digested[0] += sum(view.nbytes for view in found)
        return found

    monkeypatch.setattr(plan_cache, "host_views", counted_views)
    half = shard(torch.ones(RANKS, 2), RANKS, (RANKS, 1))

    def cost(save: Callable[..., Any], step: int, **more: Any) -> tuple[int, int]:
        digested[0] = 0
        rounds.clear()
        assert save(step, lambda rank: {"w": torch.ones(5 * KiB), "half": half[rank]} | more) == SAVED
        return digested[0] // RANKS, sum(rounds.values())

    with counted_rounds() as rounds:
        with saving(monkeypatch, MemoryStore()) as save:
            assert cost(save, 1) == (20 * KiB, 3)  # asked, compared, committed
            assert cost(save, 2) == (0, 2)
            assert cost(save, 3, new=torch.ones(KiB)) == (4 * KiB, 3)
        with saving(monkeypatch, MemoryStore(), replicas="coordinator") as save:
            assert cost(save, 1) == (0, 2)


def test_one_digest_compares_all_tensors_that_the_same_ranks_hold() -> None:
    """A message holds a digest for each set of holders; only a rank of each value lists its tensors one by one."""
    ranks = 1000
    names = [[f"all{n}" for n in range(50)] + [f"{rank % 10}.{n}" for n in range(50)] for rank in range(ranks)]
    tables = [table_of(own, [REPLICA] * 99 + [BUFFER]) for own in names]
    arrangement = arrange(tables, compared=set())
    assert sorted(len(one.ranks) for one in arrangement.sets) == [100] * 20 + [1000]
    assert all(len(np.unique(share.compared)) == 3 for share in arrangement.shares)
    assert all(share.compared.nbytes == 100 for share in arrangement.shares)
    digests = [{1: b"b" if rank in (7, 9) else b"a"} for rank in range(ranks)]
    groups = group_by_digest(range(ranks), digests, 1)
    assert [len(group) for group in groups] == [998, 2]
    assert find_unequal(groups, [b"AABB", b"AACC"], item_bytes=2) == {1: ["998 ranks (0, 1, 2, 3, …)", "ranks 7, 9"]}
    known = arrange(tables, compared={name for own in names for name in own})
    assert known.sets == ()
    assert not any(share.has_sets or len(share.compared) for share in known.shares)


def table_of(names: list[str], roles: list[int]) -> PlanTable:
    """Return the table of a rank that holds vectors of these names."""
    count = len(names)
    one = np.ones(count, dtype=np.uint8)
    return PlanTable(
        own={},
        packed_names=pack_names(names, {}),
        is_object=np.zeros(count, dtype=bool),
        role=np.array(roles, dtype=np.uint8),
        kind=one - 1,
        dimensions=one,
        shapes=one,
        offsets=one - 1,
        sizes=one,
        kinds=((to_kind("", TensorProperties()), 4),),
        value_digests=np.zeros(0, dtype=np.uint32),
    )
