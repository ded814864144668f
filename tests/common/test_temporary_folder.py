"""Temporary folders: removed with their process, or by the next process of their user if that one was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dcp_remote.common.temporary_folder import TemporaryFolder

PREFIX = "dcp_remote-test-"

_HOLDER = """
import sys
from dcp_remote.common.temporary_folder import TemporaryFolder
held = TemporaryFolder(sys.argv[1])
open(held.name + "/file", "w").close()
print(held.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def _hold() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, PREFIX], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_process_goes_at_the_next_start() -> None:
    """Make folders beside one of a process that lives, one of a process that is killed, and one that ends."""
    living, kept = _hold()
    killed, left = _hold()
    killed.kill()
    killed.wait()
    with killed, living, TemporaryFolder(PREFIX) as name:
        assert kept.is_dir()
        assert Path(name).is_dir()
        assert not left.exists()
        with TemporaryFolder(PREFIX):
            assert Path(name).is_dir()
        living.communicate("")
        assert not kept.exists()
    assert not Path(name).exists()


def test_what_is_no_folder_of_this_package_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another name, another kind of file, a folder open to others, and any on an unknown file system: all stay."""
    for name in ("dcp_remote-test-kept", "dcp_remote-other-abcdefgh", "dcp_remote-test-ABCDEFGH"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "dcp_remote-test-openopen").mkdir(mode=0o777)
    (tmp_path / "dcp_remote-test-textfile").touch()
    (tmp_path / "dcp_remote-test-linklink").symlink_to(tmp_path / "dcp_remote-test-kept")
    before = sorted(tmp_path.iterdir())
    with TemporaryFolder(PREFIX):
        pass
    assert sorted(tmp_path.iterdir()) == before

    (tmp_path / "dcp_remote-test-left0000").mkdir(mode=0o700)
    with monkeypatch.context() as context, TemporaryFolder("other-"):
        context.setattr("dcp_remote.common.mounts.LOCAL_FILE_SYSTEMS", frozenset())
        with TemporaryFolder(PREFIX):
            assert (tmp_path / "dcp_remote-test-left0000").is_dir()
    with TemporaryFolder(PREFIX):
        assert not (tmp_path / "dcp_remote-test-left0000").exists()


def test_a_folder_that_is_removed_before_it_is_locked_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another process come between `mkdtemp` and the lock, twice."""
    made: list[str] = []
    make = tempfile.mkdtemp

    def removed_at_once(*args: str, **options: str) -> str:
        name = make(*args, **options)
        made.append(name)
        if len(made) <= 2:
            Path(name).rmdir()
        return name

    monkeypatch.setattr(tempfile, "mkdtemp", removed_at_once)
    with TemporaryFolder(PREFIX) as name:
        assert made[2:] == [name]
        assert Path(name).is_dir()
