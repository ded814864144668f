"""Header and name of a shard. Pure.

A shard is a valid safetensors file, so that other tools can open it; a reader of checkpoints uses the manifest instead.
The plan gives every size, so that the header is known before the first byte of data moves.

Source: the safetensors format, https://huggingface.co/docs/safetensors (header length as 8 bytes little-endian, JSON
of names to dtype, shape and data offsets, data without holes; an optional `__metadata__` of strings).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import xxhash

from dcp_remote.common.units import MiB
from dcp_remote.format.dtypes import SAFETENSORS_NAMES
from dcp_remote.format.keys import SHARDS_PREFIX

# One PUT each: small enough to retry or hedge whole, large enough that 405B with Adam is 84,000 requests.
SHARD_BYTES_MAX = 64 * MiB

# A piece of at least this size is worth a request of its own: it is written and read alone.
SEPARATE_BYTES_MIN = 1 * MiB

# safetensors refuses headers above 100 MB; this many entries stay below it with names of 5,000 characters each.
ITEMS_PER_SHARD_MAX = 16_384

# Name of the block table among the tensors of the file.
TABLE_NAME = "__dcp_remote_blocks__"
# Key of a header that is no tensor.
METADATA_NAME = "__metadata__"
# Readers map the file into memory and need aligned data; safetensors itself pads the header to 8 bytes.
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """Tensor of the file: a piece, or a whole chunk."""

    name: str  # a suffix makes repeated names unique
    dtype: str  # torch's name; a dtype that safetensors does not know is shown as bytes
    shape: tuple[int, ...]  # its volume times the bytes of an element is `length`
    length: int  # bytes of the piece


def header(entries: Sequence[HeaderEntry], *, table_length: int) -> bytes:
    """Return the first bytes of a shard: header length and header. The block table, if any, and the data follow.

    The entries are in the order of their data; the block table, of so many bytes, becomes the first tensor.
    """
    tensors = [(TABLE_NAME, "U8", [table_length], table_length)] if table_length else []
    taken = {METADATA_NAME, TABLE_NAME}
    for entry in entries:
        name, dtype = _unused(entry.name, taken), SAFETENSORS_NAMES.get(entry.dtype)
        taken.add(name)
        tensors.append((name, dtype or "U8", list(entry.shape) if dtype else [entry.length], entry.length))
    return encode_header(tensors)


def encode_header(tensors: Iterable[tuple[str, str, list[int], int]]) -> bytes:
    """Return the first bytes of a file of safetensors: the header's length, and the header.

    A tensor is its name, the name of its dtype in safetensors, its shape, and its length in bytes; in the order of
    their data.
    """
    described: dict[str, object] = {METADATA_NAME: {"format": "pt"}}  # asked for by Transformers
    position = 0
    for name, dtype, shape, length in tensors:
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + length]}
        position += length
    text = json.dumps(described, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _unused(name: str, taken: Collection[str]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"


@dataclass(frozen=True, slots=True)
class ShardNames:
    """Names of the shards of one rank in one save."""

    rank: int  # in the process group
    origin: str = ""  # prefix of the names; for a save into a run, that of `keys.origin`
    token: str = field(
        default_factory=lambda: secrets.token_hex(8)
    )  # random, no other save has it; in a copy, a digest

    def renew(self) -> ShardNames:
        """Return fresh names for the same rank and save."""
        return replace(self, token=secrets.token_hex(8))

    def key(self, number: int) -> str:
        """Return the key of the n-th shard, relative to the checkpoint; two hex digits of a hash spread the keys."""
        name = f"{self.origin}rank-{self.rank:05d}-{self.token}-{number:04d}.safetensors"
        return f"{SHARDS_PREFIX}{xxhash.xxh3_64_hexdigest(name.encode())[:2]}/{name}"
