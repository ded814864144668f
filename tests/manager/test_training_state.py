"""States of trainings, on one process: `training_state`, and bare modules and optimizers in a state."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dcp_remote import CheckpointManager, ModelState, OptimizerState, PerRank, RandomStates, load, training_state
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError, StateMismatchError
from dcp_remote.storage import MemoryStore
from tests.support.states import equal


class Net(nn.Module):
    """Net with a frozen layer, a layer that may be left out, a tied weight and a buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3, bias=False)
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.last.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = self.frozen(torch.tanh(self.first(x)))
        result: torch.Tensor = self.last(hidden) + self.tied(hidden)
        return result


class Position:
    """Position in the data, as of a `StatefulDataLoader`: being asked for its state would start its workers."""

    def __init__(self) -> None:
        self.step, self.asked = 0, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def adamw(model: Any) -> Optimizer:
    """Return AdamW with two groups, one without decay, and the frozen parameters in the first."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=0.1)


def sgd(model: Any) -> Optimizer:
    return SGD(model.parameters(), 0.1)


def momentum(model: Any) -> Optimizer:
    return SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


def train(model: nn.Module, optimizer: Optimizer, *, steps: int = 1, seed: int = 0) -> None:
    """Train on data that `seed` gives."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(2, 3, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def made(make: Callable[[Any], Optimizer] = adamw, *, seed: int, steps: int = 0) -> tuple[Any, Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = make(model)
    train(model, optimizer, steps=steps, seed=seed)
    return model, optimizer


def names_of(value: Any) -> set[str]:
    """Return the names of all leaves, as torch flattens them."""
    return set(flatten_state_dict({"": value})[0])


def saved(state: Any) -> MemoryStore:
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, state, wait=True)
    return store


def restored(store: MemoryStore, state: Any) -> Any:
    with CheckpointManager(store) as checkpoints:
        assert checkpoints.restore(state) == 1
    return state


def assert_trains_alike(one: tuple[nn.Module, Optimizer], other: tuple[nn.Module, Optimizer]) -> None:
    """Check that states are equal, and those after three more steps."""
    for steps in (0, 3):
        train(*one, steps=steps, seed=9)
        train(*other, steps=steps, seed=9)
        assert equal(dict(one[0].state_dict()), dict(other[0].state_dict()))
        assert equal(one[1].state_dict(), other[1].state_dict())


# ---- one call


def test_a_training_goes_on_exactly() -> None:
    """Save all parts, of which some differ at the restore, in the background; the steps after that are the same."""

    def parts(seed: int) -> dict[str, Any]:
        model, optimizer = made(seed=seed)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": [ExponentialLR(optimizer, 0.5), LambdaLR(optimizer, lambda step: 1 / (1 + step))],
            "loader": {"train": Position(), "eval": Position()},
            "scaler": torch.amp.GradScaler("cpu", init_scale=float(seed)),
            "ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
            "extra": {"epoch": seed, "own": PerRank([seed])},
        }

    def step(parts: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = parts["model"](torch.randn(2, 3)).square().sum()
        loss.backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        parts["scheduler"][0].step()
        parts["ema"].update_parameters(parts["model"])
        parts["loader"]["train"].step += 1
        averaged: torch.Tensor = parts["ema"](torch.ones(1, 3)).sum()
        return loss.detach() + averaged

    store, first = MemoryStore(), parts(1)
    step(first)
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(7, training_state(**first))
        expected = [step(first) for _ in range(3)]
    again = parts(2)
    step(again)
    state = training_state(**again)
    with CheckpointManager(store) as checkpoints:
        assert checkpoints.restore(state) == 7
    assert [again["loader"][name].step for name in ("train", "eval")] == [1, 0]
    assert again["loader"]["train"].asked == 0
    assert again["scaler"].get_scale() == 1.0
    assert (state["epoch"], state["own"].value) == (1, [1])
    assert all(torch.equal(step(again), value) for value in expected)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_names_are_torchs(compiled: bool, bare: bool) -> None:
    """Save under a wrapper, restore without it: names are those of torch's functions, and nothing is lost."""
    model, optimizer = made(seed=1, steps=2)
    wrapped: Any = torch.compile(model, backend="eager") if compiled else model
    state = {"model": wrapped, "optim": optimizer}
    store = saved(state if bare else training_state(model=wrapped, optimizer=optimizer, random_states=False))
    oracle = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    assert names_of(load(store)) == names_of(oracle)
    other, other_optimizer = made(seed=2)
    restored(store, {"model": other, "optim": other_optimizer})
    assert_trains_alike((model, optimizer), (other, other_optimizer))


def test_states_of_torchs_functions_load_and_are_loaded() -> None:
    """Exchange checkpoints with a program that gives torch's state dicts, in both directions."""
    model, optimizer = made(seed=1, steps=2)
    # torch's function has no state for the layer that is not used; a template of it would ask for one.
    store = saved({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)})
    other, other_optimizer = made(seed=2)
    restored(store, training_state(model=other, optimizer=other_optimizer, random_states=False))
    assert_trains_alike((model, optimizer), (other, other_optimizer))
    template = {"model": get_model_state_dict(other), "optim": get_optimizer_state_dict(other, other_optimizer)}
    store = saved({"model": other, "optim": other_optimizer})
    train(other, other_optimizer, steps=1)
    expected = copy.deepcopy(load(store)["optim"]["state"])
    assert equal(restored(store, template)["optim"]["state"], expected)


