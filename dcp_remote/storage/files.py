"""What `LocalStore` needs of POSIX: temporaries, names, locks, syncs, and errors by errno."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from dcp_remote.errors import (
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import Buffer, Version

# How many buffers one writev(2) takes: 1,024 on Linux.
_WRITEV_BUFFERS_MAX = os.sysconf("SC_IOV_MAX")

# Wider than a tick of the kernel's file clock (1 to 10 ms), within which two files can get equal time stamps.
_STAMP_SPREAD_NS = 10_000_000

# How far a time stamp must move to be kept as different: by ext4, NTFS, old NFS servers, HFS+ and FAT.
_STAMP_STEPS_NS = (1, 100, 1_000_000, 1_000_000_000, 2_000_000_000)

# Held for a rename, microseconds. Who waits as long as this waits for a process that is stopped.
_LOCK_WAIT_SECONDS_MAX = 30.0
_LOCK_POLL_SECONDS = (0.0002, 0.02)  # the first pause, and the longest

# Where locks cannot tell a living writer from a dead one. No put takes a day.
_STALE_TEMPORARY_SECONDS = 24 * 3600.0


def version_of(status: os.stat_result) -> Version:
    """The identity of a file's content; see `Temporary` for why it never comes back.

    Not of the change time: that moves when a stale temporary's name is removed, or a backup makes a hard link.
    """
    return Version(etag=f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"')


class Temporary:
    """A whole, synced file that is about to get its name; removed on leaving the `with`.

    Its version (inode, modification time, size) must differ from that of every earlier object of the name, also if the
    content is the same, the inode is used again and the clock has not moved. So the time is ours to set: of a file that
    replaces another it is greater than the other's, always; of one that is created it is the file system's clock plus
    a random number of nanoseconds within a tick, so that create, delete, create in one tick on one inode repeat a
    version once in ten million times.

    While it is open its writer holds a lock on it, by which `sweep_temporaries` knows the dead from the living.

    Raises:
        OSError: As the kernel gave it; nothing is left behind.
    """

    def __init__(self, path: str, buffers: Sequence[Buffer]) -> None:
        """Write and sync."""
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._mark_as_alive()
            _write_all(self._descriptor, buffers)
            now_ns = os.fstat(self._descriptor).st_mtime_ns
            self._stamp(now_ns + secrets.randbelow(_STAMP_SPREAD_NS))
            os.fsync(self._descriptor)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        """As a context manager."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it and remove its temporary name."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    @property
    def version(self) -> Version:
        """The version of the object that it becomes."""
        return version_of(self._status)

    def link(self, path: str) -> bool:
        """Give it the name `path`; False if that name is taken. Of many writers exactly one is told True.

        Raises:
            FileNotFoundError: The folder of `path` does not exist.
        """
        try:
            os.link(self._path, path)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                taken_by = os.stat(path)
                if stat.S_ISDIR(taken_by.st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path) from None
                # An NFS server that answered, and was asked again because its answer was lost, finds its own work.
                return os.path.samestat(taken_by, self._status)
            return False
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise OSError(errno.EOPNOTSUPP, "link(2) is not supported here") from error
            raise
        return True

    def rename_over(self, path: str, *, replaced: os.stat_result) -> None:
        """Give it the name of `replaced`, of which the caller holds the lock."""
        if self._status.st_mtime_ns <= replaced.st_mtime_ns:
            for step_ns in _STAMP_STEPS_NS:
                self._stamp(replaced.st_mtime_ns + step_ns)
                if self._status.st_mtime_ns > replaced.st_mtime_ns:
                    break
            else:
                raise OSError(errno.EOPNOTSUPP, "the file system keeps no usable modification times")
            os.fsync(self._descriptor)
        os.replace(self._path, path)

    def check_not_lost(self) -> None:
        """Raise if somebody removed it before it got a name.

        Raises:
            OSError: ESTALE, so that the write is tried again from the start.
        """
        if os.fstat(self._descriptor).st_nlink == 0:
            raise OSError(errno.ESTALE, "the temporary file was removed")

    def close(self) -> None:
        """Release it for others to replace. Safe to call again."""
        if self._descriptor < 0:
            return
        # Said aloud, for a process forked meanwhile (a data loader's worker) holds this lock through its copy.
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def _mark_as_alive(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            swept = os.fstat(self._descriptor).st_nlink == 0
        except BlockingIOError:
            swept = True  # a sweeper came between the two calls, and is about to remove it
        except OSError:
            swept = False  # a network file system without locks, where the sweeper goes by age
        if swept:
            raise FileNotFoundError(errno.ENOENT, "swept before it was locked", self._path)

    def _stamp(self, modified_ns: int) -> None:
        os.utime(self._descriptor, ns=(modified_ns, modified_ns))
        self._status = os.fstat(self._descriptor)  # what the file system kept of it


def _write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    """Write buffers one after another without joining them; the kernel may take a part of them at a time."""
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    first = 0
    while first < len(views):
        batch = views[first : first + _WRITEV_BUFFERS_MAX]
        written = os.writev(descriptor, batch)
        for view in batch:
            if written < len(view):
                views[first] = view[written:]
                break
            written -= len(view)
            first += 1


@contextlib.contextmanager
def locked(path: str, *, writable: bool) -> Iterator[os.stat_result]:
    """Hold the file that has the name `path`: nobody else replaces it or removes the name meanwhile.

    Excludes threads and processes. Nothing stays behind, also if the process is killed.

    Args:
        path: The file.
        writable: Open it for writing, which locks on NFS need and on a local disk others' files may refuse.

    Raises:
        FileNotFoundError: Nothing has that name.
        TimeoutError: Somebody has held it for longer than a living process would.
    """
    descriptor, status = _lock(path, writable=writable)
    try:
        yield status
    finally:
        _unlock(descriptor)


def _lock(path: str, *, writable: bool) -> tuple[int, os.stat_result]:
    give_up = time.monotonic() + _LOCK_WAIT_SECONDS_MAX
    pause, pause_max = _LOCK_POLL_SECONDS
    flags = os.O_CLOEXEC | os.O_NONBLOCK | (os.O_RDWR if writable else os.O_RDONLY)
    while True:
        descriptor = os.open(path, flags)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            # Polled, not waited for: a process that was stopped with the lock in hand must not hang this one.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It may have lost its name while we waited; the number cannot be another file's while this one is open.
            if os.path.samestat(status, os.stat(path)):
                return descriptor, os.fstat(descriptor)
        except BlockingIOError:
            if time.monotonic() > give_up:
                _unlock(descriptor)
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock", path) from None
        except BaseException:
            _unlock(descriptor)
            raise
        _unlock(descriptor)
        time.sleep(pause)
        pause = min(pause * 2, pause_max)


def _unlock(descriptor: int) -> None:
    # Said aloud for the sake of forked processes; see `Temporary.close`.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def sweep_temporaries(folder: str, *, trust_locks: bool) -> None:
    """Remove the temporaries of writers that died. Best effort: what fails now is tried by the next process.

    Args:
        folder: Holds nothing but temporaries.
        trust_locks: A file that nobody locks has no writer. False where locks may not be seen by all hosts: then only
            what is a day old is removed.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                _remove_if_stale(entry.path, trust_locks=trust_locks)


def _remove_if_stale(path: str, *, trust_locks: bool) -> None:
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        return
    if not trust_locks:
        if time.time() - status.st_mtime > _STALE_TEMPORARY_SECONDS:
            os.unlink(path)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under the lock: a writer that has made its file, and not locked it yet, must not take it for its own now.
        os.unlink(path)
    except BlockingIOError:
        return
    finally:
        _unlock(descriptor)


# Each is a deleter that came between two system calls.
_FOLDER_RACES_MAX = 100


def make_folders(path: str) -> None:
    """Make a folder and those above it that are missing, each synced into the one above. Safe in a race.

    Raises:
        NotADirectoryError: A file is in the way.
        OSError: The file system makes no folders there.
    """
    races = 0
    while not os.path.isdir(path):
        try:
            os.mkdir(path)
        except FileNotFoundError:
            # Somebody removed the one above, or the file system makes no folders: /proc says so with this errno, too.
            races += 1
            if races > _FOLDER_RACES_MAX:
                raise OSError(errno.EOPNOTSUPP, "no folder can be made here", path) from None
            make_folders(os.path.dirname(path))
        except FileExistsError:
            # One look: between two, a deleter may remove the folder that was in the way.
            with contextlib.suppress(FileNotFoundError):
                mode = os.lstat(path).st_mode
                if not stat.S_ISDIR(mode) and not os.path.isdir(path):
                    raise NotADirectoryError(errno.ENOTDIR, "a file is where a folder must be", path) from None
        else:
            _sync_folder(os.path.dirname(path))


def sync_folders(folder: str, *, down_from: str) -> None:
    """Make the names in `folder`, and it itself, survive a crash.

    All the way from the root: a folder that was there already may be another writer's, a moment old.
    """
    while True:
        _sync_folder(folder)
        if folder == down_from:
            return
        folder = os.path.dirname(folder)


def _sync_folder(folder: str) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        # Gone, so the object was deleted since and has nothing to survive; or above the root, and not ours to open.
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems write names through, and know no sync of folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


_DISK_FULL = "The disk is full, or the quota used up: free space, or save elsewhere."
_DENIED = "The folder or the file refuses this user: fix its owner or mode, or whether it is mounted read-only."
_BUSY = "The file system did not answer, or ran out of something, for now."

# An errno that is not here is a `StorageError` in the kernel's words. EIO too: a disk that failed fails again, and
# repeating the request for half an hour would only hide it.
_ERRORS: dict[int, tuple[type[DcpRemoteError], str]] = {
    errno.ENOENT: (ObjectNotFoundError, "There is no such object."),
    errno.ENOSPC: (StorageError, _DISK_FULL),
    errno.EDQUOT: (StorageError, _DISK_FULL),
    errno.EFBIG: (StorageError, "The file is larger than this file system, or the process's limit (ulimit -f), takes."),
    errno.EACCES: (PermissionDeniedError, _DENIED),
    errno.EPERM: (PermissionDeniedError, _DENIED),
    errno.EROFS: (PermissionDeniedError, _DENIED),
    errno.EISDIR: (StorageError, "A folder has this name: a file system cannot keep an object `a` and another `a/b`."),
    errno.ENOTDIR: (StorageError, "A file has the name of a folder: it cannot keep an object `a` and another `a/b`."),
    errno.ENAMETOOLONG: (InvalidArgumentError, "The name is too long for this file system."),
    errno.EXDEV: (StorageError, "Another file system is mounted below the root: open the store at that folder."),
    errno.EOPNOTSUPP: (StorageError, "This file system cannot create an object exactly once: save elsewhere."),
    **dict.fromkeys(
        (
            errno.EINTR,
            errno.EAGAIN,
            errno.EBUSY,
            errno.ENOMEM,
            errno.ENOBUFS,
            errno.EMFILE,
            errno.ENFILE,
            errno.ENOLCK,
            errno.ESTALE,
            errno.ETIMEDOUT,
            errno.ECONNRESET,
            errno.ECONNREFUSED,
            errno.EHOSTDOWN,
            errno.EHOSTUNREACH,
            errno.ENETDOWN,
            errno.ENETUNREACH,
        ),
        (TransientStorageError, _BUSY),
    ),
}


@contextlib.contextmanager
def translated(verb: str, *, key: str, url: str) -> Iterator[None]:
    """Turn the kernel's errors into ours."""
    try:
        yield
    except DcpRemoteError:
        raise  # some of ours are OSErrors too
    except OSError as error:
        raise storage_error(error, verb=verb, key=key, url=url) from error


def storage_error(error: OSError, *, verb: str, key: str, url: str) -> DcpRemoteError:
    """The error of ours that says what an errno means for a store."""
    number = error.errno or 0
    kind, what = _ERRORS.get(number, (StorageError, "The file system failed."))
    if verb == "put" and number == errno.ENOENT:
        kind, what = TransientStorageError, "A folder was removed while an object was written into it."
    # Of what is only looked at: below a file there is no object, a folder is none, a name too long has none.
    if verb != "put" and number in (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG):
        kind, what = _ERRORS[errno.ENOENT]
    return kind(what, verb=verb, key=key, url=url, cause=error)
