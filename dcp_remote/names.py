"""The names of a checkpoint's entries: chosen by pattern, and grouped by the top of the state dict. Pure."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence

from dcp_remote.errors import InvalidArgumentError

# A message is read by somebody who typed a name wrong, not parsed.
_NEAR_MAX = 3
_TOP_LEVEL_MAX = 10
_NAME_CHARACTERS_MAX = 128

# Likeness takes 35 µs a name, and grows with the square of its length: a manifest may hold a million of any length.
_COMPARED_NAMES_MAX = 5_000


def top_level_key(path: Sequence[str | int] | None) -> str:
    """The key of the state dict below which an entry lies.

    Args:
        path: The entry's place in the nested state dict; None where the state dict was not flattened.

    Returns:
        "" for entries that lie at the top themselves: they are one group, however many there are.
    """
    return str(path[0]) if path is not None and len(path) > 1 else ""


def chosen_names(
    names: Sequence[str], patterns: Collection[str], *, paths: Mapping[str, Sequence[str | int]] | None
) -> list[str]:
    """The names that patterns choose, in the order of `names`.

    A pattern that is itself a name chooses that name and nothing else: `layers[0].weight` and `*` can be names. Any
    other is a glob, as for `fnmatch.fnmatchcase`; `.` means nothing special in it.

    Args:
        names: Of all entries, each once.
        patterns: What to choose; none of them chooses nothing.
        paths: Places of entries in the nested state dict, for the error; None where it was not flattened.

    Raises:
        InvalidArgumentError: One pattern fits nothing; says which names are like it, and the top-level keys.
    """
    known = set(names)
    chosen: set[str] = set()
    for pattern in patterns:
        if pattern in known:
            chosen.add(pattern)
            continue
        fits = re.compile(fnmatch.translate(pattern)).match
        found = [name for name in names if fits(name)]
        if not found:
            raise _nothing_fits(pattern, names, paths or {})
        chosen.update(found)
    return [name for name in names if name in chosen]


def _nothing_fits(pattern: str, names: Sequence[str], paths: Mapping[str, Sequence[str | int]]) -> InvalidArgumentError:
    compared = [name for name in names if len(name) <= _NAME_CHARACTERS_MAX][:_COMPARED_NAMES_MAX]
    near = difflib.get_close_matches(pattern[:_NAME_CHARACTERS_MAX], compared, n=_NEAR_MAX)
    # What lies at the top itself is named by its own name, which is a key of the state dict then.
    tops = sorted({top_level_key(paths.get(name)) or name for name in names})
    shown = [top[:_NAME_CHARACTERS_MAX] for top in tops[:_TOP_LEVEL_MAX]]
    more = ["…"] if len(tops) > _TOP_LEVEL_MAX else []
    return InvalidArgumentError(
        "No entry of the checkpoint has this name or fits this pattern.",
        key=pattern,
        near=", ".join(near) or None,
        top_level=", ".join(shown + more),
    )
