"""Store on s3fs's `S3FileSystem`: each verb is one request of its S3 client. s3fs is slower than `s3://` URLs.

fsspec's own way to create a file, `pipe_file(mode="create")`, uploads large files in parts, does not return the version
and is repeated by s3fs; and directory listings may come from a cache. So each request is a call of botocore's client,
from a file system that is made of the arguments of the user's. What an answer means is decided by `cloud/errors.py`.

Other file systems of fsspec are refused: their `pipe_file(mode="create")` checks and then writes, so that two savers
may both succeed.
"""

from __future__ import annotations

import bisect
import io
import itertools
import os
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar

from botocore.exceptions import ClientError, HTTPClientError, NoCredentialsError, ResponseStreamingError
from fsspec import AbstractFileSystem
from fsspec.asyn import sync
from fsspec.implementations.local import LocalFileSystem

from dcp_remote.common.arrays import Buffer
from dcp_remote.errors import (
    BucketNotFoundError,
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
    PlacedStore,
    Version,
    check_listing,
    make_oversize_error,
    make_short_error,
    quote_etag,
)
from dcp_remote.storage.cloud.bucket import Timeouts, refuse_after_fork
from dcp_remote.storage.cloud.errors import (
    NO_SUCH_BUCKET_CODE,
    SENT_ELSEWHERE,
    CloudError,
    describe_cause,
    get_safe_cause,
    make_answer_error,
    make_s3_bucket_error,
    translate,
)
from dcp_remote.storage.cloud.s3 import S3
from dcp_remote.storage.conditional_writes import find_unproven_server
from dcp_remote.storage.local import LocalStore
from dcp_remote.storage.options import check_endpoint
from dcp_remote.storage.request_context import remaining_seconds, rounded_up, writes_nothing
from dcp_remote.storage.url import ParsedUrl, check_list_prefix, parse_url

_Answer = TypeVar("_Answer")

# Answer of S3 to one request, as parsed by botocore.
_Parsed: TypeAlias = dict[str, Any]

# Most keys of S3 in one DeleteObjects request, and in one page of a listing.
_KEYS_MAX = 1000

# Key that no object has, so that a GET shows whether the bucket exists.
_PROBE_KEY = "dcp-remote-probe"

# Bytes per read of a body, so that a body that is longer than expected is not read to its end.
_READ_BYTES = 1024 * 1024

# Limit for asking botocore for the credentials that it found, in order to hide them in an error; most are cached.
_SECRETS_SECONDS = 5.0

_REDIRECTS = frozenset({301, 302, 303, 307, 308})

# Arguments of s3fs that concern the event loop and caches of the caller, which the store does not use.
_ARGUMENTS_OF_THE_CALLER = ("asynchronous", "loop", "skip_instance_cache")

# Names of a file system's arguments whose values are hidden in errors.
_SECRET_NAME = re.compile(r"(?i)key|secret|token|passw|passphrase|credential|auth|header|cookie|sas|connection_string")

_NO_CREDENTIALS = (
    "No credentials were found, and nothing was sent: give the file system `key` and `secret`, or `profile`, or put "
    "them into the environment; `anon=True` reads public buckets without."
)


