"""Functions of the package that tests execute, in all processes; for `mutants`.

A process whose environment has both names notes each function once for each test. Imports little, because every process
of the tests imports this module at its start.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

# Names in the environment: of the file with the number of the running test, and of the folder of the notes.
NUMBER_NAME, FOLDER_NAME = "DCP_REMOTE_TEST_NUMBER", "DCP_REMOTE_TEST_EXECUTED"

_BYTES = 4


class Numbers:
    """Number of the running test, which all processes see."""

    def __init__(self, path: Path) -> None:
        """Begin with 0."""
        path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _BYTES)

    def set(self, number: int) -> None:
        """Set the number."""
        self._shared[:] = number.to_bytes(_BYTES, "little")


def note() -> Callable[[FrameType, str, Any], None] | None:
    """Note from now on what the threads of this process execute; return the profile function that does.

    Does nothing without the names.
    """
    if NUMBER_NAME not in os.environ:
        return None
    root = str(Path(__file__).parents[2]) + os.sep
    package = os.path.join(root, "dcp_remote", "")  # a prefix of names of files
    folder = os.environ[FOLDER_NAME]
    with Path(os.environ[NUMBER_NAME]).open("rb") as file:
        shared = mmap.mmap(file.fileno(), _BYTES, access=mmap.ACCESS_READ)
    seen: set[tuple[bytes, object]] = set()
    # Opened once: a test may leave no descriptor, and an error would end the profile. Forked processes append, too.
    notes = Path(folder, f"{os.getpid()}.executed").open("a", buffering=1)  # noqa: SIM115  # until the process ends

    def note_call(frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        key = (shared[:], code)
        if key in seen:
            return
        seen.add(key)
        if code.co_filename.startswith(package):
            number = int.from_bytes(key[0], "little")
            name = code.co_qualname.replace(".<locals>", "")
            notes.write(f"{number}\t{code.co_filename.removeprefix(root)}:{name}\n")

    threading.setprofile(note_call)
    sys.setprofile(note_call)
    return note_call
