"""File descriptors of this process: whether another file or connection can be opened."""

from __future__ import annotations

import errno
import resource
import socket
from contextlib import ExitStack

# File descriptors that a request may need at once: to resolve a name, to read certificates, to connect. The first
# request of obstore takes three for its threads: without them obstore panics, and stays unusable in this process.
_NEEDED = 4

_PROCESS_SHORT = (
    "No file or connection can be opened: this process has reached its limit of {limit} open files. Raise the limit "
    "(`ulimit -n`), or open fewer files: each tensor from a worker of a DataLoader is an open file, unless "
    '`torch.multiprocessing.set_sharing_strategy("file_system")` is called.'
)
_MACHINE_SHORT = (
    "No file or connection can be opened: this machine has reached its limit of open files. Raise the limit "
    "(`sysctl fs.file-max`; that of a process, `ulimit -n`, is {limit}), or end programs that hold many files open."
)


def find_shortage() -> str | None:
    """Return a message if this process cannot open the files and connections of a request now; else None.

    Opens some, because clients of stores report a missing descriptor as an endpoint that does not answer.
    """
    try:
        with ExitStack() as opened:
            for _ in range(_NEEDED):
                opened.enter_context(socket.socket())
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if error.errno == errno.EMFILE:
            return _PROCESS_SHORT.format(limit=limit)
        if error.errno == errno.ENFILE:
            return _MACHINE_SHORT.format(limit=limit)
    return None
