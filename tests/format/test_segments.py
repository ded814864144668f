"""Manifests in segments: what is written and joined, which segments boxes need, and damage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.digests import block_bytes, block_digests, piece_digest
from dcp_remote.common.geometry import Box
from dcp_remote.errors import CorruptCheckpointError, UnsupportedFormatError
from dcp_remote.format import document, manifest_json, segments
from dcp_remote.format.columns import encode_column
from dcp_remote.format.document import seal, unseal
from dcp_remote.format.manifest import Manifest, TensorKind
from dcp_remote.format.segments import (
    Segment,
    choose_band_pieces,
    decode_segment,
    find_segments,
    join,
    place_of,
    segment_keys,
)
from dcp_remote.format.shard import ShardNames
from dcp_remote.loading.overlapping_templates import _have_other_values
from dcp_remote.run.thinning import drop_keys
from tests.support.columns import decode_column
from tests.support.manifests import Layout, build, manifests, plain
from tests.support.segments import lower_segments, split

Objects = Mapping[str, Sequence[Buffer]]


def wide(*, tensors: int = 6, ranks: int = 8, keys: Sequence[str] = ("model", "optim")) -> Manifest:
    """Return the manifest of a state of some top-level keys, each tensor divided among all ranks."""
    chunks = tuple(Box((4 * rank, 0), (4, 3)) for rank in range(ranks))
    names = [f"{key}.{number}" for key in keys for number in range(tensors)]
    layouts = [Layout(name, TensorKind("float32"), (4 * ranks, 3), chunks, ((48,),) * ranks) for name in names]
    # Each rank writes its part of each key into a shard.
    shard_of = [rank * len(keys) + number // tensors for number in range(len(names)) for rank in range(ranks)]
    manifest = build(layouts, shard_of=shard_of)
    return replace(manifest, flatten={name: tuple(name.split(".")) for name in names})


def write(
    manifest: Manifest,
    pieces: int,
    known: Mapping[bytes, str] | None = None,
    *,
    box_values: int = segments.BOX_VALUES,
) -> tuple[Manifest, bytes, Objects]:
    """Return the index of a manifest in segments of so many pieces, its document, and its segments."""
    with lower_segments(pieces, box_values=box_values):
        index, objects = split(manifest, ShardNames(0).key, known or {})
    return index, manifest_json.encode(index), objects


def read(index: Manifest, objects: Objects, segment: int) -> memoryview:
    key, start, length = place_of(index, segment)
    return memoryview(b"".join(bytes(part) for part in objects[key]))[start : start + length]


def decode(index: Manifest, objects: Objects, numbers: Sequence[int] | None = None) -> list[Segment]:
    assert index.segments is not None
    chosen = range(len(index.segments.tensors)) if numbers is None else numbers
    return [decode_segment(index, number, read(index, objects, number)) for number in chosen]


def decoded(body: bytes) -> Manifest:
    manifest = manifest_json.decode(body)
    assert manifest is not None
    return manifest


@given(manifests(), st.integers(0, 3), st.sampled_from([1, 10, segments.BOX_VALUES]))
def test_joined_is_what_was_written(manifest: Manifest, pieces: int, box_values: int) -> None:
    """Any manifest is read as it was written; one of few pieces has no segments, and is the document of before."""
    written, body, objects = write(manifest, pieces, box_values=box_values)
    index = decoded(body)
    if int(manifest.tensors.piece_first[-1]) <= pieces:
        assert (body, objects) == (manifest_json.encode(manifest), {})
        assert b"segments" not in unseal(body)
        return
    assert plain(index) == plain(written)
    assert set(index.shards.keys) == {*manifest.shards.keys, *objects}
    joined = join(index, found := decode(index, objects))
    assert not found  # freed
    own = joined.pieces.take(np.arange(joined.segment_first))
    assert plain(replace(joined, segments=None, shards=manifest.shards, pieces=own)) == plain(manifest)
    assert manifest_json.encode(joined) == body


def test_a_segment_has_the_chunks_of_neighbors() -> None:
    """A segment has one key, and whole shards of some ranks; each has about as many pieces as is allowed."""
    index = decoded(write(wide(), pieces=12)[1])
    assert index.segments is not None
    keys = [{index.tensors.names[tensor].split(".")[0] for tensor in tensors} for _, tensors in index.segments.parts()]
    assert keys == [{"model"}] * 4 + [{"optim"}] * 4
    assert [len(shards) for shards, _ in index.segments.parts()] == [2] * 8
    assert [len(tensors) for _, tensors in index.segments.parts()] == [6] * 8


@given(st.data())
def test_the_segments_of_boxes_have_their_chunks(data: st.DataObject) -> None:
    """Every chunk that shares an element with a box is in a segment that is found."""
    manifest = data.draw(manifests().filter(lambda one: int(one.tensors.piece_first[-1]) > 0))
    _, body, objects = write(manifest, 0)
    index, tensors = decoded(body), manifest.tensors
    boxes: dict[str, list[tuple[Sequence[int], Sequence[int]]]] = {"absent": [((0,), (1,))]}
    for number, name in enumerate(tensors.names):
        shape = tensors.shape_of(number)
        offsets = [data.draw(st.integers(0, max(size - 1, 0))) for size in shape]
        sizes = [data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)]
        boxes[name] = [(offsets, sizes)]
    found = find_segments(index, boxes)
    joined = join(index, decode(index, objects, found))
    for number, name in enumerate(tensors.names):
        wanted = Box(*map(tuple, boxes[name][0]))
        own = {joined.tensors.offsets_of(chunk) for chunk in chunks_of(joined, number)}
        for chunk in chunks_of(manifest, number):
            if Box(tensors.offsets_of(chunk), tensors.sizes_of(chunk)).intersection(wanted) is not None:
                assert tensors.offsets_of(chunk) in own


def chunks_of(manifest: Manifest, tensor: int) -> range:
    return range(*(int(manifest.tensors.chunk_first[tensor + i]) for i in (0, 1)))


def test_a_rank_needs_its_own_segment_of_each_key() -> None:
    """The boxes of one rank lie in one segment of each key, whatever the number of tensors; none of a key alone."""
    index = decoded(write(wide(ranks=16), pieces=24)[1])
    own = {name: [((4 * 9, 0), (4, 3))] for name in index.tensors.names}
    assert find_segments(index, own) == [2, 6]
    assert find_segments(index, {name: boxes for name, boxes in own.items() if name.startswith("optim")}) == [6]
    assert find_segments(index, {"model.0": [((0,), (1,))]}) == []  # of other dimensions


def test_a_part_is_read_as_it_is_in_the_whole() -> None:
    """Chunks and pieces of some segments are those of the whole manifest; others are missing."""
    large = wide()
    _, body, objects = write(large, pieces=12)
    index = decoded(body)
    part = join(index, decode(index, objects, [1, 6]))
    assert part.tensors.chunks.tolist() == [2] * 12
    assert part.chunk_counts.tolist() == [8] * 12
    for number in range(12):
        for chunk in chunks_of(part, number):
            whole = next(
                c for c in chunks_of(large, number) if large.tensors.offsets_of(c) == part.tensors.offsets_of(chunk)
            )
            pieces = [int(one.tensors.piece_first[c]) for one, c in ((part, chunk), (large, whole))]
            assert part.pieces.digest(pieces[0]) == large.pieces.digest(pieces[1])
            assert part.pieces.start[pieces[0]] == large.pieces.start[pieces[1]]


def test_many_tensors_have_few_boxes() -> None:
    """More ranks are neighbors then, whose segments have some tensors each: a rank needs the segments of them alone."""
    manifest = wide(tensors=40, ranks=32)
    for box_values, neighbors, boxes in ((2**23, 1, 2 * 32 * 40), (1500, 8, 2 * 4 * 40), (1, 32, 2 * 40)):
        index = decoded(write(manifest, pieces=40, box_values=box_values)[1])
        assert index.segments is not None
        assert len(index.segments.tensor) == boxes
        assert len(index.segments.tensors) == 2 * 32
        own = {name: [((4 * 9, 0), (4, 3))] for name in index.tensors.names if name.startswith("model")}
        assert len(find_segments(index, own)) == neighbors
        one = {"model.7": [((0, 0), (128, 3))]}
        assert len(find_segments(index, one)) == 32 // neighbors


@pytest.mark.parametrize(
    ("tensors", "pieces", "expected"),
    [
        (3_400, 55_705_600, 50_000),
        (207_000, 200_001, 50_000),
        (207_000, 26_496_000, 1_600_000),
        (207_000, 27_000_000, 1_600_000),
        (10_000, 163_840_000, 400_000),
    ],
)
def test_neighbors_whose_segments_are_divided_by_tensor(tensors: int, pieces: int, expected: int) -> None:
    """As many as a quarter of a column of the index allows, and the same ones where a later save has more pieces."""
    named = replace(wide().tensors, dimensions=np.full(tensors, 2, dtype=np.int64))
    assert choose_band_pieces(pieces, named) == expected
    assert pieces * 2 * tensors // expected <= 2**23


def test_tied_tensors_of_which_one_has_more_chunks() -> None:
    """Their other chunks are compared: a segment may end between the shards of one rank."""
    _, body, objects = write(wide(), pieces=12)
    (own,) = decode(decoded(body), objects, [1])
    part = join(decoded(body), [own.take(np.flatnonzero((own.tensor > 0) | (own.number < own.number.max())))])
    assert part.tensors.chunks.tolist()[:2] == [1, 2]
    assert _have_other_values(part, "model.0", "model.1")
    assert not _have_other_values(part, "model.1", "model.1")


def test_equal_segments_are_named_again() -> None:
    """A segment with the same pieces keeps its bytes, and each object is named once."""
    first = wide(keys=("frozen", "model"))
    large, _, objects = write(first, pieces=12)
    digests = np.frombuffer(first.pieces.digests, dtype=np.uint8).reshape(-1, 16).copy()
    digests[48:] ^= 1  # of the second key
    changed = replace(first, pieces=replace(first.pieces, digests=digests.tobytes()))
    again, _, sent = write(changed, pieces=12, known=segment_keys(large))
    assert len(objects) == 8
    assert len(sent) == 4
    assert [key for key in again.shards.keys if key in objects] == list(objects)[:4]
    twins = replace(first, pieces=replace(first.pieces, digests=bytes(len(first.pieces.digests))))
    assert len(set(write(twins, pieces=47)[0].shards.keys)) == len(first.shards.keys) + 2


def test_few_segments_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment is encoded when another one has been put."""
    lock, counts = threading.Lock(), {"now": 0, "most": 0, "all": 0, "encoding": 0}

    def count(text: bytes) -> bytes:
        with lock:
            counts["now"] += 1
            counts["most"], counts["all"] = max(counts["most"], counts["now"]), counts["all"] + 1
            counts["encoding"] += 1
            assert counts["encoding"] <= 2
        time.sleep(0.0001)
        with lock:
            counts["encoding"] -= 1
        return seal(text)

    def put(_: str, __: Sequence[Buffer]) -> None:
        time.sleep(0.001)  # others go on meanwhile
        with lock:
            counts["now"] -= 1

    monkeypatch.setattr(segments, "seal", count)
    with lower_segments(12):
        split(wide(ranks=100), ShardNames(0).key, {}, put)
    assert counts["all"] == 100
    assert 1 < counts["most"] <= 16
    assert counts["now"] == 0


