"""Names that an export cannot write, small files that stand in its way, and disks that change or refuse bytes."""

from __future__ import annotations

import json
import logging
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from dcp_remote import Files, errors, export_checkpoint, import_checkpoint, load
from dcp_remote.transfer import safetensors_export
from tests.support.foreign_checkpoints import QUIET, damage, save_run


def test_names_that_safetensors_cannot_hold(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", {"model": {"__metadata__": torch.ones(2), "a": torch.ones(2)}})
    out = tmp_path / "out"
    for rename in (None, {"__metadata__": "\ud800"}, {"__metadata__": None, "a": "__metadata__"}):
        with pytest.raises(errors.InvalidArgumentError, match="of this name"):
            export_checkpoint(run, out, rename=rename, **QUIET)
        assert not out.exists()
    with pytest.raises(errors.InvalidArgumentError, match="leaves out all"):
        export_checkpoint(run, out, rename=lambda _: None, **QUIET)
    export_checkpoint(run, out, rename={"__metadata__": "../metadata"}, **QUIET)
    assert set(load_file(out / "model.safetensors")) == {"../metadata", "a"}


@pytest.mark.parametrize("dtype", ["Tensor", "finfo", "int8", ""])
def test_dtypes_that_are_none(tmp_path: Path, dtype: str) -> None:
    run = save_run(tmp_path / "run", {"model": {"a": torch.ones(2)}})
    kinds: tuple[Any, ...] = ("safetensors", "torch")
    for kind in kinds:
        with pytest.raises(errors.InvalidArgumentError, match="dtype must be"):
            export_checkpoint(run, tmp_path / "out", kind=kind, dtype=dtype, **QUIET)


def test_small_files_named_as_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Left out with a warning: the folder is opened again, and has the tensors of the checkpoint."""
    stale = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    left = {
        "model.safetensors": b"x",
        "model-00002-of-00002.safetensors/x": b"x",
        "Model-00001-of-00002.safetensors": b"x",
        "model.safetensors.index.json": json.dumps(stale).encode(),
        ".metadata": b"x",
    }
    kept = {"config.json": b"{}", "original/model.safetensors": b"x", "adapter_model.safetensors": b"x"}
    run = save_run(
        tmp_path / "run", {"model": {"a": torch.arange(8.0), "b": torch.ones(9)}, "files": Files(left | kept)}
    )
    for number, size in enumerate((1000, 10)):
        with caplog.at_level(logging.WARNING):
            written = export_checkpoint(run, tmp_path / f"out-{number}", file_bytes_max=size, **QUIET)
        names = {str(path.relative_to(tmp_path / f"out-{number}")) for path in written}
        assert names >= set(kept)
        assert not names & {".metadata", "Model-00001-of-00002.safetensors"}
        assert all(name in caplog.text for name in left)
        import_checkpoint(tmp_path / f"out-{number}", tmp_path / f"again-{number}", step=1, **QUIET)
        assert torch.equal(load(tmp_path / f"again-{number}")["model"]["a"], torch.arange(8.0))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_disk_that_changes_a_small_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back as the weights are."""
    files = Files({"config.json": b'{"x": 1}'})
    run = save_run(tmp_path / "run", {"model": {"a": torch.ones(9), "b": torch.ones(9)}, "files": files})
    write = Path.write_bytes

    def write_wrong(self: Path, data: bytes) -> int:
        return write(self, data.replace(b"total_size", b"total_syze") if ".export-" in str(self) else data)

    def write_files_wrong(self: Files, folder: Path) -> None:
        for file in self.names:
            write(folder / file, self[file].replace(b"1", b"3"))

    if name == "config.json":
        monkeypatch.setattr(Files, "write", write_files_wrong)
    else:
        monkeypatch.setattr(Path, "write_bytes", write_wrong)
    with pytest.raises(errors.CorruptCheckpointError, match=f"read back differ.*{name}"):
        export_checkpoint(run, tmp_path / "out", file_bytes_max=10, **QUIET)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "mark", "what"),
    [
        ("torch", b"text to be found", "entry='note'"),
        ("torch", b"\0\0\x80\x3f" * 100, "entry='model.a'"),
        ("safetensors", b"\0\0\x80\x3f" * 100, "a"),
    ],
)
def test_a_disk_that_changes_a_value(
    tmp_path: Path, kind: Any, mark: bytes, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are changed between writing and reading back; of an object, the stream is another one, and loads."""
    run = save_run(tmp_path / "run", {"model": {"a": torch.ones(1000)}, "note": "a text to be found"})
    save, verify = dcp.save, safetensors_export._verify

    def save_damaged(*args: Any, **options: Any) -> None:
        save(*args, **options)
        (path,) = Path(options["storage_writer"].path).glob("*.distcp")
        damage(path, mark, 3)

    def verify_damaged(path: Path, *rest: Any) -> None:
        damage(path, mark, 3)
        verify(path, *rest)

    monkeypatch.setattr(dcp, "save", save_damaged)
    monkeypatch.setattr(safetensors_export, "_verify", verify_damaged)
    with pytest.raises(errors.CorruptCheckpointError, match=f"read back differ.*{what}"):
        export_checkpoint(run, tmp_path / "out", kind=kind, **QUIET)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let this process write no file of more than 300 kB, as a full disk would not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_disk_that_is_full(tmp_path: Path, kind: Any, request: pytest.FixtureRequest) -> None:
    """The system's error, and nothing is left."""
    run = save_run(tmp_path / "run", {"model": {"a": torch.ones(500_000)}})
    request.getfixturevalue("small_files")
    with pytest.raises(OSError, match="File too large"):
        export_checkpoint(run, tmp_path / "out", kind=kind, **QUIET)
    assert not (tmp_path / "out").exists()
