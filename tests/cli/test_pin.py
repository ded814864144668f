"""Tests of `dcp-remote pin` through its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcp_remote.cli import main
from dcp_remote.format.catalog import Catalog
from dcp_remote.run.catalog_store import read_catalog
from dcp_remote.storage import LocalStore
from tests.support.runs import save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save two steps."""
    store = LocalStore(tmp_path / "run")
    save(store, 1)
    save(store, 2)
    return tmp_path / "run"


def catalog(run: Path) -> Catalog:
    found = read_catalog(LocalStore(run))
    assert found is not None
    return found


def test_pins_and_unpins(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pin and unpin, each twice: the second time changes nothing."""
    for arguments, pins, says in (
        (["1"], [True, False], "step 1 is pinned; retention keeps it"),
        (["1"], [True, False], "step 1 is pinned; retention keeps it"),
        (["2"], [True, True], "step 2 is pinned; retention keeps it"),
        (["1", "--undo"], [False, True], "step 1 is not pinned; retention may delete it"),
        (["1", "--undo"], [False, True], "step 1 is not pinned; retention may delete it"),
    ):
        before = catalog(run)
        assert main(["pin", str(run), *arguments]) == 0
        assert capsys.readouterr().out == f"file://{run}: {says}\n"
        after = catalog(run)
        assert [entry.pinned for entry in after.entries] == pins
        assert after.revision == before.revision + (pins != [entry.pinned for entry in before.entries])


def test_a_step_that_is_not_live(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pin an absent step: one line of error, and nothing is changed."""
    before = catalog(run)
    assert main(["pin", str(run), "7"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "The run has no live checkpoint of this step." in captured.err
    assert "step=7 checkpoints=2 steps='1, 2'" in captured.err
    assert captured.err.count("\n") == 1
    assert catalog(run) == before


def test_pins_by_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pin the checkpoint of a name; a name that none has is one line of error with those that are like it."""
    save(LocalStore(run), 3, names=("best", "checkpoint-3"))
    assert main(["pin", str(run), "checkpoint-3"]) == 0
    assert "step 3 is pinned" in capsys.readouterr().out
    assert [entry.pinned for entry in catalog(run).entries] == [False, False, True]
    assert main(["pin", str(run), "--undo", "best"]) == 0
    assert not any(entry.pinned for entry in catalog(run).entries)
    assert main(["pin", str(run), "checkpoint-4"]) == 1
    captured = capsys.readouterr()
    assert "no live checkpoint of this name" in captured.err
    assert "near='checkpoint-3'" in captured.err


def test_prints_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, is_pinned in (([], True), (["--undo"], False)):
        assert main(["pin", str(run), "1", *more, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"url": f"file://{run}", "step": 1, "pinned": is_pinned}
        assert catalog(run).entries[0].pinned is is_pinned
    assert main(["pin", str(run), "7", "--json"]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("arguments", [["1", "--und"], []])
def test_wrong_command_lines(run: Path, arguments: list[str]) -> None:
    """Pass an abbreviated option, no step: refused."""
    with pytest.raises(SystemExit) as caught:
        main(["pin", str(run), *arguments])
    assert caught.value.code == 2
