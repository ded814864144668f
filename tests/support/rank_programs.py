"""Scripts run as ranks, as torchrun starts them: a process each, with gloo, bounded in time, ended by its own handle.

    ranks = run_ranks(Path("save.py"), 2, "s3://bucket/run", folder=tmp_path)
    assert ranks.reports == [{"step": 3}, {"step": 3}]

A script reports by `report(step=3)`. Environments of frameworks have no pool of ranks, because each script patches its
framework as its users would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parent.parent.parent

# Time for all ranks of a script, of which most is the import of the frameworks on a busy machine.
RANKS_TIMEOUT_SECONDS = 240.0

# Time in which the other ranks end once one of them has failed, after which they are killed.
_FAILED_GRACE_SECONDS = 45.0

_REPORTS = "DCP_REMOTE_TEST_REPORTS"
_OUTPUT_CHARACTERS_MAX = 6000


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks of a script that have ended."""

    exit_codes: list[int]  # exit code of each rank; negative is the number of the signal that ended the rank
    reports: list[dict[str, Any]]  # values that each rank reported; empty if it reported nothing
    outputs: list[str]  # standard output and error of each rank

    def show(self) -> str:
        """Return the exit code and the end of the output of each rank."""
        ended = zip(self.exit_codes, self.outputs, strict=True)
        return "\n".join(
            f"---- rank {rank}, exit code {code}\n{output[-_OUTPUT_CHARACTERS_MAX:]}"
            for rank, (code, output) in enumerate(ended)
        )


def report(**values: Any) -> None:
    """Report values of this rank, which JSON can hold, to the test; a later call adds to an earlier one."""
    path = Path(os.environ[_REPORTS], f"{os.environ.get('RANK', '0')}.json")
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | values))


def leave_process_group() -> None:
    """Destroy the process group, if there is one: the last call of a rank.

    Otherwise gloo's threads, which may still hold tensors, may take the GIL while Python shuts down, and the process
    ends by SIGABRT: "terminate called without an active exception" (https://github.com/pytorch/pytorch/issues/190489).
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def run_ranks(
    script: Path,
    world_size: int,
    *arguments: object,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = RANKS_TIMEOUT_SECONDS,
    is_checked: bool = True,
) -> Ranks:
    """Run a script on several ranks in a folder, wait for them, and kill them when the time is over.

    Outputs and reports lie in a folder below that one. If it is checked, each rank has to end with exit code 0.
    """
    own = folder / f"ranks-{len(list(folder.glob('ranks-*')))}"
    own.mkdir(parents=True)
    # In this process, as in torchrun's agent: no port is chosen before it is bound, and the store outlives each rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    processes = []
    outputs = [own / f"{rank}.txt" for rank in range(world_size)]
    try:
        for rank, output in enumerate(outputs):
            with output.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", str(script), *map(str, arguments)],
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=_environment(rank, world_size, store.port, own, environment or {}),
                    )
                )
        is_late = not _wait(processes, timeout_seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ranks = Ranks(
        [process.returncode for process in processes],
        [_read_report(own / f"{rank}.json") for rank in range(world_size)],
        [output.read_text(errors="replace") for output in outputs],
    )
    assert not is_late, f"{script.name} did not end within {timeout_seconds:g} s.\n{ranks.show()}"
    if is_checked:
        assert not any(ranks.exit_codes), f"{script.name} failed.\n{ranks.show()}"
    return ranks


def _environment(
    rank: int, world_size: int, port: int, reports: Path, environment: Mapping[str, str]
) -> dict[str, str]:
    # The user's AWS configuration must not affect the ranks.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        _REPORTS: str(reports),
        **environment,
    }


def _wait(processes: list[subprocess.Popen[bytes]], timeout_seconds: float) -> bool:
    """Wait until all processes have ended, or some time after the first that failed; return whether in time."""
    deadline = time.monotonic() + timeout_seconds
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if failed_at is None and any(process.returncode for process in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + _FAILED_GRACE_SECONDS:
            return True  # the failure is the result; the ranks that wait for the failed one are killed
        if now > deadline:
            return False
        time.sleep(0.05)
    return True


def _read_report(path: Path) -> dict[str, Any]:
    report = json.loads(path.read_text()) if path.exists() else {}
    assert isinstance(report, dict)
    return report
