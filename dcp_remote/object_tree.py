"""Trees of Python objects as JSON: plain where JSON says it exactly, a tag where it does not.

A tag is a JSON object with one name that begins with "$": `{"$tuple": [0.9, 0.999]}`. The tags are in tables, in
`object_tags.py`, `object_classes.py`, `object_numpy.py` and `object_torch.py`, and the text in `object_text.py`; here
is what all tags share: the walk in both directions, and its limits. Nothing that is read is imported, or called, by
its name.
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

from dcp_remote.errors import CorruptCheckpointError, DcpRemoteError, UnsupportedFormatError
from dcp_remote.object_raw import RAW_BYTES_MIN, RawBytes

# What is encoded holds long buffers as they are; what is read never does.
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | RawBytes | None"

# State dicts nest about ten deep. A level costs up to six Python frames, and CPython stops at 1,000 of them.
DEPTH_MAX = 100

# JSON integers stay within 64 bits, which most languages read exactly; beyond, there is a tag.
INT_MIN, INT_MAX = -(2**63), 2**63 - 1

# An immutable value that is reachable twice, as AdamW's betas are from every group, is simply written twice. Above
# this size it counts as shared: `[text] * 1_000_000` must not become a million texts.
REPEATED_ITEMS_MAX = 64
REPEATED_BYTES_MAX = 1024

# Keys of one hash are compared each with each, and whoever chooses the keys can choose their hash: a hundred thousand
# would take minutes. Honest keys share one with a few others, such as -1 with -2.
COLLISIONS_MAX = 100

_CONTAINERS = (list, dict, tuple, frozenset)

_NAN_BITS = struct.pack(">d", math.nan)


class NotEncodableError(Exception):
    """Raised by the encoder of a tag: a value of its type that it cannot say without loss. Never leaves `Encoder`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A value that has no JSON encoding.

    Attributes:
        type_name: `module.qualname`.
        where: Its place in the object, such as `['a'][3]`; empty for the object itself.
        why: The reason, as half a sentence.
    """

    type_name: str
    where: str
    why: str


@dataclass(frozen=True, slots=True)
class Tag:
    """How one type is written.

    Attributes:
        name: With its "$".
        kind: The exact type; subclasses are other types.
        encode: Value to JSON; may raise `NotEncodableError`.
        decode: The inverse. Whatever it raises on damaged input, `Decoder` turns into `CorruptCheckpointError`.
        mutable: Whether it matters that two paths lead to the same value.
    """

    name: str
    kind: type
    encode: Callable[[Encoder, Any], Json]
    decode: Callable[[Decoder, Json], object]
    mutable: bool = False


def type_name(value: object) -> str:
    """`module.qualname` of a value's type; of the value itself, if it is a class or function."""
    named = value if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) else type(value)
    return f"{getattr(named, '__module__', None)}.{getattr(named, '__qualname__', type(value).__qualname__)}"


class Encoder:
    """One object to JSON. What cannot be said is collected, not raised: an error can then name all of it.

    Args:
        find_tag: The tag of a value, or None.
    """

    def __init__(self, find_tag: Callable[[object], Tag | None]) -> None:
        """See the class."""
        self.refusals: list[Refusal] = []
        self.buffers: list[RawBytes] = []
        self._find_tag = find_tag
        self._path: list[object] = []
        # By identity; the values are kept alive, or a temporary's identity would come again.
        self._seen: dict[Hashable, tuple[object, str]] = {}

    def value(self, value: object) -> Json:
        """Any object; None stands for one that was refused."""
        try:
            return self._value(value)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001  # told where all of them are raised
            # Values can hold what their own constructors never give them; who saves is then told where.
            why = str(error) if isinstance(error, NotEncodableError) else f"{type(error).__name__}: {error}"
            self.refusals.append(Refusal(type_name(value), self._where(), why))
            return None

    def child(self, step: object, value: object) -> Json:
        """A value inside the current one; `step` leads there: a key, a position, the name of an attribute."""
        if len(self._path) >= DEPTH_MAX:
            raise NotEncodableError(f"nested deeper than {DEPTH_MAX}")
        self._path.append(step)
        try:
            return self.value(value)
        finally:
            self._path.pop()

    def children(self, values: Sequence[object]) -> list[Json]:
        """The values of a sequence, in order."""
        return [self.child(position, value) for position, value in enumerate(values)]

    def pairs(self, mapping: Mapping[Any, object]) -> list[Json]:
        """The items of a mapping as `[[key, value], …]`, in order."""
        require_spread(mapping)
        return [[self.child(key, key), self.child(key, value)] for key, value in mapping.items()]

    def data(self, view: memoryview) -> Json:
        """Bytes: base64, or the buffer itself if it is long; its memory must then not change until it is stored."""
        if view.nbytes < RAW_BYTES_MIN:
            return to_base64(view)
        buffer = RawBytes(view)
        self.buffers.append(buffer)
        return buffer

    def claim(self, identity: Hashable, value: object) -> None:
        """Refuse a value, or the memory below it, that was reached before on another path."""
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
            return value if _is_unicode(value) else {"$str": to_base64(value.encode("utf-8", "surrogatepass"))}
        if isinstance(value, list) and kind is list:
            return self.children(value)
        if isinstance(value, dict) and kind is dict:
            if all(type(key) is str and not key.startswith("$") and _is_unicode(key) for key in value):
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
            # What changes through one path is seen through the other. For other types, their tag says it.
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
    """One object from JSON, which anybody may have written.

    Args:
        key: Of the object, for errors.
        tags: By name.
        raw: The raw bytes behind the text.
    """

    def __init__(self, key: str, tags: Mapping[str, Tag], raw: memoryview) -> None:
        """Keep the arguments; nothing is decoded yet."""
        self.key = key
        self._tags = tags
        self._depth = 0
        self._raw = raw
        self._taken: list[tuple[int, int]] = []
        self._taken_bytes = 0

    def value(self, encoded: Json) -> Any:
        """The object that `Encoder.value` was given.

        Raises:
            CorruptCheckpointError: No encoder writes this.
            UnsafeObjectError: A class that it names is not loaded.
            UnsupportedFormatError: A tag that this version does not know.
        """
        if isinstance(encoded, str):
            if not _is_unicode(encoded):
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
        """What `Encoder.children` wrote."""
        return [self.value(item) for item in expect(encoded, list)]

    def pairs(self, encoded: Json) -> dict[Any, Any]:
        """What `Encoder.pairs` wrote; equal keys are refused."""
        pairs = [self.values(fixed(pair, 2)) for pair in expect(encoded, list)]
        require_spread([key for key, _ in pairs])
        decoded = dict(pairs)
        if len(decoded) != len(pairs):
            self.corrupt("a key stands twice")
        return decoded

    def data(self, encoded: Json) -> memoryview:
        """What `Encoder.data` wrote; raw bytes are views of the memory that they were read into.

        Raises:
            TypeError: It is neither a string nor a place.
            ValueError: It is not base64, or the place lies outside the raw bytes, or is another's too.
        """
        if isinstance(encoded, str):
            return memoryview(from_base64(encoded))
        start, length = fixed(encoded, 2)
        first = bounded(start, 0, len(self._raw))
        stop = first + bounded(length, 1, len(self._raw) - first)
        self._taken.append((first, stop))
        # At once: a million buffers in one place would be a million copies of it.
        self._taken_bytes += stop - first
        if self._taken_bytes > len(self._raw):
            raise ValueError("buffers overlap")
        return self._raw[first:stop]

    def finish(self) -> None:
        """See that each raw byte was decoded exactly once; called after the object was decoded.

        Raises:
            CorruptCheckpointError: Buffers overlap, or leave bytes out.
        """
        stop = 0
        for first, end in [*sorted(self._taken), (len(self._raw), 0)]:
            if first != stop:
                self.corrupt("its buffers overlap, or leave raw bytes out")
            stop = end

    def corrupt(self, why: str) -> NoReturn:
        """Raise `CorruptCheckpointError`."""
        raise CorruptCheckpointError("A stored object is damaged.", key=self.key, cause=why)

    def _mapping(self, encoded: dict[str, Json]) -> object:
        if not any(name.startswith("$") for name in encoded):
            return {self.value(name): self.value(inner) for name, inner in encoded.items()}
        if len(encoded) != 1:
            self.corrupt("a tag beside other names")
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
            # What the constructors of forty types raise on hostile values is no list worth keeping.
            raise CorruptCheckpointError("A stored object is damaged.", key=self.key, tag=name, cause=error) from error


