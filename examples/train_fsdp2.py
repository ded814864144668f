"""Train a small GPT with FSDP2, with every checkpoint saved straight to object storage while training goes on.

    torchrun --nproc-per-node 4 examples/train_fsdp2.py --checkpoint s3://my-bucket/run

Stop it however you like and start it again, with as many ranks as you like: it goes on from the newest checkpoint.
The text is the Python standard library's own source, as bytes; gloo on CPU, nccl where every rank has a GPU.

The lines about checkpoints are `training_state`, `BackgroundSaves`, `newest_checkpoint` and `restore`. The rest is an
ordinary training script, with one property worth copying: which text a step trains on depends on the step alone, not
on the number of ranks. That is what makes a run continue at another size as if nothing had happened.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import sys
import sysconfig
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from dcp_remote import RemoteReader, RemoteWriter
from dcp_remote.errors import DcpRemoteError
from dcp_remote.storage import open_store
from watch import Events, logical_digest

VOCABULARY = 256  # the text is bytes
CONTEXT = 128  # bytes that the model sees at once
BATCH = 12  # sequences per step over all ranks; whole shares for 1, 2, 3, 4, 6 and 12 of them
WARMUP_STEPS = 10
TEXT_BYTES_MAX = 4 << 20  # more than a demonstration reads; every machine has at least this much


# --- the model and its text ------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal attention and an MLP, each on a normalized residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        """See the class."""
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] to the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return cast("torch.Tensor", x + self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, *, width: int, layers: int, heads: int) -> None:
        """See the class."""
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Bytes [batch, time] to logits [batch, time, 256]."""
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return cast("torch.Tensor", self.head(self.norm(x)))


