"""Progress as the user sees it: bars of tqdm, log records, calls of a function."""

from __future__ import annotations

import errno
import io
import logging
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import CheckpointManager, ProgressReport, RemoteReader
from dcp_remote.common.units import MiB
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.manager import progress as progress_module
from dcp_remote.manager.progress import Progress, start_progress

REPOSITORY = Path(__file__).parent.parent.parent
LOGGER = logging.getLogger("dcp_remote.manager.progress")


class Clock:
    """Clock that moves only when a test sets it."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Terminal(io.StringIO):
    """Standard error that is a terminal; its n-th write raises an error."""

    def __init__(self, error: BaseException | None = None, number: int = 0) -> None:
        super().__init__()
        self._error, self._left = error, number

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._left -= 1
        if self._error is not None and self._left < 0:
            raise self._error
        return super().write(text)


def on_terminal(monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO, clock: Clock) -> Progress:
    """Begin the progress of a save of 1000 MiB that is shown on a terminal."""
    monkeypatch.setattr("sys.stderr", terminal)
    progress = start_progress(True, "save", is_coordinator=True)
    progress._clock, progress._next_seconds = clock, clock()
    progress.begin(7, 1000 * MiB)
    return progress


# ---- a bar


def test_bar_of_a_terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Draw the name, the share and the bytes, ten times a second at most; log the last line alone."""
    caplog.set_level(logging.INFO, LOGGER.name)
    terminal = Terminal()
    progress = on_terminal(monkeypatch, terminal, clock)
    for _ in range(500):
        progress.add(MiB)
        clock.seconds += 0.01
    assert 45 <= terminal.getvalue().count("saving step 7: ") <= 55
    last = terminal.getvalue().split("\r")[-1]
    assert last.startswith("saving step 7:  4")
    assert "/0.98G [" in last
    progress.close("saved step 7: 1000.0 MiB")
    assert terminal.getvalue().split("\r")[-1].startswith("saving step 7: 100%|")
    assert caplog.messages == ["saved step 7: 1000.0 MiB"]


