"""Operations and seconds of rounds, heartbeats, saves and restores, by the number of ranks.

    python -m tests.scale.run --ranks 512 --hosts 64 [--json FILE]

Prints a table of the phases of a job: seconds; operations at the key-value store; of these, for each rank, those of its
rounds but for looks in vain, its looks in vain, and those of its heartbeats' thread; the last also for each heartbeat;
bytes of values for each rank, to the store and from it; connections of each rank to the store, afterwards; requests to
the object store; CPU of the store's process, of rank 0, and of all ranks. 512 ranks take two minutes and 12 GiB on two
cores.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

# Before torch is imported: hundreds of ranks share the cores, and a fork takes no threads along.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Both ends of each connection of the store look up the other's host: without a nameserver that takes time, and warns.
os.environ |= {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

from tests.scale import phases
from tests.scale.processes import Measured, Ranks

# Rounds of one operation.
ROUNDS = 4


def measure(ranks: Ranks, *, beats: int, tensors: int) -> Iterator[tuple[str, Measured]]:
    """Yield each phase of a job and its cost."""
    yield "first use of a group, one gather", ranks.run(phases.first_use)
    yield f"{ROUNDS} gathers", ranks.run(phases.gather, ROUNDS)
    yield f"{ROUNDS} scatters", ranks.run(phases.scatter, ROUNDS)
    yield f"{ROUNDS} scatters by host", ranks.run(phases.scatter_by_host, ROUNDS)
    yield "heartbeats outside an operation", ranks.run(phases.rest, beats)
    yield "a gather, and heartbeats in an operation", ranks.run(phases.rest_inside, beats)
    yield "close a group", ranks.run(phases.close_group)
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        ranks.run(phases.open_manager, f"{folder}/run", tensors)
        yield "first use of a manager, a restore of nothing", ranks.run(phases.restore_nothing)
        yield "first save", ranks.run(phases.save, 1)
        yield "warm save", ranks.run(phases.save, 2)
        yield "another warm save", ranks.run(phases.save, 3)
        yield "restore", ranks.run(phases.restore, 3)
        yield "close a manager", ranks.run(phases.close_manager)


def describe(name: str, measured: Measured, world_size: int) -> dict[str, Any]:
    """Return the figures of a phase."""
    rounds = measured.count(is_of_round=True)
    looks = measured.count(is_look=True)
    beats = measured.count(is_of_round=False)
    return {
        "seconds": round(measured.seconds, 3),
        "operations": rounds + beats,
        "without_looks_per_rank": round((rounds - looks) / world_size, 2),
        "looks_per_rank": round(looks / world_size, 2),
        "by_heartbeats_per_rank": round(beats / world_size, 2),
        "per_beat": round(beats / measured.beats, 2) if measured.beats else None,
        "beats_per_rank": round(measured.beats / world_size, 2),
        "store_cpu_seconds": round(measured.store_cpu_seconds, 2),
        "value_bytes_per_rank": round(measured.value_bytes / world_size),
        "connections_per_rank": round(measured.connections / world_size, 2),
        "requests": sum(measured.values) if name == "restore" else measured.values[0] if "save" in name else None,
        "coordinator_cpu_seconds": round(measured.coordinator_cpu_seconds, 2),
        "ranks_cpu_seconds": round(measured.ranks_cpu_seconds, 2),
        "kinds": {
            f"{'heartbeat' if kind.by_heartbeat else 'rank'}, {kind.subject}, {kind.method}"
            + " in vain" * kind.in_vain: count
            for kind, count in sorted(measured.operations.items())
        },
    }


_COLUMNS = {
    "seconds": "s",
    "operations": "operations",
    "without_looks_per_rank": "for a rank",
    "looks_per_rank": "looks",
    "by_heartbeats_per_rank": "by heartbeats",
    "per_beat": "for a beat",
    "value_bytes_per_rank": "bytes for a rank",
    "connections_per_rank": "connections",
    "requests": "requests",
    "store_cpu_seconds": "store, CPU s",
    "coordinator_cpu_seconds": "rank 0, CPU s",
    "ranks_cpu_seconds": "all ranks, CPU s",
}


def write(line: str) -> None:
    """Write a line to the output at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the figures as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--hosts", type=int, help="modelled hosts (default: one for eight ranks)")
    parser.add_argument("--beats", type=int, default=4, help="heartbeats that are measured, of a second or more each")
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--timeout-seconds", type=float, default=60.0, help="longest time of one phase")
    parser.add_argument("--json", metavar="FILE", help="file for all figures")
    chosen = parser.parse_args(arguments)
    hosts = chosen.hosts or max(1, chosen.ranks // 8)
    gc.collect()
    gc.freeze()  # the collector of a rank must not write into pages that all share
    began = time.monotonic()
    found: dict[str, Any] = {}
    with Ranks(chosen.ranks, hosts=hosts, timeout_seconds=chosen.timeout_seconds) as ranks:
        write(f"{chosen.ranks} ranks on {hosts} modelled hosts, started in {time.monotonic() - began:.1f} s\n")
        write("| phase | " + " | ".join(_COLUMNS.values()) + " |")
        write("| --- |" + " ---: |" * len(_COLUMNS))
        for name, measured in measure(ranks, beats=chosen.beats, tensors=chosen.tensors):
            figures = found[name] = describe(name, measured, chosen.ranks)
            write(
                f"| {name} | "
                + " | ".join("" if figures[column] is None else str(figures[column]) for column in _COLUMNS)
                + " |"
            )
        memory_bytes = ranks.memory_bytes()
    write(f"\n{memory_bytes / 2**20 / chosen.ranks:.0f} MiB for each rank; {time.monotonic() - began:.0f} s in all")
    if chosen.json is not None:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump({"ranks": chosen.ranks, "hosts": hosts, "phases": found}, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])
