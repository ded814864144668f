"""POSIX operations of `LocalStore`: temporary files, names, locks, syncs, and errors by errno."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline, RetryPolicy
from dcp_remote.errors import (
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import Version
from dcp_remote.storage.request_context import remaining_seconds

# Most buffers that one writev(2) takes: 1,024 on Linux.
_WRITEV_BUFFERS_MAX = os.sysconf("SC_IOV_MAX")

# Wider than a tick of the kernel's file clock (1 to 10 ms), within which two files can get equal time stamps.
_STAMP_SPREAD_NS = 10_000_000

# Steps of time stamps, in nanoseconds: of local file systems, and of servers whose resolution is coarser.
_STAMP_STEPS_NS = (1, 1_000_000_000)

# A lock is held for the microseconds of a rename, so after this time its holder is a process that was stopped.
_LOCK_WAIT_SECONDS_MAX = 30.0
_LOCK_POLLING = RetryPolicy(first_delay_seconds=0.0002, delay_seconds_max=0.02)

# Age from which a temporary is stale where locks cannot show whether its writer lives. No put takes a day.
_STALE_TEMPORARY_SECONDS = 24 * 3600.0


def version_of(status: os.stat_result) -> Version:
    """Return the identity of a file's content; `Temporary` ensures that no later file of that name has it again.

    The change time is no part of it, since it moves when a stale temporary's name is removed, or a backup makes a hard
    link.
    """
    return Version(etag=f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"')


class Temporary:
    """Complete, synced file that waits for its name; its temporary name is removed at the end of the `with` block.

    Its version (inode, modification time, size) must differ from that of every earlier object of the same name, even if
    the content is equal, the inode is reused and the clock has not moved. So the modification time is set explicitly: a
    file that replaces another always gets a later time than that one; a new file gets the file system's clock plus a
    random number of nanoseconds within a tick, so that create, delete, create in one tick on one inode repeat a version
    once in ten million times.

    Until it is closed, its writer holds a lock on it, which tells `sweep_temporaries` that the writer is alive. If the
    kernel refuses the file, nothing is left behind.
    """

    def __init__(self, path: str, buffers: Sequence[Buffer]) -> None:
        """Create, lock, write and sync the file."""
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._mark_as_alive()
            _write_all(self._descriptor, buffers)
            now_ns = os.fstat(self._descriptor).st_mtime_ns
            self._stamp(now_ns + secrets.randbelow(_STAMP_SPREAD_NS))
            os.fsync(self._descriptor)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file and remove its temporary name."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    @property
    def version(self) -> Version:
        """Version of the object that the file becomes."""
        return version_of(self._status)

    def link(self, path: str) -> bool:
        """Name the file `path`, in a folder that exists; return False if that name is taken.

        Of many writers exactly one gets True.
        """
        try:
            os.link(self._path, path)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                taken_by = os.stat(path)
                if stat.S_ISDIR(taken_by.st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path) from None
                # If an answer of an NFS server is lost, the repeated request finds the name made by the first one.
                return os.path.samestat(taken_by, self._status)
            return False
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise OSError(errno.EOPNOTSUPP, "link(2) is not supported here") from error
            raise
        return True

    def rename_over(self, path: str, *, replaced: os.stat_result) -> None:
        """Rename the file over `replaced`, which the caller has locked."""
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
        """Raise ESTALE, so that the write is repeated from the start, if another process has removed the file."""
        if os.fstat(self._descriptor).st_nlink == 0:
            raise OSError(errno.ESTALE, "the temporary file was removed")

    def close(self) -> None:
        """Unlock and close the file, so that others may replace it. Safe to call again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _unlock(descriptor)

    def _mark_as_alive(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            swept = os.fstat(self._descriptor).st_nlink == 0
        except BlockingIOError:
            swept = True  # a sweeper locked it first, and is about to remove it
        except OSError:
            swept = False  # a network file system without locks, where sweepers go by age
        if swept:
            raise FileNotFoundError(errno.ENOENT, "swept before it was locked", self._path)

    def _stamp(self, modified_ns: int) -> None:
        os.utime(self._descriptor, ns=(modified_ns, modified_ns))
        self._status = os.fstat(self._descriptor)  # with the time as the file system has rounded it


def _write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    """Write buffers one after another without joining them; one writev(2) may write a part of them."""
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
    """Lock the file that is named `path`, so that no other thread or process replaces or removes it in the block.

    Yields the status of the file. If the process is killed, the kernel releases the lock. `writable` opens the file for
    writing, which locks on NFS need, and which other users' files on a local disk may refuse. A lock that is held, or a
    file that is replaced each time, for `_LOCK_WAIT_SECONDS_MAX` or until the caller's deadline is a TimeoutError.
    """
    deadline = Deadline(min(_LOCK_WAIT_SECONDS_MAX, remaining_seconds()))
    flags = os.O_CLOEXEC | os.O_NONBLOCK | (os.O_RDWR if writable else os.O_RDONLY)
    for pause_seconds in _LOCK_POLLING.growing_delays():
        descriptor, is_locked = os.open(path, flags), False
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            # Polled, since a process that was stopped while it held the lock must not block this one for ever.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file may have lost its name meanwhile. Its inode is not reused while it is open.
            is_locked = os.path.samestat(status, os.stat(path))
            if is_locked:
                yield os.fstat(descriptor)
                return
            obstacle = "the object was replaced by another process each time"
        except BlockingIOError:
            if is_locked:
                raise  # from the block
            obstacle = "another process holds the lock"
        finally:
            _unlock(descriptor)
        if deadline.expired():
            raise TimeoutError(errno.ETIMEDOUT, obstacle, path)
        time.sleep(pause_seconds)


def _unlock(descriptor: int) -> None:
    # Unlocked explicitly, since a process forked meanwhile (a data loader's worker) has a copy of the descriptor,
    # through which it would go on holding the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def sweep_temporaries(folder: str, *, trust_locks: bool) -> None:
    """Remove the temporaries of writers that died, all of which lie in `folder`; errors are left to the next process.

    With `trust_locks` every file that is not locked is removed. Where not all hosts may see locks, files that are a day
    old are.
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
        # Removed under the lock, so that a writer that has created but not locked the file notices that it lost it.
        os.unlink(path)
    except BlockingIOError:
        return
    finally:
        _unlock(descriptor)


def require_folder(path: str, *, url: str) -> None:
    """Refuse a root that is a file, or lies below one; a folder that does not exist yet is as good. A few stat(2)."""
    # What cannot be looked at, for lack of access or by a name that is too long, is left to the first request.
    found = next(each for each in (path, *map(str, Path(path).parents)) if os.path.exists(each))
    if not os.path.isdir(found):
        which = "is a file" if found == path else f"lies below the file {found}"
        raise InvalidArgumentError(
            f"The URL {which}; that of a checkpoint or run is a folder. Pass the URL of a folder, which need not exist "
            "yet.",
            url=url,
        )


# Attempts to make a folder, each of which fails if another process removes the folder above between two system calls.
_FOLDER_RACES_MAX = 100


def make_folders(path: str) -> None:
    """Make a folder and its missing parents, each synced into its parent. Safe in a race with other processes."""
    for _ in range(_FOLDER_RACES_MAX):
        if os.path.isdir(path):
            return
        try:
            os.mkdir(path)
        except FileNotFoundError:
            # The parent was removed, or no folder is allowed here, which /proc reports with the same errno.
            make_folders(os.path.dirname(path))
        except FileExistsError:
            # One lstat decides, since between two calls another process may remove the folder that was found.
            with contextlib.suppress(FileNotFoundError):
                mode = os.lstat(path).st_mode
                if not stat.S_ISDIR(mode) and not os.path.isdir(path):
                    raise NotADirectoryError(errno.ENOTDIR, "a file is where a folder must be", path) from None
        else:
            _sync_folder(os.path.dirname(path))
            return
    raise OSError(errno.EOPNOTSUPP, "no folder can be made here", path)


def sync_folders(folder: str, *, down_from: str) -> None:
    """Sync `folder` and its parents up to `down_from`, so that the names in them survive a crash of the machine.

    All of them are synced, since an existing folder may have been made by another writer a moment ago.
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
        # Removed, so the object was deleted meanwhile; or above the root, where this user may not open it.
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems write names through, and do not support fsync of folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


_DISK_FULL = "The disk is full, or the quota is used up: free space, or save elsewhere."
_DENIED = "This user has no access to the file or folder: fix its owner or mode, or a read-only mount."
_BUSY = "The file system did not answer, or is short of a resource; a later attempt may pass."

# Errors of the operating system that a later attempt may not meet: another request releases its descriptor or its lock.
TRANSIENT_ERRNOS = frozenset(
    {
        *(errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ENOMEM, errno.ENOBUFS, errno.EMFILE, errno.ENFILE),
        *(errno.ENOLCK, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET),
    }
)

# Any other errno becomes a `StorageError` with the kernel's message. So does EIO: a disk that failed will fail again,
# and repeating the request for half an hour would only hide it.
_ERRORS: dict[int, tuple[type[DcpRemoteError], str]] = {
    errno.ENOENT: (ObjectNotFoundError, "There is no such object."),
    errno.ENOSPC: (StorageError, _DISK_FULL),
    errno.EDQUOT: (StorageError, _DISK_FULL),
    errno.EFBIG: (
        StorageError,
        "The file is larger than the file system or the limit of this process (ulimit -f) allows.",
    ),
    errno.EACCES: (PermissionDeniedError, _DENIED),
    errno.EPERM: (PermissionDeniedError, _DENIED),
    errno.EROFS: (PermissionDeniedError, _DENIED),
    errno.EISDIR: (StorageError, "A folder has this name: a file system cannot keep an object `a` and another `a/b`."),
    errno.ENOTDIR: (StorageError, "A file has the name of a folder: it cannot keep an object `a` and another `a/b`."),
    errno.ENAMETOOLONG: (InvalidArgumentError, "The name is too long for this file system."),
    errno.EXDEV: (StorageError, "Another file system is mounted below the root: open the store at that folder."),
    errno.EOPNOTSUPP: (StorageError, "This file system cannot create an object exactly once: save elsewhere."),
    **dict.fromkeys(TRANSIENT_ERRNOS, (TransientStorageError, _BUSY)),
}


@contextlib.contextmanager
def translate_os_errors(verb: str, *, key: str, url: str) -> Iterator[None]:
    """Turn an OSError in the block into an error of dcp_remote."""
    try:
        yield
    except DcpRemoteError:
        raise  # some of these are OSErrors too
    except OSError as error:
        number = error.errno or 0
        kind, what = _ERRORS.get(number, (StorageError, "The file system failed."))
        if verb == "put" and number == errno.ENOENT:
            kind, what = TransientStorageError, "A folder was removed while an object was written into it."
        # To a read or delete these say that there is no such object: a parent is a file, the name a folder or too long.
        if verb != "put" and number in (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG):
            kind, what = _ERRORS[errno.ENOENT]
        raise kind(what, verb=verb, key=key, url=url, cause=error) from error
