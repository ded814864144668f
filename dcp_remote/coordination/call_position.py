"""Position of a thread in the code of its user, which tells other ranks what a rank does while they wait for it."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_STANDARD_LIBRARY = f"{Path(threading.__file__).parent}{os.sep}"

# Frames looked at: a recursion may have thousands.
_FRAMES_MAX = 200


@dataclass(frozen=True, slots=True)
class CallPosition:
    """Position of a thread.

    Attributes:
        where: Function, file and line of the innermost frame that is neither of this package, torch nor Python's own
            library, as "evaluate (train.py:88)"; "" if there is none.
        is_calling: True if the thread is in a call of this package.
    """

    where: str = ""
    is_calling: bool = False


def position_of(thread: threading.Thread) -> CallPosition:
    """Return the position of a thread of this process; costs microseconds, and stops no thread."""
    where, is_calling = "", False
    # The identifier of a thread that has ended may be that of another thread by now.
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None
    for _ in range(_FRAMES_MAX):
        if frame is None or (where and is_calling):
            break
        path = frame.f_code.co_filename
        is_calling = is_calling or path.startswith(_PACKAGE)
        if not where and not _is_library(path):
            where = f"{frame.f_code.co_name} ({Path(path).name}:{frame.f_lineno})"
        frame = frame.f_back
    return CallPosition(where, is_calling)


def _is_library(path: str) -> bool:
    is_standard = path.startswith(_STANDARD_LIBRARY) and "-packages" not in path
    return is_standard or path.startswith((_PACKAGE, _TORCH, "<frozen"))
