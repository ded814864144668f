"""States of models and optimizers under canonical names, which any number of ranks loads under any wrapper.

Names are those of torch's `get_model_state_dict` and `get_optimizer_state_dict`: `<fqn>`, `state.<fqn>.<key>`,
`param_groups.<number>.<key>`, without the prefixes of DDP, FSDP, `torch.compile` and activation checkpointing. Torch's
own functions are used where a wrapper changes names, and for the older FSDP. Elsewhere they are not, because they make
an optimizer step before the first save, and keep the state of no optimizer that has gradients but no step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
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
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dcp_remote.errors import DcpRemoteError, InvalidArgumentError

# Children by which `torch.compile` and activation checkpointing wrap a module.
_WRAPPED_CHILDREN = ("_orig_mod", "_checkpoint_wrapped_module")

_SHAPES_NAMED_MAX = 5


def keep_nothing(_names: Collection[str]) -> Collection[str]:
    """Return no name: all values are loaded."""
    return ()


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

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set parameters and buffers; every name must be there, and no other."""
        if state_dict and _is_renamed(self.model):
            set_model_state_dict(self.model, dict(state_dict))
        else:
            self.model.load_state_dict(state_dict)


class OptimizerState:
    """State of an optimizer under the names of the parameters, so that any number of ranks loads it; a `Stateful`.

    A bare optimizer numbers its parameters, and has nothing to load into before its first step. `CheckpointManager`
    takes a bare optimizer for this, with the model that is found among the other values of the state.

    A restore by a manager leaves the optimizer as it was when it was saved: a parameter without a state (before its
    first gradient) has none afterwards. A state that is excluded, or kept by `missing="keep"`, stays as it is. The
    states that are read into are made by a step with zero gradients and a learning rate of zero, as in torch; learning
    rates and gradients are put back. Plain `dcp.save` and `dcp.load` make this step, too. An optimizer that cannot make
    such a step, as LBFGS, must have made a step before.

    Args:
        model: Model whose parameters the optimizer has; or several by name, which then precedes the parameters' names.
        optimizer: Optimizer, or several with parameters of their own, whose states are joined as torch joins them.

    Raises:
        InvalidArgumentError: The optimizer has parameters that the model does not have.
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
        self._require_names()

    def __repr__(self) -> str:
        return f"OptimizerState({', '.join(type(optimizer).__name__ for optimizer in self._optimizers)})"

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards, which share memory with the optimizer, after a state was made for each parameter.

        Raises:
            InvalidArgumentError: The optimizer has parameters that the model lacks, or cannot make its state.
        """
        names = self._require_names()
        for optimizer in self._optimizers:
            if not optimizer.state:
                self._make_states(optimizer, _parameters_of(optimizer))
        return self._values(names)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the states of the parameters and the options of the groups.

        Raises:
            InvalidArgumentError: A parameter that needs a gradient has no state in the argument, and others have.
        """
        if not _is_fsdp1(self._model):
            names, states = self._require_names(), state_dict.get("state", {})
            trained = [names[id(parameter)] for parameter in self._parameters() if parameter.requires_grad]
            missing = [name for name in trained if name not in states]
            if states and missing:
                raise InvalidArgumentError(
                    "The state of an optimizer lacks parameters.",
                    missing=len(missing),
                    names=", ".join(missing[:_SHAPES_NAMED_MAX]),
                )
        self.load_saved(state_dict)

    def saved_values(self) -> dict[str, Any]:
        """Return `state_dict` without making states: a save changes nothing."""
        return self.state_dict() if _is_fsdp1(self._model) else self._values(self._require_names())

    def template(
        self, saved: Collection[str], keep: Callable[[Collection[str]], Collection[str]] = keep_nothing
    ) -> dict[str, Any]:
        """Return values to load into: the states of those parameters that the checkpoint has states of.

        States that stay as they are are among them, but none is made for them.

        Args:
            saved: Names in the checkpoint below this state: `state.<fqn>.<key>`, and others. States of no parameter of
                this optimizer may be those of another rank. If all are, states are made of all parameters, so that the
                load fails and names the difference.
            keep: Function that returns those of some names whose values stay as they are. If all of `saved` do, no
                state is made.
        """
        loaded = set(saved).difference(keep(saved))
        if not loaded:
            return self.saved_values()
        if _is_fsdp1(self._model):
            return self.state_dict()
        names, wanted = self._require_names(), {name for name in loaded if name.startswith("state.")}
        own = {names[id(parameter)] for parameter in self._parameters()}
        filled = {part for name in wanted for part in _first_parts(name.removeprefix("state.")) if part in own}
        if wanted and not filled:
            filled = own.difference(name.removeprefix("state.") for name in keep([f"state.{name}" for name in own]))
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
        return {"state": states, "param_groups": groups}

    def drop_kept_options(self, values: Mapping[str, Any], loads: Callable[[str], bool]) -> None:
        """Remove options of groups that were not loaded from a template, so that each group keeps its own.

        Args:
            values: Template that was loaded; a group has another position in it than here if the order differs.
            loads: Function that returns whether the value of a name was loaded.
        """
        if _is_fsdp1(self._model):
            return  # torch's function needs all options
        groups = values["param_groups"]
        paths: Mapping[str, Any] = flatten_state_dict({"param_groups": groups})[1]
        options = {tuple(path[1:3]) for path in paths.values()}
        loaded = {tuple(path[1:3]) for name, path in paths.items() if loads(name)}
        for number, option in options - loaded:
            groups[number].pop(option, None)

    def load_saved(self, values: Mapping[str, Any]) -> None:
        """Set the optimizers to what was saved: a parameter without a state in `values` has none afterwards."""
        if _is_fsdp1(self._model):
            with _keeping_gradients(self._optimizers):
                set_optimizer_state_dict(
                    self._model, self._optimizers, dict(values), options=StateDictOptions(strict=False)
                )
            return
        names, states, groups = self._require_names(), values["state"], values["param_groups"]
        group_of = {name: number for number, group in enumerate(groups) for name in group.get("params", ())}
        matched = {group_of[name] for name in map(names.__getitem__, map(id, self._parameters())) if name in group_of}
        position = 0
        for optimizer in self._optimizers:
            packed_groups: list[dict[str, Any]] = []
            # States of the optimizer itself, under keys that are no parameters.
            keys: Iterable[Any] = optimizer.state
            others = [key for key in keys if not isinstance(key, torch.Tensor) and key in states]
            packed_states: dict[Any, Any] = {key: states[key] for key in others}
            number = 0
            for group in optimizer.param_groups:
                own = [names[id(parameter)] for parameter in group["params"]]
                # By position if no name is known, as after a rename, and no other group has the names at that position.
                by_position = groups[position] if position < len(groups) and position not in matched else {}
                saved = next((groups[group_of[name]] for name in own if name in group_of), by_position)
                numbers = list(range(number, number + len(own)))
                packed_groups.append({**group, **saved, "params": numbers})
                packed_states.update((n, states[name]) for n, name in zip(numbers, own, strict=True) if name in states)
                number += len(own)
                position += 1
            optimizer.load_state_dict({"state": packed_states, "param_groups": packed_groups})

    def _values(self, names: Mapping[int, str]) -> dict[str, Any]:
        if _is_fsdp1(self._model):
            return self._fsdp1_values()
        states: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for optimizer in self._optimizers:
            packed = optimizer.state_dict()
            by_number: dict[Any, str] = {}
            for packed_group, group in zip(packed["param_groups"], optimizer.param_groups, strict=True):
                own = [names[id(parameter)] for parameter in group["params"]]
                by_number.update(zip(packed_group["params"], own, strict=True))
                groups.append({**packed_group, "params": own})
            states.update((by_number.get(key, key), value) for key, value in packed["state"].items())
        return {"state": states, "param_groups": groups}

    def _fsdp1_values(self) -> dict[str, Any]:
        # torch makes no state while there are gradients.
        fresh = [optimizer for optimizer in self._optimizers if not optimizer.state]
        with _keeping_gradients(fresh, hides=True), _keeping_rates(fresh):
            return get_optimizer_state_dict(self._model, self._optimizers)

    def _make_states(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Make the state of each of these parameters that has none, by a step that changes no parameter."""
        if _is_fsdp1(self._model):
            return  # torch's function does
        lacking = [
            parameter for parameter in parameters if parameter.requires_grad and not optimizer.state.get(parameter)
        ]
        if not lacking:
            return
        with _keeping_gradients([optimizer], hides=True), _keeping_rates([optimizer]):
            for parameter in lacking:
                parameter.grad = torch.zeros_like(parameter)
            for group in optimizer.param_groups:
                if "lr" in group:
                    rate = group["lr"]
                    group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            try:
                with torch.no_grad():
                    optimizer.step()
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise InvalidArgumentError(
                    "The state of this optimizer cannot be made before its first step, and there is nothing to load "
                    "into. Make a step before the restore, or save Opaque(optimizer.state_dict()).",
                    optimizer=type(optimizer).__name__,
                    cause=error,
                ) from error

    def _parameters(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(_parameters_of(optimizer) for optimizer in self._optimizers)

    def _require_names(self) -> dict[int, str]:
        """Return the canonical names of the model's parameters, by `id`; each parameter of the optimizer has one."""
        names = _names_of(self._model)
        foreign = [parameter for parameter in self._parameters() if id(parameter) not in names]
        if foreign:
            raise foreign_parameters_error(
                foreign, [type(optimizer).__name__ for optimizer in self._optimizers], models=type(self._model).__name__
            )
        return names


def find_models(
    optimizers: Sequence[Optimizer], models: Mapping[str, nn.Module], *, where: str = ""
) -> nn.Module | dict[str, nn.Module]:
    """Return the model that has all parameters of the optimizers; or those, by name, that have them together.

    Args:
        optimizers: Optimizers.
        models: Modules by name; of several that have all parameters, the first is taken.
        where: Name of the optimizer in the state, for the error.

    Raises:
        InvalidArgumentError: Parameters belong to none of the modules.
    """
    wanted = {id(parameter): parameter for optimizer in optimizers for parameter in _parameters_of(optimizer)}
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
        raise foreign_parameters_error(
            [wanted[key] for key in wanted if key in left],
            [type(optimizer).__name__ for optimizer in optimizers],
            models=", ".join(models) or "none",
            where=where,
        )
    return chosen


def foreign_parameters_error(
    foreign: Sequence[torch.Tensor], optimizers: Sequence[str], *, models: str, where: str = ""
) -> DcpRemoteError:
    """Return the error of an optimizer with parameters that no model has."""
    return InvalidArgumentError(
        "An optimizer has parameters that no model of the state has. Make the optimizer after the model is wrapped "
        "(fully_shard replaces parameters), and put the model into the state, or OptimizerState(model, optimizer).",
        where=where or None,
        optimizer=", ".join(optimizers),
        models=models,
        parameters=len(foreign),
        shapes=", ".join(str(tuple(parameter.shape)) for parameter in foreign[:_SHAPES_NAMED_MAX]),
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


def _names_of(model: nn.Module) -> dict[int, str]:
    """Return the canonical names of a module's parameters, by `id`; of a tied parameter the first name."""
    if not _is_renamed(model):
        return {id(parameter): name for name, parameter in model.named_parameters()}
    # A flat parameter of the older FSDP has several names; the first stands for it, as only its presence is asked for.
    return {id(parameter): min(_get_fqns(model, name)) for name, parameter in model.named_parameters()}


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


def _first_parts(name: str) -> Iterator[str]:
    """Yield the first parts of a name, up to each dot, and the name itself."""
    return (name[:stop] for stop in (*(number for number, sign in enumerate(name) if sign == "."), len(name)))


def _flat_names(values: Mapping[str, Any]) -> set[str]:
    """Return the names that torch's planner gives to the states of parameters."""
    return set(flatten_state_dict({"state": values["state"]})[0])


@contextmanager
def _keeping_gradients(optimizers: Iterable[Optimizer], *, hides: bool = False) -> Iterator[None]:
    """Put gradients back at the end, also after an error; `hides` takes them away in between."""
    parameters = [parameter for optimizer in optimizers for parameter in _parameters_of(optimizer)]
    gradients = [parameter.grad for parameter in parameters]
    try:
        if hides:
            for parameter in parameters:
                parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def _keeping_rates(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Put learning rates back at the end, also after an error."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    rates = [group["lr"] for group in groups]
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
