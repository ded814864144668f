"""Saves of a training on a GPU that goes on while its state is copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_remote import CheckpointManager, load
from dcp_remote.errors import SaveFailedError
from dcp_remote.storage import MemoryStore
from tests.gpu.training import DEVICE, Training, begin_process_group
from tests.support.states import equal

KINDS = {
    "foreach": {"foreach": True},
    "for each parameter": {"foreach": False},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "FSDP2": {"is_sharded": True},
    "FSDP2, fused": {"is_sharded": True, "fused": True},
    "compiled": {"is_compiled": True, "foreach": True},
}


@pytest.fixture
def process_group() -> Iterator[None]:
    begin_process_group()
    yield
    dist.destroy_process_group()


@pytest.fixture(params=KINDS)
def training(request: pytest.FixtureRequest, process_group: None) -> Training:
    if DEVICE != "cuda" and request.param in ("capturable", "compiled"):
        pytest.skip(f"{request.param} needs a GPU")
    return Training(**KINDS[request.param])


def saved_at_once(training: Training) -> dict[str, Any]:
    """Return what a save holds that copies nothing beside training."""
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.save(0, training.state, wait=True)
    return load(store)


def test_training_goes_on_while_the_state_is_copied(training: Training) -> None:
    """Each save holds the state of its step, though three steps come at once behind it."""
    store, expected = MemoryStore(), {}
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.watch(training.optimizer)
        for step in (1, 2, 3):
            expected[step] = saved_at_once(training)
            checkpoints.save(step, training.state)
            for _ in range(3):
                training.train()
            checkpoints.wait()
            assert checkpoints.last_save is not None
            assert checkpoints.last_save.copied_bytes > 0
    assert not equal(expected[1], expected[2])
    for step, state in expected.items():
        assert equal(load(store, step=step), state)


def test_work_that_is_queued_before_the_save_is_in_it(training: Training) -> None:
    """The GPU still computes the step when `save` is called: the copies wait for it on the GPU."""
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.watch(training.optimizer)
        ballast = torch.randn(2048, 2048, device=DEVICE)
        for _ in range(20):
            ballast = (ballast @ ballast).tanh()
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.add_(1)
        checkpoints.save(1, training.state)
        training.wait()
        expected = saved_at_once(training)
    assert equal(load(store), expected)


def test_a_change_that_comes_too_early_is_noticed(training: Training) -> None:
    with CheckpointManager(MemoryStore(), progress=False) as checkpoints:
        checkpoints.watch(training.optimizer)
        checkpoints.save(1, training.state)
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.add_(1)
        with pytest.raises(SaveFailedError, match=r"before_update\(\)"):
            checkpoints.wait()
        assert not checkpoints.run.checkpoints()


def test_the_default_device_is_the_gpu(process_group: None) -> None:
    """Buffers on the host stay on the host."""
    store = MemoryStore()
    with torch.device(DEVICE):
        training = Training()
        expected = saved_at_once(training)
        with CheckpointManager(store, progress=False) as checkpoints:
            checkpoints.watch(training.optimizer)
            checkpoints.save(1, training.state)
            training.train()
        found = load(store)
        with CheckpointManager(store, progress=False) as checkpoints:
            checkpoints.restore(training.state)
        assert equal(saved_at_once(training), expected)
    assert equal(found, expected)


def test_a_restore_fills_tensors_of_the_gpu(training: Training) -> None:
    store = MemoryStore()
    expected = saved_at_once(training)
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.save(1, training.state, wait=True)
        training.train()
        checkpoints.restore(training.state)
    assert {parameter.device.type for parameter in training.model.parameters()} == {DEVICE}
    assert equal(saved_at_once(training), expected)
