"""A thread that waits in place of another, which looks meanwhile whether there is still something to wait for."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

# How often the thread that waits looks.
_LOOK_SECONDS = 0.5


class HelperThread:
    """Makes calls that may block for ever, one after another, for one thread that must not.

    A caller that stops waiting leaves the thread behind, which ends when its call returns; the next call gets another.

    Args:
        name: Of the threads.
    """

    def __init__(self, name: str) -> None:
        """See the class; no thread is started yet."""
        self._name = name
        # Of the thread that waits for the next call, if there is one.
        self._calls: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def run(self, call: Callable[[], T], look: Callable[[], None]) -> T:
        """Make a call in the thread, with the context variables of this one; what it returns, or raises.

        Args:
            call: Does no harm if it goes on when nobody waits for it any more.
            look: Called twice a second meanwhile; what it raises ends the waiting.

        Raises:
            RuntimeError: No thread can be started.
        """
        answer: Future[T] = Future()
        answered, context = threading.Event(), contextvars.copy_context()

        def act() -> None:
            try:
                answer.set_result(context.run(call))
            except BaseException as error:  # noqa: BLE001  # raised where it is waited for
                answer.set_exception(error)
            answered.set()

        calls, self._calls = self._calls, None
        try:
            if calls is None:
                calls = queue.SimpleQueue()
                threading.Thread(target=_serve, args=(calls,), name=self._name, daemon=True).start()
            calls.put(act)
            while not answered.wait(_LOOK_SECONDS):
                look()
        except BaseException:
            if calls is not None:
                calls.put(None)
            raise
        self._calls = calls
        return answer.result()

    def close(self) -> None:
        """End the thread that waits for the next call."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.put(None)


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # or what it holds would stay until the next
