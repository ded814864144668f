"""Layout of objects with large buffers, which follow the JSON text as raw bytes, neither encoded nor copied.

An object of encoding `json+raw` consists of the length of its text (8 bytes, little-endian), the text, and the buffers,
one after another. The text gives the place of a buffer as `[start, length]`, counted from the end of the text.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dcp_remote.common.units import KiB, MiB

# A shorter buffer is base64 in the text, since a place of its own would cost about as much.
RAW_BYTES_MIN = 2 * KiB
# If all long buffers of an object have at most this many bytes together, the object is text only, in the manifest.
TEXT_BYTES_MAX = 12 * KiB
# Shorter neighbors are copied into one piece, since a piece of its own costs more than the copy.
ALONE_BYTES_MIN = 64 * KiB
# Longest such copy, which holds the GIL.
TOGETHER_BYTES_MAX = 4 * MiB

# The raw bytes begin at a multiple of this, so that memory can be viewed as any type.
ALIGNMENT_BYTES = 64

_LENGTH = struct.Struct("<Q")


@dataclass(slots=True, eq=False)
class RawBytes:
    """Long buffer in a tree that is being encoded."""

    view: memoryview  # memory of the object itself
    start: int = -1  # first byte among the raw bytes of the object; set by `lay_out`


def lay_out(buffers: Iterable[RawBytes]) -> list[RawBytes]:
    """Set the start of each buffer, without gaps, and return the buffers in that order.

    Each buffer begins at a multiple of the largest power of two, up to `ALIGNMENT_BYTES`, that divides its length; so
    items whose size is a power of two are aligned. Short buffers of equal alignment are neighbors.
    """
    ordered = sorted(buffers, key=lambda buffer: (-_alignment(buffer.view.nbytes), buffer.view.nbytes))
    start = 0
    for buffer in ordered:
        buffer.start = start
        start += buffer.view.nbytes
    return ordered


def _alignment(length: int) -> int:
    return min(length & -length, ALIGNMENT_BYTES)


def head_of(text: bytes) -> bytes:
    """Return the length of a text, the text, and spaces up to a multiple of `ALIGNMENT_BYTES`."""
    padding = -(_LENGTH.size + len(text)) % ALIGNMENT_BYTES
    return _LENGTH.pack(len(text) + padding) + text + b" " * padding


def split(data: memoryview) -> tuple[memoryview, memoryview]:
    """Return the text of an object, and its raw bytes; a ValueError if they do not fit the data."""
    if len(data) < _LENGTH.size:
        raise ValueError(f"{len(data)} bytes are too short for a length")
    (length,) = _LENGTH.unpack_from(data)
    stop = _LENGTH.size + length
    if stop > len(data) or stop % ALIGNMENT_BYTES:
        raise ValueError(f"a text of {length} bytes is too long for {len(data)} bytes, or has the wrong alignment")
    return data[_LENGTH.size : stop], data[stop:]


class Segments:
    """Sequence of bytes in several memory views. A slice inside one view is a view; a longer one is a copy."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.views = views
        self._starts = [0, *accumulate(view.nbytes for view in views)]

    def __len__(self) -> int:
        """Return the number of bytes."""
        return self._starts[-1]

    def __getitem__(self, span: slice) -> memoryview:
        """Return the bytes from `span.start` to `span.stop`, excluded."""
        number, found = bisect_right(self._starts, span.start) - 1, []
        while number < len(self.views) and self._starts[number] < span.stop:
            first = self._starts[number]
            found.append(self.views[number][max(span.start - first, 0) : span.stop - first])
            number += 1
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def runs(self) -> Iterator[Segments]:
        """Yield consecutive parts: each long view alone, and short neighbors together."""
        first, size = 0, 0
        for number, view in enumerate(self.views):
            is_long = view.nbytes >= ALONE_BYTES_MIN
            if number > first and (is_long or size + view.nbytes > TOGETHER_BYTES_MAX):
                yield Segments(self.views[first:number])
                first, size = number, 0
            size += view.nbytes
            if is_long:
                yield Segments([view])
                first, size = number + 1, 0
        if first < len(self.views):
            yield Segments(self.views[first:])
