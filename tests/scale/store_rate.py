"""Operations a second of one TCPStore, by method and number of connections.

    python -m tests.scale.store_rate [--connections 1 32 512]

Each connection is of a process of its own, which has one request under way. On a machine with few cores the processes
that ask take most of the CPU: the second figure of a pair is for one second of CPU of the store, whose server has one
thread, and so what a store with a core of its own would serve.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

from tests.scale import phases
from tests.scale.processes import Ranks
from tests.scale.run import write

_METHODS = ("set", "get", "check", "check of a missing key", "add", "multi_get of 16")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 32, 512])
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each figure")
    chosen = parser.parse_args(arguments)
    gc.collect()
    gc.freeze()
    write("| connections | " + " | ".join(_METHODS) + " |")
    write("| ---: |" + " ---: |" * len(_METHODS))
    for connections in chosen.connections:
        cells = []
        with Ranks(connections, hosts=1) as ranks:
            for method in _METHODS:
                measured = ranks.run(phases.ask_store, method, chosen.seconds)
                count = sum(measured.values)
                cells.append(f"{count / measured.seconds:,.0f}, {count / measured.store_cpu_seconds:,.0f}")
        write(f"| {connections} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
