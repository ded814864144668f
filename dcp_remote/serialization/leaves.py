"""Leaves of a state: the values in its dicts and lists, each with its path; what looks into a state loops over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.empty_dicts import empty_name
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
    return isinstance(value, (Mapping, list)) and not is_stateful(value)


def is_flattened(value: object, path: Path = ()) -> bool:
    """Return whether torch's planner takes a value apart: a mapping, or a list that holds a tensor or mapping."""
    if not isinstance(value, list):
        return isinstance(value, Mapping)
    stack = [(value, len(path))]
    while stack:
        items, depth = stack.pop()
        if ATOMS.issuperset(map(type, items)):
            continue
        require_depth(path, depth)
        for inner in items:
            if isinstance(inner, (torch.Tensor, Mapping)):
                return True
            if isinstance(inner, list):
                stack.append((inner, depth + 1))
    return False


class FlatState(NamedTuple):
    """State that is taken apart as torch's planner does: its values, tensors and others, by name."""

    values: dict[str, Any]
    paths: dict[str, Path]  # of the values; and of empty dicts, which have no value, see `format/empty_dicts.py`


def flatten_state(state: Mapping[Any, Any]) -> FlatState:
    """Take a state apart; the values themselves are not copied. Takes 1 µs for each value.

    Refuses two values that torch would give the same name, since their keys are equal as text, or their paths once
    the parts are joined by dots; the error names them. Refuses a mapping that is no dict, and a dict or list that
    contains itself or is nested too deeply.
    """
    values: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    empty: list[Path] = []
    stack: list[tuple[Path, str, Iterator[tuple[Any, Any]]]] = [((), "", _text_items(state, ()))]
    while stack:
        outer, prefix, items = stack[-1]
        for key, value in items:
            path, name = (*outer, key), f"{prefix}{key}"
            if type(value) not in ATOMS and not isinstance(value, torch.Tensor) and is_flattened(value, path):
                if not value:
                    empty.append(path)
                stack.append((path, f"{name}.", _text_items(value, path)))
                break
            if name in values:
                raise InvalidArgumentError(
                    "Two values of the state have one name, since torch joins the parts of a path by dots. Rename one.",
                    name=name,
                    paths=", ".join(sorted([str([*paths[name]]), str([*path])])),
                )
            values[name], paths[name] = value, path
        else:
            stack.pop()
    return FlatState(values, {empty_name(path): path for path in reversed(empty)} | paths)


def _text_items(container: Any, path: Path) -> Iterator[tuple[str | int, Any]]:
    """Return an iterator of the items of a container with keys as text, or indices; refuse keys with equal texts."""
    require_depth(path, len(path))
    if isinstance(container, list):
        return enumerate(container)
    if path and not isinstance(container, dict):  # torch's loader takes dicts alone apart
        raise InvalidArgumentError(
            "A mapping in the state is no dict, so that a restore could not fill it. Save dict(value), or of a config "
            "OmegaConf.to_container(value).",
            where=name_of(path),
            type=type(container).__qualname__,
        )
    if {str}.issuperset(map(type, container)):
        return iter(container.items())
    texts = Counter(map(str, container))
    if len(texts) < len(container):
        raise InvalidArgumentError(
            "Keys of the state are equal as text, and torch would give their values the same name. Rename one.",
            where=name_of(path),
            keys=", ".join(text for text, count in texts.items() if count > 1),
        )
    return zip(texts, container.values(), strict=True)


def iterate_leaves(
    value: object, path: Path = (), *, descends: Callable[[object], bool] = is_container
) -> Iterator[Leaf]:
    """Yield the leaves of a value, depth first and in its order; `descends` decides what is taken apart.

    The value itself is the one leaf if it is not taken apart. Refuses a dict or list that contains itself, or is nested
    too deeply.
    """
    stack = [iter([Leaf(path, path, value)])]
    while stack:
        for leaf in stack[-1]:
            if type(leaf.value) not in ATOMS and descends(leaf.value) and leaf.value:
                stack.append(_parts_of(leaf))
                break
            yield leaf
        else:
            stack.pop()


def _parts_of(leaf: Leaf) -> Iterator[Leaf]:
    path, keys, container = leaf
    require_depth(path, len(path))
    is_list = isinstance(container, list)
    for key, value in enumerate(container) if is_list else container.items():
        text = key if is_list or type(key) is str else str(key)
        inner = (*path, text)
        # One tuple for both, where all keys are text: there may be a million values.
        yield Leaf(inner, inner if keys is path and text is key else (*keys, key), value)


def require_depth(path: Path, depth: int) -> None:
    """Refuse a container that is nested too deeply."""
    if depth >= _DEPTH_MAX:
        raise nesting_error(path[0] if path else None)


def nesting_error(key: object) -> InvalidArgumentError:
    """Return the error of a container below a top-level key that is nested too deeply."""
    return InvalidArgumentError(
        "A dict or list of the state contains itself, or is nested too deeply. Put a value that contains itself "
        "into Opaque(...); make a deep one flat, or leave it out.",
        key=key,
    )


def value_at(state: Any, keys: Sequence[Any]) -> Any:
    """Return the value of a state below these keys."""
    for key in keys:
        state = state[key]
    return state
