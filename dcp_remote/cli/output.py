"""Output of a command: lines of text, or with `--json` one document, or one per line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from dcp_remote.common.text import escape_unprintable


class Output:
    """Standard output of a command.

    Attributes:
        as_json: True to print a document in place of text.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def say(self, *lines: str) -> None:
        """Print lines of text at once, escaped: names and values in a checkpoint are untrusted."""
        if not self.as_json:
            sys.stdout.writelines(f"{escape_unprintable(line)}\n" for line in lines)
            sys.stdout.flush()

    def give(self, document: dict[str, object], *, in_line: bool = False) -> None:
        """Print the document, once and at the end: half a document would be worse than none.

        With `in_line`, print one of several documents on a line of its own, for a command that goes on.
        """
        if self.as_json:
            print(json.dumps(document, indent=None if in_line else 2), flush=in_line)


def format_rows(rows: Sequence[Sequence[str]], *, right: Sequence[bool]) -> Iterator[str]:
    """Yield the aligned lines of a table, escaped; `right` tells which columns are flush right, all but the last."""
    cells = [[escape_unprintable(cell) for cell in row] for row in rows]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(len(right))]
    for row in cells:
        aligned = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=False)
        ]
        yield "  ".join([*aligned, *row[len(right) :]]).rstrip()


def complain(text: str) -> None:
    """Print a line on standard error, escaped."""
    print(escape_unprintable(text), file=sys.stderr, flush=True)


def show_line(text: str = "") -> None:
    """Draw a line anew on standard error, if that is a terminal; without a text, remove the line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
