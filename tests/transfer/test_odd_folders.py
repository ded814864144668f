"""Folders and files as tools and people leave them: names, markers, indexes, hidden files, parts of tensors."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_remote import CheckpointManager, export_checkpoint, import_checkpoint, load
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, UnsafeObjectError
from dcp_remote.run.gc import find_orphans
from dcp_remote.storage import open_store
from dcp_remote.testing import RecordingStore
from dcp_remote.testing.servers import S3Server
from dcp_remote.transfer import exporting
from dcp_remote.transfer.ranges import RangeReader
from dcp_remote.transfer.safetensors_source import SafetensorsSource
from dcp_remote.transfer.torch_file_source import TorchFileSource
from tests.support.foreign_checkpoints import QUIET, imported
from tests.support.rank_pool import RankPool

WEIGHT = torch.arange(6.0)


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    name = f"odd-{uuid.uuid4().hex[:12]}"
    s3_server.create_bucket(name)
    return name


def client_of(server: S3Server) -> Any:
    settings: Any = server.storage_options
    return boto3.client("s3", **settings)


def upload(server: S3Server, bucket: str, folder: Path, prefix: str) -> None:
    for path in folder.iterdir():
        client_of(server).upload_file(str(path), bucket, f"{prefix}{path.name}")


def test_names_tell_neither_files_nor_folders(s3_server: S3Server, bucket: str, tmp_path: Path) -> None:
    """Lightning's folder `step=10.ckpt`, and files of torch.save with any name; as paths, `file://` and `s3://`."""
    folder = tmp_path / "step=10.ckpt"
    dcp.save({"model": {"w": WEIGHT}}, checkpoint_id=folder, no_dist=True)
    upload(s3_server, bucket, folder, "runs/step=10.ckpt/")
    files = tmp_path / "files"
    files.mkdir()
    names = ("last.pt", "last.pth.tar", "weights", "last.PT")
    for name in names:
        torch.save({"w": WEIGHT}, files / name)
    upload(s3_server, bucket, files, "")
    options = {"source_options": s3_server.storage_options}
    sources: list[tuple[object, dict[str, Any]]] = [(folder, {}), (f"file://{folder}", {}), (f"{folder}/", {})]
    sources += [(f"s3://{bucket}/runs/step=10.ckpt{end}", options) for end in ("", "/")]
    sources += [(files / name, {}) for name in names] + [(f"s3://{bucket}/{name}", options) for name in names]
    for source, given in sources:
        assert torch.equal(imported(source, tmp_path, **given)["model"]["w"], WEIGHT), source