def open_fsspec_store(filesystem: AbstractFileSystem, path: str | os.PathLike[str]) -> ObjectStore:
    """Open a store below a path of an fsspec file system. Sends no request and creates nothing.

        RemoteWriter(open_fsspec_store(s3fs.S3FileSystem(endpoint_url=..., key=..., secret=...), "bucket/prefix"))

    The file system is an `s3fs.S3FileSystem` (with its credentials, endpoint, `config_kwargs` and
    `s3_additional_kwargs`), or fsspec's `LocalFileSystem` (served by `LocalStore`, with its rules for network file
    systems). If a store needs longer than s3fs's 15 seconds to answer a PUT of a shard, raise
    `config_kwargs={"read_timeout": ...}`.

    Args:
        filesystem: File system. Of an `S3FileSystem` the arguments are used, not the connections or caches.
        path: Path with or without the file system's protocol; for S3 an existing bucket, and a prefix.

    Raises:
        InvalidArgumentError: The file system is another one, also of a subclass; the path is invalid; or the URL of the
            endpoint or the path contains a user, a password or a query.
    """
    s3fs = sys.modules.get("s3fs")  # imported already, if the file system is one of s3fs
    is_s3 = s3fs is not None and type(filesystem) is s3fs.S3FileSystem
    if not is_s3 and type(filesystem) is not LocalFileSystem:
        raise InvalidArgumentError(
            "Checkpoints cannot be saved to this file system: fsspec has no conditional PUT. Pass an s3://, gs://, "
            "az:// or file:// URL in its place, or s3fs's own S3FileSystem and the whole path.",
            filesystem=type(filesystem).__qualname__,
        )
    path = os.fspath(path)
    if not path:
        raise InvalidArgumentError("The path is empty. Pass bucket/prefix, or the path of a folder.")
    # Private, but the one way to a path without its protocol, which every file system implements.
    bare = filesystem._strip_protocol(path)
    if not is_s3:
        return LocalStore(bare)
    bare = bare.lstrip("/")
    if "://" in bare:
        raise InvalidArgumentError("The path has the scheme of another file system: pass bucket/prefix.", path=path)
    parsed = parse_url(f"s3://{bare}")
    endpoint_url = filesystem.endpoint_url or filesystem.client_kwargs.get("endpoint_url")
    if endpoint_url is not None:
        check_endpoint(endpoint_url, named="The endpoint_url of the file system")
    return FsspecStore(parsed, _Connection(filesystem.storage_args, filesystem.storage_options))


