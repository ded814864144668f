"""Values that are stored as one entry and given back whole: `Opaque`, and the marks by which readers know such entries.

torch's planner flattens dicts and lists, but no tuple: so the entry is a tuple of a mark and the value.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from types import NoneType
from typing import Any, Final, Generic, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from dcp_remote.common.text import join_some
from dcp_remote.errors import InvalidArgumentError

# Types of values that hold no others.
ATOMS = frozenset({NoneType, bool, int, float, complex, str, bytes})

# Types that are no `Stateful`s, which takes microseconds to find out of others.
_NEVER_STATEFUL = ATOMS | {tuple, list, dict, OrderedDict, defaultdict}

T = TypeVar("T")

# Made when this module is imported, so that no constant of a user's code is the same object: entries that `Opaque` and
# `Files` made have these very strings, and imitations only equal ones.
OPAQUE_MARK: Final = "".join(("dcp_remote.", "Opaque"))  # noqa: FLY002  # a literal is interned
FILES_MARK: Final = "".join(("dcp_remote.", "Files"))  # noqa: FLY002  # a literal is interned

# Stands in a template for a value that is read whole, so that no value has to be made for the template. A pair, so that
# no stored per-rank value, which is a tuple of one, is equal to it.
_UNREAD_MARK: Final = "dcp_remote.unread"
_MARKS = (OPAQUE_MARK, FILES_MARK, _UNREAD_MARK)
UNREAD: Final = (_UNREAD_MARK, None)
UNREAD_FILES: Final = (_UNREAD_MARK, "Files")


class Opaque(Generic[T]):
    """Value that is saved as one entry, and given back whole, whatever the structure of the template's value.

        state["hparams"] = Opaque({"lr": 1e-3, "layers": [64, 64]})
        checkpoints.restore(state)
        state["hparams"].value

    Other dicts and lists are stored entry by entry, and a template must have the entries that were saved. An `Opaque`
    is allowed at any depth of the state of a `CheckpointManager`, inside `PerRank`, and at the top level of a state for
    `dcp.save`. Tensors inside are copied and read whole by every rank: leave large ones outside. As of any value that
    is no tensor, the value of one rank is stored for all.

    Args:
        value: Value of the types that `refused_values` does not name; or a `Stateful`, of which the `state_dict()` is
            stored, and given to `load_state_dict` by a restore, whatever the object returned before.

    Attributes:
        value: Value; replaced by a restore, unless it is a `Stateful`. `dcp_remote.load` returns what was stored.
    """

    def __init__(self, value: T) -> None:
        """Wrap a value."""
        self.value = value

    def __repr__(self) -> str:
        return f"Opaque({self.value!r})"

    def state_dict(self) -> tuple[str, Any]:
        """Return the entry: torch takes this object for a `Stateful`."""
        value: Any = self.value
        return OPAQUE_MARK, value.state_dict() if _is_asked(value) else value

    def load_state_dict(self, state_dict: Any) -> None:
        """Replace the value by that of an entry, or by a value that a reader has unwrapped."""
        mark, loaded = mark_of(state_dict)
        value: Any = self.value
        if _is_asked(value):
            value.load_state_dict(loaded if mark == OPAQUE_MARK else state_dict)
        else:
            self.value = loaded if mark == OPAQUE_MARK else state_dict


def _is_asked(value: object) -> bool:
    # Modules and optimizers belong into the state themselves: their tensors are large, and may be sharded.
    return is_stateful(value) and not isinstance(value, nn.Module | Optimizer)


def is_stateful(value: object) -> bool:
    """Return whether a value is a `Stateful`: an object, and no class, with `state_dict` and `load_state_dict`."""
    if type(value) in _NEVER_STATEFUL or isinstance(value, torch.Tensor | type):
        return False
    return isinstance(value, Stateful)


def mark_of(value: object) -> tuple[str | None, Any]:
    """Return the mark of an entry and the value in it; None and the value itself for any other value."""
    marked: Any = value
    return (marked[0], marked[1]) if _first(value) in (OPAQUE_MARK, FILES_MARK) else (None, value)


def is_unread(value: object) -> bool:
    """Return whether a value of a template was not loaded; by content, since torch copies the tuples of a template."""
    return _first(value) == _UNREAD_MARK


def asks_for_files(value: object) -> bool:
    """Return whether a value of a template, of a restore or of `dcp.load`, stands for `Files`."""
    pair: Any = value
    first = _first(value)
    return first == FILES_MARK or (first == _UNREAD_MARK and bool(pair[1] == UNREAD_FILES[1]))


def is_imitation(value: object) -> bool:
    """Return whether a value looks like an entry that `Opaque` or `Files` of this process did not make.

    A load would return another value. So is the entry of an `Opaque` that holds a pair with a mark.
    """
    marked: Any = value
    mark = _first(value)
    if mark is OPAQUE_MARK:
        return _first(marked[1]) in _MARKS
    return mark in _MARKS and mark is not FILES_MARK


def imitation_error(names: Sequence[str]) -> InvalidArgumentError:
    """Return the error for values that a load would take for entries with a mark."""
    return InvalidArgumentError(
        "Tuples of two that begin with a mark of this library cannot be told from values that it has wrapped. "
        "Save lists in their place, or change the text.",
        where=join_some(names),
        found=len(names),
    )


def _first(value: object) -> str | None:
    """Return the text with which a pair begins; None for any other value."""
    # The type first: comparing an array with a text raises an error or gives an array.
    if type(value) is tuple and len(value) == 2 and type(value[0]) is str:  # noqa: PLR2004  # mark, value
        return value[0]
    return None
