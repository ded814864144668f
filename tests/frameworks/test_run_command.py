"""`python -m dcp_remote.run` with a program that knows nothing of dcp_remote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dcp_remote import open_run

PROGRAM = Path(__file__).parent / "programs" / "plain_trainer.py"
ROOT = Path(__file__).parents[2]


def train(folder: Path, url: Path, *, steps: int) -> str:
    """Train in a folder, and return the last line: the step and the sum of the weights."""
    folder.mkdir(exist_ok=True)
    launcher = [sys.executable, "-m", "dcp_remote.run", "--url", url.as_uri()]
    command = [*launcher, sys.executable, str(PROGRAM), str(steps)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "nothing was saved" not in done.stderr
    return done.stdout.splitlines()[-1]


def test_a_program_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """In a folder of another host: all that it needs is in the run. To the bit as one that was not stopped."""
    url = tmp_path / "run"
    assert train(tmp_path / "host-1", url, steps=10).startswith("steps 10 ")
    resumed = train(tmp_path / "host-2", url, steps=20)
    assert resumed == train(tmp_path / "host-3", tmp_path / "other-run", steps=20)
    assert [info.names for info in open_run(url).checkpoints()] == [(f"checkpoint-{step}",) for step in (5, 10, 15, 20)]
    for folder in ("host-1", "host-2"):
        assert not list((tmp_path / folder).rglob("checkpoint-*"))
