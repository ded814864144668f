"""Error of a failed request to a cloud store, from the client's error, a diagnosis and the credentials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from obstore.exceptions import AlreadyExistsError, InvalidPathError

from dcp_remote.common.descriptors import find_shortage
from dcp_remote.errors import (
    BucketNotFoundError,
    DcpRemoteError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import FOREIGN_KEY
from dcp_remote.storage.cloud.errors import (
    FAILURES,
    WHAT,
    CloudError,
    classify_error,
    find_error_code,
    get_safe_cause,
    is_slow_down,
    translate,
)
from dcp_remote.storage.cloud.provider import Provider
from dcp_remote.storage.request_context import remaining_seconds

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """Request to a store, as far as its error needs it."""

    verb: str  # of the store contract
    url: str  # of the object or the prefix
    prefix: str  # of the store, below its bucket
    signed_with: ReadOnlyCredentials | None  # in use before the request; None for an anonymous or a first request
    is_conditional: bool  # a conditional PUT, whose outcome the caller settles


def raise_failure(error: Exception, request: FailedRequest, provider: Provider) -> NoReturn:
    """Raise the error of this package for a client's. Costs a request if a diagnosis or new credentials are needed.

    Raises:
        StorageError: Or another class, as `ObjectStore` documents for its verbs.
    """
    what = ""
    credentials_error = provider.credentials.take_error()
    if credentials_error is not None:
        error, what = credentials_error, "The credentials cannot be renewed."
    secrets = provider.secrets()
    failure: CloudError = translate(error, verb=request.verb, url=request.url, secrets=secrets, what=what)
    if credentials_error is None:
        failure = _explain(error, failure, request, provider)
        if isinstance(failure, PermissionDeniedError):
            failure = _renew_credentials(failure, request, provider)
    raise failure from get_safe_cause(error, secrets)


def _explain(error: Exception, failure: CloudError, request: FailedRequest, provider: Provider) -> CloudError:
    """Return a more precise error than the class of `error` gives; `failure` if there is none."""
    verb, url = request.verb, request.url
    if type(failure) is not classify_error(error):
        return failure  # the store gave a code that no later attempt will change
    # For a PUT, 404 means that the bucket is missing: obstore turns the 404 of a swap into a failed condition.
    is_no_bucket = isinstance(error, FileNotFoundError) and verb == "put"
    if is_no_bucket or (verb == "list" and find_error_code(str(error)) == provider.no_bucket_code):
        return provider.make_bucket_error()
    if classify_error(error) is TransientStorageError:
        if (shortage := find_shortage()) is not None:  # a diagnosis would lack a descriptor, and blame the endpoint
            return TransientStorageError(shortage, **failure.details)
        if not remaining_seconds() or is_slow_down(error):
            return failure  # a diagnosis would be too late, or one request more of each rank to an overloaded store
        found = provider.diagnose(request.prefix, listing=verb == "list", reuse=True)
        if found is not None and request.is_conditional:
            # The diagnosis shows the bucket of a moment later, not the outcome of this PUT: keep it unknown.
            found = TransientStorageError(found.what, **found.details)
        return failure if found is None else add_request(found, verb=verb, url=url)
    if verb == "head" and classify_error(error) is PermissionDeniedError:
        # The answer to a HEAD has no body and so no error code: ask by a GET.
        found = provider.diagnose(request.prefix, reuse=True)
        return failure if found is None else add_request(found, verb=verb, url=url)
    if isinstance(error, AlreadyExistsError) and verb == "put" and not request.is_conditional:
        # 409 to an unconditional PUT: another request for this key is under way, so a retry may pass.
        return TransientStorageError(WHAT[TransientStorageError], **failure.details)
    if isinstance(error, InvalidPathError) and verb == "list":
        return StorageError(FOREIGN_KEY, url=url, cause=str(failure))
    return failure


def add_request(found: CloudError, *, verb: str, url: str) -> CloudError:
    """Return the error of one request for a diagnosis of its bucket; that of a missing bucket is the same for all."""
    request = {} if isinstance(found, BucketNotFoundError) else {"verb": verb, "url": url}
    return type(found)(found.what, **{**request, **found.details})


def _renew_credentials(refused: PermissionDeniedError, request: FailedRequest, provider: Provider) -> StorageError:
    """Look for newer credentials; return a transient error if there are any, else `refused`."""
    try:
        is_renewed = provider.renew_credentials(request.signed_with)
    except (DcpRemoteError, *FAILURES) as error:
        cause = translate(error, verb="open", url=request.url, secrets=provider.secrets())
        return PermissionDeniedError(
            f"{refused.what} No other credentials were found.", **{**refused.details, "renewal": cause}
        )
    if not is_renewed:
        return refused
    return TransientStorageError(
        "The store refused the credentials; newer ones were found for the next attempt.", **refused.details
    )
