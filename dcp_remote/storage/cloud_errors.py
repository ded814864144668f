"""What the clients of the clouds raise, as what a caller can do about it.

`KINDS` is the whole mapping, by class. obstore has one class, `GenericError`, for timeouts, refused connections, 5xx,
redirects and whatever else; its text is for people, so nothing is decided by it. Where the difference matters
`diagnose_s3` asks the store once more, in a way that shows status and error code.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeAlias

import botocore.exceptions as botocore_exceptions
import obstore.exceptions as obstore_exceptions
from botocore.awsrequest import AWSRequest
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies

from dcp_remote.errors import (
    ConditionFailedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.cloud_options import S3Options, S3Place, presign_s3

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
_ADVICE = {
    "RequestTimeTooSkewed": "The clock of this machine is wrong: set it (NTP).",
    "ExpiredToken": "The temporary credentials have expired: renew them (for SSO: `aws sso login`).",
    "TokenRefreshRequired": "The temporary credentials have expired: renew them.",
    "InvalidToken": "The session token is not one of these keys.",
    "InvalidAccessKeyId": "The store does not know this access key.",
    "SignatureDoesNotMatch": "The secret key is not that of the access key.",
}

# S3 tells no 404 to those who may not list: a first save, and a load of what is not there, look denied to them.
_DENIED_ADVICE = (
    "A job needs s3:GetObject and s3:PutObject on the objects, and s3:ListBucket on the bucket: without that, S3 "
    "refuses also to say that an object is not there."
)

WHAT: dict[Kind, str] = {
    StorageError: "The store failed.",
    TransientStorageError: "The store did not answer as it should: a timeout, a lost connection or its own error.",
    ObjectNotFoundError: "There is no such object.",
    ConditionFailedError: "The object is not in the state that this write asks for.",
    PermissionDeniedError: "The store refused the request: these credentials (or their lack) do not allow it.",
    InvalidArgumentError: "The client of the store refused the call.",
}

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
    # For people alone: nothing is decided by it.
    code = _first(r"<Code>(\w{1,64})</Code>", text)
    details = {"verb": verb, "url": url, "code": code, "cause": cause_of(text, secrets)}
    return kind(advised(what or WHAT[kind], code), **{name: value for name, value in details.items() if value})


def advised(what: str, code: str | None) -> str:
    """What happened, and what to do about an error code of S3 where that is known."""
    advice = _ADVICE.get(code or "") or (_DENIED_ADVICE if code == "AccessDenied" else "")
    return f"{what} {advice}" if advice else what


def chained(error: BaseException, secrets: Sequence[str]) -> BaseException | None:
    """The error, to raise ours from; None if its text holds a secret (some stores quote the request they refuse)."""
    return None if any(secret in str(error) for secret in secrets) else error


def cause_of(text: str, secrets: Sequence[str]) -> str:
    """What a client said, in one short line without secrets."""
    visible, _, dump = text.partition(_DUMP)
    inner = _first(r"kind: (Timeout|Connect|Interrupted|Decode)\b", dump)
    for secret in secrets:
        visible = visible.replace(secret, "…")
    visible = " ".join(visible.split())[:_CAUSE_CHARACTERS_MAX]
    return f"{visible} ({inner})" if inner else visible


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


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


# Nobody puts an object of this name: the answer is short, whether or not the bucket is there.
_PROBE_KEY = "dcp-remote-diagnosis"

# A look at why a request failed must not take longer than the failure. To connect, to read.
_PROBE_TIMEOUTS_SECONDS = (3.0, 5.0)

_CREDENTIALS_CODES = frozenset(_ADVICE)


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
    except botocore_exceptions.SSLError:
        return Verdict(
            StorageError,
            "The certificate of the endpoint is not trusted: give the file of its authority as "
            "storage_options['verify'].",
            (("endpoint", place.endpoint_url),),
        )
    except botocore_exceptions.BotoCoreError as error:
        kind = kind_of(error)
        if kind is TransientStorageError:
            return Verdict(
                kind,
                "The endpoint cannot be reached, or does not answer: look at endpoint_url, the network, the proxy.",
                (("endpoint", place.endpoint_url),),
            )
        return Verdict(kind, "Requests cannot be signed any more.", (("cause", type(error).__name__),))
    return _judge(
        status=answer.status_code,
        code=_first(r"<Code>(\w{1,64})</Code>", body) or "",
        answered_region=answer.headers.get("x-amz-bucket-region") or _first(r"<Region>([\w-]{1,64})</Region>", body),
        place=place,
        bucket=bucket,
        listing=listing,
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
            "The endpoint sends requests elsewhere: endpoint_url or region_name is not that of this bucket.",
            (("bucket", bucket), ("status", status), ("used_region", place.region_name), endpoint),
        )
    if code in _CREDENTIALS_CODES:
        return Verdict(PermissionDeniedError, _ADVICE[code], (("code", code), endpoint))
    if status == HTTPStatus.BAD_REQUEST:  # the same GET will be malformed the next time, too
        return Verdict(StorageError, "The store takes our requests for malformed.", (("code", code), endpoint))
    if listing and status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return Verdict(PermissionDeniedError, WHAT[PermissionDeniedError], (("code", code), endpoint))
    # 403 is what a grant without s3:ListBucket answers for any missing object; 5xx and 429 are no news.
    return None
