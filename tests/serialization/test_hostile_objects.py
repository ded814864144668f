"""Attacks by stored objects: nothing is run or imported, and memory is bounded by the bytes that are present.

Attacks are given as the bytes in the bucket. Decoding returns an object or raises one of three errors.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import pickle
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.errors import CorruptCheckpointError, UnsafeObjectError, UnsupportedFormatError
from dcp_remote.serialization.objects import EncodedObject, decode_object, encode_object

REFUSALS = (CorruptCheckpointError, UnsafeObjectError, UnsupportedFormatError)


def decode_json(tree: object) -> object:
    return decode_object("k", EncodedObject("json", json.dumps(tree).encode()))


TEXTS = {
    "empty": b"",
    "cut": b'{"a":1',
    "not UTF-8": b'"\xff"',
    "UTF-16": '"a"'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf1",
    "NaN": b"[NaN]",
    "Infinity": b"-Infinity",
    "overflow": b"1e999",
    "65 bits": b"9223372036854775808",
    "quadratic integer": b"1" * 5_000_000,
    "repeated name": b'{"a":1,"a":2}',
    "lone surrogate": b'"\\ud800"',
    "lone surrogate in a name": b'{"\\ud800":1}',
    "trailing": b"1 2",
    "deep lists": b"[" * 1_000_000,
    "deep objects": b'{"a":' * 100_000,
    "deep after strings with brackets": b'["[[\\"[",' * 500 + b"1" + b"]" * 500,
    "deep tags": b'{"$tuple":[' * 150 + b"]}" * 150,
}


@pytest.mark.parametrize("name", TEXTS)
def test_invalid_texts_are_corrupt(name: str) -> None:
    """Decode each, also with a raised recursion limit, with which Python's parser would overflow the C stack."""
    limit = sys.getrecursionlimit()
    for raised in (limit, 10_000_000):
        sys.setrecursionlimit(raised)
        try:
            with pytest.raises(CorruptCheckpointError) as caught:
                decode_object("k", EncodedObject("json", TEXTS[name]))
        finally:
            sys.setrecursionlimit(limit)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def array(**changes: object) -> dict[str, object]:
    return {"$numpy.ndarray": {"dtype": "<f4", "shape": [1], "order": "C", "data": text(b"1234"), **changes}}


def tensor(**changes: object) -> dict[str, object]:
    plain = {"dtype": "float32", "shape": [1], "requires_grad": False, "data": text(b"1234")}
    return {"$torch.Tensor": {**plain, **changes}}


def subarrays(depth: int) -> object:
    return "<f4" if depth == 0 else {"base": subarrays(depth - 1), "shape": [1000]}


def random_state(position: int) -> dict[str, Any]:
    """Encode a Mersenne Twister, with a given position in its 624 words."""
    state = json.loads(encode_object("k", np.random.RandomState(1)).data)
    state["$numpy.RandomState"]["state"]["pos"] = position
    return state  # type: ignore[no-any-return]  # from json


def generator(**changes: object) -> dict[str, Any]:
    state = json.loads(encode_object("k", np.random.Generator(np.random.Philox(1))).data)
    state["$numpy.Generator"].update({name: value for name, value in changes.items() if name == "seed"})
    state["$numpy.Generator"]["state"].update({name: value for name, value in changes.items() if name != "seed"})
    return state  # type: ignore[no-any-return]  # from json


