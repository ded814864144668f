"""Tests of `dcp-remote rm` through its command line."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest

from dcp_remote.common.deadline import Deadline
from dcp_remote.format.catalog import CATALOG_KEY, Catalog, mark_entries, pin_entry
from dcp_remote.run.catalog_store import read_catalog, swap
from dcp_remote.run.labels import give_names
from dcp_remote.run.usage import Usage, read_usage
from dcp_remote.storage import LocalStore
from dcp_remote.storage.deletion_queue import DeletionQueue
from tests.support.command_line import CommandLine, KeepingStore, open_with
from tests.support.runs import begin, fence, save
from tests.support.schemas import require_schema

LONG = "9" * 5_000  # more digits than Python reads


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save three steps that share a shard, and pin the second."""
    store = LocalStore(tmp_path / "run")
    for before, step in ((None, 1), (1, 2), (2, 3)):
        save(store, step, base=before, names=("stable",))
    swap(store, partial(pin_entry, step=2, pin=True), deadline=Deadline(30))
    return tmp_path / "run"


def test_what_stays_is_abandoned(cli: CommandLine, run: Path) -> None:
    """Delete the last checkpoint that counts: the output says that no job begins with what stays."""
    catalog = read_catalog(LocalStore(run))
    assert catalog is not None
    marks = {entry.save_id: entry.step != 2 for entry in catalog.entries}
    swap(LocalStore(run), partial(mark_entries, marks=marks), deadline=Deadline(30))
    told = [line for line in cli.run("rm", run, "--step", "2", "--force").lines if line.startswith("what stays")]
    assert len(told) == 1
    assert "no job begins by itself until one is restored by step" in told[0]
    for options in (("--step", "1"), ("--abandoned",)):
        assert not [line for line in cli.run("rm", run, *options).lines if line.startswith("what stays")]


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.json") if path.is_file()} | {
        str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.safetensors")
    }


def shard_bytes(run: Path) -> int:
    return sum(path.stat().st_size for path in run.rglob("*.safetensors"))


def live(run: Path) -> list[int]:
    found = read_catalog(LocalStore(run))
    assert found is not None
    return [entry.step for entry in found.entries]


def test_prints_what_it_would_delete(cli: CommandLine, run: Path) -> None:
    """Run without --yes: nothing is changed."""
    before = files(run)
    lines = cli.run("rm", run, "--step", "1").lines
    assert lines[0] == f"file://{run}: 1 checkpoint of 3"
    assert lines[2].split()[0] == "1"
    assert "--yes" in lines[3]
    assert files(run) == before


def test_deletes_checkpoints(cli: CommandLine, run: Path) -> None:
    """Delete two of three, naming one twice: objects that the third shares with them stay."""
    lines = cli.run("rm", run, "--step", "1", "--step", "3", "--step", "1", "--yes", "--force").lines
    assert lines[0] == f"file://{run}: 2 checkpoints of 3"
    assert lines[-1] == "deleted step 1, step 3 (6 objects, 802 B freed)"
    assert live(run) == [2]
    assert len(files(run)) == 1 + 1 + 3
    assert "0 objects, 0 B: at least 0 h old" in cli.run("gc", run, "--grace-hours", "0").out


def test_prints_json(cli: CommandLine, run: Path) -> None:
    """Without and with --yes, which is the only one that deletes."""
    before = shard_bytes(run)
    for more, deleted, objects_deleted in (([], [], 0), (["--yes"], [1], 3)):
        document = cli.run("rm", run, "--step", "1", *more, "--json").document
        require_schema("rm", document)
        assert [entry["step"] for entry in document["checkpoints"]] == [1]
        assert (document["deleted"], document["objects_deleted"]) == (deleted, objects_deleted)
        assert document["freed_bytes"] == before - shard_bytes(run)
    assert document["freed_bytes"] == document["would_free_bytes"] > 0
    assert live(run) == [2, 3]


