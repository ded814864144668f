"""Text for a terminal, which takes some characters for commands."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP = 1024


def printable(text: str) -> str:
    """One line, with everything escaped that is no graphic character or plain space.

    Names and values come from whoever wrote the checkpoint: line breaks would forge lines, ANSI sequences (also those
    that begin with U+009B) recolor, retitle or type, Unicode's direction marks reorder, and lone surrogates cannot be
    written at all.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def human_bytes(size_bytes: int) -> str:
    """`1.5 GiB` for 1610612736."""
    size = float(size_bytes)
    for unit in _UNITS:
        if size < _STEP or unit == _UNITS[-1]:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= _STEP
    raise AssertionError("the last unit takes everything")


def counted(number: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{number} {noun}{'s' * (number != 1)}"
