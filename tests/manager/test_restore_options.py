"""`CheckpointManager.restore` of a checkpoint that does not fit the state: real modules, and ranks that are threads.

The stores are in memory and record their requests.
"""

from __future__ import annotations

import copy
import datetime as dt
import json
import logging
import re
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dcp_remote import CheckpointManager, Opaque, PerRank, Retention, load, training_state
from dcp_remote.errors import InvalidArgumentError, StateMismatchError
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.rank_threads import manager_threads, plain
from tests.support.states import equal

State = dict[str, Any]


class Counting:
    """`Stateful` that counts the calls of `load_state_dict`."""

    def __init__(self, **state: Any) -> None:
        self.state, self.calls = state, 0

    def state_dict(self) -> State:
        return dict(self.state)

    def load_state_dict(self, state: State) -> None:
        self.state, self.calls = state, self.calls + 1


class Net(nn.Module):
    """Two layers and a head, with an adapter beside the first layer if it is given a width."""

    def __init__(self, classes: int, adapter: int = 0) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, classes)
        if adapter:
            self.adapter = nn.Sequential(nn.Linear(4, adapter), nn.Linear(adapter, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = self.adapter(x) if hasattr(self, "adapter") else 0
        return self.head(torch.tanh(self.body(x) + more))  # type: ignore[no-any-return]  # a tensor


def bare(model: nn.Module, *, steps: int = 0, **options: Any) -> State:
    """Return a model and its AdamW after some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 0.01} | options)
    train(model, optimizer, steps)
    return {"model": model, "optim": optimizer}


def steps_of(state: State) -> dict[str, float]:
    """Return the steps of the parameters that have a state, by name."""
    states = state["optim"].state
    return {
        name: float(states[value]["step"]) for name, value in state["model"].named_parameters() if states.get(value)
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore(MemoryStore())


def save(store: RecordingStore, state: State, **options: Any) -> None:
    with CheckpointManager(store, **options) as checkpoints:
        checkpoints.save(1, state, wait=True)
    store.clear()


def restore(store: RecordingStore, state: State, **options: Any) -> None:
    with CheckpointManager(store) as checkpoints:
        assert checkpoints.restore(state, **options) == 1


# ---- a model that has changed


def test_a_resized_head(store: RecordingStore) -> None:
    """`exclude="*head.*"`: the head stays as it is, all else is loaded, and training goes on."""
    old, new = Net(classes=2), Net(classes=5)
    save(store, bare(old, steps=3))
    state = bare(new)
    head = copy.deepcopy(new.head.state_dict())
    with pytest.raises(StateMismatchError, match=r"6 values of another shape: model\.head\.weight"):
        restore(store, state)
    restore(store, state, exclude="*head.*")
    assert equal(new.body.state_dict(), old.body.state_dict())
    assert equal(new.head.state_dict(), head)
    train(new, state["optim"], 1)
    assert steps_of(state) == {"body.weight": 4, "body.bias": 4, "head.weight": 1, "head.bias": 1}
    with CheckpointManager(store) as checkpoints:
        checkpoints.restore(state, exclude="*head.*")
        checkpoints.save(2, state, wait=True)
        assert checkpoints.restore(state) == 2


def test_what_was_not_loaded_is_reported(store: RecordingStore, caplog: pytest.LogCaptureFixture) -> None:
    """Keep, ignore, exclude, rename to None: the report has the names; one warning has those that no option names."""
    save(store, {"a": torch.ones(1), "b": {"x": 1, "y": 2}, "c": 3, "d": 4, **{f"e{n}": n for n in range(1_100)}})
    state: State = {"a": torch.zeros(1), "b": {"x": 0, "z": 5}, "new": 6, "c": 7}
    with CheckpointManager(store) as checkpoints:
        checkpoints.restore(state, missing="keep", unexpected="ignore", exclude="c", rename={"d": None})
        report = checkpoints.last_load
    assert report is not None
    assert (report.kept, report.kept_values) == (("b.z", "c", "new"), 3)
    assert report.left_out[:4] == ("c", "d", "b.y", "e0")
    assert (len(report.left_out), report.left_out_values) == (1_000, 1_103)
    assert str(report).endswith("; 1 rank had saved it")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert (
        "Kept 2 values that the checkpoint lacks: b.z; new. Left out 1101 values of the checkpoint: b.y; e0"
        in (warnings[0])
    )
    caplog.clear()
    with CheckpointManager(store) as checkpoints:
        checkpoints.restore({"a": torch.zeros(1)}, include="a")
        assert checkpoints.last_load is not None
        assert checkpoints.last_load.left_out_values == 1_104
    assert not caplog.records


class Tied(nn.Module):
    """Model whose head is its embedding, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("saved", ["embedding.weight", "head.weight"])
def test_a_tied_weight_that_was_saved_under_one_name(
    store: RecordingStore, caplog: pytest.LogCaptureFixture, saved: str
) -> None:
    """As in files of Hugging Face: the other name is not missing, nor kept, for it is the same memory."""
    save(store, {"model": {saved: torch.ones(5, 3)}})
    model = Tied()
    with CheckpointManager(store) as checkpoints:
        assert checkpoints.restore({"model": model}) == 1
        assert checkpoints.last_load is not None
        assert checkpoints.last_load.kept == ()
    assert torch.equal(model.head.weight, torch.ones(5, 3))
    assert not caplog.records
    model.head.weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(StateMismatchError, match="1 value missing in the checkpoint"):
        restore(store, {"model": model})


def test_a_key_that_options_leave_out_is_warned_of(store: RecordingStore, caplog: pytest.LogCaptureFixture) -> None:
    """A job that starts again with `include="model.*"` loses its optimizer: no warning if only a part is left out."""
    save(store, bare(Net(classes=2), steps=1))
    new = bare(Net(classes=2))
    restore(store, new, include="model.*")
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "leaves out all of optim, which the checkpoint has" in warnings[0]
    caplog.clear()
    restore(store, new, exclude="*head*")
    with CheckpointManager(store) as checkpoints:
        checkpoints.restore(new, include="model.*", go_on=False)
    assert not caplog.records


def test_a_key_that_has_another_name(store: RecordingStore) -> None:
    """Restore under other top-level keys: the error gives the `rename` that works, and lists no name below them."""
    old = Net(classes=2)
    save(store, {**bare(old, steps=1), "average": old})
    new = Net(classes=2)
    optimizer = torch.optim.AdamW(new.parameters())
    state: State = {"net": new, "optimizer": optimizer}
    with pytest.raises(StateMismatchError) as caught:
        restore(store, state)
    rename = {"model": "net", "optim": "optimizer"}
    assert (
        'several keys of the checkpoint: pass rename={"average": "net"} or {"model": "net"}, ' in caught.value.message
    )
    assert 'A top-level key has another name in the checkpoint: pass rename={"optim": "optimizer"}.\n' in (
        caught.value.message
    )
    assert "body" not in caught.value.message
    assert not optimizer.state
    state["average"] = Net(classes=2)
    with pytest.raises(StateMismatchError, match=r'rename=\{"model": "net", "optim": "optimizer"\}\.\n'):
        restore(store, state)
    del state["average"]
    restore(store, state, rename=rename | {"average": None})
    assert optimizer.state[new.body.weight]["step"] == 1


class Wrapped(nn.Module):
    """Layers of a `Net` under other names, which may have several parts, as below torch's wrappers."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        net = Net(classes=2)
        for name, layer in zip(names, (net.body, net.head), strict=True):
            *above, last = name.split(".")
            parent: nn.Module = self
            for part in above:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, layer)


@pytest.mark.parametrize(
    ("saved", "now", "rename"),
    [
        (("module.body", "module.head"), ("body", "head"), {"model.module": "model"}),
        (
            ("body", "head"),
            ("module.body", "module.head"),
            {"model.body": "model.module.body", "model.head": "model.module.head"},
        ),
        (("body", "head"), ("body", "classifier"), {"model.head": "model.classifier"}),
    ],
)
def test_the_ready_rename_where_first_parts_differ(
    store: RecordingStore, saved: tuple[str, ...], now: tuple[str, ...], rename: dict[str, str]
) -> None:
    """The error prints the argument, with which the optimizer is loaded, too."""
    old, new = Wrapped(*saved), Wrapped(*now)
    optimizer = torch.optim.AdamW(old.parameters())
    torch.stack([parameter.sum() for parameter in old.parameters()]).sum().backward()
    optimizer.step()
    save(store, {"model": old, "optim": optimizer})
    state: State = {"model": new, "optim": torch.optim.AdamW(new.parameters())}
    with pytest.raises(StateMismatchError) as caught:
        restore(store, state)
    shown = ", ".join(f'"{name}": "{other}"' for name, other in rename.items())
    assert f"rename={{{shown}}} gives the names" in caught.value.message
    assert "near:" not in caught.value.message
    restore(store, state, rename=rename)
    assert all(torch.equal(*pair) for pair in zip(new.parameters(), old.parameters(), strict=True))
    assert len(state["optim"].state) == 4


def test_the_ready_rename_of_a_large_model(store: RecordingStore) -> None:
    """More names than a rank lists."""
    save(store, {"model": {"module": {f"layer{number}": number for number in range(1_500)}}})
    with pytest.raises(StateMismatchError, match=r'rename=\{"model.module": "model"\} gives'):
        restore(store, {"model": {f"layer{number}": 0 for number in range(1_500)}})


def test_no_ready_rename_where_it_is_not_certain(store: RecordingStore) -> None:
    """Two saved layers for one of the state: names that are near are listed."""
    save(store, {"model": {"first": {"w": torch.ones(2)}, "second": {"w": torch.ones(2)}}, "n": 1})
    with pytest.raises(StateMismatchError, match=r'rename=\{"name in the checkpoint"') as caught:
        restore(store, {"model": {"third": {"w": torch.zeros(2)}}, "n": 0})
    assert "model.third.w (near: " in caught.value.message


def test_another_optimizer(store: RecordingStore) -> None:
    """The message has the names that differ and what to do; `exclude` begins the optimizer anew."""
    old, new = Net(classes=2), Net(classes=2)
    optimizer = torch.optim.AdamW(old.parameters(), lr=0.01)
    train(old, optimizer, 1)
    save(store, {"model": old, "optim": optimizer})
    state: State = {"model": new, "optim": torch.optim.SGD(new.parameters(), lr=0.01, momentum=0.9)}
    with pytest.raises(StateMismatchError) as caught:
        restore(store, state)
    message = caught.value.message
    assert re.search(r"missing in the checkpoint: .*optim\.state\.\S+\.momentum_buffer", message)
    assert re.search(r"not in the state: .*optim\.state\.\S+\.exp_avg", message)
    assert 'exclude="pattern" leaves values as they are' in message
    restore(store, state, exclude=["optim.*"])
    assert equal(new.state_dict(), old.state_dict())
    train(new, state["optim"], 1)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, ["The state has no values. Put into it", "model.* (4 values); optim.* (", "scheduler.* (5 values)\n"]),
        ({"model": {}}, ["model is empty in the state, and the checkpoint has 4 values below it.\n"]),
        ({"optim": {"state": {}}}, ["optim.state is empty in the state", "put the optimizer itself into the state"]),
    ],
)
def test_a_state_without_values(store: RecordingStore, state: State, expected: list[str]) -> None:
    """Restore `{}` or empty dicts: whole top-level keys are named, and only an optimizer is called one."""
    save(store, {**bare(Net(classes=2), steps=1), "scheduler": {f"value{number}": number for number in range(5)}})
    with pytest.raises(StateMismatchError) as caught:
        restore(store, state)
    assert all(text in caught.value.message for text in expected)
    assert ("optimizer has no state" in caught.value.message) == ("optim" in state)


@pytest.mark.parametrize("key", ["scores", "history", "average"])
def test_values_that_a_new_job_lacks_at_first(store: RecordingStore, key: str) -> None:
    """Follow the error on a dict, a list and an object that have grown: restore the rest, read and save them whole."""
    grown: State = {
        "scores": {"best": 0.5, 1: "one"},
        "history": [{"loss": 1.0}, {"loss": 0.5}],
        "average": Counting(shadow={"w": torch.ones(2)}),
    }
    new: State = {"scores": {}, "history": [], "average": Counting(shadow={})}
    save(store, {"w": torch.ones(2), key: grown[key]})
    with pytest.raises(StateMismatchError) as caught:
        restore(store, {"w": torch.zeros(2), key: new[key]})
    options = re.search(r"exclude=([^;]*) restores .*keys=(\".*?\")", caught.value.message)
    assert options is not None
    state = {"w": torch.zeros(2), key: new[key]}
    restore(store, state, exclude=json.loads(options[1]))
    assert equal(state["w"], torch.ones(2))
    saved = load(store, keys=json.loads(options[2]))[key]
    assert equal(saved, {"scores": {"best": 0.5, "1": "one"}, "average": grown["average"].state}.get(key, grown[key]))
    whole = RecordingStore(MemoryStore())
    save(whole, {"w": torch.ones(2), key: Opaque(grown[key])})
    state[key] = Opaque(new[key])
    restore(whole, state)
    value, expected = (getattr(one, "state", one) for one in (state[key].value, grown[key]))
    assert equal(value, expected)


def test_the_model_alone(store: RecordingStore) -> None:
    """`include="model.*"`: the optimizer is not touched, nor are values of single ranks and objects."""
    old, new = Net(classes=2), Net(classes=2)
    save(store, bare(old, steps=3) | {"own": PerRank(1), "count": Counting(n=1), "step": 3})
    own, count = PerRank(Counting(n=2)), Counting(n=3)
    state = bare(new, steps=1) | {"own": own, "count": count, "step": 0}
    restore(store, state, include="model.*")
    assert equal(new.state_dict(), old.state_dict())
    assert set(steps_of(state).values()) == {1.0}
    assert (own.value.calls, count.calls, state["step"]) == (0, 0, 0)


def test_different_values_for_one_memory(store: RecordingStore) -> None:
    """Save two layers and restore them into tied ones: an error that names both; equal values are restored."""
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    untied = {"model": nn.ModuleDict({"a": first, "b": second}), "view": torch.ones(9)}
    save(store, untied)
    layer, tied = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    tied.weight = layer.weight
    state: State = {"model": nn.ModuleDict({"a": layer, "b": tied}), "view": torch.zeros(9)}
    before = layer.weight.detach().clone()
    with pytest.raises(StateMismatchError, match=r"share their memory.*'model\.a\.weight and model\.b\.weight'"):
        restore(store, state)
    assert torch.equal(layer.weight, before)
    assert not state["view"].any()
    restore(store, state, exclude="model.b.weight")
    assert torch.equal(layer.weight, first.weight)
    second.weight.data.copy_(first.weight)
    again = RecordingStore(MemoryStore())
    save(again, untied)
    restore(again, state)


def test_a_state_that_cannot_be_changed(store: RecordingStore) -> None:
    """It is refused before anything is loaded."""
    save(store, {"w": torch.ones(2), "step": 3})
    state: Any = MappingProxyType({"w": torch.zeros(2), "step": 0})
    with pytest.raises(InvalidArgumentError, match=r"can be changed.*dict\(state\)"):
        restore(store, state)
    assert not state["w"].any()


@pytest.mark.parametrize(
    "options",
    [
        ({}, {"include": "w"}),
        ({"exclude": "b"}, {}),
        ({}, {"must_exist": True}),
        ({"step": 1}, {"step": 2}),
        ({"rename": {"b": None}, "missing": "keep"}, {"rename": {"w": None}, "missing": "keep"}),
    ],
)
def test_ranks_with_different_options(store: RecordingStore, options: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """An error on all ranks: else one rank would keep what the others load."""
    save(store, {"w": torch.ones(2), "b": torch.ones(2)})
    states: list[State] = [{"w": torch.zeros(2), "b": torch.zeros(2)} for _ in range(2)]
    with manager_threads(2, store) as ranks:
        ended = ranks.run(lambda rank, manager: manager.restore(states[rank], **options[rank]))
    for one in ended:
        assert isinstance(one.error, InvalidArgumentError)
        assert "different options" in one.error.what
        assert "rank 1: {" in str(one.error)
    assert not any(value.any() for state in states for value in state.values())


# ---- bare optimizers


@pytest.mark.parametrize(
    ("options", "loaded"),
    [
        ({"include": "model.*"}, set()),
        ({"exclude": "optim.*"}, set()),
        ({"exclude": "optim.state.*"}, set()),
        ({"exclude": "*head.*"}, {"body.weight", "body.bias"}),
        ({"rename": {"optim": None}, "missing": "keep"}, set()),
    ],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_excluded_states_of_an_optimizer(
    store: RecordingStore, options: dict[str, Any], loaded: set[str], steps: int
) -> None:
    """No state is made for a parameter whose state is not loaded; one that exists stays as it is."""
    save(store, bare(Net(classes=2), steps=3))
    state = bare(Net(classes=2), steps=steps)
    before = copy.deepcopy(state["optim"].state_dict()["state"])
    restore(store, state, **options)
    assert steps_of(state) == dict.fromkeys(loaded, 3.0) | (
        {name: 2.0 for name, _ in state["model"].named_parameters() if name not in loaded} if steps else {}
    )
    if not loaded:
        assert equal(state["optim"].state_dict()["state"], before)


def test_an_excluded_optimizer_that_cannot_make_its_state(store: RecordingStore) -> None:
    """`include="model.*"` with LBFGS before its first step: its state is not asked for."""

    def state(steps: int) -> State:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.LBFGS(model.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
        return {"model": model, "optim": optimizer}

    save(store, state(1))
    fresh = state(0)
    restore(store, fresh, include="model.*")
    assert not fresh["optim"].state


def stage(rank: int, steps: int, name: str = "layer") -> State:
    """Return the state of a rank after some steps; one of its layers never has a gradient."""
    model = nn.ModuleDict({f"{one}{rank}": nn.Linear(4, 4) for one in (name, "unused")})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model[f"{name}{rank}"](torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return {"model": model, "optim": optimizer}


@pytest.mark.parametrize("trained", [2, 1])
def test_stages_with_parameters_that_had_no_gradient(store: RecordingStore, trained: int) -> None:
    """Parameters that never had a gradient, some of each rank or all of one, have no state afterwards.

    Other names in the state are an error as before, on both ranks.
    """
    states, others = [stage(0, 0), stage(1, trained - 1)], [stage(rank, 0, "other") for rank in range(2)]
    with manager_threads(2, store) as ranks:
        ranks.values(lambda rank, manager: manager.save(1, stage(rank, 3 if rank < trained else 0), wait=True))
        assert ranks.values(lambda rank, manager: manager.restore(states[rank])) == [1, 1]
        ended = ranks.run(lambda rank, manager: manager.restore(others[rank]))
        assert [type(one.error) for one in ended] == [StateMismatchError] * 2
        assert not any(state["optim"].state for state in others)
    for rank, state in enumerate(states):
        names = (f"layer{rank}.weight", f"layer{rank}.bias") if rank < trained else ()
        assert steps_of(state) == dict.fromkeys(names, 3.0)


@pytest.mark.parametrize("steps", [0, 2])
def test_an_added_adapter_beside_a_trained_optimizer(store: RecordingStore, steps: int) -> None:
    """`missing="keep"`: the moments of the added parameters stay, and none are made where there are none."""
    save(store, bare(Net(classes=2), steps=3))
    state = bare(Net(classes=2, adapter=2), steps=steps)
    added = [name for name, _ in state["model"].named_parameters() if name.startswith("adapter")]
    first = next(state["model"].adapter.parameters())
    before = copy.deepcopy(state["optim"].state.get(first))
    restore(store, state, missing="keep")
    counts = steps_of(state)
    assert [counts.pop(name, 0.0) for name in added] == [float(steps)] * 4
    assert set(counts.values()) == {3.0}
    assert len(counts) == 4
    assert equal(state["optim"].state.get(first), before)


def test_kept_options_of_groups_in_another_order(store: RecordingStore) -> None:
    """`exclude="*.lr"`, and a new first group with `missing="keep"`: each group keeps its own options."""
    old = Net(classes=2)

    def groups(model: Net, *rates: tuple[str, Any, float]) -> State:
        given = [{"params": getattr(model, name).parameters(), "lr": lr, "eps": eps} for name, lr, eps in rates]
        return {"model": model, "optim": torch.optim.AdamW(given)}

    def options_of(state: State) -> list[tuple[float, float]]:
        return [(float(group["lr"]), group["eps"]) for group in state["optim"].param_groups]

    save(store, groups(old, ("body", 0.1, 1e-1), ("head", 0.2, 1e-2)))
    state = groups(Net(classes=2), ("head", 0.5, 1e-5), ("body", 0.6, 1e-6))
    restore(store, state, exclude="*.lr")
    assert options_of(state) == [(0.5, 1e-2), (0.6, 1e-1)]
    rate = torch.tensor(0.7, dtype=torch.float64)
    state = groups(Net(classes=2, adapter=2), ("adapter", rate, 1e-7), ("body", 0.8, 1e-8), ("head", 0.9, 1e-9))
    restore(store, state, missing="keep", unexpected="ignore", exclude="optim.param_groups.0.lr")
    assert options_of(state) == [(0.7, 1e-7), (0.8, 1e-1), (0.2, 1e-2)]


# ---- objects, `Stateful`s, values of single ranks


def test_a_new_value_in_the_state(store: RecordingStore) -> None:
    """A new number or `Stateful` keeps its own value, and its `load_state_dict` is not called."""
    save(store, {"step": 7, "count": Counting(n=1)})
    new, count = Counting(m=5), Counting(n=0, more=2)
    state: State = {"step": 0, "epoch": 4, "count": count, "new": new}
    with pytest.raises(StateMismatchError) as caught:
        restore(store, state)
    assert "3 values missing in the checkpoint: count.more; epoch; new.m\n" in caught.value.message
    assert (caught.value.details["step"], caught.value.details["url"]) == (1, store.url)
    assert (state["step"], count.calls) == (0, 0)
    restore(store, state, missing="keep")
    assert (state["step"], state["epoch"], count.state) == (7, 4, {"n": 1, "more": 2})
    assert (count.calls, new.calls) == (1, 0)


def test_what_a_restore_would_leave_out(store: RecordingStore, caplog: pytest.LogCaptureFixture) -> None:
    """Values without a place in the state are an error, those of this rank and below empty dicts too."""
    caplog.set_level(logging.INFO)
    save(store, {"step": 7, "more": {"a": 1}, "optim": {"state": {"w": torch.ones(2)}}, "own": PerRank(3)})
    state: State = {"step": 0, "optim": {"state": {}}}
    with pytest.raises(StateMismatchError) as caught:
        restore(store, state)
    assert "3 values unexpected, not in the state: more.a; optim.state.w; per_rank.*.own\n" in caught.value.message
    assert "optim.state is empty in the state" in caught.value.message
    assert [verb for verb, key in store.calls if "shards/" in key] == []
    restore(store, state, unexpected="ignore")
    assert state == {"step": 7, "optim": {"state": {}}}
    assert "Left out 3 values of the checkpoint: more.a; optim.state.w; per_rank.*.own." in caplog.text


def test_a_thinned_checkpoint(store: RecordingStore) -> None:
    """Ask for entries that retention deleted: the error calls them thinned; `missing="keep"` restores the rest."""
    first, second = ({"model": torch.full((2,), n), "optim": {"m": torch.full((2,), n)}} for n in (1.0, 2.0))
    with CheckpointManager(store, retention=Retention(keep_optimizer_last=1)) as checkpoints:
        checkpoints.save(1, first, wait=True)
        checkpoints.save(2, second, wait=True)
    with CheckpointManager(store) as checkpoints:
        state: State = {"model": torch.zeros(2), "optim": {"m": torch.zeros(2)}}
        with pytest.raises(StateMismatchError, match=r"1 value missing because retention .* \(thinned\): optim\."):
            checkpoints.restore(state, 1)
        checkpoints.restore(state, 1, missing="keep")
        assert equal(state, {"model": first["model"], "optim": {"m": torch.zeros(2)}})


def test_states_without_a_shape_or_an_end(store: RecordingStore) -> None:
    """A nested tensor, and containers that hold themselves, are refused by name."""
    ring: list[Any] = []
    ring.append({"again": ring})
    parts = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    deep: Any = torch.ones(1)
    for _ in range(300):
        deep = [deep]
    given = SimpleNamespace(state_dict=lambda: {"deep": deep}, load_state_dict=print)
    for value, text in (
        (ring, "contains itself.*Opaque.*key='x'"),
        (deep, "too deeply.*flat.*key='x'"),
        (given, "too deeply.*flat.*key='x'"),
        ([parts], r"unbind.*tensor='x\.0'"),
    ):
        with CheckpointManager(store, progress=False) as checkpoints, pytest.raises(InvalidArgumentError, match=text):
            checkpoints.save(1, {"x": value})


# ---- several ranks


def test_structures_that_differ_between_ranks(store: RecordingStore) -> None:
    """A value on one rank and a dict on the other: an error that names both places, and no damaged manifest."""
    states: list[State] = [{"x": 5, "w": torch.ones(2)}, {"x": {"a": torch.ones(1)}, "w": torch.ones(2)}]
    with manager_threads(2, store) as ranks:
        ended = ranks.run(lambda rank, manager: manager.save(1, states[rank], wait=True))
    assert {type(one.error) for one in ended} == {InvalidArgumentError}
    assert all("names='x and x.a' found=1" in str(one.error) for one in ended)


def test_ranks_agree(store: RecordingStore) -> None:
    """Stages of a pipeline restore their parts; a misfit of one rank is one error on all, before a shard is read."""
    states = [{f"stage{rank}": {"w": torch.full((3,), rank + 1.0)}, "own": PerRank(rank)} for rank in range(3)]
    blank: list[State] = [{f"stage{rank}": {"w": torch.zeros(3)}, "own": PerRank(None)} for rank in range(3)]
    with manager_threads(3, store) as ranks:
        ranks.values(lambda rank, manager: manager.save(1, states[rank], wait=True))
        ranks.values(lambda rank, manager: manager.restore(blank[rank]))
        for rank in range(3):
            assert equal(blank[rank][f"stage{rank}"], states[rank][f"stage{rank}"])
            assert blank[rank]["own"].value == rank
        store.clear()
        blank[2]["stage2"]["w"] = torch.zeros(4)
        del blank[1]["stage1"], blank[1]["own"]
        errors = [one.error for one in ranks.run(lambda rank, manager: manager.restore(blank[rank]))]
        assert {type(error) for error in errors} == {StateMismatchError}
        # A rank that is late hears of the error from rank 0, whose process its details then name.
        assert len({plain(error).removesuffix(" rank=0") for error in errors}) == 1
        assert "unexpected, not in the state: stage1.w; per_rank.*.own" in str(errors[0])
        assert "another shape: stage2.w (saved: (3,), state: (4,))" in str(errors[0])
        assert "ranks='1, 2'" in str(errors[0])
        assert not [key for _, key in store.calls if key.startswith("shards/")]


def test_a_stateful_is_told_on_all_ranks_or_none(store: RecordingStore) -> None:
    """`load_state_dict` may be a collective operation: one rank that loads a value of it is enough for all."""
    some, none = [Counting(x=0), Counting(y=0)], [Counting(u=0), Counting(v=0)]
    with manager_threads(2, store) as ranks:
        ranks.values(lambda _, manager: manager.save(1, {"a": Counting(x=1), "step": 1}, wait=True))
        states = [{"a": some[rank], "b": none[rank], "step": 0} for rank in range(2)]
        ranks.values(lambda rank, manager: manager.restore(states[rank], missing="keep"))
    assert [one.calls for one in some] == [1, 1]
    assert [one.calls for one in none] == [0, 0]


class Point(NamedTuple):
    """Tuple of a class of its own, which torch would rebuild as a plain one."""

    x: int


def kept_values() -> dict[str, Any]:
    """Return values of types that torch's planner does not know."""
    return {
        "since": dt.date(2026, 1, 1),
        "best": np.float32(3),
        "place": Point(1),
        "nested": {"list": [dt.date(2026, 1, 2), {"array": np.arange(3)}], "tuple": (np.float32(1),)},
    }


@pytest.mark.parametrize(
    "options", [{"missing": "keep"}, {"include": ["w", "hp"]}, {"exclude": ["since", "best", "place", "nested.*"]}]
)
def test_what_is_kept_is_unchanged(options: dict[str, Any]) -> None:
    """Objects that a restore keeps are those that were there; torch's planner would make them None."""
    store, kept = MemoryStore(), kept_values()
    if "missing" not in options:
        kept["nested"] = {"list": [dt.date(2026, 1, 2)], "tuple": (np.float32(1),)}
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(1), "hp": Opaque({"lr": 1})}, wait=True)
        state: dict[str, Any] = {"w": torch.zeros(1), "hp": Opaque({"lr": 99}), **kept}
        own = state["nested"]
        assert checkpoints.restore(state, **options) == 1
    assert (state["w"].item(), state["hp"].value) == (1.0, {"lr": 1})
    assert all(state[key] is value for key, value in kept.items() if key != "nested")
    assert type(state["place"]) is Point
    assert own["list"][0] == dt.date(2026, 1, 2)
    assert repr(state["nested"]) == repr(kept_values()["nested"] if "missing" in options else kept["nested"])


