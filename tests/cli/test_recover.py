"""Tests of `dcp-remote recover` through its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcp_remote.cli import main
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.storage import LocalStore
from tests.support.runs import save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save three steps, delete a shard of the second, and delete the catalog."""
    store = LocalStore(tmp_path / "run")
    for step in (1, 2, 3):
        save(store, step, names=(f"number {step}",))
    next((tmp_path / "run").glob("shards/*/*step-000000000002*")).unlink()
    (tmp_path / "run" / CATALOG_KEY).unlink()
    return tmp_path / "run"


def test_prints_what_it_would_write(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run without --write: the table, omissions and limits are printed, and nothing is changed."""
    before = sorted(run.rglob("*"))
    assert main(["recover", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"file://{run}: the catalog is lost; manifests of 2 checkpoints found"
    assert [line.split()[0] for line in lines[1:4]] == ["step", "1", "3"]
    assert '"number 3"' in lines[3]
    assert lines[4].startswith("left out: manifests/step-000000000002-")
    assert lines[4].endswith("(step 2): of its 3 shards 1 are missing or of another size")
    assert "pinned" in lines[5]
    assert lines[6].endswith("add --write")
    assert sorted(run.rglob("*")) == before


def test_writes_the_catalog(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run with --write: the run can be listed, and there is nothing more to recover."""
    assert main(["recover", str(run), "--write"]) == 0
    captured = capsys.readouterr()
    assert "the catalog was lost" in captured.out
    assert captured.out.endswith("The catalog was written.\n")
    assert main(["ls", str(run)]) == 0
    assert '"number 1"' in capsys.readouterr().out
    for more in ([], ["--write"]):
        assert main(["recover", str(run), *more]) == 2
        assert "nothing to recover" in capsys.readouterr().err


def test_prints_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without and with --write: the same checkpoints and omissions; on failure nothing."""
    for more, is_written in (([], False), (["--write"], True)):
        assert main(["recover", str(run), *more, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert [entry["step"] for entry in document.pop("checkpoints")] == [1, 3]
        (left,) = document.pop("left_out")
        assert (left["step"], left["reason"]) == (2, "of its 3 shards 1 are missing or of another size")
        assert document == {"url": f"file://{run}", "damaged": False, "written": is_written}
        assert (run / CATALOG_KEY).exists() is is_written
    assert main(["recover", str(run), "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_a_damaged_catalog(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage the catalog: it is replaced."""
    (run / CATALOG_KEY).write_bytes(b"{}")
    assert main(["recover", str(run)]) == 0
    assert "the catalog is damaged" in capsys.readouterr().out
    assert (run / CATALOG_KEY).read_bytes() == b"{}"
    assert main(["recover", str(run), "--write"]) == 0
    assert main(["ls", str(run)]) == 0


def test_a_damaged_manifest_does_not_control_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Put escape sequences into a manifest: the reason is one printable line."""
    for path in run.glob("manifests/*step-000000000003*"):
        path.write_bytes(b"\x1b[2J\r\nfake")
    assert main(["recover", str(run)]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.split("\n"))
    assert not any(line.startswith("fake") for line in out.splitlines())


def test_a_url_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Name an empty folder: an error, and nothing is written."""
    (tmp_path / "empty").mkdir()
    for more in ([], ["--write"]):
        assert main(["recover", str(tmp_path / "empty"), *more]) == 1
        assert "no run" in capsys.readouterr().err
    assert list((tmp_path / "empty").iterdir()) == []


def test_an_abbreviated_option_writes_nothing(run: Path) -> None:
    """Pass `--wri`, which is not an option: refused as a wrong command line."""
    with pytest.raises(SystemExit) as caught:
        main(["recover", str(run), "--wri"])
    assert caught.value.code == 2
    assert not (run / CATALOG_KEY).exists()
