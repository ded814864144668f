"""Shard keys outside of the checkpoint: in another checkpoint, another bucket, a file of the host, another host."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import RemoteWriter, load
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format.document import seal, unseal
from tests.attacks.attacker import assert_refused, bucket
from tests.support.figures import count

pytestmark = pytest.mark.torture

KEYS = [
    "",
    ".",
    "/",
    "../shards/00/a.safetensors",
    "shards/../shards/00/a.safetensors",
    "shards/00/../00/a.safetensors",
    "shards/00/..safetensors",
    "shards/00/a..safetensors",
    "shards/00/.safetensors",
    "shards//00/a.safetensors",
    "/shards/00/a.safetensors",
    "./shards/00/a.safetensors",
    "shards/00/a.safetensors/",
    "shards/00/a.safetensors\n",
    "shards/00/a.safetensors\x00.safetensors",
    "shards/00/a\\..\\b.safetensors",
    "shards/00/%2e%2e%2fb.safetensors",
    "shards/00/a?versionId=1.safetensors",
    "shards/00/a#b.safetensors",
    "shards/0g/a.safetensors",
    "shards/00/\u0430.safetensors",
    "shards/\u0660\u0660/a.safetensors",
    "shards/00/a.safetensors\u202e",
    "Shards/00/a.safetensors",
    "shards/00/a.SAFETENSORS",
    "shards/00/" + "a" * 201 + ".safetensors",
    "shards/00/" + "a" * 1_000_000 + ".safetensors",
    "manifest.json",
    "/etc/passwd",
    "file:///etc/passwd",
    "http://169.254.169.254/latest/meta-data",
    "s3://elsewhere/shards/00/a.safetensors",
]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: f"{ascii(key)[:60]} {len(key)}")
def test_a_key_that_is_none(key: str) -> None:
    """A manifest with an invalid key is refused before any other request."""
    attacked = bucket()
    document = attacked.document()
    document["shards"]["keys"][0] = key
    attacked.commit(document)
    assert_refused(attacked, CorruptCheckpointError)


def test_one_key_twice() -> None:
    """Two shards with one key are refused."""
    attacked = bucket()
    document = attacked.document()
    document["shards"]["keys"][0] = document["shards"]["keys"][1]
    attacked.commit(document)
    assert_refused(attacked, CorruptCheckpointError)


def test_a_folder_beside_the_checkpoint_is_not_read(tmp_path: pathlib.Path) -> None:
    """A key with `..` that leads to an existing shard of another folder is refused."""
    for name in ("mine", "theirs"):
        dcp.save({"w": torch.ones(10)}, storage_writer=RemoteWriter(tmp_path / name), no_dist=True)
    manifest = tmp_path / "mine" / "manifest.json"
    [theirs] = (tmp_path / "theirs").glob("shards/*/*")
    [mine] = (tmp_path / "mine").glob("shards/*/*")
    before, after = mine.relative_to(tmp_path), theirs.relative_to(tmp_path)
    text = unseal(manifest.read_bytes())
    key = str(before).removeprefix("mine/").encode()
    assert text.count(key) == 1
    count("attacks")
    manifest.write_bytes(seal(text.replace(key, f"../{after}".encode())))
    with pytest.raises(CorruptCheckpointError, match="key"):
        load(tmp_path / "mine")
