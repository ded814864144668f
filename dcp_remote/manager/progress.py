"""Progress of a save: a line that is redrawn on a terminal, or a log record per minute without a terminal.

Where tqdm is loaded (torch loads it if it is installed), tqdm draws the line, below the bars of the training loop.
Otherwise the line needs only carriage returns and spaces. The cursor always returns to the first column, so that other
output begins there, over the line and not behind it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

from dcp_remote.common.text import escape_unprintable, human_bytes

logger = logging.getLogger(__name__)

_REDRAW_SECONDS = 0.1
_LOG_SECONDS = 60.0

# Earlier, too few bytes have moved for a rate.
_RATE_FROM_SECONDS = 1.0

# Width of a terminal that does not tell its width.
_COLUMNS = 80
# The longest that fits is taken; only three lengths, so that the bar does not change its length with each redraw.
_BAR_COLUMNS = (30, 20, 10)

# Limit of waiting for a thread that draws, because the user may have stopped the terminal with Ctrl-S.
_LAST_LINE_SECONDS = 1.0


def can_redraw(out: TextIO | None) -> bool:
    """Return whether a line can be redrawn: the stream is the process's own, and a terminal.

    Replacements of `sys.stderr`, such as those of rich, notebooks and test runners, expect whole lines.
    """
    try:
        return out is not None and any(out is own for own in (sys.__stderr__, sys.__stdout__)) and out.isatty()
    except ValueError:  # closed
        return False


class Progress:
    """Progress of one save on this rank. Call `close`, or use the object as a context manager.

    Any thread may call `add` and `tell`; the caller's thread draws the line, at most ten times a second. Neither
    raises: nothing more is written to a terminal that was closed or failed.

    Args:
        what: Operation under way, in a few words: `saving step 1000`.
        total_bytes: Bytes to be moved; None if unknown.
        out: Stream to draw on, usually standard error.
        is_terminal: True if a line can be redrawn there (`can_redraw`); otherwise a line is logged per minute.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        what: str,
        total_bytes: int | None,
        out: TextIO | None,
        *,
        is_terminal: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without a line; the first one is drawn by `add` or `tell`."""
        self._what = escape_unprintable(what)
        self._total_bytes = total_bytes
        self._out = out if is_terminal else None
        self._tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
        self._bar: Any = None
        self._clock = clock
        self._began_seconds = clock()
        self._next_seconds = self._began_seconds + (_LOG_SECONDS if self._out is None else 0.0)
        self._done_bytes = 0
        self._others = ""
        self._drawn_columns = 0
        self._closed = threading.Event()
        self._counting = threading.Lock()
        self._drawing = threading.Lock()

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line, unless `close` has left a last one."""
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
        """Remove the line; later calls of any method do nothing.

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
            if self._closed.is_set() or now < self._next_seconds:
                return
            out = self._out
            self._next_seconds = now + (_LOG_SECONDS if out is None else _REDRAW_SECONDS)
            parts = self._parts(now - self._began_seconds)
        if out is None:
            logger.info("%s: %s", self._what, ", ".join(parts))
        # Other threads do not wait for the one that draws, because they have bytes to move.
        elif self._drawing.acquire(blocking=False):
            try:
                if not self._closed.is_set():
                    columns = _columns(out)
                    self._write(
                        self._draw, _line(self._what, ", ".join(parts), self._share(), columns=columns), columns
                    )
            finally:
                self._drawing.release()

    def _share(self) -> float | None:
        if self._total_bytes is None:
            return None
        return min(1.0, self._done_bytes / self._total_bytes) if self._total_bytes else 1.0

    def _parts(self, elapsed_seconds: float) -> list[str]:
        share, done = self._share(), self._done_bytes
        if share is None:
            parts = [human_bytes(done)]
        else:
            # Rounded down, so that 100% means all bytes.
            parts = [f"{int(100 * share)}% of {human_bytes(self._total_bytes or 0)}"]
        if done and elapsed_seconds >= _RATE_FROM_SECONDS:
            rate = done / elapsed_seconds
            parts.append(f"{human_bytes(round(rate))}/s")
            if self._total_bytes is not None and done < self._total_bytes:
                parts.append(f"{_human_seconds((self._total_bytes - done) / rate)} left")
        return [*parts, self._others] if self._others else parts

    def _write(self, act: Callable[..., None], *args: Any) -> None:
        """Call a function that writes to the terminal; write no more if it raises."""
        if self._out is not None:
            try:
                act(self._out, *args)
                self._out.flush()
            except Exception:  # noqa: BLE001  # a terminal that is gone must not fail a save, whatever it raises
                self._out = None

    def _draw(self, out: TextIO, text: str, columns: int) -> None:
        if self._tqdm is None:
            # Spaces cover the rest of the last line, unless the terminal was made narrower.
            out.write(f"\r{text.ljust(min(self._drawn_columns, columns - 1))}\r")
            self._drawn_columns = len(text)
            return
        if self._bar is None:
            self._bar = self._tqdm(desc=text, bar_format="{desc}", file=out, leave=False)
        else:
            self._bar.set_description_str(text)
        out.write("\r")

    def _erase(self, out: TextIO) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._drawn_columns:
            self._draw(out, "", _columns(out))

    def _print(self, out: TextIO, text: str) -> None:
        if self._tqdm is None:
            out.write(text + "\n")
        else:
            self._tqdm.write(text, file=out)


def _line(what: str, rest: str, share: float | None, *, columns: int) -> str:
    """Return `saving step 1000 [####....] 50% of …`, shorter than `columns`: a wrapped line cannot be redrawn."""
    free_columns = columns - 1 - len(f"{what} [] {rest}")
    bar_columns = next((length for length in _BAR_COLUMNS if length <= free_columns), None)
    if share is None or bar_columns is None:
        return f"{what}: {rest}"[: columns - 1]
    filled = int(share * bar_columns)
    return f"{what} [{'#' * filled}{'.' * (bar_columns - filled)}] {rest}"


def _columns(out: TextIO) -> int:
    try:
        return os.get_terminal_size(out.fileno()).columns or _COLUMNS
    except (AttributeError, OSError, ValueError):
        return _COLUMNS


def _human_seconds(seconds: float) -> str:
    """Return a duration with its unit: `8 s`, `2 min`, `1.5 h`."""
    if seconds < 60:  # noqa: PLR2004  # a minute
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 60 else f"{minutes / 60:.1f} h"  # noqa: PLR2004  # an hour


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
