"""Operations at the key-value store of rounds, heartbeats, saves and restores: real processes, a real TCPStore.

Each is a limit for one rank. What a rank asks in vain while it waits depends on time, and is not counted here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl(2), and names of Unix sockets without files")

# Operations of one rank, in the rounds of a phase of 4 rounds, or of a whole save or restore; the coordinator's, which
# are shared out among all, are those above a whole number.
ROUNDS_MAX = {
    "4 gathers": 4 * 5.1,
    "4 scatters": 4 * 7.8,
    "4 scatters by host": 4 * 10.3,
    "first save": 23.3,
    "warm save": 10.3,
    "another warm save": 10.3,
    "restore": 35.4,
}

# Operations of one heartbeat.
BEAT_MAX = {"heartbeats outside an operation": 2.5, "a gather, and heartbeats in an operation": 4.0}

# Requests of all ranks to the object store.
REQUESTS_MAX = {"first save": 2.5, "warm save": 1.5, "another warm save": 1.5, "restore": 2.0}

_PROGRAM = """
import sys
from tests.scale import phases
from tests.scale.processes import Ranks
def fail(rank):
    if rank.rank == 2:
        raise ValueError("of rank 2")
sys.modules["tests.scale.phases"].fail = fail
with Ranks(4, hosts=2) as ranks:
    print(*ranks.pids, flush=True)
    if sys.argv[1] == "fail":
        ranks.run(fail)
    ranks.run(phases.first_use)
    sys.stdin.read()
"""


def measured(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.scale.run", "--json", str(folder / "figures.json"), *arguments]
    subprocess.run(command, check=True, timeout=250, stdout=subprocess.DEVNULL)
    phases: dict[str, Any] = json.loads((folder / "figures.json").read_text())["phases"]
    return phases


def assert_few(phases: dict[str, Any], ranks: int) -> None:
    """That no phase costs more than is known; all that do are named at once."""
    found = {name: phases[name]["without_looks_per_rank"] for name in ROUNDS_MAX}
    assert {name: count for name, count in found.items() if count > ROUNDS_MAX[name]} == {}
    beats = {name: phases[name]["per_beat"] for name in BEAT_MAX}
    assert {name: count for name, count in beats.items() if count > BEAT_MAX[name]} == {}
    requests = {name: phases[name]["requests"] / ranks for name in REQUESTS_MAX}
    assert {name: count for name, count in requests.items() if count > REQUESTS_MAX[name]} == {}


def test_of_32_ranks_on_four_hosts(tmp_path: Path) -> None:
    """A whole job: a group of its own, then a manager's restore of nothing, saves and a restore."""
    assert_few(measured(tmp_path, "--ranks", "32", "--hosts", "4", "--beats", "2"), 32)


@pytest.mark.torture(smoke=False)
def test_of_128_ranks_on_16_hosts(tmp_path: Path) -> None:
    """What 32 ranks ask, 128 ask of each rank as well; the coordinator's part counts for less."""
    assert_few(measured(tmp_path, "--ranks", "128", "--hosts", "16"), 128)


def test_two_ranks_ask_no_more_than_many(tmp_path: Path) -> None:
    """Of two ranks one is the coordinator, whose part counts half."""
    phases = measured(tmp_path, "--ranks", "2", "--hosts", "1", "--beats", "2")
    found = {name: phases[name]["without_looks_per_rank"] for name in ROUNDS_MAX}
    assert {name: count for name, count in found.items() if count > 1.5 * ROUNDS_MAX[name]} == {}


@pytest.mark.parametrize("end", ["fail", "kill"])
def test_no_process_outlives_the_command(end: str) -> None:
    """Neither when a rank raises, whose error is told, nor when the process that started all is killed."""
    program = [sys.executable, "-c", _PROGRAM, end]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        assert len(pids) == 5
        if end == "kill":
            process.kill()
        error = process.communicate(timeout=60)[1].decode()
    assert ("ValueError: of rank 2" in error) == (end == "fail")
    limit = time.monotonic() + 10
    while any(Path(f"/proc/{pid.decode()}").exists() for pid in pids):
        assert time.monotonic() < limit
        time.sleep(0.01)
