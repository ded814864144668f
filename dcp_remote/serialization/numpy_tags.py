"""Tags of numpy: arrays, scalars, dtypes, and random number generators.

Numbers are stored as they lie in memory, bit for bit including NaN payloads, in the byte order that the dtype names.
Fortran-contiguous arrays stay so, all others are stored in C order. Large contiguous arrays are not copied, neither
when they are encoded nor when they are decoded.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from dcp_remote.format.columns import to_base64
from dcp_remote.format.json_tree import (
    INT_MAX,
    Decoder,
    Encoder,
    Json,
    NotEncodableError,
    Tag,
    bounded,
    expect,
    fields,
    fixed,
    from_base64,
    write_no_longer,
)
from dcp_remote.format.raw_buffers import ALONE_BYTES_MIN

# Limit of numpy and of most torch operators.
DIMENSIONS_MAX = 64
# Levels of nested structured dtypes. Decoding recurses, and dtypes in use nest less.
DTYPE_DEPTH_MAX = 8
# Largest item of an array (strings and structures).
ITEM_BYTES_MAX = 2**31 - 1

# Booleans, integers, floats and complex numbers up to 128 bits, times, strings, raw bytes. Excluded: `long double`
# ("g", "G"), whose bits differ between machines, and objects and strings stored outside the array ("O", "T").
_DTYPE_CODES = frozenset("?bBhHiIlLqQefdFDmMSUV")

# The forms that `dtype.str` writes. `np.dtype(text)` takes many more: lists of types, repetitions, names.
_DTYPE_TEXT = re.compile(r"[<>|][a-zA-Z]\d{1,10}(\[\d{0,10}[a-zA-Z]{1,2}\])?", re.ASCII)

_BIT_GENERATORS: dict[str, type[np.random.BitGenerator]] = {
    name: getattr(np.random, name) for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
}
# numpy does not check a generator's position in its buffer: beyond these, draws would read memory after the buffer.
_BUFFER_POSITIONS_MAX = {"MT19937": 624, "Philox": 4}
# Real seeds are a few words. numpy mixes all of them, and these bounds keep that short for a hostile seed.
_SEED_BITS_MAX = 2**12
_SEED_WORDS_MAX = 2**12
# Pool of a seed sequence, in words. Mixing takes quadratic time, and numpy's default of 4 is rarely changed.
_POOL_SIZE_MIN, _POOL_SIZE_MAX = 4, 256


def decode_shape(encoded: Json) -> list[int]:
    """Decode a shape: the sizes of its dimensions."""
    shape = [bounded(size, 0, INT_MAX) for size in expect(encoded, list)]
    if len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"more than {DIMENSIONS_MAX} dimensions")
    return shape


def decode_exact_data(
    decoder: Decoder, encoded: Json, *, shape: list[int], item_bytes: int, is_boolean: bool
) -> memoryview:
    """Decode the bytes of an array, which must be exactly as many as `shape` needs.

    Called before memory is allocated, so that a claimed shape never takes more than the bytes that are present.
    """
    data = decoder.data(encoded)
    if len(data) != math.prod(shape) * item_bytes:
        raise ValueError(f"{len(data)} bytes for shape {shape} of {item_bytes} bytes each")
    if is_boolean and len(data) and np.frombuffer(data, dtype=np.uint8).max() > 1:
        raise ValueError("a boolean is neither 0 nor 1")  # undefined behaviour in C
    return data


def _encode_dtype(_: Encoder, dtype: np.dtype[Any]) -> Json:
    # Structures, which decoding knows, are written no longer.
    if dtype.metadata is not None:
        raise NotEncodableError("its dtype has metadata")
    if dtype.char not in _DTYPE_CODES or np.dtype(dtype.str) != dtype:
        raise NotEncodableError(f"its dtype {dtype} has no portable form")
    return dtype.str


def _decode_dtype(decoder: Decoder, encoded: Json, depth: int = 0) -> np.dtype[Any]:
    if depth > DTYPE_DEPTH_MAX:
        raise ValueError(f"a dtype nests deeper than {DTYPE_DEPTH_MAX}")
    if isinstance(encoded, str):
        if _DTYPE_TEXT.fullmatch(encoded) is None or (dtype := np.dtype(encoded)).char not in _DTYPE_CODES:
            raise ValueError(f"not a dtype: {encoded[:100]!r}")
        return dtype
    if "base" in expect(encoded, dict):
        base, shape = fields(encoded, "base", "shape")
        inner = _decode_dtype(decoder, base, depth + 1)
        sizes = decode_shape(shape)
        bounded(math.prod(sizes) * inner.itemsize, 0, ITEM_BYTES_MAX)
        return np.dtype((inner, tuple(sizes)))
    entries, item_bytes, aligned = fields(encoded, "fields", "item_bytes", "aligned")
    columns = [fixed(entry, 3) for entry in expect(entries, list)]
    return np.dtype(
        {
            "names": [expect(decoder.value(name), str) for name, _, _ in columns],
            "formats": [_decode_dtype(decoder, kind, depth + 1) for _, kind, _ in columns],
            "offsets": [bounded(offset, 0, ITEM_BYTES_MAX) for _, _, offset in columns],
            "itemsize": bounded(item_bytes, 0, ITEM_BYTES_MAX),
        },
        align=expect(aligned, bool),
    )


def _encode_array(encoder: Encoder, value: np.ndarray[Any, Any]) -> Json:
    dtype = _encode_dtype(encoder, value.dtype)
    if value.dtype.itemsize == 0:
        raise NotEncodableError("its items have no bytes")
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    items = np.ascontiguousarray(value.T if order == "F" else value).reshape(-1)
    data = encoder.data(memoryview(items.view(np.uint8)))  # type: ignore[arg-type]  # arrays are buffers
    return {"dtype": dtype, "shape": list(value.shape), "order": order, "data": data}


def _decode_array(decoder: Decoder, encoded: Json) -> np.ndarray[Any, Any]:
    kind, sizes, order, data = fields(encoded, "dtype", "shape", "order", "data")
    dtype, shape = _decode_dtype(decoder, kind), decode_shape(sizes)
    if dtype.itemsize == 0 or order not in ("C", "F"):
        raise ValueError("items without bytes, or an unknown order")
    content = decode_exact_data(decoder, data, shape=shape, item_bytes=dtype.itemsize, is_boolean=dtype.char == "?")
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer=content, order="F" if order == "F" else "C")
    return array if should_share_memory(content) and array.flags.aligned else array.copy(order="K")


def should_share_memory(content: memoryview) -> bool:
    """Return True if a decoded value should use the memory of `content` instead of a copy.

    The value then keeps alive the buffer of the whole object, so small values are copied.
    """
    return not content.readonly and content.nbytes >= ALONE_BYTES_MIN


def _encode_scalar(encoder: Encoder, value: np.generic) -> Json:
    dtype = _encode_dtype(encoder, value.dtype)
    if value.dtype.itemsize == 0:
        raise NotEncodableError("has no bytes")
    return {"dtype": dtype, "data": encoder.data(memoryview(value.tobytes()))}


def _decode_scalar(decoder: Decoder, encoded: Json) -> object:
    kind, data = fields(encoded, "dtype", "data")
    dtype = _decode_dtype(decoder, kind)
    content = decode_exact_data(decoder, data, shape=[1], item_bytes=dtype.itemsize, is_boolean=dtype.char == "?")
    return np.ndarray([1], dtype, buffer=bytearray(content))[0]


def _decode_long_double(_: Decoder, encoded: Json) -> object:
    doubles = np.frombuffer(from_base64(encoded), dtype="<f8")
    if len(doubles) == 1:
        return np.longdouble(doubles[0])
    (real, imaginary) = doubles
    pair = np.empty(1, dtype=np.clongdouble)
    pair.real, pair.imag = real, imaginary
    return pair[0]


def _create_bit_generator(state: object, seed: np.random.SeedSequence | int) -> np.random.BitGenerator:
    """Return a new bit generator of the kind that `state` names, in its initial state.

    Checks only what numpy does not check when `state` is assigned.
    """
    whole: dict[str, Any] = expect(state, dict)
    name = whole["bit_generator"]
    if name in _BUFFER_POSITIONS_MAX:
        position = whole["state"]["pos"] if name == "MT19937" else whole["buffer_pos"]
        bounded(position, 0, _BUFFER_POSITIONS_MAX[name])
    return _BIT_GENERATORS[name](seed)


def _encode_random_state(encoder: Encoder, value: np.random.RandomState) -> Json:
    state: dict[str, Any] = value.get_state(legacy=False)
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise NotEncodableError("its bit generator is not one of numpy's")
    return encoder.child("state", state)


def _decode_random_state(decoder: Decoder, encoded: Json) -> np.random.RandomState:
    state = decoder.value(encoded)
    random = np.random.RandomState(_create_bit_generator(state, 0))
    random.set_state(state)
    return random


def _encode_generator(encoder: Encoder, value: np.random.Generator) -> Json:
    bit_generator = value.bit_generator
    if type(bit_generator) not in _BIT_GENERATORS.values():
        raise NotEncodableError("its bit generator is not one of numpy's")
    encoder.claim(id(bit_generator), bit_generator)
    seed = bit_generator.seed_seq
    entropy: Json = None
    if isinstance(seed, np.random.SeedSequence) and type(seed) is np.random.SeedSequence:
        words, spawn_key = _as_python_ints(seed.entropy), tuple(_as_python_ints(seed.spawn_key))
        _check_seed(words, spawn_key, seed.pool_size)
        # `Generator.spawn` needs the seed sequence.
        entropy = [
            encoder.child("entropy", words),
            encoder.child("spawn_key", spawn_key),
            seed.pool_size,
            seed.n_children_spawned,
        ]
    return {"state": encoder.child("state", bit_generator.state), "seed": entropy}


def _decode_generator(decoder: Decoder, encoded: Json) -> np.random.Generator:
    state_json, seed_json = fields(encoded, "state", "seed")
    state = decoder.value(state_json)
    seed: np.random.SeedSequence | int = 0
    if seed_json is not None:
        entropy, spawn_key, pool_size, spawned = decoder.values(fixed(seed_json, 4))
        _check_seed(entropy, spawn_key, pool_size)
        seed = np.random.SeedSequence(
            entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=bounded(spawned, 0, 2**32 - 1)
        )
    bit_generator = _create_bit_generator(state, seed)
    bit_generator.state = state
    return np.random.Generator(bit_generator)


def _as_python_ints(words: Any) -> Any:
    """Convert an integer, or a sequence of integers, from numpy's types to Python's."""
    if isinstance(words, (int, np.integer)):
        return int(words)
    return [int(word) if isinstance(word, np.integer) else word for word in words]


def _check_seed(entropy: Any, spawn_key: Any, pool_size: int) -> None:
    words = [*([entropy] if type(entropy) is int else expect(entropy, list)), *expect(spawn_key, tuple)]
    if any(type(word) is not int or not 0 <= word < 2**_SEED_BITS_MAX for word in words):
        raise NotEncodableError("its seed does not consist of integers")
    if len(words) > _SEED_WORDS_MAX or not _POOL_SIZE_MIN <= pool_size <= _POOL_SIZE_MAX:
        raise NotEncodableError("its seed is too long")


_SCALAR_KINDS: list[type[np.generic]] = sorted(
    {*np.sctypeDict.values()} - {np.str_, np.bytes_, np.longdouble, np.clongdouble, np.object_},
    key=lambda kind: kind.__name__,
)

_DTYPE_KINDS: list[type[np.generic]] = [*_SCALAR_KINDS, np.str_, np.bytes_]

NUMPY_TAGS: tuple[Tag, ...] = (
    *(Tag("$numpy.dtype", type(np.dtype(kind)), _encode_dtype, _decode_dtype) for kind in _DTYPE_KINDS),
    Tag("$numpy.ndarray", np.ndarray, _encode_array, _decode_array, mutable=True),
    *(Tag("$numpy.scalar", kind, _encode_scalar, _decode_scalar, mutable=kind is np.void) for kind in _SCALAR_KINDS),
    Tag("$numpy.longdouble", np.longdouble, write_no_longer, _decode_long_double),
    Tag(
        "$numpy.str",
        np.str_,
        lambda encoder, value: encoder.child("str", str.__str__(value)),  # `str(value)` drops NUL characters at the end
        lambda decoder, encoded: np.str_(expect(decoder.value(encoded), str)),
    ),
    Tag(
        "$numpy.bytes", np.bytes_, lambda _, value: to_base64(value), lambda _, encoded: np.bytes_(from_base64(encoded))
    ),
    Tag("$numpy.RandomState", np.random.RandomState, _encode_random_state, _decode_random_state, mutable=True),
    Tag("$numpy.Generator", np.random.Generator, _encode_generator, _decode_generator, mutable=True),
)
