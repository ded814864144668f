"""Training with Transformers' Trainer that knows nothing of dcp_remote. Argument: the number of steps."""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
rows = [(torch.arange(8) + first) % 64 for first in range(40)]
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        max_steps=int(sys.argv[1]),
        save_steps=5,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
)
trainer.train()
weights = float(sum(parameter.double().sum() for parameter in model.parameters()))
sys.stdout.write(f"steps {trainer.state.global_step} weights {weights!r}\n")
