"""Train a small GPT with FSDP2; every checkpoint is saved straight to object storage while training goes on.

    torchrun --nproc-per-node 4 examples/train_fsdp2.py --checkpoint s3://my-bucket/run

Stop the job in any way and start it again with any number of ranks: it resumes from the newest checkpoint. On SIGTERM
it saves once more and stops. The text is the source of Python's standard library, as bytes; gloo on CPU, nccl where
every rank has a GPU.

All code about checkpoints is in `train`: the `state` and the calls of `checkpoints`. The `events` are for the demo and
the tests. The rest is an ordinary training script, with one property worth copying: the text of a step depends on the
step alone, not on the number of ranks, so that a run continues unchanged at another size.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from dcp_remote import CheckpointManager, Retention, training_state
from dcp_remote.errors import DcpRemoteError
from watch import Events

VOCABULARY = 256  # the text is bytes
CONTEXT = 128  # bytes that the model sees at once
BATCH = 12  # sequences per step over all ranks; equal shares for 1, 2, 3, 4, 6 and 12 ranks
WARMUP_STEPS = 10
TEXT_BYTES_MAX = 4 << 20  # more than a demonstration reads, and no more than any machine has
NOTICE_SECONDS = 25.0  # torchrun passes SIGTERM on to its ranks, and kills them 30 s later


# ---- the model and its text


class Block(nn.Module):
    """Causal attention and an MLP, each on a normalized residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        """Create the layers."""
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations of the shape of `x`: [batch, time, width]."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return cast("torch.Tensor", x + self.dropout(self.mlp(self.mlp_norm(x))))


class GPT(nn.Module):
    """Transformer that predicts the next byte."""

    def __init__(self, *, width: int, layers: int, heads: int, dropout: float) -> None:
        """Create the layers."""
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, time, 256] for bytes [batch, time]."""
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return cast("torch.Tensor", self.head(self.norm(x)))


class TextStream:
    """Training text and the position in it; a `Stateful`, so that torch saves and restores it like the rest.

    The i-th sequence of a step is a function of (seed, step, i), whatever the number of ranks.
    """

    def __init__(self, text: bytes, seed: int) -> None:
        """Begin at step 0."""
        self._text, self._seed, self.step = text, seed, 0

    def next_batch(self, rank: int, world_size: int) -> torch.Tensor:
        """Return this rank's share of the next step: int64 [BATCH / world_size, CONTEXT + 1]."""
        share = range(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        names = (f"{self._seed} {self.step} {i}" for i in share)
        hashes = (int.from_bytes(hashlib.sha256(name.encode()).digest()) for name in names)
        starts = [number % (len(self._text) - CONTEXT) for number in hashes]
        self.step += 1
        return torch.tensor([list(self._text[start : start + CONTEXT + 1]) for start in starts])

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the seed and digest that identify the text."""
        return {"step": self.step, "seed": self._seed, "text_sha256": hashlib.sha256(self._text).hexdigest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the position in `state`; refuse another text, which would be another run."""
        if state != self.state_dict() | {"step": state["step"]}:
            raise RuntimeError("The checkpoint was trained on another text or seed (another version of Python?).")
        self.step = state["step"]


def standard_library() -> bytes:
    """Return the source of Python's standard library, up to TEXT_BYTES_MAX: real text on every machine."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:TEXT_BYTES_MAX]
    if len(text) <= CONTEXT:
        raise RuntimeError(
            "Python's standard library has no source here, which is the training text. Use another Python."
        )
    return text


def warmup_then_cosine(total_steps: int) -> Any:
    """Return a learning-rate schedule: up to 1 over the warm-up, then down to 0.1 at `total_steps`."""

    def factor(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        progress = (step - WARMUP_STEPS) / max(1, total_steps - WARMUP_STEPS)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor


# ---- the training


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train from the newest checkpoint, or from the start, to `--stop-after`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH % world_size:
        raise SystemExit(f"{world_size} ranks cannot share {BATCH} sequences evenly. Use 1, 2, 3, 4, 6 or 12 ranks.")
    torch.manual_seed(options.seed)  # the same first weights on every rank
    model = GPT(width=options.width, layers=options.layers, heads=options.heads, dropout=options.dropout).to(device)
    torch.manual_seed(options.seed + 1 + rank)  # other random numbers on each rank, for dropout
    mesh = init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.1)
    schedule = LambdaLR(optimizer, warmup_then_cosine(options.steps))
    stream = TextStream(standard_library(), options.seed)

    # All that a training step changes, with the random states of each rank. The position in the text is the same on all
    # ranks; a data loader with a position of its own on each rank is passed as `loader`.
    state = training_state(model=model, optimizer=optimizer, scheduler=schedule, extra={"data": stream})
    events = Events(options.events, rank=rank, digest=options.digest)
    events.write("started", world_size=world_size, pid=os.getpid())
    with CheckpointManager(
        options.checkpoint, retention=Retention(keep_last=options.keep_last), notice_seconds=NOTICE_SECONDS
    ) as checkpoints:
        if checkpoints.restore(state) is not None:  # in place; None if the run is new
            events.report(checkpoints.last_load)
            events.digest("loaded", step=stream.step, state=state)

        last = min(options.steps, options.stop_after or options.steps)
        while stream.step < last and not checkpoints.should_stop:
            text = stream.next_batch(rank, world_size).to(device)
            logits = model(text[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

            step, mean_loss = stream.step, loss.detach() / world_size
            dist.all_reduce(mean_loss)
            events.write("step", step=step, loss=mean_loss.item())
            stopping = checkpoints.reached_preemption(step)  # true at one step on all ranks, after SIGTERM on any
            if options.save_every and (step % options.save_every == 0 or step == last or stopping):
                events.digest("saving", step=step, state=state)
                checkpoints.save(step, state, metrics={"loss": mean_loss.item()})  # continues in the background
                events.report(checkpoints.last_save)  # the previous save
    # Leaving the block has waited for the last save, and would have raised its error.
    events.report(checkpoints.last_save)
    events.write("finished", step=stream.step, preempted=checkpoints.should_stop)


# ---- the command line


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with FSDP2 and save it to object storage.")
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="URL",
        help="URL of the run: s3://bucket/run, gs://…, az://… or a folder",
    )
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS", help="0: never")
    parser.add_argument("--keep-last", type=int, default=3, metavar="COUNT", help="older checkpoints are deleted")
    parser.add_argument("--steps", type=int, default=200, help="length of the learning-rate schedule")
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="stop here, as if the job's time were up")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.0, help="above 0, results depend on the number of ranks")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=Path, metavar="FOLDER", help="write events as JSON lines to this folder")
    parser.add_argument("--digest", action="store_true", help="gather and hash the state at each save and load")
    return parser.parse_args(arguments)


@record  # torchrun's summary names the error of the rank that failed first
def main(arguments: list[str]) -> None:
    """Run one rank, started by torchrun."""
    options = parse(arguments)
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by deterministic matrix products
        torch.cuda.set_device(device)
    # A resumed run equals the uninterrupted one to the last bit, so that any difference is a fault.
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    logging.basicConfig(format="%(message)s")  # warnings, of every rank
    if dist.get_rank() == 0:
        logging.getLogger("dcp_remote").setLevel(logging.INFO)  # one line for each checkpoint that is saved or restored
    try:
        train(options, device)
    except DcpRemoteError as error:
        print(f"Rank {dist.get_rank()} stops. {type(error).__name__}: {error}\n", end="", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
