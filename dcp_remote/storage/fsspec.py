"""Stores on fsspec file systems: s3fs and local ones to save and load, any other to load.

fsspec's own way to create a file, `pipe_file(mode="create")`, checks and then writes on most file systems, so that two
savers may both succeed. So s3fs sends S3's own requests (`fsspec_s3`), a local folder is served by `LocalStore`, and
every other file system is read-only. s3fs runs in one thread, in Python, and is slower than `s3://` URLs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import ClientError
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.helper_thread import HelperThread
from dcp_remote.errors import (
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import (
    Capabilities,
    Condition,
    Content,
    ObjectInfo,
    ObjectStore,
    PlacedStore,
    Version,
    check_listing,
    make_oversize_error,
)
from dcp_remote.storage.cloud.errors import (
    WHAT,
    ErrorClass,
    classify_answer,
    classify_error,
    describe_cause,
    get_safe_cause,
)
from dcp_remote.storage.cloud.options import check_endpoint
from dcp_remote.storage.cloud.redaction import redact
from dcp_remote.storage.fsspec_s3 import fill, find_secrets, open_s3fs_store, request_seconds, status_of
from dcp_remote.storage.local import LocalStore
from dcp_remote.storage.request_context import writes_nothing
from dcp_remote.storage.url import check_key, check_list_prefix, parse_url

_Answer = TypeVar("_Answer")

_ACCEPTED = "any file system of fsspec; to save, s3fs.S3FileSystem, LocalFileSystem, or a DirFileSystem around them"

# File systems that answer from a cache, which misses the commits of other jobs.
_CACHES = frozenset({"blockcache", "cached", "filecache", "simplecache"})

# Names under which file systems give the time of the last write; a file system without any has the time 0.
_TIME_NAMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


def open_fsspec_store(filesystem: AbstractFileSystem, path: str | os.PathLike[str]) -> ObjectStore:
    """Open a store below a path of an fsspec file system. Sends no request and creates nothing.

        RemoteWriter(open_fsspec_store(s3fs.S3FileSystem(endpoint_url=..., key=..., secret=...), "bucket/prefix"))

    Checkpoints are saved to and loaded from `s3fs.S3FileSystem` (with its credentials, endpoint, `config_kwargs` and
    `s3_additional_kwargs`), fsspec's `LocalFileSystem` (served by `LocalStore`, with its rules for network file
    systems), and `DirFileSystem` around either. Every other file system is read-only, also a subclass of these. If a
    store needs longer than s3fs's 15 seconds to answer a PUT of a shard, raise `config_kwargs={"read_timeout": ...}`.

    Args:
        filesystem: File system. Of an `S3FileSystem` the arguments are used, not the connections or caches.
        path: Path with or without the file system's protocol; for S3 an existing bucket, and a prefix.

    Raises:
        InvalidArgumentError: The file system caches or is asynchronous, the path is invalid, or the URL of the endpoint
            or the path contains a user, a password or a query.
    """
    path = os.fspath(path)
    if not isinstance(filesystem, AbstractFileSystem):
        given = type(filesystem).__name__
        raise InvalidArgumentError("This is no file system of fsspec.", type=given, accepted=_ACCEPTED)
    while type(filesystem) is DirFileSystem:
        path = path.removesuffix("/")
        if path:
            check_key(path)  # `..` would leave the folder
        path = "/".join(part for part in (filesystem.path, path) if part)
        filesystem = filesystem.fs
    # Private, but the one way to a path without its protocol, which every file system implements.
    bare = filesystem._strip_protocol(path)
    s3fs = sys.modules.get("s3fs")  # imported already, if the file system is one of s3fs
    is_s3 = s3fs is not None and type(filesystem) is s3fs.S3FileSystem
    if not is_s3 and type(filesystem) is not LocalFileSystem:
        return _open_to_read(filesystem, bare)
    if not path:
        raise InvalidArgumentError("The path is empty.", accepted=_ACCEPTED)
    if not is_s3:
        return LocalStore(bare)
    bare = bare.lstrip("/")
    if "://" in bare:
        raise InvalidArgumentError("The path has the scheme of another file system: pass bucket/prefix.", path=path)
    parsed = parse_url(f"s3://{bare}")
    endpoint_url = filesystem.endpoint_url or filesystem.client_kwargs.get("endpoint_url")
    if endpoint_url is not None:
        check_endpoint(endpoint_url, named="The endpoint_url of the file system")
    return open_s3fs_store(parsed, filesystem.storage_args, filesystem.storage_options)


def _open_to_read(filesystem: AbstractFileSystem, path: str) -> ReadOnlyFsspecStore:
    protocol = _protocol_of(filesystem)
    if protocol in _CACHES:
        raise InvalidArgumentError(
            "This file system answers from a cache, which misses the commits of other jobs: pass the file system that "
            "it wraps.",
            filesystem=type(filesystem).__qualname__,
            accepted=_ACCEPTED,
        )
    if getattr(filesystem, "asynchronous", False):
        raise InvalidArgumentError(
            "This file system is for coroutines: create it without asynchronous=True.", accepted=_ACCEPTED
        )
    # The path of `http` is a URL, to which keys are appended; that of any other file system has no scheme.
    url = urlsplit(path) if protocol in ("http", "https") else None
    if any((url.username, url.password, url.query, url.fragment)) if url else redact(path, ()) != path:
        raise InvalidArgumentError(
            "The path contains a user, a password, a query or a fragment: pass credentials to the file system."
        )
    # Only file systems with fsspec's event loop are safe in threads, so the others get one call at a time.
    return ReadOnlyFsspecStore(filesystem, path, nullcontext() if filesystem.async_impl else threading.Lock())


class ReadOnlyFsspecStore(PlacedStore):
    """Store that reads through the public methods of any fsspec file system; opened by `open_fsspec_store`.

    Safe to use from many threads; a file system without fsspec's own event loop gets one call at a time. Pickles the
    file system. Objects have no versions, and the modification time 0 where the file system gives none. The file
    system decides about its retries and redirects; each call ends by the deadline of the request.
    """

    def __init__(self, filesystem: Any, path: str, lock: AbstractContextManager[object]) -> None:
        """Store the file system and a path without protocol; sends no request."""
        self._filesystem = filesystem
        self._path = path.rstrip("/") + "/" if path else filesystem.root_marker
        self._lock = lock

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the file system, including explicit credentials."""
        return _open_to_read, (self._filesystem, self._path)

    @property
    def url(self) -> str:
        """Implement `ObjectStore.url`. URL of the path; it names no server unless the path does."""
        return str(self._filesystem.unstrip_protocol(self._path.rstrip("/")))

    @property
    def capabilities(self) -> Capabilities:
        """Implement `ObjectStore.capabilities`. Read-only; memory is not shared with other processes."""
        protocol = _protocol_of(self._filesystem)
        refusal = (
            f"The store is read-only: fsspec's {protocol} has no conditional PUT. Write with s3://, gs://, "
            "az:// or file:// URLs, or s3fs's own S3FileSystem."
        )
        return Capabilities(
            compare_and_swap=False, shared=protocol != "memory", swap_refusal=refusal, write_refusal=refusal
        )

    def child(self, prefix: str) -> ReadOnlyFsspecStore:
        """Implement `ObjectStore.child`."""
        check_key(prefix)
        return ReadOnlyFsspecStore(self._filesystem, self._path + prefix, self._lock)

    def head(self, key: str) -> ObjectInfo:
        """Implement `ObjectStore.head`. One `info`; a listing that the file system cached is dropped."""
        check_key(key)

        def request() -> ObjectInfo:
            self._filesystem.invalidate_cache()
            info = self._filesystem.info(self._path + key)
            if info["type"] != "file":
                raise FileNotFoundError(key)
            return _make_found(key, info)

        return self._ask("head", key, request)

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """Implement `ObjectStore.get`. One `cat_file`, of one byte more than `limit_bytes` at most."""
        check_key(key)
        data = self._read("get", key, 0, limit_bytes + 1)
        if len(data) > limit_bytes:
            raise make_oversize_error(self._named(key), size_bytes=len(data), limit_bytes=limit_bytes)
        return Content(data=data, version=Version(etag=None))

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Implement `ObjectStore.get_into`. One `cat_file`; its answer is copied once."""
        check_key(key)
        with writes_nothing():
            data = self._read("get_into", key, start, start + len(buffer))
        fill(buffer, data, start=start, url=self._named(key))

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """Implement `ObjectStore.put`. Refused."""
        raise InvalidArgumentError(self.capabilities.write_refusal, url=self._named(key))

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Implement `ObjectStore.list`. One `find`, and an `info` for each object whose size it lacks (`http`)."""
        check_list_prefix(prefix)
        folder = self._path + prefix[: prefix.rfind("/") + 1]

        def request() -> Sequence[ObjectInfo]:
            self._filesystem.invalidate_cache()
            try:
                found = self._filesystem.find(folder.rstrip("/"), detail=True)
            except FileNotFoundError:
                return []
            infos = {name.removeprefix(self._path): info for name, info in found.items() if name.startswith(folder)}
            keys = sorted(key for key in infos if key.startswith(prefix) and key > after)
            for key in keys:
                if infos[key].get("size") is None:
                    infos[key] = self._filesystem.info(self._path + key)
            return [_make_found(key, infos[key]) for key in keys]

        yield from check_listing(self._ask("list", prefix, request), url=self.url, prefix=prefix, after=after)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """Implement `ObjectStore.delete`. Refused."""
        raise InvalidArgumentError(self.capabilities.write_refusal, url=self.url)

    def _read(self, verb: str, key: str, start: int, stop: int) -> bytes:
        def request() -> bytes:
            try:
                return bytes(self._filesystem.cat_file(self._path + key, start=start, end=stop))
            except Exception as error:
                if _status_of(error) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    return b""
                raise

        return self._ask(verb, key, request, size_bytes=stop - start)

    def _ask(self, verb: str, key: str, request: Callable[[], _Answer], *, size_bytes: int = 0) -> _Answer:
        """Make a call of the file system and return its result; raise its errors as errors of dcp_remote."""
        # In a thread, so that a call that does not return ends for the caller by its deadline.
        helper, deadline = HelperThread("dcp_remote-fsspec"), Deadline(request_seconds(size_bytes))

        def call() -> _Answer:
            with self._lock:
                return request()

        def check_deadline() -> None:
            if deadline.expired():
                raise TimeoutError

        try:
            return helper.run(call, check_deadline)
        except DcpRemoteError:
            raise
        except Exception as error:  # noqa: BLE001  # `_classify` handles every error
            secrets = list(find_secrets(self._filesystem.storage_options))
            kind = _classify(error)
            failure = kind(
                WHAT[kind],
                verb=verb,
                url=self._named(key),
                cause=describe_cause(str(error) or type(error).__name__, secrets),
            )
            raise failure from get_safe_cause(error, secrets)
        finally:
            helper.close()


