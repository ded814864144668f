"""Stores on fsspec file systems: s3fs and local ones; all others are refused with the reason.

fsspec's own way to create a file, `pipe_file(mode="create")`, checks and then writes on most file systems, so that two
savers may both succeed; and directory listings may come from a cache. So none of fsspec's methods is used here. From
s3fs's `S3FileSystem` only the configuration is taken, and each verb is one request of the S3 client that it makes; a
local folder is served by `LocalStore`. s3fs runs in one thread, in Python, and is slower than `s3://` URLs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NoReturn, TypeVar

from botocore.exceptions import ClientError
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from dcp_remote.common.arrays import Buffer
from dcp_remote.errors import (
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
)
from dcp_remote.storage.base import (
    Capabilities,
    Condition,
    Content,
    ObjectInfo,
    ObjectStore,
    Version,
    may_follow,
    quoted,
)
from dcp_remote.storage.cloud.config import Timeouts
from dcp_remote.storage.cloud.errors import WHAT, advised, chained
from dcp_remote.storage.cloud.options import check_endpoint
from dcp_remote.storage.conditional_writes import unproven_server
from dcp_remote.storage.fsspec_client import (
    KINDS_BY_CODE,
    NO_SUCH_BUCKET_CODE,
    Body,
    Call,
    Configuration,
    Connection,
    Parsed,
    read_body,
    status_of,
    translated,
)
from dcp_remote.storage.local import LocalStore
from dcp_remote.storage.request_context import rounded_up, seconds_left
from dcp_remote.storage.url import ParsedUrl, check_key, check_list_prefix, parse_url

_Answer = TypeVar("_Answer")

_CAPABILITIES = Capabilities(compare_and_swap=True, shared=True)

# Most keys of S3 in one DeleteObjects request, and in one page of a listing.
_KEYS_MAX = 1000

# Key that no object has, so that a GET shows whether the bucket exists.
_PROBE_KEY = "dcp-remote-probe"

_ACCEPTED = "s3fs.S3FileSystem, fsspec's LocalFileSystem, and a DirFileSystem around one of them"

# Reasons of refusal, by the protocol of the file system.
_USE_GS = "Its create is not tested to be atomic. Google Cloud Storage is served without it: write gs://bucket/prefix."
_USE_AZ = "Its create is not tested to be atomic. Azure is served without it: write az://container/prefix."
_CACHED = "It answers from a cache, which misses the commits of other jobs: pass the file system that it wraps."
_READ_ONLY = "It supports no conditional writes."
_ARCHIVE = "An archive is one file, with one writer and no conditional writes."
_REFUSALS = {
    "gs": _USE_GS,
    "gcs": _USE_GS,
    "abfs": _USE_AZ,
    "abfss": _USE_AZ,
    "az": _USE_AZ,
    "adl": _USE_AZ,
    "blockcache": _CACHED,
    "cached": _CACHED,
    "filecache": _CACHED,
    "simplecache": _CACHED,
    "http": _READ_ONLY,
    "https": _READ_ONLY,
    "zip": _ARCHIVE,
    "tar": _ARCHIVE,
    "libarchive": _ARCHIVE,
    "memory": "Its create checks and then writes. Write memory://name/prefix for a store in this process.",
    "s3": "A subclass of S3FileSystem may override anything: pass an S3FileSystem itself.",
    "file": "A subclass of LocalFileSystem may override anything: pass the path itself.",
}
_REFUSAL = (
    "Its create is not known to be atomic: fsspec's own `mode='create'` checks and then writes, so that two savers may "
    "both succeed."
)


def open_fsspec_store(filesystem: AbstractFileSystem, path: str | os.PathLike[str]) -> ObjectStore:
    """Open a store below a path of an fsspec file system. Sends no request and creates nothing.

        RemoteWriter(open_fsspec_store(s3fs.S3FileSystem(endpoint_url=..., key=..., secret=...), "bucket/prefix"))

    Accepted are `s3fs.S3FileSystem` (with its credentials, endpoint, `config_kwargs` and `s3_additional_kwargs`),
    fsspec's `LocalFileSystem` (served by `LocalStore`, with its rules for network file systems), and `DirFileSystem`
    around one of them. If a store needs longer than s3fs's 15 seconds to answer a PUT of a shard, raise
    `config_kwargs={"read_timeout": ...}`.

    Args:
        filesystem: File system, of which the arguments are used, not the connections or caches.
        path: Path with or without the file system's protocol; for S3 an existing bucket, and a prefix.

    Raises:
        InvalidArgumentError: The file system is not accepted, the path is invalid, or the URL of the endpoint contains
            a user, a password or a query.
    """
    path = os.fspath(path)
    while type(filesystem) is DirFileSystem:
        path = path.removesuffix("/")
        if path:
            check_key(path)  # `..` would leave the folder
        path = "/".join(part for part in (filesystem.path, path) if part)
        filesystem = filesystem.fs
    if not path:
        raise InvalidArgumentError("The path is empty.", accepted=_ACCEPTED)
    if type(filesystem) is LocalFileSystem:
        return LocalStore(filesystem._strip_protocol(path))
    s3fs = sys.modules.get("s3fs")  # imported already, if the file system is one of s3fs
    if s3fs is None or type(filesystem) is not s3fs.S3FileSystem:
        _refuse(filesystem)
    bare = filesystem._strip_protocol(path).lstrip("/")
    if "://" in bare:
        raise InvalidArgumentError("The path has the scheme of another file system: pass bucket/prefix.", path=path)
    parsed = parse_url(f"s3://{bare}")
    endpoint_url = filesystem.endpoint_url or filesystem.client_kwargs.get("endpoint_url")
    if endpoint_url is not None:
        check_endpoint(endpoint_url, named="The endpoint_url of the file system")
    return _reopen(parsed, Configuration(parsed.bucket, filesystem.storage_args, filesystem.storage_options))


def _refuse(filesystem: object) -> NoReturn:
    kind: Any = type(filesystem)
    if not isinstance(filesystem, AbstractFileSystem):
        raise InvalidArgumentError("This is no file system of fsspec.", type=kind.__name__, accepted=_ACCEPTED)
    # From the class, since an instance of a cache has the protocol of the file system that it wraps.
    protocols = (kind.protocol,) if isinstance(kind.protocol, str) else tuple(kind.protocol)
    reason = next((_REFUSALS[protocol] for protocol in protocols if protocol in _REFUSALS), _REFUSAL)
    raise InvalidArgumentError(
        f"This file system cannot hold checkpoints. {reason}",
        filesystem=f"{kind.__module__}.{kind.__qualname__}",
        accepted=_ACCEPTED,
    )


class FsspecStore:
    """Store of a bucket and prefix, through the client of an s3fs file system; made by `open_fsspec_store`.

    Safe to use from many threads. Pickles the arguments of the file system, including explicit credentials. Children
    share the client. A process that was forked after the first request cannot use the store: use `spawn`.

    No request is retried here or by botocore (`RetryingStore` retries, under a deadline). Buffers are sent without a
    copy of the whole. Checksums are botocore's: CRC32 by default, another or none by `config_kwargs`.
    """

    def __init__(self, parsed: ParsedUrl, connection: Connection) -> None:
        """Store the URL and the connection; sends no request."""
        self._parsed = parsed
        self._connection = connection

    def __repr__(self) -> str:
        """Return the class and the URL; arguments of the file system may be secrets."""
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the configuration, including explicit credentials."""
        return _reopen, (self._parsed, self._connection.configuration())

    @property
    def url(self) -> str:
        """See `ObjectStore.url`. Like any `s3://` URL, it contains no endpoint."""
        return self._parsed.canonical

    @property
    def capabilities(self) -> Capabilities:
        """See `ObjectStore.capabilities`. S3's conditional PUT compares and swaps."""
        return _CAPABILITIES

    def child(self, prefix: str) -> FsspecStore:
        """See `ObjectStore.child`."""
        return FsspecStore(self._parsed.child(prefix), self._connection)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`. One request; nothing is cached."""
        path = self._path(key)

        async def request(call: Call) -> ObjectInfo:
            answer = await call("head_object", Key=path)
            return _info(key, answer, size_bytes=answer["ContentLength"])

        return self._ask("head", key, request)

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """See `ObjectStore.get`. One request."""
        path = self._path(key)

        async def request(call: Call) -> Content:
            answer = await call("get_object", Key=path)
            size_bytes, data = answer.get("ContentLength"), b""
            if size_bytes is None or size_bytes <= limit_bytes:
                data = await read_body(answer["Body"], limit_bytes=limit_bytes)
                size_bytes = len(data)
            if size_bytes > limit_bytes:
                answer["Body"].close()
                raise CorruptCheckpointError(
                    "The object is larger than any object of dcp_remote with this key.",
                    url=f"{self.url}/{key}",
                    size_bytes=size_bytes,
                    limit_bytes=limit_bytes,
                )
            return Content(data=data, version=_version(answer))

        return self._ask("get", key, request, size_bytes=limit_bytes)

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """See `ObjectStore.get_into`. One request; its answer is copied once."""
        path = self._path(key)
        stop = start + len(buffer)

        async def request(call: Call) -> bytes:
            try:
                answer = await call("get_object", Key=path, Range=f"bytes={start}-{stop - 1}")
            except ClientError as error:
                if status_of(error) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    return b""
                raise
            if not answer.get("ContentRange", "").startswith(f"bytes {start}-"):
                answer["Body"].close()
                raise StorageError("The store does not serve ranges of an object.", url=f"{self.url}/{key}")
            return await read_body(answer["Body"], limit_bytes=len(buffer))

        data = self._ask("get_into", key, request, size_bytes=len(buffer))
        if len(data) > len(buffer):
            raise StorageError("The store sent more bytes than the requested range.", url=f"{self.url}/{key}")
        if len(data) < len(buffer):
            raise CorruptCheckpointError(
                "The object ends before the range that is to be read.",
                url=f"{self.url}/{key}",
                size_bytes=start + len(data) if data else None,
                start=start,
                stop=stop,
            )
        buffer[:] = data

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """See `ObjectStore.put`. One PUT, whatever the size; S3 verifies its checksum before it answers."""
        path = self._path(key)
        body = Body(buffers)
        match: dict[str, str | None] = {}
        if condition == "absent":
            match = {"IfNoneMatch": "*"}
        elif condition != "any":
            match = {"IfMatch": condition.etag}
        answer = self._ask(
            "put",
            key,
            lambda call: call("put_object", Key=path, Body=body, **match),
            size_bytes=body.size_bytes,
            condition=condition,
        )
        return _version(answer)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. One request per 1,000 objects; never from s3fs's cache of listings."""
        check_list_prefix(prefix)
        return self._list(prefix, after)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """See `ObjectStore.delete`. One request per 1,000 keys; if it fails, all its keys are reported."""
        for key in keys:
            self._path(key)
        failed: dict[str, StorageError] = {}
        for first in range(0, len(keys), _KEYS_MAX):
            failed.update(self._delete_batch(keys[first : first + _KEYS_MAX]))
        return failed

    def explain_missing(self) -> str | None:
        """Return a sentence that says so if an object is missing because its bucket does not exist, else None.

        One request, sent after a manifest was not found; never on the path of a save.
        """
        try:
            self.get(_PROBE_KEY, limit_bytes=0)
        except ObjectNotFoundError as error:
            if error.details.get("code") == NO_SUCH_BUCKET_CODE:
                return str(error)
        except DcpRemoteError:
            pass  # the store answered that the object is missing; another failure now does not explain that
        return None

    def unproven_server(self) -> str | None:
        """Return the server and bucket if conditional writes are unproven there; None for Amazon's own servers.

        Sends no request; see `conditional_writes`.
        """
        endpoint_url = self._ask("open", "", Call.endpoint_url)
        check_endpoint(endpoint_url, named="AWS_ENDPOINT_URL, or `endpoint_url` of the profile,")
        return unproven_server("s3", endpoint_url, self._parsed.bucket)

    @property
    def _root(self) -> str:
        """Prefix that all keys of this store have in the bucket."""
        return f"{self._parsed.prefix}/" if self._parsed.prefix else ""

    def _path(self, key: str) -> str:
        check_key(key)
        return self._root + key

    def _list(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        last, where = after, {"StartAfter": self._root + after} if after else {}
        while True:
            infos, token = self._page(prefix, where)
            for info in infos:
                if info.size_bytes == 0 and (not info.key or info.key.endswith("/")):
                    continue  # marker of a "folder", which some consoles create
                if not may_follow(info.key, last) or not info.key.startswith(prefix):
                    raise StorageError(
                        "The store does not list its keys in order.", url=f"{self.url}/{info.key}", after=last
                    )
                _check_listed(self.url, info.key)
                last = info.key
                yield info
            if token is None:
                return
            if where == {"ContinuationToken": token}:
                raise StorageError(
                    "The listing does not go on: the store repeats a continuation token.", url=self.url, after=last
                )
            where = {"ContinuationToken": token}

    def _page(self, prefix: str, where: Mapping[str, str]) -> tuple[Sequence[ObjectInfo], str | None]:
        """Return the next page of a listing, and the token of the page after it; None at the end."""
        root = self._root

        async def request(call: Call) -> tuple[Sequence[ObjectInfo], str | None]:
            page = await call("list_objects_v2", Prefix=root + prefix, MaxKeys=_KEYS_MAX, **where)
            infos = [
                _info(entry["Key"].removeprefix(root), entry, size_bytes=entry["Size"])
                for entry in page.get("Contents", [])
            ]
            return infos, page["NextContinuationToken"] if page.get("IsTruncated") else None

        return self._ask("list", prefix, request)

    def _delete_batch(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        paths = {self._path(key): key for key in keys}
        order = {"Objects": [{"Key": path} for path in paths], "Quiet": True}
        try:
            answer = self._ask("delete", "", lambda call: call("delete_objects", Delete=order))
        except StorageError as error:
            return dict.fromkeys(keys, error)
        failed: dict[str, StorageError] = {}
        for entry in answer.get("Errors", []):
            key, code = paths.get(entry.get("Key")), entry.get("Code")
            kind = KINDS_BY_CODE.get(code, StorageError)
            if kind is ObjectNotFoundError:
                continue  # absent counts as deleted
            failure = kind(advised(WHAT[kind], code), verb="delete", url=self._named(key or ""), code=code)
            # An error that names none of the keys is reported for all of them.
            failed.update(dict.fromkeys([key] if key is not None else keys, failure))
        return failed

    def _named(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def _ask(
        self,
        verb: str,
        key: str,
        request: Callable[[Call], Awaitable[_Answer]],
        *,
        size_bytes: int = 0,
        condition: Condition = "any",
    ) -> _Answer:
        """Send a request and return its result; raise errors of the client as errors of dcp_remote."""
        try:
            seconds = min(Timeouts().request_seconds(size_bytes), rounded_up(seconds_left()))
            return self._connection.run(request, seconds=seconds)
        except DcpRemoteError:  # some of these are OSErrors and ValueErrors too
            raise
        except Exception as error:  # noqa: BLE001  # `translate` handles every error
            secrets = self._connection.secrets(answered=isinstance(error, ClientError))
            failure = translated(error, verb=verb, url=self._named(key), secrets=secrets, condition=condition)
            raise failure from chained(error, secrets)


def _reopen(parsed: ParsedUrl, configuration: Configuration) -> FsspecStore:
    return FsspecStore(parsed, Connection(configuration))


def _version(answer: Parsed) -> Version:
    return Version(etag=quoted(answer.get("ETag")))


def _info(key: str, answer: Parsed, *, size_bytes: int) -> ObjectInfo:
    return ObjectInfo(
        key=key, size_bytes=size_bytes, version=_version(answer), modified_seconds=answer["LastModified"].timestamp()
    )


def _check_listed(url: str, key: str) -> None:
    try:
        check_key(key)
    except InvalidArgumentError as error:
        raise StorageError(
            "An object below this URL has a key that no checkpoint has, with empty, `.` or `..` parts, or a control "
            "character. Remove it.",
            url=url,
            key=key,
        ) from error
