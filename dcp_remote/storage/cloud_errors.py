"""What the clients of the clouds raise, as what a caller can do about it.

`KINDS` is the whole mapping, by class. obstore has one class, `GenericError`, for timeouts, refused connections, 5xx,
redirects and whatever else; its text is for people, so nothing is decided by its words. But where the store gave an
error code, that stands in there as it was sent, and some codes are final (`final_of`). Where there is none and the
difference matters, `diagnosis.py` asks the store once more, in a way that shows status and error code.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import TypeAlias

import botocore.exceptions as botocore_exceptions
import obstore.exceptions as obstore_exceptions

from dcp_remote.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.redaction import redacted

CloudError: TypeAlias = StorageError | InvalidArgumentError
Kind: TypeAlias = type[StorageError] | type[InvalidArgumentError]

# By class; a class that is not here is what the nearest of its bases is.
KINDS: dict[type[BaseException], Kind] = {
    Exception: StorageError,
    # Of Python: obstore raises these, too.
    FileNotFoundError: ObjectNotFoundError,
    PermissionError: PermissionDeniedError,
    ConnectionError: TransientStorageError,
    TimeoutError: TransientStorageError,
    OSError: StorageError,  # unless its errno says more
    ValueError: InvalidArgumentError,
    TypeError: InvalidArgumentError,
    BufferError: InvalidArgumentError,
    # Of obstore.
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
    # Of botocore, which reads the configuration, finds credentials and sends the diagnosis.
    botocore_exceptions.BotoCoreError: StorageError,
    # The network, for now.
    botocore_exceptions.ConnectionError: TransientStorageError,
    botocore_exceptions.HTTPClientError: TransientStorageError,
    botocore_exceptions.IncompleteReadError: TransientStorageError,
    botocore_exceptions.ChecksumError: TransientStorageError,
    botocore_exceptions.FlexibleChecksumError: TransientStorageError,
    botocore_exceptions.CapacityNotAvailableError: TransientStorageError,
    botocore_exceptions.MetadataRetrievalError: TransientStorageError,
    botocore_exceptions.SSLError: StorageError,  # a certificate does not become better
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
    # Calls of ours with an answer are those for credentials (STS, SSO): refused.
    botocore_exceptions.ClientError: PermissionDeniedError,
    # The configuration.
    botocore_exceptions.ProfileNotFound: InvalidArgumentError,
    botocore_exceptions.ConfigNotFound: InvalidArgumentError,
    botocore_exceptions.ConfigParseError: InvalidArgumentError,
    botocore_exceptions.InvalidConfigError: InvalidArgumentError,
    botocore_exceptions.NoRegionError: InvalidArgumentError,
    botocore_exceptions.UnknownRegionError: InvalidArgumentError,
    botocore_exceptions.ServiceNotInRegionError: InvalidArgumentError,
    botocore_exceptions.ValidationError: InvalidArgumentError,  # InvalidRegionError among them
    botocore_exceptions.ParamValidationError: InvalidArgumentError,
    botocore_exceptions.MissingParametersError: InvalidArgumentError,
    botocore_exceptions.BaseEndpointResolverError: InvalidArgumentError,
    botocore_exceptions.EndpointProviderError: InvalidArgumentError,
    botocore_exceptions.InvalidEndpointConfigurationError: InvalidArgumentError,
    botocore_exceptions.InvalidEndpointDiscoveryConfigurationError: InvalidArgumentError,
    botocore_exceptions.InvalidDNSNameError: InvalidArgumentError,
    botocore_exceptions.InvalidHostLabelError: InvalidArgumentError,
    botocore_exceptions.InvalidProxiesConfigError: InvalidArgumentError,
    botocore_exceptions.InvalidDefaultsMode: InvalidArgumentError,
    botocore_exceptions.InvalidChecksumConfigError: InvalidArgumentError,
    botocore_exceptions.InvalidIMDSEndpointError: InvalidArgumentError,
    botocore_exceptions.InvalidIMDSEndpointModeError: InvalidArgumentError,
    botocore_exceptions.InvalidRetryConfigurationError: InvalidArgumentError,
    botocore_exceptions.InvalidS3AddressingStyleError: InvalidArgumentError,
    botocore_exceptions.InvalidS3UsEast1RegionalEndpointConfigError: InvalidArgumentError,
    botocore_exceptions.InvalidSTSRegionalEndpointsConfigError: InvalidArgumentError,
    botocore_exceptions.UnknownSignatureVersionError: InvalidArgumentError,
    botocore_exceptions.UnknownTokenProviderError: InvalidArgumentError,
    botocore_exceptions.UnsupportedSignatureVersionError: InvalidArgumentError,
    botocore_exceptions.UnsupportedOutpostResourceError: InvalidArgumentError,
    botocore_exceptions.UnsupportedS3AccesspointConfigurationError: InvalidArgumentError,
    botocore_exceptions.UnsupportedS3ArnError: InvalidArgumentError,
    botocore_exceptions.UnsupportedS3ConfigurationError: InvalidArgumentError,
    botocore_exceptions.UnsupportedS3ControlArnError: InvalidArgumentError,
    botocore_exceptions.UnsupportedS3ControlConfigurationError: InvalidArgumentError,
}

# What passes, of the errors that are known by their number alone.
_TRANSIENT_ERRNOS = frozenset(
    {
        errno.EAGAIN,
        errno.EINTR,
        errno.EHOSTUNREACH,
        errno.EHOSTDOWN,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENOBUFS,
        errno.EMFILE,  # some other request gives its descriptor back
        errno.ENFILE,
    }
)

# What a refused request is called, and what follows. The codes are part of S3's interface.
ADVICE = {
    "RequestTimeTooSkewed": "The clock of this machine is wrong: set it (NTP).",
    "ExpiredToken": "The temporary credentials have expired: renew them (for SSO: `aws sso login`).",
    "TokenRefreshRequired": "The temporary credentials have expired: renew them.",
    "InvalidToken": "The session token is not one of these keys.",
    "InvalidAccessKeyId": "The store does not know this access key.",
    "SignatureDoesNotMatch": "The secret key is not that of the access key.",
}

CREDENTIALS_CODES = frozenset(ADVICE)

# S3 tells no 404 to those who may not list: a first save, and a load of what is not there, look denied to them.
_DENIED_ADVICE = (
    "A job needs s3:GetObject and s3:PutObject on the objects, and s3:ListBucket on the bucket: without that, S3 "
    "refuses also to say that an object is not there."
)

_FULL = (
    "The store is full, or a quota of it is used up: make room (older checkpoints, `dcp-remote gc`), or have it "
    "enlarged."
)
_NOT_UNDERSTOOD = (
    "The store refuses a request that every S3 store should understand. If it knows no newer checksums, give "
    "storage_options['checksum_algorithm'] = 'SHA256' or 'none'."
)

# Answers to a request that a later attempt would get, too. obstore takes those of status 400, 413, 501 or 507 for
# failures like any other, and those of 403 for a missing grant. A full store is Ceph's and others' first, MinIO's two
# and RustFS's.
_FINAL = {
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "XMinioAdminBucketQuotaExceeded": _FULL,
    "XRustfsQuotaExceeded": _FULL,
    "EntityTooLarge": "The store takes no object of this size in one request.",
    "InvalidObjectState": "The object was moved to an archive by a lifecycle rule of the bucket: restore it first.",
    "InvalidArgument": _NOT_UNDERSTOOD,
    "InvalidRequest": _NOT_UNDERSTOOD,
    "MethodNotAllowed": _NOT_UNDERSTOOD,
    "MissingContentLength": _NOT_UNDERSTOOD,
    "NotImplemented": _NOT_UNDERSTOOD,
}

WHAT: dict[Kind, str] = {
    StorageError: "The store failed.",
    TransientStorageError: "The store did not answer as it should: a timeout, a lost connection or its own error.",
    ObjectNotFoundError: "There is no such object.",
    ConditionFailedError: "The object is not in the state that this write asks for.",
    PermissionDeniedError: "The store refused the request: these credentials (or their lack) do not allow it.",
    InvalidArgumentError: "The client of the store refused the call.",
}

SENT_ELSEWHERE = "The endpoint sends requests elsewhere: endpoint_url or region_name is not that of this bucket."
NO_SUCH_BUCKET = (
    "The bucket does not exist. Buckets are never created implicitly: create it, or correct the URL, the region_name "
    "or the endpoint_url."
)

# Enough for what a person wants to read; a body of XML is longer.
_CAUSE_CHARACTERS_MAX = 300

# What stands in front of obstore's dump of its own structures.
_DUMP = "Debug source:"


def kind_of(error: BaseException) -> Kind:
    """Which error of ours stands for another's: by its class, for plain OSErrors by their number."""
    for base in type(error).__mro__:
        if base is OSError and isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
            return TransientStorageError
        if base in KINDS:
            return KINDS[base]
    return StorageError


