"""Empty dicts of a state dict, which torch's planner drops and the flatten mapping of a manifest records. Pure.

The name of an empty dict is its path and `{}`, joined by dots, such as `optim.state.{}`; it has no entry. Other names
without an entry come from planners that do not save all that they flattened, and are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import NoneType
from typing import TypeAlias

Path: TypeAlias = tuple[str | int, ...]


def empty_name(path: Path) -> str:
    """Return the name of an empty dict at a path."""
    return ".".join(map(str, (*path, {})))


def empty_dicts(flatten: Mapping[str, Path] | None, entries: Collection[str]) -> dict[str, Path]:
    """Return the items of a manifest's flatten mapping that record empty dicts; `entries` are the names of entries."""
    rest = (flatten or {}).keys() - entries
    return {name: path for name, path in (flatten or {}).items() if name in rest and name == empty_name(path)}


def drop_conflicting(flatten: Mapping[str, Path] | None, entries: Collection[str]) -> Mapping[str, Path] | None:
    """Drop empty dicts whose paths conflict with what other ranks have. Coordinator only.

    Entries take precedence over empty dicts, and deeper empty dicts over others.
    """
    empty = empty_dicts(flatten, entries)
    if not flatten or not empty:
        return flatten
    fit = {name: path for name, path in flatten.items() if name not in empty}
    # The type of the keys of each container by its path; NoneType for a value.
    kinds: dict[Path, type] = {}
    for path in [*fit.values(), *((name,) for name in entries if name not in fit)]:
        kinds.update(_kinds(path))
    for name, path in sorted(empty.items(), key=lambda item: -len(item[1])):
        own = _kinds(path)
        if path not in kinds and all(kinds.get(prefix, kind) is kind for prefix, kind in own.items()):
            kinds.update(own)
            fit[name] = path
    return fit


def _kinds(path: Path) -> dict[Path, type]:
    return {path[:depth]: type(part) for depth, part in enumerate(path)} | {path: NoneType}
