"""Tests of `dcp-remote gc` through its command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_remote import RemoteWriter, load
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.storage import LocalStore
from tests.support.command_line import CommandLine, KeepingStore, open_with
from tests.support.runs import begin, fence, save
from tests.support.simulated_ranks import save_as_ranks


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Save a checkpoint over another of two shards, which are now orphans."""
    for value in (1.0, 2.0):
        states = [{"w": torch.full((3,), value)}, {"v": torch.full((3,), value)}]
        save_as_ranks(states, lambda: RemoteWriter(tmp_path / "ck", overwrite=True))
    return tmp_path / "ck"


def shards(checkpoint: Path) -> int:
    return len(list(checkpoint.glob("shards/*/*.safetensors")))


def test_removes_orphans(cli: CommandLine, checkpoint: Path) -> None:
    """Print without --yes, which changes nothing; then delete: no orphan is left, and the checkpoint loads."""
    before = {str(path.relative_to(checkpoint)): path.stat().st_size for path in checkpoint.glob("shards/*/*")}
    lines = cli.run("gc", checkpoint, "--grace-hours", "0").lines
    assert lines[0] == f"file://{checkpoint}: orphans (shards that the manifest does not name)"
    assert lines[1].startswith("2 shards, ")
    assert "--yes" in lines[3]
    assert shards(checkpoint) == len(before) == 4
    lines = cli.run("gc", checkpoint, "--grace-hours", "0", "--yes", "--list").lines
    assert lines[3].startswith("2 shards, ")
    for key, size_bytes in (line.split() for line in lines[1:3]):
        assert before[key] == int(size_bytes)
        assert not (checkpoint / key).exists()
    assert shards(checkpoint) == 2
    assert bool((load(checkpoint)["w"] == 2).all())
    assert cli.run("gc", checkpoint, "--grace-hours", "0").lines[1].startswith("0 shards, 0 B")


def test_keeps_young_orphans(cli: CommandLine, checkpoint: Path) -> None:
    """List and delete with the default grace of a day: all orphans are listed and kept; what removes them is said."""
    lines = cli.run("gc", checkpoint, "--list").lines
    assert lines[1] == "0 shards, 0 B: at least 24 h old"
    assert all((checkpoint / line.split()[0]).exists() for line in lines[2:4])
    assert lines[5].endswith("add --yes --grace-hours 0")
    lines = cli.run("gc", checkpoint, "--yes").lines
    assert lines[1] == "0 shards, 0 B: removed"
    assert lines[2].endswith(": kept, younger than 24 h")
    assert shards(checkpoint) == 4


@pytest.mark.parametrize("hours", ["-1", "nan", "inf"])
def test_an_invalid_grace(cli: CommandLine, checkpoint: Path, hours: str) -> None:
    """Pass a grace that is negative or not finite: refused as a wrong command line."""
    cli.fail("gc", checkpoint, f"--grace-hours={hours}", code=2, says=f"grace_hours={float(hours)}")


@pytest.mark.parametrize("more", [[], ["--yes"]])
def test_a_url_without_a_checkpoint(cli: CommandLine, tmp_path: Path, more: list[str]) -> None:
    """Name an empty folder, a file, a folder of checkpoints: an error for each, and nothing is written."""
    (tmp_path / "file").touch()
    (tmp_path / "run" / "step-1" / "shards").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for place in ("empty", "run"):
        cli.fail("gc", tmp_path / place, *more, says="no committed checkpoint here")
    cli.fail("gc", tmp_path / "file", *more, code=2, says="The URL is a file")
    assert sorted(tmp_path.rglob("*")) == before


def test_orphans_without_a_manifest(cli: CommandLine, checkpoint: Path) -> None:
    """Delete orphans of an absent manifest: a tombstone takes its place, which `show` explains and a save replaces."""
    (checkpoint / MANIFEST_KEY).unlink()
    cli.run("gc", checkpoint, "--grace-hours", "0", "--yes")
    assert shards(checkpoint) == 0
    cli.run("gc", checkpoint)
    cli.fail("show", checkpoint, says="tombstone")
    save_as_ranks([{"w": torch.ones(3)}], lambda: RemoteWriter(checkpoint))
    assert bool((load(checkpoint)["w"] == 1).all())


def test_a_damaged_manifest(cli: CommandLine, checkpoint: Path) -> None:
    """Damage the manifest: its shards are unknown, so nothing is removed."""
    (checkpoint / MANIFEST_KEY).write_bytes(b"{}")
    cli.fail("gc", checkpoint, "--grace-hours", "0", "--yes", says="manifest")
    assert shards(checkpoint) == 4


