"""What uploads and downloads have in common: worker threads that may not start, retries that can be given up."""

from __future__ import annotations

import atexit
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from dcp_remote.ranges import MiB

T = TypeVar("T")

MEMORY_BUDGET_BYTES = 256 * MiB

# How often who waits for a transfer looks at the deadline, which another thread may let expire.
WAKE_SECONDS = 1.0


# What threads get, as the process ends, to be through with their requests: a put that lost against its second deletes
# what it has put. A request may take four minutes, which nobody wants to wait for.
_EXIT_SECONDS = 5.0


class Workers:
    """Threads that make calls in the order of their submission, and that do not keep the process from ending.

    The standard library's pool is joined as the process ends, be its threads stuck in requests for minutes; and it
    takes no call from then on, when the last save of a script may be under way.

    Args:
        count: Of threads, at most; each is started when a call finds none that waits.
        name: Of them.
    """

    def __init__(self, count: int, name: str) -> None:
        """See the class; no thread is started yet."""
        self._count = count
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._waiting = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[[], object]) -> None:
        """Have a call made, which raises nothing.

        Raises:
            RuntimeError: No thread can be started; one that lives may still find the call in the queue.
        """
        self._calls.put(call)
        if self._waiting.acquire(blocking=False):
            return
        with self._lock:
            if len(self._threads) < self._count:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
                _alive.add(thread)

    def shutdown(self, *, wait: bool) -> None:
        """Make no more of the calls that have not begun; the threads end.

        Args:
            wait: Whether to wait for those that have.
        """
        while True:
            try:
                self._calls.get_nowait()
            except queue.Empty:
                break
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._calls.put(None)
        if wait:
            for thread in threads:
                thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # or what it holds would stay until the next
            self._waiting.release()


_alive: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_exit_seconds = _EXIT_SECONDS


def end_within(seconds: float) -> None:
    """As the process ends, wait no longer than so for threads that are still in a request: it is about to be killed."""
    global _exit_seconds  # noqa: PLW0603  # as the end is: one for the process
    _exit_seconds = min(_exit_seconds, seconds)


def _end() -> None:
    end_seconds = time.monotonic() + _exit_seconds
    for thread in list(_alive):
        thread.join(max(0.0, end_seconds - time.monotonic()))


atexit.register(_end)


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


def submitted(pool: Workers, call: Callable[[], T]) -> Future[T]:
    """Call it in a worker thread; or here and now, if no thread can be started any more.

    That is where a process has all the threads that it may have, or is about to end: a save must be slow rather than
    lost. The pool has put the call into its queue before it fails, and a thread that lives may find it there, too.
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
