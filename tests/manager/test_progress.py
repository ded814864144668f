"""Progress as the user sees it: the output is played to a small terminal model, or to a pseudoterminal."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import pty
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
import torch.distributed.checkpoint as dcp
import tqdm  # type: ignore[import-untyped]

from dcp_remote import CheckpointManager, ProgressReport, RemoteReader
from dcp_remote.common.units import MiB
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.manager import progress as progress_module
from dcp_remote.manager.progress import Progress, can_redraw
from tests.support.rank_threads import Clock

REPOSITORY = Path(__file__).parent.parent.parent
LOGGER = logging.getLogger("dcp_remote.manager.progress")


def screen(written: str, *, columns: int = 80) -> list[str]:
    """Return the lines of a terminal that knows carriage return, line feed and tqdm's cursor up; wraps at its edge."""
    lines, row, column = [""], 0, 0
    for character in written.replace("\x1b[A", "\v"):
        assert character.isprintable() or character in "\r\n\v", "no other command"
        if character == "\v":
            row -= 1
        elif character == "\r":
            column = 0
        elif character == "\n" or column == columns:
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        if character.isprintable():
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def _without_other_bars() -> Iterator[None]:
    """Forget the bars that a test has not closed, below which the next ones would stand, and a lock not released."""
    tqdm.tqdm.set_lock(threading.RLock())
    yield
    tqdm.tqdm._instances.clear()


def make_progress(clock: Clock, out: TextIO, *, is_terminal: bool = True) -> Progress:
    """Return the progress of a save, which takes the stream for a terminal or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress_module, "can_redraw", lambda _: is_terminal)
        return Progress(True, "save", is_coordinator=True, out=out, clock=clock)


def on_terminal(clock: Clock, total_bytes: int | None = 1000 * MiB) -> tuple[Progress, io.StringIO]:
    """Return the progress of a save that has begun on a terminal, and what the terminal gets."""
    out = io.StringIO()
    progress = make_progress(clock, out)
    progress.begin(1000, total_bytes)
    return progress, out


def test_bar_of_a_terminal(clock: Clock) -> None:
    """Draw the share and the state of other ranks on one line; leave the last line alone."""
    progress, out = on_terminal(clock)
    seen = []
    for done_bytes, others in (
        (0, "planning"),
        (250 * MiB, ""),
        (740 * MiB, "late"),
        (10 * MiB, ""),
    ):
        progress.add(done_bytes)
        clock.now += 0.1
        progress.tell(others)
        clock.now += 0.1
        seen += screen(out.getvalue())
    assert [line.partition("|")[0] for line in seen] == [f"saving step 1000: {share:3}%" for share in (0, 25, 99, 100)]
    assert [line.rpartition("B/s")[2] for line in seen] == [", planning]", "]", ", late]", "]"]
    progress.close("saved step 1000: 1000.0 MiB")
    assert screen(out.getvalue()) == ["saved step 1000: 1000.0 MiB", ""]


@pytest.mark.parametrize(
    ("done_bytes", "total_bytes", "line"),
    [
        (0, 0, "100% of 0 B"),
        (500, 300, "100% of 300 B, 8 B/s"),
        (60 * MiB, None, "60.0 MiB, 1.0 MiB/s"),
        (999, 1000, "99% of 1000 B, 17 B/s, 0 s left"),
        (6 * MiB, 1006 * MiB, "0% of 1006.0 MiB, 102.4 KiB/s, 2.8 h left"),
        (60 * MiB, 360 * MiB, "16% of 360.0 MiB, 1.0 MiB/s, 5 min left"),
    ],
)
def test_figures(
    done_bytes: int, total_bytes: int | None, line: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Log an empty, an exceeded and an unknown total, 100% only for all bytes, and minutes and hours."""
    caplog.set_level(logging.INFO, LOGGER.name)
    progress = make_progress(clock, io.StringIO(), is_terminal=False)
    progress.begin(7, total_bytes)
    clock.now += 60
    progress.add(done_bytes)
    assert caplog.messages == [f"saving step 7: {line}"]


def test_at_most_ten_redraws_a_second(clock: Clock) -> None:
    """Draw 20 times in a thousand calls of two seconds."""
    progress, out = on_terminal(clock)
    for _ in range(1000):
        progress.add(1)
        progress.tell("x")
        clock.now += 0.002
    assert out.getvalue().count("saving") == 20


