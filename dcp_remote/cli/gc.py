"""`dcp-remote gc`: what no checkpoint names, shown or removed; of a checkpoint by itself, or of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from dcp_remote.errors import StorageError
from dcp_remote.gc import Orphans, Removal, find_orphans, remove_orphans
from dcp_remote.run_gc import RunOrphans, find_run_orphans, is_run, remove_run_orphans
from dcp_remote.storage import ObjectInfo, ObjectStore, open_store
from dcp_remote.terminal import counted, human_bytes, printable

_HOUR_SECONDS = 3600.0

# Somebody looks at a terminal. Deleting has its own, longer patience: an outage in the middle is waited for.
_LOOK_SECONDS = 20.0

# Of what could not be deleted. The reasons are few, most often one.
_FAILURES_SHOWN = 5


def run(
    url: str,
    *,
    storage_options: Mapping[str, object],
    grace_hours: float,
    delete: bool,
    as_list: bool,
    out: TextIO,
) -> None:
    """Say which orphans there are, or remove them; costs as in `dcp_remote.gc` and `dcp_remote.run_gc`, and a HEAD.

    Args:
        url: Of the checkpoint, or of the run.
        storage_options: As for `RemoteWriter`.
        grace_hours: Age from which an orphan is removed.
        delete: Remove them; without it nothing is changed.
        as_list: Also print the key and the size in bytes of each that is removed, or would be.
        out: Where to.

    Raises:
        StorageError: Some could not be deleted.
        CheckpointNotFoundError: Nothing of a checkpoint is here, or a run that has lost its catalog.
        CommitConflictError: Somebody is saving here.
        CorruptCheckpointError: A manifest, or the catalog, is damaged: what is named cannot be known.
        UnsupportedFormatError: A newer version wrote it.
        InvalidArgumentError: The grace is negative, or the store cannot replace an object on condition.
    """
    store = open_store(url, storage_options)
    of_a_run = is_run(store, timeout_seconds=_LOOK_SECONDS)
    grace_seconds = grace_hours * _HOUR_SECONDS
    title = f"{store.url}: orphans, which no {'live checkpoint of the run' if of_a_run else 'manifest'} names"
    noun = "object" if of_a_run else "shard"
    if not delete:
        found = _find(store, of_a_run=of_a_run, grace_seconds=grace_seconds)
        out.write(printable(title) + "\n")
        _list(out, found.old if as_list else ())
        _say(out, found.old, noun, f"at least {grace_hours:g} h old")
        _say(out, found.young, noun, "younger, perhaps of a save under way")
        if isinstance(found, RunOrphans) and found.abandoned:
            size = human_bytes(sum(entry.size_bytes for entry in found.abandoned))
            what = counted(len(found.abandoned), "checkpoint")
            out.write(f"abandoned, and so live: {what}, {size}; `dcp-remote rm` retires them\n")
        if found.old:
            out.write("Nothing was changed. To remove the older ones, while nobody saves here: add --delete\n")
        return
    removal = _remove(store, of_a_run=of_a_run, grace_seconds=grace_seconds)
    out.write(printable(title) + "\n")
    _list(out, removal.removed if as_list else ())
    _say(out, removal.removed, noun, "removed")
    _say(out, removal.kept, noun, f"kept: younger than {grace_hours:g} h")
    shown = list(removal.failed.items())[:_FAILURES_SHOWN]
    out.writelines(printable(f"{key}: {error}") + "\n" for key, error in shown)
    if removal.failed:
        raise StorageError("Some orphans could not be deleted; they can be tried again.", failed=len(removal.failed))


def _find(store: ObjectStore, *, of_a_run: bool, grace_seconds: float) -> Orphans:
    find = find_run_orphans if of_a_run else find_orphans
    return find(store, grace_seconds=grace_seconds, timeout_seconds=_LOOK_SECONDS)


def _remove(store: ObjectStore, *, of_a_run: bool, grace_seconds: float) -> Removal:
    remove = remove_run_orphans if of_a_run else remove_orphans
    return remove(store, grace_seconds=grace_seconds)


def _list(out: TextIO, infos: Sequence[ObjectInfo]) -> None:
    out.writelines(printable(f"{info.key}  {info.size_bytes}") + "\n" for info in infos)


def _say(out: TextIO, infos: Sequence[ObjectInfo], noun: str, what: str) -> None:
    size = human_bytes(sum(info.size_bytes for info in infos))
    out.write(f"{counted(len(infos), noun)}, {size}: {what}\n")
