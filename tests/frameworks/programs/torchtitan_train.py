"""Train torchtitan's debug model by its command line, once for each job of a file; report losses and digests."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import torchtitan_cpu  # noqa: F401  # changes torch for torchtitan, which comes after it

# ruff: isort: split
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.models.llama3 import model_registry
from torchtitan.train import main as train
from torchtitan.trainer import Trainer

from dcp_remote import load
from dcp_remote.errors import DcpRemoteError
from tests.support.late_copies import count_late_copies
from tests.support.rank_programs import leave_process_group, report

RANK = int(os.environ["RANK"])

ARGUMENTS = shlex.split("""
--module llama3 --config llama3_debugmodel --hf_assets_path assets --dataloader.dataset_path assets/data
--training.seq_len 32 --training.local_batch_size 2 --training.steps 6 --training.disable_cuda_graphs
--parallelism.spmd_backend partial_dtensor --training.mixed_precision_param float32
--debug.seed 1 --debug.no-enable_structured_logging --lr_scheduler.total_steps 6
""")


class Watch:
    """Record of one training, which also disturbs the training as its options say."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.losses: list[float] = []
        self.digests: dict[str, dict[str, str]] = {}
        self.loader: dict[str, str] = {}
        self.save_seconds = 0.0

    def log(self, _processor: Any, _step: int, loss: float, *_: Any, **__: Any) -> None:
        self.losses.append(loss)

    def load(self, manager: Any, step: int = -1) -> bool:
        was_loaded = bool(LOAD(manager, step))
        if manager.enable:
            self.note("loaded", manager.states["train_state"])
        return was_loaded

    def train_step(self, trainer: Any, data: Any) -> None:
        TRAIN_STEP(trainer, data)
        step = trainer.step
        if step in self.options.get("digest_at", [6]):
            self.note(str(step), trainer)

    def save(self, manager: Any, curr_step: int, last_step: bool = False) -> bool:
        if RANK == 1 and curr_step == self.options.get("late_at"):
            time.sleep(8)  # longer than the other rank waits
        if curr_step == 0:
            self.note("seed", manager.states["train_state"])
        is_failing = RANK == 1 and curr_step == self.options.get("fail_at")
        began = time.monotonic()
        try:
            with patch.object(Trainer, "state_dict", side_effect=ValueError("boo")) if is_failing else nullcontext():
                was_saved = bool(SAVE(manager, curr_step, last_step))
        finally:
            self.save_seconds = time.monotonic() - began
        if curr_step == self.options.get("kill_at"):
            time.sleep(0.2)  # in the middle of the upload
            os.kill(os.getpid(), signal.SIGKILL)
        return was_saved

    def note(self, name: str, trainer: Any) -> None:
        # Asked for its state before the first step, the optimizer makes one of an empty step.
        has_stepped = any(one.state for one in trainer.optimizers)
        values = {
            "model": {key: value for part in trainer.model_parts for key, value in part.state_dict().items()},
            "optimizer": trainer.optimizers.state_dict() if has_stepped else None,
            "rest": {"schedulers": trainer.lr_schedulers.state_dict(), "train": trainer.state_dict()},
        }
        self.digests[name] = {key: digest(value) for key, value in values.items()}
        self.loader[name] = digest(trainer.dataloader.state_dict())


INIT = dist.init_process_group
LATE_COPIES = count_late_copies()
LOAD, SAVE, TRAIN_STEP = BaseCheckpointManager.load, BaseCheckpointManager.save, Trainer.train_step


def digest(values: Any) -> str:
    """Return a digest of whole tensors; gathers, which a test may."""
    if isinstance(values, dict):
        text = "".join(f"{name}:{digest(values[name])}" for name in sorted(values))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
    if isinstance(values, DTensor):
        values = values.full_tensor()
    if isinstance(values, torch.Tensor):
        return hashlib.sha256(values.double().numpy().tobytes()).hexdigest()[:16]
    return repr(values)


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Train once; return what the test compares."""
    watch, error = Watch(options), None
    LATE_COPIES.clear()
    imports = ["torchtitan_cpu.attention_on_cpu"]
    if "settings" in options:
        imports.append(f"dcp_remote.integrations.torchtitan.remote_checkpoint={json.dumps(options['settings'])}")
    arguments = ["train", *ARGUMENTS, *options["arguments"]]
    if "--override.imports" not in arguments:
        arguments.append("--override.imports")
    place = arguments.index("--override.imports") + 1
    arguments[place:place] = imports
    if "export_from" in options:
        folder = Path(f"hugging-face-{RANK}").absolute()
        export_to_hugging_face(options["export_from"], folder)
        arguments += ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", str(folder)]
    if "convert_from" in options:
        convert_to_own(options["convert_from"], Path(f"outputs/own-{RANK}/step-2"))
        arguments += ["--checkpoint.folder", f"own-{RANK}"]
    with (
        patch.object(sys, "argv", arguments),
        patch("torchtitan.trainer.time", SimpleNamespace(sleep=lambda _: None, perf_counter=time.perf_counter)),
        patch.object(MetricsProcessor, "log", autospec=True, side_effect=watch.log),
        patch.object(BaseCheckpointManager, "load", autospec=True, side_effect=watch.load),
        patch.object(BaseCheckpointManager, "save", autospec=True, side_effect=watch.save),
        patch.object(Trainer, "train_step", autospec=True, side_effect=watch.train_step),
    ):
        try:
            train()
        except (DcpRemoteError, ValueError, FileNotFoundError, SystemExit) as caught:
            if not options.get("expects_error"):
                raise
            error = f"{type(caught).__name__}: {caught}"
    seen = {name: getattr(watch, name) for name in ("losses", "digests", "loader", "save_seconds")}
    return seen | {"error": error, "late_copies": list(LATE_COPIES)}


def export_to_hugging_face(url: str, folder: Path) -> None:
    """Write the model of a checkpoint as Hugging Face's files, as docs/torchtitan.md says."""
    spec = model_registry("debugmodel")
    adapter = spec.state_dict_adapter(spec.model, None)
    folder.mkdir()
    save_file(adapter.to_hf(load(url, keys="model.*")["model"]), folder / "model.safetensors")


def convert_to_own(url: str, folder: Path) -> None:
    """Write a checkpoint as torchtitan's own manager does, as docs/torchtitan.md says."""
    state = load(url, keys=["model.*", "optim.*", "scheduler.*", "train_state.*"])
    own = {"optimizer": state["optim"], "lr_scheduler": state["scheduler"], "train_state": state["train_state"]}
    dcp.save(state["model"] | own, checkpoint_id=folder, no_dist=True)


def main() -> None:
    """Run the jobs of the option file, each reported by its name."""
    sys.modules["s3fs"] = None  # type: ignore[assignment]  # importing it fails
    size = int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    for name, options in json.loads(Path(sys.argv[1]).read_text()).items():
        # A second process group would find the keys of the first one, and fail or wait.
        own: dict[str, Any] = {"store": dist.PrefixStore(name, store), "rank": RANK, "world_size": size}
        with patch.object(torch.distributed, "init_process_group", partial(INIT, **own)):
            report(**{name: run(options)})
        leave_process_group()


if __name__ == "__main__":
    main()
