"""Columns against plain Python: round trips, the bytes of an example, and texts that are no columns."""

from __future__ import annotations

import base64
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format import columns
from dcp_remote.format.columns import VALUE_MAX, encode_column, to_base64
from tests.support.columns import decode_column


def column(width: int, differences: list[int]) -> str:
    """Encode a column without the code under test."""
    packed = b"".join(d.to_bytes(width, "little", signed=True) for d in differences)
    return f"{width}:{base64.standard_b64encode(packed).decode()}"


@given(st.lists(st.integers(0, VALUE_MAX) | st.integers(0, 300), max_size=20))
def test_round_trip(values: list[int]) -> None:
    """Decoding returns the encoded values; the width is the least that holds every difference."""
    text = encode_column(np.array(values, dtype=np.int64))
    assert decode_column(text, name="c", count=len(values)).tolist() == values
    assert decode_column(text, name="c").dtype == np.int64
    differences = [b - a for a, b in itertools.pairwise([0, *values])]
    width = next(w for w in (1, 2, 4, 8) if all(-(2 ** (8 * w - 1)) <= d < 2 ** (8 * w - 1) for d in differences))
    assert text == column(width, differences)


def test_narrow_integers() -> None:
    """Columns of narrow unsigned integers, whose differences are negative or wider, are those of the same values."""
    for values in ([3, 250, 1, 0], [70_000, 2, 2**32 - 1]):
        narrow = np.array(values, dtype=np.min_scalar_type(max(values)))
        assert encode_column(narrow) == encode_column(np.array(values, dtype=np.int64))


def test_what_a_reader_would_refuse_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers out of bounds, and too many of them: the coordinator does not decode what it has encoded."""
    for values in ([-1], [5, VALUE_MAX + 1]):
        with pytest.raises(CorruptCheckpointError, match="out of bounds"):
            encode_column(np.array(values))
    monkeypatch.setattr(columns, "ENTRIES_MAX", 2)
    with pytest.raises(CorruptCheckpointError, match="too many entries"):
        encode_column(np.array([1, 2, 3]))


@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6))
def test_any_differences(width: int, differences: list[int]) -> None:
    """Values out of bounds are refused, also where int64 sums wrap around; Python's integers are the oracle."""
    bound = 2 ** (8 * width - 1)
    differences = [(d + bound) % (2 * bound) - bound for d in differences]
    values = list(itertools.accumulate(differences))
    text = column(width, differences)
    if all(0 <= value <= VALUE_MAX for value in values):
        assert decode_column(text, name="c").tolist() == values
    else:
        with pytest.raises(CorruptCheckpointError, match="out of bounds") as caught:
            decode_column(text, name="c")
        assert caught.value.details == {"column": "c"}


def test_more_entries_than_any_column_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound counts entries, not bytes, and is checked before decoding: the text is not even base64."""
    monkeypatch.setattr(columns, "ENTRIES_MAX", 1000)
    assert len(decode_column(column(2, [1] * 1000), name="c")) == 1000
    for width in (1, 2, 4, 8):
        with pytest.raises(CorruptCheckpointError, match="too many entries"):
            decode_column(f"{width}:" + "!" * (1100 * width * 4 // 3), name="c")


def test_columns_of_another_length() -> None:
    """Half a number, and fewer or more numbers than expected."""
    for text, count in (("2:AA==", None), ("1:AAAA", 2), ("1:AAAA", 4), ("1:", 1)):
        with pytest.raises(CorruptCheckpointError):
            decode_column(text, name="c", count=count)


def test_bytes_of_columns() -> None:
    """Base64 is decoded as it was encoded; other texts are refused."""
    for values in ([], [0], list(range(128))):
        packed = to_base64(np.diff(values, prepend=0).astype(np.int8).tobytes())
        assert decode_column(f"1:{packed}").tolist() == values
    for text in ("AA", "A", "ä", "AA=A"):
        with pytest.raises(CorruptCheckpointError):
            decode_column(f"1:{text}")
