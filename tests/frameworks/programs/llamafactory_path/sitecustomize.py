"""Changes in processes of LLaMA-Factory, which are started out of sight, by variables of the environment.

TEST_GLOO       Accelerate wraps models on the CPU as on GPUs: without this it has no DeepSpeed there.
TEST_KILL       `<when>-<step>`: SIGKILL in the save of a step; `state`: when the trainer state is to be written,
                `upload`: on every rank, while the tensors are sent.
TEST_GATHERS    File to which the name of each call that gathers a sharded model is appended.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


def _use_gloo_ranks(module: Any) -> None:
    import torch
    from accelerate.utils import DistributedType

    module.PartialState._prepare_backend = lambda *_args, **_kwargs: ("gloo", DistributedType.MULTI_GPU)
    module.PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


def _kill_in_a_save(module: Any) -> None:
    when, _, step = os.environ["TEST_KILL"].partition("-")
    write, on_save = module.TrainerState.save_to_json, module.CallbackHandler.on_save

    @functools.wraps(write)
    def write_state(self: Any, json_path: str) -> None:
        if when == "state" and self.global_step == int(step):
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, json_path)

    @functools.wraps(on_save)
    def call(self: Any, args: Any, state: Any, control: Any) -> Any:
        if when == "upload" and state.global_step == int(step):
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return on_save(self, args, state, control)

    module.TrainerState.save_to_json, module.CallbackHandler.on_save = write_state, call


def _note_gathers(module: Any) -> None:
    gather = module.DeepSpeedEngine._zero3_consolidated_16bit_state_dict

    @functools.wraps(gather)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Path(os.environ["TEST_GATHERS"]).open("a") as file:
            file.write(f"{self.global_steps}\n")
        return gather(self, *args, **kwargs)

    module.DeepSpeedEngine._zero3_consolidated_16bit_state_dict = noted


_CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "accelerate.state": ("TEST_GLOO", _use_gloo_ranks),
    "transformers.trainer_callback": ("TEST_KILL", _kill_in_a_save),
    "deepspeed.runtime.engine": ("TEST_GATHERS", _note_gathers),
}


class _Finder(MetaPathFinder):
    """Finder of the modules that are changed once they are imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        variable, change = _CHANGES.get(name, ("", None))
        spec = PathFinder.find_spec(name, path, target) if os.environ.get(variable) else None
        if spec is None or spec.loader is None or change is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]  # of this loader alone
        return spec


sys.meta_path.insert(0, _Finder())
# Of a process that stands still, the stacks of all threads are written to its output.
faulthandler.dump_traceback_later(150, repeat=True)
