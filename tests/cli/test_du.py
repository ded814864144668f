"""Tests of `dcp-remote du` through its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_remote.storage import LocalStore
from dcp_remote.testing import RecordingStore
from tests.support.command_line import CommandLine
from tests.support.runs import begin, save
from tests.support.schemas import require_schema


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save three steps that share a shard, and leave the objects of an interrupted save."""
    store = LocalStore(tmp_path / "run")
    for before, step in ((None, 1), (1, 2), (2, 3)):
        save(store, step, base=before)
    begin(store, 4)
    return tmp_path / "run"


def test_prints_what_a_run_stores(cli: CommandLine, run: Path) -> None:
    """Read the tables: steps, keys, the total, and the cost."""
    lines = cli.run("du", run, "--price", "1e6").lines
    stored = sum(path.stat().st_size for path in run.rglob("*") if path.is_file() and ".dcp" not in str(path))
    assert lines[0] == f"file://{run}: 3 checkpoints"
    assert [line.split() for line in lines[2:6]] == [
        ["step", "size", "used", "by", "no", "other", "shared"],
        ["1", "682", "B", "401", "B", "281", "B"],
        ["2", "682", "B", "401", "B", "281", "B"],
        ["3", "682", "B", "401", "B", "281", "B"],
    ]
    assert [line.split()[0] for line in lines[7:10]] == ["key", "model", "optim"]
    assert lines[11].startswith("stored in total: ")
    assert lines[11].endswith(" in 15 objects")
    assert lines[13] == f"cost: {1e6 * stored / 2**30:.2f} dollars a month"


def test_json_agrees_with_the_files(cli: CommandLine, run: Path) -> None:
    """Compare the document with the sizes of the files."""
    document = cli.run("du", run, "--json").document
    require_schema("du", document)
    sizes = {path: path.stat().st_size for path in run.rglob("*") if path.suffix in (".json", ".safetensors")}
    orphans = [path for path in sizes if "step-000000000004-" in path.name]
    assert (document["stored_bytes"], document["stored_objects"]) == (sum(sizes.values()), len(sizes))
    assert document["orphan_bytes"] == sum(sizes[path] for path in orphans)
    shards = sum(size for path, size in sizes.items() if path.suffix == ".safetensors" and path not in orphans)
    assert sum(row["bytes"] for row in document["keys"]) == shards
    assert document["dollars_per_month"] is None


def test_costs_a_get_of_each_manifest(cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the requests: the catalog twice, so that a wrong URL is explained before the listing."""
    recording = RecordingStore(LocalStore(run))
    monkeypatch.setattr("dcp_remote.cli.du.open_store", lambda url, options: recording)
    cli.run("du", run)
    assert (recording.count("get"), recording.count("list"), recording.count()) == (2 + 3, 1, 6)


def test_a_damaged_manifest(cli: CommandLine, run: Path) -> None:
    """Damage a manifest: exit code 1, and what it makes uncertain is not told as known."""
    for path in run.glob("manifests/step-000000000002-*"):
        path.write_bytes(b"{}")
    document = cli.run("du", run, "--json", code=1).document
    require_schema("du", document)
    assert (document["unreadable"], document["orphan_bytes"]) == ([2], None)
    assert {row["own_bytes"] for row in document["steps"]} == {None}
    assert "the manifest of step 2 cannot be read" in cli.run("du", run, code=1).out


def test_wrong_calls(cli: CommandLine, run: Path, tmp_path: Path) -> None:
    """Name a folder without a run, one beside it, and a price that is none."""
    (tmp_path / "empty").mkdir()
    cli.fail("du", tmp_path / "empty", says="no run (no catalog.json)")
    cli.fail("du", tmp_path / "rnu", says="near='run'")
    cli.fail("du", run, "--price", "nan", code=2, says="--price")
