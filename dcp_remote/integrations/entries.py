"""Entries of a checkpoint by their top-level keys: functions for `rename=` that leave out what is not to be loaded.

Entries that are left out by these functions are not unexpected, so that no warning names them; and, unlike with
`include` and `exclude`, a key of which the checkpoint has no entry is no error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Key of an engine of DeepSpeed, which has no use for some of the entries below it.
ENGINE_KEY = "deepspeed"


def keep_only(*keys: str) -> Callable[[str], str | None]:
    """Return a function for `rename=` that leaves out all entries but those below some keys."""
    return lambda name: name if _key_of(name) in keys else None


def keep_used(state: Mapping[str, Any]) -> Callable[[str], str | None]:
    """Return a function for `rename=` that leaves out all entries for which a state has no use, by their keys."""
    return lambda name: name if _key_of(name) in state and _is_used(name, state) else None


def leave_out(state: Mapping[str, Any], *keys: str) -> Callable[[str], str | None]:
    """Return a function for `rename=` that leaves out entries below some keys, and those of an engine without use."""
    return lambda name: name if _key_of(name) not in keys and _is_used(name, state) else None


def _is_used(name: str, state: Mapping[str, Any]) -> bool:
    """Return whether a state has a use for an entry, if that is one of an engine."""
    is_of_engine = _key_of(name) == ENGINE_KEY
    return not is_of_engine or (ENGINE_KEY in state and state[ENGINE_KEY].takes(name))


def _key_of(name: str) -> str:
    """Return the key of an entry in the state; of a `PerRank` value, `per_rank.<rank>.<key>`, its own."""
    key, _, rest = name.partition(".")
    return rest.split(".")[1] if key == "per_rank" and "." in rest else key
