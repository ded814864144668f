"""Diagnosis of an S3 bucket whose requests fail: one GET more, by botocore, that shows status and error code."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import botocore.exceptions as botocore_exceptions
from botocore.awsrequest import AWSRequest
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies

from dcp_remote.errors import BucketNotFoundError, Detail, PermissionDeniedError, StorageError, TransientStorageError
from dcp_remote.storage.cloud.endpoint import S3Endpoint, presign_s3
from dcp_remote.storage.cloud.errors import (
    ADVICE,
    CREDENTIALS_CODES,
    NO_SUCH_BUCKET_CODE,
    SENT_ELSEWHERE,
    WHAT,
    CloudError,
    ErrorClass,
    classify_error,
    find_error_code,
    first_match,
    make_bucket_error,
)
from dcp_remote.storage.cloud.options import S3Options

# OpenSSL's name of the only alert that reports the server's own state.
_TLS_INTERNAL_ERROR = "TLSV1_ALERT_INTERNAL_ERROR"

# Name of an object that never exists, so the answer is short whether or not the bucket exists.
_PROBE_KEY = "dcp-remote-diagnosis"

# Time limits to connect and to read: a diagnosis must not take longer than the failure.
_PROBE_TIMEOUTS_SECONDS = (3.0, 5.0)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of a diagnosis, from which errors for all requests that fail at that time are made.

    Attributes:
        error_class: Class of the errors.
        what: Message of the errors.
        details: Names and values to show behind the message.
    """

    error_class: ErrorClass
    what: str
    details: tuple[tuple[str, Detail], ...] = ()

    def error(self, *, verb: str, url: str) -> CloudError:
        """Return the error for one request; that of a missing bucket is the same for all requests."""
        if self.error_class is BucketNotFoundError:
            return BucketNotFoundError(self.what, **dict(self.details))
        return self.error_class(self.what, verb=verb, url=url, **dict(self.details))


