"""Tests of `dcp-remote rm` through its command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial, partialmethod
from pathlib import Path

import pytest

from dcp_remote.cli import main
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import PermissionDeniedError, StorageError
from dcp_remote.format.catalog import CATALOG_KEY, pin_entry
from dcp_remote.run.catalog_store import read_catalog, swap
from dcp_remote.run.deletions import Deletions
from dcp_remote.storage import LocalStore
from tests.support.runs import begin, save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save three steps that share a shard, and pin the second."""
    store = LocalStore(tmp_path / "run")
    for before, step in ((None, 1), (1, 2), (2, 3)):
        save(store, step, base=before, names=("stable",))
    swap(store, partial(pin_entry, step=2, pin=True), deadline=Deadline(30))
    return tmp_path / "run"


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.json") if path.is_file()} | {
        str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.safetensors")
    }


def live(run: Path) -> list[int]:
    found = read_catalog(LocalStore(run))
    assert found is not None
    return [entry.step for entry in found.entries]


def test_prints_what_it_would_delete(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run without --yes: nothing is changed."""
    before = files(run)
    assert main(["rm", str(run), "--step", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"file://{run}: 1 checkpoint of 3"
    assert lines[2].split()[0] == "1"
    assert "--yes" in lines[3]
    assert files(run) == before


def test_deletes_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Delete two of three, naming one twice: objects that the third shares with them stay."""
    assert main(["rm", str(run), "--step", "1", "--step", "3", "--step", "1", "--yes", "--force"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"file://{run}: 2 checkpoints of 3"
    assert lines[-1] == "deleted step 1, step 3 (6 objects)"
    assert live(run) == [2]
    assert len(files(run)) == 1 + 1 + 3
    assert main(["gc", str(run), "--grace-hours", "0"]) == 0
    assert "0 objects, 0 B: at least 0 h old" in capsys.readouterr().out


def test_prints_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without and with --yes, which is the only one that deletes."""
    for more, result in (
        ([], {"deleted": [], "objects_deleted": 0, "left_for_gc": None}),
        (["--yes"], {"deleted": [1], "objects_deleted": 3, "left_for_gc": None}),
    ):
        assert main(["rm", str(run), "--step", "1", *more, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert [entry["step"] for entry in document.pop("checkpoints")] == [1]
        assert document == {"url": f"file://{run}", **result}
    assert live(run) == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--step", "2"], 2, "pinned"),
        (["--step", "3"], 2, "newest"),
        (["--step", "1", "--step", "2"], 2, "pinned"),
        (["--step", "7"], 1, "no live checkpoint of this step"),
        (["--step", "x"], 1, "no live checkpoint of this name"),
        (["--step", "1", "--step", "stable"], 2, "newest"),
        (["--step", "1", "--step", "latest"], 2, "newest"),
    ],
)
@pytest.mark.parametrize("yes", [False, True])
def test_refusal_is_one_line_and_a_code(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str, *, yes: bool
) -> None:
    """Name steps that are pinned, newest or absent, with and without --yes: nothing is changed."""
    before = files(run)
    assert main(["rm", str(run), *arguments, *(["--yes"] if yes else [])]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert files(run) == before


def test_deletes_by_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Name a checkpoint twice, by its step and by its name: deleted once."""
    save(LocalStore(run), 4, base=3, names=("first try",))
    save(LocalStore(run), 5, base=4)
    assert main(["rm", str(run), "--step", "first try", "--step", "4", "--yes"]) == 0
    assert "deleted step 4 (" in capsys.readouterr().out
    assert live(run) == [1, 2, 3, 5]


def test_force(run: Path) -> None:
    """Delete the pinned and the newest checkpoint, then the last: only the catalog is left."""
    assert main(["rm", str(run), "--step", "2", "--step", "3", "--yes", "--force"]) == 0
    assert live(run) == [1]
    assert main(["rm", str(run), "--step", "1", "--yes", "--force"]) == 0
    assert live(run) == []
    assert list(files(run)) == [CATALOG_KEY]


@pytest.mark.parametrize("arguments", [["--step", "1", "--ye"], ["--ste", "1", "--yes"], ["--yes"], ["--step"]])
def test_wrong_command_lines(run: Path, arguments: list[str]) -> None:
    """Pass abbreviated options, or no step: refused, and nothing is changed."""
    before = files(run)
    with pytest.raises(SystemExit) as caught:
        main(["rm", str(run), *arguments])
    assert caught.value.code == 2
    assert files(run) == before


def test_a_damaged_checkpoint_can_be_deleted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage a manifest: the output says that some objects are left, and gc finds them."""
    (manifest,) = (path for path in run.glob("manifests/*.json") if "step-000000000001" in path.name)
    manifest.write_bytes(b"{}")
    assert main(["rm", str(run), "--step", "1", "--yes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "deleted step 1 (1 object)"
    assert lines[-1].startswith("some objects are left for `dcp-remote gc`: the manifest of step 1 cannot be read")
    assert main(["gc", str(run), "--grace-hours", "0", "--delete"]) == 0
    assert "2 objects, " in capsys.readouterr().out


class KeepingStore(LocalStore):
    """Store that denies all deletions."""

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        return {key: PermissionDeniedError("An injected\n403.", key=key) for key in keys}


def test_objects_that_cannot_be_deleted(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deny deletions: the checkpoint is gone, the reasons are printed, and the error names gc."""
    begin(LocalStore(run), 9)
    monkeypatch.setattr("dcp_remote.cli.rm.open_store", lambda url, options: KeepingStore(url))
    assert main(["rm", str(run), "--step", "1", "--yes"]) == 1
    captured = capsys.readouterr()
    assert live(run) == [2, 3]
    assert main(["rm", str(run), "--step", "2", "--yes", "--force", "--json"]) == 1
    assert capsys.readouterr().out == ""
    assert "deleted step 1 (0 objects)" in captured.out
    assert captured.out.count(r"An injected\n403.") == 3
    assert "dcp-remote gc" in captured.err.splitlines()[-1]


def test_objects_beyond_the_first_refusal_are_counted(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deny deletions, an object per request: one request is sent, and the error counts the objects of all requests."""
    monkeypatch.setattr("dcp_remote.cli.rm.open_store", lambda url, options: KeepingStore(url))
    monkeypatch.setattr(Deletions, "delete", partialmethod(Deletions.delete, batch=1))
    assert main(["rm", str(run), "--step", "1", "--yes"]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("An injected") == 1
    assert "failed=1 left=2" in captured.err
