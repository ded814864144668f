"""Text for a terminal, which takes some characters for commands."""

from __future__ import annotations


def printable(text: str) -> str:
    """One line, with everything escaped that is no graphic character or plain space.

    Names and values come from whoever wrote the checkpoint: line breaks would forge lines, ANSI sequences (also those
    that begin with U+009B) recolor, retitle or type, Unicode's direction marks reorder, and lone surrogates cannot be
    written at all.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