# ---- a run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save two steps, and leave a manifest and three shards of an interrupted save."""
    store = LocalStore(tmp_path / "run")
    save(store, 1)
    save(store, 2, base=1)
    begin(store, 3)
    return tmp_path / "run"


def objects(run: Path) -> int:
    return shards(run) + len(list(run.glob("manifests/*.json")))


def test_orphans_of_a_run(cli: CommandLine, run: Path) -> None:
    """Print, then remove: the checkpoints stay, the catalog is replaced, and no tombstone is put."""
    before = (run / CATALOG_KEY).read_bytes()
    lines = cli.run("gc", run, "--grace-hours", "0").lines
    assert lines[0] == f"file://{run}: orphans (objects that no live checkpoint of the run uses)"
    assert lines[1].startswith("4 objects, ")
    assert "--yes" in lines[3]
    assert (run / CATALOG_KEY).read_bytes() == before
    assert cli.run("gc", run, "--yes").lines[2].endswith(": kept, younger than 24 h")
    assert objects(run) == 4 + 3 + 4
    lines = cli.run("gc", run, "--grace-hours", "0", "--yes", "--list").lines
    assert lines[5].startswith("4 objects, ")
    assert not any((run / line.split()[0]).exists() for line in lines[1:5])
    assert objects(run) == 4 + 3
    assert not (run / MANIFEST_KEY).exists()
    assert "2 checkpoints" in cli.run("ls", run).out


def test_prints_json(cli: CommandLine, run: Path) -> None:
    """Without and with --yes: the same objects, with their keys and sizes."""
    found = cli.run("gc", run, "--grace-hours", "0", "--json").document
    assert found == {"url": f"file://{run}", "is_run": True, "old": found["old"], "young": [], "abandoned": []}
    assert [(run / info["key"]).stat().st_size for info in found["old"]] == [info["bytes"] for info in found["old"]]
    document = cli.run("gc", run, "--grace-hours", "0", "--yes", "--json").document
    assert document == {"url": f"file://{run}", "is_run": True, "removed": document["removed"], "kept": []}
    assert sorted(info["key"] for info in document["removed"]) == sorted(info["key"] for info in found["old"])
    assert objects(run) == 4 + 3


def test_prints_no_json_on_failure(cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse deletions."""
    monkeypatch.setattr("dcp_remote.cli.gc.open_store", open_with(KeepingStore))
    shown = cli.run("gc", run, "--grace-hours", "0", "--yes", "--json", code=3)
    assert shown.out == ""
    assert "An injected" in shown.err


def test_abandoned_checkpoints_are_listed_apart(cli: CommandLine, run: Path) -> None:
    """Roll back: the abandoned checkpoint is live, and the output names the command that deletes it."""
    store = LocalStore(run)
    fence(store)
    save(store, 3, base=1, abandons=1, letter="b")
    line = cli.run("gc", run).lines[3]
    assert line == "not orphans: 1 checkpoint abandoned by a rollback, 682 B; delete with `dcp-remote rm`"
    assert [entry["step"] for entry in cli.run("gc", run, "--json").document["abandoned"]] == [2]
    cli.run("rm", run, "--step", "2", "--yes")
    assert "dcp-remote rm" not in cli.run("gc", run).out


@pytest.mark.parametrize("more", [[], ["--yes"]])
def test_a_run_whose_catalog_is_lost_or_damaged(cli: CommandLine, run: Path, more: list[str]) -> None:
    """Lose or damage the catalog: the error names `recover`, nothing is removed, and no tombstone is put."""
    for prepare in (lambda: (run / CATALOG_KEY).write_bytes(b"{}"), (run / CATALOG_KEY).unlink):
        prepare()
        cli.fail("gc", run, "--grace-hours", "0", *more, says="dcp-remote recover")
    assert objects(run) == 4 + 3 + 4
    assert not (run / MANIFEST_KEY).exists()


def test_a_run_with_a_damaged_manifest(cli: CommandLine, run: Path) -> None:
    """Damage one manifest: nothing is removed, and the error names the step."""
    for path in run.glob("manifests/*step-000000000001*"):
        path.write_bytes(b"{}")
    cli.fail("gc", run, "--grace-hours", "0", "--yes", says="step=1")
    assert objects(run) == 4 + 3 + 4
