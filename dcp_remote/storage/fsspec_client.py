"""s3fs's client of S3, lent: one request at a time, from any thread, with errors of ours.

s3fs's own `call_s3` is not used. It repeats requests by itself, knows throttling by words in the text of an error, and
leaves out what an older botocore has no parameter for: a conditional write would silently become a plain one.
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

from dcp_remote.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import Buffer, Condition
from dcp_remote.storage.cloud_errors import (
    NO_SUCH_BUCKET,
    SENT_ELSEWHERE,
    WHAT,
    CloudError,
    advised,
    cause_of,
    translate,
)

_Answer = TypeVar("_Answer")

# S3's answer to one request, as botocore parses it.
Parsed: TypeAlias = dict[str, Any]

NO_SUCH_BUCKET_CODE = "NoSuchBucket"

# Arguments of s3fs that say how the caller runs, not where the bytes lie: the store runs by itself.
_ARGUMENTS_OF_THE_CALLER = ("asynchronous", "loop", "skip_instance_cache")

_NO_CREDENTIALS = (
    "No credentials were found, and nothing was sent: give the file system `key` and `secret`, or `profile`, or put "
    "them into the environment; `anon=True` reads public buckets without."
)

# A body is read in pieces of this, so that one that is longer than it should be is not kept.
_READ_BYTES = 1024 * 1024

# Enough to ask for what was found already: an error is not held up for what it might have to hide.
_SECRETS_SECONDS = 5.0

# What S3's codes mean where the status does not tell; a failed part of DeleteObjects has nothing but a code.
KINDS_BY_CODE: dict[str, type[StorageError]] = {
    "RequestTimeout": TransientStorageError,  # these five are 400, and a matter of the way there
    "IncompleteBody": TransientStorageError,
    "BadDigest": TransientStorageError,
    "XAmzContentSHA256Mismatch": TransientStorageError,
    "XAmzContentChecksumMismatch": TransientStorageError,
    "ExpiredToken": PermissionDeniedError,  # these three are 400 as well
    "InvalidToken": PermissionDeniedError,
    "TokenRefreshRequired": PermissionDeniedError,
    "AccessDenied": PermissionDeniedError,
    "NoSuchKey": ObjectNotFoundError,
    "NoSuchVersion": ObjectNotFoundError,
    "InternalError": TransientStorageError,
    "ServiceUnavailable": TransientStorageError,
    "SlowDown": TransientStorageError,
}

# A status that is not here: from 500 on it is the server's own failure, for now; below it is about the request.
_KINDS_BY_STATUS: dict[int, type[StorageError]] = {
    HTTPStatus.UNAUTHORIZED: PermissionDeniedError,
    HTTPStatus.FORBIDDEN: PermissionDeniedError,
    HTTPStatus.NOT_FOUND: ObjectNotFoundError,
    HTTPStatus.REQUEST_TIMEOUT: TransientStorageError,
    HTTPStatus.CONFLICT: TransientStorageError,  # to a conditional write it is an answer; see `_kind`
    HTTPStatus.PRECONDITION_FAILED: ConditionFailedError,
    HTTPStatus.TOO_MANY_REQUESTS: TransientStorageError,
    HTTPStatus.NOT_IMPLEMENTED: StorageError,
}


_REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, slots=True)
class Configuration:
    """How to make a file system of s3fs.

    Attributes:
        bucket: Where requests go.
        arguments: Of `S3FileSystem`, by position.
        options: Of `S3FileSystem`, by name.
    """

    bucket: str
    arguments: tuple[object, ...] = field(repr=False)  # some are secrets
    options: Mapping[str, object] = field(repr=False)

    def __post_init__(self) -> None:
        """Leave out what is the caller's own."""
        kept = {name: value for name, value in self.options.items() if name not in _ARGUMENTS_OF_THE_CALLER}
        object.__setattr__(self, "options", kept)


