"""Tags of Python's built-in and standard library types."""

from __future__ import annotations

import argparse
import array
import io
import pathlib
import re
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

from dcp_remote.format.json_text import to_text
from dcp_remote.format.json_tree import (
    INT_MAX,
    Decoder,
    Encoder,
    Json,
    NotEncodableError,
    Tag,
    bounded,
    decode_special_float,
    expect,
    fields,
    fixed,
    from_base64,
    require_spread,
    write_no_longer,
)

# Bits of a numerator or denominator. The constructor divides by their greatest common divisor, in quadratic time.
FRACTION_BITS_MAX = 2**16

_INT_TEXT = re.compile(r"-?0x[0-9a-f]+")
_DECIMAL_TEXT = re.compile(r"-?(\d+(\.\d+)?(E[+-]\d{1,20})?|Infinity|s?NaN\d*)", re.ASCII)

_MICROSECOND = timedelta(microseconds=1)

# Default factories that a stored defaultdict may have.
_FACTORIES: dict[str, Callable[[], object] | None] = {
    "None": None,
    **{kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple)},
}

# Typecodes of numbers. Excluded: "u" holds wchar_t, whose size and meaning differ between systems.
_ARRAY_CODES = "bBhHiIlLqQfd"

_PATHS: dict[str, tuple[type[pathlib.PurePath], type[pathlib.PurePath]]] = {
    "posix": (pathlib.PosixPath, pathlib.PurePosixPath),
    "windows": (pathlib.WindowsPath, pathlib.PureWindowsPath),
}


def _decode_int(_: Decoder, encoded: Json) -> int:
    text: str = expect(encoded, str)
    if _INT_TEXT.fullmatch(text) is None:
        raise ValueError("not a hexadecimal integer")
    # Hexadecimal, because it is parsed in linear time and decimal digits are not.
    return int(text, 16)


def _made_by(kind: type[Any], decode: Callable[[Decoder, Json], object]) -> Callable[[Decoder, Json], object]:
    """Return the decoder of a type that is made from what `decode` returns."""
    return lambda decoder, encoded: kind(decode(decoder, encoded))


def _parts_tag(name: str, kind: type, attributes: tuple[str, ...], part: type, *, mutable: bool = False) -> Tag:
    """Return the tag of a type that its constructor makes from attributes, in their order, each of the type `part`."""

    def encode(encoder: Encoder, value: object) -> Json:
        parts = [getattr(value, attribute) for attribute in attributes]
        return encoder.children(_require_parts(parts, part))

    def decode(decoder: Decoder, encoded: Json) -> object:
        return kind(*_require_parts(decoder.values(fixed(encoded, len(attributes))), part))

    return Tag(name, kind, encode, decode, mutable=mutable)


def _require_parts(values: list[Any], part: type) -> list[Any]:
    return values if part is object else [expect(value, part) for value in values]


def _encode_set(encoder: Encoder, value: set[object] | frozenset[object]) -> Json:
    require_spread(value)
    # Sorted, so that equal sets give equal bytes, which dedup compares: strings hash differently in every process.
    first = len(encoder.buffers)
    encoded: list[Json] = sorted(encoder.children(list(value)), key=to_text)
    if len(encoder.buffers) > first:
        del encoder.buffers[first:]
        to_text(encoded, encoder.buffers.append)
    return encoded


def _decode_set(decoder: Decoder, encoded: Json) -> set[object]:
    values = decoder.values(encoded)
    require_spread(values)
    decoded = set(values)
    if len(decoded) != len(values):
        raise ValueError("an element occurs twice")
    return decoded


def _decode_str(_: Decoder, encoded: Json) -> str:
    return from_base64(encoded).decode("utf-8", "surrogatepass")


def _encode_bytes(encoder: Encoder, value: bytes | bytearray) -> Json:
    return encoder.data(memoryview(value))


def _encode_ordered(encoder: Encoder, value: OrderedDict[object, object] | Counter[object]) -> Json:
    if vars(value):
        raise NotEncodableError("has instance attributes")
    return encoder.pairs(value)


def _decode_counter(decoder: Decoder, encoded: Json) -> Counter[object]:
    counter: Counter[object] = Counter()
    # `Counter.update` would add to counts instead of setting them.
    dict.update(counter, decoder.pairs(encoded))
    return counter


