"""`training_state`: the state of a training in one call, under the names that all frameworks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch import nn
from torch.optim import Optimizer

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.manager.random_states import RandomSource, RandomStates
from dcp_remote.serialization.module_state import ModelState, OptimizerState, find_models, names_parameters_itself
from dcp_remote.serialization.opaque import is_stateful
from dcp_remote.serialization.state_dict import PER_RANK_KEY, PerRank

_Value = TypeVar("_Value")
OneOrNamed: TypeAlias = _Value | Mapping[str, _Value]


def training_state(
    *,
    model: OneOrNamed[nn.Module] | None = None,
    optimizer: OneOrNamed[Optimizer] | Sequence[Optimizer] | None = None,
    scheduler: OneOrNamed[Any] | Sequence[Any] | None = None,
    loader: OneOrNamed[Any] | None = None,
    scaler: OneOrNamed[Any] | None = None,
    ema: OneOrNamed[Any] | None = None,
    random_states: bool | RandomStates = True,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the state of a training, as `CheckpointManager.save` and `restore` take it; made once, before training.

        state = training_state(model=model, optimizer=optimizer, scheduler=scheduler, extra={"epoch": 0})
        step = checkpoints.restore(state) or 0
        ...
        state["epoch"] = epoch
        checkpoints.save(step, state)

    Entries have the same names under FSDP, DDP, tensor parallelism, `torch.compile` and none of them, and at any number
    of ranks: what one job saves, any other loads. The result is an ordinary dict, which may be changed. No copy is made
    and nothing is asked of the objects here; `save` and `restore` do that.

    Args:
        model: Model or models by name: `model.<fqn>`, `model.<name>.<fqn>`.
        optimizer: Optimizer, or optimizers by name, made after the model was wrapped: `optim.state.<fqn>.<key>`,
            `optim.param_groups.…`, with the name after `optim.`. A sequence of optimizers is saved as one. Each finds
            its model by its parameters; one with parameters of several models puts their names before the parameters'.
        scheduler: Scheduler or schedulers: `scheduler.…`.
        loader: Data loader with `state_dict` and `load_state_dict`, as torchdata's `StatefulDataLoader`, or several by
            name. Each rank saves its own position: `per_rank.<rank>.loader`, or `loader.<name>`.
        scaler: Gradient scaler, as `torch.amp.GradScaler`: `scaler.…`.
        ema: Module of averaged weights, as `torch.optim.swa_utils.AveragedModel` (made before `fully_shard`, which its
            `module` needs, too: FSDP2 cannot be copied), or an object with `state_dict` and `load_state_dict`, or such
            by name: `ema.…`. A dict of tensors goes into `extra`.
        random_states: True for the random states of each rank under `random`; `RandomStates(name=generator)` for those
            of generators of your own as well.
        extra: Further entries, as they are: tensors, objects, `Stateful`s, `PerRank` and `Opaque` values. A restore
            replaces those that are no `Stateful`s in the returned dict: read them there.

    Raises:
        InvalidArgumentError: An argument is of the wrong type, an optimizer has parameters of no model, a key of
            `extra` is taken, or a value of `extra` is a generator of random numbers.
    """
    own_states = random_states if isinstance(random_states, RandomStates) else RandomStates()
    parts: dict[str, Any] = {
        "model": _each(model, lambda value: ModelState(_require(value, nn.Module, "model"))),
        "optim": _optimizer_states(optimizer, _named(model)),
        "scheduler": _each(scheduler, partial(_require_stateful, what="scheduler")),
        **{f"loader.{name}" if name else "loader": _as_loader(value) for name, value in _named(loader).items()},
        "scaler": _each(scaler, partial(_require_stateful, what="scaler")),
        "ema": _each(ema, _as_average),
        "random": PerRank(own_states) if random_states else None,
    }
    state = {key: value for key, value in parts.items() if value is not None}
    if not isinstance(extra, Mapping | None):
        raise InvalidArgumentError("extra must be a dict.", type=type(extra).__qualname__)
    taken = [key for key in extra or {} if key in state or key == PER_RANK_KEY]
    if taken:
        raise InvalidArgumentError("Keys of extra are taken. Choose others.", keys=", ".join(taken))
    generators = [
        key
        for key, value in (extra or {}).items()
        if isinstance(value.value if isinstance(value, PerRank) else value, RandomSource)
    ]
    if generators:
        raise InvalidArgumentError(
            "A restore would put new generators into the state, and leave those that training draws from as they are. "
            "Pass them as random_states=RandomStates(name=generator) in place of extra.",
            keys=", ".join(generators),
        )
    return state | dict(extra or {})


def _named(values: Any) -> dict[str, Any]:
    """Return values by name; one without a name under an empty one."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        return {"": values}
    wrong = [name for name in values if not isinstance(name, str) or not name]
    if wrong:
        raise InvalidArgumentError("Names must be strings.", names=", ".join(map(repr, wrong[:5])))
    return dict(values)


def _each(values: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a converted value, or the converted values of a mapping or sequence in a dict or list; None for None."""
    if isinstance(values, Mapping):
        return {name: convert(value) for name, value in _named(values).items()}
    if isinstance(values, Sequence):
        return [convert(value) for value in values]
    return None if values is None else convert(values)


def _as_average(value: Any) -> Any:
    return ModelState(value) if isinstance(value, nn.Module) else _require_stateful(value, "ema")


def _as_loader(value: Any) -> PerRank[Any]:
    return value if isinstance(value, PerRank) else PerRank(_require_stateful(value, "loader"))


def _optimizer_states(optimizer: Any, models: Mapping[str, nn.Module]) -> Any:
    if optimizer is None:
        return None
    if isinstance(optimizer, Mapping):
        return {name: _optimizer_state([value], models, name) for name, value in _named(optimizer).items()}
    return _optimizer_state(list(optimizer) if isinstance(optimizer, Sequence) else [optimizer], models, "")


def _optimizer_state(optimizers: Iterable[Any], models: Mapping[str, nn.Module], name: str) -> Any:
    taken = [_require(value, Optimizer, "optimizer") for value in optimizers]
    if len(taken) == 1 and names_parameters_itself(taken[0]):
        return taken[0]
    return OptimizerState(find_models(taken, models, where=f"optim.{name}".strip(".")), taken)


def _require(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise InvalidArgumentError(
            f"{what} must be a {kind.__module__.partition('.')[0]} {kind.__name__}, or several by name.",
            type=f"{type(value).__module__}.{type(value).__qualname__}",
        )
    return value


def _require_stateful(value: Any, what: str) -> Any:
    if not is_stateful(value):
        raise InvalidArgumentError(
            f"{what} has no state_dict and load_state_dict. "
            + (
                "A plain DataLoader has no position to save: use torchdata's StatefulDataLoader, or leave it out."
                if what == "loader"
                else "Give such an object, or put the value into extra."
            ),
            type=f"{type(value).__module__}.{type(value).__qualname__}",
        )
    return value
