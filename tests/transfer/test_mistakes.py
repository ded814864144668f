"""Mistakes of users, and damage of the files of others: each a clear error, and nothing is committed or left behind."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import Metadata

from dcp_remote import CheckpointManager, errors, export_checkpoint, import_checkpoint, latest, load, open_run
from dcp_remote.storage import LocalStore
from dcp_remote.testing.servers import S3Server
from dcp_remote.transfer import importing
from dcp_remote.transfer.checkpoint import SavedCheckpoint
from tests.support.foreign_checkpoints import INDEX, QUIET, by_torch, damage, hugging_face, refused, write_index

SHARD = "model-00001-of-00002.safetensors"


def two_files(folder: Path) -> Path:
    """Make two files of weights with an index: `a` and `b` in the first."""
    return hugging_face(folder, {"a": torch.arange(8.0), "c": torch.zeros(4), "b": torch.ones(3, 2)})


def change_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a file, and keep its bytes."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_nothing_is_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(errors.CheckpointNotFoundError, "no such folder", tmp_path / "nowhere", tmp_path)
    refused(errors.CheckpointNotFoundError, "found='nothing'", tmp_path / "empty", tmp_path)
    (tmp_path / "empty" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    refused(errors.CheckpointNotFoundError, "Files of torch.save lie there", tmp_path / "empty", tmp_path)


OFFSETS = {
    "overlap": lambda header: header["b"].update(data_offsets=[0, 24]),
    "gap": lambda header: header["b"].update(data_offsets=[40, 64]),
    "out of range": lambda header: header["b"].update(data_offsets=[10**9, 10**9 + 24]),
    "negative": lambda header: header["a"].update(data_offsets=[-8, 24]),
    "other size": lambda header: header["a"].update(shape=[9]),
    "negative shape": lambda header: header["a"].update(shape=[-8]),
    "no list": lambda header: header["a"].update(shape="8"),
    "no dict": lambda header: header.update(a=3),
    "one number": lambda header: header["a"].update(data_offsets=[0]),
}


@pytest.mark.parametrize("mistake", list(OFFSETS))
def test_headers_of_safetensors(tmp_path: Path, mistake: str) -> None:
    folder = two_files(tmp_path / "hf")
    change_header(folder / SHARD, OFFSETS[mistake])
    refused(errors.CorruptCheckpointError, f"damaged.*{SHARD}", folder, tmp_path)


def test_an_unknown_dtype_of_safetensors(tmp_path: Path) -> None:
    folder = two_files(tmp_path / "hf")
    change_header(folder / SHARD, lambda header: header["a"].update(dtype="F7"))
    refused(errors.InvalidArgumentError, "dtype='F7'", folder, tmp_path)


@pytest.mark.parametrize("size", [0, 5, 8, 60, -1])
def test_truncated_safetensors(tmp_path: Path, size: int) -> None:
    """Empty, in the length, in the header, and in the data."""
    folder = two_files(tmp_path / "hf")
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:size])
    refused(errors.CorruptCheckpointError, f"(damaged|too short).*{SHARD}", folder, tmp_path)


@pytest.mark.parametrize(
    ("file", "match"),
    [
        ("missing.safetensors", "is missing.*missing.safetensors"),
        ("../other.safetensors", "none of a file in this folder"),
        ("/etc/passwd", "none of a file in this folder"),
        (3, "is missing.*'3'"),
        (None, "is missing.*'None'"),
    ],
)
def test_an_index_that_names_other_files(tmp_path: Path, file: object, match: str) -> None:
    folder = two_files(tmp_path / "hf")
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    write_index(folder, {"a": SHARD, "c": file})
    refused(errors.CorruptCheckpointError, match, folder, tmp_path)


def test_a_damaged_index(tmp_path: Path) -> None:
    folder = two_files(tmp_path / "hf")
    write_index(folder, {"a": SHARD, "other": SHARD})
    refused(errors.CorruptCheckpointError, "No file has a tensor of the index.*other", folder, tmp_path)
    write_index(folder, {})
    refused(errors.CorruptCheckpointError, "no weight_map", folder, tmp_path)
    (folder / INDEX).write_text("{")
    refused(errors.CorruptCheckpointError, "its JSON is damaged", folder, tmp_path)
    (folder / INDEX).write_text("[" * 100_000)
    refused(errors.CorruptCheckpointError, "its JSON is damaged", folder, tmp_path)


def test_parts_without_an_index(tmp_path: Path) -> None:
    folder = two_files(tmp_path / "hf")
    (folder / INDEX).unlink()
    refused(errors.CorruptCheckpointError, f"no index.*{SHARD}", folder, tmp_path)


def test_two_files_with_one_name(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, folder / "adapter.safetensors")
    save_file({"a": torch.ones(1)}, folder / "other.safetensors")
    refused(errors.CorruptCheckpointError, "Two files have a tensor", folder, tmp_path)
    import_checkpoint(folder / "adapter.safetensors", tmp_path / "run", step=1, **QUIET)


def test_files_of_torch_that_are_lost_or_cut_off(tmp_path: Path) -> None:
    folder = by_torch(tmp_path / "torch")
    (data,) = folder.glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[:-10])
    refused(errors.CorruptCheckpointError, f"too short.*{data.name}", folder, tmp_path)
    data.write_bytes(b"\0" * len(content))
    refused(errors.CorruptCheckpointError, "stream of torch.save is damaged", folder, tmp_path)
    data.unlink()
    refused(errors.CorruptCheckpointError, f"is missing.*{data.name}", folder, tmp_path)


def test_metadata_of_torch_that_are_no_metadata(tmp_path: Path) -> None:
    folder = by_torch(tmp_path / "torch")
    content = (folder / ".metadata").read_bytes()
    metadata: Metadata = pickle.loads(content)
    nothing: Any = None
    outside = {key: type(info)("../x.distcp", info.offset, info.length) for key, info in metadata.storage_data.items()}
    for changed, match in (
        (content[:-20], "metadata are damaged"),
        (pickle.dumps({"a": 1}), "type='dict'"),
        (pickle.dumps(replace(metadata, storage_data=outside)), "none of a file in this folder"),
        (pickle.dumps(replace(metadata, storage_data={}, state_dict_metadata=nothing)), "metadata are damaged"),
        (pickle.dumps(replace(metadata, storage_data={})), "no place"),
    ):
        (folder / ".metadata").write_bytes(changed)
        refused(errors.CorruptCheckpointError, match, folder, tmp_path)


def test_metadata_of_torch_that_call_functions(tmp_path: Path) -> None:
    """`os.system` is also a name in a module of torch's checkpoints, which pickle would look up part by part."""
    folder = by_torch(tmp_path / "torch")
    module, name = "torch.distributed.checkpoint.filesystem", "os.system"
    command = f"touch {tmp_path / 'ran'}"
    program = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    program += b"\x93" + b"X" + len(command).to_bytes(4, "little") + command.encode() + b"\x85R."
    (folder / ".metadata").write_bytes(program)
    refused(errors.UnsafeObjectError, r"os\.system", folder, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_stream_extensions_of_torch(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "torch", _extensions=[ZStandard()])
    dcp.save({"w": torch.ones(100)}, storage_writer=writer, no_dist=True)
    refused(errors.InvalidArgumentError, "stream extensions", tmp_path / "torch", tmp_path)

    def name_them(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["zstd"]

    named = by_torch(tmp_path / "named", name_them)
    refused(errors.InvalidArgumentError, "stream extensions.*zstd", named, tmp_path)


def test_files_that_are_none_of_torch_save(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"no zip")
    refused(errors.InvalidArgumentError, "none of torch.save", path, tmp_path)
    path.write_bytes(b"")
    refused(errors.InvalidArgumentError, "none of torch.save", path, tmp_path)
    torch.save({"w": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    refused(errors.InvalidArgumentError, "older one", path, tmp_path)
    torch.save([torch.ones(1)], path)
    refused(errors.InvalidArgumentError, "type='list'", path, tmp_path)
    torch.save({"w": torch.eye(3).to_sparse()}, path)
    refused(errors.InvalidArgumentError, "no plain one.*'model.w'", path, tmp_path)
    torch.save({"w": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:-500])
    refused(errors.CorruptCheckpointError, "damaged", path, tmp_path)


def test_files_that_another_tool_has_packed(tmp_path: Path) -> None:
    """Info-ZIP adds 28 bytes to the header of a record; the places are those that the headers tell."""
    saved, path = tmp_path / "saved.pt", tmp_path / "a.pt"
    torch.save({"w": torch.arange(16, dtype=torch.uint8) + 1}, saved)
    with zipfile.ZipFile(saved) as archive, zipfile.ZipFile(path, "w") as repacked:
        for one in archive.infolist():
            record = zipfile.ZipInfo(one.filename)
            record.extra = b"ux" + (24).to_bytes(2, "little") + bytes(24)
            repacked.writestr(record, archive.read(one))
    import_checkpoint(path, tmp_path / "run", step=1, **QUIET)
    assert load(tmp_path / "run")["model"]["w"].tolist() == [*range(1, 17)]


def test_steps_that_exist(tmp_path: Path) -> None:
    """A step that is there stays, unless it is replaced; steps ascend."""
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    torch.save({"w": torch.zeros(1)}, tmp_path / "b.pt")
    run = tmp_path / "run"
    for step in (1, 2):
        import_checkpoint(tmp_path / "a.pt", run, step=step, **QUIET)
    with pytest.raises(errors.CheckpointExistsError, match="overwrite=True"):
        import_checkpoint(tmp_path / "b.pt", run, step=2, **QUIET)
    with pytest.raises(errors.InvalidArgumentError, match="to a step above 2, or into another run"):
        import_checkpoint(tmp_path / "b.pt", run, step=1, **QUIET)
    assert [info.step for info in open_run(run).checkpoints()] == [1, 2]
    import_checkpoint(tmp_path / "b.pt", run, step=2, overwrite=True, **QUIET)
    assert [info.step for info in open_run(run).checkpoints()] == [1, 2]
    import_checkpoint(tmp_path / "b.pt", run, step=1, start_over=True, overwrite=True, **QUIET)
    assert [info.step for info in open_run(run).checkpoints() if not info.abandoned] == [1]


def test_wrong_arguments(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    for options, match in (
        ({"memory_budget_bytes": 0}, "memory_budget_bytes"),
        ({"progress": "yes"}, "progress"),
        ({"timeout_seconds": -1}, "timeout_seconds"),
    ):
        refused(errors.InvalidArgumentError, match, tmp_path / "a.pt", tmp_path, **options)
    refused(errors.InvalidArgumentError, "s3://", "s3:/bucket/x", tmp_path)
    import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1, **QUIET)
    out, file = tmp_path / "out", tmp_path / "a.pt"
    calls: list[tuple[Any, dict[str, Any], str]] = [
        ("s3://bucket/out", {}, "local folder"),
        ("memory://bucket/out", {}, "local folder"),
        ("s3:/bucket/out", {}, "s3://bucket/out"),
        (tmp_path, {}, r"not empty.*'a\.pt"),
        (file, {}, "that of a file"),
        (out, {"key": "modle"}, "no tensors below this key.*has='model'"),
        (out, {"kind": "onnx"}, "kind"),
        (out, {"dtype": torch.int32}, "dtype"),
        (out, {"dtype": "float7"}, "dtype"),
        *((out, {"file_bytes_max": size}, "file_bytes_max") for size in (0, "5GB", True, 1.5)),
        (out, {"rename": {"v": "x"}}, "rename"),
        (out, {"rename": {"w": "x"}, "kind": "torch"}, "rename"),
        (out, {"memory_budget_bytes": -1}, "memory_budget_bytes"),
    ]
    for folder, options, match in calls:
        with pytest.raises(errors.InvalidArgumentError, match=match):
            export_checkpoint(tmp_path / "run", folder, **QUIET, **options)
    with pytest.raises(errors.CheckpointNotFoundError):
        export_checkpoint(tmp_path / "run", out, step=7, **QUIET)
    with pytest.raises(errors.CheckpointNotFoundError):
        export_checkpoint(tmp_path / "nowhere", out, **QUIET)
    assert not out.exists()
    assert not list(Path.cwd().glob("s3:*"))


def test_what_safetensors_cannot_hold(tmp_path: Path) -> None:
    """Sparse tensors are refused; objects below the key are left out with a warning."""
    with CheckpointManager(tmp_path / "run", progress=False) as run:
        run.save(1, {"model": {"s": torch.eye(3).to_sparse(), "w": torch.ones(2), "extra": "text"}})
    with pytest.raises(errors.InvalidArgumentError, match=r"cannot hold a tensor.*model\.s"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", **QUIET)
    export_checkpoint(tmp_path / "run", tmp_path / "out", rename={"s": None}, **QUIET)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], torch.ones(2))
    with pytest.raises(errors.InvalidArgumentError, match=r"cannot save a tensor.*model\.s"):
        export_checkpoint(tmp_path / "run", tmp_path / "torch", kind="torch", **QUIET)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, kind: Any) -> None:
    """Folders that the export made are removed; one that was there stays."""
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1, **QUIET)
    (shard,) = (tmp_path / "run").rglob("*.safetensors")
    shard.chmod(0o644)
    damage(shard, b"\0\0\x80\x3f" * 100)
    with pytest.raises(errors.CorruptCheckpointError, match="do not match their digest"):
        export_checkpoint(tmp_path / "run", tmp_path / "out" / "weights", kind=kind, **QUIET)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(errors.CorruptCheckpointError, match="do not match their digest"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", kind=kind, **QUIET)
    assert not list((tmp_path / "out").iterdir())


def test_an_import_that_differs_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run keeps what it had, and no name moves."""
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1, name="good", **QUIET)
    read = SavedCheckpoint.read

    def other(self: SavedCheckpoint, parts: Any) -> list[torch.Tensor]:
        tensors = read(self, parts)
        tensors[-1].view(torch.uint8)[5] ^= 1
        return tensors

    monkeypatch.setattr(SavedCheckpoint, "read", other)
    with pytest.raises(errors.CorruptCheckpointError, match="differs from what was read"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=2, name="good", **QUIET)
    assert [(info.step, info.names) for info in open_run(tmp_path / "run").checkpoints()] == [(1, ("good",))]


def test_a_source_that_fails_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is committed, and no shard is left."""
    folder = two_files(tmp_path / "hf")
    original = importing._SourcePlanner.resolve_data

    def fail(self: Any, item: Any) -> Any:
        if item.index.fqn == "model.c":
            (folder / "model-00002-of-00002.safetensors").unlink(missing_ok=True)
            self._reads._kept.clear()
        return original(self, item)

    monkeypatch.setattr(importing._SourcePlanner, "resolve_data", fail)
    refused(errors.DcpRemoteError, "model-00002", folder, tmp_path)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_server_that_is_down(tmp_path: Path, s3_server: S3Server) -> None:
    """Both ends; the port belongs to nobody."""
    options = {**s3_server.storage_options, "endpoint_url": "http://127.0.0.1:9"}
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    soon: dict[str, Any] = {"timeout_seconds": 1, **QUIET}
    with pytest.raises(errors.StorageError):
        export_checkpoint("s3://b/run", tmp_path / "out", storage_options=options, **soon)
    with pytest.raises(errors.StorageError):
        import_checkpoint("s3://b/source", tmp_path / "run", step=1, source_options=options, **soon)
    with pytest.raises(errors.StorageError):
        import_checkpoint("s3://b/model.pt", tmp_path / "run", step=1, source_options=options, **soon)
    with pytest.raises(errors.StorageError):
        import_checkpoint(tmp_path / "a.pt", "s3://b/run", step=1, storage_options=options, **soon)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "run").exists()


# Ends as `kill -9` would, at the n-th call of a function in an export.
KILLED = """
import os, sys
from dataclasses import replace
from pathlib import Path
from dcp_remote import export_checkpoint
from dcp_remote.transfer.checkpoint import SavedCheckpoint
from tests.support.foreign_checkpoints import INDEX, QUIET, by_torch, damage, hugging_face, refused, write_index

run, folder, kind, owner, name, number = sys.argv[1:]
owner = {"Path": Path, "SavedCheckpoint": SavedCheckpoint}[owner]
original, left = getattr(owner, name), int(number)

def counted(*arguments):
    global left
    left -= 1
    if left == 0:
        os._exit(9)
    return original(*arguments)

setattr(owner, name, counted)
export_checkpoint(run, folder, kind=kind, file_bytes_max=4000, memory_budget_bytes=32_000, progress=False)
"""


@pytest.mark.parametrize(
    ("kind", "owner", "name", "number"),
    [
        ("safetensors", "SavedCheckpoint", "read", 2),
        ("torch", "Path", "rename", 3),  # torch itself renames .metadata once
    ],
)
def test_a_killed_export_is_not_taken_for_whole(tmp_path: Path, kind: str, owner: str, name: str, number: int) -> None:
    """Killed while tensors are written, and while files are moved to their places."""
    torch.save({"a": torch.ones(1000), "b": torch.ones(4000), "c": torch.ones(1000)}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1, **QUIET)
    out = tmp_path / "out"
    arguments = [str(one) for one in (tmp_path / "run", out, kind, owner, name, number)]
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, *arguments], check=False, timeout=120)
    assert ended.returncode == 9
    assert [path for path in out.iterdir() if path.name.startswith(".export-")]
    assert not list(out.glob("*.index.json")) + list(out.glob(".metadata")) + list(out.glob("model.safetensors"))
    refused(errors.DcpRemoteError, "no index|Nothing that can be imported", out, tmp_path / "other")
    with pytest.raises(errors.InvalidArgumentError, match=r"not empty.*\.export-"):
        export_checkpoint(tmp_path / "run", out, **QUIET)


def test_a_store_is_a_source(tmp_path: Path) -> None:
    folder = two_files(tmp_path / "hf")
    import_checkpoint(LocalStore(folder), LocalStore(tmp_path / "run"), step=1, **QUIET)
    assert latest(tmp_path / "run") is not None
