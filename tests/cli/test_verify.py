"""Tests of `dcp-remote verify` through its command line."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_remote import CheckpointManager, RemoteWriter
from dcp_remote.errors import StorageError
from dcp_remote.storage import open_store
from dcp_remote.testing import Fault, FaultyStore
from dcp_remote.testing.servers import S3Server
from tests.support.command_line import CommandLine, open_with
from tests.support.schemas import require_schema
from tests.support.simulated_ranks import save_as_ranks


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save steps 1 and 2, which share a frozen tensor."""
    save_run(tmp_path / "run")
    return tmp_path / "run"


def save_run(url: Path | str, **options: Any) -> None:
    with CheckpointManager(url, **options) as checkpoints:
        for step in (1, 2):
            state = {"model": {"frozen": torch.arange(50_000.0)}, "optim": {"m": torch.full((40_000,), float(step))}}
            checkpoints.save(step, state, wait=True)


def shard(run: Path, step: int, size_bytes: int) -> Path:
    """Return the shard of a step that is at least so large, and not the frozen one of another."""
    (path,) = (path for path in run.glob(f"shards/*/*-step-{step:012d}-*") if path.stat().st_size > size_bytes)
    return path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def verified(cli: CommandLine, *arguments: object, code: int = 0) -> Any:
    """Return the document, which has the form that the schema says."""
    document = cli.run("verify", *arguments, "--json", code=code).document
    require_schema("verify", document)
    return document


@pytest.mark.parametrize("depth", ["quick", "sample", "deep"])
def test_a_sound_run(cli: CommandLine, run: Path, depth: str) -> None:
    """Print that nothing was found, and at the end how much was looked at."""
    options = [] if depth == "sample" else [f"--{depth}"]
    first, verdict, total = cli.run("verify", run, *options).lines
    assert first == f"file://{run}: verified ({depth})"
    assert total.startswith("total: 2 checkpoints, 3 shards, ")
    assert total.endswith(" read, 0 objects damaged")
    assert verdict == "no damage was found" + ("" if depth == "deep" else f" ({depth}); --deep reads every byte")
    document = verified(cli, run, *options)
    assert (document["damage"], document["depth"], document["steps"]) == ([], depth, [1, 2])


def test_damage_is_printed(cli: CommandLine, run: Path) -> None:
    """Flip a bit that both checkpoints need, delete a shard, damage a manifest: each in a line, and exit code 1."""
    frozen, own = shard(run, 1, 200_000), shard(run, 2, 0)
    flip(frozen)
    own.unlink()
    shown = cli.run("verify", run, code=1).lines[1:]
    lines = {line.split()[0]: (line, entries) for line, entries in zip(shown[:-3:2], shown[1:-3:2], strict=True)}
    assert set(lines) == {str(path.relative_to(run)) for path in (frozen, own)}
    assert lines[str(frozen.relative_to(run))][1] == "    model.frozen"
    assert " (of step 1, 2): " in lines[str(frozen.relative_to(run))][0]
    assert lines[str(own.relative_to(run))][0].endswith(" (of step 2): missing")
    assert shown[-3] == "every checkpoint is damaged"
    assert shown[-1].startswith("total: 2 checkpoints, 3 shards, ")
    assert shown[-1].endswith(", 2 objects damaged")
    document = verified(cli, run, "--step", "1", code=1)
    assert [(damage["kind"], damage["steps"]) for damage in document["damage"]] == [("bytes", [1, 2])]
    assert not verified(cli, run, "--quick", "--step", "1")["damage"]
    flip(next(run.glob("manifests/step-000000000001-*")))
    kinds = [damage["kind"] for damage in verified(cli, run, "--deep", code=1)["damage"]]
    assert sorted(kinds) == ["bytes", "manifest", "missing"]


