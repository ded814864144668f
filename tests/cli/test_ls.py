"""Tests of `dcp-remote ls` through its command line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
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
from dcp_remote.storage import LocalStore
from dcp_remote.testing import RecordingStore
from tests.support.command_line import CommandLine
from tests.support.runs import fence, save, thin

HOSTILE = "a\x1b]0;owned\x07\x1b[2J\r\nfake  1\x9b31m\u202eb\x7f\u2028"


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
    assert title == f"file://{run}: 4 checkpoints, 2.5 KiB in total, shared shards counted in each"
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
    assert (document["url"], document["token"]) == (f"file://{run}", 2)
    first, second, *_ = document["checkpoints"]
    assert (first["step"], first["thinned"], first["bytes"]) == (100, ["optim"], 498)
    assert (second["names"], second["metrics"], second["pinned"]) == (["best"], {"loss": 0.25}, True)
    assert [entry["abandoned"] for entry in document["checkpoints"]] == [False, False, False, True]


def test_an_empty_run(cli: CommandLine, tmp_path: Path) -> None:
    """List a run that was started and has saved nothing: one line."""
    fence(LocalStore(tmp_path))
    assert cli.run("ls", tmp_path).lines == [
        f"file://{tmp_path}: 0 checkpoints, 0 B in total, shared shards counted in each"
    ]


def test_one_get(cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the requests of a listing: one GET of the catalog."""
    recording = RecordingStore(LocalStore(run))
    monkeypatch.setattr("dcp_remote.cli.ls.open_store", lambda url, options: recording)
    cli.run("ls", run)
    assert recording.calls == [("get", CATALOG_KEY)]


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
