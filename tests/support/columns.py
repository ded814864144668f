"""Columns of documents, decoded by themselves."""

from __future__ import annotations

from dcp_remote.common.arrays import I64
from dcp_remote.format.columns import sum_column, unpack_column


def decode_column(text: str, *, name: str = "c", count: int | None = None) -> I64:
    """Decode a column."""
    return sum_column(unpack_column(str, text), name=name, count=count)
