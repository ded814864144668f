"""Huge integers: in fields, in columns, in sizes that multiply, in objects; claims of a petabyte."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dcp_remote import load
from dcp_remote.common.geometry import Box
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, UnsafeObjectError
from dcp_remote.format.document import seal
from dcp_remote.format.manifest import JSON, RAW, TORCH, Manifest, TensorKind
from dcp_remote.format.manifest_json import encode
from dcp_remote.loading.downloads import RANGE_BYTES_MAX
from dcp_remote.loading.read_plan import RANGES_MAX, Want, plan_reads
from dcp_remote.serialization.objects import EncodedObject, decode_object
from dcp_remote.storage import MemoryStore
from tests.attacks.attacker import (
    assert_refused,
    bucket,
    call,
    column,
    integer,
    named,
    numbers,
    stream,
    tensor,
    word,
)
from tests.support.figures import count
from tests.support.manifests import Layout, ObjectLayout, build

pytestmark = pytest.mark.torture

HUGE = {
    "4,000 digits": 10**4000,
    "2**64": 2**64,
    "2**63": 2**63,
    "2**53 + 1": 2**53 + 1,
    "-1": -1,
    "-2**63": -(2**63),
    "-4,000 digits": -(10**4000),
}


@pytest.mark.parametrize("name", HUGE)
@pytest.mark.parametrize("path", [["world_size"], ["run"], ["objects", "stored", 0, "pieces"], ["flatten", "step", 1]])
def test_a_number_of_the_document(path: list[str | int], name: str) -> None:
    """Each integer field of the document is refused beyond its bounds."""
    value = HUGE[name]
    attacked = bucket()
    document = attacked.document()
    document["flatten"]["step"] = ["steps", 0]
    place: Any = document
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = {"step": 1, "token": value, "revision": 1} if path == ["run"] else value
    attacked.commit(document)
    assert_refused(attacked, CorruptCheckpointError)


def test_a_number_of_a_million_digits() -> None:
    """A number of a million digits, which takes quadratic time to parse, is refused by its length."""
    for field in ("world_size", "user"):
        attacked = bucket()
        text = json.dumps(attacked.document() | {field: {"a": 7} if field == "user" else 7}).encode()
        attacked.put(
            "manifest.json",
            seal(
                text.replace(b'{"a": 7}', b'{"a": ' + b"9" * 900_000 + b"}").replace(
                    b'"world_size": 7', b'"world_size": ' + b"9" * 1_000_000
                )
            ),
        )
        assert_refused(attacked, CorruptCheckpointError)


@pytest.mark.parametrize("value", [2**53 + 1, 2**62, 2**63 - 1, -1, -(2**63)])
def test_a_number_of_a_column(value: int) -> None:
    """The first and last entry of each column are refused out of bounds, also where the differences' sum wraps."""
    places = [(part, name) for part in ("shards", "tensors", "chunks", "pieces") for name in bucket().document()[part]]
    for part, name in [*places, ("objects", "positions")]:
        text = bucket().document()[part][name]
        if not isinstance(text, str) or text[1:2] != ":":
            continue
        for index in (0, -1):
            attacked = bucket()
            document = attacked.document()
            values = numbers(text)
            values[index] = value
            document[part][name] = column(values)
            attacked.commit(document)
            assert_refused(attacked, CorruptCheckpointError)


@pytest.mark.parametrize("shape", [[2**53] * 64, [2**32, 2**32], [2**31, 2**31, 4], [2**53, 0], [0, 2**40, 2**40]])
def test_sizes_whose_product_wraps_around(shape: list[int]) -> None:
    """A shape is refused whose product wraps around to zero or to the true size, or is hidden behind a zero."""
    attacked = bucket()
    document = attacked.document()
    rank = numbers(document["tensors"]["dimensions"])[0]
    sizes, boxes = numbers(document["tensors"]["shape"]), numbers(document["chunks"]["sizes"])
    offsets = numbers(document["chunks"]["offsets"])
    dimensions = numbers(document["tensors"]["dimensions"])
    document["tensors"]["dimensions"] = column([len(shape), *dimensions[1:]])
    document["tensors"]["shape"] = column([*shape, *sizes[rank:]])
    document["chunks"]["sizes"] = column([*shape, *boxes[rank:]])
    document["chunks"]["offsets"] = column([0] * len(shape) + offsets[rank:])
    attacked.commit(document)
    assert_refused(attacked, CorruptCheckpointError)


def claiming(*, length: int, encoding: str) -> Manifest:
    """Return the manifest of one tensor or object of so many bytes, in one shard that does not exist."""
    if encoding == JSON:
        return build([], [ObjectLayout("o", JSON, (length,))])
    kind = TensorKind("uint8", encoding=encoding)
    return build([Layout("w", kind, (length,), (Box((0,), (length,)),), ((length,),))])


@pytest.mark.parametrize(
    ("encoding", "length"), [(RAW, 2**52), (RAW, 2**46), (RAW, 2**40), (TORCH, 2**38), (JSON, 2**38)]
)
def test_sizes_that_no_memory_holds(encoding: str, length: int) -> None:
    """A claim of more bytes than any memory has, with a shard of 4 bytes, is refused without an allocation."""
    count("attacks")
    store = MemoryStore()
    manifest = claiming(length=length, encoding=encoding)
    store.put("manifest.json", [encode(manifest)])
    store.put(manifest.shards.keys[0], [b"1234"])
    with pytest.raises((InvalidArgumentError, CorruptCheckpointError)):
        load(store)


def test_a_list_of_requests_that_no_memory_holds() -> None:
    """A read of more than 2 million requests is refused, since a host may overcommit 16 TiB for a tensor."""
    count("attacks")
    at_most = RANGES_MAX * RANGE_BYTES_MAX
    with pytest.raises(InvalidArgumentError, match="more than one process can read"):
        plan_reads(claiming(length=at_most + RANGE_BYTES_MAX, encoding=RAW), [Want(0, 1, None)])


OBJECTS: dict[str, object] = {
    "int of a million digits": {"$int": "9" * 1_000_000},
    "range": {"$range": [0, 10**30, 1]},
    "size": {"$torch.Size": [2**64]},
    "fraction": {"$Fraction": [{"$int": "0x" + "f" * 100_000}, 7]},
    "deque": {"$deque": {"maxlen": 2**64, "items": []}},
    "position": {"$BytesIO": {"data": "", "position": 2**64}},
    "timedelta": {"$timedelta": [10**18, 0, 0]},
    "shape": {"$torch.Tensor": {"dtype": "float32", "shape": [2**62, 4], "requires_grad": False, "data": ""}},
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_number_of_an_object(name: str) -> None:
    """Huge numbers in a JSON object are refused."""
    count("attacks")
    with pytest.raises(CorruptCheckpointError):
        decode_object("k", EncodedObject("json", json.dumps(OBJECTS[name]).encode()))


QUANTIZED = b"(" + word("storage") + named("torch", "QInt8Storage") + word("0") + word("cpu") + b"K\x01tQK\x00"
STREAMS: dict[str, bytes] = {
    "product of 100,000 sizes of 2,000 bits": call(
        "torch._utils",
        "_rebuild_qtensor",
        QUANTIZED + b"(" + integer(2**2000) + b"q\x00" + b"h\x00" * 100_000 + b"t)NN",
    ),
    "size": tensor(2**70, 0),
    "stride": tensor(2, 2**62),
    "items": tensor(1, 1, items=2**62),
    "items below zero": tensor(1, 1, items=-1),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_number_of_a_stream(name: str) -> None:
    """Huge sizes, strides and counts in a stream are refused."""
    count("attacks")
    with pytest.raises((CorruptCheckpointError, UnsafeObjectError)):
        decode_object("k", EncodedObject("torch", stream(STREAMS[name], d0=b"1234")))
