"""Encoding of trees of Python objects as JSON: plain JSON where that is exact, tags elsewhere.

A tag is a JSON object with one name that begins with "$": `{"$tuple": [0.9, 0.999]}`. The tags of each type are in
`serialization/{python,class,numpy,torch}_tags.py`; `json_text.py` writes and parses the JSON text. This module walks
the tree in both directions and sets the limits. Decoding never imports or calls anything by a name in the data.
"""

from __future__ import annotations

import base64
import math
import struct
import types
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from dcp_remote.common.text import is_unicode
from dcp_remote.errors import CorruptCheckpointError, DcpRemoteError, UnsupportedFormatError
from dcp_remote.format.columns import to_base64
from dcp_remote.format.raw_buffers import RAW_BYTES_MIN, RawBytes

# `RawBytes` only occurs in a tree that is being encoded.
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | RawBytes | None"

# State dicts nest about ten deep. A level takes up to six Python frames, and CPython allows 1,000 of them.
DEPTH_MAX = 100

# Most languages read JSON integers of 64 bits exactly; larger ones get a tag.
INT_MIN, INT_MAX = -(2**63), 2**63 - 1

# A small immutable value that is reachable twice, as AdamW's betas are from every group, is written twice. A larger one
# counts as shared: `[text] * 1_000_000` must not become a million copies of the text.
REPEATED_ITEMS_MAX = 64
REPEATED_BYTES_MAX = 1024

# Keys with equal hashes are compared pairwise, and an attacker can choose keys with equal hashes: 100,000 would take
# minutes. Other keys share their hash with few others, as -1 does with -2.
COLLISIONS_MAX = 100

_CONTAINERS = (list, dict, tuple, frozenset)

_NAN_BITS = struct.pack(">d", math.nan)


class NotEncodableError(Exception):
    """A tag cannot encode a value of its type without loss. `Encoder` turns this into a `Refusal`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Value that has no JSON encoding."""

    type_name: str  # as `module.qualname`
    where: str  # path to the value in the object, such as `['a'][3]`; empty for the object itself
    why: str  # half a sentence


@dataclass(frozen=True, slots=True)
class Tag:
    """Encoding of one type. Whatever `encode` raises becomes a `Refusal`, and what `decode` raises a damaged object."""

    name: str  # with its "$"
    kind: type  # exact: subclasses need tags of their own
    encode: Callable[[Encoder, Any], Json]
    decode: Callable[[Decoder, Json], object]
    mutable: bool = False  # a value that is reachable on two paths is refused, as sharing would be lost


def type_name(value: object) -> str:
    """Return `module.qualname` of the type of a value, or of the value itself if it is a class or function."""
    named = value if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) else type(value)
    return f"{getattr(named, '__module__', None)}.{getattr(named, '__qualname__', type(value).__qualname__)}"


