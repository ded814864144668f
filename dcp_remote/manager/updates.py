"""Updates: the moments at which training changes the state, before which the copies of a save must have ended."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.saving.late_copies import Held, LateCopies
from dcp_remote.saving.staging import tensors_of
from dcp_remote.serialization.leaves import FlatState
from dcp_remote.serialization.state_dict import TensorRoles


class Updates:
    """Optimizers that were given to `watch`, and the copies of the last save that may be under way.

    Late are the copies of what these optimizers own, because each `step` of theirs waits for the copies. If there was
    no such optimizer when `come` was called, late are the copies of all values but those of `TensorRoles.is_buffer`,
    which change in a forward pass, and of numbers that are not trained. A storage is copied late only if all that lies
    in it may be.
    """

    def __init__(self) -> None:
        """Begin without an optimizer: all copies end before `save` returns."""
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._is_called = False
        self._owned: dict[int, set[int]] = {}  # `id`s of storages in the last state, by that of their optimizer
        self._late: weakref.ref[LateCopies] | None = None
        self._pid = os.getpid()

    def watch(self, optimizer: object) -> None:
        """Let each `step` of an optimizer wait for the copies of what it changes; a second call does nothing.

        Raises:
            InvalidArgumentError: The object is no optimizer of torch, or calls no hooks.
        """
        # A wrapper, as of accelerate, is an `Optimizer` by its class and calls the hooks of the one in it.
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer) and inner is not optimizer:
            optimizer = inner
        # An optimizer of a class that does not call `Optimizer.__init__` calls no hooks.
        if not isinstance(optimizer, Optimizer) or "_optimizer_step_pre_hooks" not in vars(optimizer):
            raise InvalidArgumentError(
                "watch() takes a torch.optim.Optimizer. Before any other object changes the state, call "
                "before_update().",
                type=type(optimizer).__qualname__,
            )
        held = self._optimizers.get(id(optimizer))
        if held is None or held() is None:
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)
            self._owned.pop(id(optimizer), None)  # of a dead optimizer that had the same `id`
            # Not traced by `torch.compile`, which would move the wait for the copies to another place of the step.
            self._hooks.append(optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)))

    def come(self) -> None:
        """Wait for the copies of the whole state."""
        self._is_called |= not self._hooks
        if (late := self._copies_under_way()) is not None:
            late.protect()

    def choose(self, state: FlatState, held: Iterable[Held], roles: TensorRoles) -> LateCopies:
        """Return the object that copies what of a state may be copied late.

        `held` are the tensors of the state. The object also looks at tensors of the optimizers, since the state may
        hold views with counters of their own, as of parameters of FSDP1.
        """
        owned: dict[int, list[torch.Tensor]] = {}
        self._owned = {}
        for optimizer in filter(None, (each() for each in self._optimizers.values())):
            tensors = list(tensors_of([[group["params"] for group in optimizer.param_groups], dict(optimizer.state)]))
            # As of now: a parameter may get other memory before the step, as by `Module.to`.
            self._owned[id(optimizer)] = set(map(_storage_id, tensors))
            for tensor in tensors:
                owned.setdefault(_storage_id(tensor), []).append(tensor)
        if not owned and not self._is_called:
            return LateCopies()
        late: dict[int, list[tuple[str, torch.Tensor]]] = {}
        early: set[int] = set()
        for name, tensor, storage in held:
            key = id(storage)
            # Ranks compare numbers that are neither parameters nor states of optimizers before the copies end.
            is_compared = not tensor.dim() and name not in roles.trained
            if (owned and key not in owned) or roles.is_buffer(name) or is_compared:
                early.add(key)
                continue
            if key not in late:
                late[key] = [(name, other) for other in owned.get(key, ())]
            late[key].append((name, tensor))
            if type(state.values[name]) is DTensor:  # operations raise its own counter, and not its local tensor's
                late[key].append((name, state.values[name]))
        copies = LateCopies({key: tensors for key, tensors in late.items() if key not in early})
        self._late = weakref.ref(copies)
        return copies

    def close(self) -> None:
        """Let the optimizers be."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if (late := self._copies_under_way()) is not None:
            late.protect(self._owned.get(id(optimizer)))  # all, if it was watched after the save

    def _copies_under_way(self) -> LateCopies | None:
        # A forked process has memory of its own, and none of the threads that copy.
        late = self._late() if self._late is not None and os.getpid() == self._pid else None
        return late if late is not None and late.is_protecting else None


def _storage_id(tensor: torch.Tensor) -> int:
    try:
        return id(tensor.untyped_storage())
    except NotImplementedError:  # of a subclass without memory of its own
        return 0
