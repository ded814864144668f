"""From devices to the host: all that a shard takes from one at once, into pinned memory, beside the caller's streams.

As CUDA has it (CUDA C++ Programming Guide, "Asynchronous Concurrent Execution"): a copy into ordinary memory goes
through a small pinned buffer of the driver's and holds its thread; one into pinned memory is the device's own work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import NamedTuple, Protocol

import torch

from dcp_remote.ranges import MiB
from dcp_remote.serialization import byte_view, copy_run, run_bytes

logger = logging.getLogger(__name__)

# Less than that is copied before an allocation of pinned memory would be through.
_PINNED_BYTES_MIN = 1 * MiB


class Run(NamedTuple):
    """Elements `start` to `stop` of a tensor, in row-major order."""

    tensor: torch.Tensor
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """As they are stored."""
        return (self.stop - self.start) * self.tensor.element_size()


class Link(Protocol):
    """What leads from the memory of one kind of device to the host's."""

    def pinned(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """So many bytes that the device itself can write to; a RuntimeError where there are none."""
        ...

    def copying(self, device: torch.device) -> AbstractContextManager[None]:
        """A block of copies that need not be waited for one by one: when it is left, all have arrived."""
        ...


class _Cuda:
    """CUDA, and ROCm, which torch calls the same. One stream a device; all threads that copy share it.

    torch keeps pinned memory that nobody uses any more for whoever asks next, in sizes of powers of two
    (CachingHostAllocator): that is the ring of buffers. Of each size, what was in use at most stays pinned until the
    process ends; nearly all shards ask for the largest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def pinned(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        # A thread begins with the first device, and every process of a host would take memory there.
        with torch.cuda.device(device):
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    @contextmanager
    def copying(self, device: torch.device) -> Iterator[None]:
        with self._lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            try:
                yield
            finally:
                # Also after an error: nobody may use the memory again while the device writes to it.
                arrived = torch.cuda.Event(blocking=True)  # sleeps; by default a wait keeps a core busy
                arrived.record(stream)
                arrived.synchronize()


# By type of device. Of others (XPU, MPS) each run is copied by itself, into ordinary memory.
LINKS: Mapping[str, Link] = {"cuda": _Cuda()}


def pinned_bytes(size_bytes: int) -> int:
    """What pinned memory for so many bytes takes: torch gives powers of two."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


def is_linked(tensor: torch.Tensor) -> bool:
    """Whether `host_views` copies it into pinned memory, together with others."""
    return tensor.device.type in LINKS


def wait_for_devices(devices: Iterable[torch.device]) -> None:
    """Wait for all that the calling thread has queued on these devices; copies may then go by streams of their own.

    To be called in the thread that computed or copied what is read next: each thread has a current stream of its own,
    on each device. Waits for no other stream. The CPU may be among the devices.

    Raises:
        RuntimeError: As torch raises it: a device that fails.
    """
    for device in sorted({device for device in devices if device.type != "cpu"}, key=str):
        # CUDA and XPU have streams; MPS has one queue, and a copy from it waits by itself.
        current_stream = getattr(getattr(torch, device.type, None), "current_stream", None)
        if current_stream is not None:
            current_stream(device).synchronize()


def host_views(runs: Sequence[Run]) -> list[memoryview]:
    """The bytes of each run; what is on devices must have been waited for (`wait_for_devices`).

    Views of tensors that lie in the host's memory as they are stored, else copies (see `run_bytes`). What comes from
    one device lies in one pinned memory, which is free again when none of its views is left; it is copied with one
    wait. Where there is no pinned memory to be had, ordinary memory does.

    Raises:
        RuntimeError: As torch raises it: no memory, or a device that fails.
    """
    by_device: dict[torch.device, list[int]] = {}
    for number, run in enumerate(runs):
        if is_linked(run.tensor):
            by_device.setdefault(run.tensor.device, []).append(number)
    views: dict[int, memoryview] = {}
    for numbers in by_device.values():
        copies = _copied_at_once([runs[number] for number in numbers])
        views.update(zip(numbers, copies, strict=True) if copies else ())
    return [views[n] if n in views else run_bytes(run.tensor, run.start, run.stop) for n, run in enumerate(runs)]


def _copied_at_once(runs: Sequence[Run]) -> list[memoryview]:
    """Of runs on one device. Nothing if they are few bytes, or where there is no pinned memory."""
    device, size_bytes = runs[0].tensor.device, sum(run.size_bytes for run in runs)
    if size_bytes < _PINNED_BYTES_MIN:
        return []
    link = LINKS[device.type]
    try:
        memory = link.pinned(size_bytes, device)
    except RuntimeError as error:
        _tell_once(str(error).partition("\n")[0])
        return []
    views: dict[int, memoryview] = {}
    first = 0
    with link.copying(device):
        # The largest elements first: then all are aligned, without gaps.
        for number, run in sorted(enumerate(runs), key=lambda one: -one[1].tensor.element_size()):
            into = memory[first : first + run.size_bytes]
            copy_run(run.tensor, run.start, run.stop, into=into, non_blocking=True)
            views[number] = byte_view(into)
            first += run.size_bytes
    return [views[number] for number in range(len(runs))]


@cache
def _tell_once(why: str) -> None:
    logger.warning("There is no pinned memory; what is on devices is copied into ordinary memory. cause=%s", why)