def test_the_bar_is_below_those_of_a_training(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it stays below the bar of a training loop."""
    tqdm = pytest.importorskip("tqdm", reason="not installed").tqdm
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with tqdm(total=4, file=terminal, desc="training", ncols=60, mininterval=0) as bar:
        progress = on_terminal(monkeypatch, terminal, clock)
        assert "\n\rsaving step 7: " in terminal.getvalue()
        progress.add(1000 * MiB)
        progress.close("saved step 7")
        cleared = terminal.getvalue()
        bar.update()
    assert cleared.endswith("\x1b[A")
    assert not cleared.removesuffix("\x1b[A").split("\r")[-1].strip()


def test_after_an_error_the_bar_ends(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar shows how far the save came, and no more is drawn."""
    terminal = Terminal()

    def save() -> None:
        with on_terminal(monkeypatch, terminal, clock) as progress:
            clock.seconds += 1
            progress.add(100 * MiB)
            raise KeyError

    with pytest.raises(KeyError):
        save()
    assert terminal.getvalue().endswith("\n")
    assert "saving step 7:  10%" in terminal.getvalue().split("\r")[-1]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(),
        OSError(errno.EIO, "the terminal is gone"),
        ValueError("I/O operation on closed file"),
        UnicodeEncodeError("ascii", "é", 0, 1, "no such letter"),
        RuntimeError("of a replaced stream"),
    ],
)
def test_streams_that_fail(
    error: Exception,
    number: int,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Raise nothing if a write fails, and log the last line."""
    caplog.set_level(logging.INFO, LOGGER.name)
    with on_terminal(monkeypatch, Terminal(error, number), clock) as progress:
        for _ in range(2):
            progress.add(1)
            clock.seconds += 0.1
        progress.close("saved")
    monkeypatch.undo()
    assert caplog.messages == ["saved"]


def test_a_stream_that_is_closed_meanwhile(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise nothing if the stream is closed during the save, as daemons close standard error."""
    terminal = Terminal()
    progress = on_terminal(monkeypatch, terminal, clock)
    terminal.close()
    clock.seconds += 1
    progress.add(1)
    progress.close("saved")
    start_progress(True, "save", is_coordinator=True).close()


def test_in_a_notebook(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw on a notebook's stream, which says that it is no terminal."""
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    progress = on_terminal(monkeypatch, stream, clock)
    progress.close("saved step 7")
    assert stream.getvalue().split("\r")[-1].startswith("saving step 7: 100%|")


SCRIPT = """
import sys
from dcp_remote.manager.progress import start_progress
with start_progress(True, "save", is_coordinator=True) as progress:
    progress.begin(1000, 100)
    for done in range(10):
        progress.add(10)
    progress.close("saved step 1000")
"""


def test_a_pseudoterminal() -> None:
    """A process draws on its own terminal."""
    ours, its = pty.openpty()
    ended = subprocess.run([sys.executable, "-c", SCRIPT], stderr=its, check=False, cwd=REPOSITORY)
    os.close(its)
    written = os.read(ours, 65536).decode()
    os.close(ours)
    assert ended.returncode == 0, written
    assert "saving step 1000: 100%|" in written


FULL_DISK = ["2>/dev/full"] if Path("/dev/full").exists() else []  # Linux has one


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/null", "2>&1 1>/dev/null | cat", *FULL_DISK])
def test_no_terminal_at_all(redirection: str) -> None:
    """Draw and raise nothing if standard error is closed, a file, a full disk or a pipe."""
    command = f'set -o pipefail; "$0" -c "$1" {redirection}'
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable, SCRIPT], capture_output=True, check=False, text=True, cwd=REPOSITORY
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# ---- threads


class Stuck(Terminal):
    """Terminal that was stopped with Ctrl-S: writes block until it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = threading.Event()
        self.goes_on = threading.Event()

    def write(self, text: str) -> int:
        self.is_stuck.set()
        assert self.goes_on.wait(60)
        return super().write(text)


def test_a_terminal_that_was_stopped(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block one thread; the others count on, and the save ends."""
    monkeypatch.setattr(progress_module, "_LAST_CALL_SECONDS", 0.01)
    terminal = Stuck()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = start_progress(True, "save", is_coordinator=True)
    progress._clock, progress._next_seconds = clock, clock()
    held_up = threading.Thread(target=progress.begin, args=(7, 10), daemon=True)
    held_up.start()
    assert terminal.is_stuck.wait(60)
    clock.seconds += 10
    progress.add(1)
    progress.close("saved")
    terminal.goes_on.set()
    held_up.join(60)
    assert not held_up.is_alive()


def test_many_threads(clock: Clock) -> None:
    """Count every byte; no two calls at a time, and none goes back."""
    told: list[int] = []
    under_way = threading.Lock()

    def note(report: ProgressReport) -> None:
        assert under_way.acquire(blocking=False)
        told.append(report.done_bytes)
        under_way.release()

    progress = Progress("save", note, clock=clock)
    progress.begin(7, 8 * 2000)

    def count() -> None:
        for _ in range(2000):
            progress.add(1)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    progress.add(0)
    assert told[-1] == 8 * 2000
    assert told == sorted(told)
    assert progress._function is note  # it has not raised


# ---- logs


def logging_progress(clock: Clock, total_bytes: int) -> Progress:
    progress = start_progress(True, "save", is_coordinator=True)  # pytest's standard error is no terminal
    progress._clock, progress._next_seconds = clock, clock()
    progress.begin(7, total_bytes)
    return progress


def test_without_a_terminal_a_line_a_minute(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Log a line per minute and the last line."""
    caplog.set_level(logging.INFO, LOGGER.name)
    with logging_progress(clock, 200 * MiB) as progress:
        for _ in range(185):
            clock.seconds += 1
            progress.add(MiB)
        progress.close("saved step 7: 200.0 MiB")
    assert caplog.messages == [
        "saving step 7: 30% of 200.0 MiB",
        "saving step 7: 60% of 200.0 MiB",
        "saving step 7: 90% of 200.0 MiB",
        "saved step 7: 200.0 MiB",
    ]


def test_a_short_save_logs_one_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Log only the last line of a save of less than a minute; nothing comes after it."""
    caplog.set_level(logging.INFO, LOGGER.name)
    progress = logging_progress(clock, 200 * MiB)
    progress.add(MiB)
    clock.seconds += 59
    progress.add(MiB)
    progress.close("saved")
    clock.seconds += 100
    progress.add(MiB)
    progress.close("saved twice")
    assert caplog.messages == ["saved"]


# ---- the argument `progress` of a manager


STATE_BYTES = 400_000 + 5 * 4000


def state_of(value: float) -> dict[str, Any]:
    """Return a state of one large and five small tensors, all of one value."""
    return {
        "weights": torch.full((100_000,), value),
        "more": {str(number): torch.full((1000,), value) for number in range(5)},
    }


def save_and_restore(url: str, **options: Any) -> None:
    with CheckpointManager(url, **options) as checkpoints:
        checkpoints.save(7, state_of(1.0), wait=True)
        state = state_of(0.0)
        assert checkpoints.restore(state) == 7
    assert torch.equal(state["weights"], torch.ones(100_000))


def test_a_function_is_told(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """Save and restore with a function, which is called at the beginning and at the end; nothing is drawn."""
    told: list[ProgressReport] = []
    save_and_restore("memory://progress-function", progress=told.append)
    for what in ("save", "restore"):
        reports = [report for report in told if report.what == what]
        assert {report.step for report in reports} == {7}
        assert reports[0].done_bytes == 0
        assert reports[-1].done_bytes == reports[-1].total_bytes >= STATE_BYTES
        assert [report.done_bytes for report in reports] == sorted(report.done_bytes for report in reports)
    assert capfd.readouterr().err == ""


def test_a_function_is_called_once_a_second(clock: Clock) -> None:
    """Add bytes a thousand times in ten seconds: the function is told of some, and at the end of all."""
    told: list[ProgressReport] = []
    with Progress("save", told.append, interval_seconds=1.0, clock=clock) as progress:
        progress.begin(3, 1000)
        for _ in range(1000):
            clock.seconds += 0.01
            progress.add(1)
        progress.close("saved")
        progress.add(1)
    assert 10 <= len(told) <= 12
    assert (told[0], told[-1]) == (ProgressReport("save", 3, 0, 1000), ProgressReport("save", 3, 1000, 1000))


def test_a_function_that_raises_fails_no_save(caplog: pytest.LogCaptureFixture) -> None:
    """Raise in each call: one record per save and per restore, with the traceback, and everything is saved."""

    def fail(report: ProgressReport) -> None:
        calls.append(report)
        raise RuntimeError("an injected error")

    calls: list[ProgressReport] = []
    save_and_restore("memory://progress-raises", progress=fail)
    records = [record for record in caplog.records if record.name == LOGGER.name and record.levelname == "ERROR"]
    assert [report.what for report in calls] == ["save", "restore"]
    assert len(records) == 2
    assert all(record.exc_info is not None and "not called any more" in record.getMessage() for record in records)


def test_an_error_makes_no_last_call(clock: Clock) -> None:
    """Close without a last line, as an error does: the function is not told that all bytes were moved."""
    told: list[ProgressReport] = []
    with Progress("save", told.append, clock=clock) as progress:
        progress.begin(3, 10)
        progress.close()
    assert told == [ProgressReport("save", 3, 0, 10)]


@pytest.mark.parametrize("setting", [True, False])
def test_a_line_or_none(*, setting: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Save and restore on a terminal: both are drawn, or with False neither; the reports are logged either way."""
    caplog.set_level(logging.INFO)
    out = Terminal()
    monkeypatch.setattr("sys.stderr", out)
    save_and_restore(f"memory://progress-{setting}", progress=setting)
    monkeypatch.undo()
    assert ("saving step 7" in out.getvalue(), "restoring step 7" in out.getvalue()) == (setting, setting)
    reports = [record.getMessage() for record in caplog.records if record.name == LOGGER.name]
    assert [line.split()[0] for line in reports] == ["saved", "loaded"], reports


def test_a_restore_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Restore at INFO, with all loggers of this package and torch: one line. `RemoteReader` logs one as well."""
    caplog.set_level(logging.INFO)
    with CheckpointManager("memory://one-line") as checkpoints:
        checkpoints.save(7, state_of(1.0), wait=True)
        caplog.clear()
        checkpoints.restore(state_of(0.0))
        assert len(infos := [record for record in caplog.records if record.levelno >= logging.INFO]) == 1, infos
    caplog.clear()
    dcp.load(state_of(0.0), storage_reader=RemoteReader("memory://one-line"))
    assert len(infos := [record for record in caplog.records if record.levelno >= logging.INFO]) == 1, infos


def test_other_ranks_show_nothing(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Start the progress of another rank than the coordinator: no line, no record, no call."""
    caplog.set_level(logging.INFO)
    told: list[ProgressReport] = []
    for setting in (True, told.append):
        with start_progress(setting, "restore", is_coordinator=False) as progress:
            progress.begin(3, 10)
            progress.add(5)
            progress.close()
    assert told == []
    assert caplog.messages == []


@pytest.mark.parametrize("setting", ["yes", None, 1])
def test_settings_that_are_refused(setting: object) -> None:
    """Pass a text, None and a number."""
    with pytest.raises(InvalidArgumentError, match="progress must be True, False, or a function"):
        CheckpointManager("memory://progress", progress=setting)  # type: ignore[arg-type]
