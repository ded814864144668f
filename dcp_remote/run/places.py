"""Runs and checkpoints below a URL, found by a listing that leaves out what lies inside each of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import DcpRemoteError
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.format.entry_names import near_names
from dcp_remote.format.keys import MANIFESTS_PREFIX, revision_of
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.retrying import RetryingStore

logger = logging.getLogger(__name__)

# One page of a listing of S3: beyond it, another LIST behind the folder costs less than the rest of the folder.
_KEYS_PER_PAGE = 1_000

# Bounds on the look for similar names, which only completes a message: LISTs, and seconds of retries.
_NEAR_PAGES_MAX = 5
_NEAR_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Folder of a run or of a checkpoint.

    Attributes:
        path: Folder, relative to the URL that was listed.
        kind: "run"; "checkpoint", one by itself; or "lost run", which has manifests and no catalog.
    """

    path: str
    kind: Literal["run", "checkpoint", "lost run"]


def find_places(
    store: ObjectStore, *, is_recursive: bool, after: str = "", pages_max: int | None = None
) -> Iterator[Place]:
    """Yield the runs and checkpoints below a URL, by their folders: all, or those directly below.

    Costs a LIST of a page per thousand objects, but at most one for each run or folder, of which only the first page is
    read. `after` is a key behind which to begin; after `pages_max` pages no more is found.
    """
    pages = 0
    while True:
        # A page holds several small runs, so that their keys are read on, and only a new page is avoided.
        for number, info in enumerate(store.list(after=after), 1):
            is_skipped = info.key <= after
            if not is_skipped:
                place = _find_place(info.key)
                if place is not None and (is_recursive or "/" not in place.path):
                    yield place
                    after = f"{place.path}0"  # "0" follows "/": behind all keys of the folder
                elif not is_recursive:
                    after = _leave_folder(info.key)
            if number % _KEYS_PER_PAGE == 0:
                pages += 1
                if pages == pages_max:
                    return
                if is_skipped:
                    break
        else:
            return


def find_near_runs(store: ObjectStore) -> list[str]:
    """Return names of runs beside a URL that are similar to its own; for the message of a mistyped URL.

    Costs up to ten LISTs of a page beside the URL: those behind the first half of the name, then those from the
    beginning on. Without permission to list, after a failure, and on a store that has no parent the result is empty.
    """
    make_parent = getattr(store, "parent", None)
    parent = make_parent() if callable(make_parent) else None
    if parent is None:
        return []
    name, found = store.url.rpartition("/")[2], set[str]()
    asking = RetryingStore(parent, Deadline(_NEAR_SECONDS))
    try:
        for after in (name[: len(name) // 2], ""):
            places = find_places(asking, is_recursive=False, after=after, pages_max=_NEAR_PAGES_MAX)
            found.update(place.path for place in places)
            if near := near_names(name, sorted(found)):
                return near
    except DcpRemoteError as error:
        logger.debug("%s: no look at what lies beside it: %s", store.url, error)
    return []


def _find_place(key: str) -> Place | None:
    """Return the run or checkpoint of which this is the first key; None for other keys, and for those of the URL."""
    path, _, name = key.rpartition("/")
    if path and name in (CATALOG_KEY, MANIFEST_KEY):
        return Place(path, "run" if name == CATALOG_KEY else "checkpoint")
    # In a listing the catalog comes before the manifests.
    above, mark, name = key.rpartition(f"/{MANIFESTS_PREFIX}")
    return Place(above, "lost run") if mark and revision_of(f"{MANIFESTS_PREFIX}{name}") is not None else None


def _leave_folder(key: str) -> str:
    """Return the key behind which the folder at the top can still turn out to be a run, or behind the folder."""
    top, slash, _ = key.partition("/")
    firsts = (f"{top}/{CATALOG_KEY[:-1]}", f"{top}/{MANIFEST_KEY[:-1]}", f"{top}/{MANIFESTS_PREFIX[:-1]}", f"{top}0")
    return next(first for first in firsts if first > key) if slash else key
