"""A small GPT under DeepSpeed ZeRO-3 that saves straight to a bucket, and resumes from it at any number of ranks.

    torchrun --nproc-per-node 2 examples/deepspeed_zero3.py --url s3://my-bucket/run

The three lines that differ from a program with local checkpoints end with `# <--`. Runs on GPUs, or on the CPU if there
are none. Start it again, with any number of ranks that divides 12 and any `--stage`, and it goes on.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from dcp_remote import Retention
from dcp_remote.integrations.deepspeed import attach  # <--

VOCABULARY, WIDTH, BATCH, LENGTH = 64, 64, 12, 32


class Gpt(nn.Module):
    """Two layers of a transformer, with tied embeddings."""

    def __init__(self) -> None:
        """Create the layers."""
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of tokens [batch, length]."""
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device), 1)
        logits = self.head(self.layers(self.embed(tokens), mask))[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def batch_of(step: int) -> torch.Tensor:
    """Return this rank's tokens of a step; those of all ranks together are the same at any number of ranks."""
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(LENGTH) * (1 + start % 3)) % VOCABULARY
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


@record  # torchrun's summary names the error of the rank that failed first
def main() -> None:
    """Train up to a step, saving now and then."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", required=True, help="URL of the run, such as s3://my-bucket/run")
    parser.add_argument("--stage", type=int, default=3, help="stage of ZeRO, 0 to 3")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    options = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Gpt()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": options.stage},
            "zero_allow_untested_optimizer": True,
        },
    )

    attach(engine, retention=Retention(keep_last=2, keep_named=False))  # <-- each tag is a name, which would be kept
    _, client_state = engine.load_checkpoint(options.url)  # <-- a URL; (None, None) if there is no checkpoint yet
    if dist.get_rank() == 0:
        print(f"step {engine.global_steps}, {client_state}", flush=True)

    loss = None
    while engine.global_steps < options.steps:
        loss = engine(batch_of(engine.global_steps).to(engine.device))
        engine.backward(loss)
        engine.step()
        if engine.global_steps % options.save_every == 0:
            engine.save_checkpoint(options.url, client_state={"loss": loss.item()})  # copied at once, then uploaded
    if dist.get_rank() == 0 and loss is not None:
        print(f"step {engine.global_steps}, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
