"""Values that are stored whole, values that need code, and values that are stored by their fields."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import functools
import logging
import pickle
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dcp_remote import (
    CheckpointManager,
    Files,
    Opaque,
    PerRank,
    RemoteReader,
    RemoteWriter,
    as_plain,
    load,
    plain_errors,
    refused_values,
)
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError, UnsafeObjectError
from dcp_remote.serialization.state_dict import make_template
from dcp_remote.storage import MemoryStore
from tests.support.states import equal

SHARED = torch.ones(3)


@dataclasses.dataclass
class Options:
    """Options of a layer, with a field that was never set."""

    width: int = 3
    names: list[str] = dataclasses.field(default_factory=list)
    late: Any = dataclasses.field(init=False)


class Name(str):
    """Text with a method that must not be called."""

    __slots__ = ()

    def __str__(self) -> str:
        raise AssertionError


class Number(int):
    """Number of a library."""


class Lines(list[Any]):
    """List of a library."""


class Config:
    """Object of a library with its own way to become a dict."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def to_dict(self) -> Any:
        if isinstance(self.content, Exception):
            raise self.content
        return self.content


class Color(enum.Enum):
    """Enumeration that is stored as such."""

    RED = 1


# ---- Opaque


@pytest.mark.parametrize(
    "value",
    [
        {"lr": 1e-3, "layers": [64, {"heads": 2}]},
        [torch.arange(3.0), {"nested": torch.ones(2)}],
        {"a": SHARED, "b": SHARED},  # shared memory is no JSON
        {1: "keys that are", (2, 3): "no text"},
        None,
        (5,),
        {"array": np.arange(100_000)},  # stored as raw bytes
    ],
    ids=repr,
)
def test_a_value_is_given_back_whole(value: Any) -> None:
    """Save at the top, in a list in a dict, and per rank; restore where the template holds something else."""
    store = MemoryStore()

    def state(value: Any) -> dict[str, Any]:
        return {
            "top": Opaque(value),
            "deep": {"list": [{"x": Opaque(value)}, 7], "w": torch.zeros(1)},
            "own": PerRank(Opaque(value)),
        }

    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, state(value))
        found = state({"other": [1, 2, torch.zeros(7)]})
        entries = found["deep"]["list"]
        checkpoints.restore(found)
    assert found["deep"]["list"] is entries
    loaded = load(store)
    for restored in (
        found["top"].value,
        entries[0]["x"].value,
        found["own"].value.value,
        loaded["top"],
        loaded["deep"]["list"][0]["x"],
        loaded["per_rank"]["0"]["own"],
        load(store, keys="deep.list.0.x")["deep"]["list"][0]["x"],
    ):
        assert str(restored) == str(value)
        assert type(restored) is type(value)


def test_an_object_whose_state_grows() -> None:
    """Save `Stateful`s with values that new ones lack: `load_state_dict` gets all of them, and `load` returns them."""
    store, grown = MemoryStore(), {"shadow": {"w": torch.ones(3)}, "history": [{"loss": 0.5}, {1: 2}]}

    def state(*values: Any) -> dict[str, Any]:
        first, second = values or (Holding({"shadow": {}, "history": []}), Holding({}))
        return {"top": [Opaque(first)], "own": PerRank(Opaque(second)), "w": torch.ones(1)}

    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, state(Holding(grown), Holding(grown)), wait=True)
        new, other = state(), state("text", "text")
        checkpoints.restore(new)
        checkpoints.restore(other)
    for found in (
        new["top"][0].value.state,
        new["own"].value.value.state,
        other["top"][0].value,
        load(store)["top"][0],
    ):
        assert equal(found, grown)
    assert refused_values({"model": Opaque(nn.Linear(1, 1))})[0].path == "model"


def test_by_torchs_own_functions(tmp_path: Path) -> None:
    """Save and load at the top level of a state for plain `dcp.save`."""
    url = tmp_path.as_uri()
    dcp.save({"cfg": Opaque({"a": [1]}), "w": torch.ones(1)}, storage_writer=RemoteWriter(url), no_dist=True)
    state: dict[str, Any] = {"cfg": Opaque(None), "w": torch.zeros(1)}
    dcp.load(state, storage_reader=RemoteReader(url), no_dist=True)
    assert state["cfg"].value == {"a": [1]} == load(url)["cfg"]
    assert repr(state["cfg"]) == "Opaque({'a': [1]})"


def test_a_pair_that_begins_with_an_array() -> None:
    """Save and load a tuple of an array and a value: no comparison of the array with a mark."""
    store, first = MemoryStore(), np.arange(3)
    assert refused_values({"pair": (first, 1)}) == []
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, {"pair": (first, 1)}, wait=True)
    assert np.array_equal(load(store)["pair"][0], first)


