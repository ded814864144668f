"""Stage a state: copy it before training continues, into buffers that the next save uses again.

A staged copy is stored exactly as the state itself would be (`wait=True`). torch's stager does not achieve that:
it drops the conjugate and negative bits of lazy views, fails on tensors that are more than their memory (sparse,
quantized), and copies the attributes of parameters, including modules.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from dcp_remote.common.memory import available_memory_bytes
from dcp_remote.common.text import human_bytes
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError, UnsafeObjectError
from dcp_remote.format.json_tree import type_name
from dcp_remote.saving.device_copy import wait_for_devices
from dcp_remote.saving.late_copies import Buffers, Copy, Held, LateCopies
from dcp_remote.serialization.leaves import nesting_error
from dcp_remote.serialization.local_boxes import LocalBoxes
from dcp_remote.serialization.opaque import ATOMS
from dcp_remote.serialization.tensors import choose_encoding, empty_tensor, is_plain
from dcp_remote.serialization.torch_tags import lacks_memory

logger = logging.getLogger(__name__)

# Refusals, and lack of memory: raised to the caller as they are.
_RAISED_AS_THEY_ARE = (DcpRemoteError, MemoryError, torch.OutOfMemoryError)

_ATOMS = ATOMS | {torch.dtype, torch.device, torch.Size}


class Stager:
    """Stager that copies a state into buffers, which it uses again while the storages of the state are alive.

    On a host with a GPU, the buffers are pinned and the copies do not block. Whole storages are copied: a small view of
    a large tensor takes the memory of the large one.
    """

    def __init__(self) -> None:
        """Start without buffers; nothing is allocated."""
        self._buffers = Buffers()
        self.late = LateCopies()  # of the last state
        self.copied_bytes = 0  # size of the buffers for the last state

    @torch.inference_mode(mode=False)  # what is made in that mode cannot be written to outside of it
    @torch.no_grad()
    def stage(
        self, state: dict[str, Any], choose_late: Callable[[list[Held]], LateCopies] = lambda _: LateCopies()
    ) -> dict[str, Any]:
        """Return a complete copy of a state on the CPU, objects included. The copy is valid until the next call.

        `choose_late` returns the object that copies some storages later, of those of the state: the copy of the state
        lacks their values until its `finish` has returned.

        Sharing is preserved: tied tensors, views of one memory, lists in two places. Python attributes of plain tensors
        are not copied: tensors inside objects keep their attributes, all others lose them. Errors name the key of a
        tensor that has no data, or of a value that cannot be copied.
        """
        self.cancel()
        held = [
            Held(name, tensor, storage)
            for name, value in state.items()
            for tensor in tensors_of(value)
            if (storage := storage_of(tensor)) is not None
        ]
        self.late = choose_late(held)
        copies = self._copy_storages(list({id(each.storage): each.storage for each in held}.values()))
        copier = _StateCopier(copies, {id(each.tensor): each.storage for each in held}, self.late)
        copied: dict[str, Any] = {}
        for key, value in state.items():
            try:
                copied[key] = copier.copy_value(value, (key,))
            except RecursionError as error:
                raise nesting_error(key) from error
        return copied

    def cancel(self) -> None:
        """Begin no copy of the last state any more, and wait for those under way."""
        self.late.cancel()
        self.late = LateCopies()

    def close(self) -> None:
        """Free the buffers."""
        self.cancel()
        self._buffers.clear()

    def _copy_storages(self, storages: list[torch.UntypedStorage]) -> dict[int, torch.UntypedStorage]:
        """Return the copies of storages, some of which are only begun, by the `id` of the original."""
        new_bytes = self._buffers.fit(storages)
        available_bytes = available_memory_bytes() if new_bytes else None
        self.copied_bytes = sum(storage.nbytes() for storage in storages)
        if available_bytes is not None and new_bytes > available_bytes:
            logger.warning(
                "The copy of the state needs %s of memory, and %s is free: this process may be killed. wait=True saves "
                "without a copy",
                human_bytes(new_bytes),
                human_bytes(available_bytes),
            )
        copies = [Copy(storage, _bytes_of(storage), self._buffers.of(storage)) for storage in storages]
        now = [each for each in copies if not self.late.takes(each.storage)]
        try:
            for each in now:
                _copy(each)
        finally:
            # Also after an error: the buffers must not be used again while a device writes to them.
            wait_for_devices(each.storage.device for each in now)
        self.late.begin([each for each in copies if self.late.takes(each.storage)])
        return {id(each.storage): each.into.untyped_storage() for each in copies}


def _copy(each: Copy) -> None:
    each.into.copy_(each.source, non_blocking=True)


def tensors_of(held: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a value for which `Stager` keeps buffers: those that are not inside other objects."""
    stack: list[Any] = [held]
    seen: set[int] = set()
    while stack:
        value = stack.pop()
        if type(value) is DTensor:
            stack.append(value._local_tensor)
        elif type(value) is ShardedTensor:
            stack.extend(shard.tensor for shard in reversed(value.local_shards()))
        elif isinstance(value, LocalBoxes):
            yield from (tensor for _, tensor in value.boxes)
        elif isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            stack.extend(reversed([*value.values()] if isinstance(value, Mapping) else value))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a tensor whose elements are completely described by it, or None."""
    if not _is_dense(tensor) or tensor.is_meta or lacks_memory(tensor) or not tensor.data_ptr():
        return None
    return tensor.untyped_storage()


def _is_dense(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and not tensor.is_quantized and not tensor.is_nested


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _StateCopier:
    """Copies of the values of one state, which share what the originals share."""

    def __init__(
        self,
        copies: dict[int, torch.UntypedStorage],
        storages: dict[int, torch.UntypedStorage],
        late: LateCopies,
    ) -> None:
        """Start with copies of storages, by the `id` of the original, and the storages of tensors by theirs."""
        self._copies, self._storages, self._late = copies, storages, late
        self._memo: dict[int, Any] = {}  # copies by `id` of the original, as `copy.deepcopy` keeps them
        self._alive: list[object] = []  # originals, kept alive so that their `id`s are not reused

    def copy_value(self, value: Any, path: tuple[str, ...] = (), *, inside: bool = False) -> Any:
        """Return the copy of a value; `inside` if an object that torch does not take apart holds it."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        copied = self._memo.get(id(value))
        if copied is None:
            copied = self._copy_new(value, path, inside=inside)
            self._memo[id(value)] = copied
            self._alive.append(value)
        if inside and isinstance(value, torch.Tensor) and is_plain(value):
            if (storage := storage_of(value)) is not None:
                self._late.complete(storage)  # the object may compute from the tensor while it is copied
            self._copy_attributes(copied, value, path)
        return copied

    def _copy_new(self, value: Any, path: tuple[str, ...], *, inside: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value, path, inside=inside)
        if type(value) in (dict, OrderedDict, defaultdict):
            copied = self._memo[id(value)] = copy.copy(value)
            for key, element in value.items():
                copied[key] = self.copy_value(element, (*path, str(key)), inside=inside)
            return copied
        if type(value) is list:
            elements = self._memo[id(value)] = []
            elements.extend(self.copy_value(item, (*path, str(n)), inside=inside) for n, item in enumerate(value))
            return elements
        if type(value) is tuple:
            members = tuple(self.copy_value(member, (*path, str(n)), inside=True) for n, member in enumerate(value))
            # If a list in the tuple holds the tuple itself, copying the list has copied the tuple already.
            return self._memo.get(id(value), members)
        return self._copy_object(value, path)

    def _copy_object(self, value: object, path: tuple[str, ...]) -> object:
        try:
            mode = _TensorsInside(lambda tensor: self.copy_value(tensor, path, inside=True))
            with mode:
                copied = copy.deepcopy(value, self._memo)
            wait_for_devices(mode.devices)
        except _RAISED_AS_THEY_ARE:
            raise
        except Exception as error:
            raise UnsafeObjectError(
                "An object cannot be copied, as a background save requires. Keep it out of the state.",
                key=".".join(path),
                types=type_name(value),
                cause=error,
            ) from error
        return copied

    def _copy_tensor(self, tensor: torch.Tensor, path: tuple[str, ...], *, inside: bool) -> torch.Tensor:
        key = ".".join(path)
        if type(tensor) is DTensor:
            local = self.copy_value(tensor._local_tensor, path, inside=inside)
            return DTensor(local.detach(), tensor._spec, requires_grad=tensor.requires_grad)
        if type(tensor) is ShardedTensor:
            return self._copy_sharded(tensor, path)
        if isinstance(tensor, LocalBoxes):
            return tensor.replace_memory(lambda box: self.copy_value(box, path, inside=inside))
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            if not inside:
                choose_encoding(key, tensor, allow_pickle=True)  # raises an error that names the reason
            return tensor
        try:
            storage = self._storages.get(id(tensor)) or storage_of(tensor)
            if storage is not None:
                copied = self._same_view(tensor, self._copy_storage(storage))
            elif not is_plain(tensor):
                return self._copy_other_tensor(tensor, path)
            elif _is_dense(tensor) and lacks_memory(tensor):
                choose_encoding(key, tensor, allow_pickle=True)
                raise AssertionError("choose_encoding refuses a tensor without memory")
            else:
                copied = _clone(tensor)
        except _RAISED_AS_THEY_ARE:
            raise
        except Exception as error:
            raise InvalidArgumentError(
                "A tensor cannot be copied, as a background save requires. Save with wait=True.",
                tensor=key,
                type=type_name(tensor),
                cause=error,
            ) from error
        if type(tensor) is torch.nn.Parameter:
            return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def _copy_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if id(storage) not in self._copies:
            # Tensors inside objects are not among the storages that the stager has copied.
            self._copies[id(storage)] = _clone(_bytes_of(storage)).untyped_storage()
            self._alive.append(storage)
        return self._copies[id(storage)]

    @staticmethod
    def _same_view(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        view = empty_tensor(tensor.dtype, (0,))
        view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        # The view stays lazy; nothing is computed here.
        view = view.conj() if tensor.is_conj() else view
        return torch._neg_view(view) if tensor.is_neg() else view

    def _copy_sharded(self, tensor: ShardedTensor, path: tuple[str, ...]) -> ShardedTensor:
        properties = tensor.metadata().tensor_properties
        copied: ShardedTensor = ShardedTensor.__new__(
            ShardedTensor,
            tensor.sharding_spec(),
            tensor.metadata().size,
            dtype=properties.dtype,
            layout=properties.layout,
            pin_memory=False,
            requires_grad=properties.requires_grad,
        )
        vars(copied).update(vars(tensor))
        copied._local_shards = []
        for shard in tensor.local_shards():
            # The constructor of `Shard` would require the tensor to be on the device that the metadata names.
            own = copy.copy(shard)
            own.tensor = self.copy_value(shard.tensor, path)
            copied._local_shards.append(own)
        return copied

    def _copy_other_tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
        """Copy a tensor of a subclass, or of a layout that is not strided."""
        kind: Any = type(tensor)
        if kind in (torch.Tensor, torch.nn.Parameter):
            return _clone(tensor)
        if hasattr(kind, "__tensor_flatten__"):
            # torch takes such subclasses apart in the same way (torch/utils/_python_dispatch.py).
            names, context = cast("Any", tensor).__tensor_flatten__()
            inner = {name: self.copy_value(getattr(tensor, name), path, inside=True) for name in names}
            return cast("torch.Tensor", kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride()))
        if tensor.data_ptr():
            own = self.copy_value(tensor.detach().as_subclass(torch.Tensor), path).as_subclass(kind)
            self._copy_attributes(own, tensor, path)
            return cast("torch.Tensor", own.requires_grad_(tensor.requires_grad))
        copied = copy.deepcopy(tensor if tensor.is_leaf else tensor.detach(), self._memo)
        wait_for_devices([tensor.device])
        return copied

    def _copy_attributes(self, copied: torch.Tensor, tensor: torch.Tensor, path: tuple[str, ...]) -> None:
        """Copy attributes that are tensors, and keep others: a parameter may refer to its module or optimizer."""
        for name, value in vars(tensor).items():
            vars(copied)[name] = self.copy_value(value, path, inside=True) if isinstance(value, torch.Tensor) else value


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor.cpu()
    # `Tensor.clone` does not support every quantization scheme; `Tensor.__deepcopy__` does.
    return copy.deepcopy(tensor) if tensor.is_quantized else tensor.clone()


class _TensorsInside(TorchFunctionMode):
    """Mode that copies tensors which `copy.deepcopy` finds inside objects in the same way as all other tensors.

    torch passes `Tensor.__deepcopy__` to a mode first, but not `Parameter.__deepcopy__`: parameters inside objects are
    cloned on their devices, which must then be waited for.
    """

    def __init__(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._copy_tensor = copy_tensor
        self.devices: set[torch.device] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self._copy_tensor(args[0])
        if func is torch.Tensor.clone:
            self.devices.add(args[0].device)
        return func(*args, **(kwargs or {}))
