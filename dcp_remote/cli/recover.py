"""`dcp-remote recover`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, flag
from dcp_remote.cli.ls import build_entry, format_table
from dcp_remote.cli.output import Output
from dcp_remote.common.text import format_count
from dcp_remote.run.recovery import find_recovery, recover
from dcp_remote.storage import open_store

# Short, because a user waits at a terminal, but a run can have many manifests to read.
_LOOK_SECONDS = 60.0


def recover_catalog(
    out: Output,
    url: Url,
    *,
    yes: Annotated[bool, flag("write the catalog; without this nothing is changed")] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Rebuild a lost or damaged catalog.

    Prints the catalog that can be rebuilt from the manifests of a run whose catalog.json is lost or damaged. With
    --yes it is written. No job may use the run meanwhile.
    """
    store = open_store(url, storage_options)
    recovered = recover(store) if yes else find_recovery(store, timeout_seconds=_LOOK_SECONDS)
    entries = recovered.catalog.entries
    state = f"{'was' if yes else 'is'} {'damaged' if recovered.damaged else 'lost'}"
    out.say(f"{store.url}: the catalog {state}; manifests of {format_count(len(entries), 'checkpoint')} found")
    out.say(*format_table(entries))
    for left in recovered.left:
        step = "" if left.step is None else f" (step {left.step})"
        out.say(f"left out: {left.key}{step}: {left.reason}")
    out.say(
        "The manifests do not tell which checkpoints were pinned, which names were given or moved since, and which "
        "checkpoints were abandoned by a rollback (except those marked above). Checkpoints that were retired but not "
        "yet deleted are included again."
    )
    if yes:
        out.say("The catalog was written.")
    else:
        out.say("Nothing was changed. To write this catalog, while no job uses the run, add --yes")
    out.give(
        {
            "url": store.url,
            "damaged": recovered.damaged,
            "written": yes,
            "checkpoints": [build_entry(entry) for entry in entries],
            "left_out": [asdict(left) for left in recovered.left],
        }
    )
