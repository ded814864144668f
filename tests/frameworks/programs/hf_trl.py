"""Train with trainers of TRL, stop, and resume in a new trainer; report losses. Argument: URL below which they save.

SFT; DPO, whose reference is another model; and DPO of an adapter, whose reference is the base.
"""

from __future__ import annotations

import sys
from typing import Any

from datasets import Dataset  # type: ignore[import-not-found]  # may not be installed
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # type: ignore[import-not-found]  # may not be installed

from dcp_remote.integrations.runs import close_managers
from dcp_remote.integrations.transformers import remote
from hf_models import VOCABULARY, make_model, model_digest
from tests.support.rank_programs import leave_process_group, report


class Stop(TrainerCallback):  # type: ignore[misc]  # may not be installed
    """Callback that stops a training at a step."""

    def __init__(self, step: int) -> None:
        """Take the step."""
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop."""
        control.should_training_stop |= state.global_step == self.step


def make_trainer(kind: str, stop_at: int) -> Any:
    """Return a trainer of words, the same each time."""
    words = {f"w{number}": number for number in range(VOCABULARY - 2)}
    tokenizer = Tokenizer(WordLevel(words | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    texts = [" ".join(f"w{(first * 7 + place) % 60}" for place in range(12)) for first in range(32)]
    trainer, arguments = (SFTTrainer, SFTConfig) if kind == "sft" else (DPOTrainer, DPOConfig)
    given = arguments(
        output_dir="output",
        max_steps=6,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    turned = [" ".join(reversed(text.split())) for text in texts]
    data = {"text": texts} if kind == "sft" else {"prompt": texts, "chosen": texts, "rejected": turned}
    own: dict[str, Any] = {"ref_model": make_model()} if kind == "dpo" else {}
    if kind == "adapter":
        own["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return trainer(
        model=make_model(),
        args=given,
        train_dataset=Dataset.from_dict(data),
        processing_class=fast,
        callbacks=[Stop(stop_at)],
        **own,
    )


def results_of(trainer: Any) -> dict[str, Any]:
    """Return the losses of a training, and the digest of the model."""
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return {"losses": losses, "model": model_digest(trainer.model)}


def main(url: str) -> None:
    """Train each kind as a whole, and in two parts."""
    for kind in ("sft", "dpo", "adapter"):
        whole = make_trainer(kind, 6)
        whole.args.save_strategy = "no"
        whole.train()
        remote(make_trainer(kind, 2), f"{url}/{kind}").train()
        close_managers()
        resumed = remote(make_trainer(kind, 6), f"{url}/{kind}")
        resumed.train(resume_from_checkpoint=True)
        close_managers()
        report(**{kind: {"whole": results_of(whole), "resumed": results_of(resumed)}})
    leave_process_group()


main(sys.argv[1])
