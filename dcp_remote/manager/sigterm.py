"""Handler of SIGTERM of this process, which calls all listeners."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class Sigterm:
    """Handler of SIGTERM: one for all listeners, installed from the first listener to the last.

    The handler runs between any two instructions of the main thread, which may hold any lock: so neither the handler
    nor a listener takes a lock or logs.

    The handler before goes on as far as it does not end the process: a handler of the user's own, in Python, is called
    as well, after the listeners. A signal that was ignored has listeners all the same: a launcher that ignores it, as
    after `trap '' TERM` in a shell, wants to outlive the signal, not to keep it from its children.

    A child that is forked has no listeners: SIGTERM does there what it did before, until the child adds its own. No
    signal that is sent to the child is lost, however early.
    """

    def __init__(self) -> None:
        """Begin without listeners; SIGTERM does what it did before."""
        # Changed in one instruction: other threads may remove a listener while the handler runs.
        self._listeners: set[Callable[[], None]] = set()
        self._before: Callable[[int, FrameType | None], object] | int | None = signal.SIG_DFL
        self._is_calling_before = False
        self._forking = threading.local()
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
        )

    def __contains__(self, listener: object) -> bool:
        """Return whether a function is a listener."""
        return listener in self._listeners

    def add(self, listener: Callable[[], None]) -> None:
        """Call a function at each signal from now on; called in the main thread."""
        self._listeners.add(listener)
        if not self._is_installed():
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def remove(self, listener: Callable[[], None]) -> None:
        """Stop calling a function; after the last listener, SIGTERM does what it did before.

        Only the main thread may put the former handler back. In another thread this handler stays, and passes signals
        on.
        """
        self._listeners.discard(listener)
        if not self._listeners and threading.current_thread() is threading.main_thread():
            self._put_back()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        listeners = tuple(self._listeners)
        for listener in listeners:
            listener()
        if callable(self._before):
            # A former handler that was installed on top of this one calls this one: without a check, for ever.
            if not self._is_calling_before:
                self._is_calling_before = True
                try:
                    self._before(number, frame)
                finally:
                    self._is_calling_before = False
        elif not listeners and self._is_installed():  # otherwise another handler has called this one, and decides
            self._put_back()
            os.kill(os.getpid(), signal.SIGTERM)

    def _is_installed(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _put_back(self) -> None:
        if self._is_installed():  # otherwise another handler was installed in its place
            before, self._before = self._before, signal.SIG_DFL
            # None is a handler that is not Python's.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    def _before_fork(self) -> None:
        # A signal that reaches the child before Python is ready there would be forgotten. Blocked, it waits.
        self._forking.mask = None
        if self._is_installed():
            self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def _after_fork(self) -> None:
        if self._forking.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _after_fork_in_child(self) -> None:
        self._listeners.clear()
        self._put_back()
        self._after_fork()


SIGTERM = Sigterm()
