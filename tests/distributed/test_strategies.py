"""Checkpoints of one way to parallelize load in every other: real ranks, model and optimizer, equal bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_remote import RemoteReader, RemoteWriter, load
from tests.support.rank_pool import RankPool
from tests.support.training import STRATEGIES, Leaves, assert_same, full, load_each, save_trained, trained


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Leaves]]:
    """A checkpoint by each strategy, each of another seed: the URL and the full state."""
    made = {}
    for seed, (name, strategy) in enumerate(STRATEGIES.items()):
        url = tmp_path_factory.mktemp(name).as_uri()
        states = rank_pool.run(save_trained, name, url, seed, None, ranks=strategy.ranks)
        for state in states[1:]:
            assert_same(state, states[0])
        made[name] = url, states[0]
    return made


@pytest.mark.torture
@pytest.mark.parametrize("loader", STRATEGIES)
def test_any_strategy_loads_what_any_other_saved(
    loader: str, rank_pool: RankPool, saved: Mapping[str, tuple[str, Leaves]]
) -> None:
    """A training takes over the checkpoint of each strategy in turn, and then is the one that was saved, on every rank.

    The oracle is torch: `full_tensor` on the ranks that saved, and on the ranks that loaded.
    """
    urls = [url for url, _ in saved.values()]
    for states in rank_pool.run(load_each, loader, urls, None, ranks=STRATEGIES[loader].ranks):
        for state, (url, expected) in zip(states, saved.values(), strict=True):
            assert_same(state, expected, url)


def test_a_single_process_loads_without_a_template(saved: Mapping[str, tuple[str, Leaves]]) -> None:
    """`load` gives the nesting that was saved, with whole tensors; or the model alone."""
    for url, expected in saved.values():
        assert_same(full(load(url)), expected, url)
        model = {path: value for path, value in expected.items() if path.startswith("/model/")}
        assert_same(full(load(url, keys="model.*")), model, url)


def placements_of(strategy: str) -> set[str]:
    leaves = trained(strategy, seed=1).state()["model"].values()
    return {str(tensor.placements) for tensor in leaves if isinstance(tensor, DTensor)}


def test_the_strategies_make_what_they_are_here_for(rank_pool: RankPool) -> None:
    """The matrix above would prove little if no tensor were sharded; torch's own words for its placements."""
    assert rank_pool.run(placements_of, "tp-2", ranks=(0, 1))[0] == {
        str((Shard(0),)),
        str((Shard(1),)),
        str((Replicate(),)),
    }
    assert rank_pool.run(placements_of, "fsdp-3", ranks=(0, 1, 2))[0] == {str((Shard(0),))}
    assert rank_pool.run(placements_of, "hsdp-2x2")[0] == {str((Replicate(), Shard(0)))}
    both = rank_pool.run(placements_of, "fsdp-tp-2x2")[0]
    assert {str((_StridedShard(0, split_factor=2), Shard(0))), str((Shard(0), Shard(1)))} <= both


# Each on two ranks by two, for sizes that these do not divide, and for empty and missing dimensions.
LAYOUTS: tuple[tuple[Placement, Placement], ...] = (
    (Replicate(), Replicate()),
    (Replicate(), Shard(0)),
    (Shard(1), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(2), Shard(0)),
    (Shard(1), Shard(1)),
)
TENSORS = {(7, 5, 3): torch.float32, (1, 4, 9): torch.bfloat16, (2, 1, 1): torch.int64, (0, 3, 2): torch.bool}


def laid_out(shift: int, *, filled: bool) -> dict[str, torch.Tensor]:
    """Every kind of tensor in every layout, which is another for each `shift`; all values differ, or are 0."""
    mesh = init_device_mesh("cpu", (2, 2))
    state: dict[str, torch.Tensor] = {}
    for number in range(len(LAYOUTS)):
        for shape, dtype in TENSORS.items():
            values = torch.arange(math.prod(shape)).reshape(shape) + 1 + 100 * number
            whole = (values if filled else torch.zeros(shape)).to(dtype)
            state[f"{shape} {number}"] = distribute_tensor(whole, mesh, LAYOUTS[(number + shift) % len(LAYOUTS)])
    return state


def save_layouts(url: str) -> None:
    dcp.save(laid_out(0, filled=True), storage_writer=RemoteWriter(url))


def load_layouts(url: str, shift: int) -> tuple[Leaves, Leaves]:
    state = laid_out(shift, filled=False)
    dcp.load(state, storage_reader=RemoteReader(url))
    return full(state), full(laid_out(0, filled=True))


@pytest.mark.parametrize("shift", range(len(LAYOUTS)))
def test_a_tensor_is_loaded_into_another_layout(shift: int, rank_pool: RankPool, tmp_path: Path) -> None:
    """Replicated, cut along one dimension, along two, along one twice: each is read into the layout `shift` further."""
    rank_pool.run(save_layouts, str(tmp_path))
    for loaded, expected in rank_pool.run(load_layouts, str(tmp_path), shift):
        assert_same(loaded, expected)
