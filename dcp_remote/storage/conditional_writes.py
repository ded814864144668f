"""Probe of conditional writes: a server that ignores the condition of a put is refused before a commit relies on it.

A commit is safe only if the server refuses a put whose condition fails. Some S3-compatible servers ignore conditions,
so that two jobs overwrite each other's commits unnoticed. The clouds' own servers, files and memory are known to be
correct; every other server is probed once per process and bucket, with puts that it has to refuse.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import ConditionFailedError, StorageError
from dcp_remote.storage.base import Condition, ObjectStore, Version
from dcp_remote.storage.request_context import limit_requests
from dcp_remote.storage.retrying import RetryingStore
from dcp_remote.storage.wrapper import Request

logger = logging.getLogger(__name__)

# Below the store's own prefix, since a grant may cover nothing else; no key of a checkpoint or run begins so. Each
# probe has an object of its own, so that any number of processes can probe at once.
PROBES_PREFIX = "dcp-remote-probes/"
_BODY = b"dcp_remote tested conditional writes with this object. Delete it at any time: nothing reads it.\n"

# Version that no object has: no content has this digest, and no object in Google Cloud this generation.
_STALE = Version(etag=f'"{"0" * 32}"', generation="1")

# Limit of the clean-up: one small object that stays costs less than a longer wait.
_DELETE_SECONDS = 5.0

# Pairs of server and header that this process has proven.
_proven: set[tuple[str, str]] = set()


def find_unproven_server(endpoint_url: str | None, bucket: str, *, known_hosts: tuple[str, ...]) -> str | None:
    """Return server and bucket if conditional writes are unproven there; None for a cloud's own server.

    No URL means the cloud's own server. `known_hosts` are ends of the names of servers that are known to be correct.
    """
    host = urlsplit(endpoint_url).hostname if endpoint_url is not None else None
    return None if host is None or f".{host}".endswith(known_hosts) else f"{endpoint_url} {bucket}"


def require_conditional_writes(
    store: ObjectStore,
    deadline: Deadline,
    *,
    swaps: bool,
    clean_up: Callable[[Callable[[], None]], object] = lambda delete: delete(),
) -> None:
    """Refuse a server that carries out a put although its condition fails; called before the first conditional put.

    Costs nothing if the server is known to be correct, or was probed before by this process. Otherwise it costs two
    PUTs and a DELETE, and one more PUT with `swaps`. Without permission to delete, or if this process is killed, one
    small object stays, which nothing ever reads.

    With `swaps`, the comparison of versions (`If-Match`) is probed too, and not only of absence (`If-None-Match`).
    `clean_up` is given the DELETE of a probe that has passed, to send it when it likes: within five seconds.

    Raises:
        StorageError: The server ignores a condition, refused a request, or did not answer by the deadline.
    """
    unproven = getattr(store, "find_unproven_server", None)  # not in the contract, so a user's own store is trusted
    server = unproven() if callable(unproven) else None
    wanted = ("If-None-Match", "If-Match") if swaps else ("If-None-Match",)
    if server is None or all((server, header) in _proven for header in wanted):
        return

    key = f"{PROBES_PREFIX}{uuid.uuid4().hex}"

    def refuses(condition: Condition) -> bool:
        """Send a put that the server may only refuse; return False if the server carried it out."""
        request = Request(verb="put", keys=(key,), size_bytes=len(_BODY))
        try:
            RetryingStore(store, deadline).repeat(request, lambda: store.put(key, [_BODY], condition=condition))
        except ConditionFailedError:
            return True
        return False

    try:
        # No other process uses this key, so the first put can only be refused by its own earlier, unanswered attempt.
        if not refuses("absent") and not refuses("absent"):
            raise make_ignored_error("If-None-Match", store.url, server)
        if swaps and not refuses(_STALE):
            raise make_ignored_error("If-Match", store.url, server)
    except BaseException:
        _delete(store, key, deadline)
        raise
    _proven.update((server, header) for header in wanted)
    clean_up(lambda: _delete(store, key, deadline))


def _delete(store: ObjectStore, key: str, deadline: Deadline) -> None:
    failed: Mapping[str, StorageError]
    try:
        with limit_requests(lambda: min(_DELETE_SECONDS, deadline.remaining_seconds())):
            failed = store.delete([key])
    except StorageError as error:
        failed = {key: error}
    for cause in failed.values():
        logger.info("The probe object %s/%s was not deleted; delete it at any time. cause=%s", store.url, key, cause)


def make_ignored_error(header: str, url: str, server: str | None = None) -> StorageError:
    """Return the error for a server that carries out a put although the condition in a header does not hold."""
    return StorageError(
        f"The server ignores the condition of a write ({header}), so jobs could overwrite each other's checkpoints "
        "unnoticed; no checkpoint was written. Update the server to one with conditional PUTs, or save elsewhere.",
        url=url,
        server=server,
    )
