"""Read plans, compared with marks in numpy arrays: one bool per byte of a piece, whether it is wanted."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.common.digests import BLOCK_BYTES_MIN, block_bytes
from dcp_remote.common.geometry import Box, cut_to_fill
from dcp_remote.common.units import KiB, MiB
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.manifest import RAW, Manifest, TensorKind
from dcp_remote.format.manifest_validation import check
from dcp_remote.format.shard import SEPARATE_BYTES_MIN
from dcp_remote.loading.downloads import RANGE_BYTES_MAX
from dcp_remote.loading.read_plan import GAP_BYTES, ReadPlan, Want, plan_reads, want_box
from tests.benchmark.clients.state import LARGE
from tests.support.manifests import Layout, build, manifests
from tests.support.properties import examples

# Per piece: whether each byte is wanted.
Marks = dict[int, np.ndarray]


def mark_box(manifest: Manifest, marks: Marks, tensor: int, chunk: int, box: Box) -> list[int]:
    """Mark the bytes of a box, and return the pieces that hold them."""
    sizes = manifest.tensors.sizes_of(chunk)
    kind = manifest.tensors.kind_of(tensor)
    first, stop = manifest.tensors.piece_first[chunk : chunk + 2].tolist()
    if kind.encoding != RAW:
        return mark_all(manifest, marks, first, stop)
    wanted = np.zeros(sizes, dtype=bool)
    wanted[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = True
    flat = np.repeat(without_short_gaps(wanted.reshape(-1), ITEM_BYTES[kind.dtype]), ITEM_BYTES[kind.dtype])
    touched: list[int] = []
    for piece in range(first, stop):
        part, flat = np.split(flat, [int(manifest.pieces.length[piece])])
        if part.any():
            marks[piece] = marks.get(piece, np.zeros(len(part), dtype=bool)) | part
            touched.append(piece)
    return touched


def without_short_gaps(wanted: np.ndarray, item_bytes: int) -> np.ndarray:
    """Also mark the elements between two marked ones that are less than the smallest block apart."""
    places = np.flatnonzero(wanted)
    gaps = np.diff(places) - 1
    short = (gaps > 0) & (gaps < max(1, BLOCK_BYTES_MIN // item_bytes))
    for first, count in zip((places[:-1] + 1)[short], gaps[short], strict=True):
        wanted[first : first + count] = True
    return wanted


def mark_all(manifest: Manifest, marks: Marks, first: int, stop: int) -> list[int]:
    """Mark all bytes of consecutive pieces, and return the pieces."""
    for piece in range(first, stop):
        marks[piece] = np.ones(int(manifest.pieces.length[piece]), dtype=bool)
    return list(range(first, stop))


def assert_plan(manifest: Manifest, plan: ReadPlan, marks: Marks, users: dict[int, list[int]]) -> None:
    """Check that the plan fetches each block with a marked byte once, no other block, in requests of the right size."""
    fetched: Counter[tuple[int, int]] = Counter()
    for request in plan.ranges:
        assert (request.start, request.start + request.length) == (request.segments[0].start, request.segments[-1].stop)
        assert 0 < request.length <= RANGE_BYTES_MAX
        for segment, following in itertools.pairwise(request.segments):
            assert 0 <= following.start - segment.stop <= GAP_BYTES
            assert max(segment.length, following.length) < SEPARATE_BYTES_MIN
        for segment in request.segments:
            assert int(manifest.pieces.shard[segment.piece]) == request.shard
            length = int(manifest.pieces.length[segment.piece])
            size = block_bytes(length)
            assert segment.start == int(manifest.pieces.start[segment.piece]) + segment.block_first * size
            assert segment.length == min(segment.block_stop * size, length) - segment.block_first * size
            fetched.update((segment.piece, block) for block in range(segment.block_first, segment.block_stop))
    needed = {
        (piece, block)
        for piece, mark in marks.items()
        for size in [block_bytes(len(mark))]
        for block in range(-(-len(mark) // size))
        if mark[block * size : (block + 1) * size].any()
    }
    assert dict(fetched) == dict.fromkeys(needed, 1)
    assert plan.wanted.users == users
    blocks = Counter(piece for piece, _ in needed)
    partial = {piece for piece, count in blocks.items() if count * block_bytes(len(marks[piece])) < len(marks[piece])}
    assert plan.wanted.partial == partial
    assert plan.tables == tuple(sorted({int(manifest.pieces.shard[piece]) for piece in partial}))
    places = [(r.shard, r.start) for r in plan.ranges]
    assert len(set(places)) == len(places)


def plan_and_check(manifest: Manifest, boxes: Sequence[tuple[int, int, Box]], objects: Sequence[int] = ()) -> ReadPlan:
    wants: list[Want] = []
    marks: Marks = {}
    users: dict[int, list[int]] = {}
    for tensor, chunk, box in boxes:
        for piece in mark_box(manifest, marks, tensor, chunk, box):
            users.setdefault(piece, []).append(len(wants))
        if manifest.tensors.kind_of(tensor).encoding == RAW:
            wants.append(want_box(manifest, tensor=tensor, chunk=chunk, box=box))
        else:
            first, stop = manifest.tensors.piece_first[chunk : chunk + 2].tolist()
            wants.append(Want(first, stop, None))
    for number in objects:
        item = manifest.stored[number]
        stop = item.piece_first + item.pieces
        for piece in mark_all(manifest, marks, item.piece_first, stop):
            users.setdefault(piece, []).append(len(wants))
        wants.append(Want(item.piece_first, stop, None))
    plan = plan_reads(manifest, wants)
    assert_plan(manifest, plan, marks, users)
    return plan


@examples(60)
@given(manifests(), st.data())
def test_plans(manifest: Manifest, data: st.DataObject) -> None:
    """Plan any boxes of any chunks, overlapping or not, and any objects, of any manifest."""
    tensors = manifest.tensors
    owners = [t for t, count in enumerate(tensors.chunks.tolist()) for _ in range(count)]
    chunks = [
        (tensor, chunk)
        for chunk, tensor in enumerate(owners)
        if math.prod(tensors.sizes_of(chunk)) and math.prod(tensors.sizes_of(chunk)) < 2_000_000
    ]
    boxes: list[tuple[int, int, Box]] = []
    for tensor, chunk in data.draw(st.lists(st.sampled_from(chunks), max_size=6)) if chunks else []:
        sizes = tensors.sizes_of(chunk)
        offsets = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
        lengths = tuple(data.draw(st.integers(1, size - o)) for size, o in zip(sizes, offsets, strict=True))
        boxes.append((tensor, chunk, Box(offsets, lengths)))
    count = len(manifest.stored)
    plan_and_check(manifest, boxes, data.draw(st.lists(st.integers(0, count - 1), max_size=3)) if count else [])


def one_tensor(
    shape: tuple[int, ...], *pieces: int, shards: Sequence[int] | None = None, gap_bytes: int = 0
) -> Manifest:
    chunk = Box((0,) * len(shape), shape)
    return check(
        build([Layout("w", TensorKind("uint8"), shape, (chunk,), (pieces,))], shard_of=shards, gap_bytes=gap_bytes)
    )


@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_a_model_is_read_at_another_world_size(world_size: int) -> None:
    """A load of what 8 ranks saved costs at most 1.05 times the needed bytes, block tables included.

    The state is that of a transformer of 1.2 GiB with its moments, tensors from 4 KiB to 200 MiB, packed as in a save.
    """
    layouts: list[Layout] = []
    shards: list[int] = []
    filled: dict[int, int] = {}  # bytes in the last shard, by the rank that saved
    last: dict[int, int] = {}  # number of the last shard, by the rank that saved
    for name, shape in LARGE.parameters():
        for part in ("", ".exp_avg", ".exp_avg_sq"):
            boxes = [box for box in rows_of(shape, 8) if box.elements]
            pieces = []
            for rank, box in enumerate(boxes):
                cuts = cut_to_fill(
                    box.sizes, item_bytes=4, room_bytes=0, piece_bytes_max=64 * MiB, row_bytes_max=64 * MiB
                )
                pieces.append(tuple(4 * (stop - start) for start, stop in cuts))
                for length in pieces[-1]:
                    if rank not in last or filled[rank] + length > 64 * MiB:
                        last[rank], filled[rank] = 8 * len(shards) + rank, 0
                    filled[rank] += length
                    shards.append(last[rank])
            layouts.append(Layout(name + part, TensorKind("float32"), shape, tuple(boxes), tuple(pieces)))
    numbers = {shard: number for number, shard in enumerate(sorted(set(shards)))}
    manifest = check(build(layouts, shard_of=[numbers[shard] for shard in shards]))
    needed = fetched = 0
    for rank in range(world_size):
        wants = []
        for tensor, layout in enumerate(layouts):
            mine = rows_of(layout.shape, world_size)[rank]
            for number, saved in enumerate(layout.chunks):
                common = mine.intersection(saved)
                if common is not None:
                    chunk = int(manifest.tensors.chunk_first[tensor]) + number
                    box = common.relative_to(saved.offsets)
                    wants.append(want_box(manifest, tensor=tensor, chunk=chunk, box=box))
                    needed += 4 * common.elements
        plan = plan_reads(manifest, wants)
        fetched += sum(request.length for request in plan.ranges)
        fetched += sum(int(manifest.shards.table_lengths[shard]) for shard in plan.tables)
    assert needed == sum(4 * math.prod(layout.shape) for layout in layouts)
    assert needed <= fetched <= 1.05 * needed


def rows_of(shape: tuple[int, ...], world_size: int) -> list[Box]:
    """Cut a tensor along dimension 0 into the parts of all ranks, as torch does."""
    rows = -(-shape[0] // world_size)
    bounds = [min(rows * rank, shape[0]) for rank in range(world_size + 1)]
    rest = shape[1:]
    return [Box((a, *(0 for _ in rest)), (b - a, *rest)) for a, b in itertools.pairwise(bounds)]


def test_the_largest_comes_first() -> None:
    """The ranges of the largest tensor come first, one after another; tensors of one size are in their stored order."""
    sizes = (3 * MiB, 20 * MiB, 10, 20 * MiB, 2 * MiB)
    chunks = tuple((Box((0,), (size,)),) for size in sizes)
    layouts = [
        Layout(f"w{n}", TensorKind("uint8"), (size,), chunk, ((size,),))
        for n, (size, chunk) in enumerate(zip(sizes, chunks, strict=True))
    ]
    plan = plan_and_check(check(build(layouts)), [(n, n, Box((0,), (size,))) for n, size in enumerate(sizes)])
    assert [segment.piece for r in plan.ranges for segment in r.segments] == [1, 1, 1, 3, 3, 3, 0, 4, 2]


def test_neighbors_become_one_request() -> None:
    """Pieces of 100 KiB that are near each other share requests of at most 8 MiB, with gaps; distant ones do not."""
    lengths = [100 * KiB] * 200
    shape = (sum(lengths),)
    for gap_bytes, count in ((0, 3), (GAP_BYTES, 6), (GAP_BYTES + 1, 200)):
        manifest = one_tensor(shape, *lengths, gap_bytes=gap_bytes)
        assert len(plan_and_check(manifest, [(0, 0, Box((0,), shape))]).ranges) == count


def test_rows_far_apart_are_fetched_alone() -> None:
    """A narrow column touches one block per row where rows have 300 KiB, and every block where rows have 30 KiB."""
    manifest = one_tensor((20, 300 * KiB), 20 * 300 * KiB)
    plan = plan_and_check(manifest, [(0, 0, Box((0, 5), (20, 10)))])
    assert sum(s.block_stop - s.block_first for r in plan.ranges for s in r.segments) == 20
    assert plan.tables == (0,)
    manifest = one_tensor((200, 30 * KiB), 200 * 30 * KiB)
    plan = plan_and_check(manifest, [(0, 0, Box((0, 5), (200, 10)))])
    assert plan.wanted.partial == frozenset()
    assert len(want_box(manifest, tensor=0, chunk=0, box=Box((0, 5), (200, 10))).runs or ()) == 1


def test_a_short_piece_between_two_rows_is_read_with_them() -> None:
    """The piece of byte 8 is read between the wanted bytes 7 and 9, in one request; a piece of 1 MiB is not."""
    manifest = one_tensor((5, 2), 1, 7, 1, 1)
    plan = plan_and_check(manifest, [(0, 0, Box((3, 1), (2, 1)))])
    assert [[segment.piece for segment in r.segments] for r in plan.ranges] == [[1, 2, 3]]
    far = one_tensor((5, MiB), MiB, 7 * MiB // 2, MiB // 4, MiB // 4)
    plan = plan_and_check(far, [(0, 0, Box((3, MiB - 1), (2, 1)))])
    assert sorted(plan.wanted.users) == [1, 3]


def test_a_wanted_part_of_a_wanted_whole_needs_no_table() -> None:
    """A piece that is wanted whole is verified by the manifest alone, whatever parts of it are wanted, in any order."""
    manifest = one_tensor((MiB,), MiB)
    part, whole = (0, 0, Box((0,), (10,))), (0, 0, Box((0,), (MiB,)))
    assert plan_and_check(manifest, [part]).tables == (0,)
    for wants in ([part, whole], [whole, part], [part, whole, part]):
        plan = plan_and_check(manifest, wants)
        assert plan.tables == ()
        assert len(plan.ranges) == 1
