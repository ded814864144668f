"""Train a small Llama with a Trainer, once for each job of an option file; report losses and digests by job."""

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

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from dcp_remote.errors import DcpRemoteError
from dcp_remote.integrations.runs import close_managers
from dcp_remote.integrations.transformers import enable, load_weights, remote
from hf_models import (
    engine_digests,
    forbid_gathers,
    make_data,
    make_model,
    model_digest,
    optimizer_digest,
    random_digest,
    use_gloo_ranks,
)
from tests.support.rank_programs import report

logging.basicConfig(level=logging.INFO)


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

    def note(self, model: Any, optimizer: Any, state: Any) -> None:
        """Note the state after a step."""
        if self.is_deepspeed:
            digests = engine_digests(self.trainer.model_wrapped)
        else:
            digests = {"model": model_digest(model), "optimizer": optimizer_digest(model, optimizer)}
        self.digests[state.global_step] = {**digests, "random": random_digest()}

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
        if state.global_step == self.options.get("notice_at"):
            os.kill(os.getpid(), signal.SIGTERM)
        if state.global_step == self.options.get("stop_at"):
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Die while the save that has begun goes on."""
        if state.global_step == self.options.get("kill_at"):
            threading.Timer(self.options.get("kill_seconds", 0.3), os.kill, (os.getpid(), signal.SIGKILL)).start()


class SideFileTrainer(Trainer):  # type: ignore[misc]  # may not be installed
    """Trainer that writes a file of its own into each checkpoint, as Axolotl's does."""

    fails_at: tuple[int, int] | None = None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the file, then let `Trainer` save."""
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokens_state.json").write_text("{}")
        if self.fails_at == (self.args.process_index, self.state.global_step):
            raise ValueError("boo")
        super()._save_checkpoint(model, trial)


class Warnings(logging.Handler):
    """Handler that keeps the texts of warnings."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a text."""
        self.texts.append(record.getMessage())


def train(mode: str, options: dict[str, Any]) -> dict[str, Any]:  # noqa: C901, PLR0912, PLR0915  # a user's script
    """Train as a job's options say; return what the test compares."""
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
        "use_cpu": mode in ("plain", "ddp"),
        "disable_tqdm": True,
        "restore_callback_states_from_checkpoint": True,
        **options.get("arguments", {}),
    }
    if mode != "plain":
        given["ddp_backend"] = "gloo"
    if mode == "fsdp2":
        given["fsdp"] = "full_shard auto_wrap"
        given["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    if mode == "zero3":
        given["deepspeed"] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 16,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
    model: Any = make_model(tied=options.get("tied", False))
    if options.get("weights_from"):
        load_weights(model, options["weights_from"])
    if options.get("lora"):
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    watch, data = Watch(options, is_deepspeed=mode == "zero3"), make_data()
    kind = SideFileTrainer if options.get("has_side_file") else Trainer
    warned = Warnings()
    logging.getLogger("dcp_remote").addHandler(warned)
    began_seconds = time.monotonic()
    result: dict[str, Any] = {}
    trainer: Any = None
    try:
        if options.get("is_enabled"):
            enable(options["url"])
        trainer = kind(
            model=model,
            args=TrainingArguments(**given),
            train_dataset=data,
            eval_dataset=data[:8],
            callbacks=[watch, Counter()],
        )
        watch.trainer = trainer
        if options.get("fails_at"):
            trainer.fails_at = tuple(options["fails_at"])
        if options.get("url") and not options.get("is_enabled"):
            trainer = remote(trainer, options["url"], **options.get("settings", {}))
        for training in options.get("trainings", [{"resume": options.get("resume")}]):
            trainer.args.max_steps = training.get("max_steps", trainer.args.max_steps)
            trainer.train(resume_from_checkpoint=training["resume"])
            result.setdefault("best_after", []).append(trainer.state.best_model_checkpoint)
            after = engine_digests(trainer.model_wrapped)["model"] if mode == "zero3" else model_digest(trainer.model)
            result.setdefault("models_after", []).append(after)
    except (DcpRemoteError, ValueError, OSError, RuntimeError) as error:
        if not options.get("expects_error"):
            raise
        result |= {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began_seconds}
        try:
            close_managers()
        except DcpRemoteError as save_error:
            result["save_error"] = str(save_error)
    finally:
        logging.getLogger("dcp_remote").removeHandler(warned)
    result |= {"warnings": warned.texts, "digests": watch.digests, "shown": watch.shown}
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
    return result


def main() -> None:
    """Train once for each job of the file."""
    options: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    mode = options["mode"]
    if mode == "plain":
        assert os.environ["WORLD_SIZE"] == "1"
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    elif mode != "ddp":
        use_gloo_ranks()
    if mode == "zero3":
        forbid_gathers()
    for name, job in options["jobs"].items():
        report(**{name: train(mode, job)})
        close_managers()


main()
