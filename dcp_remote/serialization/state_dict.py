"""State dicts: modules, optimizers and `Stateful`s, values that differ between ranks (`PerRank`), keys of other types.

torch plans one state dict for all ranks and flattens it by `str(key)`, so all these are converted before torch plans
and converted back after a load.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dcp_remote.common.text import join_some
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.serialization.files import Files, holds_imitation, unwrap_marked
from dcp_remote.serialization.leaves import (
    FlatState,
    Leaf,
    Path,
    flatten_state,
    is_container,
    iterate_leaves,
    name_of,
    nesting_error,
    require_depth,
    value_at,
)
from dcp_remote.serialization.module_state import (
    MadeStates,
    ModelState,
    OptimizerState,
    all_names_of,
    find_models,
    names_parameters_itself,
)
from dcp_remote.serialization.opaque import (
    ATOMS,
    OPAQUE_MARK,
    UNREAD,
    UNREAD_FILES,
    Opaque,
    imitation_error,
    is_stateful,
    is_unread,
)
from dcp_remote.serialization.optimizer_load import load_exactly
from dcp_remote.serialization.tensors import is_plain, unwrap_elements

T = TypeVar("T")
_State = TypeVar("_State", bound=Mapping[str, Any])

# Top-level key below which values of single ranks are saved.
PER_RANK_KEY = "per_rank"

# Names by which modules of torch count in a forward pass: on each rank other values, as under DDP.
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})

# Name by which torch saves the extra state of a module.
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class TensorRoles:
    """Names of tensors whose role is known from the modules and optimizers of a state; see `build_saved_state`."""

    trained: set[str] = field(default_factory=set)  # parameters of modules, and states of optimizers
    buffers: set[str] = field(default_factory=set)  # buffers and extra states of modules

    def note_model(self, path: Path, model: nn.Module, values: Mapping[str, Any]) -> None:
        """Note the values of a module; of one that a hook renamed, nothing is known."""
        parameters = all_names_of(model, model.named_parameters(remove_duplicate=False))
        buffers = all_names_of(model, model.named_buffers(remove_duplicate=False))
        for name in values:
            if name in parameters:
                self.trained.add(name_of((*path, name)))
            elif name in buffers or name.endswith(_EXTRA_STATE):
                self.buffers.add(name_of((*path, name)))

    def note_optimizer(self, path: Path, values: Mapping[str, Any]) -> None:
        """Note the states of an optimizer."""
        for name, state in values["state"].items():
            keys = state if isinstance(state, Mapping) else ()
            self.trained.update(name_of((*path, "state", name, key)) for key in keys)

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


def build_saved_state(state: Mapping[str, Any], rank: int, roles: TensorRoles | None = None) -> FlatState:
    """Return what this rank saves: `state_dict()` of each `Stateful`, per-rank values below one key, taken apart.

    Bare modules and optimizers count as `ModelState` and `OptimizerState`. `Stateful`s may be at any depth. Raises an
    `InvalidArgumentError` if two values would have one name, or a tuple, also of a `state_dict()`, looks like an entry
    of `Opaque` or `Files`.
    """
    _require_state(state)
    reader = _StateReader(state, roles=roles)
    # Sorted, as in torch: `state_dict()` may be a collective operation, and the order of keys may differ between ranks.
    values = {key: reader.read(state[key], (key,)) for key in sorted(state)}
    # In a tuple, which torch's planner does not flatten: a later job's template may hold a value of another structure.
    own = {key: (value,) for key, value in values.items() if isinstance(state[key], PerRank)}
    shared = {key: value for key, value in values.items() if key not in own}
    flat = flatten_state(shared | {PER_RANK_KEY: {str(rank): own}} if own else shared)
    for name, value in flat.values.items():  # also those of modules and optimizers
        if isinstance(value, torch.Tensor):
            _require_shape(value, flat.paths[name])
            flat.values[name] = unwrap_elements(value)
    held = {key: values[key] for key in own} | flat.values  # those of this rank without their tuple
    imitations = [
        name for name, value in held.items() if isinstance(value, (tuple, list, dict)) and holds_imitation(value)
    ]
    if imitations:
        raise imitation_error(sorted(imitations))
    if lazy := [name for name, value in flat.values.items() if is_lazy(value)]:
        raise InvalidArgumentError(
            "Parameters of a lazy module have no shape yet. Call the module once before the save.",
            tensors=join_some(lazy),
        )
    return flat


def make_template(
    state: Mapping[str, Any],
    rank: int,
    saved: Collection[Path],
    *,
    keep: Callable[[Collection[str]], Collection[str]],
    made: MadeStates,
) -> dict[str, Any]:
    """Return the template for a restore: `build_saved_state`, without per-rank values that the checkpoint lacks.

    No state is asked of values that are read whole: a data loader would start its workers for it. Optimizers make the
    states that are loaded, which `made` records. `saved` has the paths of all saved values; `keep` returns those of
    some names whose values in the state stay as they are.
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