def test_keys_are_dropped_without_their_segments() -> None:
    """The index is thinned without a segment; the rest is as when the whole manifest is thinned."""
    large = replace(wide(), run=build([]).run)
    _, body, objects = write(large, pieces=12)
    thin = drop_keys(decoded(body), ["optim"])
    index = decoded(manifest_json.encode(thin))
    joined = join(index, decode(index, objects))
    own = joined.pieces.take(np.arange(joined.segment_first))
    assert len(joined.shards.keys) == 8 + len(own.shard) // 12
    shards = joined.shards.take(np.arange(8))
    assert plain(replace(joined, segments=None, shards=shards, pieces=own)) == plain(drop_keys(large, ["optim"]))
    assert drop_keys(decoded(body), ["other"]).segments is not None


def test_a_tensor_at_the_top_stays() -> None:
    """It shares its segment with others at the top."""
    manifest = replace(wide(), flatten={name: (name,) for name in wide().tensors.names})
    index = decoded(write(manifest, pieces=12)[1])
    assert drop_keys(index, ["model.0"]) is index


# ---- refusals


def test_an_older_reader_names_the_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    body = write(wide(), pieces=12)[1]
    monkeypatch.setattr(document, "FEATURES", {})
    with pytest.raises(UnsupportedFormatError, match=r"needs features .* Upgrade it\. features='segments'"):
        manifest_json.decode(body)


