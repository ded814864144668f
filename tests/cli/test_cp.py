"""Tests of `dcp-remote cp` through its command line."""

from __future__ import annotations

import io
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_remote import CheckpointManager, RemoteWriter, load
from dcp_remote.testing.servers import S3Server
from tests.support.command_line import CommandLine
from tests.support.schemas import require_schema
from tests.support.simulated_ranks import save_as_ranks


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save steps 10 and 20, which share a shard."""
    with CheckpointManager(tmp_path / "run", progress=False) as manager:
        for step in (10, 20):
            model = {"frozen": torch.arange(300_000), "w": torch.full((3,), float(step))}
            manager.save(step, {"model": model, "optim": {"lr": 0.5}}, wait=True)
    return tmp_path / "run"


def copy(cli: CommandLine, *arguments: object) -> Any:
    """Copy, and return the document."""
    document = cli.run("cp", *arguments, "--json").document
    require_schema("cp", document)
    return document


def test_says_what_was_copied(cli: CommandLine, run: Path, tmp_path: Path) -> None:
    """Copy a run twice, and again after another save: bytes, and what was left out; nothing on standard error."""
    shown = cli.run("cp", run, tmp_path / "copy")
    assert shown.err == ""
    first, shared = shown.lines
    assert first.startswith(f"copied file://{run} to file://{tmp_path}/copy: 2 checkpoints, 2.")
    assert first.endswith(" in 2 shards, verified")
    assert shared == "not sent again: 2.3 MiB, of shards that several share or that were there"
    assert cli.run("cp", run, tmp_path / "copy").lines[1:] == [
        "left out, since the destination has them: steps 10, 20",
    ]
    assert cli.run("diff", run, tmp_path / "copy").lines
    cli.run("rm", tmp_path / "copy", "--step", 10, "--yes")
    assert [entry["step"] for entry in copy(cli, run, tmp_path / "copy")["copied"]] == [10]
    assert bool((load(tmp_path / "copy", step=10)["model"]["w"] == 10).all())


def test_prints_json(cli: CommandLine, run: Path, tmp_path: Path) -> None:
    """Copy one step, those since another, all: each document follows the schema."""
    document = copy(cli, run, tmp_path / "copy", "--step", 10)
    assert [entry["step"] for entry in document["copied"]] == [10]
    assert document["bytes_there"] == 0
    document = copy(cli, run, tmp_path / "copy", "--since", 20)
    assert ([entry["step"] for entry in document["copied"]], document["present"]) == ([20], [])
    assert document["bytes_there"] > document["bytes"]
    assert copy(cli, run, tmp_path / "copy")["present"] == [10, 20]


def test_what_is_refused(cli: CommandLine, run: Path, tmp_path: Path) -> None:
    """Copy nothing, a checkpoint by itself, a run to itself, a wrong step, a damaged shard: each error says why."""
    cli.fail("cp", tmp_path / "nothing", tmp_path / "copy", says="no committed checkpoint here")
    save_as_ranks([{"w": torch.ones(3)}], lambda: RemoteWriter(tmp_path / "alone"))
    cli.fail("cp", tmp_path / "alone", tmp_path / "copy", code=2, says="checkpoint by itself")
    cli.fail("cp", run, tmp_path / "alone", says="by itself")
    cli.fail("cp", run, run, code=2, says="the source itself")
    cli.fail("cp", run, run / "copies" / "1", code=2, says="lies below the other")
    cli.fail("cp", run, run.parent, code=2, says="lies below the other")
    cli.fail("cp", run, tmp_path / "copy", "--step", 11, says="no live checkpoint of this step")
    cli.fail("cp", run, tmp_path / "copy", "--step", 10, "--since", 10, code=2, says="--since")
    assert not (tmp_path / "copy").exists()
    shard = max(run.glob("shards/*/*"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    cli.fail("cp", run, tmp_path / "copy", "--step", 10, says="dcp-remote verify")
    assert not list(tmp_path.glob("copy/manifests/*"))
    shown = cli.run("cp", run, tmp_path / "copy", code=1)
    assert shown.lines[-1].startswith("NOT copied, since objects of them are damaged (the warnings say which): step")


def test_progress_on_a_terminal(cli: CommandLine, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw a line on a terminal, which is removed at the end."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    cli.run("cp", run, tmp_path / "copy")
    assert "checkpoint 1 of 2: " in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_bucket(
    cli: CommandLine, run: Path, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copy a folder to a bucket, to another prefix, and back: equal to the first."""
    for name, value in (("AWS_ACCESS_KEY_ID", "testing"), ("AWS_SECRET_ACCESS_KEY", "testing")):
        monkeypatch.setenv(name, value)
    bucket = f"cp-{uuid.uuid4().hex[:12]}"
    s3_server.create_bucket(bucket)
    options = ["--endpoint-url", s3_server.endpoint_url, "--region", "us-east-1"]
    cli.run("cp", run, f"s3://{bucket}/a", *options)
    cli.run("cp", f"s3://{bucket}/a", f"s3://{bucket}/b", *options)
    cli.run("cp", f"s3://{bucket}/b", tmp_path / "back", *options)
    assert cli.run("diff", run, tmp_path / "back", "--step", 10).out
    cli.run("diff", f"s3://{bucket}/a", f"s3://{bucket}/b", *options)
    first = [f"--source-option={name}={value}" for name, value in s3_server.storage_options.items()]
    cli.run("diff", f"s3://{bucket}/a", run, *first)
