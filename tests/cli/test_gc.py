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
    assert lines[0].startswith("2 shards, ")
    assert lines[0].endswith(": older than 0 hours that no manifest names")
    assert lines[1] == "0 shards, 0 B: younger, perhaps of a save under way"
    assert "--delete" in lines[2]
    assert shards(checkpoint) == 4
    assert (checkpoint / MANIFEST_KEY).read_bytes() == before


def test_removes_them(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then nothing is left to remove, and the checkpoint is as it was."""
    assert main(["gc", str(checkpoint), "--grace-hours", "0", "--delete"]) == 0
    assert capsys.readouterr().out.startswith("2 shards, ")
    assert shards(checkpoint) == 2
    assert bool((load(checkpoint)["w"] == 2).all())
    assert main(["gc", str(checkpoint), "--grace-hours", "0"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "0 shards, 0 B: older than 0 hours that no manifest names",
        "0 shards, 0 B: younger, perhaps of a save under way",
    ]


def test_leaves_what_is_young(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default what is a day old is removed, and no younger."""
    assert main(["gc", str(checkpoint), "--delete"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0 shards, 0 B: removed"
    assert lines[1].endswith(": kept: younger than 24 hours")
    assert shards(checkpoint) == 4


@pytest.mark.parametrize("hours", ["-1", "nan"])
def test_a_grace_that_is_none(checkpoint: Path, hours: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused as a wrong command line."""
    assert main(["gc", str(checkpoint), f"--grace-hours={hours}"]) == 2
    assert "at least 0" in capsys.readouterr().err


def test_a_place_where_nothing_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty folder: nothing to remove, and nothing is written."""
    assert main(["gc", str(tmp_path), "--delete"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "0 shards, 0 B: removed"
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_manifest(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its shards are not known, and so nothing is removed."""
    (checkpoint / MANIFEST_KEY).write_bytes(b"{}")
    assert main(["gc", str(checkpoint), "--grace-hours", "0", "--delete"]) == 1
    assert "dcp-remote: " in capsys.readouterr().err
    assert shards(checkpoint) == 4