@dataclass(frozen=True, slots=True)
class Call:
    """Sends one request, by the name of the client's method and its parameters beside the bucket."""

    filesystem: Any
    client: Any
    bucket: str

    async def __call__(self, method: str, **parameters: object) -> Parsed:
        """The answer of the store.

        Raises:
            Exception: Whatever the client raises.
        """
        meta = self.client.meta
        operation = meta.service_model.operation_model(meta.method_to_api_mapping[method])
        # What the user wants said with each request that knows it: encryption, storage class, who pays. No conditions.
        theirs = {
            name: value
            for name, value in {**self.filesystem.s3_additional_kwargs, **self.filesystem.req_kw}.items()
            if name in operation.input_shape.members and not name.startswith("If")
        }
        # Ours are not filtered: a botocore that does not know the condition of a write refuses the call.
        answer: Parsed = await getattr(self.client, method)(**theirs, Bucket=self.bucket, **parameters)
        return answer

    async def endpoint_url(self) -> str:
        """The server that requests go to. Sends nothing."""
        return str(self.client.meta.endpoint_url)


class Connection:
    """A file system of s3fs in this process, made when it is needed from the arguments of the one that was given.

    Not that one itself: it may belong to the caller's own event loop, and its client repeats requests.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._lock = threading.Lock()
        self._filesystem: Any = None
        self._pid: int | None = None

    def configuration(self) -> Configuration:
        """What can be sent to another process.

        Raises:
            InvalidArgumentError: A session is in it, which cannot.
        """
        if self._configuration.options.get("session") is not None:
            raise InvalidArgumentError(
                "A file system that was given a `session` cannot be sent to other processes: give it `profile`, or "
                "`key` and `secret`, or leave credentials to the environment.",
                bucket=self._configuration.bucket,
            )
        return self._configuration

    def run(self, request: Callable[[Call], Awaitable[_Answer]], *, seconds: float) -> _Answer:
        """Let a request run on fsspec's event loop, and wait for its end.

        Raises:
            InvalidArgumentError: This process was forked after the first request.
            TimeoutError: It took longer than `seconds`, and was ended.
            Exception: Whatever the client raises.
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
                        raise error.__context__ from None  # of ours, in which aiobotocore sees one more of aiohttp's
                    raise

        future = asyncio.run_coroutine_threadsafe(bounded(), filesystem.loop)
        try:
            return future.result()
        finally:
            future.cancel()  # for whoever is interrupted while it waits; of an answered one it does nothing

    def secrets(self, *, answered: bool) -> list[str]:
        """What no error may show: credentials that were given, and those that were found.

        Args:
            answered: The store answered, so that there are credentials, and it may have quoted them.
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

            with suppress(Exception):  # the error that is being told is the one that counts
                given += asyncio.run_coroutine_threadsafe(find(), filesystem.loop).result()
        return [secret for secret in given if isinstance(secret, str) and secret]

    def _open(self) -> Any:
        if self._pid not in (None, os.getpid()):
            raise InvalidArgumentError(
                "This process was forked from one that had used this store already, whose client cannot follow: start "
                "processes with `spawn` or `forkserver`.",
                pid=os.getpid(),
                forked_from=self._pid,
            )
        configuration = self._configuration
        with self._lock:
            if self._filesystem is None:
                from s3fs import S3FileSystem  # half a second, and whoever only loads a pickle need not have it

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
    # Another region is named in a header. To find one that is not, botocore asks again and again without end.
    if answer.status in _REDIRECTS and "x-amz-bucket-region" not in answer.headers:
        answer.close()
        raise StorageError(SENT_ELSEWHERE, url=str(answer.url.with_query(None)), status=answer.status)
    return answer


def _unredirected(given: Any) -> Any:
    """The class of aiobotocore's HTTP sessions that was given, or its usual one, without following redirects.

    They would take the session token to any host, and what that answers for the store's answer.
    """
    from aiobotocore.httpsession import AIOHTTPSession

    kind: Any = given or AIOHTTPSession
    if not issubclass(kind, AIOHTTPSession):
        return kind  # of httpx, which follows none
    if not hasattr(kind, "_get_session"):
        raise InvalidArgumentError("This aiobotocore cannot be kept from following redirects: update it with s3fs.")

    class Unredirected(kind):  # type: ignore[misc]  # a class of no stubs
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            return SimpleNamespace(request=partial(_unredirected_answer, session))

    return Unredirected


def translated(
    error: Exception, *, verb: str, url: str, secrets: Sequence[str], condition: Condition = "any"
) -> CloudError:
    """Our error for one of the client: of an answer by its code and status, of all else by its class.

    Args:
        error: What the client raised.
        verb: Of the store contract.
        url: Of the object or the prefix.
        secrets: What must not be shown, whoever echoes it.
        condition: Of a put.
    """
    cause = cause_of(str(error), secrets)
    if isinstance(error, ResponseParserError):  # a proxy's page, or half an answer: no word of S3
        return TransientStorageError(WHAT[TransientStorageError], verb=verb, url=url, cause=cause)
    if not isinstance(error, ClientError):
        what = _NO_CREDENTIALS if isinstance(error, NoCredentialsError) else ""
        return translate(error, verb=verb, url=url, secrets=secrets, what=what)
    code = str(error.response.get("Error", {}).get("Code", ""))
    kind = _kind(code, status_of(error), condition)
    what = NO_SUCH_BUCKET if code == NO_SUCH_BUCKET_CODE else advised(WHAT[kind], code)
    return kind(what, verb=verb, url=url, code=code, cause=cause)


def status_of(error: ClientError) -> int:
    """The HTTP status of an answer; 0 if it is not known."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _kind(code: str, status: int, condition: Condition) -> type[StorageError]:
    if condition != "any" and status == HTTPStatus.CONFLICT:
        return ConditionFailedError  # another conditional write of this key is under way
    if condition not in ("any", "absent") and status == HTTPStatus.NOT_FOUND and code != NO_SUCH_BUCKET_CODE:
        return ConditionFailedError  # a swap of what is not there
    if code in KINDS_BY_CODE:
        return KINDS_BY_CODE[code]
    passing = TransientStorageError if status >= HTTPStatus.INTERNAL_SERVER_ERROR else StorageError
    return _KINDS_BY_STATUS.get(status, passing)


