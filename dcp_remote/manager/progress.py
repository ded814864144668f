"""Progress of a save, restore, import or export: a bar of tqdm on a terminal or in a notebook, log records, or calls.

torch loads tqdm if it is installed; its bar stands below those of the training loop. The cursor always returns to the
first column, so that other output begins there, over the bar and not behind it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self, TextIO, TypeAlias

from dcp_remote.common.text import escape_unprintable, human_bytes, human_seconds
from dcp_remote.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

Operation: TypeAlias = Literal["save", "restore", "export", "verify"]
_DOING: dict[Operation, str] = {
    "save": "saving",
    "restore": "restoring",
    "export": "exporting",
    "verify": "verifying",
}

_REDRAW_SECONDS = 0.1
_CALL_SECONDS = 1.0
_LOG_SECONDS = 60.0

# Limit of waiting for a thread that draws, because the user may have stopped the terminal with Ctrl-S.
_LAST_LINE_SECONDS = 1.0

# Module of the streams that replace `sys.stdout` and `sys.stderr` in a notebook's process.
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


def can_redraw(out: TextIO | None) -> bool:
    """Return whether a line can be redrawn: tqdm is loaded, and the stream is the own terminal, or a notebook's.

    Other replacements of `sys.stderr`, such as those of rich and test runners, expect whole lines.
    """
    try:
        is_own = any(out is own for own in (sys.__stderr__, sys.__stdout__))
        return "tqdm" in sys.modules and out is not None and ((is_own and out.isatty()) or _is_notebook(out))
    except ValueError:  # closed
        return False


def _is_notebook(out: TextIO) -> bool:
    return type(out).__module__ == _NOTEBOOK_STREAMS


class Progress:
    """Progress of one save, restore, export or verification on this rank: a bar, log records, or calls of a function.

    Call `begin` once the step is known, and `close`; or use the object as a context manager. Any thread may call `add`
    and `tell`; the caller's thread draws the bar, at most ten times a second. Neither raises: nothing more is written
    to a terminal that was closed or failed.

    A setting of True draws a bar where one can be drawn (`can_redraw`), and otherwise logs a line per minute; False
    shows nothing but the last line, as do ranks other than the coordinator. A function is called from `begin` on, about
    once a second, in the thread that moved bytes, and never two at a time; an exception that it raises is logged, and
    then the function is not called any more.
    """

    def __init__(
        self,
        setting: ProgressSetting,
        operation: Operation,
        *,
        is_coordinator: bool,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without a bar; `out` is the stream to draw on, None for standard error."""
        out = sys.stderr if out is None else out
        is_shown = setting is True and is_coordinator
        self._what = _DOING[operation]
        self._total_bytes: int | None = None
        self._out = out if is_shown and can_redraw(out) else None
        self._bar: Any = None
        self._function = setting if is_coordinator and not isinstance(setting, bool) else None
        self._operation: Operation = operation
        self._step: int | None = None
        self._is_silent = not is_shown
        self._clock = clock
        self._began_seconds = clock()
        self._next_seconds = self._began_seconds + (_LOG_SECONDS if self._out is None else 0.0)
        self._done_bytes = 0
        self._others = ""
        self._closed = threading.Event()
        self._counting = threading.Lock()
        self._drawing = threading.Lock()

    def begin(self, step: int | None, total_bytes: int | None = None) -> None:
        """Set the step, and the bytes to be moved; None if `expect` tells them. The time counts from now on.

        Args:
            step: Step of the checkpoint; None outside a run.
            total_bytes: Bytes to be moved.
        """
        with self._counting:
            self._what = self._what if step is None else f"{self._what} step {step}"
            self._step, self._total_bytes = step, total_bytes
            self._began_seconds = self._clock()
            self._next_seconds = self._began_seconds
            if self._out is None and self._function is None:
                self._next_seconds += _LOG_SECONDS
        if total_bytes is not None:
            self._show()

    def expect(self, size_bytes: int) -> None:
        """Count bytes that are to be moved."""
        with self._counting:
            self._total_bytes = (self._total_bytes or 0) + size_bytes
        self._show()

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar, unless `close` has left a last line."""
        self.close()

    def add(self, size_bytes: int) -> None:
        """Count bytes that were moved."""
        with self._counting:
            self._done_bytes += size_bytes
        self._show()

    def tell(self, others: str) -> None:
        """Set the state of the other ranks, in a few words: `waiting for rank 3`; empty for none."""
        with self._counting:
            self._others = escape_unprintable(others)
        self._show()

    def close(self, last_line: str | None = None) -> None:
        """Remove the bar; later calls of any method do nothing.

        Args:
            last_line: Text that stays on the terminal and is logged at INFO; None for none, as after an error.
        """
        with self._counting:
            if self._closed.is_set():
                return
            self._closed.set()
        # A thread that is stuck in a write keeps the terminal; the save must not wait for it.
        if self._drawing.acquire(timeout=_LAST_LINE_SECONDS):
            try:
                if last_line is not None and self._function is not None:
                    self._call(self._total_bytes or 0)
                self._write(self._erase)
                if last_line is not None and not _is_logged_to(self._out):
                    self._write(self._print, escape_unprintable(last_line))
            finally:
                self._drawing.release()
        if last_line is not None:
            logger.info("%s", last_line)

    def _show(self) -> None:
        with self._counting:
            now = self._clock()
            if self._closed.is_set() or now < self._next_seconds or (self._is_silent and self._function is None):
                return
            out = self._out
            interval_seconds = _REDRAW_SECONDS if out is not None else _LOG_SECONDS
            self._next_seconds = now + (interval_seconds if self._function is None else _CALL_SECONDS)
        if out is None and self._function is None:
            logger.info("%s: %s", self._what, self._describe(now - self._began_seconds))
        # Other threads do not wait for the one that draws, because they have bytes to move.
        elif self._drawing.acquire(blocking=False):
            try:
                if self._closed.is_set():
                    return
                if self._function is not None:
                    self._call(self._done_bytes)
                else:
                    self._write(self._draw)
                    if self._closed.is_set():  # meanwhile, and `close` may not have waited
                        self._write(self._erase)
            finally:
                self._drawing.release()

    def _call(self, done_bytes: int) -> None:
        """Call the user's function; after an exception never again."""
        total_bytes = self._total_bytes or 0
        report = ProgressReport(self._operation, self._step, min(done_bytes, total_bytes), total_bytes)
        try:
            if self._function is not None:
                self._function(report)
        except Exception:
            logger.exception("The progress function failed, and is not called any more in this %s.", self._operation)
            self._function, self._is_silent = None, True

    def _describe(self, elapsed_seconds: float) -> str:
        total, done = self._total_bytes, self._done_bytes
        # Rounded down, so that 100% means all bytes.
        share = min(100, 100 * done // total) if total else 100
        parts = [human_bytes(done) if total is None else f"{share}% of {human_bytes(total)}"]
        if done:
            rate = done / elapsed_seconds
            parts.append(f"{human_bytes(round(rate))}/s")
            if total is not None and done < total:
                parts.append(f"{human_seconds((total - done) / rate)} left")
        return ", ".join([*parts, self._others] if self._others else parts)

    def _write(self, act: Callable[..., None], *args: Any) -> None:
        """Call a function that writes to the terminal; close the bar and write no more if it raises."""
        if self._out is not None:
            try:
                act(self._out, *args)
                self._out.flush()
            except Exception:  # noqa: BLE001  # a terminal that is gone must not fail a save, whatever it raises
                self._out = None
                with contextlib.suppress(Exception):
                    self._bar.close()  # without a write; each `tqdm.write` of the user redraws the open bars

    def _draw(self, out: TextIO) -> None:
        total, done = self._total_bytes, self._done_bytes
        if self._bar is None:
            # In a notebook, the cursor movements of a bar below others would be shown as text.
            position = 0 if _is_notebook(out) else None
            self._bar = sys.modules["tqdm"].tqdm(
                desc=self._what,
                file=out,
                leave=False,
                position=position,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                delay=math.inf,  # only `display` draws
            )
            if position == 0:
                self._bar.close()  # so that a bar of the training loop can have that position, too
        self._bar.total, self._bar.n = total, done if total is None else min(done, total)
        self._bar.set_postfix_str(self._others, refresh=False)
        self._display(out)

    def _erase(self, out: TextIO) -> None:
        if self._bar is not None:
            self._bar.close()
            self._display(out, "")

    def _display(self, out: TextIO, text: str | None = None) -> None:
        """Draw the bar, or a text in its place. Unlike this, `refresh` of tqdm keeps tqdm's lock if a write raises."""
        with self._bar.get_lock():
            self._bar.display(text)
            out.write("\r")

    def _print(self, out: TextIO, text: str) -> None:
        sys.modules["tqdm"].tqdm.write(text, file=out)


def _is_logged_to(out: TextIO | None) -> bool:
    """Return whether log records at INFO appear on this stream."""
    if not logger.isEnabledFor(logging.INFO):
        return False
    current: logging.Logger | None = logger
    while current is not None:
        if any(
            getattr(handler, "stream", None) is out and handler.level <= logging.INFO for handler in current.handlers
        ):
            return True
        current = current.parent if current.propagate else None
    return False