class Encoder:
    """Encoder of one object."""

    def __init__(self, find_tag: Callable[[object], Tag | None]) -> None:
        self.refusals: list[Refusal] = []  # collected, so that one error can name all of them
        self.buffers: list[RawBytes] = []  # long buffers in the encoded tree
        self._find_tag = find_tag
        self._path: list[object] = []
        # Keyed by identity. The values are kept alive, as the identity of a freed temporary could be used again.
        self._seen: dict[Hashable, tuple[object, str]] = {}

    def value(self, value: object) -> Json:
        """Encode any value. A value that cannot be encoded is added to `refusals` and becomes None."""
        try:
            return self._value(value)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001  # kept in `refusals`, which the caller raises
            # A value can have attributes that its constructor never sets, so that a tag may raise anything.
            why = str(error) if isinstance(error, NotEncodableError) else f"{type(error).__name__}: {error}"
            self.refusals.append(Refusal(type_name(value), self._where(), why))
            return None

    def child(self, step: object, value: object) -> Json:
        """Encode a value inside the current one; `step` is the key, position or attribute that leads to it."""
        if len(self._path) >= DEPTH_MAX:
            raise NotEncodableError(f"nested deeper than {DEPTH_MAX}")
        self._path.append(step)
        try:
            return self.value(value)
        finally:
            self._path.pop()

    def children(self, values: Sequence[object]) -> list[Json]:
        """Encode the values of a sequence, in order."""
        return [self.child(position, value) for position, value in enumerate(values)]

    def pairs(self, mapping: Mapping[Any, object]) -> list[Json]:
        """Encode the items of a mapping as `[[key, value], …]`, in order."""
        require_spread(mapping)
        return [[self.child(key, key), self.child(key, value)] for key, value in mapping.items()]

    def data(self, view: memoryview) -> Json:
        """Encode bytes as base64, or as `RawBytes` if they are long; their memory must not change until stored."""
        if view.nbytes < RAW_BYTES_MIN:
            return to_base64(view)
        buffer = RawBytes(view)
        self.buffers.append(buffer)
        return buffer

    def claim(self, identity: Hashable, value: object) -> None:
        """Refuse a value whose identity, or that of its memory, was reached before on another path."""
        if identity in self._seen:
            raise NotEncodableError(f"shared with {self._seen[identity][1] or 'the object itself'}")
        self._seen[identity] = (value, self._where())

    def _value(self, value: object) -> Json:
        kind = type(value)
        if value is None or kind is bool:
            return value  # type: ignore[return-value]  # the type was compared by identity, which mypy does not follow
        if isinstance(value, int) and kind is int:
            return value if INT_MIN <= value <= INT_MAX else {"$int": hex(value)}
        if isinstance(value, float) and kind is float:
            return value if math.isfinite(value) else {"$float": _special_float(value)}
        self._claim_container(value)
        if isinstance(value, str) and kind is str:
            return value if is_unicode(value) else {"$str": to_base64(value.encode("utf-8", "surrogatepass"))}
        if isinstance(value, list) and kind is list:
            return self.children(value)
        if isinstance(value, dict) and kind is dict:
            if all(type(key) is str and not key.startswith("$") and is_unicode(key) for key in value):
                return {key: self.child(key, inner) for key, inner in value.items()}
            return {"$dict": self.pairs(value)}
        tag = self._find_tag(value)
        if tag is None:
            raise NotEncodableError("has no encoding without pickle")
        if tag.mutable:
            self.claim(id(value), value)
        return {tag.name: tag.encode(self, value)}

    def _claim_container(self, value: object) -> None:
        if isinstance(value, (str, bytes)):
            repeatable = len(value) <= REPEATED_BYTES_MAX
        elif isinstance(value, (tuple, frozenset)):
            repeatable = len(value) <= REPEATED_ITEMS_MAX and not any(self._holds_others(item) for item in value)
        else:
            # A change through one path is seen through the other. The tags of other types state their own mutability.
            repeatable = type(value) not in (list, dict)
        if not repeatable:
            self.claim(id(value), value)

    def _holds_others(self, value: object) -> bool:
        if isinstance(value, _CONTAINERS):
            return True
        tag = self._find_tag(value)
        return tag is not None and tag.mutable

    def _where(self) -> str:
        return "".join(f"[{step!r}]" if type(step) in (int, str) else f"[<{type_name(step)}>]" for step in self._path)


