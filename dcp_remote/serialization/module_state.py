"""States of models and optimizers under canonical names, which any number of ranks loads under any wrapper.

Names are those of torch's `get_model_state_dict` and `get_optimizer_state_dict`: `<fqn>`, `state.<fqn>.<key>`,
`param_groups.<number>.<key>`, without the prefixes of DDP, FSDP, `torch.compile` and activation checkpointing. Torch's
own functions are used where a wrapper changes names, and for the older FSDP. Nowhere else, because these functions make
an optimizer step before the first save, and keep the state of no optimizer that has gradients but no step.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _get_fqns,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dcp_remote.errors import InvalidArgumentError, StateMismatchError
from dcp_remote.serialization.optimizer_load import require_loaded, without_casts

# Children by which `torch.compile` and activation checkpointing wrap a module.
_WRAPPED_CHILDREN = ("_orig_mod", "_checkpoint_wrapped_module")

_NAMES_SHOWN_MAX = 5

# Attributes in which torch keeps hooks for the steps of one optimizer (optimizer.py of torch 2.13).
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

# Optimizers whose step makes each element by itself. Another may send messages, as Muon does for a DTensor.
_ELEMENTWISE = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD})

# Methods and hooks by which a state is made or taken.
_STATE_METHODS = (
    *("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict"),
    *("get_extra_state", "set_extra_state", "make_template"),
)
_STATE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)

# Keys of an optimizer's `state_dict` that torch fills; an optimizer may add others.
_TORCH_KEYS = frozenset({"state", "param_groups"})

# Characters in which the place of a model ends; names may be hostile.
_PLACE_CHARACTERS_MAX = 128


class ModelState:
    """State of a model, with the same names under any wrapper (FSDP, DDP, `torch.compile`); a `Stateful`.

    `CheckpointManager` takes a bare module for this. In a state for plain `dcp.save`, torch asks a bare module itself,
    which names its parameters with the prefixes of its wrappers.

    Args:
        model: Module; parameters, persistent buffers and extra states are saved, also those of frozen layers.

    Attributes:
        model: Module.
    """

    def __init__(self, model: nn.Module) -> None:
        """Keep the module."""
        if not isinstance(model, nn.Module):
            raise InvalidArgumentError("ModelState takes a torch.nn.Module.", type=type(model).__name__)
        self.model = model

    def __repr__(self) -> str:
        return f"ModelState({type(self.model).__name__})"

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards, which share memory with the model."""
        # torch's function refuses a model without values, such as a loss function, unless it is not strict.
        options = StateDictOptions(strict=False)
        return get_model_state_dict(self.model, options=options) if _is_renamed(self.model) else self.model.state_dict()

    def template(self, *, where: str = "") -> dict[str, Any]:
        """Return `state_dict`, for a load into its tensors.

        Raises:
            InvalidArgumentError: Values are on the meta device, where a load into them would have no effect.
        """
        values = self.state_dict()
        empty = [
            name for name, value in values.items() if isinstance(value, torch.Tensor) and value.device.type == "meta"
        ]
        if empty:
            raise InvalidArgumentError(
                "A module is on the meta device, and has no memory to load into. Call "
                "model.to_empty(device=...) first, and make the optimizer after that.",
                where=where or None,
                model=type(self.model).__name__,
                tensors=len(empty),
                names=", ".join(empty[:_NAMES_SHOWN_MAX]),
            )
        return values

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set parameters and buffers; every name must be there, and no other."""
        if state_dict and _is_renamed(self.model):
            set_model_state_dict(self.model, dict(state_dict))
        else:
            self.model.load_state_dict(state_dict)


class OptimizerState:
    """State of an optimizer under the names of the parameters, so that any number of ranks loads it; a `Stateful`.

    A bare optimizer numbers its parameters, and has nothing to load into before its first step. `CheckpointManager`
    takes a bare optimizer for this, with the model that is found among the other values of the state. What the
    optimizer's own `state_dict` has beside `state` and `param_groups` is saved below the same key, and given back to
    its `load_state_dict`.

    A restore by a manager leaves the optimizer as it was when it was saved: a parameter without a state (before its
    first gradient) has none afterwards, and options that only the saved groups have (`initial_lr`, which a scheduler
    adds) are taken. States keep their dtype and device, where torch's `load_state_dict` would cast them to those of
    the parameter; hooks for loads may change them. A state that is excluded, or kept by `missing="keep"`, stays as it
    is. The states that are read into are made by a step with zero gradients and a learning rate of zero, as in torch,
    but without the hooks of the optimizer; options and gradients are put back. If the checkpoint does not fit, these
    states are removed. Plain `dcp.save` and `dcp.load` make this step, too. An optimizer that cannot make such a step,
    as LBFGS, is saved as `PerRank(optimizer)`.

    Args:
        model: Model whose parameters the optimizer has; or several by name, which then precedes the parameters' names.
        optimizer: Optimizer, or several with parameters of their own, whose states are joined as torch joins them.

    Raises:
        InvalidArgumentError: The optimizer has parameters that the model does not have, or two have the same.
            Raised by a save or restore: one of several optimizers, or one under the older FSDP, has values of its own.
    """

    def __init__(self, model: nn.Module | Mapping[str, nn.Module], optimizer: Optimizer | Iterable[Optimizer]) -> None:
        """Keep model and optimizer."""
        several: Any = optimizer  # callers without types may give anything
        is_one = isinstance(several, Optimizer) or not isinstance(several, Iterable)
        given: tuple[Any, ...] = (several,) if is_one else tuple(several)
        joined: Any = _join(model) if isinstance(model, Mapping) else model
        if not isinstance(joined, nn.Module) or not all(isinstance(value, Optimizer) for value in given):
            raise InvalidArgumentError(
                "OptimizerState takes a torch.nn.Module and a torch.optim.Optimizer, in this order.",
                model=type(model).__name__,
                optimizer=", ".join(type(value).__name__ for value in given),
            )
        self._model: nn.Module = joined
        self._optimizers: tuple[Optimizer, ...] = given
        self._require_own_parameters()

    def __repr__(self) -> str:
        return f"OptimizerState({', '.join(type(optimizer).__name__ for optimizer in self._optimizers)})"

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Optimizers whose states are joined."""
        return self._optimizers

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards, which share memory with the optimizer, after a state was made for each parameter.

        Raises:
            InvalidArgumentError: The optimizer has parameters that the model lacks, or cannot make its state.
        """
        names = self._require_names()
        for optimizer in self._optimizers:
            if not optimizer.state:
                self._make_states(optimizer, [one for one in _parameters_of(optimizer) if one.requires_grad])
        return self._values(names)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the states of the parameters and the options of the groups.

        Raises:
            InvalidArgumentError: A parameter that needs a gradient has no state in the argument, and others have.
            StateMismatchError: See `load_saved`.
        """
        if not _is_fsdp1(self._model):
            names, states = self._require_names(), state_dict.get("state", {})
            trained = [names[id(parameter)] for parameter in self._parameters() if parameter.requires_grad]
            missing = [name for name in trained if name not in states]
            if states and missing:
                raise InvalidArgumentError(
                    "The state of an optimizer lacks parameters.",
                    missing=len(missing),
                    names=", ".join(missing[:_NAMES_SHOWN_MAX]),
                )
        self.load_saved(state_dict)

    def parameter_names(self) -> dict[int, str]:
        """Return the canonical names of the model's parameters, by `id`."""
        return names_of(self._model)

    def saved_values(self) -> dict[str, Any]:
        """Return `state_dict`; states that torch makes for the older FSDP are removed: a save changes nothing."""
        if not _is_fsdp1(self._model):
            return self._values(self._require_names())
        made = MadeStates()
        made.note(self._optimizers)
        try:
            return self.state_dict()
        finally:
            made.remove()

    def template(
        self,
        saved: Collection[str],
        keep: Callable[[Collection[str]], Collection[str]] = lambda _names: (),
        *,
        others: Collection[str] = (),
        made: MadeStates | None = None,
    ) -> dict[str, Any]:
        """Return values to load into: the states of those parameters that the checkpoint has states of.

        States that stay as they are are among them, but none is made for them. Options of groups that only the
        checkpoint has are among them, too.

        Args:
            saved: Names in the checkpoint below this state: `state.<fqn>.<key>`, and others. States of no parameter of
                this optimizer may be those of another rank. If all are, states are made of all parameters, so that the
                load fails and names the difference; but none if `others` shows that the parameters had no states.
            keep: Function that returns those of some names whose values stay as they are. If all of `saved` do, no
                state is made.
            others: All other names in the checkpoint, as in the state, among them those of the models' parameters.
            made: Record of the states that are made.
        """
        loaded = set(saved).difference(keep(saved))
        if not loaded:
            return self.saved_values()
        if made is not None:
            made.note(self._optimizers)
        wanted = {name for name in loaded if name.startswith("state.")}
        if _is_fsdp1(self._model):
            values = self.state_dict() if wanted else self.saved_values()
            if not any(name.startswith("state.") for name in saved):
                values["state"] = {}
            self._add_options(values["param_groups"], loaded)
            return values
        names = self._require_names()
        before = self._values(names)  # a step may change values of the optimizer itself
        own = {names[id(parameter)] for parameter in self._parameters()}
        filled = {part for name in wanted for part in first_parts(name.removeprefix("state.")) if part in own}
        if wanted and not filled and not _had_no_states(own, wanted, others):
            trained = {names[id(parameter)] for parameter in self._parameters() if parameter.requires_grad} or own
            kept_states = keep([f"state.{name}" for name in trained])
            filled = trained.difference(name.removeprefix("state.") for name in kept_states)
        for optimizer in self._optimizers:
            self._make_states(
                optimizer, [parameter for parameter in _parameters_of(optimizer) if names[id(parameter)] in filled]
            )
        values = self._values(names)
        kept = set(keep(_flat_names(values)))
        states: dict[Any, Any] = {}
        for name, state in values["state"].items():
            flat = _flat_names({"state": {name: state}})
            if name in filled or not wanted.isdisjoint(flat) or flat <= kept:
                states[name] = state
        # A group of another position may keep the tensor, such as its learning rate, that is here.
        groups = [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            for group in values["param_groups"]
        ]
        self._add_options(groups, loaded)
        return before | {"state": states, "param_groups": groups}

    def _add_options(self, groups: Sequence[dict[str, Any]], loaded: Collection[str]) -> None:
        """Add options that only the saved groups have, which the optimizer takes as from torch's `load_state_dict`."""
        group_of = {f"param_groups.{number}": group for number, group in enumerate(groups)}
        for name in loaded:
            place, _, option = name.rpartition(".")
            group = group_of.get(place, {})
            if group and option and option not in group:
                rate = group.get("lr")
                # A scheduler copies the rate, of whose kind the value to load into must be.
                group[option] = rate.clone() if option == "initial_lr" and isinstance(rate, torch.Tensor) else None

    def fit_groups(self, values: Mapping[str, Any], loads: Callable[[str], bool], renamed: Mapping[str, str]) -> None:
        """Remove options of groups that were not loaded from a template, so that each group keeps its own.

        The parameters of loaded groups get their new names, by which `load_saved` finds the group of a parameter.

        Args:
            values: Template that was loaded; a group has another position in it than here if the order differs.
            loads: Function that returns whether the value of a name was loaded.
            renamed: New names of parameters by their old ones.
        """
        for number, group in enumerate(values["param_groups"]):
            if loads(f"param_groups.{number}.params"):
                group["params"] = [renamed.get(name, name) for name in group["params"]]
        if _is_fsdp1(self._model):  # torch's function needs all options
            if not any(optimizer.state for optimizer in self._optimizers) and not any(map(loads, _flat_names(values))):
                values["state"].clear()
            return
        groups = values["param_groups"]
        paths: Mapping[str, Any] = flatten_state_dict({"param_groups": groups})[1]
        options = {tuple(path[1:3]) for path in paths.values()}
        loaded = {tuple(path[1:3]) for name, path in paths.items() if loads(name)}
        for number, option in options - loaded:
            groups[number].pop(option, None)

    def load_saved(self, values: Mapping[str, Any]) -> None:
        """Set the optimizers to what was saved: a parameter without a state in `values` has none afterwards.

        States keep their dtype and device, whatever those of their parameters are.

        Raises:
            StateMismatchError: The parameters of a group were saved with different options; or an optimizer changed
                states while it took them.
        """
        if _is_fsdp1(self._model) and values["state"]:
            with _undisturbed(self._optimizers, keeps_options=False), without_casts(self._optimizers):
                set_optimizer_state_dict(
                    self._model, self._optimizers, dict(values), options=StateDictOptions(strict=False)
                )
            return
        names, states, groups = self._require_names(), values["state"], values["param_groups"]
        group_of = {name: number for number, group in enumerate(groups) for name in group.get("params", ())}
        matched = {group_of[name] for name in map(names.__getitem__, map(id, self._parameters())) if name in group_of}
        self._require_options_of_one_group(names, group_of, groups)
        own_values = _own_values(values)
        position = 0
        loaded: dict[Any, Any] = {}
        for optimizer in self._optimizers:
            packed_groups: list[dict[str, Any]] = []
            # States of the optimizer itself, under keys that are no parameters.
            keys: Iterable[Any] = optimizer.state
            others = [key for key in keys if not isinstance(key, torch.Tensor) and key in states]
            packed_states: dict[Any, Any] = {key: states[key] for key in others}
            loaded |= packed_states
            number = 0
            for group in optimizer.param_groups:
                own = [names[id(parameter)] for parameter in group["params"]]
                # By position if no name is known, as after a rename, and no other group has the names at that position.
                by_position = groups[position] if position < len(groups) and position not in matched else {}
                saved = next((groups[group_of[name]] for name in own if name in group_of), by_position)
                numbers = list(range(number, number + len(own)))
                # Of an optimizer that is made of `named_parameters()`, the names of the saved group's parameters.
                options = {key: value for key, value in saved.items() if key != "param_names"}
                packed_groups.append({**group, **options, "params": numbers})
                packed_states.update((n, states[name]) for n, name in zip(numbers, own, strict=True) if name in states)
                loaded.update((name, states[name]) for name in own if name in states)
                number += len(own)
                position += 1
            with without_casts([optimizer]):
                optimizer.load_state_dict({**own_values, "state": packed_states, "param_groups": packed_groups})
        if not _is_fsdp1(self._model):  # of which torch returns copies
            require_loaded(self._optimizers, {**own_values, "state": loaded}, self._values(names))

    def _require_options_of_one_group(
        self, names: Mapping[int, str], group_of: Mapping[str, int], saved: Sequence[Mapping[str, Any]]
    ) -> None:
        """Require that the parameters of each group were saved with the same options, of which a group has one set."""
        found: list[str] = []
        for position, group in enumerate(chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers)):
            own = (names[id(parameter)] for parameter in group["params"])
            numbers = sorted({group_of[name] for name in own if name in group_of})
            for option in sorted({option for number in numbers for option in saved[number]} - {"params"}):
                values = [saved[number].get(option) for number in numbers]
                if not all(_is_equal(value, values[0]) for value in values):
                    texts = ", ".join(f"{value!r:.60}" for value in values)
                    places = ", ".join(map(str, numbers))
                    found.append(f"{option} of group {position} ({texts} in the saved groups {places})")
        if found:
            raise StateMismatchError(
                "The optimizer has parameters in one group that were saved in several with different options, of "
                "which some would be lost; other values were already loaded. Make the groups as they were saved.",
                options="; ".join(found[:_NAMES_SHOWN_MAX]),
                found=len(found),
            ).advise(exclude='exclude="optim.param_groups*", by the name in the state, keeps those of the optimizer')

    def _values(self, names: Mapping[int, str]) -> dict[str, Any]:
        if _is_fsdp1(self._model):
            return self._fsdp1_values()
        own_values: dict[str, Any] = {}
        states: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for optimizer in self._optimizers:
            packed = optimizer.state_dict()
            own_values |= self._require_savable(optimizer, packed)
            by_number: dict[Any, str] = {}
            for packed_group, group in zip(packed["param_groups"], optimizer.param_groups, strict=True):
                own = [names[id(parameter)] for parameter in group["params"]]
                by_number.update(zip(packed_group["params"], own, strict=True))
                groups.append({**packed_group, "params": own})
            states.update((by_number.get(key, key), value) for key, value in packed["state"].items())
        return {**own_values, "state": states, "param_groups": groups}

    def _require_savable(self, optimizer: Optimizer, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that only an optimizer's own `state_dict` has; refuse them where they have no place."""
        found = _own_values(packed)
        if found and (len(self._optimizers) > 1 or _is_fsdp1(self._model)):
            raise InvalidArgumentError(
                "An optimizer's state_dict has values of its own beside state and param_groups, which are not saved "
                "where several optimizers are saved as one, and under the older FSDP. Save each optimizer under a name "
                "of its own, or save PerRank(optimizer).",
                optimizer=type(optimizer).__name__,
                keys=", ".join(map(str, list(found)[:_NAMES_SHOWN_MAX])),
            )
        return found

    def _fsdp1_values(self) -> dict[str, Any]:
        for optimizer in self._optimizers:
            self._require_savable(optimizer, optimizer.state_dict())
        # torch makes no state while there are gradients.
        with _undisturbed(optimizer for optimizer in self._optimizers if not optimizer.state):
            return get_optimizer_state_dict(self._model, self._optimizers)

    def _make_states(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Make the state of each of these parameters that has none, by a step that changes no parameter."""
        if _is_fsdp1(self._model):
            return  # torch's function makes them
        wanted = {parameter for parameter in parameters if not _has_state(optimizer, parameter)}
        if not wanted:
            return
        # All parameters of a group, since an optimizer may stack their gradients, and keep one state for all of them.
        stepped = [
            parameter
            for group in optimizer.param_groups
            if not wanted.isdisjoint(group["params"])
            for parameter in group["params"]
            if parameter in wanted or (parameter.requires_grad and not _has_state(optimizer, parameter))
        ]
        with _undisturbed([optimizer]):
            for parameter in stepped:
                parameter.grad = torch.zeros_like(parameter)
            for group in optimizer.param_groups:
                if "lr" in group:
                    rate = group["lr"]
                    group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            try:
                with torch.no_grad():
                    _step_of(optimizer)(optimizer)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                advice = "Make a step before the restore, or save PerRank(optimizer)."
                if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                    # Each rank may keep a part of its own, under the names and with the shapes of all others.
                    advice = "Save PerRank(optimizer), which gives each rank its own states."
                raise InvalidArgumentError(
                    "The state of this optimizer cannot be made before its first step, and there is nothing to load "
                    f"into. {advice}",
                    optimizer=type(optimizer).__name__,
                    cause=error,
                ) from error
        for parameter in stepped:
            if parameter not in wanted:
                optimizer.state.pop(parameter, None)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(_parameters_of(optimizer) for optimizer in self._optimizers)

    def _require_own_parameters(self) -> None:
        """Require that no two optimizers have one parameter: their states would have the same names."""
        holders = Counter(chain.from_iterable(set(map(id, _parameters_of(one))) for one in self._optimizers))
        names = self._require_names()
        shared = [names[key] for key, count in holders.items() if count > 1]
        if shared:
            raise InvalidArgumentError(
                "Several optimizers that are saved as one have the same parameters, so that their states would have "
                "the same names. Save each under a name of its own: optimizer={'first': first, 'second': second} in "
                "training_state, or an OptimizerState for each.",
                optimizers=", ".join(type(optimizer).__name__ for optimizer in self._optimizers),
                parameters=", ".join(sorted(shared)[:_NAMES_SHOWN_MAX]),
            )

    def _require_names(self) -> dict[int, str]:
        """Return the canonical names of the model's parameters, by `id`; each parameter of the optimizer has one."""
        names = names_of(self._model)
        foreign = [parameter for parameter in self._parameters() if id(parameter) not in names]
        if foreign:
            raise _foreign_parameters_error(foreign, self._optimizers, models=type(self._model).__name__)
        return names


class MadeStates:
    """Record of the states that a restore has made in optimizers; as a context, removes the states if an error ends it.

    What was there before stays as it is.
    """

    def __init__(self) -> None:
        """Begin an empty record."""
        self._before: list[tuple[Optimizer, set[Any]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is not None:
            self.remove()

    def note(self, optimizers: Iterable[Optimizer]) -> None:
        """Note which states optimizers have."""
        self._before += [
            (optimizer, {key for key in optimizer.state if _has_state(optimizer, key)}) for optimizer in optimizers
        ]

    def remove(self) -> None:
        """Remove the states that were made since they were noted."""
        for optimizer, before in self._before:
            for key in [key for key in optimizer.state if key not in before]:
                del optimizer.state[key]


def find_models(
    optimizers: Sequence[Optimizer], models: Mapping[str, nn.Module], *, where: str = ""
) -> nn.Module | dict[str, nn.Module]:
    """Return the first model that has all parameters of the optimizers; or those, by name, that have them together.

    Refuses parameters that belong to none of the modules; `where` is the optimizer's name in the state, for the error.
    """
    wanted = {id(parameter): parameter for optimizer in optimizers for parameter in _parameters_of(optimizer)}
    for model in models.values():
        _reshard(model)
    owned = {name: {id(parameter) for parameter in model.parameters()} for name, model in models.items()}
    for name, owns in owned.items():
        if wanted.keys() <= owns:
            return models[name]
    chosen: dict[str, nn.Module] = {}
    left = set(wanted)
    for name, owns in owned.items():
        if not left.isdisjoint(owns):
            chosen[name] = models[name]
            left -= owns
    if left:
        raise _foreign_parameters_error(
            [wanted[key] for key in wanted if key in left],
            optimizers,
            models=", ".join(name or "model" for name in models),
            where=where,
        )
    return chosen


def is_left_to_torch(stateful: object) -> bool:
    """Return whether only torch's code makes and takes the state of an object, without a message between ranks.

    True for modules but those of the older FSDP, for torch's schedulers, and for its optimizers that treat each element
    by itself, unless a method is overridden or a hook registered.
    """
    parts: Iterable[Any] = (stateful,)
    if type(stateful) is OptimizerState:  # a class derived from it has methods of its own
        parts = chain(stateful.optimizers, stateful._model.modules())
    elif isinstance(stateful, nn.Module) or type(stateful) is ModelState:
        parts = (stateful.model if isinstance(stateful, ModelState) else stateful).modules()
    elif isinstance(stateful, LRScheduler):
        parts = (stateful, *getattr(stateful, "_schedulers", ()))
    return all(map(_is_torchs, parts))


def _is_torchs(part: Any) -> bool:
    is_module = isinstance(part, nn.Module) and not isinstance(part, FullyShardedDataParallel)
    methods = (getattr(part, name, None) for name in _STATE_METHODS)
    hooks = chain.from_iterable(vars(part).get(name, {}).values() for name in _STATE_HOOKS)
    called = [function for function in (*methods, *hooks) if function is not None]
    return (is_module or type(part) in _ELEMENTWISE or isinstance(part, LRScheduler)) and all(
        str(getattr(function, "__module__", None)).startswith("torch.") for function in called
    )


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether a step needs an argument, as that of LBFGS, so that no state can be made before the first one."""
    parameters = list(inspect.signature(_step_of(optimizer)).parameters.values())[1:]
    return any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)


def _foreign_parameters_error(
    foreign: Sequence[torch.Tensor], optimizers: Iterable[Optimizer], *, models: str, where: str = ""
) -> InvalidArgumentError:
    """Return the error of an optimizer with parameters that no model has; `models` is "" if the state has no module."""
    what = (
        "An optimizer has parameters that no model of the state has. Make the optimizer after the model is wrapped "
        "(fully_shard replaces parameters), and put the model into the state, or OptimizerState(model, optimizer)."
        if models
        else "An optimizer is saved under the names of its model's parameters, and the state has no torch.nn.Module. "
        "Put the model itself into the state, not model.state_dict(); or OptimizerState(model, optimizer)."
    )
    return InvalidArgumentError(
        what,
        where=where or None,
        optimizer=", ".join(type(optimizer).__name__ for optimizer in optimizers),
        models=models or None,
        parameters=len(foreign),
        shapes=", ".join(str(tuple(parameter.shape)) for parameter in foreign[:_NAMES_SHOWN_MAX]),
    )


def names_parameters_itself(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's own `state_dict` has names for its parameters, and so needs no model.

    Containers of optimizers in training frameworks do so.
    """
    if type(optimizer).state_dict is Optimizer.state_dict:
        return False
    groups = optimizer.state_dict().get("param_groups")
    is_numbered = isinstance(groups, list) and all(
        isinstance(number, int) for group in groups for number in group.get("params", ())
    )
    return not is_numbered


def _is_equal(value: Any, other: Any) -> bool:
    """Return whether two options of groups are equal."""
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(value, other)
    return bool(value == other)


def _own_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an optimizer's `state_dict` that torch's own does not have."""
    return {key: value for key, value in values.items() if key not in _TORCH_KEYS}


def _has_state(optimizer: Optimizer, key: Any) -> bool:
    """Return whether an optimizer has a state under a key: a look-up leaves an empty dict; a state may be a tensor."""
    state = optimizer.state.get(key)
    return state is not None and not (isinstance(state, Mapping) and not state)


def _parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _is_fsdp1(model: nn.Module) -> bool:
    return bool(FullyShardedDataParallel.fsdp_modules(model))


def _is_renamed(model: nn.Module) -> bool:
    """Return whether a wrapper adds a prefix to the names of the module, or a module asks torch to change names."""
    return any(
        isinstance(module, (DistributedDataParallel, FullyShardedDataParallel))
        or any(child in module._modules for child in _WRAPPED_CHILDREN)
        or hasattr(module, "_fqn_modifiers")
        for module in model.modules()
    )


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the canonical names of a module's parameters, by `id`; of a tied parameter the first name."""
    _reshard(model)
    if not _is_renamed(model):
        return {id(parameter): name for name, parameter in model.named_parameters()}
    # A flat parameter of the older FSDP has several names; the first stands for it, as only its presence is asked for.
    return {id(parameter): min(_get_fqns(model, name)) for name, parameter in model.named_parameters()}


def all_names_of(model: nn.Module, named: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Return the canonical names of a module's parameters or buffers, of which it has these."""
    own = (name for name, _ in named)
    return {name for one in own for name in _get_fqns(model, one)} if _is_renamed(model) else set(own)


def _reshard(model: nn.Module) -> None:
    """Give modules of FSDP2 their sharded parameters, which the optimizer has.

    After a forward pass without a backward pass, as in an evaluation, a root module still has its whole ones.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _join(models: Mapping[str, nn.Module]) -> nn.Module:
    """Return a module that has several modules as children."""
    joined = nn.Module()
    for name, model in models.items():
        try:
            joined.add_module(name.replace(".", "_"), model)
        except (KeyError, TypeError) as error:
            raise InvalidArgumentError(
                "An optimizer of several models needs another name for this one.", name=name, cause=error
            ) from error
    return joined


def first_parts(name: str) -> Iterator[str]:
    """Yield the first parts of a name, up to each dot, and the name itself."""
    return (name[:stop] for stop in (*(number for number, sign in enumerate(name) if sign == "."), len(name)))


def _flat_names(values: Mapping[str, Any]) -> set[str]:
    """Return the names that torch's planner gives to the states of parameters."""
    return set(flatten_state_dict({"state": values["state"]})[0])


@contextmanager
def _undisturbed(optimizers: Iterable[Optimizer], *, keeps_options: bool = True) -> Iterator[None]:
    """Hide gradients, and the hooks that users registered for steps, from what is done to optimizers.

    Both are put back at the end, also after an error; so are the options of groups, as learning rates and counts of
    steps, if `keeps_options`.
    """
    changed = list(optimizers)
    gradients = [(one, one.grad) for optimizer in changed for one in _parameters_of(optimizer)]
    options = [(group, dict(group)) for optimizer in changed if keeps_options for group in optimizer.param_groups]
    hooks = [
        (vars(optimizer), name, vars(optimizer)[name])
        for optimizer in changed
        for name in _STEP_HOOKS
        if name in vars(optimizer)
    ]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        for attributes, name, registered in hooks:
            attributes[name] = type(registered)()
        yield
    finally:
        for attributes, name, registered in hooks:
            attributes[name] = registered
        for group, kept in options:
            group.clear()
            group.update(kept)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _step_of(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """Return the method of a step without the hooks for all optimizers, and without the count of a scheduler.

    torch wraps the method of the class for hooks (`Optimizer.profile_hook_step`); schedulers wrap that of the object.
    """
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]  # a function


def _had_no_states(own: Collection[str], wanted: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether a checkpoint has values of all these parameters, and states of other parameters alone.

    A rank's parameters then had no gradient when they were saved, as those of a pipeline stage that is frozen. Without
    the parameters in the checkpoint, a model whose parameters have other names cannot be told from this. `own` has the
    names of this rank's parameters, `wanted` of states (`state.<fqn>.<key>`), `others` of what may be parameters
    (`model.<fqn>`).
    """
    saved = {
        name[stop + 1 :] for name in others for stop, sign in enumerate(name[:_PLACE_CHARACTERS_MAX]) if sign == "."
    }
    return saved.issuperset(own) and all(
        not saved.isdisjoint(first_parts(name.removeprefix("state."))) for name in wanted
    )
