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
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_remote import CheckpointManager, Opaque, PerRank, ProgressReport, RandomStates, RemoteWriter, latest, load
from dcp_remote.errors import (
    InvalidArgumentError,
    UnsafeObjectError,
)
from dcp_remote.transfer import export_checkpoint, import_checkpoint, importing
from tests.support.foreign_checkpoints import QUIET, hugging_face
from tests.support.rank_pool import RankPool


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
    hugging_face(tmp_path / "hf", weights(), parts)
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
    hugging_face(tmp_path / "hf", weights(), 1)
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


class Loader:
    """Data loader whose state has a tensor, an empty dict and a list of dicts."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {"seen": torch.arange(rank + 1000), "workers": [{"at": rank}, {"at": 2}]}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def make_own(rank: int) -> dict[str, Any]:
    return {
        "w": torch.ones(3),
        "loader": PerRank(Loader(rank)),
        "random": PerRank(RandomStates()),
        "rank": PerRank(rank),
        "opaque": PerRank(Opaque({"a": [rank]})),
    }


def save_own(url: Path) -> list[float]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    with CheckpointManager(url, **QUIET) as checkpoints:
        checkpoints.save(3, make_own(rank))
    return torch.rand(3).tolist()


def restore_own(url: Path) -> list[float]:
    rank = dist.get_rank()
    state = make_own(7)
    with CheckpointManager(url, **QUIET) as checkpoints:
        assert checkpoints.restore(state) == 3
    assert state["rank"].value == rank
    assert state["opaque"].value.value == {"a": [rank]}
    assert torch.equal(state["loader"].value.state["seen"], torch.arange(rank + 1000))
    assert state["loader"].value.state["workers"] == [{"at": rank}, {"at": 2}]
    return torch.rand(3).tolist()


def test_values_of_each_rank_come_back(tmp_path: Path, rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random states, loaders and plain values of two ranks, through a folder of torch; a tensor of one is cut."""
    monkeypatch.setattr(importing, "PIECE_BYTES_MAX", 1000)
    numbers = rank_pool.run(save_own, tmp_path / "run", ranks=[0, 1])
    export_checkpoint(tmp_path / "run", tmp_path / "torch", kind="torch", **QUIET)
    with pytest.raises(UnsafeObjectError, match=r"per_rank\.0\.random"):
        import_checkpoint(tmp_path / "torch", tmp_path / "again", step=3, **QUIET)
    import_checkpoint(tmp_path / "torch", tmp_path / "again", step=3, allow_pickle=True, **QUIET)
    assert rank_pool.run(restore_own, tmp_path / "again", ranks=[0, 1]) == numbers


def test_another_key_per_rank_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "per_rank": {"first": 1}}, tmp_path / "a.pt")
    with pytest.raises(InvalidArgumentError, match="key per_rank of the source is reserved"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1, **QUIET)


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


