"""Tags of Python's built-in and standard library types."""

from __future__ import annotations

import argparse
import array
import io
import math
import operator
import pathlib
import re
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
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


def _refuse_attributes(value: object) -> None:
    if vars(value):
        raise NotEncodableError("has instance attributes")


def _decode_int(_: Decoder, encoded: Json) -> int:
    text: str = expect(encoded, str)
    if _INT_TEXT.fullmatch(text) is None:
        raise ValueError("not a hexadecimal integer")
    # Hexadecimal, because it is parsed in linear time and decimal digits are not.
    return int(text, 16)


def _encode_tuple(encoder: Encoder, value: tuple[object, ...]) -> Json:
    return encoder.children(value)


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


def _encode_complex(encoder: Encoder, value: complex) -> Json:
    return encoder.children((value.real, value.imag))


def _decode_complex(decoder: Decoder, encoded: Json) -> complex:
    real, imaginary = decoder.values(fixed(encoded, 2))
    return complex(expect(real, float), expect(imaginary, float))


def _encode_ordered(encoder: Encoder, value: OrderedDict[object, object] | Counter[object]) -> Json:
    _refuse_attributes(value)
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


def _encode_slice(encoder: Encoder, value: slice) -> Json:
    return encoder.children((value.start, value.stop, value.step))


def _decode_slice(decoder: Decoder, encoded: Json) -> slice:
    return slice(*decoder.values(fixed(encoded, 3)))


def _encode_range(encoder: Encoder, value: range) -> Json:
    return encoder.children((value.start, value.stop, value.step))


def _decode_range(decoder: Decoder, encoded: Json) -> range:
    start, stop, step = decoder.values(fixed(encoded, 3))
    return range(expect(start, int), expect(stop, int), expect(step, int))


def _encode_decimal(_: Encoder, value: Decimal) -> Json:
    return str(value)


def _decode_decimal(_: Decoder, encoded: Json) -> Decimal:
    text: str = expect(encoded, str)
    if _DECIMAL_TEXT.fullmatch(text) is None:
        raise ValueError("not a decimal number")
    return Decimal(text)


def _encode_fraction(encoder: Encoder, value: Fraction) -> Json:
    # A fraction made of numpy integers keeps them; `operator.index` converts them to Python's.
    numerator, denominator = operator.index(value.numerator), operator.index(value.denominator)
    if max(numerator.bit_length(), denominator.bit_length()) > FRACTION_BITS_MAX:
        raise NotEncodableError(f"has more than {FRACTION_BITS_MAX} bits")
    if denominator < 1 or math.gcd(numerator, denominator) != 1:
        raise NotEncodableError("is not in lowest terms")
    return encoder.children((numerator, denominator))


def _decode_fraction(decoder: Decoder, encoded: Json) -> Fraction:
    numerator, denominator = decoder.values(fixed(encoded, 2))
    if max(expect(numerator, int).bit_length(), expect(denominator, int).bit_length()) > FRACTION_BITS_MAX:
        raise ValueError(f"more than {FRACTION_BITS_MAX} bits")
    return Fraction(numerator, denominator)


def _encode_uuid(_: Encoder, value: uuid.UUID) -> Json:
    return {"uuid": str(value), "is_safe": value.is_safe.value}


def _decode_uuid(_: Decoder, encoded: Json) -> uuid.UUID:
    text, is_safe = fields(encoded, "uuid", "is_safe")
    decoded = uuid.UUID(expect(text, str), is_safe=uuid.SafeUUID(is_safe))
    if str(decoded) != text:
        raise ValueError("not a UUID in canonical form")
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


def _encode_datetime(encoder: Encoder, value: datetime | time) -> Json:
    local = value.replace(tzinfo=None).isoformat(timespec="microseconds")
    return {"local": local, "fold": value.fold, "zone": _encode_zone(encoder, value)}


def _decode_datetime(decoder: Decoder, encoded: Json) -> datetime:
    local, fold, zone = fields(encoded, "local", "fold", "zone")
    naive = datetime.fromisoformat(expect(local, str))
    if naive.isoformat(timespec="microseconds") != local:
        raise ValueError("not a date and time in canonical form")
    return naive.replace(fold=bounded(fold, 0, 1), tzinfo=_decode_zone(decoder, zone))


def _decode_time(decoder: Decoder, encoded: Json) -> time:
    local, fold, zone = fields(encoded, "local", "fold", "zone")
    naive = time.fromisoformat(expect(local, str))
    if naive.isoformat(timespec="microseconds") != local:
        raise ValueError("not a time in canonical form")
    return naive.replace(fold=bounded(fold, 0, 1), tzinfo=_decode_zone(decoder, zone))


def _encode_date(_: Encoder, value: date) -> Json:
    return value.isoformat()


def _decode_date(_: Decoder, encoded: Json) -> date:
    decoded = date.fromisoformat(expect(encoded, str))
    if decoded.isoformat() != encoded:
        raise ValueError("not a date in canonical form")
    return decoded


def _encode_timedelta(_: Encoder, value: timedelta) -> Json:
    return [value.days, value.seconds, value.microseconds]


def _decode_timedelta(_: Decoder, encoded: Json) -> timedelta:
    days, seconds, microseconds = (expect(part, int) for part in fixed(encoded, 3))
    return timedelta(days, seconds, microseconds)


def _encode_path(encoder: Encoder, value: pathlib.PurePath) -> Json:
    for flavor, (concrete, pure) in _PATHS.items():
        if type(value) in (concrete, pure):
            return {"flavor": flavor, "pure": type(value) is pure, "path": encoder.child("path", str(value))}
    raise AssertionError("_PATHS has all types that this tag is for")


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


