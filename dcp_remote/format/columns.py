"""Columns: arrays of integers as strings in a JSON document.

JSON numbers are slow to parse, and a million of them become a million Python objects. A column is one string: the width
of an entry in bytes, and the differences of neighboring values, packed little-endian in base64, as in `"2:AAABAAEA"`.
Regular layouts have equal differences, which zstd compresses to almost nothing.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcp_remote.common.arrays import I64
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format.document import DOCUMENT_BYTES_MAX

_WIDTHS = {"1": "<i1", "2": "<i2", "4": "<i4", "8": "<i8"}

# Every language reads JSON numbers up to here exactly; a byte offset in 8 PiB still fits.
VALUE_MAX = 2**53

# Three times the pieces for whose digests the largest manifest has room. A byte in the document becomes up to eight in
# memory, so that without this bound a hostile document of 1 GiB would take many times its size.
ENTRIES_MAX = 2**25


def encode_column(values: Any) -> str:
    """Encode an array of integers as a column; refuse what `sum_column` would refuse.

    The hook by which msgspec encodes a column.
    """
    assert isinstance(values, np.ndarray)
    if values.size > ENTRIES_MAX:
        raise damaged("a column has too many entries", entries_max=ENTRIES_MAX)
    if values.size and (values.min() < 0 or values.max() > VALUE_MAX):
        raise damaged("a number in a column is out of bounds")
    # Differences of narrower integers could wrap around.
    differences = np.diff(values.astype(np.int64), prepend=np.int64(0))
    for width, kind in _WIDTHS.items():
        bounds = np.iinfo(kind)
        if differences.size == 0 or (differences.min() >= bounds.min and differences.max() <= bounds.max):
            return f"{width}:{to_base64(differences.astype(kind).tobytes())}"
    raise AssertionError("int64 holds every difference of int64 values below 2**53")


def unpack_column(_field: type, text: object) -> NDArray[np.signedinteger[Any]]:
    """Return the differences between the values of a column, as narrow as they are stored; `ENTRIES_MAX` at most.

    The hook by which msgspec decodes a column.
    """
    if not isinstance(text, str):
        raise TypeError("a column is a string")
    width, _, packed = text.partition(":")
    kind = _WIDTHS.get(width)
    if kind is None:
        raise damaged("the width of a column is unknown")
    if len(packed) // 4 * 3 > (ENTRIES_MAX + 1) * int(width):
        raise damaged("a column has too many entries", entries_max=ENTRIES_MAX)
    try:
        data = binascii.a2b_base64(packed, strict_mode=True)  # unlike `base64.b64decode`, without a copy of the text
    except (binascii.Error, ValueError) as error:
        raise damaged("a field is not base64") from error
    if len(data) % int(width):
        raise damaged("a column has the wrong length", bytes=len(data))
    return np.frombuffer(data, dtype=kind)


def sum_column(differences: NDArray[np.signedinteger[Any]], *, name: str, count: int | None = None) -> I64:
    """Return the values of a column, each from 0 to 2**53; `count` is their number, if another field tells it.

    A difference may take one byte, and a value takes eight: the number is compared before memory is taken.
    """
    if count is not None and len(differences) != count:
        raise damaged("a column has the wrong length", column=name, entries=len(differences), count=count)
    # The first sum outside [0, 2**53] is below 2**63 + 2**53: if it wraps around, it is negative, and is refused.
    values: I64 = np.cumsum(differences, dtype=np.int64)
    if values.size and (values.min() < 0 or values.max() > VALUE_MAX):
        raise damaged("a number in a column is out of bounds", column=name)
    return values


def sum_counts(counts: I64) -> int:
    """Return the sum of a column of counts, of which each must be possible in a document."""
    # A larger sum or product of counts could wrap around in int64 and match by chance.
    if counts.size and (int(counts.max()) > DOCUMENT_BYTES_MAX or int(counts.min()) < 0):
        raise damaged("a count is larger than the document")
    return int(counts.sum())


def damaged(what: str, **details: object) -> CorruptCheckpointError:
    """Return the error for a manifest that contradicts itself."""
    return CorruptCheckpointError(f"The manifest is damaged: {what}.", **details)


def to_base64(data: bytes | memoryview) -> str:
    """Encode bytes in base64 (RFC 4648 section 4, with padding)."""
    return base64.b64encode(data).decode("ascii")
