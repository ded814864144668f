"""Run the tests of this folder only where torch sees a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.training import DEVICE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder, and say why, on a machine without a GPU."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        reason = "torch sees no GPU; on a machine that has one: make TORCH=torch test-gpu"
        for item in items:
            if "tests/gpu/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