def _decode_namespace(decoder: Decoder, encoded: Json) -> argparse.Namespace:
    namespace = argparse.Namespace()
    vars(namespace).update(_decode_attributes(decoder, encoded))
    return namespace


def _decode_simple_namespace(decoder: Decoder, encoded: Json) -> types.SimpleNamespace:
    namespace = types.SimpleNamespace()
    vars(namespace).update(_decode_attributes(decoder, encoded))
    return namespace


def _decode_attributes(decoder: Decoder, encoded: Json) -> dict[str, Any]:
    return {expect(name, str): value for name, value in decoder.pairs(encoded).items()}


def _encode_bytesio(encoder: Encoder, value: io.BytesIO) -> Json:
    if value.closed:
        raise NotEncodableError("is closed")
    _refuse_attributes(value)
    # Copied with `getvalue`, because a stream cannot grow while `getbuffer` is in use, and `dcp.async_save` lets
    # training go on with the same stream.
    return {"data": encoder.data(memoryview(value.getvalue())), "position": value.tell()}


def _decode_bytesio(decoder: Decoder, encoded: Json) -> io.BytesIO:
    data, position = fields(encoded, "data", "position")
    stream = io.BytesIO(decoder.data(data))
    stream.seek(bounded(position, 0, INT_MAX))
    return stream


def _swap_to_little(values: array.array[Any]) -> array.array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _encode_array(encoder: Encoder, value: array.array[Any]) -> Json:
    if value.typecode not in _ARRAY_CODES:
        raise NotEncodableError(f"its typecode {value.typecode!r} differs between systems")
    data = value if sys.byteorder == "little" else _swap_to_little(value[:])
    return {
        "typecode": value.typecode,
        "item_bytes": value.itemsize,
        "data": encoder.data(memoryview(data).cast("B")),
    }


def _decode_array(decoder: Decoder, encoded: Json) -> array.array[Any]:
    typecode, item_bytes, data = fields(encoded, "typecode", "item_bytes", "data")
    if not isinstance(typecode, str) or typecode not in tuple(_ARRAY_CODES):
        raise ValueError("unknown typecode")
    values: array.array[Any] = array.array(typecode)
    if values.itemsize != item_bytes:
        raise ValueError(f"an item has {item_bytes} bytes in the checkpoint and {values.itemsize} on this system")
    values.frombytes(decoder.data(data))
    return _swap_to_little(values)


PYTHON_TAGS: tuple[Tag, ...] = (
    Tag("$tuple", tuple, _encode_tuple, lambda decoder, encoded: tuple(decoder.values(encoded))),
    Tag("$set", set, _encode_set, _decode_set, mutable=True),
    Tag("$frozenset", frozenset, _encode_set, lambda decoder, encoded: frozenset(_decode_set(decoder, encoded))),
    Tag("$bytes", bytes, _encode_bytes, lambda decoder, encoded: bytes(decoder.data(encoded))),
    Tag(
        "$bytearray",
        bytearray,
        _encode_bytes,
        lambda decoder, encoded: bytearray(decoder.data(encoded)),
        mutable=True,
    ),
    Tag("$complex", complex, _encode_complex, _decode_complex),
    Tag(
        "$OrderedDict",
        OrderedDict,
        _encode_ordered,
        lambda decoder, encoded: OrderedDict(decoder.pairs(encoded)),
        mutable=True,
    ),
    Tag("$Counter", Counter, _encode_ordered, _decode_counter, mutable=True),
    Tag("$defaultdict", defaultdict, _encode_defaultdict, _decode_defaultdict, mutable=True),
    Tag("$deque", deque, _encode_deque, _decode_deque, mutable=True),
    Tag("$slice", slice, _encode_slice, _decode_slice, mutable=True),
    Tag("$range", range, _encode_range, _decode_range),
    Tag("$Decimal", Decimal, _encode_decimal, _decode_decimal),
    Tag("$Fraction", Fraction, _encode_fraction, _decode_fraction),
    Tag("$UUID", uuid.UUID, _encode_uuid, _decode_uuid),
    Tag("$datetime", datetime, _encode_datetime, _decode_datetime),
    Tag("$time", time, _encode_datetime, _decode_time),
    Tag("$date", date, _encode_date, _decode_date),
    Tag("$timedelta", timedelta, _encode_timedelta, _decode_timedelta),
    *(Tag("$Path", kind, _encode_path, _decode_path) for kinds in _PATHS.values() for kind in kinds),
    Tag("$Namespace", argparse.Namespace, _encode_attributes, _decode_namespace, mutable=True),
    Tag("$SimpleNamespace", types.SimpleNamespace, _encode_attributes, _decode_simple_namespace, mutable=True),
    Tag("$BytesIO", io.BytesIO, _encode_bytesio, _decode_bytesio, mutable=True),
    Tag("$array", array.array, _encode_array, _decode_array, mutable=True),
)


def _unused_encoder(_: Encoder, value: object) -> Json:
    raise AssertionError(f"{type(value).__name__} is encoded by Encoder itself")


# Written by `Encoder` itself, for values of JSON's types that plain JSON cannot express.
INNER_TAGS: tuple[Tag, ...] = (
    Tag("$int", int, _unused_encoder, _decode_int),
    Tag("$float", float, _unused_encoder, decode_special_float),
    Tag("$str", str, _unused_encoder, _decode_str),
    Tag("$dict", dict, _unused_encoder, lambda decoder, encoded: decoder.pairs(encoded)),
)
