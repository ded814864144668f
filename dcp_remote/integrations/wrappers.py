"""Objects of a training as frameworks hold them: wrapped, or in lists and dicts; and methods that replace theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dcp_remote import RandomStates, training_state

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Modules by which `torch.compile` and activation checkpointing wrap others.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def replaces(owner: Any, name: str) -> Callable[[_Function], _Function]:
    """Return a decorator for the function that takes the place of a method, or of a module's function.

    The function gets the one that it replaces, and then all arguments.
    """
    own = getattr(owner, name)

    def replace(function: _Function) -> _Function:
        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(own, *args, **kwargs)

        setattr(owner, name, call)
        return function

    return replace


def canonical(name: str) -> str:
    """Return the name of a parameter or module without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside of Accelerate's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def one_or_named(values: Mapping[str, Any] | Sequence[Any]) -> Any:
    """Return a value alone; of several a dict, by name or by number; None if there is none."""
    named = values if isinstance(values, Mapping) else {str(number): value for number, value in enumerate(values)}
    return next(iter(named.values())) if len(named) == 1 else dict(named) or None


def training_parts(
    engine: Mapping[str, Any],
    *,
    models: Mapping[str, Any] | Sequence[Any],
    optimizers: Mapping[str, Any] | Sequence[Any],
    schedulers: Mapping[str, Any] | Sequence[Any],
    scaler: Any = None,
    random_states: bool | RandomStates = False,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the state of a training under the names that all frameworks share; the same to save and to load.

    Args:
        engine: State of an engine of DeepSpeed, which takes the place of models, optimizers and scaler; {} without one.
        models: Models, by name or in a list.
        optimizers: Optimizers.
        schedulers: Schedulers, which take the place of the engine's.
        scaler: Gradient scaler, which is left out unless it is enabled.
        random_states: As of `training_state`.
        extra: As of `training_state`.
    """
    has_scaler = scaler is not None and not engine and scaler.is_enabled()
    own = training_state(
        model=None if engine else one_or_named(models),
        optimizer=None if engine else one_or_named(optimizers),
        scheduler=one_or_named(schedulers),
        scaler=scaler if has_scaler else None,
        random_states=random_states,
        extra=extra,
    )
    return dict(engine) | own
