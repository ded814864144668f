"""Diagnosis of an S3 bucket whose requests fail: one GET more, by botocore, that shows status and error code."""

from __future__ import annotations

import ssl
from http import HTTPStatus
from typing import Any

import botocore.exceptions as botocore_exceptions
from botocore.awsrequest import AWSRequest
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies

from dcp_remote.errors import PermissionDeniedError, StorageError, TransientStorageError
from dcp_remote.storage.cloud.endpoint import SIGNED_FOR, S3Endpoint, S3Options, create_client
from dcp_remote.storage.cloud.errors import (
    ADVICE,
    FAILURES,
    NO_SUCH_BUCKET_CODE,
    SENT_ELSEWHERE,
    WHAT,
    CloudError,
    find_error_code,
    first_match,
    make_s3_bucket_error,
)

# OpenSSL's name of the only alert that reports the server's own state.
_TLS_INTERNAL_ERROR = "TLSV1_ALERT_INTERNAL_ERROR"

# Name of an object that never exists, so the answer is short whether or not the bucket exists.
PROBE_KEY = "dcp-remote-diagnosis"

# Time limits to connect to each address of the server, and to read: a diagnosis must not take longer than the failure.
CONNECT_SECONDS, READ_SECONDS = 3.0, 5.0


def diagnose_s3(
    endpoint: S3Endpoint, options: S3Options, *, bucket: str, prefix: str, listing: bool = False
) -> CloudError | None:
    """Find out why requests to a bucket fail, by one GET of an object that does not exist; at most 8 s.

    The answer to a GET, unlike that to a HEAD, has a body with an error code, and a GET needs no grant to list. It uses
    the endpoint, addressing style, region and credentials of the failed request. It is not retried and follows no
    redirect. If a listing failed, one object is listed instead, because obstore does not show that a listing is denied.

    Returns:
        An error without the details of a request. None if nothing is found: the bucket answers well, or is as
        overloaded as before, or botocore cannot sign.
    """
    operation = "list_objects_v2" if listing else "get_object"
    place = {"Prefix": prefix, "MaxKeys": 1} if listing else {"Key": f"{prefix}/{PROBE_KEY}".lstrip("/")}
    try:
        client = create_client(endpoint.session, options)
        seconds = int(SIGNED_FOR.total_seconds())
        url = client.generate_presigned_url(operation, {"Bucket": bucket, **place}, seconds)  # a secret
    except FAILURES:
        # `S3Credentials` goes on with its last keys when a renewal fails, and the store says when they have expired.
        return None
    try:
        answer = send_by_botocore("GET", url, endpoint)
    except StorageError as error:
        return error
    except botocore_exceptions.BotoCoreError:
        return _report_unreachable(endpoint)
    body = answer.content.decode(errors="replace")
    answered_region = (
        answer.headers.get("x-amz-bucket-region")
        or first_match(r"<Region>([\w-]{1,64})</Region>", body)
        or first_match(r"\.([a-z]{2}-[a-z-]+-\d+)\.amazonaws\.com", answer.headers.get("Location", ""))
    )
    status, code = answer.status_code, find_error_code(body) or ""
    if listing and status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) and code not in ADVICE:
        return PermissionDeniedError(WHAT[PermissionDeniedError], code=code, endpoint=endpoint.endpoint_url)
    return diagnose_answer(status, code, answered_region, endpoint=endpoint, bucket=bucket)


def send_by_botocore(method: str, url: str, endpoint: S3Endpoint) -> Any:
    """Send a request without a body, once, and return botocore's answer; at most 8 s.

    Raises:
        StorageError: The TLS handshake failed.
        botocore.exceptions.BotoCoreError: There was no answer.
    """
    # `Any`: the stubs lack the path of a certificate and the pair of timeouts, which botocore itself passes.
    verify: Any = True if endpoint.verify is None else endpoint.verify
    timeout: Any = (CONNECT_SECONDS, READ_SECONDS)
    session = URLLib3Session(verify=verify, proxies=get_environ_proxies(url), timeout=timeout)
    try:
        return session.send(AWSRequest(method, url).prepare())
    except botocore_exceptions.SSLError as error:
        raise _explain_tls_failure(error, endpoint) from None
    finally:
        session.close()


def _report_unreachable(endpoint: S3Endpoint) -> StorageError:
    return TransientStorageError(
        "The endpoint cannot be reached, or does not answer: check endpoint_url, the network and the proxy.",
        endpoint=endpoint.endpoint_url,
    )


def _explain_tls_failure(error: botocore_exceptions.SSLError, endpoint: S3Endpoint) -> StorageError:
    """Return the error for a failed TLS handshake: certificate, protocol, or a server that is restarting."""
    # botocore wraps urllib3's error, which wraps that of ssl; only a wrong host name is found by urllib3 itself.
    inner = next(iter(error.kwargs["error"].args), None)
    if isinstance(inner, ssl.SSLCertVerificationError) or not isinstance(inner, ssl.SSLError):
        return StorageError(
            "The certificate of the endpoint is not trusted: give the certificate file of its authority as "
            "storage_options['verify'].",
            endpoint=endpoint.endpoint_url,
            cause=inner.verify_message if isinstance(inner, ssl.SSLCertVerificationError) else str(inner),
        )
    # Load balancers break off handshakes while they restart or are overloaded: a later attempt may pass.
    if inner.reason == _TLS_INTERNAL_ERROR or isinstance(inner, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return _report_unreachable(endpoint)
    return StorageError(
        "TLS with the endpoint fails: it speaks plain http, offers only unsafe versions or ciphers of TLS, or asks for "
        "a client certificate. Check endpoint_url.",
        endpoint=endpoint.endpoint_url,
        cause=inner.reason,
    )


def diagnose_answer(
    status: int, code: str, answered_region: str | None, *, endpoint: S3Endpoint, bucket: str
) -> StorageError | None:
    """Return the error that the store's answer to the GET shows; None if it shows nothing."""
    used_region, endpoint_url = endpoint.region_name, endpoint.endpoint_url
    if code == NO_SUCH_BUCKET_CODE:
        return make_s3_bucket_error(bucket, endpoint_url=endpoint_url, region_name=used_region)
    is_redirect = HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST
    # 400 is AuthorizationHeaderMalformed: the request was signed for a region that is not the endpoint's.
    is_other_region = answered_region is not None and answered_region != used_region
    if is_other_region and (is_redirect or status == HTTPStatus.BAD_REQUEST):
        return StorageError(
            "The bucket lies in another region: set storage_options['region_name'] (or AWS_DEFAULT_REGION) to "
            f"{answered_region!r}.",
            bucket=bucket,
            bucket_region=answered_region,
            used_region=used_region,
            endpoint=endpoint_url,
        )
    if is_redirect:
        return StorageError(
            SENT_ELSEWHERE, bucket=bucket, status=status, used_region=used_region, endpoint=endpoint_url
        )
    if code in ADVICE:
        return PermissionDeniedError(ADVICE[code], code=code, endpoint=endpoint_url)
    if status == HTTPStatus.BAD_REQUEST:  # the same GET would be malformed again
        return StorageError(
            "The store rejects the requests as malformed; see the code.", code=code, endpoint=endpoint_url
        )
    # Without s3:ListBucket, S3 answers 403 for any missing object; 5xx and 429 say nothing new.
    return None
