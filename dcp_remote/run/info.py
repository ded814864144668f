"""Runs as users see them: `CheckpointInfo`, `latest`; and the catalog of a run, or why there is none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime

from dcp_remote.common.deadline import Clock, Deadline
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.run.catalog_store import read_catalog
from dcp_remote.run.conditional_put import find_object
from dcp_remote.run.lookup import not_found, require_not_lost, require_reachable
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.location import Location, require_timeout
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
        values = {field.name: getattr(entry, field.name) for field in fields(cls)}  # under the same names
        return cls(**values | {"metrics": dict(entry.metrics)})


def latest(
    run_url: str | os.PathLike[str] | ObjectStore,
    *,
    storage_options: Mapping[str, object] | None = None,
    timeout_seconds: float = RANGE_RETRY_SECONDS,
) -> CheckpointInfo | None:
    """Return the newest checkpoint of a run; None if none is committed, or if there is no run yet. One GET.

    Abandoned checkpoints do not count: a later job went on from an older one. Any process may call this.

    Args:
        run_url: URL, path or store of the run, as for `RemoteReader`.
        storage_options: Options of the store, as for `RemoteWriter`.
        timeout_seconds: Time for which one request is retried while the store fails, in seconds; 300.

    Raises:
        BucketNotFoundError: There is no such bucket.
        CorruptCheckpointError: The catalog is damaged or lost; `dcp-remote recover` rebuilds it.
        StorageError: The store refused, or did not answer in time.
        InvalidArgumentError: The URL, an option or the timeout is wrong.
    """
    require_timeout(timeout_seconds)
    catalog = catalog_of(Location.of(run_url, storage_options).store, retry_seconds=timeout_seconds)
    entry = catalog.latest() if catalog is not None else None
    return CheckpointInfo.of(entry) if entry is not None else None


def find_seconds(created: str) -> float | None:
    """Return a time of a catalog, ISO 8601, in seconds since 1970; None if the text, which may be any, is no time."""
    try:
        found = datetime.fromisoformat(created)
        return found.replace(tzinfo=found.tzinfo or UTC).astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        return None


def find_age_seconds(created: str, now_seconds: float) -> float | None:
    """Return the seconds since a time of a catalog; None if the text is no time. Pure."""
    seconds = find_seconds(created)
    return None if seconds is None else max(0.0, now_seconds - seconds)


def catalog_of(
    store: ObjectStore, *, retry_seconds: float = RANGE_RETRY_SECONDS, clock: Clock | None = None
) -> Catalog | None:
    """Return the catalog of a run; None if there is no run yet.

    One GET; where there is no catalog, also a LIST, and perhaps three requests more. A bucket that does not exist, and
    a run that has lost its catalog, are refused. A catalog that is there after all is read.
    """
    asking = RetryingStore(store, Deadline(retry_seconds, clock))
    catalog = read_catalog(asking)
    if catalog is None:
        require_reachable(store)
        if require_not_lost(asking) and (catalog := read_catalog(asking)) is None:
            raise not_found(asking)
    return catalog


def require_run(store: ObjectStore, *, retry_seconds: float = RANGE_RETRY_SECONDS) -> Catalog:
    """Read the catalog of a run, or say why there is none.

    One GET; where there is no catalog, also a HEAD, two LISTs, and perhaps a request more. A checkpoint by itself
    (`InvalidArgumentError`) and what else lies there are named.
    """
    asking = RetryingStore(store, Deadline(retry_seconds))
    catalog = read_catalog(asking)
    if catalog is None:
        require_run_url(asking)
        raise not_found(asking)
    return catalog


def require_run_url(store: ObjectStore) -> None:
    """Refuse the URL of a checkpoint by itself; called where there is no catalog. One HEAD."""
    if find_object(store, MANIFEST_KEY) is not None:
        raise InvalidArgumentError(
            "This is a checkpoint by itself, not a run: load or RemoteReader reads it, `dcp-remote show` says what it "
            "holds. To remove it, delete all objects below its URL, manifest.json first.",
            url=store.url,
        )