# ---- optimizers


@pytest.mark.parametrize("make", [adamw, sgd, momentum])
def test_an_optimizer_without_a_step(make: Callable[[Any], Optimizer]) -> None:
    """Save before the first step: neither optimizer nor parameters change; restore it over a trained optimizer."""
    model, optimizer = made(make, seed=1)
    before = copy.deepcopy(model.state_dict())
    store = saved({"model": model, "optim": optimizer})
    assert not optimizer.state
    assert equal(dict(model.state_dict()), dict(before))
    assert all(parameter.grad is None for parameter in model.parameters())
    other = made(make, seed=2, steps=2)
    restored(store, {"model": other[0], "optim": other[1]})
    assert_trains_alike((model, optimizer), other)


@pytest.mark.parametrize("make", [adamw, momentum])
def test_a_fresh_optimizer_is_filled(make: Callable[[Any], Optimizer]) -> None:
    """Restore into an optimizer that has gradients but no step, which torch would leave empty; gradients stay."""
    one = made(make, seed=1, steps=2)
    other = made(make, seed=2)
    other[0](torch.ones(1, 3)).sum().backward()
    gradients = [copy.deepcopy(parameter.grad) for parameter in other[0].parameters()]
    restored(saved({"model": one[0], "optim": one[1]}), {"model": other[0], "optim": other[1]})
    assert equal([parameter.grad for parameter in other[0].parameters()], gradients)
    other[1].zero_grad()
    assert_trains_alike(one, other)


def test_a_parameter_that_had_no_gradient_has_no_state_afterwards() -> None:
    """Restore a state of all parameters where some have none, and the reverse: each is then as it was saved."""
    some, every = made(seed=1, steps=1), made(seed=2, steps=1)
    for parameter in every[0].parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    every[1].step()
    every[1].zero_grad()
    assert len(every[1].state) > len(some[1].state) > 0
    store, other = saved({"model": some[0], "optim": some[1]}), saved({"model": every[0], "optim": every[1]})
    target = made(seed=3, steps=1)
    for step in (other, store, other):
        restored(step, {"model": target[0], "optim": target[1]})
        source = every if step is other else some
        assert len(target[1].state) == len(source[1].state)
    assert_trains_alike(every, target)


def test_no_optimizer_is_left_empty_silently() -> None:
    """Restore into a model of other names: an error, whichever names the checkpoint has for its states."""
    model, optimizer = made(seed=1, steps=1)
    store = saved({"model": model, "optim": optimizer})
    other = nn.Linear(3, 4)
    with pytest.raises(Exception, match=r"first|[Mm]issing"), CheckpointManager(store) as checkpoints:
        checkpoints.restore({"optim": OptimizerState(other, Adam(other.parameters()))})
    numbered = saved({"model": model.state_dict(), "optim": optimizer.state_dict()})
    fresh = made(seed=2)
    with pytest.raises(Exception, match=r"first|[Mm]issing"), CheckpointManager(numbered) as checkpoints:
        checkpoints.restore({"model": fresh[0], "optim": fresh[1]})


