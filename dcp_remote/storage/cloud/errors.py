"""Errors of obstore and botocore, translated into errors of this package by what a caller can do about them.

Exceptions are mapped by class (`ERROR_CLASSES`), answers by status and code (`make_answer_error`). obstore has one
class, `GenericError`, for timeouts, refused connections, 5xx, redirects and other failures; of its text, which is for
people, only the error code counts that it quotes, and some codes are final (`translate`). Where the store gave no code
and the difference matters, `diagnosis` asks the store once more, by a request that shows status and error code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import TypeAlias

import botocore.exceptions as botocore_exceptions
import botocore.parsers
import obstore.exceptions as obstore_exceptions

from dcp_remote.errors import (
    BucketNotFoundError,
    ConditionFailedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import Condition
from dcp_remote.storage.cloud.redaction import redact
from dcp_remote.storage.local_files import TRANSIENT_ERRNOS

# Exceptions of obstore and botocore, and those of Python that they let through: botocore's from the issuing service.
FAILURES = (
    obstore_exceptions.BaseError,
    botocore_exceptions.BotoCoreError,
    botocore_exceptions.ClientError,
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
)

CloudError: TypeAlias = StorageError | InvalidArgumentError
ErrorClass: TypeAlias = type[StorageError] | type[InvalidArgumentError]

# By class; a class that is not listed is treated like the nearest of its bases.
ERROR_CLASSES: dict[type[BaseException], ErrorClass] = {
    Exception: StorageError,
    # Python's own, which obstore raises as well.
    FileNotFoundError: ObjectNotFoundError,
    PermissionError: PermissionDeniedError,
    ConnectionError: TransientStorageError,
    TimeoutError: TransientStorageError,
    OSError: StorageError,  # unless its errno says more
    ValueError: InvalidArgumentError,
    TypeError: InvalidArgumentError,
    BufferError: InvalidArgumentError,
    # obstore.
    obstore_exceptions.BaseError: StorageError,
    obstore_exceptions.GenericError: TransientStorageError,  # unless a diagnosis says more
    obstore_exceptions.NotFoundError: ObjectNotFoundError,
    obstore_exceptions.InvalidPathError: InvalidArgumentError,
    obstore_exceptions.UnknownConfigurationKeyError: InvalidArgumentError,
    obstore_exceptions.AlreadyExistsError: ConditionFailedError,
    obstore_exceptions.PreconditionError: ConditionFailedError,
    obstore_exceptions.NotModifiedError: ConditionFailedError,
    obstore_exceptions.PermissionDeniedError: PermissionDeniedError,
    obstore_exceptions.UnauthenticatedError: PermissionDeniedError,
    # botocore, which reads the configuration, finds credentials and sends the diagnosis.
    botocore_exceptions.BotoCoreError: InvalidArgumentError,  # configuration, unless it is one of the following
    # Network: a later attempt may pass.
    botocore_exceptions.ConnectionError: TransientStorageError,
    botocore_exceptions.HTTPClientError: TransientStorageError,
    botocore_exceptions.IncompleteReadError: TransientStorageError,
    botocore_exceptions.ChecksumError: TransientStorageError,
    botocore_exceptions.FlexibleChecksumError: TransientStorageError,
    botocore_exceptions.CapacityNotAvailableError: TransientStorageError,
    botocore_exceptions.MetadataRetrievalError: TransientStorageError,
    botocore.parsers.ResponseParserError: TransientStorageError,  # a proxy's page, or half an answer
    botocore_exceptions.SSLError: StorageError,  # a retry does not change the certificate
    # Credentials.
    botocore_exceptions.NoCredentialsError: PermissionDeniedError,
    botocore_exceptions.PartialCredentialsError: PermissionDeniedError,
    botocore_exceptions.CredentialRetrievalError: PermissionDeniedError,
    botocore_exceptions.UnknownCredentialError: PermissionDeniedError,
    botocore_exceptions.RefreshWithMFAUnsupportedError: PermissionDeniedError,
    botocore_exceptions.NoAuthTokenError: PermissionDeniedError,
    botocore_exceptions.TokenRetrievalError: PermissionDeniedError,
    botocore_exceptions.SSOError: PermissionDeniedError,
    botocore_exceptions.LoginError: PermissionDeniedError,
    # Through botocore only credentials are requested (STS, SSO), and a ClientError is a refusal to give them.
    botocore_exceptions.ClientError: PermissionDeniedError,
}

# Codes of STS that a later attempt may not get: many ranks asked at once, or the identity provider did not answer.
_PASSING_CODES = ("Throttling", "ThrottlingException", "RequestLimitExceeded", "IDPCommunicationError")

# Advice by S3's error code for refused credentials. The codes are part of S3's interface.
ADVICE = {
    "RequestTimeTooSkewed": "The clock of this machine is wrong. Set it (NTP).",
    "ExpiredToken": "The temporary credentials have expired. Renew them (for SSO: `aws sso login`).",
    "TokenRefreshRequired": "The temporary credentials have expired. Renew them.",
    "InvalidToken": "The session token does not belong to these keys.",
    "InvalidAccessKeyId": "The store does not know this access key.",
    "SignatureDoesNotMatch": "The secret key is not that of the access key.",
}

NO_SUCH_BUCKET_CODE = "NoSuchBucket"

# Code of a range that begins at or after the end of the object, on all three clouds.
SHORT_OBJECT_CODE = "InvalidRange"

# Error classes by S3's error code, where the HTTP status says less; failed keys of DeleteObjects have no status.
_CLASSES_BY_CODE: dict[str, type[StorageError]] = {
    **dict.fromkeys((*ADVICE, "AccessDenied"), PermissionDeniedError),
    **dict.fromkeys(("NoSuchKey", "NoSuchVersion"), ObjectNotFoundError),
    # The first five have status 400, and are caused by the network.
    **dict.fromkeys(("RequestTimeout", "IncompleteBody", "BadDigest"), TransientStorageError),
    **dict.fromkeys(("XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"), TransientStorageError),
    **dict.fromkeys(("InternalError", "ServiceUnavailable", "SlowDown"), TransientStorageError),
}

# Error classes by HTTP status. Any other status is transient from 500 on, and final below.
_CLASSES_BY_STATUS: dict[int, type[StorageError]] = {
    HTTPStatus.UNAUTHORIZED: PermissionDeniedError,
    HTTPStatus.FORBIDDEN: PermissionDeniedError,
    HTTPStatus.NOT_FOUND: ObjectNotFoundError,
    HTTPStatus.REQUEST_TIMEOUT: TransientStorageError,
    HTTPStatus.CONFLICT: TransientStorageError,  # not for a conditional write; see `make_answer_error`
    HTTPStatus.PRECONDITION_FAILED: ConditionFailedError,
    HTTPStatus.TOO_MANY_REQUESTS: TransientStorageError,
    HTTPStatus.NOT_IMPLEMENTED: StorageError,
}

# Without s3:ListBucket, S3 answers 403 instead of 404: a first save, or a load of a missing checkpoint, looks denied.
_DENIED_ADVICE = (
    "A job needs s3:GetObject and s3:PutObject on the objects, and s3:ListBucket on the bucket: without "
    "s3:ListBucket, S3 also refuses to say that an object does not exist."
)

_FULL = (
    "The store is full, or a quota of it is used up: delete older checkpoints, run `dcp-remote gc`, or have the quota "
    "raised."
)
_NO_KEY = "The KMS key of the bucket or object is disabled, being deleted or unknown: enable it, or name another one."
_NOT_UNDERSTOOD = (
    "The store refuses a request that every S3 store should understand. If it does not know the newer checksums, give "
    "storage_options['checksum_algorithm'] = 'SHA256' or 'none', or s3fs "
    "config_kwargs={'request_checksum_calculation': 'when_required'}."
)

# Error codes that a later attempt would get again. obstore raises those of status 400, 413, 501 and 507 as GenericError
# and those of 403 as a missing grant. QuotaExceeded is Ceph's and others', the X-codes are MinIO's and RustFS's.
_FINAL = {
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "XMinioAdminBucketQuotaExceeded": _FULL,
    "XRustfsQuotaExceeded": _FULL,
    "EntityTooLarge": "The store takes no object of this size in one request.",
    "InvalidObjectState": "The object was moved to an archive by a lifecycle rule of the bucket: restore it first.",
    "KMS.DisabledException": _NO_KEY,
    "KMS.KMSInvalidStateException": _NO_KEY,
    "KMS.NotFoundException": _NO_KEY,
    "InvalidArgument": _NOT_UNDERSTOOD,
    "InvalidRequest": _NOT_UNDERSTOOD,
    "MethodNotAllowed": _NOT_UNDERSTOOD,
    "MissingContentLength": _NOT_UNDERSTOOD,
    "NotImplemented": _NOT_UNDERSTOOD,
}

WHAT: dict[ErrorClass, str] = {
    StorageError: "The store failed.",
    TransientStorageError: "The store did not answer as it should: a timeout, a lost connection or its own error.",
    ObjectNotFoundError: "There is no such object.",
    ConditionFailedError: "The object is not in the state that this write asks for.",
    PermissionDeniedError: "The store refused the request: these credentials (or their lack) do not allow it.",
    InvalidArgumentError: "The client of the store refused the call.",
}

SENT_ELSEWHERE = "The endpoint redirects requests: endpoint_url or region_name is not that of this bucket."

# Bytes in which a web page must begin, after white space.
_WEB_PAGE_BYTES = 1_000

# Longest cause that an error shows; the XML body of an answer is longer.
_CAUSE_CHARACTERS_MAX = 300

# obstore's duration of a request, and the beginning of an answer in XML.
_DURATION = re.compile(r" in [\d.]+[nµm]?s\b")
_XML = re.compile(r"<\?xml|<Error>")

# Marker before obstore's dump of its own structures.
_DUMP = "Debug source:"


def classify_error(error: BaseException) -> ErrorClass:
    """Return this package's class for another library's error: by class, errno (OSError), or code (ClientError)."""
    answer = getattr(error, "response", {}) if isinstance(error, botocore_exceptions.ClientError) else {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    is_busy = status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS
    if is_busy or answer.get("Error", {}).get("Code") in _PASSING_CODES:
        return TransientStorageError
    for base in type(error).__mro__:
        if base is OSError and isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            return TransientStorageError
        if base in ERROR_CLASSES:
            return ERROR_CLASSES[base]
    return StorageError


def make_answer_error(
    status: int, code: str, *, verb: str, url: str, cause: str = "", condition: Condition = "any"
) -> StorageError:
    """Return the error of this package for an answer of S3, by its status (0: unknown) and error code.

    `cause` has no secrets, `condition` is that of a put.
    """
    default = TransientStorageError if status >= HTTPStatus.INTERNAL_SERVER_ERROR else StorageError
    error_class = _CLASSES_BY_CODE.get(code) or _CLASSES_BY_STATUS.get(status, default)
    if code in _FINAL:
        error_class = StorageError
    is_missing = status == HTTPStatus.NOT_FOUND and code != NO_SUCH_BUCKET_CODE
    # 409: another conditional write of this key is in progress. 404: a swap of an object that does not exist.
    if (condition != "any" and status == HTTPStatus.CONFLICT) or (condition not in ("any", "absent") and is_missing):
        error_class = ConditionFailedError
    what = _FINAL.get(code) or _add_advice(WHAT[error_class], code)
    return error_class(what, **_details(verb=verb, url=url, code=code, cause=cause))


def make_bucket_error(
    bucket: str, command: str, *, kind: str = "bucket", where: str = "URL", endpoint_url: str | None, **details: str
) -> BucketNotFoundError:
    """Return the error for a missing bucket: the same for every request, with the command that creates it."""
    return BucketNotFoundError(
        f"The {kind} does not exist, and is never created implicitly. Create it (`{command}`), or correct the {where}.",
        bucket=bucket,
        endpoint=endpoint_url,
        **details,
    )


def make_s3_bucket_error(bucket: str, *, endpoint_url: str | None, region_name: str | None) -> BucketNotFoundError:
    """Return the error for a bucket of S3; both options are None if unknown."""
    command = f"aws s3 mb s3://{bucket}" + (f" --region {region_name}" if region_name else "")
    if endpoint_url is not None and ".amazonaws." not in endpoint_url:
        command += f" --endpoint-url {endpoint_url}"
    where = "URL, the region_name or the endpoint_url"
    region = {"region": region_name} if region_name else {}
    return make_bucket_error(bucket, command, where=where, endpoint_url=endpoint_url, **region)


def is_web_page(data: bytes) -> bool:
    """Return whether the content of an object is HTML, as which no object of dcp_remote begins."""
    return data[:_WEB_PAGE_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html"))


def make_web_page_error(url: str, *, endpoint_url: str | None) -> StorageError:
    """Return the error for an endpoint that answers the read of an object with a web page."""
    return StorageError(
        "The endpoint answers with a web page, so it is not the API of an object store, and nothing is known of "
        "checkpoints there. Check endpoint_url (MinIO's console has a port of its own, and its API another one) and "
        "the proxy.",
        url=url,
        endpoint=endpoint_url,
    )


def translate(error: BaseException, *, verb: str, url: str, secrets: Sequence[str], what: str = "") -> CloudError:
    """Return the error of this package for a client's: by the store's error code if that is final, else by its class.

    The error does not show the secrets, even if the store echoes them. `what` replaces the message of its class.
    """
    error_class, code = classify_error(error), find_error_code(str(error)) or ""
    if code in _FINAL:
        error_class, what = StorageError, _FINAL[code]
    elif code in ADVICE:
        error_class = PermissionDeniedError
    elif verb == "list" and code == "NoSuchKey":
        error_class = StorageError
        what = "The store takes a listing for the read of an object: endpoint_url must not end with the bucket's name."
    cause = describe_cause(str(error), secrets)
    return error_class(
        _add_advice(what or WHAT[error_class], code), **_details(verb=verb, url=url, code=code, cause=cause)
    )


def _details(**details: str) -> dict[str, str]:
    return {name: value for name, value in details.items() if value}


def find_error_code(text: str) -> str | None:
    """Return the error code of the store's answer that a text quotes; None if it quotes none."""
    return first_match(r"<Code>([\w.]{1,64})</Code>", text)


