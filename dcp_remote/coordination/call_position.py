"""Position of a thread in the code of its user, which tells other ranks what a rank does while they wait for it."""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import threading
from pathlib import Path

import torch

# Folders as faulthandler writes them: what is not ASCII is escaped.
_PACKAGE, _TORCH, _STANDARD_LIBRARY = (
    f"{folder}{os.sep}".encode("ascii", "backslashreplace").decode()
    for folder in (Path(__file__).parents[1], Path(torch.__file__).parent, Path(threading.__file__).parent)
)
# A remote Trainer's `train` is below all that its training does: its frame alone is no call.
_INTEGRATIONS = f"{_PACKAGE}integrations{os.sep}"

# Frame of a thread, as faulthandler writes it: innermost first, a hundred at most.
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?+) in (.*)$', re.MULTILINE)


def position_of(thread: threading.Thread) -> tuple[str, bool]:
    """Return where a thread of this process is, and whether that is in a call of this package.

    The first is the function, file and line of the innermost frame that is neither of this package, torch nor Python's
    own library, as "evaluate (train.py:88)"; "" if there is none. Nothing is known of a process with over a hundred
    threads.

    Costs about 0.2 ms per thread of the process, in which no thread runs Python. The frame objects of another thread
    (`sys._current_frames`) would be cheaper, but to walk them while their thread runs crashes Python 3.11
    (cpython#111363); faulthandler makes none, and keeps the GIL.
    """
    frames = _FRAME.findall(_stack_of(thread))
    users = [
        f"{function} ({path.rpartition(os.sep)[2]}:{line})" for path, line, function in frames if not _is_library(path)
    ]
    is_calling = any(path.startswith(_PACKAGE) and not path.startswith(_INTEGRATIONS) for path, _, _ in frames)
    return users[0] if users else "", is_calling


def _stack_of(thread: threading.Thread) -> str:
    """Return the frames of a thread as faulthandler writes them; "" if the thread has ended."""
    # The identifier of a thread that has ended may be that of another thread by now.
    if not thread.is_alive():
        return ""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            threads = file.read().decode("ascii", "replace").split("\n\n")
    except OSError:  # no folder for temporary files, or a full one; the position only completes a message
        return ""
    head = re.compile(f"(Current thread|Thread) 0x0*{thread.ident:x} ")
    return next((stack for stack in threads if head.match(stack)), "")


def _is_library(path: str) -> bool:
    is_standard = path.startswith(_STANDARD_LIBRARY) and "-packages" not in path
    return is_standard or path.startswith((_PACKAGE, _TORCH, "<frozen"))