def test_flattened_states_of_torch_are_recognized() -> None:
    """Load a state that torch has flattened, as frameworks save it: same names, other paths."""
    one = made(lambda model: Adam(model.first.parameters()), seed=1, steps=1)
    flat = get_optimizer_state_dict(*one, options=StateDictOptions(flatten_optimizer_state_dict=True))
    store = saved({"optim": {key: value for key, value in flat.items() if key.startswith("state.")}})
    names = list(flatten_state_dict({"optim": load(store)["optim"]})[0])
    other = made(lambda model: Adam(model.first.parameters()), seed=2)
    template = OptimizerState(*other).template([name.removeprefix("optim.") for name in names])
    assert {name for name in names_of(template) if ".state." in name} == {f".{n.removeprefix('optim.')}" for n in names}


def test_load_state_dict_refuses_a_part() -> None:
    """Give an optimizer a state without some parameters, outside of a restore: refused by name."""
    model, optimizer = made(lambda model: Adam(model.parameters()), seed=1)
    state = OptimizerState(model, optimizer)
    values = state.state_dict()
    del values["state"]["first.bias"]
    with pytest.raises(InvalidArgumentError, match=r"names='first.bias'"):
        state.load_state_dict(values)


class Calling(AdamW):
    """Optimizer that calls the step of its base, which has hooks as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [AdamW, Calling])
def test_a_restore_fires_no_hooks_and_counts_no_step(kind: Callable[[Any], Optimizer]) -> None:
    """Restore into a fresh optimizer with hooks and a scheduler, to which the step that makes states is no step."""
    fired: list[str] = []
    trained = made(lambda model: kind(model.parameters()), seed=1, steps=2)
    store = saved({"model": trained[0], "optim": trained[1]})
    model, optimizer = made(lambda model: kind(model.parameters()), seed=2)
    scheduler = ExponentialLR(optimizer, 0.5)
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    everywhere = register_optimizer_step_post_hook(lambda *_: fired.append("global"))
    if kind is Calling:
        everywhere.remove()
    try:
        with CheckpointManager(store) as checkpoints:
            checkpoints.restore({"model": model, "optim": optimizer}, missing="keep")
        assert not fired
        assert not getattr(optimizer, "_opt_called", False)
        train(model, optimizer)
        assert {"pre", "post"} <= set(fired)
    finally:
        everywhere.remove()
    scheduler.step()
    assert optimizer.state[model.first.weight]["step"] == 3


def test_a_mismatch_leaves_a_fresh_optimizer_without_states() -> None:
    """Restore a checkpoint that does not fit: no state stays; states, options and gradients of a trained one do."""
    one = made(seed=1, steps=1)
    store = saved({"model": one[0], "optim": one[1]})
    for steps in (0, 1):
        model, optimizer = made(seed=2, steps=steps)
        before = copy.deepcopy(optimizer.state_dict())
        with CheckpointManager(store) as checkpoints, pytest.raises(StateMismatchError):
            checkpoints.restore({"model": model, "optim": optimizer, "epoch": 0})
        assert equal(optimizer.state_dict(), before)


@pytest.mark.parametrize("is_tensor", [False, True])
def test_options_that_a_scheduler_added(is_tensor: bool) -> None:
    """Save with a scheduler, restore without one: `initial_lr` is taken as by torch, also if a tensor, or excluded."""

    def rated(model: Any) -> Optimizer:
        return AdamW(model.parameters(), lr=torch.tensor(0.1) if is_tensor else 0.1)

    model, optimizer = made(rated, seed=1)
    scheduler = ExponentialLR(optimizer, 0.5)
    train(model, optimizer)
    scheduler.step()
    store = saved({"model": model, "optim": optimizer})
    other = made(rated, seed=2)
    restored(store, {"model": other[0], "optim": other[1]})
    assert other[1].param_groups[0]["initial_lr"] == scheduler.base_lrs[0]
    assert other[1].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert_trains_alike((model, optimizer), other)
    fresh = made(rated, seed=2)
    with CheckpointManager(store) as checkpoints:
        checkpoints.restore({"model": fresh[0], "optim": fresh[1]}, exclude="*.initial_lr")
    assert "initial_lr" not in fresh[1].param_groups[0]


# ---- several models and optimizers


def test_several_models_and_optimizers() -> None:
    """Name models and optimizers: each optimizer finds its model; one for both models has their names."""

    def parts(seed: int, steps: int) -> list[tuple[Any, Optimizer]]:
        return [made(seed=seed, steps=steps), made(seed=seed + 1, steps=steps)]

    one, other = parts(1, 2), parts(5, 0)

    def state(parts: list[tuple[Any, Optimizer]]) -> dict[str, Any]:
        models = {"generator": parts[0][0], "critic": parts[1][0]}
        optimizers = {"critic": parts[1][1], "generator": parts[0][1]}
        return training_state(model=models, optimizer=optimizers)

    store = saved(state(one))
    names = names_of(load(store))
    assert {".model.critic.first.weight", ".optim.generator.state.first.weight.exp_avg"} <= names
    restored(store, state(other))
    for before, after in zip(one, other, strict=True):
        assert_trains_alike(before, after)

    def together(parts: list[tuple[Any, Optimizer]]) -> dict[str, Any]:
        models = {"generator": parts[0][0].first, "critic": parts[1][0].first}
        optimizer = Adam([parameter for model in models.values() for parameter in model.parameters()])
        for model in models.values():
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {**models, "optim": optimizer}

    both = together(one)
    store = saved(both)
    assert ".optim.state.critic.weight.exp_avg" in names_of(load(store))
    again = restored(store, together(other))
    assert equal(again["optim"].state_dict(), both["optim"].state_dict())
    assert equal(dict(again["critic"].state_dict()), dict(both["critic"].state_dict()))


def test_a_sequence_of_optimizers_is_saved_as_one() -> None:
    """Split the parameters among two optimizers: names are those that torch gives to both together."""

    def parts(seed: int, steps: int) -> tuple[Any, list[Optimizer]]:
        model, _ = made(seed=seed)
        optimizers: list[Optimizer] = [
            SGD([model.first.weight], 0.1, momentum=0.9),
            Adam([model.first.bias, model.last.weight]),
        ]
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return model, optimizers

    model, optimizers = parts(1, 2)
    store = saved(training_state(model=model, optimizer=optimizers, random_states=False))
    assert names_of(load(store)["optim"]) == names_of(get_optimizer_state_dict(model, optimizers))
    other, fresh = parts(2, 0)
    restored(store, training_state(model=other, optimizer=fresh, random_states=False))
    for one, two in zip(optimizers, fresh, strict=True):
        assert equal(one.state_dict(), two.state_dict())


def test_optimizers_that_share_parameters_are_not_saved_as_one() -> None:
    """Two states of one parameter would have one name; under names of their own both are restored."""

    def parts(seed: int, steps: int) -> tuple[Any, list[Optimizer]]:
        model, _ = made(seed=seed)
        optimizers = [momentum(model), Adam(model.parameters())]
        for optimizer in optimizers:
            train(model, optimizer, steps=steps)
        return model, optimizers

    model, optimizers = parts(1, 2)
    for given in (optimizers, optimizers[:1] * 2):
        with pytest.raises(InvalidArgumentError, match=r"same parameters.*optimizer={'first': first"):
            training_state(model=model, optimizer=given)
        with pytest.raises(InvalidArgumentError, match="same parameters"):
            OptimizerState(model, given)
    named = dict(zip("ab", optimizers, strict=True))
    store = saved(training_state(model=model, optimizer=named, random_states=False))
    other, fresh = parts(2, 0)
    restored(store, training_state(model=other, optimizer=dict(zip("ab", fresh, strict=True)), random_states=False))
    for one, two in zip(optimizers, fresh, strict=True):
        assert equal(one.state_dict(), two.state_dict())


@pytest.mark.parametrize("rates", [(0.1, 0.5), (torch.tensor(0.1), torch.tensor(0.5)), (0.1, 0.1)])
def test_groups_that_were_merged_or_split_otherwise(rates: tuple[Any, Any]) -> None:
    """A group of parameters of two saved groups cannot have both groups' options: an error, unless they are equal."""

    def parts(cut: int, rates: tuple[Any, Any]) -> tuple[nn.Module, Optimizer]:
        model, _ = made(seed=1)
        parameters = list(model.parameters())
        groups: list[Any] = [{"params": parameters[:cut], "lr": rates[0]}, {"params": parameters[cut:], "lr": rates[1]}]
        return model, Adam(groups, foreach=False)

    model, optimizer = parts(2, rates)
    train(model, optimizer)
    store = saved({"model": model, "optim": optimizer})
    blank = tuple(rate * 0 for rate in rates)
    model, optimizer = parts(1, blank)
    if rates[0] == rates[1]:
        restored(store, {"model": model, "optim": optimizer})
        assert [group["lr"] for group in optimizer.param_groups] == list(rates)
        return
    with pytest.raises(StateMismatchError, match=r"different options.*'lr of group 1 \(.*0\.1.*0\.5.* groups 0, 1\)'"):
        restored(store, {"model": model, "optim": optimizer})
    store_state = {"model": model, "optim": optimizer}
    with CheckpointManager(store) as checkpoints:
        checkpoints.restore(store_state, exclude="optim.param_groups*")
    assert [group["lr"] for group in optimizer.param_groups] == list(blank)
    assert optimizer.state[next(model.parameters())]["step"] == 1


