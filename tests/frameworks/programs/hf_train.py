"""Train a small Llama with a Trainer, with remote checkpoints, as an option file says; report losses and digests."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hf_models import make_data, make_model, model_digest, optimizer_digest, random_digest, use_gloo_ranks
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from dcp_remote.errors import DcpRemoteError
from dcp_remote.integrations.transformers import remote
from tests.support.rank_programs import report

logging.basicConfig(level=logging.INFO)


class Counter(TrainerCallback, ExportableState):
    """Callback with a state that a resumed training goes on from."""

    def __init__(self, count: int = 0) -> None:
        """Begin at a count."""
        self.count = count

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step."""
        self.count += 1

    def state(self) -> dict[str, Any]:
        """Return the state as Transformers saves it."""
        return {"args": {"count": self.count}, "attributes": {}}


class Watch(TrainerCallback):
    """Callback that notes digests at some steps, and kills this process in the middle of a save."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Take the options of the program."""
        self.options = options
        self.digests: dict[int, dict[str, str]] = {}

    def note(self, model: Any, optimizer: Any, state: Any) -> None:
        """Note the state after a step."""
        self.digests[state.global_step] = {
            "model": model_digest(model),
            "optimizer": optimizer_digest(model, optimizer) if optimizer is not None else "",
            "random": random_digest(),
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the state that was loaded."""
        self.note(kwargs["model"], kwargs["optimizer"], state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the state."""
        if state.global_step in self.options.get("digest_at", []):
            self.note(kwargs["model"], kwargs["optimizer"], state)
        if self.options.get("slow_rank") == args.process_index:
            time.sleep(self.options["slow_seconds"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Die while the save that has begun goes on."""
        if state.global_step == self.options.get("kill_at"):
            threading.Timer(self.options.get("kill_seconds", 0.3), os.kill, (os.getpid(), signal.SIGKILL)).start()


def main() -> None:
    """Train."""
    options: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    world_size, mode = int(os.environ["WORLD_SIZE"]), options.get("mode", "plain")
    if mode != "plain":
        use_gloo_ranks()
    else:
        assert world_size == 1
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    output = Path(f"output-{os.getpid()}")
    given: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": 6,
        "save_steps": 2,
        "save_strategy": "steps",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options.get("arguments", {}),
    }
    if mode == "fsdp2":
        given |= {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "min_num_params": 0},
        }
        del given["fsdp_config"]["min_num_params"]
    if mode != "plain":
        given["ddp_backend"] = "gloo"
    model: Any = make_model(tied=options.get("tied", False))
    if options.get("lora"):
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    watch, counter = Watch(options), Counter()
    data = make_data()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**given),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=[watch, counter],
    )
    began_seconds = time.monotonic()
    try:
        if options.get("url"):
            trainer = remote(trainer, options["url"], **options.get("settings", {}))
        for resume in options.get("trainings", [options.get("resume")]):
            trainer.train(resume_from_checkpoint=resume)
    except (DcpRemoteError, ValueError) as error:
        report(error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - began_seconds)
        if options.get("expects_error"):
            return
        raise
    state = trainer.state
    watch.note(trainer.model, trainer.optimizer, state)
    counts = [callback.count for callback in trainer.callback_handler.callbacks if isinstance(callback, Counter)]
    report(
        losses={entry["step"]: entry["loss"] for entry in state.log_history if "loss" in entry},
        digests=watch.digests,
        step=state.global_step,
        count=counts[0],
        best=state.best_model_checkpoint,
        final_model=model_digest(trainer.model),
        world=dist.get_world_size() if dist.is_initialized() else 1,
        local=sorted(path.name for path in output.rglob("checkpoint-*")) if output.exists() else [],
        type=type(trainer).__name__,
        wrapped=type(trainer.model_wrapped).__name__,
    )
    shutil.rmtree(output, ignore_errors=True)


main()
