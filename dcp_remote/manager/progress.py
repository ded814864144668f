"""Progress of a save, restore, import or export: a bar of tqdm, log records, or calls of a user's function."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

from dcp_remote.common.text import human_bytes
from dcp_remote.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

Operation: TypeAlias = Literal["save", "restore", "export", "verify"]
_DOING: dict[Operation, str] = {
    "save": "saving",
    "restore": "restoring",
    "export": "exporting",
    "verify": "verifying",
}

_BAR_SECONDS = 0.1
_CALL_SECONDS = 1.0
_LOG_SECONDS = 60.0

# Limit of waiting for a thread that draws or calls, because the user may have stopped the terminal with Ctrl-S.
_LAST_CALL_SECONDS = 1.0

# Module of the streams that replace `sys.stderr` in a notebook, which say that they are no terminal.
_NOTEBOOK_STREAMS = "ipykernel.iostream"


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """Progress of one save or restore on rank 0, as `CheckpointManager(progress=function)` passes it to the function.

    Attributes:
        what: "save" or "restore"; "verify" in `import_checkpoint`, "export" in `export_checkpoint`.
        step: Step of the checkpoint; None where a checkpoint outside a run is exported.
        done_bytes: Bytes that this rank has moved so far, of its own part; `total_bytes` in the last call of a save or
            restore that succeeded.
        total_bytes: Bytes of this rank's part.
    """

    what: Operation
    step: int | None
    done_bytes: int
    total_bytes: int


ProgressSetting: TypeAlias = bool | Callable[[ProgressReport], object]


def check_progress(given: object) -> None:
    """Check the `progress` argument of `CheckpointManager`.

    Raises:
        InvalidArgumentError: The argument is neither a boolean nor a function.
    """
    if not isinstance(given, bool) and not callable(given):
        raise InvalidArgumentError(
            "progress must be True, False, or a function that takes a ProgressReport.", type=type(given).__name__
        )


def start_progress(setting: ProgressSetting, what: Operation, *, is_coordinator: bool) -> Progress:
    """Return the progress of a save or restore; call `begin` when its step is known. Other ranks show nothing."""
    if setting is False or not is_coordinator:
        return Progress(what, None)
    if setting is not True:
        return Progress(what, setting, interval_seconds=_CALL_SECONDS)
    tqdm = _find_tqdm()
    if tqdm is None:
        return Progress(what, _log, interval_seconds=_LOG_SECONDS)
    bar = _Bar(tqdm)
    return Progress(what, bar.draw, interval_seconds=_BAR_SECONDS, end=bar.close)


def _find_tqdm() -> Any:
    """Return tqdm's class of bars; None if tqdm is not installed, or nothing can be drawn on standard error."""
    with suppress(ImportError, ValueError):  # ValueError: standard error is closed
        if sys.stderr is not None and (sys.stderr.isatty() or type(sys.stderr).__module__ == _NOTEBOOK_STREAMS):
            from tqdm.auto import tqdm

            return tqdm
    return None


def _describe(report: ProgressReport) -> str:
    return _DOING[report.what] if report.step is None else f"{_DOING[report.what]} step {report.step}"


def _log(report: ProgressReport) -> None:
    # The end has a line of its own, and a short save no other.
    if 0 < report.done_bytes < report.total_bytes:
        percent = 100 * report.done_bytes // report.total_bytes
        logger.info("%s: %d%% of %s", _describe(report), percent, human_bytes(report.total_bytes))


class _Bar:
    """Bar of tqdm, which stays if it is the only one. A terminal that is gone must not fail a save."""

    def __init__(self, tqdm: Any) -> None:
        self._tqdm = tqdm
        self._bar: Any = None

    def draw(self, report: ProgressReport) -> None:
        with suppress(Exception):
            if self._bar is None:
                self._bar = self._tqdm(
                    desc=_describe(report),
                    total=report.total_bytes,
                    unit="B",
                    unit_scale=True,
                    unit_divisor=1024,
                    leave=None,
                    mininterval=0,  # draws at each call, since calls come at intervals
                    miniters=0,
                )
            self._bar.total = report.total_bytes
            self._bar.update(report.done_bytes - self._bar.n)

    def close(self) -> None:
        with suppress(Exception):
            if self._bar is not None:
                self._bar.close()


class Progress:
    """Progress of one save or restore on this rank. Call `close`, or use the object as a context manager.

    Any thread may call `expect` and `add`. Neither raises, nor waits for another thread that shows progress.

    Args:
        what: Operation under way.
        show: Function that shows a report: called from `begin` or `expect` on, in the thread that moved bytes, never
            twice at a time, and not any more after an exception, which is logged. None shows nothing.
        interval_seconds: Time between two calls.
        end: Function that is called at the end in any case.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        what: Operation,
        show: Callable[[ProgressReport], object] | None,
        *,
        interval_seconds: float = 0.0,
        end: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without a call; the first one is made by `begin` or `expect`."""
        self._what: Operation = what
        self._function, self._end = show, end
        self._interval_seconds, self._clock = interval_seconds, clock
        self._next_seconds = clock()
        self._step: int | None = None
        self._done_bytes = self._total_bytes = 0
        self._is_closed = False
        self._counting, self._showing = threading.Lock(), threading.Lock()

    def begin(self, step: int | None, total_bytes: int | None = None) -> None:
        """Set the step, None outside a run; and the bytes to be moved, None if `expect` tells them."""
        self._step = step
        if total_bytes is not None:
            self.expect(total_bytes)

    def expect(self, size_bytes: int) -> None:
        """Count bytes that are to be moved."""
        with self._counting:
            self._total_bytes += size_bytes
        self._show()

    def add(self, size_bytes: int) -> None:
        """Count bytes that were moved."""
        with self._counting:
            self._done_bytes += size_bytes
        self._show()

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """End, unless `close` was called."""
        self.close()

    def close(self, last_line: str | None = None) -> None:
        """End; later calls of any method do nothing. A last line is logged, and says that all bytes were moved."""
        with self._counting:
            if self._is_closed:
                return
            self._is_closed = True
        # A thread that is stuck in a write, or in the user's function, must not hold up the save.
        if self._showing.acquire(timeout=_LAST_CALL_SECONDS):
            try:
                if last_line is not None:
                    self._call(self._total_bytes)
                if self._end is not None:
                    self._end()
            finally:
                self._showing.release()
        if last_line is not None:
            logger.info("%s", last_line)

    def _show(self) -> None:
        with self._counting:
            now = self._clock()
            if self._is_closed or now < self._next_seconds:
                return
            self._next_seconds = now + self._interval_seconds
        # Other threads do not wait for the one that shows, because they have bytes to move.
        if self._showing.acquire(blocking=False):
            try:
                if not self._is_closed:
                    self._call(min(self._done_bytes, self._total_bytes))
            finally:
                self._showing.release()

    def _call(self, done_bytes: int) -> None:
        try:
            if self._function is not None:
                self._function(ProgressReport(self._what, self._step, done_bytes, self._total_bytes))
        except Exception:
            logger.exception("The progress function failed, and is not called any more in this %s.", self._what)
            self._function = None
