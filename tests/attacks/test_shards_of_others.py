"""Valid objects in wrong places: of other checkpoints, at other prefixes, exchanged."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import RemoteWriter, load
from dcp_remote.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.format.manifest_json import make_tombstone
from dcp_remote.storage import MemoryStore
from tests.attacks.attacker import LOADS, LOOKS, NOTES, SHAPE, Bucket, bucket, outcomes

pytestmark = pytest.mark.torture


def of_the_same_shapes(value: float) -> dict[str, bytes]:
    """Return the objects of another checkpoint that differs only in its numbers."""
    repeated = [1, 2]
    store = MemoryStore()
    state = {
        "model": {"weight": torch.full(SHAPE, value), "bias": torch.ones(5)},
        "sparse": torch.eye(3).to_sparse(),
        "step": 3,
        "notes": NOTES,
        "shared": [repeated, repeated],
    }
    dcp.save(state, storage_writer=RemoteWriter(store), no_dist=True)
    return {key: found.data for key, found in store.space.objects.items()}


def assert_corrupt(attacked: Bucket, *untouched: str) -> None:
    for name, error in outcomes(attacked, LOADS).items():
        assert error is None if name in untouched else isinstance(error, CorruptCheckpointError), (name, error)
        assert error is None or "shards/" in str(error)


def test_a_shard_of_another_checkpoint() -> None:
    """A shard of another checkpoint with equal size and layout, under a key of this one, is refused."""
    attacked = bucket()
    [model, _] = attacked.document()["shards"]["keys"]
    for value in (0.0, 1.0, float("nan")):
        other = of_the_same_shapes(value)
        [foreign] = [data for data in other.values() if len(data) == len(attacked.objects[model])]
        attacked.put(model, foreign)
        assert_corrupt(attacked)


def test_two_shards_that_changed_places() -> None:
    """Two shards of one save that were exchanged are refused."""
    attacked = bucket()
    one, other = attacked.document()["shards"]["keys"]
    objects = attacked.objects
    attacked.put(one, objects[other])
    attacked.put(other, objects[one])
    assert_corrupt(attacked)


def test_a_manifest_at_another_prefix() -> None:
    """A manifest copied to another prefix without its shards is refused: its keys lead to no other prefix."""
    attacked = bucket()
    elsewhere = attacked.store.child("elsewhere")
    elsewhere.put(MANIFEST_KEY, [attacked.objects[MANIFEST_KEY]])
    with pytest.raises(CorruptCheckpointError, match="missing"):
        load(elsewhere)
    found = load(attacked.store)
    assert found["step"] == 3


def test_a_manifest_of_another_checkpoint() -> None:
    """A manifest of another checkpoint, whose shards are elsewhere, is refused."""
    attacked = bucket()
    attacked.put(MANIFEST_KEY, of_the_same_shapes(1.0)[MANIFEST_KEY])
    assert_corrupt(attacked)


def test_a_manifest_of_an_earlier_save() -> None:
    """A manifest put back after its shards were removed is refused, and mixes no checkpoints."""
    attacked = bucket()
    earlier = attacked.objects
    newer = of_the_same_shapes(2.0)
    for key in earlier:
        del attacked.store.space.objects[key]
    attacked.store.put(MANIFEST_KEY, [earlier[MANIFEST_KEY]])
    for key, data in newer.items():
        if key != MANIFEST_KEY:
            attacked.store.put(key, [data])
    assert_corrupt(attacked)


def test_a_tombstone_over_a_checkpoint() -> None:
    """A tombstone in place of the manifest means that there is no checkpoint, whatever shards exist."""
    attacked = bucket()
    attacked.put(MANIFEST_KEY, make_tombstone("0" * 32, ()))
    for error in outcomes(attacked, LOADS | LOOKS).values():
        assert isinstance(error, CheckpointNotFoundError)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 200, -1])
def test_a_shard_that_is_shorter(cut: int) -> None:
    """A shard cut short, to nothing, in its header or by a byte, is refused."""
    attacked = bucket()
    for key in attacked.document()["shards"]["keys"]:
        attacked.put(key, attacked.objects[key][:cut])
    found = outcomes(attacked, LOADS)
    assert isinstance(found["load"], CorruptCheckpointError)
    assert isinstance(found["template"], CorruptCheckpointError)


def test_a_shard_that_is_longer() -> None:
    """Bytes behind the end that the manifest states are not read."""
    attacked = bucket()
    for key in attacked.document()["shards"]["keys"]:
        attacked.put(key, attacked.objects[key] + b"evil" * 1000)
    assert set(outcomes(attacked, LOADS).values()) == {None}


def test_a_shard_in_place_of_the_manifest() -> None:
    """A shard in place of the manifest, and the manifest in place of a shard, are refused."""
    attacked = bucket()
    key = attacked.document()["shards"]["keys"][0]
    manifest, shard = attacked.objects[MANIFEST_KEY], attacked.objects[key]
    attacked.put(key, manifest)
    assert_corrupt(attacked)
    attacked.put(MANIFEST_KEY, shard)
    for error in outcomes(attacked, LOADS | LOOKS).values():
        assert isinstance(error, CorruptCheckpointError)
