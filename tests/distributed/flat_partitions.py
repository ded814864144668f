"""Functions for a `RankPool` that save and restore parameters in flat partitions, as ZeRO keeps them."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_remote import LocalBoxes
from tests.distributed.managed import State, ended, managing
from tests.distributed.planning import scatters_counted

# Some are smaller than a rank's share, one has no dimensions, and one no elements.
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (7, 5),
    "weight": (4, 6, 3),
    "bias": (5,),
    "scale": (),
    "pair": (2,),
    "none": (0, 3),
}


def parameters(step: int) -> dict[str, torch.Tensor]:
    """Return the whole parameters of a step."""
    return {
        name: (torch.arange(float(math.prod(shape))) + 1000 * number + 0.5 * step).view(shape)
        for number, (name, shape) in enumerate(SHAPES.items())
    }


class Partition:
    """This rank's part of all parameters: a range of one flat buffer of all, with padding at the end of the last.

    Attributes:
        memory: Partition of this rank, shape [elements of a rank].
        boxes: Parts of the parameters, as views of `memory`.
    """

    def __init__(self) -> None:
        length = -(-sum(math.prod(shape) for shape in SHAPES.values()) // dist.get_world_size())
        begin = dist.get_rank() * length
        self.memory = torch.full((length,), -1.0)
        self.boxes: dict[str, LocalBoxes] = {}
        first = 0
        for name, shape in SHAPES.items():
            stop = first + math.prod(shape)
            start = min(max(first, begin), stop)
            part = self.memory[max(start - begin, 0) : max(min(stop, begin + length) - begin, 0)]
            self.boxes[name] = LocalBoxes.from_flat(shape, start - first, part)
            first = stop

    def fill(self, whole: dict[str, torch.Tensor]) -> None:
        """Copy this rank's parts of the parameters into the memory."""
        for name, boxes in self.boxes.items():
            for offsets, box in boxes.boxes:
                box.copy_(whole[name][tuple(slice(o, o + n) for o, n in zip(offsets, box.shape, strict=True))])


def save_partitions(path: Path, wait: bool) -> list[int]:
    """Save two steps, the memory overwritten meanwhile; return how often plans were exchanged for each."""
    partition = Partition()
    exchanged = []
    with managing(path) as manager, scatters_counted() as count:
        for step in (1, 2):
            count[0] = 0
            partition.fill(parameters(step))
            manager.save(step, {"model": dict(partition.boxes), "step": step}, wait=wait)
            partition.memory.fill_(-2)
            manager.wait()
            exchanged.append(count[0])
    return exchanged


def restore_partitions(path: Path, step: int) -> bool:
    """Restore as flat partitions; return whether this rank's memory is as it should be, padding included."""
    partition, expected = Partition(), Partition()
    expected.fill(parameters(step))
    state: State = {"model": dict(partition.boxes), "step": 0}
    with managing(path) as manager:
        assert manager.restore(state, step) == step
    assert state["step"] == step
    return torch.equal(partition.memory, expected.memory)


def distributed(whole: dict[str, torch.Tensor]) -> dict[str, DTensor]:
    """Return the parameters as DTensors, in rows where there are any."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0) if tensor.dim() else Replicate()])
        for name, tensor in whole.items()
    }


def save_dtensors(path: Path) -> None:
    """Save step 1 as DTensors."""
    with managing(path) as manager:
        manager.save(1, {"model": distributed(parameters(1)), "step": 1})


def restore_dtensors(path: Path, step: int) -> bool:
    """Restore as DTensors; return whether they are as they should be."""
    held = distributed({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    state: dict[str, Any] = {"model": held, "step": 0}
    with managing(path) as manager:
        manager.restore(state, step)
    return all(torch.equal(held[name].full_tensor(), tensor) for name, tensor in parameters(step).items())


def save_incomplete(path: Path) -> list[str]:
    """Save without the boxes of the last rank; return the errors of this rank, of a gap and of no box at all."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    rows = LocalBoxes((6, 2), [] if is_last else [((2 * dist.get_rank(), 0), torch.ones(2, 2))], dtype=torch.float32)
    none = LocalBoxes((6, 2), dtype=torch.float32)
    errors = []
    for boxes in (rows, none):
        with managing(path) as manager:
            failure = ended(partial(manager.save, 1, {"w": boxes}, wait=True))
        errors.append(failure.text if failure is not None else "")
    return errors
