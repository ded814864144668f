"""Tests of `dcp-remote prune` through its command line."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_remote import CheckpointManager, load
from dcp_remote.common.deadline import Deadline
from dcp_remote.format.catalog import pin_entry
from dcp_remote.run.catalog_store import require_catalog, swap
from dcp_remote.run.deletions import Applied
from dcp_remote.run.usage import clear
from dcp_remote.storage import LocalStore, ObjectStore
from dcp_remote.storage.deletion_queue import Deleted
from tests.support.command_line import CommandLine
from tests.support.runs import fence, save
from tests.support.schemas import require_schema


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save steps 10 to 60, each with a loss; 20 has a name, 30 is pinned, and 55 is abandoned."""
    store = LocalStore(tmp_path / "run")
    for step in (10, 20, 30, 40, 50, 55):
        save(store, step, names=("first",) if step == 20 else (), metrics=(("loss", step / 10),))
    fence(store)
    save(store, 60, base=50, abandons=50, metrics=(("loss", 6.0),))
    swap(store, partial(pin_entry, step=30, pin=True), deadline=Deadline(30))
    return tmp_path / "run"


def live(run: Path) -> list[int]:
    return [entry.step for entry in require_catalog(LocalStore(run)).entries]


def shard_bytes(run: Path) -> int:
    return sum(path.stat().st_size for path in run.rglob("*.safetensors"))


ALL = [10, 20, 30, 40, 50, 55, 60]


@pytest.mark.parametrize(
    ("arguments", "deleted", "thinned"),
    [
        (["--keep-last", "1"], [10, 40, 50], []),
        (["--keep-last", "2"], [10, 40], []),
        (["--keep-last", "1", "--keep-every", "20"], [10, 50], []),
        (["--keep-last", "1", "--keep-best", "loss"], [40, 50], []),
        (["--keep-last", "1", "--keep-best", "loss=2", "--largest"], [10, 40], []),
        (["--keep-last", "1", "--named-too"], [10, 20, 40, 50], []),
        (["--keep-last", "3", "--keep-optimizer-last", "2"], [10], [40]),
        (["--keep-optimizer-last", "1"], [], [10, 40, 50]),
        (["--keep-optimizer-last", "1", "--optimizer-key", "other"], [], []),
        (["--keep-last", "99"], [], []),
    ],
)
def test_deletes_what_the_retention_does_not_keep(
    cli: CommandLine, run: Path, arguments: list[str], deleted: list[int], thinned: list[int]
) -> None:
    """Without --yes nothing is changed; with it the same checkpoints go, and as many bytes as were foretold."""
    before = shard_bytes(run)
    foretold = cli.run("prune", run, *arguments, "--json").document
    require_schema("prune", foretold)
    assert [[entry["step"] for entry in foretold[name]] for name in ("retire", "thin")] == [deleted, thinned]
    assert (live(run), shard_bytes(run), foretold["freed_bytes"]) == (ALL, before, 0)
    document = cli.run("prune", run, *arguments, "--yes", "--json").document
    require_schema("prune", document)
    assert (document["deleted"], document["thinned"]) == (deleted, thinned)
    assert live(run) == [step for step in ALL if step not in deleted]
    assert document["freed_bytes"] == foretold["would_free_bytes"] == before - shard_bytes(run)
    again = cli.run("prune", run, *arguments, "--yes", "--json").document
    assert (again["retire"], again["thin"], again["deleted"], again["freed_bytes"]) == ([], [], [], 0)


def test_text(cli: CommandLine, run: Path) -> None:
    """Read what would be done, and what was done."""
    lines = cli.run("prune", run, "--keep-last", "2", "--keep-optimizer-last", "1").lines
    assert lines[0] == f"file://{run}: 2 checkpoints of 7 to delete"
    assert [line.split()[0] for line in lines[2:4]] == ["10", "40"]
    assert lines[4] == "kept in any case, since they are pinned or have a name: step 20, 30"
    assert lines[5] == "1 checkpoint to lose the optimizer"
    assert lines[-1] == "Nothing was changed. To free 1.5 KiB, add --yes"
    lines = cli.run("prune", run, "--keep-last", "2", "--keep-optimizer-last", "1", "--yes").lines
    assert lines[-2:] == ["deleted step 10, step 40 (10 objects, 1.5 KiB freed)", "without optimizer: step 50"]


