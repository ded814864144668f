"""Shards as the safetensors library reads them, and their keys."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load

from dcp_remote.format.dtypes import ITEM_BYTES, SAFETENSORS_NAMES
from dcp_remote.format.shard import TABLE_NAME, HeaderEntry, ShardNames, header


def data_of(length: int, seed: int) -> bytes:
    # Zeros and ones alone: some types of elements have patterns that are not a value.
    return np.random.default_rng(seed).integers(0, 2, length, dtype=np.uint8).tobytes()


ENTRIES = st.lists(
    st.builds(
        lambda name, dtype, shape: HeaderEntry(name, dtype, tuple(shape), int(np.prod(shape)) * ITEM_BYTES[dtype]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.sampled_from(["w", "w#2", "__metadata__"]),
        st.sampled_from(sorted(ITEM_BYTES)),
        st.lists(st.integers(1, 4), max_size=3),
    ),
    max_size=6,
)


@given(ENTRIES, st.sampled_from([0, 32, 4800]))
def test_the_library_opens_what_a_header_makes(entries: list[HeaderEntry], table_length: int) -> None:
    """Header, table and data form a file whose tensors have the expected names, types and bytes in order."""
    contents = [data_of(entry.length, seed) for seed, entry in enumerate(entries)]
    table = data_of(table_length, 99)
    front = header(entries, table_length=table_length)
    assert len(front) % 8 == 0
    tensors = load(front + table + b"".join(contents))
    if table_length:
        assert tensors[TABLE_NAME].numpy().tobytes() == table
    names = [name for name in json.loads(front[8:]) if name not in (TABLE_NAME, "__metadata__")]
    assert len(names) == len(entries), "each entry has a name of its own"
    for name, entry, content in zip(names, entries, contents, strict=True):
        assert name == entry.name or re.fullmatch(re.escape(entry.name) + r"(#\d+)+", name)
        known = entry.dtype in SAFETENSORS_NAMES
        assert tensors[name].dtype == (getattr(torch, entry.dtype) if known else torch.uint8)
        assert tensors[name].shape == (entry.shape if known else (entry.length,))
        assert tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes() == content


def test_names_that_collide() -> None:
    """The first tensor keeps its name; names reserved by safetensors or dcp_remote are never given to a tensor."""
    names = ["w", "w", "w#2", "w", TABLE_NAME, "__metadata__", "__metadata__"]
    entries = [HeaderEntry(name, "uint8", (1,), 1) for name in names]
    for table_length in (0, 16):
        tensors = json.loads(header(entries, table_length=table_length)[8:])
        given_names = list(tensors)[1 + bool(table_length) :]
        renamed = [f"{TABLE_NAME}#2", "__metadata__#2", "__metadata__#3"]
        assert given_names == ["w", "w#2", "w#2#2", "w#3", *renamed]
        assert (TABLE_NAME in tensors) == bool(table_length)
        assert tensors["__metadata__"] == {"format": "pt"}


def test_the_library_is_an_oracle() -> None:
    """The library refuses a file with a hole or an extra byte, so a file that opens matches its header."""
    front = header([HeaderEntry("w", "int16", (3,), 6)], table_length=0)
    assert load(front + bytes(6))["w"].tolist() == [0, 0, 0]
    for wrong in (front + bytes(5), front + bytes(7), front[:-1] + bytes(6)):
        with pytest.raises(SafetensorError):
            load(wrong)


def test_keys() -> None:
    """A key has the rank and number, two hex digits of the hash of the name, and a token that is never repeated."""
    names = ShardNames(3, token="0123456789abcdef")
    name = "rank-00003-0123456789abcdef-0012.safetensors"
    assert names.key(12) == f"shards/{xxhash.xxh3_64(name.encode()).hexdigest()[:2]}/{name}"
    assert ShardNames(123_456).key(98_765).endswith("-98765.safetensors")
    assert len({ShardNames(0).token for _ in range(100)}) == 100
    assert len({names.key(n) for n in range(2000)}) == 2000
    assert len({names.key(n)[:9] for n in range(2000)}) > 200, "keys are spread over the 256 prefixes"
