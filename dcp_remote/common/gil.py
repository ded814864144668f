"""Lower GIL switch interval while bytes move, so that busy Python threads delay transfers less.

A thread that needs the GIL asks its holder for it after the switch interval of the process, by default 5 ms
(`sys.setswitchinterval`). An upload needs the GIL a few times per shard, and beside a thread of pure Python that never
waits, most of its time would be these waits: 1.15 GiB on loopback took 0.76 s; with 1 ms 0.52, with 0.2 ms 0.49, and
beside a busy process 0.47. A training loop on torch made as many steps with either interval.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Handing the GIL over takes some 10 us, so 1 ms costs about 1%.
_SWITCH_SECONDS = 0.001

_lock = threading.Lock()
_users = 0
_before_seconds = 0.0
_set_seconds = 0.0


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Lower the GIL switch interval of the process to 1 ms while a block runs.

    Of concurrent blocks the first sets the interval, and the last restores it. An interval that is shorter already is
    kept, and so is one that other code has set meanwhile.
    """
    global _users, _before_seconds, _set_seconds  # noqa: PLW0603  # a process has one interval
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
    # Python keeps whole microseconds and rounds down, also an interval that it has returned itself.
    sys.setswitchinterval(seconds + 0.5e-6)
