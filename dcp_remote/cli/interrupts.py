"""Ctrl-C in a command: the first one ends it in order, the second one at once; one ends a command that only reads."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

# Exit code of a command that Ctrl-C ended: 128 and the number of SIGINT, as shells have it.
INTERRUPTED = 130

# A launcher may pass on a SIGINT that the terminal has sent to the command as well: these two are one Ctrl-C.
_TOGETHER_SECONDS = 0.5

# Time in which a command that only reads may end in order, before its process is ended.
_READING_SECONDS = 0.5


@contextmanager
def watch_interrupts(*, is_reading: bool) -> Iterator[None]:
    """Answer the first Ctrl-C by a line on standard error, and end the process at the second.

    Python raises KeyboardInterrupt only in the main thread, which may be in a request that takes many seconds: a thread
    of its own gets the signals' numbers from a socket. Where SIGINT is ignored, as in background jobs, or handled by
    a program that calls `main`, nothing is done. A command that only reads (`is_reading`) is ended soon after the
    first one.
    """
    if not _is_default() or threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    sender.settimeout(0)
    watch = partial(_watch, receiver, is_reading=is_reading)
    watcher = threading.Thread(target=watch, name="dcp_remote-interrupts", daemon=True)
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        sender.close()
        watcher.join()
        receiver.close()


def _watch(receiver: socket.socket, *, is_reading: bool) -> None:
    first_seconds: float | None = None
    end = threading.Timer(_READING_SECONDS, os._exit, [INTERRUPTED])
    end.daemon = True
    while number := receiver.recv(1):
        if number[0] != signal.SIGINT or not _is_default():
            continue
        if first_seconds is None:
            first_seconds = time.monotonic()
            sys.stderr.write(f"dcp-remote: interrupted{'' if is_reading else '; Ctrl-C again ends at once'}\n")
            sys.stderr.flush()
            if is_reading:
                end.start()
        elif time.monotonic() - first_seconds > _TOGETHER_SECONDS:
            os._exit(INTERRUPTED)
    end.cancel()


def _is_default() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler
