"""Packing: every element of every item is followed into the shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.common.units import MiB
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.shard import ITEMS_PER_SHARD_MAX, SHARD_BYTES_MAX
from dcp_remote.saving.packing import Item, Piece, pack, piece_label, spread

TopItem = Item[None]


@st.composite
def items(draw: st.DrawFn) -> list[TopItem]:
    result: list[TopItem] = []
    tops = sorted(draw(st.lists(st.sampled_from("abc"), max_size=12)))
    for number, top in enumerate(tops):
        sizes = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        whole = draw(st.booleans())
        offsets = tuple(0 if whole else draw(st.integers(0, 9)) for _ in sizes)
        dtype = draw(st.sampled_from(["uint8", "int32", "complex128"]))
        keeps_bounds = draw(st.booleans())
        result.append(Item(top, f"{top}.{number}", dtype, offsets, sizes, whole, None, keeps_bounds))
    return result


@given(items(), st.integers(16, 400), st.integers(1, 5), st.sampled_from([16, 64, 1000]))
def test_every_element_is_placed_once_within_all_limits(
    given_items: list[TopItem], shard_bytes_max: int, items_per_shard_max: int, fill_bytes_min: int
) -> None:
    """Elements lie in order, in shards that are not empty, hold one top-level key, and stay within both limits.

    Room in a shard is left only below `fill_bytes_min`, or before an item that keeps its bounds.
    """
    shards = list(
        pack(
            given_items,
            shard_bytes_max=shard_bytes_max,
            items_per_shard_max=items_per_shard_max,
            fill_bytes_min=fill_bytes_min,
        )
    )
    placed = [(p.number, n) for shard in shards for p in shard for n in range(p.start, p.stop)]
    assert placed == [(n, e) for n, item in enumerate(given_items) for e in range(math.prod(item.sizes))]
    for shard in shards:
        assert 1 <= len(shard) <= items_per_shard_max
        assert sum(p.length for p in shard) <= shard_bytes_max
        assert len({p.item.top for p in shard}) == 1
        assert all(p.item is given_items[p.number] and p.stop > p.start for p in shard)
        assert all(p.length == (p.stop - p.start) * ITEM_BYTES[p.item.dtype] for p in shard)
    for shard, following in itertools.pairwise(shards):
        room_bytes = shard_bytes_max - sum(p.length for p in shard)
        if len(shard) == items_per_shard_max or shard[0].item.top != following[0].item.top:
            continue
        assert following[0].length > room_bytes, "no shard ends without need"
        assert room_bytes < fill_bytes_min or following[0].item.keeps_bounds


def test_items_are_drawn_as_late_as_can_be() -> None:
    """A shard is yielded before the second item after it is drawn, so that few copies of a planner are alive."""
    drawn = 0

    def source() -> Iterator[TopItem]:
        nonlocal drawn
        for number in range(10):
            drawn += 1
            yield Item("m", str(number), "uint8", (0,), (60,), True, None)

    for number, shard in enumerate(pack(source(), shard_bytes_max=100)):
        assert [piece.number for piece in shard] == [number]
        assert drawn == min(number + 2, 10)


def test_defaults_hold_what_a_large_model_has() -> None:
    """An embedding of 1.05 GiB and 40,000 scalars: 17 pieces of whole rows, the last smaller; shards of 16,384."""
    embedding = Item("m", "wte", "float32", (0, 0), (128_256, 2200), True, None)
    scalars = [Item("m", f"s{n}", "float32", (), (), True, None) for n in range(40_000)]
    shards = list(pack([embedding, *scalars]))
    cut = [shard[0] for shard in shards[:17]]
    assert [p.item.name for p in cut] == ["wte"] * 17
    assert all(p.start % 2200 == 0 for p in cut)
    assert all(SHARD_BYTES_MAX - 2200 * 4 < p.length <= SHARD_BYTES_MAX == 64 * MiB for p in cut[:-1])
    assert [len(shard) for shard in shards[16:]] == [ITEMS_PER_SHARD_MAX, ITEMS_PER_SHARD_MAX, 40_001 - 2 * 16_384]


def test_an_item_that_keeps_its_bounds_is_cut_into_equal_pieces() -> None:
    """Shards become a little smaller with each save: the pieces of the saves before are cut in halves, once."""
    bounds = [(0, 64 * MiB)]
    for shard_bytes in range(64 * MiB, 40 * MiB, -MiB):
        items = [Item("m", "w", "uint8", (start,), (stop - start,), False, None, True) for start, stop in bounds]
        cut = [piece for shard in pack(items, shard_bytes_max=shard_bytes) for piece in shard]
        bounds = [(p.item.offsets[0] + p.start, p.item.offsets[0] + p.stop) for p in cut]
    assert len(bounds) == 2
    assert min(stop - start for start, stop in bounds) > 30 * MiB


def transformer(size_bytes: int) -> Iterator[TopItem]:
    """Yield float32 tensors of a model and the two moments of its optimizer, of about this size."""
    width = 768
    layers = (size_bytes // 12 - 32_000 * width) // (12 * width**2)
    matrices = {
        "attn": (3 * width, width),
        "proj": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    for top, parts in (("model", ["weight"]), ("optim", ["exp_avg", "exp_avg_sq"])):
        for part in parts:
            for layer in range(layers):
                yield Item(top, f"{layer}.norm.{part}", "float32", (0,), (width,), True, None)
        for part in parts:
            yield Item(top, f"wte.{part}", "float32", (0, 0), (32_000, width), True, None)
            for layer, (name, sizes) in itertools.product(range(layers), matrices.items()):
                yield Item(top, f"{layer}.{name}.{part}", "float32", (0, 0), sizes, True, None)


@pytest.mark.parametrize("in_flight", [16, 32])
@pytest.mark.parametrize(("size", "near_waves"), [(387, 1), (476, 1), (1176, 2), (1414, 2), (4058, 5)])
def test_shards_are_sent_in_full_waves(size: int, near_waves: int, in_flight: int) -> None:
    """All shards of a state go in waves of as many as are in flight, and all but the last of each key are full."""
    state = list(transformer(size * MiB))
    size_bytes = sum(math.prod(item.sizes) * ITEM_BYTES[item.dtype] for item in state)
    assert abs(size_bytes - size * MiB) < 82 * MiB
    shard_bytes = spread(size_bytes, in_flight)
    waves = near_waves if in_flight == 16 else -(-near_waves // 2)
    shards = list(pack(state, shard_bytes_max=shard_bytes))
    assert waves * in_flight - 2 <= len(shards) <= waves * in_flight
    assert sum(sum(p.length for p in shard) < shard_bytes - MiB for shard in shards) <= 2


def test_the_size_of_shards_follows_the_bytes() -> None:
    """Bytes fill a wave, and more waves only if shards would have more than 64 MiB, or than the limit; or 8 MiB."""
    sizes = {0: 8, 1: 8, 64: 8, 112: 8, 140: 10, 896: 64, 900: 30, 1920: 64, 1950: 42.5, 100_000: 64}
    assert {size: round(spread(size * MiB, 16) / MiB, 4) for size in sizes} == sizes
    assert spread(140 * MiB, 32) == 8 * MiB
    assert spread(1024 * MiB, 16, 5 * MiB) == 5 * MiB
    assert spread(2048 * MiB, 16, 20 * MiB) == 18.75 * MiB


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ([(), (0, 7), (0,)], [4]),
        ([(5000, 1000)], [8_388_000, 8_388_000, 3_224_000]),
        ([(1, 5_000_000)], [8 * MiB, 8 * MiB, 20_000_000 - 16 * MiB]),
        ([(64, 1024)] * 100, [8 * MiB, 8 * MiB, 8 * MiB, 1 * MiB]),
        ([(1000,)] * 5000, [8 * MiB - 608, 8 * MiB - 608, 5000 * 4000 - 2 * (8 * MiB - 608)]),
    ],
    ids=["empty", "one large tensor", "one row", "tensors of 256 KiB", "thousands"],
)
def test_lengths_of_shards(sizes: list[tuple[int, ...]], lengths: list[int]) -> None:
    """Pack float32 tensors of these sizes into shards of 8 MiB."""
    given_items = [Item("m", str(n), "float32", (0,) * len(size), size, True, None) for n, size in enumerate(sizes)]
    shards = pack(given_items, shard_bytes_max=8 * MiB)
    assert [sum(piece.length for piece in shard) for shard in shards] == lengths


@given(items(), st.integers(16, 100))
def test_labels_tell_where_a_piece_lies(given_items: list[TopItem], shard_bytes_max: int) -> None:
    """Label and shape alone are enough to find a piece's elements in the tensor."""
    labels: set[str] = set()
    for piece in itertools.chain.from_iterable(pack(given_items, shard_bytes_max=shard_bytes_max)):
        label, shape = piece_label(piece)
        assert label not in labels
        labels.add(label)
        assert math.prod(shape) == piece.stop - piece.start
        assert _elements(piece, label, shape) == list(range(piece.start, piece.stop))


def _elements(piece: Piece[None], label: str, shape: tuple[int, ...]) -> list[int]:
    item = piece.item
    numbers = np.arange(math.prod(item.sizes)).reshape(item.sizes)
    name, at, where = label.partition("@")
    assert name == item.name
    if not at:
        assert item.whole
        assert shape == item.sizes
        return [int(n) for n in numbers.reshape(-1)]
    offsets, plus, first = where.partition("+")
    corner = tuple(int(o) for o in offsets.split(",")) if offsets else ()
    inside = tuple(o - base for o, base in zip(corner, item.offsets, strict=True))
    if plus:
        assert not any(inside)
        return [int(n) for n in numbers.reshape(-1)[int(first) : int(first) + shape[0]]]
    box = numbers[tuple(slice(o, o + n) for o, n in zip(inside, shape, strict=True))]
    return [int(n) for n in np.asarray(box).reshape(-1)]
