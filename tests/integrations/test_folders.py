"""Folders of programs that stand for checkpoints below a URL: names, steps, and the local folders. No framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_remote import CheckpointManager
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.integrations.folders import NOTE, RemoteFolders, leave_to_trainer, path_name_of


def test_a_folder_has_the_url_of_its_name() -> None:
    """Take the last part of a path; digits alone and words for the newest checkpoint get a prefix."""
    folders = RemoteFolders("s3://bucket/run/")
    for folder in ("out/step_1", "out/step_1/", Path("out/step_1"), f"{Path.cwd()}/out/step_1"):
        assert folders.url_of(folder) == "s3://bucket/run/step_1"
    for name in ("7", "last", "latest", "folder-7", "folder-folder-7", "folder-a\nb"):
        assert folders.url_of(name) == f"s3://bucket/run/folder-{name}"
    with pytest.raises(InvalidArgumentError, match="has no name"):
        folders.url_of("/")


def test_a_process_saves_one_folder_to_a_run() -> None:
    folders = RemoteFolders("s3://bucket")
    assert folders.run_url_of("out/actor", is_saved=True) == "s3://bucket/actor"
    assert folders.run_url_of("other/critic", is_saved=False) == "s3://bucket/critic"
    assert folders.run_url_of("out/critic", is_saved=True) == "s3://bucket/critic"
    for is_saved in (True, False):
        with pytest.raises(InvalidArgumentError, match="must be another one for each folder"):
            folders.run_url_of("other/actor", is_saved=is_saved)


def test_folders_of_one_name_are_two_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Load in a later process what was saved from each; from a folder that was moved, what the nearest path gave."""
    url, long = (tmp_path / "run").as_uri(), "x" * 100
    saved = [f"/{top}/{middle}/best" for top in "ab" for middle in ("out", long)] + [f"/a/{long}/{long}/y/best"]
    saved.append(saved[-1].replace("/a/", "/b/"))
    with CheckpointManager(url) as manager:
        for step, folder in enumerate(saved):
            manager.save(step, {"step": step}, name=["best", path_name_of(folder)])
    folders = RemoteFolders(url)
    assert folders.saved_url_of(saved[-1]) == f"{url}/5"
    assert not caplog.records
    assert [folders.saved_url_of(folder) for folder in saved[:-1]] == [f"{url}/{step}" for step in range(5)]
    assert folders.saved_url_of("/moved/out/best") == f"{url}/2"
    assert folders.saved_url_of("/moved/best") == f"{url}/5"
    said = [record.getMessage() for record in caplog.records]
    newest = f"The newest of a folder of this name is step 5, from {path_name_of(saved[-1])}"
    assert said[0] == f"/a/out/best: step 0 of {url} is loaded, saved from /a/out/best. {newest}"
    assert said[5] == f"/moved/out/best: step 2 of {url} is loaded, saved from /b/out/best. {newest}"
    assert len(said) == 7
    assert folders.saved_url_of("/a/out/last") == f"{url}/folder-last"
    folders.find(tmp_path / "new", writes=False)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["best"]


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
        manager.save(
            1,
            {"step": 1},
            name=["step_1", "folder-last", "folder-folder-7", "../out-of-it", str(tmp_path / "absolute"), ".."],
        )
    folders.find(tmp_path / "out", writes=True)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("out*/**/*")} == {
        *("out/step_1", f"out/step_1/{NOTE}", "out/last", f"out/last/{NOTE}", "out/folder-7", f"out/folder-7/{NOTE}")
    }
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}
