"""Tests of `dcp-remote import` and `dcp-remote export` through their command line."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from safetensors.torch import load_file

from dcp_remote import latest
from dcp_remote.cli import main
from dcp_remote.testing.servers import S3Server


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Save two tensors by torch."""
    torch.save({"w": torch.arange(8.0), "b": torch.ones(3)}, tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def test_imports_and_exports(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As text: one line each."""
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["import", str(weights), str(run), "--step", "7", "--name", "base"]) == 0
    info = latest(run)
    assert info is not None
    assert capsys.readouterr().out == f"imported {weights} to {run}: step 7, {info.size_bytes} B, verified\n"
    assert (info.step, info.names) == (7, ("base",))
    assert main(["export", str(run), str(out), "--step", "base", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.startswith(f"exported {run} to {out}: 1 file, ")
    assert torch.equal(load_file(out / "model.safetensors")["w"], torch.arange(8).bfloat16())
    assert main(["export", str(run), f"{out}-2", "--dtype", "bf16"]) == 0
    assert load_file(f"{out}-2/model.safetensors")["w"].dtype == torch.bfloat16


def test_prints_json(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert main(["import", str(weights), run, "--step", "7", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.pop("seconds") > 0
    assert len(document.pop("save_id")) == 32
    info = latest(run)
    assert info is not None
    assert document == {"source": str(weights), "url": run, "step": 7, "name": None, "bytes": info.size_bytes}
    assert main(["export", run, out, "--kind", "torch", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["files"] == ["__0_0.distcp", ".metadata"]
    assert document["bytes"] == sum(path.stat().st_size for path in Path(out).iterdir())
    assert main(["export", run, f"{out}-2", "--file-bytes-max", "32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_starts_over(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Import to a step below the newest: the other checkpoints are left behind."""
    run = str(tmp_path / "run")
    assert main(["import", str(weights), run, "--step", "7"]) == 0
    assert main(["import", str(weights), run, "--step", "3", "--start-over"]) == 0
    capsys.readouterr()
    assert main(["ls", run, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(entry["step"], entry["abandoned"]) for entry in listed] == [(3, False), (7, True)]


def test_renames(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """New names, and no name, which leaves a tensor out; each mistake names the option."""
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert main(["import", str(weights), run, "--step", "7"]) == 0
    assert main(["export", run, out, "--rename", "w=layer.weight", "--rename", "b="]) == 0
    assert list(load_file(f"{out}/model.safetensors")) == ["layer.weight"]
    capsys.readouterr()
    for options, says in (
        (["--rename=w=", "--rename=b="], "rename leaves out all tensors. Leave out some alone."),
        (["--rename=w=b"], "one name. Leave the other out. Options: --rename ("),
        (["--rename=v=x"], "rename takes names of the checkpoint"),
        (["--rename==x"], "rename takes names of the checkpoint"),
        (["--rename=w=__metadata__"], "Rename it, or leave it out. Options: --rename ("),
        (["--rename=w=x", "--kind=torch"], "rename and key are for safetensors"),
    ):
        assert main(["export", run, f"{out}-2", *options]) == 2
        assert says in capsys.readouterr().err
    for options, says in (
        (["--rename=w"], "error: argument --rename: must have the form OLD=NEW; one has no equals sign\n"),
        (["--option=secret:hunter2"], "argument --option: must have the form NAME=VALUE; one has no equals sign\n"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["export", run, f"{out}-2", *options])
        assert says in capsys.readouterr().err
    assert not Path(f"{out}-2").exists()


def test_a_bucket(weights: Path, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options are those of both ends, unless the source has its own."""
    for name, value in (("AWS_ACCESS_KEY_ID", "testing"), ("AWS_SECRET_ACCESS_KEY", "testing")):
        monkeypatch.setenv(name, value)
    bucket = f"cli-{uuid.uuid4().hex[:12]}"
    s3_server.create_bucket(bucket)
    options = ["--endpoint-url", s3_server.endpoint_url, "--region", "us-east-1"]
    assert main(["import", str(weights), f"s3://{bucket}/run", "--step", "1", *options]) == 0
    assert main(["export", f"s3://{bucket}/run", str(tmp_path / "out"), "--kind", "torch", *options]) == 0
    from dcp_remote.storage import open_store

    store = open_store(f"s3://{bucket}/copy", s3_server.storage_options)
    for path in (tmp_path / "out").iterdir():
        store.put(path.name, [path.read_bytes()])
    source = [f"s3://{bucket}/copy", f"s3://{bucket}/run2", "--step", "1"]
    assert main(["import", *source, *options]) == 0
    assert main(["import", *source[:1], str(tmp_path / "run"), "--step", "1", "--source-option", "endpoint_url="]) != 0
    given = [f"--source-option={name}={value}" for name, value in s3_server.storage_options.items()]
    assert main(["import", *source[:1], str(tmp_path / "run"), "--step", "1", *given]) == 0


def test_errors(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on standard error; 1 for a failure, 2 for a wrong call."""
    run = str(tmp_path / "run")
    calls = [
        (["import", str(tmp_path / "nowhere"), run, "--step", "1"], 1, "no such folder"),
        (["import", str(weights), "s3:/bucket/run", "--step", "1"], 2, "s3://bucket/run"),
        (["import", str(weights), run, "--step", "-1"], 2, "step"),
        (["import", str(weights), run, "--step", "1"], 0, ""),
        (
            ["import", str(weights), run, "--step", "1"],
            1,
            "--overwrite (replace the checkpoint of this step).",
        ),
        (["import", str(weights), run, "--step", "0"], 2, "Import to a step above 1, or into another run."),
        (["export", run, "s3://bucket/out"], 2, "local folder"),
        (["export", run, str(tmp_path)], 2, "not empty"),
        (["export", run, str(tmp_path / "out"), "--key", "modle"], 2, "has='model'"),
        (
            ["export", run, str(tmp_path / "out"), "--dtype", "int8"],
            2,
            "dcp-remote: --dtype must be a floating-point dtype of torch, such as bfloat16. dtype='int8'",
        ),
        (["export", run, str(tmp_path / "out"), "--step", "9"], 1, "9"),
    ]
    for arguments, code, text in calls:
        assert main(arguments) == code, arguments
        errors = capsys.readouterr().err
        assert errors.startswith("dcp-remote: ") is (code > 0)
        assert text in errors
        assert errors.count("\n") == (code > 0)
    for wrong in (
        ["import", str(weights), run],
        ["import", str(weights), run, "--step", "1", "--source-option", "x"],
        ["export", run, "out", "--kind", "onnx"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)


def test_options_of_a_bucket_are_the_sources_alone(
    weights: Path, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import from a bucket into a local run: `--endpoint-url` is that of the source."""
    for name, value in (("AWS_ACCESS_KEY_ID", "testing"), ("AWS_SECRET_ACCESS_KEY", "testing")):
        monkeypatch.setenv(name, value)
    bucket = f"cli-{uuid.uuid4().hex[:12]}"
    s3_server.create_bucket(bucket)
    server = ["--endpoint-url", s3_server.endpoint_url, "--region", "us-east-1"]
    assert main(["import", str(weights), f"s3://{bucket}/run", "--step", "1", *server]) == 0
    assert main(["export", f"s3://{bucket}/run", str(tmp_path / "out"), *server]) == 0
    settings: Any = s3_server.storage_options
    path = tmp_path / "out" / "model.safetensors"
    boto3.client("s3", **settings).upload_file(str(path), bucket, "weights/model.safetensors")
    assert main(["import", f"s3://{bucket}/weights", str(tmp_path / "local"), "--step", "1", *server]) == 0
