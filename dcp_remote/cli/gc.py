"""`dcp-remote gc`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument, flag
from dcp_remote.cli.ls import build_entry, require_answer
from dcp_remote.cli.output import Output
from dcp_remote.common.text import format_count, human_bytes
from dcp_remote.errors import InvalidArgumentError, StorageError
from dcp_remote.run.gc import GRACE_SECONDS, find_orphans, remove_orphans
from dcp_remote.storage import open_store

_HOUR_SECONDS = 3600.0

# Deadline for looking, short because a user waits. Deleting has a longer one, so that it waits for an outage to end.
_LOOK_SECONDS = 20.0

# Objects that could not be deleted and are printed with the reason. Most often all have the same reason.
_FAILURES_SHOWN = 5


def gc(
    out: Output,
    url: Url,
    *,
    as_list: Annotated[bool, argument("--list", action="store_true", help="print also each orphan's key and size")] = (
        False
    ),
    yes: Annotated[bool, flag("remove the orphans; without this nothing is changed")] = False,
    grace_hours: Annotated[
        float, argument(type=float, metavar="HOURS", help="keep orphans younger than this (default: %(default)g)")
    ] = GRACE_SECONDS / _HOUR_SECONDS,
    storage_options: StorageOptions = None,
) -> None:
    """Remove objects that no checkpoint uses.

    Prints which objects are orphans: left by interrupted, failed or replaced saves, and used by no checkpoint. With
    --yes they are removed. In a run, these are manifests and shards that no live checkpoint uses, and a save that is
    under way starts again. At the URL of a single checkpoint, these are shards that its manifest does not name, and a
    save that is under way fails. If the manifest is absent, a tombstone is put in its place first, which the next save
    replaces.
    """
    if not 0 <= grace_hours < math.inf:
        raise InvalidArgumentError("--grace-hours must be at least 0, and finite.", grace_hours=grace_hours)
    store, grace_seconds = open_store(url, storage_options), grace_hours * _HOUR_SECONDS
    if yes:
        require_answer(store)
        orphans = remove_orphans(store, grace_seconds=grace_seconds)
        groups = {"removed": "removed", "kept": f"kept, younger than {grace_hours:g} h"}
    else:
        orphans = find_orphans(store, grace_seconds=grace_seconds, timeout_seconds=_LOOK_SECONDS)
        groups = {"old": f"at least {grace_hours:g} h old", "young": "younger, perhaps of a save under way"}
    noun, what = "shard", "shards that the manifest does not name"
    if orphans.is_run:
        noun, what = "object", "objects that no live checkpoint of the run uses"
    out.say(f"{store.url}: orphans ({what})")
    document: dict[str, object] = {"url": store.url, "is_run": orphans.is_run}
    for (name, state), infos in zip(groups.items(), (orphans.old, orphans.young), strict=True):
        if as_list:
            out.say(*(f"{info.key}  {info.size_bytes}" for info in infos))
        out.say(f"{format_count(len(infos), noun)}, {human_bytes(sum(info.size_bytes for info in infos))}: {state}")
        document[name] = [{"key": info.key, "bytes": info.size_bytes} for info in infos]
    out.say(*describe_failures(orphans.failed))
    if orphans.failed:
        raise StorageError("Some orphans could not be deleted. Run the command again.", failed=len(orphans.failed))
    if not yes:
        if orphans.abandoned:
            size = human_bytes(sum(entry.size_bytes for entry in orphans.abandoned))
            count = format_count(len(orphans.abandoned), "checkpoint")
            out.say(f"not orphans: {count} abandoned by a rollback, {size}; delete with `dcp-remote rm`")
        if orphans.old:
            out.say(f"Nothing was changed. To remove the older {noun}s, while no job saves here, add --yes")
        elif orphans.young:
            out.say(f"To remove the younger {noun}s, while no job saves here, add --yes --grace-hours 0")
        document["abandoned"] = [build_entry(entry) for entry in orphans.abandoned]
    out.give(document)


def describe_failures(failed: Mapping[str, StorageError]) -> list[str]:
    """Return a line for each of the first objects that could not be deleted."""
    return [f"{key}: {error}" for key, error in islice(failed.items(), _FAILURES_SHOWN)]