def diagnose_s3(
    endpoint: S3Endpoint, options: S3Options, *, bucket: str, prefix: str, listing: bool = False
) -> Diagnosis | None:
    """Find out why requests to a bucket fail, by one GET of an object that does not exist; at most 8 s.

    The answer to a GET, unlike that to a HEAD, has a body with an error code, and a GET needs no grant to list. It uses
    the endpoint, addressing style, region and credentials of the failed request. It is not retried and follows no
    redirect.

    Args:
        endpoint: Endpoint of the bucket.
        options: Options that sign the request.
        bucket: Name of the bucket.
        prefix: Prefix of the store; the grant may end there.
        listing: True if a listing failed: then list one object, because obstore does not show that a listing is denied.

    Returns:
        None if nothing is found: the bucket answers well, or is as overloaded as before.
    """
    key = f"{prefix}/{_PROBE_KEY}" if prefix else _PROBE_KEY
    try:
        if listing:
            url = presign_s3(endpoint, options, "list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1)
        else:
            url = presign_s3(endpoint, options, "get_object", Bucket=bucket, Key=key)
        # `Any`: the stubs lack the path of a certificate and the pair of timeouts, which botocore itself passes.
        verify: Any = True if endpoint.verify is None else endpoint.verify
        timeout: Any = _PROBE_TIMEOUTS_SECONDS
        session = URLLib3Session(verify=verify, proxies=get_environ_proxies(url), timeout=timeout)
        try:
            answer = session.send(AWSRequest("GET", url).prepare())
            body = answer.content.decode(errors="replace")
        finally:
            session.close()
    except botocore_exceptions.SSLError as error:
        return _diagnose_tls(error, endpoint)
    except botocore_exceptions.BotoCoreError as error:
        error_class = classify_error(error)
        if error_class is TransientStorageError:
            return _report_unreachable(endpoint)
        return Diagnosis(error_class, "Requests can no longer be signed.", (("cause", type(error).__name__),))
    return _diagnose_answer(
        status=answer.status_code,
        code=find_error_code(body) or "",
        answered_region=answer.headers.get("x-amz-bucket-region")
        or first_match(r"<Region>([\w-]{1,64})</Region>", body)
        or first_match(r"\.([a-z]{2}-[a-z-]+-\d+)\.amazonaws\.com", answer.headers.get("Location", "")),
        endpoint=endpoint,
        bucket=bucket,
        listing=listing,
    )


def _report_unreachable(endpoint: S3Endpoint) -> Diagnosis:
    return Diagnosis(
        TransientStorageError,
        "The endpoint cannot be reached, or does not answer: check endpoint_url, the network and the proxy.",
        (("endpoint", endpoint.endpoint_url),),
    )


def _diagnose_tls(error: botocore_exceptions.SSLError, endpoint: S3Endpoint) -> Diagnosis:
    """Return the diagnosis for a failed TLS handshake: certificate, protocol, or a server that is restarting."""
    shown_endpoint = ("endpoint", endpoint.endpoint_url)
    # botocore wraps urllib3's error, which wraps that of ssl; only a wrong host name is found by urllib3 itself.
    inner = next(iter(error.kwargs["error"].args), None)
    if isinstance(inner, ssl.SSLCertVerificationError) or not isinstance(inner, ssl.SSLError):
        cause = inner.verify_message if isinstance(inner, ssl.SSLCertVerificationError) else str(inner)
        return Diagnosis(
            StorageError,
            "The certificate of the endpoint is not trusted: give the certificate file of its authority as "
            "storage_options['verify'].",
            (shown_endpoint, ("cause", cause)),
        )
    # Load balancers break off handshakes while they restart or are overloaded: a later attempt may pass.
    if inner.reason == _TLS_INTERNAL_ERROR or isinstance(inner, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return _report_unreachable(endpoint)
    return Diagnosis(
        StorageError,
        "TLS with the endpoint fails: it speaks plain http, offers only unsafe versions or ciphers of TLS, or asks for "
        "a client certificate. Check endpoint_url.",
        (shown_endpoint, ("cause", inner.reason)),
    )


def _diagnose_answer(
    *, status: int, code: str, answered_region: str | None, endpoint: S3Endpoint, bucket: str, listing: bool
) -> Diagnosis | None:
    """Return what the store's answer to the GET shows about its bucket; None if nothing."""
    shown_endpoint = ("endpoint", endpoint.endpoint_url)
    if code == NO_SUCH_BUCKET_CODE:
        missing = make_bucket_error("s3", bucket, endpoint_url=endpoint.endpoint_url, region_name=endpoint.region_name)
        return Diagnosis(BucketNotFoundError, missing.what, tuple(missing.details.items()))
    is_redirect = HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST
    # 400 is AuthorizationHeaderMalformed: the request was signed for a region that is not the endpoint's.
    is_other_region = answered_region is not None and answered_region != endpoint.region_name
    if is_other_region and (is_redirect or status == HTTPStatus.BAD_REQUEST):
        return Diagnosis(
            StorageError,
            f"The bucket lies in another region: set storage_options['region_name'] (or AWS_DEFAULT_REGION) to "
            f"{answered_region!r}.",
            (
                ("bucket", bucket),
                ("bucket_region", answered_region),
                ("used_region", endpoint.region_name),
                shown_endpoint,
            ),
        )
    if is_redirect:
        return Diagnosis(
            StorageError,
            SENT_ELSEWHERE,
            (("bucket", bucket), ("status", status), ("used_region", endpoint.region_name), shown_endpoint),
        )
    if code in CREDENTIALS_CODES:
        return Diagnosis(PermissionDeniedError, ADVICE[code], (("code", code), shown_endpoint))
    if status == HTTPStatus.BAD_REQUEST:  # the same GET would be malformed again
        return Diagnosis(
            StorageError, "The store rejects the requests as malformed; see the code.", (("code", code), shown_endpoint)
        )
    if listing and status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return Diagnosis(PermissionDeniedError, WHAT[PermissionDeniedError], (("code", code), shown_endpoint))
    # Without s3:ListBucket, S3 answers 403 for any missing object; 5xx and 429 say nothing new.
    return None
