"""Shards that the live checkpoints of a run name, read from their manifests and held in little memory."""

from __future__ import annotations

from collections.abc import Iterable

import zstandard

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.threads import in_parallel
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpRemoteError,
    PermissionDeniedError,
    UnsupportedFormatError,
)
from dcp_remote.format.catalog import Entry
from dcp_remote.run.lookup import read_entry
from dcp_remote.storage.base import ObjectStore


class LiveShards:
    """Keys of the shards that manifests name. A manifest never changes, and is read once. For one thread at a time.

    The keys are held compressed, at 10 to 20 bytes per shard, since a checkpoint can have a hundred thousand shards and
    a run a hundred checkpoints.
    """

    def __init__(self) -> None:
        """Begin with no manifest known."""
        self._keys: dict[str, bytes] = {}
        # Made once, since making one takes longer than decompressing the keys of a manifest.
        self._decompressor = zstandard.ZstdDecompressor()

    def remember(self, manifest_key: str, shard_keys: Iterable[str]) -> None:
        """Remember the shards that a manifest names, as known to the caller."""
        self._keys[manifest_key] = _pack(shard_keys)

    def forget_others(self, manifest_keys: Iterable[str]) -> None:
        """Forget all manifests but these."""
        kept = set(manifest_keys)
        self._keys = {key: packed for key, packed in self._keys.items() if key in kept}

    def read(self, store: ObjectStore, entries: Iterable[Entry], deadline: Deadline) -> dict[Entry, DcpRemoteError]:
        """Read the manifests that are not known yet, a few at a time; one GET each.

        Returns errors of the manifests that cannot be read, even later: damaged, of a newer version, or gone.
        """

        def keys_of(entry: Entry) -> bytes | DcpRemoteError:
            try:
                manifest = read_entry(store, entry, retry_seconds=deadline.remaining_seconds(), whole=False)
            except (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError) as error:
                if isinstance(error.__cause__, PermissionDeniedError):
                    raise error.__cause__ from None  # it may be there: of what is not live, no manifest is missed
                return error
            return _pack(manifest.shards.keys)

        missing = [entry for entry in entries if entry.manifest not in self._keys]
        failed: dict[Entry, DcpRemoteError] = {}
        for entry, found in zip(missing, in_parallel(keys_of, missing), strict=True):
            if isinstance(found, DcpRemoteError):
                failed[entry] = found
            else:
                self._keys[entry.manifest] = found
        return failed

    def not_named(self, keys: Iterable[str], entries: Iterable[Entry]) -> set[str]:
        """Return the keys that none of these checkpoints names; all their manifests must be known."""
        left = set(keys)
        for entry in entries:
            assert entry.manifest in self._keys, "an unknown manifest may name any key"
            left.discard(entry.manifest)
            left.difference_update(self.shards_of(entry.manifest))
        return left

    def shards_of(self, manifest_key: str) -> list[str]:
        """Return the keys of the shards that a manifest names; [] if the manifest is not known."""
        packed = self._keys.get(manifest_key)
        text = self._decompressor.decompress(packed).decode("ascii") if packed is not None else ""
        return text.split("\n") if text else []


def _pack(keys: Iterable[str]) -> bytes:
    return zstandard.ZstdCompressor().compress("\n".join(keys).encode("ascii"))
