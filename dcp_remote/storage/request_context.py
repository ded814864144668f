"""Context of a request: its time limit, which helper threads get too, and the lease of the buffer that it fills.

A store that does not answer may block a request for half a minute, long past a deadline. A pending request cannot be
cancelled, but it writes nothing into its buffer until bytes arrive. So a caller that gives up can reclaim its buffers
after waiting only for threads that may be writing; these check the lease often.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from dcp_remote.errors import StorageError

# A context variable: a thread that sends a request for another one runs in a copy of that thread's context.
_seconds_left: ContextVar[Callable[[], float] | None] = ContextVar("dcp_remote_seconds_left", default=None)


class _ThreadState(threading.local):
    """Lease of the buffer that each thread reads into; None outside of a load.

    Not a context variable: a lease counts threads, and a helper thread writes into memory of its own.
    """

    lease: BufferLease | None = None


_thread_state = _ThreadState()


@contextmanager
def limit_requests(left: Callable[[], float]) -> Iterator[None]:
    """Limit the requests of this context to `left()` seconds while a block runs; of nested blocks the inner counts."""
    token = _seconds_left.set(left)
    try:
        yield
    finally:
        _seconds_left.reset(token)


def remaining_seconds() -> float:
    """Return the time limit of this context's requests in seconds; infinite if there is none."""
    seconds_left = _seconds_left.get()
    return math.inf if seconds_left is None else seconds_left()


def rounded_up(seconds: float) -> float:
    """Round a time limit up, to at least 1 s and one of four values per power of two.

    Each limit needs a client of its own, so few values must serve all requests.
    """
    if math.isinf(seconds):
        return seconds
    step = 2.0 ** (math.floor(math.log2(max(1.0, seconds))) - 2)
    return max(1.0, math.ceil(seconds / step) * step)


class BufferLease:
    """Permission of the threads of one load to write into its buffers, until the load closes the lease.

    Lets a load reclaim its buffers while requests are still pending.
    """

    def __init__(self) -> None:
        """Begin open, used by no thread."""
        self._changed = threading.Condition()
        self._writing = 0  # threads that may be writing
        self._waiting = 0  # threads that wait for a store, and do not write
        self.closed = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let this thread read into the buffers while a block runs; refused once the lease is closed."""
        self._count(writing=1)
        _thread_state.lease = self
        try:
            self.require_open()
            yield
        finally:
            _thread_state.lease = None
            self._count(writing=-1)

    def close(self) -> bool:
        """Close the lease, and wait until no thread writes into the buffers; none will from then on.

        Return True if threads are left that wait for a store.
        """
        with self._changed:
            self.closed = True
            self._changed.wait_for(lambda: not self._writing)
            return self._waiting > 0

    def require_open(self) -> None:
        """Raise `StorageError` if the lease is closed."""
        if self.closed:
            raise StorageError("The read was given up, and its buffers belong to the caller again.")

    @contextmanager
    def allow_close(self) -> Iterator[None]:
        """Let the lease be closed at once while a block runs, in which this thread writes nothing into the buffers.

        Raise after the block if the lease was closed meanwhile.
        """
        self._count(writing=-1, waiting=1)
        try:
            yield
        finally:
            self._count(writing=1, waiting=-1)
        self.require_open()

    def _count(self, *, writing: int, waiting: int = 0) -> None:
        with self._changed:
            self._writing += writing
            self._waiting += waiting
            self._changed.notify_all()


@contextmanager
def writes_nothing() -> Iterator[None]:
    """Mark a wait of this thread in which it writes nothing into its buffer, so that a load need not wait for it.

    Raise after the block if the lease of the buffer was closed meanwhile.
    """
    lease = _thread_state.lease
    with lease.allow_close() if lease is not None else nullcontext():
        yield


def may_write() -> bool:
    """Return whether this thread may still write into its buffer."""
    return _thread_state.lease is None or not _thread_state.lease.closed


def require_may_write() -> None:
    """Raise if the lease of this thread's buffer was closed; called often while it writes."""
    if _thread_state.lease is not None:
        _thread_state.lease.require_open()
