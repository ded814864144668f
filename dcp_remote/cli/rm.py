"""`dcp-remote rm`: let checkpoints of a run go, and delete what only they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from dcp_remote.checkpoint import find
from dcp_remote.cli.ls import catalog_of, table
from dcp_remote.errors import StorageError
from dcp_remote.gc import TIMEOUT_SECONDS
from dcp_remote.storage import open_store
from dcp_remote.storage.retrying import Deadline
from dcp_remote.terminal import counted, printable
from dcp_remote.upkeep import Upkeep, require_expendable

# Of what could not be deleted. The reasons are few, most often one.
_FAILURES_SHOWN = 5


def run(
    url: str, *, storage_options: Mapping[str, object], steps: Sequence[int], yes: bool, force: bool, out: TextIO
) -> None:
    """Say what would go, which is one GET; or retire it, and delete what only it names, as in `dcp_remote.upkeep`.

    Args:
        url: Of the run.
        storage_options: As for `RemoteWriter`.
        steps: Of live checkpoints.
        yes: Do it; without it nothing is changed.
        force: Also what is pinned, or the newest.
        out: Where to.

    Raises:
        CheckpointNotFoundError: There is no run here, or no checkpoint of one of the steps.
        InvalidArgumentError: One is pinned, or the newest; or this is a checkpoint by itself.
        CommitUnknownError: The store never said whether they were retired.
        StorageError: They were retired, and some objects could not be deleted.
    """
    store = open_store(url, storage_options)
    catalog = catalog_of(store)
    entries = [find(catalog, step, url=store.url) for step in sorted(set(steps))]
    if not force:
        require_expendable(catalog, entries)
    out.write(printable(f"{store.url}: {counted(len(entries), 'checkpoint')} of {len(catalog.entries)}") + "\n")
    out.writelines(f"{line}\n" for line in table(entries))
    if not yes:
        out.write("Nothing was changed. To retire them, and delete what no other checkpoint names: add --yes\n")
        return
    upkeep = Upkeep(store)
    applied = upkeep.retire([entry.step for entry in entries], deadline=Deadline(TIMEOUT_SECONDS), force=force)
    deleted = upkeep.delete(deadline=Deadline(TIMEOUT_SECONDS))
    gone = ", ".join(map(str, applied.retired)) or "none"
    out.write(f"retired: {gone}\n{counted(deleted.removed, 'object')} deleted\n")
    if applied.reason is not None:
        out.write(printable(f"not everything was deleted: {applied.reason}") + "\n")
    shown = list(deleted.failed.items())[:_FAILURES_SHOWN]
    out.writelines(printable(f"{key}: {error}") + "\n" for key, error in shown)
    if deleted.failed or deleted.left:
        raise StorageError(
            "The checkpoints are retired, and not all of their objects could be deleted; `dcp-remote gc` finds them.",
            url=store.url,
            failed=len(deleted.failed),
            left=deleted.left,
        )
