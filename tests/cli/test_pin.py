"""Tests of `dcp-remote pin` through its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_remote.format.catalog import Catalog
from dcp_remote.run.catalog_store import read_catalog
from dcp_remote.storage import LocalStore
from tests.support.command_line import CommandLine
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


def test_pins_and_unpins(cli: CommandLine, run: Path) -> None:
    """Pin and unpin, each twice: the second time changes nothing."""
    for arguments, pins, says in (
        (["1"], [True, False], "step 1 is pinned; retention keeps it"),
        (["1"], [True, False], "step 1 is pinned; retention keeps it"),
        (["2"], [True, True], "step 2 is pinned; retention keeps it"),
        (["1", "--undo"], [False, True], "step 1 is not pinned; retention may delete it"),
        (["1", "--undo"], [False, True], "step 1 is not pinned; retention may delete it"),
    ):
        before = catalog(run)
        assert cli.run("pin", run, *arguments).lines == [f"file://{run}: {says}"]
        after = catalog(run)
        assert [entry.pinned for entry in after.entries] == pins
        assert after.revision == before.revision + (pins != [entry.pinned for entry in before.entries])


def test_a_step_that_is_not_live(cli: CommandLine, run: Path) -> None:
    """Pin an absent step: one line of error, and nothing is changed."""
    before = catalog(run)
    cli.fail("pin", run, "7", says="step=7 checkpoints=2 steps='1, 2'")
    assert cli.run("pin", run, "7", "--json", code=1).out == ""
    assert catalog(run) == before


def test_pins_by_name(cli: CommandLine, run: Path) -> None:
    """Pin the checkpoint of a name; a name that none has is one line of error with those that are like it."""
    save(LocalStore(run), 3, names=("best", "checkpoint-3"))
    assert "step 3 is pinned" in cli.run("pin", run, "checkpoint-3").out
    assert [entry.pinned for entry in catalog(run).entries] == [False, False, True]
    cli.run("pin", run, "--undo", "best")
    assert not any(entry.pinned for entry in catalog(run).entries)
    cli.fail("pin", run, "checkpoint-4", says="near='checkpoint-3'")


def test_prints_json(cli: CommandLine, run: Path) -> None:
    for more, is_pinned in (([], True), (["--undo"], False)):
        document = cli.run("pin", run, "1", *more, "--json").document
        assert document == {"url": f"file://{run}", "step": 1, "pinned": is_pinned}
        assert catalog(run).entries[0].pinned is is_pinned