def is_slow_down(error: Exception) -> bool:
    """Return whether the store itself said that it takes no more requests for now, and so no gateway before it."""
    return (find_error_code(str(error)) or "").startswith("SlowDown")


def _add_advice(what: str, code: str) -> str:
    advice = ADVICE.get(code) or (_DENIED_ADVICE if code == "AccessDenied" else "")
    return f"{what} {advice}" if advice else what


def get_safe_cause(error: BaseException, secrets: Sequence[str]) -> BaseException | None:
    """Return `error` to be raised from; None if its text, or that of an error in its chain, quotes a secret."""
    seen: set[int] = set()  # a chain can be circular
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        text = str(link)
        if redact(text, secrets) != text:
            return None
        link = link.__cause__ or link.__context__
    return error


def describe_cause(text: str, secrets: Sequence[str]) -> str:
    """Return a client's message as one short line, without secrets, durations and all of an XML answer but its text."""
    visible, _, dump = redact(text, secrets).partition(_DUMP)
    visible = _DURATION.sub("", visible)
    if xml := _XML.search(visible):
        message = first_match(r"(?s)<Message>(.+?)</Message>", visible)
        visible = f"{visible[: xml.start()].rstrip(': ')}{f': {message}' if message else ''}"
    inner = first_match(r"kind: (Timeout|Connect|Interrupted|Decode)\b", dump)
    visible = " ".join(visible.split())[:_CAUSE_CHARACTERS_MAX]
    return f"{visible} ({inner})" if inner else visible


def first_match(pattern: str, text: str) -> str | None:
    """Return the first group of the first match of a pattern; None if there is no match."""
    match = re.search(pattern, text)
    return match[1] if match else None
