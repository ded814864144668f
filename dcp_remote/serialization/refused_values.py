"""Values of a state that need code to load: listed before a save, or all at once when a save refuses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dcp_remote.errors import UnsafeObjectError
from dcp_remote.serialization.objects import find_refusals
from dcp_remote.serialization.opaque import mark_of
from dcp_remote.serialization.state_dict import PER_RANK_KEY, as_state, build_saved_state

# Values that an error names. The error is sent to all ranks, so it stays short.
_NAMED_MAX = 10
_REASON_CHARACTERS_MAX = 100


@dataclass(frozen=True, slots=True)
class RefusedValue:
    """Value that a save without `allow_pickle` refuses.

    Attributes:
        path: Path in the state, such as `trainer.hparams['optimizer']`: names joined by dots as far as torch's planner
            flattens the state, then the way into the object.
        type_name: Type of the value as `module.qualname`; of a class or function its own name.
        reason: Reason, as half a sentence.
    """

    path: str
    type_name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.type_name}): {self.reason}"


def refused_values(state: Mapping[str, Any] | nn.Module) -> list[RefusedValue]:
    """Return the values of a state that a save would refuse, because loading them would run code; all at once.

    Asks each `Stateful` for its `state_dict()`, as a save does, and encodes every value that is no tensor. Sends no
    request. Covers the values of this rank: call it on every rank, or with the state of one.

    Raises:
        InvalidArgumentError: The state is none, see `CheckpointManager.save`.
    """
    saved = build_saved_state(as_state(state), 0)
    own = {name: str(path[-1]) for name, path in saved.paths.items() if path[0] == PER_RANK_KEY}
    return _find_all({own.get(name, name): value[0] if name in own else value for name, value in saved.values.items()})


def name_all_refused(error: UnsafeObjectError, values: Mapping[str, Any]) -> UnsafeObjectError:
    """Return the error of a save that names all refused values, not only those of the first object.

    `values` are all values of the state by name, tensors too; `error` is returned if no other object is refused.
    """
    refused = _find_all(values)
    if len({value.path.partition("[")[0] for value in refused}) < 2:  # noqa: PLR2004  # the error names those of one
        return error
    return UnsafeObjectError(
        error.what,
        values="; ".join(f"{value.path} ({value.type_name})" for value in refused[:_NAMED_MAX]),
        why="; ".join(dict.fromkeys(value.reason[:_REASON_CHARACTERS_MAX] for value in refused[:_NAMED_MAX])),
        refused=len(refused),
    )


def _find_all(values: Mapping[str, Any]) -> list[RefusedValue]:
    return [
        RefusedValue(f"{name}{found.where}", found.type_name, found.why)
        for name, value in values.items()
        if not isinstance(value, torch.Tensor)
        for found in find_refusals(mark_of(value)[1])
    ]
