"""Training that was saved and loaded goes on exactly as the training that was not interrupted.

Every optimizer and schedule of torch, random numbers of Python, numpy and torch, scalers, averages, data loaders: saved
after some steps, loaded into new objects, and then both go on. Their results must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import functools
import inspect
import pathlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.storage import MemoryStore
from tests.serialization.test_tags import same
from tests.serialization.test_training_objects import Level, as_it_is

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


@pytest.mark.parametrize(("name", "settings"), OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_nothing_had_happened(name: str, settings: dict[str, Any]) -> None:
    """Two steps, a save of `state_dict()`, a load into a fresh model and optimizer: one more step of each is equal."""
    model = model_for(name, seed=1)
    optimizer = optimizer_for(model, name, settings)
    step(model, optimizer, 1)
    step(model, optimizer, 2)
    saved = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    loaded = as_it_is(saved)
    assert same(loaded["optim"], saved["optim"])
    fresh = model_for(name, seed=2)
    fresh.load_state_dict(loaded["model"])
    restored = optimizer_for(fresh, name, settings)
    restored.load_state_dict(loaded["optim"])
    step(model, optimizer, 3)
    step(fresh, restored, 3)
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert same(restored.state_dict(), optimizer.state_dict())


# torch cannot take these optimizers' states apart: it makes a step without a closure, or with dense gradients.
NOT_TAKEN_APART = {"LBFGS", "SparseAdam"}


def taken_apart(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


@pytest.mark.parametrize(("name", "settings"), [one for one in OPTIMIZERS if one.values[0] not in NOT_TAKEN_APART])
def test_an_optimizer_taken_apart_by_torch_goes_on(name: str, settings: dict[str, Any]) -> None:
    """The same through `get_state_dict` and `set_state_dict`: tensors are loaded in place, options as objects."""
    model = model_for(name, seed=1)
    optimizer = optimizer_for(model, name, settings)
    step(model, optimizer, 1)
    step(model, optimizer, 2)
    store = MemoryStore()
    dcp.save(taken_apart(model, optimizer), storage_writer=RemoteWriter(store))
    fresh = model_for(name, seed=2)
    restored = optimizer_for(fresh, name, settings)
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


BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")

# Per case: how its state is taken, how it is given back, and what is drawn then.
Random: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]


def draws_of_numpy(generator: np.random.Generator) -> list[float]:
    return [*generator.random(3), *generator.integers(9, size=3), *generator.spawn(1)[0].random(2)]


def generator_of(kind: str) -> np.random.Generator:
    generator = np.random.Generator(getattr(np.random, kind)(5))
    generator.integers(9, size=3, dtype=np.int32)  # leaves half of a word in the generator
    return generator


def state_set(kind: str, state: Any) -> np.random.Generator:
    generator = np.random.Generator(getattr(np.random, kind)())
    generator.bit_generator.state = state
    return generator


RANDOM: dict[str, Random] = {
    "random": (random.getstate, random.setstate, lambda _: [random.gauss(0, 1) for _ in range(5)]),
    "np.random": (np.random.get_state, np.random.set_state, lambda _: np.random.standard_normal(5).tolist()),
    "np.random, a dict": (
        lambda: np.random.get_state(legacy=False),
        np.random.set_state,
        lambda _: np.random.standard_normal(5).tolist(),
    ),
    "RandomState": (lambda: np.random.RandomState(3), lambda state: state, lambda r: r.standard_normal(5).tolist()),
    "torch": (torch.get_rng_state, torch.set_rng_state, lambda _: torch.randn(5).tolist()),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(3).get_state(),
        lambda state: torch.Generator().set_state(state),
        lambda generator: torch.randn(5, generator=generator).tolist(),
    ),
    **{
        f"Generator of {kind}": (functools.partial(generator_of, kind), lambda state: state, draws_of_numpy)
        for kind in BIT_GENERATORS
    },
    **{
        f"state of {kind}": (
            lambda kind=kind: generator_of(kind).bit_generator.state,  # type: ignore[misc]  # the loop's present value
            functools.partial(state_set, kind),
            lambda generator: [*generator.random(3), *generator.integers(9, size=3)],
        )
        for kind in BIT_GENERATORS
    },
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_go_on_as_if_nothing_had_happened(name: str) -> None:
    """A generator's state, saved after an odd number of normal draws, gives the same draws after a load."""
    take, give, draw = RANDOM[name]
    random.gauss(0, 1)
    np.random.standard_normal(1)
    state = take()
    (loaded,) = as_it_is({"random": (state,)})["random"]
    expected = draw(give(state))
    assert same(draw(give(loaded)), expected)


def test_a_scaler_goes_on_as_if_nothing_had_happened() -> None:
    """A restored GradScaler that has backed off and grown: after an overflow and three steps, scales are equal."""

    def scales(scaler: torch.amp.GradScaler, losses: list[float]) -> list[float]:
        parameter = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        found = []
        for loss in losses:
            optimizer.zero_grad()
            scaler.scale(parameter * loss).sum().backward()
            scaler.step(optimizer)
            scaler.update()
            found += [scaler.get_scale(), float(parameter.detach())]
        return found

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales(scaler, [float("inf"), 1.0, 1.0, 1.0])
    loaded = as_it_is({"scaler": scaler.state_dict()})["scaler"]
    assert same(loaded, scaler.state_dict())
    fresh = torch.amp.GradScaler("cpu")
    fresh.load_state_dict(loaded)
    rest = [1.0, float("inf"), 1.0, 1.0]
    assert scales(fresh, rest) == scales(scaler, rest)


