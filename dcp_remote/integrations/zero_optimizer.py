"""State of the base optimizer under DeepSpeed's, split by the parameters in its flat partitions."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from dcp_remote import LocalBoxes
from dcp_remote.common.text import join_some
from dcp_remote.errors import InvalidArgumentError, StateMismatchError
from dcp_remote.integrations.zero import Layout, Partition, read_layout

logger = logging.getLogger(__name__)

# Number of a group, and an option of the group, in the name of an entry; of a nested option its first key.
_OPTION = re.compile(r"param_groups\.(\d+)\.([^.]+)")


class ZeroOptimizerState:
    """State of the base optimizer, whose parameters are flat partitions, under the names of the parameters.

    Every parameter of a partition has the partition's step. A `Stateful`.

    Attributes:
        is_required: True if a restore refuses a checkpoint without an optimizer, and takes away states that were not
            saved; False leaves them as they are, also those that the restore excludes.
    """

    def __init__(self, engine: Any) -> None:
        """Keep the engine."""
        self._engine = engine
        self.is_required = False

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's parts; before the first step no parameter has a state, and none is made.

        Raises:
            InvalidArgumentError: A state has another shape than the masters, as that of an 8-bit optimizer.
        """
        layout = read_layout(self._engine)
        state: dict[str, dict[str, Any]] = {}
        for partition in layout.partitions:
            shaped, steps = _split_state(layout, partition)
            for fragment in partition.fragments if shaped or steps else ():
                state[fragment.name] = {key: fragment.boxes_in(value) for key, value in shaped.items()} | steps
        return {"state": state, "param_groups": self._groups(layout)}

    def make_template(self, names: Collection[str]) -> dict[str, Any]:
        """Return the values to load into; states are made if the checkpoint has them and the optimizer does not.

        Raises:
            StateMismatchError: The checkpoint has no optimizer, and `is_required` is true.
            InvalidArgumentError: The optimizer cannot make its state before its first step.
        """
        if self.is_required and not names:
            raise StateMismatchError(
                "The checkpoint has no state of the optimizer; nothing was loaded. To load the rest, pass "
                "load_optimizer_states=False."
            )
        layout = read_layout(self._engine)
        saved = {name.removeprefix("state.").rpartition(".")[0] for name in names if name.startswith("state.")}
        own = [fragment.name for partition in layout.partitions for fragment in partition.fragments]
        states: dict[str, Any] = {}
        if not saved.isdisjoint(own):
            for partition in layout.partitions:
                if not layout.optimizer.state.get(partition.masters):
                    with partition.in_memory():
                        _make_state(layout.optimizer, partition.masters, partition.group)
            states = self.state_dict()["state"]
        lacking = [name for name in states if name not in saved]
        if lacking:
            logger.warning("the checkpoint has no optimizer state of %s", join_some(lacking))
        # A number of its own for each parameter, since each is read.
        states = {
            name: {key: value if isinstance(value, LocalBoxes) else value.clone() for key, value in state.items()}
            for name, state in states.items()
            if name in saved
        }
        groups: dict[int, dict[str, Any]] = {}
        known = layout.optimizer.param_groups
        for found in filter(None, map(_OPTION.match, names)):
            number, key = int(found[1]), found[2]
            value = known[number].get(key) if number < len(known) and key != "params" else None
            groups.setdefault(number, {})[key] = value.clone() if isinstance(value, torch.Tensor) else value
        numbers = range(max(groups, default=-1) + 1)
        return {"state": states, "param_groups": [groups.get(number, {}) for number in numbers]}

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Set steps and options of the groups; the other states were read in place."""
        groups = values.get("param_groups")
        if not groups:  # the checkpoint has no optimizer
            return
        layout = read_layout(self._engine)
        self._set_steps(layout, values.get("state", {}))
        self._set_options(layout, groups)
        layout.flush()

    def _set_steps(self, layout: Layout, states: Mapping[str, Any]) -> None:
        """Set the numbers that all elements of a partition have in common; take away what was not saved."""
        for partition in layout.partitions:
            saved = {one.name: states[one.name] for one in partition.fragments if one.name in states}
            if not saved:
                if self.is_required:
                    layout.forget_state(partition)
                continue
            shaped, steps = _split_state(layout, partition)
            if self.is_required:
                lost = [fragment for fragment in partition.fragments if fragment.name not in saved]
                for fragment, value in itertools.product(lost, shaped.values()):
                    fragment.view_in(value).zero_()
            flat_state = layout.optimizer.state[partition.masters]
            for key in steps:
                found = [state[key] for state in saved.values() if key in state]
                if found:
                    count = len({float(one) for one in found})
                    flat_state[key] = _like(flat_state[key], max(found, key=float), key=key, count=count)

    def _set_options(self, layout: Layout, groups: Sequence[Mapping[str, Any]]) -> None:
        group_of = {name: number for number, group in enumerate(groups) for name in group.get("params") or ()}
        for number, group in enumerate(layout.optimizer.param_groups):
            names = self._names(layout, number)
            saved_number = next((group_of[name] for name in names if name in group_of), None)
            if saved_number is None:
                continue
            options = {key: value for key, value in groups[saved_number].items() if key != "params"}
            for key, value in options.items():
                if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    def _groups(self, layout: Layout) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"} | {"params": self._names(layout, number)}
            for number, group in enumerate(layout.optimizer.param_groups)
        ]

    def _names(self, layout: Layout, group: int) -> list[str]:
        return [
            fragment.name
            for partition in layout.partitions
            if partition.group == group
            for fragment in partition.fragments
        ]


def _split_state(layout: Layout, partition: Partition) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the states of a partition: those of its shape, and the numbers that all its elements have in common."""
    shaped, steps = {}, {}
    shape = partition.values_of(partition.masters).shape
    for key, state in (layout.optimizer.state.get(partition.masters) or {}).items():
        value = partition.values_of(state) if isinstance(state, torch.Tensor) else state
        if isinstance(value, torch.Tensor) and value.shape == shape:
            shaped[key] = value
        else:
            steps[key] = _to_scalar(key, value, shape)
    return shaped, steps


def _to_scalar(key: str, value: Any, shape: Any) -> torch.Tensor:
    """Return a state that all elements of a partition have in common, such as the step, as torch's optimizers have it.

    Raises:
        InvalidArgumentError: This is no number.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor(float(value))
    raise InvalidArgumentError(
        "A state of the optimizer is neither of the shape of its flat partition nor a number, so it cannot be split by "
        "parameters. Use another optimizer, or DeepSpeed's own checkpoints in a local folder.",
        state=key,
        type=type(value).__qualname__,
        shape=tuple(value.shape) if isinstance(value, torch.Tensor) else None,
        partition=tuple(shape),
    )


def _like(current: Any, value: torch.Tensor, *, key: str, count: int) -> Any:
    """Return a loaded number in the form in which the optimizer keeps it."""
    if count > 1:
        logger.warning(
            "parameters of one flat partition have %d different values of %s: the largest, %g, counts for all of them",
            count,
            key,
            float(value),
        )
    if isinstance(current, torch.Tensor):
        return current.copy_(value)
    return type(current)(float(value))


def _make_state(optimizer: Any, masters: torch.Tensor, group: int) -> None:
    """Make the state of a partition by a step with zero gradients and a learning rate of zero.

    Raises:
        InvalidArgumentError: The optimizer cannot make such a step.
    """
    groups, gradient = optimizer.param_groups, masters.grad
    rate = groups[group].get("lr", 0.0)
    zero = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    try:
        masters.grad = torch.zeros_like(masters)
        optimizer.param_groups = [groups[group] | {"params": [masters], "lr": zero}]
        with torch.no_grad():
            optimizer.step()
        assert optimizer.state.get(masters), "the step has made no state"
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InvalidArgumentError(
            "The state of this optimizer cannot be made before its first step, and there is nothing to load into. Make "
            "a step before load_checkpoint, or pass load_optimizer_states=False.",
            optimizer=type(optimizer).__qualname__,
            cause=error,
        ) from error
    finally:
        optimizer.param_groups, masters.grad = groups, gradient
