"""Leaves of generated states, compared with torch's own flattening and with a copy by recursion."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.loading.planner import RemoteLoadPlanner
from dcp_remote.saving.staging import Stager
from dcp_remote.serialization.leaves import flatten_state, is_flattened, iterate_leaves, value_at
from dcp_remote.serialization.state_dict import build_saved_state

KEYS = st.text("ab.1", min_size=1, max_size=3) | st.integers(0, 1)
VALUES = st.just(None) | st.integers() | st.builds(lambda: torch.zeros(1)) | st.tuples(st.integers(), st.text())
STATES = st.dictionaries(
    st.text("ab.", min_size=1, max_size=3),
    st.recursive(
        VALUES,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(KEYS, inner, max_size=3)
            | st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict)
        ),
        max_leaves=12,
    ),
    max_size=4,
)


def has_equal_names(state: dict[str, Any]) -> bool:
    """Return whether torch refuses a state, or would lose one of two keys that are equal as text."""
    try:
        flatten_state_dict(state)
    except ValueError:
        return True
    mappings = [state, *(value for _, value in every(state) if isinstance(value, dict))]
    return any(len({str(key) for key in mapping}) < len(mapping) for mapping in mappings)


def every(value: Any, keys: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Return all values below a value with their keys, by recursion; containers before what they hold."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in pairs for found in [((*keys, key), inner), *every(inner, (*keys, key))]]


@given(state=STATES)
def test_leaves_are_the_entries_of_torch(state: dict[str, Any]) -> None:
    """Flatten as torch's planner does: equal names, paths and values in equal order, and the empty dicts besides."""
    refused = has_equal_names(state)
    try:
        flat = flatten_state(state)
    except InvalidArgumentError:
        assert refused
        return
    assert not refused
    values, paths = flatten_state_dict(state)
    leaves = list(iterate_leaves(state, descends=is_flattened))
    entries = [leaf for leaf in leaves if not isinstance(leaf.value, dict)]
    assert [leaf.name for leaf in entries] == list(values)
    assert [leaf.path for leaf in entries] == list(paths.values())
    assert all(leaf.value is value for leaf, value in zip(entries, values.values(), strict=True))
    empty = [leaf.path for leaf in leaves if leaf.path and isinstance(leaf.value, dict)]
    assert empty == [path for name, path in flat.paths.items() if name not in flat.values][::-1]


@given(state=STATES)
def test_all_leaves(state: dict[str, Any]) -> None:
    """Equal, in order, to the values that a recursion finds and that hold no others; each is found by its keys."""
    expected = [(keys, id(value)) for keys, value in every(state) if not isinstance(value, dict | list)]
    found: list[tuple[Any, int]] = []
    for leaf in iterate_leaves(state):
        inner = leaf.value if isinstance(leaf.value, list) else []  # of numbers alone
        assert all(value is None or isinstance(value, int) for value in inner)
        found += [((*leaf.keys, number), id(value)) for number, value in enumerate(inner)]
        found += [(leaf.keys, id(leaf.value))] if not isinstance(leaf.value, dict | list) else []
    assert found == expected
    assert all(value_at(state, leaf.keys) is leaf.value for leaf in iterate_leaves(state))


@given(state=STATES)
def test_keys_of_other_types_come_back(state: dict[str, Any]) -> None:
    """Put loaded values by their names, which are text: all entries get theirs, in the containers of the state."""
    if has_equal_names(state):
        return
    containers = [(keys, value) for keys, value in every(state) if isinstance(value, dict)]
    leaves = list(iterate_leaves(state, descends=is_flattened))
    planner = RemoteLoadPlanner()
    planner.set_up_planner(state, Metadata({}))
    values = [(number, leaf) for number, leaf in enumerate(leaves) if not isinstance(leaf.value, dict)]
    assert list(planner.state_dict) == [leaf.name for _, leaf in values]
    for number, leaf in values:
        planner.put(leaf.name, ("loaded", number))
    assert all(value_at(state, leaf.keys) == ("loaded", number) for number, leaf in values)
    assert all(value_at(state, keys) is value for keys, value in containers)


@pytest.mark.parametrize("holder", [list, dict])
def test_a_container_that_contains_itself(holder: type) -> None:
    """One error, that names the top-level key."""
    ring: Any = holder()
    if isinstance(ring, list):
        ring.append(ring)
    else:
        ring["a"] = ring
    with pytest.raises(InvalidArgumentError, match=r"contains itself.*key='x'"):
        list(iterate_leaves({"x": ring}))
    with pytest.raises(InvalidArgumentError, match=r"contains itself.*key='x'"):
        flatten_state({"x": ring})


def test_a_deep_list_in_a_deep_call_stack() -> None:
    """Refused with its key, where Python's limit of calls is reached before the limit of nesting."""
    deep: Any = 1
    for _ in range(180):
        deep = [deep]

    def save_below(depth: int) -> None:
        if depth:
            save_below(depth - 1)
        else:
            build_saved_state({"a": 1, "x": deep}, 0)

    used = len(inspect.stack(0))
    with pytest.raises(InvalidArgumentError, match=r"nested too deeply.*key='x'"):
        save_below(sys.getrecursionlimit() - used - 200)
    with pytest.raises(InvalidArgumentError, match=r"nested too deeply.*key='x'"):
        stage_below({"x": deep}, sys.getrecursionlimit() - used - 200)


def stage_below(state: dict[str, Any], depth: int) -> None:
    """Stage a state so many calls further down."""
    if depth:
        stage_below(state, depth - 1)
    else:
        Stager().stage(state)