class FsspecStore(PlacedStore):
    """Store of a bucket and prefix, through the client of an s3fs file system; opened by `open_fsspec_store`.

    Safe to use from many threads. Pickles the arguments of the file system, including explicit credentials. Children
    share the client. A process that was forked after the first request cannot use the store: use `spawn`.

    No request is retried here, by s3fs or by botocore (`RetryingStore` retries, under a deadline). Buffers are sent
    without a copy of the whole. Checksums are botocore's: CRC32 by default, another or none by `config_kwargs`.
    """

    capabilities = Capabilities(compare_and_swap=True, shared=True)  # by S3's conditional PUT

    def __init__(self, parsed: ParsedUrl, connection: _Connection) -> None:
        """Store the URL and the connection; sends no request."""
        self._place = parsed
        self._connection = connection

    def head(self, key: str) -> ObjectInfo:
        """Implement `ObjectStore.head`. One request; nothing is cached."""
        path = self._place.key(key)
        with self._translated("head", key):
            answer = self._call("head_object", Key=path)
            return _make_info(key, answer, size_bytes=answer["ContentLength"])

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """Implement `ObjectStore.get`. One request."""
        path = self._place.key(key)
        with self._translated("get", key):
            answer = self._call("get_object", size_bytes=limit_bytes, Key=path)
            announced_bytes = answer.get("ContentLength", 0)
            data = self._read(answer, limit_bytes if announced_bytes <= limit_bytes else -1)
            size_bytes = max(len(data), announced_bytes)
            if size_bytes > limit_bytes:
                raise make_oversize_error(self._named(key), size_bytes=size_bytes, limit_bytes=limit_bytes)
            return Content(data=data, version=_make_version(answer))

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Implement `ObjectStore.get_into`. One request; its answer is copied once."""
        path, length, data = self._place.key(key), len(buffer), b""
        with writes_nothing(), self._translated("get_into", key):
            try:
                asked = f"bytes={start}-{start + length - 1}"
                answer = self._call("get_object", size_bytes=length, Key=path, Range=asked)
                if not answer.get("ContentRange", "").startswith(f"bytes {start}-"):
                    self._read(answer, -1)  # closes it
                    raise StorageError("The store does not serve ranges of an object.", url=self._named(key))
                data = self._read(answer, length)
            except ClientError as error:
                if _status_and_code_of(error)[0] != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    raise
        if len(data) > length:
            raise StorageError("The store sent more bytes than the requested range.", url=self._named(key))
        if len(data) < length:
            size_bytes = start + len(data) if data else None
            raise make_short_error(self._named(key), size_bytes=size_bytes, start=start, stop=start + length)
        buffer[:] = data

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """Implement `ObjectStore.put`. One PUT, whatever the size; S3 verifies its checksum before it answers."""
        path, body = self._place.key(key), _Body(buffers)
        match: dict[str, str | None] = {}
        if condition == "absent":
            match = {"IfNoneMatch": "*"}
        elif condition != "any":
            match = {"IfMatch": condition.etag}
        with self._translated("put", key, condition):
            file = io.BufferedReader(body)
            return _make_version(self._call("put_object", size_bytes=body.size_bytes, Key=path, Body=file, **match))

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Implement `ObjectStore.list`. One request per 1,000 objects; never from s3fs's cache of listings."""
        check_list_prefix(prefix)
        return check_listing(self._list(prefix, after), url=self.url, prefix=prefix, after=after)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """Implement `ObjectStore.delete`. One request per 1,000 keys; if it fails, all its keys are reported."""
        paths = {self._place.key(key): key for key in keys}
        failed: dict[str, StorageError] = {}
        for first in range(0, len(paths), _KEYS_MAX):
            failed.update(self._delete_batch(dict(itertools.islice(paths.items(), first, first + _KEYS_MAX))))
        return failed

    def explain_missing(self) -> BucketNotFoundError | None:
        """Return the error if an object is missing because its bucket does not exist, else None.

        One request, sent after a manifest was not found; never on the path of a save.
        """
        try:
            self.get(_PROBE_KEY, limit_bytes=0)
        except DcpRemoteError as error:
            # That the object is missing is known; another failure now does not explain that.
            return error if isinstance(error, BucketNotFoundError) else None
        return None

    def find_unproven_server(self) -> str | None:
        """Return the server and bucket if conditional writes are unproven there; None for Amazon's own servers.

        Sends no request; see `conditional_writes`.
        """
        with self._translated("open", ""):
            endpoint_url = str(self._wait(self._connection.client).meta.endpoint_url)
        check_endpoint(endpoint_url, named="AWS_ENDPOINT_URL, or `endpoint_url` of the profile,")
        return find_unproven_server(endpoint_url, self._place.bucket, known_hosts=S3.known_hosts)

    def _list(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        root = f"{self._place.prefix}/" if self._place.prefix else ""
        where: dict[str, Any] = {"StartAfter": root + after} if after else {}
        while True:
            with self._translated("list", prefix):
                page = self._call("list_objects_v2", Prefix=root + prefix, MaxKeys=_KEYS_MAX, **where)
                entries = [(entry["Key"].removeprefix(root), entry) for entry in page.get("Contents", [])]
                infos = [_make_info(key, entry, size_bytes=entry["Size"]) for key, entry in entries]
            # Some consoles create markers of "folders", which are left out.
            yield from (info for info in infos if info.size_bytes or (info.key and not info.key.endswith("/")))
            if not page.get("IsTruncated"):
                return
            before, where = where, {"ContinuationToken": page.get("NextContinuationToken")}
            if not where["ContinuationToken"] or where == before:
                raise StorageError(
                    "The listing does not go on: NextContinuationToken is missing or repeated.",
                    url=self.url,
                    after=infos[-1].key if infos else after,
                )

    def _delete_batch(self, paths: Mapping[str, str]) -> Mapping[str, StorageError]:
        batch = {"Objects": [{"Key": path} for path in paths], "Quiet": True}
        try:
            with self._translated("delete", ""):
                answer = self._call("delete_objects", Delete=batch)
        except StorageError as error:
            return dict.fromkeys(paths.values(), error)
        failed: dict[str, StorageError] = {}
        for entry in answer.get("Errors", []):
            key = paths.get(entry.get("Key"))
            failure = make_answer_error(0, entry.get("Code", ""), verb="delete", url=self._named(key or ""))
            # An absent object counts as deleted. An error that names none of the keys is reported for all of them.
            if not isinstance(failure, ObjectNotFoundError):
                failed.update(dict.fromkeys(paths.values() if key is None else [key], failure))
        return failed

    def _call(self, method: str, *, size_bytes: int = 0, **parameters: object) -> _Parsed:
        """Send one request by a method of botocore's client; `size_bytes` is the size of its body."""
        return self._wait(self._connection.call, method, size_bytes=size_bytes, Bucket=self._place.bucket, **parameters)

    def _read(self, answer: _Parsed, limit_bytes: int) -> bytes:
        """Read a body and close it; of one that is longer than the limit, return a part longer than the limit."""
        return self._wait(_read_body, answer["Body"], limit_bytes, size_bytes=max(0, limit_bytes))

    def _wait(
        self, function: Callable[..., Awaitable[_Answer]], *arguments: object, size_bytes: int = 0, **parameters: object
    ) -> _Answer:
        """Call a function in s3fs's event loop, and return its result."""
        seconds = min(Timeouts().request_seconds(size_bytes), rounded_up(remaining_seconds()))
        loop = self._connection.filesystem().loop
        answer: _Answer = sync(loop, function, *arguments, timeout=seconds, **parameters)
        return answer

    @contextmanager
    def _translated(self, verb: str, key: str, condition: Condition = "any") -> Iterator[None]:
        """Raise errors of the client in the block as this package's."""
        connection = self._connection
        try:
            yield
        except DcpRemoteError:  # some of these are OSErrors and ValueErrors too
            raise
        except Exception as error:  # noqa: BLE001  # `translate` handles every error
            sent_elsewhere = error.kwargs.get("error") if isinstance(error, HTTPClientError) else None
            if isinstance(sent_elsewhere, StorageError):
                raise sent_elsewhere from None  # raised by `_request_without_redirects`, and wrapped by aiobotocore
            secrets = connection.secrets(has_answered=isinstance(error, ClientError))
            failure: CloudError
            status, code = _status_and_code_of(error) if isinstance(error, ClientError) else (0, "")
            if code == NO_SUCH_BUCKET_CODE:
                meta = connection.filesystem().s3.meta
                bucket, endpoint_url = self._place.bucket, str(meta.endpoint_url)
                failure = make_s3_bucket_error(bucket, endpoint_url=endpoint_url, region_name=meta.region_name)
            elif isinstance(error, ClientError):
                cause = describe_cause(str(error), secrets)
                failure = make_answer_error(
                    status, code, verb=verb, url=self._named(key), cause=cause, condition=condition
                )
            else:
                what = _NO_CREDENTIALS if isinstance(error, NoCredentialsError) else ""
                failure = translate(error, verb=verb, url=self._named(key), secrets=secrets, what=what)
            raise failure from get_safe_cause(error, secrets)


class _Connection:
    """File system of s3fs in this process, made on first use from the arguments of the one that the user passed.

    The user's own file system is not used, since it may belong to another event loop, and its client repeats requests.
    """

    def __init__(self, arguments: Sequence[object], options: Mapping[str, object]) -> None:
        options = {name: value for name, value in options.items() if name not in _ARGUMENTS_OF_THE_CALLER}
        self.given = arguments, options
        self._lock = threading.Lock()
        self._filesystem: Any = None
        self._pid: int | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the arguments of the file system, including explicit credentials; a session cannot be pickled."""
        if self.given[1].get("session") is not None:
            raise InvalidArgumentError(
                "A file system that was created with a `session` cannot be sent to other processes: create it with "
                "`profile`, or `key` and `secret`, or take credentials from the environment."
            )
        return _Connection, self.given

    def filesystem(self) -> Any:
        """Return the file system; refused in a process that was forked after the first request."""
        pid = refuse_after_fork(self._pid)
        with self._lock:
            if self._filesystem is None:
                from s3fs import S3FileSystem  # takes half a second, and unpickling needs no s3fs

                arguments, options = self.given
                filesystem = S3FileSystem(*arguments, **options, skip_instance_cache=True)
                filesystem.config_kwargs = {
                    **filesystem.config_kwargs,
                    "retries": {"total_max_attempts": 1},
                    "http_session_cls": _without_redirects(filesystem.config_kwargs.get("http_session_cls")),
                }
                # The conditions of writes are set by the store alone.
                given = filesystem.s3_additional_kwargs
                filesystem.s3_additional_kwargs = {name: given[name] for name in given if not name.startswith("If")}
                self._pid, self._filesystem = pid, filesystem
            return self._filesystem

    async def client(self) -> Any:
        """Return botocore's client, whose `meta` describes it. Sends no request, except to find credentials."""
        return await self.filesystem().set_session()

    async def call(self, method: str, **parameters: object) -> _Parsed:
        """Send one request by a method of botocore's client, with the user's parameters for all requests."""
        await self.client()
        filesystem = self.filesystem()
        send = getattr(await filesystem.get_s3(parameters["Bucket"]), method)
        # Not through s3fs, which drops the condition of a write if botocore is too old to know it.
        answer: _Parsed = await send(**filesystem._get_s3_method_kwargs(send, filesystem.req_kw) | parameters)
        return answer

    def secrets(self, *, has_answered: bool) -> list[str]:
        """Return the secrets that no error may show: credentials that the user passed, or that botocore found.

        botocore is asked only if the store has answered, since the answer may quote what signed the request.
        """
        filesystem = self._filesystem
        if filesystem is None:
            return []
        options = (filesystem.storage_options, filesystem.client_kwargs, filesystem.s3_additional_kwargs)
        named = [value for each in options for name, value in each.items() if _SECRET_NAME.search(name)]
        given = [filesystem.secret, filesystem.token, *named]
        given_key = filesystem.key or filesystem.client_kwargs.get("aws_access_key_id")
        if has_answered and not (filesystem.anon or given_key):

            async def find() -> list[str | None]:
                credentials = await filesystem.session.get_credentials()
                frozen = await credentials.get_frozen_credentials()
                return [frozen.secret_key, frozen.token]

            with suppress(Exception):  # the error of the request is the one to report
                given += sync(filesystem.loop, find, timeout=_SECRETS_SECONDS)
        return [secret for secret in given if isinstance(secret, str) and secret]


async def _request_without_redirects(session: Any, method: str, **parameters: object) -> Any:
    answer = await session.request(method, allow_redirects=False, **parameters)
    # A redirect to another region names it in a header. Without the header, botocore would repeat requests for ever.
    if answer.status in _REDIRECTS and "x-amz-bucket-region" not in answer.headers:
        answer.close()
        raise StorageError(SENT_ELSEWHERE, url=str(answer.url.with_query(None)), status=answer.status)
    return answer


def _without_redirects(given: Any) -> Any:
    """Return a class of aiobotocore's HTTP sessions, derived from `given` or its default, that follows no redirects.

    A redirect would send the session token to any host, and take that host's answer for the store's.
    """
    from aiobotocore.httpsession import AIOHTTPSession

    base: Any = given or AIOHTTPSession
    if not issubclass(base, AIOHTTPSession):
        return base  # based on httpx, which follows no redirects
    if not hasattr(base, "_get_session"):
        raise InvalidArgumentError("This version of aiobotocore always follows redirects: update aiobotocore and s3fs.")

    class SessionWithoutRedirects(base):  # type: ignore[misc]  # the class has no stubs
        # Private, since aiobotocore has no option for redirects, and `send` gives aiohttp none.
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            return SimpleNamespace(request=partial(_request_without_redirects, session))

    return SessionWithoutRedirects


async def _read_body(body: Any, limit_bytes: int) -> bytes:
    data = bytearray()
    try:
        while len(data) <= limit_bytes and (part := await body.read(_READ_BYTES)):
            data += part
    except Exception as error:
        # Some of these errors are botocore's, and some aiohttp's.
        raise ResponseStreamingError(error=error) from error
    finally:
        body.close()
    return bytes(data)


class _Body(io.RawIOBase):
    """File of buffers one after another, which are not joined, so that a save needs no more memory."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        """Begin at the first byte."""
        self._views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        self._ends = list(itertools.accumulate(map(len, self._views)))
        self.size_bytes = self._ends[-1] if self._ends else 0
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True; botocore reads a body twice, for its checksum and to send it."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, within the buffers, and return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        self._position = min(max(start + offset, 0), self.size_bytes)
        return self._position

    def readinto(self, target: Any) -> int:
        """Read from the buffer at the position, at most to its end; return the number of bytes."""
        if self._position == self.size_bytes:
            return 0
        index = bisect.bisect_right(self._ends, self._position)
        part = self._views[index][self._position - self._ends[index] :][: len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)


def _status_and_code_of(answer: ClientError) -> tuple[int, str]:
    """Return the HTTP status of an answer, and S3's error code; 0 and empty if unknown."""
    status = answer.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status), str(answer.response.get("Error", {}).get("Code", ""))


def _make_version(answer: _Parsed) -> Version:
    return Version(etag=quote_etag(answer.get("ETag")))


def _make_info(key: str, answer: _Parsed, *, size_bytes: int) -> ObjectInfo:
    modified_seconds = answer["LastModified"].timestamp()
    return ObjectInfo(key=key, size_bytes=size_bytes, version=_make_version(answer), modified_seconds=modified_seconds)
