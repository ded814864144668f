"""Strategies of Lightning on gloo ranks of a CPU, and digests of what they hold."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from argparse import Namespace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

# Lightning removes the variables when a training has ended.
ENVIRONMENT = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
WORLD_SIZE, RANK = int(ENVIRONMENT["WORLD_SIZE"]), int(ENVIRONMENT["RANK"])


def digests_of(strategy: Any, model: Any, optimizers: list[Any]) -> dict[str, str]:
    """Return digests of whole tensors; gathers, which a test may."""
    if "DeepSpeed" in type(strategy).__name__:
        from hf_models import engine_digests

        return dict(engine_digests(model))
    options = StateDictOptions(full_state_dict=True)
    values: dict[str, Any] = {"model": get_model_state_dict(model, options=options)}
    if optimizers:
        values["optimizer"] = get_optimizer_state_dict(model, optimizers, options=options)["state"]
    return {name: _digest(value) for name, value in values.items()}


def _digest(values: Any) -> str:
    if isinstance(values, dict):
        text = "".join(f"{name.removeprefix('module.')}:{_digest(values[name])}" for name in sorted(values))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
    if isinstance(values, torch.Tensor):
        return hashlib.sha256(values.double().numpy().tobytes()).hexdigest()[:16]
    return repr(values)


def make_strategy(mode: str, settings: dict[str, Any] | None, *, is_fabric: bool = False, **given: Any) -> Any:
    """Return a strategy of Trainer or Fabric by name; Lightning's own without settings of checkpoints.

    Args:
        mode: "ddp", "fsdp1", "fsdp2", "plain", or "zero" with a stage.
        settings: Settings of checkpoints.
        is_fabric: True for Fabric.
        given: Arguments of the strategy of FSDP2.
    """
    package = "lightning.fabric.strategies" if is_fabric else "lightning.pytorch.strategies"
    if settings is not None:
        package = "dcp_remote.integrations." + ("fabric" if is_fabric else "lightning")
    strategies = importlib.import_module(package)
    name = {
        "ddp": "DDPStrategy",
        "fsdp1": "FSDPStrategy",
        "fsdp2": "ModelParallelStrategy",
        "zero": "DeepSpeedStrategy",
        "plain": "SingleDeviceStrategy",
    }[mode.rstrip("0123456789") if mode.startswith("zero") else mode]
    base = getattr(strategies, name if settings is None else f"Remote{name}")
    options: dict[str, Any] = {} if settings is None else {"checkpoint_settings": settings}
    if mode == "plain":
        return base(device="cpu", **options)
    if mode == "fsdp1":
        base = _on_cpu(base)
        options |= {"auto_wrap_policy": {nn.Linear}, "state_dict_type": "full"}
    if mode.startswith("zero"):
        return _deepspeed_on_cpu(base, int(mode[-1]), options)
    if mode == "fsdp2":
        options |= {"data_parallel_size": WORLD_SIZE, "tensor_parallel_size": 1, **given}
    return base(process_group_backend="gloo", **options)


def _on_cpu(base: Any) -> Any:
    """Return a class of FSDP1 that runs without an accelerator, which torch refuses."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    init = FullyShardedDataParallel.__init__

    def on_cpu(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **{**options, "device_id": torch.device("cpu")})

    FullyShardedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]  # for this process
    return type(base.__name__, (base,), {})


def make_accelerator(mode: str, *, is_fabric: bool = False) -> Any:
    """Return the accelerator of a strategy: one that DeepSpeed's takes for CUDA, or the CPU."""
    if not mode.startswith("zero"):
        return "cpu"
    package = f"lightning.{'fabric' if is_fabric else 'pytorch'}.accelerators"
    cuda_accelerator = importlib.import_module(package).CUDAAccelerator

    methods = {
        "setup_device": lambda self, device: None,
        "teardown": lambda self: None,
        "get_device_stats": lambda self, device: {},
        "parse_devices": staticmethod(lambda devices: list(range(int(devices)))),
        "get_parallel_devices": staticmethod(lambda devices: [torch.device("cpu", index) for index in devices]),
        "auto_device_count": staticmethod(lambda: WORLD_SIZE),
        "is_available": staticmethod(lambda: True),
    }
    return type("PretendedCuda", (cuda_accelerator,), methods)()


def _deepspeed_on_cpu(base: Any, stage: int, options: dict[str, Any]) -> Any:
    import deepspeed

    if not hasattr(deepspeed.initialize, "__wrapped__"):
        initialize = deepspeed.initialize
        # Lightning passes the index of a GPU.
        deepspeed.initialize = functools.wraps(initialize)(
            lambda args, **given: initialize(args=Namespace(device_rank=RANK), **given)
        )
    strategy_class = type(
        base.__name__,
        (base,),
        {"root_device": property(lambda self: torch.device("cpu"))},
    )
    config = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 3,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return strategy_class(process_group_backend="gloo", config=config, **options)
