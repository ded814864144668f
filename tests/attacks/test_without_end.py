"""Small inputs that would keep a process busy or fill its memory: copies of copies, keys with equal hashes."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError, UnsafeObjectError
from dcp_remote.format.json_tree import COLLISIONS_MAX
from dcp_remote.serialization.objects import EncodedObject, decode_object, encode_object
from tests.attacks.attacker import call, doubled, integer, named, stream, tensor, word
from tests.support.figures import count

pytestmark = pytest.mark.torture

# Python's hash of an integer is its remainder by this.
HASH_MODULUS = 2**61 - 1

THOUSANDS = b"](" + b"".join(integer(n) for n in range(10_000)) + b"e"
STRIDELESS = tensor(10**12, 0)
STORAGE = b"(" + word("storage") + named("torch", "FloatStorage") + word("0") + word("cpu") + integer(1) + b"tQ"
HOOKS = b"\x89" + call("collections", "OrderedDict", b"")
LISTS = b"](K\x01K\x01eq\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(40))

PROGRAMS: dict[str, bytes] = {
    "a tuple of 2**60 as a key": b"}" + doubled(60) + b"K\x01s",
    "as an element": call("__builtin__", "set", b"]" + doubled(60) + b"a"),
    "as what is called": doubled(60) + b")R",
    "as what is changed": doubled(60) + b"K\x01a",
    "as the key of a storage": b"(" + word("storage") + named("torch", "FloatStorage") + doubled(60) + b"NK\x00tQ",
    "as the place of a storage": b"("
    + word("storage")
    + named("torch", "FloatStorage")
    + word("0")
    + doubled(60)
    + b"K\x00tQ",
    "as a shape": call("torch", "Size", doubled(60)),
    "10,000 sets of one list": THOUSANDS + b"q\x00](" + call("__builtin__", "set", b"h\x00") * 10_000 + b"e",
    "10,000 counters of one dict": b"}q\x00("
    + b"".join(integer(n) * 2 for n in range(10_000))
    + b"u]("
    + call("collections", "Counter", b"h\x00") * 10_000
    + b"e",
    "a set of a text": call("__builtin__", "set", word("abc")),
    "10,000 copies of one text": word("a" * 10_000)
    + b"q\x00]("
    + call("_codecs", "encode", b"h\x00" + word("latin1")) * 10_000
    + b"e",
    "10,000 copies of bytes": call("_codecs", "encode", word("a" * 10_000) + word("latin1"))
    + b"q\x00]("
    + call("__builtin__", "bytearray", b"h\x00") * 10_000
    + b"e",
    "numbers of a text": call("__builtin__", "complex", word("1" * 10_000)),
    "a set of a tensor without strides": call("__builtin__", "set", STRIDELESS),
    "a counter of one": call("collections", "Counter", STRIDELESS),
    "an OrderedDict of one": call("collections", "OrderedDict", STRIDELESS),
    "sizes of one": call("torch", "Size", STRIDELESS),
    "a shape of one": call("torch._utils", "_rebuild_tensor_v2", STORAGE + b"K\x00" + STRIDELESS * 2 + HOOKS),
    "a terabyte in an empty storage": tensor(10**12, 1, items=0),
    "a terabyte in four bytes": tensor(10**12, 1),
    "a terabyte behind four bytes": call(
        "torch._utils", "_rebuild_tensor_v2", STORAGE + integer(10**12) + b"K\x01\x85K\x01\x85" + HOOKS
    ),
    "10,000 sets of one long tuple": b"](("
    + b"".join(integer(n) for n in range(10_000))
    + b"teq\x00]("
    + call("__builtin__", "set", b"h\x00") * 10_000
    + b"e",
    "scales in lists of lists": call(
        "torch._utils",
        "_rebuild_qtensor",
        STORAGE.replace(b"FloatStorage", b"QInt8Storage")
        + b"K\x00K\x01\x85K\x01\x85("
        + named("torch", "per_channel_affine")
        + LISTS * 2
        + b"K\x00t"
        + HOOKS,
    ),
    "a sparse tensor of them": call(
        "torch._utils",
        "_rebuild_sparse_tensor",
        call("torch.serialization", "_get_layout", word("torch.sparse_coo"))
        + b"("
        + STRIDELESS
        + STRIDELESS
        + call("torch", "Size", integer(10**13) + b"\x85")
        + b"t",
    ),
    "a nested tensor of them": call("torch._utils", "_rebuild_nested_tensor", STRIDELESS * 4),
    "keys of one hash": b"}(" + b"".join(integer(n * HASH_MODULUS) + b"N" for n in range(1, 50_000)) + b"u",
    "keys of one hash, one by one": b"}" + b"".join(integer(n * HASH_MODULUS) + b"Ns" for n in range(1, 50_000)),
    "elements of one hash": call(
        "__builtin__", "set", b"](" + b"".join(integer(n * HASH_MODULUS) for n in range(1, 50_000)) + b"e"
    ),
    "tuples of one hash": b"}("
    + b"".join(b"(" + b"".join(integer(-1 - (n >> bit & 1)) for bit in range(14)) + b"tN" for n in range(10_000))
    + b"u",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_stream(name: str) -> None:
    """A stream is refused in memory of about its own length."""
    count("attacks")
    data = stream(PROGRAMS[name], d0=b"1234")
    tracemalloc.start()
    try:
        with pytest.raises((CorruptCheckpointError, UnsafeObjectError)):
            decode_object("k", EncodedObject("torch", data))
        assert tracemalloc.get_traced_memory()[1] < 32 * MiB
    finally:
        tracemalloc.stop()


def generator(pool_size: int) -> object:
    encoded = json.loads(encode_object("k", np.random.Generator(np.random.PCG64(1))).data)
    encoded["$numpy.Generator"]["seed"][2] = pool_size
    return encoded


TREES: dict[str, object] = {
    "keys of one hash": {"$dict": [[{"$int": hex(n * HASH_MODULUS)}, 0] for n in range(50_000)]},
    "elements of one hash": {"$set": [{"$int": hex(n * HASH_MODULUS)} for n in range(50_000)]},
    "tuples of one hash": {"$frozenset": [{"$tuple": [-1 - (n >> b & 1) for b in range(14)]} for n in range(10_000)]},
    "counted": {"$Counter": [[{"$int": hex(n * HASH_MODULUS)}, 0] for n in range(50_000)]},
    "ordered": {"$OrderedDict": [[{"$int": hex(n * HASH_MODULUS)}, 0] for n in range(50_000)]},
    "a pool that is mixed in quadratic time": [generator(4096)] * 1000,
}


@pytest.mark.parametrize("name", TREES)
def test_a_text(name: str) -> None:
    """JSON objects that take quadratic time are refused."""
    count("attacks")
    data = json.dumps(TREES[name]).encode()
    with pytest.raises(CorruptCheckpointError):
        decode_object("k", EncodedObject("json", data))


def test_what_honest_keys_have_in_common_is_no_attack() -> None:
    """A hundred keys with one hash are accepted, in both encodings, and so are twenty thousand different ones."""
    alike = {n * HASH_MODULUS: n for n in range(COLLISIONS_MAX)}
    spread = dict.fromkeys((n, float(n)) for n in range(20_000))
    for value in (alike, spread, [alike, alike], set(alike)):
        assert decode_object("k", encode_object("k", value)) == value
    with pytest.raises(UnsafeObjectError):
        encode_object("k", {n * HASH_MODULUS: n for n in range(COLLISIONS_MAX + 1)})
