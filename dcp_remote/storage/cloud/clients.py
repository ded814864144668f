"""Clients of one bucket in this process: created on first use, renewed with their credentials; and its diagnosis."""

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

from dcp_remote.common.descriptors import find_shortage
from dcp_remote.errors import BucketNotFoundError, InvalidArgumentError, TransientStorageError
from dcp_remote.storage.cloud.circuit_breaker import CircuitBreaker, DirectCounts, Outcome
from dcp_remote.storage.cloud.config import (
    Timeouts,
    forbid_other_hosts,
    make_azure_config,
    make_client_config,
    make_google_config,
    make_s3_config,
)
from dcp_remote.storage.cloud.credentials import S3Credentials, find_credentials
from dcp_remote.storage.cloud.diagnosis import Diagnosis, diagnose_s3
from dcp_remote.storage.cloud.endpoint import S3Endpoint, resolve_s3
from dcp_remote.storage.cloud.errors import get_safe_cause, make_bucket_error, translate
from dcp_remote.storage.cloud.options import CloudOptions, GoogleOptions, S3Options, collect_secrets
from dcp_remote.storage.cloud.range_reader import DirectRangeReader, uses_proxy
from dcp_remote.storage.cloud.rate_limit import AdaptiveRequestLimit, shared_request_limit
from dcp_remote.storage.request_context import remaining_seconds, rounded_up
from dcp_remote.storage.rereads import is_reread
from dcp_remote.storage.url import ParsedUrl

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials
    from obstore.store import ClientConfig, RetryConfig

Client: TypeAlias = S3Store | GCSStore | AzureStore

# One attempt per call: `RetryingStore`, which knows the deadline, retries.
_NO_RETRIES: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(0)}

# Exceptions of obstore and botocore, and those of Python that obstore lets through.
FAILURES = (BaseError, BotoCoreError, ClientError, OSError, ValueError)

# Time for which a diagnosis without a lasting cause is reused: one per request would double a storm of 503.
_DIAGNOSIS_SECONDS = 30.0

# Time for which a lasting cause is reused: long enough for threads that failed together, and not for a user's fix.
_LASTING_DIAGNOSIS_SECONDS = 2.0

# Pause after renewed credentials, longer than that of a retry: a role may give new ones at every call, so if the store
# refuses the new ones as well, age was not the reason.
_RENEWED_SECONDS = 5.0

# Validity of a signed URL, which is used at once.
_SIGNED_FOR = timedelta(minutes=10)

# obstore's threads do not survive a fork; a child process that uses them hangs.
_requesting_pid: int | None = None


