"""Differences between ranks in the values that they save under one name, of which a checkpoint holds one.

Tensors of different shapes or dtypes are refused before anything is uploaded, and so are parameters, states of
optimizers and options of their groups with different values. Other objects with different values are named in a
warning, because a time or a host name in the state does no harm; buffers in a line of the log, because under DDP each
forward pass makes statistics differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from dcp_remote.common.text import format_count
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.manifest import Manifest

# Bounds of a message: names, properties of one name, ranks of one property. Other ranks get the error as well.
NAMED_MAX = 10
_PROPERTIES_MAX = 3
_RANKS_MAX = 4

# Option of an optimizer's group; and the names of its parameters, which differ between the stages of a pipeline.
_GROUP_OPTION = re.compile(r"\.param_groups\.\d+\.(?!params$|param_names$)")
_GROUP_NAMES = re.compile(r"\.param_groups\.\d+\.(params|param_names)$")

# Name, dtype and global shape of each tensor of a rank; of an object "object" and no shape.
Described: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]

# Ranks of one set of tensors whose digests are listed tensor by tensor, one for each digest of the whole set.
_LISTING_RANKS_MAX = 16

# Advice on what may differ.
_LOWEST_RANKS = (
    'CheckpointManager(…, replicas="coordinator") saves those of the lowest rank, where values are to differ for now, '
    "as in local SGD"
)

# Digests of each set of tensors that a rank compares with others, by the number of the set.
SetDigests: TypeAlias = Mapping[int, bytes]

# Ranks by what they hold under a name, such as "float32 (3,)".
Holders: TypeAlias = Mapping[str, Sequence[int]]


class ObjectDifference(NamedTuple):
    """Object of which ranks hold different values."""

    name: str
    values: int  # number of different values
    ranks: int  # number of ranks that hold the object
    writer: int  # rank whose value is saved

    @property
    def is_harmless(self) -> bool:
        """Return whether each rank has its own value again after a restore."""
        return _GROUP_NAMES.search(self.name) is not None

    def __str__(self) -> str:
        return f"{self.name} ({self.values} values on {self.ranks} ranks; rank {self.writer}'s is saved)"


def require_equal_tensors(
    described: Sequence[Described | None], planned_names: Callable[[], Iterable[str]] | None = None
) -> None:
    """Refuse tensors that ranks describe differently; coordinator only.

    Costs a comparison per rank, and microseconds for each tensor of each different description. A description is None
    for a rank that sent none. `planned_names` returns the names that are written, which a user's planner may have
    changed; None if they are those of the descriptions.
    """
    ranks_of: dict[Described, list[int]] = {}
    for rank, description in enumerate(described):
        if description is not None:
            ranks_of.setdefault(description, []).append(rank)
    if len(ranks_of) < 2:  # noqa: PLR2004  # all are equal
        return
    found: dict[str, dict[str, list[int]]] = {}
    for description, ranks in ranks_of.items():
        for name, dtype, shape in description:
            found.setdefault(name, {}).setdefault(describe_tensor(dtype, shape), []).extend(ranks)
    differing = {name: holders for name, holders in found.items() if len(holders) > 1}
    if differing and planned_names is not None:
        written = frozenset(planned_names())
        differing = {name: holders for name, holders in differing.items() if name in written}
    if differing:
        raise make_difference_error(differing, names=len(differing))


def describe_saved(manifest: Manifest) -> set[tuple[str, str, tuple[int, ...]]]:
    """Return name, dtype and shape of each tensor of a checkpoint, and its objects, as a rank describes its own."""
    tensors = manifest.tensors
    objects = [*manifest.inline, *manifest.stored_index]
    return {
        *((name, tensors.kind_of(number).dtype, tensors.shape_of(number)) for name, number in tensors.index.items()),
        *((name, "object", ()) for name in objects),
    }


def describe_tensor(dtype: str, shape: Sequence[int]) -> str:
    """Return a text on a tensor for `Holders`."""
    return f"{dtype} {tuple(shape)}"


def make_difference_error(differing: Mapping[str, Holders], *, names: int) -> InvalidArgumentError:
    """Return the error that says what ranks hold under `names` names, of which only one value can be saved.

    `differing` has the ranks by what they hold, for `NAMED_MAX` names at least.
    """
    named = [f"{name}: {_list_holders(holders)}" for name, holders in list(differing.items())[:NAMED_MAX]]
    return InvalidArgumentError(
        "Ranks save different things under one name, of which a checkpoint holds one; nothing was uploaded. Make "
        "shapes and dtypes equal, or save every rank's value: by PerRank(...) in the state of a CheckpointManager, or "
        "under a name for each rank.",
        differing="; ".join(named),
        names=names,
    )


def group_by_digest(ranks: Iterable[int], digests: Sequence[SetDigests], number: int) -> list[list[int]]:
    """Return the ranks of the set `number`, those with equal digests together, by the lowest rank of each group."""
    found: dict[bytes, list[int]] = {}
    for rank in ranks:
        found.setdefault(digests[rank][number], []).append(rank)
    return list(found.values())


def find_unequal(groups: Sequence[Sequence[int]], lists: Sequence[bytes], *, item_bytes: int) -> dict[int, list[str]]:
    """Return the ranks of each value of each tensor of a set that differs, as texts, by the position of the tensor.

    `groups` has the ranks with equal values; `lists`, the digests of each tensor of the set, of the first rank of each
    of the first groups.
    """
    rows = [[row[start : start + item_bytes] for start in range(0, len(row), item_bytes)] for row in lists]
    unequal: dict[int, list[str]] = {}
    for position, values in enumerate(zip(*rows, strict=True)):
        if len(set(values)) > 1:
            holders: dict[bytes, list[int]] = {}
            for value, ranks in zip(values, groups, strict=False):
                holders.setdefault(value, []).extend(ranks)
            unequal[position] = [_list_ranks(ranks) for ranks in holders.values()]
    return unequal


def choose_listing_ranks(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks that list their digests tensor by tensor: the first of each group, up to a bound."""
    return tuple(ranks[0] for ranks in groups[:_LISTING_RANKS_MAX])


