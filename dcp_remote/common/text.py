"""Text that is safe and readable on a terminal, and the check that a text is Unicode."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP = 1024

# Characters of a name or value in a listing.
_LISTED_CHARACTERS_MAX = 60

# Ranks, or other items, that a message names.
_JOINED_MAX = 16

_DAY_SECONDS = 86_400

# Seconds below which a duration is in a unit, the seconds of the unit, and the text; all else is in days.
_DURATIONS = ((60, 1, "{:.0f} s"), (3600, 60, "{:.0f} min"), (2 * _DAY_SECONDS, 3600, "{:.1f} h"))


def escape_unprintable(text: str) -> str:
    """Return a text as one line, with all characters escaped but graphic ones and the plain space.

    Names and values in a checkpoint are untrusted: line breaks would forge lines, ANSI sequences (also those that begin
    with U+009B) could recolor, retitle or type, Unicode direction marks reorder text, and lone surrogates cannot be
    written at all.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def is_unicode(text: str) -> bool:
    """Return False for a text with lone surrogates, which UTF-8 cannot encode."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shorten(text: str) -> str:
    """Cut a text that is too long for a line of a listing."""
    return text if len(text) <= _LISTED_CHARACTERS_MAX else f"{text[:_LISTED_CHARACTERS_MAX]}…"


def human_bytes(size_bytes: int | None) -> str:
    """Return a size with a binary unit: `1.5 GiB` for 1610612736; `?` for one that is not known."""
    if size_bytes is None:
        return "?"
    exponent = min(max(0, int(size_bytes).bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{size_bytes / _STEP**exponent:.1f} {_UNITS[exponent]}" if exponent else f"{size_bytes} B"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 tensor`, `2 tensors`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def join_some(items: Sequence[object]) -> str:
    """Return the first of many items, such as ranks, and the number of the others: `1, 2 and 30 more`."""
    shown = ", ".join(map(str, items[:_JOINED_MAX]))
    return f"{shown} and {len(items) - _JOINED_MAX} more" if len(items) > _JOINED_MAX else shown


def human_seconds(seconds: float) -> str:
    """Return a duration with its unit: `8 s`, `2 min`, `1.5 h`, `3 d`."""
    for limit, unit, form in _DURATIONS:
        if seconds < limit:
            return form.format(seconds / unit)
    return f"{seconds / _DAY_SECONDS:.0f} d"
