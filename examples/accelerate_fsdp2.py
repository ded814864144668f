"""Train a small Llama with Accelerate and FSDP2; checkpoints go straight to object storage.

    accelerate launch --num-processes 4 examples/accelerate_fsdp2.py --url s3://my-bucket/run

Stop the job in any way and start it again with any number of processes: it goes on from the newest checkpoint. On the
CPU, where Accelerate has no FSDP, it trains with DDP. `# changed` marks the lines that are not those of an ordinary
script.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from dcp_remote import latest  # changed
from dcp_remote.integrations.accelerate import load_state, save_state  # changed
from dcp_remote.integrations.runs import close_managers  # changed


@record  # torchrun's summary names the error of the rank that failed first
def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="URL of the run")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    if torch.cuda.is_available():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        accelerator = Accelerator(fsdp_plugin=plugin)
    else:
        accelerator = Accelerator(cpu=True)

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(1, 256, (256, 32), generator=torch.Generator().manual_seed(2))
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    # With a generator of its own, the loader draws nothing from the random states that a checkpoint gives back.
    loader: Any = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = load_state(accelerator, options.url) if latest(options.url) else 0  # changed
    while step < options.steps:
        loader.set_epoch(step // len(loader))
        for batch in accelerator.skip_first_batches(loader, step % len(loader)):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % options.save_every == 0:
                save_state(accelerator, f"{options.url}/step-{step}")  # changed
            if step == options.steps:
                break
    close_managers()  # changed: waits for the last save, and raises its error
    accelerator.print(f"trained {step} steps")
    accelerator.end_training()


if __name__ == "__main__":
    main()
