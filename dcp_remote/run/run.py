"""Runs as users see them: `latest` and `CheckpointInfo`; and the catalog of a run, or the reason why there is none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.run.catalog_store import read_catalog
from dcp_remote.run.lookup import exists, not_found, require_not_lost, require_reachable
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS, RetryingStore


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Live checkpoint of a run.

    Attributes:
        step: Number of finished steps of training.
        save_id: Id of the save that wrote it.
        created: Time of the save; UTC, ISO 8601, by the coordinator's clock.
        size_bytes: Size of its shards in bytes; a shard shared with other checkpoints counts in each.
        names: Names by which it can be loaded.
        metrics: Metrics given by the user, by name.
        pinned: Exempt from retention, and replaced only by a save with `overwrite=True`.
        thinned: Top-level keys of the state that were dropped.
        abandoned: A later job went on from an older checkpoint; this one can still be loaded by its step.
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
        """Return the information that an entry of a catalog holds."""
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
    """Return the newest checkpoint of a run; None if none is committed, or if there is no run yet. One GET.

    Abandoned checkpoints do not count: a later job went on from an older one. Any process may call this.

    Raises:
        CheckpointNotFoundError: There is no such bucket.
        CorruptCheckpointError: The catalog is damaged or lost; `dcp-remote recover` rebuilds it.
        StorageError: The store refused, or did not answer for five minutes.
        InvalidArgumentError: The URL or an option is wrong.
    """
    if isinstance(run_url, ObjectStore):
        if storage_options:
            raise InvalidArgumentError(
                "storage_options need a URL; this is a store, which has its own.", url=run_url.url
            )
        store: ObjectStore = run_url
    else:
        store = open_store(run_url, storage_options)
    catalog = catalog_of(store)
    entry = catalog.latest() if catalog is not None else None
    return CheckpointInfo.of(entry) if entry is not None else None


def catalog_of(store: ObjectStore, *, retry_seconds: float = RANGE_RETRY_SECONDS) -> Catalog | None:
    """Return the catalog of a run; None if there is no run yet. One GET; where there is no catalog, also a LIST.

    Raises:
        CheckpointNotFoundError: There is no such bucket.
        CorruptCheckpointError: The catalog is damaged, or lost; `dcp-remote recover` rebuilds it.
        UnsupportedFormatError: A newer version wrote the catalog.
    """
    asking = RetryingStore(store, Deadline(retry_seconds))
    seen = read_catalog(asking)
    if seen is not None:
        return seen.catalog
    require_reachable(store)
    require_not_lost(asking)
    return None


def require_run(store: ObjectStore, *, retry_seconds: float = RANGE_RETRY_SECONDS) -> Catalog:
    """Read the catalog of a run, or say why there is none; one GET, and where there is none a HEAD, a LIST and a HEAD.

    Raises:
        CheckpointNotFoundError: There is no run here, or no such bucket.
        InvalidArgumentError: This is a checkpoint by itself.
        CorruptCheckpointError: The catalog is damaged, or lost; `dcp-remote recover` rebuilds it.
        UnsupportedFormatError: A newer version wrote the catalog.
    """
    asking = RetryingStore(store, Deadline(retry_seconds))
    seen = read_catalog(asking)
    if seen is not None:
        return seen.catalog
    if exists(asking, MANIFEST_KEY):
        raise InvalidArgumentError(
            "This is a checkpoint by itself, not a run: `dcp-remote show` says what it holds. To remove it, delete all "
            "objects below its URL, manifest.json first.",
            url=store.url,
        )
    raise not_found(asking)
