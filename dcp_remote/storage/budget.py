"""How many requests at once a store takes from this host: what it refuses is offered less often.

A store that is asked for more than it gives answers a part of the requests with 503 ("SlowDown"), and repeating them
makes it worse. So every process keeps to a share of the requests that it would have under way, and all processes of one
user on a host that speak to one bucket have the same share. It goes down by the part of the requests that was refused,
which brings it to what the store takes in one step, and grows again by a tenth a second. Where few are refused, that is
no overload, and repeating them is all it needs.

The share and when it was last changed lie in a small file of the temporary folder. Nothing is counted there, so a
process that dies leaves nothing behind; two that write at once lose one of two steps. The file is read and written, and
not mapped: where somebody cuts it, or the disk is full, an access to mapped memory kills the process.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

# Of one process, at a full share: the pools of `uploads` and `downloads` together are hardly ever busy.
REQUESTS_MAX = 16

# A share is changed once in so long, and only after so many requests were answered.
_STEP_SECONDS = 1.0
_ANSWERS_MIN = 8

# A process looks at it so often: each look is three calls of the system, and so many waits for Python's lock.
_LOOK_SECONDS = 0.1

# From this part on, what is refused is too much.
REFUSED_MAX = 0.1

_GROWTH = 1.1
SHARE_MIN = 1 / REQUESTS_MAX

# Nobody waits longer for others: a share is a bound on what is begun in a second, and no lock that could be held.
WAIT_SECONDS_MAX = 2.0

# A refusal comes at once. What fails after longer was stalled or cut, which fewer requests do not cure.
REFUSAL_SECONDS_MAX = 5.0

_FORMAT = struct.Struct("=dd")  # the share, and when it was changed by the monotonic clock


class Shared:
    """A share, and when it was changed; for this process alone."""

    def __init__(self) -> None:
        """Nothing was written yet."""
        self._data = b""

    def read(self) -> bytes:
        """What was written last; empty at first."""
        return self._data

    def write(self, data: bytes) -> None:
        """Replace it."""
        self._data = data


class SharedFile(Shared):
    """A share for all processes that can open a file; where that fails, for this process alone.

    An error of the file system is logged, once for each file, and never raised: the share saves requests, and no save
    fails for want of it.

    Args:
        path: In a folder that nobody else can write to; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        """See the class."""
        super().__init__()
        self._path = path
        self._failed = False

    def read(self) -> bytes:
        """See `Shared.read`."""
        try:
            with self._opened() as descriptor:
                return os.pread(descriptor, _FORMAT.size, 0)
        except OSError as error:
            self._tell(error)
            return super().read()

    def write(self, data: bytes) -> None:
        """See `Shared.write`."""
        super().write(data)
        try:
            with self._opened() as descriptor:
                os.pwrite(descriptor, data, 0)
        except OSError as error:
            self._tell(error)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _tell(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            _tell_alone(error)


class RequestBudget:
    """The requests of this process to one bucket.

    Args:
        shared: What all processes see.
        clock: In seconds, one for all processes.
    """

    def __init__(self, shared: Shared, *, clock: Callable[[], float] = time.monotonic) -> None:
        """See the class."""
        self._shared = shared
        self._clock = clock
        # Never held across a call of the system: all requests of the process would queue up behind it.
        self._changed = threading.Condition()
        self._share = 1.0
        self._changed_seconds = -math.inf
        self._look_again_at = -math.inf
        self._step_again_at = -math.inf
        self._running = 0
        self._answered = 0
        self._refused = 0

    def share(self) -> float:
        """What of `REQUESTS_MAX` may be under way, in (0, 1]."""
        now_seconds = self._clock()
        if now_seconds >= self._look_again_at:
            self._look_again_at = now_seconds + _LOOK_SECONDS
            self._look()
        return self._share

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Around a request: waits for one of the others if there are too many, though never for long."""
        self.share()
        with self._changed:
            self._changed.wait_for(
                lambda: self._running < math.ceil(self._share * REQUESTS_MAX), timeout=WAIT_SECONDS_MAX
            )
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify()

    def note(self, *, refused: bool) -> None:
        """A request was answered, or refused."""
        now_seconds = self._clock()
        with self._changed:
            self._answered += 1
            self._refused += refused
            if self._answered < _ANSWERS_MIN or now_seconds < self._step_again_at:
                return
            # Others need not look meanwhile.
            self._step_again_at = now_seconds + _LOOK_SECONDS
        self._look()
        with self._changed:
            if self._answered < _ANSWERS_MIN or 0 <= now_seconds - self._changed_seconds < _STEP_SECONDS:
                return
            part = self._refused / self._answered
            self._answered = self._refused = 0
            next_share = self._share * (1 - part) if part > REFUSED_MAX else self._share * _GROWTH
            next_share = min(1.0, max(SHARE_MIN, next_share))
            if next_share == self._share:
                return
            self._share, self._changed_seconds = next_share, now_seconds
        self._shared.write(_FORMAT.pack(next_share, now_seconds))

    def _look(self) -> None:
        data = self._shared.read()
        share, changed_seconds = _FORMAT.unpack(data) if len(data) == _FORMAT.size else (1.0, 0.0)
        if changed_seconds > self._clock():
            changed_seconds = -math.inf  # of another time
        with self._changed:
            # Another thread may have changed it while this one was reading.
            if changed_seconds >= self._changed_seconds:
                # Nothing that somebody wrote there stops us.
                self._share = share if SHARE_MIN <= share <= 1 else 1.0
                self._changed_seconds = changed_seconds


def shared_budget(place: str) -> RequestBudget:
    """The budget of this user's processes on this host for a place such as an endpoint and a bucket.

    Where no file can be shared, the budget is this process's own, and a warning is logged.
    """
    try:
        folder = _folder()
    except OSError as error:
        _tell_alone(error)
        return RequestBudget(Shared())
    return RequestBudget(SharedFile(folder / f"requests-{hashlib.sha256(place.encode()).hexdigest()[:16]}"))


def _tell_alone(error: OSError) -> None:
    logger.warning(
        "the processes of this host cannot share how many requests the store takes; this process goes by its own "
        "requests alone: look at the temporary folder (TMPDIR). error=%s",
        error,
    )


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"dcp_remote-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError("somebody else made the folder")
    return folder
