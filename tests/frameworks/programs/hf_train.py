"""Train a small Llama with a Trainer, once for each job of an option file; report losses and digests by job."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

import hf_models
from dcp_remote.errors import DcpRemoteError
from dcp_remote.integrations.runs import close_managers, wait_for_saves
from dcp_remote.integrations.transformers import enable, load_weights, remote
from tests.support.late_copies import count_late_copies
from tests.support.refused_shards import refuse_shards

logging.basicConfig(level=logging.INFO)

LATE_COPIES = count_late_copies()
REFUSES_SHARDS = refuse_shards()


class Counter(TrainerCallback, ExportableState):  # type: ignore[misc]  # may not be installed
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


class Watch(TrainerCallback):  # type: ignore[misc]  # may not be installed
    """Callback that notes digests at some steps, and kills this process in the middle of a save."""

    def __init__(self, options: dict[str, Any], *, is_deepspeed: bool) -> None:
        """Take the options of the program."""
        self.options, self.is_deepspeed = options, is_deepspeed
        self.shown: float | None = None
        self.trainer: Any = None
        self.digests: dict[int, dict[str, str]] = {}
        self.began_seconds = time.monotonic()
        self.seen: list[str] = []

    def note(self, model: Any, optimizer: Any, state: Any) -> None:
        """Note the state after a step."""
        if self.is_deepspeed:
            digests = hf_models.engine_digests(self.trainer.model_wrapped)
        else:
            optimizer_digest = hf_models.optimizer_digest(model, optimizer)
            digests = {"model": hf_models.model_digest(model), "optimizer": optimizer_digest}
        self.digests[state.global_step] = {**digests, "random": hf_models.random_digest()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the state that was loaded."""
        self.note(kwargs["model"], kwargs["optimizer"], state)
        if self.options.get("shows_weight"):
            self.shown = dict(kwargs["model"].named_parameters())[self.options["shows_weight"]].double().sum().item()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the state."""
        if state.global_step in self.options.get("digest_at", []):
            self.note(kwargs["model"], kwargs["optimizer"], state)
        if self.options.get("slow_rank") == args.process_index:
            time.sleep(0.4)
        absent_rank, absent_at, seconds = self.options.get("absent", (None, None, 0))
        if state.global_step == absent_at:
            time.sleep(seconds if args.process_index == absent_rank else 0)
            self.began_seconds = time.monotonic()
        if state.global_step == self.options.get("refused_at"):
            REFUSES_SHARDS.set()
        if state.global_step == self.options.get("notice_at"):
            os.kill(os.getpid(), signal.SIGTERM)
        if state.global_step == self.options.get("stop_at"):
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the local files of the checkpoint; die while the save that has begun goes on, or let it fail."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.seen = sorted(path.name for path in folder.glob("*"))
        if state.global_step == self.options.get("kill_at"):
            hf_models.kill_soon()
        if REFUSES_SHARDS.is_set():
            wait_for_saves()
            REFUSES_SHARDS.clear()


class UsersTrainer(Trainer):  # type: ignore[misc]  # may not be installed
    """Trainer that writes a file of its own into each checkpoint, as Axolotl's does; and does wrong as it is told."""

    options: dict[str, Any]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the file, then let `Trainer` save."""
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokens_state.json").write_text("{}")
        if self.options.get("fails_at") == [self.args.process_index, self.state.global_step]:
            raise ValueError("boo")
        if self.options.get("gathers"):
            next(model.parameters()).redistribute(placements=[torch.distributed.tensor.Replicate()])
        super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Be killed after the weights were written, if that is asked."""
        if self.options.get("kill_within") == self.state.global_step:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        """Come late, if that is asked."""
        if self.options.get("late_rank") == self.args.process_index:
            time.sleep(2)
        super()._save_rng_state(output_dir)


