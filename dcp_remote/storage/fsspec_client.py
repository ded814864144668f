"""Requests through the S3 client of an s3fs file system, from any thread, with the errors of dcp_remote.

s3fs's own `call_s3` is not used. It repeats requests by itself, recognises throttling by the text of an error, and
drops parameters that an older botocore does not have: a conditional write would silently become a plain one.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar

from botocore.exceptions import ClientError, HTTPClientError, NoCredentialsError, ResponseStreamingError
from botocore.parsers import ResponseParserError

from dcp_remote.common.arrays import Buffer
from dcp_remote.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import Condition
from dcp_remote.storage.cloud.errors import (
    NO_SUCH_BUCKET,
    SENT_ELSEWHERE,
    WHAT,
    CloudError,
    advised,
    cause_of,
    translate,
)

_Answer = TypeVar("_Answer")

# Answer of S3 to one request, as parsed by botocore.
Parsed: TypeAlias = dict[str, Any]

NO_SUCH_BUCKET_CODE = "NoSuchBucket"

# Arguments of s3fs that concern the event loop and caches of the caller, which the store does not use.
_ARGUMENTS_OF_THE_CALLER = ("asynchronous", "loop", "skip_instance_cache")

_NO_CREDENTIALS = (
    "No credentials were found, and nothing was sent: give the file system `key` and `secret`, or `profile`, or put "
    "them into the environment; `anon=True` reads public buckets without."
)

# Bytes per read of a body, so that a body that is longer than expected is not read to its end.
_READ_BYTES = 1024 * 1024

# Limit for asking botocore for the credentials that it found, in order to hide them in an error; most are cached.
_SECRETS_SECONDS = 5.0

# Error classes by S3's error code, where the HTTP status is ambiguous; failed keys of DeleteObjects have only a code.
KINDS_BY_CODE: dict[str, type[StorageError]] = {
    "RequestTimeout": TransientStorageError,  # these five have status 400, and are caused by the network
    "IncompleteBody": TransientStorageError,
    "BadDigest": TransientStorageError,
    "XAmzContentSHA256Mismatch": TransientStorageError,
    "XAmzContentChecksumMismatch": TransientStorageError,
    "ExpiredToken": PermissionDeniedError,  # these three have status 400 as well
    "InvalidToken": PermissionDeniedError,
    "TokenRefreshRequired": PermissionDeniedError,
    "AccessDenied": PermissionDeniedError,
    "NoSuchKey": ObjectNotFoundError,
    "NoSuchVersion": ObjectNotFoundError,
    "InternalError": TransientStorageError,
    "ServiceUnavailable": TransientStorageError,
    "SlowDown": TransientStorageError,
}

# Error classes by HTTP status. Any other status is transient from 500 on, and final below.
_KINDS_BY_STATUS: dict[int, type[StorageError]] = {
    HTTPStatus.UNAUTHORIZED: PermissionDeniedError,
    HTTPStatus.FORBIDDEN: PermissionDeniedError,
    HTTPStatus.NOT_FOUND: ObjectNotFoundError,
    HTTPStatus.REQUEST_TIMEOUT: TransientStorageError,
    HTTPStatus.CONFLICT: TransientStorageError,  # not for a conditional write; see `_kind`
    HTTPStatus.PRECONDITION_FAILED: ConditionFailedError,
    HTTPStatus.TOO_MANY_REQUESTS: TransientStorageError,
    HTTPStatus.NOT_IMPLEMENTED: StorageError,
}

_REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, slots=True)
class Configuration:
    """Arguments to make a file system of s3fs.

    Attributes:
        bucket: Bucket that requests go to.
        arguments: Positional arguments of `S3FileSystem`.
        options: Keyword arguments of `S3FileSystem`.
    """

    bucket: str
    arguments: tuple[object, ...] = field(repr=False)  # some are secrets
    options: Mapping[str, object] = field(repr=False)

    def __post_init__(self) -> None:
        """Drop the arguments that concern the caller's event loop and caches."""
        kept = {name: value for name, value in self.options.items() if name not in _ARGUMENTS_OF_THE_CALLER}
        object.__setattr__(self, "options", kept)