def test_a_checkpoint_by_itself(cli: CommandLine, tmp_path: Path) -> None:
    """Verify it sound and damaged."""
    save_as_ranks([{"w\x1b[2J": torch.ones(3)}], lambda: RemoteWriter(tmp_path / "ck"))
    assert cli.run("verify", tmp_path / "ck").lines[1] == "no damage was found (sample); --deep reads every byte"
    flip(next((tmp_path / "ck").glob("shards/*/*")))
    shown = cli.run("verify", tmp_path / "ck", code=1)
    assert shown.lines[2] == "    w\\x1b[2J"
    assert shown.lines[-1].endswith(", 1 object damaged")
    assert verified(cli, tmp_path / "ck", code=1)["damage"][0]["steps"] == []


def test_wrong_calls(cli: CommandLine, run: Path, tmp_path: Path) -> None:
    """Contradict, mistype, name what is not there: the messages name the options."""
    cli.fail("verify", run, "--quick", "--deep", code=2, says="--quick and --deep")
    cli.fail("verify", run, "--after", "shards", code=2, says="--after must be")
    cli.fail("verify", run, "--step", "7", says="steps='1, 2'")
    cli.fail("verify", tmp_path, says="no committed checkpoint here")
    cli.refuse("verify", run, "--dep", says="--dep")
    (run / "catalog.json").write_bytes(b"{}")
    cli.fail("verify", run, says="dcp-remote recover")


@pytest.mark.parametrize(("error", "code"), [(StorageError("Injected."), 3), (KeyboardInterrupt(), 130)])
def test_after_an_interruption_it_goes_on(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    """Fail, or press Ctrl-C, at the shard that is checked last: the place to go on from, where damage is found."""
    paths = [str(path.relative_to(run)) for path in run.glob("shards/*/*")]
    paths.sort(key=lambda key: ("-step-000000000002-" in key, key))
    flip(run / paths[0])
    flip(run / paths[-1])

    def is_last(verb: str, key: str, _number: int) -> bool:
        return verb == "head" and key == paths[-1]

    faults = [Fault(is_last, "request", persistent=True, error=lambda: error)]
    with monkeypatch.context() as patched:
        patched.setattr("dcp_remote.cli.verify.open_store", open_with(partial(FaultyStore, faults=faults)))
        patched.setattr("dcp_remote.run.verification._BATCH", 1)
        shown = cli.run("verify", run, "--deep", code=code)
    assert shown.out == ""
    found, place, *reason = shown.err.splitlines()[-2 - (code == 3) :]
    assert found.startswith(f"damaged, or deleted meanwhile: {paths[0]}: ")
    assert place == f"to go on: --after 0000000000000001:{paths[1]}"
    assert [line.startswith("dcp-remote: Injected.") for line in reason] == [True] * (code == 3)
    document = verified(cli, run, "--deep", "--after", place.split()[-1], code=1)
    assert (document["shards"], [damage["key"] for damage in document["damage"]]) == (1, [paths[-1]])


def test_progress_on_a_terminal_alone(cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a line on a terminal, which is removed; nothing in a pipe."""
    assert cli.run("verify", run).err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown = cli.run("verify", run)
    assert "1 shard, " in shown.err
    assert shown.err.endswith("\r\x1b[K")
    assert shown.lines[1] == "no damage was found (sample); --deep reads every byte"


def test_on_s3(cli: CommandLine, s3_server: S3Server) -> None:
    """Verify a run in a bucket; then cut a shard and delete another."""
    s3_server.create_bucket("verify")
    url = "s3://verify/run"
    save_run(url, storage_options=s3_server.storage_options)
    options = [f"--option={name}={value}" for name, value in s3_server.storage_options.items()]
    assert not verified(cli, url, "--deep", *options)["damage"]
    store = open_store(url, s3_server.storage_options)
    whole, cut, *_ = store.list("shards/")
    store.put(cut.key, [store.get(cut.key, limit_bytes=cut.size_bytes).data[:-9]])
    store.delete([whole.key])
    found = {damage["key"]: damage["kind"] for damage in verified(cli, url, *options, code=1)["damage"]}
    assert found == {whole.key: "missing", cut.key: "length"}
