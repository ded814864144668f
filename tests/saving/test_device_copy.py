"""Copies from devices to the host, with stand-ins: the machines that run these tests have no GPU.

`SlowCopier` treats the CPU as a device: non-blocking copies arrive only when the wait ends, and until then pinned
memory holds bytes that were never stored. The calls to CUDA are checked with its functions replaced; their effect was
never seen on a GPU.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.overrides import TorchFunctionMode

from dcp_remote import RemoteReader, RemoteWriter
from dcp_remote.common.units import MiB
from dcp_remote.saving import device_copy
from dcp_remote.saving.device_copy import ElementRange, host_views, pinned_bytes
from dcp_remote.serialization.tensors import copy_elements, dtype_name, element_bytes
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.strategies import DTYPES, LAYOUTS, random_whole
from tests.support.threads import PATIENCE_SECONDS, HookedStore

NEVER_STORED = 0xA5


class Later(TorchFunctionMode):
    """Mode that holds back every non-blocking copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Callable[[], object]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            self.copies.append(lambda: func(*args))
            return args[0]
        return func(*args, **(kwargs or {}))


class SlowCopier:
    """Copier for the CPU as a device. Counts waits, copies, and bytes of pinned memory, now and at most."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may free memory in any thread
        self.pinned_now = self.pinned_max = self.waits = self.copies = 0

    def allocate_pinned(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        assert device.type == "cpu"
        memory = mmap.mmap(-1, pinned_bytes(size_bytes))
        with self._lock:
            self.pinned_now += len(memory)
            self.pinned_max = max(self.pinned_max, self.pinned_now)
        weakref.finalize(memory, self._let_go, len(memory))
        return torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes].fill_(NEVER_STORED)

    def _let_go(self, size_bytes: int) -> None:
        with self._lock:
            self.pinned_now -= size_bytes

    @contextmanager
    def copying(self, device: torch.device) -> Iterator[None]:
        assert device.type == "cpu"
        later = Later()
        try:
            with later:
                yield
        finally:
            for copy in later.copies:
                copy()
            with self._lock:
                self.waits += 1
                self.copies += len(later.copies)


class BrokenCopier(SlowCopier):
    """Copier that has no pinned memory."""

    def allocate_pinned(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nand much more")


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> SlowCopier:
    found = SlowCopier()
    monkeypatch.setattr(device_copy, "HOST_COPIERS", {"cpu": found})
    return found


def assorted() -> Iterator[ElementRange]:
    """Runs of every dtype and layout, with empty ones between; over 1 MiB."""
    for dtype in DTYPES:
        for layout in LAYOUTS:
            tensor = random_whole(dtype, (3, 5, 7), seed=len(dtype_name(dtype))).tensor(layout=layout)
            yield ElementRange(tensor, 0, 105)
            yield ElementRange(tensor, 17, 17)
            yield ElementRange(tensor, 1, 64)
    yield ElementRange(torch.rand(MiB // 4 + 1), 0, MiB // 4 + 1)
    yield ElementRange(torch.rand(64, dtype=torch.complex64).conj(), 3, 60)
    yield ElementRange(torch._neg_view(torch.rand(64)), 3, 60)
    yield ElementRange(torch.rand(0, 4), 0, 0)


def test_every_run_has_arrived_with_one_wait(copier: SlowCopier) -> None:
    """Runs of all dtypes and layouts arrive with one wait, in one block of pinned memory."""
    runs = list(assorted())
    views = host_views(runs)
    assert [bytes(view) for view in views] == [bytes(element_bytes(*run)) for run in runs]
    assert copier.waits == 1
    assert copier.copies > len(runs) // 2
    assert copier.pinned_max == pinned_bytes(sum(run.size_bytes for run in runs))


def test_the_stand_in_would_show_what_is_read_too_early(copier: SlowCopier) -> None:
    """Memory read before the wait differs; without this the other tests could not fail."""
    memory = copier.allocate_pinned(4, torch.device("cpu"))
    with copier.copying(torch.device("cpu")):
        memory.copy_(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), non_blocking=True)
        assert memory.tolist() == [NEVER_STORED] * 4
    assert memory.tolist() == [1, 2, 3, 4]


def test_pinned_memory_is_kept_by_its_last_view(copier: SlowCopier) -> None:
    """A late put still reads the memory, so it must not be allocated again."""
    views = host_views([ElementRange(torch.zeros(MiB), 0, MiB), ElementRange(torch.ones(MiB), 0, MiB)])
    part = memoryview(views[1])[4:8]
    del views
    assert copier.pinned_now == 8 * MiB
    assert part.cast("f")[0] == 1.0
    del part
    assert copier.pinned_now == 0


def test_a_few_bytes_are_not_worth_pinned_memory(copier: SlowCopier) -> None:
    """Small runs are copied directly, because an allocation takes longer than the copy."""
    tensor = torch.arange(100)
    assert bytes(host_views([ElementRange(tensor, 1, 99)])[0]) == tensor[1:99].numpy().tobytes()
    assert (copier.waits, copier.pinned_max) == (0, 0)


def test_without_pinned_memory_ordinary_memory_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without pinned memory, ordinary memory is used, with one warning that has the cause."""
    monkeypatch.setattr(device_copy, "HOST_COPIERS", {"cpu": BrokenCopier()})
    device_copy._warn_once.cache_clear()
    runs = list(assorted())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [bytes(view) for view in host_views(runs)] == [bytes(element_bytes(*run)) for run in runs]
    assert [record.getMessage().rpartition("cause=")[2] for record in caplog.records] == ["CUDA error: out of memory"]


