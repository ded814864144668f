"""Entries of a checkpoint by their top-level keys: functions for `rename=` that leave out what is not to be loaded.

Entries that are left out by these functions are not unexpected, so that no warning names them; and, unlike with
`include` and `exclude`, a key of which the checkpoint has no entry is no error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def keep_only(*keys: str) -> Callable[[str], str | None]:
    """Return a function for `rename=` that leaves out all entries but those below some keys."""
    return lambda name: name if _key_of(name) in keys else None


def leave_out(*keys: str) -> Callable[[str], str | None]:
    """Return a function for `rename=` that leaves out the entries below some keys."""
    return lambda name: None if _key_of(name) in keys else name


def leave_out_unused(state: Mapping[str, Any], rename: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Return a function for `rename=` that also leaves out entries for which the state's engine has no use."""
    engine = state.get("deepspeed")
    return rename if engine is None else lambda name: rename(name) if engine.takes(name) else None


def _key_of(name: str) -> str:
    """Return the key of an entry in the state; of a `PerRank` value, `per_rank.<rank>.<key>`, its own."""
    key, _, rest = name.partition(".")
    return rest.split(".")[1] if key == "per_rank" and "." in rest else key
