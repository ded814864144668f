"""Keys of manifests and shards in a run: made, and parsed."""

from __future__ import annotations

import pytest

from dcp_remote.format.keys import is_written_key, manifest_key, origin, revision_of, step_of
from dcp_remote.format.manifest_validation import _SHARD_KEY
from dcp_remote.format.shard import ShardNames


@pytest.mark.parametrize("revision", [0, 7, 10**15])
@pytest.mark.parametrize("step", [0, 1_000, 10**14])
def test_round_trip(revision: int, step: int) -> None:
    """A key carries its revision and its step, is valid in a manifest, and is not taken for a key outside a run."""
    shard = ShardNames(3, origin(revision=revision, step=step)).key(12)
    manifest = manifest_key(revision=revision, step=step)
    assert revision_of(shard) == revision_of(manifest) == revision
    assert step_of(shard) == step_of(manifest) == step
    assert _SHARD_KEY.fullmatch(shard)
    assert not is_written_key(shard)
    assert manifest != manifest_key(revision=revision, step=step)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "catalog.json",
        "manifest.json",
        "manifests/notes.json",
        "manifests/step-000000000001-7-0123456789abcdef.json.bak",
        "manifests/step-1-7-0123456789abcdef.json",
        "shards/ab/rank-00000-0123456789abcdef-0000.safetensors",
        "other/shards/ab/7-step-000000000001-rank-00000-0123456789abcdef-0000.safetensors",
        "shards/ab/7-step-000000000001-rank-00000-0123456789abcdef-0000.safetensors\n",
        "shards/ab/\u0667-step-000000000001-rank-00000-0123456789abcdef-0000.safetensors",
    ],
)
def test_foreign_keys(key: str) -> None:
    """A key of another form has no revision, so gc does not delete it, and no step."""
    assert revision_of(key) is None
    assert step_of(key) is None


def test_manifests_are_listed_by_step() -> None:
    keys = [manifest_key(revision=99 - step, step=step) for step in (1, 9, 10, 100, 99_999)]
    assert keys == sorted(keys)
