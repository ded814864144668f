"""Values that differ between ranks, in a state dict that torch plans for all of them.

torch takes what stands under one key on several ranks for one value, and keeps one of them: random states and data
loaders are lost so (torch issue 146566). Here each rank's value gets a name of its own, `per_rank.<rank>.<key>`: an
ordinary object, a tuple of one, which any reader can load; `load` gives the value without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

from torch.distributed.checkpoint.stateful import Stateful

from dcp_remote.errors import InvalidArgumentError

T = TypeVar("T")

# The top-level key below which they are saved.
PER_RANK_KEY = "per_rank"


class PerRank(Generic[T]):
    """A value of this rank alone, at the top level of the state that is given to a `CheckpointManager`.

        state = {"model": …, "optim": …, "random": PerRank(RandomStates()), "loader": PerRank(loader)}

    Each rank saves its own, and `restore` gives each its own back: a `Stateful` is asked by `state_dict` and told by
    `load_state_dict`; of anything else `value` is replaced. It is stored as any object is: without code to load.

    Attributes:
        value: The value.
    """

    def __init__(self, value: T) -> None:
        """See the class."""
        self.value = value

    def __repr__(self) -> str:
        """With the value."""
        return f"PerRank({self.value!r})"


def saved_state(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """What is to be saved of a state, its `Stateful`s asked; by this rank.

    Raises:
        InvalidArgumentError: The state is no mapping, or a key is no string, or the one that per-rank values are saved
            under.
    """
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(
            "The state must be a dict of tensors, objects and Stateful objects: {'model': model, …}.",
            type=type(state).__name__,
        )
    if not all(isinstance(key, str) for key in state):
        raise InvalidArgumentError("The keys of the state are strings.", keys=", ".join(map(repr, list(state)[:5])))
    if PER_RANK_KEY in state:
        raise InvalidArgumentError(
            "The top-level key 'per_rank' is where values of single ranks are saved: wrap them in PerRank(...), under "
            "keys of their own."
        )
    # Sorted, as torch does it: a `state_dict` may be a collective, and ranks may have put their keys in in any order.
    asked = {key: _asked(state[key]) for key in sorted(state)}
    # In a tuple, which torch's planner does not take apart: whoever restores may have a value of another form.
    own = {key: (value,) for key, value in asked.items() if isinstance(state[key], PerRank)}
    shared = {key: value for key, value in asked.items() if key not in own}
    return shared | {PER_RANK_KEY: {str(rank): own}} if own else shared


def template_of(state: Mapping[str, Any], rank: int, saved: Collection[tuple[str | int, ...]]) -> dict[str, Any]:
    """What `saved_state` gives, without this rank's values that were not saved: those stay as they are.

    Args:
        state: To be restored.
        rank: This one.
        saved: The paths of what was saved.
    """
    template = saved_state(state, rank)
    own = template.pop(PER_RANK_KEY, {str(rank): {}})[str(rank)]
    there = {key: value for key, value in own.items() if (PER_RANK_KEY, str(rank), key) in saved}
    return template | {PER_RANK_KEY: {str(rank): there}} if there else template


def unwrapped(path: tuple[str | int, ...], value: Any) -> Any:
    """Return what was loaded from a path of a run, as the user saved it: a value of one rank without its tuple."""
    is_own = len(path) == 3 and path[0] == PER_RANK_KEY and isinstance(value, tuple) and len(value) == 1  # noqa: PLR2004
    return value[0] if is_own else value


def put_back(state: MutableMapping[str, Any], loaded: Mapping[str, Any], rank: int) -> None:
    """Put a template that was loaded into where it belongs."""
    own = loaded.get(PER_RANK_KEY, {}).get(str(rank), {})
    for key in sorted(state):
        element = state[key]
        if isinstance(element, PerRank):
            if key not in own:
                continue
            (value,) = own[key]
            if isinstance(element.value, Stateful):
                element.value.load_state_dict(value)
            else:
                element.value = value
        elif isinstance(element, Stateful):
            element.load_state_dict(loaded[key])
        else:
            state[key] = loaded[key]


def _asked(element: object) -> object:
    value = element.value if isinstance(element, PerRank) else element
    return value.state_dict() if isinstance(value, Stateful) else value
