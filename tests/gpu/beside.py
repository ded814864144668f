"""Measure steps of a training that is bound by its launches, beside saves in the background.

Without a GPU (DCP_REMOTE_TEST_DEVICE=cpu), its operations are small ones of the CPU, which let go of the GIL as a
launch does. Python's collection of garbage, which may set in at any time, is off.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory

import torch

from dcp_remote import CheckpointManager, Retention
from dcp_remote.common.arrays import Buffer
from dcp_remote.common.units import MiB
from dcp_remote.storage.base import Condition, ObjectStore, Version
from dcp_remote.storage.local import LocalStore
from dcp_remote.storage.wrapper import WrappedStore
from tests.gpu.training import DEVICE

_STATE_BYTES = 400 * MiB
_LARGE, _SMALL = 300, 1600  # tensors
_OPERATIONS = 1000
_ROUNDS = 5
# Rate of a connection; no CPU is used meanwhile, which on few cores would be that of the training.
_BYTES_PER_SECOND = 100e6


class _Connections(WrappedStore):
    """Store whose shards take as long as over a connection each, and are not stored."""

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        if key.endswith(".safetensors"):
            time.sleep(sum(memoryview(buffer).nbytes for buffer in buffers) / _BYTES_PER_SECOND)
            buffers = [b""]
        return super().put(key, buffers, condition=condition)


def _step(values: torch.Tensor) -> None:
    for _ in range(_OPERATIONS):
        values.add_(1)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _measure(store: ObjectStore) -> dict[str, float]:
    """Return medians of rounds of two saves: the call waits for one, and makes steps beside the other."""
    step = partial(_step, torch.zeros(30_000, device=DEVICE))
    state = {f"large{n}": torch.rand(_STATE_BYTES // _LARGE // 4, device=DEVICE) for n in range(_LARGE)}
    state |= {f"small{n}": torch.rand(1024, device=DEVICE) for n in range(_SMALL)}
    found = defaultdict[str, list[float]](list)
    with CheckpointManager(store, progress=False, dedup=False, retention=Retention(keep_last=1)) as checkpoints:
        checkpoints.save(0, state, wait=True)
        for number in range(1, 2 * _ROUNDS, 2):
            blocked = _seconds(partial(checkpoints.save, number, state))
            found["a save that is waited for"].append(blocked + _seconds(checkpoints.wait))
            alone = statistics.median(_seconds(step) for _ in range(20))
            began = time.perf_counter()
            checkpoints.save(number + 1, state)
            steps = [_seconds(step)]
            while checkpoints._background_saves.is_busy:
                steps.append(_seconds(step))
            found["a save beside steps"].append(time.perf_counter() - began)
            found["blocked by a save"].append(blocked)
            found["a step alone"].append(alone)
            found["the first step beside a save"].append(steps[0])
            found["the longest one"].append(max(steps))
            found["the median one"].append(statistics.median(steps))
            found["what all of them took longer"].append(sum(steps) - alone * len(steps))
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Print the table, in seconds."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU: nothing is measured")  # noqa: T201  # what the program is for
        return
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    with TemporaryDirectory(dir="/dev/shm") as folder, TemporaryDirectory(dir="/dev/shm") as other:
        table = {"connections": _measure(_Connections(LocalStore(folder))), "folder": _measure(LocalStore(other))}
    print(f"{'seconds':<30}" + "".join(f"{name:>14}" for name in table))  # noqa: T201
    for row in table["folder"]:
        print(f"{row:<30}" + "".join(f"{figures[row]:14.3f}" for figures in table.values()))  # noqa: T201


if __name__ == "__main__":
    main()
