"""States of optimizers that are no copies of their parameters: each comes back with its dtype, device and bits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

from dcp_remote import CheckpointManager, OptimizerState, PerRank, RemoteReader, RemoteWriter, training_state
from dcp_remote.errors import InvalidArgumentError, StateMismatchError
from dcp_remote.storage import MemoryStore
from tests.support.states import equal


class Masters(Optimizer):
    """Optimizer of the shape of Adafactor and of optimizers with masters: states of many dtypes over bf16 weights."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.int64)
                    state["master"] = parameter.detach().float().to("cpu")
                    state["count"] = torch.tensor(1_000_000)
                    state["mask"] = torch.zeros(parameter.shape, dtype=torch.bool)
                    state["codes"] = torch.zeros(parameter.shape, dtype=torch.uint8)
                    state["nested"] = OrderedDict(row=torch.zeros(parameter.shape[0]), mode="warm")
                    state["history"] = [torch.zeros(2), torch.zeros(2, dtype=torch.float64)]
                gradient = parameter.grad.float().cpu()
                state["master"] -= group["lr"] * gradient
                state["nested"]["row"] += gradient.flatten(1).square().mean(1) / 3
                state["mask"] |= gradient > 0
                state["codes"] += 200
                torch._foreach_add_(state["history"], 0.1)
                for name in ("step", "count"):
                    state[name] += 1
                parameter.copy_(state["master"])


