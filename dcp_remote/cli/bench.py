"""`dcp-remote bench`: what a bucket gives this machine, and what limits it; as text, and as a report for others."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import platform
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TextIO

from dcp_remote.bench.findings import Probe, Unit, limit, said
from dcp_remote.bench.probe import fresh_name, object_bytes, probe
from dcp_remote.errors import InvalidArgumentError, StorageError
from dcp_remote.ranges import MiB
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.circuit_breaker import DirectCounts
from dcp_remote.terminal import human_bytes, printable
from dcp_remote.url import parse_url

# Some seconds of a usual connection each way, and a few cents nowhere.
BYTES = 256 * MiB
SECONDS = 60.0
OUTPUT = "dcp-remote-bench.json"

_UNITS = {"": 1, "MiB": MiB, "GiB": 1024 * MiB}

# Of a request without a body, or hardly one: an outage is told in seconds. Bodies get the time that a save gives them.
_QUICK_SECONDS = 5.0

# What a shell says of a program that a signal ended is this and its number.
_SIGNALLED = 128
# Of those that end a process, the ones that can wait for what was put to be deleted. Windows has no SIGHUP.
_SIGNALS = tuple(
    number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None
)


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
            deleted, or the store ignores conditions.
        FileExistsError: There is a report already.
        SystemExit: A signal ended it.
    """
    store = open_store(url, storage_options)
    object_bytes(bytes_max)
    if not 0 < seconds_max < math.inf:
        raise InvalidArgumentError("--seconds is a positive number.", seconds=seconds_max)
    scheme = parse_url(url).scheme
    unit: Unit = "thread" if scheme in {"file", "memory"} else "connection"
    fresh = fresh_name()
    place = printable(store.child(fresh).url)

    def tell(line: str) -> None:
        out.write(f"… {line}\n")
        out.flush()

    with _report_at(output) as file:
        # Before anything is put: whoever kills this one knows what to delete.
        out.write(f"{place}: all below it is written, read and deleted\n")
        out.flush()
        quick = _quick(url, storage_options, store)
        with _signals(place) as signals:
            found = probe(
                store,
                name=fresh,
                bytes_max=bytes_max,
                seconds_max=seconds_max,
                tell=tell,
                quick=quick,
                unit=unit,
                hold=signals.hold,
            )
        direct = _direct_counts(store).plus(_direct_counts(quick))
        document = _report(found, direct, scheme=scheme, unit=unit, name=name)
        file.write(json.dumps(document, indent=2) + "\n")
    out.writelines(f"{line}\n" for line in _lines(found, direct, unit))
    out.write(printable(f"report: {output}") + "\n")
    if found.objects_left:
        raise StorageError(
            "Not all that was put could be deleted; the warning says where it lies.", objects=found.objects_left
        )
    if False in {found.creates_if_absent, found.compares_and_swaps}:
        raise StorageError(
            "This store does not keep conditional writes: it cannot hold checkpoints safely.",
            create_if_absent=found.creates_if_absent,
            compare_and_swap=found.compares_and_swaps,
        )


def _quick(url: str, storage_options: Mapping[str, object], store: ObjectStore) -> ObjectStore:
    """The same place by a client that gives up sooner; files and memory answer or do not."""
    parsed = parse_url(url)
    if parsed.scheme in {"file", "memory"}:
        return store
    from dcp_remote.storage.cloud import open_cloud_store
    from dcp_remote.storage.timeouts import Timeouts

    timeouts = Timeouts(floor_seconds=_QUICK_SECONDS, silence_seconds=_QUICK_SECONDS)
    return open_cloud_store(parsed, storage_options, timeouts=timeouts)


def _direct_counts(store: ObjectStore) -> DirectCounts:
    """How ranges were read so far; zeros for files and memory."""
    if parse_url(store.url).scheme in {"file", "memory"}:
        return DirectCounts()
    from dcp_remote.storage.cloud import CloudStore

    return store.direct_counts if isinstance(store, CloudStore) else DirectCounts()


