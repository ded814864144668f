"""`dcp-remote pin`: keep a checkpoint of a run from retention and from being replaced unasked, or not any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from dcp_remote.catalog import Catalog, pinned
from dcp_remote.catalog_store import swap
from dcp_remote.cli.ls import catalog_of
from dcp_remote.storage import open_store
from dcp_remote.storage.retrying import Deadline
from dcp_remote.terminal import printable

# Somebody waits, and the catalog of a run that is saved to changes now and then.
_TIMEOUT_SECONDS = 60.0


def run(url: str, *, storage_options: Mapping[str, object], step: int, pin: bool, out: TextIO) -> None:
    """Pin a checkpoint, or undo that; a GET to look, and a swap.

    Args:
        url: Of the run.
        storage_options: As for `RemoteWriter`.
        step: Of the checkpoint.
        pin: Pin it; otherwise undo that.
        out: Where to.

    Raises:
        CheckpointNotFoundError: There is no run here, or no checkpoint of this step.
        InvalidArgumentError: This is a checkpoint by itself; or the store cannot replace an object on condition.
        CommitUnknownError: The store never said whether it was done.
    """
    store = open_store(url, storage_options)
    catalog_of(store)  # says best what is wrong with a URL

    def change(catalog: Catalog) -> Catalog | None:
        return pinned(catalog, step, pin=pin)

    swap(store, change, deadline=Deadline(_TIMEOUT_SECONDS))
    state = "pinned: retention keeps it" if pin else "not pinned"
    out.write(printable(f"{store.url}: step {step} is {state}") + "\n")