def test_markers_of_folders(s3_server: S3Server, bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Consoles create an object `name/` for a folder: of the source, in it, and of a run whose orphans are listed."""
    dcp.save({"model": {"w": WEIGHT}}, checkpoint_id=tmp_path / "torch", no_dist=True)
    upload(s3_server, bucket, tmp_path / "torch", "zoo/")
    save_file({"w": WEIGHT}, tmp_path / "model.safetensors")
    client = client_of(s3_server)
    client.upload_file(str(tmp_path / "model.safetensors"), bucket, "hf/model.safetensors")
    for key in ("zoo/", "hf/", "hf/sub/", "xrun/"):
        client.put_object(Bucket=bucket, Key=key, Body=b"")
    options: Any = s3_server.storage_options
    for source in ("zoo", "hf"):
        state = imported(f"s3://{bucket}/{source}", tmp_path, source_options=options)
        assert torch.equal(state["model"]["w"], WEIGHT)
    assert not [record for record in caplog.records if record.name.startswith("dcp_remote.transfer")]
    run = f"s3://{bucket}/xrun"
    import_checkpoint(tmp_path / "model.safetensors", run, step=1, storage_options=options, **QUIET)
    orphans = find_orphans(open_store(run, options), grace_seconds=0)
    assert (orphans.old, orphans.young) == ((), ())


def test_several_indexes_and_hidden_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in a folder of Mistral's: the usual index counts. Files `._…` of macOS are nothing; of two others neither."""
    folder = tmp_path / "hf"
    folder.mkdir()
    for start, name in (("consolidated", "a"), ("model", "b")):
        save_file({name: WEIGHT}, folder / f"{start}-00001-of-00001.safetensors")
        index = {"weight_map": {name: f"{start}-00001-of-00001.safetensors"}}
        (folder / f"{start}.safetensors.index.json").write_text(json.dumps(index))
    (folder / "._model.safetensors.index.json").write_bytes(b"\0\5\26\7")
    assert list(imported(folder, tmp_path)["model"]) == ["b"]
    (folder / "model.safetensors.index.json").rename(folder / "model.safetensors.index.fp16.json")
    with pytest.raises(InvalidArgumentError, match="several indexes"):
        imported(folder, tmp_path)
    (folder / "consolidated.safetensors.index.json").unlink()
    assert list(imported(folder, tmp_path)["model"]) == ["b"]
    (folder / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="missing"):
        imported(folder, tmp_path)
    assert "consolidated-00001" in caplog.text


def test_small_files_that_a_checkpoint_cannot_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Left out, and named: those are no reason to refuse the weights."""
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"w": WEIGHT}, folder / "model.safetensors")
    for name in ("README.md", "readme.md", "what?.txt", "config.json", "\x1b[31m.txt"):
        (folder / name).write_text("x")
    with (folder / "large.json").open("wb") as opened:
        opened.truncate(64 * 2**20 + 1)
    assert set(imported(folder, tmp_path)["files"].names) == {"README.md", "config.json"}
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("dcp_remote.transfer")]
    assert "4 files" in warning
    assert "\x1b" not in warning


def save_shards(folder: Path) -> None:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder / "shards"), save_distributed=True))
    whole = HuggingFaceStorageWriter(str(folder / "whole"), save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=whole)


def test_parts_of_tensors_in_safetensors(tmp_path: Path, rank_pool: RankPool) -> None:
    """HuggingFaceStorageWriter of torch saves a part on each rank, under the whole tensor's name: never a tensor."""
    rank_pool.run(save_shards, tmp_path, ranks=[0, 1])
    assert torch.equal(imported(tmp_path / "whole", tmp_path)["model"]["w"], torch.arange(8.0))
    first, second = sorted((tmp_path / "shards").iterdir())
    (tmp_path / "renamed").mkdir()
    (tmp_path / "renamed" / "model.safetensors").write_bytes(second.read_bytes())
    for source in (tmp_path / "shards", first, second, tmp_path / "renamed"):
        with pytest.raises(InvalidArgumentError, match="parts of tensors"):
            imported(source, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_new_dtypes_of_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    """Bits come and go, although a shard has these dtypes as bytes."""
    value = torch.arange(1, 9, dtype=torch.uint8).view(dtype)
    save_file({"w": value}, tmp_path / "model.safetensors")
    import_checkpoint(tmp_path / "model.safetensors", tmp_path / "run", step=1, **QUIET)
    export_checkpoint(tmp_path / "run", tmp_path / "out", **QUIET)
    back = load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), value.view(torch.uint8))


def test_a_part_that_is_named(tmp_path: Path) -> None:
    """A file of weights in several parts is imported if it is named itself."""
    save_file({"w": WEIGHT}, tmp_path / "model-00001-of-00002.safetensors")
    assert list(imported(tmp_path / "model-00001-of-00002.safetensors", tmp_path)["model"]) == ["w"]
    save_file({"w": WEIGHT}, tmp_path / "model-00001-of-00002.fp16.safetensors")
    with pytest.raises(CorruptCheckpointError, match="have no index"):
        imported(tmp_path, tmp_path / "runs")


def test_small_files_above_the_limit_of_all(tmp_path: Path) -> None:
    """Five of 60 MiB: four are within 256 MiB, and the fifth is not read."""
    save_file({"w": WEIGHT}, tmp_path / "model.safetensors")
    for number in range(5):
        with (tmp_path / f"{number}.json").open("wb") as opened:
            opened.truncate(60 * 2**20)
    store = RecordingStore(open_store(tmp_path))
    reader = RangeReader(store, store.list(), retry_seconds=5)
    source = SafetensorsSource(reader, None, piece_bytes_max=2**20)
    assert source.state["files"].names == ("0.json", "1.json", "2.json", "3.json")
    assert not [request for request in store.requests if request.key == "4.json"]


