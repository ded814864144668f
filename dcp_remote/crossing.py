"""Exceptions that cross ranks: whatever leaves a reader or writer can be pickled, in both directions.

torch gathers what a rank raises by pickle. What cannot be pickled, or not be unpickled, makes that rank drop out of the
collective while the others wait in it until the process group times out (torch 2.13: after 30 minutes by default).
Ours all can; what a planner or a store of the user's own raises, or a library below, may not.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from dcp_remote.errors import DcpRemoteError

P = ParamSpec("P")
R = TypeVar("R")


def crosses_ranks(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method that torch calls: what it raises and cannot be pickled becomes an error of ours.

    torch still sees the method's own parameters, by whose names it decides what to pass.
    """

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            crossing = portable(error)
            if crossing is error:
                raise
            raise crossing from error

    return guarded


def portable(error: BaseException) -> BaseException:
    """The error itself if it can be pickled in both directions; otherwise one of ours that names it."""
    if survives_pickling(error):
        return error
    told = DcpRemoteError("An error that cannot be sent to the other ranks.", cause=error)
    told.__cause__ = error
    return told


def survives_pickling(error: BaseException) -> bool:
    """Whether an exception comes back from a pickle as what it was."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301  # of our own making, a moment ago
    except Exception:  # noqa: BLE001  # a class may raise anything while it is pickled; then it does not survive
        return False
