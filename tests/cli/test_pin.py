"""Tests of `dcp-remote pin` through its command line."""

from __future__ import annotations

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
    seen = read_catalog(LocalStore(run))
    assert seen is not None
    return seen.catalog


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
    assert captured.err == "dcp-remote: No checkpoint of this step is live. step=7 steps='1, 2'\n"
    assert catalog(run) == before


@pytest.mark.parametrize("arguments", [["1", "--und"], ["one"], []])
def test_wrong_command_lines(run: Path, arguments: list[str]) -> None:
    """Pass an abbreviated option, a step that is not a number, no step: refused."""
    with pytest.raises(SystemExit) as caught:
        main(["pin", str(run), *arguments])
    assert caught.value.code == 2
