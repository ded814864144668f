"""`dcp-remote gc`, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_remote import RemoteWriter, load
from dcp_remote.catalog import CATALOG_KEY
from dcp_remote.cli import main
from dcp_remote.manifest import MANIFEST_KEY
from dcp_remote.storage import LocalStore
from dcp_remote.testing.ranks import save_as_ranks
from tests.runs import begin, fence, save


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One that has replaced another of two shards, just now."""
    for value in (1.0, 2.0):
        states = [{"w": torch.full((3,), value)}, {"v": torch.full((3,), value)}]
        save_as_ranks(states, lambda: RemoteWriter(tmp_path / "ck", overwrite=True))
    return tmp_path / "ck"


def shards(checkpoint: Path) -> int:
    return len(list(checkpoint.glob("shards/*/*.safetensors")))


def test_says_what_it_would_remove(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --delete, and without a grace: nothing is changed."""
    before = (checkpoint / MANIFEST_KEY).read_bytes()
    assert main(["gc", str(checkpoint), "--grace-hours", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"file://{checkpoint}: orphans, which no manifest names"
    assert lines[1].startswith("2 shards, ")
    assert lines[1].endswith(": at least 0 h old")
    assert lines[2] == "0 shards, 0 B: younger, perhaps of a save under way"
    assert "--delete" in lines[3]
    assert shards(checkpoint) == 4
    assert (checkpoint / MANIFEST_KEY).read_bytes() == before


def test_removes_them(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then nothing is left to remove, and the checkpoint is as it was."""
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


def test_leaves_what_is_young(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default what is a day old is removed, and no younger."""
    assert main(["gc", str(checkpoint), "--delete"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "0 shards, 0 B: removed"
    assert lines[2].endswith(": kept: younger than 24 h")
    assert shards(checkpoint) == 4


@pytest.mark.parametrize("hours", ["-1", "nan", "inf"])
def test_a_grace_that_is_none(checkpoint: Path, hours: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused as a wrong command line."""
    assert main(["gc", str(checkpoint), f"--grace-hours={hours}"]) == 2
    assert "at least 0" in capsys.readouterr().err


def test_a_place_where_nothing_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty folder, a file, a folder of checkpoints: no wrong URL looks like a clean one, and nothing is written."""
    (tmp_path / "file").touch()
    (tmp_path / "run" / "step-1" / "shards").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for place in ("empty", "file", "run"):
        for more in ([], ["--delete"]):
            assert main(["gc", str(tmp_path / place), *more]) == 1
            assert "no committed checkpoint here" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_where_only_orphans_were(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tombstone is left in their place: `gc` finds nothing more, `show` says what it is, and a save replaces it."""
    (checkpoint / MANIFEST_KEY).unlink()
    assert main(["gc", str(checkpoint), "--grace-hours", "0", "--delete"]) == 0
    assert shards(checkpoint) == 0
    assert main(["gc", str(checkpoint)]) == 0
    assert main(["show", str(checkpoint)]) == 1
    assert "tombstone" in capsys.readouterr().err
    save_as_ranks([{"w": torch.ones(3)}], lambda: RemoteWriter(checkpoint))
    assert bool((load(checkpoint)["w"] == 1).all())


def test_half_a_word_deletes_nothing(checkpoint: Path) -> None:
    """`--del` is no option."""
    with pytest.raises(SystemExit) as caught:
        main(["gc", str(checkpoint), "--grace-hours", "0", "--del"])
    assert caught.value.code == 2
    assert shards(checkpoint) == 4


def test_a_damaged_manifest(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its shards are not known, and so nothing is removed."""
    (checkpoint / MANIFEST_KEY).write_bytes(b"{}")
    assert main(["gc", str(checkpoint), "--grace-hours", "0", "--delete"]) == 1
    assert "dcp-remote: " in capsys.readouterr().err
    assert shards(checkpoint) == 4


# ---- a run ----


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of two steps, and what a save that was cut off has left: a manifest and three shards."""
    store = LocalStore(tmp_path / "run")
    save(store, 1)
    save(store, 2, base=1)
    begin(store, 3)
    return tmp_path / "run"


def objects(run: Path) -> int:
    return shards(run) + len(list(run.glob("manifests/*.json")))


def test_orphans_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shown, then removed; the checkpoints are as they were, and the catalog is a new one. No tombstone is put."""
    before = (run / CATALOG_KEY).read_bytes()
    assert main(["gc", str(run), "--grace-hours", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"file://{run}: orphans, which no live checkpoint of the run names"
    assert lines[1].startswith("4 objects, ")
    assert lines[2] == "0 objects, 0 B: younger, perhaps of a save under way"
    assert "--delete" in lines[3]
    assert (run / CATALOG_KEY).read_bytes() == before
    assert main(["gc", str(run), "--delete"]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith(": kept: younger than 24 h")
    assert objects(run) == 4 + 3 + 4
    assert main(["gc", str(run), "--grace-hours", "0", "--delete", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[5].startswith("4 objects, ")
    assert not any((run / line.split()[0]).exists() for line in lines[1:5])
    assert objects(run) == 4 + 3
    assert not (run / MANIFEST_KEY).exists()
    assert main(["ls", str(run)]) == 0
    assert "2 checkpoints" in capsys.readouterr().out


def test_abandoned_checkpoints_are_listed_apart(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are live; who would have them go is told how."""
    store = LocalStore(run)
    fence(store)
    save(store, 3, base=1, abandons=1, letter="b")
    assert main(["gc", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == "abandoned, and so live: 1 checkpoint, 682 B; `dcp-remote rm` retires them"
    assert main(["rm", str(run), "--step", "2", "--yes"]) == 0
    capsys.readouterr()
    assert main(["gc", str(run)]) == 0
    assert "dcp-remote rm" not in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--delete"]])
def test_a_run_whose_catalog_is_lost_or_damaged(run: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Told to recover; nothing is removed, and no tombstone put."""
    for prepare in (lambda: (run / CATALOG_KEY).write_bytes(b"{}"), (run / CATALOG_KEY).unlink):
        prepare()
        assert main(["gc", str(run), "--grace-hours", "0", *more]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert "dcp-remote recover" in captured.err
    assert objects(run) == 4 + 3 + 4
    assert not (run / MANIFEST_KEY).exists()


def test_a_run_of_which_a_manifest_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is removed; the step is named."""
    for path in run.glob("manifests/*step-000000000001*"):
        path.write_bytes(b"{}")
    assert main(["gc", str(run), "--grace-hours", "0", "--delete"]) == 1
    assert "step=1" in capsys.readouterr().err
    assert objects(run) == 4 + 3 + 4
