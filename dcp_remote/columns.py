"""Columns of integers in a JSON document: differences, packed, in base64.

A million chunks as JSON numbers are slow to parse and become a million Python objects. A column is one string: the
width in bytes of an entry and the differences of neighboring values, little-endian, as in `"2:AAABAAEA"`. Regular
layouts give equal differences, which zstd then shrinks to almost nothing.
"""

from __future__ import annotations

import base64
import binascii

import numpy as np

from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.ranges import I64

_WIDTHS = {"1": "<i1", "2": "<i2", "4": "<i4", "8": "<i8"}

# JSON numbers are exact up to here in every language; a position in a bucket of 8 PiB still fits.
VALUE_MAX = 2**53

# Three times what the digests in the largest manifest leave room for. A byte in the document becomes eight in memory:
# without a bound a hostile one of 1 GiB would take many times that.
ENTRIES_MAX = 2**25


def encode_column(values: I64) -> str:
    """Pack integers from 0 to 2**53 into a column; the inverse of `decode_column`."""
    assert values.dtype == np.int64, "differences of other types would wrap around, or be fractions"
    differences = np.diff(values, prepend=np.int64(0))
    for width, kind in _WIDTHS.items():
        bounds = np.iinfo(kind)
        if differences.size == 0 or (differences.min() >= bounds.min and differences.max() <= bounds.max):
            return f"{width}:{encode_bytes(differences.astype(kind).tobytes())}"
    raise AssertionError("int64 holds every difference of int64 values below 2**53")


def decode_column(text: str, *, name: str, count: int | None = None) -> I64:
    """Unpack a column.

    Args:
        text: What stands in the document.
        name: Of the column, for the error.
        count: How many entries it must have; None takes any number.

    Returns:
        int64 array of at most `ENTRIES_MAX`, every value from 0 to 2**53.

    Raises:
        CorruptCheckpointError: Not a column, another number of entries, or a value out of bounds.
    """
    width, _, packed = text.partition(":")
    kind = _WIDTHS.get(width)
    if kind is None:
        raise CorruptCheckpointError("The manifest is damaged: a column has no known width.", column=name)
    if len(packed) // 4 * 3 > (ENTRIES_MAX + 1) * int(width):
        raise CorruptCheckpointError(
            "The manifest is damaged: a column is longer than any.", column=name, entries_max=ENTRIES_MAX
        )
    data = decode_bytes(packed, name=name)
    if len(data) % int(width) or (count is not None and len(data) != count * int(width)):
        raise CorruptCheckpointError(
            "The manifest is damaged: a column has another length.", column=name, bytes=len(data), entries=count
        )
    # No sum wraps around unseen: the first to leave [0, 2**53] is below 2**63 + 2**53, so it is too large or negative.
    values: I64 = np.cumsum(np.frombuffer(data, dtype=kind), dtype=np.int64)
    if values.size and (values.min() < 0 or values.max() > VALUE_MAX):
        raise CorruptCheckpointError("The manifest is damaged: a number is out of bounds.", column=name)
    return values


def encode_bytes(data: bytes) -> str:
    """Base64 of some bytes (RFC 4648, with padding)."""
    return base64.b64encode(data).decode("ascii")


def decode_bytes(text: str, *, name: str) -> bytes:
    """Bytes from base64.

    Raises:
        CorruptCheckpointError: Not base64.
    """
    try:
        return binascii.a2b_base64(text, strict_mode=True)  # as `base64.b64decode`, which copies the text first
    except (binascii.Error, ValueError) as error:
        raise CorruptCheckpointError("The manifest is damaged: a field is not base64.", field=name) from error
