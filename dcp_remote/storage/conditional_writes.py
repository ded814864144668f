"""Conditional writes, proven: a server that does not keep to the condition of a put is refused before it is relied on.

A commit is safe because a put is refused whose condition fails. Some servers that speak S3 take such a put for one
without a condition, and two jobs overwrite each other's commits unseen. The clouds themselves, files and memory are
known to be right; every other server is asked once per process and bucket, by puts that it has to refuse.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from dcp_remote.errors import ConditionFailedError, StorageError, TransientStorageError
from dcp_remote.storage.base import Condition, ObjectStore, Version
from dcp_remote.storage.retrying import Deadline, RetryPolicy, jitter
from dcp_remote.storage.time_left import of_use_for

logger = logging.getLogger(__name__)

# Below the store's own prefix, since a grant may end there; no part of a checkpoint or run is named so. Each probe has
# an object of its own, so that any number of processes can ask at a time.
PROBES_PREFIX = "dcp-remote-probes/"
_BODY = b"dcp_remote asked whether the server keeps to conditions. Delete this object at any time: nothing reads it.\n"

# No content has this digest, and no object of Google's this generation.
_STALE = Version(etag=f'"{"0" * 32}"', generation="1")

# To delete one object is not worth more.
_DELETE_SECONDS = 5.0

# Whose conditional writes are known to hold, by scheme. Google's own server is another one to those who speak S3 to it.
_KNOWN_HOSTS = {
    "s3": (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu", ".api.aws"),
    "gs": (".googleapis.com",),
    "az": (".core.windows.net", ".core.chinacloudapi.cn", ".core.usgovcloudapi.net"),
}

# Proven in this process: the server and bucket, and the condition.
_proven: set[tuple[str, str]] = set()


def unproven_server(scheme: str, endpoint_url: str | None, bucket: str) -> str | None:
    """The name of a server and bucket whose conditional writes nobody vouches for; None for a cloud's own server.

    Args:
        scheme: "s3", "gs" or "az".
        endpoint_url: The server; None for the cloud's own.
        bucket: Its name.
    """
    host = urlsplit(endpoint_url).hostname if endpoint_url is not None else None
    return None if host is None or f".{host}".endswith(_KNOWN_HOSTS[scheme]) else f"{endpoint_url} {bucket}"


def require_conditional_writes(
    store: ObjectStore, deadline: Deadline, *, swaps: bool, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Refuse a store whose server takes a put although its condition fails. Called before anything rests on one.

    Costs nothing where the server is known to be right, or was asked before by this process. Otherwise two PUTs and a
    DELETE, one PUT more with `swaps`. Without a grant to delete, or if this process is killed, one small object stays,
    which nothing ever reads.

    Args:
        store: Opened where the commit will be.
        deadline: Until when requests are repeated.
        swaps: Whether versions are to be compared, too (`If-Match`), and not only absence (`If-None-Match`).
        sleep: For tests.

    Raises:
        StorageError: The server ignores a condition; or it refused, or did not answer by the deadline.
    """
    unproven = getattr(store, "unproven_server", None)  # of no part of the contract: stores of others know themselves
    server = unproven() if callable(unproven) else None
    wanted = ("If-None-Match", "If-Match") if swaps else ("If-None-Match",)
    if server is None or all((server, header) in _proven for header in wanted):
        return

    key = f"{PROBES_PREFIX}{uuid.uuid4().hex}"

    def refuses(condition: Condition) -> bool:
        return _refuses(store, key, condition, deadline, sleep)

    try:
        # The first one is refused only where its own answer was lost: nobody else has this name.
        if not refuses("absent") and not refuses("absent"):
            raise _ignores("If-None-Match", store, server)
        if swaps and not refuses(_STALE):
            raise _ignores("If-Match", store, server)
    finally:
        _delete(store, key, deadline)
    _proven.update((server, header) for header in wanted)


def _refuses(
    store: ObjectStore, key: str, condition: Condition, deadline: Deadline, sleep: Callable[[float], None]
) -> bool:
    policy, failed = RetryPolicy(), 0
    while True:
        try:
            with of_use_for(deadline.remaining_seconds):
                store.put(key, [_BODY], condition=condition)
        except ConditionFailedError:
            return True
        except TransientStorageError:
            failed += 1
            delay_seconds = policy.delay_seconds(
                failed, remaining_seconds=deadline.remaining_seconds(), random=jitter(0, 1)
            )
            if delay_seconds is None:
                raise
            sleep(delay_seconds)
        else:
            return False


def _delete(store: ObjectStore, key: str, deadline: Deadline) -> None:
    failed: Mapping[str, StorageError]
    try:
        with of_use_for(lambda: min(_DELETE_SECONDS, deadline.remaining_seconds())):
            failed = store.delete([key])
    except StorageError as error:
        failed = {key: error}
    for cause in failed.values():
        logger.info("%s/%s stays; delete it at any time. cause=%s", store.url, key, cause)


def _ignores(header: str, store: ObjectStore, server: str) -> StorageError:
    return StorageError(
        f"The server ignores the condition of a write ({header}), so that jobs overwrite each other's checkpoints "
        "unseen; no checkpoint was written. Update the server to a version with conditional PUTs, or save elsewhere.",
        url=store.url,
        server=server,
    )