@pytest.mark.parametrize("averaging", [None, get_ema_multi_avg_fn(0.9)])
def test_an_averaged_model_goes_on_as_if_nothing_had_happened(averaging: Any) -> None:
    """SWA and EMA with buffers, saved after two updates and loaded both ways, are equal after two more."""

    def updated(model: nn.Module, average: AveragedModel, numbers: range) -> None:
        for number in numbers:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
            model(torch.full((4, 3), float(number)))
            average.update_parameters(model)

    def made() -> tuple[nn.Module, AveragedModel]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        return model, AveragedModel(model, multi_avg_fn=averaging, use_buffers=True)

    model, average = made()
    updated(model, average, range(2))
    store = MemoryStore()
    dcp.save({"ema": average, "model": model}, storage_writer=RemoteWriter(store))
    fresh = made()
    dcp.load({"ema": fresh[1], "model": fresh[0]}, storage_reader=RemoteReader(store))
    again = made()
    again[0].load_state_dict(load(store)["model"])
    again[1].load_state_dict(load(store)["ema"])
    for pair in ((model, average), fresh, again):
        updated(*pair, range(2, 4))
    for pair in (fresh, again):
        assert same(dict(pair[1].state_dict()), dict(average.state_dict()))


class Loader:
    """State of a stateful data loader: its own numbers, those of its workers, and bytes of its dataset."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.workers = [np.random.default_rng(seed + number) for number in range(2)]
        self.seen: collections.Counter[str] = collections.Counter()
        self.buffer: collections.deque[np.int64] = collections.deque(maxlen=4)

    def draw(self) -> tuple[int, ...]:
        """Draw a batch."""
        self.buffer += (worker.integers(100) for worker in self.workers)
        self.seen[f"source {int(torch.randint(3, (), generator=self.generator))}"] += 1
        return tuple(int(number) for number in self.buffer)

    def state_dict(self) -> State:
        """Return a state shaped like torchdata's: nested snapshots, keyed by name, with numpy numbers."""
        return {
            "_iterator_finished": False,
            "_snapshot": {
                "_main_snapshot": {"_sampler_iter_state": None, "generator": self.generator.get_state()},
                "_worker_snapshots": {
                    f"worker_{number}": {"worker_id": np.int64(number), "rng": worker, "dataset": None}
                    for number, worker in enumerate(self.workers)
                },
            },
            "_iterator_state": (self.seen, self.buffer),
        }

    def load_state_dict(self, state: State) -> None:
        """Load a state."""
        snapshot = state["_snapshot"]
        self.generator.set_state(snapshot["_main_snapshot"]["generator"])
        self.workers = [worker["rng"] for worker in snapshot["_worker_snapshots"].values()]
        self.seen, self.buffer = state["_iterator_state"]


class Job:
    """A whole training as a user writes it for `dcp.save`: model, schedule, data, randomness, settings."""

    def __init__(self, seed: int) -> None:
        self.model = model_for("AdamW", seed)
        self.optimizer = optimizer_for(self.model, "AdamW", {"amsgrad": True})
        self.scheduler = lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=20)
        self.loader = Loader(seed)
        self.settings = argparse.Namespace(seed=seed, out=pathlib.PurePosixPath("runs/a"), level=Level.LOW)
        self.begun = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
        self.losses: collections.defaultdict[str, list[np.float64]] = collections.defaultdict(list)

    def step(self) -> None:
        """Draw a batch, train on it, record the loss."""
        step(self.model, self.optimizer, sum(self.loader.draw()) + random.randrange(1000))
        self.scheduler.step()
        self.losses["train"].append(np.float64(torch.randn(())))

    def state_dict(self) -> State:
        """Return the state of everything; mappings of special types lie in a tuple, which torch does not take apart."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        randomness = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        own = (self.settings, self.begun, self.losses, self.scheduler.state_dict())
        return {"model": model, "optim": optimizer, "data": self.loader.state_dict(), "random": randomness, "own": own}

    def load_state_dict(self, state: State) -> None:
        """Load a state."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.settings, self.begun, self.losses, schedule = state["own"]
        self.scheduler.load_state_dict(schedule)
        self.loader.load_state_dict(state["data"])
        python, numpy, own = state["random"]
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(own)


def test_a_whole_job_goes_on_as_if_nothing_had_happened() -> None:
    """A stateful job, saved after three steps and loaded into one with another seed, is equal after three more."""
    store = MemoryStore()
    job = Job(seed=1)
    for _ in range(3):
        job.step()
    dcp.save({"job": job}, storage_writer=RemoteWriter(store))
    for _ in range(3):
        job.step()
    expected = job.state_dict()
    fresh = Job(seed=2)
    fresh.step()
    dcp.load({"job": fresh}, storage_reader=RemoteReader(store))
    for _ in range(3):
        fresh.step()
    assert same(fresh.state_dict(), expected)