def test_a_value_in_place_of_an_opaque_one() -> None:
    """Restore `Opaque` and `Files`, of all ranks and of one, into values without them: the values themselves."""
    store, files = MemoryStore(), Files({"x": b"1"})
    with CheckpointManager(store) as checkpoints:
        saved = {"all": Opaque({"a": 1}), "cfg": PerRank(Opaque({"a": 1})), "files": PerRank(files)}
        checkpoints.save(1, saved, wait=True)
        state: dict[str, Any] = {"all": None, "cfg": PerRank(0), "files": PerRank(0)}
        checkpoints.restore(state)
    assert (state["all"], state["cfg"].value, state["files"].value) == ({"a": 1}, {"a": 1}, files)


def test_a_value_of_one_rank_in_the_place_of_a_shared_one() -> None:
    """Rename between `PerRank` and shared values: the value itself in both directions, of `Opaque` and `Files` too."""
    store, files, pairs = MemoryStore(), Files({"x": b"1"}), [("dcp_remote.Opaque", 5)]
    saved: dict[str, Any] = {
        "n": PerRank(7),
        "pair": PerRank((1,)),
        "cfg": PerRank(Opaque(pairs)),
        "files": PerRank(files),
        "m": 8,
        "shared": Opaque(pairs),
        "other": files,
    }
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, saved, wait=True)
        state: dict[str, Any] = {
            "new": {"n": 0},
            "pair": None,
            "cfg": Opaque(0),
            "files": Files(),
            "m": PerRank(0),
            "shared": PerRank(Opaque(0)),
            "other": PerRank(Files()),
        }
        rename = {f"per_rank.0.{key}": key for key in ("pair", "cfg", "files")} | {"per_rank.0.n": "new.n"}
        rename |= {key: f"per_rank.0.{key}" for key in ("m", "shared", "other")}
        checkpoints.restore(state, rename=rename)
    assert (state["new"], state["pair"], state["cfg"].value, state["files"]) == ({"n": 7}, (1,), pairs, files)
    assert (state["m"].value, state["shared"].value.value, state["other"].value) == (8, pairs, files)


def test_lists_without_tensors() -> None:
    """Save `Opaque` and `Files` in lists that torch stores as one entry: load, and restore into lists of any length."""
    store, files = MemoryStore(), Files({"x": b"1"})
    inner = [("dcp_remote.Opaque", 5)]  # in an Opaque, whose value is given back as it was saved
    state: dict[str, Any] = {"l": [Opaque({"a": 1}), Opaque(inner), files, 7], "deep": {"k": [1, [Opaque(5)]]}}
    whole: dict[str, Any] = {"l": [{"a": 1}, inner, files, 7], "deep": {"k": [1, [5]]}}
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, state, wait=True)
        short: dict[str, Any] = {"l": [Opaque(0)], "deep": {"k": [0, [Opaque(0)]]}}
        checkpoints.restore(short)
        plain: dict[str, Any] = {"l": [0], "deep": {"k": [0]}}
        checkpoints.restore(plain)
    assert load(store) == whole == plain
    assert short["l"][0].value == {"a": 1}
    assert short["l"][1:] == whole["l"][1:]
    assert short["deep"]["k"][1][0].value == 5


@pytest.mark.parametrize("mark", ["dcp_remote.Opaque", "dcp_remote.Files", "dcp_remote.unread"])
def test_tuples_that_look_like_entries(mark: str) -> None:
    """Save tuples that begin with a mark: one error names all, and nothing is stored; others are saved."""
    store, pair = MemoryStore(), (mark, 5)
    wrong = {
        "a": pair,
        "b": {"c": [1, pair]},
        "d": Opaque(pair),
        "e": PerRank(pair),
        "f": PerRank([{"g": pair}]),
        "h": PerRank(Opaque(pair)),
    }
    with CheckpointManager(store) as checkpoints:
        with pytest.raises(InvalidArgumentError, match=r"where='?a, b\.c, d, e, f.*found=6"):
            checkpoints.save(1, wrong, wait=True)
        right = {"a": (*pair, 6), "b": [mark, 5], "c": Opaque([pair]), "d": PerRank(mark), "e": (pair,)}
        checkpoints.save(1, right, wait=True)
        state = {"d": PerRank("")}
        checkpoints.restore(state, include="per_rank.*", unexpected="ignore")
    assert state["d"].value == mark
    loaded = load(store)
    assert loaded.pop("per_rank") == {"0": {"d": mark}}
    assert loaded == {"a": (mark, 5, 6), "b": [mark, 5], "c": [pair], "e": (pair,)}


