"""A reader of checkpoints in a folder, written from FORMAT.md alone; imports neither torch nor dcp_remote."""

from __future__ import annotations

import base64
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

TYPES = {"float32": "<f4", "int64": "<i8", "bool": "?", "complex64": "<c8"}  # only those of the test


def column(text: str) -> list[int]:
    width, packed = text.split(":")
    data = base64.b64decode(packed)
    steps = [int.from_bytes(bytes(b), "little", signed=True) for b in zip(*[iter(data)] * int(width), strict=True)]
    return list(itertools.accumulate(steps))


def digests(text: str) -> list[bytes]:
    return [bytes(one) for one in np.frombuffer(base64.b64decode(text), np.uint8).reshape(-1, 16)]


def block_bytes(length: int) -> int:
    return next((size for size in (65536, 131072, 262144, 524288) if size * 64 >= length), 1048576)


def blocks_of(data: bytes) -> list[bytes]:
    size = block_bytes(len(data))
    return [xxhash.xxh3_128_digest(data[i : i + size]) for i in range(0, len(data), size)]


def read_document(path: Path, form: str) -> dict[str, Any]:
    data = path.read_bytes()
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        data = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(data).read(2**30)
    assert data[:47] == b'{"xxh3-128":"%s",' % xxhash.xxh3_128_hexdigest(data[47:]).encode()
    document: dict[str, Any] = json.loads(data)
    assert (document["format"], document["version"], document["requires"]) == (form, "1-draft.3", [])
    return document


def read_manifest(folder: Path, step: int | None = None) -> dict[str, Any]:
    live = [] if step is None else read_document(folder / "catalog.json", "dcp_remote catalog")["checkpoints"]
    key = next((one["manifest"] for one in live if one["step"] == step), "manifest.json")
    manifest = read_document(folder / key, "dcp_remote manifest")
    assert manifest["kind"] == "checkpoint"
    return manifest


def read(folder: Path, step: int | None = None) -> dict[str, Any]:
    """Return tensors as arrays, objects as their JSON, and raw bytes, in the order of the save."""
    manifest = read_manifest(folder, step)
    shards, tensors, chunks = manifest["shards"], manifest["tensors"], manifest["chunks"]
    table_starts = [a - b for a, b in zip(column(shards["data_starts"]), column(shards["table_lengths"]), strict=True)]
    tables = {}
    for key, start, stop, digest in zip(
        shards["keys"], table_starts, column(shards["data_starts"]), digests(shards["table_digests"]), strict=True
    ):
        assert re.fullmatch(r"shards/[0-9a-f]{2}/(?!.*\.\.)[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\.safetensors", key)
        table = (folder / key).read_bytes()[start:stop]
        assert xxhash.xxh3_128_digest(table) == digest
        tables[key] = [table[i : i + 16] for i in range(0, len(table), 16)]
    places = [column(manifest["pieces"][name]) for name in ("shard", "start", "length", "table")]
    pieces = []
    for shard, start, length, first, digest in zip(*places, digests(manifest["pieces"]["digests"]), strict=True):
        data = (folder / shards["keys"][shard]).read_bytes()[start : start + length]
        found = blocks_of(data)
        assert xxhash.xxh3_128_digest(b"".join(found)) == digest
        assert len(found) == 1 or found == tables[shards["keys"][shard]][first : first + len(found)]
        pieces.append(data)
    parts, counts = iter(pieces), iter(column(chunks["pieces"]))
    shape, offsets, sizes = (iter(column(c)) for c in (tensors["shape"], chunks["offsets"], chunks["sizes"]))
    values: dict[str, Any] = {}
    columns = (tensors["names"], *(column(tensors[name]) for name in ("kind", "dimensions", "chunks")))
    for name, kind, dimensions, chunk_count in zip(*columns, strict=True):
        array = np.empty([next(shape) for _ in range(dimensions)], TYPES[tensors["kinds"][kind]["dtype"]])
        assert tensors["kinds"][kind]["encoding"] == "raw"
        for _ in range(chunk_count):
            box = [(next(offsets), next(sizes)) for _ in range(dimensions)]
            data = np.frombuffer(b"".join(next(parts) for _ in range(next(counts))), array.dtype)
            array[tuple(slice(o, o + n) for o, n in box)] = data.reshape([n for _, n in box])
        values[name] = array
    objects = dict(manifest["objects"]["inline"])
    for stored in manifest["objects"]["stored"]:
        data = b"".join(next(parts) for _ in range(stored["pieces"]))
        objects[stored["name"]] = json.loads(data) if stored["encoding"] == "json" else data
        if stored["encoding"] == "json+raw":
            stop = 8 + int.from_bytes(data[:8], "little")
            objects[stored["name"]] = (json.loads(data[8:stop]), data[stop:])
    at, rest = dict(zip(column(manifest["objects"]["positions"]), objects, strict=True)), iter(tensors["names"])
    order = [at[i] if i in at else next(rest) for i in range(len(at) + len(tensors["names"]))]
    return {name: values[name] if name in values else objects[name] for name in order}
