"""Runs below a URL, found by a listing that leaves out what lies inside each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.threads import in_parallel
from dcp_remote.errors import DcpRemoteError, TransientStorageError
from dcp_remote.format.catalog import CATALOG_KEY, Entry
from dcp_remote.format.keys import MANIFESTS_PREFIX, revision_of
from dcp_remote.run.catalog_store import require_catalog
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.retrying import RetryingStore

# A page of a listing of S3.
_KEYS_PER_PAGE = 1_000


@dataclass(frozen=True, slots=True)
class FoundRun:
    """Run below a URL.

    Attributes:
        path: Folder, relative to the URL that was listed.
        newest: Newest checkpoint that is not abandoned; None if there is none, or that is not known.
        holder: Description of the job that writes the run; "" if not known.
        problem: Reason why nothing else is known, such as a lost catalog; None if all is well.
    """

    path: str
    newest: Entry | None = None
    holder: str = ""
    problem: str | None = None


def list_runs(store: ObjectStore, *, timeout_seconds: float) -> list[FoundRun]:
    """List the runs below a URL, at any depth, ordered by folder; also those that have lost their catalog.

    Costs a LIST of a page per thousand objects, but at most one for each run, of which only the first page is read; and
    a GET of each catalog.
    """
    deadline = Deadline(timeout_seconds)
    paths = list(find_runs(RetryingStore(store, deadline)))
    return in_parallel(partial(_look_at, store, deadline), paths)


def find_runs(store: ObjectStore) -> Iterator[str]:
    """Yield the folders of the runs below a URL; costs the LISTs of `list_runs`."""
    after = ""
    is_last = False
    while not is_last:
        page = list(islice(store.list(after=after), _KEYS_PER_PAGE))
        is_last = len(page) < _KEYS_PER_PAGE
        for info in page:
            if info.key <= after:  # inside of a run
                continue
            path = _find_run(info.key)
            if path:
                yield path
            after = f"{path}0" if path else info.key  # "0" follows "/": behind all keys of the folder


def _find_run(key: str) -> str:
    """Return the folder of the run to which a catalog or manifest belongs; "" for other keys, and at the URL itself."""
    path, _, name = key.rpartition("/")
    if name == CATALOG_KEY:
        return path
    # In a listing the catalog comes before the manifests, so that a run found by these has lost it.
    path, _, name = key.rpartition(f"/{MANIFESTS_PREFIX}")
    return path if revision_of(f"{MANIFESTS_PREFIX}{name}") is not None else ""


def _look_at(store: ObjectStore, deadline: Deadline, path: str) -> FoundRun:
    try:
        catalog = require_catalog(RetryingStore(store.child(path), deadline))
    except TransientStorageError:
        raise
    except DcpRemoteError as error:  # also a folder that a foreign tool named, with a control character
        return FoundRun(path, problem=error.message)
    return FoundRun(path, catalog.latest(), catalog.holder)