def translate(error: BaseException, *, verb: str, url: str, secrets: Sequence[str], what: str = "") -> CloudError:
    """Our error for another's, with what was asked of which URL and, where the store gave one, its error code.

    Args:
        error: What a client raised.
        verb: Of the store contract.
        url: Of the object or the prefix.
        secrets: What must not be shown, whoever echoes it.
        what: Says it better than the class of `error` does.
    """
    kind = kind_of(error)
    text = str(error)
    code = code_in(text)
    details = {"verb": verb, "url": url, "code": code, "cause": cause_of(text, secrets)}
    return kind(advised(what or WHAT[kind], code), **{name: value for name, value in details.items() if value})


def final_of(error: BaseException, *, verb: str, url: str, secrets: Sequence[str]) -> CloudError | None:
    """Our error if the store answered this very request with a code that no later attempt will change; else None."""
    code = code_in(str(error))
    if code is None or not isinstance(error, obstore_exceptions.BaseError):
        return None
    cause = cause_of(str(error), secrets)
    if code in _FINAL:
        return StorageError(_FINAL[code], verb=verb, url=url, code=code, cause=cause)
    if code in CREDENTIALS_CODES:
        what = advised(WHAT[PermissionDeniedError], code)
        return PermissionDeniedError(what, verb=verb, url=url, code=code, cause=cause)
    return None


