"""State dicts: values that differ between ranks (`PerRank`), and keys that are not strings.

torch plans one state dict for all ranks and flattens it by `str(key)`, so both kinds are converted before torch plans
and converted back after a load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from torch.distributed.checkpoint.stateful import Stateful

from dcp_remote.errors import InvalidArgumentError

T = TypeVar("T")

# Top-level key below which values of single ranks are saved.
PER_RANK_KEY = "per_rank"


class PerRank(Generic[T]):
    """Value of this rank alone, at the top level of the state that is given to a `CheckpointManager`.

        state = {"model": …, "optim": …, "random": PerRank(RandomStates()), "loader": PerRank(loader)}

    Each rank saves its own value, and `restore` gives that value back to the same rank: through `state_dict` and
    `load_state_dict` if the value is a `Stateful`, otherwise by replacing `value`. As every object, it is stored in a
    form that needs no code to load.

    Attributes:
        value: Value of this rank.
    """

    def __init__(self, value: T) -> None:
        """Wrap a value."""
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def build_saved_state(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the state dict that this rank saves: `state_dict()` of each `Stateful`, per-rank values below one key.

    Raises:
        InvalidArgumentError: The state is not a mapping, a key is not a string, or a key is "per_rank".
    """
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(
            "The state must be a dict of tensors, objects and Stateful objects: {'model': model, …}.",
            type=type(state).__name__,
        )
    if not all(isinstance(key, str) for key in state):
        raise InvalidArgumentError(
            "Top-level keys of the state must be strings.", keys=", ".join(map(repr, list(state)[:5]))
        )
    if PER_RANK_KEY in state:
        raise InvalidArgumentError(
            "The top-level key 'per_rank' is reserved for values of single ranks: wrap such values in PerRank(...) and "
            "put them under other top-level keys."
        )
    # Sorted, as in torch: `state_dict()` may be a collective operation, and the order of keys may differ between ranks.
    values = {key: _to_value(state[key]) for key in sorted(state)}
    # In a tuple, which torch's planner does not flatten: a later job's template may hold a value of another structure.
    own = {key: (value,) for key, value in values.items() if isinstance(state[key], PerRank)}
    shared = {key: value for key, value in values.items() if key not in own}
    return shared | {PER_RANK_KEY: {str(rank): own}} if own else shared


def make_template(state: Mapping[str, Any], rank: int, saved: Collection[tuple[str | int, ...]]) -> dict[str, Any]:
    """Return the template for a restore: `build_saved_state`, without per-rank values that the checkpoint lacks.

    Args:
        state: State to restore; values that are left out of the template stay as they are.
        rank: This rank.
        saved: Paths of all saved values.
    """
    template = build_saved_state(state, rank)
    own = template.pop(PER_RANK_KEY, {str(rank): {}})[str(rank)]
    restorable = {key: value for key, value in own.items() if (PER_RANK_KEY, str(rank), key) in saved}
    return template | {PER_RANK_KEY: {str(rank): restorable}} if restorable else template


def unwrap_per_rank(path: tuple[str | int, ...], value: Any) -> Any:
    """Return a loaded value as the user saved it: a per-rank value without the tuple that `build_saved_state` adds."""
    is_own = len(path) == 3 and path[0] == PER_RANK_KEY and isinstance(value, tuple) and len(value) == 1  # noqa: PLR2004  # per_rank, rank, key
    return value[0] if is_own else value


def apply_loaded(
    state: MutableMapping[str, Any], loaded: Mapping[str, Any], rank: int, *, untouched: Collection[str] = ()
) -> None:
    """Put the values of a loaded template into the user's state, by `load_state_dict` where a value is `Stateful`.

    Args:
        state: State of the user.
        loaded: Template that was loaded.
        rank: This rank.
        untouched: Keys of the state that stay as they are.
    """
    own = loaded.get(PER_RANK_KEY, {}).get(str(rank), {})
    for key in sorted(key for key in state if key not in untouched):
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


def _to_value(element: object) -> object:
    value = element.value if isinstance(element, PerRank) else element
    return value.state_dict() if isinstance(value, Stateful) else value