def test_views_of_one_storage_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a matrix need all of its storage: never several at once, however small these tensors are."""
    base = torch.randn(1024, 512)
    columns = {f"c{number}": base[:, number] for number in range(20)}
    torch.save({"model": columns, "x": 1}, tmp_path / "a.pt")
    counts: list[int] = []
    read = TorchFileSource.read

    def counting(self: TorchFileSource, parts: Any) -> list[torch.Tensor]:
        counts.append(len(parts))
        return read(self, parts)

    monkeypatch.setattr(TorchFileSource, "read", counting)
    run = tmp_path / "run"
    import_checkpoint(tmp_path / "a.pt", run, step=1, memory_budget_bytes=8 * 2**20, **QUIET)
    assert counts == [1] * 20
    assert all(torch.equal(value, columns[name]) for name, value in load(run)["model"].items())


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_an_export_that_begins_during_another(tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both found the folder empty: the second sees the first one's files and ends; the first is whole."""
    save_file({"w": WEIGHT}, tmp_path / "model.safetensors")
    import_checkpoint(tmp_path / "model.safetensors", tmp_path / "run", step=1, **QUIET)
    ended: list[str] = []
    open_folder = exporting._open_folder

    def open_twice(folder: Any) -> Path:
        found = open_folder(folder)
        if not ended:
            ended.append("")
            export_checkpoint(tmp_path / "run", folder, kind=kind, **QUIET)
        return found

    monkeypatch.setattr(exporting, "_open_folder", open_twice)
    with pytest.raises(InvalidArgumentError, match="not empty"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", kind=kind, **QUIET)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == (
        ["model.safetensors"] if kind == "safetensors" else [".metadata", "__0_0.distcp"]
    )


def test_views_in_a_checkpoint_of_torch(tmp_path: Path) -> None:
    """Conjugated and negated tensors, whose bytes are not their values."""
    value = torch.randn(3, dtype=torch.complex64)
    dcp.save({"c": value.conj(), "n": value.conj().imag}, checkpoint_id=tmp_path / "torch", no_dist=True)
    state = imported(tmp_path / "torch", tmp_path)
    assert torch.equal(state["c"], value.conj())
    assert torch.equal(state["n"], value.conj().imag)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4:UserWarning")
def test_pickles_of_other_protocols(tmp_path: Path) -> None:
    torch.save({"w": WEIGHT}, tmp_path / "four.pt", pickle_protocol=4)
    with pytest.raises(InvalidArgumentError, match="such as one of protocol 4"):
        imported(tmp_path / "four.pt", tmp_path)


def test_the_order_of_top_level_keys_is_kept(tmp_path: Path) -> None:
    torch.save({"z": WEIGHT, "epoch": 3, "a": {"y": WEIGHT, "b": WEIGHT}}, tmp_path / "a.pt")
    state = imported(tmp_path / "a.pt", tmp_path)
    assert list(state) == ["z", "epoch", "a"]
    assert list(state["a"]) == ["y", "b"]


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ({"\ud800": WEIGHT, "b": WEIGHT}, InvalidArgumentError),
        ({"a": {frozenset({torch.Size([2])})}}, UnsafeObjectError),
    ],
)
def test_a_refused_import_leaves_the_training_alone(tmp_path: Path, state: Any, kind: type[Exception]) -> None:
    """Names and values that no save takes are refused before the import takes the run."""
    torch.save(state, tmp_path / "a.pt")
    with CheckpointManager(tmp_path / "run", **QUIET) as checkpoints:
        checkpoints.save(1, {"w": WEIGHT}, wait=True)
        with pytest.raises(kind):
            import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=2, **QUIET)
        checkpoints.save(2, {"w": WEIGHT}, wait=True)
