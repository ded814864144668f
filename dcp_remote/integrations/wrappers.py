"""Wrappers that frameworks put around modules and optimizers: names without them, and the object inside."""

from __future__ import annotations

from typing import Any

# Modules by which `torch.compile` and activation checkpointing wrap others.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def canonical(name: str) -> str:
    """Return the name of a parameter or module without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside of Accelerate's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
