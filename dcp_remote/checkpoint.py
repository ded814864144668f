"""Finding a checkpoint and reading its manifest: the one way in, for readers and for the command line. No torch.

A URL is that of a checkpoint by itself, which has a manifest, or that of a run, which has a catalog of checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from dcp_remote import commit, manifest_json
from dcp_remote.catalog import CATALOG_KEY, Catalog, Entry
from dcp_remote.catalog_store import read_catalog
from dcp_remote.downloads import RANGE_RETRY_SECONDS
from dcp_remote.envelope import STORED_BYTES_MAX, unseal
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
    UnsupportedFormatError,
)
from dcp_remote.manifest import MANIFEST_KEY, Manifest
from dcp_remote.run_names import MANIFESTS_PREFIX, revision_of
from dcp_remote.storage.base import ObjectStore, Version
from dcp_remote.storage.rereads import RereadingStore, get_decoded
from dcp_remote.storage.retrying import Deadline, RetryingStore

# What is named of a run's checkpoints in an error: the newest.
_STEPS_NAMED_MAX = 10


@dataclass(frozen=True, slots=True)
class Stored:
    """What lies at the manifest's key, checked.

    Attributes:
        data: As it is stored.
        version: Of the object.
        manifest: None of a tombstone: no checkpoint is here.
    """

    data: bytes
    version: Version
    manifest: Manifest | None

    @property
    def shard_keys(self) -> tuple[str, ...]:
        """The shards that it names."""
        return self.manifest.shards.keys if self.manifest is not None else ()


def read_stored(store: ObjectStore) -> Stored:
    """Read and check what lies at the manifest's key; one GET, and one more if the answer is damaged.

    Raises:
        ObjectNotFoundError: Nothing does.
        CorruptCheckpointError: It is damaged.
        UnsupportedFormatError: A newer version wrote it.
    """
    try:
        content, manifest = get_decoded(store, MANIFEST_KEY, manifest_json.decode, limit_bytes=STORED_BYTES_MAX)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        raise type(error)(error.what, **{"url": store.url, **error.details}) from error
    return Stored(content.data, content.version, manifest)


def read_manifest(
    store: ObjectStore, *, step: int | str | None = None, retry_seconds: float = RANGE_RETRY_SECONDS
) -> Manifest:
    """Read and check a checkpoint's manifest; one GET, of a run three (two if a step is given).

    Args:
        store: Opened at the checkpoint's URL, or at the run's.
        step: Of a run: a step, or a checkpoint's name. None is a checkpoint by itself, or the newest of a run.
        retry_seconds: For how long to try again where the store fails.

    Raises:
        CheckpointNotFoundError: No checkpoint is committed here, or none of this step.
        CorruptCheckpointError: The manifest or the catalog is damaged.
        UnsupportedFormatError: A newer version wrote it.
        InvalidArgumentError: `step` is neither a number nor a name.
    """
    if step is not None and type(step) not in (int, str):
        raise InvalidArgumentError("A step is an integer, or a checkpoint's name.", step=step)
    reading = RetryingStore(store, Deadline(retry_seconds))
    stored: Stored | None = None
    if step is None:
        try:
            stored = read_stored(reading)
        except ObjectNotFoundError:
            stored = None
        if stored is not None and stored.manifest is not None:
            return stored.manifest
    seen = read_catalog(reading)
    if seen is not None:
        return read_entry(store, find(seen.catalog, step, url=store.url), retry_seconds=retry_seconds)
    nothing = not_found(reading)
    if step is not None:
        raise CheckpointNotFoundError(
            "There is no run here (no catalog.json), and so no step of one. A checkpoint by itself is read without.",
            url=store.url,
            step=step,
        )
    if stored is None:
        raise nothing
    raise CheckpointNotFoundError(
        "There is no committed checkpoint here: manifest.json is a tombstone, which was put when orphans were "
        "removed. A save here replaces it.",
        url=store.url,
    )


def find(catalog: Catalog, step: int | str | None, *, url: str) -> Entry:
    """The checkpoint of a run that is asked for. Pure.

    Args:
        catalog: Of the run.
        step: A step; a name; None for the newest, abandoned ones left out.
        url: For the error.

    Raises:
        CheckpointNotFoundError: There is none; says which there are.
    """
    if step is None:
        entry = catalog.latest()
    else:
        entry = catalog.named(step) if isinstance(step, str) else catalog.at(step)
    if entry is not None:
        return entry
    steps = [one.step for one in catalog.entries if not one.abandoned][-_STEPS_NAMED_MAX:]
    what = "The run has no live checkpoint of this step."
    if step is None:
        what = "No checkpoint is live in this run yet."
    elif isinstance(step, str):
        what = "The run has no live checkpoint of this name."
        if step.isdecimal():
            what += " A step is a number, not a text."
    raise CheckpointNotFoundError(
        what,
        url=url,
        step=step,
        checkpoints=len(catalog.entries),
        steps=", ".join(map(str, steps)) or None,
        names=", ".join(name for one in catalog.entries for name in one.names) or None,
    )


def read_entry(store: ObjectStore, entry: Entry, *, retry_seconds: float = RANGE_RETRY_SECONDS) -> Manifest:
    """Read and check the manifest of a checkpoint of a run; one GET, and one more if the answer is damaged.

    Raises:
        CheckpointNotFoundError: It was retired, or thinned, since the catalog was read.
        CorruptCheckpointError: It is damaged, of another save, or gone although the catalog names it.
        UnsupportedFormatError: A newer version wrote it.
    """
    data = fetch_entry(store, entry, retry_seconds=retry_seconds)
    return decode_entry(store, entry, data, retry_seconds=retry_seconds)


def fetch_entry(store: ObjectStore, entry: Entry, *, retry_seconds: float = RANGE_RETRY_SECONDS) -> bytes:
    """The manifest of a checkpoint of a run as it is stored, its digest checked; one GET, one more if it is damaged.

    Raises:
        CheckpointNotFoundError: It was retired, or thinned, since the catalog was read.
        CorruptCheckpointError: It is damaged, or gone although the catalog names it.
    """
    asking = RetryingStore(store, Deadline(retry_seconds))
    try:
        return get_decoded(asking, entry.manifest, unseal, limit_bytes=STORED_BYTES_MAX)[0].data
    except CorruptCheckpointError as error:
        raise _about(error, store, entry.manifest) from error
    except ObjectNotFoundError as error:
        seen = read_catalog(asking)
        if seen is None or entry.manifest not in {one.manifest for one in seen.catalog.entries}:
            raise CheckpointNotFoundError(
                "The checkpoint was retired or replaced while it was being looked for; look again.",
                url=store.url,
                step=entry.step,
            ) from error
        raise CorruptCheckpointError(
            "The manifest of a checkpoint of the run is missing. Use another checkpoint.",
            url=store.url,
            step=entry.step,
            manifest=entry.manifest,
        ) from error


def read_manifest_at(
    store: ObjectStore, key: str, *, save_id: str, retry_seconds: float = RANGE_RETRY_SECONDS
) -> Manifest:
    """Read and check the manifest of a save into a run; one GET, and one more if the answer is damaged.

    Raises:
        ObjectNotFoundError: It is gone.
        CorruptCheckpointError: It is damaged, or of another save.
        UnsupportedFormatError: A newer version wrote it.
    """
    decode = partial(_decoded_at, store, key, save_id=save_id)
    return get_decoded(RetryingStore(store, Deadline(retry_seconds)), key, decode, limit_bytes=STORED_BYTES_MAX)[1]


def decode_entry(
    store: ObjectStore, entry: Entry, data: bytes, *, retry_seconds: float = RANGE_RETRY_SECONDS
) -> Manifest:
    """Decode what `fetch_entry` gave, here or on another rank; no request, but one GET if the data is damaged.

    Raises:
        CorruptCheckpointError: It is damaged, or of another save.
        UnsupportedFormatError: A newer version wrote it.
    """
    try:
        return _decoded_at(store, entry.manifest, data, save_id=entry.save_id)
    except CorruptCheckpointError:
        data = fetch_entry(RereadingStore(store), entry, retry_seconds=retry_seconds)
        return _decoded_at(store, entry.manifest, data, save_id=entry.save_id)


def _decoded_at(store: ObjectStore, key: str, data: bytes, *, save_id: str) -> Manifest:
    try:
        manifest = manifest_json.decode(data)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        raise _about(error, store, key) from error
    if manifest is None or manifest.save_id != save_id or manifest.run is None:
        raise CorruptCheckpointError(
            "The manifest is not that of the save that the catalog names.", url=store.url, manifest=key, save_id=save_id
        )
    return manifest


def _about(
    error: CorruptCheckpointError | UnsupportedFormatError, store: ObjectStore, key: str
) -> CorruptCheckpointError | UnsupportedFormatError:
    """The same error, which also names the manifest."""
    return type(error)(error.what, **{"url": store.url, "manifest": key, **error.details})


def why_missing(store: ObjectStore, manifest: Manifest, *, retry_seconds: float) -> str | None:
    """What became of a checkpoint that lacks a shard; None if it is committed as it was, and so is damaged. One GET."""
    reading = RetryingStore(store, Deadline(retry_seconds))
    if manifest.run is None:
        head = commit.look(reading).head
        return None if head is not None and head.save_id == manifest.save_id else "removed or replaced"
    seen = read_catalog(reading)
    entry = next((one for one in seen.catalog.entries if one.save_id == manifest.save_id), None) if seen else None
    if entry is None:
        return "retired"
    return "thinned" if entry.thinned != manifest.run.thinned else None


def require_reachable(store: ObjectStore) -> None:
    """Where nothing was found, see that there can be something; asked of a store that knows, at the price of a request.

    Raises:
        CheckpointNotFoundError: There is no such bucket.
    """
    explain = getattr(store, "explain_missing", None)
    reason = explain() if callable(explain) else None
    if reason:
        raise CheckpointNotFoundError(reason)


def require_not_lost(store: ObjectStore) -> None:
    """Where there is no catalog, see that there never was one: nobody shall begin anew for want of it.

    One LIST; where that finds something, a HEAD: another job may have begun the run between the two looks.

    Raises:
        CorruptCheckpointError: There are manifests of a run, and still no catalog, which is there before any of them.
    """
    try:
        has_begun = any(revision_of(info.key) is not None for info in store.list(MANIFESTS_PREFIX))
    except PermissionDeniedError:
        return  # who may not list cannot know
    if has_begun and not _exists(store, CATALOG_KEY):
        raise CorruptCheckpointError(
            "This run has manifests, but has lost its catalog.json. `dcp-remote recover` makes it again.",
            url=store.url,
        )


def require_no_checkpoint_by_itself(store: ObjectStore) -> None:
    """Refuse the prefix of a checkpoint by itself: who reads there would find that, and never the run. One HEAD.

    Raises:
        CheckpointExistsError: A manifest lies there.
    """
    if _exists(store, MANIFEST_KEY):
        raise CheckpointExistsError(
            "A checkpoint by itself lies here (manifest.json); a run needs a URL of its own. If a run was here first, "
            "that checkpoint was saved over it: load it if it is wanted, and delete manifest.json.",
            url=store.url,
        )


def not_found(store: ObjectStore) -> CheckpointNotFoundError:
    """The error that says that there is neither a checkpoint nor a run; costs a LIST, and perhaps a request more.

    Raises:
        CheckpointNotFoundError: There is no such bucket.
        CorruptCheckpointError: There was a run.
    """
    require_reachable(store)
    require_not_lost(store)
    return CheckpointNotFoundError(
        "There is no committed checkpoint here (no manifest.json), and no run (no catalog.json). Is this the URL of a "
        "folder of checkpoints, or of one that torch's own writer made? A save that was cut off leaves shards alone, "
        "which are none.",
        url=store.url,
    )


def _exists(store: ObjectStore, key: str) -> bool:
    """Whether such an object lies there; one HEAD."""
    try:
        store.head(key)
    except ObjectNotFoundError:
        return False
    return True