def code_in(text: str) -> str | None:
    """The error code of the store's answer that a text quotes."""
    return first_match(r"<Code>(\w{1,64})</Code>", text)


def advised(what: str, code: str | None) -> str:
    """What happened, and what to do about an error code of S3 where that is known."""
    advice = ADVICE.get(code or "") or (_DENIED_ADVICE if code == "AccessDenied" else "")
    return f"{what} {advice}" if advice else what


def chained(error: BaseException, secrets: Sequence[str]) -> BaseException | None:
    """The error, to raise ours from; None if its text, or that of an error behind it, quotes a secret."""
    seen: set[int] = set()  # a chain can be a circle
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        text = str(link)
        if redacted(text, secrets) != text:
            return None
        link = link.__cause__ or link.__context__
    return error


def cause_of(text: str, secrets: Sequence[str]) -> str:
    """What a client said, in one short line without secrets."""
    visible, _, dump = redacted(text, secrets).partition(_DUMP)
    inner = first_match(r"kind: (Timeout|Connect|Interrupted|Decode)\b", dump)
    visible = " ".join(visible.split())[:_CAUSE_CHARACTERS_MAX]
    return f"{visible} ({inner})" if inner else visible


def first_match(pattern: str, text: str) -> str | None:
    """The first group of a pattern where it first matches; None if it nowhere does."""
    match = re.search(pattern, text)
    return match[1] if match else None
