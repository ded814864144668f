"""Valid manifests for tests: a builder from a layout, and a hypothesis strategy of small ones."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
from hypothesis import strategies as st

from dcp_remote.common.arrays import I64
from dcp_remote.common.digests import DIGEST_BYTES, table_entries
from dcp_remote.common.geometry import Box
from dcp_remote.format import manifest_json
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.manifest import (
    JSON,
    PICKLE,
    RAW,
    TORCH,
    Manifest,
    Pieces,
    RunInfo,
    Shards,
    StoredObject,
    TensorKind,
    Tensors,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a tensor: its chunks, and the lengths of each chunk's pieces in bytes."""

    name: str
    kind: TensorKind
    shape: tuple[int, ...]
    chunks: tuple[Box, ...]
    pieces: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """Layout of an object in shards: the lengths of its pieces in bytes."""

    name: str
    encoding: str
    pieces: tuple[int, ...]


def build(
    layouts: Sequence[Layout],
    objects: Sequence[ObjectLayout] = (),  # layouts of the objects in shards
    inline: Mapping[str, bytes] | None = None,  # objects in the manifest, by name
    *,
    shard_of: Sequence[int] | None = None,  # index of the shard of each piece; by default all are in one
    gap_bytes: int = 0,  # gap between neighbors in a shard
    seed: int = 0,  # seed of digests and names
) -> Manifest:
    """Build a manifest whose pieces lie in shards one after another, in the order of their numbers."""
    random = np.random.default_rng(seed)
    lengths = [n for layout in layouts for chunk in layout.pieces for n in chunk]
    lengths += [n for item in objects for n in item.pieces]
    shard_of = list(shard_of if shard_of is not None else [0] * len(lengths))
    count = max(shard_of, default=-1) + 1
    tables = [0] * count
    for shard, length in zip(shard_of, lengths, strict=True):
        tables[shard] += table_entries(length) * DIGEST_BYTES
    data_starts = [8 + 2 + int(random.integers(0, 300)) + table for table in tables]
    ends = list(data_starts)
    starts: list[int] = []
    table_firsts: list[int] = []
    filled = [0] * count
    for shard, length in zip(shard_of, lengths, strict=True):
        table_firsts.append(filled[shard] if table_entries(length) else 0)
        filled[shard] += table_entries(length)
        starts.append(ends[shard])
        ends[shard] += length + gap_bytes
    kinds = list(dict.fromkeys(layout.kind for layout in layouts))
    piece = sum(len(chunk) for layout in layouts for chunk in layout.pieces)
    stored: list[StoredObject] = []
    for item in objects:
        stored.append(StoredObject(item.name, item.encoding, piece, len(item.pieces)))
        piece += len(item.pieces)
    total = len(layouts) + len(inline or {}) + len(objects)
    return Manifest(
        save_id=random.bytes(16).hex(),
        replaces=tuple(random.bytes(16).hex() for _ in range(int(random.integers(0, 3)))),
        created="2025-01-02T03:04:05+00:00",
        writer={"dcp_remote": "0"},
        world_size=4,
        shards=Shards(
            keys=tuple(f"shards/{n % 256:02x}/rank-{n:05d}.safetensors" for n in range(count)),
            sizes=column(ends),
            data_starts=column(data_starts),
            table_lengths=column(tables),
            table_digests=random.bytes(DIGEST_BYTES * count),
        ),
        tensors=Tensors(
            names=tuple(layout.name for layout in layouts),
            kinds=tuple(kinds),
            kind=column([kinds.index(layout.kind) for layout in layouts]),
            dimensions=column([len(layout.shape) for layout in layouts]),
            shape=column([n for layout in layouts for n in layout.shape]),
            chunks=column([len(layout.chunks) for layout in layouts]),
            chunk_offsets=column([n for layout in layouts for box in layout.chunks for n in box.offsets]),
            chunk_sizes=column([n for layout in layouts for box in layout.chunks for n in box.sizes]),
            chunk_pieces=column([len(chunk) for layout in layouts for chunk in layout.pieces]),
        ),
        pieces=Pieces(
            shard=column(shard_of),
            start=column(starts),
            length=column(lengths),
            table=column(table_firsts),
            digests=random.bytes(DIGEST_BYTES * len(lengths)),
        ),
        inline=dict(inline or {}),
        stored=tuple(stored),
        positions=tuple(random.permutation(total)[: total - len(layouts)].tolist()),
        run=RunInfo("5" * 32, step=seed, token=2, revision=3, names=("best",), metrics=(("loss", 0.5),))
        if seed % 2
        else None,
        user={"note": "ä", "list": [1, None, {"x": 1.5}]} if seed % 3 else {},
    )


