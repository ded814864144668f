"""Raw bytes behind the text of an object: ranges that overlap, leave bytes out, or lie outside."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError, UnsafeObjectError, UnsupportedFormatError
from dcp_remote.serialization.objects import EncodedObject, decode_object, encode_object
from tests.attacks.attacker import LOADS, assert_refused, bucket, outcomes


def raw_object(tree: object, raw: bytes, *, length: int | None = None) -> EncodedObject:
    text = json.dumps(tree).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return EncodedObject("json+raw", struct.pack("<Q", len(text) if length is None else length) + text + raw)


def data_at(start: object, length: object) -> dict[str, object]:
    return {"$bytes": [start, length]}


def tensor_at(start: int, length: int, shape: list[int], dtype: str = "float32") -> dict[str, object]:
    return {"$torch.Tensor": {"dtype": dtype, "shape": shape, "requires_grad": False, "data": [start, length]}}


def array_at(start: int, length: int, shape: list[int], dtype: object = "<f4") -> dict[str, object]:
    return {"$numpy.ndarray": {"dtype": dtype, "shape": shape, "order": "C", "data": [start, length]}}


RAW = bytes(range(200)) * 20

ATTACKS: dict[str, EncodedObject] = {
    "nothing": EncodedObject("json+raw", b""),
    "half a length": EncodedObject("json+raw", b"\x40\0\0\0"),
    "text beyond the end": raw_object([], b"", length=2**63),
    "text cut": raw_object([], RAW, length=0),
    "text that is not filled up": raw_object([], b"", length=3),
    "text that takes raw bytes": raw_object([data_at(0, 4000)], RAW, length=56 + 64),
    "bytes left out behind": raw_object([data_at(0, 3999)], RAW),
    "bytes left out before": raw_object([data_at(1, 3999)], RAW),
    "bytes left out between": raw_object([data_at(0, 1999), data_at(2000, 2000)], RAW),
    "bytes of no value": raw_object([], RAW),
    "none are there": raw_object([data_at(0, 1)], b""),
    "overlap": raw_object([data_at(0, 3000), data_at(2999, 1001)], RAW),
    "overlap and gap": raw_object([data_at(0, 3000), data_at(2000, 1000)], RAW),
    "one place twice": raw_object([data_at(0, 4000), data_at(0, 4000)], RAW),
    "a million in one place": raw_object([data_at(0, 4000)] * 100_000, RAW),
    "beyond the end": raw_object([data_at(0, 4001)], RAW),
    "starts beyond": raw_object([data_at(4001, 1)], RAW),
    "before the start": raw_object([data_at(-1, 4001)], RAW),
    "less than none": raw_object([data_at(4000, -4000), data_at(0, 4000)], RAW),
    "empty": raw_object([data_at(0, 0), data_at(0, 4000)], RAW),
    "huge": raw_object([data_at(0, 2**63 - 1)], RAW),
    "sum that wraps": raw_object([data_at(2**63 - 1, 2**63 - 1)], RAW),
    "true": raw_object([data_at(False, True), data_at(1, 3999)], RAW),  # booleans are integers to Python
    "floats": raw_object([data_at(0.0, 4000.0)], RAW),
    "three numbers": raw_object([{"$bytes": [0, 4000, 1]}], RAW),
    "an object": raw_object([{"$bytes": {"start": 0}}], RAW),
    "huge shape": raw_object([tensor_at(0, 4000, [2**40])], RAW),
    "shape that overflows": raw_object([tensor_at(0, 4000, [2**62, 2**62, 0])], RAW),
    "shape too small": raw_object([tensor_at(0, 4000, [999])], RAW),
    "boolean tensor of 2": raw_object([tensor_at(0, 4000, [4000], "bool")], RAW),
    "boolean array of 2": raw_object([array_at(0, 4000, [4000], "|b1")], RAW),
    "huge array": raw_object([array_at(0, 4000, [2**40])], RAW),
    "no bytes each": raw_object([array_at(0, 4000, [2**40], "|V0")], RAW),
    "objects": raw_object([array_at(0, 4000, [500], "|O8")], RAW),
    "half an item": raw_object(
        [{"$array": {"typecode": "d", "item_bytes": 8, "data": [0, 4000 - 4]}}, data_at(3996, 4)], RAW
    ),
    "raw bytes behind a text without": EncodedObject("json", json.dumps([data_at(0, 4)]).encode()),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_no_encoder_writes_is_corrupt(name: str) -> None:
    """Ranges that no encoder writes are refused, in memory in proportion to the input."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError):
            decode_object("k", ATTACKS[name])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50 * len(ATTACKS[name].data) + MiB


def test_places_that_are_not_aligned_are_copied() -> None:
    """Unaligned values, which other writers may store, are copied into aligned arrays."""
    raw = b"\1" + np.arange(50_000, dtype="<f4").tobytes() + b"\1" + np.arange(50_000, dtype="<f4").tobytes()
    tree = [data_at(0, 1), tensor_at(1, 200_000, [50_000]), data_at(200_001, 1), array_at(200_002, 200_000, [50_000])]
    data = memoryview(bytearray(raw_object(tree, raw).data))
    decoded: Any = decode_object("k", EncodedObject("json+raw", b"", (data,)))
    tensor, values = decoded[1::2]
    assert torch.equal(tensor, torch.arange(50_000.0))
    assert values.flags.aligned
    np.testing.assert_array_equal(values, np.arange(50_000))


VALUE = {"a": np.arange(2_000), "b": torch.ones(3_000), "c": b"xyz" * 1001, "d": (bytearray(5_000), [1, 2])}
WHOLE = b"".join([encode_object("k", VALUE).data, *encode_object("k", VALUE).buffers])


@given(st.data())
def test_changed_bytes_are_an_object_or_an_error_of_ours(data: st.DataObject) -> None:
    """Changed bytes of length and text, or a cut end, give an object or a typed error."""
    changed = bytearray(WHOLE)
    stop = 8 + int.from_bytes(WHOLE[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, stop - 1))
        new = data.draw(st.sampled_from([b"0", b"1", b"9", b"-", b"[", b"]", b'"', b",", b"\xff", b"\0"]))
        changed[at : at + data.draw(st.integers(0, 2))] = new * data.draw(st.integers(0, 2))
    changed = changed[: data.draw(st.sampled_from([len(changed), len(changed) - 1, stop, 100, 8, 7, 0]))]
    try:
        decode_object("k", EncodedObject("json+raw", b"", (memoryview(changed),)))
    except (CorruptCheckpointError, UnsafeObjectError, UnsupportedFormatError):
        return


@pytest.mark.parametrize("number", [0, 1])
def test_an_object_that_is_said_to_be_raw_bytes_behind_a_text(number: int) -> None:
    """An object without raw bytes, under the encoding of one that has them, is refused."""
    attacked = bucket()
    document = attacked.document()
    document["objects"]["stored"][number]["encoding"] = "json+raw"
    attacked.commit(document)
    # A reader of a tensor's rows never decodes the object.
    found = outcomes(attacked, LOADS)
    assert {name for name, error in found.items() if not isinstance(error, CorruptCheckpointError)} == {"rows"}


def test_a_tensor_that_is_said_to_be_raw_bytes_behind_a_text() -> None:
    """A tensor under an encoding of objects is refused."""
    attacked = bucket()
    document = attacked.document()
    for kind in document["tensors"]["kinds"]:
        kind["encoding"] = "json+raw"
    attacked.commit(document)
    assert_refused(attacked, UnsupportedFormatError)
