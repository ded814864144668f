"""Error of a failed request to a cloud store, from the client's error, a diagnosis of the bucket and the credentials.

`raise_failure` is the one entry; `CloudStore` calls it for whatever a client raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from obstore.exceptions import AlreadyExistsError, InvalidPathError

from dcp_remote.common.descriptors import find_shortage
from dcp_remote.errors import DcpRemoteError, PermissionDeniedError, StorageError, TransientStorageError
from dcp_remote.storage.cloud.clients import FAILURES, BucketClients
from dcp_remote.storage.cloud.errors import (
    NO_BUCKET_CODES,
    WHAT,
    CloudError,
    classify_error,
    find_error_code,
    find_final_error,
    get_safe_cause,
    translate,
)
from dcp_remote.storage.request_context import remaining_seconds

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """Request to a store, as far as its error needs it.

    Attributes:
        verb: Verb of the store contract.
        url: URL of the object or the prefix.
        prefix: Prefix of the store, below its bucket.
        signed_with: Credentials in use before the request was sent; None for an anonymous or a first request.
        is_conditional: True if it was a conditional PUT, whose outcome the caller settles.
    """

    verb: str
    url: str
    prefix: str
    signed_with: ReadOnlyCredentials | None
    is_conditional: bool


def raise_failure(error: Exception, request: FailedRequest, clients: BucketClients) -> NoReturn:
    """Raise the error of this package for a client's. Costs a request if a diagnosis or new credentials are needed.

    Raises:
        StorageError: Or another class, as `ObjectStore` documents for its verbs.
    """
    verb, url, secrets = request.verb, request.url, clients.secrets()
    credentials_error = clients.take_credentials_error()
    if credentials_error is not None:
        error, what = credentials_error, "The credentials cannot be renewed."
        raise translate(error, verb=verb, url=url, secrets=secrets, what=what) from get_safe_cause(error, secrets)
    failure = _explain(error, request, clients, secrets) or translate(error, verb=verb, url=url, secrets=secrets)
    if isinstance(failure, PermissionDeniedError):
        failure = _renew_credentials(failure, request, clients)
    raise failure from get_safe_cause(error, secrets)


def _explain(
    error: Exception, request: FailedRequest, clients: BucketClients, secrets: Sequence[str]
) -> CloudError | None:
    """Return a more precise error than the class of `error` gives; None if there is none."""
    verb, url = request.verb, request.url
    final = find_final_error(error, verb=verb, url=url, secrets=secrets)
    if final is not None:
        return final
    # For a PUT, 404 means that the bucket is missing: obstore turns the 404 of a swap into a failed condition.
    is_no_bucket = isinstance(error, FileNotFoundError) and verb == "put"
    if is_no_bucket or (verb == "list" and find_error_code(str(error)) in NO_BUCKET_CODES):
        return clients.make_bucket_error()
    if classify_error(error) is TransientStorageError:
        if (shortage := find_shortage()) is not None:  # a diagnosis would lack a descriptor, and blame the endpoint
            return translate(error, verb=verb, url=url, secrets=secrets, what=shortage)
        if not remaining_seconds():
            return None  # the deadline has passed: a diagnosis would be too late
        if verb == "list":
            diagnosis = clients.diagnose_listing(request.prefix)
        else:
            diagnosis = clients.diagnose(request.prefix, reuse=True)
        failure = diagnosis.error(verb=verb, url=url) if diagnosis is not None else None
        if failure is not None and request.is_conditional:
            # The diagnosis shows the bucket of a moment later, not the outcome of this PUT: keep it unknown.
            failure = TransientStorageError(failure.what, **failure.details)
        return failure
    if verb == "head" and classify_error(error) is PermissionDeniedError:
        # The answer to a HEAD has no body and so no error code: ask by a GET.
        diagnosis = clients.diagnose(request.prefix, reuse=True)
        return diagnosis.error(verb=verb, url=url) if diagnosis is not None else None
    if isinstance(error, AlreadyExistsError) and verb == "put" and not request.is_conditional:
        # 409 to an unconditional PUT: another request for this key is under way, so a retry may pass.
        failure = translate(error, verb=verb, url=url, secrets=secrets)
        return TransientStorageError(WHAT[TransientStorageError], **failure.details)
    if isinstance(error, InvalidPathError) and verb == "list":
        return StorageError(
            "Under this URL lies an object whose key no checkpoint has: empty, `.` or `..` parts, or a control "
            "character. Remove it.",
            url=url,
            cause=str(translate(error, verb=verb, url=url, secrets=secrets)),
        )
    return None


def _renew_credentials(refused: PermissionDeniedError, request: FailedRequest, clients: BucketClients) -> StorageError:
    """Look for newer credentials; return a transient error if there are any, else `refused`."""
    try:
        is_renewed = clients.renew_credentials(request.signed_with)
    except (DcpRemoteError, *FAILURES) as error:
        cause = translate(error, verb="open", url=request.url, secrets=clients.secrets())
        return PermissionDeniedError(
            f"{refused.what} No other credentials were found.", **{**refused.details, "renewal": cause}
        )
    if not is_renewed:
        return refused
    return TransientStorageError(
        "The store refused the credentials; newer ones were found for the next attempt.", **refused.details
    )