def require_spread(keys: Collection[Hashable]) -> None:
    """See that no more than `COLLISIONS_MAX` keys of a mapping, or elements of a set, have one hash.

    Raises:
        NotEncodableError: They have. Of what is decoded, that makes it corrupt.
    """
    if len(keys) > COLLISIONS_MAX and max(Counter(map(hash, keys)).values()) > COLLISIONS_MAX:
        raise NotEncodableError(f"more than {COLLISIONS_MAX} of its keys have one hash")


def expect(encoded: object, kind: type) -> Any:
    """`encoded`, if it is exactly a `kind`: True is no integer.

    Raises:
        TypeError: It is something else.
    """
    if type(encoded) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(encoded).__name__}")
    return encoded


def fixed(encoded: Json, count: int) -> list[Json]:
    """A list of exactly `count` entries.

    Raises:
        TypeError: It is no list.
        ValueError: It has another length.
    """
    entries: list[Json] = expect(encoded, list)
    if len(entries) != count:
        raise ValueError(f"expected {count} entries, found {len(entries)}")
    return entries


def fields(encoded: Json, *names: str) -> list[Json]:
    """The values of an object that has exactly these names, in the order of `names`.

    Raises:
        TypeError: It is no object.
        ValueError: It has other names.
    """
    entries: dict[str, Json] = expect(encoded, dict)
    if entries.keys() != set(names):
        raise ValueError(f"expected {sorted(names)}, found {sorted(entries)}")
    return [entries[name] for name in names]


def bounded(encoded: Json, low: int, high: int) -> int:
    """An integer from `low` to `high`, both included.

    Raises:
        TypeError: It is no integer.
        ValueError: It is out of bounds.
    """
    number: int = expect(encoded, int)
    if not low <= number <= high:
        raise ValueError(f"{number} is not from {low} to {high}")
    return number


def to_base64(data: bytes | memoryview) -> str:
    """RFC 4648 section 4, with padding."""
    return base64.b64encode(data).decode("ascii")


def from_base64(encoded: Json) -> bytes:
    """The inverse of `to_base64`.

    Raises:
        TypeError: It is no string.
        ValueError: It is not base64.
    """
    return base64.b64decode(expect(encoded, str), validate=True)


def _is_unicode(text: str) -> bool:
    """False for lone surrogates, which UTF-8 has no bytes for."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _special_float(value: float) -> str:
    bits = struct.pack(">d", value)
    return bits.hex() if math.isnan(value) and bits != _NAN_BITS else repr(value)


def decode_special_float(_: Decoder, encoded: Json) -> float:
    """`nan`, `inf`, `-inf`, or the 16 hex digits of another NaN."""
    text: str = expect(encoded, str)
    if text in ("nan", "inf", "-inf"):
        return float(text)
    (value,) = struct.unpack(">d", bytes.fromhex(text))
    if not math.isnan(value):
        raise ValueError(f"{text[:40]} is no NaN")
    return float(value)
