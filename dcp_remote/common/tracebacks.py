"""Tracebacks of errors without the frames of this package: a user needs their own line of code, and the message.

JAX does the same, see `JAX_TRACEBACK_FILTERING`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from dcp_remote.errors import DcpRemoteError

P = ParamSpec("P")
R = TypeVar("R")

# Variable of the environment that keeps all frames, for a report of a defect.
FULL_NAME = "DCP_REMOTE_FULL_TRACEBACK"

# Files whose frames are left out: of this package, and of the standard library, over which its threads run.
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_STANDARD = str(Path(os.__file__).parent) + os.sep
_INSTALLED = os.sep + "site-packages" + os.sep


def hides_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Leave the frames of this package out of the tracebacks of errors of this package that the function raises.

    Also out of those of their causes, but not of an exception that was being handled when the function was called. Any
    other exception, such as one of the user's code, keeps all.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        handled = sys.exc_info()[1]
        try:
            return function(*args, **kwargs)
        except DcpRemoteError as error:
            if not os.environ.get(FULL_NAME):
                _hide_frames(error, until=handled)
            raise

    return call


def _hide_frames(error: BaseException, until: BaseException | None) -> None:
    seen = {id(until)}
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.__traceback__ = _of_others(one.__traceback__)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _of_others(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without frames of this package, and of the standard library where this package calls it."""
    frames: list[TracebackType] = []
    is_of_others = False
    while traceback is not None:
        path = traceback.tb_frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            is_of_others = False
        elif _INSTALLED in path or not path.startswith(_STANDARD):
            is_of_others = True
        if is_of_others:
            frames.append(traceback)
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for frame in reversed(frames):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept
