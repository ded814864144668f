"""Unbounded nesting: in the document, in paths of the state dict, in objects, in pickles and their attributes."""

from __future__ import annotations

import json
import sys

import pytest

from dcp_remote import load
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format.document import seal
from dcp_remote.format.manifest_validation import PATH_PARTS_MAX
from dcp_remote.serialization.objects import EncodedObject, decode_object
from tests.attacks.attacker import assert_refused, bucket, call, stream, tensor, word
from tests.support.figures import count

pytestmark = pytest.mark.torture

LEVELS = 200_000


@pytest.mark.parametrize("field", ["user", "objects", "flatten", "run", "shards", "a field of the future"])
@pytest.mark.parametrize("opening", ["[", '{"a":'], ids=["lists", "objects"])
def test_a_field_of_the_manifest(field: str, opening: str) -> None:
    """Nesting of 200,000 levels is refused in every field of the manifest."""
    deep = opening * LEVELS + "1" + {"[": "]", '{"a":': "}"}[opening] * LEVELS
    attacked = bucket()
    text = json.dumps(attacked.document() | {field: "HERE"}, separators=(",", ":")).replace('"HERE"', deep)
    attacked.put("manifest.json", seal(text.encode()))
    assert_refused(attacked, CorruptCheckpointError)


def test_a_path_of_the_state_dict() -> None:
    """A path as deep as any that can be saved loads; a deeper one, whose dicts cannot be printed, is refused."""
    for parts in (PATH_PARTS_MAX, PATH_PARTS_MAX + 1, LEVELS):
        attacked = bucket()
        document = attacked.document()
        document["flatten"]["step"] = ["a"] * parts
        attacked.commit(document)
        if parts > PATH_PARTS_MAX:
            assert_refused(attacked, CorruptCheckpointError)
        else:
            found: object = load(attacked.store)
            for _ in range(parts):
                assert isinstance(found, dict)
                found = found["a"]
            assert found == 3


TEXTS: dict[str, str] = {
    "lists": "[" * LEVELS + "]" * LEVELS,
    "objects": '{"a":' * LEVELS + "1" + "}" * LEVELS,
    "tuples": '{"$tuple":[' * LEVELS + "]}" * LEVELS,
    "keys": '{"$dict":[[' * 150 + "1" + ",0]]}" * 150,
    "101 lists": "[" * 102 + "]" * 102,
    "open": "[" * LEVELS,
    "behind a string": '["\\"[' + "[" * 50 + '",' + "[" * LEVELS,
}


@pytest.mark.parametrize("name", TEXTS)
def test_an_object_as_json(name: str) -> None:
    """A deeply nested JSON object is refused, closed or not, also with the recursion limit raised beyond the stack."""
    count("attacks")
    limit = sys.getrecursionlimit()
    for raised in (limit, 10_000_000):
        sys.setrecursionlimit(raised)
        try:
            with pytest.raises(CorruptCheckpointError):
                decode_object("k", EncodedObject("json", TEXTS[name].encode()))
        finally:
            sys.setrecursionlimit(limit)


def test_a_value_in_a_manifest() -> None:
    """A value in a manifest that is nested deeper than an object may be is refused by a load."""
    for depth in (400, 404, 405, 900):
        attacked = bucket()
        document = json.dumps(attacked.document(), separators=(",", ":"))
        assert document.count('"step":3') == 1
        text = document.replace('"step":3', '"step":' + "[" * depth + "]" * depth)
        attacked.put("manifest.json", seal(text.encode()))
        with pytest.raises(CorruptCheckpointError, match=r"not valid JSON|too deep|damaged"):
            load(attacked.store)


# Each level costs one to seven bytes.
PROGRAMS: dict[str, bytes] = {
    "lists": b"]" * LEVELS + b"a" * (LEVELS - 1),
    "dicts": b"}" + b"K\x00}" * 50_000 + b"s" * 50_000,
    "tuples": b")" + b"\x85" * LEVELS,
    "a key": b"})" + b"\x85" * 1_000_000 + b"K\x01s",
    "an element": call("__builtin__", "set", b"](" + b")" + b"\x85" * 1_000_000 + b"e"),
    "a size": call("torch", "Size", b")" + b"\x85" * LEVELS),
    "marks": b"(" * LEVELS + b"t" * LEVELS,
    "calls": (b"ctorch._tensor\n_rebuild_from_type_v2\n(" * 2000) + b"Nt" * 2000,
    "attributes of an OrderedDict": call("collections", "OrderedDict", b"")
    + b"}"
    + word("x")
    + b"]" * LEVELS
    + b"a" * (LEVELS - 1)
    + b"sb",
    "attributes of a parameter": call(
        "torch._utils",
        "_rebuild_parameter_with_state",
        tensor(1, 1)
        + b"\x89"
        + call("collections", "OrderedDict", b"")
        + b"}"
        + word("x")
        + b"]" * LEVELS
        + b"a" * (LEVELS - 1)
        + b"s",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_object_as_a_stream(name: str) -> None:
    """Deep nesting in a stream is refused; hashing a key of a million levels once overflowed the stack."""
    count("attacks")
    with pytest.raises(CorruptCheckpointError):
        decode_object("k", EncodedObject("torch", stream(PROGRAMS[name], d0=b"1234")))
