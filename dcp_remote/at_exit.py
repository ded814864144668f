"""What is left to do when a process ends without having closed something."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from typing import Protocol

logger = logging.getLogger(__name__)


class Close(Protocol):
    """Waits for the last save of a manager, and raises what that came to."""

    def __call__(self, *, is_interrupted: bool) -> None:
        """Close it; `is_interrupted` says that Ctrl-C was pressed already."""


class AtExit:
    """Closes a manager when the process ends, if nobody has by then.

    Args:
        url: Of its run, for the log.
        close: Called then.
    """

    def __init__(self, url: str, close: Close) -> None:
        """See the class."""
        self._url = url
        self._close = close
        self._pid = os.getpid()
        atexit.register(self._run)

    def cancel(self) -> None:
        """It was closed."""
        atexit.unregister(self._run)

    def _run(self) -> None:
        """The process ends, and nobody has closed this: the last save is waited for, and its failure is told.

        By the exit code as well: a job that ends well without its last checkpoint would be taken for one that has it.
        """
        if os.getpid() != self._pid:
            return  # a child that was forked has none of its threads
        try:
            # Set by the interpreter for what ended the main thread, a few lines before it comes here.
            self._close(is_interrupted=getattr(sys, "last_type", None) is KeyboardInterrupt)
        except BaseException:
            logger.critical("%s: the last save of this process failed", self._url, exc_info=True)
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(1)