class Decoder:
    """Decoder of one object from untrusted JSON."""

    def __init__(self, key: str, tags: Mapping[str, Tag], raw: memoryview) -> None:
        self.key = key  # name of the object, for errors
        self._tags = tags
        self._depth = 0
        self._raw = raw
        self._taken: list[tuple[int, int]] = []
        self._taken_bytes = 0

    def value(self, encoded: Json) -> Any:
        """Decode a value that `Encoder.value` wrote.

        Raises:
            CorruptCheckpointError: The value is not one that an encoder writes.
            UnsafeObjectError: The value names a class that is not loaded.
            UnsupportedFormatError: The value has a tag that this version does not know.
        """
        if isinstance(encoded, str):
            if not is_unicode(encoded):
                self.corrupt("a string is not Unicode")
            return encoded
        if not isinstance(encoded, (list, dict)):
            return encoded
        if self._depth > DEPTH_MAX:
            self.corrupt(f"nested deeper than {DEPTH_MAX}")
        self._depth += 1
        try:
            return self.values(encoded) if isinstance(encoded, list) else self._mapping(encoded)
        finally:
            self._depth -= 1

    def values(self, encoded: Json) -> list[Any]:
        """Decode a list that `Encoder.children` wrote."""
        return [self.value(item) for item in expect(encoded, list)]

    def pairs(self, encoded: Json) -> dict[Any, Any]:
        """Decode a mapping that `Encoder.pairs` wrote; equal keys are refused."""
        pairs = [self.values(fixed(pair, 2)) for pair in expect(encoded, list)]
        require_spread([key for key, _ in pairs])
        decoded = dict(pairs)
        if len(decoded) != len(pairs):
            self.corrupt("a mapping has a key twice")
        return decoded

    def data(self, encoded: Json) -> memoryview:
        """Decode bytes that `Encoder.data` wrote; raw bytes are returned as a view, not copied."""
        if isinstance(encoded, str):
            return memoryview(from_base64(encoded))
        start, length = fixed(encoded, 2)
        first = bounded(start, 0, len(self._raw))
        stop = first + bounded(length, 1, len(self._raw) - first)
        self._taken.append((first, stop))
        # Checked before `finish`, since a million buffers at one place would become a million copies of its bytes.
        self._taken_bytes += stop - first
        if self._taken_bytes > len(self._raw):
            raise ValueError("buffers overlap")
        return self._raw[first:stop]

    def finish(self) -> None:
        """Check that each raw byte was decoded exactly once; called after the object was decoded."""
        stop = 0
        for first, end in [*sorted(self._taken), (len(self._raw), 0)]:
            if first != stop:
                self.corrupt("its buffers overlap, or leave raw bytes out")
            stop = end

    def corrupt(self, why: str) -> NoReturn:
        """Raise `CorruptCheckpointError` for this object."""
        raise CorruptCheckpointError("A stored object is damaged.", key=self.key, cause=why)

    def _mapping(self, encoded: dict[str, Json]) -> object:
        if not any(name.startswith("$") for name in encoded):
            return {self.value(name): self.value(inner) for name, inner in encoded.items()}
        if len(encoded) != 1:
            self.corrupt("an object with a tag has other names, too")
        [(name, content)] = encoded.items()
        tag = self._tags.get(name)
        if tag is None:
            raise UnsupportedFormatError(
                "A stored object has a tag that this version does not know. Upgrade dcp_remote.", key=self.key, tag=name
            )
        try:
            return tag.decode(self, content)
        except (DcpRemoteError, MemoryError, RecursionError):
            raise
        except Exception as error:
            # The constructors of forty types may raise anything on forged values.
            raise CorruptCheckpointError("A stored object is damaged.", key=self.key, tag=name, cause=error) from error


def write_no_longer(_: Encoder, value: object) -> NoReturn:
    """Refuse a value whose tag is read in earlier checkpoints alone, or is written by `Encoder` itself."""
    raise NotEncodableError("is read, but written no longer")


def require_spread(keys: Collection[Hashable]) -> None:
    """Check that at most `COLLISIONS_MAX` keys of a mapping, or elements of a set, have equal hashes."""
    if len(keys) > COLLISIONS_MAX and max(Counter(map(hash, keys)).values()) > COLLISIONS_MAX:
        raise NotEncodableError(f"more than {COLLISIONS_MAX} of its keys have the same hash")


def expect(encoded: object, kind: type) -> Any:
    """Return `encoded` if its type is exactly `kind`: True is no integer."""
    if type(encoded) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(encoded).__name__}")
    return encoded


def fixed(encoded: Json, count: int) -> list[Json]:
    """Return `encoded` if it is a list of exactly `count` entries."""
    entries: list[Json] = expect(encoded, list)
    if len(entries) != count:
        raise ValueError(f"expected {count} entries, found {len(entries)}")
    return entries


def fields(encoded: Json, *names: str) -> list[Json]:
    """Return the values of an object that has exactly these names, in the order of `names`."""
    entries: dict[str, Json] = expect(encoded, dict)
    if entries.keys() != set(names):
        raise ValueError(f"expected {sorted(names)}, found {sorted(entries)}")
    return [entries[name] for name in names]


def bounded(encoded: Json, low: int, high: int) -> int:
    """Return `encoded` if it is an integer from `low` to `high`, both included."""
    number: int = expect(encoded, int)
    if not low <= number <= high:
        raise ValueError(f"{number} is not from {low} to {high}")
    return number


def from_base64(encoded: Json) -> bytes:
    """Decode base64; a ValueError or TypeError if it is none."""
    return base64.b64decode(expect(encoded, str), validate=True)


def _special_float(value: float) -> str:
    bits = struct.pack(">d", value)
    return bits.hex() if math.isnan(value) and bits != _NAN_BITS else repr(value)


def decode_special_float(_: Decoder, encoded: Json) -> float:
    """Decode `nan`, `inf`, `-inf`, or the 16 hex digits of another NaN."""
    text: str = expect(encoded, str)
    if text in ("nan", "inf", "-inf"):
        return float(text)
    (value,) = struct.unpack(">d", bytes.fromhex(text))
    if not math.isnan(value):
        raise ValueError(f"{text[:40]} is not a NaN")
    return float(value)
