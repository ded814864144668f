"""First parts of names that differ between state and checkpoint, for the hints of an error. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

# Names up to which they are compared, parts of a name that are tried as first ones, renamed first parts that a message
# shows, and candidates for each first part.
_NAMES_COMPARED_MAX = 20_000
_PARTS_MAX = 16
_PREFIXES_MAX = 8
_CANDIDATES_MAX = 8


def find_key_renames(missing: Iterable[str], unexpected: Iterable[str]) -> dict[str, list[str]]:
    """Return top-level keys of the state, each with those of the checkpoint that have the same names below them.

    A key of the checkpoint fits if it has all names of the key of the state; those with the fewest other names are
    returned. An optimizer before its first step has fewer names than the one that was saved. `missing` are names of
    the state below keys that the checkpoint lacks, `unexpected` the reverse.
    """
    wanted, saved = _names_by_key(missing), _names_by_key(unexpected)
    renames: dict[str, list[str]] = {}
    for key, names in wanted.items():
        fits = {other: len(theirs) for other, theirs in saved.items() if names <= theirs}
        if fits:
            renames[key] = [other for other, count in fits.items() if count == min(fits.values())]
    return renames


def find_prefix_renames(
    missing: Collection[str], unexpected: Collection[str], *, whole_keys: bool, is_cut: bool = False
) -> dict[str, str]:
    """Return first parts of names of the checkpoint with those of the state, which together explain all missing names.

    The names below both are the same, and each missing name has exactly one explanation; else the result is empty.
    With `whole_keys` the first part may be a whole top-level key of the checkpoint; `is_cut` says that there are more
    missing names.
    """
    if max(len(missing), len(unexpected)) > _NAMES_COMPARED_MAX:
        return {}
    renames: dict[str, str] = {}
    lost, new = dict.fromkeys(missing), dict.fromkeys(unexpected)
    while lost and len(renames) < _PREFIXES_MAX:
        pair = _find_prefix(next(iter(lost)), lost, new, parts_min=1 if whole_keys else 2, is_cut=is_cut)
        if pair is None:
            return {}
        saved, wanted = pair
        renames[saved] = wanted
        lost = {name: None for name in lost if not name.startswith(f"{wanted}.")}
        new = {name: None for name in new if not name.startswith(f"{saved}.")}
    return {} if lost else renames


def _find_prefix(
    name: str, lost: Collection[str], new: Collection[str], *, parts_min: int, is_cut: bool
) -> tuple[str, str] | None:
    """Return the shortest first parts, of checkpoint and state, that explain a name; None if none is certain."""
    parts = name.split(".")
    for count in range(1, min(len(parts), _PARTS_MAX)):
        wanted, rest = ".".join(parts[:count]), "." + ".".join(parts[count:])
        candidates = [other.removesuffix(rest) for other in new if other.endswith(rest)]
        candidates = [saved for saved in candidates if saved and saved.count(".") + 1 >= parts_min]
        below = {other[len(wanted) :] for other in lost if other.startswith(f"{wanted}.")}
        fits = []
        for saved in candidates[:_CANDIDATES_MAX]:
            theirs = {other[len(saved) :] for other in new if other.startswith(f"{saved}.")}
            if below == theirs or (is_cut and below < theirs):
                fits.append(saved)
        # Layers may have the same names below them: take the layer whose last part is unchanged.
        certain = [saved for saved in fits if _last(saved) == _last(wanted)] or (fits if len(candidates) == 1 else [])
        if fits or len(candidates) > _CANDIDATES_MAX:
            return (certain[0], wanted) if len(certain) == 1 else None
    return None


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _names_by_key(names: Iterable[str]) -> dict[str, set[str]]:
    """Return the names below each top-level key, without those of values at the top itself."""
    found: dict[str, set[str]] = {}
    for name in names:
        key, _, rest = name.partition(".")
        if rest:
            found.setdefault(key, set()).add(rest)
    return found
