"""State dicts: modules, optimizers and `Stateful`s, values that differ between ranks (`PerRank`), keys of other types.

torch plans one state dict for all ranks and flattens it by `str(key)`, so all these are converted before torch plans
and converted back after a load.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from types import NoneType
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_remote.errors import DcpRemoteError, InvalidArgumentError
from dcp_remote.serialization.files import Files, holds_imitation, iterate_tuples, unwrap_marked
from dcp_remote.serialization.module_state import (
    MadeStates,
    ModelState,
    OptimizerState,
    all_names_of,
    find_models,
    keep_nothing,
    names_parameters_itself,
)
from dcp_remote.serialization.opaque import (
    OPAQUE_MARK,
    UNREAD,
    UNREAD_FILES,
    Opaque,
    imitation_error,
    is_imitation,
    is_reserved,
    is_stateful,
    is_unread,
)
from dcp_remote.serialization.optimizer_load import load_exactly
from dcp_remote.serialization.tensors import is_plain

T = TypeVar("T")
_State = TypeVar("_State", bound=Mapping[str, Any])
_Path: TypeAlias = tuple[str | int, ...]

# Top-level key below which values of single ranks are saved.
PER_RANK_KEY = "per_rank"

# Names by which modules of torch count in a forward pass: on each rank other values, as under DDP.
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})

# Name by which torch saves the extra state of a module.
_EXTRA_STATE = "_extra_state"

# Types that are no `Stateful`s, which takes microseconds to find out of others.
_LEAVES = frozenset({NoneType, bool, int, float, complex, str, bytes})
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list})

# Depth of containers in a state. A copy needs three calls for each, of the thousand that Python allows.
_DEPTH_MAX = 200


@dataclass(frozen=True, slots=True)
class TensorRoles:
    """Names of tensors whose role is known from the modules and optimizers of a state; `build_saved_state` adds to it.

    Attributes:
        trained: Names of parameters of modules, and of states of optimizers.
        buffers: Names of buffers and extra states of modules.
    """

    trained: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)

    def note_model(self, path: _Path, model: nn.Module, values: Mapping[str, Any]) -> None:
        """Note the values of a module; of one that a hook renamed, nothing is known."""
        parameters = all_names_of(model, model.named_parameters(remove_duplicate=False))
        buffers = all_names_of(model, model.named_buffers(remove_duplicate=False))
        for name in values:
            if name in parameters:
                self.trained.add(_text((*path, name)))
            elif name in buffers or name.endswith(_EXTRA_STATE):
                self.buffers.add(_text((*path, name)))

    def note_optimizer(self, path: _Path, values: Mapping[str, Any]) -> None:
        """Note the states of an optimizer."""
        for name, state in values["state"].items():
            keys = state if isinstance(state, Mapping) else ()
            self.trained.update(_text((*path, "state", name, key)) for key in keys)

    def is_buffer(self, name: str) -> bool:
        """Return whether ranks may hold different values: of a module's buffer, or of statistics as of BatchNorm."""
        return name in self.buffers or (name not in self.trained and name.rpartition(".")[2] in _STATISTICS)


class PerRank(Generic[T]):
    """Value of this rank alone, at the top level of the state that is given to a `CheckpointManager`.

        state = {"model": …, "optim": …, "random": PerRank(RandomStates()), "loader": PerRank(loader)}

    Each rank saves its own value, and `restore` gives that value back to the same rank: through `state_dict` and
    `load_state_dict` if the value is a `Stateful`, otherwise by replacing `value`, in which tensors of the same shape
    and dtype, also in dicts and lists, stay the same objects and are filled. As every object, it is stored in a form
    that needs no code to load. A restore warns of ranks that the checkpoint has no value of, and of values that no rank
    gets, unless the value is of a subclass.

    Attributes:
        value: Value of this rank.
    """

    def __init__(self, value: T) -> None:
        """Wrap a value."""
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def as_state(state: _State | nn.Module) -> _State | dict[str, Any]:
    """Return `{"model": module}` for a bare module, and any other state itself."""
    return {"model": state} if isinstance(state, nn.Module) else state