def unwrap_per_rank(path: Path, value: Any) -> Any:
    """Return a loaded value as the user saved it: a per-rank value without the tuple that `build_saved_state` adds."""
    is_own = _is_per_rank(path) and isinstance(value, tuple) and len(value) == 1
    return unwrap_marked(value[0]) if is_own else value


def convert_per_rank(saved: Path, loaded: Path, value: Any) -> Any:
    """Return a value of the path `saved` in the form in which a template has it at the path `loaded`.

    The paths differ where an entry was renamed: a value of one rank is stored in a tuple, and a shared value is not.
    """
    if _is_per_rank(saved) == _is_per_rank(loaded):
        return value
    if _is_per_rank(saved):
        return unwrap_per_rank(saved, value)
    # A value that is unwrapped already may hold tuples with a mark, which would be unwrapped with it once more.
    return ((OPAQUE_MARK, value) if holds_imitation(value) else value,)


def _is_per_rank(path: Path) -> bool:
    return len(path) == 3 and path[0] == PER_RANK_KEY  # noqa: PLR2004  # per_rank, rank, key


def fit_groups(
    state: Mapping[str, Any],
    loaded: Mapping[str, Any],
    loads: Callable[[str], bool],
    renamed: Mapping[str, Mapping[str, str | None]],
) -> None:
    """Remove options of optimizers' groups that were not loaded from a template, and rename the groups' parameters.

    `loads` returns whether the value of a name in the state was loaded. `renamed` has the new names of parameters by
    their old ones, by the beginning of the names of the optimizer's states.
    """
    for leaf in iterate_stateful(state):
        if not isinstance(leaf.value, OptimizerState):
            continue
        values, prefix = value_at(loaded, leaf.keys), f"{leaf.name}."

        def loads_below(name: str, prefix: str = prefix) -> bool:
            return loads(prefix + name)

        states, new_names = f"{prefix}state.", dict[str, str]()
        for place, names in renamed.items():
            if place.startswith(states):
                model = place.removeprefix(states)
                new_names |= {model + old: model + new for old, new in names.items() if new is not None}
        leaf.value.fit_groups(values, loads_below, new_names)


