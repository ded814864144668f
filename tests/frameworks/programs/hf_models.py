"""Small models, data and digests that the programs with Transformers and Accelerate share."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from dcp_remote import LocalBoxes

VOCABULARY = 64


def use_gloo_ranks() -> None:
    """Make Accelerate wrap models on the CPU as it does on GPUs: without this it has no FSDP and no DeepSpeed there."""
    PartialState._prepare_backend = lambda *_args, **_kwargs: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


def make_model(*, tied: bool = False) -> LlamaForCausalLM:
    """Return a Llama with random weights, the same in every process, with dropout that draws random numbers."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def make_data(count: int = 64) -> list[dict[str, torch.Tensor]]:
    """Return samples of 16 tokens, the same in every process."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, VOCABULARY, (count, 16), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def digest_values(values: Any) -> str:
    """Return a digest of tensors and plain values, nested; of a DTensor, of the whole tensor. Collective for these."""
    found = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{name}.{key}", value[key])
        elif isinstance(value, LocalBoxes):
            add(name, [(offsets, tensor) for offsets, tensor in value.boxes])
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                add(f"{name}.{number}", item)
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
            found.update(whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(f"{name} {value!r}".encode())

    add("", values)
    return found.hexdigest()


def model_digest(model: torch.nn.Module) -> str:
    """Return the digest of a model's parameters and buffers, under names without the prefixes of wrappers."""
    return digest_values({name.removeprefix("module."): value for name, value in model.state_dict().items()})


def optimizer_digest(model: torch.nn.Module, optimizer: Any) -> str:
    """Return the digest of an optimizer's states by the names of the parameters, and of its options."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    names = {id(parameter): name.removeprefix("module.") for name, parameter in model.named_parameters()}
    states = {names[id(parameter)]: state for parameter, state in optimizer.state.items()}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"names": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return digest_values({"states": states, "groups": groups})


def engine_digests(engine: Any) -> dict[str, str]:
    """Return the digests of this rank's part of an engine of DeepSpeed: masters, states of the optimizer."""
    from dcp_remote.integrations.deepspeed import engine_state

    state = engine_state(engine)
    return {
        "model": digest_values(state["model"].state_dict()),
        "optimizer": digest_values(state["optim"].state_dict()["state"]),
    }


def random_digest() -> str:
    """Return the digest of the random states of this process."""
    return digest_values(
        {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": str(np.random.get_state(legacy=False))}
    )


def forbid_gathers() -> None:
    """Make every way in which the frameworks gather a sharded model on one rank for a checkpoint raise an error."""
    import deepspeed
    from accelerate import Accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch.distributed.checkpoint import state_dict as torch_state_dict

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("a save or a load gathers the model")

    DeepSpeedEngine._zero3_consolidated_16bit_state_dict = refuse
    DeepSpeedEngine.save_checkpoint = refuse
    DeepSpeedEngine.load_checkpoint = refuse
    Accelerator.get_state_dict = refuse
    deepspeed.zero.GatheredParameters.__enter__ = refuse
    torch_state_dict._gather_state_dict = refuse
