"""Tests of `dcp-remote ls` through its command line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import escape_unprintable
from dcp_remote.format.catalog import CATALOG_KEY, Catalog, pin_entry, take_fence
from dcp_remote.format.catalog_json import encode
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.run.catalog_store import read_catalog, swap
from dcp_remote.run.deletions import Deletions
from dcp_remote.storage import LocalStore, open_store
from dcp_remote.testing import RecordingStore
from dcp_remote.testing.servers import S3Server
from tests.support.command_line import CommandLine
from tests.support.runs import begin, fence, save, thin
from tests.support.schemas import require_schema

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


def test_names_the_job_that_writes(cli: CommandLine, tmp_path: Path) -> None:
    """A line below the title, escaped; null in JSON where an older release wrote the catalog."""
    store = LocalStore(tmp_path)
    save(store, 1)
    assert "written by" not in cli.run("ls", tmp_path).out
    assert cli.run("ls", tmp_path, "--json").document["holder"] is None
    swap(store, lambda now: take_fence(now, f"gpu-07, pid 4711, {HOSTILE}"), deadline=Deadline(30))
    _, line, *_ = cli.run("ls", tmp_path).lines
    assert line == f"written by gpu-07, pid 4711, {escape_unprintable(HOSTILE)}"
    assert cli.run("ls", tmp_path, "--json").document["holder"] == f"gpu-07, pid 4711, {HOSTILE}"


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


def test_failed_saves(cli: CommandLine, run: Path) -> None:
    """List steps whose saves were not committed: no checkpoints, and nothing of a run without such saves."""
    cli.run("gc", run, "--yes", "--grace-hours", "0")
    assert cli.run("ls", run, "--failed").lines == [f"file://{run}: 0 steps with objects that no checkpoint uses"]
    for step in (400, 400, 350):
        begin(LocalStore(run), step)
    title, header, *lines = cli.run("ls", run, "--failed").lines
    assert title == f"file://{run}: 2 steps with objects that no checkpoint uses"
    assert header.split() == ["step", "last", "written", "size", "objects"]
    assert [(line.split()[0], line.split()[-1]) for line in lines] == [("350", "4"), ("400", "8")]
    document = cli.run("ls", run, "--failed", "--json").document
    require_schema("ls", document)
    found = [path.stat() for path in run.rglob("*step-000000000400-*")]
    written = datetime.fromtimestamp(max(one.st_ctime for one in found), UTC).isoformat(timespec="seconds")
    size = sum(one.st_size for one in found)
    assert document["failed"][1] == {"step": 400, "modified": written, "bytes": size, "objects": 8}


def test_one_list_at_a_time(cli: CommandLine, run: Path) -> None:
    cli.fail("ls", run, "--failed", "--abandoned", code=2, says="exclude each other")


@pytest.fixture
def bucket(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lay beside the run: a lost one, a new one with a holder, one with a hostile name, a deeper one, and a file."""
    monkeypatch.setattr("dcp_remote.cli.ls.time.time", lambda: CREATED_SECONDS + 3 * 86_400)
    for name in ("lost", "team/deep", "a\x1b[2Jb"):
        save(LocalStore(tmp_path / name), 7)
    (tmp_path / "lost" / CATALOG_KEY).unlink()
    fence(LocalStore(tmp_path / "new"))
    swap(LocalStore(tmp_path / "new"), lambda now: take_fence(now, "gpu-07, pid 4711"), deadline=Deadline(30))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").touch()
    return tmp_path


def test_lists_the_runs_of_a_bucket(cli: CommandLine, bucket: Path) -> None:
    """List a folder of runs: a line for each, and exit code 1 because one has lost its catalog."""
    title, header, *lines = cli.run("ls", "-r", bucket, code=1).lines
    assert title == f"file://{bucket}: 5 runs"
    assert header.split() == ["run", "newest", "age", "newest's", "size", "written", "by"]
    hostile, lost, *others = [" ".join(line.split()) for line in lines]
    assert hostile.startswith(r"a\x1b[2Jb ")
    assert lost.startswith("lost There is no run here: it has no catalog.json. If it was lost, `dcp-remote recover`")
    assert others == ["new gpu-07, pid 4711", "run 250 3 d 682 B", "team/deep 7 3 d 682 B"]


def test_json_of_a_bucket(cli: CommandLine, bucket: Path) -> None:
    """List a folder of runs as JSON: what is not known is null."""
    (bucket / "run" / CATALOG_KEY).write_bytes(b"{}")
    document = cli.run("ls", bucket, "-r", "--json", code=1).document
    require_schema("ls", document)
    runs = {row["path"]: row for row in document["runs"]}
    assert (runs["team/deep"]["newest"]["step"], runs["team/deep"]["problem"]) == (7, None)
    assert (runs["new"]["newest"], runs["new"]["holder"]) == (None, "gpu-07, pid 4711")
    assert "cannot be read" in runs["run"]["problem"]


def test_runs_of_a_bucket_of_s3(cli: CommandLine, s3_server: S3Server) -> None:
    """List the bucket, a mistyped run, and a prefix without a run."""
    s3_server.create_bucket("list-runs")
    options = [f"--option={name}={value}" for name, value in s3_server.storage_options.items() if name[:3] == "aws"]
    options += ["--endpoint-url", s3_server.endpoint_url, "--region", "us-east-1"]
    for name in ("runs/llama-7b", "runs/llama-13b", "other/x"):
        save(open_store(f"s3://list-runs/{name}", s3_server.storage_options), 3)
    lines = cli.run("ls", "-r", "s3://list-runs", *options).lines
    assert [line.split()[:2] for line in lines[2:]] == [
        ["other/x", "3"],
        ["runs/llama-13b", "3"],
        ["runs/llama-7b", "3"],
    ]
    cli.fail("ls", "s3://list-runs", *options, says="`dcp-remote ls -r` looks below")
    cli.fail("ls", "-r", "s3://list-runs/x", *options, says="and none below")
    cli.fail("ls", "s3://list-runs/runs/lama-7b", *options, says="near='llama-7b, llama-13b'")


@pytest.mark.parametrize("command", [["ls"], ["rm", "--step", "100"], ["pin", "100"]], ids=lambda command: command[0])
def test_wrong_urls_are_explained(cli: CommandLine, command: list[str], run: Path, tmp_path: Path) -> None:
    """Name a folder of runs, a single checkpoint, a run with a damaged or lost catalog: each error says what to do."""
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / MANIFEST_KEY).write_bytes(b"{}")
    name, *more = command
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
