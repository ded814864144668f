"""Top-level keys that have another name in the state than in the checkpoint, for the hint of an error. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def find_key_renames(missing: Iterable[str], unexpected: Iterable[str]) -> dict[str, str]:
    """Return the top-level keys of the state by those of the checkpoint that have the same names below them.

    A key of the state fits if the checkpoint has all its names. Of several that fit, the one with most names in common
    is taken; each key once. An optimizer before its first step has fewer names than the one that was saved.

    Args:
        missing: Names of the state below keys that the checkpoint lacks.
        unexpected: Names of the checkpoint below keys that the state lacks.
    """
    wanted, saved = _names_by_key(missing), _names_by_key(unexpected)
    fits = sorted(
        (
            (len(names & theirs) / len(names | theirs), place, key, other)
            for place, (key, names) in enumerate(wanted.items())
            for other, theirs in saved.items()
            if names <= theirs
        ),
        key=lambda fit: (-fit[0], fit[1]),
    )
    renames: dict[str, str] = {}
    for _, _, key, other in fits:
        if other not in renames and key not in renames.values():
            renames[other] = key
    return renames


def _names_by_key(names: Iterable[str]) -> dict[str, set[str]]:
    """Return the names below each top-level key, without those of values at the top itself."""
    found: dict[str, set[str]] = {}
    for name in names:
        key, _, rest = name.partition(".")
        if rest:
            found.setdefault(key, set()).add(rest)
    return found
