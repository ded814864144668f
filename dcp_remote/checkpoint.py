"""Reading a checkpoint's manifest: the one way in, for readers and for the command line. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_remote import manifest_json
from dcp_remote.envelope import STORED_BYTES_MAX
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    UnsupportedFormatError,
)
from dcp_remote.manifest import MANIFEST_KEY, Manifest
from dcp_remote.storage.base import ObjectStore, Version
from dcp_remote.storage.retrying import Deadline, RetryingStore
from dcp_remote.transfer import RANGE_RETRY_SECONDS


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
    """Read and check what lies at the manifest's key; one GET.

    Raises:
        ObjectNotFoundError: Nothing does.
        CorruptCheckpointError: It is damaged.
        UnsupportedFormatError: A newer version wrote it.
    """
    content = store.get(MANIFEST_KEY, limit_bytes=STORED_BYTES_MAX)
    try:
        return Stored(content.data, content.version, manifest_json.decode(content.data))
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        raise type(error)(error.what, **{"url": store.url, **error.details}) from error


def read_manifest(store: ObjectStore, *, retry_seconds: float = RANGE_RETRY_SECONDS) -> Manifest:
    """Read and check a checkpoint's manifest; one GET.

    Args:
        store: Opened at the checkpoint's URL.
        retry_seconds: For how long to try again where the store fails.

    Raises:
        CheckpointNotFoundError: No checkpoint is committed here.
        CorruptCheckpointError: The manifest is damaged.
        UnsupportedFormatError: A newer version wrote it.
    """
    try:
        stored = read_stored(RetryingStore(store, Deadline(retry_seconds)))
    except ObjectNotFoundError as error:
        raise not_found(store) from error
    if stored.manifest is None:
        raise CheckpointNotFoundError(
            "There is no committed checkpoint here: manifest.json is a tombstone, which was put when orphans were "
            "removed. A save here replaces it.",
            url=store.url,
        )
    return stored.manifest


def not_found(store: ObjectStore) -> CheckpointNotFoundError:
    """The error that says that nothing lies at the manifest's key, and what may be the matter.

    A store that knows more (no such bucket) says so, at the price of a request.
    """
    explain = getattr(store, "explain_missing", None)
    reason = explain() if callable(explain) else None
    if reason:
        return CheckpointNotFoundError(reason)
    return CheckpointNotFoundError(
        "There is no committed checkpoint here (no manifest.json). Is this the URL of a folder of checkpoints, or of "
        "one that torch's own writer made? A save that was cut off leaves shards alone, which are none.",
        url=store.url,
    )
