"""Top-level keys that have another name in the state than in the checkpoint, for the hint of an error. Pure."""

from __future__ import annotations

from collections.abc import Iterable


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


def _names_by_key(names: Iterable[str]) -> dict[str, set[str]]:
    """Return the names below each top-level key, without those of values at the top itself."""
    found: dict[str, set[str]] = {}
    for name in names:
        key, _, rest = name.partition(".")
        if rest:
            found.setdefault(key, set()).add(rest)
    return found