def column(values: Sequence[int]) -> I64:
    """Return an int64 array, also of no values."""
    return np.array(values, dtype=np.int64)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...], *, cuts_max: int = 4) -> tuple[Box, ...]:
    """Draw a tiling of a shape, made by cutting boxes in two; some boxes are empty."""
    result = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, cuts_max)) if shape else 0):
        box = result.pop(draw(st.integers(0, len(result) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dimension]))
        for start, length in ((0, at), (at, box.sizes[dimension] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dimension] += start
            sizes[dimension] = length
            result.append(Box(tuple(offsets), tuple(sizes)))
    return tuple(result)


@st.composite
def layouts(draw: st.DrawFn, name: str) -> Layout:
    """Draw a tensor of any kind; some chunks are larger than a block, so that their shards have block tables."""
    kind = TensorKind(
        dtype=draw(st.sampled_from(["bool", "bfloat16", "float32", "complex128", "quint8"])),
        encoding=draw(st.sampled_from([RAW, RAW, RAW, TORCH, PICKLE])),
        requires_grad=draw(st.booleans()),
    )
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 60, 400]), max_size=3)))
    if kind.encoding != RAW:
        pieces = tuple(draw(st.lists(st.integers(1, 200_000), min_size=1, max_size=3)))
        return Layout(name, kind, shape, (Box((0,) * len(shape), shape),), (pieces,))
    item_bytes = ITEM_BYTES[kind.dtype]
    chunks = draw(boxes(shape))
    cuts: list[tuple[int, ...]] = []
    for box in chunks:
        elements = math.prod(box.sizes)
        inner = draw(st.lists(st.integers(1, elements - 1), max_size=3, unique=True)) if elements > 1 else []
        edges = [0, *sorted(inner), elements]
        cuts.append(tuple((b - a) * item_bytes for a, b in itertools.pairwise(edges) if b > a))
    return Layout(name, kind, shape, chunks, tuple(cuts))


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Draw a valid manifest: tensors of all kinds in irregular chunks, objects, pieces anywhere in several shards."""
    names = draw(st.lists(NAMES, max_size=8, unique=True))
    tensors: list[Layout] = []
    objects: list[ObjectLayout] = []
    inline: dict[str, bytes] = {}
    for name in names:
        what = draw(st.sampled_from(["tensor", "tensor", "object", "inline"]))
        if what == "tensor":
            tensors.append(draw(layouts(name)))
        elif what == "object":
            pieces = draw(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=3))
            objects.append(ObjectLayout(name, draw(st.sampled_from([JSON, TORCH, PICKLE])), tuple(pieces)))
        else:
            inline[name] = draw(st.sampled_from([b"1", b'{"a":[1,2.5,null]}', '"ä"'.encode(), b"[]"]))
    count = sum(len(chunk) for layout in tensors for chunk in layout.pieces) + sum(len(o.pieces) for o in objects)
    return build(
        tensors,
        objects,
        inline,
        shard_of=draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)),
        gap_bytes=draw(st.sampled_from([0, 0, 3, 20_000])),
        seed=draw(st.integers(0, 5)),
    )


def decode(data: bytes) -> Manifest:
    """Decode the manifest of a checkpoint; raise for a tombstone."""
    manifest = manifest_json.decode(data)
    assert manifest is not None
    return manifest


def plain(value: object) -> object:
    """Return a manifest as lists, tuples, dicts and scalars, to compare and to print."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return tuple(plain(item) for item in value) if isinstance(value, tuple) else value


