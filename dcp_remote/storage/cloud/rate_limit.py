"""Adaptive limit of concurrent requests, shared by the processes of one user on a host that use the same bucket.

A store that is offered more than its capacity answers some requests with 503 ("SlowDown"), and retries add to the load.
Every process therefore keeps to a share of its maximum number of concurrent requests, the same share in all processes.
The share is reduced by the fraction of requests that were refused, which reaches the store's capacity in one step, and
grows by a tenth per second. If only a few requests are refused, that is no overload, and retries are enough.

The share and the time of its last change lie in a small file in the temporary folder. The file holds no counters, so a
process that dies leaves nothing to clean up; of two concurrent changes one is lost. The file is read and written, not
mapped: if it is truncated, or the disk is full, an access to mapped memory would kill the process.
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

# Concurrent requests of one process at a full share: more than the upload and download pools together usually need.
REQUESTS_MAX = 16

# A share changes at most once per interval, and after a minimum of answers.
_STEP_SECONDS = 1.0
_ANSWERS_MIN = 8

# Interval in which a process reads the file: each read is three system calls, which each release the GIL.
_READ_SECONDS = 0.1

# Fraction of refused requests above which the store is overloaded.
REFUSED_MAX = 0.1

_GROWTH = 1.1
SHARE_MIN = 1 / REQUESTS_MAX

# Longest wait for a slot: the limit slows requests down, and a slot that is never released must not block others.
WAIT_SECONDS_MAX = 2.0

# Failures within this time are refusals. Later ones are stalled or broken requests, which fewer requests do not cure.
REFUSAL_SECONDS_MAX = 5.0

_FORMAT = struct.Struct("=dd")  # share, and time of its last change by the monotonic clock


class LocalShare:
    """Share and time of its last change, packed, in the memory of this process."""

    def __init__(self) -> None:
        """Begin empty."""
        self._data = b""

    def read(self) -> bytes:
        """Return the bytes written last; empty at first."""
        return self._data

    def write(self, data: bytes) -> None:
        """Replace the bytes."""
        self._data = data


class ShareFile(LocalShare):
    """Share in a file, for all processes that can open the file; if that fails, in the memory of this process.

    An error of the file system is logged once per file and never raised: the share saves requests, and a save must not
    fail because of it.

    Args:
        path: Path in a folder that no other user can write to; the file is created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        """Store the path; the file is not opened."""
        super().__init__()
        self._path = path
        self._has_warned = False

    def read(self) -> bytes:
        """Implement `LocalShare.read`."""
        try:
            with self._open() as descriptor:
                return os.pread(descriptor, _FORMAT.size, 0)
        except OSError as error:
            self._warn_once(error)
            return super().read()

    def write(self, data: bytes) -> None:
        """Implement `LocalShare.write`."""
        super().write(data)
        try:
            with self._open() as descriptor:
                os.pwrite(descriptor, data, 0)
        except OSError as error:
            self._warn_once(error)

    @contextmanager
    def _open(self) -> Iterator[int]:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _warn_once(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _warn_not_shared(error)


class AdaptiveRequestLimit:
    """Limit of the concurrent requests of this process to one bucket. Safe to use from many threads.

    Args:
        storage: Storage of the share, common to all processes.
        clock: Monotonic clock in seconds, common to all processes.
    """

    def __init__(self, storage: LocalShare, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Store the arguments; the share is full until it is read."""
        self._storage = storage
        self._clock = clock
        # Never held during a system call, which would queue all requests of the process behind it.
        self._changed = threading.Condition()
        self._share = 1.0
        self._changed_seconds = -math.inf
        self._read_again_at = -math.inf
        self._step_again_at = -math.inf
        self._running = 0
        self._answered = 0
        self._refused = 0

    def share(self) -> float:
        """Return the fraction of `REQUESTS_MAX` that may be in flight, in (0, 1]."""
        now_seconds = self._clock()
        if now_seconds >= self._read_again_at:
            self._read_again_at = now_seconds + _READ_SECONDS
            self._read_share()
        return self._share

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one of the concurrent requests; wait for a free one, at most `WAIT_SECONDS_MAX`."""
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

    def record_answer(self, *, refused: bool) -> None:
        """Note that a request was answered or refused, and change the share if it is time to."""
        now_seconds = self._clock()
        with self._changed:
            self._answered += 1
            self._refused += refused
            if self._answered < _ANSWERS_MIN or now_seconds < self._step_again_at:
                return
            # Keeps other threads from reading the file at the same time.
            self._step_again_at = now_seconds + _READ_SECONDS
        self._read_share()
        with self._changed:
            if self._answered < _ANSWERS_MIN or 0 <= now_seconds - self._changed_seconds < _STEP_SECONDS:
                return
            refused_fraction = self._refused / self._answered
            self._answered = self._refused = 0
            factor = 1 - refused_fraction if refused_fraction > REFUSED_MAX else _GROWTH
            next_share = min(1.0, max(SHARE_MIN, self._share * factor))
            if next_share == self._share:
                return
            self._share, self._changed_seconds = next_share, now_seconds
        self._storage.write(_FORMAT.pack(next_share, now_seconds))

    def _read_share(self) -> None:
        data = self._storage.read()
        share, changed_seconds = _FORMAT.unpack(data) if len(data) == _FORMAT.size else (1.0, 0.0)
        if changed_seconds > self._clock():
            changed_seconds = -math.inf  # written before the host was restarted
        with self._changed:
            # Another thread may have changed the share after this one read the file.
            if changed_seconds >= self._changed_seconds:
                # Any bytes may stand in the file: what is no valid share counts as a full one.
                self._share = share if SHARE_MIN <= share <= 1 else 1.0
                self._changed_seconds = changed_seconds


def shared_request_limit(name: str) -> AdaptiveRequestLimit:
    """Return the limit that this user's processes on this host share under a name.

    If no file can be shared, the limit is this process's own, and a warning is logged.

    Args:
        name: Text that identifies the bucket, such as endpoint and bucket name.
    """
    try:
        folder = _make_folder()
    except OSError as error:
        _warn_not_shared(error)
        return AdaptiveRequestLimit(LocalShare())
    return AdaptiveRequestLimit(ShareFile(folder / f"requests-{hashlib.sha256(name.encode()).hexdigest()[:16]}"))


def _warn_not_shared(error: OSError) -> None:
    logger.warning(
        "The processes of this host cannot share their request limit; this process adapts to refusals of its own "
        "requests only. Check the temporary folder (TMPDIR). error=%s",
        error,
    )


def _make_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"dcp_remote-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a folder that only this user can write to; remove it")
    return folder
