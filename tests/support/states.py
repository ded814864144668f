"""State dicts that several tests save, and their comparison."""

from __future__ import annotations

from typing import Any

import torch


def state_of_training() -> dict[str, Any]:
    """Return a model, its optimizer, a step and a schedule, nested as torch's own functions nest them."""
    generator = torch.Generator().manual_seed(1)
    return {
        "model": {"weight": torch.randn(7, 5, generator=generator), "bias": torch.randn(7, generator=generator)},
        "optim": {
            "state": {"weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(7, 5, generator=generator)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": ["weight", "bias"]}],
        },
        "step": 3,
        "schedule": {"last_lr": [0.1, 0.05], "name": "cosine", "none": None},
    }


def blank_state() -> dict[str, Any]:
    """Return a template for `state_of_training`."""
    return {
        "model": {"weight": torch.zeros(7, 5), "bias": torch.zeros(7)},
        "optim": {
            "state": {"weight": {"step": torch.tensor(0.0), "exp_avg": torch.zeros(7, 5)}},
            "param_groups": [{"lr": 0.0, "betas": (0.0, 0.0), "params": []}],
        },
        "step": 0,
        "schedule": {"last_lr": [], "name": "", "none": 1},
    }


def equal(left: object, right: object) -> bool:
    """Return whether types and values are equal at every level."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and left == right