def _encode_defaultdict(encoder: Encoder, value: defaultdict[object, object]) -> Json:
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return {"factory": name, "items": encoder.pairs(value)}
    raise NotEncodableError(f"its default_factory is not one of {', '.join(_FACTORIES)}")


def _decode_defaultdict(decoder: Decoder, encoded: Json) -> defaultdict[object, object]:
    factory, items = fields(encoded, "factory", "items")
    return defaultdict(_FACTORIES[expect(factory, str)], decoder.pairs(items))


def _encode_deque(encoder: Encoder, value: deque[object]) -> Json:
    return {"maxlen": value.maxlen, "items": encoder.children(list(value))}


def _decode_deque(decoder: Decoder, encoded: Json) -> deque[object]:
    maxlen, items = fields(encoded, "maxlen", "items")
    values = decoder.values(items)
    return deque(values, None if maxlen is None else bounded(maxlen, len(values), INT_MAX))


def _decode_decimal(_: Decoder, encoded: Json) -> Decimal:
    text: str = expect(encoded, str)
    if _DECIMAL_TEXT.fullmatch(text) is None:
        raise ValueError("not a decimal number")
    return Decimal(text)


def _decode_fraction(decoder: Decoder, encoded: Json) -> Fraction:
    parts = decoder.values(fixed(encoded, 2))
    if any(expect(part, int).bit_length() > FRACTION_BITS_MAX for part in parts):
        raise ValueError(f"a part has more than {FRACTION_BITS_MAX} bits")
    return Fraction(*parts)


def _require_canonical(text: Json, canonical: str) -> None:
    if text != canonical:
        raise ValueError(f"{text!r:.100} is not in canonical form")


def _decode_uuid(_: Decoder, encoded: Json) -> uuid.UUID:
    text, is_safe = fields(encoded, "uuid", "is_safe")
    decoded = uuid.UUID(expect(text, str), is_safe=uuid.SafeUUID(is_safe))
    _require_canonical(text, str(decoded))
    return decoded


