"""Other checkpoints at a URL without one of ours: what messages call them, and what looking costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_remote.errors import CheckpointNotFoundError
from dcp_remote.run.foreign_checkpoints import describe_foreign, describe_keys
from dcp_remote.run.lookup import read_manifest
from dcp_remote.storage import LocalStore, MemoryStore, ObjectStore
from dcp_remote.storage.base import ObjectInfo
from dcp_remote.testing import Fault, FaultyStore, RecordingStore
from tests.support.faults import denied, verb_is
from tests.support.runs import save

URL = "s3://bucket/run"


SHARD = "shards/00/rank-00000-0123456789abcdef-0000.safetensors"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([".metadata", "__0_0.distcp", "__1_0.distcp"], "torch's own writer lies there (.metadata, __0_0"),
        (["epoch-1/.metadata"], "torch's own writer lies there (epoch-1/.metadata)"),
        (["__0_0.distcp"], "FsspecReader for a URL"),
        (["global_step5/mp_rank_00_model_states.pt", "latest"], "Files of torch.save lie there (global_step5/mp"),
        (["config.json", "model.safetensors", "tokenizer.json"], "or Hugging Face lie there (model.safetensors)"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "from_pretrained"),
        (["checkpoint-500/adapter_model.safetensors"], "or Hugging Face lie there (checkpoint-500/adapter_model"),
        (["weights.safetensors"], "files of safetensors or Hugging Face lie there (weights.safetensors)"),
        (["epoch=3-step=500.ckpt"], "Files of torch.save lie there (epoch=3-step=500.ckpt)"),
        (["step-100/state.bin"], "Other objects lie there (step-100/state.bin)"),
        (["a/catalog.json", "a/manifests/x"], "A run of dcp_remote lies below this URL (a/catalog.json): pass s3://"),
        (["b/manifest.json", f"b/{SHARD}"], "by itself lies below this URL (b/manifest.json): pass s3://bucket/run/b"),
        (["web/manifest.json"], "Other objects lie there (web/manifest.json)"),
        (["catalog.json", "manifests/x", SHARD], "A run of dcp_remote lies there (catalog.json): try again"),
        ([SHARD], "of a save that was interrupted lie there"),
        (["a", "b", "c", "d"], "Other objects lie there (a, b, c, …)"),
        (["a\x1b[2J\nfake.pt"], r"(a\x1b[2J\nfake.pt)"),
    ],
)
def test_kinds(keys: list[str], says: str) -> None:
    """Recognize each kind by its keys, wherever they lie below the URL."""
    assert says in (describe_keys(sorted(keys), URL) or "")


def test_nothing_to_say() -> None:
    """Say nothing of no keys, nor of a checkpoint by itself, which its caller found."""
    assert describe_keys([], URL) is None
    assert describe_keys(["manifest.json", SHARD], URL) is None


def test_ours_one_level_down() -> None:
    """Look one level above a real run: it is named, and its shards are not taken for those of another tool."""
    store = MemoryStore("above-a-run")
    for step in (1, 2):
        save(store.child("a/b"), step)
    assert describe_foreign(store) == (
        "A run of dcp_remote lies below this URL (a/b/catalog.json): pass memory://above-a-run/a/b."
    )


def test_nothing_lies_there() -> None:
    """Look at a URL where nothing lies: one request, and nothing to say."""
    store = RecordingStore(MemoryStore().child("run"))
    assert describe_foreign(store) is None
    assert store.calls == [("list", "")]


class _Endless(MemoryStore):
    """Store that lists objects without end, and counts them."""

    listed = 0

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        while True:
            self.listed += 1
            yield ObjectInfo(f"{self.listed:09d}", 1, self.put("x", [b""]), 0.0)


def test_a_look_is_one_page() -> None:
    """Look at a bucket without end: a thousand keys are enough."""
    store = _Endless()
    assert "Other objects lie there (000000001," in (describe_foreign(store) or "")
    assert store.listed == 1_000


def test_what_may_not_be_listed_is_not_mentioned() -> None:
    """Deny the listing, or fail it for good: nothing is said, and nothing raised."""
    refused = Fault(verb_is("list"), "request", persistent=True, error=denied)
    assert describe_foreign(FaultyStore(MemoryStore(), [refused])) is None
    failing = Fault(verb_is("list"), "request", persistent=True)
    assert describe_foreign(FaultyStore(MemoryStore(), [failing]), retry_seconds=0.01) is None


@pytest.mark.parametrize("step", [None, 5])
def test_readers_name_what_lies_there(tmp_path: Path, step: int | None) -> None:
    """Read a folder of torch's own writer: not found, and the error says whose it is; for a run's step, too."""
    (tmp_path / ".metadata").write_bytes(b"x")
    store: ObjectStore = RecordingStore(LocalStore(tmp_path))
    with pytest.raises(CheckpointNotFoundError, match="A checkpoint of torch's own writer lies there"):
        read_manifest(store, step=step)
    with pytest.raises(CheckpointNotFoundError, match="Check the URL"):
        read_manifest(LocalStore(tmp_path / "none"), step=step)


def test_a_checkpoint_by_itself_has_no_steps() -> None:
    """Ask for a step of a checkpoint by itself: the advice is to leave the step out, and no other kind is named."""
    store = MemoryStore()
    store.put("manifest.json", [b"x"])
    store.put(SHARD, [b"x"])
    with pytest.raises(CheckpointNotFoundError, match=r"leave out the step. Check the URL"):
        read_manifest(store, step=1)
