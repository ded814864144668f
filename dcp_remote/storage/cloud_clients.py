"""The clients behind a cloud store: made when they are needed, one set per process, and asked why requests fail."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

import obstore
from botocore.exceptions import BotoCoreError, ClientError
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from dcp_remote.errors import InvalidArgumentError, TransientStorageError
from dcp_remote.storage.budget import RequestBudget, shared_budget
from dcp_remote.storage.circuit_breaker import CircuitBreaker, DirectCounts, Outcome
from dcp_remote.storage.cloud_configs import azure_config, client_config, google_config, one_host, s3_config
from dcp_remote.storage.cloud_credentials import S3Credentials, find_credentials
from dcp_remote.storage.cloud_errors import chained, translate
from dcp_remote.storage.cloud_options import CloudOptions, GoogleOptions, S3Options, secrets_of
from dcp_remote.storage.diagnosis import Verdict, diagnose_s3
from dcp_remote.storage.direct_reads import DirectReads, goes_through_a_proxy
from dcp_remote.storage.rereads import is_reread
from dcp_remote.storage.s3_place import S3Place, resolve_s3
from dcp_remote.storage.time_left import rounded_up, seconds_left
from dcp_remote.storage.timeouts import Timeouts
from dcp_remote.url import ParsedUrl

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials
    from obstore.store import ClientConfig, RetryConfig

Client: TypeAlias = S3Store | GCSStore | AzureStore

# One attempt: whoever knows the deadline tries again.
_ONCE: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(0)}

# What obstore raises, and what it lets through of Python's own.
FAILURES = (BaseError, BotoCoreError, ClientError, OSError, ValueError)

# During a storm of 503 a diagnosis a request would double it; one in half a minute is nothing.
_VERDICT_SECONDS = 30.0

# The failures of threads that began together are told alike.
_DEFINITE_VERDICT_SECONDS = 2.0

# A role gives other credentials each time it is asked: if those are refused as well, and that is seen within the pause
# of a retry, it is not because the first ones were old.
_RENEWED_SECONDS = 5.0

# A signed URL is used at once.
_SIGNED_FOR = timedelta(minutes=10)

# obstore's threads do not survive a fork, and a child that uses them waits for ever.
_requesting_pid: int | None = None


class Connections:
    """The clients of one bucket in this process, made when they are needed, and what is known of its failures."""

    def __init__(self, parsed: ParsedUrl, options: CloudOptions, timeouts: Timeouts) -> None:
        self.options = options
        self.timeouts = timeouts
        self._bucket = parsed.bucket
        self._lock = threading.Lock()
        # By direction, way to delete and seconds: obstore has these per client, and they are cheap.
        self._clients: dict[tuple[bool, bool, float], Client] = {}
        self._place: S3Place | None = None
        self._credentials: S3Credentials | None = None
        self._credentials_changes = 0
        self._renew_lock = threading.Lock()
        self._renew_again_at = 0.0
        self._look_lock = threading.Lock()
        self._verdict: Verdict | None = None
        self._look_again_at = 0.0
        self._head_again_at = 0.0
        self._budget: RequestBudget | None = None
        self._direct: DirectReads | None = None
        self._breaker = CircuitBreaker(parsed.bucket)

    def client(self, *, download: bool, size_bytes: int = 0, delete_singly: bool = False) -> Client:
        """The client for requests of about this size.

        Args:
            download: Whether the answer is large, and the request is not.
            size_bytes: Of the larger one.
            delete_singly: A request for each key: the answer to one for many does not show which error it is.

        Raises:
            InvalidArgumentError: This process was forked after the first request; or the configuration is no good.
            PermissionDeniedError: There are no credentials.
            botocore.exceptions.BotoCoreError: Profile, region or credentials cannot be read.
        """
        _refuse_after_fork()
        seconds = self.request_seconds(size_bytes)
        kind = (download, delete_singly, seconds)
        with self._lock:
            changes = self._credentials.changes if self._credentials is not None else 0
            if changes != self._credentials_changes:
                # Each client asks for itself: one of them has been given others, the rest would have the old ones yet.
                self._clients.clear()
                self._credentials_changes = changes
            if kind not in self._clients:
                self._clients[kind] = self._open(
                    download=download, delete_singly=delete_singly, request_seconds=seconds
                )
            return self._clients[kind]

    def request_seconds(self, size_bytes: int = 0) -> float:
        """The limit of a request of this size that begins now: it ends with the deadline of who waits for it."""
        return min(self.timeouts.request_seconds(size_bytes), rounded_up(seconds_left()))

    def _open(self, *, download: bool, delete_singly: bool, request_seconds: float) -> Client:
        def http(endpoint_url: str | None, *, verify: bool | str | None) -> ClientConfig:
            return client_config(
                self.options,
                endpoint_url=endpoint_url,
                verify=verify,
                timeouts=self.timeouts,
                download=download,
                request_seconds=request_seconds,
            )

        options = self.options
        try:
            if isinstance(options, S3Options):
                place = self._place = self._place or resolve_s3(self._bucket, options)
                if self._credentials is None and not options.anon:
                    self._credentials = find_credentials(place, self._bucket)
                network = http(place.endpoint_url, verify=place.verify)
                if not goes_through_a_proxy(place.endpoint_url):
                    network.update(one_host(place.endpoint_url))
                return S3Store(
                    self._bucket,
                    config=s3_config(options, place, delete_singly=delete_singly),
                    client_options=network,
                    retry_config=_ONCE,
                    credential_provider=self._credentials,
                )
            if isinstance(options, GoogleOptions):
                google = google_config(options)
                network = http(google.get("base_url"), verify=options.verify)
                return GCSStore(self._bucket, config=google, client_options=network, retry_config=_ONCE)
            azure = azure_config(options)
            network = http(azure.get("endpoint"), verify=options.verify)
            return AzureStore(self._bucket, config=azure, client_options=network, retry_config=_ONCE)
        except BaseError as error:
            reason = translate(error, verb="open", url=self._bucket, secrets=self.secrets())
            raise InvalidArgumentError(
                "The store's client cannot be configured from storage_options and environment.",
                bucket=self._bucket,
                cause=reason.details.get("cause"),
            ) from chained(error, self.secrets())

    def read_directly(self, path: str, start: int, buffer: memoryview, other_way: Callable[[], memoryview]) -> Outcome:
        """Read a range of an object straight into `buffer`, by one GET; see `DirectReads.read`.

        Of S3 alone: on the others, to sign a URL costs a request with many a kind of credentials.

        Returns:
            "read"; or why it was not: then the content of `buffer` is undefined, obstore is to be asked, and
            `was_read_otherwise` called.

        Raises:
            ConnectionError: The store is too busy, or the connection broke.
            TimeoutError: The store was silent, or slow.
        """
        if not self._reads_directly():
            return "skipped"
        part = (path, start)
        way = self._breaker.way(part)
        if way != "direct":
            return way
        client = self.client(download=True, size_bytes=len(buffer))
        assert isinstance(client, S3Store)
        direct = self._direct_reads()
        if direct is None:
            return "skipped"
        url = obstore.sign(client, "GET", path, _SIGNED_FOR)
        try:
            # Where the store is short of breath, nothing is sent twice.
            spare = self.budget.share() == 1
            seconds = self.timeouts.request_seconds(len(buffer))
            if not direct.read(url, start, buffer, seconds=seconds, other_way=other_way if spare else None):
                return "refused"
        except (ConnectionError, TimeoutError):
            self._breaker.broke(part)
            raise
        except OSError:
            return "refused"  # names, certificates: obstore has its own, and its errors are known
        self._breaker.was_read(part, "read")
        return "read"

    def was_read_otherwise(self, path: str, start: int, outcome: Outcome) -> None:
        """Note that obstore read what `read_directly` did not, and why not."""
        if self._reads_directly():
            self._breaker.was_read((path, start), outcome)

    @property
    def direct_counts(self) -> DirectCounts:
        """How ranges were read so far; zeros where nothing is ever read directly."""
        return self._breaker.counts

    def _reads_directly(self) -> bool:
        return isinstance(self.options, S3Options) and not self.options.anon and not is_reread()

    def _direct_reads(self) -> DirectReads | None:
        with self._lock:
            assert self._place is not None
            if self._direct is None and not goes_through_a_proxy(self._place.endpoint_url):
                self._direct = DirectReads(
                    verify=self._place.verify,
                    connect_seconds=self.options.connect_timeout_seconds,
                    silence_seconds=self.timeouts.silence_seconds,
                )
            return self._direct

    def endpoint_url(self) -> str | None:
        """The server that requests go to; None where obstore knows the cloud's own. Sends nothing.

        Raises:
            InvalidArgumentError: An option is no good.
            botocore.exceptions.BotoCoreError: Profile or region cannot be read.
        """
        if isinstance(self.options, S3Options):
            return self._resolved(self.options).endpoint_url
        if isinstance(self.options, GoogleOptions):
            return google_config(self.options).get("base_url")
        return azure_config(self.options).get("endpoint")

    def _resolved(self, options: S3Options) -> S3Place:
        with self._lock:
            self._place = self._place or resolve_s3(self._bucket, options)
            return self._place

    @property
    def budget(self) -> RequestBudget:
        """What this host has under way to this bucket."""
        with self._lock:
            if self._budget is None:
                self._budget = shared_budget(
                    f"{type(self.options).__name__} {self.options.endpoint_url} {self._bucket}"
                )
            return self._budget

    def secrets(self) -> list[str]:
        """What must not be shown: what options hold, and what was found and last used."""
        found = self._credentials.secrets if self._credentials is not None else ()
        return [*secrets_of(self.options), *found]

    def signs_with(self) -> ReadOnlyCredentials | None:
        """The credentials that requests are signed with now; None if none has been so far."""
        return self._credentials.given if self._credentials is not None else None

    def renew_credentials(self, refused: ReadOnlyCredentials | None) -> bool:
        """Look for others than those that the store refused: once for all requests that were signed with them.

        Costs what finding them costs, for which other refused requests wait.

        Args:
            refused: What `signs_with` said before the request was sent.

        Returns:
            Whether there are others, with which the next request is signed.

        Raises:
            DcpRemoteError: There are none any more.
            botocore.exceptions.BotoCoreError: They cannot be looked for.
        """
        options = self.options
        if not isinstance(options, S3Options) or options.aws_access_key_id is not None:
            return False  # what the caller gave is all that there is
        with self._renew_lock:
            current = self._credentials
            if current is None:
                return False
            if refused is not None and refused != current.given:
                return True
            if time.monotonic() < self._renew_again_at:
                return False
            renewed = False
            try:
                # In a session of its own: the other one has read the files, and believes in their end as it was told.
                place = resolve_s3(self._bucket, options)
                found = find_credentials(place, self._bucket, before=current)
                renewed = found.now() != current.given
            finally:
                again_seconds = _RENEWED_SECONDS if renewed else _DEFINITE_VERDICT_SECONDS
                self._renew_again_at = time.monotonic() + again_seconds
            if renewed:
                with self._lock:
                    self._place, self._credentials, self._credentials_changes = place, found, 0
                    self._clients.clear()
                self._look_again_at = 0.0  # what was found with the others
            return renewed

    def take_credentials_error(self) -> Exception | None:
        """Why credentials could not be renewed, once."""
        if self._credentials is None:
            return None
        error, self._credentials.error = self._credentials.error, None
        return error

    def look(self, prefix: str, *, reuse: bool = False) -> Verdict | None:
        """Diagnose an S3 bucket, by one request. Of the other clouds nothing can be told.

        Args:
            prefix: Of the store that asks.
            reuse: Take what the last look found, if that is recent: a hundred failures need one diagnosis. Errors that
                retrying does not cure are not kept for long: the user may have cured them.
        """
        with self._look_lock:
            if reuse and time.monotonic() < self._look_again_at:
                return self._verdict
            self._verdict = self._look(prefix, listing=False)
            passing = self._verdict is None or issubclass(self._verdict.kind, TransientStorageError)
            self._look_again_at = time.monotonic() + (_VERDICT_SECONDS if passing else _DEFINITE_VERDICT_SECONDS)
            return self._verdict

    def look_at_listing(self, prefix: str) -> Verdict | None:
        """Diagnose a listing that failed. Not kept: there is never more than one at a time."""
        return self._look(prefix, listing=True)

    def _look(self, prefix: str, *, listing: bool) -> Verdict | None:
        if not isinstance(self.options, S3Options):
            return None  # obstore tells no more than it did, and it is the only client
        place = self._resolved(self.options)
        return diagnose_s3(place, self.options, bucket=self._bucket, prefix=prefix, listing=listing)

    def size_after_failure(self, path: str) -> int | None:
        """How large the object is whose range could not be read; None if the store does not tell, or just did not."""
        if time.monotonic() < self._head_again_at:
            return None
        try:
            return obstore.head(self.client(download=True), path)["size"]
        except FAILURES:
            self._head_again_at = time.monotonic() + _VERDICT_SECONDS
            return None


def _refuse_after_fork() -> None:
    global _requesting_pid  # noqa: PLW0603  # one runtime per process, whatever the number of stores
    if _requesting_pid is None:
        _requesting_pid = os.getpid()
    elif _requesting_pid != os.getpid():
        raise InvalidArgumentError(
            "This process was forked from one that had used a cloud store already, whose client cannot follow: start "
            "processes with `spawn` or `forkserver`.",
            pid=os.getpid(),
            forked_from=_requesting_pid,
        )
