"""Small files of a Trainer's checkpoint: trainer state, arguments, configurations, tokenizer or processor."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from dcp_remote.integrations.adapters import is_peft

STATE_FILE = "trainer_state.json"
ARGUMENTS_FILE = "training_args.json"


def write_files(trainer: Any, folder: Path) -> None:
    """Write configurations, tokenizer or processor, arguments and trainer state into the folder of a checkpoint."""
    model = trainer.model
    base = model.get_base_model() if is_peft(model) else model
    configurations: tuple[Any, ...] = (getattr(base, "config", None), getattr(base, "generation_config", None))
    for config in configurations:
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)
    if is_peft(model):
        for name, config in model.peft_config.items():
            saved = copy.deepcopy(config)
            saved.inference_mode = True  # as PeftModel.save_pretrained does
            saved.save_pretrained(folder if name == "default" else folder / name)
    collator = getattr(trainer, "data_collator", None)
    processor: Any = getattr(trainer, "processing_class", None) or getattr(collator, "tokenizer", None)
    if hasattr(processor, "save_pretrained"):
        processor.save_pretrained(folder)
    arguments = json.dumps(trainer.args.to_dict(), indent=2, default=str)
    (folder / ARGUMENTS_FILE).write_text(arguments)
    trainer.state.save_to_json(str(folder / STATE_FILE))