class BucketClients:
    """Clients of one bucket in this process, created on first use. Safe to use from many threads.

    Args:
        parsed: URL of the bucket.
        options: Checked `storage_options`.
        timeouts: Limits after which a request counts as stalled.
    """

    def __init__(self, parsed: ParsedUrl, options: CloudOptions, timeouts: Timeouts) -> None:
        """Store the arguments; nothing is created or sent."""
        self.options = options
        self.timeouts = timeouts
        self._scheme, self._bucket = parsed.scheme, parsed.bucket
        self._lock = threading.Lock()
        # By (download, delete_singly, request_seconds): obstore fixes these per client, and clients are cheap.
        self._clients: dict[tuple[bool, bool, float], Client] = {}
        self._endpoint: S3Endpoint | None = None
        self._credentials: S3Credentials | None = None
        self._credentials_changes = 0
        self._renew_lock = threading.Lock()
        self._renew_again_at = 0.0
        self._diagnosis_lock = threading.Lock()
        self._diagnosis: Diagnosis | None = None
        self._diagnose_again_at = 0.0
        self._head_again_at = 0.0
        self._request_limit: AdaptiveRequestLimit | None = None
        self._direct_reader: DirectRangeReader | None = None
        self._breaker = CircuitBreaker(parsed.bucket)

    def client(self, *, download: bool, size_bytes: int = 0, delete_singly: bool = False) -> Client:
        """Return the client for requests of a size, creating it if necessary.

        Args:
            download: True if the answer is the larger part, not the request.
            size_bytes: Size of the larger part.
            delete_singly: True to delete by one request per key; the answer to a batch does not show each error.

        Raises:
            InvalidArgumentError: This process was forked after the first request; or the configuration is invalid.
            PermissionDeniedError: There are no credentials.
            TransientStorageError: This process can open too few files.
            botocore.exceptions.BotoCoreError: Profile, region or credentials cannot be read.
        """
        _refuse_after_fork()
        seconds = self.request_seconds(size_bytes)
        settings = (download, delete_singly, seconds)
        with self._lock:
            changes = self._credentials.changes if self._credentials is not None else 0
            if changes != self._credentials_changes:
                # Each client keeps credentials of its own: after one got new ones, the others would sign with old ones.
                self._clients.clear()
                self._credentials_changes = changes
            if settings not in self._clients:
                if (shortage := find_shortage()) is not None:
                    raise TransientStorageError(shortage)
                self._clients[settings] = self._open(
                    download=download, delete_singly=delete_singly, request_seconds=seconds
                )
            return self._clients[settings]

    def request_seconds(self, size_bytes: int = 0) -> float:
        """Return the time limit of a request of a size that begins now, which ends with the caller's deadline."""
        return min(self.timeouts.request_seconds(size_bytes), rounded_up(remaining_seconds()))

    def _open(self, *, download: bool, delete_singly: bool, request_seconds: float) -> Client:
        def http(endpoint_url: str | None, *, verify: bool | str | None) -> ClientConfig:
            return make_client_config(
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
                endpoint = self._endpoint = self._endpoint or resolve_s3(self._bucket, options)
                if self._credentials is None and not options.anon:
                    self._credentials = find_credentials(endpoint, self._bucket)
                network = http(endpoint.endpoint_url, verify=endpoint.verify)
                if not uses_proxy(endpoint.endpoint_url):
                    network.update(forbid_other_hosts(endpoint.endpoint_url))
                return S3Store(
                    self._bucket,
                    config=make_s3_config(options, endpoint, delete_singly=delete_singly),
                    client_options=network,
                    retry_config=_NO_RETRIES,
                    credential_provider=self._credentials,
                )
            if isinstance(options, GoogleOptions):
                google = make_google_config(options)
                network = http(google.get("base_url"), verify=options.verify)
                return GCSStore(self._bucket, config=google, client_options=network, retry_config=_NO_RETRIES)
            azure = make_azure_config(options)
            network = http(azure.get("endpoint"), verify=options.verify)
            return AzureStore(self._bucket, config=azure, client_options=network, retry_config=_NO_RETRIES)
        except BaseError as error:
            reason = translate(error, verb="open", url=self._bucket, secrets=self.secrets())
            raise InvalidArgumentError(
                "The store's client cannot be configured from storage_options and environment.",
                bucket=self._bucket,
                cause=reason.details.get("cause"),
            ) from get_safe_cause(error, self.secrets())

    def read_directly(self, path: str, start: int, buffer: memoryview, hedge: Callable[[], memoryview]) -> Outcome:
        """Read a range of an object straight into `buffer`, by one GET; see `DirectRangeReader.read`.

        Only on S3: with many kinds of credentials of the other clouds, signing a URL costs a request.

        Returns:
            "read", or the reason why nothing was read. The content of `buffer` is then undefined: read the range by
            obstore and call `note_obstore_read`.

        Raises:
            ConnectionError: The store is too busy, or the connection broke.
            TimeoutError: The store was silent, or slow.
        """
        if not self._may_read_directly():
            return "skipped"
        range_id = (path, start)
        route = self._breaker.choose_route(range_id)
        if route != "direct":
            return route
        client = self.client(download=True, size_bytes=len(buffer))
        assert isinstance(client, S3Store)
        reader = self._get_direct_reader()
        if reader is None:
            return "skipped"
        url = obstore.sign(client, "GET", path, _SIGNED_FOR)
        try:
            # While the request limit is reduced, the store is overloaded: send no second requests.
            should_hedge = self.request_limit.share() == 1
            seconds = self.request_seconds(len(buffer))
            if not reader.read(url, start, buffer, seconds=seconds, hedge=hedge if should_hedge else None):
                return "refused"
        except (ConnectionError, TimeoutError):
            self._breaker.note_broken(range_id)
            raise
        except OSError:
            return "refused"  # a name or a certificate: obstore resolves and verifies by itself, with mapped errors
        self._breaker.note_read(range_id, "read")
        return "read"

    def note_obstore_read(self, path: str, start: int, outcome: Outcome) -> None:
        """Note that obstore read a range for which `read_directly` returned `outcome`."""
        if self._may_read_directly():
            self._breaker.note_read((path, start), outcome)

    @property
    def direct_counts(self) -> DirectCounts:
        """Counts of the ranges read so far; zeros where nothing is ever read directly."""
        return self._breaker.counts

    def _may_read_directly(self) -> bool:
        options = self.options
        return isinstance(options, S3Options) and options.direct_reads and not options.anon and not is_reread()

    def _get_direct_reader(self) -> DirectRangeReader | None:
        with self._lock:
            assert self._endpoint is not None
            if self._direct_reader is None and not uses_proxy(self._endpoint.endpoint_url):
                self._direct_reader = DirectRangeReader(
                    verify=self._endpoint.verify,
                    connect_seconds=self.options.connect_timeout_seconds,
                    silence_seconds=self.timeouts.silence_seconds,
                )
            return self._direct_reader

    def endpoint_url(self) -> str | None:
        """Return the URL of the server; None if obstore uses the cloud's own. Sends nothing.

        Raises:
            InvalidArgumentError: An option is invalid.
            botocore.exceptions.BotoCoreError: Profile or region cannot be read.
        """
        if isinstance(self.options, S3Options):
            return self._resolve_endpoint(self.options).endpoint_url
        if isinstance(self.options, GoogleOptions):
            return make_google_config(self.options).get("base_url")
        return make_azure_config(self.options).get("endpoint")

    def make_bucket_error(self) -> BucketNotFoundError:
        """Return the error for this bucket, which does not exist. Sends nothing. Errors as of `endpoint_url`."""
        region = self._resolve_endpoint(self.options).region_name if isinstance(self.options, S3Options) else None
        return make_bucket_error(self._scheme, self._bucket, endpoint_url=self.endpoint_url(), region_name=region)

    def _resolve_endpoint(self, options: S3Options) -> S3Endpoint:
        with self._lock:
            self._endpoint = self._endpoint or resolve_s3(self._bucket, options)
            return self._endpoint

    @property
    def request_limit(self) -> AdaptiveRequestLimit:
        """Limit of concurrent requests to this bucket, shared by the processes of this host."""
        with self._lock:
            if self._request_limit is None:
                self._request_limit = shared_request_limit(
                    f"{type(self.options).__name__} {self.options.endpoint_url} {self._bucket}"
                )
            return self._request_limit

    def secrets(self) -> list[str]:
        """Return all texts that no message may show: secrets of the options and credentials in use."""
        found = self._credentials.secrets if self._credentials is not None else ()
        return [*collect_secrets(self.options), *found]

    def get_signing_credentials(self) -> ReadOnlyCredentials | None:
        """Return the credentials that requests are signed with now; None before the first signed request."""
        return self._credentials.last_given if self._credentials is not None else None

    def renew_credentials(self, refused: ReadOnlyCredentials | None) -> bool:
        """Look for credentials other than the refused ones, once for all requests that were signed with them.

        Costs what finding credentials costs; other refused requests wait meanwhile.

        Args:
            refused: Result of `get_signing_credentials` before the request was sent.

        Returns:
            Whether newer credentials were found, which sign the next request.

        Raises:
            DcpRemoteError: No credentials exist any more.
            botocore.exceptions.BotoCoreError: Looking for credentials failed.
        """
        options = self.options
        if not isinstance(options, S3Options) or options.aws_access_key_id is not None:
            return False  # credentials in the options are the only ones
        with self._renew_lock:
            current = self._credentials
            if current is None:
                return False
            if refused is not None and refused != current.last_given:
                return True
            if time.monotonic() < self._renew_again_at:
                return False
            is_renewed = False
            try:
                # A new session: the old one has read the files and trusts the expiry that it was told.
                endpoint = resolve_s3(self._bucket, options)
                found = find_credentials(endpoint, self._bucket, before=current)
                is_renewed = found.fetch() != current.last_given
            finally:
                pause_seconds = _RENEWED_SECONDS if is_renewed else _LASTING_DIAGNOSIS_SECONDS
                self._renew_again_at = time.monotonic() + pause_seconds
            if is_renewed:
                with self._lock:
                    self._endpoint, self._credentials, self._credentials_changes = endpoint, found, 0
                    self._clients.clear()
                # A diagnosis under way is made with the old credentials: wait for its end, or it would be reused.
                with self._diagnosis_lock:
                    self._diagnose_again_at = 0.0
            return is_renewed

    def take_credentials_error(self) -> Exception | None:
        """Return why the last renewal by obstore failed, and forget it; None if it did not fail."""
        if self._credentials is None:
            return None
        error, self._credentials.error = self._credentials.error, None
        return error

    def diagnose(self, prefix: str, *, reuse: bool = False) -> Diagnosis | None:
        """Diagnose an S3 bucket, by one request; None if nothing is found, and always for the other clouds.

        Args:
            prefix: Prefix of the store that asks.
            reuse: True if a recent result may be returned, so that a hundred failures cost one diagnosis. Causes that a
                retry does not cure are reused for a shorter time, because the user may have fixed them.
        """
        with self._diagnosis_lock:
            if reuse and time.monotonic() < self._diagnose_again_at:
                return self._diagnosis
            self._diagnosis = self._diagnose(prefix, listing=False)
            is_lasting = self._diagnosis is not None and not issubclass(
                self._diagnosis.error_class, TransientStorageError
            )
            reuse_seconds = _LASTING_DIAGNOSIS_SECONDS if is_lasting else _DIAGNOSIS_SECONDS
            self._diagnose_again_at = time.monotonic() + reuse_seconds
            return self._diagnosis

    def diagnose_listing(self, prefix: str) -> Diagnosis | None:
        """Diagnose a failed listing, by one request. Never reused, since listings are rare and sequential."""
        return self._diagnose(prefix, listing=True)

    def _diagnose(self, prefix: str, *, listing: bool) -> Diagnosis | None:
        if not isinstance(self.options, S3Options):
            return None  # for the other clouds obstore is the only client, and its error says all that it knows
        endpoint = self._resolve_endpoint(self.options)
        return diagnose_s3(endpoint, self.options, bucket=self._bucket, prefix=prefix, listing=listing)

    def size_after_failure(self, path: str) -> int | None:
        """Return the size in bytes of an object whose range could not be read, by one HEAD.

        None if the HEAD fails, or one failed within the last 30 s.
        """
        if time.monotonic() < self._head_again_at:
            return None
        try:
            return obstore.head(self.client(download=True), path)["size"]
        except FAILURES:
            self._head_again_at = time.monotonic() + _DIAGNOSIS_SECONDS
            return None


def _refuse_after_fork() -> None:
    global _requesting_pid  # noqa: PLW0603  # one runtime per process, whatever the number of stores
    if _requesting_pid is None:
        _requesting_pid = os.getpid()
    elif _requesting_pid != os.getpid():
        raise InvalidArgumentError(
            "This process was forked after its parent had used a cloud store, whose client does not survive a fork. "
            "Start processes with `spawn` or `forkserver`.",
            pid=os.getpid(),
            forked_from=_requesting_pid,
        )
