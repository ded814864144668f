"""Leaves of a state: the values in its dicts and lists, each with its path; what looks into a state loops over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.serialization.opaque import ATOMS, is_stateful

# Keys as text, and indices of lists, as torch's planner writes paths.
Path: TypeAlias = tuple[str | int, ...]

# Depth of containers in a state. A copy needs three calls for each, of the thousand that Python allows.
_DEPTH_MAX = 200


class Leaf(NamedTuple):
    """Value of a state and its place; an empty dict is a leaf, too."""

    path: Path
    keys: tuple[Any, ...]  # the same path, with keys as the state has them
    value: Any

    @property
    def name(self) -> str:
        """Name that torch's planner gives to the value."""
        return name_of(self.path)


def name_of(path: Path) -> str:
    """Return the name that torch's planner gives to a path."""
    return ".".join(map(str, path))


def is_container(value: object) -> bool:
    """Return whether a value is a dict or list to take apart: no `Stateful`, no list of numbers and text alone."""
    if isinstance(value, list) and ATOMS.issuperset(map(type, value)):
        return False  # 20 ns for each of a million numbers, as of a sampler
    return isinstance(value, Mapping | list) and not is_stateful(value)


def is_flattened(value: object) -> bool:
    """Return whether torch's planner takes a value apart: a mapping, or a list that holds a tensor or mapping."""
    if isinstance(value, list):
        return is_container(value) and any(isinstance(inner, torch.Tensor) or is_flattened(inner) for inner in value)
    return isinstance(value, Mapping)


def iterate_leaves(
    value: object, path: Path = (), *, descends: Callable[[object], bool] = is_container
) -> Iterator[Leaf]:
    """Yield the leaves of a value, depth first and in its order; `descends` decides what is taken apart.

    The value itself is the one leaf if it is not taken apart. Refuses a dict or list that contains itself, or is nested
    too deeply.
    """
    stack = [Leaf(path, path, value)]
    while stack:
        leaf = stack.pop()
        inner = _parts_of(leaf) if descends(leaf.value) else []
        if inner:
            stack.extend(reversed(inner))
        else:
            yield leaf


def _parts_of(leaf: Leaf) -> list[Leaf]:
    path, keys, container = leaf
    require_depth(path)
    is_list = isinstance(container, list)
    parts = []
    for key, value in enumerate(container) if is_list else container.items():
        text = key if is_list or type(key) is str else str(key)
        inner = (*path, text)
        # One tuple for both, where all keys are text: there may be a million values.
        parts.append(Leaf(inner, inner if keys is path and text is key else (*keys, key), value))
    return parts


def require_depth(path: Path) -> None:
    """Refuse a container that is nested too deeply."""
    if len(path) >= _DEPTH_MAX:
        raise InvalidArgumentError(
            "A dict or list of the state contains itself, or is nested too deeply. Put a value that contains itself "
            "into Opaque(...); make a deep one flat, or leave it out.",
            key=path[0],
        )


def value_at(state: Any, keys: Sequence[Any]) -> Any:
    """Return the value of a state below these keys."""
    for key in keys:
        state = state[key]
    return state
