"""Processes of several ranks that end although nobody has closed their managers."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import dcp_remote
from dcp_remote.storage import LocalStore

_PROGRAM = """
    import sys, threading, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from dcp_remote import CheckpointManager
    from dcp_remote.storage import LocalStore
    from dcp_remote.storage.wrapper import WrappedStore

    class Late(WrappedStore):
        def _request(self, request, send):
            if request.verb == "put" and request.key.startswith("shards/"):
                if rank == 0:
                    threading.main_thread().join()
                    ended.touch()
                else:
                    while not ended.exists():
                        time.sleep(0.01)
                    heartbeat = checkpoints._ranks.heartbeat
                    count = heartbeat._count
                    while heartbeat._count < count + 3:
                        time.sleep(0.01)
            return send()

    rank, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    ended = Path(path, "ended")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    checkpoints = CheckpointManager(Late(LocalStore(path)), timeout_seconds=60)
    checkpoints.save(1, {"model": torch.ones(3), "mine": {str(rank): torch.zeros(3)}})
    if rank == 1:
        checkpoints.close()
    print("training is done")
"""


@pytest.mark.torture(smoke=False)
def test_the_last_save_of_ranks_that_end(tmp_path: Path) -> None:
    """Of one, before its shard is put; the other, which closes, sees it beat until the save is committed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", textwrap.dedent(_PROGRAM)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [(rank.returncode, text) for rank, text in zip(ranks, told, strict=True)] == [(0, "training is done\n")] * 2
    newest = dcp_remote.latest(LocalStore(tmp_path))
    assert newest is not None
    assert newest.step == 1
