"""Entries of a checkpoint by their top-level keys: functions for `rename=` that leave out what is not to be loaded.

Entries that are left out by these functions are not unexpected, so that no warning names them; and, unlike with
`include` and `exclude`, a key of which the checkpoint has no entry is no error.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

# Key of an engine of DeepSpeed.
ENGINE_KEY = "deepspeed"


def keep_only(keys: Container[str]) -> Callable[[str], str | None]:
    """Return a function for `rename=` that leaves out all entries but those below some keys, as those of a state."""
    return lambda name: name if _key_of(name) in keys else None


def leave_out(state: Mapping[str, Any], *keys: str) -> Callable[[str], str | None]:
    """Return a function for `rename=` that leaves out entries below some keys, and those of an engine without one."""
    left_out = {*keys, ENGINE_KEY} - state.keys()
    return lambda name: None if _key_of(name) in left_out else name


def _key_of(name: str) -> str:
    """Return the key of an entry in the state; of a `PerRank` value, `per_rank.<rank>.<key>`, its own."""
    key, _, rest = name.partition(".")
    return rest.split(".")[1] if key == "per_rank" and "." in rest else key
