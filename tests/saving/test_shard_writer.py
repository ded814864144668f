"""Sizes and number of the shards of a save: objects and requests of a store are counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import CheckpointManager, RemoteWriter
from dcp_remote.common.units import MiB
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
