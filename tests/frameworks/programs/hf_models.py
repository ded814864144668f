"""Small models, data, digests and jobs that the programs with Transformers and Accelerate share."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import LlamaConfig, LlamaForCausalLM

from dcp_remote import CheckpointManager, LocalBoxes
from dcp_remote.integrations.runs import close_managers
from dcp_remote.integrations.wrappers import unwrap_optimizer
from tests.support.rank_programs import leave_process_group, report

VOCABULARY = 64

_full_tensor = DTensor.full_tensor


def run_jobs(train: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """Train once for each job of the option file; report what each returns.

    Args:
        train: Called with the mode, as "plain" or "fsdp2", and the options of a job.
    """
    options: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    mode = options["mode"]
    if mode == "plain":
        assert os.environ["WORLD_SIZE"] == "1"
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    elif mode != "ddp":
        use_gloo_ranks()
        forbid_gathers(has_collectives=mode == "fsdp1")
    for name, job in options["jobs"].items():
        report(**{name: train(mode, job)})
        close_managers()
    leave_process_group()


def kill_soon(seconds: float = 0.3) -> None:
    """Kill this process in a moment, in the middle of the save that has begun."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def zero_config(mode: str, **options: Any) -> dict[str, Any]:
    """Return the configuration of DeepSpeed for `zero1`, `zero2` or `zero3`; `options` are those of ZeRO."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": int(mode[-1]), "stage3_param_persistence_threshold": 16, **options},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


def use_gloo_ranks() -> None:
    """Make Accelerate wrap models on the CPU as it does on GPUs: without this it has no FSDP and no DeepSpeed there."""
    PartialState._prepare_backend = lambda *_args, **_kwargs: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


class Warnings(logging.Handler):
    """Handler that keeps the texts of warnings of dcp_remote, until `end`."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("dcp_remote").addHandler(self)

    def end(self) -> None:
        """Keep no more."""
        logging.getLogger("dcp_remote").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a text."""
        self.texts.append(record.getMessage())


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
            whole = _full_tensor(value) if isinstance(value, DTensor) else value
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
    optimizer = unwrap_optimizer(optimizer)
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


def forbid_gathers(*, has_collectives: bool = False) -> None:
    """Make every way in which the frameworks gather a sharded model for a checkpoint raise an error.

    So does a collective of torch in a save. A DTensor without dimensions, as the norm of gradients, may be gathered.

    Args:
        has_collectives: True where a save calls collectives of torch, as that of FSDP1's optimizer does.
    """
    from accelerate import Accelerator
    from torch.distributed.checkpoint import state_dict as torch_state_dict

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("a save or a load gathers the model")

    def refuse_whole(tensor: DTensor, **options: Any) -> Any:
        return _full_tensor(tensor, **options) if not tensor.ndim else refuse()

    save = CheckpointManager.save

    def save_without_collectives(manager: CheckpointManager, *args: Any, **options: Any) -> None:
        with CommDebugMode() as collectives:
            save(manager, *args, **options)
        if collectives.get_total_counts():
            raise RuntimeError(f"a save calls collectives of torch: {dict(collectives.get_comm_counts())}")

    if not has_collectives:
        CheckpointManager.save = save_without_collectives  # type: ignore[assignment, method-assign]  # in this process
    Accelerator.get_state_dict = refuse
    DTensor.full_tensor = refuse_whole  # type: ignore[assignment, method-assign]  # in this process
    torch_state_dict._gather_state_dict = refuse
    torch_state_dict._broadcast_state_dict = refuse
    if find_spec("deepspeed"):
        import deepspeed
        from deepspeed.runtime.engine import DeepSpeedEngine

        DeepSpeedEngine._zero3_consolidated_16bit_state_dict = refuse
        DeepSpeedEngine.save_checkpoint = refuse
        DeepSpeedEngine.load_checkpoint = refuse
        deepspeed.zero.GatheredParameters.__enter__ = refuse
