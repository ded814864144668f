"""Train a small Llama with Transformers' Trainer; checkpoints go straight to object storage.

    python examples/hf_trainer.py --url s3://my-bucket/run
    torchrun --nproc-per-node 4 examples/hf_trainer.py --url s3://my-bucket/run

Stop the job in any way and start it again: it goes on from the newest checkpoint. `# changed` marks the lines that are
not those of an ordinary script.
"""

from __future__ import annotations

import argparse
import logging

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dcp_remote.integrations.runs import close_managers  # changed
from dcp_remote.integrations.transformers import remote  # changed


@record  # torchrun's summary names the error of the rank that failed first
def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="URL of the run")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="output", help="local folder for logs")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    tokens = torch.randint(1, 256, (256, 32), generator=torch.Generator().manual_seed(2))
    arguments = TrainingArguments(
        output_dir=options.output,  # stays local: the URL goes to remote()
        max_steps=options.steps,
        save_steps=10,
        save_total_limit=2,
        logging_steps=10,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )
    trainer = remote(trainer, options.url)  # changed
    trainer.train(resume_from_checkpoint=True)
    close_managers()  # changed: raises the error of a last save, if there is one
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
