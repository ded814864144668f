"""First save of a training: values that the same program could not restore when it starts again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.optim import Optimizer

from dcp_remote.serialization.files import Files
from dcp_remote.serialization.module_state import (
    ModelState,
    OptimizerState,
    names_parameters_itself,
    needs_closure,
)
from dcp_remote.serialization.opaque import Opaque, is_stateful
from dcp_remote.serialization.state_dict import PerRank, holds_stateful

logger = logging.getLogger(__name__)

_NAMES_SHOWN_MAX = 5

# Shape and dtype of each tensor by its name, and None for each object.
_Outline = dict[str, "tuple[torch.Size, torch.dtype] | None"]


class FirstSave:
    """Check of a job that began without a checkpoint: its first save against its state at the start.

    A program that asks a run for its newest checkpoint shows by its state what it will restore into when it starts
    again. Only what is certain is reported: dicts, lists, tensors and objects (by their `state_dict`) that have other
    names, shapes or dtypes after training than before, and optimizers that can make no states to load into. Nothing is
    run for it but `state_dict`, and no message is sent.

    Args:
        url: URL of the run, for the log.
    """

    def __init__(self, url: str) -> None:
        """Begin without a state."""
        self._url = url
        self._at_start: dict[tuple[str, ...], _Outline | Exception] | None = None

    def note_start(self, state: Mapping[str, Any]) -> None:
        """Note the names of the state of a restore that found no checkpoint; the same call on all ranks."""
        self._at_start = {path: _try_outline(value) for path, value in _iterate_objects(state)}

    def forget_start(self) -> None:
        """Note that the program has restored a checkpoint, or has saved: there is nothing to check."""
        self._at_start = None

    def check(self, state: Mapping[str, Any], saved: Mapping[str, Any], *, is_coordinator: bool) -> None:
        """Warn, once, of what the same program could not restore.

        Args:
            state: State that is saved, as the user gave it.
            saved: Values of the state, as they are saved.
            is_coordinator: True on the rank that writes the log.
        """
        at_start, self._at_start = self._at_start, None
        if at_start is None or not is_coordinator:
            return
        for path, value in _iterate_objects(state):
            found = _difference(at_start[path], _outline(_value_at(saved, path))) if path in at_start else ""
            if found:
                logger.warning(
                    "%s: a new job of this program could not restore %s (%s), which %s. Put Opaque(...) around the "
                    "value, which is then stored whole (one for all ranks; PerRank(...): one of each), or give the "
                    "object a method make_template(names).",
                    *(self._url, ".".join(path), type(value).__qualname__, found),
                )
        for optimizer in _iterate_optimizers(state):
            if needs_closure(optimizer):
                logger.warning(
                    "%s: a new job of this program could not restore %s, which cannot make states to load into: its "
                    "step needs a closure. Put PerRank(...) around the optimizer, which is then stored whole",
                    *(self._url, type(optimizer).__qualname__),
                )


def _iterate_objects(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values that a restore compares with the saved ones, with their paths; models and optimizers aside."""
    if isinstance(value, dict | list) and (not path or holds_stateful(value)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        # Sorted as for a save, since `state_dict` may be a collective operation.
        for key, inner in sorted(items, key=lambda item: str(item[0])):
            yield from _iterate_objects(inner, (*path, str(key)))
    elif isinstance(value, nn.Module | ModelState | OptimizerState | Optimizer | PerRank | Opaque | Files):
        return
    elif not callable(getattr(value, "make_template", None)):
        yield path, value


def _iterate_optimizers(value: Any) -> Iterator[Optimizer]:
    """Yield the optimizers whose states are made by a step before they are loaded."""
    if isinstance(value, OptimizerState):
        yield from value.optimizers
    elif isinstance(value, Optimizer):
        if not names_parameters_itself(value):
            yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _iterate_optimizers(inner)


def _try_outline(value: Any) -> _Outline | Exception:
    try:
        return _outline(value.state_dict() if is_stateful(value) else value)
    except Exception as error:  # noqa: BLE001  # reported by the first save: a restore would raise it, too
        return error


def _outline(values: Any) -> _Outline:
    flat: Mapping[str, Any] = flatten_state_dict(values if isinstance(values, dict) else {"": values})[0]
    return {
        name.lstrip("."): (value.size(), value.dtype) if isinstance(value, torch.Tensor) else None
        for name, value in flat.items()
    }


def _value_at(values: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        values = values[int(part)] if isinstance(values, list) else {str(key): values[key] for key in values}[part]
    return values


def _difference(at_start: _Outline | Exception, saved: _Outline) -> str:
    """Return how a saved object differs from the one at the start; "" if a restore finds what it needs."""
    if isinstance(at_start, Exception):
        return f"has no state_dict before the training ({type(at_start).__name__}: {at_start})"
    texts = []
    for names, what in (
        ([name for name in saved if name not in at_start], "has values that it lacks before the training"),
        ([name for name in at_start if name not in saved], "lacks values that it has before the training"),
        (
            [name for name in saved if name in at_start and saved[name] != at_start[name]],
            "has values of other shapes or dtypes than before the training",
        ),
    ):
        if names:
            more = ", …" if len(names) > _NAMES_SHOWN_MAX else ""
            texts.append(f"{what}: {', '.join(names[:_NAMES_SHOWN_MAX])}{more}")
    return "; ".join(texts)