def _encode_zone(encoder: Encoder, value: datetime | time) -> Json:
    zone = value.tzinfo
    if zone is None:
        return None
    if not isinstance(zone, timezone) or type(zone) is not timezone:
        raise NotEncodableError("its time zone is not a fixed datetime.timezone")
    offset = zone.utcoffset(None)
    has_default_name = timezone(offset).tzname(None) == zone.tzname(None)
    return [offset // _MICROSECOND, None if has_default_name else encoder.child("tzinfo", zone.tzname(None))]


def _decode_zone(decoder: Decoder, encoded: Json) -> timezone | None:
    if encoded is None:
        return None
    microseconds, name = decoder.values(fixed(encoded, 2))
    offset = timedelta(microseconds=expect(microseconds, int))
    return timezone(offset) if name is None else timezone(offset, expect(name, str))


def _encode_clock(encoder: Encoder, value: datetime | time) -> Json:
    local = value.replace(tzinfo=None).isoformat(timespec="microseconds")
    return {"local": local, "fold": value.fold, "zone": _encode_zone(encoder, value)}


def _decode_clock(kind: type[datetime | time], decoder: Decoder, encoded: Json) -> datetime | time:
    local, fold, zone = fields(encoded, "local", "fold", "zone")
    naive = kind.fromisoformat(expect(local, str))
    _require_canonical(local, naive.isoformat(timespec="microseconds"))
    return naive.replace(fold=bounded(fold, 0, 1), tzinfo=_decode_zone(decoder, zone))


def _decode_date(_: Decoder, encoded: Json) -> date:
    decoded = date.fromisoformat(expect(encoded, str))
    _require_canonical(encoded, decoded.isoformat())
    return decoded


def _encode_path(encoder: Encoder, value: pathlib.PurePath) -> Json:
    flavor = "windows" if isinstance(value, pathlib.PureWindowsPath) else "posix"
    is_pure = not isinstance(value, pathlib.Path)
    return {"flavor": flavor, "pure": is_pure, "path": encoder.child("path", str(value))}


def _decode_path(decoder: Decoder, encoded: Json) -> pathlib.PurePath:
    flavor, pure, path = fields(encoded, "flavor", "pure", "path")
    concrete_kind, pure_kind = _PATHS[expect(flavor, str)]
    # A concrete path of another operating system cannot be created here, so its pure form takes its place.
    kind = pure_kind if expect(pure, bool) or concrete_kind is not type(pathlib.Path()) else concrete_kind
    return kind(expect(decoder.value(path), str))


def _encode_attributes(encoder: Encoder, value: argparse.Namespace | types.SimpleNamespace) -> Json:
    if any(type(name) is not str for name in vars(value)):
        raise NotEncodableError("the name of an attribute is not a str")
    return encoder.pairs(vars(value))


def _decode_attributes(kind: type, decoder: Decoder, encoded: Json) -> object:
    attributes = {expect(name, str): value for name, value in decoder.pairs(encoded).items()}
    namespace = kind()
    vars(namespace).update(attributes)
    return namespace


def _decode_bytesio(decoder: Decoder, encoded: Json) -> io.BytesIO:
    data, position = fields(encoded, "data", "position")
    stream = io.BytesIO(decoder.data(data))
    stream.seek(bounded(position, 0, INT_MAX))
    return stream


def _decode_array(decoder: Decoder, encoded: Json) -> array.array[Any]:
    typecode, item_bytes, data = fields(encoded, "typecode", "item_bytes", "data")
    if not isinstance(typecode, str) or typecode not in tuple(_ARRAY_CODES):
        raise ValueError("unknown typecode")
    values: array.array[Any] = array.array(typecode)
    if values.itemsize != item_bytes:
        raise ValueError(f"an item has {item_bytes} bytes in the checkpoint and {values.itemsize} on this system")
    values.frombytes(decoder.data(data))
    return values


PYTHON_TAGS: tuple[Tag, ...] = (
    Tag("$tuple", tuple, Encoder.children, _made_by(tuple, Decoder.values)),
    Tag("$set", set, _encode_set, _decode_set, mutable=True),
    Tag("$frozenset", frozenset, _encode_set, _made_by(frozenset, _decode_set)),
    Tag("$bytes", bytes, _encode_bytes, _made_by(bytes, Decoder.data)),
    Tag("$bytearray", bytearray, _encode_bytes, _made_by(bytearray, Decoder.data), mutable=True),
    _parts_tag("$complex", complex, ("real", "imag"), float),
    Tag("$OrderedDict", OrderedDict, _encode_ordered, _made_by(OrderedDict, Decoder.pairs), mutable=True),
    Tag("$Counter", Counter, _encode_ordered, _decode_counter, mutable=True),
    Tag("$defaultdict", defaultdict, _encode_defaultdict, _decode_defaultdict, mutable=True),
    Tag("$deque", deque, _encode_deque, _decode_deque, mutable=True),
    _parts_tag("$slice", slice, ("start", "stop", "step"), object, mutable=True),
    _parts_tag("$range", range, ("start", "stop", "step"), int),
    Tag("$Decimal", Decimal, lambda _, value: str(value), _decode_decimal),
    Tag("$Fraction", Fraction, write_no_longer, _decode_fraction),
    Tag("$UUID", uuid.UUID, write_no_longer, _decode_uuid),
    Tag("$datetime", datetime, _encode_clock, partial(_decode_clock, datetime)),
    Tag("$time", time, _encode_clock, partial(_decode_clock, time)),
    Tag("$date", date, lambda _, value: value.isoformat(), _decode_date),
    _parts_tag("$timedelta", timedelta, ("days", "seconds", "microseconds"), int),
    *(Tag("$Path", kind, _encode_path, _decode_path) for kinds in _PATHS.values() for kind in kinds),
    *(
        Tag(f"${kind.__name__}", kind, _encode_attributes, partial(_decode_attributes, kind), mutable=True)
        for kind in (argparse.Namespace, types.SimpleNamespace)
    ),
    Tag("$array", array.array, write_no_longer, _decode_array),
    Tag("$BytesIO", io.BytesIO, write_no_longer, _decode_bytesio),
    # `Encoder` itself writes these, for values of JSON's types that plain JSON cannot express.
    Tag("$int", int, write_no_longer, _decode_int),
    Tag("$float", float, write_no_longer, decode_special_float),
    Tag("$str", str, write_no_longer, _decode_str),
    Tag("$dict", dict, write_no_longer, Decoder.pairs),
)
