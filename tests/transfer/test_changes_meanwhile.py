"""Imports while another job saves, the source changes, or the store loses bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from dcp_remote import CheckpointManager, Run, errors, import_checkpoint, latest, load, open_run
from dcp_remote.common.arrays import Buffer
from dcp_remote.storage import open_store
from dcp_remote.storage.base import Condition, Version
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing import FaultyStore, nth
from dcp_remote.transfer.safetensors_source import SafetensorsSource
from tests.support.foreign_checkpoints import QUIET


def steps(run: Path) -> list[tuple[int, bool]]:
    return [(info.step, info.abandoned) for info in open_run(run).checkpoints()]


@pytest.mark.parametrize("step", [7, 10])
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_job_that_commits_meanwhile(
    tmp_path: Path, step: int, has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint stays live at every step that is imported; an import afterwards goes on from it."""
    run = tmp_path / "run"
    save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    with CheckpointManager(run, progress=False) as job:
        if has_begun:
            job.save(5, {"w": torch.ones(3)}, wait=True)

        def look(*args: Any, **options: Any) -> Any:
            found = latest(*args, **options)
            if found is None or found.step == 5:
                job.save(10, {"w": torch.full((3,), 2.0)}, wait=True)
            return found

        monkeypatch.setattr("dcp_remote.transfer.importing.latest", look)
        with pytest.raises(errors.CommitConflictError, match="Another job saved to the run while the import began"):
            import_checkpoint(tmp_path / "a.safetensors", run, step=step, **QUIET)
    assert steps(run) == [(5, False)] * has_begun + [(10, False)]
    assert torch.equal(load(run)["w"], torch.full((3,), 2.0))
    import_checkpoint(tmp_path / "a.safetensors", run, step=12, **QUIET)
    assert steps(run) == [(5, False)] * has_begun + [(10, False), (12, False)]


class LosingStore(WrappedStore):
    """Store that changes a bit of the first shard that has some bytes."""

    mark = b""

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        data = bytearray(b"".join(bytes(buffer) for buffer in buffers))
        if key.startswith("shards") and self.mark in data:
            data[data.index(self.mark)] ^= 1
        return super().put(key, [bytes(data)], condition=condition)


def weights_and_files(folder: Path, mark: bytes) -> Path:
    folder.mkdir()
    save_file({"a": torch.randn(1000)}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_bytes(mark * 1000)
    return folder


def file_with_an_object(folder: Path, mark: bytes) -> Path:
    folder.mkdir()
    torch.save({"w": torch.ones(3), "o": mark * 1000}, folder / "a.pt")
    return folder / "a.pt"


def quantized_by_torch(folder: Path, mark: bytes) -> Path:
    values = torch.frombuffer(bytearray(mark * 50), dtype=torch.uint8)
    quantized = torch._make_per_tensor_quantized_tensor(values, 0.5, 0)
    dcp.save({"w": torch.ones(3), "q": quantized}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # by torch itself
@pytest.mark.parametrize("make", [weights_and_files, file_with_an_object, quantized_by_torch])
def test_a_store_that_loses_bits_of_objects(tmp_path: Path, make: Callable[[Path, bytes], Path]) -> None:
    """Files, objects and quantized tensors are verified as well as tensors; an import without the loss passes."""
    mark = bytes(range(100, 140))
    source = make(tmp_path / "source", mark)
    store = LosingStore(open_store(tmp_path / "run"))
    store.mark = mark
    with pytest.raises(errors.CorruptCheckpointError, match="was deleted; import once more"):
        import_checkpoint(source, store, step=1, name="good", **QUIET)
    assert steps(tmp_path / "run") == []
    import_checkpoint(source, tmp_path / "run", step=1, name="good", **QUIET)
    assert steps(tmp_path / "run") == [(1, False)]


def test_damage_that_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is that of the damage, and says that the checkpoint is still there."""

    def refuse(*_: object, **__: object) -> None:
        raise errors.StorageError("The store refuses.")

    monkeypatch.setattr(Run, "delete", refuse)
    mark = bytes(range(100, 140))
    store = LosingStore(open_store(tmp_path / "run"))
    store.mark = mark
    with pytest.raises(errors.CorruptCheckpointError, match=r"could not be deleted \(The store refuses\.\)"):
        import_checkpoint(weights_and_files(tmp_path / "source", mark), store, step=1, **QUIET)
    assert steps(tmp_path / "run") == [(1, False)]


@pytest.mark.parametrize("is_inside_a_read", [True, False])
def test_a_source_that_is_replaced(tmp_path: Path, is_inside_a_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By files of the same sizes: neither a mixture of both nor the new one is saved."""
    source = tmp_path / "source"
    source.mkdir()
    old = {f"t{n}": torch.full((1 << 19,), 1.0) for n in range(4)}
    save_file(old, source / "model.safetensors")
    save_file({name: value * 2 for name, value in old.items()}, tmp_path / "new.safetensors")
    read, calls = SafetensorsSource.read, 0

    def replace(self: SafetensorsSource, parts: Any) -> list[torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls == (2 if is_inside_a_read else 1):
            os.replace(tmp_path / "new.safetensors", source / "model.safetensors")
        return read(self, parts)

    monkeypatch.setattr(SafetensorsSource, "read", replace)
    with pytest.raises(errors.CorruptCheckpointError, match="replaced while it was read"):
        import_checkpoint(source, tmp_path / "run", step=1, **QUIET)
    assert steps(tmp_path / "run") == []


def test_each_request_that_is_refused(tmp_path: Path) -> None:
    """The nth request is refused, then the next: the step is not there, or the error says what was not done with it."""
    save_file({"a": torch.arange(3.0)}, tmp_path / "a.safetensors")
    outcomes: list[str] = []
    for number in range(1, 60):
        run = tmp_path / f"run-{number}"
        fault = nth(number, "request", error=lambda: errors.StorageError("The store refuses."))
        store = FaultyStore(open_store(run), [fault])
        try:
            import_checkpoint(tmp_path / "a.safetensors", store, step=1, name="base", **QUIET)
        except errors.DcpRemoteError as error:
            outcomes.append("")
            if "saved, but could not be" in error.what:
                outcomes[-1] = "verified" if "could not be verified" in error.what else "named"
        else:
            if not store.hits:
                break
            outcomes.append("done")
        info = latest(run)
        assert (info is not None) == bool(outcomes[-1]), number
        if info is not None:
            assert torch.equal(load(run)["model"]["a"], torch.arange(3.0))
            assert (info.names == ("base",)) == (outcomes[-1] == "done")
    assert not store.hits
    assert {"", "verified", "named"} <= set(outcomes)