class TextStream:
    """The training text and the position in it; a `Stateful`, so that torch saves and restores it like the rest.

    The i-th sequence of a step is a function of (seed, step, i). How many ranks share a step changes nothing.
    """

    def __init__(self, text: bytes, seed: int) -> None:
        """See the class."""
        self._text, self._seed, self.step = text, seed, 0

    def next_batch(self, rank: int, world_size: int) -> torch.Tensor:
        """This rank's share of the next step: [BATCH / world_size, CONTEXT + 1]."""
        share = range(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        names = (f"{self._seed} {self.step} {i}" for i in share)
        hashes = (int.from_bytes(hashlib.sha256(name.encode()).digest()) for name in names)
        starts = [number % (len(self._text) - CONTEXT) for number in hashes]
        self.step += 1
        return torch.tensor([list(self._text[start : start + CONTEXT + 1]) for start in starts])

    def state_dict(self) -> dict[str, Any]:
        """The position, and which text it is a position in."""
        return {"step": self.step, "seed": self._seed, "text_sha256": hashlib.sha256(self._text).hexdigest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was; another text would silently be another run."""
        if state != self.state_dict() | {"step": state["step"]}:
            raise RuntimeError("The checkpoint was trained on another text or seed (another version of Python?).")
        self.step = state["step"]


def standard_library() -> bytes:
    """The source of Python's standard library, up to TEXT_BYTES_MAX: real text that is on every machine."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:TEXT_BYTES_MAX]
    if len(text) <= CONTEXT:
        raise RuntimeError("This Python comes without the source of its standard library, which is the text here.")
    return text


def warmup_then_cosine(total_steps: int) -> Any:
    """A learning-rate factor: up to 1 over the warm-up, then down to 0.1 at `total_steps`."""

    def factor(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        progress = (step - WARMUP_STEPS) / max(1, total_steps - WARMUP_STEPS)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor


# --- checkpoints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Training:
    """Everything that one step of training changes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    stream: TextStream


def training_state(training: Training) -> dict[str, Any]:
    """What a checkpoint holds. The tensors are this rank's shards and share memory with the training."""
    model_state, optimizer_state = get_state_dict(training.model, training.optimizer)
    return {
        "model": model_state,
        "optim": optimizer_state,
        "schedule": training.schedule,
        "data": training.stream,
    }


def restore(training: Training, checkpoint_url: str) -> None:
    """Load a checkpoint that any number of ranks saved."""
    state = training_state(training)
    dcp.load(state, storage_reader=RemoteReader(checkpoint_url))  # loads schedule and data, which are `Stateful`, too
    set_state_dict(training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


class BackgroundSaves:
    """Saves while training goes on, one at a time: a save first waits for the one before, and raises what failed there.

    The uploads run in a thread and talk to each other over a process group of their own, since a group must not be
    used by two threads at once.
    """

    def __init__(self, run_url: str, events: Events) -> None:
        """See the class; called by every rank."""
        self._run_url, self._events = run_url, events
        self._group = dist.new_group(backend="gloo")
        self._uploading: Future[Any] | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copy the state, and return while the copy is uploaded: training waits for no more than the copy."""
        started = time.monotonic()
        self.wait()
        writer = RemoteWriter(checkpoint_url(self._run_url, step))
        uploading = cast("Future[Any]", dcp.async_save(state, storage_writer=writer, process_group=self._group))
        self._events.write("saving", step=step, blocked_seconds=time.monotonic() - started)

        def note(done: Future[Any]) -> None:
            event = "saved" if done.exception() is None else "failed"
            self._events.write(event, step=step, seconds=time.monotonic() - started)

        uploading.add_done_callback(note)
        self._uploading = uploading

    def wait(self) -> None:
        """Return when nothing is being uploaded.

        Raises:
            CheckpointException: The upload failed, on this rank or another; it names the ranks and their errors.
        """
        if self._uploading is not None:
            self._uploading.result()
            self._uploading = None


def checkpoint_url(run_url: str, step: int) -> str:
    """Where this example puts the checkpoint of a step."""
    return f"{run_url.rstrip('/')}/step-{step:06d}"


def newest_checkpoint(run_url: str) -> int | None:
    """The step of the newest checkpoint of this run; None if there is none.

    A helper of this example, not of the library: the checkpoints lie side by side, and it LISTs. What has no manifest
    was never committed, so it does not count.
    """
    manifests = (re.fullmatch(r"step-(\d+)/manifest\.json", info.key) for info in open_store(run_url).list())
    return max((int(manifest[1]) for manifest in manifests if manifest), default=None)


def agree_on_newest_checkpoint(run_url: str) -> int | None:
    """Rank 0 looks and tells the others, its error included: looking in turn, they might see different steps."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [newest_checkpoint(run_url)]
        except DcpRemoteError as error:
            answer = [error]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], DcpRemoteError):
        raise answer[0]
    return cast("int | None", answer[0])


# --- training --------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train from the newest checkpoint, or from the start, to `--stop-after`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH % world_size:
        raise SystemExit(f"{BATCH} sequences cannot be shared evenly by {world_size} ranks.")
    torch.manual_seed(options.seed)  # the same first weights on every rank
    model = GPT(width=options.width, layers=options.layers, heads=options.heads).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.1)
    schedule = LambdaLR(optimizer, warmup_then_cosine(options.steps))
    training = Training(model, optimizer, schedule, TextStream(standard_library(), options.seed))

    events = Events(options.events, rank=rank)
    events.write("started", world_size=world_size, pid=os.getpid())
    saves = None
    if options.checkpoint is not None:
        saves = BackgroundSaves(options.checkpoint, events)
        newest = agree_on_newest_checkpoint(options.checkpoint)
        if newest is not None:
            started = time.monotonic()
            restore(training, checkpoint_url(options.checkpoint, newest))
            events.write("loaded", step=newest, seconds=time.monotonic() - started)
            if options.digest:
                events.write("digest", of="loaded", step=newest, **logical_digest(training_state(training)))

    last = min(options.steps, options.stop_after or options.steps)
    while training.stream.step < last:
        text = training.stream.next_batch(rank, world_size).to(device)
        logits = model(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

        step, mean_loss = training.stream.step, loss.detach() / world_size
        dist.all_reduce(mean_loss)
        events.write("step", step=step, loss=mean_loss.item())
        if saves is not None and options.save_every and (step % options.save_every == 0 or step == last):
            state = training_state(training)
            if options.digest:
                events.write("digest", of="saving", step=step, **logical_digest(state))
            saves.save(step, state)
    if saves is not None:
        saves.wait()
    events.write("finished", step=training.stream.step)


# --- the command line ------------------------------------------------------------------------------------------------


def explain(error: BaseException) -> str:
    """What to tell the user: for a failed save or load, each different cause once, with the first rank that had it."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    causes = {f"{type(cause).__name__}: {cause}": rank for rank, (cause, _) in reversed(error.failures.items())}
    return "\n".join(f"(rank {rank}) {cause}" for cause, rank in causes.items())


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with FSDP2 and save it to object storage.")
    parser.add_argument(
        "--checkpoint", metavar="URL", help="where the run's checkpoints are: s3://bucket/run, a folder"
    )
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS", help="0: never")
    parser.add_argument("--steps", type=int, default=200, help="length of the learning-rate schedule")
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="stop here, as if the job's time were up")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=Path, metavar="FOLDER", help="write what happens as JSON lines, for checks")
    parser.add_argument("--digest", action="store_true", help="gather and hash the state at each save and load")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """One rank, started by torchrun."""
    options = parse(arguments)
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products ask for
        torch.cuda.set_device(device)
    # A resumed run should be the uninterrupted one to the last bit: then whatever differs is a fault.
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        train(options, device)
    except (DcpRemoteError, CheckpointException) as error:
        print(f"Rank {dist.get_rank()} stops. {explain(error)}\n", end="", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
