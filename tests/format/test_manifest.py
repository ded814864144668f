"""The manifest in memory: accessors, and refusal of every contradiction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.common.digests import DIGEST_BYTES
from dcp_remote.common.geometry import Box
from dcp_remote.errors import CorruptCheckpointError, UnsupportedFormatError
from dcp_remote.format.manifest import TORCH, Manifest, Pieces, RunInfo, Shards, TensorKind
from dcp_remote.format.manifest_validation import check
from tests.format.test_manifest_json import example
from tests.support.manifests import Layout, ObjectLayout, assert_sound, build, column, manifests

F32 = TensorKind("float32")


@given(manifests())
def test_sound_manifests_pass(manifest: Manifest) -> None:
    """Manifests of the strategy pass an oracle that shares no code with `check`, and `check` itself."""
    assert_sound(manifest)
    assert check(manifest) is manifest


@given(manifests())
def test_accessors(manifest: Manifest) -> None:
    """Accessors return what iterators over the flat columns return."""
    tensors = manifest.tensors
    shape, offsets = iter(tensors.shape.tolist()), iter(tensors.chunk_offsets.tolist())
    sizes, pieces = iter(tensors.chunk_sizes.tolist()), iter(tensors.chunk_pieces.tolist())
    chunk = piece = 0
    for number, name in enumerate(tensors.names):
        dimensions = int(tensors.dimensions[number])
        assert tensors.index[name] == number
        assert tensors.kind_of(number) == tensors.kinds[int(tensors.kind[number])]
        assert tensors.shape_of(number) == tuple(next(shape) for _ in range(dimensions))
        assert int(tensors.chunk_first[number]) == chunk
        all_offsets, all_sizes = tensors.boxes_of(number)
        assert all_offsets.shape == all_sizes.shape == (int(tensors.chunks[number]), dimensions)
        for row in range(int(tensors.chunks[number])):
            assert tensors.offsets_of(chunk) == tuple(next(offsets) for _ in range(dimensions))
            assert tensors.sizes_of(chunk) == tuple(next(sizes) for _ in range(dimensions))
            assert tuple(all_offsets[row].tolist()) == tensors.offsets_of(chunk)
            assert tuple(all_sizes[row].tolist()) == tensors.sizes_of(chunk)
            assert int(tensors.piece_first[chunk]) == piece
            piece += next(pieces)
            chunk += 1
    assert (int(tensors.chunk_first[-1]), int(tensors.piece_first[-1])) == (chunk, piece)
    assert manifest.total_bytes == sum(manifest.shards.sizes.tolist())
    for item in manifest.stored:
        assert manifest.stored_index[item.name] is item
        assert item.piece_first == piece
        piece += item.pieces
    assert manifest.pieces.digest(0) == manifest.pieces.digests[:16]
    names = list(manifest.names())
    for position, name in zip(manifest.positions, [*manifest.inline, *(o.name for o in manifest.stored)], strict=True):
        assert names[position] == name
    assert [name for name in names if name in tensors.index] == list(tensors.names)


def rows(columns: Shards | Pieces) -> list[tuple[Any, ...]]:
    """Return one tuple per shard or piece, digest last."""
    *values, digests = (getattr(columns, field.name) for field in fields(columns))
    values.append([digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)])
    return list(zip(*(v.tolist() if isinstance(v, np.ndarray) else v for v in values), strict=True))


@given(st.lists(manifests(), max_size=3), st.data())
def test_concat_and_take(parts: list[Manifest], data: st.DataObject) -> None:
    """`concat` and `take` agree with lists of rows, also for no parts and no indices."""
    for kind, name in ((Shards, "shards"), (Pieces, "pieces")):
        joined = kind.concat([getattr(part, name) for part in parts])
        expected = [row for part in parts for row in rows(getattr(part, name))]
        assert rows(joined) == expected
        indices = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=9)) if expected else []
        taken = joined.take(column(indices))
        assert rows(taken) == [expected[index] for index in indices]
        for columns in (joined, taken):
            arrays = [
                v for v in (getattr(columns, field.name) for field in fields(columns)) if isinstance(v, np.ndarray)
            ]
            assert all(values.dtype == np.int64 for values in arrays)


def changed(part: str, **changes: Callable[[Any], Any]) -> Callable[[Manifest], Manifest]:
    """Return the change of columns of a part of the manifest."""

    def change(manifest: Manifest) -> Manifest:
        of: Any = getattr(manifest, part)
        return replace(manifest, **{part: replace(of, **{k: f(getattr(of, k)) for k, f in changes.items()})})

    return change


shards, tensors, pieces = (partial(changed, part) for part in ("shards", "tensors", "pieces"))


def put(position: int, value: int) -> Callable[[Any], Any]:
    return lambda values: column([*values[:position].tolist(), value, *values[position + 1 :].tolist()])


def flatten(*paths: tuple[str | int, ...]) -> Callable[[Manifest], Manifest]:
    return lambda m: replace(m, flatten=dict(zip(example().names(), paths, strict=False)))


# What a change of one number of a document, or one of `tests/attacks/test_documents.py`, does not show.
CONTRADICTIONS: list[tuple[Callable[[Manifest], Manifest], str]] = [
    (shards(table_lengths=put(0, 16)), "block table"),
    (tensors(shape=put(0, 2**53)), "a tensor is too large"),
    (tensors(chunk_pieces=lambda v: column([2, 1, *v[2:].tolist()])), "not as long as the chunk"),
    (pieces(length=put(0, 0)), "a piece is empty"),
    (pieces(length=lambda v: column([24, 7, 17, *v[3:].tolist()])), "splits an element"),
    (lambda m: replace(m, stored=(replace(m.stored[0], piece_first=0), *m.stored[1:])), "not consecutive"),
    (lambda m: replace(m, run=RunInfo("7" * 32, -1, 0, 0)), "number of the run"),
    (lambda m: replace(m, run=RunInfo("7" * 32, 1, 0, 2**70)), "number of the run"),
    (lambda m: replace(m, run=RunInfo("7" * 31, 1, 0, 0)), "run_id"),
    (lambda m: replace(m, run=RunInfo("7" * 32, 1, 0, 0, metrics=(("loss", float("nan")),))), "metric"),
    (lambda m: replace(m, positions=(0, 0, 1, 2)), "not distinct positions"),
    (flatten((0,)), "is a list"),
    (flatten(("a", 10_000_000)), "too long, or has keys that are no indices"),
    (flatten(("a", 6_000_000), ("b", 6_000_000)), "too long, or has keys that are no indices"),
]


@pytest.mark.parametrize(
    ("change", "message"), CONTRADICTIONS, ids=[f"{n}: {message}" for n, (_, message) in enumerate(CONTRADICTIONS)]
)
def test_contradictions(change: Callable[[Manifest], Manifest], message: str) -> None:
    check(example())
    with pytest.raises(CorruptCheckpointError, match=message):
        check(change(example()))


def test_unknown_dtypes_and_encodings() -> None:
    """Unknown dtypes and encodings are not damage: a newer version may know them."""
    for kind in (TensorKind("float2"), TensorKind("float32", encoding="zip")):
        manifest = example()
        with pytest.raises(UnsupportedFormatError):
            check(replace(manifest, tensors=replace(manifest.tensors, kinds=(kind, F32))))
    with pytest.raises(UnsupportedFormatError):
        check(replace(example(), stored=(replace(example().stored[0], encoding="zip"), *example().stored[1:])))


def test_flatten_paths_of_torch() -> None:
    """Nested dicts, lists with empty dicts left out, and entries that were not flattened are accepted."""
    check(flatten(("a", "b"), ("a", "c", 0), ("a", "c", 7, "x"), ("l", 3))(example()))
    check(replace(example(), flatten={}))


def test_lengths_that_add_up_only_modulo_two_to_the_64() -> None:
    """4,096 pieces of 2**52 bytes sum to 0 in 64 bits: a chunk of 8 bytes in 4,097 pieces is refused."""
    count = 4096
    small = build([Layout("w", TensorKind("uint8"), (8,), (Box((0,), (8,)),), ((8,),))])
    huge = 2**52
    table = 16 * (huge // 2**20)
    manifest = replace(
        small,
        tensors=replace(small.tensors, chunk_pieces=column([count + 1])),
        shards=replace(
            small.shards,
            keys=tuple(f"shards/00/{n}.safetensors" for n in range(count + 1)),
            sizes=column([huge + table + 10] * count + [100]),
            data_starts=column([table + 10] * count + [10]),
            table_lengths=column([table] * count + [0]),
            table_digests=bytes(16 * (count + 1)),
        ),
        pieces=replace(
            small.pieces,
            shard=column(range(count + 1)),
            start=column([table + 10] * count + [10]),
            length=column([huge] * count + [8]),
            table=column([0] * (count + 1)),
            digests=bytes(16 * (count + 1)),
        ),
    )
    assert int(manifest.pieces.length.sum()) == 8
    with pytest.raises(CorruptCheckpointError, match="shards together are too large"):
        check(manifest)


@pytest.mark.parametrize(
    "manifest",
    [
        build([], [ObjectLayout(f"o{n}", TORCH, (2**41,)) for n in range(3)]),
        build([Layout("t", TensorKind("float32", encoding=TORCH), (2,), (Box((0,), (2,)),), ((2**42 + 1,),))]),
    ],
    ids=["objects", "a stream"],
)
def test_too_long_streams(manifest: Manifest) -> None:
    """Streams are read whole, so that a forged manifest could cause a request for every 8 MiB that it claims."""
    with pytest.raises(CorruptCheckpointError, match="streams together are too large"):
        check(manifest)
