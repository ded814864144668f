"""S3, Google Cloud Storage and Azure Blob Storage as an `ObjectStore`.

obstore sends the requests: one plain PUT per object, from the caller's buffers without a copy and without the GIL; one
GET per read. botocore finds credentials, region and endpoint. Nothing is retried here (`RetryingStore` does that, under
a deadline), no upload is multipart, no bucket is ever created.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import GenericError

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.units import MiB
from dcp_remote.errors import (
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
    PlacedStore,
    Version,
    check_listing,
    make_oversize_error,
    make_short_error,
    may_follow,
)
from dcp_remote.storage.cloud.azure import Azure
from dcp_remote.storage.cloud.bucket import Bucket, Timeouts
from dcp_remote.storage.cloud.direct_reads import Outcome
from dcp_remote.storage.cloud.errors import (
    FAILURES,
    SHORT_OBJECT_CODE,
    find_error_code,
    is_web_page,
    make_web_page_error,
)
from dcp_remote.storage.cloud.failures import FailedRequest, add_request, raise_failure
from dcp_remote.storage.cloud.google import GoogleCloud
from dcp_remote.storage.cloud.provider import Client, Provider
from dcp_remote.storage.cloud.s3 import S3
from dcp_remote.storage.conditional_writes import find_unproven_server
from dcp_remote.storage.limits import count_processes
from dcp_remote.storage.options import CloudOptions
from dcp_remote.storage.request_context import remaining_seconds, writes_nothing
from dcp_remote.storage.rereads import is_reread
from dcp_remote.storage.url import ParsedUrl, check_key, check_list_prefix

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode

_Answer = TypeVar("_Answer")

CLOUDS: dict[str, type[Provider]] = {"s3": S3, "gs": GoogleCloud, "az": Azure}

# Verbs that a save or a load sends in large numbers; only their requests are throttled.
_THROTTLED_VERBS = frozenset({"put", "get_into"})

# The most keys that one DeleteObjects request of S3 takes. obstore splits further for stores that take fewer.
_DELETE_KEYS_MAX = 1000

# When this many keys, sampled across a batch, are all denied, the rest of the batch is reported as denied unasked.
_DENIED_SAMPLE_KEYS = 4

# Size for which the client of each whole object is chosen, so that a manifest comes over the connection of the catalog
# before. A silent server is noticed all the same, by the limit of silence.
_DOCUMENT_BYTES = 256 * MiB

# Keys per page of a listing, for all three clouds.
_LIST_PAGE_KEYS = 1000


def open_cloud_store(
    parsed: ParsedUrl, options: Mapping[str, object], *, timeouts: Timeouts | None = None
) -> CloudStore:
    """Open the bucket and prefix of a URL. Sends nothing; the first request creates clients and finds credentials.

    Raises:
        InvalidArgumentError: An option is unknown or has the wrong type.
    """
    return CloudStore(parsed, Bucket(CLOUDS[parsed.scheme].parse(parsed.bucket, options), timeouts or Timeouts()))


class CloudStore(PlacedStore):
    """Prefix of a bucket, opened by `open_cloud_store`. Safe to use from many threads; pickles its configuration.

    Children share the clients of their parent. A process that was forked after the first request cannot use its stores;
    start processes with spawn or forkserver.
    """

    capabilities = Capabilities(compare_and_swap=True, shared=True)  # by the conditional PUT that all three clouds have

    def __init__(self, parsed: ParsedUrl, bucket: Bucket) -> None:
        """Store the arguments; nothing is sent."""
        self._place = parsed
        self._bucket = bucket
        self._provider = bucket.provider

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the configuration, explicit credentials included; treat such a pickle as a secret."""
        return _reopen, (self._place, self._provider.options, self._bucket.timeouts)

    @property
    def latency_seconds(self) -> float:
        """Seconds until a `get` was answered, without its body: the least so far, 0 at first. Not in the contract."""
        return self._bucket.latency_seconds

    def parent(self) -> CloudStore | None:
        """Return the store of the folder above; None for the bucket. Not part of the contract."""
        above = self._place.parent()
        return CloudStore(above, self._bucket) if above is not None else None

    def head(self, key: str) -> ObjectInfo:
        """Implement `ObjectStore.head`. One request."""
        path = self._place.key(key)
        meta = self._send("head", key, lambda: obstore.head(self._bucket.get_client(download=True), path))
        return self._info(key, meta)

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """Implement `ObjectStore.get`. One request.

        A missing bucket raises the same error as a missing object, since telling them apart would cost every first save
        one more request; `explain_missing` tells them apart.
        """
        path = self._place.key(key)

        def request() -> Content:
            client = self._bucket.get_client(download=True, size_bytes=max(limit_bytes, _DOCUMENT_BYTES))
            began_seconds = time.monotonic()
            try:
                result = obstore.get(client, path)
            except FileNotFoundError:  # an answer as well, as before the first save
                self._bucket.note_latency(time.monotonic() - began_seconds)
                raise
            self._bucket.note_latency(time.monotonic() - began_seconds)
            size_bytes = result.meta["size"]
            if size_bytes > limit_bytes:
                raise make_oversize_error(self._named(key), size_bytes=size_bytes, limit_bytes=limit_bytes)
            data = bytes(result.bytes())
            if is_web_page(data):
                raise make_web_page_error(self._named(key), endpoint_url=self._provider.endpoint_url())
            return Content(data=data, version=self._provider.version_of(result.meta))

        return self._send("get", key, request)

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Implement `ObjectStore.get_into`. One request; two if obstore repeats a direct read that is late or fails.

        One HEAD more if the object may be too short, and the store did not say so by an error code.
        """
        path = self._place.key(key)
        stop = start + len(buffer)

        def client() -> Client:
            return self._bucket.get_client(download=True, size_bytes=len(buffer))

        def request() -> None:
            provider, bucket = self._provider, self._bucket
            signed_with, began_seconds = provider.credentials.last_given, time.monotonic()
            outcome: Outcome = "skipped"
            if not is_reread():
                outcome = bucket.direct.read(
                    lambda: provider.sign_get(client(), path),
                    start,
                    buffer,
                    verify=provider.verify(),
                    seconds=bucket.request_seconds(len(buffer)),
                    may_repeat=not bucket.throttle.is_overloaded,
                )
            if outcome != "direct":
                try:
                    with writes_nothing():
                        data = memoryview(obstore.get_range(client(), path, start=start, end=stop))
                except GenericError as error:
                    code, size_bytes = find_error_code(str(error)), None
                    is_short = "416 Range Not Satisfiable" in str(error) or "NotPartial" in str(error)
                    if code is None and is_short and remaining_seconds():
                        # A 416 without a code, or a 200 for an empty object: only a HEAD tells that it is short.
                        with writes_nothing(), suppress(*FAILURES):
                            size_bytes = obstore.head(bucket.get_client(download=True), path)["size"]
                    if code != SHORT_OBJECT_CODE and (size_bytes is None or size_bytes >= stop):
                        raise
                    raise make_short_error(self._named(key), size_bytes=size_bytes, start=start, stop=stop) from None
                if len(data) != len(buffer):
                    size_bytes = start + len(data)
                    raise make_short_error(self._named(key), size_bytes=size_bytes, start=start, stop=stop)
                buffer[:] = data
                # Credentials renewed in between mean that the store refused the old ones, and not direct reads.
                if outcome == "failed" and signed_with in (None, provider.credentials.last_given):
                    bucket.direct.note_failed(began_seconds)

        self._send("get_into", key, request)

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """Implement `ObjectStore.put`. One PUT, whatever the size; S3 verifies a CRC64NVME before it answers."""
        path = self._place.key(key)
        body = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        size_bytes = sum(view.nbytes for view in body)
        mode: PutMode = "create" if condition == "absent" else "overwrite"
        if isinstance(condition, Version):
            mode = self._provider.condition_of(condition)

        def request() -> Version:
            client = self._bucket.get_client(download=False, size_bytes=size_bytes)
            result = obstore.put(client, path, body, mode=mode, use_multipart=False)
            return self._provider.version_of(result)

        return self._send("put", key, request, is_conditional=condition != "any")

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Implement `ObjectStore.list`. One request per 1,000 objects; more if `prefix` ends within a name."""
        check_list_prefix(prefix)
        listed = self._list(prefix, after)
        # obstore refuses such keys itself, except backslashes, which `ls -r` has to get past.
        return check_listing(listed, url=self.url, prefix=prefix, after="", checks_keys=False)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """Implement `ObjectStore.delete`. One request per 1,000 keys on S3, per 256 on Azure, per key on Google Cloud.

        If a batch fails, its keys are deleted one by one until a key fails with a transient error, a sample of the keys
        is denied throughout, or the caller's deadline passes; the remaining keys are then reported with that error.
        """
        for key in keys:
            check_key(key)
        failed: dict[str, StorageError] = {}
        for first in range(0, len(keys), _DELETE_KEYS_MAX):
            failed.update(self._delete_batch(keys[first : first + _DELETE_KEYS_MAX]))
        return failed

    def explain_missing(self) -> DcpRemoteError | None:
        """Return an error if an expected object is missing because of its bucket, else None.

        One request to S3, sent after a manifest was not found; never on the path of a save. Google Cloud and Azure show
        a missing bucket only in the answer to a PUT, so the result for them is None.
        """
        found = self._send("get", "", lambda: self._provider.diagnose(self._place.prefix))
        return add_request(found, verb="get", url=self.url) if found is not None else None

    def find_unproven_server(self) -> str | None:
        """Return the server and bucket if conditional writes are unproven there; None for the clouds' own servers.

        Sends nothing; see `conditional_writes`.
        """
        endpoint_url = self._send("open", "", self._provider.endpoint_url)
        return find_unproven_server(endpoint_url, self._place.bucket, known_hosts=self._provider.known_hosts)

    def _info(self, key: str, meta: ObjectMeta) -> ObjectInfo:
        return ObjectInfo(
            key=key,
            size_bytes=meta["size"],
            version=self._provider.version_of(meta),
            modified_seconds=meta["last_modified"].timestamp(),
        )

    def _list(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        root = f"{self._place.prefix}/" if self._place.prefix else ""
        # obstore lists whole folders. No caller has a prefix that ends within a name.
        folder = f"{root}{prefix}".rpartition("/")[0]
        offset = _offset(f"{root}{after}") if after else ""
        last = ""
        for meta in self._pages(prefix, folder, offset):
            key = meta["path"].removeprefix(root)
            # Left out are markers of "folders", of some consoles: this very one, and `name/`, shown as `name`.
            is_marker = not meta["path"].startswith(root) or (meta["size"] == 0 and not may_follow(key, last))
            if key.startswith(prefix) and key > after and not is_marker:
                last = key
                yield self._info(key, meta)

    def _pages(self, prefix: str, folder: str, offset: str) -> Iterator[ObjectMeta]:
        """List a folder page by page, raising errors of this package."""
        pages: Iterator[Sequence[ObjectMeta]] | None = None
        limit_seconds = 0.0

        def next_page() -> Sequence[ObjectMeta] | None:
            nonlocal pages, limit_seconds
            # A client's time limit is fixed: near a deadline, restart behind the last key with a client of less time.
            if pages is None or self._bucket.request_seconds() < limit_seconds:
                limit_seconds = self._bucket.request_seconds()
                client = self._bucket.get_client(download=True)
                listing = obstore.list(client, folder or None, offset=offset or None, chunk_size=_LIST_PAGE_KEYS)
                pages = iter(listing)
            return next(pages, None)

        while (metas := self._send("list", prefix, next_page)) is not None:
            yield from metas
            offset = metas[-1]["path"] if metas else offset

    def _delete_batch(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        paths = [self._place.key(key) for key in keys]
        try:
            obstore.delete(self._bucket.get_client(download=False), paths)
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
            obstore.delete(self._bucket.get_client(download=False, delete_singly=True), self._place.key(key))

        try:
            self._send("delete", key, request)
        except FileNotFoundError:
            return None  # absent counts as deleted
        except StorageError as error:
            return error
        return None

    def _send(self, verb: str, key: str, request: Callable[[], _Answer], *, is_conditional: bool = False) -> _Answer:
        """Send a request; raise its failure as an error of this package.

        If the store refused the credentials and newer ones were found, the error is transient. So is that of a
        conditional PUT, whatever a later diagnosis finds: its outcome after a timeout is unknown, and settled by the
        caller. `key` may be a prefix; it is empty for the store itself.
        """
        failed_request = FailedRequest(
            verb=verb,
            url=self._named(key),
            prefix=self._place.prefix,
            signed_with=self._provider.credentials.last_given,
            is_conditional=is_conditional,
        )
        try:
            self._bucket.refuse_fork()  # before the throttle, in which requests of the parent may wait
            # Of a job, the coordinator alone sends conditional requests, and all ranks wait for them.
            is_throttled = verb in _THROTTLED_VERBS and not (is_conditional and count_processes() > 1)
            return self._bucket.throttle.send(request) if is_throttled else request()
        except DcpRemoteError:  # before Exception: some of them are OSErrors and ValueErrors as well
            raise
        except Exception as error:  # noqa: BLE001  # `ERROR_CLASSES` has a row for everything
            with writes_nothing():
                raise_failure(error, failed_request, self._provider)


def _reopen(parsed: ParsedUrl, options: CloudOptions, timeouts: Timeouts) -> CloudStore:
    return CloudStore(parsed, Bucket(CLOUDS[parsed.scheme](parsed.bucket, options), timeouts))


def _offset(key: str) -> str:
    """Return an offset that obstore accepts, at or before `key`; empty if none is valid.

    Keys before `key` that a listing then returns are filtered out by the caller.
    """
    try:
        check_key(key.rstrip("/"))
    except InvalidArgumentError:
        return ""
    return key.rstrip("/")
