"""The benchmark: our way and others, interleaved against one server, each measurement in fresh processes.

    python -m dcp_remote.bench.run --rounds 5 --output bench-output

Prints a table, and writes `bench.json` (every measurement), `bench.md` (the table) and, with matplotlib, `bench.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dcp_remote.bench.server import BenchServer, bench_server
from dcp_remote.bench.shape import Shape
from dcp_remote.bench.worker import Action, Measured, Task
from dcp_remote.ranges import MiB
from dcp_remote.terminal import human_bytes

GiB = 1024 * MiB

# Nobody takes as long, unless he hangs.
_MEASUREMENT_SECONDS = 300.0

# Settings of the server, by name.
REGIMES: dict[str, tuple[bool, Shape]] = {
    "http": (False, Shape()),
    "tls": (True, Shape()),
    "100 ms, 50 MB/s": (False, Shape(latency_ms=100, bandwidth_bytes_per_second=50_000_000)),
    "5 % 503": (False, Shape(slow_down_share=0.05)),
}

ACTIONS: tuple[Action, ...] = ("save", "load")

CLIENTS = (
    "dcp_remote",
    "FsspecWriter + s3fs",
    "FsspecWriter + s3fs, best",
    "s3torchconnector",
    "s3torchconnector, best",
    "torch.save + boto3",
    "torch.save + boto3, best",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, of all ranks.

    Attributes:
        regime: One of `REGIMES`.
        client: One of `CLIENTS`.
        action: "save" or "load".
        ranks: How many.
        round: Which, from 0.
        state_bytes: Of all ranks.
        wall_seconds: Of the slowest rank.
        cpu_seconds: Of all ranks.
        above_state_bytes: Of the rank that needed most.
        requests: That the server answered.
        sent_bytes: Bodies, on the wire, to the server.
        got_bytes: And from it.
        failed: Why there are no figures; None if there are.
    """

    regime: str
    client: str
    action: str
    ranks: int
    round: int
    state_bytes: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    above_state_bytes: int = 0
    requests: int = 0
    sent_bytes: int = 0
    got_bytes: int = 0
    failed: str | None = None


def rows(
    *, regimes: Sequence[str], clients: Sequence[str], ranks: Sequence[int], rounds: int, shape: str, size_bytes: int
) -> Iterator[Row]:
    """Measure; what is compared follows each other, in an order that changes with each round."""
    for regime in regimes:
        tls, shaped = REGIMES[regime]
        with bench_server(size_bytes=size_bytes, tls=tls, shape=shaped) as server:
            for world_size in ranks:
                for number in range(rounds):
                    turn = number % len(clients)
                    for client in (*clients[turn:], *clients[:turn]):
                        server.clear()
                        for action in ACTIONS:
                            task = Task(
                                client=client,
                                action=action,
                                url="s3://bench/checkpoint",
                                shape=shape,
                                options=dict(server.storage_options),
                                world_size=world_size,
                                store_port=_free_port() if world_size > 1 else 0,
                            )
                            row = _row(server, regime, number, task)
                            yield row
                            if row.failed is not None:
                                break


def _row(server: BenchServer, regime: str, number: int, task: Task) -> Row:
    server.reset()
    row = Row(regime, task.client, task.action, task.world_size, number)
    try:
        measured = _measured(task)
    except (subprocess.SubprocessError, ValueError) as error:
        return replace(row, failed=str(error)[-1000:])
    counts = server.counts().total
    return replace(
        row,
        state_bytes=sum(one.state_bytes for one in measured),
        wall_seconds=max(one.wall_seconds for one in measured),
        cpu_seconds=sum(one.cpu_seconds for one in measured),
        above_state_bytes=max(one.above_state_bytes for one in measured),
        requests=counts.requests,
        sent_bytes=counts.body_bytes_in,
        got_bytes=counts.body_bytes_out,
    )