@dataclass(frozen=True, slots=True)
class Call:
    """Function that sends one request to a bucket, by the name of the client's method and its other parameters."""

    filesystem: Any
    client: Any
    bucket: str

    async def __call__(self, method: str, **parameters: object) -> Parsed:
        """Send a request and return the answer of the store.

        Raises:
            Exception: Any error of the client.
        """
        meta = self.client.meta
        operation = meta.service_model.operation_model(meta.method_to_api_mapping[method])
        # Parameters that the user set for every request that has them: encryption, storage class, requester pays. The
        # conditions of writes are set by this package alone.
        user_parameters = {
            name: value
            for name, value in {**self.filesystem.s3_additional_kwargs, **self.filesystem.req_kw}.items()
            if name in operation.input_shape.members and not name.startswith("If")
        }
        # Not filtered, so that a botocore that does not know the condition of a write refuses the call.
        answer: Parsed = await getattr(self.client, method)(**user_parameters, Bucket=self.bucket, **parameters)
        return answer

    async def endpoint_url(self) -> str:
        """Return the URL of the server that requests go to. Sends no request."""
        return str(self.client.meta.endpoint_url)


class Connection:
    """File system of s3fs in this process, made on first use from the arguments of the one that the user passed.

    The user's own file system is not used, since it may belong to another event loop, and its client repeats requests.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._lock = threading.Lock()
        self._filesystem: Any = None
        self._pid: int | None = None

    def configuration(self) -> Configuration:
        """Return the arguments, for another process.

        Raises:
            InvalidArgumentError: A session is among the arguments, which cannot be pickled.
        """
        if self._configuration.options.get("session") is not None:
            raise InvalidArgumentError(
                "A file system that was created with a `session` cannot be sent to other processes: create it with "
                "`profile`, or `key` and `secret`, or take credentials from the environment.",
                bucket=self._configuration.bucket,
            )
        return self._configuration

    def run(self, request: Callable[[Call], Awaitable[_Answer]], *, seconds: float) -> _Answer:
        """Run a request on fsspec's event loop, and return its result.

        Raises:
            InvalidArgumentError: This process was forked after the first request.
            TimeoutError: The request took longer than `seconds`, and was cancelled.
            Exception: Any error of the client.
        """
        filesystem, bucket = self._open(), self._configuration.bucket

        async def bounded() -> _Answer:
            async with asyncio.timeout(seconds):
                await filesystem.set_session()
                client = await filesystem.get_s3(bucket)
                try:
                    return await request(Call(filesystem, client, bucket))
                except HTTPClientError as error:
                    if isinstance(error.__context__, StorageError):
                        raise error.__context__ from None  # raised below, and wrapped by aiobotocore
                    raise

        future = asyncio.run_coroutine_threadsafe(bounded(), filesystem.loop)
        try:
            return future.result()
        finally:
            future.cancel()  # if this thread was interrupted while it waited

    def secrets(self, *, answered: bool) -> list[str]:
        """Return the secrets that no error may show: credentials that the user passed, or that botocore found.

        Args:
            answered: True if the store answered, so that there are credentials, which it may have quoted.
        """
        if self._filesystem is None:
            return []
        filesystem = self._filesystem
        client_kwargs = filesystem.client_kwargs
        given = [
            filesystem.secret,
            filesystem.token,
            client_kwargs.get("aws_secret_access_key"),
            client_kwargs.get("aws_session_token"),
            filesystem.s3_additional_kwargs.get("SSECustomerKey"),
        ]
        if answered and not (filesystem.anon or filesystem.key or client_kwargs.get("aws_access_key_id")):

            async def find() -> list[str | None]:
                async with asyncio.timeout(_SECRETS_SECONDS):
                    credentials = await filesystem.session.get_credentials()
                    frozen = await credentials.get_frozen_credentials()
                    return [frozen.secret_key, frozen.token]

            with suppress(Exception):  # the error of the request is the one to report
                given += asyncio.run_coroutine_threadsafe(find(), filesystem.loop).result()
        return [secret for secret in given if isinstance(secret, str) and secret]

    def _open(self) -> Any:
        if self._pid not in (None, os.getpid()):
            raise InvalidArgumentError(
                "This process was forked from one that had used this store already, and clients do not survive a fork: "
                "start processes with `spawn` or `forkserver`.",
                pid=os.getpid(),
                forked_from=self._pid,
            )
        configuration = self._configuration
        with self._lock:
            if self._filesystem is None:
                from s3fs import S3FileSystem  # takes half a second, and unpickling needs no s3fs

                filesystem = S3FileSystem(*configuration.arguments, **configuration.options, skip_instance_cache=True)
                filesystem.config_kwargs = {
                    **filesystem.config_kwargs,
                    "retries": {"total_max_attempts": 1},
                    "http_session_cls": _unredirected(filesystem.config_kwargs.get("http_session_cls")),
                }
                self._pid, self._filesystem = os.getpid(), filesystem
            return self._filesystem


async def _unredirected_answer(session: Any, method: str, **parameters: object) -> Any:
    answer = await session.request(method, allow_redirects=False, **parameters)
    # A redirect to another region names it in a header. Without the header, botocore would repeat requests for ever.
    if answer.status in _REDIRECTS and "x-amz-bucket-region" not in answer.headers:
        answer.close()
        raise StorageError(SENT_ELSEWHERE, url=str(answer.url.with_query(None)), status=answer.status)
    return answer


def _unredirected(given: Any) -> Any:
    """Return a class of aiobotocore's HTTP sessions, derived from `given` or its default, that follows no redirects.

    A redirect would send the session token to any host, and take that host's answer for the store's.
    """
    from aiobotocore.httpsession import AIOHTTPSession

    kind: Any = given or AIOHTTPSession
    if not issubclass(kind, AIOHTTPSession):
        return kind  # based on httpx, which follows no redirects
    if not hasattr(kind, "_get_session"):
        raise InvalidArgumentError("This version of aiobotocore always follows redirects: update aiobotocore and s3fs.")

    class Unredirected(kind):  # type: ignore[misc]  # the class has no stubs
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            return SimpleNamespace(request=partial(_unredirected_answer, session))

    return Unredirected


def translated(
    error: Exception, *, verb: str, url: str, secrets: Sequence[str], condition: Condition = "any"
) -> CloudError:
    """Return the error of dcp_remote for an error of the client: by code and status of an answer, else by its class.

    Args:
        error: Error of the client.
        verb: Verb of the store contract.
        url: URL of the object or prefix.
        secrets: Strings that the error must not show.
        condition: Condition of a put.
    """
    cause = cause_of(str(error), secrets)
    if isinstance(error, ResponseParserError):  # a proxy's page, or half an answer
        return TransientStorageError(WHAT[TransientStorageError], verb=verb, url=url, cause=cause)
    if not isinstance(error, ClientError):
        what = _NO_CREDENTIALS if isinstance(error, NoCredentialsError) else ""
        return translate(error, verb=verb, url=url, secrets=secrets, what=what)
    code = str(error.response.get("Error", {}).get("Code", ""))
    kind = _kind(code, status_of(error), condition)
    what = NO_SUCH_BUCKET if code == NO_SUCH_BUCKET_CODE else advised(WHAT[kind], code)
    return kind(what, verb=verb, url=url, code=code, cause=cause)


def status_of(error: ClientError) -> int:
    """Return the HTTP status of an answer; 0 if unknown."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _kind(code: str, status: int, condition: Condition) -> type[StorageError]:
    if condition != "any" and status == HTTPStatus.CONFLICT:
        return ConditionFailedError  # another conditional write of this key is in progress
    if condition not in ("any", "absent") and status == HTTPStatus.NOT_FOUND and code != NO_SUCH_BUCKET_CODE:
        return ConditionFailedError  # a swap of an object that does not exist
    if code in KINDS_BY_CODE:
        return KINDS_BY_CODE[code]
    default = TransientStorageError if status >= HTTPStatus.INTERNAL_SERVER_ERROR else StorageError
    return _KINDS_BY_STATUS.get(status, default)


async def read_body(body: Any, *, limit_bytes: int) -> bytes:
    """Read a body and close it. If the body is longer than `limit_bytes`, return a part longer than that.

    Raises:
        ResponseStreamingError: The body ended early or did not match its checksum, by a fault of the network.
    """
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
        self._views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        self.size_bytes = sum(map(len, self._views))
        self._position = 0
        self._number, self._begin = 0, 0  # index of the buffer that holds the position, and its offset

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
        self._number = self._begin = 0
        while self._number < len(self._views) and self._begin + len(self._views[self._number]) <= self._position:
            self._begin += len(self._views[self._number])
            self._number += 1
        return self._position

    def readinto(self, target: Any) -> int:
        """Fill `target` from as many buffers as needed; return the number of bytes read."""
        filled = 0
        room = memoryview(target).cast("B")
        while filled < len(room) and self._number < len(self._views):
            view = self._views[self._number]
            part = view[self._position - self._begin :][: len(room) - filled]
            room[filled : filled + len(part)] = part
            filled += len(part)
            self._position += len(part)
            if self._position == self._begin + len(view):
                self._begin = self._position
                self._number += 1
        return filled
