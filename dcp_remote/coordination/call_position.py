"""Position of a thread in the code of its user, which tells other ranks what a rank does while they wait for it."""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
# A remote Trainer's `train` is below all that its training does: its frame alone is no call.
_INTEGRATIONS = f"{_PACKAGE}integrations{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_STANDARD_LIBRARY = f"{Path(threading.__file__).parent}{os.sep}"

# Lines that faulthandler writes: the head of a thread, then its frames, innermost first, a hundred at most.
_THREAD = re.compile(r"(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+) ")
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)')


class _Frame(NamedTuple):
    """Frame of a thread, as faulthandler writes it: what is not ASCII is escaped."""

    path: str
    line: str
    function: str


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
    """Return the position of a thread of this process; nothing is known of a process with over a hundred threads.

    Costs about 0.2 ms per thread of the process, in which no thread runs Python. The frame objects of another thread
    (`sys._current_frames`) would be cheaper, but to walk them while their thread runs crashes Python 3.11
    (cpython#111363); faulthandler makes none, and keeps the GIL.
    """
    where, is_calling = "", False
    for path, line, function in _frames_of(thread):
        if where and is_calling:
            break
        is_own = path.startswith(_escaped(_PACKAGE)) and not path.startswith(_escaped(_INTEGRATIONS))
        is_calling = is_calling or is_own
        if not where and not _is_library(path):
            where = f"{function} ({path.rpartition(os.sep)[2]}:{line})"
    return CallPosition(where, is_calling)


def _frames_of(thread: threading.Thread) -> Iterator[_Frame]:
    """Yield the frames of a thread, innermost first; none if the thread has ended."""
    # The identifier of a thread that has ended may be that of another thread by now.
    if not thread.is_alive():
        return
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read().decode("ascii", "replace")
    except OSError:  # no folder for temporary files, or a full one; the position only completes a message
        return
    is_thread = False
    for line in text.splitlines():
        if head := _THREAD.match(line):
            is_thread = int(head["ident"], 16) == thread.ident
        elif is_thread and (frame := _FRAME.fullmatch(line)):
            yield _Frame(frame["path"], frame["line"], frame["function"])


def _is_library(path: str) -> bool:
    is_standard = path.startswith(_escaped(_STANDARD_LIBRARY)) and "-packages" not in path
    return is_standard or path.startswith((_escaped(_PACKAGE), _escaped(_TORCH), "<frozen"))


def _escaped(path: str) -> str:
    """Return a path as faulthandler writes it."""
    return path.encode("ascii", "backslashreplace").decode()