@pytest.mark.parametrize("foreign", ["INFO a line of the log\n", "two\nlines\n", "\ranother bar", ""])
def test_other_output(foreign: str, clock: Clock) -> None:
    """Let other output begin in the first column; the rest of the progress line may stand behind it."""
    progress, out = on_terminal(clock)
    progress.add(MiB)
    before = len(screen(out.getvalue()))
    out.write(foreign)
    found = screen(out.getvalue())[before - 1 :]
    for line, expected in zip(found, foreign.strip("\r").splitlines(), strict=False):
        assert line.startswith(expected)
    clock.now += 1
    progress.add(MiB)
    progress.close("saved")
    # No progress line is left below it.
    assert screen(out.getvalue())[-2:] == ["saved", ""]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_comes_after_the_last_line(is_terminal: bool, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Ignore bytes of uploads that were given up, and a second `close`."""
    caplog.set_level(logging.INFO, LOGGER.name)
    out = io.StringIO()
    with make_progress(clock, out, is_terminal=is_terminal) as progress:
        progress.begin(7, 1000 * MiB)
        progress.close("saved")
        clock.now += 100
        progress.add(MiB)
        progress.tell("x")
        progress.close("saved twice")
    assert screen(out.getvalue()) == (["saved", ""] if is_terminal else [""])
    assert caplog.messages == ["saved"]


def test_after_an_error_nothing_remains(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Remove the line if the block raises."""
    caplog.set_level(logging.INFO)
    progress, out = on_terminal(clock)
    with contextlib.suppress(KeyError), progress:
        progress.add(MiB)
        raise KeyError
    assert screen(out.getvalue()) == [""]
    assert caplog.messages == []


def test_text_is_escaped(clock: Clock) -> None:
    """Escape line breaks and ANSI sequences in every text."""
    progress, out = on_terminal(clock)
    progress.tell("3\n\x1b]0")
    progress.close("saved\x1b[2J\nstep 3")
    assert screen(out.getvalue()) == ["saved\\x1b[2J\\nstep 3", ""]


# ---- logs


def test_without_a_terminal_a_line_a_minute(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Log a line per minute and the last line, and write nothing to the stream."""
    caplog.set_level(logging.INFO, LOGGER.name)
    out = io.StringIO()
    with make_progress(clock, out, is_terminal=False) as progress:
        progress.begin(7, 200 * MiB)
        for _ in range(185):
            clock.now += 1
            progress.add(MiB)
        progress.close("saved step 7: 200.0 MiB")
    assert caplog.messages == [
        "saving step 7: 30% of 200.0 MiB, 1.0 MiB/s, 2 min left",
        "saving step 7: 60% of 200.0 MiB, 1.0 MiB/s, 1 min left",
        "saving step 7: 90% of 200.0 MiB, 1.0 MiB/s, 20 s left",
        "saved step 7: 200.0 MiB",
    ]
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("level", "handled_level", "propagate"),
    [
        (logging.INFO, logging.INFO, True),
        (logging.WARNING, logging.INFO, True),
        (logging.INFO, logging.WARNING, True),
        (logging.INFO, logging.INFO, False),
    ],
)
def test_the_last_line_is_seen_once(
    level: int, handled_level: int, propagate: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Print the last line only if the log does not appear on the same terminal."""
    progress, out = on_terminal(clock)
    handler = logging.StreamHandler(out)
    handler.setLevel(handled_level)
    package = logging.getLogger("dcp_remote")
    monkeypatch.setattr(LOGGER, "level", level)
    monkeypatch.setattr(LOGGER, "propagate", propagate)
    LOGGER.manager._clear_cache()  # type: ignore[attr-defined]  # of levels
    package.addHandler(handler)
    try:
        progress.add(MiB)
        progress.close("saved")
    finally:
        package.removeHandler(handler)
        monkeypatch.undo()
        LOGGER.manager._clear_cache()  # type: ignore[attr-defined]
    assert screen(out.getvalue()) == ["saved", ""]


# ---- streams that fail


class Broken(io.StringIO):
    """Stream that raises an error from the n-th write on."""

    def __init__(self, error: BaseException, number: int) -> None:
        super().__init__()
        self._error = error
        self._left = number

    def write(self, text: str) -> int:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return super().write(text)


def can_others_draw() -> bool:
    """Return whether a thread of the training loop can take the lock of tqdm."""

    def take() -> bool:
        lock = tqdm.tqdm.get_lock()
        return bool(lock.acquire(blocking=False)) and lock.release() is None

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(take).result()


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "the terminal is gone"),
        ValueError("closed file"),
        OSError(errno.ENOSPC, "the disk is full"),
        RuntimeError("reentrant call inside a signal handler"),
    ],
)
def test_streams_that_fail(error: Exception, number: int, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Raise nothing if any write of the first two redraws fails, leave tqdm to others, and log the last line."""
    caplog.set_level(logging.INFO, LOGGER.name)
    with make_progress(clock, Broken(error, number)) as progress:
        progress.begin(7, 10)
        for _ in range(2):
            progress.add(1)
            clock.now += 0.1
        assert can_others_draw()
        with tqdm.tqdm(total=1, file=io.StringIO()) as bar:
            assert not bar.fp.getvalue().startswith("\n"), "the bar stands where the other one stood"
        progress.close("saved")
    assert caplog.messages[-1] == "saved"


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_ctrl_c_in_a_write(number: int, clock: Clock) -> None:
    """Interrupt any write of two redraws: the interrupt is raised, and bars of other threads are drawn."""
    progress = make_progress(clock, Broken(KeyboardInterrupt(), number))

    def save() -> None:
        with progress:
            progress.begin(7, 10)
            for _ in range(2):
                progress.add(1)
                clock.now += 0.1

    with pytest.raises(KeyboardInterrupt):
        save()
    assert can_others_draw()


def test_a_terminal_that_was_stopped(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop a terminal with Ctrl-S: one thread waits, the others count on, the save ends; then the bar is removed."""
    is_stuck, goes_on = threading.Event(), threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            is_stuck.set()
            assert goes_on.wait(60)
            return super().write(text)

    monkeypatch.setattr(progress_module, "_LAST_LINE_SECONDS", 0.01)
    out = Stuck()
    progress = make_progress(clock, out)
    held_up = threading.Thread(target=progress.begin, args=(7, 10), daemon=True)
    held_up.start()
    assert is_stuck.wait(60)
    clock.now += 10
    progress.add(1)
    progress.tell("x")
    progress.close("saved")
    goes_on.set()
    held_up.join(60)
    assert not held_up.is_alive()
    assert screen(out.getvalue()) == [""]


def test_many_threads(clock: Clock) -> None:
    """Count every byte and tear no line."""
    progress, out = on_terminal(clock, 8 * 2000)

    def count() -> None:
        for _ in range(2000):
            clock.now += 0.01
            progress.add(1)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.now += 1000  # because threads that add concurrently may have set the clock back
    progress.tell("")
    assert " 100%|" in screen(out.getvalue())[-1]
    assert all(drawn.startswith("saving") for drawn in out.getvalue().split("\r") if drawn)


# ---- pseudoterminals

SCRIPT = """
import os, sys
import tqdm
from dcp_remote.manager.progress import Progress
now = 0.0
with Progress(True, "save", is_coordinator=True, clock=lambda: now) as progress:
    progress.begin(1000, 100)
    for done in range(10):
        progress.add(10)
        now += 0.5
    progress.tell("rank 3 is late, and so is the other one that it waits for")
    progress.close("saved step 1000")
"""


def shown(environment: dict[str, str], *, columns: int) -> str:
    """Return the output of the script on a terminal of this width."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, columns))
    try:
        with subprocess.Popen(
            [sys.executable, "-c", SCRIPT], stderr=its, env=os.environ | environment, cwd=REPOSITORY
        ) as process:
            os.close(its)
            written = b"".join(_chunks(ours))
        assert process.returncode == 0, written
        return written.decode().replace("\r\n", "\n")
    finally:
        os.close(ours)


def _chunks(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(descriptor, 4096)
        except OSError:  # on Linux: the other end is closed
            return
        if not chunk:
            return
        yield chunk


@pytest.mark.parametrize(
    ("environment", "columns"),
    [({"TERM": "dumb"}, 40), ({}, 100)],
)
def test_a_pseudoterminal(environment: dict[str, str], columns: int) -> None:
    """Wrap no line on a wide and a narrow terminal; leave the last line."""
    written = shown(environment, columns=columns)
    drawn = [part for part in written.replace("\n", "\r").split("\r") if part.strip()]
    assert len(drawn) > 5
    assert max(map(len, drawn)) <= columns
    assert "\x1b" not in written
    assert screen(written, columns=columns) == ["saved step 1000", ""]


@pytest.mark.parametrize("redirection", ["2>&-", "2>&1 1>/dev/null | cat"])
def test_no_terminal_at_all(redirection: str) -> None:
    """Draw and raise nothing if standard error is closed, or a pipe."""
    command = f'set -o pipefail; "$0" -c "$1" {redirection}'
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable, SCRIPT], capture_output=True, check=False, text=True, cwd=REPOSITORY
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_what_can_be_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept the own terminal of the process, but no replacement of it, no closed stream, and none without tqdm."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return super().isatty() or True

    own, proxy = Terminal(), Terminal()
    monkeypatch.setattr(sys, "__stderr__", own)
    assert can_redraw(own)
    assert not can_redraw(proxy)
    assert not can_redraw(None)
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "tqdm")
        assert not can_redraw(own)
    own.close()
    assert not can_redraw(own)


# ---- tqdm


def test_the_bar_is_below_that_of_a_training_loop(clock: Clock) -> None:
    """Draw below the bar of a training loop, print the last line above, and leave the bar whole all the time."""
    out = io.StringIO()
    with tqdm.tqdm(total=4, file=out, desc="training", ncols=60, mininterval=0) as bar:
        progress = make_progress(clock, out)
        progress.begin(1000, 1000 * MiB)
        for number in range(4):
            clock.now += 1
            progress.add(MiB)
            lines = screen(out.getvalue())
            assert lines[0].startswith(f"training: {25 * number:3}%")
            assert lines[1].startswith("saving step 1000: ")
            assert len(lines) == 2
            bar.update()
        progress.close("saved step 1000")
    lines = screen(out.getvalue())
    assert lines[0] == "saved step 1000"
    assert lines[1].startswith("training: 100%")
    assert lines[2:] == [""]


def test_nothing_of_the_bar_is_left(clock: Clock) -> None:
    """End with an error, below the bar of a training loop: other output then begins in the first column."""
    out = io.StringIO()
    with tqdm.tqdm(total=4, file=out, desc="training", ncols=60):
        progress = make_progress(clock, out)
        progress.begin(7, 1000 * MiB)
        progress.close()
        out.write("an error")
        assert screen(out.getvalue())[0].startswith("an error:   0%|")
        assert screen(out.getvalue())[1:] == [""]


def test_tqdm_that_draws_nothing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Disable the bars of tqdm, as `TQDM_DISABLE=1` does: a line is logged per minute."""
    caplog.set_level(logging.INFO, LOGGER.name)
    monkeypatch.setattr(tqdm.tqdm, "__init__", partialmethod(tqdm.tqdm.__init__, disable=True))
    progress, out = on_terminal(clock)
    for _ in range(3):
        progress.add(MiB)
        clock.now += 60
    progress.close("saved")
    assert [message.partition(":")[0] for message in caplog.messages] == ["saving step 1000"] * 2 + ["saved"]
    assert out.getvalue() == ""


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


@pytest.mark.parametrize("fails", [False, True])
def test_a_function_is_called_once_a_second(fails: bool, clock: Clock) -> None:
    """Add bytes in ten seconds: the function is told of some, and at the end of all, but not after an error."""
    told: list[ProgressReport] = []
    progress = Progress(told.append, "save", is_coordinator=True, clock=clock)
    with contextlib.suppress(KeyError), progress:
        progress.begin(3, 950)
        for _ in range(950):
            clock.now += 0.01
            progress.add(1)
        if fails:
            raise KeyError
        progress.close("saved")
        progress.add(1)
    assert 9 <= len(told) <= 12
    assert told[0] == ProgressReport("save", 3, 0, 950)
    assert (told[-1] == ProgressReport("save", 3, 950, 950)) == (not fails)


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


@pytest.mark.parametrize("setting", [True, False])
def test_a_line_or_none(*, setting: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Save and restore on a terminal: both are drawn, or with False neither; the reports are logged either way."""
    caplog.set_level(logging.INFO)
    out = io.StringIO()
    monkeypatch.setattr(progress_module, "can_redraw", lambda _: True)
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
        with Progress(setting, "restore", is_coordinator=False, out=io.StringIO()) as progress:
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


def notebook_stream() -> io.StringIO:
    """Return a stream that looks like standard error of a notebook."""
    stream: io.StringIO = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    return stream


def test_in_a_notebook(clock: Clock) -> None:
    """Draw on a notebook's stream, with another bar open: carriage returns redraw the bar, and no cursor moves up."""
    stream = notebook_stream()
    assert can_redraw(stream)
    with tqdm.tqdm(total=4, file=io.StringIO()):
        progress = Progress(True, "save", is_coordinator=True, out=stream, clock=clock)
        progress.begin(7, 1000 * MiB)
        for _ in range(3):
            clock.now += 1
            progress.add(100 * MiB)
        assert screen(stream.getvalue())[0].startswith("saving step 7:  30%|")
        progress.close("saved step 7")
    assert screen(stream.getvalue()) == ["saved step 7", ""]
    assert "\x1b" not in stream.getvalue()


def test_a_training_loop_in_a_notebook(clock: Clock) -> None:
    """Begin a bar of a training loop while a save is shown: no cursor moves for it, either."""
    stream = notebook_stream()
    with Progress(True, "save", is_coordinator=True, out=stream, clock=clock) as progress:
        progress.begin(7, 1000 * MiB)
        progress.add(MiB)
        with tqdm.tqdm(total=4, file=stream, desc="training", leave=False, mininterval=0) as bar:
            bar.update()
            clock.now += 1
            progress.add(MiB)
            bar.update()
        clock.now += 1
        progress.add(MiB)
        assert len(screen(stream.getvalue())) == 1
    assert screen(stream.getvalue()) == [""]
    assert "\x1b" not in stream.getvalue()
