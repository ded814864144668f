"""Changed headers of shards, which other tools read: for dcp_remote the manifest alone counts."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest
import safetensors
from safetensors import SafetensorError

from tests.attacks.attacker import LOADS, Bucket, bucket, numbers, outcomes

pytestmark = pytest.mark.torture


def header_of(attacked: Bucket, key: str) -> bytes:
    """Return the bytes before the block table, or before the data."""
    shards = attacked.document()["shards"]
    shard = shards["keys"].index(key)
    return attacked.objects[key][: numbers(shards["data_starts"])[shard] - numbers(shards["table_lengths"])[shard]]


def padded(text: bytes, length: int) -> bytes:
    assert len(text) <= length - 8
    return (length - 8).to_bytes(8, "little") + text.ljust(length - 8)


HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "length of zero": lambda header: bytes(8) + header[8:],
    "length of 16 EiB": lambda header: b"\xff" * 8 + header[8:],
    "length of 100 MB": lambda header: (10**8).to_bytes(8, "little") + header[8:],
    "length beyond the file": lambda header: (10**6).to_bytes(8, "little") + header[8:],
    "nothing": lambda header: padded(b"{}", len(header)),
    "no JSON": lambda header: padded(b"\xff\x00{", len(header)),
    "a list": lambda header: padded(b"[]", len(header)),
    "deep": lambda header: padded(b"[" * (len(header) - 8), len(header)),
    "a name twice": lambda header: padded(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        len(header),
    ),
    "offsets beyond the file": lambda header: padded(
        json.dumps({"a": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}).encode(), len(header)
    ),
    "offsets backwards": lambda header: padded(
        json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}}).encode(), len(header)
    ),
    "a shape that wraps around": lambda header: padded(
        json.dumps({"a": {"dtype": "U8", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}).encode(), len(header)
    ),
    "the other tensors": lambda header: header.replace(b"weight", b"thgiew"),
    "an executable": lambda header: b"\x7fELF" + header[4:],
    "a zip": lambda header: b"PK\x03\x04" + header[4:],
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_of_anything(name: str) -> None:
    """With any header in every shard, data and manifest unchanged, each load gets the saved values."""
    attacked = bucket()
    for key in attacked.document()["shards"]["keys"]:
        header = header_of(attacked, key)
        changed = HEADERS[name](header)
        assert len(changed) == len(header)
        attacked.put(key, changed + attacked.objects[key][len(header) :])
    assert set(outcomes(attacked, LOADS).values()) == {None}


def test_readers_of_headers_refuse_most_of_them(tmp_path: pathlib.Path) -> None:
    """The library that reads these headers refuses most of them, which shows that the attacks are real."""
    attacked = bucket()
    key = attacked.document()["shards"]["keys"][0]
    header = header_of(attacked, key)
    path = tmp_path / "shard.safetensors"
    refused = 0
    for change in HEADERS.values():
        path.write_bytes(change(header) + attacked.objects[key][len(header) :])
        try:
            with safetensors.safe_open(path, "pt") as opened:
                opened.keys()
        except (SafetensorError, OverflowError):
            refused += 1
    assert refused >= len(HEADERS) - 2
