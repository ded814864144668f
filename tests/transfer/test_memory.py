"""Memory of imports and exports: what is held at a time stays within the budget, also of a tensor larger than that."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from dcp_remote import export_checkpoint, import_checkpoint, load
from dcp_remote.common.geometry import Box
from dcp_remote.common.units import MiB
from dcp_remote.transfer import ranges
from dcp_remote.transfer.checkpoint import SavedCheckpoint

BUDGET_BYTES = 8 * MiB


class CountingArrays:
    """Stands for numpy in `ranges`: counts the bytes of arrays that are alive."""

    uint8 = np.uint8

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = self.held_max = self.largest = 0

    def empty(self, length: int, *, dtype: Any) -> Any:
        array = np.empty(length, dtype=dtype)
        self._change(length)
        weakref.finalize(array, self._change, -length)
        return array

    def _change(self, length: int) -> None:
        with self._lock:
            self._held += length
            self.held_max = max(self.held_max, self._held)
            self.largest = max(self.largest, length)


@pytest.fixture
def arrays(monkeypatch: pytest.MonkeyPatch) -> CountingArrays:
    """Count what is read from sources."""
    counting = CountingArrays()
    monkeypatch.setattr(ranges, "np", counting)
    return counting


def state() -> dict[str, torch.Tensor]:
    """Return 48 MiB: a tensor of 32 MiB, twice the budget and more, and two hundred of 80 KiB."""
    torch.manual_seed(0)
    return {"large": torch.randn(1024, 8192), **{f"small.{n}": torch.randn(20, 1024) for n in range(200)}}


def save_by_torch(folder: Path) -> None:
    dcp.save({"model": state()}, checkpoint_id=folder, no_dist=True)


def save_by_hugging_face(folder: Path) -> None:
    folder.mkdir()
    save_file(state(), folder / "model.safetensors", metadata={"format": "pt"})


def save_one_file(path: Path) -> None:
    torch.save(state(), path)


@pytest.mark.parametrize("make", [save_by_torch, save_by_hugging_face, save_one_file])
def test_an_import_holds_its_budget(tmp_path: Path, make: Any, arrays: CountingArrays) -> None:
    """Every read is of a piece at most, though torch has the large tensor as one chunk."""
    make(tmp_path / "source")
    import_checkpoint(tmp_path / "source", tmp_path / "run", step=1, memory_budget_bytes=BUDGET_BYTES, progress=False)
    assert arrays.largest <= BUDGET_BYTES // 8
    assert BUDGET_BYTES // 4 < arrays.held_max <= BUDGET_BYTES
    loaded = load(tmp_path / "run")["model"]
    assert all(torch.equal(loaded[name], value) for name, value in state().items())


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_an_export_holds_its_budget(tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read is of a quarter at most; requests in flight have half."""
    save_one_file(tmp_path / "source.pt")
    import_checkpoint(tmp_path / "source.pt", tmp_path / "run", step=1, progress=False)
    sizes: list[int] = []
    read = SavedCheckpoint.read

    def counted(self: SavedCheckpoint, parts: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        tensors = read(self, parts)
        sizes.append(sum(tensor.nbytes for tensor in tensors))
        return tensors

    monkeypatch.setattr(SavedCheckpoint, "read", counted)
    export_checkpoint(tmp_path / "run", tmp_path / "out", kind=kind, memory_budget_bytes=BUDGET_BYTES, progress=False)
    assert max(sizes) <= BUDGET_BYTES // 4
    assert sum(sizes) == sum(tensor.nbytes for tensor in state().values())
    # Small ones are read together.
    assert len(sizes) < 60
    if kind == "safetensors":
        back = load_file(tmp_path / "out" / "model.safetensors")
    else:
        nested: dict[str, Any] = {"model": {name: torch.zeros_like(value) for name, value in state().items()}}
        dcp.load(nested, checkpoint_id=tmp_path / "out", no_dist=True)
        back = nested["model"]
    assert list(back) == list(state()) or kind == "safetensors"
    assert all(torch.equal(back[name], value) for name, value in state().items())
