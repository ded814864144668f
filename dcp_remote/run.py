"""What a run holds, as users see it: `latest` and `CheckpointInfo`. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dcp_remote.catalog import Catalog, Entry
from dcp_remote.catalog_store import read_catalog
from dcp_remote.checkpoint import require_not_lost, require_reachable
from dcp_remote.downloads import RANGE_RETRY_SECONDS
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.retrying import Deadline, RetryingStore


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A live checkpoint of a run.

    Attributes:
        step: Of training, finished.
        save_id: Of the save that wrote it.
        created: UTC, ISO 8601, by the coordinator's clock.
        size_bytes: Of the shards that it names; those that it shares with other checkpoints are counted in each.
        names: By which it can be asked for.
        metrics: What the user noted, by name.
        pinned: Exempt from retention, and from being replaced by a save that was not told to overwrite.
        thinned: Top-level keys of the state that were let go.
        abandoned: A later job went on from an older checkpoint; it can be loaded when asked for by its step.
    """

    step: int
    save_id: str
    created: str
    size_bytes: int
    names: tuple[str, ...]
    metrics: Mapping[str, float]
    pinned: bool
    thinned: tuple[str, ...]
    abandoned: bool

    @classmethod
    def of(cls, entry: Entry) -> CheckpointInfo:
        """Of an entry of a catalog."""
        return cls(
            step=entry.step,
            save_id=entry.save_id,
            created=entry.created,
            size_bytes=entry.size_bytes,
            names=entry.names,
            metrics=dict(entry.metrics),
            pinned=entry.pinned,
            thinned=entry.thinned,
            abandoned=entry.abandoned,
        )


def latest(
    run_url: str | os.PathLike[str] | ObjectStore, *, storage_options: Mapping[str, object] | None = None
) -> CheckpointInfo | None:
    """The newest checkpoint of a run; None if none is committed, or if there is no run yet. One GET, on any process.

    Checkpoints that were abandoned, because a later job went on from an older one, do not count.

    Raises:
        CheckpointNotFoundError: There is no such bucket.
        CorruptCheckpointError: The catalog is damaged or lost; `dcp-remote recover` makes it again.
        StorageError: The store refused, or did not answer for five minutes.
        InvalidArgumentError: The URL or an option is wrong.
    """
    if isinstance(run_url, ObjectStore):
        if storage_options:
            raise InvalidArgumentError("storage_options go with a URL; this store has its own.", url=run_url.url)
        store: ObjectStore = run_url
    else:
        store = open_store(run_url, storage_options)
    catalog = catalog_of(store)
    entry = catalog.latest() if catalog is not None else None
    return CheckpointInfo.of(entry) if entry is not None else None


def catalog_of(store: ObjectStore, *, retry_seconds: float = RANGE_RETRY_SECONDS) -> Catalog | None:
    """The catalog of a run; None if there is none. One GET; where there is none, a LIST and perhaps more, to say why.

    Raises:
        CheckpointNotFoundError: The store knows why there cannot be one (no such bucket).
        CorruptCheckpointError: It is damaged, or lost.
    """
    asking = RetryingStore(store, Deadline(retry_seconds))
    seen = read_catalog(asking)
    if seen is not None:
        return seen.catalog
    require_reachable(store)
    require_not_lost(asking)
    return None