def _classify(error: BaseException) -> ErrorClass:
    """Return the class of dcp_remote for an error of a file system: by HTTP status, errno or class."""
    status = _status_of(error)
    if status >= HTTPStatus.BAD_REQUEST:
        return classify_answer(status)
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        # `HTTPFileSystem.info` raises FileNotFoundError for every failure, from the reason.
        reason = _classify(error.__cause__)
        return reason if reason in (TransientStorageError, PermissionDeniedError) else ObjectNotFoundError
    aiohttp = sys.modules.get("aiohttp")  # imported already, if the error is one of aiohttp
    if aiohttp is not None and isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError):
        return StorageError if isinstance(error, aiohttp.ClientSSLError) else TransientStorageError
    if isinstance(error, OSError) and error.errno is not None:
        return classify_error(OSError(error.errno, ""))  # Python's own subclass for this number
    return classify_error(error)


def _status_of(error: BaseException) -> int:
    """Return the HTTP status of an error of s3fs (its cause's), aiohttp (`status`) or gcsfs (`code`); 0 if unknown."""
    if isinstance(error.__cause__, ClientError):
        return status_of(error.__cause__)
    return next((value for name in ("status", "code") if isinstance(value := getattr(error, name, None), int)), 0)


def _protocol_of(filesystem: object) -> str:
    # From the class, since an instance of a cache has the protocol of the file system that it wraps.
    protocol: Any = type(filesystem).protocol  # type: ignore[attr-defined]  # an attribute of fsspec's classes
    return protocol if isinstance(protocol, str) else protocol[0]


def _make_found(key: str, info: Mapping[str, Any]) -> ObjectInfo:
    times = [info[name] for name in _TIME_NAMES if isinstance(info.get(name), datetime | int | float)]
    modified = times[0] if times else 0.0
    return ObjectInfo(
        key=key,
        size_bytes=int(info["size"]),
        version=Version(etag=None),
        modified_seconds=modified.timestamp() if isinstance(modified, datetime) else float(modified),
    )
