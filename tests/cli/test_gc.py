"""`dcp-remote gc`, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_remote import RemoteWriter, load
from dcp_remote.cli import main
from dcp_remote.manifest import MANIFEST_KEY
from dcp_remote.testing.ranks import save_as_ranks


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
