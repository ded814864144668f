"""Templates that share memory: which are read after which, and that the last one wins."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dcp_remote import RemoteReader, RemoteWriter
from dcp_remote.aliases import layers
from dcp_remote.storage import MemoryStore


def test_layers() -> None:
    """Alone, the same again, overlapping views, columns, an empty one, and a chain."""
    flat = torch.zeros(100)
    grid = torch.zeros(10, 10)
    assert layers([]) == []
    assert layers([flat, grid, torch.zeros(3)]) == [0, 0, 0]
    assert layers([flat, flat, flat]) == [0, 1, 2]
    assert layers([flat[:50], flat[50:]]) == [0, 0]
    assert layers([flat[50:], flat[:51]]) == [0, 1]
    assert layers([flat[:40], flat[30:70], flat[60:]]) == [0, 1, 2]
    assert layers([flat[:40], flat[60:], flat[30:70]]) == [0, 0, 1]
    assert layers([grid[:, :5], grid[:, 5:], grid[:, :5]]) == [0, 0, 1]
    assert layers([grid[:, :5], grid, grid[:, 5:]]) == [0, 1, 2]
    assert layers([flat[3:3], flat, flat[3:3]]) == [0, 0, 0]
    assert layers([flat, flat.view(torch.int32), grid.t(), grid]) == [0, 1, 0, 1]


def test_within_a_layer_nothing_shares_memory() -> None:
    """Random slices of one buffer, compared byte by byte: no two of a layer, and none after one that comes later."""
    draw = random.Random(4)
    for _ in range(200):
        flat = torch.arange(64)
        cuts = [sorted(draw.sample(range(65), 2)) for _ in range(draw.randint(1, 8))]
        found = layers([flat[first:stop] for first, stop in cuts])
        for number, (first, stop) in enumerate(cuts):
            for before in range(number):
                if set(range(first, stop)) & set(range(*cuts[before])):
                    assert found[before] < found[number]


@pytest.mark.parametrize("rows", [100, 1 << 20])
def test_the_last_one_wins(rows: int) -> None:
    """Saved as two tensors, loaded into one memory, whole or by half: as if they had been read in turn."""
    store = MemoryStore()
    state = {"a": torch.full((rows,), 1.0), "b": torch.full((rows,), 2.0)}
    dcp.save(state, storage_writer=RemoteWriter(store), no_dist=True)
    for _ in range(5):
        memory = torch.zeros(rows)
        dcp.load({"a": memory, "b": memory}, storage_reader=RemoteReader(store), no_dist=True)
        assert bool((memory == 2).all())
        memory = torch.zeros(rows + rows // 2)
        template = {"a": memory[:rows], "b": memory[rows // 2 :]}
        dcp.load(template, storage_reader=RemoteReader(store), no_dist=True)
        assert bool((memory[: rows // 2] == 1).all())
        assert bool((memory[rows // 2 :] == 2).all())


def test_tied_weights() -> None:
    """A model whose embedding is its last layer, saved untied and loaded tied."""
    store = MemoryStore()

    def model(*, tied: bool) -> nn.ModuleDict:
        made = nn.ModuleDict({"embedding": nn.Embedding(300_000, 4), "head": nn.Linear(4, 300_000, bias=False)})
        if tied:
            made["head"].weight = made["embedding"].weight
        return made

    saved, loaded = model(tied=False).state_dict(), model(tied=True)
    dcp.save({"model": saved}, storage_writer=RemoteWriter(store), no_dist=True)
    dcp.load({"model": loaded.state_dict()}, storage_reader=RemoteReader(store), no_dist=True)
    assert torch.equal(loaded.state_dict()["embedding.weight"], saved["head.weight"])
