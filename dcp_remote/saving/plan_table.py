"""Plans of all ranks as columns, and the decision which rank writes what. Pure, without torch.

torch plans with one to four objects per chunk, which the coordinator receives from every rank, handles one by one, and
sends back: for a thousand ranks with a thousand tensors each that is a million, and takes a minute and a half in which
the training on that rank waits for the GIL. Here a rank sends columns, and receives which of its own items it writes.
The decision is that of torch's `DefaultSavePlanner` (torch/distributed/checkpoint/_dedup_save_plans.py,
default_planner.py), with two exceptions: which of its holders writes a replica, and that buffers and objects are
written by the holder with the lowest rank.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from dcp_remote.common.arrays import (
    I64,
    Integers,
    concat_arrays,
    concat_ranges,
    group_offsets,
    shrink_integers,
    sorted_unique,
)
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.document import DOCUMENT_BYTES_MAX
from dcp_remote.format.empty_dicts import empty_dicts
from dcp_remote.format.manifest import TensorKind, Tensors
from dcp_remote.format.manifest_validation import find_doubtful
from dcp_remote.format.tiling import Comparisons, why_not_tiled
from dcp_remote.saving.manifest_assembly import Planned, PlannedTensors
from dcp_remote.saving.rank_differences import NAMED_MAX, ObjectDifference, describe_tensor, make_difference_error

# Roles of items. Replicas hold equal values. Of buffers and of values, which are objects and numbers, ranks may hold
# different values, and the lowest rank's is saved.
REPLICA, BUFFER, VALUE = range(3)

# Tables that are compared at a time, and items for each step of that, from which on it pays.
_ALIKE_AT_ONCE = 512
_ALIKE_MIN = 16

Flatten: TypeAlias = Mapping[str, tuple[str | int, ...]]
Bools: TypeAlias = NDArray[np.bool_]

# Key of an item that is the same on every rank that holds it: its name, and the offsets of its chunk.
Chunk: TypeAlias = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PlanTable:
    """Proposal of one rank: the items that it would write if it were alone, in order. All are different chunks.

    Objects of this rank alone are no items, but in `own`: with them, no rank's names would be those of another.
    """

    packed_names: bytes  # name of each item, and the flatten mapping (see `pack_names`)
    is_object: Bools  # True for each object; other items are chunks of tensors
    role: NDArray[np.uint8]  # role of each item
    kind: Integers  # index into `kinds` of each item; 0 for objects
    dimensions: Integers  # number of dimensions of each item; 0 for objects
    shapes: Integers  # shapes of the chunks' tensors, one after another
    offsets: Integers  # offsets of the chunks, one after another
    sizes: Integers  # sizes of the chunks, one after another
    kinds: tuple[tuple[TensorKind, int], ...]  # distinct kinds, each with its bytes per element
    value_digests: NDArray[np.uint32]  # digest of each value; 0 for one that is not compared. Empty if none is
    own: Mapping[str, tuple[tuple[str | int, ...], bool]]  # path by name, and whether it is an object or an empty dict

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle compressed columns; those that most ranks have alike are unpacked once for all of them."""
        form = self.packed_names, self.is_object, self.role, self.kind, self.dimensions, self.shapes, self.kinds
        return _to_table, (pack(form), pack(self.sizes), pack(self.offsets), self.value_digests, self.own)

    def take(self, items: I64) -> PlanTable:
        """Return the table of these items, among which are all values."""
        if len(items) == len(self.kind):
            return self
        dimensions = self.dimensions[items]
        values = concat_ranges(group_offsets(self.dimensions)[items], dimensions)
        return replace(
            self,
            is_object=self.is_object[items],
            role=self.role[items],
            kind=self.kind[items],
            dimensions=dimensions,
            shapes=self.shapes[values],
            offsets=self.offsets[values],
            sizes=self.sizes[values],
        )