def test_an_optimizer_of_no_model_is_refused() -> None:
    """Give an optimizer that was made before its model was replaced, and one without a model: errors that say so."""
    model, (_, stale) = Net(), made(seed=1)
    with pytest.raises(InvalidArgumentError, match=r"no model of the state has.*OptimizerState.*models='model'"):
        saved({"model": model, "optim": stale})
    for state in ({"optim": stale}, {"model": model.state_dict(), "optim": stale}):
        with pytest.raises(InvalidArgumentError, match=r"has no torch\.nn\.Module.*OptimizerState.*where='optim' opt"):
            saved(state)
    with pytest.raises(InvalidArgumentError, match=r"after the model is wrapped.*shapes='\(4, 3\)"):
        training_state(model=model, optimizer=stale)
    with pytest.raises(InvalidArgumentError, match="no model"):
        OptimizerState(model, stale)


# ---- parameters with other names


class Renamed(Net):
    """Net whose first layer has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = self.first
        del self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.frozen(torch.tanh(self.entry(x)))) + self.unused(torch.ones(4)).sum()
        return result


def averaged(model: Any) -> AveragedModel:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    return average


def test_a_renamed_parameter_takes_its_copies_along() -> None:
    """Rename a layer below its model: states of the optimizer and averages follow; the other model is left alone."""

    def parts(generator: Any, seed: int, steps: int) -> tuple[Any, Optimizer, dict[str, Any]]:
        critic, critic_optimizer = made(seed=seed + 10, steps=steps)
        optimizer = adamw(generator)
        for _ in range(steps):
            generator(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
        models = {"generator": generator, "critic": critic}
        state = training_state(
            model=models,
            optimizer={"first": optimizer, "second": critic_optimizer},
            ema={name: averaged(model) for name, model in models.items()},
            random_states=False,
        )
        return generator, optimizer, state

    old, old_optimizer, state = parts(Net(), 1, 2)
    store = saved(state)
    new, optimizer, other = parts(Renamed(), 2, 0)
    rename = {"model.generator.first": "model.generator.entry"}
    with CheckpointManager(store) as checkpoints:
        checkpoints.restore(other, rename=rename)
        assert checkpoints.last_load is not None
        assert (checkpoints.last_load.kept, checkpoints.last_load.left_out) == ((), ())
    assert torch.equal(new.entry.weight, old.first.weight)
    assert equal(optimizer.state[new.entry.weight], old_optimizer.state[old.first.weight])
    averages = [each["ema"]["generator"].model.module for each in (other, state)]
    assert torch.equal(averages[0].entry.weight, averages[1].first.weight)
    explicit = rename | {
        "optim.first.state.first": "optim.first.state.entry",
        "ema.generator.module.first": "ema.generator.module.entry",
    }
    with CheckpointManager(store) as checkpoints:
        checkpoints.restore(parts(Renamed(), 3, 0)[2], rename=explicit)


def test_groups_of_renamed_parameters() -> None:
    """Rename a layer that has a group of its own, which has another position: the group gets its own options."""

    def parts(name: str, *groups: tuple[str, float]) -> dict[str, Any]:
        model = nn.ModuleDict({"body": nn.Linear(2, 2), name: nn.Linear(2, 2)})
        optimizer = SGD([{"params": model[layer].parameters(), "lr": rate} for layer, rate in groups])
        return {"model": model, "optim": optimizer}

    store = saved(parts("old", ("old", 1.0), ("body", 2.0)))
    state = parts("new", ("body", 3.0), ("new", 4.0))
    with CheckpointManager(store) as checkpoints:
        checkpoints.restore(state, rename={"model.old": "model.new"})
    assert [group["lr"] for group in state["optim"].param_groups] == [2.0, 1.0]


# ---- bare modules, nesting, errors


def test_a_bare_module_is_a_state() -> None:
    """Save and restore a module: its names are those below "model"."""
    model, _ = made(seed=1)
    store = saved(model)
    assert equal(load(store)["model"], dict(model.state_dict()))
    other, _ = made(seed=2)
    restored(store, other)
    assert equal(dict(other.state_dict()), dict(model.state_dict()))
    restored(store, {"model": ModelState(other)})


def test_a_module_without_values() -> None:
    """Save a loss function without parameters beside a model, also compiled."""
    loss = nn.CrossEntropyLoss()
    for value in (loss, torch.compile(loss, backend="eager")):
        state = {"model": nn.Linear(1, 1), "loss": value}
        assert restored(saved(state), state)["loss"] is value


def test_stateful_objects_at_any_depth() -> None:
    """Nest schedulers and a module in dicts and lists, with keys that are no text, beside values; containers stay."""

    def state(seed: int) -> dict[str, Any]:
        model, optimizer = made(seed=seed)
        inner = {3: [ExponentialLR(optimizer, 1 / seed), seed, {"module": model.first}], "seed": seed}
        return {"trainer": {"parts": inner, "rest": [seed]}}

    one, other = state(1), state(2)
    inner, items = other["trainer"]["parts"], other["trainer"]["parts"][3]
    scheduler = items[0]
    restored(saved(one), other)
    assert other["trainer"]["parts"] is inner
    assert inner[3] is items
    assert items[0] is scheduler
    assert scheduler.gamma == 1.0
    assert items[1] == inner["seed"] == 1
    assert other["trainer"]["rest"] == [1]
    assert torch.equal(items[2]["module"].weight, one["trainer"]["parts"][3][2]["module"].weight)


@pytest.mark.filterwarnings("ignore:`_get_pg_default_device`")
def test_a_module_on_the_meta_device() -> None:
    """Restore into a module without memory, and into its tensors without a process group: refused, with what to do."""
    store = saved({"model": nn.Linear(2, 2)})
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(InvalidArgumentError, match=r"to_empty.*where='model'.*names='weight, bias'"):
        restored(store, {"model": model})
    with pytest.raises(InvalidArgumentError, match=r"to_empty.*names='model\.weight, "):
        restored(store, {"model": model.state_dict()})
    model.to_empty(device="cpu")
    restored(store, {"model": model})


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"model": 5}, "model must be a torch Module"),
        ({"model": {"": nn.Linear(1, 1)}}, "Names must be strings"),
        ({"optimizer": nn.Linear(1, 1)}, "optimizer must be a torch Optimizer"),
        ({"loader": [1, 2]}, "StatefulDataLoader"),
        ({"scheduler": 5}, "scheduler has no state_dict"),
        ({"extra": {"random": 1}}, "taken.*random"),
        ({"extra": [1]}, "extra must be a dict"),
        ({"extra": {"per_rank": 1}}, "taken.*per_rank"),
        ({"extra": {"a": torch.Generator(), "b": PerRank(random.Random(0)), "c": 1}}, "RandomStates.*keys='a, b'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], what: str) -> None:
    """Each wrong argument is named."""
    with pytest.raises(InvalidArgumentError, match=what):
        training_state(**arguments)


def test_a_per_rank_value_below_the_top() -> None:
    """Nest a `PerRank`: refused by path."""
    with pytest.raises(DcpRemoteError, match=r"PerRank must be at the top level.*where='a.b'"):
        saved({"a": {"b": PerRank(1)}})


def test_generators_of_ones_own() -> None:
    """Pass `RandomStates` with a generator: its next draw is repeated."""
    generator = torch.Generator().manual_seed(1)
    store = saved(training_state(random_states=RandomStates(data=generator)))
    expected = torch.rand(3, generator=generator)
    restored(store, training_state(random_states=RandomStates(data=generator)))
    assert torch.equal(torch.rand(3, generator=generator), expected)
