"""Operations at the key-value store of rounds, heartbeats, saves and restores: real processes, a real TCPStore.

Each is a limit for one rank. What a rank asks in vain while it waits depends on time, and is not counted here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl(2), and names of Unix sockets without files")

# Operations of one rank, in the rounds of a phase of 4 rounds, or of a whole save or restore: those of eight ranks of a
# host are mostly of one of them. Where ranks arrive a quarter of a second apart, a host speaks twice.
ROUNDS_MAX = {
    **dict.fromkeys(("4 gathers", "4 scatters", "4 scatters by host"), 4 * 1.5),
    "first save": 5.0,
    "warm save": 3.0,
    "another warm save": 3.0,
    "restore": 7.0,
}

# The same of two ranks on one host, of which the coordinator is one.
ROUNDS_OF_TWO_MAX = {
    **dict.fromkeys(("4 gathers", "4 scatters", "4 scatters by host"), 4 * 4.7),
    "first save": 15.5,
    **dict.fromkeys(("warm save", "another warm save"), 11.5),
    "restore": 15.0,
}
REQUESTS_OF_TWO_MAX = {"first save": 9, "warm save": 6, "another warm save": 6, "restore": 6}

# Operations of a rank by its heartbeats, in a second: ranks of one host publish theirs together.
BEATS_MAX = {"heartbeats outside an operation": 1.5, "a gather, and heartbeats in an operation": 3.0}
# The same in a save or a restore that takes less than a second, most of them as ranks enter and leave it.
BEATS_OF_SAVE_MAX = dict.fromkeys(("first save", "warm save", "another warm save", "restore"), 4.5)

# Connections to the store of a rank: torch's and the heartbeat's, with those of rank 0 and the sockets of the store
# itself; and none that outlives its group.
CONNECTIONS_MAX = dict.fromkeys(("4 gathers", "first save", "another warm save", "restore"), 2.4)
CONNECTIONS_MAX |= dict.fromkeys(("close a group", "close a manager"), 1.25)

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


def above(phases: dict[str, Any], figure: str, limits: Mapping[str, float], *, ranks: int = 1) -> dict[str, float]:
    """Return the phases that cost more than they may."""
    found = {name: phases[name][figure] / ranks for name in limits}
    return {name: count for name, count in found.items() if count > limits[name]}


def assert_few(phases: dict[str, Any], ranks: int, *, beats: int) -> None:
    """That no phase costs more than is known; all that do are named at once."""
    assert above(phases, "without_looks_per_rank", ROUNDS_MAX) == {}
    assert above(phases, "by_heartbeats_per_rank", BEATS_MAX, ranks=beats) == {}
    assert above(phases, "by_heartbeats_per_rank", BEATS_OF_SAVE_MAX) == {}
    assert above(phases, "connections_per_rank", CONNECTIONS_MAX) == {}
    assert above(phases, "requests", REQUESTS_MAX, ranks=ranks) == {}


def test_of_32_ranks_on_four_hosts(tmp_path: Path) -> None:
    """A whole job: a group of its own, then a manager's restore of nothing, saves and a restore."""
    assert_few(measured(tmp_path, "--ranks", "32", "--hosts", "4", "--beats", "2"), 32, beats=2)


@pytest.mark.torture(smoke=False)
def test_of_128_ranks_on_16_hosts(tmp_path: Path) -> None:
    """With 128 ranks a rank asks no more often than with 32; the coordinator's part counts for less."""
    assert_few(measured(tmp_path, "--ranks", "128", "--hosts", "16", "--beats", "4"), 128, beats=4)


def test_of_two_ranks_on_one_host(tmp_path: Path) -> None:
    """The same job: what makes thousands of ranks cheap must not cost two."""
    phases = measured(tmp_path, "--ranks", "2", "--hosts", "1", "--beats", "1")
    assert above(phases, "without_looks_per_rank", ROUNDS_OF_TWO_MAX) == {}
    assert above(phases, "requests", REQUESTS_OF_TWO_MAX) == {}


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
