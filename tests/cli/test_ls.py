"""Tests of `dcp-remote ls` through its command line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
import torch

from dcp_remote import RemoteWriter
from dcp_remote.common.deadline import Deadline
from dcp_remote.format.catalog import CATALOG_KEY, Catalog, pin_entry
from dcp_remote.format.catalog_json import encode
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.run.catalog_store import read_catalog, swap
from dcp_remote.run.deletions import Deletions
from dcp_remote.storage import LocalStore, open_store
from dcp_remote.testing import RecordingStore
from dcp_remote.testing.servers import S3Server
from tests.support.command_line import CommandLine
from tests.support.runs import fence, save, thin
from tests.support.schemas import require_schema
from tests.support.simulated_ranks import save_as_ranks

HOSTILE = "a\x1b]0;owned\x07\x1b[2J\r\nfake  1\x9b31m\u202eb\x7f\u2028"


# Time of the saves of these tests, seconds since 1970.
CREATED_SECONDS = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save steps 100 to 300: one pinned, one thinned, one abandoned by a job that restored 200 and saved 250."""
    store = LocalStore(tmp_path / "run")
    save(store, 100)
    save(store, 200, base=100, names=("best",), metrics=(("loss", 0.25),))
    save(store, 300, base=200)
    swap(store, partial(pin_entry, step=200, pin=True), deadline=Deadline(30))
    thin(Deletions(store), [100], deadline=Deadline(30))
    fence(store)
    save(store, 250, base=200, abandons=200)
    return tmp_path / "run"


def test_lists_the_checkpoints(cli: CommandLine, run: Path) -> None:
    """List a run: aligned columns of step, time, size and notes."""
    title, header, *lines = cli.run("ls", run).lines
    assert title == f"file://{run}: 4 checkpoints; `dcp-remote du` tells what they share"
    assert header == "step  saved                       size  notes"
    assert lines == [
        " 100  2026-01-02T03:04:05+00:00  498 B  without optim",
        ' 200  2026-01-02T03:04:05+00:00  682 B  pinned; "best"; loss 0.25',
        " 250  2026-01-02T03:04:05+00:00  682 B",
        " 300  2026-01-02T03:04:05+00:00  682 B  abandoned",
    ]


def test_json_is_a_document(cli: CommandLine, run: Path) -> None:
    """List as JSON: one document with the run's token and every checkpoint."""
    document = cli.run("ls", run, "--json").document
    require_schema("ls", document)
    assert (document["url"], document["token"]) == (f"file://{run}", 2)
    first, second, *_ = document["checkpoints"]
    assert (first["step"], first["thinned"], first["bytes"]) == (100, ["optim"], 498)
    assert (second["names"], second["metrics"], second["pinned"]) == (["best"], {"loss": 0.25}, True)
    assert [entry["abandoned"] for entry in document["checkpoints"]] == [False, False, False, True]


def test_an_empty_run(cli: CommandLine, tmp_path: Path) -> None:
    """List a run that was started and has saved nothing: one line."""
    fence(LocalStore(tmp_path))
    assert cli.run("ls", tmp_path).lines == [f"file://{tmp_path}: 0 checkpoints"]


