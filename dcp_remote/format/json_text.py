"""JSON text of an object: written without spaces, parsed strictly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import NoReturn

from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format.columns import to_base64
from dcp_remote.format.json_tree import DEPTH_MAX, INT_MAX, INT_MIN, Json
from dcp_remote.format.raw_buffers import RawBytes

# A tag adds at most four JSON containers per level: the object, its fields, the list of pairs, a pair.
JSON_DEPTH_MAX = 4 * (DEPTH_MAX + 1)

INT_TEXT_LENGTH_MAX = len(str(INT_MIN))

# Possessive quantifiers skip a string of a gigabyte without keeping positions for backtracking.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)


def encode_in_text(buffer: RawBytes) -> Json:
    """Return a long buffer as base64."""
    return to_base64(buffer.view)


def encode_by_place(buffer: RawBytes) -> Json:
    """Return the place of a long buffer among the raw bytes: [start, length]."""
    return [buffer.start, buffer.view.nbytes]


def to_text(encoded: Json, buffer: Callable[[RawBytes], object] = encode_in_text) -> bytes:
    """Write a tree of `Encoder` as UTF-8 JSON without spaces, names in their order; `buffer` encodes long ones."""
    # A tree of `Encoder` has no cycle, so that the check for cycles is left out.
    return json.dumps(
        encoded, ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":"), default=buffer
    ).encode()


def from_text(key: str, data: bytes | memoryview) -> Json:
    """Parse JSON strictly: no repeated names, NaN, Infinity, overflow, integers beyond 64 bits, or deep nesting.

    `key` is the object's name, for the `CorruptCheckpointError`.
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
        raise CorruptCheckpointError("A stored object is damaged: not valid JSON.", key=key, cause=error) from error
    return parsed


def _check_json_depth(text: str) -> None:
    # The parser recurses in C up to Python's recursion limit, which the user may have raised beyond the stack.
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
        raise ValueError("an object has a name twice")
    return names


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} overflows a 64-bit float")
    return number


def _integer_64(text: str) -> int:
    # The length is checked first, since Python parses long decimals in quadratic time.
    if len(text) > INT_TEXT_LENGTH_MAX or not INT_MIN <= (number := int(text)) <= INT_MAX:
        raise ValueError(f"{text[:40]} overflows 64 bits")
    return number
