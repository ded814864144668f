"""A folder as a store: objects are files that appear whole, once, and are never written in place.

Every write goes to a temporary in the hidden folder `.dcp_remote` of the root, is synced, and only then gets its name:
by link(2), which gives a name to exactly one of many writers, or by rename(2) over an object that is locked. So a
reader sees a whole object or none, and what was answered survives a crash of the machine.

The lock is flock(2) on *the very file that is replaced or removed*, with a second look that the name still means it.
Beside the object or the root there is no lock file to leave behind, and stores opened at different depths of one tree
(`/data` and `/data/run`) exclude each other all the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence

from dcp_remote.errors import (
    ConditionFailedError,
    CorruptCheckpointError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
)
from dcp_remote.storage.base import Buffer, Capabilities, Condition, Content, ObjectInfo, Version
from dcp_remote.storage.files import (
    Temporary,
    locked,
    make_folders,
    sweep_temporaries,
    sync_folders,
    translated,
    version_of,
)
from dcp_remote.storage.mounts import swap_refusal
from dcp_remote.url import ParsedUrl, check_key, check_list_prefix

HIDDEN_FOLDER = ".dcp_remote"

# A writer makes the folder, a deleter removes it while it is empty: who loses this many times in a row is not unlucky.
_ATTEMPTS_MAX = 1000


class _Root:
    """What a store and its children share: the root, what can be done there, and whether it was swept."""

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

    def temporary(self, buffers: Sequence[Buffer]) -> Temporary:
        """Write a temporary. The first of each process also removes those of writers that were killed."""
        with self._lock:
            sweep, self._swept = not self._swept, True
        make_folders(self.hidden)
        if sweep:
            sweep_temporaries(self.hidden, trust_locks=not self.is_network)
        for _ in range(_ATTEMPTS_MAX):
            # Somebody may tidy up the folder, or sweep the file before it is locked.
            with contextlib.suppress(FileNotFoundError):
                return Temporary(os.path.join(self.hidden, secrets.token_hex(16)), buffers)
            make_folders(self.hidden)
        raise TimeoutError(errno.ETIMEDOUT, "temporaries were removed by others again and again", self.hidden)


class LocalStore:
    """Objects as files below a folder, which the first put creates.

    Costs beside the bytes: a put syncs the file and the folders down to it, a swap and a delete also lock the file.
    Deletes are not synced: after a crash of the machine a deleted object may be there again.

    Args:
        root: The folder; made absolute now.
        allow_network_replace: Trust flock(2) although the file system is not known to be of this machine alone. On
            NFS that needs version 4 (or a lock daemon) and mounts without `local_lock` or `nolock`.
    """

    def __init__(self, root: str | os.PathLike[str], *, allow_network_replace: bool = False) -> None:
        """See the class. Creates nothing."""
        self._root = _Root(os.path.abspath(os.fspath(root)), allow_network_replace=allow_network_replace)
        self._prefix = ""

    def __repr__(self) -> str:
        """With its URL."""
        return f"LocalStore({self.url})"

    def __reduce__(self) -> tuple[object, ...]:
        """By path."""
        return _reopen, (self._root.path, self._root.allow_network_replace, self._prefix)

    @property
    def url(self) -> str:
        """`file:///path`, percent-encoded."""
        return ParsedUrl("file", "", self._folder.lstrip("/")).canonical

    @property
    def capabilities(self) -> Capabilities:
        """Swaps only where the file system is known to lock, or trusted by the caller; found when it was opened."""
        return self._root.capabilities

    def child(self, prefix: str) -> LocalStore:
        """See `ObjectStore.child`. The child shares the root's hidden folder."""
        child = LocalStore.__new__(LocalStore)
        vars(child).update(vars(self), _prefix=self._full(prefix))
        return child

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        path = self._path(key)
        with self._translated("head", key):
            info = _info(key, os.stat(path))
        if info is None:
            raise self._no_object(key)
        return info

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """See `ObjectStore.get`. Version and content are of one moment, whatever is renamed meanwhile."""
        with self._translated("get", key):
            descriptor, status = self._open(key)
            with os.fdopen(descriptor, "rb") as file:
                if status.st_size > limit_bytes:
                    raise CorruptCheckpointError(
                        "The object is larger than anything that belongs under this name.",
                        key=key,
                        url=self.url,
                        size_bytes=status.st_size,
                        limit_bytes=limit_bytes,
                    )
                data = file.read(status.st_size)
        if len(data) < status.st_size:
            raise self._short(key, stop=status.st_size)
        return Content(data=data, version=version_of(status))

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """See `ObjectStore.get_into`. The kernel copies straight into the buffer."""
        assert start >= 0
        with self._translated("get", key):
            descriptor, _ = self._open(key)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                file.seek(start)
                filled = 0
                # One call reads at most 2 GiB.
                while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
                    filled += count
        if filled < len(buffer):
            raise self._short(key, stop=start + len(buffer))

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """See `ObjectStore.put`. A process that is killed leaves a temporary, which the next one removes."""
        path = self._path(key)
        if isinstance(condition, Version) and not self.capabilities.compare_and_swap:
            raise InvalidArgumentError(
                f"This store cannot replace an object on condition: {self.capabilities.swap_refusal}.",
                key=key,
                url=self.url,
            )
        with self._translated("put", key), self._root.temporary(buffers) as temporary:
            if condition == "absent":
                if not self._link(temporary, path):
                    raise _refused("The object exists already.", key, url=self.url)
            elif condition == "any":
                self._put_any(temporary, path)
            elif not self._swap(temporary, path, expected=condition):
                raise _refused("The object has changed, or is gone.", key, url=self.url, expected=condition)
            # Before the folders are synced: who waits to replace this object need not wait for the disk.
            temporary.close()
            sync_folders(os.path.dirname(path), down_from=self._root.path)
            return temporary.version

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. One folder is read at a time, so what is put meanwhile may be shown or not.

        Symbolic links, hidden folders of this store's and names that are not Unicode are not shown.
        """
        check_list_prefix(prefix)
        below = prefix.rpartition("/")[0]
        if HIDDEN_FOLDER in below.split("/"):
            return
        with self._translated("list", prefix):
            yield from self._list_folder(f"{below}/" if below else "", prefix=prefix, after=after)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """See `ObjectStore.delete`. Folders that are empty then are removed, up to the root."""
        failed: dict[str, StorageError] = {}
        paths = {key: self._path(key) for key in keys}  # all checked before the first is gone
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

    def _swap(self, temporary: Temporary, path: str, *, expected: Version) -> bool:
        try:
            with locked(path, writable=self._root.is_network) as found:
                if version_of(found) != expected:
                    return False
                temporary.rename_over(path, replaced=found)
                return True
        except FileNotFoundError:
            temporary.check_not_lost()
            return False

    def _put_any(self, temporary: Temporary, path: str) -> None:
        """Also under the lock, or it could come between a swap's look and its rename, and be lost."""
        for _ in range(_ATTEMPTS_MAX):
            if self._link(temporary, path):
                return
            with contextlib.suppress(FileNotFoundError):
                if not self.capabilities.compare_and_swap:
                    temporary.rename_over(path, replaced=os.stat(path))
                    return
                with locked(path, writable=self._root.is_network) as found:
                    temporary.rename_over(path, replaced=found)
                    return
            temporary.check_not_lost()
        raise TimeoutError(errno.ETIMEDOUT, "the object was created and deleted by others again and again", path)

    def _link(self, temporary: Temporary, path: str) -> bool:
        """Name a temporary unless the name is taken; make the folders it needs, again if a deleter removes them."""
        for _ in range(_ATTEMPTS_MAX):
            try:
                return temporary.link(path)
            except FileNotFoundError:
                temporary.check_not_lost()
                make_folders(os.path.dirname(path))
        raise TimeoutError(errno.ETIMEDOUT, "the folder was removed by others again and again", path)

    def _unlink(self, path: str) -> None:
        if not self.capabilities.compare_and_swap:
            os.unlink(path)
            return
        # Or it could come between a swap's look and its rename, and the object would be there again.
        with locked(path, writable=self._root.is_network):
            os.unlink(path)

    def _remove_empty_folders(self, folder: str) -> None:
        with contextlib.suppress(OSError):  # not empty, most often; best effort in any case
            while folder != self._root.path:
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def _list_folder(self, folder: str, *, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """What lies below `folder`, a key that ends in a slash or is empty."""
        try:
            with os.scandir(os.path.join(self._folder, folder)) as entries:
                # A folder sorts as the keys in it do: `a.b` comes before `a/b`.
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
                begins = key.startswith(prefix) or prefix.startswith(key)
                if begins and (key > after or after.startswith(key)):
                    yield from self._list_folder(key, prefix=prefix, after=after)
            elif key.startswith(prefix) and key > after:
                with contextlib.suppress(FileNotFoundError):  # deleted since
                    if info := _info(key, os.lstat(os.path.join(self._folder, key))):
                        yield info

    @property
    def _folder(self) -> str:
        return os.path.join(self._root.path, self._prefix) if self._prefix else self._root.path

    def _full(self, key: str) -> str:
        check_key(key)
        if HIDDEN_FOLDER in key.split("/"):
            raise InvalidArgumentError(f"{HIDDEN_FOLDER} is the store's own folder.", key=key)
        return f"{self._prefix}/{key}" if self._prefix else key

    def _path(self, key: str) -> str:
        return os.path.join(self._root.path, self._full(key))

    def _open(self, key: str) -> tuple[int, os.stat_result]:
        # Non-blocking, or opening a pipe that lies here would wait for a writer for ever.
        descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise self._no_object(key)
        return descriptor, status

    def _translated(self, verb: str, key: str) -> contextlib.AbstractContextManager[None]:
        return translated(verb, key=key, url=self.url)

    def _no_object(self, key: str) -> ObjectNotFoundError:
        return ObjectNotFoundError("There is no such object: this is not a plain file.", key=key, url=self.url)

    def _short(self, key: str, *, stop: int) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            "The object is shorter than the range that was asked for.", key=key, url=self.url, stop=stop
        )


def _info(key: str, status: os.stat_result) -> ObjectInfo | None:
    if not stat.S_ISREG(status.st_mode):
        return None
    # A file that is copied with its times (`cp -a`) is as young as the copy, and its manifest is perhaps on its way.
    modified_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    return ObjectInfo(
        key=key, size_bytes=status.st_size, version=version_of(status), modified_seconds=modified_ns / 1e9
    )


def _is_shown(name: str) -> bool:
    # Undecodable bytes come as surrogates, which no manifest and no log could hold.
    return name != HIDDEN_FOLDER and not any("\ud800" <= character <= "\udfff" for character in name)


def _refused(what: str, key: str, **details: object) -> ConditionFailedError:
    return ConditionFailedError(what, key=key, **details)


def _reopen(path: str, allow_network_replace: bool, prefix: str) -> LocalStore:  # noqa: FBT001  # pickle's arguments
    store = LocalStore(path, allow_network_replace=allow_network_replace)
    return store.child(prefix) if prefix else store