def require_distinct(state: Mapping[Any, object]) -> None:
    """Refuse a state in which torch would give two values the same name.

    Raises:
        InvalidArgumentError: Two keys of a mapping are equal as text; the error names them.
    """
    for path, mapping in _iterate_mappings(state):
        if len({str(key) for key in mapping}) < len(mapping):
            texts = [str(key) for key in mapping]
            repeated = sorted(key for key in set(texts) if texts.count(key) > 1)
            raise InvalidArgumentError(
                "Keys of the state are equal as text, and torch would give their values the same name. Rename one.",
                where=".".join(map(str, path)),
                keys=", ".join(repeated[:5]),
            )


class TextKeys:
    """Copy of a template in which all keys are text, for torch to load into.

    Only containers are copied, not tensors; nothing is copied if all keys are strings.

    Args:
        template: Nested mappings and lists.

    Attributes:
        template: Template to load into, in place of the argument.
    """

    def __init__(self, template: dict[str, Any]) -> None:
        """Copy the containers, if any key is not a string."""
        self.template = template
        self._originals: dict[int, Any] = {}  # by `id` of the copy
        self._copies: dict[int, Any] = {}  # by `id` of the original
        self._done: dict[int, Any] = {}  # by `id` of the copy: the container that was put back for it
        if any(not isinstance(key, str) for _, mapping in _iterate_mappings(template) for key in mapping):
            self.template = self._copy(template)

    def apply_loaded(self) -> None:
        """Move what was loaded from the copies into the original containers, under the original keys."""
        if self._copies:
            self._restore(self.template, self._originals[id(self.template)])

    def _copy(self, value: Any) -> Any:
        """Return the copy of a container, made once however often it occurs; or any other value itself."""
        if not isinstance(value, Mapping | list):
            return value
        if id(value) not in self._copies:
            copy: Any = [] if isinstance(value, list) else {}
            self._copies[id(value)], self._originals[id(copy)] = copy, value
            if isinstance(value, list):
                copy.extend(self._copy(inner) for inner in value)
            else:
                copy.update((str(key), self._copy(inner)) for key, inner in value.items())
        return self._copies[id(value)]

    def _restore(self, loaded: Any, current: Any) -> Any:
        """Return what belongs in the place of `current`: the original if `loaded` is its copy, else `loaded` itself."""
        original = self._originals.pop(id(loaded), None)  # popped, so that it is filled once
        if original is None and id(loaded) in self._done:
            return self._done[id(loaded)]
        if isinstance(loaded, list):
            current_items = current if isinstance(current, list) else []
            values = [self._restore(*pair) for pair in zip_longest(loaded, current_items[: len(loaded)])]
            target = loaded if original is None else original
            target[:] = values
        elif isinstance(loaded, Mapping) and isinstance(current, Mapping):
            keys = {str(key): key for key in current}
            restored: dict[Any, Any] = {}
            for text, value in loaded.items():
                key = keys.get(text, text)
                restored[key] = self._restore(value, current.get(key))
            target = restored
            if original is not None:
                target = original
                for key, value in restored.items():
                    if key not in target or target[key] is not value:
                        target[key] = value
        else:
            return loaded
        self._done[id(loaded)] = target
        return target


def empty_places(state: Mapping[Any, object]) -> list[tuple[str | int, ...]]:
    """Return the paths of empty mappings, as torch's planner writes paths; the planner has no entry for them."""
    return [path for path, mapping in _iterate_mappings(state) if path and not mapping]


def _iterate_mappings(state: Mapping[Any, object]) -> Iterator[tuple[tuple[str | int, ...], Mapping[Any, Any]]]:
    """Yield all mappings that torch reaches through mappings and lists, with their paths; outer ones first."""
    stack: list[tuple[tuple[str | int, ...], object]] = [((), state)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, Mapping):
            yield path, value
            stack.extend(((*path, str(key)), inner) for key, inner in value.items())
        elif isinstance(value, list):
            stack.extend(((*path, number), inner) for number, inner in enumerate(value))