def _to_table(form: bytes, sizes: bytes, offsets: bytes, *own: Any) -> PlanTable:
    names, is_object, role, kind, dimensions, shapes, kinds = _unpack_shared(form)
    return PlanTable(
        names, is_object, role, kind, dimensions, shapes, unpack(offsets), _unpack_shared(sizes), kinds, *own
    )


@dataclass(frozen=True, slots=True)
class Share:
    """Items that one rank writes."""

    items: Integers  # indices of the items in the rank's table, ascending
    hints: Integers  # position of each item among the chunks of its tensor; 0 for objects
    has_sets: bool  # True if values of sets of tensors are compared on any rank
    # Number of the set of each item in the rank's table, from 1 on; 0 for an item that is not compared. Empty if there
    # are no sets.
    compared: Integers


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """Replicas, or buffers, that the same ranks hold, so that one digest of all of them compares these ranks."""

    ranks: I64  # ascending
    chunks: list[Chunk]
    are_buffers: bool  # True if ranks may hold different values


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Decision on the tables of all ranks."""

    shares: list[Share]  # share of each rank
    planned: Planned
    differing: tuple[ObjectDifference, ...]  # objects and numbers of which ranks hold different values
    sets: tuple[ReplicaSet, ...]  # replicas and buffers whose values are compared


def pack_names(names: Sequence[str], flatten: Flatten) -> bytes:
    """Pack names and flatten mapping. Equal on most ranks, so that the coordinator unpacks only a few."""
    return pack((names, flatten))


def pack(value: object) -> bytes:
    """Return a value that is sent to the coordinator, compressed."""
    return zstandard.ZstdCompressor().compress(pickle.dumps(value))


def unpack(packed: bytes) -> Any:
    """Return what `pack` was given by a rank of this job."""
    return pickle.loads(zstandard.ZstdDecompressor().decompress(packed))  # noqa: S301  # from a rank of this job


_unpack_shared = functools.lru_cache(maxsize=64)(unpack)


def arrange(
    tables: Sequence[PlanTable], *, to_lowest_rank: bool = False, compared: Collection[str] | None = None
) -> Arrangement:
    """Decide which rank writes which items; coordinator only.

    Costs at most two seconds of CPU for a million items.

    A replica is written by one of its holders: the largest replica first, each by the holder with the least to write.
    If all ranks hold the same replicas and nothing else, no rank writes more than the mean plus the largest replica.
    Buffers, objects and numbers are written by the holder with the lowest rank; with `to_lowest_rank` replicas, too.

    `compared` has the names of tensors whose values were compared; those of all others are, but of none if it is None.

    Refuses chunks that do not make up their tensor, and names under which ranks save different things.
    """
    names, alone = _Names.of(tables), {name: found for table in tables for name, found in table.own.items()}
    own_objects = [name for name, (_, is_object) in alone.items() if is_object]
    flatten = {**names.flatten, **{name: path for name, (path, _) in alone.items()}}
    if clashing := sorted(alone.keys() & names.numbers.keys()):
        raise InvalidArgumentError("A name in the state is that of a PerRank value. Rename it.", names=clashing[0])
    _require_room([*names.numbers, *own_objects], flatten)
    require_held(flatten, {*names.numbers, *own_objects})
    items = _Items.of(tables, names, _find_alike(tables, names))
    _require_one_meaning(items)
    leaders, is_alone = items.leaders()
    if not is_alone.all() and len(items.like) > len(sorted_unique(items.like)):
        # Replicas are dealt out one by one.
        has_replicas = np.zeros(len(items.like), dtype=np.bool_)
        has_replicas[items.name[~is_alone]] = True
        items = _Items.of(tables, names, np.where(has_replicas[items.like], np.arange(len(items.like)), items.like))
        leaders, is_alone = items.leaders()
    size_bytes = items.size_bytes()
    groups = list(_group_replicas(leaders, np.flatnonzero(~is_alone), size_bytes))
    roles = _roles_of_groups(items, leaders)
    sets, set_of_item = _group_by_holders(items, groups, roles, compared)
    of_lowest_rank = [to_lowest_rank or bool(roles[holders[0]] != REPLICA) for holders in groups]
    writes = _choose_writers(items, groups, size_bytes, is_alone, of_lowest_rank)
    planned, hints = _plan_checkpoint(items, np.flatnonzero(writes))
    positions = {**planned.positions, **{name: len(names.numbers) + n for n, name in enumerate(own_objects)}}
    planned = replace(planned, positions=positions, flatten=flatten)
    shares = []
    for table, start in zip(tables, items.rank_first.tolist(), strict=False):
        places = start + items.places[table.packed_names]
        own = np.flatnonzero(writes[places])
        shares.append(
            Share(
                shrink_integers(own),
                shrink_integers(hints[places][own]),
                has_sets=bool(sets),
                compared=shrink_integers(set_of_item[places] if sets else set_of_item[:0]),
            )
        )
    return Arrangement(shares, planned, _find_differing_objects(items, writes), sets)


def require_held(flatten: Flatten | None, entries: Collection[str]) -> None:
    """Refuse a state with a tensor of which no rank holds any part. For plans of torch's own planner, which has all."""
    unheld = (flatten or {}).keys() - entries
    unheld -= empty_dicts(flatten, entries).keys() if unheld else frozenset()
    if unheld:
        raise InvalidArgumentError(
            "No rank holds any part of a tensor, so that the checkpoint would lack it. Give the ranks' parts, or leave "
            "it out of the state.",
            tensor=", ".join(sorted(unheld)[:5]),
            tensors=len(unheld),
        )


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of the items of all ranks."""

    numbers: dict[str, int]  # in the order in which they first appear
    flatten: Flatten
    of_table: dict[bytes, I64]  # number of the name of each item, by the packed names of a table

    @classmethod
    def of(cls, tables: Sequence[PlanTable]) -> Self:
        """Merge the names of all ranks."""
        numbers: dict[str, int] = {}
        merged: dict[str, tuple[str | int, ...]] = {}
        # Paths of names for which the rank itself has no item: a rank that has the item takes precedence.
        others: dict[str, tuple[str | int, ...]] = {}
        seen: dict[bytes, I64] = {}
        for packed in dict.fromkeys(table.packed_names for table in tables):
            names, flatten = unpack(packed)
            seen[packed] = np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)
            own = frozenset(names)
            for name, path in flatten.items():
                (merged if name in own else others).setdefault(name, path)
        return cls(numbers, others | merged, seen)


def _find_alike(tables: Sequence[PlanTable], names: _Names) -> I64:
    """Return, for each name, the first name of which all ranks hold the same chunks, in the same order.

    Of FSDP's thousands of tensors, few are cut differently. Tables that differ in offsets and sizes alone are compared
    together; nothing is compared if that would take a step for more than a few of the items. Buffers and values are
    alike to no other.
    """
    forms: dict[tuple[object, ...], list[PlanTable]] = {}
    for table in tables:
        columns = (table.is_object, table.role, table.kind, table.dimensions)
        form = table.packed_names, table.kinds, *(column.tobytes() for column in columns)
        forms.setdefault(form, []).append(table)
    steps = sum((len(alike) // _ALIKE_AT_ONCE + 1) * len(alike[0].kind) for alike in forms.values())
    if steps * _ALIKE_MIN > sum(len(table.kind) for table in tables):
        return np.arange(len(names.numbers))
    fresh = itertools.count(1)
    # Equal for names of which all tables so far have the same items.
    marks = [0] * len(names.numbers)
    for alike in forms.values():
        own, kind = names.of_table[alike[0].packed_names].tolist(), alike[0].kind.tolist()
        roles = alike[0].role.tolist()
        firsts = group_offsets(alike[0].dimensions).tolist()
        for begin in range(0, len(alike), _ALIKE_AT_ONCE):
            some = alike[begin : begin + _ALIKE_AT_ONCE]
            stacks = (
                [table.shapes for table in some],
                [table.offsets for table in some],
                [table.sizes for table in some],
            )
            values = [np.ascontiguousarray(np.stack(stack).T) for stack in stacks]
            seen: dict[object, int] = {}
            for number, role, kind_of, (first, stop) in zip(own, roles, kind, itertools.pairwise(firsts), strict=True):
                key = marks[number], kind_of, *(column[first:stop].tobytes() for column in values)
                marks[number] = seen.setdefault(key if role == REPLICA else number, next(fresh))
    first_of: dict[int, int] = {}
    return np.array([first_of.setdefault(mark, number) for number, mark in enumerate(marks)], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Items:
    """Items of all ranks, one rank after another; of names that are alike, those of the first one."""

    names: list[str]  # in the order in which they first appear
    flatten: Flatten
    like: I64  # number, for each name, of the first one that is alike
    places: dict[bytes, I64]  # index of each item of a table, or the one that is alike, among those here
    kinds: list[tuple[TensorKind, int]]
    rank_first: I64
    rank: I64
    name: I64
    is_object: Bools
    role: Integers
    kind: I64
    dimensions: I64
    box_first: I64
    shapes: I64
    offsets: I64
    sizes: I64
    value_digests: I64  # digest of each item; 0 for those that are no values

    @staticmethod
    def of(tables: Sequence[PlanTable], names: _Names, like: I64) -> _Items:
        """Merge the tables of all ranks; `like` as of `_find_alike`."""
        kept = {packed: np.flatnonzero(like[own] == own) for packed, own in names.of_table.items()}
        places = {packed: _find_places(own, like[own], kept[packed]) for packed, own in names.of_table.items()}
        tables = [table.take(kept[table.packed_names]) for table in tables]
        kinds: dict[tuple[TensorKind, int], int] = {}
        kind = [
            np.array([kinds.setdefault(entry, len(kinds)) for entry in table.kinds] or [0], dtype=np.int64)[table.kind]
            for table in tables
        ]
        counts = np.array([len(table.kind) for table in tables], dtype=np.int64)
        dimensions = concat_arrays([table.dimensions for table in tables])
        role = np.concatenate([table.role for table in tables])
        value_digests = np.zeros(len(role), dtype=np.int64)
        if all(len(table.value_digests) == np.count_nonzero(table.role == VALUE) for table in tables):
            value_digests[role == VALUE] = concat_arrays([table.value_digests for table in tables])
        return _Items(
            names=list(names.numbers),
            flatten=names.flatten,
            like=like,
            places=places,
            kinds=list(kinds),
            rank_first=group_offsets(counts),
            rank=np.repeat(np.arange(len(tables), dtype=np.int64), counts),
            name=concat_arrays([names.of_table[table.packed_names][kept[table.packed_names]] for table in tables]),
            is_object=np.concatenate([table.is_object for table in tables]),
            role=role,
            kind=concat_arrays(kind),
            dimensions=dimensions,
            box_first=group_offsets(dimensions),
            shapes=concat_arrays([table.shapes for table in tables]),
            offsets=concat_arrays([table.offsets for table in tables]),
            sizes=concat_arrays([table.sizes for table in tables]),
            value_digests=value_digests,
        )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.rank_first) - 1

    def by_dimensions(self) -> Iterator[tuple[int, I64]]:
        """Yield each number of dimensions, with the indices of the items that have as many."""
        for count in sorted_unique(self.dimensions).tolist():
            yield count, np.flatnonzero(self.dimensions == count)

    def rows(self, values: I64, numbers: I64, dimensions: int) -> I64:
        """Return the values (shapes, offsets or sizes) of items with this number of dimensions, one row per item."""
        result: I64 = values[self.box_first[numbers, None] + np.arange(dimensions)]
        return result

    def box(self, values: I64, number: int) -> tuple[int, ...]:
        """Return the values (offsets or sizes) of one item."""
        return tuple(values[self.box_first[number] : self.box_first[number + 1]].tolist())

    def chunk(self, number: int) -> Chunk:
        """Return the key of an item."""
        return self.names[self.name[number]], self.box(self.offsets, number)

    def size_bytes(self) -> I64:
        """Return the bytes of each item and those that are alike; 1 for an object, whose size is unknown."""
        result = np.ones(len(self.kind), dtype=np.int64)
        item_bytes = np.array([size for _, size in self.kinds] or [1], dtype=np.int64)
        for dimensions, numbers in self.by_dimensions():
            volumes = self.rows(self.sizes, numbers, dimensions).prod(axis=1, dtype=np.int64)
            result[numbers] = volumes * item_bytes[self.kind[numbers]]
        return np.where(self.is_object, 1, result) * np.bincount(self.like, minlength=len(self.like))[self.name]

    def leaders(self) -> tuple[I64, Bools]:
        """Return, for each item, the index of the first item with the same key, and whether no other item has the key.

        A chunk without elements is never the same as a chunk with elements.
        """
        result = np.empty(len(self.kind), dtype=np.int64)
        for dimensions, numbers in self.by_dimensions():
            begins, sizes = self.rows(self.offsets, numbers, dimensions), self.rows(self.sizes, numbers, dimensions)
            keys = np.column_stack([self.is_object[numbers], self.name[numbers], begins, (sizes == 0).any(axis=1)])
            order = np.lexsort(keys.T[::-1])
            keys, ordered = keys[order], numbers[order]
            is_new = np.concatenate([[True], (keys[1:] != keys[:-1]).any(axis=1)])
            result[ordered] = ordered[is_new][np.cumsum(is_new) - 1]
        return result, np.bincount(result, minlength=len(result))[result] == 1


def _find_places(names: I64, like: I64, kept: I64) -> I64:
    """Return, for each item of a table, the position among the kept items of the one that is alike.

    `names` and `like` are the number of the name of each item, and of the one that is alike. A name may have several
    items.
    """
    order, kept_order = np.argsort(names, kind="stable"), np.argsort(names[kept], kind="stable")
    nth = np.empty(len(names), dtype=np.int64)  # among the items of the name
    nth[order] = np.arange(len(names)) - np.searchsorted(names[order], names[order])
    places: I64 = kept_order[np.searchsorted(names[kept][kept_order], like) + nth]
    return places


def _roles_of_groups(items: _Items, leaders: I64) -> NDArray[np.uint8]:
    """Return the role of each group at the index of its first item: the highest of the roles of its items."""
    roles = np.full(len(leaders), REPLICA, dtype=np.uint8)
    for role in (BUFFER, VALUE):
        roles[leaders[items.role == role]] = role
    return roles


def _group_by_holders(
    items: _Items, groups: Sequence[I64], roles: NDArray[np.uint8], compared: Collection[str] | None
) -> tuple[tuple[ReplicaSet, ...], I64]:
    """Return the sets of tensors whose values are compared, and the number of the set of each item, or 0."""
    numbers: dict[tuple[bytes, bool], int] = {}
    sets: list[ReplicaSet] = []
    set_of_item = np.zeros(len(items.kind), dtype=np.int64)
    for holders in groups if compared is not None else ():
        first = int(holders[0])
        if roles[first] == VALUE or items.names[items.name[first]] in (compared or ()):
            continue
        ranks, are_buffers = items.rank[holders], bool(roles[first] == BUFFER)
        number = numbers.setdefault((ranks.tobytes(), are_buffers), len(numbers))
        if number == len(sets):
            sets.append(ReplicaSet(ranks, [], are_buffers))
        sets[number].chunks.append(items.chunk(first))
        set_of_item[holders] = number + 1
    return tuple(sets), set_of_item


def _choose_writers(
    items: _Items, groups: Sequence[I64], size_bytes: I64, is_alone: Bools, of_lowest_rank: Sequence[bool]
) -> Bools:
    """Return which items their ranks write.

    `of_lowest_rank` is True for each group that the holder with the lowest rank writes.
    """
    writes = is_alone.copy()
    load = np.zeros(items.ranks, dtype=np.int64)
    np.add.at(load, items.rank[writes], size_bytes[writes])
    for holders, is_of_lowest_rank in zip(groups, of_lowest_rank, strict=True):
        writer = holders[0 if is_of_lowest_rank else load[items.rank[holders]].argmin()]
        writes[writer] = True
        load[items.rank[writer]] += size_bytes[writer]
    return writes


def _group_replicas(leaders: I64, numbers: I64, size_bytes: I64) -> Iterator[I64]:
    """Yield the indices of the items of each replica, in order of rank; the largest replica first."""
    ordered = numbers[np.argsort(leaders[numbers], kind="stable")]
    begins = np.flatnonzero(leaders[ordered] == ordered)
    stops = np.append(begins[1:], len(ordered))
    for group in np.argsort(-size_bytes[ordered[begins]], kind="stable").tolist():
        yield ordered[begins[group] : stops[group]]


def _plan_checkpoint(items: _Items, written: I64) -> tuple[Planned, I64]:
    """Return the contents of the checkpoint, and the position of each item among the chunks of its tensor."""
    objects, chunks = written[items.is_object[written]], written[~items.is_object[written]]
    chunks = chunks[np.argsort(items.name[chunks], kind="stable")]
    is_first = np.concatenate([np.ones(min(1, len(chunks)), dtype=bool), np.diff(items.name[chunks]) != 0])
    begins = np.flatnonzero(is_first)
    counts = np.diff(np.append(begins, len(chunks)))
    hints = np.zeros(len(items.kind), dtype=np.int64)
    hints[chunks] = np.arange(len(chunks)) - np.repeat(begins, counts)
    leads = chunks[begins]
    tensors = Tensors(
        names=tuple(items.names[number] for number in items.name[leads].tolist()),
        kinds=tuple(kind for kind, _ in items.kinds),
        kind=items.kind[leads],
        dimensions=items.dimensions[leads],
        shape=items.shapes[concat_ranges(items.box_first[leads], items.dimensions[leads])],
        chunks=counts,
        chunk_offsets=items.offsets[concat_ranges(items.box_first[chunks], items.dimensions[chunks])],
        chunk_sizes=items.sizes[concat_ranges(items.box_first[chunks], items.dimensions[chunks])],
        chunk_pieces=np.zeros(len(chunks), dtype=np.int64),
    )
    _require_tiled(tensors)
    layout = np.full(len(items.names), -1, dtype=np.int64)
    layout[items.name[leads]] = np.arange(len(leads))
    layout = layout[items.like]
    own = np.flatnonzero(layout >= 0)
    layout = layout[own]
    # Kept from save to save.
    planned = PlannedTensors(
        names=tuple(items.names[number] for number in own.tolist()),
        kinds=tensors.kinds,
        kind=tensors.kind[layout],
        dimensions=tensors.dimensions[layout],
        shape=tensors.shape[concat_ranges(tensors.shape_first[layout], tensors.dimensions[layout])],
        chunks=counts[layout],
        chunk_offsets=shrink_integers(tensors.chunk_offsets),
        chunk_sizes=shrink_integers(tensors.chunk_sizes),
        chunk_pieces=np.zeros(0, dtype=np.int64),
        layout_first=tensors.value_first[layout],
    )
    positions = {items.names[number]: number for number in items.name[objects].tolist()}
    return Planned(planned, positions=positions, flatten=items.flatten), hints


def _require_room(names: Collection[str], flatten: Flatten) -> None:
    """Refuse names that take more than a manifest may have, which has them once alone, and once with their paths."""
    bytes_min = sum(map(len, itertools.chain(names, flatten)))
    if bytes_min > DOCUMENT_BYTES_MAX:
        raise InvalidArgumentError(
            "The names of tensors and objects take more than a manifest may have; nothing was uploaded. Join small "
            "tensors into larger ones, or save parts of the state into runs of their own.",
            names=len(names),
            bytes_min=bytes_min,
            limit_bytes=DOCUMENT_BYTES_MAX,
        )


def _require_one_meaning(items: _Items) -> None:
    """Refuse names under which ranks save tensors of different global shapes or dtypes, or a tensor and an object.

    Also items that no rank would write are compared: of equal chunks one is written.
    """
    tensors = np.flatnonzero(~items.is_object)
    first = np.full(len(items.names), -1, dtype=np.int64)  # first tensor of each name
    first[items.name[tensors][::-1]] = tensors[::-1]
    numbers: dict[str, int] = {}
    dtypes = np.array([numbers.setdefault(kind.dtype, len(numbers)) for kind, _ in items.kinds] or [0], dtype=np.int64)
    leads = first[items.name[tensors]]
    is_other = dtypes[items.kind[tensors]] != dtypes[items.kind[leads]]
    is_other |= items.dimensions[tensors] != items.dimensions[leads]
    for dimensions in sorted_unique(items.dimensions[tensors]).tolist():
        # Without tensors of other dimensions than the first: their rows would hold values of other items.
        same = np.flatnonzero(~is_other & (items.dimensions[tensors] == dimensions))
        shapes, expected = (items.rows(items.shapes, own[same], dimensions) for own in (tensors, leads))
        is_other[same] = (shapes != expected).any(axis=1)
    wrong = np.zeros(len(items.names), dtype=np.bool_)
    wrong[items.name[tensors[is_other]]] = True
    wrong[items.name[items.is_object & (first[items.name] >= 0)]] = True
    if not wrong.any():
        return
    differing: dict[str, dict[str, list[int]]] = {}
    named = np.flatnonzero(wrong)[:NAMED_MAX]
    for number in np.flatnonzero(np.isin(items.name, named)).tolist():
        kind, _ = items.kinds[int(items.kind[number])] if not items.is_object[number] else (None, 0)
        text = describe_tensor(kind.dtype, items.box(items.shapes, number)) if kind is not None else "an object"
        ranks = differing.setdefault(items.names[int(items.name[number])], {}).setdefault(text, [])
        if (rank := int(items.rank[number])) not in ranks[-1:]:  # several chunks of one tensor
            ranks.append(rank)
    raise make_difference_error(differing, names=int(np.count_nonzero(wrong[items.like])))


def _find_differing_objects(items: _Items, writes: Bools) -> tuple[ObjectDifference, ...]:
    """Return the objects and numbers of which ranks hold different values, in the order of the state."""
    known = np.flatnonzero(items.value_digests)
    first = np.zeros(len(items.names), dtype=np.int64)  # digest of the first item of each name
    first[items.name[known][::-1]] = items.value_digests[known][::-1]
    differs = np.zeros(len(items.names), dtype=np.bool_)
    differs[items.name[known[items.value_digests[known] != first[items.name[known]]]]] = True
    held = np.flatnonzero((items.role == VALUE) & differs[items.name])
    held = held[np.argsort(items.name[held], kind="stable")]
    found: list[ObjectDifference] = []
    for numbers in np.split(held, np.flatnonzero(np.diff(items.name[held])) + 1) if len(held) else ():
        values = int(np.count_nonzero(np.unique(items.value_digests[numbers])))
        writer = int(items.rank[numbers[writes[numbers]][0]])
        found.append(ObjectDifference(items.names[int(items.name[numbers[0]])], values, len(numbers), writer))
    return tuple(found)


def _require_tiled(tensors: Tensors) -> None:
    """Refuse tensors whose chunks do not tile them, before any upload; the manifest is checked again at the commit."""
    comparisons = Comparisons()
    is_single = tensors.chunks == 1
    doubtful = find_doubtful(tensors, np.flatnonzero(is_single))
    for number in sorted([*np.flatnonzero(~is_single).tolist(), *doubtful.tolist()]):
        shape = tensors.shape_of(number)
        reason = why_not_tiled(shape, *tensors.boxes_of(number), comparisons)
        if reason is not None:
            raise InvalidArgumentError(
                f"The ranks' chunks of a tensor do not make up the tensor: {reason}.",
                tensor=tensors.names[number],
                shape=shape,
                chunks=int(tensors.chunks[number]),
            )
