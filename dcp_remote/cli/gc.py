"""`dcp-remote gc`: print or remove the orphaned objects of a run, or the orphaned shards of a single checkpoint."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import TextIO

from dcp_remote.cli.ls import build_entry
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import escape_unprintable, format_count, human_bytes
from dcp_remote.errors import InvalidArgumentError, StorageError
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.run.gc import Orphans, Removal, find_orphans, remove_orphans
from dcp_remote.run.lookup import exists
from dcp_remote.storage import ObjectInfo, open_store
from dcp_remote.storage.retrying import RetryingStore

_HOUR_SECONDS = 3600.0

# Deadline for looking, short because a user waits. Deleting has a longer one, so that it waits for an outage to end.
_LOOK_SECONDS = 20.0

# Objects that could not be deleted and are printed with the reason. Most often all have the same reason.
_FAILURES_SHOWN = 5


def run(
    url: str,
    *,
    storage_options: Mapping[str, object],
    grace_hours: float,
    delete: bool,
    as_list: bool,
    as_json: bool,
    out: TextIO,
) -> None:
    """Print which orphans there are, or remove them; costs as in `dcp_remote.run.gc`, and with `delete` a HEAD.

    Args:
        url: URL of the checkpoint, or of the run.
        storage_options: Options as for `RemoteWriter`.
        grace_hours: Age in hours from which an orphan is removed.
        delete: Remove the orphans; False changes nothing.
        as_list: Print also the key and the size in bytes of each orphan that is, or would be, removed.
        as_json: Print a JSON document, with each orphan, instead of text.
        out: Output stream.

    Raises:
        StorageError: Some orphans could not be deleted.
        CheckpointNotFoundError: There is no object of a checkpoint at the URL, or the catalog of the run is lost.
        CommitConflictError: A save is under way.
        CorruptCheckpointError: A manifest or the catalog is damaged, so that it is not known which objects are in use.
        UnsupportedFormatError: A newer version of dcp_remote wrote a manifest or the catalog.
        InvalidArgumentError: The grace is not a finite number of at least 0, or the store has no compare-and-swap.
    """
    if not 0 <= grace_hours < math.inf:
        raise InvalidArgumentError("--grace-hours must be at least 0, and finite.", grace_hours=grace_hours)
    store = open_store(url, storage_options)
    grace_seconds = grace_hours * _HOUR_SECONDS
    text = io.StringIO() if as_json else out  # a document takes the place of the text
    if not delete:
        orphans = find_orphans(store, grace_seconds=grace_seconds, timeout_seconds=_LOOK_SECONDS)
        noun = _print_title(text, store.url, orphans)
        _print_objects(text, orphans.old if as_list else ())
        _print_total(text, orphans.old, noun, f"at least {grace_hours:g} h old")
        _print_total(text, orphans.young, noun, "younger, perhaps of a save under way")
        if orphans.abandoned:
            size = human_bytes(sum(entry.size_bytes for entry in orphans.abandoned))
            count = format_count(len(orphans.abandoned), "checkpoint")
            text.write(f"not orphans: {count} abandoned by a rollback, {size}; delete with `dcp-remote rm`\n")
        if orphans.old:
            text.write(f"Nothing was changed. To remove the older {noun}s, while no job saves here, add --delete\n")
        if as_json:
            abandoned = [build_entry(entry) for entry in orphans.abandoned]
            groups = {"old": orphans.old, "young": orphans.young}
            _print_document(out, store.url, groups, is_run=orphans.is_run, abandoned=abandoned)
        return
    # Asked apart, since deleting waits for an outage to end: so a wrong endpoint is reported within seconds.
    exists(RetryingStore(store, Deadline(_LOOK_SECONDS)), CATALOG_KEY)
    removal = remove_orphans(store, grace_seconds=grace_seconds)
    noun = _print_title(text, store.url, removal)
    _print_objects(text, removal.removed if as_list else ())
    _print_total(text, removal.removed, noun, "removed")
    _print_total(text, removal.kept, noun, f"kept, younger than {grace_hours:g} h")
    failures = list(removal.failed.items())[:_FAILURES_SHOWN]
    text.writelines(escape_unprintable(f"{key}: {error}") + "\n" for key, error in failures)
    if removal.failed:
        raise StorageError("Some orphans could not be deleted. Run the command again.", failed=len(removal.failed))
    if as_json:
        _print_document(out, store.url, {"removed": removal.removed, "kept": removal.kept}, is_run=removal.is_run)


def _print_document(
    out: TextIO, url: str, groups: Mapping[str, Sequence[ObjectInfo]], *, is_run: bool, **more: object
) -> None:
    objects = {name: [{"key": info.key, "bytes": info.size_bytes} for info in infos] for name, infos in groups.items()}
    out.write(json.dumps({"url": url, "is_run": is_run, **objects, **more}, indent=2) + "\n")


def _print_title(out: TextIO, url: str, found: Orphans | Removal) -> str:
    """Print the first line; return the noun for the objects that are counted."""
    what = (
        "objects that no live checkpoint of the run uses" if found.is_run else "shards that the manifest does not name"
    )
    out.write(escape_unprintable(f"{url}: orphans ({what})") + "\n")
    return "object" if found.is_run else "shard"


def _print_objects(out: TextIO, infos: Sequence[ObjectInfo]) -> None:
    out.writelines(escape_unprintable(f"{info.key}  {info.size_bytes}") + "\n" for info in infos)


def _print_total(out: TextIO, infos: Sequence[ObjectInfo], noun: str, state: str) -> None:
    size = human_bytes(sum(info.size_bytes for info in infos))
    out.write(f"{format_count(len(infos), noun)}, {size}: {state}\n")
