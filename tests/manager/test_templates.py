"""`Stateful`s that make their template by the names that a checkpoint has."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from dcp_remote import CheckpointManager
from dcp_remote.errors import InvalidArgumentError, StateMismatchError
from dcp_remote.storage import MemoryStore


class Growing:
    """Values by name, of which a restore takes those that the checkpoint has."""

    def __init__(self, **values: Any) -> None:
        self.values = values
        self.asked: list[Collection[str]] = []

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def make_template(self, names: Collection[str]) -> dict[str, Any]:
        self.asked.append(sorted(names))
        return {name: value for name, value in self.values.items() if name in names}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values |= values


def test_a_template_is_made_of_the_names_that_are_loaded(tmp_path: Path) -> None:
    """Also where the checkpoint has none; names that stay as they are are not among them."""
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        checkpoints.save(1, {"part": Growing(a=torch.ones(2), b=1), "x": 5}, wait=True)
        part, other = Growing(a=torch.zeros(2), c=3), Growing(z=1)
        state: dict[str, Any] = {"part": part, "other": other, "x": 0}
        assert checkpoints.restore(state, unexpected="ignore") == 1
        assert part.asked == [["a", "b"]]
        assert other.asked == [[]]
        assert part.values["c"] == 3
        assert torch.equal(part.values["a"], torch.ones(2))
        assert other.values == {"z": 1}
        assert state["x"] == 5
        assert checkpoints.restore({"part": part, "x": 0}, exclude="part.a", unexpected="ignore") == 1
        assert part.asked[1:] == [["b"]]
        rename = {"part.a": None, "part.b": "part.c"}.get
        assert checkpoints.restore({"part": part, "x": 0}, rename=lambda name: rename(name, name)) == 1
        assert part.asked[2:] == [["c"]]
        assert part.values["c"] == 1


def test_what_a_template_lacks_is_unexpected(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        checkpoints.save(1, {"part": Growing(a=1, b=2)}, wait=True)
        with pytest.raises(StateMismatchError, match=r"unexpected, not in the state: part\.b"):
            checkpoints.restore({"part": Growing(a=0)})


class Models(dict[str, nn.Module]):
    """Modules by name, as a `Stateful`."""

    def state_dict(self) -> dict[str, Any]:
        return {name: model.state_dict() for name, model in self.items()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for name, model in self.items():
            model.load_state_dict(states[name])


def test_an_optimizer_finds_its_model_in_a_stateful_mapping() -> None:
    """Save and restore an optimizer beside a `Stateful` that is a dict of modules."""
    store = MemoryStore()

    def train(value: float) -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.full((2,), value)).sum().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, other_optimizer) = train(1.0), train(2.0)
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, {"models": Models(net=model), "optim": optimizer}, wait=True)
        assert checkpoints.restore({"models": Models(net=other), "optim": other_optimizer}) == 1
    assert torch.equal(model.weight, other.weight)
    moments = [one.state[net.weight]["exp_avg"] for net, one in ((model, optimizer), (other, other_optimizer))]
    assert torch.equal(*moments)


@pytest.mark.parametrize(
    ("state", "where"),
    [({"a": UserDict(x=1)}, "a"), ({"a": [MappingProxyType({"x": torch.ones(1)})]}, "a.0")],
    ids=["dict of the user", "read-only"],
)
def test_a_mapping_that_is_no_dict(state: dict[str, Any], where: str) -> None:
    """Save a mapping that torch's loader does not take apart: refused at once, and not by the restore."""
    with CheckpointManager(MemoryStore()) as checkpoints, pytest.raises(InvalidArgumentError, match="dict") as error:
        checkpoints.save(1, state, wait=True)
    assert error.value.details["where"] == where


def test_a_lazy_module_without_shapes() -> None:
    lazy = nn.LazyLinear(3)
    with CheckpointManager(MemoryStore()) as checkpoints:
        with pytest.raises(InvalidArgumentError, match="lazy") as error:
            checkpoints.save(1, {"model": lazy}, wait=True)
        assert error.value.details["tensors"] == "model.weight, model.bias"
        lazy(torch.ones(2))
        checkpoints.save(1, {"model": lazy}, wait=True)


def test_a_mapping_that_cannot_be_changed_holds_no_stateful() -> None:
    """A restore could put nothing into such a mapping, so that the save is refused."""
    with CheckpointManager(MemoryStore()) as checkpoints, pytest.raises(InvalidArgumentError, match="Save dict"):
        checkpoints.save(1, {"parts": MappingProxyType({"part": Growing(a=1)})}, wait=True)
