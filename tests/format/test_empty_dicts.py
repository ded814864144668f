"""Empty dicts of a state dict, which torch's planner drops: saves of a manager keep them, whatever other ranks have."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcp_remote import CheckpointManager, Retention, load
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError
from dcp_remote.format.empty_dicts import Path, drop_conflicting, empty_dicts
from dcp_remote.format.manifest_validation import check
from dcp_remote.saving.plan_cache import RunPlanner, propose, to_table
from dcp_remote.saving.plan_table import arrange
from dcp_remote.serialization.leaves import flatten_state
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.manifests import build
from tests.support.states import equal

State: TypeAlias = dict[str, Any]


def save(store: MemoryStore, state: State) -> None:
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, state, wait=True)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {}},
        {"a": {"b": {}, "c": 1}, "d": torch.ones(2)},
        {"a": {"b": {"c": {}}}},
        {"a": [{}]},
        {"a": [{}, {"w": torch.ones(2)}, {}, 3, {"x": {}}]},
        {"a": [[{}], [[], {}]], "b": []},
        {"a.b": {}, "a": {"b": torch.ones(1)}},
        {"a.b": torch.ones(1), "a": {"b": {}}},
        {"a.{}": 1, "a": {}},
        {"a": {}, "b": ({},), "c": {"{}": {}}},
    ],
    ids=lambda state: repr(state).replace("tensor", ""),
)
def test_empty_dicts_come_back(state: State) -> None:
    """Empty dicts in dicts and lists are restored, also where names collide; a user's entry `a.{}` takes precedence."""
    store = MemoryStore()
    save(store, state)
    expected = {key: value for key, value in state.items() if key != "a"} if "a.{}" in state else state
    assert equal(load(store), expected)


def test_keys_choose_empty_dicts() -> None:
    """Patterns and names select empty dicts like entries; others are left out."""
    state = {"model": {"buffers": {}, "w": torch.ones(1)}, "optim": {"state": {}, "groups": [{}, {"lr": 1}]}}
    store = MemoryStore()
    save(store, state)
    assert equal(load(store, keys="optim.*"), {"optim": state["optim"]})
    assert load(store, keys="model.buffers.{}") == {"model": {"buffers": {}}}
    assert equal(load(store, keys="model.w"), {"model": {"w": torch.ones(1)}})
    assert load(store, keys="optim.groups.0*") == {"optim": {"groups": [{}]}}


def test_plans_with_changing_empty_dicts() -> None:
    """Saves of one manager reuse plans correctly when the items are the same and only empty dicts come and go."""
    store, weight = MemoryStore(), torch.ones(3)
    states: list[State] = [
        {"w": weight, "extra": {}},
        {"w": weight + 1, "extra": {}},
        {"w": weight},
        {"w": weight, "extra": {}, "more": [{}, {}]},
    ]
    with CheckpointManager(store) as checkpoints:
        for step, state in enumerate(states, 1):
            checkpoints.save(step, state, wait=True)
    for step, state in enumerate(states, 1):
        assert equal(load(store, step=step), state)


def test_restore_logs_nothing_about_empty_dicts(caplog: pytest.LogCaptureFixture) -> None:
    """A restore into templates with and without the empty dicts logs no warning."""
    caplog.set_level(logging.WARNING)

    def made() -> State:
        model = nn.Linear(3, 2)
        return {"model": model, "optim": torch.optim.Adam(model.parameters()), "scores": {"best": {}}}

    store, state = MemoryStore(), made()
    save(store, state)
    assert load(store)["optim"]["state"] == {}
    for other in (made(), made() | {"scores": {}}):
        with CheckpointManager(store) as checkpoints:
            assert checkpoints.restore(other) == 1
    assert "left out" not in caplog.text


