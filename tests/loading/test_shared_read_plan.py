"""Shared read plans, compared with sets of the blocks that each rank wants and gets."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.common.arrays import I64
from dcp_remote.common.digests import block_bytes, block_count
from dcp_remote.common.geometry import Box
from dcp_remote.common.units import KiB, MiB
from dcp_remote.format.manifest import RAW, Manifest, TensorKind
from dcp_remote.format.manifest_validation import check
from dcp_remote.loading.downloads import RANGE_BYTES_MAX
from dcp_remote.loading.read_plan import ReadPlan, Want, Wanted, want_box, wanted_blocks
from dcp_remote.loading.shared_read_plan import (
    MEMBERS_MAX,
    Unit,
    _block_bytes,
    decode_wanted,
    encode_wanted,
    grouping_key,
    plan_shared,
    shared_units,
    split_into_cohorts,
)
from tests.support.manifests import Layout, build, manifests
from tests.support.properties import examples

# Block of a piece: piece and block. Block table of a shard: shard and -1.
Block = tuple[int, int]


def blocks_of(manifest: Manifest, wanted: Wanted) -> set[Block]:
    """Return the blocks that a rank wants."""
    found = {(shard, -1) for shard in wanted.tables}
    for piece, mask in wanted.blocks.items():
        count = block_count(int(manifest.pieces.length[piece]))
        found |= {(piece, block) for block in range(count) if mask is None or mask[block]}
    return found


def blocks_of_unit(unit: Unit) -> set[Block]:
    if not unit.range.segments:
        return {(unit.range.shard, -1)}
    return {(s.piece, block) for s in unit.range.segments for block in range(s.block_first, s.block_stop)}


def blocks_of_plan(plan: ReadPlan) -> Counter[Block]:
    found = Counter((shard, -1) for shard in plan.tables)
    found.update((s.piece, b) for r in plan.ranges for s in r.segments for b in range(s.block_first, s.block_stop))
    return found


def exchanged(manifest: Manifest, wanted: Sequence[Wanted]) -> list[I64]:
    """Return what each rank wants, as the others receive it."""
    return [decode_wanted(encode_wanted(manifest, of_rank)) for of_rank in wanted]


def assert_units(
    manifest: Manifest, wanted: Sequence[Wanted], *, window_bytes: int, groups: Sequence[str] | None = None
) -> tuple[Unit, ...]:
    """Check that each rank gets each block that it wants once: by itself, or in a unit; and return the units.

    The members of a unit are of one group, as all ranks are if no groups are given.
    """
    groups = groups or [""] * len(wanted)
    units = shared_units(manifest, exchanged(manifest, wanted), groups)
    blocks = [blocks_of(manifest, of_rank) for of_rank in wanted]
    reads = [(unit.range.shard, unit.range.start, member) for unit in units for member in unit.members]
    assert len(set(reads)) == len(reads)
    for unit in units:
        assert len(unit.members) >= 2
        assert unit.owner in unit.members
        assert len({groups[member] for member in unit.members}) == 1
        assert 0 < unit.range.length <= max(RANGE_BYTES_MAX, int(manifest.shards.table_lengths.max()))
        for member in unit.members:
            assert blocks_of_unit(unit) <= blocks[member]
    for member, of_rank in enumerate(wanted):
        plan = plan_shared(manifest, of_rank, units, member=member, window_bytes=window_bytes)
        assert blocks_of_plan(plan) == dict.fromkeys(blocks[member], 1)
        assert plan.wanted is of_rank
        ranges = {(r.shard, r.start, r.length) for r in plan.ranges}
        mine = [unit for unit in units if member in unit.members and unit.range.segments]
        assert {(u.range.shard, u.range.start, u.range.length) for u in mine} <= ranges
    return units


@examples(60)
@given(manifests(), st.integers(1, 5), st.data())
def test_every_rank_gets_what_it_wants(manifest: Manifest, world_size: int, data: st.DataObject) -> None:
    """Any parts of any manifest, wanted by any number of ranks, are compared with sets of blocks."""
    tensors = manifest.tensors
    owners = [t for t, count in enumerate(tensors.chunks.tolist()) for _ in range(count)]
    wants: list[Want] = []
    for chunk, tensor in enumerate(owners):
        sizes = tensors.sizes_of(chunk)
        if not math.prod(sizes) or math.prod(sizes) > 2_000_000:
            continue
        wants.append(Want(int(tensors.piece_first[chunk]), int(tensors.piece_first[chunk + 1]), None))
        if tensors.kind_of(tensor).encoding == RAW:
            offsets = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
            lengths = tuple(data.draw(st.integers(1, size - o)) for size, o in zip(sizes, offsets, strict=True))
            wants.append(want_box(manifest, tensor=tensor, chunk=chunk, box=Box(offsets, lengths)))
    chosen = [data.draw(st.lists(st.sampled_from(wants), max_size=6)) if wants else [] for _ in range(world_size)]
    wanted = [wanted_blocks(manifest, rank_wants) for rank_wants in chosen]
    groups = data.draw(st.lists(st.sampled_from("ab"), min_size=world_size, max_size=world_size))
    units = assert_units(manifest, wanted, window_bytes=data.draw(st.integers(1, 10 * MiB)), groups=groups)
    blocks = [blocks_of(manifest, of_rank) for of_rank in wanted]
    counts = Counter(block for rank_blocks in blocks for block in rank_blocks)
    shared = {block for unit in units for block in blocks_of_unit(unit)}
    alone = {piece for (piece, block), count in counts.items() if block >= 0 and count == 1}
    # Each rank reads for itself only small parts of pieces of which one rank wants another part alone.
    if len(set(groups)) == 1:
        assert {block for block, count in counts.items() if count > 1 and block[0] not in alone} <= shared


@given(st.integers(0, 2**40))
def test_sizes_of_blocks(length: int) -> None:
    """Block sizes of many pieces are those of `digests.block_bytes`."""
    assert _block_bytes(np.array([length]))[0] == block_bytes(length)


def tensors_of(*sizes: tuple[int, ...]) -> Manifest:
    """Build a manifest of uint8 tensors of these shapes, each in a shard of its own."""
    layouts = []
    for n, size in enumerate(sizes):
        layouts.append(
            Layout(f"w{n}", TensorKind("uint8"), size, (Box((0,) * len(size), size),), ((math.prod(size),),))
        )
    return check(build(layouts, shard_of=list(range(len(sizes)))))


def whole(manifest: Manifest) -> Wanted:
    return wanted_blocks(manifest, [Want(0, len(manifest.pieces.length), None)])


def test_replicas_share_the_read_evenly() -> None:
    """Each byte that all ranks want has one owner, the same on all ranks, and each owns about as many bytes."""
    manifest = tensors_of((60 * MiB,), (60 * MiB,), *[(100 * KiB,)] * 50, (17 * MiB,), (3,))
    for world_size in (2, 3, 5, 16, MEMBERS_MAX):
        units = assert_units(manifest, [whole(manifest)] * world_size, window_bytes=16 * MiB)
        assert sum(unit.range.length for unit in units) == int(manifest.pieces.length.sum())
        assert all(unit.members == tuple(range(world_size)) for unit in units)
        read = [sum(u.range.length for u in units if u.owner == n) for n in range(world_size)]
        assert max(read) - min(read) <= RANGE_BYTES_MAX


def test_a_rank_that_reads_more_alone_owns_less() -> None:
    """The bytes that a rank wants alone count when owners are chosen."""
    manifest = tensors_of((40 * MiB,), (40 * MiB,))
    alone = wanted_blocks(manifest, [Want(0, 1, None)])
    units = assert_units(manifest, [whole(manifest), alone], window_bytes=16 * MiB)
    assert {unit.owner for unit in units} == {1}


def test_each_group_reads_by_itself() -> None:
    """Two groups of two ranks: each reads all once, and each rank about as much."""
    manifest = tensors_of((40 * MiB,), (3,))
    units = assert_units(manifest, [whole(manifest)] * 4, window_bytes=16 * MiB, groups="abab")
    assert {unit.members for unit in units} == {(0, 2), (1, 3)}
    assert sum(unit.range.length for unit in units) == 2 * int(manifest.pieces.length.sum())
    read = [sum(unit.range.length for unit in units if unit.owner == n) for n in range(4)]
    assert max(read) - min(read) <= RANGE_BYTES_MAX


def test_slices_are_not_shared() -> None:
    """Each rank wants its own rows; a block at an edge, which two ranks want, is read by both."""
    rows = 101
    manifest = tensors_of((rows, 30 * KiB), (rows, 100 * KiB))
    slices = [
        wanted_blocks(
            manifest,
            [
                want_box(manifest, tensor=n, chunk=n, box=Box((first, 0), (stop - first, cols)))
                for n, cols in ((0, 30 * KiB), (1, 100 * KiB))
            ],
        )
        for first, stop in ((0, 34), (34, 68), (68, rows))
    ]
    units = assert_units(manifest, slices, window_bytes=16 * MiB)
    # The tables of both shards are wanted by all ranks, and shared.
    assert {(unit.range.shard, unit.range.segments) for unit in units} == {(0, ()), (1, ())}


def test_columns_are_shared_by_all() -> None:
    """Every rank needs every block when a tensor goes from rows to columns."""
    manifest = tensors_of((1000, 6 * KiB))
    columns = [
        wanted_blocks(manifest, [want_box(manifest, tensor=0, chunk=0, box=Box((0, n * 2 * KiB), (1000, 2 * KiB)))])
        for n in range(3)
    ]
    units = assert_units(manifest, columns, window_bytes=16 * MiB)
    assert sum(unit.range.length for unit in units if unit.range.segments) == 6000 * KiB


def test_a_rank_reads_what_it_owns_before_it_receives() -> None:
    """A rank reads its own units at most a few windows before it receives: none waits in a circle or keeps much."""
    manifest = tensors_of(*[(60 * MiB,)] * 20)
    units = assert_units(manifest, [whole(manifest)] * 3, window_bytes=16 * MiB)
    owners = {(unit.range.shard, unit.range.start): unit.owner for unit in units}
    for member in range(3):
        plan = plan_shared(manifest, whole(manifest), units, member=member, window_bytes=16 * MiB)
        owned = sum(unit.range.length for unit in units if unit.owner == member)
        read: Counter[int] = Counter()
        for request in plan.ranges:
            owner = owners[request.shard, request.start]
            read[owner] += request.length
            # A window ahead of what it receives, so that others need not wait for it.
            assert owner == member or read[member] >= read[owner] + 8 * MiB or read[member] == owned
            assert read[member] - min(read[other] for other in range(3)) <= 4 * 16 * MiB or read[member] == owned
        assert set(read) == {0, 1, 2}


def test_cohorts_keep_replicas_together() -> None:
    """For 256 ranks that hold 32 shards in 8 replicas, each cohort has all replicas of its shards."""
    keys = [rank % 32 for rank in range(256)]
    cohorts = split_into_cohorts(keys)
    assert sorted(rank for cohort in cohorts for rank in cohort) == list(range(256))
    assert max(map(len, cohorts)) <= MEMBERS_MAX
    for cohort in cohorts:
        assert set(Counter(keys[rank] for rank in cohort).values()) == {8}
    assert split_into_cohorts([0] * 3) == [[0, 1, 2]]
    assert split_into_cohorts([3, 1, 2]) == [[0, 1, 2]]
    assert [len(cohort) for cohort in split_into_cohorts([0] * (MEMBERS_MAX + 2))] == [MEMBERS_MAX // 2 + 1] * 2


def test_replicas_have_one_grouping_key() -> None:
    """The key is that of the longest run, whatever else a rank wants."""
    manifest = tensors_of((60 * MiB,), (40 * MiB,), *[(10 * KiB,)] * 3)
    keys = set()
    for own in (2, 3, 4):
        wanted = wanted_blocks(
            manifest,
            [want_box(manifest, tensor=0, chunk=0, box=Box((8 * MiB,), (20 * MiB,))), Want(own, own + 1, None)],
        )
        keys.add(grouping_key(decode_wanted(encode_wanted(manifest, wanted))))
    assert keys == {8}
    assert grouping_key(decode_wanted(encode_wanted(manifest, wanted_blocks(manifest, [])))) == -1


def test_encoded_wants_are_small() -> None:
    """Slices of a thousand tensors take under 4 KiB, and all blocks of these under 100 bytes."""
    shape = (512, 1000)
    manifest = tensors_of(*[(size + random.Random(size).randrange(9), shape[1]) for size in range(512, 1512)])
    box = [Box((128, 0), (64, 1000)) for _ in range(1000)]
    wanted = wanted_blocks(manifest, [want_box(manifest, tensor=n, chunk=n, box=b) for n, b in enumerate(box)])
    assert len(encode_wanted(manifest, wanted)) < 4 * KiB
    assert len(encode_wanted(manifest, whole(manifest))) < 100