class Holding:
    """`Stateful` with a given state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Passing(Holding):
    """`Stateful` that passes on the state of another one, which may be `Opaque` or `Files`."""

    def state_dict(self) -> Any:
        return {key: value.state_dict() for key, value in self.state.items()}

    def load_state_dict(self, state: Any) -> None:
        for key, value in self.state.items():
            value.load_state_dict(state[key])


def test_states_that_look_like_entries() -> None:
    """Save `Stateful`s and modules whose state holds tuples with a mark: one error names all, and nothing is stored."""
    pair = ("dcp_remote.Opaque", 5)

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return pair

    wrong = {
        "a": Holding(pair),
        "b": [Holding({"x": {"y": [1, pair]}, "w": torch.ones(1)})],
        "c": PerRank(Holding({"x": collections.OrderedDict(y=[pair])})),
        "d": Extra(1, 1),
        "e": Passing({"o": Opaque(pair)}),
    }
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        with pytest.raises(InvalidArgumentError, match=r"where='a, b\.0\.x\.y, c, d\._extra_state, e\.o' found=5"):
            checkpoints.save(1, wrong, wait=True)
        assert not list(store.list("shards/"))
        checkpoints.save(1, {"a": Holding({"x": (*pair, 6), "y": list(pair), "z": (pair,)})}, wait=True)
    assert load(store)["a"] == {"x": (*pair, 6), "y": list(pair), "z": (pair,)}


def test_states_that_pass_on_entries() -> None:
    """Save and restore `Stateful`s that pass on the entries of `Opaque` and `Files`, which are no imitations."""
    store, files = MemoryStore(), Files({"x": b"1"})
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(
            1, {"a": Passing({"o": Opaque([1]), "f": files}), "p": PerRank(Passing({"f": files}))}, wait=True
        )
        state: dict[str, Any] = {"a": Passing({"o": Opaque(0), "f": Files()}), "p": PerRank(Passing({"f": Files()}))}
        checkpoints.restore(state)
    assert (state["a"].state["o"].value, state["a"].state["f"]) == ([1], files)
    assert state["p"].value.state["f"] == files


def test_dcp_save_refuses_what_looks_like_entries(tmp_path: Path) -> None:
    """Save tuples with a mark by torch's functions: an error names all; entries of `Opaque` and copies of them pass."""
    pair, url = ("dcp_remote.Files", 5), tmp_path.as_uri()
    wrong = {
        "a": pair,
        "b": {"c": [1, {"d": pair}], "k": [1, pair]},
        "e": Holding({"f": pair}),
        "g": 1,
        "o": Opaque(pair),
    }
    with pytest.raises(InvalidArgumentError, match=r"where='a, b\.c\.1\.d, b\.k, e\.f, o' found=5"), plain_errors():
        dcp.save(wrong, storage_writer=RemoteWriter(url), no_dist=True)
    assert not list(tmp_path.rglob("*.safetensors"))
    right = {"a": (*pair, 6), "o": Opaque([pair]), "f": Files({"x": b"1"}), "p": Passing({"o": Opaque(5)})}
    saved: Any = dcp.async_save(right, storage_writer=RemoteWriter(url), no_dist=True)
    saved.result()
    assert load(url) == {"a": (*pair, 6), "o": [pair], "f": Files({"x": b"1"}), "p": {"o": 5}}
    # An asynchronous save in another process gets writer and state by pickle, where an entry is an equal tuple.
    entries = pickle.loads(pickle.dumps({"o": Opaque([1]).state_dict()}))
    writer = pickle.loads(pickle.dumps(RemoteWriter(url, overwrite=True)))
    dcp.save(entries, storage_writer=writer, no_dist=True)
    assert load(url) == {"o": [1]}


