"""Empty dicts of a state: torch's planner leaves them out, and the flatten mapping of a manifest names them. Pure.

Such a name has no entry, and is the path with an empty dict after it, `optim.state.{}`. Other names without an entry
come from planners that do not save what they flattened, and say nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import NoneType
from typing import TypeAlias

Path: TypeAlias = tuple[str | int, ...]


def named(paths: Iterable[Path]) -> dict[str, Path]:
    """Return what a flatten mapping says of empty dicts at these paths."""
    return {_name(path): path for path in paths}


def empty_dicts(flatten: Mapping[str, Path] | None, entries: Collection[str]) -> dict[str, Path]:
    """Return the part of a flatten mapping that names empty dicts.

    Args:
        flatten: Of a manifest; None if nothing was flattened.
        entries: The names of all entries.
    """
    rest = (flatten or {}).keys() - entries
    return {name: path for name, path in (flatten or {}).items() if name in rest and name == _name(path)}


def fitted(flatten: Mapping[str, Path] | None, entries: Collection[str]) -> Mapping[str, Path] | None:
    """Leave out empty dicts in whose place other ranks have something else; called by the coordinator.

    What they have counts: entries, and then whichever empty dict lies deeper.

    Args:
        flatten: Of all ranks; None if nothing was flattened.
        entries: The names of all entries.
    """
    empty = empty_dicts(flatten, entries)
    if not flatten or not empty:
        return flatten
    fit = {name: path for name, path in flatten.items() if name not in empty}
    # The type of a container's keys, and None's where a value lies.
    kinds: dict[Path, type] = {}
    for path in [*fit.values(), *((name,) for name in entries if name not in fit)]:
        kinds.update(_kinds(path))
    for name, path in sorted(empty.items(), key=lambda one: -len(one[1])):
        own = _kinds(path)
        if path not in kinds and all(kinds.get(place, kind) is kind for place, kind in own.items()):
            kinds.update(own)
            fit[name] = path
    return fit


def _kinds(path: Path) -> dict[Path, type]:
    return {path[:depth]: type(part) for depth, part in enumerate(path)} | {path: NoneType}


def _name(path: Path) -> str:
    return ".".join(map(str, (*path, {})))
