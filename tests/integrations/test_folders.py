"""Folders of programs that stand for checkpoints below a URL: names, steps, and the local folders. No framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_remote import CheckpointManager
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.integrations.folders import NOTE, RemoteFolders, leave_to_trainer


def test_a_folder_has_the_url_of_its_name() -> None:
    """Take the last part of a path; digits alone and words for the newest checkpoint get a prefix."""
    folders = RemoteFolders("s3://bucket/run/")
    for folder in ("out/step_1", "out/step_1/", Path("out/step_1"), f"{Path.cwd()}/out/step_1"):
        assert folders.url_of(folder, is_saved=True) == "s3://bucket/run/step_1"
    assert folders.url_of("other/step_2", is_saved=False) == "s3://bucket/run/step_2"
    assert folders.url_of("out/step_2", is_saved=True) == "s3://bucket/run/step_2"
    for name in ("7", "last", "latest"):
        assert folders.url_of(name, is_saved=True) == f"s3://bucket/run/folder-{name}"
    for folder, is_saved in (("other/step_1", True), ("other/step_1", False), ("/", True)):
        with pytest.raises(InvalidArgumentError, match="must be another one for each folder"):
            folders.url_of(folder, is_saved=is_saved)


def test_steps_ascend() -> None:
    """Save folders of any names: steps ascend, and a load of an older one goes back."""
    folders = RemoteFolders("s3://bucket/run")
    steps = []
    for name in ("best", "step_2", "epoch_0", "step_3", "best", "step_10", "step_10", f"run-{10**20}"):
        steps.append(folders.next_step(f"out/{name}"))
        folders.note_step(steps[-1])
    assert steps == [0, 2, 3, 4, 5, 10, 11, 12]
    folders.note_step(2)
    assert folders.next_step("out/step_4") == 4


def test_what_a_folder_stands_for(tmp_path: Path) -> None:
    """A framework's own files are its affair, until a checkpoint was committed; all folders are, beside a Trainer."""
    folders = RemoteFolders(f"s3://{tmp_path.name}/run")
    own = tmp_path / "own"
    own.mkdir()
    assert folders.stands_for(tmp_path / "absent", files="*.pkl")
    assert folders.stands_for(own, files="*.pkl")
    (own / "random.pkl").touch()
    assert not folders.stands_for(own, files="*.pkl")
    folders.leave_note(own)
    assert folders.stands_for(own, files="*.pkl")
    folders.leave_note(own / "random.pkl" / "below a file")  # logged
    leave_to_trainer(folders.url)
    assert not folders.stands_for(own, files="*.pkl")


def test_a_new_host_gets_the_folders_of_a_run(tmp_path: Path) -> None:
    """Make folders only for names without separators: others would lead out of the program's folder."""
    url = (tmp_path / "run").as_uri()
    folders = RemoteFolders(url)
    folders.find(tmp_path / "out", writes=True)
    assert not (tmp_path / "out").exists()
    with CheckpointManager(url) as manager:
        manager.save(1, {"step": 1}, name=["step_1", "folder-last", "../out-of-it", str(tmp_path / "absolute"), ".."])
    folders.find(tmp_path / "out", writes=True)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("out*/**/*")} == {
        *("out/step_1", f"out/step_1/{NOTE}", "out/last", f"out/last/{NOTE}")
    }
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}
