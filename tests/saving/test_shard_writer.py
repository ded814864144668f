"""Sizes and number of the shards of a save: objects and requests of a store are counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import CheckpointManager, RemoteReader, RemoteWriter
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format import manifest_json
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.saving import plan_table, shard_writer
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.simulated_ranks import save_as_ranks


class FarStore(RecordingStore):
    """Store that has measured 0.1 s."""

    latency_seconds = 0.1


def save(state: dict[str, Any], **options: Any) -> list[int]:
    """Save, and return the sizes of the shards."""
    store = RecordingStore(MemoryStore())
    dcp.save(state, storage_writer=RemoteWriter(store, **options))
    return sizes_in(store)


def sizes_in(store: RecordingStore) -> list[int]:
    """Return the sizes of the shards that were put."""
    return [request.size_bytes for request in store.requests if request.key.startswith("shards/")]


def test_stored_objects_count_in_the_size_of_shards() -> None:
    """Save an array of 168 MiB, which is an object: shards of a fourteenth, and not of 8 MiB."""
    sizes = save({"array": np.zeros(168 * MiB, dtype=np.uint8)})
    assert len(sizes) <= 15
    assert max(sizes) > 11 * MiB


def test_more_and_smaller_shards_go_to_a_store_that_is_far() -> None:
    """Save 128 MiB into a run: fourteen shards; into a store that is far, of which 32 are sent at once, sixteen."""
    for store, shards in ((RecordingStore(MemoryStore()), 14), (FarStore(MemoryStore()), 16)):
        with CheckpointManager(store) as checkpoints:
            checkpoints.save(1, {"w": torch.zeros(32 * MiB)}, wait=True)
        assert len(sizes_in(store)) == shards


def test_all_ranks_use_the_latency_that_the_coordinator_measured() -> None:
    """Only rank 0 has measured the latency of the store, and rank 1 has all bytes."""
    store = MemoryStore()
    near = RecordingStore(store)
    writers = iter([RemoteWriter(FarStore(store)), RemoteWriter(near)])
    save_as_ranks([{}, {"w": torch.zeros(32 * MiB)}], lambda: next(writers))
    assert len(sizes_in(near)) == 16


def test_objects_in_the_manifest_are_few_whatever_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let five ranks save small objects of their own: those of ranks 1 to 4 share the room that rank 0 has alone."""
    monkeypatch.setattr(shard_writer, "INLINE_TOTAL_BYTES_MAX", 4_000)
    monkeypatch.setattr(shard_writer, "count_processes", lambda: 5)
    store = MemoryStore()
    states = [{f"{rank}.{number}": "x" * 98 for number in range(10)} for rank in range(5)]
    save_as_ranks(states, lambda: RemoteWriter(store))
    manifest = manifest_json.decode(store.get(MANIFEST_KEY, limit_bytes=MiB).data)
    assert manifest is not None
    inline = Counter(name[0] for name in manifest.inline)
    assert inline == {"0": 10, "1": 8, "2": 8, "3": 8, "4": 8}
    assert len(manifest.stored) == 8
    read = {name: "" for state in states for name in state}
    dcp.load(read, storage_reader=RemoteReader(store))
    assert set(read.values()) == {"x" * 98}


def test_names_for_which_a_manifest_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save tensors whose names take more than a manifest may have: refused with the limit, and no shard is put."""
    store = RecordingStore(MemoryStore())
    monkeypatch.setattr(plan_table, "DOCUMENT_BYTES_MAX", 10 * KiB)
    state = {f"layers.{number:05}.weight": torch.zeros(1) for number in range(600)}
    with CheckpointManager(store) as checkpoints:
        with pytest.raises(InvalidArgumentError, match="Join small tensors") as caught:
            checkpoints.save(1, state, wait=True)
        assert caught.value.details["limit_bytes"] == 10 * KiB
        assert sizes_in(store) == []
        checkpoints.save(2, dict(list(state.items())[:200]), wait=True)
