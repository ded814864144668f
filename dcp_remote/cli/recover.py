"""`dcp-remote recover`: rebuild the lost or damaged catalog of a run from its manifests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TextIO

from dcp_remote.cli.ls import build_entry, format_table
from dcp_remote.common.text import escape_unprintable, format_count
from dcp_remote.run.recovery import find_recovery, recover
from dcp_remote.storage import open_store

# Short, because a user waits at a terminal, but a run can have many manifests to read.
_LOOK_SECONDS = 60.0


def run(url: str, *, storage_options: Mapping[str, object], write: bool, as_json: bool, out: TextIO) -> None:
    """Print the catalog that can be rebuilt, or write it; costs as in `dcp_remote.run.recovery`.

    Args:
        url: URL of the run.
        storage_options: Options as for `RemoteWriter`.
        write: Write the catalog; False changes nothing.
        as_json: Print a JSON document instead of text.
        out: Output stream.

    Raises:
        InvalidArgumentError: The catalog can be read, or the store has no compare-and-swap.
        CheckpointNotFoundError: There is no object of a run at the URL.
        CommitConflictError: Another catalog was written meanwhile.
        CommitUnknownError: The store did not say whether the catalog was written.
    """
    store = open_store(url, storage_options)
    recovered = recover(store) if write else find_recovery(store, timeout_seconds=_LOOK_SECONDS)
    entries = recovered.catalog.entries
    if as_json:
        document = {
            "url": store.url,
            "damaged": recovered.damaged,
            "written": write,
            "checkpoints": [build_entry(entry) for entry in entries],
            "left_out": [asdict(left) for left in recovered.left],
        }
        out.write(json.dumps(document, indent=2) + "\n")
        return
    state = f"{'was' if write else 'is'} {'damaged' if recovered.damaged else 'lost'}"
    count = format_count(len(entries), "checkpoint")
    out.write(escape_unprintable(f"{store.url}: the catalog {state}; manifests of {count} found") + "\n")
    out.writelines(f"{line}\n" for line in format_table(entries))
    for left in recovered.left:
        step = "" if left.step is None else f" (step {left.step})"
        out.write(escape_unprintable(f"left out: {left.key}{step}: {left.reason}") + "\n")
    out.write(
        "The manifests do not tell which checkpoints were pinned, which names were given or moved since, and which "
        "checkpoints were abandoned by a rollback (except those marked above). Checkpoints that were retired but not "
        "yet deleted are included again.\n"
    )
    if write:
        out.write("The catalog was written.\n")
    else:
        out.write("Nothing was changed. To write this catalog, while no job uses the run, add --write\n")
