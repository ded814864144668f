"""Tests of `dcp-remote gc` through its command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from dcp_remote import RemoteWriter, load
from dcp_remote.cli import main
from dcp_remote.errors import StorageError
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.storage import LocalStore
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


def test_prints_what_it_would_remove(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run without --delete and without a grace: nothing is changed."""
    before = (checkpoint / MANIFEST_KEY).read_bytes()
    assert main(["gc", str(checkpoint), "--grace-hours", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"file://{checkpoint}: orphans (shards that the manifest does not name)"
    assert lines[1].startswith("2 shards, ")
    assert lines[1].endswith(": at least 0 h old")
    assert lines[2] == "0 shards, 0 B: younger, perhaps of a save under way"
    assert "--delete" in lines[3]
    assert shards(checkpoint) == 4
    assert (checkpoint / MANIFEST_KEY).read_bytes() == before


def test_removes_orphans(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Delete without a grace: no orphan is left, and the checkpoint loads."""
    before = {str(path.relative_to(checkpoint)): path.stat().st_size for path in checkpoint.glob("shards/*/*")}
    assert main(["gc", str(checkpoint), "--grace-hours", "0", "--delete", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("2 shards, ")
    for line in lines[1:3]:
        key, size_bytes = line.split()
        assert before[key] == int(size_bytes)
        assert not (checkpoint / key).exists()
    assert shards(checkpoint) == 2
    assert bool((load(checkpoint)["w"] == 2).all())
    assert main(["gc", str(checkpoint), "--grace-hours", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "0 shards, 0 B: at least 0 h old",
        "0 shards, 0 B: younger, perhaps of a save under way",
    ]


def test_keeps_young_orphans(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Delete with the default grace of a day: all orphans are kept."""
    assert main(["gc", str(checkpoint), "--delete"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "0 shards, 0 B: removed"
    assert lines[2].endswith(": kept, younger than 24 h")
    assert shards(checkpoint) == 4


@pytest.mark.parametrize("hours", ["-1", "nan", "inf"])
def test_an_invalid_grace(checkpoint: Path, hours: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Pass a grace that is negative or not finite: refused as a wrong command line."""
    assert main(["gc", str(checkpoint), f"--grace-hours={hours}"]) == 2
    assert f"--grace-hours must be at least 0, and finite. grace_hours={float(hours)}\n" in capsys.readouterr().err


def test_a_url_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Name an empty folder, a file, a folder of checkpoints: an error for each, and nothing is written."""
    (tmp_path / "file").touch()
    (tmp_path / "run" / "step-1" / "shards").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for place in ("empty", "file", "run"):
        for more in ([], ["--delete"]):
            is_file = place == "file"
            assert main(["gc", str(tmp_path / place), *more]) == (2 if is_file else 1)
            says = "The URL is a file" if is_file else "no committed checkpoint here"
            assert says in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_orphans_without_a_manifest(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Delete orphans of an absent manifest: a tombstone takes its place, which `show` explains and a save replaces."""
    (checkpoint / MANIFEST_KEY).unlink()
    assert main(["gc", str(checkpoint), "--grace-hours", "0", "--delete"]) == 0
    assert shards(checkpoint) == 0
    assert main(["gc", str(checkpoint)]) == 0
    assert main(["show", str(checkpoint)]) == 1
    assert "tombstone" in capsys.readouterr().err
    save_as_ranks([{"w": torch.ones(3)}], lambda: RemoteWriter(checkpoint))
    assert bool((load(checkpoint)["w"] == 1).all())


def test_an_abbreviated_option_deletes_nothing(checkpoint: Path) -> None:
    """Pass `--del`, which is not an option: refused as a wrong command line."""
    with pytest.raises(SystemExit) as caught:
        main(["gc", str(checkpoint), "--grace-hours", "0", "--del"])
    assert caught.value.code == 2
    assert shards(checkpoint) == 4


def test_a_damaged_manifest(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage the manifest: its shards are unknown, so nothing is removed."""
    (checkpoint / MANIFEST_KEY).write_bytes(b"{}")
    assert main(["gc", str(checkpoint), "--grace-hours", "0", "--delete"]) == 1
    assert "dcp-remote: " in capsys.readouterr().err
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


def test_orphans_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Print, then remove: the checkpoints stay, the catalog is replaced, and no tombstone is put."""
    before = (run / CATALOG_KEY).read_bytes()
    assert main(["gc", str(run), "--grace-hours", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"file://{run}: orphans (objects that no live checkpoint of the run uses)"
    assert lines[1].startswith("4 objects, ")
    assert lines[2] == "0 objects, 0 B: younger, perhaps of a save under way"
    assert "--delete" in lines[3]
    assert (run / CATALOG_KEY).read_bytes() == before
    assert main(["gc", str(run), "--delete"]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith(": kept, younger than 24 h")
    assert objects(run) == 4 + 3 + 4
    assert main(["gc", str(run), "--grace-hours", "0", "--delete", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[5].startswith("4 objects, ")
    assert not any((run / line.split()[0]).exists() for line in lines[1:5])
    assert objects(run) == 4 + 3
    assert not (run / MANIFEST_KEY).exists()
    assert main(["ls", str(run)]) == 0
    assert "2 checkpoints" in capsys.readouterr().out


def test_prints_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without and with --delete: the same objects, with their keys and sizes."""
    assert main(["gc", str(run), "--grace-hours", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"url": f"file://{run}", "is_run": True, "old": found["old"], "young": [], "abandoned": []}
    assert [(run / info["key"]).stat().st_size for info in found["old"]] == [info["bytes"] for info in found["old"]]
    assert main(["gc", str(run), "--grace-hours", "0", "--delete", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"url": f"file://{run}", "is_run": True, "removed": document["removed"], "kept": []}
    assert sorted(info["key"] for info in document["removed"]) == sorted(info["key"] for info in found["old"])
    assert objects(run) == 4 + 3


class KeepingStore(LocalStore):
    """Store that refuses all deletions."""

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        return {key: StorageError("An injected refusal.", key=key) for key in keys}


def test_prints_no_json_on_failure(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse deletions."""
    monkeypatch.setattr("dcp_remote.cli.gc.open_store", lambda url, options: KeepingStore(url))
    assert main(["gc", str(run), "--grace-hours", "0", "--delete", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Some orphans could not be deleted." in captured.err


def test_abandoned_checkpoints_are_listed_apart(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Roll back: the abandoned checkpoint is live, and the output names the command that deletes it."""
    store = LocalStore(run)
    fence(store)
    save(store, 3, base=1, abandons=1, letter="b")
    assert main(["gc", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "not orphans: 1 checkpoint abandoned by a rollback, 682 B; delete with `dcp-remote rm`"
    assert main(["gc", str(run), "--json"]) == 0
    assert [entry["step"] for entry in json.loads(capsys.readouterr().out)["abandoned"]] == [2]
    assert main(["rm", str(run), "--step", "2", "--yes"]) == 0
    capsys.readouterr()
    assert main(["gc", str(run)]) == 0
    assert "dcp-remote rm" not in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--delete"]])
def test_a_run_whose_catalog_is_lost_or_damaged(run: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Lose or damage the catalog: the error names `recover`, nothing is removed, and no tombstone is put."""
    for prepare in (lambda: (run / CATALOG_KEY).write_bytes(b"{}"), (run / CATALOG_KEY).unlink):
        prepare()
        assert main(["gc", str(run), "--grace-hours", "0", *more]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert "dcp-remote recover" in captured.err
    assert objects(run) == 4 + 3 + 4
    assert not (run / MANIFEST_KEY).exists()


def test_a_run_with_a_damaged_manifest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage one manifest: nothing is removed, and the error names the step."""
    for path in run.glob("manifests/*step-000000000001*"):
        path.write_bytes(b"{}")
    assert main(["gc", str(run), "--grace-hours", "0", "--delete"]) == 1
    assert "step=1" in capsys.readouterr().err
    assert objects(run) == 4 + 3 + 4