def test_checkpoints_of_dcp_remote_are_refused(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf", weights(), 1)
    import_checkpoint(tmp_path / "hf", tmp_path / "run", step=1, **QUIET)
    dcp.save(weights(), storage_writer=RemoteWriter(tmp_path / "single"), no_dist=True)
    for own in ("run", "single"):
        with pytest.raises(InvalidArgumentError, match="a checkpoint of dcp_remote"):
            import_checkpoint(tmp_path / own, tmp_path / "other", step=1, **QUIET)


def test_a_cache_of_links(tmp_path: Path) -> None:
    """The cache of the Hugging Face hub has links to files with other names."""
    hugging_face(tmp_path / "blobs", weights())
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    import_checkpoint(tmp_path / "snapshot", tmp_path / "run", step=1, **QUIET)
    assert equal(load(tmp_path / "run")["model"], weights())


@pytest.mark.parametrize("piece_bytes", [1000, 10**6])
def test_tensors_that_are_not_contiguous(tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed ones, views of one storage, parameters, and tensors in a tuple, which torch takes for one object."""
    monkeypatch.setattr(importing, "PIECE_BYTES_MAX", piece_bytes)
    torch.manual_seed(0)
    base = torch.randn(40, 50)
    model = {
        "t": base.t(),
        "view": base[10:20],
        "columns": base[:, 3:7],
        "step": base.view(-1)[3::7],
        "wide": base[:1, :1].expand(4, 3),
        "empty": base[40:],
        "nothing": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "parameter": torch.nn.Parameter(torch.randn(30, 30)),
        "again": base,
    }
    dcp.save({"model": model}, checkpoint_id=tmp_path / "torch", no_dist=True)
    torch.save({"model": model, "pair": (torch.ones(3), {"x": torch.zeros(2)}), "list": [base, 1]}, tmp_path / "a.pt")
    for number, source in enumerate(("torch", "a.pt")):
        import_checkpoint(tmp_path / source, tmp_path / f"run-{number}", step=1, **QUIET)
        loaded = load(tmp_path / f"run-{number}")
        assert equal(loaded["model"], {name: value.detach() for name, value in model.items()})
    assert torch.equal(loaded["pair"][0], torch.ones(3))
    assert torch.equal(loaded["pair"][1]["x"], torch.zeros(2))
    assert torch.equal(loaded["list"][0], base)
    assert loaded["list"][1] == 1


def test_names(tmp_path: Path) -> None:
    """Another key, all tensors, and new names."""
    torch.save({"model": weights(), "ema": {"w": torch.ones(2)}, "epoch": 4}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1, **QUIET)

    def exported(name: str, **options: Any) -> dict[str, torch.Tensor]:
        (path,) = export_checkpoint(tmp_path / "run", tmp_path / name, **QUIET, **options)
        return load_file(path)

    assert list(exported("ema", key="ema")) == ["w"]
    assert set(exported("all", key="")) == {"ema.w", *(f"model.{name}" for name in weights())}
    renamed = exported("renamed", rename={"layers": "blocks", "scale": None})
    assert set(renamed) == {name.replace("layers", "blocks") for name in weights()} - {"scale"}
    assert torch.equal(renamed["blocks.0.weight"], weights()["layers.0.weight"])


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A function hears of each operation, up to the end; nothing is written where there is no terminal."""
    torch.save(weights(), tmp_path / "a.pt")
    reports: list[ProgressReport] = []
    import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1, progress=reports.append)
    export_checkpoint(tmp_path / "run", tmp_path / "out", progress=reports.append)
    export_checkpoint(tmp_path / "run", tmp_path / "torch", kind="torch", progress=reports.append)
    last = {report.what: report for report in reports}
    assert list(last) == ["save", "verify", "export"]
    size_bytes = sum(value.nbytes for value in weights().values())
    assert (last["verify"].step, last["verify"].total_bytes) == (1, size_bytes)
    assert (last["export"].step, last["export"].total_bytes) == (1, 2 * size_bytes)  # written and read back
    assert all(report.done_bytes == report.total_bytes for report in last.values())
    export_checkpoint(tmp_path / "run", tmp_path / "third")
    assert capsys.readouterr() == ("", "")


def test_a_checkpoint_by_itself(tmp_path: Path) -> None:
    """One that `dcp.save` wrote by RemoteWriter, outside a run."""
    dcp.save({"model": weights()}, storage_writer=RemoteWriter(tmp_path / "single"), no_dist=True)
    (path,) = export_checkpoint(tmp_path / "single", tmp_path / "out", **QUIET)
    assert equal(load_file(path), weights())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_a_quantized_tensor_of_torch(tmp_path: Path) -> None:
    """Read whole, like an object; torch's own writer takes these."""
    value = torch.quantize_per_tensor(torch.arange(6.0), 0.5, 1, torch.qint8)
    dcp.save({"q": value, "w": torch.ones(2)}, checkpoint_id=tmp_path / "torch", no_dist=True)
    import_checkpoint(tmp_path / "torch", tmp_path / "run", step=1, **QUIET)
    assert torch.equal(load(tmp_path / "run")["q"], value)
