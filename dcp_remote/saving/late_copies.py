"""Copies of a state that go on while training does, and the buffers that they fill."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.cuda._pin_memory_utils as pinning
from torch.utils.weak import WeakIdKeyDictionary

from dcp_remote.common.units import KiB
from dcp_remote.errors import SaveFailedError
from dcp_remote.saving.device_copy import HOST_COPIERS

# A smaller storage is copied before `save` returns: that takes less time than to look after its copy.
_LATE_BYTES_MIN = 64 * KiB

# Types of device from which copies go on by themselves. Copies from others (MPS, XPU) end before `save` returns.
_LATE_DEVICES = frozenset({"cpu", "cuda"})

# Bytes of a storage that are compared.
_SAMPLES = 64

# Largest share of idle buffers, relative to the largest state so far. Buffers of tensors that are alive but not in this
# state are kept up to this share, because dropping them means pinning all memory anew.
_IDLE_MAX = 1 / 8


class Held(NamedTuple):
    """Tensor of a state, by the name of its value, and the memory that holds its elements."""

    name: str
    tensor: torch.Tensor
    storage: torch.UntypedStorage


class Copy(NamedTuple):
    """Copy of a storage, both as tensors of bytes."""

    storage: torch.UntypedStorage
    source: torch.Tensor
    into: torch.Tensor


class _Seen(NamedTuple):
    """Storage as it was when `save` returned: its bytes, some of them as they were, and the tensors in it."""

    name: str
    source: torch.Tensor
    sample: bytes | None  # None of memory of a device
    tensors: Sequence[tuple[torch.Tensor, int]]  # with their versions

    @property
    def is_changed(self) -> bool:
        """True if anything was written since."""
        if any(tensor._version != version for tensor, version in self.tensors):
            return True
        return self.sample is not None and _sample(self.source).numpy().tobytes() != self.sample


class _FromDevice(NamedTuple):
    """Copy from a device, with samples of the source as of the call of `save`, and after the copy."""

    name: str
    copy: Copy
    before: torch.Tensor
    after: torch.Tensor


class LateCopies:
    """Copies of one state that go on after `save` has returned; until they end, training must not change the state.

    `finish`, in the thread of the save, makes the copies from the CPU, and waits for those from devices. `protect`, in
    the thread of training, returns once training may change the state; it makes copies itself that have not begun.

    A change that comes too early is found in two ways. In-place operations raise the version counters of their tensors
    (https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks). But fused optimizers, and
    `_foreach` operations on a `DTensor`, which optimizers use by default, raise none in torch 2.13, nor do writes by
    way of `.data`. So some bytes of each storage are compared as well: an optimizer changes nearly all elements.
    """

    def __init__(self, tensors: Mapping[int, Sequence[tuple[str, torch.Tensor]]] = MappingProxyType({})) -> None:
        """Store the tensors whose storages, by `id`, may be copied late, with their names; by default none.

        Inference tensors have no versions; their storages are not copied late. The tensors are alive until `begin`.
        """
        self._tensors = {
            key: held for key, held in tensors.items() if not any(tensor.is_inference() for _, tensor in held)
        }
        self._seen: dict[int, _Seen] = {}  # by `id` of the storage
        # Held while a copy is made, or looked after. One copy at a time: torch uses several threads for each.
        self._lock = threading.Lock()
        self._waiting: dict[int, Copy] = {}  # from the CPU, not made yet
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
        self._from_devices: list[_FromDevice] = []
        self._changed: str | None = None
        self.waited_seconds = 0.0  # for which `protect` kept training from its update

    def takes(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage is to be copied late."""
        is_worth_it = storage.nbytes() >= _LATE_BYTES_MIN and storage.device.type in _LATE_DEVICES
        return is_worth_it and id(storage) in self._tensors

    @property
    def is_protecting(self) -> bool:
        """True while training must not change some tensor without a call of `protect`."""
        return bool(self._seen)

    def begin(self, copies: Sequence[Copy]) -> None:
        """Begin the copies of storages that this object takes.

        Copies from a device run on a stream of their own, behind all work that the calling thread has queued there.
        """
        on_devices: dict[torch.device, list[Copy]] = {}
        for each in copies:
            key, device = id(each.storage), each.source.device
            held, sample = self._tensors[key], None
            if device.type == "cpu":
                self._waiting[key], sample = each, _sample(each.source).numpy().tobytes()
            else:
                on_devices.setdefault(device, []).append(each)
            versions = [(tensor, tensor._version) for _, tensor in held]
            self._seen[key] = _Seen(held[0][0], each.source, sample, versions)
        self._tensors = {}
        for device, of_device in on_devices.items():
            self._begin_on(device, of_device)

    def _begin_on(self, device: torch.device, copies: Sequence[Copy]) -> None:
        # On the current stream: behind what training has queued, and before what it queues from now on.
        before = [_sample(each.source).clone() for each in copies]
        stream, event = HOST_COPIERS["cuda"].stream_of(device), torch.cuda.Event(blocking=True)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                for each, sample in zip(copies, before, strict=True):
                    each.into.copy_(each.source, non_blocking=True)
                    name = self._seen[id(each.storage)].name
                    self._from_devices.append(_FromDevice(name, each, sample, _sample(each.source).clone()))
        finally:  # also after Ctrl-C, since `cancel` waits for it
            event.record(stream)
            self._streams[device] = stream, event

    def complete(self, storage: torch.UntypedStorage) -> None:
        """Return when a storage is copied, of which an object of the state is about to be made."""
        with self._lock:
            if id(storage) in self._waiting:
                self._make(id(storage))
        if storage.device in self._streams:
            self._streams[storage.device][1].synchronize()

    def finish(self) -> None:
        """Make the copies, and wait for those from devices; an error of a device is raised.

        Raises:
            SaveFailedError: A tensor was changed meanwhile.
        """
        try:
            while True:
                with self._lock:
                    if not self._waiting:
                        break
                    self._make(next(iter(self._waiting)))
            for device, (stream, event) in self._streams.items():
                event.synchronize()
                # The current device of a new thread is the first one, where a context would take memory.
                with torch.cuda.device(device), torch.cuda.stream(stream):
                    for each in self._from_devices:
                        if each.copy.source.device == device and not torch.equal(each.before, each.after):
                            self._changed = self._changed or each.name
        finally:
            self._from_devices.clear()  # until now the memory of tensors that training drops must not be used anew
        self.require_unchanged()

    def protect(self, storages: Collection[int] | None = None) -> None:
        """Return once training may change these storages, by `id`; or all.

        Copies from the CPU have ended then. Those from a device may go on: its current stream waits for them.
        """
        began_seconds = time.monotonic()
        with self._lock:
            keys = [key for key in self._seen if storages is None or key in storages]
            self._look(keys)
        for key in keys:
            with self._lock:
                if key in self._waiting:
                    self._make(key)
        for device, (_, event) in self._streams.items():
            torch.cuda.current_stream(device).wait_event(event)
        with self._lock:
            for key in keys:
                self._seen.pop(key, None)
            self.waited_seconds += time.monotonic() - began_seconds

    def require_unchanged(self) -> None:
        """Raise if a tensor was changed since `save`, other than after `protect`; called again before the commit.

        An operation raises the counter of its tensor when it has ended, which may be after the copy.

        Raises:
            SaveFailedError: A tensor was changed.
        """
        with self._lock:
            self._look(list(self._seen))
        if self._changed is not None:
            raise SaveFailedError(
                "A tensor was changed after save() had returned, perhaps while it was copied; nothing was committed.",
                tensor=self._changed,
            ).advise(
                before_update="before_update() must precede any change but a step of an optimizer given to watch()"
            )

    def cancel(self) -> None:
        """Begin no copy any more, wait for those under way, and hold no tensor any more: the save has ended."""
        with self._lock:
            self._waiting.clear()
            self._seen.clear()
        for _, event in self._streams.values():
            with suppress(RuntimeError):  # of a device that has failed, and writes no more
                event.synchronize()
        self._from_devices.clear()

    def _make(self, key: int) -> None:
        copy, seen = self._waiting[key], self._seen[key]
        copy.into.copy_(copy.source)
        # Other values may have been there for a while, such as averaged weights that are swapped in by way of `.data`.
        if self._changed is None and _sample(copy.into).numpy().tobytes() != seen.sample:
            self._changed = seen.name
        del self._waiting[key]

    def _look(self, keys: Iterable[int]) -> None:
        for key in keys:
            if self._changed is None and self._seen[key].is_changed:
                self._changed = self._seen[key].name


