"""Sizes and number of the shards of a save: objects and requests of a store are counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed.checkpoint as dcp

from dcp_remote import RemoteWriter
from dcp_remote.common.units import MiB
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore


def save(state: dict[str, Any], **options: Any) -> list[int]:
    """Save, and return the sizes of the shards."""
    store = RecordingStore(MemoryStore())
    dcp.save(state, storage_writer=RemoteWriter(store, **options))
    return [request.size_bytes for request in store.requests if request.key.startswith("shards/")]


def test_stored_objects_count_in_the_size_of_shards() -> None:
    """Save an array of 168 MiB, which is an object: shards of a fourteenth, and not of 8 MiB."""
    sizes = save({"array": np.zeros(168 * MiB, dtype=np.uint8)})
    assert len(sizes) <= 15
    assert max(sizes) > 11 * MiB
