"""The benchmark: our way and others, interleaved against one server, each measurement in fresh processes.

    python -m tests.benchmark.run --output bench-output

Prints what it measures and then the tables; writes `results.json` (every measurement), `RESULTS.md` and `results.png`.
`python -m tests.benchmark.report.publish` puts them where the README shows them.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.benchmark.ceph import ceph_server
from tests.benchmark.clients.processes import Server, measure_step
from tests.benchmark.report.plan import FULL, QUICK, Group, Section
from tests.benchmark.report.publish import RESULTS, document, write
from tests.benchmark.report.rows import Results, Row
from tests.benchmark.report.tables import last_line
from tests.benchmark.server.server import bench_server
from tests.support.ceph import ceph_is_installed

_VERSIONS = ("torch", "obstore", "s3fs", "s3torchconnector", "boto3")


def rows(sections: Sequence[Section], *, verify: bool = True) -> Iterator[Row]:
    """Measure; what is compared follows each other, in an order that changes with each round."""
    for section in sections:
        if section.ceph:
            for number, group in section.turns():
                with ceph_server() as ceph:
                    yield from _group(ceph, section, group, number)
            continue
        with bench_server(
            size_bytes=section.server_bytes, tls=section.tls, verify=verify, shape=section.server
        ) as server:
            for number, group in section.turns():
                server.clear()
                yield from _group(server, section, group, number)


def _group(server: Server, section: Section, group: Group, number: int) -> Iterator[Row]:
    """Its steps in one round; those behind one that failed would find nothing."""
    for step in group.steps:
        row = measure_step(server, section, group, step, round_=number)
        yield row
        if row.failed is not None:
            return


def about_this_machine() -> dict[str, Any]:
    """Facts for `Results.about`, without a name of the machine or of a person."""
    versions = []
    for name in _VERSIONS:
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": ", ".join(versions),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round, a smaller state: it works, no more than that")
    parser.add_argument("--rounds", type=int, help="instead of each section's own")
    parser.add_argument(
        "--sections", nargs="+", choices=list(FULL), metavar="NAME", help=f"of {', '.join(FULL).replace('%', '%%')}"
    )
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    if absent := [name for name in options.sections or () if name not in plan]:
        parser.error(f"--quick has no section {', '.join(absent)}; it has {', '.join(plan)}")
    sections = [plan[name] for name in options.sections or plan]
    if not ceph_is_installed() and any(section.ceph for section in sections):
        sys.stdout.write("Ceph 16 is not installed: its section is left out (tests/support/ceph.py says how).\n")
        sections = [section for section in sections if not section.ceph]
    if options.rounds is not None:
        sections = [replace(section, rounds=options.rounds) for section in sections]
    options.output.mkdir(parents=True, exist_ok=True)  # before it takes half an hour for nothing
    about = about_this_machine()
    began = time.monotonic()
    measured: list[Row] = []

    def results() -> Results:
        return Results(about | {"seconds": round(time.monotonic() - began)}, tuple(measured))

    try:
        for row in rows(sections):
            if measured and measured[-1].section != row.section:
                # Whoever kills it has the sections that were done.
                keep(results(), options.output)
            measured.append(row)
            sys.stdout.write(f"{time.monotonic() - began:5.0f} s  {_told(row)}\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        # It takes long, and each figure stands by itself.
        sys.stdout.write("interrupted; of what was measured:\n")
    if not measured:
        return
    found = results()
    keep(found, options.output)
    write(found, options.output)
    sys.stdout.write("\n" + document(found))


def keep(results: Results, folder: Path) -> None:
    """The measurements alone, whole at any time."""
    unfinished = folder / f"{RESULTS}.unfinished"
    unfinished.write_text(results.to_json(), encoding="utf-8")
    unfinished.replace(folder / RESULTS)


def _told(row: Row) -> str:
    what = f"{row.section}: {row.client}, {row.action}, ranks {row.ranks}, round {row.round}"
    what += f", beside {row.beside}" if row.beside != "nothing" else ""
    if row.failed is not None:
        return f"{what}: failed: {last_line(row.failed)}"
    return f"{what}: {row.wall_seconds:.2f} s, {row.cpu_seconds_per_gib:.2f} CPU s/GiB"


if __name__ == "__main__":
    main()