def _sample(memory: torch.Tensor) -> torch.Tensor:
    # An odd distance: bytes at all places of an element, since its first ones rarely change.
    return memory[:: (len(memory) // _SAMPLES) | 1]


class Buffers:
    """Memory of the host for copies of storages, kept while the storages are alive; pinned where there is a GPU.

    The buffers hold one copy of the state, and at most an eighth more. If buffers of storages that are no longer in the
    state exceed that, or a storage was resized, all buffers are freed before the next copy.
    """

    def __init__(self) -> None:
        """Start without buffers; nothing is allocated."""
        self._buffers = WeakIdKeyDictionary()  # tensors of bytes, by storage
        self._largest_bytes = 0

    def fit(self, storages: Collection[torch.UntypedStorage]) -> int:
        """Free all buffers if one does not fit its storage, or too many are idle; return the bytes to allocate."""
        wanted = {id(storage): storage.nbytes() for storage in storages}
        wanted_bytes, idle_bytes, resized = sum(wanted.values()), 0, False
        for storage, buffer in self._buffers.items():
            if id(storage) not in wanted:
                idle_bytes += buffer.nbytes
            elif wanted[id(storage)] != buffer.nbytes:
                resized = True
        self._largest_bytes = max(self._largest_bytes, wanted_bytes)
        if resized or wanted_bytes + idle_bytes > self._largest_bytes * (1 + _IDLE_MAX):
            self.clear()
        return sum(storage.nbytes() for storage in storages if storage not in self._buffers)

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the buffer of a storage; it is allocated if there is none."""
        buffer: torch.Tensor | None = self._buffers.get(storage)
        if buffer is None:
            buffer = self._buffers[storage] = _allocate(storage.nbytes())
        return buffer

    def clear(self) -> None:
        """Free the buffers."""
        self._buffers.clear()


def _allocate(size_bytes: int) -> torch.Tensor:
    memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    if size_bytes and torch.cuda.is_available():
        # Pinned as by torch's stager (torch/distributed/checkpoint/_state_dict_stager.py), in just this size: the
        # allocator behind `pin_memory=True` takes the next power of two.
        address = memory.data_ptr()
        pinning.pin_memory(address, size_bytes)
        weakref.finalize(memory.untyped_storage(), pinning.unpin_memory, address).atexit = False
    return memory
