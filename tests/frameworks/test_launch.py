"""`python -m dcp_remote.launch` with a program that knows nothing of dcp_remote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from dcp_remote import open_run

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]


def start(
    program: str, folder: Path, url: Path | None, *arguments: object, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, by `dcp_remote.launch` if there is a URL, on one process."""
    folder.mkdir(exist_ok=True)
    launcher = [sys.executable, "-m", "dcp_remote.launch", "--url", url.as_uri()] if url is not None else []
    command = [*launcher, sys.executable, str(PROGRAMS / program), *map(str, arguments)]
    known = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=folder, env=known | environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == code, done.stderr
    assert "dcp_remote: " not in done.stderr  # what the launcher and its hook say
    return done


def train(folder: Path, url: Path, *, steps: int) -> str:
    """Train in a folder, and return the last line: the step and the sum of the weights."""
    return start("plain_trainer.py", folder, url, steps).stdout.splitlines()[-1]


def test_a_program_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """In a folder of another host: all that it needs is in the run. To the bit as one that was not stopped."""
    url = tmp_path / "run"
    assert train(tmp_path / "host-1", url, steps=10).startswith("steps 10 ")
    resumed = train(tmp_path / "host-2", url, steps=20)
    assert resumed == train(tmp_path / "host-3", tmp_path / "other-run", steps=20)
    assert [info.names for info in open_run(url).checkpoints()] == [(f"checkpoint-{step}",) for step in (5, 10, 15, 20)]
    for folder in ("host-1", "host-2"):
        assert not list((tmp_path / folder).rglob("checkpoint-*"))


def test_a_program_of_accelerate_that_saves_to_folders(tmp_path: Path) -> None:
    """Killed, and gone on by the same command on a new host, where a listing finds the checkpoints; to the bit."""
    url, command = tmp_path / "run", ("out", 11, "latest")
    start("plain_accelerate.py", tmp_path / "host-1", url, *command, code=128 + signal.SIGKILL, KILL_AT="5")
    resumed = start("plain_accelerate.py", tmp_path / "host-2", url, *command).stdout
    whole = start("plain_accelerate.py", tmp_path / "host-3", None, *command).stdout
    assert "resumed from 4" in resumed.splitlines()
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]
    names, paths = zip(*(info.names for info in open_run(url).checkpoints() if info.names), strict=True)
    folders = tmp_path / "host-2" / "out"
    assert paths[1:3] == (f"{tmp_path}/host-1/out/step_4", f"{folders}/step_6")
    assert list(names) == ["step_2", "step_4", "step_6", "epoch_0", "step_8", "step_10", "epoch_1", "folder-last"]
    assert {path.name for path in folders.rglob("*") if path.is_file()} == {"dcp_remote.txt"}
    assert {path.name for path in folders.iterdir()} >= {"step_4", "epoch_1", "last"}
