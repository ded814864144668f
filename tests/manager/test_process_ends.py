"""Programs that end without closing their manager: what becomes of the save under way, and what is said of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dcp_remote
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.storage import LocalStore

# The upload begins once the manager is being closed: a save that is done was waited for.
_PROGRAM = """
import multiprocessing, sys, time
import torch
from dcp_remote import CheckpointManager
from dcp_remote.storage import LocalStore
from dcp_remote.storage.wrapper import WrappedStore

class Late(WrappedStore):
    def _request(self, request, send):
        if request.verb == "put" and request.key.startswith("shards/"):
            while not checkpoints._closed:
                time.sleep(0.01)
            if end == "failed save":
                raise OSError("the disk broke")
        return send()

def train():
    global checkpoints
    checkpoints = CheckpointManager(Late(LocalStore(path)), timeout_seconds=60)
    checkpoints.save(1, {"model": torch.ones(3)})
    if end == "error":
        raise RuntimeError("the script broke")
    if end == "exit":
        sys.exit(3)

how, end, path = sys.argv[1:]
if how == "script":
    train()
else:
    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize(
    ("how", "end", "code"),
    [
        ("script", "quietly", 0),
        ("script", "error", 1),
        ("script", "failed save", 1),
        ("forked child", "exit", 3),
        ("forked child", "failed save", 1),
    ],
)
def test_a_save_under_way_at_the_end_of_a_process(how: str, end: str, code: int, tmp_path: Path) -> None:
    """End without `close`: the save is finished, after a line that says so if an error came before; a loss is said."""
    command = [sys.executable, "-c", _PROGRAM, how, end, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == code, ended.stderr
    newest = dcp_remote.latest(LocalStore(tmp_path))
    assert (newest is None) == (end == "failed save")
    waits = "after RuntimeError (the script broke), waiting for the save of step 1, until "
    assert (waits in ended.stderr) == (end == "error")
    assert ("the last save of this process failed" in ended.stderr) == (end == "failed save")


def test_a_closed_manager(tmp_path: Path) -> None:
    """Close twice, and after that save, restore and read: only reading goes on."""
    state = {"model": torch.ones(3)}
    checkpoints = dcp_remote.CheckpointManager(tmp_path)
    checkpoints.save(1, state)
    checkpoints.close()
    checkpoints.close()
    with pytest.raises(InvalidArgumentError, match="is closed; make another one"):
        checkpoints.save(2, state)
    with pytest.raises(InvalidArgumentError, match="is closed; make another one"):
        checkpoints.restore(state)
    assert checkpoints.run.steps() == [1]
