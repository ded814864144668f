"""Copies of a state, made before training goes on, in memory that is used again by the next.

What is stored of a copy is what is stored of the state itself (`wait=True`). torch's stager alone does not see to
that: it drops the bits of lazily conjugated and negated views, fails on what is more than its memory (sparse,
quantized), and copies the attributes of parameters, modules and all. So it is given the memory and nothing else: the
structure of the state is copied here.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from dcp_remote.devices import wait_for_devices
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError, UnsafeObjectError
from dcp_remote.object_torch import lacks_memory
from dcp_remote.object_tree import type_name
from dcp_remote.serialization import empty_tensor, encoding_of, is_plain

# What may be kept for tensors that live but are not in this state, of the largest state so far: tensors come and go,
# and pinning all memory anew for each of them would cost more than it frees.
_IDLE_MAX = 1 / 8

_ATOMS = frozenset({NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


class Stager:
    """torch's own stager, which keeps its buffers for as long as the tensors that it copied live.

    Pinned, and copied without waiting for each, where there is a GPU (torch/distributed/checkpoint/staging.py).
    It copies whole storages: a small view of a large tensor takes the memory of the large one.

    There is one copy at a time, and at most an eighth more: buffers of tensors that are alive but not in the state any
    more are let go of before the next copy is made. So are all of them when a storage has been resized meanwhile.
    """

    def __init__(self) -> None:
        """See the class; nothing is allocated yet."""
        self._stager: DefaultStager | None = None
        self._held_bytes = WeakIdKeyDictionary()  # of each storage that has a buffer
        self._largest_bytes = 0

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy on the CPU, objects included. Valid until the next call; returns when it is made.

        What is shared stays shared: tied tensors, views of one memory, lists in two places. Python attributes of plain
        tensors are not copied; tensors inside of objects keep them as they are, all others do without.

        Raises:
            InvalidArgumentError: A tensor without data, or one that cannot be copied; names its key.
            UnsafeObjectError: An object that cannot be copied; names its key and type.
        """
        storages = {id(storage): storage for storage in map(_storage, tensors_of(state)) if storage is not None}
        with torch.no_grad():
            copies = dict(zip(storages, self._copied(list(storages.values())), strict=True))
            return cast("dict[str, Any]", _Copy(copies).of(state))

    def close(self) -> None:
        """Let go of the buffers."""
        self._held_bytes.clear()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _copied(self, storages: list[torch.UntypedStorage]) -> Iterable[torch.UntypedStorage]:
        self._make_room(storages)
        if self._stager is None:
            cuda = torch.cuda.is_available()
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=cuda,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=cuda,
                )
            )
        for storage in storages:
            self._held_bytes[storage] = storage.nbytes()
        try:
            # Not a future: staging is not asynchronous.
            staged = cast(
                "dict[str, torch.Tensor]",
                self._stager.stage({str(n): _bytes_of(each) for n, each in enumerate(storages)}),
            )
        finally:
            # torch's waits for the thread's own device alone, but each copy goes by the current stream of its source's.
            # After an error, too: nobody may use the buffers again while a device writes to them.
            wait_for_devices(storage.device for storage in storages)
        return [each.untyped_storage() for each in staged.values()]

    def _make_room(self, storages: list[torch.UntypedStorage]) -> None:
        """Drop torch's stager where its buffers do not fit the storages, or too many are of no use any more."""
        wanted = {id(storage): storage.nbytes() for storage in storages}
        wanted_bytes, idle_bytes, resized = sum(wanted.values()), 0, False
        for storage, held_bytes in self._held_bytes.items():
            if id(storage) not in wanted:
                idle_bytes += held_bytes
            elif wanted[id(storage)] != held_bytes:
                resized = True
        self._largest_bytes = max(self._largest_bytes, wanted_bytes)
        if resized or wanted_bytes + idle_bytes > self._largest_bytes * (1 + _IDLE_MAX):
            self.close()


