"""`dcp-remote recover`, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_remote.catalog import CATALOG_KEY
from dcp_remote.cli import main
from dcp_remote.storage import LocalStore
from tests.runs import save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of three steps, one of which lacks a shard; without a catalog."""
    store = LocalStore(tmp_path / "run")
    for step in (1, 2, 3):
        save(store, step, names=(f"number {step}",))
    next((tmp_path / "run").glob("shards/*/*step-000000000002*")).unlink()
    (tmp_path / "run" / CATALOG_KEY).unlink()
    return tmp_path / "run"


def test_says_what_it_would_write(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what it leaves out, and what nobody can know; nothing is changed."""
    before = sorted(run.rglob("*"))
    assert main(["recover", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"file://{run}: the catalog is lost; 2 checkpoints can be found"
    assert [line.split()[0] for line in lines[1:4]] == ["step", "1", "3"]
    assert '"number 3"' in lines[3]
    assert lines[4].startswith("left out: manifests/step-000000000002-")
    assert lines[4].endswith("(step 2): of its 3 shards 1 are missing or of another size")
    assert "pinned" in lines[5]
    assert lines[6].endswith("add --write")
    assert sorted(run.rglob("*")) == before


def test_writes_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then it is a run again, and there is nothing to recover."""
    assert main(["recover", str(run), "--write"]) == 0
    captured = capsys.readouterr()
    assert "the catalog was lost" in captured.out
    assert captured.out.endswith("The catalog was written.\n")
    assert main(["ls", str(run)]) == 0
    assert '"number 1"' in capsys.readouterr().out
    for more in ([], ["--write"]):
        assert main(["recover", str(run), *more]) == 2
        assert "nothing to recover" in capsys.readouterr().err


def test_a_damaged_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is replaced."""
    (run / CATALOG_KEY).write_bytes(b"{}")
    assert main(["recover", str(run)]) == 0
    assert "the catalog is damaged" in capsys.readouterr().out
    assert (run / CATALOG_KEY).read_bytes() == b"{}"
    assert main(["recover", str(run), "--write"]) == 0
    assert main(["ls", str(run)]) == 0


def test_a_damaged_manifest_does_not_command_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Why it was left out is one line, whatever it says."""
    for path in run.glob("manifests/*step-000000000003*"):
        path.write_bytes(b"\x1b[2J\r\nfake")
    assert main(["recover", str(run)]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.split("\n"))
    assert not any(line.startswith("fake") for line in out.splitlines())


def test_a_place_where_nothing_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written."""
    (tmp_path / "empty").mkdir()
    for more in ([], ["--write"]):
        assert main(["recover", str(tmp_path / "empty"), *more]) == 1
        assert "no run" in capsys.readouterr().err
    assert list((tmp_path / "empty").iterdir()) == []


def test_half_a_word_writes_nothing(run: Path) -> None:
    """`--wri` is no option."""
    with pytest.raises(SystemExit) as caught:
        main(["recover", str(run), "--wri"])
    assert caught.value.code == 2
    assert not (run / CATALOG_KEY).exists()
