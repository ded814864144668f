"""A small model, trained for a step under each kind of parallelism, and its full state to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from dcp_remote import RemoteReader, RemoteWriter

Leaves: TypeAlias = dict[str, Any]

# Sizes that 3 and 4 ranks cannot share evenly, but the 2 of tensor parallelism can.
VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH = 37, 12, 2, 30, 5


class Block(nn.Module):
    """Attention and an MLP, with projections that tensor parallelism can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        query, key, value = (
            # Number of local heads: under tensor parallelism each rank has its share.
            layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return cast("torch.Tensor", x + self.down(functional.gelu(self.up(self.mlp_norm(x)))))


class Transformer(nn.Module):
    """Transformer with a parameter smaller than any world size, and buffers, of integers and without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.rand(1, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("positions", torch.randint(100, (LENGTH,)))
        self.register_buffer("temperature", torch.rand(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return cast("torch.Tensor", self.head(x * self.scale))


def plain(model: Transformer) -> nn.Module:
    return model


def ddp(model: Transformer) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: Transformer) -> nn.Module:
    return _sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp(model: Transformer) -> nn.Module:
    """Shard by HSDP: two replicas of two shards."""
    return _sharded(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel(model: Transformer) -> nn.Module:
    return _tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def fsdp_and_tensor_parallel(model: Transformer) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return _sharded(_tensor_parallel(model, mesh["tensor"]), mesh["data"])


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in cast("nn.ModuleList", model.blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _tensor_parallel(model: Transformer, mesh: DeviceMesh) -> Transformer:
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    plan |= {name: RowwiseParallel() for name in ("out", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


@dataclass(frozen=True, slots=True)
class Strategy:
    """Kind of parallelism, and its ranks of the pool."""

    parallelize: Callable[[Transformer], nn.Module]
    world_size: int

    @property
    def ranks(self) -> range:
        return range(self.world_size)


STRATEGIES = {
    "plain": Strategy(plain, 1),
    "ddp-2": Strategy(ddp, 2),
    "tp-2": Strategy(tensor_parallel, 2),
    "fsdp-3": Strategy(fsdp, 3),
    "fsdp-4": Strategy(fsdp, 4),
    "hsdp-2x2": Strategy(hsdp, 4),
    "fsdp-tp-2x2": Strategy(fsdp_and_tensor_parallel, 4),
}


@dataclass(frozen=True, slots=True)
class Training:
    """A model and its optimizer after one step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Any]:
        """Return the state to save or to load into: this rank's part, as `dcp` takes it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "steps": 1}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set model and optimizer to a loaded state."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def trained(strategy: str, seed: int) -> Training:
    """Return the model and its AdamW after one step, all drawn from `seed`; called on every rank."""
    torch.manual_seed(seed)
    model = STRATEGIES[strategy].parallelize(Transformer())
    # The learning rate depends on the seed, so that a restored option of a group is recognized.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 / (1 + seed), foreach=False)
    tokens = torch.randint(VOCABULARY, (3, LENGTH))
    model(tokens).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return Training(model, optimizer)


def save_trained(strategy: str, url: str, seed: int, storage_options: dict[str, str] | None) -> Leaves:
    """Train and save; return the full state that was saved."""
    state = trained(strategy, seed).state()
    dcp.save(state, storage_writer=RemoteWriter(url, storage_options=storage_options))
    return full(state)


def load_each(strategy: str, urls: Sequence[str], storage_options: dict[str, str] | None) -> list[Leaves]:
    """Load one checkpoint after another into one training; return the full state of model and optimizer after each."""
    training = trained(strategy, seed=100)
    states = [full(training.state())]
    for url in urls:
        state = training.state() | {"steps": 0}
        dcp.load(state, storage_reader=RemoteReader(url, storage_options=storage_options))
        training.restore(state)
        states.append(full(training.state() | {"steps": state["steps"]}))
    for one, other in pairwise(states):
        assert not torch.equal(one["/model/embedding.weight"], other["/model/embedding.weight"])
    return states[1:]


def full(state: object) -> Leaves:
    """Return every leaf by its path, with whole tensors; a collective, called on every rank."""
    leaves: Leaves = {}
    _collect(state, "", leaves)
    return leaves


def gathered(value: Any) -> Any:
    """Return a state with every ShardedTensor put together from what the ranks hold.

    Not by `FULL_STATE_DICT`: on a CPU that gives the optimizer's second moments in the place of its first (torch 2.13).
    """
    if isinstance(value, dict):
        return {key: gathered(inner) for key, inner in value.items()}
    if not isinstance(value, ShardedTensor):
        return value
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()])
    result = torch.full(tuple(value.size()), torch.nan)
    for offsets, part in (shard for shards in held for shard in shards):
        result[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))] = part
    return result


def _collect(value: object, path: str, leaves: Leaves) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _collect(item, f"{path}/{key}", leaves)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _collect(item, f"{path}/{number}", leaves)
    elif isinstance(value, DTensor):
        leaves[path] = value.full_tensor().detach().clone()
    elif isinstance(value, torch.Tensor):
        leaves[path] = value.detach().clone()
    else:
        leaves[path] = value


def assert_same(actual: Mapping[str, Any], expected: Mapping[str, Any], label: str = "") -> None:
    """Check that both are equal bit for bit, types included."""
    assert actual.keys() == expected.keys(), label
    for path, value in expected.items():
        other = actual[path]
        assert type(other) is type(value), (label, path)
        if isinstance(value, torch.Tensor):
            assert (other.dtype, other.shape) == (value.dtype, value.shape), (label, path)
            assert torch.equal(_bits(other), _bits(value)), (label, path)
        else:
            assert other == value, (label, path)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