@contextmanager
def _report_at(output: Path) -> Iterator[TextIO]:
    """The report, opened before a byte is sent; a file that was not written is gone behind the block.

    Raises:
        InvalidArgumentError: There is no such folder.
        FileExistsError: There is one already: it may be all that is left of a long measurement.
        OSError: It cannot be written.
    """
    if not output.parent.is_dir() or output.is_dir():
        raise InvalidArgumentError("The report cannot be written there.", output=output)
    if output.is_file():
        raise FileExistsError(errno.EEXIST, "A report is there already; --output names another", str(output))
    # What exists and is no file (/dev/null, a pipe) is nothing to lose, nor to remove.
    ours = not output.exists()
    with output.open("x" if ours else "w", encoding="utf-8") as file:
        try:
            yield file
        except BaseException:
            if ours:
                output.unlink(missing_ok=True)
            raise


class _Signals:
    """What a signal does here: the first one ends the measurement, and none the deletion that follows.

    Args:
        place: Where what was put lies.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._told: set[str] = set()
        self._held = False
        self.first: int | None = None

    def hold(self) -> None:
        """From here on nothing is interrupted."""
        self._held = True

    def __call__(self, number: int, _: FrameType | None) -> None:
        """See `signal.signal`."""
        end = self.first is None and not self._held
        if self.first is None:
            self.first = number
        if end:
            self._say("interrupted; waiting for requests under way, then deleting")
            raise SystemExit(_SIGNALLED + number)
        self._say("still waiting for requests under way, and for the deletion of")

    def _say(self, what: str) -> None:
        if what in self._told:
            return
        self._told.add(what)
        # Not by `sys.stderr`, which the signal may have interrupted in the middle of a line.
        with suppress(OSError):
            os.write(2, f"dcp-remote: {what} what lies below {self._place}\n".encode(errors="backslashreplace"))


@contextmanager
def _signals(place: str) -> Iterator[_Signals]:
    """With their handlers in place; behind it those that were there.

    Raises:
        SystemExit: One came: at once, or while what was put was deleted.
    """
    signals = _Signals(place)
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            # What is ignored stays ignored, under nohup, say; what others handle outside Python is theirs.
            if signal.getsignal(number) not in {signal.SIG_IGN, None}:
                before[number] = signal.signal(number, signals)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signals.first is not None:
        raise SystemExit(_SIGNALLED + signals.first)


def _report(found: Probe, direct: DirectCounts, *, scheme: str, unit: Unit, name: str | None) -> dict[str, object]:
    """For others: nothing of it says whose bucket this is, or who asked."""
    return {
        "dcp_remote": version("dcp-remote"),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "name": name,
        "scheme": scheme,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "limit": limit(found, unit=unit),
        "measured": asdict(found),
        "ranges_read": asdict(direct),
    }


def _others(direct: DirectCounts) -> str:
    """Why ranges were not read directly; empty if all were."""
    if direct.direct == direct.ranges:
        return ""
    return (
        f"; obstore read the others, at more CPU ({direct.refused} refused by the store, {direct.after_breaks} after "
        f"broken connections, {direct.skipped} not tried: a pause after these, or a proxy)"
    )


def _lines(found: Probe, direct: DirectCounts, unit: Unit) -> Iterator[str]:
    first, later, slowest = (
        f"{1000 * seconds:.1f} ms"
        for seconds in (found.first_answer_seconds, found.answer_seconds, found.slow_answer_seconds)
    )
    yield f"first answer         {first}{', credentials and connection included' * (unit == 'connection')}"
    yield f"later answers        {later}, the slowest {slowest}"
    yield f"small reads          {found.small_reads_per_second:.0f}/s by 8 {unit}s"
    yield f"create-if-absent     {said(found.creates_if_absent)}"
    yield f"compare-and-swap     {said(found.compares_and_swaps)}"
    yield f"requests sent again  {found.requests_again} of {found.requests}, {found.slow_downs} of them for their rate"
    if direct.ranges:
        yield f"ranges read directly {direct.direct} of {direct.ranges}{_others(direct)}"
    if found.up:
        yield f"\nobjects of {human_bytes(found.object_bytes)}"
        yield f"{f'{unit}s':<11}    up MiB/s  CPU s/GiB  down MiB/s  CPU s/GiB"
    for up, down in zip(found.up, found.down, strict=True):
        yield (
            f"{up.connections:>11}  {up.bytes_per_second / MiB:>10.1f}  {up.cpu_seconds_per_gib:>9.2f}  "
            f"{down.bytes_per_second / MiB:>10.1f}  {down.cpu_seconds_per_gib:>9.2f}"
        )
    if found.stopped_early:
        yield "time ran out before all was tried: --seconds gives it more"
    yield f"\n{limit(found, unit=unit)}"
