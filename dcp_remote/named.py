"""Which shards the live checkpoints of a run name, read from their manifests and held in little memory. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import zstandard

from dcp_remote.catalog import Entry
from dcp_remote.checkpoint import read_entry
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpRemoteError,
    UnsupportedFormatError,
)
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.retrying import Deadline

_S = TypeVar("_S")
_T = TypeVar("_T")

# A manifest of a million chunks takes 100 MB in memory while it is looked at.
_READS_IN_FLIGHT = 4


class Named:
    """Which shards manifests name, each read once: a manifest never changes. For one thread at a time.

    Held compressed, at 10 to 20 bytes a shard: a checkpoint can have a hundred thousand, and a run a hundred of those.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._keys: dict[str, bytes] = {}
        # Made once: to make one takes longer than a manifest's keys do.
        self._decompressor = zstandard.ZstdDecompressor()

    def remember(self, manifest_key: str, shard_keys: Iterable[str]) -> None:
        """What this manifest names, as somebody knows who wrote it."""
        self._keys[manifest_key] = _packed(shard_keys)

    def forget_others(self, manifest_keys: Iterable[str]) -> None:
        """Of all but these."""
        kept = set(manifest_keys)
        self._keys = {key: packed for key, packed in self._keys.items() if key in kept}

    def read(self, store: ObjectStore, entries: Iterable[Entry], deadline: Deadline) -> dict[Entry, DcpRemoteError]:
        """Read the manifests that are not known yet, a few at a time; one GET each.

        Returns:
            Why some could not be read, for ever: damaged, of a newer version, or gone.

        Raises:
            StorageError: The store refused, or did not answer by the deadline.
        """

        def keys_of(entry: Entry) -> bytes | DcpRemoteError:
            try:
                manifest = read_entry(store, entry, retry_seconds=deadline.remaining_seconds())
            except (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError) as error:
                return error
            return _packed(manifest.shards.keys)

        missing = [entry for entry in entries if entry.manifest not in self._keys]
        failed: dict[Entry, DcpRemoteError] = {}
        for entry, packed in zip(missing, in_parallel(keys_of, missing), strict=True):
            if isinstance(packed, bytes):
                self._keys[entry.manifest] = packed
            else:
                failed[entry] = packed
        return failed

    def objects_of(self, entries: Iterable[Entry]) -> set[str]:
        """Their manifests, and of those that are known the shards."""
        return {key for entry in entries for key in (entry.manifest, *self._shards(entry))}

    def not_named(self, keys: Iterable[str], entries: Iterable[Entry]) -> set[str]:
        """Those keys that none of these checkpoints names; all of their manifests must be known."""
        left = set(keys)
        for entry in entries:
            assert entry.manifest in self._keys, "what is not known might be named"
            left.discard(entry.manifest)
            left.difference_update(self._shards(entry))
        return left

    def _shards(self, entry: Entry) -> list[str]:
        packed = self._keys.get(entry.manifest)
        text = self._decompressor.decompress(packed).decode("ascii") if packed is not None else ""
        return text.split("\n") if text else []


def _packed(keys: Iterable[str]) -> bytes:
    return zstandard.ZstdCompressor().compress("\n".join(keys).encode("ascii"))


def in_parallel(call: Callable[[_S], _T], values: Sequence[_S]) -> list[_T]:
    """Call it for each, four at a time, and return what it gives in their order; the first that raises ends it."""
    if len(values) <= 1:
        return [call(value) for value in values]
    with ThreadPoolExecutor(_READS_IN_FLIGHT, thread_name_prefix="dcp_remote-manifests") as pool:
        try:
            futures = [pool.submit(call, value) for value in values]
        except RuntimeError:  # the interpreter is about to exit, and starts no thread any more
            return [call(value) for value in values]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)