@pytest.mark.parametrize(
    ("steps", "code", "says"),
    [
        (["2"], 2, "pinned"),
        (["3"], 2, "newest"),
        (["1", "2"], 2, "pinned"),
        (["7"], 1, "no live checkpoint of this step"),
        (["x"], 1, "no live checkpoint of this name"),
        (["1", "stable"], 2, "newest"),
        (["1", "latest"], 2, "newest"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--yes"]])
def test_refusal_is_one_line_and_a_code(
    cli: CommandLine, run: Path, steps: list[str], code: int, says: str, *, more: list[str]
) -> None:
    """Name steps that are pinned, newest or absent, with and without --yes: nothing is changed."""
    before = files(run)
    cli.fail("rm", run, *(f"--step={step}" for step in steps), *more, code=code, says=says)
    assert files(run) == before


def test_deletes_by_name(cli: CommandLine, run: Path) -> None:
    """Name a checkpoint twice, by its step and by its name: deleted once."""
    save(LocalStore(run), 4, base=3, names=("first try",))
    save(LocalStore(run), 5, base=4)
    assert "deleted step 4 (" in cli.run("rm", run, "--step", "first try", "--step", "4", "--yes").out
    assert live(run) == [1, 2, 3, 5]


def test_force(cli: CommandLine, run: Path) -> None:
    """Delete the pinned and the newest checkpoint, then the last: only the catalog is left."""
    cli.run("rm", run, "--step", "2", "--step", "3", "--yes", "--force")
    assert live(run) == [1]
    cli.run("rm", run, "--step", "1", "--yes", "--force")
    assert live(run) == []
    assert list(files(run)) == [CATALOG_KEY]


def test_names_are_kept(cli: CommandLine, run: Path) -> None:
    """Choose a named checkpoint by a range, and by age: kept; by its name or step, or with --force: deleted."""
    save(LocalStore(run), 4, base=3, names=("first \x1b try",))
    save(LocalStore(run), 5, base=4)
    for choice in (["--step", "3-4"], ["--older-than", "0", "--step", "3-4"]):
        shown = cli.run("rm", run, *choice)
        assert r'kept: step 4, which is named "first \x1b try"' in shown.lines
    assert cli.run("rm", run, "--step", "3-4", "--force", "--json").document["kept"] == []
    document = cli.run("rm", run, "--step", "3-4", "--step", "4", "--yes", "--json").document
    assert (document["kept"], document["deleted"]) == ([3], [4])


def test_bytes_that_are_not_known(cli: CommandLine, run: Path) -> None:
    """Damage a manifest: nothing is said of the bytes that would be freed."""
    for path in run.glob("manifests/step-000000000003-*"):
        path.write_bytes(b"{}")
    *_, why, last = cli.run("rm", run, "--step", "1").lines
    assert why.startswith("the manifest of step 3 cannot be read, so that bytes are not known")
    assert last == "Nothing was changed. To delete, add --yes"
    document = cli.run("rm", run, "--step", "1", "--json").document
    require_schema("rm", document)
    assert document["would_free_bytes"] is None


def test_a_damaged_checkpoint_can_be_deleted(cli: CommandLine, run: Path) -> None:
    """Damage a manifest: the output says that some objects are left, and gc finds them."""
    (manifest,) = (path for path in run.glob("manifests/*.json") if "step-000000000001" in path.name)
    manifest.write_bytes(b"{}")
    lines = cli.run("rm", run, "--step", "1", "--yes").lines
    assert lines[-2] == "deleted step 1 (1 object, 0 B freed)"
    assert lines[-1].startswith("some objects are left for `dcp-remote gc`: the manifest of step 1 cannot be read")
    assert "2 objects, " in cli.run("gc", run, "--grace-hours", "0", "--yes").out


def test_objects_that_cannot_be_deleted(cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deny deletions: the checkpoint is gone, the reasons are printed, and the error names gc."""
    begin(LocalStore(run), 9)
    monkeypatch.setattr("dcp_remote.cli.deletions.open_store", open_with(KeepingStore))
    shown = cli.run("rm", run, "--step", "1", "--yes", code=3)
    assert live(run) == [2, 3]
    assert "deleted step 1 (0 objects, 0 B freed)" in shown.out
    assert shown.out.count(r"An injected\n403.") == 3
    assert "dcp-remote gc" in shown.err.splitlines()[-1]
    assert cli.run("rm", run, "--step", "2", "--yes", "--force", "--json", code=3).out == ""


def test_objects_beyond_the_first_refusal_are_counted(
    cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deny deletions, an object per request: one request is sent, and the error counts the objects of all requests."""
    monkeypatch.setattr("dcp_remote.cli.deletions.open_store", open_with(KeepingStore))
    monkeypatch.setattr(DeletionQueue, "delete", partialmethod(DeletionQueue.delete, batch=1))
    shown = cli.run("rm", run, "--step", "1", "--yes", code=3)
    assert shown.out.count("An injected") == 1
    assert "failed=1 left=2" in shown.err


# ---- many at a time


@pytest.fixture
def long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save steps 1 to 6, a day after another; pin 2; then a job goes back to 4 and saves 7, which abandons 5 and 6."""
    store = LocalStore(tmp_path / "long")
    for step in range(1, 7):
        save(store, step)
    fence(store)
    save(store, 7, base=4, abandons=4)
    swap(store, partial(pin_entry, step=2, pin=True), deadline=Deadline(30))
    swap(store, _save_on_days, deadline=Deadline(30))
    monkeypatch.setattr("dcp_remote.cli.deletions.time.time", lambda: datetime(2026, 1, 8, tzinfo=UTC).timestamp())
    return tmp_path / "long"


def _save_on_days(catalog: Catalog) -> Catalog:
    entries = (replace(entry, created=f"2026-01-0{entry.step}T00:00:00+00:00") for entry in catalog.entries)
    return replace(catalog, revision=catalog.revision + 1, entries=tuple(entries))


@pytest.mark.parametrize(
    ("arguments", "deleted"),
    [
        (["--step", "1-3"], [1, 3]),  # without the pinned one
        (["--step", "6-99"], [6]),  # without the newest
        (["--step", "1-3", "--step", "5"], [1, 3, 5]),
        (["--older-than", "3"], [1, 3, 4]),
        (["--older-than", "1.5"], [1, 3, 4, 5, 6]),
        (["--abandoned"], [5, 6]),
        (["--abandoned", "--older-than", "2.5"], [5]),
        (["--step", "3-5", "--older-than", "3"], [3, 4]),
        (["--step", "1-7", "--force"], [1, 2, 3, 4, 5, 6, 7]),
        (["--step", "50-60"], []),
        (["--older-than", "14"], []),
    ],
)
def test_deletes_what_fits_all_options(
    cli: CommandLine, long_run: Path, arguments: list[str], deleted: list[int]
) -> None:
    """Choose by steps, age and abandonment: the pinned and the newest stay, and the bytes are those that go."""
    before = shard_bytes(long_run)
    would = cli.run("rm", long_run, *arguments, "--json").document["would_free_bytes"]
    document = cli.run("rm", long_run, *arguments, "--yes", "--json").document
    require_schema("rm", document)
    assert document["deleted"] == deleted
    assert live(long_run) == [step for step in range(1, 8) if step not in deleted]
    assert document["freed_bytes"] == would == before - shard_bytes(long_run)


def test_what_is_kept_is_told(cli: CommandLine, long_run: Path) -> None:
    """Delete a range with the pinned and the newest: both are named."""
    lines = cli.run("rm", long_run, "--step", "1-7").lines
    assert lines[-3:-1] == ["kept: step 2, which is pinned", "kept: step 7, which is the newest"]
    assert lines[-1].startswith("Nothing was changed. To free ")
    cli.fail("rm", long_run, "--step", "1-7", "--step", "2", code=2, says="pinned")


def test_a_name_like_a_range_is_a_name(cli: CommandLine, long_run: Path) -> None:
    """Name a checkpoint `1-3`: that one is meant."""
    save(LocalStore(long_run), 8, names=("1-3",))
    save(LocalStore(long_run), 9)
    assert cli.run("rm", long_run, "--step", "1-3", "--yes", "--json").document["deleted"] == [8]


def test_a_step_that_is_saved_again_meanwhile_stays(
    cli: CommandLine, long_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace an abandoned checkpoint by a save of its step while `rm --abandoned` runs: the new one stays."""
    store = LocalStore(long_run)

    def read_meanwhile(*arguments: Any, **options: Any) -> Usage:
        usage = read_usage(*arguments, **options)
        save(store, 6, base=4, letter="b", overwrite=True)
        return usage

    monkeypatch.setattr("dcp_remote.cli.deletions.read_usage", read_meanwhile)
    assert cli.run("rm", long_run, "--abandoned", "--yes", "--json").document["deleted"] == [5]
    assert 6 in live(long_run)


def test_a_name_that_is_given_meanwhile_is_respected(
    cli: CommandLine, long_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name a checkpoint while `rm` of a range runs: nothing is deleted, and the error says why."""

    def read_meanwhile(*arguments: Any, **options: Any) -> Usage:
        give_names(LocalStore(long_run), 3, "best", move=False, deadline=Deadline(30))
        return read_usage(*arguments, **options)

    monkeypatch.setattr("dcp_remote.cli.deletions.read_usage", read_meanwhile)
    assert "got a name meanwhile" in cli.run("rm", long_run, "--step", "1-4", "--yes", code=2).err
    assert live(long_run) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "options", [["--older-than", "-30"], ["--older-than", "nan"], ["--step", "900-100"], ["--step", f"1-{LONG}"]]
)
def test_a_choice_that_is_none_is_refused(cli: CommandLine, long_run: Path, options: list[str]) -> None:
    before = live(long_run)
    cli.fail("rm", long_run, *options, "--yes", code=2, says=options[0])
    assert live(long_run) == before


def test_without_a_choice_nothing_is_deleted(cli: CommandLine, long_run: Path) -> None:
    cli.fail("rm", long_run, "--yes", "--force", code=2, says="--step, --older-than or --abandoned")
    cli.refuse("rm", long_run, "--older-than", "7d", "--yes", says="--older-than")
    cli.refuse("rm", long_run, "--step", LONG, "--yes", says=f"--step: a step has at most 60 digits: {LONG[:60]}…")
    assert live(long_run) == [1, 2, 3, 4, 5, 6, 7]
