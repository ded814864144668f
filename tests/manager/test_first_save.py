"""First save of a job that began without a checkpoint: what the same program could not restore is said then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, AdamW, Optimizer, lr_scheduler

from dcp_remote import CheckpointManager, Opaque, PerRank, training_state
from dcp_remote.errors import InvalidArgumentError, StateMismatchError
from tests.support.states import equal


class Metric:
    """Metric of the shape of ignite's: it has a sum from its first update on."""

    def __init__(self, *, raises: bool = False) -> None:
        self.values: dict[str, Any] = {}
        self.raises = raises

    def state_dict(self) -> dict[str, Any]:
        if self.raises and not self.values:
            raise ValueError("no update yet")
        return dict(self.values)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = dict(values)

    def update(self) -> None:
        self.values = {"sum": torch.ones(2), "count": 1}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "could not restore" in record.getMessage()]
    caplog.clear()
    return found


@pytest.mark.parametrize("raises", [False, True])
def test_an_object_that_grows_in_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture, raises: bool) -> None:
    """Warn in the first save, once; a new job's restore fails as it says. With `PerRank` around it neither happens."""
    metric, own = Metric(raises=raises), Metric()
    state = {"w": torch.ones(2), "metrics": {"a.b": [metric]}, "own": PerRank(own), "notes": Opaque({})}
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        assert checkpoints.restore(state) is None
        metric.update()
        own.update()
        for step in (1, 2):
            checkpoints.save(step, state, wait=True)
    (warning,) = warnings_of(caplog)
    assert "metrics.a.b.0 (Metric)" in warning
    assert ("no update yet" if raises else "lacks before the training: sum, count") in warning
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        with pytest.raises(ValueError if raises else StateMismatchError):
            checkpoints.restore({**state, "metrics": {"a.b": [Metric(raises=raises)]}})
        restored = Metric()
        assert checkpoints.restore({**state, "own": PerRank(restored)}) == 2
        assert equal(restored.values, own.values)
        checkpoints.save(3, state, wait=True)
    assert not warnings_of(caplog)


def test_plain_values_that_grow_in_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Warn of a dict, a list of dicts and a tensor; not of lists of numbers, scalars and `Opaque` values."""

    def made() -> dict[str, Any]:
        state = {"w": torch.ones(2), "scores": {}, "history": [], "losses": torch.zeros(0), "deep": {"m": Metric()}}
        return {**state, "best": None, "plain": [], "config": {"lr": 1.0}, "whole": Opaque({})}

    state = made()
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        assert checkpoints.restore(state) is None
        state["scores"]["best"] = 1
        state["history"].append({"loss": 0.5})
        state |= {"losses": torch.ones(3), "best": 0.5, "plain": [1, 2], "whole": Opaque({"a": 1})}
        checkpoints.save(1, state, wait=True)
        found = warnings_of(caplog)
        assert [text.partition("restore ")[2].split()[0] for text in found] == ["history", "losses", "scores"]
        assert "lacks before the training: 0.loss" in found[0]
        assert all("Opaque(...)" in text for text in found)
        with pytest.raises(StateMismatchError, match="1 value missing in the checkpoint: history"):
            checkpoints.restore(made())
        wanted = made() | {key: Opaque(None) for key in ("scores", "history", "losses")}
        state |= {key: Opaque(state[key]) for key in ("scores", "history", "losses")}
        checkpoints.save(2, state, wait=True)
        assert checkpoints.restore(wanted) == 2
    assert equal(
        [wanted[key].value for key in ("scores", "history", "losses")], [{"best": 1}, [{"loss": 0.5}], torch.ones(3)]
    )


SCHEDULERS = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, 10),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_trainings_without_such_objects(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Train with schedulers of several kinds, and save after some steps: no warning, and the restore needs none."""

    def made() -> tuple[Optimizer, Any, dict[str, Any]]:
        model = nn.Linear(2, 2)
        optimizer = AdamW(model.parameters())
        scheduler = SCHEDULERS[name](optimizer)  # type: ignore[operator]  # classes and functions
        scaler = torch.amp.GradScaler("cpu")
        return (
            optimizer,
            scheduler,
            training_state(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler),
        )

    optimizer, scheduler, state = made()
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        assert checkpoints.restore(state) is None
        for _ in range(4):
            state["model"].model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
        checkpoints.save(4, state, wait=True)
        assert checkpoints.restore(made()[2]) == 4
    assert not warnings_of(caplog)


@pytest.mark.parametrize("is_own", [False, True])
def test_an_optimizer_that_needs_a_closure(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_own: bool) -> None:
    """Warn of LBFGS, whose states cannot be made before they are loaded; with `PerRank` around it, it is restored."""

    def made() -> tuple[nn.Module, Optimizer, dict[str, Any]]:
        model = nn.Linear(2, 2, bias=False)
        optimizer = LBFGS(model.parameters(), max_iter=3)
        return model, optimizer, {"model": model, "optim": PerRank(optimizer) if is_own else optimizer}

    model, optimizer, state = made()

    def loss() -> torch.Tensor:
        value: torch.Tensor = model(torch.ones(1, 2)).square().sum()
        value.backward()
        return value

    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        assert checkpoints.restore(state) is None
        optimizer.step(loss)  # type: ignore[arg-type]  # torch wants a number, and takes a tensor
        checkpoints.save(1, state, wait=True)
        found = warnings_of(caplog)
        if is_own:
            _, resumed, template = made()
            assert checkpoints.restore(template) == 1
            assert equal(resumed.state_dict(), optimizer.state_dict())
            assert not found
        else:
            assert ["LBFGS" in text and "PerRank" in text for text in found] == [True]
            with pytest.raises(InvalidArgumentError, match=r"cannot be made before its first step.*PerRank.*LBFGS"):
                checkpoints.restore(made()[2])


class Stacked(Optimizer):
    """Optimizer of the shape of nanochat's Muon: one state for a group, under its first parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            parameters = group["params"]
            state = self.state[parameters[0]]
            gradients = torch.stack([parameter.grad for parameter in parameters])
            momentum = state.setdefault("momentum", torch.zeros_like(gradients))
            momentum.mul_(0.9).add_(gradients)
            for parameter, change in zip(parameters, momentum, strict=True):
                parameter.sub_(change, alpha=group["lr"])


def test_an_optimizer_with_one_state_for_a_group(tmp_path: Path) -> None:
    """Restore into a new one, whose step needs the gradients of all parameters: equal, and trains on alike."""

    def made(seed: int, steps: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
        optimizer = Stacked(model.parameters())
        train(model, optimizer, steps)
        return model, optimizer

    def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    one, other = made(1, 2), made(2, 0)
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        checkpoints.save(1, {"model": one[0], "optim": one[1]}, wait=True)
        assert checkpoints.restore({"model": other[0], "optim": other[1]}) == 1
    for _ in range(2):
        assert equal(other[1].state_dict(), one[1].state_dict())
        assert equal(dict(other[0].state_dict()), dict(one[0].state_dict()))
        for pair in (one, other):
            train(*pair, steps=1)
