"""Flat partitions on real ranks, as ZeRO keeps them: saved by three, restored by two, and exchanged with DTensors."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_remote import LocalBoxes, load
from tests.distributed.managed import managing
from tests.distributed.planning import plans_counted
from tests.support.rank_pool import RankPool

THREE, PAIR = range(3), range(2)

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


def partition(step: int | None) -> tuple[torch.Tensor, dict[str, LocalBoxes]]:
    """Return this rank's part of one flat buffer of all parameters, with padding at the end, and the views of it.

    It is filled with the parameters of a step, or with none.
    """
    length = -(-sum(math.prod(shape) for shape in SHAPES.values()) // dist.get_world_size())
    begin = dist.get_rank() * length
    memory, boxes, first = torch.full((length,), -1.0), {}, 0
    for name, shape in SHAPES.items():
        stop = first + math.prod(shape)
        start = min(max(first, begin), stop)
        part = memory[max(start - begin, 0) : max(min(stop, begin + length) - begin, 0)]
        if step is not None:
            part.copy_(parameters(step)[name].flatten()[start - first : start - first + part.numel()])
        boxes[name] = LocalBoxes.from_flat(shape, start - first, part)
        first = stop
    return memory, boxes


def save_partitions(path: Path) -> list[int]:
    """Save two steps, the memory overwritten meanwhile; return how often plans were exchanged for each."""
    exchanged = []
    with managing(path) as manager, plans_counted() as count:
        for step in (1, 2):
            count[0] = 0
            memory, boxes = partition(step)
            manager.save(step, {"model": boxes, "step": step})
            memory.fill_(-2)
            manager.wait()
            exchanged.append(count[0])
    return exchanged


def restore_partitions(path: Path, step: int) -> bool:
    """Restore as flat partitions; return whether this rank's memory is as it should be, padding included."""
    memory, boxes = partition(None)
    with managing(path) as manager:
        assert manager.restore({"model": boxes, "step": 0}, step) == step
    return torch.equal(memory, partition(step)[0])


def distributed(step: int, factor: int) -> dict[str, DTensor]:
    """Return the parameters as DTensors, in rows where there are any."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(one * factor, mesh, [Shard(0) if one.dim() else Replicate()])
        for name, one in parameters(step).items()
    }


def save_dtensors(path: Path) -> None:
    with managing(path) as manager:
        manager.save(1, {"model": distributed(1, 1), "step": 1})


def restore_dtensors(path: Path, step: int) -> bool:
    held = distributed(step, 0)
    with managing(path) as manager:
        manager.restore({"model": held, "step": 0}, step)
    return all(torch.equal(held[name].full_tensor(), tensor) for name, tensor in parameters(step).items())


def test_flat_partitions(rank_pool: RankPool, tmp_path: Path) -> None:
    """Plans are columns, exchanged once; what is loaded is equal bit for bit: as partitions, whole, as DTensors."""
    assert rank_pool.run(save_partitions, tmp_path, ranks=THREE) == [[1, 0]] * 3
    for step in (1, 2):
        loaded = load(tmp_path, step=step)["model"]
        assert loaded.keys() == parameters(step).keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in parameters(step).items())
        assert rank_pool.run(restore_partitions, tmp_path, step, ranks=PAIR) == [True] * 2
    assert rank_pool.run(restore_dtensors, tmp_path, 2, ranks=PAIR) == [True] * 2


def test_flat_partitions_of_dtensors(rank_pool: RankPool, tmp_path: Path) -> None:
    """Saved as FSDP2 holds them by three ranks; restored as flat partitions by two."""
    rank_pool.run(save_dtensors, tmp_path, ranks=THREE)
    assert rank_pool.run(restore_partitions, tmp_path, 1, ranks=PAIR) == [True] * 2
