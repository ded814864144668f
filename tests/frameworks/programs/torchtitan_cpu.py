"""Run torchtitan on a CPU, which it does not support: import this before torchtitan.

Language models of torchtitan use FlexAttention, which has no backward pass on CPUs. `--override.imports
torchtitan_cpu.attention_on_cpu` replaces it by torch's own attention.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.distributed.fsdp import FSDPModule

# Kernels of expert parallelism, which need triton, and so a torch with CUDA.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()

torch._utils._get_available_device_type = lambda: "cpu"
VALUES: dict[str, Any] = {
    "get_device_name": "CPU",
    "get_device_properties": SimpleNamespace(total_memory=2**34),
    "memory_stats": {},
    "empty_cache": None,
    "reset_peak_memory_stats": None,
    "current_device": 0,  # torch's own is a text, which its `barrier` refuses
}
for name, value in VALUES.items():
    setattr(torch.cpu, name, lambda *_, value=value: value)
if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3.0 asks for a torch that is not released yet
    vars(torch.distributed)["set_timeout"] = lambda *_: None


def set_divisor(module: FSDPModule, divisor: float, *, original: Any = FSDPModule.set_gradient_divide_factor) -> None:
    """Add gradients by a plain sum, the only operation of gloo for this."""
    module.set_force_sum_reduction_for_comms(enable=True)
    original(module, divisor)


FSDPModule.set_gradient_divide_factor = set_divisor  # type: ignore[assignment, method-assign]  # for this process

# ruff: isort: split  # torchtitan looks for a device when it is imported
from torchtitan.config.override import derive, override  # noqa: E402  # as above
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402  # as above

ScaledDotProductAttention.sdpa_backends = [torch.nn.attention.SDPBackend.MATH]


@override(target=FlexAttention.Config)  # type: ignore[untyped-decorator]  # as above
def attention_on_cpu(config: Any) -> Any:
    """Replace FlexAttention."""
    return derive(config, ScaledDotProductAttention.Config)