@pytest.mark.parametrize("copies", [False, True])
def test_values_that_are_not_loaded(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore without some `Opaque` and `Files`, also if torch copies the tuples of the template: they stay."""
    store, files = MemoryStore(), Files({"x": b"1"})
    if copies:
        name = "dcp_remote.manager.rank_restore.make_template"
        monkeypatch.setattr(name, lambda *args, **options: copied(make_template(*args, **options)))
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(
            1, {"w": torch.ones(1), "o": Opaque(1), "own": PerRank(Opaque(1)), "l": [Opaque(1)]}, wait=True
        )
        state: dict[str, Any] = {"w": torch.zeros(1), "o": Opaque(2), "own": PerRank(Opaque(2)), "l": [Opaque(2)]}
        state |= {"new": Opaque(3), "files": files}
        checkpoints.restore(state, exclude=["o", "per_rank.*", "l"], missing="keep")
    assert state["w"] == 1
    assert str((state["o"], state["own"], state["l"])) == "(Opaque(2), PerRank(Opaque(2)), [Opaque(2)])"
    assert (state["new"].value, state["files"].names) == (3, ("x",))


def copied(value: Any) -> Any:
    """Return a template in which dicts, lists and tuples are copies with equal content."""
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return type(value)(list(map(copied, value))) if isinstance(value, (list, tuple)) else value


# ---- what is refused


def a_refused_state() -> dict[str, Any]:
    return {
        "model": nn.Linear(2, 2),
        "partial": functools.partial(print, 1),
        "good": {"date": dt.date(2026, 1, 1), "color": Color.RED, "array": np.ones(2)},
        "hparams": {"inner": [1, (2, Options())], "pattern": re.compile("x")},
        "whole": Opaque({"x": [Options()]}),
        "own": PerRank({"log": logging.getLogger("x")}),
    }


REFUSED = {
    "partial": "functools.partial",
    "hparams.inner[1][1]": f"{__name__}.Options",
    "hparams.pattern": "re.Pattern",
    "whole['x'][0]": f"{__name__}.Options",
    "own['log']": "logging.Logger",
}


def test_refused_values_are_known_beforehand() -> None:
    """Ask for all refused values of a state: path, type and reason of each, and none of a state that can be saved."""
    found = refused_values(a_refused_state())
    assert {value.path: value.type_name for value in found} == REFUSED
    assert all(value.reason == "has no encoding without pickle" for value in found)
    assert str(found[0]).startswith(f"{found[0].path} (")
    assert refused_values({"a": [SHARED, {"b": (SHARED, SHARED)}], "m": nn.Linear(1, 1)}) == []
    assert refused_values(nn.Linear(1, 1)) == []


@pytest.mark.parametrize("wait", [False, True])
def test_a_save_names_all_that_it_refuses(wait: bool) -> None:
    """Save the state: one error names all values, and no shard was uploaded."""
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints, pytest.raises(DcpRemoteError) as caught:  # noqa: PT012  # either call
        checkpoints.save(1, a_refused_state(), wait=wait)
        checkpoints.wait()
    text = str(caught.value)
    assert all(path.rpartition("own")[2] in text and name in text for path, name in REFUSED.items()), text
    assert "as_plain" in text
    assert not list(store.list("shards/"))


# ---- fields


def test_objects_become_their_fields() -> None:
    """Convert what needs code: dataclasses, mappings, subclasses, objects with to_dict; all else stays itself."""
    array, date = np.ones(2), dt.date(2026, 1, 1)
    counts = collections.defaultdict(lambda: 0, {"a": 1})
    value = {
        "options": Options(5, [Name("x")]),
        "proxy": types.MappingProxyType({"a": Options(1)}),
        "counts": counts,
        "config": Config({"inner": Config({"n": Number(7)})}),
        "lines": Lines([Number(1), (Name("t"), {2.5})]),
        Name("key"): [array, date, Color.RED, SHARED, None],
        "user": collections.UserList([1, Number(2)]),
    }
    assert refused_values({"value": Opaque(value)})
    plain = as_plain(value)
    expected = {
        "options": {"width": 5, "names": ["x"]},
        "proxy": {"a": {"width": 1, "names": []}},
        "counts": {"a": 1},
        "config": {"inner": {"n": 7}},
        "lines": [1, ("t", {2.5})],
        "key": [array, date, Color.RED, SHARED, None],
        "user": [1, 2],
    }
    assert str(plain) == str(expected)
    assert type(plain["options"]["names"][0]) is str
    assert type(plain["config"]["inner"]["n"]) is int
    assert type(plain["counts"]) is dict
    assert plain["key"][0] is array
    assert refused_values({"value": Opaque(plain)}) == []
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, {"value": Opaque(plain)}, wait=True)
    assert equal(load(store)["value"]["options"], expected["options"])


def test_values_without_fields_are_named() -> None:
    """Convert functions, patterns, classes, cycles, failing to_dict, dataclasses in sets: one error names all."""
    cycle: list[Any] = []
    cycle.append(cycle)

    @dataclasses.dataclass(frozen=True)
    class Frozen:
        n: int = 1

    value = {
        "call": [print],
        "pattern": re.compile("x"),
        "class": Options,
        "config": Config(ValueError("no")),
        "set": {Frozen()},
        "cycle": cycle,
    }
    with pytest.raises(UnsafeObjectError) as caught:
        as_plain(value)
    text = str(caught.value)
    for part in ("['call'][0] (builtins.print)", "['pattern']", "['class']", "to_dict() fails: ValueError", "a set"):
        assert part in text
    assert caught.value.details["refused"] == 6
