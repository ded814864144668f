"""Processes that can open no more files."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Free file descriptors below the lowered limit.
_FREE = 8


@contextmanager
def no_descriptors() -> Iterator[Callable[[], None]]:
    """Let this process open no file during the block; the function that is given ends that sooner."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + _FREE, hard))

    def release() -> None:
        while held:
            os.close(held.pop())

    try:
        while True:
            try:
                held.append(os.dup(held[0]))
            except OSError:
                break
        yield release
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        release()
