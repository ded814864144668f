"""A user's default device: tensors that the package makes stay on the CPU. "meta" stands for a device of the user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dcp_remote import CheckpointManager, load

CPU = torch.device("cpu")


@pytest.fixture
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def tensors() -> dict[str, torch.Tensor]:
    """Return tensors of every encoding."""
    return {
        "large": torch.arange(400_000.0, device=CPU),
        "turned": torch.arange(600.0, device=CPU).reshape(20, 30).t(),
        "lazy": torch.full((4,), 1 + 2j, device=CPU).conj(),
        "sparse": torch.eye(3, device=CPU).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(3, device=CPU)),
        "half": torch.ones(5, dtype=torch.bfloat16, device=CPU),
    }


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.usefixtures("elsewhere")
def test_a_save_and_a_load(tmp_path: Path, *, wait: bool) -> None:
    """Saves, in the foreground and background, and loads, with and without a state, ignore the default device."""
    state = {**tensors(), "object": {"of": [torch.ones(2, device=CPU)]}}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state, wait=wait)
        checkpoints.wait()
        blank = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
        checkpoints.restore({**blank, "object": {"of": [torch.zeros(2, device=CPU)]}})
    found = load(tmp_path)
    for name, tensor in tensors().items():
        assert found[name].device == blank[name].device == CPU
        torch.testing.assert_close(found[name], tensor.detach(), rtol=0, atol=0)
        torch.testing.assert_close(blank[name], tensor.detach(), rtol=0, atol=0)
    assert found["object"]["of"][0].tolist() == [1, 1]
