"""S3, Google Cloud Storage and Azure Blob Storage as an `ObjectStore`.

obstore sends the requests: one plain PUT per object, from the caller's buffers without a copy and without the GIL; one
GET per read. botocore finds credentials, region and endpoint. Nothing is retried here (`RetryingStore` does that, under
a deadline), no upload is multipart, no bucket is ever created.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import GenericError

from dcp_remote.common.arrays import Buffer
from dcp_remote.errors import (
    ConditionFailedError,
    DcpRemoteError,
    InvalidArgumentError,
    PermissionDeniedError,
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
from dcp_remote.storage.cloud.circuit_breaker import DirectCounts
from dcp_remote.storage.cloud.clients import FAILURES, BucketClients
from dcp_remote.storage.cloud.config import Timeouts
from dcp_remote.storage.cloud.errors import classify_error
from dcp_remote.storage.cloud.failures import FailedRequest, raise_failure
from dcp_remote.storage.cloud.options import CloudOptions, S3Options, parse_options
from dcp_remote.storage.cloud.rate_limit import REFUSAL_SECONDS_MAX
from dcp_remote.storage.conditional_writes import find_unproven_server
from dcp_remote.storage.request_context import remaining_seconds, writes_nothing
from dcp_remote.storage.url import ParsedUrl, check_key, check_list_prefix

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, PutResult

_Answer = TypeVar("_Answer")

_CAPABILITIES = Capabilities(compare_and_swap=True, shared=True)

# Verbs that a save or a load sends in large numbers; only their requests count against the request limit.
_RATE_LIMITED_VERBS = frozenset({"put", "get_into"})

# The most keys that one DeleteObjects request of S3 takes. obstore splits further for stores that take fewer.
_DELETE_KEYS_MAX = 1000

# When this many keys, sampled across a batch, are all denied, the rest of the batch is reported as denied unasked.
_DENIED_SAMPLE_KEYS = 4

# Keys per page of a listing, for all three clouds.
_LIST_PAGE_KEYS = 1000


def open_cloud_store(
    parsed: ParsedUrl, options: Mapping[str, object], *, timeouts: Timeouts | None = None
) -> CloudStore:
    """Open the bucket and prefix of a URL. Sends nothing; the first request creates clients and finds credentials.

    Args:
        parsed: URL with the scheme s3, gs or az.
        options: `storage_options`; see `S3Options`, `GoogleOptions`, `AzureOptions`.
        timeouts: Limits after which a request counts as stalled.

    Raises:
        InvalidArgumentError: An option is unknown or has the wrong type.
    """
    clients = BucketClients(parsed, parse_options(parsed.scheme, options), timeouts or Timeouts())
    return CloudStore(parsed, clients)


class CloudStore:
    """Prefix of a bucket, opened by `open_cloud_store`. Safe to use from many threads; pickles its configuration.

    Children share the clients of their parent. A process that was forked after the first request cannot use its stores;
    start processes with spawn or forkserver.
    """

    def __init__(self, parsed: ParsedUrl, clients: BucketClients) -> None:
        """Store the arguments; nothing is sent."""
        self._parsed = parsed
        self._clients = clients

    def __repr__(self) -> str:
        """Return the class and URL, without options: some are secrets."""
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the configuration, explicit credentials included; treat such a pickle as a secret."""
        return _reopen, (self._parsed, self._clients.options, self._clients.timeouts)

    @property
    def url(self) -> str:
        """Implement `ObjectStore.url`."""
        return self._parsed.canonical

    @property
    def capabilities(self) -> Capabilities:
        """Implement `ObjectStore.capabilities`. All three clouds compare and swap, in their conditional PUT."""
        return _CAPABILITIES

    @property
    def direct_counts(self) -> DirectCounts:
        """Counts of the ranges that this process read, of this store and its children; zeros except for S3."""
        return self._clients.direct_counts

    def child(self, prefix: str) -> CloudStore:
        """Implement `ObjectStore.child`."""
        return CloudStore(self._parsed.child(prefix), self._clients)

    def head(self, key: str) -> ObjectInfo:
        """Implement `ObjectStore.head`. One request."""
        path = self._path(key)
        meta = self._send("head", key, lambda: obstore.head(self._clients.client(download=True), path))
        return self._info(key, meta)

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """Implement `ObjectStore.get`. One request.

        A missing bucket raises the same error as a missing object, since telling them apart would cost every first save
        one more request; `explain_missing` tells them apart.
        """
        path = self._path(key)

        def request() -> Content:
            result = obstore.get(self._clients.client(download=True, size_bytes=limit_bytes), path)
            size_bytes = result.meta["size"]
            if size_bytes > limit_bytes:
                raise make_oversize_error(f"{self.url}/{key}", size_bytes=size_bytes, limit_bytes=limit_bytes)
            return Content(data=bytes(result.bytes()), version=self._version(result.meta))

        return self._send("get", key, request)

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Implement `ObjectStore.get_into`. One request; two if the first is late, or obstore repeats a direct read.

        After a failure that may mean that the object is too short, one HEAD more.
        """
        path = self._path(key)
        stop = start + len(buffer)

        def read_with_obstore() -> memoryview:
            client = self._clients.client(download=True, size_bytes=len(buffer))
            return memoryview(obstore.get_range(client, path, start=start, end=stop))

        def request() -> None:
            signed_with = self._clients.get_signing_credentials()
            outcome = self._clients.read_directly(path, start, buffer, read_with_obstore)
            if outcome == "read":
                return
            try:
                with writes_nothing():
                    data = read_with_obstore()
            except GenericError:
                if outcome == "broken":
                    raise  # the next attempt is a direct read again, which shows more of the answer
                # GenericError stands for many failures, a 416 among them: the object may end before the range.
                with writes_nothing():
                    size_bytes = self._clients.size_after_failure(path)
                if size_bytes is None or size_bytes >= stop:
                    raise
                raise make_short_error(f"{self.url}/{key}", size_bytes=size_bytes, start=start, stop=stop) from None
            if len(data) != len(buffer):
                raise make_short_error(f"{self.url}/{key}", size_bytes=start + len(data), start=start, stop=stop)
            buffer[:] = data
            # Credentials renewed in between mean that the store refused the old ones, and not direct reads.
            is_renewed = signed_with not in (None, self._clients.get_signing_credentials())
            self._clients.note_obstore_read(path, start, "skipped" if is_renewed else outcome)

        self._send("get_into", key, request)

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """Implement `ObjectStore.put`. One PUT, whatever the size; S3 verifies a CRC64NVME before it answers."""
        path = self._path(key)
        body = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        size_bytes = sum(view.nbytes for view in body)
        mode = self._put_mode(key, condition)

        def request() -> Version:
            client = self._clients.client(download=False, size_bytes=size_bytes)
            result = obstore.put(client, path, body, mode=mode, use_multipart=False)
            return self._version(result)

        return self._send("put", key, request, is_conditional=condition != "any")

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Implement `ObjectStore.list`. One request per 1,000 objects; more if `prefix` ends within a name."""
        check_list_prefix(prefix)
        return self._list(prefix, after)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """Implement `ObjectStore.delete`. One request per 1,000 keys on S3, per 256 on Azure, per key on Google Cloud.

        If a batch fails, its keys are deleted one by one until a key fails with a transient error, a sample of the keys
        is denied throughout, or the caller's deadline passes; the remaining keys are then reported with that error.
        """
        for key in keys:
            self._path(key)
        failed: dict[str, StorageError] = {}
        for first in range(0, len(keys), _DELETE_KEYS_MAX):
            failed.update(self._delete_batch(keys[first : first + _DELETE_KEYS_MAX]))
        return failed

    def explain_missing(self) -> DcpRemoteError | None:
        """Return an error if an expected object is missing because of its bucket, else None.

        One request to S3, sent after a manifest was not found; never on the path of a save. Google Cloud and Azure show
        a missing bucket only in the answer to a PUT, so the result for them is None.
        """
        diagnosis = self._send("get", "", lambda: self._clients.diagnose(self._parsed.prefix))
        return diagnosis.error(verb="get", url=self.url) if diagnosis is not None else None

    def find_unproven_server(self) -> str | None:
        """Return the server and bucket if conditional writes are unproven there; None for the clouds' own servers.

        Sends nothing; see `conditional_writes`.
        """
        endpoint_url = self._send("open", "", self._clients.endpoint_url)
        return find_unproven_server(self._parsed.scheme, endpoint_url, self._parsed.bucket)

    def _path(self, key: str) -> str:
        check_key(key)
        return f"{self._parsed.prefix}/{key}" if self._parsed.prefix else key

    def _info(self, key: str, meta: ObjectMeta) -> ObjectInfo:
        return ObjectInfo(
            key=key,
            size_bytes=meta["size"],
            version=self._version(meta),
            modified_seconds=meta["last_modified"].timestamp(),
        )

    def _version(self, meta: ObjectMeta | PutResult) -> Version:
        # S3 and Azure compare the ETag, and a listing of a versioned bucket gives no version ID: only Google's is kept.
        return Version(
            etag=quote_etag(meta["e_tag"]), generation=meta["version"] if self._parsed.scheme == "gs" else None
        )

    def _put_mode(self, key: str, condition: Condition) -> PutMode:
        if condition == "any":
            return "overwrite"
        if condition == "absent":
            return "create"
        if self._parsed.scheme == "gs" and condition.generation is None:
            # Google Cloud compares generations only, and every version that it returned has one.
            raise ConditionFailedError(
                "The object is not in the state that this write asks for: the version names no generation.",
                url=f"{self.url}/{key}",
            )
        etag = condition.etag
        options = self._clients.options
        if etag is not None and isinstance(options, S3Options) and not options.etag_quotes:
            etag = etag.strip('"')
        return {"e_tag": etag} if condition.generation is None else {"e_tag": etag, "version": condition.generation}

    def _list(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        root = f"{self._parsed.prefix}/" if self._parsed.prefix else ""
        # obstore lists whole folders: for a prefix that ends within a name, list the folder from just before it on.
        folder = f"{root}{prefix}".rpartition("/")[0]
        offset = max(_key_before(f"{root}{prefix}"), _offset(f"{root}{after}") if after else "")
        last = ""
        for meta in self._pages(prefix, folder, offset):
            if not meta["path"].startswith(root):
                continue  # the marker of this very folder, as some consoles create it
            key = meta["path"].removeprefix(root)
            if not key.startswith(prefix) or key <= after:
                # Keys are ordered: once past the prefix, no later key can match.
                if prefix.isascii() and key > prefix and not key.startswith(prefix):
                    return
                continue
            if not may_follow(key, last):
                if meta["size"] == 0:
                    continue  # the marker of a "folder": some consoles create `name/`, which obstore shows as `name`
                raise StorageError("The store does not list its keys in order.", url=f"{self.url}/{key}", after=last)
            last = key
            yield self._info(key, meta)

    def _pages(self, prefix: str, folder: str, offset: str) -> Iterator[ObjectMeta]:
        """List a folder page by page, raising errors of this package."""
        pages: Iterator[Sequence[ObjectMeta]] | None = None
        limit_seconds = 0.0

        def next_page() -> Sequence[ObjectMeta] | None:
            nonlocal pages, limit_seconds
            # A client's time limit is fixed: near a deadline, restart behind the last key with a client of less time.
            if pages is None or self._clients.request_seconds() < limit_seconds:
                limit_seconds = self._clients.request_seconds()
                client = self._clients.client(download=True)
                listing = obstore.list(client, folder or None, offset=offset or None, chunk_size=_LIST_PAGE_KEYS)
                pages = iter(listing)
            return next(pages, None)

        while (metas := self._send("list", prefix, next_page)) is not None:
            yield from metas
            offset = metas[-1]["path"] if metas else offset

    def _delete_batch(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        paths = [self._path(key) for key in keys]
        try:
            obstore.delete(self._clients.client(download=False), paths)
        except FAILURES as error:
            if isinstance(error, DcpRemoteError):
                raise
            # For a batch, obstore raises only the first failure, and without its class: ask key by key.
            return self._delete_singly(keys)
        return {}

    def _delete_singly(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        # The sample is spread across the batch, because the grant may cover a part of the keys.
        sample = keys[:: max(1, (len(keys) - 1) // (_DENIED_SAMPLE_KEYS - 1))]
        failed: dict[str, StorageError] = {}
        error_for_rest: StorageError | None = None
        for number, key in enumerate(dict.fromkeys([*sample, *keys])):
            if error_for_rest is None and not remaining_seconds():
                error_for_rest = TransientStorageError(
                    "The deadline passed before this object was deleted.", url=self.url
                )
            elif (
                number == len(sample) and [type(error) for error in failed.values()] == [PermissionDeniedError] * number
            ):
                error_for_rest = failed[sample[0]]
            error = error_for_rest or self._delete_one(key)
            if isinstance(error, TransientStorageError):
                error_for_rest = error
            if error is not None:
                failed[key] = error
        return failed

    def _delete_one(self, key: str) -> StorageError | None:
        """Delete one object; return the error if it may still exist."""

        def request() -> None:
            obstore.delete(self._clients.client(download=False, delete_singly=True), self._path(key))

        try:
            self._send("delete", key, request)
        except FileNotFoundError:
            return None  # absent counts as deleted
        except StorageError as error:
            return error
        return None

    def _send(self, verb: str, key: str, request: Callable[[], _Answer], *, is_conditional: bool = False) -> _Answer:
        """Send a request; raise its failure as an error of this package.

        If the store refused the credentials and newer ones were found, the error is transient.

        Args:
            verb: Verb of the store contract, for the error.
            key: Key or prefix, for the error; empty for the store itself.
            request: Function that sends the request.
            is_conditional: True if the request is a conditional PUT. Its outcome after a timeout is unknown and is
                settled by the caller, so the error stays transient whatever a later diagnosis finds.
        """
        failed_request = FailedRequest(
            verb=verb,
            url=f"{self.url}/{key}" if key else self.url,
            prefix=self._parsed.prefix,
            signed_with=self._clients.get_signing_credentials(),
            is_conditional=is_conditional,
        )
        try:
            return self._send_limited(request) if verb in _RATE_LIMITED_VERBS else request()
        except DcpRemoteError:  # before Exception: some of them are OSErrors and ValueErrors as well
            raise
        except Exception as error:  # noqa: BLE001  # `ERROR_CLASSES` has a row for everything
            with writes_nothing():
                raise_failure(error, failed_request, self._clients)

    def _send_limited(self, request: Callable[[], _Answer]) -> _Answer:
        request_limit = self._clients.request_limit
        with request_limit.slot():
            began_seconds = time.monotonic()
            try:
                answer = request()
            except Exception as error:
                if classify_error(error) is TransientStorageError:
                    request_limit.record_answer(refused=time.monotonic() - began_seconds < REFUSAL_SECONDS_MAX)
                raise
            request_limit.record_answer(refused=False)
            return answer


def _reopen(parsed: ParsedUrl, options: CloudOptions, timeouts: Timeouts) -> CloudStore:
    return CloudStore(parsed, BucketClients(parsed, options, timeouts))


def _key_before(prefix: str) -> str:
    """Return a key shortly before all keys that begin with `prefix`; empty if there is no simple one."""
    if not prefix or prefix.endswith("/") or not "!" <= prefix[-1] <= "~":
        return ""
    # Lower the last character by one and append the last printable one of ASCII. Below `0` comes the slash, which
    # would end the name: use the character before it.
    previous = chr(ord(prefix[-1]) - 1).replace("/", ".")
    return _offset(f"{prefix[:-1]}{previous}~")


def _offset(key: str) -> str:
    """Return an offset that obstore accepts, at or before `key`; empty if none is valid.

    Keys before `key` that a listing then returns are filtered out by the caller.
    """
    try:
        check_key(key.rstrip("/"))
    except InvalidArgumentError:
        return ""
    return key.rstrip("/")
