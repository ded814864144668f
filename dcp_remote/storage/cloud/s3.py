"""Amazon S3, and servers that speak its protocol."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store

from dcp_remote.errors import BucketNotFoundError, InvalidArgumentError, TransientStorageError
from dcp_remote.storage.base import Version
from dcp_remote.storage.cloud.credentials import find_credentials
from dcp_remote.storage.cloud.diagnosis import diagnose_s3
from dcp_remote.storage.cloud.endpoint import SIGNED_FOR, S3Endpoint, S3Options, resolve_s3
from dcp_remote.storage.cloud.errors import CloudError, make_s3_bucket_error
from dcp_remote.storage.cloud.provider import NO_RETRIES, Client, Provider
from dcp_remote.storage.options import LIMIT_OPTIONS

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials
    from obstore import UpdateVersion
    from obstore.store import ClientConfig, S3Config

# Pause after newer credentials were not found: long enough for threads that failed together, and not for a user's fix.
_NOT_RENEWED_SECONDS = 2.0

# Pause after renewed credentials, longer than that of a retry: a role may give new ones at every call, so if the store
# refuses the new ones as well, age was not the reason.
_RENEWED_SECONDS = 5.0

# Time for which a diagnosis without a lasting cause is reused: one per request would double a storm of 503.
_REUSE_SECONDS = 30.0

# Time for which a cause that a retry does not cure is reused: long enough for threads that failed together, and not for
# a user's fix.
_REUSE_LASTING_SECONDS = 2.0


class S3(Provider):
    """Bucket of S3: botocore finds endpoint and credentials, both on first use; obstore signs and sends."""

    options_class = S3Options
    # Google's server also takes S3 requests, for which it has to be probed.
    known_hosts = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu", ".api.aws")
    options: S3Options

    def __init__(self, bucket: str, options: S3Options) -> None:
        """Store the arguments; nothing is read or sent."""
        super().__init__(bucket, options)
        self._lock = threading.Lock()
        self._endpoint: S3Endpoint | None = None
        self._renew_lock = threading.Lock()
        self._renew_again_at = 0.0
        self._diagnosing = threading.Lock()
        self._diagnosis: CloudError | None = None  # the last one, reused for a while
        self._diagnose_again_at = 0.0

    @classmethod
    def parse(cls, bucket: str, options: Mapping[str, object]) -> Self:
        """Implement `Provider.parse`; accept s3fs's nested `client_kwargs`."""
        nested = options.get("client_kwargs")
        if isinstance(nested, Mapping):
            given = {name: value for name, value in nested.items() if value is not None}
            if misplaced := sorted(given.keys() & set(LIMIT_OPTIONS)):
                raise InvalidArgumentError("Give limits beside client_kwargs, not in it.", names=", ".join(misplaced))
            twice = next((name for name, value in given.items() if options.get(name) not in (None, value)), None)
            if twice is not None:
                raise InvalidArgumentError("storage_options give one setting twice, with different values.", name=twice)
            options = {name: value for name, value in options.items() if name != "client_kwargs"} | given
        return super().parse(bucket, options)

    def endpoint(self) -> S3Endpoint:
        """Return the endpoint of the bucket; raises like `endpoint_url`."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = resolve_s3(self.bucket, self.options)
            return self._endpoint

    def endpoint_url(self) -> str:
        """Implement `Provider.endpoint_url`."""
        return self.endpoint().endpoint_url

    def verify(self) -> bool | str | None:
        """Implement `Provider.verify`, as botocore reads environment and profile."""
        return self.endpoint().verify

    def open_client(self, http: ClientConfig, *, delete_singly: bool) -> S3Store:
        """Implement `Provider.open_client`.

        Raises:
            PermissionDeniedError: There are no credentials.
            botocore.exceptions.BotoCoreError: Credentials cannot be read, or the service that issues them failed.
        """
        options, endpoint = self.options, self.endpoint()
        if not endpoint.has_proxy:
            http = {**http, **_forbid_other_hosts(endpoint.endpoint_url)}
        # Settings as botocore has resolved them: obstore's own reading of the environment must contradict none.
        config: S3Config = {
            "endpoint": endpoint.endpoint_url,
            "aws_endpoint_url_s3": endpoint.endpoint_url,
            "region": endpoint.region_name,
            "virtual_hosted_style_request": endpoint.virtual_hosted,
            "skip_signature": options.anon,
            "unsigned_payload": not options.sign_payload,
            "disable_bulk_delete": delete_singly,
            "conditional_put": "etag",
        }
        if options.checksum_algorithm != "none":
            config["checksum_algorithm"] = options.checksum_algorithm or "CRC64NVME"
        with self._lock:
            if self.credentials.source is None and not options.anon:
                self.credentials.source = find_credentials(endpoint, self.bucket)
        return S3Store(
            self.bucket,
            config=config,
            client_options=http,
            retry_config=NO_RETRIES,
            credential_provider=None if options.anon else self.credentials,
        )

    def make_bucket_error(self) -> BucketNotFoundError:
        """Implement `Provider.make_bucket_error`."""
        endpoint = self.endpoint()
        return make_s3_bucket_error(self.bucket, endpoint_url=endpoint.endpoint_url, region_name=endpoint.region_name)

    def condition_of(self, version: Version) -> UpdateVersion:
        """Implement `Provider.condition_of`."""
        etag = version.etag
        return {"e_tag": etag if etag is None or self.options.etag_quotes else etag.strip('"')}

    def sign_get(self, client: Client, path: str) -> str | None:
        """Implement `Provider.sign_get`."""
        assert isinstance(client, S3Store)
        if not self.options.direct_reads or self.options.anon or self.endpoint().has_proxy:
            return None
        return obstore.sign(client, "GET", path, SIGNED_FOR)

    def renew_credentials(self, refused: ReadOnlyCredentials | None) -> bool:
        """Implement `Provider.renew_credentials`, once for all requests that were signed with the refused ones.

        Costs what finding credentials costs; other refused requests wait meanwhile.

        Raises:
            DcpRemoteError: No credentials exist any more.
            botocore.exceptions.BotoCoreError: Looking for credentials failed.
        """
        with self._renew_lock:
            current = self.credentials
            if current.source is None or self.options.aws_access_key_id is not None:
                return False  # credentials in the options are the only ones
            if refused is not None and refused != current.last_given:
                return True
            if time.monotonic() < self._renew_again_at:
                return False
            is_renewed = False
            try:
                # A new session: the old one has read the files and trusts the expiry that it was told.
                endpoint = resolve_s3(self.bucket, self.options)
                found = find_credentials(endpoint, self.bucket)
                is_renewed = found.get_frozen_credentials() != current.last_given
            finally:
                self._renew_again_at = time.monotonic() + (_RENEWED_SECONDS if is_renewed else _NOT_RENEWED_SECONDS)
            if is_renewed:
                with self._lock:
                    self._endpoint = endpoint
                    current.replace(found)
                with self._diagnosing:  # that under way was begun with the old credentials
                    self._diagnose_again_at = 0.0
            return is_renewed

    def diagnose(self, prefix: str, *, listing: bool = False, reuse: bool = False) -> CloudError | None:
        """Implement `Provider.diagnose`. Listings are rare and sequential, so their diagnoses are not reused."""
        if listing:
            return diagnose_s3(self.endpoint(), self.options, bucket=self.bucket, prefix=prefix, listing=True)
        with self._diagnosing:
            if not reuse or time.monotonic() >= self._diagnose_again_at:
                self._diagnosis = diagnose_s3(self.endpoint(), self.options, bucket=self.bucket, prefix=prefix)
                is_lasting = self._diagnosis is not None and not isinstance(self._diagnosis, TransientStorageError)
                again_seconds = _REUSE_LASTING_SECONDS if is_lasting else _REUSE_SECONDS
                self._diagnose_again_at = time.monotonic() + again_seconds
            return self._diagnosis


def _forbid_other_hosts(endpoint_url: str) -> ClientConfig:
    """Return settings that keep an obstore client from following redirects to hosts other than that of a URL.

    obstore follows redirects of GET, HEAD, DELETE and 303, sends them the session token, and has no setting against it.
    These settings therefore send requests for all other hosts to a proxy on port 0, where nothing can listen. Redirects
    to another port of the same host are followed.
    """
    host = urlsplit(endpoint_url).hostname or ""
    with suppress(OSError):  # the host is a name, or an IPv6 address
        host = socket.inet_ntoa(socket.inet_aton(host))  # obstore also expands 127.1
    return {"proxy_url": "http://127.0.0.1:0", "proxy_excludes": host}
