"""Templates that share memory: their layers, and that the last one in the plan wins."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dcp_remote import RemoteReader, RemoteWriter
from dcp_remote.loading.overlapping_templates import assign_layers
from dcp_remote.storage import MemoryStore


def test_layers() -> None:
    """Layers of separate tensors, the same one again, overlapping views, columns, an empty one, and a chain."""
    flat = torch.zeros(100)
    grid = torch.zeros(10, 10)
    assert assign_layers([]) == []
    assert assign_layers([flat, grid, torch.zeros(3)]) == [0, 0, 0]
    assert assign_layers([flat, flat, flat]) == [0, 1, 2]
    assert assign_layers([flat[:50], flat[50:]]) == [0, 0]
    assert assign_layers([flat[50:], flat[:51]]) == [0, 1]
    assert assign_layers([flat[:40], flat[30:70], flat[60:]]) == [0, 1, 2]
    assert assign_layers([flat[:40], flat[60:], flat[30:70]]) == [0, 0, 1]
    assert assign_layers([grid[:, :5], grid[:, 5:], grid[:, :5]]) == [0, 0, 1]
    assert assign_layers([grid[:, :5], grid, grid[:, 5:]]) == [0, 1, 2]
    assert assign_layers([flat[3:3], flat, flat[3:3]]) == [0, 0, 0]
    assert assign_layers([flat, flat.view(torch.int32), grid.t(), grid]) == [0, 1, 0, 1]


def test_within_a_layer_nothing_shares_memory() -> None:
    """Random slices of one buffer, compared by element: of two that overlap, the later one is in a later layer."""
    random_source = random.Random(4)
    for _ in range(200):
        flat = torch.arange(64)
        cuts = [sorted(random_source.sample(range(65), 2)) for _ in range(random_source.randint(1, 8))]
        found = assign_layers([flat[first:stop] for first, stop in cuts])
        for number, (first, stop) in enumerate(cuts):
            for before in range(number):
                if set(range(first, stop)) & set(range(*cuts[before])):
                    assert found[before] < found[number]


@pytest.mark.parametrize("rows", [100, 1 << 20])
def test_the_last_one_wins(rows: int) -> None:
    """Load two tensors into the same memory, whole or by half: as if they had been read one after the other."""
    store = MemoryStore()
    state = {"a": torch.full((rows,), 1.0), "b": torch.full((rows,), 2.0)}
    dcp.save(state, storage_writer=RemoteWriter(store), no_dist=True)
    for _ in range(2):
        memory = torch.zeros(rows)
        dcp.load({"a": memory, "b": memory}, storage_reader=RemoteReader(store), no_dist=True)
        assert bool((memory == 2).all())
        memory = torch.zeros(rows + rows // 2)
        template = {"a": memory[:rows], "b": memory[rows // 2 :]}
        dcp.load(template, storage_reader=RemoteReader(store), no_dist=True)
        assert bool((memory[: rows // 2] == 1).all())
        assert bool((memory[rows // 2 :] == 2).all())


def test_tied_weights() -> None:
    """A model is saved with untied weights and loaded with its embedding tied to its head: the head's values win."""
    store = MemoryStore()

    def model(*, tied: bool) -> nn.ModuleDict:
        module = nn.ModuleDict({"embedding": nn.Embedding(300_000, 4), "head": nn.Linear(4, 300_000, bias=False)})
        if tied:
            module["head"].weight = module["embedding"].weight
        return module

    saved, loaded = model(tied=False).state_dict(), model(tied=True)
    dcp.save({"model": saved}, storage_writer=RemoteWriter(store), no_dist=True)
    dcp.load({"model": loaded.state_dict()}, storage_reader=RemoteReader(store), no_dist=True)
    assert torch.equal(loaded.state_dict()["embedding.weight"], saved["head.weight"])