def test_what_fails_is_raised_when_the_device_is_through(copier: SlowCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pending copies would otherwise still write to memory that is freed."""
    begun = 0

    def second_fails(*args: Any, **options: Any) -> None:
        nonlocal begun
        begun += 1
        if begun == 2:
            raise torch.AcceleratorError("an illegal memory access was encountered")
        copy_elements(*args, **options)

    monkeypatch.setattr(device_copy, "copy_elements", second_fails)
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        host_views([ElementRange(torch.zeros(MiB), 0, MiB), ElementRange(torch.ones(MiB), 0, MiB)])
    assert (copier.copies, copier.waits) == (1, 1)


@pytest.mark.parametrize(
    ("size_bytes", "expected"), [(0, 0), (1, 1), (3, 4), (64, 64), (65, 128), (64 * MiB, 64 * MiB)]
)
def test_pinned_memory_comes_in_powers_of_two(size_bytes: int, expected: int) -> None:
    """The sizes are those to which torch rounds up."""
    assert pinned_bytes(size_bytes) == expected


# ---- a save


def state(mib: int) -> dict[str, Any]:
    """Return large and small tensors, some of which are not contiguous."""
    return {
        "large": torch.rand(mib * MiB // 4),
        "turned": torch.rand(700, 900).t(),
        "small": [torch.rand(n) for n in range(40)],
        "half": torch.rand(3 * MiB // 2).to(torch.bfloat16),
        "name": "a model",
    }


def blank(of: dict[str, Any]) -> dict[str, Any]:
    return {
        "large": torch.zeros_like(of["large"]),
        "turned": torch.zeros(900, 700),
        "small": [torch.zeros_like(tensor) for tensor in of["small"]],
        "half": torch.zeros_like(of["half"]),
        "name": "",
    }


def test_a_state_on_a_device_is_saved_within_the_budget(copier: SlowCopier) -> None:
    """Through the writer: one wait per shard, pinned memory within the budget, and every bit equal."""
    store, budget_bytes = RecordingStore(MemoryStore()), 16 * MiB
    expected = state(60)
    dcp.save(expected, storage_writer=RemoteWriter(store, memory_budget_bytes=budget_bytes), no_dist=True)
    assert 0 < copier.pinned_max <= budget_bytes
    assert copier.pinned_now == 0
    shards = [key for request in store.requests if request.verb == "put" for key in request.keys if "shard" in key]
    assert len(shards) >= 4
    assert 4 <= copier.waits <= len(shards)  # the last shard may be too small for pinned memory
    found = blank(expected)
    dcp.load(found, storage_reader=RemoteReader(store), no_dist=True)
    assert found.pop("name") == expected.pop("name")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_as_many_shards_are_sent_at_once_as_may_be_in_flight(copier: SlowCopier) -> None:
    """Let sixteen puts of 136 MiB on a device wait for each other, with pinned memory of 128 MiB."""
    barrier = threading.Barrier(16)
    puts = itertools.count()

    def before(key: str) -> None:
        if next(puts) < 16:
            barrier.wait(PATIENCE_SECONDS)

    writer = RemoteWriter(HookedStore(MemoryStore(), before), memory_budget_bytes=128 * MiB)
    dcp.save({"w": torch.zeros(34 * MiB)}, storage_writer=writer, no_dist=True)
    assert copier.pinned_max == 128 * MiB


# ---- how CUDA is called


class FakeCuda:
    """Stand-in for `torch.cuda` that records the calls, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._events = 0

    def device(self, device: object) -> AbstractContextManager[None]:
        self.calls.append(f"device {device}")
        return nullcontext()

    def make_stream(self, device: object) -> str:
        self.calls.append(f"new stream on {device}")
        return f"stream of {device}"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.calls.append(f"on {stream}")
        yield
        self.calls.append(f"off {stream}")

    def event(self, *, blocking: bool) -> FakeEvent:
        assert blocking, "a wait must not keep a core busy"
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self, stream: str) -> None:
        self._cuda.calls.append(f"event on {stream}")

    def synchronize(self) -> None:
        self._cuda.calls.append("wait for event")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch.cuda, "Stream", fake.make_stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    return fake


def test_copies_of_cuda_go_by_one_stream_of_their_own(cuda: FakeCuda) -> None:
    """Leaving the block waits for an event behind the copies; after an error too."""
    copier, device = device_copy._Cuda(), torch.device("cuda", 1)
    with copier.copying(device):
        cuda.calls.append("copies")
    block = [
        "device cuda:1",
        "on stream of cuda:1",
        "copies",
        "event on stream of cuda:1",
        "wait for event",
        "off stream of cuda:1",
    ]
    assert cuda.calls == ["new stream on cuda:1", *block]
    cuda.calls.clear()
    with pytest.raises(KeyError), copier.copying(device):
        raise KeyError
    assert cuda.calls == [call for call in block[:-1] if call != "copies"]


def test_pinned_memory_of_cuda_takes_no_memory_of_the_first_device(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is allocated with the tensor's device as the current one."""
    asked: list[tuple[int, dict[str, object]]] = []

    def empty(size: int, **options: object) -> torch.Tensor:
        asked.append((size, options))
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", empty)
    device_copy._Cuda().allocate_pinned(100, torch.device("cuda", 3))
    assert cuda.calls == ["device cuda:3"]
    assert asked == [(100, {"dtype": torch.uint8, "device": "cpu", "pin_memory": True})]
