"""File systems of fsspec as stores: those of a tested list, all others refused with the reason.

fsspec's own way to create a file, `pipe_file(mode="create")`, is for most file systems a look and then a write, which
lets two savers both believe that they won; and what a directory holds may come from a cache. So none of its verbs is
used here. Of s3fs's `S3FileSystem` we take the configuration, and send each verb as one request of the S3 client that
it makes; a local folder is served by `LocalStore`. s3fs works in one thread, in Python: it is slower than `s3://` URLs.
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

from dcp_remote.errors import (
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
)
from dcp_remote.storage.base import (
    Buffer,
    Capabilities,
    Condition,
    Content,
    ObjectInfo,
    ObjectStore,
    Version,
    may_follow,
    quoted,
)
from dcp_remote.storage.cloud_errors import WHAT, advised, chained
from dcp_remote.storage.cloud_options import check_endpoint
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
from dcp_remote.storage.time_left import rounded_up, seconds_left
from dcp_remote.storage.timeouts import Timeouts
from dcp_remote.url import ParsedUrl, check_key, check_list_prefix, parse_url

_Answer = TypeVar("_Answer")

_CAPABILITIES = Capabilities(compare_and_swap=True, shared=True)

# What S3 allows in one DeleteObjects, and gives in one page of a listing.
_KEYS_MAX = 1000

# No object has this name: who asks for it wants to hear of the bucket.
_PROBE_KEY = "dcp-remote-probe"

_TAKEN = "s3fs.S3FileSystem, fsspec's LocalFileSystem, and a DirFileSystem around one of them"

# Why the others are not, by their protocol.
_USE_GS = (
    "Its create is not tested to be one step. Google Cloud Storage is served without it: write gs://bucket/prefix."
)
_USE_AZ = "Its create is not tested to be one step. Azure is served without it: write az://container/prefix."
_CACHED = "It answers from a cache, which the commits of others do not reach: pass the file system that it wraps."
_READ_ONLY = "Nothing can be written there on the condition that nobody else has."
_ARCHIVE = "An archive is one file, which has one writer and no conditional write."
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
    "memory": "It creates by a look and then a write. Write memory://name/prefix for a store in this process.",
    "s3": "A class derived from S3FileSystem may do anything: pass an S3FileSystem itself.",
    "file": "A class derived from LocalFileSystem may do anything: pass the path itself.",
}
_REFUSAL = (
    "It is not known to create an object in one step: fsspec's own `mode='create'` is a look and then a write, which "
    "lets two savers both believe that they won."
)


def open_fsspec_store(filesystem: AbstractFileSystem, path: str | os.PathLike[str]) -> ObjectStore:
    """A store of what lies below a path of an fsspec file system. Sends nothing and creates nothing.

        RemoteWriter(open_fsspec_store(s3fs.S3FileSystem(endpoint_url=..., key=..., secret=...), "bucket/prefix"))

    Taken are `s3fs.S3FileSystem` (credentials, endpoint, `config_kwargs` and `s3_additional_kwargs` are its own),
    fsspec's `LocalFileSystem` (served by `LocalStore`, with its rules for network file systems), and `DirFileSystem`
    around one of them. Where a store takes longer than s3fs's 15 seconds to answer a PUT of a shard, raise
    `config_kwargs={"read_timeout": ...}`.

    Args:
        filesystem: An instance; its arguments are taken, not its connections or caches.
        path: With or without the file system's protocol; for S3 a bucket, which exists, and a prefix.

    Raises:
        InvalidArgumentError: The file system cannot keep what a checkpoint needs, or is not known to; or the path is
            not one; or the URL of its endpoint has a user, a password or a query in it.
    """
    path = os.fspath(path)
    while type(filesystem) is DirFileSystem:
        path = path.removesuffix("/")
        if path:
            check_key(path)  # `..` would leave the folder
        path = "/".join(part for part in (filesystem.path, path) if part)
        filesystem = filesystem.fs
    if not path:
        raise InvalidArgumentError("The path is empty.", taken=_TAKEN)
    if type(filesystem) is LocalFileSystem:
        return LocalStore(filesystem._strip_protocol(path))
    s3fs = sys.modules.get("s3fs")  # whoever made a file system of it has imported it
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
        raise InvalidArgumentError("This is no file system of fsspec.", type=kind.__name__, taken=_TAKEN)
    # Of the class: an instance of a cache answers with the protocol of what it wraps.
    protocols = (kind.protocol,) if isinstance(kind.protocol, str) else tuple(kind.protocol)
    reason = next((_REFUSALS[protocol] for protocol in protocols if protocol in _REFUSALS), _REFUSAL)
    raise InvalidArgumentError(
        f"This file system cannot hold checkpoints. {reason}",
        filesystem=f"{kind.__module__}.{kind.__qualname__}",
        taken=_TAKEN,
    )


class FsspecStore:
    """A prefix of a bucket, through the client of an s3fs file system; `open_fsspec_store` makes it.

    Safe to use from many threads. Pickles the arguments of the file system, explicit credentials included. Children
    share the client. A process that is forked after the first request cannot use its stores: spawn.

    Nothing is retried here, by botocore's client neither (`RetryingStore` does, under a deadline). Buffers are read
    where they lie, in small pieces. Checksums are botocore's: CRC32 by default, by `config_kwargs` another or none.
    """

    def __init__(self, parsed: ParsedUrl, connection: Connection) -> None:
        """See `open_fsspec_store`."""
        self._parsed = parsed
        self._connection = connection

    def __repr__(self) -> str:
        """Without any argument of the file system: some are secrets."""
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """The configuration: a pickle is as secret as its credentials are."""
        return _reopen, (self._parsed, self._connection.configuration())

    @property
    def url(self) -> str:
        """See `ObjectStore.url`. It names no endpoint, as `s3://` URLs do not."""
        return self._parsed.canonical

    @property
    def capabilities(self) -> Capabilities:
        """See `ObjectStore.capabilities`. S3 compares and swaps, in its conditional PUT."""
        return _CAPABILITIES

    def child(self, prefix: str) -> FsspecStore:
        """See `ObjectStore.child`."""
        return FsspecStore(self._parsed.child(prefix), self._connection)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`. One request; nothing is remembered of earlier ones."""
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
                    "The object is larger than anything that is expected here.",
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
            raise StorageError("The store sends more than the range that was asked for.", url=f"{self.url}/{key}")
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
        """See `ObjectStore.list`. A request for each thousand objects; never from s3fs's cache of listings."""
        check_list_prefix(prefix)
        return self._list(prefix, after)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """See `ObjectStore.delete`. A request for each thousand keys; of one that fails all keys are reported."""
        for key in keys:
            self._path(key)
        failed: dict[str, StorageError] = {}
        for first in range(0, len(keys), _KEYS_MAX):
            failed.update(self._delete_batch(keys[first : first + _KEYS_MAX]))
        return failed

    def explain_missing(self) -> str | None:
        """Why an object may be missing that a reader expected: a sentence if it is the bucket's fault, else None.

        One request, to be asked when a manifest was not there; never on the path of a save.
        """
        try:
            self.get(_PROBE_KEY, limit_bytes=0)
        except ObjectNotFoundError as error:
            if error.details.get("code") == NO_SUCH_BUCKET_CODE:
                return str(error)
        except DcpRemoteError:
            pass  # the object was missing by a clear answer: what fails now does not explain it
        return None

    def unproven_server(self) -> str | None:
        """The server and bucket, if nobody knows whether conditional writes hold there; None for Amazon's own.

        Sends nothing; see `conditional_writes`.
        """
        endpoint_url = self._ask("open", "", Call.endpoint_url)
        check_endpoint(endpoint_url, named="AWS_ENDPOINT_URL, or `endpoint_url` of the profile,")
        return unproven_server("s3", endpoint_url, self._parsed.bucket)

    @property
    def _root(self) -> str:
        """What the keys of the bucket begin with that are below this store."""
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
                    continue  # the marker of a "folder", which some consoles create
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
                raise StorageError("The listing does not go on.", url=self.url, after=last)
            where = {"ContinuationToken": token}

    def _page(self, prefix: str, where: Mapping[str, str]) -> tuple[Sequence[ObjectInfo], str | None]:
        """What the store lists next, and where it goes on; None at the end."""
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
            # What names none of the keys is said of all of them.
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
        """Send a request, and raise what went wrong as an error of ours."""
        try:
            seconds = min(Timeouts().request_seconds(size_bytes), rounded_up(seconds_left()))
            return self._connection.run(request, seconds=seconds)
        except DcpRemoteError:  # of ours already, though some are OSErrors and ValueErrors, too
            raise
        except Exception as error:  # noqa: BLE001  # `translate` has a row for everything
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
            "Under this URL lies an object whose key no checkpoint has: empty, `.` or `..` parts, or a control "
            "character. Remove it.",
            url=url,
            key=key,
        ) from error
