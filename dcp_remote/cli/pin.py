"""`dcp-remote pin`."""

from __future__ import annotations

from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument, flag, parse_step
from dcp_remote.cli.ls import read_run_catalog
from dcp_remote.cli.output import Output
from dcp_remote.common.deadline import Deadline
from dcp_remote.run.labels import set_pin
from dcp_remote.storage import open_store

# Short, because a user waits; long enough to retry the swap while a job saves into the run.
LABEL_SECONDS = 60.0


def pin(
    out: Output,
    url: Url,
    step: Annotated[
        int | str, argument(type=parse_step, metavar="STEP|NAME", help="step or name of the checkpoint, or latest")
    ],
    *,
    undo: Annotated[bool, flag("unpin: retention may delete the checkpoint again")] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Exempt a checkpoint of a run from retention.

    Saves replace it only with overwrite=True.
    """
    store = open_store(url, storage_options)
    read_run_catalog(store)  # for its error messages, which explain a wrong URL

    step = set_pin(store, step, pin=not undo, deadline=Deadline(LABEL_SECONDS))
    state = "not pinned; retention may delete it" if undo else "pinned; retention keeps it"
    out.say(f"{store.url}: step {step} is {state}")
    out.give({"url": store.url, "step": step, "pinned": not undo})
