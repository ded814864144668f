"""Tests of `dcp-remote import` and `dcp-remote export` through their command line."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dcp_remote import latest
from dcp_remote.errors import StorageError
from dcp_remote.format.keys import SHARDS_PREFIX
from dcp_remote.storage import LocalStore, open_store
from dcp_remote.testing.servers import S3Server
from tests.support.command_line import CommandLine


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Save two tensors by torch."""
    torch.save({"w": torch.arange(8.0), "b": torch.ones(3)}, tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def test_imports_and_exports(cli: CommandLine, weights: Path, tmp_path: Path) -> None:
    """As text: one line each."""
    run, out = tmp_path / "run", tmp_path / "out"
    shown = cli.run("import", weights, run, "--step", "7", "--name", "base")
    info = latest(run)
    assert info is not None
    assert shown.lines == [f"imported {weights} to {run}: step 7, {info.size_bytes} B, verified"]
    assert (info.step, info.names) == (7, ("base",))
    shown = cli.run("export", run, out, "--step", "base", "--dtype", "bfloat16")
    assert shown.out.startswith(f"exported {run} to {out}: 1 file, ")
    assert torch.equal(load_file(out / "model.safetensors")["w"], torch.arange(8).bfloat16())
    cli.run("export", run, f"{out}-2", "--dtype", "bf16")
    assert load_file(f"{out}-2/model.safetensors")["w"].dtype == torch.bfloat16


def test_prints_json(cli: CommandLine, weights: Path, tmp_path: Path) -> None:
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    document = cli.run("import", weights, run, "--step", "7", "--json").document
    assert document.pop("seconds") > 0
    assert len(document.pop("save_id")) == 32
    info = latest(run)
    assert info is not None
    assert document == {"source": str(weights), "url": run, "step": 7, "name": None, "bytes": info.size_bytes}
    document = cli.run("export", run, out, "--kind", "torch", "--json").document
    assert document["files"] == ["__0_0.distcp", ".metadata"]
    assert document["bytes"] == sum(path.stat().st_size for path in Path(out).iterdir())
    files = cli.run("export", run, f"{out}-2", "--file-bytes-max", "32", "--json").document["files"]
    assert files == [*(f"model-0000{n}-of-00002.safetensors" for n in (1, 2)), "model.safetensors.index.json"]


def test_starts_over(cli: CommandLine, weights: Path, tmp_path: Path) -> None:
    """Import to a step below the newest: the other checkpoints are left behind."""
    run = tmp_path / "run"
    cli.run("import", weights, run, "--step", "7")
    cli.run("import", weights, run, "--step", "3", "--start-over")
    listed = cli.run("ls", run, "--json").document["checkpoints"]
    assert [(entry["step"], entry["abandoned"]) for entry in listed] == [(3, False), (7, True)]


def test_renames(cli: CommandLine, weights: Path, tmp_path: Path) -> None:
    """New names, and no name, which leaves a tensor out; each mistake names the option."""
    run, out = tmp_path / "run", tmp_path / "out"
    cli.run("import", weights, run, "--step", "7")
    cli.run("export", run, out, "--rename", "w=layer.weight", "--rename", "b=")
    assert list(load_file(f"{out}/model.safetensors")) == ["layer.weight"]
    for options, says in (
        (["--rename=w=", "--rename=b="], "leaves out all tensors"),
        (["--rename=w=b"], "Options: --rename ("),
        (["--rename=v=x"], "takes names of the checkpoint"),
        (["--rename==x"], "takes names of the checkpoint"),
        (["--rename=w=__metadata__"], "Options: --rename ("),
        (["--rename=w=x", "--kind=torch"], "for safetensors"),
    ):
        cli.fail("export", run, f"{out}-2", *options, code=2, says=says)
    cli.refuse("export", run, f"{out}-2", "--rename=w", says="--rename: must have the form OLD=NEW")
    cli.refuse("export", run, f"{out}-2", "--option=secret:hunter2", says="--option: must have the form NAME=VALUE")
    assert not Path(f"{out}-2").exists()


def test_errors(cli: CommandLine, weights: Path, tmp_path: Path) -> None:
    """One line on standard error; 1 for a failure, 2 for a wrong call."""
    run, out = tmp_path / "run", tmp_path / "out"
    cli.fail("import", tmp_path / "nowhere", run, "--step", "1", says="no such folder")
    cli.fail("import", weights, "s3:/bucket/run", "--step", "1", code=2, says="s3://bucket/run")
    cli.fail("import", weights, run, "--step", "-1", code=2, says="step")
    cli.run("import", weights, run, "--step", "1")
    cli.fail("import", weights, run, "--step", "1", says="--overwrite (")
    cli.fail("import", weights, run, "--step", "0", code=2, says="step above 1")
    cli.fail("export", run, "s3://bucket/out", code=2, says="local folder")
    cli.fail("export", run, tmp_path, code=2, says="not empty")
    cli.fail("export", run, out, "--key", "modle", code=2, says="has='model'")
    cli.fail("export", run, out, "--dtype", "int8", code=2, says="dtype='int8'")
    cli.fail("export", run, out, "--step", "9", says="9")
    cli.refuse("import", weights, run)
    cli.refuse("import", weights, run, "--step", "1", "--source-option", "x")
    cli.refuse("export", run, "out", "--kind", "onnx")


def test_a_store_that_is_down(cli: CommandLine, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse the shards of an import: the exit code says that the store failed, not that something was found."""
    put = LocalStore.put

    def refuse(store: LocalStore, key: str, *arguments: Any, **options: Any) -> Any:
        if key.startswith(SHARDS_PREFIX):
            raise StorageError("The store is down.")
        return put(store, key, *arguments, **options)

    monkeypatch.setattr(LocalStore, "put", refuse)
    cli.fail("import", weights, tmp_path / "run", "--step", "7", code=3, says="could not write a shard")


def test_a_bucket(
    cli: CommandLine, weights: Path, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options are those of the ends that are buckets, unless the source has its own."""
    for name, value in (("AWS_ACCESS_KEY_ID", "testing"), ("AWS_SECRET_ACCESS_KEY", "testing")):
        monkeypatch.setenv(name, value)
    bucket = f"cli-{uuid.uuid4().hex[:12]}"
    s3_server.create_bucket(bucket)
    options = ["--endpoint-url", s3_server.endpoint_url, "--region", "us-east-1"]
    cli.run("import", weights, f"s3://{bucket}/run", "--step", "1", *options)
    cli.run("export", f"s3://{bucket}/run", tmp_path / "out", "--kind", "torch", *options)
    store = open_store(f"s3://{bucket}/copy", s3_server.storage_options)
    for path in (tmp_path / "out").iterdir():
        store.put(path.name, [path.read_bytes()])
    source = f"s3://{bucket}/copy"
    cli.run("import", source, f"s3://{bucket}/run2", "--step", "1", *options)
    cli.run("import", source, tmp_path / "local", "--step", "1", *options)
    given = [f"--source-option={name}={value}" for name, value in s3_server.storage_options.items()]
    cli.run("import", source, tmp_path / "run", "--step", "1", *given)
    own = ["--source-option", "endpoint_url="]
    assert cli.run("import", source, tmp_path / "run", "--step", "2", *own, code=2).out == ""
