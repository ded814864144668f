"""How far a save or a load is: one line that is drawn over and over on a terminal, or a line a minute in the log.

The line is our own and not one of tqdm's, which is not everywhere: what works without it need not be done twice. And
drawn from threads in the background, next to the bars of a training loop, tqdm would move the cursor up and down
between them. Where a program shows bars of tqdm, the end of the screen is theirs: they are not drawn over, and the
line that remains is written by `tqdm.write`, above them.

The cursor waits in the first column. So whatever else is printed begins there, over our line and not behind it. There
are no ANSI sequences: a carriage return and spaces do, and every terminal knows them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Self, TextIO

from dcp_remote.common.text import human_bytes, printable

logger = logging.getLogger(__name__)

_REDRAW_SECONDS = 0.1
_LOG_SECONDS = 60.0

# Before that a rate is a guess.
_RATE_FROM_SECONDS = 1.0

# Where nobody knows.
_COLUMNS = 80
# The longest that fits; few, since a bar that is longer at each redraw says nothing.
_BAR_COLUMNS = (30, 20, 10)

# How long the end of a save waits for a thread that draws: somebody may have stopped the terminal with Ctrl-S.
_LAST_LINE_SECONDS = 1.0


def can_redraw(out: TextIO | None) -> bool:
    """Whether a line can be drawn over there: it is the process's own stream, and a terminal.

    Something else in the place of `sys.stderr`, as rich, notebooks and test runners put there, wants whole lines.
    """
    try:
        return out is not None and any(out is own for own in (sys.__stderr__, sys.__stdout__)) and out.isatty()
    except ValueError:  # it is closed
        return False


class Progress:
    """The progress of one save or load on this rank. Close it, or use it as a context manager.

    `add` and `tell` come from any thread, and whoever comes draws the line, at most ten times a second. They do not
    raise: a terminal that is closed or gone is not written to again. Without a terminal there is a line at INFO in the
    log after each minute.

    Args:
        what: Is under way: `saving step 1000`.
        total_bytes: To be moved; None if that is not known.
        out: Where to; standard error as a rule.
        is_terminal: Whether a line can be drawn over there (`can_redraw`).
        clock: Monotonic, in seconds.
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
        """See the class."""
        self._what = printable(what)
        self._total_bytes = total_bytes
        self._out = out if is_terminal else None
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
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the line away, unless `close` has left the last one."""
        self.close()

    def add(self, size_bytes: int) -> None:
        """So much more is done."""
        with self._counting:
            self._done_bytes += size_bytes
        self._show()

    def tell(self, others: str) -> None:
        """What the other ranks are doing, in a few words: `waiting for rank 3`; empty for nothing worth a word."""
        with self._counting:
            self._others = printable(others)
        self._show()

    def close(self, last_line: str | None = None) -> None:
        """The end; what comes later is not shown. Closing again does nothing.

        Args:
            last_line: What remains, on the terminal and at INFO in the log; None leaves nothing, as after an error.
        """
        with self._counting:
            if self._closed.is_set():
                return
            self._closed.set()
        # A thread that is stuck in a write is left to it: what it has to say does not matter any more.
        if self._drawing.acquire(timeout=_LAST_LINE_SECONDS):
            try:
                if not _tqdm_shows_bars():
                    self._draw("")
                if last_line is not None and not _is_logged_to(self._out):
                    self._write(printable(last_line) + "\n")
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
        # Other threads do not wait for one that draws: they have bytes to move.
        elif self._drawing.acquire(blocking=False):
            try:
                if not self._closed.is_set() and not _tqdm_shows_bars():
                    self._draw(_line(self._what, ", ".join(parts), self._share(), columns=_columns(out)))
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
            # Rounded down: 100% means all of it.
            parts = [f"{int(100 * share)}% of {human_bytes(self._total_bytes or 0)}"]
        if done and elapsed_seconds >= _RATE_FROM_SECONDS:
            rate = done / elapsed_seconds
            parts.append(f"{human_bytes(round(rate))}/s")
            if self._total_bytes is not None and done < self._total_bytes:
                parts.append(f"{_human_seconds((self._total_bytes - done) / rate)} left")
        return [*parts, self._others] if self._others else parts

    def _draw(self, text: str) -> None:
        if self._out is not None and (text or self._drawn_columns):
            # Spaces over the rest of the line before, as far as the terminal still is that wide.
            self._write(f"\r{text.ljust(min(self._drawn_columns, _columns(self._out) - 1))}\r")
            self._drawn_columns = len(text)

    def _write(self, text: str) -> None:
        if self._out is None:
            return
        try:
            if text.endswith("\n") and _tqdm_shows_bars():
                sys.modules["tqdm"].tqdm.write(text, file=self._out, end="")
            else:
                self._out.write(text)
            self._out.flush()
        except Exception:  # noqa: BLE001  # closed, gone, or whatever was put in its place: no save fails of it
            self._out = None


def _line(what: str, rest: str, share: float | None, *, columns: int) -> str:
    """`saving step 1000 [####....] 50% of …`, and shorter than `columns`: a line that wraps cannot be redrawn."""
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
    """`8 s`, `2 min`, `1.5 h`."""
    if seconds < 60:  # noqa: PLR2004  # a minute
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 60 else f"{minutes / 60:.1f} h"  # noqa: PLR2004  # an hour


def _tqdm_shows_bars() -> bool:
    # The set is tqdm's own, which has no other way to tell; without it there are no bars.
    return bool(getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ()))


def _is_logged_to(out: TextIO | None) -> bool:
    """Whether what is logged at INFO appears there anyway."""
    if not logger.isEnabledFor(logging.INFO):
        return False
    current: logging.Logger | None = logger
    while current is not None:
        if any(getattr(one, "stream", None) is out and one.level <= logging.INFO for one in current.handlers):
            return True
        current = current.parent if current.propagate else None
    return False
