"""Checkpoints of torch, Hugging Face and `torch.save` into a run, and out of one."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_remote import latest, load
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidArgumentError,
    UnsafeObjectError,
)
from dcp_remote.transfer import export_checkpoint, import_checkpoint, importing
from tests.support.rank_pool import RankPool

QUIET: dict[str, Any] = {"progress": False}


def weights() -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes, an empty one and a scalar, in an order of their own."""
    torch.manual_seed(0)
    return {
        "layers.0.weight": torch.randn(70, 33),
        "head.bias": torch.arange(7),
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.randn(5, 3).bfloat16(),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether names and all bits are equal."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def save_hugging_face(folder: Path, parts: int) -> None:
    folder.mkdir()
    names = list(weights())
    files = {f"model-{part + 1:05}-of-{parts:05}.safetensors": names[part::parts] for part in range(parts)}
    for file, own in files.items():
        save_file({name: weights()[name] for name in own}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in files.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "small"}')


def in_order(path: Path) -> list[str]:
    """Return the names of the tensors in a file, in the order of their bytes."""
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return sorted(places, key=lambda name: places[name])


@pytest.mark.parametrize("parts", [1, 3])
def test_hugging_face_comes_and_goes(tmp_path: Path, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits, and the small files; a tensor is cut into pieces."""
    monkeypatch.setattr(importing, "PIECE_BYTES_MAX", 1000)
    save_hugging_face(tmp_path / "hf", parts)
    assert import_checkpoint(tmp_path / "hf", tmp_path / "run", step=7, name="base", **QUIET).step == 7
    info = latest(tmp_path / "run")
    assert info is not None
    assert (info.step, info.names) == (7, ("base",))
    loaded = load(tmp_path / "run")
    assert equal(loaded["model"], weights())
    assert loaded["files"]["config.json"] == b'{"model_type": "small"}'
    export_checkpoint(tmp_path / "run", tmp_path / "out", file_bytes_max=100)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    # The order is that of the files, and of the bytes in each.
    theirs = [name for path in sorted((tmp_path / "hf").glob("*.safetensors")) for name in in_order(path)]
    assert [name for file in files for name in in_order(tmp_path / "out" / file)] == theirs
    back = {name: value for file in files for name, value in load_file(tmp_path / "out" / file).items()}
    assert equal(back, weights())
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "small"}'


def test_dtypes_are_converted_where_that_is_asked(tmp_path: Path) -> None:
    save_hugging_face(tmp_path / "hf", 1)
    import_checkpoint(tmp_path / "hf", tmp_path / "run", step=1, **QUIET)
    export_checkpoint(tmp_path / "run", tmp_path / "out", dtype=torch.bfloat16)
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: value.dtype for name, value in back.items()} == {
        name: torch.bfloat16 if value.is_floating_point() else value.dtype for name, value in weights().items()
    }


def save_by_torch(folder: Path) -> None:
    """Save a state of sharded and whole tensors and objects, with torch's own writer."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "model": {"w": distribute_tensor(torch.arange(70.0).view(7, 10), mesh, [Shard(0)]), "b": torch.ones(3)},
        "optim": {"state": {"w": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
        "epoch": 3,
    }
    dcp.save(state, storage_writer=FileSystemWriter(folder))


def test_a_checkpoint_of_torch_comes_and_goes(tmp_path: Path, rank_pool: RankPool) -> None:
    """Written by four ranks, of which one has nothing of a tensor; read back by torch's own reader."""
    rank_pool.run(save_by_torch, tmp_path / "torch")
    import_checkpoint(tmp_path / "torch", tmp_path / "run", step=5, **QUIET)
    loaded = load(tmp_path / "run")
    assert torch.equal(loaded["model"]["w"], torch.arange(70.0).view(7, 10))
    assert loaded["optim"]["param_groups"] == [{"lr": 0.1, "params": ["w"]}]
    assert loaded["epoch"] == 3
    export_checkpoint(tmp_path / "run", tmp_path / "out", kind="torch")
    state: dict[str, Any] = {
        "model": {"w": torch.zeros(7, 10), "b": torch.zeros(3)},
        "optim": {"state": {"w": {"step": torch.tensor(0.0)}}, "param_groups": [{"lr": 0.0, "params": []}]},
        "epoch": 0,
    }
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "out"), no_dist=True)
    assert torch.equal(state["model"]["w"], loaded["model"]["w"])
    assert torch.equal(state["optim"]["state"]["w"]["step"], torch.tensor(3.0))
    assert state["optim"]["param_groups"] == [{"lr": 0.1, "params": ["w"]}]
    assert state["epoch"] == 3


def test_a_file_of_torch_save(tmp_path: Path) -> None:
    """A state dict is the model; a dict with one keeps its keys."""
    torch.save(weights(), tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "a", step=1, **QUIET)
    assert equal(load(tmp_path / "a")["model"], weights())
    torch.save({"model_state_dict": weights(), "epoch": 4}, tmp_path / "b.pt")
    import_checkpoint(tmp_path / "b.pt", tmp_path / "b", step=1, **QUIET)
    loaded = load(tmp_path / "b")
    assert equal(loaded["model_state_dict"], weights())
    assert loaded["epoch"] == 4


class Own:
    """Object that only code can load."""


def test_what_needs_code_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1), "own": Own()}, tmp_path / "a.pt")
    with pytest.raises(UnsafeObjectError, match=r"needs code.*Own"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "a", step=1, **QUIET)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".metadata").write_bytes(pickle.dumps(Own()))
    with pytest.raises(UnsafeObjectError, match="none of torch's checkpoints"):
        import_checkpoint(tmp_path / "b", tmp_path / "run", step=1, **QUIET)


def test_wrong_calls(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "notes.txt").write_text("x")
    with pytest.raises(CheckpointNotFoundError, match=r"found='notes\.txt'"):
        import_checkpoint(tmp_path / "some", tmp_path / "run", step=1, **QUIET)
    save_hugging_face(tmp_path / "hf", 1)
    import_checkpoint(tmp_path / "hf", tmp_path / "run", step=1, **QUIET)
    with pytest.raises(InvalidArgumentError, match="not empty"):
        export_checkpoint(tmp_path / "run", tmp_path / "some")
    with pytest.raises(InvalidArgumentError, match="has='model'"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", key="ema")
    (tmp_path / "hf" / "model-00001-of-00001.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CorruptCheckpointError, match="header does not fit"):
        import_checkpoint(tmp_path / "hf", tmp_path / "other", step=1, **QUIET)