def make_value_error(unequal: Mapping[str, Sequence[str]]) -> InvalidArgumentError:
    """Return the error that names replicas with different values, and the ranks of each value, as texts."""
    named = []
    for name, holders in list(unequal.items())[:NAMED_MAX]:
        more = f" and {len(holders) - _PROPERTIES_MAX} values more" if len(holders) > _PROPERTIES_MAX else ""
        named.append(f"{name}: one value on {', another on '.join(holders[:_PROPERTIES_MAX])}{more}")
    return InvalidArgumentError(
        "Ranks hold different values of tensors, of which a checkpoint holds one; nothing was uploaded. If the values "
        "should be equal, synchronize the ranks before the save. Buffers may differ: put the module itself into the "
        "state, not its state_dict().",
        differing="; ".join(named),
        names=len(unequal),
    ).advise(
        PerRank="PerRank(optimizer) in the state saves the parts of all ranks, where each keeps its own",
        replicas=_LOWEST_RANKS,
    )


def require_equal_options(differing: Iterable[ObjectDifference]) -> None:
    """Refuse options of optimizers' groups that ranks hold different values of: all would restore the lowest rank's."""
    found = [difference for difference in differing if _GROUP_OPTION.search(difference.name)]
    if found:
        raise InvalidArgumentError(
            "Groups of parameters have other options on other ranks, of which a checkpoint holds one rank's; nothing "
            "was uploaded. Give the optimizers of all ranks the same groups in the same order, as in all stages of a "
            "pipeline, where a group may be empty.",
            differing=_list_first(
                [f"{one.name} ({one.values} values on {one.ranks} ranks)" for one in found], NAMED_MAX
            ),
        ).advise(replicas=_LOWEST_RANKS)


def describe_buffer_differences(names: Collection[str]) -> str:
    """Return the line of the log on buffers that differ between ranks."""
    return (
        f"Ranks hold different values of {format_count(len(names), 'buffer')}, as of BatchNorm under DDP; each save "
        f"holds those of the lowest rank: {_list_first(names, NAMED_MAX)}"
    )


def describe_object_differences(found: Collection[ObjectDifference]) -> str:
    """Return the text of the warning."""
    return (
        f"Ranks hold different values of {format_count(len(found), 'object')}, and each save holds that of the lowest "
        f"rank: {_list_first(found, NAMED_MAX)}. PerRank(...) in the state saves every rank's. A "
        "job says this once of each name."
    )


def _list_holders(holders: Holders) -> str:
    return _list_first([f"{text} on {_list_ranks(ranks)}" for text, ranks in holders.items()], _PROPERTIES_MAX)


def _list_first(values: Collection[object], count: int) -> str:
    more = f", and {len(values) - count} more" if len(values) > count else ""
    return ", ".join(map(str, list(values)[:count])) + more


def _list_ranks(ranks: Collection[int]) -> str:
    ranks = sorted(ranks)
    listed = ", ".join(map(str, ranks[:_RANKS_MAX]))
    if len(ranks) > _RANKS_MAX:
        return f"{len(ranks)} ranks ({listed}, …)"
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