def made(
    kind: Callable[[Any], Optimizer] = Masters, *, seed: int, steps: int = 0
) -> tuple[nn.Module, Optimizer, dict[str, Any]]:
    """Return a bf16 model, an optimizer after some steps, and their state."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 4, bias=False).bfloat16()
    optimizer = kind(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer, training_state(model=model, optimizer=optimizer, random_states=False)


def through_a_checkpoint(state: Any, template: Any, **options: Any) -> None:
    """Save a state, and restore it into a template."""
    with CheckpointManager(MemoryStore(), progress=False) as checkpoints:
        checkpoints.save(1, state, wait=True)
        assert checkpoints.restore(template, **options) == 1


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for number in range(steps):
        model(torch.full((1, 3), 0.3 + number, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_states_keep_their_dtypes_and_bits(tmp_path: Path) -> None:
    """Restore into a fresh optimizer, go on, save, restore again: equal to a training that was never interrupted."""
    model, optimizer, state = made(seed=1, steps=3)
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        checkpoints.save(1, state, wait=True)
    for step in (1, 2, 3):
        other, resumed, template = made(seed=2)
        with CheckpointManager(tmp_path, progress=False) as checkpoints:
            assert checkpoints.restore(template) == step
            assert equal(resumed.state_dict(), optimizer.state_dict())
            for pair in ((model, optimizer), (other, resumed)):
                train(*pair, steps=2)
            assert equal(resumed.state_dict(), optimizer.state_dict())
            assert equal(dict(model.state_dict()), dict(other.state_dict()))
            checkpoints.save(step + 1, template, wait=True)


def test_an_optimizer_of_one_rank_keeps_them_too() -> None:
    (_, optimizer, _), (_, resumed, _) = made(seed=1, steps=3), made(seed=2)
    through_a_checkpoint({"optim": PerRank(optimizer)}, {"optim": PerRank(resumed)})
    assert equal(resumed.state_dict(), optimizer.state_dict())


def test_a_conversion_gives_the_dtypes_of_the_optimizer() -> None:
    """Save states of torch's optimizer over fp32 weights, whose states are fp32; bf16 ones are converted, and kept."""
    model = nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    given = training_state(model=model, optimizer=optimizer, random_states=False)
    other, resumed, template = made(torch.optim.AdamW, seed=2)
    with pytest.raises(StateMismatchError, match="of another dtype"):
        through_a_checkpoint(given, template)
    through_a_checkpoint(given, template, dtype="convert")
    (state,), (saved,) = resumed.state.values(), optimizer.state.values()
    dtypes = {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
    assert {key: value.dtype for key, value in state.items()} == dtypes
    assert torch.equal(state["exp_avg"], saved["exp_avg"].bfloat16())
    assert other.weight.dtype == torch.bfloat16


def test_states_stay_on_their_devices() -> None:
    """Give states on the CPU to an optimizer whose parameters are elsewhere; and an integer step to a fused one."""
    _, optimizer, _ = made(seed=1, steps=2)
    (state,) = optimizer.state.values()
    for device, fused in (("meta", False), ("cpu", True)):
        model = nn.Linear(3, 4, bias=False, device=device, dtype=torch.bfloat16)
        other = Masters(model.parameters())
        groups = [{"params": ["weight"], "lr": 0.1, "fused": fused}]
        OptimizerState(model, other).load_state_dict({"state": {"weight": state}, "param_groups": groups})
        (found,) = other.state.values()
        assert equal(found, state)
        assert all(value.is_cpu for value in found.values() if isinstance(value, torch.Tensor))


class Wrapper(Optimizer):
    """Wrapper of an optimizer that is no optimizer itself, as that of Accelerate."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        self.optimizer.step(closure)


class Container(Optimizer):
    """Container of optimizers that names parameters itself, as that of torchtitan."""

    def __init__(self, optimizers: list[Optimizer], model: nn.Module) -> None:
        self.optimizers, self.model = optimizers, model
        super().__init__(list(model.parameters()), {})

    def state_dict(self) -> Any:
        states = [OptimizerState(self.model, one).state_dict()["state"] for one in self.optimizers]
        return {f"{number}.{name}": value for number, state in enumerate(states) for name, value in state.items()}

    def load_state_dict(self, state_dict: Any) -> None:
        for number, optimizer in enumerate(self.optimizers):
            groups = [{"lr": 0.1, "params": [0]}]
            optimizer.load_state_dict({"state": {0: state_dict[f"{number}.weight"]}, "param_groups": groups})


@pytest.mark.parametrize("wraps", [Wrapper, lambda optimizer: optimizer])
@pytest.mark.parametrize("contains", [False, True])
def test_wrappers_and_containers(wraps: Callable[[Optimizer], Optimizer], contains: bool) -> None:
    def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        wrapped = wraps(optimizer)
        return {"model": model, "optim": Container([wrapped], model) if contains else wrapped}

    model, optimizer, _ = made(seed=1, steps=2)
    other, resumed, _ = made(seed=2)
    through_a_checkpoint(state_of(model, optimizer), state_of(other, resumed))
    assert equal(resumed.state_dict(), optimizer.state_dict())


def test_hooks_of_the_user_get_what_was_loaded_and_may_change_it() -> None:
    _, optimizer, state = made(seed=1, steps=2)
    _, resumed, template = made(seed=2)
    seen: list[torch.dtype] = []

    def halve(one: Optimizer) -> None:
        (values,) = one.state.values()
        seen.append(values["master"].dtype)
        values["master"] = values["master"] / 2

    resumed.register_load_state_dict_post_hook(halve)
    through_a_checkpoint(state, template)
    (found,), (saved,) = resumed.state.values(), optimizer.state.values()
    assert seen == [torch.float32]
    assert torch.equal(found["master"], saved["master"] / 2)
    assert len(resumed._optimizer_load_state_dict_post_hooks) == 1
    assert not resumed._optimizer_load_state_dict_pre_hooks


class Rounding(Masters):
    """Optimizer whose load rounds what it gets, and keeps the dtype."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["master"] = state["master"].bfloat16().float()


class Packing(Masters):
    """Optimizer that keeps a state in another form than it saves."""

    def state_dict(self) -> Any:
        values: Any = super().state_dict()
        state = {key: {**one, "master": one["master"] - 1} for key, one in values["state"].items()}
        return {**values, "state": state}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["master"] = state["master"] + 1


def test_an_optimizer_that_changes_what_it_loads_is_refused() -> None:
    (_, _, state), (_, _, template) = made(Rounding, seed=1, steps=2), made(Rounding, seed=2)
    with pytest.raises(StateMismatchError, match=r"changed states while.*Rounding.*weight\.master \(float32 \(4, 3"):
        through_a_checkpoint(state, template)


def test_an_optimizer_that_keeps_its_state_in_another_form() -> None:
    """Its `state_dict` gives back what was loaded."""
    _, optimizer, state = made(Packing, seed=1)
    for one in optimizer.param_groups[0]["params"]:
        one.grad = torch.full_like(one, 0.5)
    optimizer.step()
    (values,) = optimizer.state.values()
    values["master"].fill_(3.0)  # of which 1 can be taken without rounding
    values["nested"]["row"].fill_(float("nan"))
    _, resumed, template = made(Packing, seed=2)
    through_a_checkpoint(state, template)
    (found,) = resumed.state.values()
    assert torch.equal(found["master"], values["master"])
    assert found["nested"]["row"].isnan().all()


class Counting(Masters):
    """Optimizer whose `state_dict` has values of its own, without which it does not load."""

    scale, calls = torch.ones(2), 0

    def step(self, closure: Any = None) -> Any:
        self.scale, self.calls = self.scale * 2, self.calls + 1
        return super().step(closure)

    def state_dict(self) -> Any:
        values: Any = super().state_dict()
        return {**values, "scale": self.scale, "calls": {"total": self.calls}}

    def load_state_dict(self, state_dict: Any) -> None:
        values = dict(state_dict)
        self.scale, self.calls = values.pop("scale"), values.pop("calls")["total"]
        super().load_state_dict(values)


def hooked(parameters: Any) -> Optimizer:
    """Return an optimizer with such values by torch's hooks."""
    optimizer: Any = Masters(parameters)
    optimizer.scale, optimizer.calls = torch.ones(2), 0
    optimizer.register_step_post_hook(lambda one, *_: setattr(one, "calls", one.calls + 1))
    optimizer.register_state_dict_post_hook(lambda one, values: {**values, "calls": one.calls})
    optimizer.register_load_state_dict_pre_hook(lambda one, values: setattr(one, "calls", values["calls"]))
    return optimizer  # type: ignore[no-any-return]  # an optimizer with attributes


@pytest.mark.parametrize("kind", [Counting, hooked])
@pytest.mark.parametrize("way", ["manager", "excluded", "dcp"])
def test_values_of_the_optimizer_itself(tmp_path: Path, kind: Callable[[Any], Any], way: str) -> None:
    """Values beside states and groups come back; those that are not loaded stay, though a step makes the states."""
    model, optimizer, state = made(kind, seed=1, steps=3)
    other, resumed, template = made(kind, seed=2)
    if way == "dcp":
        dcp.save({"optim": OptimizerState(model, optimizer)}, storage_writer=RemoteWriter(tmp_path))
        dcp.load({"optim": OptimizerState(other, resumed)}, storage_reader=RemoteReader(tmp_path))
    else:
        through_a_checkpoint(state, template, exclude="optim.calls*" if way == "excluded" else ())
    found: Any = resumed
    assert found.calls == (0 if way == "excluded" else 3)
    assert torch.equal(found.scale, optimizer.scale)  # type: ignore[attr-defined]  # of both kinds


def test_values_of_one_of_several_optimizers_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 4).bfloat16()
    optimizers = [Counting([model.weight]), Masters([model.bias])]
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        with pytest.raises(InvalidArgumentError, match=r"values of its own.*PerRank.*Counting.*scale, calls"):
            checkpoints.save(1, {"model": model, "optim": OptimizerState(model, optimizers)}, wait=True)
        state = {"model": model, "optim": {str(number): one for number, one in enumerate(optimizers)}}
        checkpoints.save(1, state, wait=True)