def build_saved_state(state: Mapping[str, Any], rank: int, roles: TensorRoles | None = None) -> dict[str, Any]:
    """Return the state dict that this rank saves: `state_dict()` of each `Stateful`, per-rank values below one key.

    Bare modules and optimizers count as `ModelState` and `OptimizerState`. `Stateful`s may be at any depth.

    Args:
        state: State of the user.
        rank: This rank.
        roles: Record of what tensors are; None if nobody asks for it.

    Raises:
        InvalidArgumentError: The state is not a mapping, a key is not a string or is "per_rank", a `PerRank` is not at
            the top level, an optimizer has parameters of no module of the state, or a tuple (also of a `state_dict()`)
            looks like an entry of `Opaque` or `Files`.
    """
    _require_state(state)
    reader = _StateReader(state, roles=roles)
    # Sorted, as in torch: `state_dict()` may be a collective operation, and the order of keys may differ between ranks.
    values = {key: reader.read(state[key], (key,)) for key in sorted(state)}
    if reader.reserved:
        raise imitation_error(reader.reserved)
    # In a tuple, which torch's planner does not flatten: a later job's template may hold a value of another structure.
    own = {key: (value,) for key, value in values.items() if isinstance(state[key], PerRank)}
    shared = {key: value for key, value in values.items() if key not in own}
    return shared | {PER_RANK_KEY: {str(rank): own}} if own else shared


def make_template(
    state: Mapping[str, Any],
    rank: int,
    saved: Collection[tuple[str | int, ...]],
    *,
    keep: Callable[[Collection[str]], Collection[str]] = keep_nothing,
    made: MadeStates | None = None,
) -> dict[str, Any]:
    """Return the template for a restore: `build_saved_state`, without per-rank values that the checkpoint lacks.

    No state is asked of values that are read whole: a data loader would start its workers for it. Optimizers make the
    states that are loaded.

    Args:
        state: State to restore; values that are left out of the template stay as they are.
        rank: This rank.
        saved: Paths of all saved values.
        keep: Function that returns those of some names whose values in the state stay as they are.
        made: Record of the states that optimizers make.

    Raises:
        InvalidArgumentError: See `build_saved_state`; or a module is on the meta device, or an optimizer cannot make
            its state before its first step.
    """
    _require_state(state)
    if not isinstance(state, MutableMapping):
        raise InvalidArgumentError(
            "The state of a restore must be a dict that can be changed, as dict(state): loaded values are put into it.",
            type=type(state).__name__,
        )
    reader = _StateReader(state, saved=saved, keep=keep, made=made)
    own = [key for key in state if isinstance(state[key], PerRank)]
    template = {key: reader.read(state[key], (key,)) for key in sorted(state) if key not in own}
    restorable = {key: _unread(state[key].value) for key in sorted(own) if (PER_RANK_KEY, str(rank), key) in saved}
    return template | {PER_RANK_KEY: {str(rank): restorable}} if restorable else template


def unwrap_per_rank(path: tuple[str | int, ...], value: Any) -> Any:
    """Return a loaded value as the user saved it: a per-rank value without the tuple that `build_saved_state` adds."""
    is_own = _is_per_rank(path) and isinstance(value, tuple) and len(value) == 1
    return unwrap_marked(value[0]) if is_own else value


def convert_per_rank(saved: _Path, loaded: _Path, value: Any) -> Any:
    """Return a value of the path `saved` in the form in which a template has it at the path `loaded`.

    The paths differ where an entry was renamed: a value of one rank is stored in a tuple, and a shared value is not.
    """
    if _is_per_rank(saved) == _is_per_rank(loaded):
        return value
    if _is_per_rank(saved):
        return unwrap_per_rank(saved, value)
    # A value that is unwrapped already may hold tuples with a mark, which would be unwrapped with it once more.
    return ((OPAQUE_MARK, value) if holds_imitation(value) else value,)


def _is_per_rank(path: _Path) -> bool:
    return len(path) == 3 and path[0] == PER_RANK_KEY  # noqa: PLR2004  # per_rank, rank, key


