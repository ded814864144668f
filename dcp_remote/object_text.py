"""The JSON text of an object: written without spaces, read strictly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import NoReturn

from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.object_raw import RawBytes
from dcp_remote.object_tree import DEPTH_MAX, INT_MAX, INT_MIN, Json, to_base64

# A tag puts at most four JSON containers around a level: the object, its fields, the pairs, a pair.
JSON_DEPTH_MAX = 4 * (DEPTH_MAX + 1)

INT_TEXT_LENGTH_MAX = len(str(INT_MIN))

# Possessive, so that a string of a gigabyte is skipped without a stack of positions to come back to.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)


def in_text(buffer: RawBytes) -> Json:
    """A long buffer as base64."""
    return to_base64(buffer.view)


def by_place(buffer: RawBytes) -> Json:
    """A long buffer as its place among the raw bytes."""
    return [buffer.start, buffer.view.nbytes]


def to_text(encoded: Json, buffer: Callable[[RawBytes], object] = in_text) -> bytes:
    """JSON as UTF-8, without spaces, names in their order; long buffers as `buffer` writes them."""
    # The tree has no cycle: `Encoder` made it.
    return json.dumps(
        encoded, ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":"), default=buffer
    ).encode()


def from_text(key: str, data: bytes | memoryview) -> Json:
    """Parse JSON strictly: no repeated names, NaN, Infinity, overflow, or integers beyond 64 bits.

    Raises:
        CorruptCheckpointError: It is not such a text, or nested too deep.
    """
    try:
        text = str(data, "utf-8")
        _check_json_depth(text)
        parsed: Json = json.loads(
            text,
            object_pairs_hook=_unique_names,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_integer_64,
        )
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError("A stored object is no JSON text of ours.", key=key, cause=error) from error
    return parsed


def _check_json_depth(text: str) -> None:
    # The parser recurses in C, to a limit that the user may have raised beyond the stack.
    if text.count("[") + text.count("{") <= JSON_DEPTH_MAX:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        bracket = match.group() if match.end() - match.start() == 1 else '"'
        depth += (bracket in "[{") - (bracket in "]}")
        if depth > JSON_DEPTH_MAX:
            raise ValueError(f"nested deeper than {JSON_DEPTH_MAX} JSON containers")


def _unique_names(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name stands twice in an object")
    return names


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is beyond a 64-bit float")
    return number


def _integer_64(text: str) -> int:
    # The length first: Python parses long decimals in quadratic time.
    if len(text) > INT_TEXT_LENGTH_MAX or not INT_MIN <= (number := int(text)) <= INT_MAX:
        raise ValueError(f"{text[:40]} is beyond 64 bits")
    return number
