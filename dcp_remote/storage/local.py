"""A store in a local folder: objects are files that appear whole and are never written in place.

Every write goes to a temporary file in the hidden folder `.dcp_remote` of the root, is synced, and then gets its name:
by link(2), which gives a name to exactly one of many writers, or by rename(2) over an object that is locked. So a
reader sees a whole object or none, and an object whose put has returned survives a crash of the machine.

The lock is flock(2) on the very file that is replaced or removed; after locking, the name is checked to still refer to
that file. So there are no lock files to leave behind, and stores opened at different depths of one tree (`/data` and
`/data/run`) exclude each other too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Self

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.mounts import swap_refusal
from dcp_remote.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
)
from dcp_remote.storage.base import (
    Capabilities,
    Condition,
    Content,
    ObjectInfo,
    PlacedStore,
    Version,
    make_oversize_error,
    make_short_error,
)
from dcp_remote.storage.local_files import (
    Temporary,
    locked,
    make_folders,
    sweep_temporaries,
    sync_folders,
    translate_os_errors,
    version_of,
)
from dcp_remote.storage.url import ParsedUrl, check_list_prefix

HIDDEN_FOLDER = ".dcp_remote"

# A deleter may remove an empty folder just before a writer uses it. That often in a row, it is no coincidence.
_ATTEMPTS_MAX = 1000


class _Root:
    """Root folder that a store and its children share: its path, its abilities, and whether it was swept."""

    def __init__(self, path: str, *, allow_network_replace: bool) -> None:
        self.path = path
        self.hidden = os.path.join(path, HIDDEN_FOLDER)
        self.allow_network_replace = allow_network_replace
        refusal = swap_refusal(path)
        self.is_network = bool(refusal)
        swaps = allow_network_replace or not refusal
        self.capabilities = Capabilities(compare_and_swap=swaps, shared=True, swap_refusal="" if swaps else refusal)
        self._swept = False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return partial(_Root, allow_network_replace=self.allow_network_replace), (self.path,)

    def temporary(self, buffers: Sequence[Buffer]) -> Temporary:
        """Write a temporary. The first call per store also removes the temporaries of writers that were killed."""
        with self._lock:
            sweep, self._swept = not self._swept, True
        make_folders(self.hidden)
        if sweep:
            sweep_temporaries(self.hidden, trust_locks=not self.is_network)
        for _ in range(_ATTEMPTS_MAX):
            # Another process may remove the folder, or sweep the file before it is locked.
            with contextlib.suppress(FileNotFoundError):
                return Temporary(os.path.join(self.hidden, secrets.token_hex(16)), buffers)
            make_folders(self.hidden)
        raise TimeoutError(
            errno.ETIMEDOUT, "the temporary files were removed by another process each time", self.hidden
        )


class LocalStore(PlacedStore):
    """Store of files below a folder, which the first put creates.

    Costs: a put writes and syncs the file, and syncs the folders from the root down to it; a swap and a delete also
    lock the file. Deletes are not synced, so a deleted object may reappear after a crash of the machine.

    `root` is the path of the folder, which is made absolute now.

    `allow_network_replace` trusts flock(2) on a file system that is not known to be local. On NFS that needs version 4
    (or a lock daemon) and mounts without `local_lock` or `nolock`.
    """

    def __init__(self, root: str | os.PathLike[str], *, allow_network_replace: bool = False) -> None:
        """Store the settings, and read the type of the file system; creates nothing."""
        self._place = ParsedUrl("file", "", os.path.abspath(os.fspath(root)).lstrip("/"))
        self._root = _Root(self._place.path, allow_network_replace=allow_network_replace)

    @property
    def capabilities(self) -> Capabilities:
        """Implement `ObjectStore.capabilities`. Swaps need a file system that locks, or that the caller trusts."""
        return self._root.capabilities

    def child(self, prefix: str) -> Self:
        """Implement `ObjectStore.child`. The child shares the root's hidden folder."""
        self._path(prefix)  # refuses the hidden folder
        return super().child(prefix)

    def parent(self) -> LocalStore | None:
        """Return the store of the folder above, to be listed; None for the root. Not part of the contract."""
        above = self._place.parent()
        return LocalStore(above.path) if above is not None else None

    def head(self, key: str) -> ObjectInfo:
        """Implement `ObjectStore.head`."""
        path = self._path(key)
        with self._translated("head", key):
            info = _info(key, os.stat(path))
        if info is None:
            raise self._no_object(key)
        return info

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """Implement `ObjectStore.get`. Version and content are of one file, even if it is replaced meanwhile."""
        with self._translated("get", key):
            descriptor, status = self._open(key)
            with os.fdopen(descriptor, "rb") as file:
                if status.st_size > limit_bytes:
                    raise make_oversize_error(self._named(key), size_bytes=status.st_size, limit_bytes=limit_bytes)
                data = file.read(status.st_size)
        if len(data) < status.st_size:
            raise make_short_error(self._named(key), size_bytes=len(data), start=0, stop=status.st_size)
        return Content(data=data, version=version_of(status))

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Implement `ObjectStore.get_into`. The kernel copies straight into the buffer."""
        assert start >= 0
        with self._translated("get", key):
            descriptor, _ = self._open(key)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                file.seek(start)
                filled = 0
                # Linux reads at most 2 GiB per call.
                while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
                    filled += count
        if filled < len(buffer):
            size_bytes = start + filled if filled else None
            raise make_short_error(self._named(key), size_bytes=size_bytes, start=start, stop=start + len(buffer))

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """Implement `ObjectStore.put`. A killed process leaves a temporary file, which the next one removes."""
        path = self._path(key)
        if isinstance(condition, Version) and not self.capabilities.compare_and_swap:
            raise InvalidArgumentError(
                f"This store cannot replace an object on condition: {self.capabilities.swap_refusal}.",
                key=key,
                url=self.url,
            )
        with self._translated("put", key), self._root.temporary(buffers) as temporary:
            if not self._name(temporary, path, condition):
                what = "The object exists already."
                if condition != "absent":
                    what = "The object has changed, or was deleted."
                raise ConditionFailedError(what, key=key, url=self.url, expected=condition)
            # Unlocked before the folders are synced, so that the next writer of this object need not wait for the disk.
            temporary.close()
            sync_folders(os.path.dirname(path), down_from=self._root.path)
            return temporary.version

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Implement `ObjectStore.list`. Reads one folder at a time, so an object that is put meanwhile may be missing.

        Symbolic links, hidden folders of stores and names that are not Unicode are left out.
        """
        check_list_prefix(prefix)
        below = prefix.rpartition("/")[0]
        if HIDDEN_FOLDER in below.split("/"):
            return
        with self._translated("list", prefix):
            yield from self._list_folder(f"{below}/" if below else "", prefix=prefix, after=after)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """Implement `ObjectStore.delete`. Also removes folders that become empty, up to the root."""
        failed: dict[str, StorageError] = {}
        paths = {key: self._path(key) for key in keys}  # all keys are checked before the first is deleted
        for key, path in paths.items():
            try:
                with self._translated("delete", key):
                    self._unlink(path)
            except ObjectNotFoundError:
                pass
            except StorageError as error:
                failed[key] = error
            else:
                self._remove_empty_folders(os.path.dirname(path))
        return failed

    def _name(self, temporary: Temporary, path: str, condition: Condition) -> bool:
        """Give a temporary its name, if the object is in the state that `condition` names; return whether it was."""
        for _ in range(_ATTEMPTS_MAX):
            try:
                if not isinstance(condition, Version):
                    if temporary.link(path):
                        return True
                    if condition == "absent":
                        return False
                    if not self.capabilities.compare_and_swap:
                        temporary.rename_over(path, replaced=os.stat(path))
                        return True
                # The lock is also for "any": without it, a swap could check the old version, and then replace the
                # object that was put meanwhile.
                with locked(path, writable=self._root.is_network) as found:
                    if isinstance(condition, Version) and version_of(found) != condition:
                        return False
                    temporary.rename_over(path, replaced=found)
                    return True
            except FileNotFoundError:
                temporary.check_not_lost()
                if isinstance(condition, Version):
                    return False
                make_folders(os.path.dirname(path))
        raise TimeoutError(
            errno.ETIMEDOUT, "the object, or its folder, was created and deleted by another process each time", path
        )

    def _unlink(self, path: str) -> None:
        if not self.capabilities.compare_and_swap:
            os.unlink(path)
            return
        # Without the lock, a swap could check the version before the delete and rename after it, and undo the delete.
        with locked(path, writable=self._root.is_network):
            os.unlink(path)

    def _remove_empty_folders(self, folder: str) -> None:
        with contextlib.suppress(
            OSError
        ):  # Most often the folder is not empty. Other errors leave an empty folder, which is harmless.
            while folder != self._root.path:
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def _list_folder(self, folder: str, *, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Yield the objects below `folder`, a key prefix that ends in a slash or is empty."""
        try:
            with os.scandir(os.path.join(self._place.path, folder)) as entries:
                # The slash sorts a folder like the keys in it: `a.b` comes before `a/b`.
                names = sorted(
                    f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
                    for entry in entries
                    if _is_shown(entry.name)
                )
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            key = folder + name
            if name.endswith("/"):
                matches_prefix = key.startswith(prefix) or prefix.startswith(key)
                if matches_prefix and (key > after or after.startswith(key)):
                    yield from self._list_folder(key, prefix=prefix, after=after)
            elif key.startswith(prefix) and key > after:
                with contextlib.suppress(FileNotFoundError):  # deleted since
                    if info := _info(key, os.lstat(os.path.join(self._place.path, key))):
                        yield info

    def _path(self, key: str) -> str:
        full_key = self._place.key(key)
        if HIDDEN_FOLDER in key.split("/"):
            raise InvalidArgumentError(f"{HIDDEN_FOLDER} is the store's own folder.", key=key)
        return f"/{full_key}"

    def _open(self, key: str) -> tuple[int, os.stat_result]:
        # Non-blocking, since opening a pipe of that name would wait for a writer for ever.
        descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise self._no_object(key)
        return descriptor, status

    def _translated(self, verb: str, key: str) -> contextlib.AbstractContextManager[None]:
        return translate_os_errors(verb, key=key, url=self.url)

    def _no_object(self, key: str) -> ObjectNotFoundError:
        return ObjectNotFoundError("There is no such object: the path is not a regular file.", key=key, url=self.url)


def _info(key: str, status: os.stat_result) -> ObjectInfo | None:
    if not stat.S_ISREG(status.st_mode):
        return None
    # The change time counts too: a shard that was copied with its old time (`cp -a`) must not look old enough for gc
    # before its manifest is copied.
    modified_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    return ObjectInfo(
        key=key, size_bytes=status.st_size, version=version_of(status), modified_seconds=modified_ns / 1e9
    )


def _is_shown(name: str) -> bool:
    # Undecodable bytes become surrogates, which neither a manifest nor a log can hold.
    return name != HIDDEN_FOLDER and not any("\ud800" <= character <= "\udfff" for character in name)
