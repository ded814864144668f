"""`dcp-remote rm`: delete checkpoints of a run, with the objects that no other checkpoint uses."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import TextIO

from dcp_remote.cli.ls import build_entry, format_table, read_run_catalog
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import escape_unprintable, format_count
from dcp_remote.errors import StorageError
from dcp_remote.format.catalog import Entry
from dcp_remote.run.gc import TIMEOUT_SECONDS
from dcp_remote.run.lookup import find_entry
from dcp_remote.run.maintenance import Maintenance, require_expendable
from dcp_remote.storage import ObjectStore, open_store

# Objects that could not be deleted and are printed with the reason. Most often all have the same reason.
_FAILURES_SHOWN = 5


def run(
    url: str,
    *,
    storage_options: Mapping[str, object],
    steps: Sequence[int | str],
    yes: bool,
    force: bool,
    as_json: bool,
    out: TextIO,
) -> None:
    """Print which checkpoints would be deleted, which costs one GET; or delete them.

    Deletion first removes the checkpoints from the catalog, by a swap, and then deletes their objects: interrupted in
    between, it leaves orphans, which `dcp-remote gc` removes.

    Args:
        url: URL of the run.
        storage_options: Options as for `RemoteWriter`.
        steps: Steps or names of live checkpoints.
        yes: Delete; False changes nothing.
        force: Delete also checkpoints that are pinned, or the newest.
        as_json: Print a JSON document instead of text.
        out: Output stream.

    Raises:
        CheckpointNotFoundError: There is no run at the URL, or no checkpoint of one of the steps or names.
        InvalidArgumentError: A checkpoint is pinned or the newest, and `force` is False; or the URL is that of a
            checkpoint by itself.
        CommitUnknownError: The store did not say whether the checkpoints were removed from the catalog.
        StorageError: The checkpoints were removed from the catalog, but some objects could not be deleted.
    """
    store = open_store(url, storage_options)
    catalog = read_run_catalog(store)
    chosen = {entry.step: entry for entry in (find_entry(catalog, step, url=store.url) for step in steps)}
    entries = [chosen[step] for step in sorted(chosen)]
    if not force:
        require_expendable(catalog, entries)
    text = io.StringIO() if as_json else out  # a document takes the place of the text
    count = format_count(len(entries), "checkpoint")
    text.write(escape_unprintable(f"{store.url}: {count} of {len(catalog.entries)}") + "\n")
    text.writelines(f"{line}\n" for line in format_table(entries))
    result: dict[str, object] = {"deleted": [], "objects_deleted": 0, "left_for_gc": None}
    if yes:
        result = _delete(store, entries, force=force, out=text)
    else:
        text.write("Nothing was changed. To delete these checkpoints, add --yes\n")
    if as_json:
        document = {"url": store.url, "checkpoints": [build_entry(entry) for entry in entries], **result}
        out.write(json.dumps(document, indent=2) + "\n")


def _delete(store: ObjectStore, entries: Sequence[Entry], *, force: bool, out: TextIO) -> dict[str, object]:
    """Delete checkpoints, print what was done, and return it as a part of the JSON document."""
    maintenance = Maintenance(store)
    applied = maintenance.retire([entry.step for entry in entries], deadline=Deadline(TIMEOUT_SECONDS), force=force)
    deleted = maintenance.delete(deadline=Deadline(TIMEOUT_SECONDS))
    steps_deleted = ", ".join(f"step {step}" for step in applied.retired) or "no checkpoint"
    out.write(f"deleted {steps_deleted} ({format_count(deleted.removed, 'object')})\n")
    if applied.reason is not None:
        out.write(escape_unprintable(f"some objects are left for `dcp-remote gc`: {applied.reason}") + "\n")
    failures = list(deleted.failed.items())[:_FAILURES_SHOWN]
    out.writelines(escape_unprintable(f"{key}: {error}") + "\n" for key, error in failures)
    if deleted.failed or deleted.left or deleted.given_up:
        raise StorageError(
            "The checkpoints were removed from the catalog, but some of their objects could not be deleted. Remove "
            "those later with `dcp-remote gc --delete`.",
            url=store.url,
            failed=len(deleted.failed),
            left=deleted.left + deleted.given_up,
        )
    return {"deleted": list(applied.retired), "objects_deleted": deleted.removed, "left_for_gc": applied.reason}
