"""Train with TRL's SFTTrainer, stop, and resume in a new trainer; report losses. Argument: URL of the run."""

from __future__ import annotations

import sys
from typing import Any

from datasets import Dataset  # type: ignore[import-not-found]  # may not be installed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]  # may not be installed

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


def make_trainer(stop_at: int) -> Any:
    """Return a trainer of words, the same each time."""
    words = {f"w{number}": number for number in range(VOCABULARY - 2)}
    tokenizer = Tokenizer(WordLevel(words | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    texts = [" ".join(f"w{(first * 7 + place) % 60}" for place in range(12)) for first in range(32)]
    arguments = SFTConfig(
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
    return SFTTrainer(
        model=make_model(),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=fast,
        callbacks=[Stop(stop_at)],
    )


def results_of(trainer: Any) -> dict[str, Any]:
    """Return the losses of a training, and the digest of the model."""
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return {"losses": losses, "model": model_digest(trainer.model)}


def main() -> None:
    """Train as a whole, and in two parts."""
    whole = make_trainer(6)
    whole.args.save_strategy = "no"
    whole.train()
    remote(make_trainer(2), sys.argv[1]).train()
    close_managers()
    resumed = remote(make_trainer(6), sys.argv[1])
    resumed.train(resume_from_checkpoint=True)
    close_managers()
    report(whole=results_of(whole), resumed=results_of(resumed))
    leave_process_group()


main()
