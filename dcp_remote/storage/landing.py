"""Memory that is read into, and its owner, who may want it back before every request has ended.

A request cannot be called off: a store may be silent for half a minute, or send a byte now and then for two, and
obstore waits as long. But it writes nothing into the memory meanwhile. So whoever gives up waits only for threads that
may be writing, which see it soon, and of the others none will.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dcp_remote.errors import StorageError


class _Own(threading.local):
    """Of each thread: what it reads into."""

    landing: Landing | None = None


_own = _Own()


class Landing:
    """Where the threads of one load read to."""

    def __init__(self) -> None:
        """Open."""
        self._changed = threading.Condition()
        self._writing = 0
        self._waiting = 0
        self._closed = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Around everything that one thread reads into it.

        Raises:
            StorageError: It is closed.
        """
        self._count(writing=1)
        _own.landing = self
        try:
            self.require_open()
            yield
        finally:
            _own.landing = None
            self._count(writing=-1)

    def close(self) -> bool:
        """Take it back: when this returns, nobody writes into it, and nobody will.

        Returns:
            Whether threads are left that wait for requests.
        """
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._writing)
            return self._waiting > 0

    @property
    def closed(self) -> bool:
        """Whether it was taken back."""
        return self._closed

    def require_open(self) -> None:
        """For a thread that is about to write.

        Raises:
            StorageError: It is closed.
        """
        if self._closed:
            raise StorageError("What was to be read is not wanted any more.")

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Around what a thread does in `used` without writing into it; see `nothing_lands`."""
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
def nothing_lands() -> Iterator[None]:
    """Around a wait of this thread in which nothing is written into what it was given to read into.

    Raises:
        StorageError: At the end: it was taken back meanwhile.
    """
    landing = _own.landing
    if landing is None:
        yield
        return
    with landing.left_alone():
        yield


def is_wanted() -> bool:
    """Whether what this thread reads into has not been taken back."""
    return _own.landing is None or not _own.landing.closed


def require_wanted() -> None:
    """While this thread writes, now and then.

    Raises:
        StorageError: What it reads into is wanted back.
    """
    if _own.landing is not None:
        _own.landing.require_open()
