"""`dcp-remote bench`: measure a bucket from this machine, print what limits it, and write a report to publish."""

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

from dcp_remote.cli.findings import Probe, Unit, describe_support, find_limit
from dcp_remote.cli.probe import fresh_name, object_bytes, probe
from dcp_remote.common.text import escape_unprintable, human_bytes
from dcp_remote.common.units import GiB, KiB, MiB
from dcp_remote.errors import InvalidArgumentError, StorageError
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.cloud.circuit_breaker import DirectCounts
from dcp_remote.storage.limits import take_limits
from dcp_remote.storage.url import parse_url

# Defaults: a few seconds of a usual connection in each direction, and less than a few cents at any provider.
BYTES = 256 * MiB
SECONDS = 60.0
OUTPUT = "dcp-remote-bench.json"

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": KiB, "MiB": MiB, "GiB": GiB}

# Timeout of small requests, so that an outage is reported within seconds. Large bodies have the timeouts of a save.
_QUICK_SECONDS = 5.0

# Exit code of a program that a signal ended is this plus the signal's number, by convention of shells.
_SIGNALLED = 128
# Signals that end a process and can be delayed until the objects are deleted. Windows has no SIGHUP.
_SIGNALS = tuple(
    number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None
)


def parse_bytes(text: str) -> int:
    """Parse a size such as `8MiB`, `64KB` or a number of bytes.

    Raises:
        argparse.ArgumentTypeError: The text has another form.
    """
    found = re.fullmatch(r"(\d+)([KMG]i?B|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"not a size like 8MiB, 64KB or 268435456: {text}")
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
    """Measure, print, and write the report; costs as in `dcp_remote.cli.probe`.

    Args:
        url: URL of a prefix that may be written.
        storage_options: Options as for `RemoteWriter`.
        bytes_max: Most bytes to upload, and to download.
        seconds_max: Seconds after which no new measurement starts.
        name: Name of the bucket or machine in the report, or None.
        output: File for the report; must not exist.
        out: Output stream.

    Raises:
        InvalidArgumentError: `bytes_max` or `seconds_max` is out of range, or the report's folder does not exist.
        PermissionDeniedError: There are no credentials, or they permit no writing or reading.
        StorageError: The bucket does not exist, or does not answer; or, raised after the report was written, objects
            could not be deleted, or the store ignores conditions.
        FileExistsError: The file for the report exists already.
        SystemExit: A signal ended the measurement.
    """
    store = open_store(url, storage_options)
    object_bytes(bytes_max)
    if not 0 < seconds_max < math.inf:
        raise InvalidArgumentError("--seconds must be a positive number.", seconds=seconds_max)
    scheme = parse_url(url).scheme
    unit: Unit = "thread" if scheme in {"file", "memory"} else "connection"
    fresh = fresh_name()
    prefix_url = escape_unprintable(store.child(fresh).url)

    def tell(line: str) -> None:
        out.write(f"… {line}\n")
        out.flush()

    with _open_report(output) as file:
        # Printed before anything is put, so that a user who kills this process knows what to delete.
        out.write(f"{prefix_url}: objects below this URL are written, read and deleted\n")
        out.flush()
        quick = _open_quick_store(url, storage_options, store)
        with _handle_signals(prefix_url) as signals:
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
        document = _build_report(found, direct, scheme=scheme, unit=unit, name=name)
        file.write(json.dumps(document, indent=2) + "\n")
    out.writelines(f"{line}\n" for line in _format_lines(found, direct, unit))
    out.write(escape_unprintable(f"report: {output}") + "\n")
    if found.objects_left:
        raise StorageError(
            "Some objects could not be deleted; the warning above names the URL to clean up.",
            objects=found.objects_left,
        )
    if False in {found.creates_if_absent, found.compares_and_swaps}:
        raise StorageError(
            "This store ignores the conditions of conditional writes, so it cannot hold checkpoints safely.",
            create_if_absent=found.creates_if_absent,
            compare_and_swap=found.compares_and_swaps,
        )


def _open_quick_store(url: str, storage_options: Mapping[str, object], store: ObjectStore) -> ObjectStore:
    """Open the URL with shorter timeouts; files and memory have none, so `store` itself is returned for them."""
    parsed = parse_url(url)
    if parsed.scheme in {"file", "memory"}:
        return store
    from dcp_remote.storage.cloud.config import Timeouts
    from dcp_remote.storage.cloud.store import open_cloud_store

    timeouts = Timeouts(floor_seconds=_QUICK_SECONDS, silence_seconds=_QUICK_SECONDS)
    return open_cloud_store(parsed, take_limits(storage_options)[1], timeouts=timeouts)


def _direct_counts(store: ObjectStore) -> DirectCounts:
    """Return the counts of how ranges were read so far; zeros for files and memory."""
    if parse_url(store.url).scheme in {"file", "memory"}:
        return DirectCounts()
    from dcp_remote.storage.cloud.store import CloudStore

    return store.direct_counts if isinstance(store, CloudStore) else DirectCounts()


@contextmanager
def _open_report(output: Path) -> Iterator[TextIO]:
    """Create the report's file before anything is sent; remove the file if the block raises.

    Raises:
        InvalidArgumentError: The folder does not exist.
        FileExistsError: The file exists already, perhaps with the results of a long measurement.
        OSError: The file cannot be written.
    """
    if not output.parent.is_dir() or output.is_dir():
        raise InvalidArgumentError("The report cannot be written there.", output=output)
    if output.is_file():
        raise FileExistsError(errno.EEXIST, "The report exists already; choose another file with --output", str(output))
    # A path that exists and is not a file (/dev/null, a pipe) is written but never removed.
    is_new = not output.exists()
    with output.open("x" if is_new else "w", encoding="utf-8") as file:
        try:
            yield file
        except BaseException:
            if is_new:
                output.unlink(missing_ok=True)
            raise


class _SignalHandler:
    """Signal handler: the first signal ends the measurement, and no signal ends the deletion that follows.

    Args:
        prefix_url: URL below which the objects are.

    Attributes:
        first: Number of the first signal, or None.
    """

    def __init__(self, prefix_url: str) -> None:
        self._prefix_url = prefix_url
        self._printed: set[str] = set()
        self._held = False
        self.first: int | None = None

    def hold(self) -> None:
        """Let no later signal interrupt."""
        self._held = True

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Handle a signal, as `signal.signal` calls it."""
        should_exit = self.first is None and not self._held
        if self.first is None:
            self.first = number
        if should_exit:
            self._print_once("interrupted; waiting for pending requests, then deleting")
            raise SystemExit(_SIGNALLED + number)
        self._print_once("still waiting for pending requests and for the deletion of")

    def _print_once(self, text: str) -> None:
        if text in self._printed:
            return
        self._printed.add(text)
        # Not through `sys.stderr`, which the signal may have interrupted in the middle of a line.
        with suppress(OSError):
            os.write(2, f"dcp-remote: {text} the objects below {self._prefix_url}\n".encode(errors="backslashreplace"))


@contextmanager
def _handle_signals(prefix_url: str) -> Iterator[_SignalHandler]:
    """Install the signal handlers, and put the previous ones back at the end.

    Raises:
        SystemExit: A signal came: raised at once, or after the objects were deleted.
    """
    signals = _SignalHandler(prefix_url)
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            # Ignored signals stay ignored, as under nohup; handlers installed outside Python (None) stay in place.
            if signal.getsignal(number) not in {signal.SIG_IGN, None}:
                previous[number] = signal.signal(number, signals)
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if signals.first is not None:
        raise SystemExit(_SIGNALLED + signals.first)


def _build_report(
    found: Probe, direct: DirectCounts, *, scheme: str, unit: Unit, name: str | None
) -> dict[str, object]:
    """Return the report, which must identify neither the bucket nor the user."""
    return {
        "dcp_remote": version("dcp-remote"),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "name": name,
        "scheme": scheme,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "limit": find_limit(found, unit=unit),
        "measured": asdict(found),
        "ranges_read": asdict(direct),
    }


def _explain_indirect_reads(direct: DirectCounts) -> str:
    """Return why some ranges were not read directly; empty if all were."""
    if direct.direct == direct.ranges:
        return ""
    return (
        f"; the others were read by obstore, which needs more CPU ({direct.refused} refused by the store, "
        f"{direct.after_breaks} after broken connections, {direct.skipped} not tried: a pause after such failures, or "
        "a proxy)"
    )


def _format_lines(found: Probe, direct: DirectCounts, unit: Unit) -> Iterator[str]:
    first, later, slowest = (
        f"{1000 * seconds:.1f} ms"
        for seconds in (found.first_answer_seconds, found.answer_seconds, found.slow_answer_seconds)
    )
    yield f"first request        {first}{', including credentials and connection' * (unit == 'connection')}"
    yield f"later requests       {later} (median), {slowest} (slowest)"
    yield f"small reads          {found.small_reads_per_second:.0f}/s by 8 {unit}s"
    yield f"create-if-absent     {describe_support(found.creates_if_absent)}"
    yield f"compare-and-swap     {describe_support(found.compares_and_swaps)}"
    yield f"requests sent again  {found.requests_again} of {found.requests}, {found.slow_downs} refused for their rate"
    if direct.ranges:
        yield f"ranges read directly {direct.direct} of {direct.ranges}{_explain_indirect_reads(direct)}"
    if found.up:
        yield f"\nobjects of {human_bytes(found.object_bytes)}"
        yield f"{f'{unit}s':<11}    up MiB/s  CPU s/GiB  down MiB/s  CPU s/GiB"
    for up, down in zip(found.up, found.down, strict=True):
        yield (
            f"{up.connections:>11}  {up.bytes_per_second / MiB:>10.1f}  {up.cpu_seconds_per_gib:>9.2f}  "
            f"{down.bytes_per_second / MiB:>10.1f}  {down.cpu_seconds_per_gib:>9.2f}"
        )
    if found.stopped_early:
        yield "time ran out before all measurements: give more --seconds"
    yield f"\n{find_limit(found, unit=unit)}"