def fit_groups(
    state: Mapping[str, Any],
    loaded: Mapping[str, Any],
    loads: Callable[[str], bool],
    renamed: Mapping[str, Mapping[str, str | None]],
) -> None:
    """Remove options of optimizers' groups that were not loaded from a template, and rename the groups' parameters.

    Args:
        state: State of the user.
        loaded: Template that was loaded.
        loads: Function that returns whether the value of a name in the state was loaded.
        renamed: New names of parameters by their old ones, by the beginning of the names of the optimizer's states.
    """
    for path, optimizer, values in _StateReader(state).iterate_optimizers(state, loaded, ()):
        prefix = f"{_text(path)}."
        states = f"{prefix}state."
        for model, names in (
            (start.removeprefix(states), renamed[start]) for start in renamed if start.startswith(states)
        ):
            optimizer.rename_groups(
                values,
                {model + old: model + new for old, new in names.items() if new is not None},
                lambda name, prefix=prefix: loads(prefix + name),  # type: ignore[misc]  # mypy infers no default
            )
        optimizer.drop_kept_options(values, lambda name, prefix=prefix: loads(prefix + name))  # type: ignore[misc]  # mypy infers no default


def apply_loaded(
    state: MutableMapping[str, Any], loaded: Mapping[str, Any], rank: int, *, untouched: Collection[str] = ()
) -> None:
    """Put the values of a loaded template into the user's state, by `load_state_dict` where a value is `Stateful`.

    Args:
        state: State of the user.
        loaded: Template that was loaded.
        rank: This rank.
        untouched: Top-level keys whose values stay as they are; the same on all ranks, since `load_state_dict` may be a
            collective operation of torch.
    """
    own = loaded.get(PER_RANK_KEY, {}).get(str(rank), {})
    reader = _StateReader(state)
    for key in sorted(set(state).difference(untouched)):
        element = state[key]
        if not isinstance(element, PerRank):
            state[key] = reader.apply(element, loaded[key], (key,))
        elif key in own and not is_unread(own[key]):
            value: Any = unwrap_marked(own[key][0])
            if isinstance(element.value, Optimizer):
                load_exactly(element.value, value, where=key)
            elif is_stateful(element.value):
                element.value.load_state_dict(value)
            else:
                element.value = _fill(element.value, value)


def _fill(held: object, loaded: Any) -> Any:
    """Return a loaded value, in which tensors of the held one take the place of equally formed loaded ones."""
    if isinstance(held, torch.Tensor) and isinstance(loaded, torch.Tensor):
        is_alike = is_plain(held) and is_plain(loaded) and (held.shape, held.dtype) == (loaded.shape, loaded.dtype)
        # What torch refuses to write to: elements of an expanded tensor, and tensors of `torch.inference_mode`.
        if is_alike and not held.is_meta and 0 not in held.stride() and not held.is_inference():
            with torch.no_grad():
                held.copy_(loaded)
            return held
    elif isinstance(held, dict) and isinstance(loaded, dict):
        loaded.update({key: _fill(held[key], loaded[key]) for key in loaded.keys() & held.keys()})
    elif isinstance(held, list) and isinstance(loaded, list):
        loaded[: len(held)] = map(_fill, held, loaded)
    return loaded


def _require_state(state: object) -> None:
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(
            "The state must be a dict of tensors, objects, modules, optimizers and Stateful objects, or a module: "
            "{'model': model, 'optim': optimizer, …}, or training_state(model=model, optimizer=optimizer, …).",
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


def _require_shape(value: object, path: _Path) -> None:
    # A ShardedTensor refuses to be asked, as a tensor without an implementation of `is_nested`.
    if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor) and value.is_nested:
        raise InvalidArgumentError(
            "A nested tensor has no shape that could be saved. Save its parts: list(tensor.unbind()).",
            tensor=_text(path),
        )
    if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
        raise InvalidArgumentError(
            "A DTensor with a Partial placement has no values before they are reduced: no rank holds any of them. Put "
            "tensor.redistribute(placements=[Replicate()]) into the state.",
            tensor=_text(path),
            placements=value.placements,
        )