def _measured(task: Task) -> list[Measured]:
    """By one process a rank."""
    command = [sys.executable, "-m", "dcp_remote.bench.worker", json.dumps(asdict(task))]
    processes = [
        subprocess.Popen(  # noqa: S603  # of our own
            command,
            env=os.environ | {"RANK": str(rank), "AWS_EC2_METADATA_DISABLED": "true"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(task.world_size)
    ]
    try:
        told = [process.communicate(timeout=_MEASUREMENT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, said) in zip(processes, told, strict=True):
        if process.returncode:
            raise ValueError(said.strip()[-1000:] or f"ended with {process.returncode}")
    return [Measured(**json.loads(out.splitlines()[-1])) for out, _ in told]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def table(measured: Sequence[Row]) -> str:
    """Medians, in Markdown; by how much others are slower than we are."""
    lines = [
        "| server, ranks | client | save s | load s | CPU s/GiB up, down | memory above state | requests up, down |",
        "|---|---|---|---|---|---|---|",
    ]
    groups = dict.fromkeys((row.regime, row.ranks, row.client) for row in measured)
    for regime, ranks, client in groups:
        own = [_median(measured, regime, ranks, "dcp_remote", action) for action in ("save", "load")]
        both = [_median(measured, regime, ranks, client, action) for action in ("save", "load")]
        whys = [row.failed for row in measured if (row.regime, row.ranks, row.client) == (regime, ranks, client)]
        failed = next(filter(None, whys), None)
        cells = [f"{regime}, {ranks}", client]
        for mine, one in zip(own, both, strict=True):
            told = f"{one['wall']:.2f}" if one else "failed"
            cells.append(f"{told} ({one['wall'] / mine['wall']:.1f} x)" if one and mine and one != mine else told)
        cells.append(", ".join(f"{one['cpu']:.2f}" if one else "–" for one in both))
        cells.append(", ".join(human_bytes(int(one["above"])) if one else "–" for one in both))
        cells.append(", ".join(f"{one['requests']:.0f}" if one else "–" for one in both))
        lines.append("| " + " | ".join(cells) + " |")
        if failed:
            lines[-1] += f" <!-- {failed.splitlines()[-1][:200]} -->"
    return "\n".join(lines) + "\n"


def _median(measured: Sequence[Row], regime: str, ranks: int, client: str, action: str) -> dict[str, float] | None:
    found = [
        row
        for row in measured
        if (row.regime, row.ranks, row.client, row.action) == (regime, ranks, client, action) and row.failed is None
    ]
    if not found:
        return None
    return {
        "wall": statistics.median(row.wall_seconds for row in found),
        "cpu": statistics.median(row.cpu_seconds / (row.state_bytes / GiB) for row in found),
        "above": statistics.median(row.above_state_bytes for row in found),
        "requests": statistics.median(row.requests for row in found),
    }


def chart(measured: Sequence[Row], path: Path) -> None:
    """Wall time of save and load, by client; of the first regime, for each number of ranks."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    regime = measured[0].regime
    ranks = sorted({row.ranks for row in measured if row.regime == regime})
    names = list(dict.fromkeys(row.client for row in measured))
    figure, axes = plt.subplots(1, len(ranks), figsize=(5 * len(ranks), 3.5), squeeze=False)
    for axis, world_size in zip(axes[0], ranks, strict=True):
        for shift, action in ((-0.2, "save"), (0.2, "load")):
            medians = [_median(measured, regime, world_size, name, action) for name in names]
            heights = [one["wall"] if one else 0.0 for one in medians]
            axis.barh([place + shift for place in range(len(names))], heights, height=0.38, label=action)
        axis.set_yticks(range(len(names)), names if world_size == ranks[0] else [""] * len(names))
        axis.invert_yaxis()
        axis.set_xlabel("seconds")
        axis.set_title(f"{regime}, {world_size} rank{'s' if world_size > 1 else ''}")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m dcp_remote.bench.run", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=list(REGIMES))
    parser.add_argument("--clients", nargs="+", default=list(CLIENTS), choices=list(CLIENTS))
    parser.add_argument("--shape", default="large")
    parser.add_argument("--server-bytes", type=int, default=3 * GiB)
    parser.add_argument("--output", type=Path, default=Path("bench-output"))
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    measured: list[Row] = []
    for row in rows(
        regimes=options.regimes,
        clients=options.clients,
        ranks=options.ranks,
        rounds=options.rounds,
        shape=options.shape,
        size_bytes=options.server_bytes,
    ):
        measured.append(row)
        what = f"{row.regime}, {row.ranks} ranks, round {row.round}: {row.client} {row.action}"
        sys.stdout.write(f"{what}: {row.failed.splitlines()[-1] if row.failed else f'{row.wall_seconds:.2f} s'}\n")
        sys.stdout.flush()
    report: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "seconds": time.monotonic() - began,
        "rows": [asdict(row) for row in measured],
    }
    (options.output / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.output / "bench.md").write_text(table(measured))
    sys.stdout.write("\n" + table(measured))
    chart(measured, options.output / "bench.png")


if __name__ == "__main__":
    main()
