"""Read and swap the catalog of a run.

A swap whose answer is lost is settled by reading: the change is applied to the catalog that is there now, and decides
whether anything is left to do.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitUnknownError,
    CorruptCheckpointError,
    DcpRemoteError,
    UnsupportedFormatError,
)
from dcp_remote.format import catalog_json
from dcp_remote.format.catalog import CATALOG_KEY, Catalog
from dcp_remote.run.conditional_put import Found, find, put_until_settled, require_compare_and_swap
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.conditional_writes import require_conditional_writes
from dcp_remote.storage.retrying import RetryingStore

# Function from the catalog to the one that replaces it; None if nothing is left to do. To refuse, it raises.
Change = Callable[[Catalog], Catalog | None]


def read_catalog(store: ObjectStore) -> Catalog | None:
    """Read and check the catalog; return None if there is none. One GET, and one more if the answer is damaged.

    `dcp-remote recover` rebuilds a damaged one (`CorruptCheckpointError`).
    """
    return see_catalog(store).content


def require_catalog(store: ObjectStore) -> Catalog:
    """Read and check the catalog, which must be there; costs and errors as of `read_catalog`."""
    catalog = read_catalog(store)
    if catalog is None:
        raise missing_catalog(store)
    return catalog


def see_catalog(store: ObjectStore) -> Found[Catalog]:
    """Read the catalog as `read_catalog` does, with the version that a swap compares."""
    found = find_catalog(store)
    if found.error is not None:
        what = f"The catalog of this run cannot be read: {found.error.what} `dcp-remote recover` rebuilds it."
        raise CorruptCheckpointError(what, **{"url": store.url, **found.error.details}) from found.error
    return found


def find_catalog(store: ObjectStore) -> Found[Catalog]:
    """Read the catalog as `see_catalog` does; the error of a damaged one is returned, and not raised."""
    found = find(store, CATALOG_KEY, catalog_json.decode, limit_bytes=catalog_json.STORED_BYTES_MAX)
    if isinstance(found.error, UnsupportedFormatError):
        raise found.error.with_details(url=store.url) from found.error
    return found


def missing_catalog(store: ObjectStore) -> CheckpointNotFoundError:
    """Make the error for a run without a catalog; no request."""
    return CheckpointNotFoundError(
        "There is no run here: it has no catalog.json. If it was lost, `dcp-remote recover` rebuilds it from the "
        "manifests.",
        url=store.url,
    )


def swap(
    store: ObjectStore,
    change: Change,
    *,
    deadline: Deadline,
    create: bool = False,
) -> Catalog:
    """Apply a change to the catalog by compare-and-swap, and return the catalog that is there then.

    `change` is called with the catalog that was just read, and again after each swap that did not clearly succeed; so
    it must recognize its own work, and return None then; what it raises is raised. With `create`, an absent catalog is
    an empty one, which is written even if `change` returns None.

    Costs a GET and a PUT, and as many more for each swap that failed, because another process swapped first or because
    the answer was lost; once per process, on a server other than the clouds' own, also the requests of
    `require_conditional_writes`. Whatever is raised, a crash of this process included, the catalog is the old one or
    the new one, whole. `CommitUnknownError` is raised if by the deadline it could not be found out which.
    """
    require_compare_and_swap(store)
    reading = RetryingStore(store, deadline)
    empty = Catalog(uuid.uuid4().hex)
    after = empty

    def decide(seen: Found[Catalog]) -> bytes | None:
        nonlocal after
        if seen.content is None and not create:
            raise missing_catalog(store)
        # Before `change`, which may check its deadline: no probe comes between that check and the PUT.
        require_conditional_writes(store, deadline, swaps=True)
        now = seen.content or empty
        wanted = change(now)
        after = now if wanted is None else wanted
        if wanted is None and seen.content is not None:
            return None
        return catalog_json.encode(after, uuid.uuid4().hex)

    seen = see_catalog(reading)
    body = decide(seen)
    if body is not None:
        put_until_settled(
            reading,
            CATALOG_KEY,
            body,
            seen,
            look=lambda: see_catalog(reading),
            decide=lambda now, _: decide(now),
            unknown=lambda failure: unknown_swap(store, failure),
            deadline=deadline,
        )
    return after


def unknown_swap(store: ObjectStore, cause: DcpRemoteError) -> CommitUnknownError:
    """Make the error for a catalog that may or may not have been written; no request."""
    return CommitUnknownError(
        "The store did not confirm the write of the catalog, which may or may not have happened. Look at the run "
        "(`dcp-remote ls`) before trying again.",
        url=store.url,
        cause=cause,
    )
