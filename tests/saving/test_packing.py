"""Packing: every element of every item is followed into the shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
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
        result.append(Item(top, f"{top}.{number}", dtype, offsets, sizes, whole, None))
    return result


@given(items(), st.integers(16, 400), st.integers(1, 5))
def test_every_element_is_placed_once_within_all_limits(
    given_items: list[TopItem], shard_bytes_max: int, items_per_shard_max: int
) -> None:
    """Elements lie in order, in shards that are not empty, hold one top-level key, and stay within both limits."""
    shards = list(pack(given_items, shard_bytes_max=shard_bytes_max, items_per_shard_max=items_per_shard_max))
    placed = [(p.number, n) for shard in shards for p in shard for n in range(p.start, p.stop)]
    assert placed == [(n, e) for n, item in enumerate(given_items) for e in range(math.prod(item.sizes))]
    for shard in shards:
        assert 1 <= len(shard) <= items_per_shard_max
        assert sum(p.length for p in shard) <= shard_bytes_max
        assert len({p.item.top for p in shard}) == 1
        assert all(p.item is given_items[p.number] and p.stop > p.start for p in shard)
        assert all(p.length == (p.stop - p.start) * ITEM_BYTES[p.item.dtype] for p in shard)
    for shard, following in itertools.pairwise(shards):
        filled = sum(p.length for p in shard) + following[0].length
        reasons = (
            filled > shard_bytes_max,
            len(shard) == items_per_shard_max,
            shard[0].item.top != following[0].item.top,
        )
        assert any(reasons), "no shard ends without need"


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
    """An embedding of 1.05 GiB and 40,000 scalars: 17 equal pieces of whole rows, then shards of 16,384."""
    embedding = Item("m", "wte", "float32", (0, 0), (128_256, 2200), True, None)
    scalars = [Item("m", f"s{n}", "float32", (), (), True, None) for n in range(40_000)]
    shards = list(pack([embedding, *scalars]))
    cut = [shard[0] for shard in shards[:17]]
    assert [p.item.name for p in cut] == ["wte"] * 17
    assert all(p.start % 2200 == 0 for p in cut)
    assert max(p.length for p in cut) - min(p.length for p in cut) <= 2200 * 4
    assert max(p.length for p in cut) <= SHARD_BYTES_MAX == 64 * MiB
    assert [len(shard) for shard in shards[16:]] == [ITEMS_PER_SHARD_MAX, ITEMS_PER_SHARD_MAX, 40_001 - 2 * 16_384]


def test_the_size_of_shards_follows_the_bytes() -> None:
    """Bytes of a rank fill sixteen shards, which are sent at once: from 8 MiB to 64 MiB, or the limit."""
    sizes = {0: 8, 1: 8, 64: 8, 128: 8, 160: 10, 1024: 64, 1025: 64, 100_000: 64}
    assert {size: spread(size * MiB, 16) // MiB for size in sizes} == sizes
    assert spread(387 * MiB, 16) * 16 >= 387 * MiB
    assert spread(1024 * MiB, 16, 5 * MiB) == 5 * MiB


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