def _nesting_error(path: _Path) -> DcpRemoteError:
    return InvalidArgumentError(
        "A dict or list of the state contains itself, or is nested too deeply. Put a value that contains itself into "
        "Opaque(...); make a deep one flat, or leave it out.",
        key=path[0],
    )


class _StateReader:
    """Reader of the values of one state, at any depth of its dicts and lists.

    Args:
        state: State.
        saved: Paths of a checkpoint's values, to make a template; None to save.
        keep: Function that returns those of some names whose values in the state stay as they are.
        made: Record of the states that optimizers make for a template.
        roles: Record of what the tensors of modules and optimizers are, to save; None if nobody asks for it.

    Attributes:
        reserved: Names of the values that a load would take for entries of `Opaque` or `Files`.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        saved: Collection[tuple[str | int, ...]] | None = None,
        keep: Callable[[Collection[str]], Collection[str]] = keep_nothing,
        made: MadeStates | None = None,
        roles: TensorRoles | None = None,
    ) -> None:
        """Keep the state; nothing is read."""
        self._state, self._saved, self._keep, self._made, self._roles = state, saved, keep, made, roles
        self.reserved: list[str] = []

    def read(self, value: Any, path: _Path) -> Any:
        """Return what is saved of a value, or loaded into; a container without `Stateful`s is returned itself."""
        try:
            return self._read(value, path)
        except RecursionError as error:
            raise _nesting_error(path) from error

    def _read(self, value: Any, path: _Path) -> Any:
        if type(value) in _LEAVES or isinstance(value, torch.Tensor):
            _require_shape(value, path)
            return value
        if isinstance(value, PerRank):
            if len(path) > 1:
                raise InvalidArgumentError("A PerRank must be at the top level of the state.", where=_text(path))
            if is_stateful(value.value):
                return self._without_imitations(value.value.state_dict(), path)
            if any(is_reserved(inner) for _, _, inner in iterate_tuples([value.value])):
                self.reserved.append(_text(path))
            return value.value
        stateful = self._stateful(value, path)
        if stateful is not None:
            return self._values_of(stateful, path)
        if isinstance(value, dict):
            read = {key: self._read(inner, (*path, str(key))) for key, inner in value.items()}
            return read if any(read[key] is not inner for key, inner in value.items()) else value
        if isinstance(value, list):
            items = [self._read(inner, (*path, number)) for number, inner in enumerate(value)]
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        if is_reserved(value):
            self.reserved.append(_text(path))
        return value

    def apply(self, value: Any, loaded: Any, path: _Path) -> Any:
        """Return what belongs in the place of a value after a load."""
        if type(value) in _LEAVES or isinstance(value, torch.Tensor):
            return loaded
        stateful = self._stateful(value, path)
        if isinstance(stateful, OptimizerState):
            stateful.load_saved(loaded)
        elif isinstance(stateful, Optimizer):  # a container that names its parameters itself
            load_exactly(stateful, loaded, where=_text(path))
        elif stateful is not None:
            if not is_unread(loaded):
                stateful.load_state_dict(loaded)
        elif not holds_stateful(value):
            return loaded
        elif isinstance(value, dict) and isinstance(loaded, Mapping):
            for key in value:
                if key in loaded:
                    value[key] = self.apply(value[key], loaded[key], (*path, str(key)))
        elif isinstance(value, list) and isinstance(loaded, list):
            value[:] = [
                self.apply(value[number], inner, (*path, number)) if number < len(value) else inner
                for number, inner in enumerate(loaded)
            ]
        else:
            return loaded
        return value

    def iterate_stateful(self, value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
        """Yield the `Stateful`s that values below a path are, or stand for, with their paths."""
        if type(value) in _LEAVES or isinstance(value, torch.Tensor | PerRank):
            return
        stateful = self._stateful(value, path)
        if stateful is not None:
            yield path, stateful
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                yield from self.iterate_stateful(inner, (*path, str(key)))
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                yield from self.iterate_stateful(inner, (*path, number))

    def iterate_optimizers(self, value: Any, loaded: Any, path: _Path) -> Iterator[tuple[_Path, OptimizerState, Any]]:
        """Yield the optimizers below a value, with their paths and the values that were loaded."""
        if type(value) in _LEAVES or isinstance(value, torch.Tensor | PerRank):
            return
        stateful = self._stateful(value, path)
        if isinstance(stateful, OptimizerState):
            yield path, stateful, loaded
        elif stateful is None and isinstance(value, dict) and isinstance(loaded, Mapping):
            for key in value:
                if key in loaded:
                    yield from self.iterate_optimizers(value[key], loaded[key], (*path, str(key)))
        elif stateful is None and isinstance(value, list) and isinstance(loaded, list):
            for number, (inner, read) in enumerate(zip(value, loaded, strict=False)):
                yield from self.iterate_optimizers(inner, read, (*path, number))

    def _stateful(self, value: Any, path: _Path) -> Any:
        """Return the `Stateful` that a value is, or stands for; None for any other value."""
        if type(value) in _CONTAINERS:
            return None
        if isinstance(value, nn.Module):
            return ModelState(value)
        if isinstance(value, Optimizer) and not names_parameters_itself(value):
            return OptimizerState(find_models([value], self._models, where=_text(path)), value)
        return value if is_stateful(value) else None

    def _values_of(self, stateful: Any, path: _Path) -> Any:
        if self._saved is None:
            is_optimizer = isinstance(stateful, OptimizerState)
            values = stateful.saved_values() if is_optimizer else stateful.state_dict()
            if self._roles is not None and is_optimizer:
                self._roles.note_optimizer(path, values)
            elif self._roles is not None and isinstance(stateful, ModelState):
                self._roles.note_model(path, stateful.model, values)
            return self._without_imitations(values, path)
        if isinstance(stateful, (Opaque, Files)):
            return _unread(stateful)
        if isinstance(stateful, ModelState):
            return stateful.template(where=_text(path))
        make_template: Any = getattr(stateful, "make_template", None)
        if not isinstance(stateful, OptimizerState) and not callable(make_template):
            return stateful.state_dict()
        prefix = f"{_text(path)}."
        names = [name.removeprefix(prefix) for name in self._saved_names if name.startswith(prefix)]

        def keep(below: Collection[str]) -> list[str]:
            return [name.removeprefix(prefix) for name in self._keep([prefix + name for name in below])]

        if isinstance(stateful, OptimizerState):
            others = [name for name in self._saved_names if not name.startswith(prefix)]
            return stateful.template(names, keep, others=others, made=self._made)
        kept = set(keep(names))
        return make_template([name for name in names if name not in kept])

    def _without_imitations(self, values: Any, path: _Path) -> Any:
        """Return the values of a `state_dict()`, and note the names of imitations of entries with a mark."""
        self.reserved += map(_text, _find_imitations(values, path))
        return values

    @cached_property
    def _models(self) -> dict[str, nn.Module]:
        """Modules of the state by the last part of their path, or by the whole path if two have the same last part."""
        found = dict(_iterate_models(self._state, ()))
        last = Counter(str(path[-1]) for path in found)
        return {
            str(path[-1]) if last[str(path[-1])] == 1 else "_".join(map(str, path)): found[path]
            for path in sorted(found, key=_text)
        }

    @cached_property
    def _saved_names(self) -> list[str]:
        return [_text(path) for path in self._saved or ()]


def _find_imitations(value: Any, path: _Path) -> list[_Path]:
    """Return the paths of imitations of entries with a mark below mappings and lists; 0.1 µs for each tensor."""
    if isinstance(value, Mapping):
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    else:
        return [path] if is_imitation(value) else []
    found: list[_Path] = []
    for key, inner in pairs:
        if type(inner) not in _LEAVES and not isinstance(inner, torch.Tensor):
            found += _find_imitations(inner, (*path, str(key)))
    return found


def iterate_stateful(state: Mapping[str, Any]) -> Iterator[tuple[_Path, Any]]:
    """Yield the `Stateful`s of a state with their paths, without `PerRank` values; modules as `ModelState`.

    Raises:
        InvalidArgumentError: An optimizer has parameters of no module of the state.
    """
    return _StateReader(state).iterate_stateful(state, ())


def _iterate_models(value: Any, path: _Path) -> Iterator[tuple[_Path, nn.Module]]:
    """Yield the modules of a state with their paths."""
    if isinstance(value, (nn.Module, ModelState)):
        yield path, value if isinstance(value, nn.Module) else value.model
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _iterate_models(inner, (*path, str(key)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _iterate_models(inner, (*path, number))


def _unread(value: object) -> tuple[str, str | None]:
    """Return what stands in a template for a value that is read whole."""
    return UNREAD_FILES if isinstance(value, Files) else UNREAD


def holds_stateful(value: Any) -> bool:
    """Return whether a dict or list holds a `Stateful` at any depth, and so was copied by `_StateReader.read`."""
    if type(value) in _LEAVES or isinstance(value, torch.Tensor):
        return False
    if type(value) not in _CONTAINERS and is_stateful(value):
        return True
    if isinstance(value, dict | list):
        return any(map(holds_stateful, value.values() if isinstance(value, dict) else value))
    return False


def _text(path: _Path) -> str:
    """Return the name that torch's planner gives to a path."""
    return ".".join(map(str, path))


