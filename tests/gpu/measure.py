"""Measure saves of a state on a GPU: how long they block, and how fast their copies are beside a plain one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory

import torch

from dcp_remote import CheckpointManager
from dcp_remote.common.units import GiB, MiB
from tests.gpu.training import DEVICE, Training, begin_process_group

_ROUNDS = 5
_STEPS = 50


def _seconds(run: Callable[[], object], training: Training) -> float:
    training.wait()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _plain_copy_rate(training: Training) -> float:
    """Return the bytes per second of a copy of 1 GiB into pinned memory, the fastest that the link allows."""
    source = torch.ones(GiB if DEVICE == "cuda" else 64 * MiB, dtype=torch.uint8, device=DEVICE)
    into = torch.empty(source.numel(), dtype=torch.uint8, device="cpu", pin_memory=DEVICE == "cuda")

    def copy() -> None:
        into.copy_(source, non_blocking=True)
        training.wait()

    return source.numel() / statistics.median(_seconds(copy, training) for _ in range(_ROUNDS))


def _step_rate(training: Training) -> float:
    def steps() -> None:
        for _ in range(_STEPS):
            training.train()
        training.wait()

    return _STEPS / _seconds(steps, training)


def main() -> None:
    """Print the table."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU: nothing is measured")  # noqa: T201  # what the program is for
        return
    begin_process_group()
    training = Training(layers=100 if DEVICE == "cuda" else 5, fused=True)
    rows = {"a plain copy into pinned memory, GiB/s": _plain_copy_rate(training) / GiB}
    for kind in ("without watch", "watched"):
        blocked, copying = list[float](), list[float]()
        # A folder in main memory: a `MemoryStore` holds the interpreter while it copies.
        with TemporaryDirectory(dir="/dev/shm") as folder, CheckpointManager(folder, progress=False) as checkpoints:
            if kind == "watched":
                checkpoints.watch(training.optimizer)
            for step in range(_ROUNDS + 1):  # the first pins the memory
                blocked.append(_seconds(partial(checkpoints.save, step, training.state), training))
                copying.append(blocked[-1] + _seconds(checkpoints.before_update, training))
                if kind == "watched" and step == _ROUNDS:
                    rows["the first step beside an upload, s"] = _seconds(training.train, training)
                checkpoints.wait()
                training.train()
            assert checkpoints.last_save is not None
            copied = checkpoints.last_save.copied_bytes
        rows[f"{kind}: the first save blocks, s"] = blocked[0]
        rows[f"{kind}: a later save blocks, s"] = statistics.median(blocked[1:])
        rows[f"{kind}: copied, GiB"] = copied / GiB
        rows[f"{kind}: rate of the copies, GiB/s"] = copied / GiB / statistics.median(copying[1:])
    rows["steps a second without a save"] = _step_rate(training)
    if DEVICE == "cuda":
        rows["pinned, GiB"] = torch.cuda.host_memory_stats()["allocated_bytes.current"] / GiB
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "the CPU, which only tries this program"
    print(f"{name}, torch {torch.__version__}")  # noqa: T201  # what the program is for
    for row, value in rows.items():
        print(f"{row:<50} {value:10.3f}")  # noqa: T201


if __name__ == "__main__":
    main()
