"""Measure the memory of saves of a Trainer with FSDP2. Argument: URL of the run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from dcp_remote.integrations.runs import close_managers, wait_for_saves
from dcp_remote.integrations.transformers import remote
from hf_models import VOCABULARY, forbid_gathers, make_data, use_gloo_ranks
from tests.support.rank_programs import leave_process_group, report

MiB = 1024 * 1024

BUDGET = 16 * MiB


class Measure(TrainerCallback):  # type: ignore[misc]  # may not be installed
    """Callback that measures from the end of a step until the checkpoint is committed."""

    def __init__(self) -> None:
        """Begin without figures."""
        self.saves: list[int] = []
        self.before = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to measure."""
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.before = resident("VmRSS:")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the peak above what there was before the save."""
        wait_for_saves()
        self.saves.append(round((resident("VmHWM:") - self.before) / MiB))


def resident(field: str) -> int:
    """Return a figure of this process's resident memory, in bytes."""
    with Path("/proc/self/status").open(encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


def main() -> None:
    """Train three steps, with a save after each."""
    use_gloo_ranks()
    forbid_gathers()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=4,
        attn_implementation="eager",
    )
    model, measure = LlamaForCausalLM(config), Measure()
    arguments = TrainingArguments(
        output_dir="output",
        max_steps=3,
        save_steps=1,
        save_total_limit=1,
        per_device_train_batch_size=1,
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
        fsdp="full_shard auto_wrap",
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=make_data(), callbacks=[measure])
    settings: dict[str, Any] = {"memory_budget_bytes": BUDGET, "progress": False, "dedup": False}
    remote(trainer, sys.argv[1], **settings).train()
    close_managers()
    # Parameters and two moments of Adam, in fp32.
    shard = 12 * sum(parameter.numel() for parameter in model.parameters()) // dist.get_world_size()
    report(memory={"shard": round(shard / MiB), "budget": BUDGET // MiB, "saves": measure.saves})
    leave_process_group()


main()
