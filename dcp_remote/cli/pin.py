"""`dcp-remote pin`: exempt a checkpoint of a run from retention and replacement, or undo that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TextIO

from dcp_remote.cli.ls import read_run_catalog
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import escape_unprintable
from dcp_remote.run.labels import set_pin
from dcp_remote.storage import open_store

# Short, because a user waits; long enough to retry the swap while a job saves into the run.
_TIMEOUT_SECONDS = 60.0


def run(
    url: str, *, storage_options: Mapping[str, object], step: int | str, pin: bool, as_json: bool, out: TextIO
) -> None:
    """Pin a checkpoint, or unpin one; costs one GET and a swap of the catalog.

    Args:
        url: URL of the run.
        storage_options: Options as for `RemoteWriter`.
        step: Step or name of the checkpoint.
        pin: True pins the checkpoint, False unpins it.
        as_json: Print a JSON document instead of text.
        out: Output stream.

    Raises:
        CheckpointNotFoundError: There is no run at the URL, or no checkpoint of this step or name.
        InvalidArgumentError: The URL is that of a checkpoint by itself, or the store has no compare-and-swap.
        CommitUnknownError: The store did not say whether the swap took place.
    """
    store = open_store(url, storage_options)
    read_run_catalog(store)  # for its error messages, which explain a wrong URL

    step = set_pin(store, step, pin=pin, deadline=Deadline(_TIMEOUT_SECONDS))
    if as_json:
        out.write(json.dumps({"url": store.url, "step": step, "pinned": pin}, indent=2) + "\n")
        return
    state = "pinned; retention keeps it" if pin else "not pinned; retention may delete it"
    out.write(escape_unprintable(f"{store.url}: step {step} is {state}") + "\n")