def test_one_get(cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the requests of a listing: one GET of the catalog."""
    recording = RecordingStore(LocalStore(run))
    monkeypatch.setattr("dcp_remote.cli.ls.open_store", lambda url, options: recording)
    cli.run("ls", run)
    assert recording.calls == [("get", CATALOG_KEY)]


def test_abandoned_checkpoints_alone(cli: CommandLine, run: Path) -> None:
    """List what a rollback left behind: the other checkpoints are only counted."""
    lines = cli.run("ls", run, "--abandoned").lines
    assert lines[0] == f"file://{run}: 1 abandoned of 4 checkpoints"
    assert [line.split()[0] for line in lines[1:]] == ["step", "300"]
    document = cli.run("ls", run, "--abandoned", "--json").document
    assert [entry["step"] for entry in document["checkpoints"]] == [300]


@pytest.fixture
def bucket(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lay beside the run: a checkpoint by itself, a lost run, an empty one, one with a hostile name, and one deeper."""
    monkeypatch.setattr("dcp_remote.cli.ls.time.time", lambda: CREATED_SECONDS + 3 * 86_400)
    save_as_ranks([{"w": torch.ones(3)}], lambda: RemoteWriter(tmp_path / "alone"))
    for name in ("lost", "team/deep", "a\x1b[2Jb"):
        save(LocalStore(tmp_path / name), 7)
    (tmp_path / "lost" / CATALOG_KEY).unlink()
    fence(LocalStore(tmp_path / "new"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").touch()
    return tmp_path


def test_lists_the_runs_of_a_bucket(cli: CommandLine, bucket: Path) -> None:
    """List a folder of runs: a line for each, and exit code 1 because one has lost its catalog."""
    title, header, *lines = cli.run("ls", bucket, code=1).lines
    assert title == f"file://{bucket}: 4 runs, 1 checkpoint outside of runs"
    assert header.split() == ["run", "newest", "age", "checkpoints", "newest's", "size", "notes"]
    alone = lines.pop(1)
    assert alone.startswith("alone ")
    assert alone.endswith(" B  checkpoint outside of a run")
    assert [" ".join(line.split()) for line in lines] == [
        r"a\x1b[2Jb no URL can have this name",
        "lost catalog.json is lost: `dcp-remote recover` rebuilds it",
        "new 0",
        "run 250 3 d 4 682 B",
    ]
    lines = cli.run("ls", "-r", bucket, code=1).lines
    assert [line.split()[0] for line in lines[2:]] == [r"a\x1b[2Jb", "alone", "lost", "new", "run", "team/deep"]


def test_json_of_a_bucket(cli: CommandLine, bucket: Path) -> None:
    """List a folder of runs as JSON: what is not known is null."""
    document = cli.run("ls", bucket, "--recursive", "--json", code=1).document
    require_schema("ls", document)
    runs = {row["path"]: row for row in document["runs"]}
    assert runs["team/deep"] == {
        "path": "team/deep",
        "url": f"file://{bucket}/team/deep",
        "kind": "run",
        "step": 7,
        "created": "2026-01-02T03:04:05+00:00",
        "checkpoints": 1,
        "bytes": 682,
        "problem": None,
    }
    assert {path: row["kind"] for path, row in runs.items() if row["kind"] != "run"} == {
        "alone": "checkpoint",
        "lost": "lost_run",
    }
    (bucket / "run" / CATALOG_KEY).write_bytes(b"{}")
    rows = cli.run("ls", bucket, "--json", code=1).document["runs"]
    assert "cannot be read" in next(row["problem"] for row in rows if row["path"] == "run")


def test_runs_of_a_bucket_of_s3(cli: CommandLine, s3_server: S3Server) -> None:
    """List the bucket, a mistyped run, and a prefix below which nothing lies."""
    s3_server.create_bucket("list-runs")
    options = [f"--option={name}={value}" for name, value in s3_server.storage_options.items() if name[:3] == "aws"]
    options += ["--endpoint-url", s3_server.endpoint_url, "--region", "us-east-1"]
    for name in ("runs/llama-7b", "runs/llama-13b", "other/x"):
        save(open_store(f"s3://list-runs/{name}", s3_server.storage_options), 3)
    lines = cli.run("ls", "s3://list-runs/runs", *options).lines
    assert [line.split()[:2] for line in lines[2:]] == [["llama-13b", "3"], ["llama-7b", "3"]]
    cli.fail("ls", "s3://list-runs", *options, says="`dcp-remote ls -r` looks deeper")
    assert len(cli.run("ls", "-r", "s3://list-runs", *options).lines) == 2 + 3
    cli.fail("ls", "s3://list-runs/runs/lama-7b", *options, says="near='llama-7b, llama-13b'")


@pytest.mark.parametrize("command", [["ls"], ["rm", "--step", "100"], ["pin", "100"]], ids=lambda command: command[0])
def test_wrong_urls_are_explained(cli: CommandLine, command: list[str], run: Path, tmp_path: Path) -> None:
    """Name a folder of runs, a single checkpoint, a run with a damaged or lost catalog: each error says what to do."""
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / MANIFEST_KEY).write_bytes(b"{}")
    name, *more = command
    if name != "ls":
        cli.fail(name, tmp_path, *more, says="no run (no catalog.json)")
    cli.fail(name, tmp_path / "alone", *more, code=2, says="dcp-remote show")
    for prepare in (lambda: (run / CATALOG_KEY).write_bytes(b"{}"), (run / CATALOG_KEY).unlink):
        prepare()
        cli.fail(name, run, *more, says="dcp-remote recover")


def test_names_do_not_control_the_terminal(cli: CommandLine, tmp_path: Path) -> None:
    """Put ANSI and C1 sequences, line breaks and direction marks into a catalog: printed in escaped form."""
    store = LocalStore(tmp_path)
    save(store, 1)
    found = read_catalog(store)
    assert found is not None
    texts = {"names": (HOSTILE,), "metrics": ((HOSTILE, 1.0),), "created": HOSTILE, "thinned": (HOSTILE * 9,)}
    hostile = replace(found.entries[0], **texts)  # type: ignore[arg-type]  # fields by name
    store.put(CATALOG_KEY, [encode(Catalog(found.run_id, revision=9, token=1, entries=(hostile,)), "0" * 32)])
    for arguments in ([], ["--json"]):
        shown = cli.run("ls", tmp_path, *arguments)
        assert all(line.isprintable() for line in shown.out.split("\n"))
        assert not any(line.startswith("fake") for line in shown.lines)


def test_starts_without_torch(run: Path) -> None:
    """Run `ls`, `gc` and `rm`, each in its own process: torch is not imported."""
    script = (
        "import sys; from dcp_remote.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    for arguments in (["ls"], ["gc"], ["rm", "--step", "100", "--yes"]):
        command = [sys.executable, "-c", script, arguments[0], str(run), *arguments[1:]]
        subprocess.run(command, check=True, capture_output=True)
