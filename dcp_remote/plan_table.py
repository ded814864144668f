"""Who writes what, decided for all ranks at once. Pure, without torch.

torch plans with an object or four for every chunk, which the coordinator reads from every rank, goes through one by
one, and sends back: of a thousand ranks with a thousand tensors each that is a million, and takes a minute and a half
in which the training on that rank waits for Python's lock. Here a rank sends columns, and gets back which of its own
items it writes. What is decided is what torch's `DefaultSavePlanner` decides (torch/distributed/checkpoint/
_dedup_save_plans.py, default_planner.py), but for which of its holders writes a replica, and that the largest are
written by all of them, a part each. In the checkpoint such a replica looks as if it had been sharded.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from dcp_remote.assembly import Planned
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.manifest import TensorKind
from dcp_remote.ranges import I64, Box, distinct, firsts, joined
from dcp_remote.tiling import Comparisons, why_not_tiled

# Of a shard: a part is no smaller, or its request would cost more than its bytes.
_PART_SHARE_MIN = 0.25

# So many bytes are digested while one is uploaded: 20 GiB/s a thread, for eight ranks that share a host's memory and
# its network. What is written in parts is digested whole by each of its writers.
_DIGESTED_PER_UPLOADED = 10

Flatten: TypeAlias = Mapping[str, tuple[str | int, ...]]
Bools: TypeAlias = NDArray[np.bool_]
Integers: TypeAlias = NDArray[Any]

# What is one and the same thing, whoever has it: a name, and where its chunk begins.
Chunk: TypeAlias = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PlanTable:
    """What a rank would write if it were alone: its items, in order. No two are the same chunk.

    Attributes:
        said: The name of each item, and the flatten mapping; packed, as most ranks say the same.
        is_object: Of each; what is no object is a chunk of a tensor.
        is_large: Whether it is larger than a shard and need not be written whole.
        kind: An index into `kinds`; 0 of objects.
        dimensions: Of each; 0 of objects.
        shapes: Of the tensors that the chunks are of, one after another.
        offsets: Of the chunks.
        sizes: Of the chunks.
        kinds: With the bytes of an element each.
    """

    said: bytes
    is_object: Bools
    is_large: Bools
    kind: Integers
    dimensions: Integers
    shapes: Integers
    offsets: Integers
    sizes: Integers
    kinds: tuple[tuple[TensorKind, int], ...]


class Part(NamedTuple):
    """A part of an item; `box` is where it lies in the tensor."""

    item: int
    box: Box


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank writes.

    Attributes:
        items: Numbers of its items, ascending.
        hints: Of each, where it stands among the chunks of its tensor; 0 of objects.
        parts: Of these items that are only written in part.
        is_cut: Whether anything is written in part, by any rank: all ranks must then compare what they hold.
    """

    items: Integers
    hints: Integers
    parts: tuple[Part, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What comes of all ranks' tables.

    Attributes:
        shares: Of each rank.
        planned: What the checkpoint will hold.
        shared: What several ranks write parts of.
    """

    shares: list[Share]
    planned: Planned
    shared: frozenset[Chunk]


def said(names: Sequence[str], flatten: Flatten | None) -> bytes:
    """See `PlanTable.said`."""
    return zstandard.ZstdCompressor().compress(pickle.dumps((names, flatten)))


def small(values: I64) -> Integers:
    """The same numbers, none of them negative, in as few bytes each as hold them."""
    return values.astype(np.min_scalar_type(int(values.max()))) if len(values) else values.astype(np.uint8)


def arrange(
    tables: Sequence[PlanTable],
    *,
    shard_bytes_max: int,
    unlike: Collection[Chunk] = (),
    to_lowest_rank: bool = False,
) -> Arrangement:
    """Decide who writes what; called on the coordinator.

    A second of CPU for a million items; ten where most are large replicas.

    What several ranks have is written by one: what is largest first, by whoever has the least to write. What is larger
    than a shard is cut along its first dimension into rows, for as many of its holders as get a quarter of a shard
    each, unless they describe it differently or have other values; only the largest, for as long as that saves more
    time than comparing all values takes.

    Args:
        tables: Of all ranks, in their order; at least one.
        shard_bytes_max: Bytes of data in a shard.
        unlike: What holders have different values of.
        to_lowest_rank: Of several holders the first writes, and nothing is cut.

    Raises:
        InvalidArgumentError: The chunks of a tensor leave a gap, overlap, or reach outside of it; or ranks mean
            different things by a name. Names it.
    """
    items = _Items.of(tables)
    writes, boxes, shared = _writers(
        items, len(tables), shard_bytes_max=shard_bytes_max, unlike=frozenset(unlike), to_lowest_rank=to_lowest_rank
    )
    planned, hints = _planned(items, np.flatnonzero(writes))
    shares = []
    for start, stop in itertools.pairwise(items.rank_first.tolist()):
        own = np.flatnonzero(writes[start:stop])
        parts = tuple(Part(number, boxes[start + number]) for number in own.tolist() if start + number in boxes)
        shares.append(Share(small(own), small(hints[start:stop][own]), parts, is_cut=bool(shared)))
    return Arrangement(shares, planned, shared)


@dataclass(frozen=True, slots=True)
class _Items:
    """The items of all ranks, one rank after another. `sizes` and `offsets` become those of parts."""

    names: list[str]  # in the order in which they first appear
    flatten: Flatten | None
    kinds: list[tuple[TensorKind, int]]
    rank_first: I64
    rank: I64
    name: I64
    is_object: Bools
    is_large: Bools
    kind: I64
    dimensions: I64
    box_first: I64
    shapes: I64
    offsets: I64
    sizes: I64

    @staticmethod
    def of(tables: Sequence[PlanTable]) -> _Items:
        numbers: dict[str, int] = {}
        merged: dict[str, tuple[str | int, ...]] | None = None
        # Names without an entry on the rank that says them: where another rank has that entry, its path counts.
        others: dict[str, tuple[str | int, ...]] = {}
        seen: dict[bytes, I64] = {}
        for packed in (table.said for table in tables):
            if packed in seen:
                continue
            names, flatten = pickle.loads(zstandard.ZstdDecompressor().decompress(packed))  # noqa: S301  # of a rank of this job
            seen[packed] = np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)
            if len(seen) > 1 and (flatten is None) != (merged is None):
                raise InvalidArgumentError("Some ranks' planners flatten their state dict, and others' do not.")
            if flatten is not None:
                merged, own = {} if merged is None else merged, frozenset(names)
                for name, place in flatten.items():
                    (merged if name in own else others).setdefault(name, place)
        kinds: dict[tuple[TensorKind, int], int] = {}
        kind = [
            np.array([kinds.setdefault(one, len(kinds)) for one in table.kinds] or [0], dtype=np.int64)[table.kind]
            for table in tables
        ]
        counts = np.array([len(table.kind) for table in tables], dtype=np.int64)
        dimensions = _column([table.dimensions for table in tables])
        return _Items(
            names=list(numbers),
            flatten=None if merged is None else others | merged,
            kinds=list(kinds),
            rank_first=firsts(counts),
            rank=np.repeat(np.arange(len(tables), dtype=np.int64), counts),
            name=_column([seen[table.said] for table in tables]),
            is_object=np.concatenate([table.is_object for table in tables]),
            is_large=np.concatenate([table.is_large for table in tables]),
            kind=_column(kind),
            dimensions=dimensions,
            box_first=firsts(dimensions),
            shapes=_column([table.shapes for table in tables]),
            offsets=_column([table.offsets for table in tables]),
            sizes=_column([table.sizes for table in tables]),
        )

    def by_dimensions(self) -> Iterator[tuple[int, I64]]:
        """The numbers of the items of as many dimensions each."""
        for count in distinct(self.dimensions).tolist():
            yield count, np.flatnonzero(self.dimensions == count)

    def rows(self, values: I64, numbers: I64, dimensions: int) -> I64:
        """Of items of so many dimensions, one row each."""
        result: I64 = values[self.box_first[numbers, None] + np.arange(dimensions)]
        return result

    def box(self, values: I64, number: int) -> tuple[int, ...]:
        """Of one item."""
        return tuple(values[self.box_first[number] : self.box_first[number + 1]].tolist())

    def chunk(self, number: int) -> Chunk:
        """What an item is, as long as no part was made of it."""
        return self.names[self.name[number]], self.box(self.offsets, number)

    def size_bytes(self) -> I64:
        """Of each item; 1 of an object, as nobody knows."""
        result = np.ones(len(self.kind), dtype=np.int64)
        item_bytes = np.array([size for _, size in self.kinds] or [1], dtype=np.int64)
        for dimensions, numbers in self.by_dimensions():
            volumes = self.rows(self.sizes, numbers, dimensions).prod(axis=1, dtype=np.int64)
            result[numbers] = volumes * item_bytes[self.kind[numbers]]
        return np.where(self.is_object, 1, result)

    def leaders(self) -> I64:
        """For each item, the first that is the same. What has no elements is never the same as what has."""
        result = np.empty(len(self.kind), dtype=np.int64)
        for dimensions, numbers in self.by_dimensions():
            begins, sizes = self.rows(self.offsets, numbers, dimensions), self.rows(self.sizes, numbers, dimensions)
            keys = np.column_stack([self.is_object[numbers], self.name[numbers], begins, (sizes == 0).any(axis=1)])
            order = np.lexsort(keys.T[::-1])
            keys, ordered = keys[order], numbers[order]
            is_new = np.concatenate([[True], (keys[1:] != keys[:-1]).any(axis=1)])
            result[ordered] = ordered[is_new][np.cumsum(is_new) - 1]
        return result

    def are_alike(self, numbers: I64) -> bool:
        """Whether the same item is described in the same way by all of its holders."""
        dimensions = int(self.dimensions[numbers[0]])
        described = np.column_stack(
            [self.kind[numbers], *(self.rows(values, numbers, dimensions) for values in (self.shapes, self.sizes))]
        )
        return bool((described == described[0]).all())


def _column(values: Sequence[Integers]) -> I64:
    # Of several types numpy makes floats.
    return np.concatenate([np.zeros(0, dtype=np.int64), *(one.astype(np.int64) for one in values)])


def _writers(
    items: _Items, ranks: int, *, shard_bytes_max: int, unlike: frozenset[Chunk], to_lowest_rank: bool
) -> tuple[Bools, dict[int, Box], frozenset[Chunk]]:
    """Which items are written by those who have them; which of them in part, and of what."""
    size_bytes, leaders = items.size_bytes(), items.leaders()
    writes = np.bincount(leaders, minlength=len(leaders))[leaders] == 1
    load = np.zeros(ranks, dtype=np.int64)
    np.add.at(load, items.rank[writes], size_bytes[writes])
    groups = list(_groups(leaders, np.flatnonzero(~writes), size_bytes))
    to_cut = _to_cut(items, groups, size_bytes, ranks=ranks, unlike=unlike)
    boxes: dict[int, Box] = {}
    shared: set[Chunk] = set()
    for group, holders in enumerate(groups):
        first = int(holders[0])
        if to_lowest_rank:
            writes[first] = True
            continue
        by_load = holders[np.argsort(load[items.rank[holders]], kind="stable")]
        parts: list[Box] = []
        if group in to_cut:
            count = min(len(holders), int(size_bytes[first] / (_PART_SHARE_MIN * shard_bytes_max)))
            parts = _cut(Box(items.box(items.offsets, first), items.box(items.sizes, first)), count)
        if len(parts) < 2:  # noqa: PLR2004  # one is the whole
            chosen = int(by_load[0])
            writes[chosen] = True
            load[items.rank[chosen]] += size_bytes[chosen]
            continue
        shared.add(items.chunk(first))
        item_bytes = items.kinds[int(items.kind[first])][1]
        for number, part in zip(np.sort(by_load[: len(parts)]).tolist(), parts, strict=True):
            writes[number] = True
            boxes[number] = part
            load[items.rank[number]] += part.elements * item_bytes
    for number, part in boxes.items():
        where = slice(int(items.box_first[number]), int(items.box_first[number + 1]))
        items.offsets[where], items.sizes[where] = part.offsets, part.sizes
    return writes, boxes, frozenset(shared)


def _to_cut(
    items: _Items, groups: Sequence[I64], size_bytes: I64, *, ranks: int, unlike: frozenset[Chunk]
) -> Collection[int]:
    """The groups whose holders write parts: the largest, so that digesting those and uploading all takes least time.

    The rank that writes most writes no more than the mean and the largest replica that is not cut.
    """
    can = [
        number
        for number, holders in enumerate(groups)
        if items.is_large[holders].all() and items.chunk(int(holders[0])) not in unlike and items.are_alike(holders)
    ]
    sizes = size_bytes[[int(groups[number][0]) for number in can]]
    holders = np.array([len(groups[number]) for number in can], dtype=np.int64)
    digested = np.append(0, np.cumsum(sizes * holders / ranks))  # by the mean rank, if so many are cut
    costs = digested / _DIGESTED_PER_UPLOADED + np.append(sizes, 0)
    return set(can[: int(costs.argmin())])


def _groups(leaders: I64, numbers: I64, size_bytes: I64) -> Iterator[I64]:
    """Items that are the same, each group in order; the largest first."""
    ordered = numbers[np.argsort(leaders[numbers], kind="stable")]
    begins = np.flatnonzero(leaders[ordered] == ordered)
    stops = np.append(begins[1:], len(ordered))
    for group in np.argsort(-size_bytes[ordered[begins]], kind="stable").tolist():
        yield ordered[begins[group] : stops[group]]


def _cut(chunk: Box, count: int) -> list[Box]:
    """Boxes of nearly equal size, along the first dimension that can be cut: each is one run of the chunk."""
    sizes = chunk.sizes
    dimension = next((n for n, size in enumerate(sizes) if size > 1), None)
    if dimension is None or count < 1:
        return []
    count = min(count, sizes[dimension])
    bounds = [sizes[dimension] * k // count for k in range(count + 1)]
    return [
        Box(
            tuple(offset + start if n == dimension else offset for n, offset in enumerate(chunk.offsets)),
            tuple(stop - start if n == dimension else size for n, size in enumerate(sizes)),
        )
        for start, stop in itertools.pairwise(bounds)
    ]


def _planned(items: _Items, written: I64) -> tuple[Planned, I64]:
    """What the written items make, and of each where it stands in its tensor."""
    objects, chunks = written[items.is_object[written]], written[~items.is_object[written]]
    chunks = chunks[np.argsort(items.name[chunks], kind="stable")]
    is_first = np.concatenate([np.ones(min(1, len(chunks)), dtype=bool), np.diff(items.name[chunks]) != 0])
    begins = np.flatnonzero(is_first)
    counts = np.diff(np.append(begins, len(chunks)))
    hints = np.zeros(len(items.kind), dtype=np.int64)
    hints[chunks] = np.arange(len(chunks)) - np.repeat(begins, counts)
    leads = chunks[begins]
    dimensions = items.dimensions[leads]
    _require_one_meaning(items, objects, chunks, np.repeat(dimensions, counts))
    all_dimensions = items.dimensions[chunks]
    names = tuple(items.names[number] for number in items.name[leads].tolist())
    planned = Planned(
        names=names,
        kinds=tuple(items.kinds[number][0] for number in items.kind[leads].tolist()),
        dimensions=dimensions,
        shape=items.shapes[joined(items.box_first[leads], dimensions)],
        chunks=counts,
        chunk_offsets=items.offsets[joined(items.box_first[chunks], all_dimensions)],
        chunk_sizes=items.sizes[joined(items.box_first[chunks], all_dimensions)],
        objects=tuple(items.names[number] for number in items.name[objects].tolist()),
        positions={items.names[number]: number for number in items.name[objects].tolist()},
        flatten=items.flatten,
    )
    _require_tiled(planned)
    return planned, hints


def _require_one_meaning(items: _Items, objects: I64, chunks: I64, expected: I64) -> None:
    """No name is an object here and a tensor there, or a tensor of more dimensions there."""
    wrong = chunks[items.dimensions[chunks] != expected]
    both = chunks[np.isin(items.name[chunks], items.name[objects])]
    for number in np.concatenate([both, wrong]).tolist():
        name = items.name[number]
        others = np.flatnonzero((items.name == name) & (items.rank != items.rank[number])).tolist()
        raise InvalidArgumentError(
            "Ranks save different things under one name: an object and a tensor, or tensors of different dimensions. "
            "What differs between ranks goes into PerRank.",
            name=items.names[name],
            ranks=", ".join(str(int(items.rank[one])) for one in [number, *others[:1]]),
        )


def _require_tiled(planned: Planned) -> None:
    """Told here, it costs no upload; the manifest is looked at again before it is put."""
    shape_first = firsts(planned.dimensions)
    chunk_first = firsts(planned.chunks)
    box_first = firsts(np.repeat(planned.dimensions, planned.chunks))
    comparisons = Comparisons()
    for number in np.flatnonzero(~_are_whole(planned, shape_first, box_first[chunk_first[:-1]])).tolist():
        dimensions = int(planned.dimensions[number])
        boxes = slice(int(box_first[chunk_first[number]]), int(box_first[chunk_first[number + 1]]))
        shape = planned.shape[shape_first[number] : shape_first[number + 1]].tolist()
        why = why_not_tiled(
            shape,
            planned.chunk_offsets[boxes].reshape(int(planned.chunks[number]), dimensions),
            planned.chunk_sizes[boxes].reshape(int(planned.chunks[number]), dimensions),
            comparisons,
        )
        if why is not None:
            raise InvalidArgumentError(
                f"What the ranks have of a tensor is not the tensor: {why}.",
                tensor=planned.names[number],
                shape=tuple(shape),
                chunks=int(planned.chunks[number]),
            )


def _are_whole(planned: Planned, shape_first: I64, first_box: I64) -> Bools:
    """Which tensors are one chunk: most of them, where nothing is sharded."""
    result: Bools = planned.chunks == 1
    for dimensions in distinct(planned.dimensions).tolist():
        numbers = np.flatnonzero(result & (planned.dimensions == dimensions))
        places = np.arange(dimensions)
        shapes = planned.shape[shape_first[numbers, None] + places]
        offsets, sizes = (
            values[first_box[numbers, None] + places] for values in (planned.chunk_offsets, planned.chunk_sizes)
        )
        result[numbers] = (sizes == shapes).all(axis=1) & (offsets == 0).all(axis=1)
    return result
