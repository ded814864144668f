"""Worker threads, threads for calls that may block for ever, and retries that can be cancelled."""

from __future__ import annotations

import atexit
import contextvars
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from functools import partial
from typing import Generic, TypeVar

from dcp_remote.common.deadline import Clock

S = TypeVar("S")
T = TypeVar("T")

# Calls of `in_parallel` at a time: bounds memory, as a manifest of a million chunks takes 100 MB while it is decoded.
CALLS_IN_FLIGHT = 4

# A thread that waits for a transfer or a call checks this often whether to go on, as another may let a deadline expire.
WAKE_SECONDS = 0.5

# Threads get this time to end their requests when the process exits: a hedged put that lost deletes its object. A
# request may take four minutes, too long to wait for.
_EXIT_SECONDS = 5.0


class OneTimeEvent:
    """Event that is set once, and that Ctrl-C in the waiting thread cannot break.

    `threading.Event` is written in Python: a KeyboardInterrupt in its `wait` may release the lock that `set` holds in
    another thread, whose `set` then raises RuntimeError.
    """

    def __init__(self) -> None:
        """Begin as not set."""
        self._is_set = False
        self._lock = threading.Lock()  # held until the event is set
        self._lock.acquire()

    def is_set(self) -> bool:
        """Return whether the event was set."""
        return self._is_set

    def set(self) -> None:
        """Set the event, and wake all threads that wait; nothing if the event was set before."""
        self._is_set = True
        with suppress(RuntimeError):  # the lock was released already
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait for the event, some seconds at most; return whether the event was set."""
        if not self._is_set and self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            self.set()  # releases the lock for other threads that wait
        return self._is_set


class Workers:
    """Daemon threads that make calls in the order of submission, and hardly delay the exit of the process.

    The standard library's pool is joined at exit even if its threads are stuck in requests for minutes, and takes no
    more calls from then on, when the last save of a script may still be under way. At most `count` threads are started,
    each when a call finds no idle thread.
    """

    def __init__(self, count: int, name: str, *, delays_exit: bool = True) -> None:
        """Store the settings; no thread is started. `delays_exit` is False for calls that only read."""
        self._count, self._delays_exit = count, delays_exit
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[[], object]) -> None:
        """Queue a call, which must not raise.

        RuntimeError: no thread can be started; a running thread may still take the call from the queue.
        """
        self._calls.put(call)
        if self._idle.acquire(blocking=False):
            return
        with self._lock:
            if len(self._threads) < self._count:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
                if self._delays_exit:
                    _threads.add(thread)

    def shutdown(self, *, wait: bool) -> None:
        """Drop the calls that have not begun, and end the threads; `wait` for the calls that have begun."""
        while True:
            try:
                self._calls.get_nowait()
            except queue.Empty:
                break
        with self._lock:
            threads = list(self._threads)
        for _ in range(len(threads) + 1):  # also for one whose start was interrupted
            self._calls.put(None)
        if wait:
            for thread in threads:
                thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # Else the memory that the call refers to would be held until the next call.
            self._idle.release()


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_exit_seconds = _EXIT_SECONDS


def limit_exit_wait(seconds: float) -> None:
    """Limit the wait for threads at exit to `seconds`; for a process that is about to be killed."""
    global _exit_seconds  # noqa: PLW0603  # a process has one exit
    _exit_seconds = min(_exit_seconds, seconds)


def _join_threads() -> None:
    end_seconds = time.monotonic() + _exit_seconds
    for thread in list(_threads):
        thread.join(max(0.0, end_seconds - time.monotonic()))


atexit.register(_join_threads)


class CallOnce(Generic[T]):
    """Call that is made once, by the first thread that reaches it; `future` is that of its result."""

    def __init__(self, call: Callable[[], T]) -> None:
        """Store the call."""
        self._call: Callable[[], T] | None = call
        self._lock = threading.Lock()
        self.future: Future[T] = Future()

    def __call__(self) -> None:
        """Make the call, unless a thread has begun to make it; an exception is raised by the future."""
        with self._lock:
            call, self._call = self._call, None
        if call is None or not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # raised by the future, as a pool does
            self.future.set_exception(error)


def submit_or_run(pool: Workers, call: Callable[[], T]) -> Future[T]:
    """Make a call in a worker thread, or in this thread if no more threads can be started; return its future.

    No thread can be started where the process has reached its limit of threads, or is about to exit; a slow save is
    better than a lost one. The pool queues the call before it fails, so a running worker may take the call as well:
    whichever thread comes first makes it.
    """
    once = CallOnce(call)
    try:
        pool.submit(once)
    except RuntimeError:
        once()
    return once.future


class HelperThread:
    """Thread that makes blocking calls one after another, for one caller thread that must not block for ever.

    When the caller stops waiting, the thread is abandoned and ends when its call returns; the next call gets a new
    thread.
    """

    def __init__(self, name: str) -> None:
        """Store the name; no thread is started."""
        self._name = name
        self._idle: Workers | None = None  # with one thread, which waits for a call

    def run(self, call: Callable[[], T], look: Callable[[], None]) -> T:
        """Make a call in the helper thread, with the context variables of this one, and return its result.

        `look` is called twice a second during the wait; an exception from it ends the wait, after which the call goes
        on and must be harmless. RuntimeError: no thread can be started.
        """
        once, answered = CallOnce(partial(contextvars.copy_context().run, call)), OneTimeEvent()

        def make_call() -> None:
            once()
            answered.set()

        worker, self._idle = self._idle or Workers(1, self._name, delays_exit=False), None
        try:
            worker.submit(make_call)
            while not answered.wait(WAKE_SECONDS):
                look()
        except BaseException:
            worker.shutdown(wait=False)
            raise
        self._idle = worker
        return once.future.result()

    def close(self) -> None:
        """End the idle thread, if there is one."""
        worker, self._idle = self._idle, None
        if worker is not None:
            worker.shutdown(wait=False)


def in_parallel(call: Callable[[S], T], values: Sequence[S], *, threads: int = CALLS_IN_FLIGHT) -> list[T]:
    """Call a function with each value, some at a time; return the results in order, or raise an error at once."""
    if len(values) <= 1:
        return [call(value) for value in values]
    workers = Workers(threads, "dcp_remote-run")
    try:
        futures = [submit_or_run(workers, partial(call, value)) for value in values]
        wait_for(futures, return_when=FIRST_EXCEPTION)
        failed = [future for future in futures if future.done() and future.exception() is not None]
        return [future.result() for future in failed or futures]
    finally:
        workers.shutdown(wait=False)


class Cancellation:
    """Clock for the retries of one transfer: `cancel` expires the deadlines on it, and ends its pauses."""

    def __init__(self) -> None:
        """Begin uncancelled."""
        self._is_cancelled = threading.Event()
        self.clock = Clock(self._monotonic, self._is_cancelled.wait)

    def cancel(self) -> None:
        """Cancel all retries that use this clock."""
        self._is_cancelled.set()

    def _monotonic(self) -> float:
        return math.inf if self._is_cancelled.is_set() else time.monotonic()


@contextmanager
def begin_early(call: Callable[[Clock | None], T], *, at_once: bool) -> Iterator[Callable[[], T]]:
    """Make a call in another thread while a block runs; yield a function that waits for its result or raises its error.

    The call gets a clock, by which its deadlines expire with the block. Unless `at_once`, the call is made when the
    yielded function is called, and so perhaps never, and gets None, for the clock of the system.
    """
    if not at_once:
        yield partial(call, None)
        return
    cancellation = Cancellation()
    pool = Workers(1, "dcp_remote-early", delays_exit=False)
    try:
        yield submit_or_run(pool, partial(call, cancellation.clock)).result
    finally:
        cancellation.cancel()
        pool.shutdown(wait=False)