TREES: dict[str, object] = {
    "tag beside another name": {"$tuple": [], "a": 1},
    "two tags": {"$tuple": [], "$set": []},
    "tuple of an object": {"$tuple": {}},
    "unhashable element": {"$set": [[]]},
    "repeated element": {"$frozenset": [1, True]},
    "repeated key": {"$dict": [[1, 2], [1, 3]]},
    "three in a pair": {"$dict": [[1, 2, 3]]},
    "decimal integer": {"$int": "9" * 10_000},
    "integer with underscores": {"$int": "0x1_0"},
    "float that is no NaN": {"$float": "3ff0000000000000"},
    "not base64": {"$bytes": "a*=="},
    "slow decimal": {"$Decimal": "1e5"},
    "decimal with an exponent beyond all": {"$Decimal": "1E+" + "9" * 30},
    "fraction over zero": {"$Fraction": [1, 0]},
    "slow fraction": {"$Fraction": [{"$int": "0x1" + "0" * 100_000}, 3]},
    "month 13": {"$date": "2020-13-01"},
    "other form of date": {"$date": "20200101"},
    "zone of a year": {"$time": {"local": "00:00:00.000000", "fold": 0, "zone": [10**15, None]}},
    "endless timedelta": {"$timedelta": [2**62, 0, 0]},
    "fold of True": {"$time": {"local": "00:00:00.000000", "fold": True, "zone": None}},
    "path flavor": {"$Path": {"flavor": "amiga", "pure": True, "path": "a"}},
    "attribute 3": {"$Namespace": [[3, 4]]},
    "negative position": {"$BytesIO": {"data": "", "position": -1}},
    "short deque": {"$deque": {"maxlen": 1, "items": [1, 2]}},
    "factory": {"$defaultdict": {"factory": "exec", "items": []}},
    "half an item": {"$array": {"typecode": "d", "item_bytes": 8, "data": text(b"1234")}},
    "item of another machine": {"$array": {"typecode": "l", "item_bytes": 3, "data": ""}},
    "typecode of many": {"$array": {"typecode": "bB", "item_bytes": 1, "data": ""}},
    "array of a terabyte": array(shape=[2**40]),
    "array that overflows": array(shape=[2**62, 2**62, 0], data=""),
    "negative shape": array(shape=[-1]),
    "thousand dimensions": array(shape=[1] * 1000),
    "objects": array(dtype="|O8", shape=[1], data=text(b"12345678")),
    "list of types": array(dtype="<f4,|O8"),
    "no bytes each": array(dtype="|V0", shape=[2**40], data=""),
    "endless structure": array(dtype=subarrays(8), data=""),
    "deep structure": array(dtype=subarrays(100), data=""),
    "field outside": array(dtype={"fields": [["a", "<f4", 4]], "item_bytes": 4, "aligned": False}),
    "field of objects": array(
        dtype={"fields": [["a", "|O8", 0]], "item_bytes": 8, "aligned": False}, data=text(b"0" * 8)
    ),
    "boolean 2": array(dtype="|b1", data=text(b"\2")),
    "order": array(order="K"),
    "tensor of a terabyte": tensor(shape=[2**40]),
    "tensor that overflows": tensor(shape=[2**62, 2**62, 0], data=""),
    "boolean tensor of 2": tensor(dtype="bool", data=text(b"\2")),
    "gradient of integers": tensor(dtype="int32", requires_grad=True),
    "device": {"$torch.device": "nowhere:0"},
    "short generator": {"$torch.Generator": text(b"\0" * 16)},
    "generator of 0xff": {"$torch.Generator": text(b"\xff" * len(torch.Generator().get_state()))},
    "position behind the words": random_state(625),
    "position before the words": random_state(-1),
    "position behind the buffer": generator(buffer_pos=5),
    "position before the buffer": generator(buffer_pos=-1),
    "unknown bit generator": generator(bit_generator="os.system"),
    "endless pool": generator(seed=[1, {"$tuple": []}, 2**40, 0]),
    "endless seed": generator(seed=[{"$int": "0x1" + "0" * 10_000}, {"$tuple": []}, 4, 0]),
    "long double of three": {"$numpy.longdouble": text(b"0" * 24)},
    "class without a name": {"$Enum": {"class": [], "name": "A"}},
    "class of numbers": {"$Enum": {"class": [1, 2], "name": "A"}},
}


@pytest.mark.parametrize("name", TREES)
def test_tags_with_invalid_content_are_corrupt(name: str) -> None:
    """Decode trees that no encoder writes; several would take terabytes or hours if their claims were trusted."""
    with pytest.raises(CorruptCheckpointError):
        decode_json(TREES[name])


def test_content_of_a_newer_version_is_unsupported() -> None:
    """Decode an unknown tag, encoding, dtype and layout."""
    for tree in ({"$quaternion": 1}, tensor(dtype="float2"), {"$torch.dtype": "float2"}, {"$torch.layout": "x"}):
        with pytest.raises(UnsupportedFormatError):
            decode_json(tree)
    with pytest.raises(UnsupportedFormatError):
        decode_object("k", EncodedObject("yaml", b""))  # type: ignore[arg-type]  # a reader of any format would say so


def enum_of(module: str, name: str) -> dict[str, object]:
    return {"$Enum": {"class": [module, name], "name": "A"}}


