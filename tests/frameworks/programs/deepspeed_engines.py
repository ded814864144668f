"""Engines of DeepSpeed that the programs train, and their full state by DeepSpeed's own functions."""

from __future__ import annotations

import hashlib
from itertools import chain
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

SAMPLES = 12
VOCABULARY = 19

# Arguments of `make_engine` by name. "1-32" adds gradients up in fp32, for which DeepSpeed has another optimizer.
KINDS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "1-32": {"stage": 1, "precision": "bf16-fp32"},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "2-offload": {"stage": 2, "offload": True},
    "3-offload": {"stage": 3, "offload": True},
    "0-fp32": {"stage": 0, "precision": "fp32"},
    "2-fp32": {"stage": 2, "precision": "fp32"},
    "3-fp32": {"stage": 3, "precision": "fp32"},
    "0-fp16": {"stage": 0, "precision": "fp16"},
    "2-fp16": {"stage": 2, "precision": "fp16"},
    "3-fp16": {"stage": 3, "precision": "fp16"},
    # Groups of a flat buffer in another order than the model's, with padding between parameters.
    "2-reordered": {"stage": 2, "round_robin_gradients": True},
    "2-aligned": {"stage": 2, "parameter_alignment": True},
}


class Net(nn.Module):
    """Model with tied, frozen and tiny parameters, and a buffer that training changes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, 10)
        self.frozen = nn.Linear(10, 7)
        self.hidden = nn.Linear(7, 10)
        self.norm = nn.LayerNorm(10)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(10, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        hidden = self.hidden(torch.relu(self.frozen(self.embed(tokens)))) * self.gain
        logits: torch.Tensor = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


def make_engine(
    stage: int,
    *,
    seed: int = 0,
    precision: str = "bf16",
    offload: bool = False,
    clipping: float = 1.0,
    **zero: Any,
) -> Any:
    """Return an engine with two groups of parameters, a scheduler, and small sub-groups in stage 3."""
    if precision == "fp16":
        type(get_accelerator()).is_fp16_supported = lambda _: True  # torch computes in it on the CPU, if slowly
    model = Net(seed)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for _, parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for _, parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    settings: dict[str, Any] = {"stage": stage, **zero}
    if stage == 3:
        # DeepSpeed's own linear layer, by default that of the whole process, rounds otherwise than torch's.
        own = {"sub_group_size": 100, "stage3_param_persistence_threshold": 12, "memory_efficient_linear": False}
        settings |= own | zero
    if offload:
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
        "zero_optimization": settings,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": clipping,
        "steps_per_print": 1_000_000,
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
    }
    if precision == "bf16" and stage == 1:
        config["data_types"] = {"grad_accum_dtype": "bf16"}  # else DeepSpeed takes `BF16_Optimizer`
    if precision == "bf16-fp32":
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        del config[precision]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step)] * 2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return engine


def batch(step: int) -> torch.Tensor:
    """Return this rank's part of the batch of a step, which is the same at any number of ranks."""
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, 6), generator=torch.Generator().manual_seed(1000 + step))
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def train(engine: Any, steps: int) -> list[float]:
    """Train some steps from `engine.global_steps` on; return the losses of this rank."""
    losses = []
    for _ in range(steps):
        loss = engine(batch(engine.global_steps))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def evaluate(engine: Any) -> float:
    """Return the loss of a batch, the same on every rank; changes nothing."""
    engine.eval()
    with torch.no_grad():
        tokens = torch.randint(0, VOCABULARY, (SAMPLES, 6), generator=torch.Generator().manual_seed(7))
        loss = engine(tokens).item()
    engine.train()
    return float(loss)


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    """Return all masters, states and 16-bit copies, whole, by DeepSpeed's own functions; every rank calls this."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state") and any(optimizer.optimizer.state.values()):
        optimizer._hp_optimizer_states_linked = False  # DeepSpeed links the first group alone
        optimizer._lazy_init_hp_params_optimizer_state()
    state: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                state[f"copy {name}"] = parameter.data.clone()
        else:
            state[f"copy {name}"] = parameter.data.clone()
        if not parameter.requires_grad:
            continue
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            state[f"{key} {name}"] = _full(engine, parameter, key).clone().view(state[f"copy {name}"].shape)
    for name, buffer in engine.module.named_buffers():
        state[f"buffer {name}"] = buffer.clone()
    return state


def _full(engine: Any, parameter: nn.Parameter, key: str) -> torch.Tensor:
    optimizer = engine.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        value = parameter.data if key == "fp32" else optimizer.state[parameter][key]
    elif hasattr(optimizer, "fp32_groups"):  # stage 0 in 16 bits
        pairs = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
        masters = next(master for one, master in pairs if one is parameter)
        value = masters.data if key == "fp32" else optimizer.optimizer.state[masters][key]
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        value = _full_of_partitions(optimizer, parameter, key)
    elif key == "fp32":
        value = safe_get_full_fp32_param(parameter)
    else:
        value = safe_get_full_optimizer_state(parameter, key)
    assert isinstance(value, torch.Tensor)
    return value.float()


def _full_of_partitions(optimizer: Any, parameter: nn.Parameter, key: str) -> torch.Tensor:
    """Gather the partitions of ZeRO-1 and 2, and find the parameter by its memory in the 16-bit buffer.

    With `round_robin_gradients`, DeepSpeed's own functions return elements of other parameters.
    """
    group = next(n for n, ones in enumerate(optimizer.bit16_groups) if any(one is parameter for one in ones))
    masters, copies = optimizer.single_partition_of_fp32_groups[group], optimizer.bit16_groups_flat[group]
    part = masters.detach() if key == "fp32" else optimizer.optimizer.state[masters][key]
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    offset = (parameter.data_ptr() - copies.data_ptr()) // copies.element_size()
    return torch.cat(parts)[offset : offset + parameter.numel()]


def digests(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of the bits of each tensor."""
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, tensor in state.items()
    }


def steps_of(engine: Any) -> list[float]:
    """Return the different steps in the state of the base optimizer."""
    return sorted({float(state["step"]) for state in base_of(engine).state.values()})


def base_of(engine: Any) -> Any:
    """Return the base optimizer, below DeepSpeed's if there is one."""
    optimizer = engine.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
