"""Processes of several ranks that end although nobody has closed their managers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import dcp_remote
from dcp_remote.storage import LocalStore
from tests.support.ports import reserved_port

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


def _run_ranks(program: str, folder: Path, *, codes: list[int]) -> tuple[list[str], list[str]]:
    """Run a program on two ranks; return what each wrote to standard output, and to standard error."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(port), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(len(codes))
        ]
        try:
            told = [rank.communicate(timeout=100) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert [rank.returncode for rank in ranks] == codes, told
    return [out for out, _ in told], [err for _, err in told]


@pytest.mark.torture(smoke=False)
def test_the_last_save_of_ranks_that_end(tmp_path: Path) -> None:
    """End one before its shard is put: the other, which closes, sees heartbeats of it until the save is committed."""
    told, _ = _run_ranks(_PROGRAM, tmp_path, codes=[0, 0])
    assert told == ["training is done\n"] * 2
    newest = dcp_remote.latest(LocalStore(tmp_path))
    assert newest is not None
    assert newest.step == 1


_RAISING = """
    import sys
    import torch
    import torch.distributed as dist
    from dcp_remote import CheckpointManager

    rank, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    checkpoints = CheckpointManager(path, silence_seconds=2, arrival_seconds=6)
    if rank == 1:
        raise RuntimeError("the script broke")
    checkpoints.restore({"model": torch.ones(3)})
"""


def test_a_rank_that_raises_before_its_first_restore(tmp_path: Path) -> None:
    """End one rank by an error, without a block: the other takes it for silent, and does not wait a minute for it."""
    _, told = _run_ranks(_RAISING, tmp_path, codes=[1, 1])
    assert "silent" in told[0]
