"""First save of a training: values that the same program could not restore when it starts again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dcp_remote.serialization.files import Files
from dcp_remote.serialization.leaves import FlatState, Leaf, Path, is_flattened, iterate_leaves, name_of
from dcp_remote.serialization.module_state import ModelState, OptimizerState, names_parameters_itself, needs_closure
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
    """

    def __init__(self, url: str) -> None:
        """Begin without a state."""
        self._url = url
        self._at_start: dict[Path, _Outline | Exception] | None = None

    def note_start(self, state: Mapping[str, Any]) -> None:
        """Note the names of the state of a restore that found no checkpoint; the same call on all ranks."""
        self._at_start = {leaf.path: _try_outline(leaf.value) for leaf in _find_objects(state)}

    def forget_start(self) -> None:
        """Note that the program has restored a checkpoint, or has saved: there is nothing to check."""
        self._at_start = None

    def check(self, state: Mapping[str, Any], saved: FlatState, *, is_coordinator: bool) -> None:
        """Warn, once, of what the same program could not restore; `saved` is what is saved of the user's state."""
        at_start, self._at_start = self._at_start, None
        if at_start is None or not is_coordinator:
            return
        outlines: dict[Path, _Outline] = {path: {} for path in at_start}
        for name, value in saved.values.items():
            path = saved.paths[name]
            for depth in range(1, len(path) + 1):
                if path[:depth] in outlines:
                    outlines[path[:depth]][name_of(path[depth:])] = _shape_of(value)
        for leaf in _find_objects(state):
            if leaf.path not in at_start:
                continue
            if found := _difference(at_start[leaf.path], outlines[leaf.path]):
                logger.warning(
                    "%s: a new job of this program could not restore %s (%s), which %s. Put Opaque(...) around the "
                    "value, which is then stored whole (one for all ranks; PerRank(...): one of each), or give the "
                    "object a method make_template(names).",
                    *(self._url, leaf.name, type(leaf.value).__qualname__, found),
                )
        for optimizer in _find_optimizers(state):
            if needs_closure(optimizer):
                logger.warning(
                    "%s: a new job of this program could not restore %s, which cannot make states to load into: its "
                    "step needs a closure. Put PerRank(...) around the optimizer, which is then stored whole",
                    *(self._url, type(optimizer).__qualname__),
                )


def _find_objects(state: Mapping[str, Any]) -> list[Leaf]:
    """Return the values that a restore compares with the saved ones; models and optimizers aside."""
    found = [
        leaf
        for key in state
        for leaf in iterate_leaves(state[key], (key,), descends=holds_stateful)
        if not isinstance(leaf.value, nn.Module | ModelState | OptimizerState | Optimizer | PerRank | Opaque | Files)
        and not callable(getattr(leaf.value, "make_template", None))
    ]
    # Sorted as for a save, since `state_dict` may be a collective operation.
    return sorted(found, key=lambda leaf: [*map(str, leaf.path)])


def _find_optimizers(state: Mapping[str, Any]) -> Iterator[Optimizer]:
    """Yield the optimizers whose states are made by a step before they are loaded."""
    for leaf in iterate_leaves(state):
        if isinstance(leaf.value, OptimizerState):
            yield from leaf.value.optimizers
        elif isinstance(leaf.value, Optimizer) and not names_parameters_itself(leaf.value):
            yield leaf.value


def _try_outline(value: Any) -> _Outline | Exception:
    try:
        return _outline(value.state_dict() if is_stateful(value) else value)
    except Exception as error:  # noqa: BLE001  # reported by the first save: a restore would raise it, too
        return error


def _outline(values: Any) -> _Outline:
    return {
        leaf.name: _shape_of(leaf.value)
        for leaf in iterate_leaves(values, descends=is_flattened)
        if not isinstance(leaf.value, Mapping)  # an empty one, which has no entry
    }


def _shape_of(value: object) -> tuple[torch.Size, torch.dtype] | None:
    return (value.size(), value.dtype) if isinstance(value, torch.Tensor) else None


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
