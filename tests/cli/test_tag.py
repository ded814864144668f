"""Tests of `dcp-remote tag` through its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_remote.run.catalog_store import read_catalog
from dcp_remote.storage import LocalStore
from tests.support.command_line import CommandLine
from tests.support.runs import save
from tests.support.schemas import require_schema


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save two steps, the second of which has a name."""
    store = LocalStore(tmp_path / "run")
    save(store, 1)
    save(store, 2, names=("best",))
    return tmp_path / "run"


def names(run: Path) -> list[tuple[str, ...]]:
    catalog = read_catalog(LocalStore(run))
    assert catalog is not None
    return [entry.names for entry in catalog.entries]


def test_gives_moves_and_takes_away(cli: CommandLine, run: Path) -> None:
    for arguments, has, says in (
        (["1", "first"], [("first",), ("best",)], 'step 1 has the name "first"'),
        (["first", "best", "--move"], [("first", "best"), ()], 'step 1 has the name "best"'),
        (["latest", "new"], [("first", "best"), ("new",)], 'step 2 has the name "new"'),
        (["1", "best", "--undo"], [("first",), ("new",)], 'step 1 no longer has the name "best"'),
    ):
        assert cli.run("tag", run, *arguments).lines == [f"file://{run}: {says}"]
        assert names(run) == has


def test_refusals_change_nothing(cli: CommandLine, run: Path) -> None:
    for arguments, code, says in (
        (["1", "best"], 1, "Options: --move (take the name from the checkpoint that has it)"),
        (["1", "best", "--undo"], 2, "The checkpoint has no such name."),
        (["2", "best", "--undo", "--move"], 2, "--move and --undo"),
        (["7", "x"], 1, "step=7"),
        (["1", "latest"], 2, "latest"),
    ):
        cli.fail("tag", run, *arguments, code=code, says=says)
        assert names(run) == [(), ("best",)]


def test_prints_json(cli: CommandLine, run: Path) -> None:
    for more, given in (([], True), (["--undo"], False)):
        document = cli.run("tag", run, "1", "first", *more, "--json").document
        require_schema("tag", document)
        assert document == {"url": f"file://{run}", "step": 1, "name": "first", "given": given}
