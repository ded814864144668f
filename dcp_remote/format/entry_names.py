"""Names of a checkpoint's entries: selection by pattern, and grouping by top-level key. Pure."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence

from dcp_remote.common.text import join_some
from dcp_remote.errors import InvalidArgumentError

# Bounds on the names shown in an error message.
_NEAR_MAX = 3
_NAME_CHARACTERS_MAX = 128

# Comparing takes 35 µs a name, and grows with the square of the length; a manifest may have a million names.
_COMPARED_NAMES_MAX = 5_000

_WILDCARD = re.compile(r"[*?\[]")


def top_level_key(path: Sequence[str | int] | None) -> str:
    """Return the top-level key of the state dict below which an entry is; its path is None if nothing was flattened.

    "" for an entry that is at the top itself, so that all such entries form one group.
    """
    return str(path[0]) if path is not None and len(path) > 1 else ""


def choose_names(
    names: Sequence[str], patterns: Collection[str], *, paths: Mapping[str, Sequence[str | int]] | None
) -> list[str]:
    """Return the names that match a pattern, in the order of `names`.

    A pattern that is itself a name matches only that name: `layers[0].weight` and `*` can be names. Any other pattern
    is a glob as in `fnmatch.fnmatchcase`, in which `.` has no special meaning.

    Raises:
        InvalidArgumentError: A pattern matches nothing; the error has similar names and the top-level keys of `paths`.
    """
    chosen, unmatched = match_names(names, patterns)
    if unmatched:
        raise no_match_error(unmatched[0], names, paths or {})
    return [name for name in names if name in chosen]


def match_names(names: Collection[str], patterns: Collection[str]) -> tuple[set[str], list[str]]:
    """Return the names that match a pattern, and the patterns that match nothing; patterns as for `choose_names`."""
    known = set(names)
    chosen: set[str] = set()
    unmatched: list[str] = []
    for pattern in patterns:
        if pattern in known:
            chosen.add(pattern)
            continue
        fits = re.compile(fnmatch.translate(pattern)).match
        found = [name for name in names if fits(name)]
        if not found:
            unmatched.append(pattern)
        chosen.update(found)
    return chosen, unmatched


def near_names(name: str, names: Collection[str]) -> list[str]:
    """Return up to three names that are similar to a name; compares 5,000 names at most, at 35 µs each."""
    return difflib.get_close_matches(name[:_NAME_CHARACTERS_MAX], _compared(names), n=_NEAR_MAX)


def _compared(names: Collection[str]) -> list[str]:
    return [name for name in names if len(name) <= _NAME_CHARACTERS_MAX][:_COMPARED_NAMES_MAX]


def no_match_error(
    pattern: str, names: Collection[str], paths: Mapping[str, Sequence[str | int]]
) -> InvalidArgumentError:
    """Return the error for a pattern that matches nothing; the arguments are those of `choose_names`."""
    group = pattern.rstrip(".") + "."
    below = [f"{group}*"] if any(name.startswith(group) for name in names) else []
    similar = [*_respell(pattern, _compared(names)), *near_names(pattern, names)]
    near = list(dict.fromkeys([*below, *similar]))[:_NEAR_MAX]
    # The name of an entry at the top itself is a key of the state dict.
    tops = sorted({top_level_key(paths.get(name)) or name for name in names})
    return InvalidArgumentError(
        "No entry of the checkpoint has this name or matches this pattern. "
        + (f"Write {below[0]!r} for all entries below it." if below else "Correct it."),
        key=pattern,
        near=", ".join(near) or None,
        top_level=join_some([top[:_NAME_CHARACTERS_MAX] for top in tops]),
    )


def _respell(pattern: str, names: Sequence[str]) -> list[str]:
    """Return a pattern whose parts before the first wildcard are those of names, if the given ones are misspelled."""
    if len(pattern) > _NAME_CHARACTERS_MAX:
        return []
    parts = pattern.split(".")
    split_names = [name.split(".") for name in names]
    for depth, part in enumerate(parts):
        if _WILDCARD.search(part):
            break
        known = {name[depth] for name in split_names if name[:depth] == parts[:depth] and len(name) > depth}
        close = [part] if part in known else difflib.get_close_matches(part, sorted(known), n=1)
        if not close:
            return []
        parts[depth] = close[0]
    respelled = ".".join(parts)
    return [respelled] if fnmatch.filter(names, respelled) else []
