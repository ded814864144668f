"""Python's lock, sooner: beside a thread of pure Python that never waits, whoever lets go of it waits long to get it.

A thread that wants the interpreter's lock asks its holder for it after the switch interval of the process, which is
5 ms (`sys.setswitchinterval`). An upload asks for it a few times a shard: beside such a thread most of its time would
be these waits (1.15 GiB on loopback: 0.76 s; with 1 ms 0.52, with 0.2 ms 0.49, beside a busy process 0.47). A training
loop on torch made as many steps with the one as with the other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Handing it over takes some 10 us.
_SWITCH_SECONDS = 0.001

_lock = threading.Lock()
_users = 0
_before_seconds = 0.0
_set_seconds = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """While a block runs, no thread of this process keeps the lock for longer than 1 ms from one that wants it.

    Of several blocks the first sets the interval, and the last sets it back. One that is shorter already is left alone,
    and so is what somebody else has set meanwhile.
    """
    global _users, _before_seconds, _set_seconds  # noqa: PLW0603  # as the interval is: one for the process
    with _lock:
        if not _users:
            _before_seconds = sys.getswitchinterval()
            if _before_seconds > _SWITCH_SECONDS:
                _set(_SWITCH_SECONDS)
            _set_seconds = sys.getswitchinterval()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and sys.getswitchinterval() == _set_seconds != _before_seconds:
                _set(_before_seconds)


def _set(seconds: float) -> None:
    # It counts in whole microseconds, and rounds down what it has given itself.
    sys.setswitchinterval(seconds + 0.5e-6)