def assert_sound_head(manifest: Manifest) -> None:
    """Check the fields that describe the save."""
    assert manifest.world_size >= 1
    assert len(manifest.replaces) <= 64
    assert all(re.fullmatch("[0-9a-f]{32}", save_id) for save_id in (manifest.save_id, *manifest.replaces))


def assert_sound(manifest: Manifest) -> None:
    """Check every promise of a manifest, one number at a time; shares no code with `check`."""
    shards, pieces, tensors = manifest.shards, manifest.pieces, manifest.tensors
    assert_sound_head(manifest)
    count = len(shards.keys)
    assert len(set(shards.keys)) == count == len(shards.sizes) == len(shards.data_starts) == len(shards.table_lengths)
    assert len(shards.table_digests) == 16 * count
    for key in shards.keys:
        assert re.fullmatch(r"shards/[0-9a-f][0-9a-f]/[^/]+\.safetensors", key)
        assert ".." not in key
        assert key.isprintable()
    bytes_of: list[list[range]] = [[] for _ in range(count)]
    tables = shards.table_lengths.tolist()
    rows = zip(*(getattr(pieces, name).tolist() for name in ("shard", "start", "length", "table")), strict=True)
    for shard, start, length, first in rows:
        assert int(shards.data_starts[shard]) <= start < start + length <= int(shards.sizes[shard])
        bytes_of[shard].append(range(start, start + length))
        entries = table_entries(length)
        assert 0 <= first <= (tables[shard] // 16 - entries if entries else 0)
    assert len(pieces.digests) == 16 * len(pieces.shard)
    assert all(table % 16 == 0 for table in tables)
    assert all(10 + table <= start for table, start in zip(tables, shards.data_starts.tolist(), strict=True))
    for ranges in bytes_of:
        ranges.sort(key=lambda r: r.start)
        assert all(one.stop <= other.start for one, other in itertools.pairwise(ranges))
    lengths = iter(pieces.length.tolist())
    values = zip(tensors.chunk_offsets.tolist(), tensors.chunk_sizes.tolist(), strict=True)
    piece_counts = iter(tensors.chunk_pieces.tolist())
    sizes = iter(tensors.shape.tolist())
    assert len(set(tensors.names)) == len(tensors.names)
    for number in range(len(tensors.names)):
        kind = tensors.kinds[int(tensors.kind[number])]
        shape = [next(sizes) for _ in range(int(tensors.dimensions[number]))]
        chunks = [[next(values) for _ in shape] for _ in range(int(tensors.chunks[number]))]
        for chunk in chunks:
            assert all(o >= 0 and n >= 0 and o + n <= size for (o, n), size in zip(chunk, shape, strict=True))
            stored = [next(lengths) for _ in range(next(piece_counts))]
            if kind.encoding == RAW:
                assert sum(stored) == math.prod(n for _, n in chunk) * ITEM_BYTES[kind.dtype]
                assert all(length % ITEM_BYTES[kind.dtype] == 0 for length in stored)
            else:
                assert stored
                assert chunks == [[(0, size) for size in shape]]
        filled = [chunk for chunk in chunks if all(n for _, n in chunk)]
        assert sum(math.prod(n for _, n in chunk) for chunk in filled) == math.prod(shape)
        for one, other in itertools.combinations(filled, 2):
            apart = [a + n <= b or b + m <= a for (a, n), (b, m) in zip(one, other, strict=True)]
            assert any(apart), "two chunks overlap"
    assert not [*sizes, *values, *piece_counts], "nothing is left over"
    objects = [*manifest.inline, *(item.name for item in manifest.stored)]
    first = int(tensors.chunk_pieces.sum())
    for item in manifest.stored:
        assert (item.piece_first, item.encoding in (JSON, TORCH, PICKLE)) == (first, True)
        assert item.pieces >= 1
        first += item.pieces
    assert first == len(pieces.shard)
    names = list(manifest.names())
    assert sorted(names) == sorted(set(names)) == sorted([*tensors.names, *objects])
