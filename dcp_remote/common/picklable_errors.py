"""Conversion of exceptions so that they can be sent to other ranks.

torch pickles the exceptions of all ranks and gathers them in a collective operation. A rank whose exception cannot be
pickled and unpickled leaves the operation, and the others wait until the process group times out (torch 2.13: after 30
minutes by default). Errors of dcp_remote can be pickled; those of a user's planner or store, or of a library, may not.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from dcp_remote.errors import DcpRemoteError

P = ParamSpec("P")
R = TypeVar("R")


def replace_unpicklable_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method that torch calls: an exception that cannot be pickled is replaced as by `make_picklable`.

    The signature stays the same, since torch decides by parameter names what to pass.
    """

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            crossing = make_picklable(error)
            if crossing is error:
                raise
            raise crossing from error

    return guarded


def make_picklable(error: BaseException) -> BaseException:
    """Return the error itself if it can be pickled and unpickled; otherwise a `DcpRemoteError` with its text."""
    if survives_pickling(error):
        return error
    replacement = DcpRemoteError(
        "A rank failed with an exception that cannot be pickled for the other ranks.", cause=error
    )
    replacement.__cause__ = error
    return replacement


def survives_pickling(error: BaseException) -> bool:
    """Return whether an exception can be pickled and unpickled as an exception of the same class."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301  # pickled in this very line
    except Exception:  # noqa: BLE001  # pickling a user's class may raise anything
        return False