def test_a_damaged_segment_is_named() -> None:
    """Any bit of it is found, and the message names its shard."""
    _, body, objects = write(wide(), pieces=12)
    index = decoded(body)
    key = place_of(index, 3)[0]
    for bit in range(0, 8 * len(read(index, objects, 3)), 97):
        data = bytearray(read(index, objects, 3))
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpointError, match=f"A segment of the manifest is damaged: its digest.*{key}"):
            decode_segment(index, 3, memoryview(data))


def forged(index: Manifest, segment: int, data: bytes) -> Manifest:
    """Return an index that has the digest and length of other data for a segment."""
    piece, digests = index.segment_first + segment, bytearray(index.pieces.digests)
    digests[16 * piece : 16 * piece + 16] = piece_digest(block_digests(data, size_bytes=block_bytes(len(data))))
    return replace(index, pieces=replace(index.pieces, digests=bytes(digests)))


def changing(*path: str, by: Callable[[list[int]], list[int]]) -> Callable[[Any], None]:
    """Return the change of the values of a column."""

    def change(document: Any) -> None:
        field = document[path[0]]
        values = by(decode_column(field[path[1]], name=path[1]).tolist())
        field[path[1]] = encode_column(np.array(values, dtype=np.int64))

    return change


BROKEN: dict[str, Callable[[Any], Any]] = {
    "another format": lambda document: document.update(format="dcp_remote manifest"),
    "a feature": lambda document: document.update(requires=["wings"]),
    "no chunks": lambda document: document.pop("chunks"),
    "a tensor more": changing("chunks", "counts", by=lambda values: [*values, 1]),
    "too many chunks": changing("chunks", "counts", by=lambda values: [2**52, *values[1:]]),
    "a chunk less": changing("chunks", "counts", by=lambda values: [values[0] - 1, *values[1:]]),
    "a number that is none": changing("chunks", "numbers", by=lambda values: [8, *values[1:]]),
    "a chunk twice": changing("chunks", "numbers", by=lambda values: [values[1], *values[1:]]),
    "a chunk outside of the box": changing("chunks", "offsets", by=lambda values: [values[0] + 4, *values[1:]]),
    "a chunk that is too long": changing("chunks", "sizes", by=lambda values: [values[0] + 40, *values[1:]]),
    "too many pieces": changing("chunks", "pieces", by=lambda values: [2**52, *values[1:]]),
    "a piece less": changing("chunks", "pieces", by=lambda values: [0, *values[1:]]),
    "another shard": changing("pieces", "shard", by=lambda values: [2, *values[1:]]),
    "a piece before the data": changing("pieces", "start", by=lambda values: [0, *values[1:]]),
    "an empty piece": changing("pieces", "length", by=lambda values: [0, *values[1:]]),
    "a table that is none": changing("pieces", "table", by=lambda values: [1, *values[1:]]),
    "no digests": lambda document: document["pieces"].update(digests=""),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_segment_that_contradicts_the_manifest(what: str) -> None:
    """A segment with a valid digest is checked like a manifest."""
    _, body, objects = write(wide(), pieces=12)
    index = decoded(body)
    content = msgspec.json.decode(unseal(bytes(read(index, objects, 2))))
    BROKEN[what](content)
    data = seal(msgspec.json.encode(content))
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError)):
        join(forged(index, 2, data), [decode_segment(forged(index, 2, data), 2, memoryview(data))])


