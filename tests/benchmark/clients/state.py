"""State that is saved and loaded: parameters and Adam moments of a transformer, from 4 bytes to 200 MiB a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

# Values repeat after so many: cheap to make, and enough that no piece is taken for its neighbour.
_PERIOD = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """State of a transformer; in float32, with two moments and a step for each parameter."""

    layers: int
    hidden: int
    vocabulary: int

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes."""
        hidden = self.hidden
        yield "embedding.weight", (self.vocabulary, hidden)
        for layer in range(self.layers):
            name = f"layers.{layer}"
            yield f"{name}.attention.qkv.weight", (3 * hidden, hidden)
            yield f"{name}.attention.qkv.bias", (3 * hidden,)
            yield f"{name}.attention.out.weight", (hidden, hidden)
            yield f"{name}.up.weight", (4 * hidden, hidden)
            yield f"{name}.down.weight", (hidden, 4 * hidden)
            for part in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
                yield f"{name}.{part}", (hidden,)
        yield "norm.weight", (hidden,)


# 1.2 GiB: the embedding and each of its moments are 200 MiB, a layer 48 MiB thrice.
LARGE = Shape(layers=4, hidden=1024, vocabulary=51_200)
# 4 GiB, of the same tensors.
LARGEST = Shape(layers=24, hidden=1024, vocabulary=51_200)
# 0.4 GiB, where the server is slow.
MEDIUM = Shape(layers=2, hidden=768, vocabulary=25_600)
# 7 MiB, for the tests.
SMALL = Shape(layers=2, hidden=128, vocabulary=1_000)
# 1 MiB, where nothing but what each save costs is seen.
TINY = Shape(layers=1, hidden=64, vocabulary=590)
# 20,000 tensors, and 2,000, of 4 to 1,024 bytes each.
MANY, FEWER = (Shape(layers=layers, hidden=4, vocabulary=64) for layers in (555, 55))

SHAPES = {
    "tiny": TINY,
    "small": SMALL,
    "medium": MEDIUM,
    "large": LARGE,
    "largest": LARGEST,
    "many": MANY,
    "fewer": FEWER,
}


def state_of(shape: Shape, *, filled: bool) -> dict[str, Any]:
    """The state, sharded along dimension 0 over the ranks, if there are several; known values, or zeros to load into.

    Every byte of it is touched: what it costs to get memory from the system is no part of a measurement.
    """
    model: dict[str, Any] = {}
    moments: dict[str, dict[str, Any]] = {}
    for number, (name, size) in enumerate(shape.parameters()):
        model[name] = _tensor(size, 3 * number, filled=filled)
        moments[name] = {
            "exp_avg": _tensor(size, 3 * number + 1, filled=filled),
            "exp_avg_sq": _tensor(size, 3 * number + 2, filled=filled),
            "step": torch.tensor(float(number) if filled else 0.0),
        }
    return {"model": model, "optim": {"state": moments}}


def require_loaded(state: dict[str, Any], shape: Shape) -> None:
    """Check that the loaded values are the known ones, bit for bit."""
    moments = state["optim"]["state"]
    for number, (name, size) in enumerate(shape.parameters()):
        tensors = state["model"][name], moments[name]["exp_avg"], moments[name]["exp_avg_sq"]
        for part, tensor in enumerate(tensors):
            wanted = _local(_tensor(size, 3 * number + part, filled=True))
            if not torch.equal(_local(tensor), wanted):
                raise AssertionError(f"{name} was not loaded as it was saved")
        if moments[name]["step"].item() != number:
            raise AssertionError(f"the step of {name} was not loaded as it was saved")


def local_tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return the part of this rank of each of its tensors, in their order."""
    tensors = [*state["model"].values(), *(one for part in state["optim"]["state"].values() for one in part.values())]
    return [_local(tensor) for tensor in tensors]


def size_bytes(state: dict[str, Any]) -> int:
    """Return the bytes of the memory of its tensors, on this rank."""
    return sum(tensor.nbytes for tensor in local_tensors(state))


def _tensor(size: tuple[int, ...], number: int, *, filled: bool) -> torch.Tensor:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size == 1:
        return _part(size, number, 0, filled=filled)
    mesh = init_device_mesh("cpu", (world_size,))
    rows = -(-size[0] // world_size)
    first = min(rows * mesh.get_rank(), size[0])
    mine = (min(rows, size[0] - first), *size[1:])
    row = size[1] if len(size) > 1 else 1
    local = _part(mine, number, first * row, filled=filled)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(size), stride=stride)


def _part(size: tuple[int, ...], number: int, first: int, *, filled: bool) -> torch.Tensor:
    """Return values of a tensor, from that one on: a function of the number and the position alone."""
    tensor = torch.empty(size).fill_(0)
    if filled:
        flat = tensor.view(-1)
        position = first % _PERIOD
        # No longer than needed: of thousands of tensors, the memory between them would be lost to their patterns.
        length = position + min(flat.numel(), _PERIOD)
        pattern = torch.arange(length, dtype=torch.float32).remainder_(_PERIOD).add_(number * 0.25)
        for begin in range(0, flat.numel(), _PERIOD):
            part = flat[begin : begin + _PERIOD]
            part.copy_(pattern[position : position + part.numel()])
    return tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