def test_classes_are_looked_up_and_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name modules that are not imported, modules whose attributes run code, and objects that are not classes."""

    class Eager(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            pytest.fail(f"code ran for {name}")

    lazy = types.ModuleType("lazy_for_test")
    lazy.__getattr__ = lambda name: pytest.fail(f"code ran for {name}")  # type: ignore[method-assign]  # PEP 562
    monkeypatch.setitem(sys.modules, "lazy_for_test", lazy)
    monkeypatch.setitem(sys.modules, "eager_for_test", Eager("eager_for_test"))
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    names = [("antigravity", "A"), ("lazy_for_test", "A.b"), ("eager_for_test", "A"), ("os", "system"), ("os", "path")]
    names += [("builtins", "dict"), ("builtins", "int.real"), ("enum", "Enum"), ("", ""), ("sys", "modules.os")]
    for module, name in names:
        fields = {"class": [module, name], "fields": ["a"], "items": [1]}
        bits = {"class": [module, name], "bits": "0x3"}
        for tree in (enum_of(module, name), {"$namedtuple": fields}, {"$Enum": bits}):
            with pytest.raises(UnsafeObjectError) as caught:
                decode_json(tree)
            assert f"{module}.{name}" in str(caught.value.details["types"])
    assert "antigravity" not in sys.modules
    with pytest.raises(UnsafeObjectError, match="import the module 'antigravity' before loading"):
        decode_json(enum_of("antigravity", "A"))


def test_constructors_of_users_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode a tuple class with a constructor, a namedtuple with other fields, flags with their own `_missing_`."""
    module = types.ModuleType("classes_for_test")
    source = """
import collections, enum
class Tricky(tuple):
    _fields = ("a",)
    def __new__(cls, *values): raise AssertionError("ran")
class Changed(collections.namedtuple("Changed", "b")): pass
class Flags(enum.Flag):
    A = 1
    B = 2
    @classmethod
    def _missing_(cls, value): raise AssertionError("ran")
"""
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    trees: list[object] = [
        {"$namedtuple": {"class": [module.__name__, name], "fields": ["a"], "items": [1]}}
        for name in ("Tricky", "Changed")
    ]
    trees.append({"$Enum": {"class": [module.__name__, "Flags"], "bits": "0x3"}})
    trees.append(enum_of(module.__name__, "Flags") | {})
    for tree in trees[:3]:
        with pytest.raises(UnsafeObjectError):
            decode_json(tree)
    assert decode_json(trees[3]) is vars(module)["Flags"].A


NAMES = """
    tuple set frozenset dict int float str bytes complex OrderedDict Counter defaultdict deque slice range Decimal
    Fraction UUID datetime date time timedelta Path Namespace BytesIO array Enum namedtuple
    numpy.dtype numpy.ndarray numpy.scalar numpy.Generator numpy.RandomState
    torch.Tensor torch.Size torch.device torch.Generator
"""
TAGS = [f"${name}" for name in NAMES.split()]
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False).filter(math.isfinite)
)
CONTENTS = ["C", "<f4", "|b1", "float32", "dtype", "shape", "data", "", "AAAA", "0x1", "-0x1", "nan"]
words = st.sampled_from([*TAGS, *CONTENTS])
nonsense = st.recursive(
    scalars | words | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(words, inner, max_size=4)
        | st.tuples(st.sampled_from(TAGS), inner).map(lambda pair: dict([pair]))
    ),
    max_leaves=12,
)


@given(nonsense)
def test_nonsense_gives_an_object_or_one_of_three_errors(tree: object) -> None:
    """Decode random JSON of tag names, field names and values."""
    with contextlib.suppress(*REFUSALS):
        decode_json(tree)


SAMPLES = [
    *(json.dumps(tree).encode() for tree in (array(), tensor(), random_state(3), generator())),
    encode_object("k", {"a": (1, b"x", 2.5, None), 3: np.float32(2), "c": torch.device("cpu")}).data,
]


@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_texts_give_an_object_or_one_of_three_errors(sample: bytes, data: st.DataObject) -> None:
    """Replace a few bytes of a valid text."""
    damaged = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.sampled_from(list(b'0129-e."$[]{}:,ax')))
    with contextlib.suppress(*REFUSALS):
        decode_object("k", EncodedObject("json", bytes(damaged)))