def tensors_of(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors of a state whose memory `Stager` keeps a buffer for: those that are not inside of other objects."""
    return _tensors(state, set())


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if type(value) is DTensor:
            yield from _tensors(value._local_tensor, seen)
        elif type(value) is ShardedTensor:
            for shard in value.local_shards():
                yield from _tensors(shard.tensor, seen)
        else:
            yield value
    elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for element in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(element, seen)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor whose elements lie in one, and mean nothing else."""
    if not _is_dense(tensor) or tensor.is_meta or lacks_memory(tensor) or not tensor.data_ptr():
        return None
    return tensor.untyped_storage()


def _is_dense(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and not tensor.is_quantized and not tensor.is_nested


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Copy:
    """One copy of a state.

    Args:
        copies: Of storages that were copied already, by the `id` of the original.
    """

    def __init__(self, copies: dict[int, torch.UntypedStorage]) -> None:
        """See the class."""
        self._copies = copies
        self._memo: dict[int, Any] = {}  # as `copy.deepcopy` has it
        self._alive: list[object] = []  # what `id`s of ours stand for

    def of(self, value: Any, path: tuple[str, ...] = (), *, inside: bool = False) -> Any:
        """The copy of a value.

        Args:
            value: Anything.
            path: Where it is, for errors.
            inside: In something that torch's planner does not take apart: it is stored as part of an object.
        """
        kind = type(value)
        if kind in _ATOMS:
            return value
        copied = self._memo.get(id(value))
        if copied is None:
            copied = self._new(value, path, inside=inside)
            self._memo[id(value)] = copied
            self._alive.append(value)
        if inside and isinstance(value, torch.Tensor) and is_plain(value):
            self._give_attributes(copied, value, path)
        return copied

    def _new(self, value: Any, path: tuple[str, ...], *, inside: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path, inside=inside)
        if type(value) in (dict, OrderedDict, defaultdict):
            copied = self._memo[id(value)] = copy.copy(value)
            for key, element in value.items():
                copied[key] = self.of(element, (*path, str(key)), inside=inside)
            return copied
        if type(value) is list:
            elements = self._memo[id(value)] = []
            elements.extend(self.of(each, (*path, str(n)), inside=inside) for n, each in enumerate(value))
            return elements
        if type(value) is tuple:
            members = tuple(self.of(each, (*path, str(n)), inside=True) for n, each in enumerate(value))
            # A list in the tuple may hold the tuple itself.
            return self._memo.get(id(value), members)
        return self._object(value, path)

    def _object(self, value: object, path: tuple[str, ...]) -> object:
        try:
            mode = _TensorsInside(lambda tensor: self.of(tensor, path, inside=True))
            with mode:
                copied = copy.deepcopy(value, self._memo)
            wait_for_devices(mode.devices)
        except (DcpRemoteError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsafeObjectError(
                "An object cannot be copied, which a save in the background begins with. Keep it out of the state.",
                key=".".join(path),
                types=type_name(value),
                cause=error,
            ) from error
        return copied

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...], *, inside: bool) -> torch.Tensor:
        key = ".".join(path)
        if type(tensor) is DTensor:
            local = self.of(tensor._local_tensor, path, inside=inside)
            return DTensor(local.detach(), tensor._spec, requires_grad=tensor.requires_grad)
        if type(tensor) is ShardedTensor:
            return self._sharded(tensor, path)
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            if not inside:
                encoding_of(key, tensor, allow_pickle=True)  # says what is wrong with it
            return tensor
        try:
            storage = _storage(tensor)
            if storage is not None:
                copied = self._same_view(tensor, self._storage_copy(storage))
            elif not is_plain(tensor):
                return self._other(tensor, path)
            elif _is_dense(tensor) and lacks_memory(tensor):
                encoding_of(key, tensor, allow_pickle=True)
                raise AssertionError("encoding_of refuses what lacks memory")
            else:
                copied = _cloned(tensor)
        except (DcpRemoteError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise InvalidArgumentError(
                "A tensor cannot be copied, which a save in the background begins with; save with wait=True.",
                tensor=key,
                type=type_name(tensor),
                cause=error,
            ) from error
        if type(tensor) is torch.nn.Parameter:
            return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def _storage_copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if id(storage) not in self._copies:
            # Of a tensor inside of an object.
            self._copies[id(storage)] = _cloned(_bytes_of(storage)).untyped_storage()
            self._alive.append(storage)
        return self._copies[id(storage)]

    @staticmethod
    def _same_view(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        view = empty_tensor(tensor.dtype, (0,))
        view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        # Of the same memory, still lazily: nothing is computed here.
        view = view.conj() if tensor.is_conj() else view
        return torch._neg_view(view) if tensor.is_neg() else view

    def _sharded(self, tensor: ShardedTensor, path: tuple[str, ...]) -> ShardedTensor:
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
            # Not made by its class, which wants the tensor to be on the device that the metadata names.
            own = copy.copy(shard)
            own.tensor = self.of(shard.tensor, path)
            copied._local_shards.append(own)
        return copied

    def _other(self, tensor: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
        """Of a class or a layout with rules of its own."""
        kind: Any = type(tensor)
        if kind in (torch.Tensor, torch.nn.Parameter):
            return _cloned(tensor)
        if hasattr(kind, "__tensor_flatten__"):
            # As torch takes subclasses apart itself (torch/utils/_python_dispatch.py).
            names, context = cast("Any", tensor).__tensor_flatten__()
            inner = {name: self.of(getattr(tensor, name), path, inside=True) for name in names}
            return cast("torch.Tensor", kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride()))
        if tensor.data_ptr():
            own = self.of(tensor.detach().as_subclass(torch.Tensor), path).as_subclass(kind)
            self._give_attributes(own, tensor, path)
            return cast("torch.Tensor", own.requires_grad_(tensor.requires_grad))
        copied = copy.deepcopy(tensor if tensor.is_leaf else tensor.detach(), self._memo)
        wait_for_devices([tensor.device])
        return copied

    def _give_attributes(self, copied: torch.Tensor, tensor: torch.Tensor, path: tuple[str, ...]) -> None:
        """As they are, but for tensors: a parameter may name its module, its hooks, its optimizer."""
        for name, value in vars(tensor).items():
            vars(copied)[name] = self.of(value, path, inside=True) if isinstance(value, torch.Tensor) else value


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        return tensor.cpu()
    # torch's clone does not know every scheme of quantization, its `__deepcopy__` does.
    return copy.deepcopy(tensor) if tensor.is_quantized else tensor.clone()


class _TensorsInside(TorchFunctionMode):
    """Copies the tensors that `copy.deepcopy` meets inside of objects as those outside of them are.

    torch offers `Tensor.__deepcopy__` to a mode before it does anything itself. It does not offer that of parameters:
    inside of objects they are cloned, on their device, which has to be waited for.

    Attributes:
        devices: The devices of those clones.
    """

    def __init__(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._copied = copied
        self.devices: set[torch.device] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self._copied(args[0])
        if func is torch.Tensor.clone:
            self.devices.add(args[0].device)
        return func(*args, **(kwargs or {}))