def test_a_chunk_in_two_segments() -> None:
    _, body, objects = write(wide(), pieces=12)
    (part,) = decode(decoded(body), objects, [2])
    with pytest.raises(CorruptCheckpointError, match="a chunk is in it twice, or in another one"):
        join(decoded(body), [part, part])


def table(**columns: Callable[[np.ndarray[Any, Any]], object]) -> Callable[[Manifest], Manifest]:
    """Return the change of some columns of the table of segments."""

    def change(index: Manifest) -> Manifest:
        assert index.segments is not None
        made = {name: np.array(by(getattr(index.segments, name)), dtype=np.int64) for name, by in columns.items()}
        return replace(index, segments=replace(index.segments, **made))

    return change


WRONG_TABLES: dict[str, Callable[[Manifest], Manifest]] = {
    "a shard that is not listed": table(shard=lambda values: [99, *values[1:]]),
    "tensors in no order": table(tensor=lambda values: [values[1], values[0], *values[2:]]),
    "tensors of several keys": table(tensor=lambda values: [*values[:5], 6, *values[6:]]),
    "a box outside of the tensor": table(sizes=lambda values: [99, *values[1:]]),
    "a piece less": lambda index: replace(index, pieces=index.pieces.take(np.arange(7))),
}


@pytest.mark.parametrize("what", WRONG_TABLES)
def test_a_wrong_table_is_refused(what: str) -> None:
    index = decoded(write(wide(), pieces=12)[1])
    with pytest.raises(CorruptCheckpointError):
        manifest_json.encode(WRONG_TABLES[what](index))


def test_a_tensor_that_is_not_listed() -> None:
    """Its dimensions would not be known."""
    content = msgspec.json.decode(unseal(write(wide(), pieces=12)[1]))
    changing("segments", "tensor", by=lambda values: [*values[:-1], 12])(content)
    with pytest.raises(CorruptCheckpointError, match="a tensor that is not listed"):
        manifest_json.decode(seal(msgspec.json.encode(content)))


def test_a_gap_is_found_when_all_segments_are_joined() -> None:
    """A part may lack chunks; the whole may not."""
    _, body, objects = write(wide(), pieces=12)
    index = decoded(body)
    assert index.segments is not None
    fewer = replace(index, segments=replace(index.segments, chunks=np.full(12, 6, dtype=np.int64)))
    found = [replace(one, number=one.number % 2) for one in decode(index, objects, [1, 2, 3])]
    found = [replace(one, number=one.number + 2 * n) for n, one in enumerate(found)]
    with pytest.raises(CorruptCheckpointError):
        join(fewer, found)