def make_arguments(mode: str, options: dict[str, Any], output: Path) -> TrainingArguments:
    """Return the arguments of a job."""
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
        "use_cpu": mode in {"plain", "ddp"},
        "disable_tqdm": True,
        "restore_callback_states_from_checkpoint": True,
    }
    if mode != "plain":
        given["ddp_backend"] = "gloo"
    if mode.startswith("fsdp"):
        given |= {"eval_strategy": "steps", "eval_steps": 2}  # before a save: leaves the root's parameters unsharded
        given["fsdp"] = "full_shard auto_wrap"
        config = {"version": int(mode[-1]), "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        config["sync_module_states"] = False  # needs an accelerator, and every rank makes the same model
        given["fsdp_config"] = config | options.get("fsdp_config", {})
    if mode.startswith("zero"):
        given["deepspeed"] = hf_models.zero_config(mode, stage3_gather_16bit_weights_on_model_save=True)
    return TrainingArguments(**given | options.get("arguments", {}))


def make_trained_model(options: dict[str, Any]) -> Any:
    """Return the model of a job."""
    model: Any = hf_models.make_model(tied=options.get("tied", False))
    if options.get("weights_from"):
        load_weights(model, options["weights_from"])
    if options.get("has_another_parameter"):
        model.another = torch.nn.Parameter(torch.zeros(3))
    if options.get("max_norm"):
        model.get_input_embeddings().max_norm = options["max_norm"]
    if options.get("oft"):
        from peft import OFTConfig, get_peft_model

        oft = OFTConfig(oft_block_size=4, coft=True, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, oft)
    if options.get("lora"):
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    return model


def train(mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train as a job's options say; return what the test compares."""
    output = Path(f"output-{os.getpid()}")
    is_deepspeed = mode.startswith("zero")
    watch, data, warned = Watch(options, is_deepspeed=is_deepspeed), hf_models.make_data(), hf_models.Warnings()
    result: dict[str, Any] = {"warnings": warned.texts, "digests": watch.digests, "best_after": [], "models_after": []}
    trainer: Any = None
    LATE_COPIES.clear()
    try:
        if options.get("is_enabled"):
            enable(options["url"])
        trainer = (UsersTrainer if options.get("is_users") else Trainer)(
            model=options.get("model") or make_trained_model(options),
            args=make_arguments(mode, options, output),
            train_dataset=data,
            eval_dataset=data[:8],
            callbacks=[Counter()] if options.get("is_quiet") else [watch, Counter()],
        )
        watch.trainer, trainer.options = trainer, options
        if options.get("url") and not options.get("is_enabled"):
            trainer = remote(trainer, options["url"], **options.get("settings", {}))
        for training in options.get("trainings", [{"resume": options.get("resume")}]):
            trainer.args.max_steps = training.get("max_steps", trainer.args.max_steps)
            resume = training["resume"]
            trainer.train(
                resume_from_checkpoint=get_last_checkpoint(trainer.args.output_dir) if resume == "last" else resume
            )
            result["best_after"].append(trainer.state.best_model_checkpoint)
            digests = hf_models.engine_digests(trainer.model_wrapped) if is_deepspeed else {}
            result["models_after"].append(digests.get("model") or hf_models.model_digest(trainer.model))
    except (DcpRemoteError, ValueError, OSError, RuntimeError) as error:
        if not options.get("expects_error"):
            raise
        seconds = time.monotonic() - watch.began_seconds
        result |= {"error": f"{type(error).__name__}: {error}", "seconds": seconds}
        try:
            close_managers()
        except DcpRemoteError as save_error:
            result["save_error"] = str(save_error)
    finally:
        warned.end()
    result |= {"shown": watch.shown, "seen": watch.seen, "late_copies": list(LATE_COPIES)}
    if trainer is not None:
        state, callbacks = trainer.state, trainer.callback_handler.callbacks
        result |= {
            "losses": {entry["step"]: entry["loss"] for entry in state.log_history if "loss" in entry},
            "eval_losses": {entry["step"]: entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry},
            "step": state.global_step,
            "count": next(callback.count for callback in callbacks if isinstance(callback, Counter)),
            "local": sorted(path.name for path in output.rglob("checkpoint-*")),
            "wrapped": type(trainer.model_wrapped).__name__,
        }
    shutil.rmtree(output, ignore_errors=True)
    if options.get("then"):  # as in a notebook: another trainer of this model, while the first one is alive
        result["then"] = train(mode, {**options["then"], "model": trainer.model})
    return result


if __name__ == "__main__":
    hf_models.run_jobs(train)