def require_distinct(state: Mapping[Any, object]) -> None:
    """Refuse a state in which torch would give two values the same name.

    Raises:
        InvalidArgumentError: Two keys of a mapping are equal as text, or two paths once their parts are joined by dots;
            the error names them.
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
        _require_distinct_paths(path, mapping)


def _require_distinct_paths(path: _Path, mapping: Mapping[Any, object]) -> None:
    """Refuse two values of which one is below a key with a dot, as "a.b", and one below "a" beside that key."""
    dotted = {str(key): value for key, value in mapping.items() if "." in str(key)}
    if not dotted:
        return
    texts = {str(key): value for key, value in mapping.items()}
    containers = {key for key, value in texts.items() if isinstance(value, (Mapping, list))}
    for text, value in dotted.items() if containers else ():
        stop = text.find(".")
        while stop >= 0:
            if (prefix := text[:stop]) in containers:
                named = _leaf_names(texts[prefix], prefix)
                for name, other in _leaf_names(value, text).items():
                    if name in named:
                        raise InvalidArgumentError(
                            "Two values of the state have one name, since torch joins the parts of a path by dots. "
                            "Rename one.",
                            name=".".join(map(str, (*path, name))),
                            paths=f"{[*path, *named[name]]}, {[*path, *other]}",
                        )
            stop = text.find(".", stop + 1)


def _leaf_names(value: object, key: str) -> dict[str, _Path]:
    """Return the paths of the values below a key by the names that torch gives to them."""
    paths = flatten_state_dict({key: value})[1]
    return {name: tuple(path) for name, path in paths.items()}


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


def has_nested_shards(value: object) -> bool:
    """Return whether a state has a ShardedTensor of ShardedTensors, as of the older FSDP over tensor parallelism."""
    if isinstance(value, ShardedTensor):
        return any(isinstance(shard.tensor, ShardedTensor) for shard in value.local_shards())
    if isinstance(value, Mapping | list):
        return any(map(has_nested_shards, value.values() if isinstance(value, Mapping) else value))
    return False


def _iterate_mappings(state: Mapping[Any, object]) -> Iterator[tuple[tuple[str | int, ...], Mapping[Any, Any]]]:
    """Yield all mappings that torch reaches through mappings and lists, with their paths; outer ones first.

    Raises:
        InvalidArgumentError: A mapping or list contains itself, or is nested too deeply.
    """
    stack: list[tuple[tuple[str | int, ...], object]] = [((), state)]
    while stack:
        path, value = stack.pop()
        if len(path) > _DEPTH_MAX:
            raise _nesting_error(path)
        if isinstance(value, Mapping):
            yield path, value
            stack.extend(((*path, str(key)), inner) for key, inner in value.items())
        elif isinstance(value, list):
            stack.extend(((*path, number), inner) for number, inner in enumerate(value))
