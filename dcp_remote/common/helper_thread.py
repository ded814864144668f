"""A helper thread for calls that may block for ever, while the caller checks whether to go on waiting."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from dcp_remote.common.threads import OneTimeEvent

T = TypeVar("T")

# Interval at which the caller checks whether to go on waiting.
_CHECK_SECONDS = 0.5


class HelperThread:
    """Thread that makes blocking calls one after another, for one caller thread that must not block for ever.

    When the caller stops waiting, the thread is abandoned and ends when its call returns; the next call gets a new
    thread.
    """

    def __init__(self, name: str) -> None:
        """Store the name; no thread is started."""
        self._name = name
        # Queue of the idle thread; None if there is no such thread.
        self._calls: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def run(self, call: Callable[[], T], look: Callable[[], None]) -> T:
        """Make a call in the helper thread, with the context variables of this one, and return its result.

        `look` is called twice a second during the wait; an exception from it ends the wait, after which the call goes
        on and must be harmless. RuntimeError: no thread can be started.
        """
        answer: Future[T] = Future()
        answered, context = OneTimeEvent(), contextvars.copy_context()

        def make_call() -> None:
            try:
                answer.set_result(context.run(call))
            except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
                answer.set_exception(error)
            answered.set()

        calls, self._calls = self._calls, None
        try:
            if calls is None:
                calls = queue.SimpleQueue()
                threading.Thread(target=_serve, args=(calls,), name=self._name, daemon=True).start()
            calls.put(make_call)
            while not answered.wait(_CHECK_SECONDS):
                look()
        except BaseException:
            if calls is not None:
                calls.put(None)
            raise
        self._calls = calls
        return answer.result()

    def close(self) -> None:
        """End the idle thread, if there is one."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.put(None)


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # Else the memory that the call refers to would be held until the next call.
