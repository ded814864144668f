"""Differences between ranks in the values that they save under one name, of which a checkpoint holds one.

Tensors of different shapes or dtypes are refused before anything is uploaded. Objects with different values are named
in a warning, because a time or a host name in the state does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dcp_remote.common.text import format_count
from dcp_remote.errors import InvalidArgumentError

# Bounds of a message: names, properties of one name, ranks of one property. Other ranks get the error as well.
NAMED_MAX = 10
_PROPERTIES_MAX = 3
_RANKS_MAX = 4

# Name, dtype and global shape of each tensor of a rank.
Described: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]

# Ranks by what they hold under a name, such as "float32 (3,)".
Holders: TypeAlias = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """Object of which ranks hold different values.

    Attributes:
        name: Name of the object.
        values: Number of different values.
        ranks: Number of ranks that hold the object.
        writer: Rank whose value is saved.
    """

    name: str
    values: int
    ranks: int
    writer: int

    def __str__(self) -> str:
        return f"{self.name} ({self.values} values on {self.ranks} ranks; rank {self.writer}'s is saved)"


def require_equal_tensors(
    described: Sequence[Described | None], planned_names: Callable[[], Iterable[str]] | None = None
) -> None:
    """Refuse tensors that ranks describe differently; coordinator only.

    Costs a comparison per rank, and microseconds for each tensor of each different description.

    Args:
        described: Descriptions of all ranks, in their order; None for a rank that sent none.
        planned_names: Function that returns the names that are written: a user's planner may rename entries. None if
            the names are those of the descriptions.

    Raises:
        InvalidArgumentError: Ranks give a tensor different shapes or dtypes; names all such tensors.
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


def describe_tensor(dtype: str, shape: Sequence[int]) -> str:
    """Return a text on a tensor for `Holders`."""
    return f"{dtype} {tuple(shape)}"


def make_difference_error(differing: Mapping[str, Holders], *, names: int) -> InvalidArgumentError:
    """Return the error that says what ranks hold under names of which only one value can be saved.

    Args:
        differing: Ranks by what they hold, for `NAMED_MAX` names at least.
        names: Number of all such names.
    """
    named = [f"{name}: {_list_holders(holders)}" for name, holders in list(differing.items())[:NAMED_MAX]]
    return InvalidArgumentError(
        "Ranks save different things under one name, of which a checkpoint holds one; nothing was uploaded. Make "
        "shapes and dtypes equal, or save every rank's value: by PerRank(...) in the state of a CheckpointManager, or "
        "under a name for each rank.",
        differing="; ".join(named),
        names=names,
    )


def describe_object_differences(found: Collection[ObjectDifference]) -> str:
    """Return the text of the warning."""
    more = f", and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    return (
        f"Ranks hold different values of {format_count(len(found), 'object')}, and one rank's value is saved: "
        f"{', '.join(map(str, list(found)[:NAMED_MAX]))}{more}. PerRank(...) in the state saves every rank's."
    )


def _list_holders(holders: Holders) -> str:
    texts = [f"{text} on {_list_ranks(ranks)}" for text, ranks in list(holders.items())[:_PROPERTIES_MAX]]
    more = f", and {len(holders) - _PROPERTIES_MAX} more" if len(holders) > _PROPERTIES_MAX else ""
    return ", ".join(texts) + more


def _list_ranks(ranks: Collection[int]) -> str:
    ranks = sorted(ranks)
    listed = ", ".join(map(str, ranks[:_RANKS_MAX]))
    if len(ranks) > _RANKS_MAX:
        return f"{len(ranks)} ranks ({listed}, …)"
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
