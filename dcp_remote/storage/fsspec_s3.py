"""Store on s3fs's `S3FileSystem`: each verb is one request of its S3 client.

fsspec's own way to create a file, `pipe_file(mode="create")`, uploads large files in parts, does not return the version
and is repeated by s3fs; and directory listings may come from a cache. So requests are sent by `call_s3`, from a file
system that is made of the arguments of the user's.
"""

from __future__ import annotations

import bisect
import io
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar

from botocore.exceptions import ClientError, HTTPClientError, NoCredentialsError, ResponseStreamingError
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync

from dcp_remote.common.arrays import Buffer
from dcp_remote.errors import (
    BucketNotFoundError,
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import (
    Capabilities,
    Condition,
    Content,
    ObjectInfo,
    Version,
    make_oversize_error,
    make_short_error,
    may_follow,
    quote_etag,
)
from dcp_remote.storage.cloud.config import Timeouts
from dcp_remote.storage.cloud.errors import (
    NO_SUCH_BUCKET_CODE,
    SENT_ELSEWHERE,
    WHAT,
    CloudError,
    describe_cause,
    get_safe_cause,
    make_answer_error,
    make_bucket_error,
    translate,
)
from dcp_remote.storage.cloud.options import check_endpoint
from dcp_remote.storage.conditional_writes import find_unproven_server
from dcp_remote.storage.request_context import remaining_seconds, rounded_up, writes_nothing
from dcp_remote.storage.url import ParsedUrl, check_key, check_list_prefix

_Answer = TypeVar("_Answer")

# Answer of S3 to one request, as parsed by botocore.
_Parsed: TypeAlias = dict[str, Any]

_CAPABILITIES = Capabilities(compare_and_swap=True, shared=True)

# Most keys of S3 in one DeleteObjects request, and in one page of a listing.
_KEYS_MAX = 1000

# Key that no object has, so that a GET shows whether the bucket exists.
_PROBE_KEY = "dcp-remote-probe"

# Bytes per read of a body, so that a body that is longer than expected is not read to its end.
_READ_BYTES = 1024 * 1024

# Limit for asking botocore for the credentials that it found, in order to hide them in an error; most are cached.
_SECRETS_SECONDS = 5.0

# Limit for asking a client that has sent requests for its endpoint and region, which sends none.
_META_SECONDS = 5.0

_REDIRECTS = frozenset({301, 302, 303, 307, 308})

# Arguments of s3fs that concern the event loop and caches of the caller, which the store does not use.
_ARGUMENTS_OF_THE_CALLER = ("asynchronous", "loop", "skip_instance_cache")

_NO_CREDENTIALS = (
    "No credentials were found, and nothing was sent: give the file system `key` and `secret`, or `profile`, or put "
    "them into the environment; `anon=True` reads public buckets without."
)


def open_s3fs_store(parsed: ParsedUrl, arguments: Sequence[object], options: Mapping[str, object]) -> FsspecStore:
    """Open a bucket and prefix by the positional and keyword arguments of an `S3FileSystem`. Sends no request."""
    return FsspecStore(parsed, _Connection(arguments, options))


class FsspecStore:
    """Store of a bucket and prefix, through the client of an s3fs file system; opened by `open_fsspec_store`.

    Safe to use from many threads. Pickles the arguments of the file system, including explicit credentials. Children
    share the client. A process that was forked after the first request cannot use the store: use `spawn`.

    No request is retried here, by s3fs or by botocore (`RetryingStore` retries, under a deadline). Buffers are sent
    without a copy of the whole. Checksums are botocore's: CRC32 by default, another or none by `config_kwargs`.
    """

    def __init__(self, parsed: ParsedUrl, connection: _Connection) -> None:
        """Store the URL and the connection; sends no request."""
        self._parsed = parsed
        self._connection = connection

    def __repr__(self) -> str:
        """Return the class and the URL; arguments of the file system may be secrets."""
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the arguments of the file system, including explicit credentials."""
        return open_s3fs_store, (self._parsed, *self._connection.arguments())

    @property
    def url(self) -> str:
        """Implement `ObjectStore.url`. Like any `s3://` URL, it contains no endpoint."""
        return self._parsed.canonical

    @property
    def capabilities(self) -> Capabilities:
        """Implement `ObjectStore.capabilities`. S3's conditional PUT compares and swaps."""
        return _CAPABILITIES

    def child(self, prefix: str) -> FsspecStore:
        """Implement `ObjectStore.child`."""
        return FsspecStore(self._parsed.child(prefix), self._connection)

    def head(self, key: str) -> ObjectInfo:
        """Implement `ObjectStore.head`. One request; nothing is cached."""
        path = self._path(key)

        def request(client: _Client) -> ObjectInfo:
            answer = client.call("head_object", Key=path)
            return _make_info(key, answer, size_bytes=answer["ContentLength"])

        return self._ask("head", key, request)

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """Implement `ObjectStore.get`. One request."""
        path = self._path(key)

        def request(client: _Client) -> Content:
            answer = client.call("get_object", Key=path)
            size_bytes, data = answer.get("ContentLength"), b""
            if size_bytes is None or size_bytes <= limit_bytes:
                data = client.read(answer["Body"], limit_bytes=limit_bytes)
                size_bytes = len(data)
            if size_bytes > limit_bytes:
                answer["Body"].close()
                raise make_oversize_error(f"{self.url}/{key}", size_bytes=size_bytes, limit_bytes=limit_bytes)
            return Content(data=data, version=_make_version(answer))

        return self._ask("get", key, request, size_bytes=limit_bytes)

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Implement `ObjectStore.get_into`. One request; its answer is copied once."""
        path = self._path(key)
        stop = start + len(buffer)

        def request(client: _Client) -> bytes:
            try:
                answer = client.call("get_object", Key=path, Range=f"bytes={start}-{stop - 1}")
            except Exception as error:
                refused = answer_of(error)
                if refused is not None and status_of(refused) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    return b""
                raise
            if not answer.get("ContentRange", "").startswith(f"bytes {start}-"):
                answer["Body"].close()
                raise StorageError("The store does not serve ranges of an object.", url=f"{self.url}/{key}")
            return client.read(answer["Body"], limit_bytes=len(buffer))

        with writes_nothing():
            data = self._ask("get_into", key, request, size_bytes=len(buffer))
        fill(buffer, data, start=start, url=f"{self.url}/{key}")

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """Implement `ObjectStore.put`. One PUT, whatever the size; S3 verifies its checksum before it answers."""
        path = self._path(key)
        body = Body(buffers)
        match: dict[str, str | None] = {}
        if condition == "absent":
            match = {"IfNoneMatch": "*"}
        elif condition != "any":
            match = {"IfMatch": condition.etag}

        def request(client: _Client) -> Version:
            if match:
                client.require_known("PutObject", match)
            return _make_version(client.call("put_object", Key=path, Body=body, **match))

        return self._ask("put", key, request, size_bytes=body.size_bytes, condition=condition)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Implement `ObjectStore.list`. One request per 1,000 objects; never from s3fs's cache of listings."""
        check_list_prefix(prefix)
        return self._list(prefix, after)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """Implement `ObjectStore.delete`. One request per 1,000 keys; if it fails, all its keys are reported."""
        for key in keys:
            self._path(key)
        failed: dict[str, StorageError] = {}
        for first in range(0, len(keys), _KEYS_MAX):
            failed.update(self._delete_batch(keys[first : first + _KEYS_MAX]))
        return failed

    def explain_missing(self) -> BucketNotFoundError | None:
        """Return the error if an object is missing because its bucket does not exist, else None.

        One request, sent after a manifest was not found; never on the path of a save.
        """
        try:
            self.get(_PROBE_KEY, limit_bytes=0)
        except BucketNotFoundError as error:
            return error
        except DcpRemoteError:
            pass  # the store answered that the object is missing; another failure now does not explain that
        return None

    def find_unproven_server(self) -> str | None:
        """Return the server and bucket if conditional writes are unproven there; None for Amazon's own servers.

        Sends no request; see `conditional_writes`.
        """
        endpoint_url = self._ask("open", "", lambda client: str(client.meta.endpoint_url))
        check_endpoint(endpoint_url, named="AWS_ENDPOINT_URL, or `endpoint_url` of the profile,")
        return find_unproven_server("s3", endpoint_url, self._parsed.bucket)

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
                check_listed(self.url, info.key)
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

        def request(client: _Client) -> tuple[Sequence[ObjectInfo], str | None]:
            page = client.call("list_objects_v2", Prefix=root + prefix, MaxKeys=_KEYS_MAX, **where)
            infos = [
                _make_info(entry["Key"].removeprefix(root), entry, size_bytes=entry["Size"])
                for entry in page.get("Contents", [])
            ]
            return infos, page["NextContinuationToken"] if page.get("IsTruncated") else None

        return self._ask("list", prefix, request)

    def _delete_batch(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        paths = {self._path(key): key for key in keys}
        batch = {"Objects": [{"Key": path} for path in paths], "Quiet": True}
        try:
            answer = self._ask("delete", "", lambda client: client.call("delete_objects", Delete=batch))
        except StorageError as error:
            return dict.fromkeys(keys, error)
        failed: dict[str, StorageError] = {}
        for entry in answer.get("Errors", []):
            key = paths.get(entry.get("Key"))
            failure = make_answer_error(0, entry.get("Code", ""), verb="delete", url=self._named(key or ""))
            # An absent object counts as deleted. An error that names none of the keys is reported for all of them.
            if not isinstance(failure, ObjectNotFoundError):
                failed.update(dict.fromkeys([key] if key is not None else keys, failure))
        return failed

    def _make_bucket_error(self) -> BucketNotFoundError:
        endpoint_url = region_name = None
        with suppress(Exception):  # the error is worth more than the two details
            meta = _Client(self._connection.filesystem(), self._parsed.bucket, time.monotonic() + _META_SECONDS).meta
            endpoint_url, region_name = str(meta.endpoint_url), meta.region_name
        return make_bucket_error("s3", self._parsed.bucket, endpoint_url=endpoint_url, region_name=region_name)

    def _named(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def _ask(
        self,
        verb: str,
        key: str,
        request: Callable[[_Client], _Answer],
        *,
        size_bytes: int = 0,
        condition: Condition = "any",
    ) -> _Answer:
        """Send a request and return its result; raise errors of the client as errors of dcp_remote."""
        try:
            seconds = request_seconds(size_bytes)
            return request(_Client(self._connection.filesystem(), self._parsed.bucket, time.monotonic() + seconds))
        except DcpRemoteError:  # some of these are OSErrors and ValueErrors too
            raise
        except Exception as error:  # noqa: BLE001  # `_translate` handles every error
            sent_elsewhere = error.kwargs.get("error") if isinstance(error, HTTPClientError) else None
            if isinstance(sent_elsewhere, StorageError):
                raise sent_elsewhere from None  # raised by `_request_without_redirects`, and wrapped by aiobotocore
            answer = answer_of(error)
            secrets = self._connection.secrets(has_answered=answer is not None)
            if answer is not None and _code_of(answer) == NO_SUCH_BUCKET_CODE:
                raise self._make_bucket_error() from get_safe_cause(error, secrets)
            failure = _translate(error, verb=verb, url=self._named(key), secrets=secrets, condition=condition)
            raise failure from get_safe_cause(error, secrets)


class _Client:
    """Client of a bucket for one request of a store, which ends by `end_seconds` of the monotonic clock."""

    def __init__(self, filesystem: Any, bucket: str, end_seconds: float) -> None:
        self._filesystem, self._bucket, self._end_seconds = filesystem, bucket, end_seconds

    @property
    def meta(self) -> Any:
        """Description of botocore's client. Sends no request, except to find credentials."""
        return self._filesystem.connect(timeout=self._left()).meta

    def call(self, method: str, **parameters: object) -> _Parsed:
        """Send one request by a method of botocore's client; return the answer of the store, or raise s3fs's error."""
        filesystem = self._filesystem
        answer: _Parsed = filesystem.call_s3(
            method, filesystem.req_kw, Bucket=self._bucket, timeout=self._left(), **parameters
        )
        return answer

    def read(self, body: Any, *, limit_bytes: int) -> bytes:
        """Read a body and close it. If the body is longer than `limit_bytes`, return a part longer than that."""
        data: bytes = sync(self._filesystem.loop, _read_body, body, limit_bytes, timeout=self._left())
        return data

    def require_known(self, operation: str, parameters: Mapping[str, object]) -> None:
        """Refuse a botocore that does not know these parameters: s3fs would drop them, and overwrite a commit."""
        known = self.meta.service_model.operation_model(operation).input_shape.members
        if not parameters.keys() <= known.keys():
            raise InvalidArgumentError("This version of botocore has no conditional writes: update boto3 and s3fs.")

    def _left(self) -> float:
        return max(0.001, self._end_seconds - time.monotonic())  # fsspec takes 0 for no limit


class _Connection:
    """File system of s3fs in this process, made on first use from the arguments of the one that the user passed.

    The user's own file system is not used, since it may belong to another event loop, and its client repeats requests.
    """

    def __init__(self, arguments: Sequence[object], options: Mapping[str, object]) -> None:
        self._arguments = arguments
        self._options = {name: value for name, value in options.items() if name not in _ARGUMENTS_OF_THE_CALLER}
        self._lock = threading.Lock()
        self._filesystem: Any = None
        self._pid: int | None = None

    def arguments(self) -> tuple[Sequence[object], Mapping[str, object]]:
        """Return the arguments of the file system, for another process.

        Raises:
            InvalidArgumentError: A session is among the arguments, which cannot be pickled.
        """
        if self._options.get("session") is not None:
            raise InvalidArgumentError(
                "A file system that was created with a `session` cannot be sent to other processes: create it with "
                "`profile`, or `key` and `secret`, or take credentials from the environment."
            )
        return self._arguments, self._options

    def filesystem(self) -> Any:
        """Return the file system.

        Raises:
            InvalidArgumentError: This process was forked after the first request.
        """
        if self._pid not in (None, os.getpid()):
            raise InvalidArgumentError(
                "This process was forked from one that had used this store already, and clients do not survive a fork: "
                "start processes with `spawn` or `forkserver`.",
                pid=os.getpid(),
                forked_from=self._pid,
            )
        with self._lock:
            if self._filesystem is None:
                from s3fs import S3FileSystem  # takes half a second, and unpickling needs no s3fs

                filesystem = S3FileSystem(*self._arguments, **self._options, skip_instance_cache=True)
                filesystem.retries = 1  # attempts of `call_s3`
                filesystem.config_kwargs = {
                    **filesystem.config_kwargs,
                    "retries": {"total_max_attempts": 1},
                    "http_session_cls": _without_redirects(filesystem.config_kwargs.get("http_session_cls")),
                }
                # The conditions of writes are set by the store alone.
                given = filesystem.s3_additional_kwargs
                filesystem.s3_additional_kwargs = {name: given[name] for name in given if not name.startswith("If")}
                self._pid, self._filesystem = os.getpid(), filesystem
            return self._filesystem

    def secrets(self, *, has_answered: bool) -> list[str]:
        """Return the secrets that no error may show: credentials that the user passed, or that botocore found.

        Args:
            has_answered: True if the store answered, so that there are credentials, which it may have quoted.
        """
        filesystem = self._filesystem
        if filesystem is None:
            return []
        client_kwargs = filesystem.client_kwargs
        given = [
            filesystem.secret,
            filesystem.token,
            client_kwargs.get("aws_secret_access_key"),
            client_kwargs.get("aws_session_token"),
            filesystem.s3_additional_kwargs.get("SSECustomerKey"),
        ]
        if has_answered and not (filesystem.anon or filesystem.key or client_kwargs.get("aws_access_key_id")):

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
    parts: list[bytes] = []
    size_bytes = 0
    try:
        while size_bytes <= limit_bytes and (part := await body.read(_READ_BYTES)):
            parts.append(part)
            size_bytes += len(part)
    except Exception as error:
        # Some of these errors are botocore's, and some aiohttp's.
        raise ResponseStreamingError(error=error) from error
    finally:
        body.close()
    return b"".join(parts)


class Body(io.RawIOBase):
    """File that reads buffers one after another, without joining them, so that a save needs no more memory."""

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

    def tell(self) -> int:
        """Return the position, in bytes from the beginning of the first buffer."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, within the buffers, and return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        self._position = min(max(start + offset, 0), self.size_bytes)
        return self._position

    def readinto(self, target: Any) -> int:
        """Fill `target` from as many buffers as needed; return the number of bytes read."""
        room, filled = memoryview(target).cast("B"), 0
        first = bisect.bisect_right(self._ends, self._position)
        for view, end in zip(self._views[first:], self._ends[first:], strict=True):
            part = view[len(view) - (end - self._position) :][: len(room) - filled]
            room[filled : filled + len(part)] = part
            filled += len(part)
            self._position += len(part)
            if filled == len(room):
                break
        return filled


def _translate(error: Exception, *, verb: str, url: str, secrets: Sequence[str], condition: Condition) -> CloudError:
    """Return the error of dcp_remote for an error of s3fs: by code and status of an answer, else by its class."""
    answer = answer_of(error)
    if answer is not None:
        cause = describe_cause(str(answer), secrets)
        return make_answer_error(
            status_of(answer), _code_of(answer), verb=verb, url=url, cause=cause, condition=condition
        )
    if isinstance(error, ResponseParserError):  # a proxy's page, or half an answer
        cause = describe_cause(str(error), secrets)
        return TransientStorageError(WHAT[TransientStorageError], verb=verb, url=url, cause=cause)
    what = _NO_CREDENTIALS if isinstance(error, NoCredentialsError) else ""
    return translate(error, verb=verb, url=url, secrets=secrets, what=what)


def _code_of(answer: ClientError) -> str:
    return str(answer.response.get("Error", {}).get("Code", ""))


def answer_of(error: BaseException) -> ClientError | None:
    """Return botocore's error for an answer of S3, of which s3fs makes an OSError; None for any other error."""
    # `sync` of fsspec raises an error of its own from a TimeoutError, which s3fs raises from a ClientError.
    links = (error, error.__cause__, error.__cause__ and error.__cause__.__cause__)
    return next((link for link in links if isinstance(link, ClientError)), None)


def status_of(answer: ClientError) -> int:
    """Return the HTTP status of an answer; 0 if unknown."""
    return int(answer.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def request_seconds(size_bytes: int) -> float:
    """Return the time limit of a request of this thread, in seconds."""
    return min(Timeouts().request_seconds(size_bytes), rounded_up(remaining_seconds()))


def fill(buffer: memoryview, data: bytes, *, start: int, url: str) -> None:
    """Copy the answer to a read from offset `start` into the buffer.

    Raises:
        CorruptCheckpointError: The answer is shorter than the buffer, so the object ends before.
        StorageError: The answer is longer.
    """
    if len(data) > len(buffer):
        raise StorageError("The store sent more bytes than the requested range.", url=url)
    if len(data) < len(buffer):
        size_bytes = start + len(data) if data else None
        raise make_short_error(url, size_bytes=size_bytes, start=start, stop=start + len(buffer))
    buffer[:] = data


def check_listed(url: str, key: str) -> None:
    """Check a key that a listing below a URL gave.

    Raises:
        StorageError: No checkpoint has such a key.
    """
    try:
        check_key(key)
    except InvalidArgumentError as error:
        raise StorageError(
            "An object below this URL has a key that no checkpoint has, with empty, `.` or `..` parts, or a control "
            "character. Remove it.",
            url=url,
            key=key,
        ) from error


def _make_version(answer: _Parsed) -> Version:
    return Version(etag=quote_etag(answer.get("ETag")))


def _make_info(key: str, answer: _Parsed, *, size_bytes: int) -> ObjectInfo:
    modified_seconds = answer["LastModified"].timestamp()
    return ObjectInfo(key=key, size_bytes=size_bytes, version=_make_version(answer), modified_seconds=modified_seconds)
