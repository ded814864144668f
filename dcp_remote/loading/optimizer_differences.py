"""Optimizers of a state that are not those of the checkpoint, but of another class or with other options. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dcp_remote.common.text import escape_unprintable, join_some

# Name of a value of an optimizer: its place in the state, "state" or "param_groups", parameter or number, and key.
_NAME = re.compile(r"(.+?)\.(state|param_groups)\..+\.([^.]+)", re.DOTALL)

# A longer name, of a hostile checkpoint, could keep the expression busy for minutes.
_NAME_CHARACTERS_MAX = 1_000


def describe_optimizers(differing: Iterable[str], *, state: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Return a sentence for each optimizer whose keys differ from those that were saved, by its place in the state.

    `differing` are names that only state or checkpoint has, `state` and `saved` all names. A fresh `state_dict()` has
    no state yet, whatever the optimizer; so a state without any is no difference.
    """
    places = {place for name in differing if (place := place_of(name)) is not None}
    if not places:
        return {}
    here, there = _collect_keys(state, places), _collect_keys(saved, places)
    sentences = {}
    for place in sorted(places):
        if (place, "param_groups") not in here or (place, "param_groups") not in there:
            continue  # no optimizer, or one that was not saved
        only_saved, only_state = _subtract(there, here, place), _subtract(here, there, place)
        if only_state or "in param_groups" in only_saved or (only_saved and (place, "state") in here):
            sides = [f"only the checkpoint has {only_saved}"] if only_saved else []
            sides += [f"only the state has {only_state}"] if only_state else []
            sentences[place] = escape_unprintable(
                f"{place} is not the optimizer that was saved, but of another class or with other options: "
                f"{'; '.join(sides)}. Make the optimizer that was saved, or begin this one anew."
            )
    return sentences


def place_of(name: str) -> str | None:
    """Return the place of the optimizer to which a value may belong; None for any other name."""
    found = _split(name)
    return found[1] if found else None


def _split(name: str) -> re.Match[str] | None:
    return _NAME.fullmatch(name) if len(name) <= _NAME_CHARACTERS_MAX else None


def _collect_keys(names: Iterable[str], places: set[str]) -> dict[tuple[str, str], set[str]]:
    keys: dict[tuple[str, str], set[str]] = {}
    for name in names:
        found = _split(name)
        if found and found[1] in places:
            keys.setdefault((found[1], found[2]), set()).add(found[3])
    return keys


def _subtract(keys: dict[tuple[str, str], set[str]], others: dict[tuple[str, str], set[str]], place: str) -> str:
    """Return the keys of an optimizer that only the first of two has, as a text; "" if there are none."""
    texts = []
    for part, where in (("state", "for a parameter"), ("param_groups", "in param_groups")):
        left = keys.get((place, part), set()) - others.get((place, part), set())
        if left:
            texts.append(f"{join_some(sorted(left))} {where}")
    return " and ".join(texts)
