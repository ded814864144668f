"""Copy tensors from devices to pinned host memory: all ranges of a shard from one device at once, on a separate stream.

According to the CUDA C++ Programming Guide, "Asynchronous Concurrent Execution", a copy into pageable memory goes
through a small pinned buffer of the driver and blocks its thread; a copy into pinned memory is done by the device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from dcp_remote.common.units import MiB
from dcp_remote.serialization.tensors import byte_view, copy_elements, element_bytes

logger = logging.getLogger(__name__)

# Smaller copies into pageable memory take less time than an allocation of pinned memory.
_PINNED_BYTES_MIN = 1 * MiB


class ElementRange(NamedTuple):
    """Elements `start` to `stop` of a tensor, in row-major order."""

    tensor: torch.Tensor
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Size of the elements as they are stored, in bytes."""
        return (self.stop - self.start) * self.tensor.element_size()


class _Cuda:
    """Copies from CUDA, and from ROCm, which torch also calls "cuda". All threads share one stream per device.

    torch caches freed pinned memory for the next allocation, in sizes of powers of two (CachingHostAllocator), so that
    buffers are used again. Of each size, the largest amount that was in use stays pinned until the process ends; nearly
    all shards need the largest size.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def allocate_pinned(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Return pinned memory, to which the device itself can write; raises a RuntimeError if there is none left."""
        # The current device of a new thread is the first one, and every process of a host would allocate memory there.
        with torch.cuda.device(device):
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def stream_of(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream for copies from a device; it is made by the first call."""
        with self._lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)
        return stream

    @contextmanager
    def copying(self, device: torch.device) -> Iterator[None]:
        """Return a context manager for non-blocking copies: when it exits, all copies are complete."""
        stream = self.stream_of(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            try:
                yield
            finally:
                # Also after an error: the memory must not be used again while the device writes to it.
                done = torch.cuda.Event(blocking=True)  # sleeps; by default a wait keeps a core busy
                done.record(stream)
                done.synchronize()


# By type of device. From other types (XPU, MPS), each range is copied separately, into pageable memory.
HOST_COPIERS: Mapping[str, _Cuda] = {"cuda": _Cuda()}


def pinned_bytes(size_bytes: int) -> int:
    """Return the bytes that torch pins for an allocation of this size: the next power of two."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


def uses_pinned_memory(tensor: torch.Tensor) -> bool:
    """Return whether `host_views` copies a tensor into pinned memory, together with others."""
    return tensor.device.type in HOST_COPIERS


def wait_for_devices(devices: Iterable[torch.device]) -> None:
    """Wait for all work that the calling thread has queued on these devices, so that other streams can copy from them.

    Call this in the thread that computed or copied the data: the current stream of each device, for which this waits,
    is that of the calling thread. Other streams are not waited for. The devices may include the CPU.
    """
    for device in sorted({device for device in devices if device.type != "cpu"}, key=str):
        # CUDA and XPU have streams; MPS has a single queue, and a copy from it waits for the queue.
        current_stream = getattr(getattr(torch, device.type, None), "current_stream", None)
        if current_stream is not None:
            current_stream(device).synchronize()


def host_views(ranges: Sequence[ElementRange]) -> list[memoryview]:
    """Return the bytes of each range; call `wait_for_devices` for the ranges' devices first.

    Contiguous tensors on the CPU are viewed, others are copied (see `element_bytes`). All ranges from one device are
    copied into one block of pinned memory, with one wait; the block is freed with the last of its views. If there is no
    pinned memory, the copies go to pageable memory. torch raises a RuntimeError if a device fails.
    """
    by_device: dict[torch.device, list[int]] = {}
    for number, part in enumerate(ranges):
        if uses_pinned_memory(part.tensor):
            by_device.setdefault(part.tensor.device, []).append(number)
    views: dict[int, memoryview] = {}
    for numbers in by_device.values():
        copies = _copy_together([ranges[number] for number in numbers])
        views.update(zip(numbers, copies, strict=True) if copies else ())
    return [
        views[n] if n in views else element_bytes(part.tensor, part.start, part.stop) for n, part in enumerate(ranges)
    ]


def _copy_together(ranges: Sequence[ElementRange]) -> list[memoryview]:
    """Copy ranges of one device into pinned memory; return nothing if they are small or there is no pinned memory."""
    device, size_bytes = ranges[0].tensor.device, sum(part.size_bytes for part in ranges)
    if size_bytes < _PINNED_BYTES_MIN:
        return []
    copier = HOST_COPIERS[device.type]
    try:
        memory = copier.allocate_pinned(size_bytes, device)
    except RuntimeError as error:
        _warn_once(str(error).partition("\n")[0])
        return []
    views: dict[int, memoryview] = {}
    first = 0
    with copier.copying(device):
        # With the largest elements first, all ranges are aligned without gaps.
        for number, part in sorted(enumerate(ranges), key=lambda numbered: -numbered[1].tensor.element_size()):
            into = memory[first : first + part.size_bytes]
            copy_elements(part.tensor, part.start, part.stop, into=into, non_blocking=True)
            views[number] = byte_view(into)
            first += part.size_bytes
    return [views[number] for number in range(len(ranges))]


@cache
def _warn_once(cause: str) -> None:
    logger.warning("No pinned memory; tensors on devices are copied through pageable memory, slower. cause=%s", cause)
