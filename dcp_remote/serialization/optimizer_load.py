"""Loads of optimizers that leave each state as it was given: dtype, bits, and the device on which it lies.

torch's `Optimizer.load_state_dict` (2.13) casts each state but `step` to the dtype and device of a floating-point
parameter: moments of fp32 over bf16 weights become bf16, and counters and masks bf16 as well.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_remote.errors import StateMismatchError

logger = logging.getLogger(__name__)

_NAMES_SHOWN_MAX = 5

# Attributes in which torch keeps hooks for the loads of one optimizer (optimizer.py of torch 2.13).
_LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


@contextmanager
def without_casts(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Let `Optimizer.load_state_dict` of these optimizers, and of those that they wrap, keep states as they are given.

    The casts are undone before the hooks that users registered, and what `__setstate__` and an optimizer's own
    `load_state_dict` do apart from the casts stays.
    """
    with ExitStack() as stack:
        for optimizer in chain.from_iterable(map(_iterate_wrapped, optimizers)):
            given: dict[str, Any] = {}
            stack.callback(optimizer.register_load_state_dict_pre_hook(partial(_note, given)).remove)
            undo = partial(_undo_casts, given)
            stack.callback(optimizer.register_load_state_dict_post_hook(undo, prepend=True).remove)
        yield


def load_exactly(optimizer: Optimizer, values: Mapping[str, Any], *, where: str) -> None:
    """Load what an optimizer's own `state_dict` returned, without casts, and check as `require_loaded` does."""
    with without_casts([optimizer]):
        optimizer.load_state_dict(dict(values))
    require_loaded([optimizer], values, optimizer.state_dict(), where=where)


def require_loaded(
    optimizers: Iterable[Optimizer], loaded: Mapping[str, Any], found: Mapping[str, Any], *, where: str = ""
) -> None:
    """Require that optimizers hold the tensors that were loaded: `found` is what `state_dict` returns after the load.

    Raises a `StateMismatchError` if a state has another dtype, shape or other bits. An optimizer that keeps its states
    in another form passes if its `state_dict` gives back what was loaded. A warning names the states that are gone, as
    those that an optimizer makes anew in each step, and drops when it loads. One with hooks for loads of the user is
    not compared: these change states on purpose. `where` is the name of the optimizer in the state, for the error.
    """
    given = list(optimizers)
    if any(vars(one)[name] for optimizer in given for one in _iterate_wrapped(optimizer) for name in _LOAD_HOOKS):
        return
    after: Mapping[str, Any] = flatten_state_dict(dict(found))[0]
    before: Mapping[str, Any] = flatten_state_dict(dict(loaded))[0]
    tensors = {name: value for name, value in before.items() if isinstance(value, torch.Tensor)}
    changed = [
        f"{name} ({_text(value)}, then {_text(after[name])})"
        for name, value in tensors.items()
        if name in after and _has_changed(value, after[name])
    ]
    kinds = ", ".join(type(optimizer).__name__ for optimizer in given)
    if changed:
        raise StateMismatchError(
            "An optimizer changed states while it took them from its checkpoint, so that training would not go on as "
            "it was saved; other values were already loaded. Correct its load_state_dict, after which state_dict must "
            "return what was loaded, or save Opaque(optimizer.state_dict()) and apply the value yourself.",
            where=where or None,
            optimizer=kinds,
            states="; ".join(changed[:_NAMES_SHOWN_MAX]),
            found=len(changed),
        )
    if gone := [name for name in tensors if name not in after]:
        names = ", ".join(gone[:_NAMES_SHOWN_MAX]) + (", …" if len(gone) > _NAMES_SHOWN_MAX else "")
        logger.warning(
            "an optimizer of the class %s dropped %d of the states that its checkpoint has (%s), and training goes on "
            "without them. If a step does not make them anew, correct the optimizer's load_state_dict",
            *(kinds, len(gone), names),
        )


def _iterate_wrapped(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield an optimizer and those in its attributes, as wrappers and containers of frameworks have them.

    A wrapper that did not call `Optimizer.__init__`, as that of Accelerate, loads nothing itself, and is left out.
    """
    found = [optimizer]
    for one in found:  # grows in the loop
        attributes = vars(one)
        if all(name in attributes for name in _LOAD_HOOKS):
            yield one
        for name, value in attributes.items():
            if name in {"state", "param_groups"}:
                continue
            inner = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
            for other in inner:
                if isinstance(other, Optimizer) and other not in found:
                    found.append(other)


def _note(given: dict[str, Any], _optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    given.update(values)


def _undo_casts(given: Mapping[str, Any], optimizer: Optimizer) -> None:
    numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in given["state"] and parameter in optimizer.state:
            optimizer.state[parameter] = _as_given(given["state"][number], optimizer.state[parameter])


def _as_given(given: Any, cast: Any, key: object = None) -> Any:
    """Return a state as it was given, in place of the copy that torch has cast."""
    if isinstance(given, torch.Tensor):
        if not isinstance(cast, torch.Tensor) or given.shape != cast.shape:
            return cast  # changed by `__setstate__`
        if (given.dtype, given.device) == (cast.dtype, cast.device):
            return cast
        # Kernels of fused and capturable optimizers read "step" on the parameter's device, to which torch moves it.
        return given.to(cast.device) if key == "step" else given
    if isinstance(given, dict) and isinstance(cast, dict):
        return cast | {key: _as_given(value, cast[key], key) for key, value in given.items() if key in cast}
    if isinstance(given, list | tuple) and type(given) is type(cast) and len(given) == len(cast):
        return type(given)(map(_as_given, given, cast))
    # torch makes a new string of the generator by which it casts the parts of a collection.
    return given if isinstance(given, str) else cast


def _has_changed(loaded: torch.Tensor, found: object) -> bool:
    if found is loaded:
        return False
    if not isinstance(found, torch.Tensor) or (found.dtype, found.shape) != (loaded.dtype, loaded.shape):
        return True
    if isinstance(loaded, DTensor) and isinstance(found, DTensor):
        return _has_changed(loaded.to_local(), found.to_local())
    is_plain = all(type(one) is torch.Tensor and one.layout is torch.strided for one in (loaded, found))
    # Bits, since NaN differs from itself. Tensors of other kinds may know no comparison.
    return is_plain and not loaded.is_quantized and not torch.equal(_bits(loaded), _bits(found).to(loaded.device))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _text(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return "no tensor"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
