"""Background saves from CUDA wait for every device of the state, with stand-ins: no test machine has a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dcp_remote import CheckpointManager, load
from dcp_remote.saving import device_copy, staging
from dcp_remote.saving.late_copies import Buffers
from dcp_remote.storage import MemoryStore

NEVER_STORED = 0xA5


class LateDevices:
    """Stand-in for devices: a copy arrives when its stream is waited for, in the thread that began it.

    Attributes:
        waits: Devices whose current stream was waited for, in order.
        fails: True to let the next staging fail.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.fails = False
        self._late: dict[tuple[int, torch.device], list[Callable[[], object]]] = {}

    def copy(self, device: torch.device, into: torch.Tensor, source: torch.Tensor) -> None:
        value = source.clone()
        self._late.setdefault((threading.get_ident(), device), []).append(lambda: into.copy_(value))

    def arrive(self, device: torch.device) -> None:
        for copy in self._late.pop((threading.get_ident(), device), []):
            copy()

    def current_stream(self, device: torch.device) -> LateStream:
        return LateStream(self, device)


class LateStream:
    """Current stream of a device in the calling thread."""

    def __init__(self, devices: LateDevices, device: torch.device) -> None:
        self._devices, self._device = devices, device

    def synchronize(self) -> None:
        self._devices.waits.append(str(self._device))
        self._devices.arrive(self._device)


class OnDevice:
    """Memory of a CPU tensor that claims to be on a device."""

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        self.tensor, self.device = tensor, device

    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevices:
    """Put tensors of two elements on cuda:0, of three on cuda:1, and so on; tensors of one stay on the CPU."""
    devices_ = LateDevices()
    kept: dict[int, tuple[OnDevice, torch.Tensor]] = {}

    def storage(tensor: torch.Tensor) -> OnDevice | torch.UntypedStorage:
        if tensor.numel() == 1:
            return tensor.untyped_storage()
        device = torch.device("cuda", tensor.numel() - 2)
        if id(tensor) not in kept:
            buffer = torch.full((tensor.numel() * 4,), NEVER_STORED, dtype=torch.uint8)
            kept[id(tensor)] = OnDevice(tensor, device), buffer
        return kept[id(tensor)][0]

    def copy(each: Any) -> None:
        if devices_.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if isinstance(each.source, OnDevice):
            devices_.copy(each.source.device, each.into, each.source.tensor.view(torch.uint8))
        else:
            each.into.copy_(each.source)

    of = Buffers.of

    def buffer(buffers: Buffers, one: Any) -> torch.Tensor:
        return kept[id(one.tensor)][1] if isinstance(one, OnDevice) else of(buffers, one)

    bytes_of = staging._bytes_of
    monkeypatch.setattr(staging, "storage_of", storage)
    monkeypatch.setattr(staging, "_bytes_of", lambda one: one if isinstance(one, OnDevice) else bytes_of(one))
    monkeypatch.setattr(staging, "_copy", copy)
    monkeypatch.setattr(Buffers, "of", buffer)
    monkeypatch.setattr(torch.cuda, "current_stream", devices_.current_stream)
    return devices_


def test_a_background_save_waits_for_every_device_of_the_state(late: LateDevices) -> None:
    """Two saves: a buffer that is read too early would hold the values of the save before."""
    state = {"model": {"b": torch.tensor([1.0, 2.0, 3.0]), "a": torch.tensor([4.0, 5.0])}, "step": torch.tensor([0.0])}
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
            assert late.waits == ["cuda:0", "cuda:1"]
            late.waits.clear()
            state["model"]["b"] += 10  # type: ignore[index]
    for step in (1, 2):
        found = load(store, step=step)["model"]
        assert found["b"].tolist() == [10.0 * (step - 1) + value for value in (1, 2, 3)]
        assert found["a"].tolist() == [4.0, 5.0]


def test_buffers_are_waited_for_after_an_error(late: LateDevices) -> None:
    """Otherwise a device could write to memory that is allocated again."""
    late.fails = True
    with CheckpointManager(MemoryStore()) as checkpoints:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            checkpoints.save(1, {"b": torch.tensor([1.0, 2.0, 3.0])})
        assert late.waits == ["cuda:1"]


class Holder:
    """Object with a parameter, which torch clones on its device."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter


def test_clones_inside_of_objects_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clones stay on their device, where the saving thread reads them on another stream.

    Only the devices passed to `wait_for_devices` are checked, since no tensor here is on a real device.
    """
    waited: list[set[torch.device]] = []
    monkeypatch.setattr(staging, "wait_for_devices", lambda found: waited.append(set(found)))
    staging.Stager().stage({"holder": Holder(torch.nn.Parameter(torch.ones(3)))})
    assert waited == [set(), {torch.device("cpu")}]


def test_devices_are_waited_for_once_each(late: LateDevices) -> None:
    """The CPU, and devices of a type without streams, are never waited for."""
    one, two = torch.device("cuda", 1), torch.device("cuda", 2)
    device_copy.wait_for_devices([two, torch.device("cpu"), one, two, torch.device("meta")])
    assert late.waits == ["cuda:1", "cuda:2"]
