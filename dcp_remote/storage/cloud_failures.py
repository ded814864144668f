"""What a failed request to a cloud store is told as: all that its error, the bucket and the credentials tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, NoReturn

from obstore.exceptions import AlreadyExistsError, InvalidPathError

from dcp_remote.errors import DcpRemoteError, PermissionDeniedError, StorageError, TransientStorageError
from dcp_remote.storage.cloud_clients import FAILURES, Connections
from dcp_remote.storage.cloud_errors import (
    NO_SUCH_BUCKET,
    WHAT,
    CloudError,
    chained,
    final_of,
    kind_of,
    translate,
)
from dcp_remote.storage.time_left import seconds_left

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked of a store.

    Attributes:
        verb: Of the store contract.
        url: Of the object or the prefix.
        prefix: Of the store, below its bucket.
        signed_with: The credentials of the moment before; None for those of nobody, or of a first request.
        settled_later: Somebody has to find out whether it was carried out.
    """

    verb: str
    url: str
    prefix: str
    signed_with: ReadOnlyCredentials | None
    _: KW_ONLY
    settled_later: bool


def raise_failure(error: Exception, asked: Asked, connections: Connections) -> NoReturn:
    """Raise our error for that of a client. Costs a request where a diagnosis is needed, and what credentials cost.

    Raises:
        StorageError: Or another of ours, as `ObjectStore` says of its verbs.
    """
    verb, url, secrets = asked.verb, asked.url, connections.secrets()
    credentials_error = connections.take_credentials_error()
    if credentials_error is not None:
        error, what = credentials_error, "The credentials cannot be renewed."
        raise translate(error, verb=verb, url=url, secrets=secrets, what=what) from chained(error, secrets)
    failure = _explained(error, asked, connections, secrets) or translate(error, verb=verb, url=url, secrets=secrets)
    if isinstance(failure, PermissionDeniedError):
        failure = _with_others(failure, asked, connections)
    raise failure from chained(error, secrets)


def _explained(error: Exception, asked: Asked, connections: Connections, secrets: Sequence[str]) -> CloudError | None:
    """What is known of a failure beyond its class."""
    verb, url = asked.verb, asked.url
    final = final_of(error, verb=verb, url=url, secrets=secrets)
    if final is not None:
        return final
    if kind_of(error) is TransientStorageError:
        if not seconds_left():
            return None  # nobody waits for what a diagnosis would find
        if verb == "list":
            verdict = connections.look_at_listing(asked.prefix)
        else:
            verdict = connections.look(asked.prefix, reuse=True)
        failure = verdict.error(verb=verb, url=url) if verdict is not None else None
        if failure is not None and asked.settled_later:
            # What is true of the bucket a moment later is no answer to this request.
            failure = TransientStorageError(failure.what, **failure.details)
        return failure
    if verb == "head" and kind_of(error) is PermissionDeniedError:
        # Its answer has no body, and so no reason.
        verdict = connections.look(asked.prefix, reuse=True)
        return verdict.error(verb=verb, url=url) if verdict is not None else None
    if isinstance(error, FileNotFoundError) and verb == "put":
        # A bucket that is there answers no put so: obstore makes a failed condition of a swap of what is absent.
        return translate(error, verb=verb, url=url, secrets=secrets, what=NO_SUCH_BUCKET)
    if isinstance(error, AlreadyExistsError) and verb == "put" and not asked.settled_later:
        # 409, and nothing was asked of what lies there: somebody else's request is under way.
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


def _with_others(refused: PermissionDeniedError, asked: Asked, connections: Connections) -> StorageError:
    """The error of a request whose credentials the store refused: one that passes, if there are others by now."""
    try:
        renewed = connections.renew_credentials(asked.signed_with)
    except (DcpRemoteError, *FAILURES) as error:
        cause = translate(error, verb="open", url=asked.url, secrets=connections.secrets())
        return PermissionDeniedError(f"{refused.what} No others can be found.", **{**refused.details, "renewal": cause})
    if not renewed:
        return refused
    return TransientStorageError("The store refused these credentials; there are others by now.", **refused.details)