def test_many_checkpoints_are_thinned(cli: CommandLine, tmp_path: Path) -> None:
    """Thin forty, more than one swap of the catalog thins."""
    for step in range(41):
        save(LocalStore(tmp_path), step)
    document = cli.run("prune", tmp_path, "--keep-optimizer-last", "1", "--yes", "--json").document
    assert document["thinned"] == list(range(40))
    assert document["freed_bytes"] == document["would_free_bytes"]


@pytest.mark.parametrize(("step", "deleted"), [(70, [10, 40]), (40, [10]), (50, [10, 40])])
def test_only_what_was_printed_goes(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch, step: int, deleted: list[int]
) -> None:
    """Save after the plan: neither a step that the new one pushes out nor a new save of a printed step goes."""

    def clear_later(store: ObjectStore, *arguments: Any, **options: Any) -> tuple[Applied, Deleted, int]:
        save(store, step, letter="b", overwrite=True)
        return clear(store, *arguments, **options)

    monkeypatch.setattr("dcp_remote.cli.deletions.clear", clear_later)
    arguments = ["--keep-last", "2", "--keep-optimizer-last", "1"]
    document = cli.run("prune", run, *arguments, "--yes", "--json").document
    printed = [[entry["step"] for entry in document[name]] for name in ("retire", "thin")]
    assert (printed, document["deleted"]) == ([[10, 40], [50]], deleted)
    assert live(run) == sorted({*ALL, step}.difference(deleted))
    assert document["thinned"] == ([50] if step == 40 else [])  # 50 would be retired now, which was not printed


def test_a_damaged_manifest_keeps_everything(cli: CommandLine, run: Path) -> None:
    """Damage the manifest of a checkpoint that stays: exit code 1, and nothing goes."""
    for path in run.glob("manifests/step-000000000060-*"):
        path.write_bytes(b"{}")
    for more in ([], ["--yes"]):
        shown = cli.run("prune", run, "--keep-last", "1", *more, code=1)
        assert "the manifest of step 60 cannot be read" in shown.out
    assert "deleted no checkpoint (0 objects, 0 B freed)" in shown.out
    assert live(run) == ALL


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Say what to keep"),
        (["--keep-optimizer-last", "1", "--keep-every", "5"], "no effect without keep_last"),
        (["--keep-last", "0"], "--keep-last must be an integer above zero"),
        (["--keep-last", "1", "--keep-best", "loss="], "METRIC=N"),
        (["--keep-last", "1", "--keep-best", f"loss={'9' * 5_000}"], "METRIC=N. keep_best='loss=9999"),
        (["--keep-last", "1", "--keep-best", ""], "--keep-best needs the name of a metric"),
        (["--keep-last", "1", "--keep-best", "los"], "No checkpoint has the metric of --keep-best. metric='los'"),
    ],
)
def test_a_retention_without_effect_is_refused(cli: CommandLine, run: Path, arguments: list[str], says: str) -> None:
    cli.fail("prune", run, *arguments, "--yes", code=2, says=says)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_beside_a_training_that_saves(cli: CommandLine, tmp_path: Path) -> None:
    """Prune again and again while a manager saves a state whose frozen part all checkpoints share: none is damaged."""
    run, frozen = tmp_path / "run", torch.arange(1_000.0)
    failures: list[BaseException] = []

    def train() -> None:
        try:
            with CheckpointManager(run) as manager:
                for step in range(1, 41):
                    manager.save(step, {"model": {"frozen": frozen, "w": torch.full((100,), float(step))}})
        except BaseException as error:  # noqa: BLE001  # shown by the assertion
            failures.append(error)

    training = threading.Thread(target=train)
    training.start()
    deleted: list[int] = []
    while training.is_alive():
        if (run / "catalog.json").exists():
            deleted += cli.run("prune", run, "--keep-last", "2", "--yes", "--json").document["deleted"]
    training.join()
    assert not failures
    deleted += cli.run("prune", run, "--keep-last", "2", "--yes", "--json").document["deleted"]
    assert deleted == list(range(1, 39))
    for step in live(run):
        state = load(run, step=step)
        assert torch.equal(state["model"]["frozen"], frozen)
        assert bool((state["model"]["w"] == step).all())
    assert cli.run("du", run, "--json").document["orphan_bytes"] == 0
