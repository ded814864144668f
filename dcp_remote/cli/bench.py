"""`dcp-remote bench`: what a bucket gives this machine, and what limits it; as text, and as a report for others."""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from dcp_remote.bench.probe import Probe, limit, object_bytes, probe
from dcp_remote.errors import InvalidArgumentError, StorageError
from dcp_remote.ranges import MiB
from dcp_remote.storage import open_store
from dcp_remote.terminal import human_bytes, printable
from dcp_remote.url import parse_url

# Some seconds of a usual connection each way, and a few cents nowhere.
BYTES = 256 * MiB
SECONDS = 60.0
OUTPUT = "dcp-remote-bench.json"

_UNITS = {"": 1, "MiB": MiB, "GiB": 1024 * MiB}

# What a shell says of a program that Ctrl-C ended.
_INTERRUPTED = 130


def parse_bytes(text: str) -> int:
    """Of `256MiB`, `4GiB` or a number of bytes.

    Raises:
        argparse.ArgumentTypeError: It is none of these.
    """
    found = re.fullmatch(r"(\d+)(MiB|GiB|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"not a size like 256MiB, 4GiB or 268435456: {text}")
    return int(found[1]) * _UNITS[found[2]]


def run(
    url: str,
    *,
    storage_options: Mapping[str, object],
    bytes_max: int,
    seconds_max: float,
    name: str | None,
    output: Path,
    out: TextIO,
) -> None:
    """Measure, print, and write the report; see `dcp_remote.bench.probe`.

    Args:
        url: Of a prefix that may be written.
        storage_options: As for `RemoteWriter`.
        bytes_max: How much may be put, and read.
        seconds_max: After which nothing more is begun.
        name: What the report calls this place; None leaves it without a name.
        output: Where the report goes.
        out: Where the text goes.

    Raises:
        InvalidArgumentError: A number makes no sense, or the report's folder is not there.
        PermissionDeniedError: There are no credentials, or they may not write or read.
        StorageError: There is no such bucket, or it does not answer; or, after all else, what was put could not be
            deleted.
        SystemExit: Somebody interrupted.
    """
    store = open_store(url, storage_options)
    object_bytes(bytes_max)
    if not 0 < seconds_max < math.inf:
        raise InvalidArgumentError("--seconds is a positive number.", seconds=seconds_max)
    if not output.parent.is_dir() or output.is_dir():
        # Before a byte is sent: a report that cannot be written is a measurement for nothing.
        raise InvalidArgumentError("The report cannot be written there.", output=output)

    def tell(line: str) -> None:
        out.write(f"… {line}\n")
        out.flush()

    out.write(printable(f"{store.url}: below it, a fresh prefix is written, read and deleted") + "\n")
    try:
        found = probe(store, bytes_max=bytes_max, seconds_max=seconds_max, tell=tell)
    except KeyboardInterrupt:
        out.write("interrupted\n")
        raise SystemExit(_INTERRUPTED) from None
    out.writelines(f"{line}\n" for line in _lines(found))
    document = _report(found, scheme=parse_url(url).scheme, name=name)
    output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    out.write(printable(f"report: {output}") + "\n")
    if found.objects_left:
        raise StorageError(
            "Not all that was put could be deleted; the warning says where it lies.", objects=found.objects_left
        )


def _report(found: Probe, *, scheme: str, name: str | None) -> dict[str, object]:
    """For others: nothing of it says whose bucket this is, or who asked."""
    return {
        "dcp_remote": version("dcp-remote"),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "name": name,
        "scheme": scheme,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "limit": limit(found),
        "measured": asdict(found),
    }


def _lines(found: Probe) -> Iterator[str]:
    first, later, slowest = (
        f"{1000 * seconds:.1f} ms"
        for seconds in (found.first_answer_seconds, found.answer_seconds, found.slow_answer_seconds)
    )
    yield f"first answer         {first}, credentials and connection included"
    yield f"later answers        {later}, the slowest {slowest}"
    yield f"small reads          {found.small_reads_per_second:.0f}/s by 8 connections"
    yield f"create-if-absent     {_said(found.creates_if_absent)}"
    yield f"compare-and-swap     {_said(found.compares_and_swaps)}"
    yield f"requests sent again  {found.requests_again} of {found.requests}, {found.slow_downs} of them for their rate"
    if found.up:
        yield f"\nobjects of {human_bytes(found.object_bytes)}"
        yield "connections    up MiB/s  CPU s/GiB  down MiB/s  CPU s/GiB"
    for up, down in zip(found.up, found.down, strict=True):
        yield (
            f"{up.connections:>11}  {up.bytes_per_second / MiB:>10.1f}  {up.cpu_seconds_per_gib:>9.2f}  "
            f"{down.bytes_per_second / MiB:>10.1f}  {down.cpu_seconds_per_gib:>9.2f}"
        )
    if found.stopped_early:
        yield "time ran out before all was tried: --seconds gives it more"
    yield f"\n{limit(found)}"


def _said(answer: bool | None) -> str:  # noqa: FBT001  # an answer
    return {True: "works", False: "does NOT work: this store cannot hold checkpoints safely", None: "not known"}[answer]
