"""`dcp-remote recover`: the catalog of a run, lost or damaged, made again from the manifests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from dcp_remote.cli.ls import table
from dcp_remote.recover import find_recovery, recover
from dcp_remote.storage import open_store
from dcp_remote.terminal import counted, printable

# Somebody looks at a terminal; but a run can have many manifests.
_LOOK_SECONDS = 60.0


def run(url: str, *, storage_options: Mapping[str, object], write: bool, out: TextIO) -> None:
    """Say what the catalog would be, or write it; costs as in `dcp_remote.recover`.

    Args:
        url: Of the run.
        storage_options: As for `RemoteWriter`.
        write: Write it; without it nothing is changed.
        out: Where to.

    Raises:
        InvalidArgumentError: The catalog can be read; or the store cannot replace an object on condition.
        CheckpointNotFoundError: There is nothing of a run here.
        CommitConflictError: Another catalog was written meanwhile.
        CommitUnknownError: The store never said whether it was written.
    """
    store = open_store(url, storage_options)
    recovered = recover(store) if write else find_recovery(store, timeout_seconds=_LOOK_SECONDS)
    entries = recovered.catalog.entries
    state = "damaged" if recovered.damaged else "lost"
    what = counted(len(entries), "checkpoint")
    out.write(printable(f"{store.url}: the catalog {'was' if write else 'is'} {state}; {what} can be found") + "\n")
    out.writelines(f"{line}\n" for line in table(entries))
    for left in recovered.left:
        step = "" if left.step is None else f" (step {left.step})"
        out.write(printable(f"left out: {left.key}{step}: {left.reason}") + "\n")
    out.write(
        "Not to be found again: which were pinned, where a name has moved since, and which were abandoned, but for "
        "those that are marked so above. What was retired and not yet deleted is back.\n"
    )
    if write:
        out.write("The catalog was written.\n")
    else:
        out.write("Nothing was changed. To write this catalog, while no job uses the run: add --write\n")
