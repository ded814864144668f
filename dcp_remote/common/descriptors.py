"""File descriptors: whether this process can open another, and the host of a key-value store one for each rank."""

from __future__ import annotations

import errno
import os
import resource
import socket
from contextlib import ExitStack

# File descriptors that a request may need at once: to resolve a name, to read certificates, to connect. The first
# request of obstore takes three for its threads: without them obstore panics, and stays unusable in this process.
_NEEDED = 4

# Connections of a rank to the key-value store of its job: one or two of torch, and one of this package, of rank 0 four.
# Its host has some other files open.
_STORE_CONNECTIONS = 4
_OTHER_FILES = 64

_STORE_SHORT = (
    "The process that hosts the key-value store of the job may open {limit} files, and needs up to {needed} for the "
    "connections of {ranks} ranks; ranks that get none fail. Raise its limit before {program} starts: `ulimit -n "
    "{needed}`, LimitNOFILE of a unit of systemd."
)
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


def find_store_shortage(host: str, ranks: int) -> str | None:
    """Return a message if the host process of the key-value store of so many ranks may open too few files; else None.

    Called by rank 0, which hosts the store, or whose torchrun does; None as well if neither can be found out. The limit
    is left as it is: that of torchrun is not this process's, and children inherit it, in which `select` fails for a
    file above 1,023.
    """
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        # Only an address of this machine can be bound to.
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            limit = resource.prlimit(os.getppid() if is_agents else os.getpid(), resource.RLIMIT_NOFILE)[0]
    except (OSError, AttributeError):  # of another user; not on macOS
        return None
    needed = _STORE_CONNECTIONS * ranks + _OTHER_FILES
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return None
    return _STORE_SHORT.format(limit=limit, ranks=ranks, needed=needed, program="torchrun" if is_agents else "rank 0")