class Scratching(Masters):
    """Optimizer that makes a state anew in each step, and drops what it loads of it."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for state in self.state.values():
            state["scratch"] = torch.ones(2)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            del state["scratch"]


@pytest.mark.parametrize("own", [False, True])
def test_a_state_that_an_optimizer_drops_is_said(caplog: pytest.LogCaptureFixture, own: bool) -> None:
    model, optimizer, _ = made(Scratching, seed=1, steps=2)
    other, resumed, _ = made(Scratching, seed=2)
    wrap: Any = PerRank if own else lambda value: value
    through_a_checkpoint({"model": model, "optim": wrap(optimizer)}, {"model": other, "optim": wrap(resumed)})
    (text,) = [record.getMessage() for record in caplog.records if record.name.endswith("optimizer_load")]
    assert f"Scratching dropped 1 of the states that its checkpoint has (state.{0 if own else 'weight'}" in text
    (found,), (saved,) = resumed.state.values(), optimizer.state.values()
    assert equal(found, {key: value for key, value in saved.items() if key != "scratch"})


@pytest.mark.parametrize("frozen", ["0", "1", ""])
def test_a_layer_that_is_frozen_before_the_restore_keeps_its_states(frozen: str) -> None:
    """Frozen before the restore: the first layer, one that never had a state, or all; as in a job that goes on."""

    def job() -> tuple[nn.Module, Optimizer]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = job()
    model[1].requires_grad_(requires_grad=frozen != "1")  # type: ignore[index]  # a sequence
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    other, resumed = job()
    other.get_submodule(frozen).requires_grad_(requires_grad=False)
    through_a_checkpoint({"model": model, "optim": optimizer}, {"model": other, "optim": resumed})
    assert equal(resumed.state_dict(), optimizer.state_dict())
    assert len(resumed.state) == (2 if frozen == "1" else 4)
    assert all(parameter.grad is None for parameter in other.parameters())


class Momentum(Masters):
    """Optimizer whose state of a parameter is a tensor, and no dict."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = parameter.grad + (self.state.get(parameter) if parameter in self.state else 0)


def test_a_state_may_be_a_tensor(tmp_path: Path) -> None:
    """Restored into a fresh optimizer, and into one that has a state."""
    _, optimizer, state = made(Momentum, seed=1, steps=2)
    _, resumed, template = made(Momentum, seed=2)
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        checkpoints.save(1, state, wait=True)
        for _ in range(2):
            assert checkpoints.restore(template) == 1
            assert equal(resumed.state_dict(), optimizer.state_dict())