def apply_loaded(
    state: MutableMapping[str, Any], loaded: Mapping[str, Any], rank: int, *, untouched: Collection[str] = ()
) -> None:
    """Put the values of a loaded template into the user's state, by `load_state_dict` where a value is `Stateful`.

    The values of the top-level keys `untouched` stay as they are; the same keys on all ranks, since `load_state_dict`
    may be a collective operation of torch.
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


def _require_shape(value: torch.Tensor, path: Path) -> None:
    # A ShardedTensor refuses to be asked, as a tensor without an implementation of `is_nested`.
    if not isinstance(value, ShardedTensor) and value.is_nested:
        raise InvalidArgumentError(
            "A nested tensor has no shape that could be saved. Save its parts: list(tensor.unbind()).",
            tensor=name_of(path),
        )
    if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
        raise InvalidArgumentError(
            "A DTensor with a Partial placement has no values before they are reduced: no rank holds any of them. Put "
            "tensor.redistribute(placements=[Replicate()]) into the state.",
            tensor=name_of(path),
            placements=value.placements,
        )


class _StateReader:
    """Reader of the values of one state, at any depth of its dicts and lists: to save, or to make a template.

    For a template, `saved` has the paths of the checkpoint's values; `keep` and `made` as for `make_template`.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        roles: TensorRoles | None = None,
        saved: Collection[Path] | None = None,
        keep: Callable[[Collection[str]], Collection[str]] = lambda _names: (),
        made: MadeStates | None = None,
    ) -> None:
        """Keep the state; nothing is read."""
        self._state, self._roles, self._saved, self._keep, self._made = state, roles, saved, keep, made

    def read(self, value: Any, path: Path) -> Any:
        """Return what is saved of a value, or loaded into; a container without `Stateful`s is returned itself."""
        try:
            return self._read(value, path)
        except RecursionError as error:
            raise nesting_error(path[0]) from error

    def _read(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            _require_shape(value, path)
            return value
        if not is_container(value):
            return self._read_leaf(value, path)
        require_depth(path, len(path))
        if isinstance(value, list):
            items = [
                inner if type(inner) in ATOMS else self._read(inner, (*path, number))
                for number, inner in enumerate(value)
            ]
            return items if any(map(operator.is_not, items, value)) else value
        read = {
            key: inner if type(inner) in ATOMS else self._read(inner, (*path, str(key))) for key, inner in value.items()
        }
        # `flatten_state` refuses a mapping that cannot be changed, into which a restore puts values.
        is_read = isinstance(value, MutableMapping) and any(map(operator.is_not, read.values(), value.values()))
        return read if is_read else value

    def _read_leaf(self, value: Any, path: Path) -> Any:
        if isinstance(value, PerRank):
            if len(path) > 1:
                raise InvalidArgumentError("A PerRank must be at the top level of the state.", where=name_of(path))
            return value.value.state_dict() if is_stateful(value.value) else value.value
        stateful = self.find_stateful(value, path)
        if stateful is None:
            return value
        return self._saved_values(stateful, path) if self._saved is None else self._template(stateful, path)

    def find_stateful(self, value: Any, path: Path) -> Any:
        """Return the `Stateful` that a value is, or stands for; None for any other value."""
        if not is_stateful(value):
            return None
        if isinstance(value, nn.Module):
            return ModelState(value)
        if isinstance(value, Optimizer) and not names_parameters_itself(value):
            return OptimizerState(find_models([value], self._models, where=name_of(path)), value)
        return value

    def _saved_values(self, stateful: Any, path: Path) -> Any:
        is_optimizer = isinstance(stateful, OptimizerState)
        values = stateful.saved_values() if is_optimizer else stateful.state_dict()
        if self._roles is not None and is_optimizer:
            self._roles.note_optimizer(path, values)
        elif self._roles is not None and isinstance(stateful, ModelState):
            self._roles.note_model(path, stateful.model, values)
        return values

    def _template(self, stateful: Any, path: Path) -> Any:
        if isinstance(stateful, (Opaque, Files)):
            return _unread(stateful)
        if isinstance(stateful, ModelState):
            return stateful.template(where=name_of(path))
        make_template: Any = getattr(stateful, "make_template", None)
        if not isinstance(stateful, OptimizerState) and not callable(make_template):
            return stateful.state_dict()
        prefix = f"{name_of(path)}."
        names = [name.removeprefix(prefix) for name in self._saved_names if name.startswith(prefix)]

        def keep(below: Collection[str]) -> list[str]:
            return [name.removeprefix(prefix) for name in self._keep([prefix + name for name in below])]

        if isinstance(stateful, OptimizerState):
            others = [name for name in self._saved_names if not name.startswith(prefix)]
            return stateful.template(names, keep, others=others, made=self._made)
        kept = set(keep(names))
        return make_template([name for name in names if name not in kept])

    def apply(self, value: Any, loaded: Any, path: Path) -> Any:
        """Return what belongs in the place of a value after a load."""
        stateful = self.find_stateful(value, path)
        if isinstance(stateful, OptimizerState):
            stateful.load_saved(loaded)
        elif isinstance(stateful, Optimizer):  # a container that names its parameters itself
            load_exactly(stateful, loaded, where=name_of(path))
        elif stateful is not None:
            if not is_unread(loaded):
                stateful.load_state_dict(loaded)
        elif not holds_stateful(value) or isinstance(value, list) != isinstance(loaded, list):
            return loaded
        elif isinstance(value, list):  # torch stores one without tensors as an entry, of any length
            value[:] = [
                self.apply(value[number], inner, (*path, number)) if number < len(value) else inner
                for number, inner in enumerate(loaded)
            ]
        else:
            for key, held in value.items():
                applied = self.apply(held, loaded[key], (*path, str(key)))
                if applied is not held:
                    value[key] = applied
        return value

    @cached_property
    def _models(self) -> dict[str, nn.Module]:
        """Modules of the state by the last part of their path, or by the whole path if two have the same last part."""
        found = {
            leaf.path: leaf.value.model if isinstance(leaf.value, ModelState) else leaf.value
            for leaf in iterate_leaves(dict(self._state), descends=_may_hold_models)
            if isinstance(leaf.value, nn.Module | ModelState)
        }
        last = Counter(str(path[-1]) for path in found)
        return {
            str(path[-1]) if last[str(path[-1])] == 1 else "_".join(map(str, path)): found[path]
            for path in sorted(found, key=name_of)
        }

    @cached_property
    def _saved_names(self) -> list[str]:
        return [name_of(path) for path in self._saved or ()]


def iterate_stateful(state: Mapping[str, Any]) -> Iterator[Leaf]:
    """Yield the `Stateful`s of a state, without `PerRank` values; modules as `ModelState`."""
    reader = _StateReader(state)
    for leaf in iterate_leaves(dict(state)):
        stateful = reader.find_stateful(leaf.value, leaf.path)
        if stateful is not None:
            yield leaf._replace(value=stateful)


def _may_hold_models(value: object) -> bool:
    """Return whether to look for modules in a value: also in a mapping or list that is a `Stateful` itself."""
    is_atoms = isinstance(value, list) and ATOMS.issuperset(map(type, value))
    return isinstance(value, Mapping | list) and not is_atoms and not isinstance(value, nn.Module)


def _unread(value: object) -> tuple[str, str | None]:
    """Return what stands in a template for a value that is read whole."""
    return UNREAD_FILES if isinstance(value, Files) else UNREAD


def holds_stateful(value: object) -> bool:
    """Return whether a value is a dict or list that holds a `Stateful` at any depth."""
    return is_container(value) and any(is_stateful(leaf.value) for leaf in iterate_leaves(value))


def has_nested_shards(values: Iterable[Any]) -> bool:
    """Return whether a value is a ShardedTensor of ShardedTensors, as of the older FSDP over tensor parallelism."""
    sharded = (value for value in values if isinstance(value, ShardedTensor))
    return any(isinstance(shard.tensor, ShardedTensor) for value in sharded for shard in value.local_shards())
