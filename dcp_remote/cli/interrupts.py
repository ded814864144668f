"""Ctrl-C in a command: the first one ends it in order, the second one at once."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Exit code of a command that Ctrl-C ended: 128 and the number of SIGINT, as shells have it.
INTERRUPTED = 130

# A launcher may pass on a SIGINT that the terminal has sent to the command as well: these two are one Ctrl-C.
_TOGETHER_SECONDS = 0.5


@contextmanager
def watch_interrupts() -> Iterator[None]:
    """Answer the first Ctrl-C by a line on standard error, and end the process at the second.

    Python raises KeyboardInterrupt only in the main thread, which may be in a request that takes many seconds: a thread
    of its own gets the signals' numbers from a socket. Where SIGINT is ignored, as in background jobs, or handled by
    a program that calls `main`, or by the command itself (`bench`), nothing is done.
    """
    if not _is_default() or threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    sender.settimeout(0)
    watcher = threading.Thread(target=_watch, args=(receiver,), name="dcp_remote-interrupts", daemon=True)
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        sender.close()
        watcher.join()
        receiver.close()


def _watch(receiver: socket.socket) -> None:
    first_seconds: float | None = None
    while number := receiver.recv(1):
        if number[0] != signal.SIGINT or not _is_default():
            continue
        if first_seconds is None:
            first_seconds = time.monotonic()
            sys.stderr.write("dcp-remote: interrupted; Ctrl-C again ends at once\n")
            sys.stderr.flush()
        elif time.monotonic() - first_seconds > _TOGETHER_SECONDS:
            os._exit(INTERRUPTED)


def _is_default() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler
