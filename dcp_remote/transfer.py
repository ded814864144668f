"""What uploads and downloads have in common: worker threads that may not start, retries that can be given up."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from dcp_remote.ranges import MiB

T = TypeVar("T")

MEMORY_BUDGET_BYTES = 256 * MiB

# How often who waits for a transfer looks at the deadline, which another thread may let expire.
WAKE_SECONDS = 1.0


class _Once(Generic[T]):
    """A call that is made once, by whichever thread comes first, and what came of it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._lock = threading.Lock()
        self.future: Future[T] = Future()

    def __call__(self) -> None:
        with self._lock:
            call, self._call = self._call, None
        if call is None or not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # handed over, as a pool does
            self.future.set_exception(error)


def submitted(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    """Call it in a worker thread; or here and now, if no thread can be started any more.

    That is when the last background save of a script runs, as the interpreter is about to exit: it must be slow rather
    than lost. Or where a process has all the threads that it may have: then the pool has put the call into its queue
    before it fails, and a thread that lives may find it there, too.
    """
    once = _Once(call)
    try:
        pool.submit(once)
    except RuntimeError:
        once()
    return once.future


class Patience:
    """Clock and pauses of the retries of one transfer: once it is given up, time is over and no pause lasts."""

    def __init__(self) -> None:
        """Go on."""
        self._over = threading.Event()

    def give_up(self) -> None:
        """From now on."""
        self._over.set()

    def clock(self) -> float:
        """In seconds; for a `Deadline`."""
        return math.inf if self._over.is_set() else time.monotonic()

    def pause(self, seconds: float) -> None:
        """Between two attempts."""
        self._over.wait(seconds)
