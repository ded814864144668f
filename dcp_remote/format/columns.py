"""Columns: arrays of integers as strings in a JSON document.

JSON numbers are slow to parse, and a million of them become a million Python objects. A column is one string: the width
of an entry in bytes, and the differences of neighboring values, packed little-endian in base64, as in `"2:AAABAAEA"`.
Regular layouts have equal differences, which zstd compresses to almost nothing.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcp_remote.common.arrays import I64, Buffer
from dcp_remote.errors import CorruptCheckpointError

_WIDTHS = {"1": "<i1", "2": "<i2", "4": "<i4", "8": "<i8"}

# Every language reads JSON numbers up to here exactly; a byte offset in 8 PiB still fits.
VALUE_MAX = 2**53

# Three times the pieces for whose digests the largest manifest has room. A byte in the document becomes up to eight in
# memory, so that without this bound a hostile document of 1 GiB would take many times its size.
ENTRIES_MAX = 2**25

# Entries that are encoded at a time, in milliseconds, for which a call keeps the interpreter from other threads. A
# multiple of 3, so that the base64 of each part but the last has no padding.
_PART_ENTRIES = 3 * 2**16


def encode_column(values: NDArray[np.integer[Any]]) -> list[bytes]:
    """Encode integers as a column, whose text is returned in parts; refuse what `sum_column` would refuse."""
    if values.size > ENTRIES_MAX:
        raise CorruptCheckpointError("The manifest is damaged: a column has too many entries.", entries_max=ENTRIES_MAX)
    if values.size and (values.min() < 0 or values.max() > VALUE_MAX):
        raise CorruptCheckpointError("The manifest is damaged: a number in a column is out of bounds.")
    starts = range(0, len(values), _PART_ENTRIES)
    bounds = [(int(part.min()), int(part.max())) for part in (_differences(values, start) for start in starts)]
    low, high = (min(low for low, _ in bounds), max(high for _, high in bounds)) if bounds else (0, 0)
    # int64 holds every difference of values up to 2**53.
    width, kind = next(
        (width, kind) for width, kind in _WIDTHS.items() if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max
    )
    packed = (_differences(values, start).astype(kind).tobytes() for start in starts)
    return [f"{width}:".encode(), *itertools.chain.from_iterable(map(encode_bytes, packed))]


def _differences(values: NDArray[np.integer[Any]], start: int) -> I64:
    """Return the differences of a part of the values that begins at `start`, of which the first is to 0."""
    part = values[max(start - 1, 0) : start + _PART_ENTRIES].astype(np.int64)
    differences: I64 = np.diff(part, prepend=part[:0] if start else 0)
    return differences


def unpack_column(text: str, *, name: str | None = None) -> NDArray[np.signedinteger[Any]]:
    """Return the differences between the values of a column, as narrow as they are stored; `ENTRIES_MAX` at most.

    `name` is the field of the document, for errors.
    """
    width, _, packed = text.partition(":")
    kind = _WIDTHS.get(width)
    if kind is None:
        raise CorruptCheckpointError("The manifest is damaged: the width of a column is unknown.", column=name)
    if len(packed) // 4 * 3 > (ENTRIES_MAX + 1) * int(width):
        raise CorruptCheckpointError(
            "The manifest is damaged: a column has too many entries.", column=name, entries_max=ENTRIES_MAX
        )
    data = decode_bytes(packed, name=name)
    if len(data) % int(width):
        raise CorruptCheckpointError(
            "The manifest is damaged: a column has the wrong length.", column=name, bytes=len(data)
        )
    return np.frombuffer(data, dtype=kind)


def sum_column(differences: NDArray[np.signedinteger[Any]], *, name: str | None, count: int | None = None) -> I64:
    """Return the values of a column, each from 0 to 2**53; `count` is their number, if another field tells it.

    A difference may take one byte, and a value takes eight: the number is compared before memory is taken.
    """
    if count is not None and len(differences) != count:
        raise CorruptCheckpointError(
            "The manifest is damaged: a column has the wrong length.",
            column=name,
            entries=len(differences),
            count=count,
        )
    # The first sum outside [0, 2**53] is below 2**63 + 2**53: if it wraps around, it is negative, and is refused.
    values: I64 = np.cumsum(differences, dtype=np.int64)
    if values.size and (values.min() < 0 or values.max() > VALUE_MAX):
        raise CorruptCheckpointError("The manifest is damaged: a number in a column is out of bounds.", column=name)
    return values


def decode_column(text: str, *, name: str, count: int | None = None) -> I64:
    """Decode a column; as `unpack_column` and `sum_column`."""
    return sum_column(unpack_column(text, name=name), name=name, count=count)


def encode_bytes(data: Buffer) -> list[bytes]:
    """Encode bytes in base64, in parts of a few MiB."""
    size = 8 * _PART_ENTRIES
    return [binascii.b2a_base64(data[at : at + size], newline=False) for at in range(0, len(data), size)]


def to_base64(data: bytes | memoryview) -> str:
    """Encode bytes in base64 (RFC 4648 section 4, with padding)."""
    return base64.b64encode(data).decode("ascii")


def decode_bytes(text: str, *, name: str | None) -> bytes:
    """Decode base64 with padding; `name` is the field of the document, for errors."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)  # unlike `base64.b64decode`, without a copy of the text
    except (binascii.Error, ValueError) as error:
        raise CorruptCheckpointError("The manifest is damaged: a field is not base64.", field=name) from error
