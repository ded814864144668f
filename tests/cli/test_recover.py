"""Tests of `dcp-remote recover` through its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.storage import LocalStore
from tests.support.command_line import CommandLine
from tests.support.runs import save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save three steps, delete a shard of the second, and delete the catalog."""
    store = LocalStore(tmp_path / "run")
    for step in (1, 2, 3):
        save(store, step, names=(f"number {step}",))
    next((tmp_path / "run").glob("shards/*/*step-000000000002*")).unlink()
    (tmp_path / "run" / CATALOG_KEY).unlink()
    return tmp_path / "run"


def test_prints_what_it_would_write(cli: CommandLine, run: Path) -> None:
    """Run without --yes: the table, omissions and limits are printed, and nothing is changed."""
    before = sorted(run.rglob("*"))
    lines = cli.run("recover", run).lines
    assert lines[0] == f"file://{run}: the catalog is lost; manifests of 2 checkpoints found"
    assert [line.split()[0] for line in lines[1:4]] == ["step", "1", "3"]
    assert '"number 3"' in lines[3]
    assert lines[4].startswith("left out: manifests/step-000000000002-")
    assert lines[4].endswith("(step 2): of its 3 shards 1 are missing or of another size")
    assert "pinned" in lines[5]
    assert lines[6].endswith("add --yes")
    assert sorted(run.rglob("*")) == before


def test_writes_the_catalog(cli: CommandLine, run: Path) -> None:
    """Run with --yes: the run can be listed, and there is nothing more to recover."""
    shown = cli.run("recover", run, "--yes")
    assert "the catalog was lost" in shown.out
    assert shown.lines[-1] == "The catalog was written."
    assert '"number 1"' in cli.run("ls", run).out
    for more in ([], ["--yes"], ["--json"]):
        cli.fail("recover", run, *more, code=2, says="nothing to recover")


def test_prints_json(cli: CommandLine, run: Path) -> None:
    """Without and with --yes: the same checkpoints and omissions."""
    for more, is_written in (([], False), (["--yes"], True)):
        document = cli.run("recover", run, *more, "--json").document
        assert [entry["step"] for entry in document.pop("checkpoints")] == [1, 3]
        (left,) = document.pop("left_out")
        assert (left["step"], left["reason"]) == (2, "of its 3 shards 1 are missing or of another size")
        assert document == {"url": f"file://{run}", "damaged": False, "written": is_written}
        assert (run / CATALOG_KEY).exists() is is_written


def test_a_damaged_catalog(cli: CommandLine, run: Path) -> None:
    """Damage the catalog: it is replaced."""
    (run / CATALOG_KEY).write_bytes(b"{}")
    assert "the catalog is damaged" in cli.run("recover", run).out
    assert (run / CATALOG_KEY).read_bytes() == b"{}"
    cli.run("recover", run, "--yes")
    cli.run("ls", run)


def test_a_damaged_manifest_does_not_control_the_terminal(cli: CommandLine, run: Path) -> None:
    """Put escape sequences into a manifest: the reason is one printable line."""
    for path in run.glob("manifests/*step-000000000003*"):
        path.write_bytes(b"\x1b[2J\r\nfake")
    lines = cli.run("recover", run).out.split("\n")
    assert all(line.isprintable() and not line.startswith("fake") for line in lines)


@pytest.mark.parametrize("more", [[], ["--yes"]])
def test_a_url_without_a_run(cli: CommandLine, tmp_path: Path, more: list[str]) -> None:
    """Name an empty folder: an error, and nothing is written."""
    cli.fail("recover", tmp_path, *more, says="no run")
    assert list(tmp_path.iterdir()) == []
