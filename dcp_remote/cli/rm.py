"""`dcp-remote rm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument, flag, parse_step
from dcp_remote.cli.gc import describe_failures
from dcp_remote.cli.ls import build_entry, format_table, read_run_catalog
from dcp_remote.cli.output import Output
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import format_count
from dcp_remote.errors import StorageError
from dcp_remote.format.catalog import Entry
from dcp_remote.run.deletions import Deletions, require_expendable
from dcp_remote.run.gc import TIMEOUT_SECONDS
from dcp_remote.run.lookup import find_entry
from dcp_remote.storage import ObjectStore, open_store


def rm(
    out: Output,
    url: Url,
    *,
    step: Annotated[
        Sequence[int | str],
        argument(
            type=parse_step,
            action="append",
            metavar="N|NAME",
            help="checkpoint to delete, by step, name or 'latest'; repeatable",
        ),
    ],
    yes: Annotated[bool, flag("delete; without this nothing is changed")] = False,
    force: Annotated[bool, flag("delete also a pinned checkpoint, or the newest")] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Delete checkpoints of a run.

    Prints which checkpoints would be deleted. With --yes they are removed from the catalog, and then the objects that
    no other checkpoint uses are deleted; what an interruption leaves is removed by `dcp-remote gc`.
    """
    store = open_store(url, storage_options)
    catalog = read_run_catalog(store)
    chosen = {entry.step: entry for entry in (find_entry(catalog, name, url=store.url) for name in step)}
    entries = [chosen[number] for number in sorted(chosen)]
    if not force:
        require_expendable(catalog, entries)
    out.say(f"{store.url}: {format_count(len(entries), 'checkpoint')} of {len(catalog.entries)}")
    out.say(*format_table(entries))
    result: dict[str, object] = {"deleted": [], "objects_deleted": 0, "left_for_gc": None}
    if yes:
        result = _delete(store, entries, force=force, out=out)
    else:
        out.say("Nothing was changed. To delete these checkpoints, add --yes")
    out.give({"url": store.url, "checkpoints": [build_entry(entry) for entry in entries], **result})


def _delete(store: ObjectStore, entries: Sequence[Entry], *, force: bool, out: Output) -> dict[str, object]:
    """Delete checkpoints, print what was done, and return it as a part of the document."""
    deletions = Deletions(store)
    applied = deletions.retire([entry.step for entry in entries], deadline=Deadline(TIMEOUT_SECONDS), force=force)
    deleted = deletions.delete(deadline=Deadline(TIMEOUT_SECONDS))
    steps_deleted = ", ".join(f"step {step}" for step in applied.retired) or "no checkpoint"
    out.say(f"deleted {steps_deleted} ({format_count(deleted.removed, 'object')})")
    if applied.reason is not None:
        out.say(f"some objects are left for `dcp-remote gc`: {applied.reason}")
    out.say(*describe_failures(deleted.failed))
    if deleted.failed or deleted.left or deleted.given_up:
        raise StorageError(
            "The checkpoints were removed from the catalog, but some of their objects could not be deleted. Remove "
            "those later with `dcp-remote gc --delete`.",
            url=store.url,
            failed=len(deleted.failed),
            left=deleted.left + deleted.given_up,
        )
    return {"deleted": list(applied.retired), "objects_deleted": deleted.removed, "left_for_gc": applied.reason}