def test_a_thinned_checkpoint_keeps_the_others_empty_dicts() -> None:
    """Empty dicts below the keys that thinning drops are dropped with them."""
    store = MemoryStore()
    with CheckpointManager(store, retention=Retention(keep_optimizer_last=1)) as checkpoints:
        for step in (1, 2):
            model = {"w": torch.full((3,), float(step)), "buffers": {}}
            optim = {"state": {}, "m": torch.full((3,), float(step))}
            checkpoints.save(step, {"model": model, "optim": optim}, wait=True)
    assert equal(load(store, step=1), {"model": {"w": torch.ones(3), "buffers": {}}})


def test_a_name_that_is_not_unicode_is_refused_before_the_upload() -> None:
    """The name of an empty dict is checked like that of an entry."""
    store = RecordingStore(MemoryStore())
    with CheckpointManager(store) as checkpoints:
        with pytest.raises(InvalidArgumentError, match="not Unicode"):
            checkpoints.save(1, {"w": torch.ones(1), "\ud800": {}}, wait=True)
        checkpoints.save(1, {"w": torch.ones(1)}, wait=True)
    assert equal(load(store), {"w": torch.ones(1)})


def merged(states: Sequence[State]) -> tuple[dict[str, Path], set[str]]:
    """Return the flatten mapping and the entries of ranks with these states, merged as in `plan_table`."""
    flatten: dict[str, Path] = {}
    entries: set[str] = set()
    for state in states:
        flat = flatten_state(state)
        entries.update(flat.values)
        for name, path in flat.paths.items():
            flatten.setdefault(name, path)
    return flatten, entries


@pytest.mark.parametrize(
    ("states", "left"),
    [
        ([{"a": {}}, {"a": {"b": 1}}], []),
        ([{"a": {}}, {"a": 1}], []),
        ([{"a": {"b": {}}}, {"a": 1}], []),
        ([{"a": {}}, {"a": {"b": {}}}], [("a", "b")]),
        ([{"a": {"b": {}}}, {"a": [{}, {"x": 1}]}], [("a", 0)]),
        ([{"a": {}, "c": {}}, {"a": [{"x": 1}]}], [("c",)]),
        ([{"a": {"0": {}}}, {"a": [{"x": 1}]}], []),
    ],
)
def test_entries_of_other_ranks_take_precedence(states: Sequence[State], left: list[tuple[str, ...]]) -> None:
    """Ranks have different states, in either order."""
    for ordered in (states, states[::-1]):
        flatten, entries = merged(ordered)
        assert sorted(empty_dicts(drop_conflicting(flatten, entries), entries).values()) == left


def test_an_entry_named_like_an_empty_dict_of_another_rank_keeps_its_path() -> None:
    tables = []
    states: tuple[dict[str, Any], ...] = ({"a": {}}, {"a": {"{}": torch.ones(1)}})
    for state in states:
        planner = RunPlanner()
        planner.set_up_planner(state)
        tables.append(to_table(propose(planner)))
    for ordered in (tables, tables[::-1]):
        assert arrange(ordered).planned.flatten == {"a.{}": ("a", "{}")}


STATES = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        st.integers(0, 2),
        lambda inner: st.dictionaries(st.sampled_from("a0{}"), inner, max_size=2) | st.lists(inner, max_size=2),
        max_leaves=6,
    ),
    max_size=3,
)


@given(st.lists(STATES, min_size=1, max_size=3))
def test_a_manifest_stays_valid(states: list[State]) -> None:
    """Entries of any ranks that form one state dict still form one with the empty dicts that are kept."""
    flatten, entries = merged(states)
    alone = {name: flatten[name] for name in entries}
    try:
        _check(alone, entries)
    except CorruptCheckpointError:  # ranks whose entries do not fit together are refused anyway
        return
    both = drop_conflicting(flatten, entries)
    assert both is not None
    assert {name: both[name] for name in entries} == alone
    _check(both, entries)


def _check(flatten: Mapping[str, Path], entries: set[str]) -> None:
    check(replace(build([], [], dict.fromkeys(entries, b"0")), flatten=flatten))
