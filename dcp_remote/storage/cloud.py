"""S3, Google Cloud Storage and Azure Blob Storage.

obstore carries the bytes: one plain PUT per object, sent from the caller's buffers without a copy and without the GIL;
one GET per read. botocore finds credentials, region and endpoint. Nothing is retried here (`RetryingStore` does, under
a deadline), no upload has parts, no bucket is ever created.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

import obstore
from obstore.exceptions import GenericError

from dcp_remote.errors import (
    ConditionFailedError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import (
    Buffer,
    Capabilities,
    Condition,
    Content,
    ObjectInfo,
    Version,
    may_follow,
    quoted,
)
from dcp_remote.storage.budget import REFUSAL_SECONDS_MAX
from dcp_remote.storage.circuit_breaker import DirectCounts
from dcp_remote.storage.cloud_clients import FAILURES, Connections
from dcp_remote.storage.cloud_errors import kind_of
from dcp_remote.storage.cloud_failures import Asked, raise_failure
from dcp_remote.storage.cloud_options import CloudOptions, S3Options, parse_options
from dcp_remote.storage.conditional_writes import unproven_server
from dcp_remote.storage.landing import nothing_lands
from dcp_remote.storage.time_left import seconds_left
from dcp_remote.storage.timeouts import Timeouts
from dcp_remote.url import ParsedUrl, check_key, check_list_prefix

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, PutResult

_Answer = TypeVar("_Answer")

_CAPABILITIES = Capabilities(compare_and_swap=True, shared=True)

# The verbs whose requests come in numbers; by the others it is settled what is.
_CARRYING = frozenset({"put", "get_into"})

# The largest request of S3's DeleteObjects; obstore sends less at a time where a store takes less.
_DELETE_KEYS_MAX = 1000

# So many keys that may not be deleted, and no other among them, mean that this client may delete nothing.
_DENIED_KEYS = 4

# A page of every store.
_LIST_PAGE_KEYS = 1000


def open_cloud_store(
    parsed: ParsedUrl, options: Mapping[str, object], *, timeouts: Timeouts | None = None
) -> CloudStore:
    """Open the bucket and prefix of a URL. Sends nothing; clients are made, and credentials found, when first needed.

    Args:
        parsed: Of the scheme s3, gs or az.
        options: `storage_options`; see `S3Options`, `GoogleOptions`, `AzureOptions`.
        timeouts: When a request counts as stalled.

    Raises:
        InvalidArgumentError: An option is unknown or has the wrong type.
    """
    connections = Connections(parsed, parse_options(parsed.scheme, options), timeouts or Timeouts())
    return CloudStore(parsed, connections)


class CloudStore:
    """A prefix of a bucket; `open_cloud_store` makes it. Safe to use from many threads; pickles its configuration.

    Children share their clients. A process that is forked after the first request cannot use its stores: spawn.
    """

    def __init__(self, parsed: ParsedUrl, connections: Connections) -> None:
        """See `open_cloud_store`."""
        self._parsed = parsed
        self._connections = connections

    def __repr__(self) -> str:
        """Without any option: some are secrets."""
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """The configuration, explicit credentials included: a pickle is as secret as they are."""
        return _reopen, (self._parsed, self._connections.options, self._connections.timeouts)

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return self._parsed.canonical

    @property
    def capabilities(self) -> Capabilities:
        """See `ObjectStore.capabilities`. All three clouds compare and swap, in their conditional PUT."""
        return _CAPABILITIES

    @property
    def direct_counts(self) -> DirectCounts:
        """How this process read ranges of this store and its children; zeros but for S3 with credentials."""
        return self._connections.direct_counts

    def child(self, prefix: str) -> CloudStore:
        """See `ObjectStore.child`."""
        return CloudStore(self._parsed.child(prefix), self._connections)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`. One request."""
        path = self._path(key)
        meta = self._ask("head", key, lambda: obstore.head(self._connections.client(download=True), path))
        return self._info(key, meta)

    def get(self, key: str, *, limit_bytes: int) -> Content:
        """See `ObjectStore.get`. One request.

        A missing bucket reads like a missing object here, or a first save would cost a request more; see
        `explain_missing`.
        """
        path = self._path(key)

        def request() -> Content:
            result = obstore.get(self._connections.client(download=True, size_bytes=limit_bytes), path)
            size_bytes = result.meta["size"]
            if size_bytes > limit_bytes:
                raise CorruptCheckpointError(
                    "The object is larger than anything that is expected here.",
                    url=f"{self.url}/{key}",
                    size_bytes=size_bytes,
                    limit_bytes=limit_bytes,
                )
            return Content(data=bytes(result.bytes()), version=self._version(result.meta))

        return self._ask("get", key, request)

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        """See `ObjectStore.get_into`. One request; a second where it is late, or has to be asked for in another way.

        And a HEAD after a failure that may mean a shorter object.
        """
        path = self._path(key)
        stop = start + len(buffer)

        def by_obstore() -> memoryview:
            client = self._connections.client(download=True, size_bytes=len(buffer))
            return memoryview(obstore.get_range(client, path, start=start, end=stop))

        def request() -> None:
            signed_with = self._connections.signs_with()
            outcome = self._connections.read_directly(path, start, buffer, by_obstore)
            if outcome == "read":
                return
            try:
                with nothing_lands():
                    data = by_obstore()
            except GenericError:
                if outcome == "broken":
                    raise  # the next attempt is direct again, and more is known of its answer
                # 416 is one of the many things that this class stands for.
                with nothing_lands():
                    size_bytes = self._connections.size_after_failure(path)
                if size_bytes is None or size_bytes >= stop:
                    raise
                self._refuse_short(key, size_bytes=size_bytes, start=start, stop=stop)
            if len(data) != len(buffer):
                self._refuse_short(key, size_bytes=start + len(data), start=start, stop=stop)
            buffer[:] = data
            # Credentials that were renewed meanwhile: the old ones were refused, and not the way.
            renewed = signed_with not in (None, self._connections.signs_with())
            self._connections.was_read_otherwise(path, start, "skipped" if renewed else outcome)

        self._ask("get_into", key, request)

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        """See `ObjectStore.put`. One PUT, whatever the size; S3 verifies a CRC64NVME of the body before it answers."""
        path = self._path(key)
        body = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        size_bytes = sum(view.nbytes for view in body)
        mode = self._mode(key, condition)

        def request() -> Version:
            client = self._connections.client(download=False, size_bytes=size_bytes)
            result = obstore.put(client, path, body, mode=mode, use_multipart=False)
            return self._version(result)

        return self._ask("put", key, request, settled_later=condition != "any")

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. A request for each thousand objects; more, where `prefix` ends within a name."""
        check_list_prefix(prefix)
        return self._list(prefix, after)

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        """See `ObjectStore.delete`. A request for each thousand keys on S3, each 256 on Azure, each one on Google.

        A batch that fails is tried key by key, until one fails for now, a few from all over it are all denied, or the
        caller's deadline passes: then the rest is reported like that.
        """
        for key in keys:
            self._path(key)
        failed: dict[str, StorageError] = {}
        for first in range(0, len(keys), _DELETE_KEYS_MAX):
            failed.update(self._delete_batch(keys[first : first + _DELETE_KEYS_MAX]))
        return failed

    def explain_missing(self) -> str | None:
        """Why an object may be missing that a reader expected: a sentence if it is the bucket's fault, else None.

        One request to S3, to be asked when a manifest was not there; never on the path of a save. The other clouds
        tell a missing bucket from a missing object only at a put: of them it says None.
        """
        verdict = self._ask("get", "", lambda: self._connections.look(self._parsed.prefix))
        return str(verdict.error(verb="get", url=self.url)) if verdict is not None else None

    def unproven_server(self) -> str | None:
        """The server and bucket, if nobody knows whether conditional writes hold there; None for the clouds' own.

        Sends nothing; see `conditional_writes`.
        """
        endpoint_url = self._ask("open", "", self._connections.endpoint_url)
        return unproven_server(self._parsed.scheme, endpoint_url, self._parsed.bucket)

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
        # On S3 and Azure the ETag is what a condition compares, and a listing of a versioned bucket gives no more.
        return Version(etag=quoted(meta["e_tag"]), generation=meta["version"] if self._parsed.scheme == "gs" else None)

    def _mode(self, key: str, condition: Condition) -> PutMode:
        if condition == "any":
            return "overwrite"
        if condition == "absent":
            return "create"
        if self._parsed.scheme == "gs" and condition.generation is None:
            # Google compares generations alone, and no version that it gave is without one.
            raise ConditionFailedError(
                "The object is not in the state that this write asks for: the version names no generation.",
                url=f"{self.url}/{key}",
            )
        etag = condition.etag
        options = self._connections.options
        if etag is not None and isinstance(options, S3Options) and not options.etag_quotes:
            etag = etag.strip('"')
        return {"e_tag": etag} if condition.generation is None else {"e_tag": etag, "version": condition.generation}

    def _list(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        root = f"{self._parsed.prefix}/" if self._parsed.prefix else ""
        # obstore lists folders; of a prefix that ends within a name the folder, from there on where the prefix begins.
        folder = f"{root}{prefix}".rpartition("/")[0]
        offset = max(_before(f"{root}{prefix}"), _offset(f"{root}{after}") if after else "")
        last = ""
        for meta in self._pages(prefix, folder, offset):
            key = meta["path"].removeprefix(root)
            if not key.startswith(prefix) or key <= after:
                # Ordered: behind the prefix there is nothing more.
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
        """What the store lists, page by page, with errors of ours."""
        pages: Iterator[Sequence[ObjectMeta]] | None = None
        limit_seconds = 0.0

        def page() -> Sequence[ObjectMeta] | None:
            nonlocal pages, limit_seconds
            # A client keeps to one limit: near a deadline the listing begins anew behind its last key, with another.
            if pages is None or self._connections.request_seconds() < limit_seconds:
                limit_seconds = self._connections.request_seconds()
                client = self._connections.client(download=True)
                found = obstore.list(client, folder or None, offset=offset or None, chunk_size=_LIST_PAGE_KEYS)
                pages = iter(found)
            return next(pages, None)

        while (metas := self._ask("list", prefix, page)) is not None:
            yield from metas
            offset = metas[-1]["path"] if metas else offset

    def _delete_batch(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        paths = [self._path(key) for key in keys]
        try:
            obstore.delete(self._connections.client(download=False), paths)
        except FAILURES as error:
            # Of one request for many keys obstore tells the first failure, and not its class.
            if isinstance(error, DcpRemoteError):
                raise
            return self._delete_singly(keys)
        return {}

    def _delete_singly(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        # From all over the batch: the grant may be for a part of the keys.
        sample = keys[:: max(1, (len(keys) - 1) // (_DENIED_KEYS - 1))]
        failed: dict[str, StorageError] = {}
        of_the_rest: StorageError | None = None
        for number, key in enumerate(dict.fromkeys([*sample, *keys])):
            if of_the_rest is None and not seconds_left():
                of_the_rest = TransientStorageError("The time was over before this was deleted.", url=self.url)
            elif (
                number == len(sample) and [type(error) for error in failed.values()] == [PermissionDeniedError] * number
            ):
                of_the_rest = failed[sample[0]]
            error = of_the_rest or self._delete_one(key)
            if isinstance(error, TransientStorageError):
                of_the_rest = error
            if error is not None:
                failed[key] = error
        return failed

    def _delete_one(self, key: str) -> StorageError | None:
        """Why it could not be deleted; None if it is gone."""

        def request() -> None:
            obstore.delete(self._connections.client(download=False, delete_singly=True), self._path(key))

        try:
            self._ask("delete", key, request)
        except FileNotFoundError:
            return None  # absent counts as deleted
        except StorageError as error:
            return error
        return None

    def _ask(self, verb: str, key: str, request: Callable[[], _Answer], *, settled_later: bool = False) -> _Answer:
        """Send a request, and raise what went wrong as an error of ours.

        What was refused because of credentials, while there are others by now, is told as what passes.

        Args:
            verb: For the error.
            key: For the error.
            request: Sends it.
            settled_later: Somebody has to find out whether it was carried out. A time-out then stays one, whatever a
                diagnosis says afterwards of the bucket: that is no answer to this request.
        """
        url = f"{self.url}/{key}" if key else self.url
        asked = Asked(verb, url, self._parsed.prefix, self._connections.signs_with(), settled_later=settled_later)
        try:
            return self._within_budget(request) if verb in _CARRYING else request()
        except DcpRemoteError:  # of ours already, though some are OSErrors and ValueErrors, too
            raise
        except Exception as error:  # noqa: BLE001  # `KINDS` has a row for everything
            with nothing_lands():
                raise_failure(error, asked, self._connections)

    def _within_budget(self, request: Callable[[], _Answer]) -> _Answer:
        budget = self._connections.budget
        with budget.slot():
            began_seconds = time.monotonic()
            try:
                answer = request()
            except Exception as error:
                if kind_of(error) is TransientStorageError:
                    budget.note(refused=time.monotonic() - began_seconds < REFUSAL_SECONDS_MAX)
                raise
            budget.note(refused=False)
            return answer

    def _refuse_short(self, key: str, *, size_bytes: int, start: int, stop: int) -> NoReturn:
        raise CorruptCheckpointError(
            "The object ends before the range that is to be read.",
            url=f"{self.url}/{key}",
            size_bytes=size_bytes,
            start=start,
            stop=stop,
        )


def _reopen(parsed: ParsedUrl, options: CloudOptions, timeouts: Timeouts) -> CloudStore:
    return CloudStore(parsed, Connections(parsed, options, timeouts))


def _before(prefix: str) -> str:
    """A key behind which all keys that begin with `prefix` lie, and few others; empty if none is at hand."""
    if not prefix or prefix.endswith("/") or not "!" <= prefix[-1] <= "~":
        return ""
    # One character less, and then the last printable one of ASCII; of `0` that would be a slash, which ends a name.
    previous = chr(ord(prefix[-1]) - 1).replace("/", ".")
    return _offset(f"{prefix[:-1]}{previous}~")


def _offset(key: str) -> str:
    """`key` as obstore takes it, not behind it; empty if it would not: what comes too early is filtered out anyway."""
    try:
        check_key(key.rstrip("/"))
    except InvalidArgumentError:
        return ""
    return key.rstrip("/")
