"""Why requests to an S3 bucket fail, asked of the bucket itself: one request that shows status and error code."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import botocore.exceptions as botocore_exceptions
from botocore.awsrequest import AWSRequest
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies

from dcp_remote.errors import ObjectNotFoundError, PermissionDeniedError, StorageError, TransientStorageError
from dcp_remote.storage.cloud_errors import (
    ADVICE,
    CREDENTIALS_CODES,
    NO_SUCH_BUCKET,
    SENT_ELSEWHERE,
    WHAT,
    CloudError,
    Kind,
    code_in,
    first_match,
    kind_of,
)
from dcp_remote.storage.cloud_options import S3Options
from dcp_remote.storage.s3_place import S3Place, presign_s3

# OpenSSL's name of the one alert that tells of the server's own state.
_TLS_INTERNAL_ERROR = "TLSV1_ALERT_INTERNAL_ERROR"

# Nobody puts an object of this name: the answer is short, whether or not the bucket is there.
_PROBE_KEY = "dcp-remote-diagnosis"

# A look at why a request failed must not take longer than the failure. To connect, to read.
_PROBE_TIMEOUTS_SECONDS = (3.0, 5.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a diagnosis found: an error that can be raised for any request of these minutes."""

    kind: Kind
    what: str
    details: tuple[tuple[str, str | int | None], ...] = ()

    def error(self, *, verb: str, url: str) -> CloudError:
        """The error for one request."""
        return self.kind(self.what, verb=verb, url=url, **dict(self.details))


def no_such_bucket(bucket: str, endpoint_url: str | None) -> Verdict:
    """The verdict on a bucket that is not there."""
    return Verdict(ObjectNotFoundError, NO_SUCH_BUCKET, (("bucket", bucket), ("endpoint", endpoint_url)))


def diagnose_s3(
    place: S3Place, options: S3Options, *, bucket: str, prefix: str, listing: bool = False
) -> Verdict | None:
    """Ask why requests to a bucket fail, by one GET of an object that is not there; at most 8 s.

    A GET and no HEAD: its answer has a body with an error code, and it needs no grant to list. It goes the way of
    the failed request (endpoint, style, region, credentials), is not retried and follows no redirect.

    Args:
        place: Where requests go.
        options: For signing.
        bucket: Its name.
        prefix: That of the store: the grant may end there.
        listing: A listing failed: list one object instead, since obstore does not tell when a listing is denied.

    Returns:
        None if nothing can be told: the bucket answers well, or is as overloaded as before.
    """
    key = f"{prefix}/{_PROBE_KEY}" if prefix else _PROBE_KEY
    try:
        if listing:
            url = presign_s3(place, options, "list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1)
        else:
            url = presign_s3(place, options, "get_object", Bucket=bucket, Key=key)
        # `Any`: the stubs know neither the path of a certificate nor a pair of timeouts, which botocore itself passes.
        verify: Any = True if place.verify is None else place.verify
        timeout: Any = _PROBE_TIMEOUTS_SECONDS
        session = URLLib3Session(verify=verify, proxies=get_environ_proxies(url), timeout=timeout)
        try:
            answer = session.send(AWSRequest("GET", url).prepare())
            body = answer.content.decode(errors="replace")
        finally:
            session.close()
    except botocore_exceptions.SSLError as error:
        return _judge_tls(error, place)
    except botocore_exceptions.BotoCoreError as error:
        kind = kind_of(error)
        if kind is TransientStorageError:
            return _unreachable(place)
        return Verdict(kind, "Requests cannot be signed any more.", (("cause", type(error).__name__),))
    return _judge(
        status=answer.status_code,
        code=code_in(body) or "",
        answered_region=answer.headers.get("x-amz-bucket-region")
        or first_match(r"<Region>([\w-]{1,64})</Region>", body)
        or first_match(r"\.([a-z]{2}-[a-z-]+-\d+)\.amazonaws\.com", answer.headers.get("Location", "")),
        place=place,
        bucket=bucket,
        listing=listing,
    )


def _unreachable(place: S3Place) -> Verdict:
    return Verdict(
        TransientStorageError,
        "The endpoint cannot be reached, or does not answer: look at endpoint_url, the network, the proxy.",
        (("endpoint", place.endpoint_url),),
    )


def _judge_tls(error: botocore_exceptions.SSLError, place: S3Place) -> Verdict:
    """What a handshake that failed tells: of the certificate, of two that do not understand each other, or nothing."""
    endpoint = ("endpoint", place.endpoint_url)
    # botocore keeps urllib3's error, and that the one of ssl; only that a host has another name is found by urllib3.
    inner = next(iter(error.kwargs["error"].args), None)
    if isinstance(inner, ssl.SSLCertVerificationError) or not isinstance(inner, ssl.SSLError):
        cause = inner.verify_message if isinstance(inner, ssl.SSLCertVerificationError) else str(inner)
        return Verdict(
            StorageError,
            "The certificate of the endpoint is not trusted: give the file of its authority as "
            "storage_options['verify'].",
            (endpoint, ("cause", cause)),
        )
    # Balancers hang up in the middle of a handshake while they start again, or have more of them than they can do.
    if inner.reason == _TLS_INTERNAL_ERROR or isinstance(inner, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return _unreachable(place)
    return Verdict(
        StorageError,
        "TLS with the endpoint fails: it speaks plain http, or no version of TLS that is safe, or asks for more.",
        (endpoint, ("cause", inner.reason)),
    )


def _judge(
    *, status: int, code: str, answered_region: str | None, place: S3Place, bucket: str, listing: bool
) -> Verdict | None:
    """What a store's answer to the diagnosis tells of its bucket; None if nothing."""
    endpoint = ("endpoint", place.endpoint_url)
    if code == "NoSuchBucket":
        return no_such_bucket(bucket, place.endpoint_url)
    moved = HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST
    # 400 is AuthorizationHeaderMalformed: signed for a region that is not the endpoint's.
    elsewhere = answered_region is not None and answered_region != place.region_name
    if elsewhere and (moved or status == HTTPStatus.BAD_REQUEST):
        return Verdict(
            StorageError,
            f"The bucket lies in another region: set storage_options['region_name'] (or AWS_DEFAULT_REGION) to "
            f"{answered_region!r}.",
            (("bucket", bucket), ("bucket_region", answered_region), ("used_region", place.region_name), endpoint),
        )
    if moved:
        return Verdict(
            StorageError,
            SENT_ELSEWHERE,
            (("bucket", bucket), ("status", status), ("used_region", place.region_name), endpoint),
        )
    if code in CREDENTIALS_CODES:
        return Verdict(PermissionDeniedError, ADVICE[code], (("code", code), endpoint))
    if status == HTTPStatus.BAD_REQUEST:  # the same GET will be malformed the next time, too
        return Verdict(StorageError, "The store takes our requests for malformed.", (("code", code), endpoint))
    if listing and status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return Verdict(PermissionDeniedError, WHAT[PermissionDeniedError], (("code", code), endpoint))
    # 403 is what a grant without s3:ListBucket answers for any missing object; 5xx and 429 are no news.
    return None