def test_an_opaque_value_is_kept() -> None:
    """An excluded `Opaque`, and one that the checkpoint lacks, keep their values, also for the next save."""
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(1), "hp": Opaque({"lr": 1})}, wait=True)
        state: dict[str, Any] = {"w": torch.zeros(1), "hp": Opaque({"lr": 99}), "new": Opaque([dt.date.min])}
        checkpoints.restore(state, missing="keep", exclude="hp")
        assert (state["hp"].value, state["new"].value) == ({"lr": 99}, [dt.date.min])
        checkpoints.save(2, state, wait=True)
    loaded = load(store)
    assert (loaded["hp"], loaded["new"]) == ({"lr": 99}, [dt.date.min])


def test_averaged_weights_are_evaluated_in_the_model() -> None:
    """Restore the averaged weights into a plain model, as on docs/restore.md: the run stays as it is."""
    model, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    averaged = AveragedModel(model)
    nn.init.zeros_(model.weight)
    with CheckpointManager(MemoryStore()) as manager:
        manager.save(1, training_state(model=model, ema=averaged), wait=True)
        rename = {"model": None, "ema.module": "model"}
        assert manager.restore({"model": plain}, include="model.*", rename=rename, go_on=False) == 1
    assert torch.equal(plain.weight, averaged.state_dict()["module.weight"])
    assert not torch.equal(plain.weight, model.weight)


def test_a_state_is_unchanged_after_a_mismatch() -> None:
    """After a `StateMismatchError` nested values are those that were there."""
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(1)}, wait=True)
        state: dict[str, Any] = {"w": torch.zeros(1), "more": kept_values()}
        with pytest.raises(StateMismatchError):
            checkpoints.restore(state)
    assert repr(state["more"]) == repr(kept_values())
    assert state["w"].item() == 0.0