async def read_body(body: Any, *, limit_bytes: int) -> bytes:
    """Read a body, and close it. Of one that is longer than the limit comes a part that is longer, too.

    Raises:
        ResponseStreamingError: It broke off, or is not what the store said it is: the network is at fault.
    """
    parts: list[bytes] = []
    size_bytes = 0
    try:
        while size_bytes <= limit_bytes and (part := await body.read(_READ_BYTES)):
            parts.append(part)
            size_bytes += len(part)
    except Exception as error:
        # Some classes of aiohttp are errors of botocore by now, and some are still aiohttp's own.
        raise ResponseStreamingError(error=error) from error
    finally:
        body.close()
    return b"".join(parts)


class Body(io.RawIOBase):
    """Buffers as one file to read: nothing is joined, so that a save needs no memory beside its buffers."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        self.size_bytes = sum(map(len, self._views))
        self._position = 0
        self._number, self._begin = 0, 0  # the buffer that holds the position, and where it begins

    def readable(self) -> bool:
        """It is there to be read."""
        return True

    def seekable(self) -> bool:
        """It can be read again."""
        return True

    def tell(self) -> int:
        """Where the next byte is read, from the beginning of the first buffer."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go elsewhere: botocore reads a body twice, for its checksum and to send it, and asks for its end."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        self._position = min(max(start + offset, 0), self.size_bytes)
        self._number = self._begin = 0
        while self._number < len(self._views) and self._begin + len(self._views[self._number]) <= self._position:
            self._begin += len(self._views[self._number])
            self._number += 1
        return self._position

    def readinto(self, target: Any) -> int:
        """Fill the target, over as many buffers as that takes."""
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
