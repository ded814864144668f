"""Copy the storages of a state into buffers that the next save uses again, while training goes on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.cuda._pin_memory_utils as pinning
from torch.utils.weak import WeakIdKeyDictionary

from dcp_remote.common.threads import OneTimeEvent
from dcp_remote.errors import SaveFailedError

# Largest share of idle buffers, relative to the largest state so far. Buffers of tensors that are alive but not in this
# state are kept up to this share, because dropping them means pinning all memory anew.
_IDLE_MAX = 1 / 8

# Below this size pinning takes longer than it saves.
_PINNED_BYTES_MIN = 5

# Interval at which a waiting caller can be interrupted.
_LOOK_SECONDS = 0.5


class _Seen(NamedTuple):
    """Tensor as it was when its copy began."""

    name: str
    tensor: torch.Tensor
    version: int


class CopiesUnderWay:
    """Copies of one state that go on after `save` has returned.

    `finish`, in the thread of the save, makes the copies from the CPU and waits for those from devices. `guard`, in the
    thread of training, returns once the state may change. A tensor that changed before is found by its version counter
    (https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks), which all in-place
    operations raise, but neither a write by way of `.data` nor one by another process or library.
    """

    def __init__(self) -> None:
        """Begin without copies."""
        self._seen: list[_Seen] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sources: list[torch.Tensor] = []
        self._events: dict[torch.device, torch.Event] = {}
        self._lock = threading.Lock()
        self._is_guarded = False
        self._changed: str | None = None
        self._finished = OneTimeEvent()

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Note the version of a tensor, whose copy begins only afterwards."""
        self._seen.append(_Seen(name, tensor, tensor._version))

    def begin(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin copies, each into a buffer from the bytes of a storage; those from the CPU wait for `finish`.

        Copies from a device run on a stream of their own, behind all work that the calling thread has queued there.
        """
        self._pairs = [(into, source) for into, source in copies if source.device.type == "cpu"]
        for device in {source.device for _, source in copies if source.device.type != "cpu"}:
            stream = torch.Stream(device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                for into, source in copies:
                    if source.device == device:
                        into.copy_(source, non_blocking=True)
            self._events[device] = stream.record_event()
        # Alive until the copies end: the memory of a tensor that training drops must not be used anew meanwhile.
        self._sources = [source for _, source in copies]

    def finish(self) -> None:
        """Make the copies, or wait for them. Errors of a device are raised; a change is noted for `require_unchanged`."""
        try:
            for into, source in self._pairs:
                into.copy_(source)
            for event in self._events.values():
                event.synchronize()
            self._note_changes()
        finally:
            self._pairs, self._sources = [], []
            self._finished.set()

    def guard(self) -> None:
        """Wait until the state may change; where copies come from a device, let its current stream wait instead."""
        if self._is_guarded:
            return
        self._note_changes()
        while self._pairs and not self._finished.wait(_LOOK_SECONDS):
            pass
        for device, event in self._events.items():
            torch.accelerator.current_stream(device).wait_event(event)
        with self._lock:
            self._is_guarded = True
            self._seen.clear()

    def require_unchanged(self) -> None:
        """Raise if a tensor changed before its copy was complete; called again just before the commit.

        An operation raises the counter of its tensor when it has ended, so that the look after the copy may come early.

        Raises:
            SaveFailedError: A tensor changed; its name is in the error.
        """
        self._note_changes()
        if self._changed is not None:
            raise SaveFailedError(
                "A tensor was changed while it was copied; nothing was committed. Call before_update() before anything "
                "changes the state, or pass the optimizer that changes this tensor to watch().",
                tensor=self._changed,
            )

    def _note_changes(self) -> None:
        with self._lock:
            for name, tensor, version in self._seen:
                if tensor._version != version:
                    self._changed = self._changed or name


class Buffers:
    """Memory of the host for copies of storages, kept while the storages live; pinned where there is a GPU.

    The buffers hold one copy of the state, and at most an eighth more. If buffers of storages that are no longer in the
    state exceed that, or a storage was resized, all buffers are freed before the next copy.
    """

    def __init__(self) -> None:
        """Start without buffers; nothing is allocated."""
        self._buffers = WeakIdKeyDictionary()  # tensors of bytes by storage
        self._largest_bytes = 0

    def fit(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Free all buffers if one does not fit its storage, or if too many bytes of them are idle."""
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

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the buffer of a storage, as bytes; it is allocated if there is none."""
        buffer = self._buffers.get(storage)
        if buffer is None:
            buffer = self._buffers[storage] = _allocate(storage.nbytes())
        return buffer

    def clear(self) -> None:
        """Free the buffers."""
        self._buffers.clear()


def _allocate(size_bytes: int) -> torch.Tensor:
    memory = torch.empty(size_bytes, dtype=torch.uint8)
    if size_bytes >= _PINNED_BYTES_MIN and torch.cuda.is_available():
        # Of just this size, as torch's own stager does it (torch/distributed/checkpoint/_state_dict_stager.py); the
        # allocator behind `pin_memory=True` takes the next power of two.
        address = memory.data_ptr()
        pinning.pin_memory(address, size_bytes)
        weakref.finalize(memory.untyped_storage(), pinning.unpin_memory, address).atexit = False
    return memory
