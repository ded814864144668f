"""Keys of a state that are no text: torch flattens a state by what `str` makes of them, and puts back under that.

A schedule's milestones, `{3: 1}`, would come back as `{3: 1, "3": 1}`, and the next save would find one name twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from dcp_remote.errors import InvalidArgumentError


def require_distinct(state: Mapping[Any, object]) -> None:
    """Refuse a state in which torch would give two values one name.

    Raises:
        InvalidArgumentError: Names them.
    """
    for path, mapping in _mappings((), state):
        if len({str(key) for key in mapping}) < len(mapping):
            texts = [str(key) for key in mapping]
            twice = sorted(key for key in set(texts) if texts.count(key) > 1)
            raise InvalidArgumentError(
                "Keys of the state are alike as text, and torch would give their values one name.",
                where=".".join(map(str, path)),
                keys=", ".join(twice[:5]),
            )


class KeysPutRight:
    """Remembers the keys of a template before it is loaded, to put back under them what came under their text.

    Args:
        template: Nested mappings and lists; what is loaded into it changes it.
    """

    def __init__(self, template: Mapping[Any, object]) -> None:
        """See the class."""
        self._keys = [
            (mapping, others)
            for _, mapping in _mappings((), template)
            if isinstance(mapping, MutableMapping)
            and (others := {str(key): key for key in mapping if not isinstance(key, str)})
        ]

    def put_right(self) -> None:
        """Once it is loaded."""
        # From within: what is moved into an outer mapping has its own keys already.
        for mapping, others in reversed(self._keys):
            for text, key in others.items():
                if text in mapping:
                    mapping[key] = _merged(mapping[key], mapping.pop(text))


def empty_places(state: Mapping[Any, object]) -> list[tuple[str | int, ...]]:
    """Paths of mappings that hold nothing, as torch's planner makes paths: no name below them is saved or asked for."""
    return [path for path, mapping in _mappings((), state) if path and not mapping]


def _merged(there: object, loaded: object) -> object:
    """What was loaded, in the places of a container that has others, such as tensors that were loaded in place."""
    if isinstance(there, MutableMapping) and isinstance(loaded, Mapping):
        keys = {str(key): key for key in there}
        for text, value in loaded.items():
            key = keys.get(text, text)
            there[key] = _merged(there.get(key), value)
        return there
    if isinstance(there, list) and isinstance(loaded, list):
        # None is what torch fills up with.
        return [_merged(old, new) if new is not None else old for old, new in zip(there, loaded, strict=False)] + (
            there[len(loaded) :] or loaded[len(there) :]
        )
    return loaded


def _mappings(path: tuple[str | int, ...], value: object) -> Iterator[tuple[tuple[str | int, ...], Mapping[Any, Any]]]:
    """All that are reached by way of mappings and lists, as torch reaches them; outer ones first."""
    stack: list[tuple[tuple[str | int, ...], object]] = [(path, value)]
    while stack:
        here, one = stack.pop()
        if isinstance(one, Mapping):
            yield here, one
            stack.extend(((*here, str(key)), inner) for key, inner in one.items())
        elif isinstance(one, list):
            stack.extend(((*here, number), inner) for number, inner in enumerate(one))
