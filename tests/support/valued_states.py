"""States of one value: a load shows whether the state is whole, and which save it is from."""

from __future__ import annotations

from typing import Any

import torch

from dcp_remote import RemoteWriter, load
from dcp_remote.errors import CheckpointNotFoundError
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.format.shard import ShardNames
from dcp_remote.storage import MemoryStore, ObjectStore
from tests.support.manifests import decode
from tests.support.simulated_ranks import LocalShards, State, save_as_ranks, shard

ROWS = 6


def states(value: float, world_size: int) -> list[State]:
    """Return each rank's state: two top-level keys with sharded and replicated tensors and an object; two shards."""
    parts = shard(torch.full((ROWS, 3), value), world_size, (world_size, 1))
    return [{"model": {"w": part, "r": torch.full((2,), value)}, "optim": {"m": part}, "n": value} for part in parts]


def save(store: ObjectStore, value: float, world_size: int, *, timeout_seconds: float = 60.0) -> None:
    """Save the state of a value, over any checkpoint that exists."""
    save_as_ranks(
        states(value, world_size),
        lambda: RemoteWriter(store, overwrite=True, timeout_seconds=timeout_seconds),
    )


def value_of(state: State) -> float:
    """Return the one value of a rank's state, or of a whole one."""
    value = state["n"]
    assert isinstance(value, float)
    for tensor in (state["model"]["w"], state["model"]["r"], state["optim"]["m"]):
        parts: list[Any] = [chunk for _, chunk in tensor.chunks] if isinstance(tensor, LocalShards) else [tensor]
        assert all(bool((part == value).all()) for part in parts)
    return value


def found(store: ObjectStore) -> float | None:
    """Load the checkpoint whole, and return its value; None if there is none."""
    try:
        return value_of(load(store))
    except CheckpointNotFoundError:
        return None


def keys(store: MemoryStore) -> set[str]:
    """Return the keys of all objects, without wrappers of the store."""
    return set(store.space.objects)


def shards_in(store: MemoryStore) -> set[str]:
    """Return the keys of all objects but the manifest."""
    return keys(store) - {MANIFEST_KEY}


def named(store: MemoryStore) -> set[str]:
    """Return the shards that the manifest names; none without a manifest."""
    if MANIFEST_KEY not in store.space.objects:
        return set()
    return set(decode(store.space.objects[MANIFEST_KEY].data).shards.keys)


def put_orphans(store: ObjectStore, count: int = 2) -> set[str]:
    """Put and return so many shards that no manifest names, as an interrupted save leaves them."""
    orphans = {ShardNames(rank).key(0) for rank in range(count)}
    for key in orphans:
        store.put(key, [b"an orphan"])
    return orphans
