"""`dcp-remote gc`: shards that no manifest names, shown or removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from dcp_remote.cli.terminal import counted, human_bytes, printable
from dcp_remote.errors import StorageError
from dcp_remote.gc import find_orphans, remove_orphans
from dcp_remote.storage import ObjectInfo, open_store

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
    """Say which orphans there are, or remove them; costs as in `dcp_remote.gc`.

    Args:
        url: Of the checkpoint.
        storage_options: As for `RemoteWriter`.
        grace_hours: Age from which an orphan is removed.
        delete: Remove them; without it nothing is changed.
        as_list: Also print the key and the size in bytes of each that is removed, or would be.
        out: Where to.

    Raises:
        StorageError: Some could not be deleted.
        CheckpointNotFoundError: Nothing of a checkpoint is here.
        CommitConflictError: Somebody is saving here.
        CorruptCheckpointError: The manifest is damaged: what it named cannot be known.
        UnsupportedFormatError: A newer version wrote it.
        InvalidArgumentError: The grace is negative, or the store cannot replace an object on condition.
    """
    store = open_store(url, storage_options)
    grace_seconds = grace_hours * _HOUR_SECONDS
    if not delete:
        found = find_orphans(store, grace_seconds=grace_seconds, timeout_seconds=_LOOK_SECONDS)
        out.write(printable(f"{store.url}: orphans, which no manifest names") + "\n")
        _list(out, found.old if as_list else ())
        _say(out, found.old, f"at least {grace_hours:g} h old")
        _say(out, found.young, "younger, perhaps of a save under way")
        if found.old:
            out.write("Nothing was changed. To remove the older ones, while nobody saves here: add --delete\n")
        return
    removal = remove_orphans(store, grace_seconds=grace_seconds)
    out.write(printable(f"{store.url}: orphans, which no manifest names") + "\n")
    _list(out, removal.removed if as_list else ())
    _say(out, removal.removed, "removed")
    _say(out, removal.kept, f"kept: younger than {grace_hours:g} h")
    shown = list(removal.failed.items())[:_FAILURES_SHOWN]
    out.writelines(printable(f"{key}: {error}") + "\n" for key, error in shown)
    if removal.failed:
        raise StorageError("Some orphans could not be deleted; they can be tried again.", failed=len(removal.failed))


def _list(out: TextIO, infos: Sequence[ObjectInfo]) -> None:
    out.writelines(printable(f"{info.key}  {info.size_bytes}") + "\n" for info in infos)


def _say(out: TextIO, infos: Sequence[ObjectInfo], what: str) -> None:
    size = human_bytes(sum(info.size_bytes for info in infos))
    out.write(f"{counted(len(infos), 'shard')}, {size}: {what}\n")
