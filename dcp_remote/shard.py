"""The bytes of a shard before its data: a safetensors header and the block table. Pure.

A shard is a valid safetensors file, so that any tool can open one; what reads a checkpoint goes by the manifest.
The plan gives every size, so the header is known before the first byte of data moves.

Source: the safetensors format, https://huggingface.co/docs/safetensors (header length as 8 bytes little-endian, JSON
of names to dtype, shape and data offsets, data without holes; an optional `__metadata__` of strings).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import xxhash

from dcp_remote.dtypes import SAFETENSORS_NAMES
from dcp_remote.ranges import MiB

# One PUT each: small enough to retry or hedge whole, large enough that 405B with Adam is 84,000 requests.
SHARD_BYTES_MAX = 64 * MiB

# safetensors refuses headers above 100 MB; this many entries stay below it with names of 5,000 characters each.
ITEMS_PER_SHARD_MAX = 16_384

SHARDS_PREFIX = "shards/"
# What `ShardNames` gives without an origin, and nobody else would.
_WRITTEN_KEY = re.compile(rf"{SHARDS_PREFIX}[0-9a-f]{{2}}/rank-\d{{5,}}-[0-9a-f]{{16}}-\d{{4,}}\.safetensors", re.ASCII)

TABLE_NAME = "__dcp_remote_blocks__"
_RESERVED = "__metadata__"
# Readers map the file and want the data aligned; safetensors itself pads the header to 8.
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of the file: a piece, or a whole chunk.

    Attributes:
        name: What to call it; made unique if it is not.
        dtype: torch's name of it. One that safetensors does not know is shown as bytes.
        shape: Of the piece; its volume times the bytes of an element is `length`.
        length: In bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    length: int


def header(entries: Sequence[HeaderEntry], *, table_length: int) -> bytes:
    """The first bytes of a shard: header length and header; the block table, if any, and the data follow.

    Args:
        entries: In the order of their data.
        table_length: Bytes of the block table, which becomes the first tensor; 0 if there is none.
    """
    tensors: dict[str, object] = {_RESERVED: {"format": "pt"}}
    position = 0
    if table_length:
        tensors[TABLE_NAME] = {"dtype": "U8", "shape": [table_length], "data_offsets": [0, table_length]}
        position = table_length
    for entry in entries:
        name = SAFETENSORS_NAMES.get(entry.dtype)
        tensors[_unused(entry.name, tensors)] = {
            "dtype": name or "U8",
            "shape": list(entry.shape) if name else [entry.length],
            "data_offsets": [position, position + entry.length],
        }
        position += entry.length
    text = json.dumps(tensors, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _unused(name: str, taken: dict[str, object]) -> str:
    if name not in taken and name != TABLE_NAME:
        return name
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"


@dataclass(frozen=True, slots=True)
class ShardNames:
    """The names of the shards of one rank in one save.

    Attributes:
        rank: In the process group.
        origin: What their names begin with; that of a save into a run says which (`run_names.origin`).
        token: Random.
    """

    rank: int
    origin: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def again(self) -> ShardNames:
        """Others for the same shards."""
        return replace(self, token=secrets.token_hex(8))

    def key(self, number: int) -> str:
        """Of the n-th shard, relative to the checkpoint; two hex digits of its hash spread the keys."""
        name = f"{self.origin}rank-{self.rank:05d}-{self.token}-{number:04d}.safetensors"
        return f"{SHARDS_PREFIX}{xxhash.xxh3_64_hexdigest(name.encode())[:2]}/{name}"


def is_written_key(key: str) -> bool:
    """Whether a key, relative to the checkpoint, is a shard that a save of ours by itself put (not into a run)."""
    return _WRITTEN_KEY.fullmatch(key) is not None
