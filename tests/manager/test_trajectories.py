"""Every optimizer and schedule of torch, saved and loaded, goes on exactly as one that was not interrupted.

Saved after some steps, loaded into new objects; then both go on, and their results must be equal bit for bit. Objects
of other kinds, random states among them, are in `tests/serialization`; whole trainings in `test_training_state.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from dcp_remote import RemoteReader, RemoteWriter
from dcp_remote.storage import MemoryStore
from tests.serialization.test_tags import same
from tests.serialization.test_tensors import as_it_is

pytestmark = pytest.mark.torture

State: TypeAlias = dict[str, Any]


class Lookup(nn.Module):
    """Embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table((x.abs() * 3).long().clamp(max=7))
        return found


def model_for(optimizer: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if optimizer == "SparseAdam":
        return Lookup()
    return nn.Sequential(nn.Linear(4, 6, bias=optimizer != "Muon"), nn.Linear(6, 2, bias=optimizer != "Muon"))


def optimizer_for(model: nn.Module, name: str, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, name)
    if name in ("LBFGS", "SparseAdam"):  # LBFGS takes a single group, SparseAdam is given a single tensor
        return kind(model.parameters(), **settings)  # type: ignore[no-any-return]  # the class is looked up by its name
    first, second = (list(part.parameters()) for part in model.children())
    # A group with its own learning rate, and an empty one.
    groups = [{"params": first}, {"params": second, "lr": 0.02}, {"params": []}]
    return kind(groups, **settings)  # type: ignore[no-any-return]  # the class is looked up by its name


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Take one step on inputs given by its number."""
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)


def optimizers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every class of `torch.optim`, with defaults and in each of its variants that run on a CPU."""
    for name, kind in sorted(vars(torch.optim).items()):
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            yield name, {}
            variants: dict[str, Any] = {"lr": torch.tensor(0.05), "momentum": 0.9}
            variants |= dict.fromkeys(["amsgrad", "centered", "foreach", "fused", "maximize"], True)
            variants |= {"line_search_fn": "strong_wolfe", "decoupled_weight_decay": True}
            known = inspect.signature(kind).parameters
            for setting, value in variants.items():
                # These refuse a learning rate that is a tensor.
                if setting in known and (setting, name) not in {("lr", "LBFGS"), ("lr", "SparseAdam")}:
                    yield name, {setting: value}


def fitting(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that a loop over tensors refuses."""
    return dict(settings) | ({"foreach": False} if "lr" in settings and name != "Muon" else {})


OPTIMIZERS = [pytest.param(n, fitting(n, s), id="-".join([n, *s])) for n, s in optimizers()]


# torch cannot take these optimizers' states apart: it makes a step without a closure, or with dense gradients.
NOT_TAKEN_APART = {"LBFGS", "SparseAdam"}


def taken_apart(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


@pytest.mark.parametrize(("name", "settings"), OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_nothing_had_happened(name: str, settings: dict[str, Any]) -> None:
    """Two steps, a save, a load into a fresh model and optimizer: one more step of each is equal.

    Through `get_state_dict` and `set_state_dict`, with tensors loaded in place; where torch cannot, as objects.
    """
    model, fresh = (model_for(name, seed) for seed in (1, 2))
    optimizer, restored = (optimizer_for(one, name, settings) for one in (model, fresh))
    step(model, optimizer, 1)
    step(model, optimizer, 2)
    if name in NOT_TAKEN_APART:
        loaded = as_it_is({"model": model.state_dict(), "optim": optimizer.state_dict()})
        assert same(loaded["optim"], optimizer.state_dict())
        fresh.load_state_dict(loaded["model"])
        restored.load_state_dict(loaded["optim"])
    else:
        store = MemoryStore()
        dcp.save(taken_apart(model, optimizer), storage_writer=RemoteWriter(store))
        template = taken_apart(fresh, restored)
        dcp.load(template, storage_reader=RemoteReader(store))
        set_state_dict(fresh, restored, model_state_dict=template["model"], optim_state_dict=template["optim"])
    step(model, optimizer, 3)
    step(fresh, restored, 3)
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert same(restored.state_dict()["state"], optimizer.state_dict()["state"])


@dataclasses.dataclass
class Warmup:
    """Schedule with a state that torch keeps: the attributes of a callable object."""

    steps: int

    def __call__(self, step: float) -> float:
        return min(1.0, (step + 1) / self.steps)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [Warmup(4), lambda step: 0.9**step]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, [Warmup(4), lambda step: 0.9]),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, 2, mode="exp_range", gamma=0.9),
    "CyclicLR of a callable": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, 2, scale_fn=Warmup(9)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, 0.01, anneal_strategy="linear"),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 9)], [2]
    ),
}


def test_every_scheduler_of_torch_is_tried() -> None:
    """Every scheduler of torch is in the table above, so that a new one in a newer torch is noticed."""
    bases = {"LRScheduler", "_LRScheduler"}
    found = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    assert found - bases <= SCHEDULERS.keys()


@pytest.mark.parametrize("kind_of_lr", ["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_as_if_nothing_had_happened(name: str, kind_of_lr: str) -> None:
    """Three steps, a save, a load into a fresh scheduler and optimizer: four more give equal rates and parameters."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        lr = 0.05 if kind_of_lr == "float" else torch.tensor(0.05)  # the scheduler changes the tensor in place
        model = nn.Linear(4, 2)
        torch.manual_seed(seed)
        nn.init.normal_(model.weight)
        groups: list[State] = [{"params": [model.weight]}, {"params": [model.bias], "lr": lr * 2}]
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, foreach=False)
        return model, optimizer, SCHEDULERS[name](optimizer)

    def steps(numbers: range, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[Any]:
        rates = []
        for number in numbers:
            step(model, optimizer, number)
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates += [[float(group["lr"]), group["momentum"]] for group in optimizer.param_groups]
        return rates

    model, optimizer, scheduler = made(seed=1)
    steps(range(3), model, optimizer, scheduler)
    saved = {"model": model.state_dict(), "optim": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    loaded = as_it_is(saved)
    assert same(loaded["scheduler"], saved["scheduler"])
    fresh = made(seed=2)
    for part, key in zip(fresh, ("model", "optim", "scheduler"), strict=True):
        part.load_state_dict(loaded[key])
    assert same(steps(range(3, 7), *fresh), steps(range(3, 7), model, optimizer, scheduler))
    assert same(dict(fresh[0].state_dict()), dict(model.state_dict()))
