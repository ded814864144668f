"""Plugin of Axolotl that reports what a training computes, and kills its ranks in the middle of a save.

Options are the JSON text of the variable `AXOLOTL_WATCH`: `digest_at` (steps), `kill_at` (step), `forbids_gathers`,
`has_offload_folder`; `axolotl_jobs.py` adds `job`, under whose name values are reported.
With several ranks it makes Accelerate wrap models on the CPU as it does on GPUs.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback

from hf_models import engine_digests, forbid_gathers, model_digest, optimizer_digest, random_digest, use_gloo_ranks
from tests.support.rank_programs import report

# Time after which the stacks of all threads are written to the output of a training that stands still, in seconds.
STANDSTILL_SECONDS = 150

OPTIONS: dict[str, Any] = json.loads(os.environ.get("AXOLOTL_WATCH", "{}"))


def gathers() -> list[tuple[Any, str]]:
    """Return what `forbid_gathers` replaces: owners, and names of their functions."""
    import deepspeed
    from accelerate import Accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch.distributed.checkpoint import state_dict as torch_state_dict

    names = ("_zero3_consolidated_16bit_state_dict", "save_checkpoint", "load_checkpoint")
    return [
        *((DeepSpeedEngine, name) for name in names),
        (Accelerator, "get_state_dict"),
        (deepspeed.zero.GatheredParameters, "__enter__"),
        (torch_state_dict, "_gather_state_dict"),
    ]


def add_offload_folder(engine: Any) -> None:
    """Give an engine of DeepSpeed the offload folder that it has with NVMe, and which its saves copy.

    The swapper, which needs a compiled operator, is replaced; the code that copies is DeepSpeed's.
    """
    swapped = Path(f"swapped-{engine.global_rank}").absolute()
    swapped.mkdir(exist_ok=True)
    (swapped / "0.tensor.swp").write_bytes(b"moments")
    engine.zero_nvme_offload_optimizer = lambda: True
    engine.optimizer.optimizer_swapper = SimpleNamespace(swap_folder=str(swapped))


class Watch(TrainerCallback):  # type: ignore[misc]  # may not be installed
    """Callback that notes losses and digests, and kills this process."""

    def __init__(self, trainer: Any) -> None:
        """Take the trainer, whose class Axolotl chose."""
        self.trainer = trainer
        self.replaced: list[tuple[Any, str, Any]] = []
        self.digests: dict[str, dict[str, str]] = {}

    def report(self, **values: Any) -> None:
        """Report values, and the digests."""
        values |= {"digests": self.digests, "trainer": type(self.trainer).__name__}
        report(**({OPTIONS["job"]: values} if "job" in OPTIONS else values))

    def note(self, model: Any, optimizer: Any, state: Any) -> None:
        """Note the state after a step."""
        if self.trainer.is_deepspeed_enabled:
            digests = engine_digests(self.trainer.model_wrapped)
        else:
            digests = {"model": model_digest(model), "optimizer": optimizer_digest(model, optimizer)}
        self.digests[str(state.global_step)] = {**digests, "random": random_digest()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the state that was loaded."""
        self.note(kwargs["model"], kwargs["optimizer"], state)
        self.began_at = state.global_step
        if OPTIONS.get("has_offload_folder"):
            add_offload_folder(self.trainer.model_wrapped)
        if OPTIONS.get("forbids_gathers"):
            self.replaced = [(owner, name, getattr(owner, name)) for owner, name in gathers()]
            forbid_gathers()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the state after the steps that the options name."""
        if state.global_step in OPTIONS.get("digest_at", []):
            self.note(kwargs["model"], kwargs["optimizer"], state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Die while the save that has begun goes on."""
        if state.global_step == OPTIONS.get("kill_at"):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report losses and digests; let Axolotl gather its final model."""
        for owner, name, function in self.replaced:
            setattr(owner, name, function)
        logged = state.log_history
        self.report(
            began_at=self.began_at,
            step=state.global_step,
            losses={str(entry["step"]): entry["loss"] for entry in logged if "loss" in entry},
            tokens={str(entry["step"]): entry["tokens/total"] for entry in logged if "tokens/total" in entry},
            wrapped=type(self.trainer.model_wrapped).__name__,
        )


class WatchPlugin(BasePlugin):  # type: ignore[misc]  # may not be installed
    """Plugin of the test."""

    def register(self, cfg: Any) -> None:
        """Change Accelerate before Axolotl starts it; seed the adapters, which Axolotl draws without its seed."""
        faulthandler.dump_traceback_later(STANDSTILL_SECONDS, repeat=True)
        torch.manual_seed(11)
        if "RANK" in os.environ:
            use_gloo_ranks()
            # Axolotl asks for a mesh of GPUs, whatever there is.
            build = ParallelismConfig.build_device_mesh
            ParallelismConfig.build_device_mesh = lambda self, _device_type: build(self, "cpu")
        if cfg.get("deepspeed"):
            # By its full name: the attribute `torch` of `deepspeed.comm` is torch itself.
            module = importlib.import_module("deepspeed.comm.torch")
            module.__dict__["build_shm_op"] = lambda: None  # a faster all-reduce, which takes minutes to compile

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """Return the callback."""
        return [Watch(trainer)]
