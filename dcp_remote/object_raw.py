"""Large buffers of objects: raw bytes that lie behind the JSON text, neither encoded nor copied.

An object of encoding `json+raw` is the length of its text (8 bytes, little-endian), the text, and the buffers, one
after another. The text gives the place of a buffer as `[start, length]`, counted from the end of the text.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dcp_remote.ranges import KiB, MiB

# A shorter buffer is base64 in the text: a place of its own would cost about as much.
RAW_BYTES_MIN = 2 * KiB
# An object whose long buffers have no more bytes in all is text alone, which then stands in the manifest.
TEXT_BYTES_MAX = 12 * KiB
# Shorter neighbors are copied together: a piece of its own costs more than the copy.
ALONE_BYTES_MIN = 64 * KiB
# The longest such copy: it is made with Python's lock held.
TOGETHER_BYTES_MAX = 4 * MiB

# The raw bytes begin at a multiple of it, so that memory can be viewed as any type.
ALIGNMENT_BYTES = 64

_LENGTH = struct.Struct("<Q")


@dataclass(slots=True, eq=False)
class RawBytes:
    """A long buffer in a tree that is being encoded.

    Attributes:
        view: Its bytes; memory of the object itself.
        start: First byte among the raw bytes of the object, once `lay_out` has chosen it.
    """

    view: memoryview
    start: int = -1


def lay_out(buffers: Iterable[RawBytes]) -> list[RawBytes]:
    """Choose where buffers lie, without gaps; return them in that order.

    A buffer begins at a multiple of the largest power of two that divides its length, which its items' size divides if
    that is a power of two. Short ones of equal alignment are neighbors.
    """
    ordered = sorted(buffers, key=lambda one: (-_alignment(one.view.nbytes), one.view.nbytes))
    start = 0
    for one in ordered:
        one.start = start
        start += one.view.nbytes
    return ordered


def _alignment(length: int) -> int:
    return min(length & -length, ALIGNMENT_BYTES)


def head_of(text: bytes) -> bytes:
    """The length of a text, and the text, filled up with spaces."""
    padding = -(_LENGTH.size + len(text)) % ALIGNMENT_BYTES
    return _LENGTH.pack(len(text) + padding) + text + b" " * padding


def split(data: memoryview) -> tuple[memoryview, memoryview]:
    """The text of an object, and its raw bytes.

    Raises:
        ValueError: The text is longer than the data, or does not end at a multiple of `ALIGNMENT_BYTES`.
    """
    if len(data) < _LENGTH.size:
        raise ValueError(f"{len(data)} bytes hold no length")
    (length,) = _LENGTH.unpack_from(data)
    stop = _LENGTH.size + length
    if stop > len(data) or stop % ALIGNMENT_BYTES:
        raise ValueError(f"a text of {length} bytes in {len(data)}")
    return data[_LENGTH.size : stop], data[stop:]


class Segments:
    """Bytes that lie in several places of memory; a slice is a view, and a copy only where it spans two of them.

    Attributes:
        views: The places, in order.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        """Keep the views; nothing is copied."""
        self.views = views
        self._starts = [0, *accumulate(view.nbytes for view in views)]

    def __len__(self) -> int:
        """Bytes in all."""
        return self._starts[-1]

    def __getitem__(self, span: slice) -> memoryview:
        """The bytes from `span.start` up to and without `span.stop`."""
        number, found = bisect_right(self._starts, span.start) - 1, []
        while number < len(self.views) and self._starts[number] < span.stop:
            first = self._starts[number]
            found.append(self.views[number][max(span.start - first, 0) : span.stop - first])
            number += 1
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def runs(self) -> Iterator[Segments]:
        """The same in order: each long place by itself, and short neighbors together."""
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
