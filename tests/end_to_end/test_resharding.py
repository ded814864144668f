"""States saved by any number of ranks and loaded by any other, bit for bit, in any sharding and memory layout.

Planner, writer and reader are called once per rank in one process (`tests.support.simulated_ranks`).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.format.shard import SHARD_BYTES_MAX
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.properties import examples
from tests.support.simulated_ranks import LocalShards, State, grid, load_as_ranks, save_as_ranks, shard
from tests.support.strategies import (
    DTYPES,
    LAYOUTS,
    AnyDtypePlanner,
    Case,
    Resharding,
    Sharding,
    Whole,
    blank,
    blank_like,
    cases,
    dealt,
    random_whole,
    same_bits,
)


def writer(store: MemoryStore | RecordingStore, shard_bytes_max: int) -> RemoteWriter:
    """Return a writer of small shards."""
    made = RemoteWriter(store)
    made._shard_bytes = shard_bytes_max if shard_bytes_max < SHARD_BYTES_MAX else None
    return made


def saved_states(case: Case) -> list[State]:
    states: list[State] = [{} for _ in range(case.saving)]
    for number, tensor in enumerate(case.tensors):
        parts = _parts(tensor, tensor.saved, world_size=case.saving)
        for state, part in zip(states, parts, strict=True):
            state[f"t{number}"] = part
    return states


def templates(case: Case) -> list[State]:
    states: list[State] = [{} for _ in range(case.loading)]
    for number, tensor in enumerate(case.tensors):
        parts = _parts(tensor, tensor.loaded, world_size=case.loading)
        for state, part in zip(states, parts, strict=True):
            state[f"t{number}"] = (
                blank_like(part, tensor.layout)
                if isinstance(part, LocalShards)
                else blank(part.dtype, part.shape, layout=tensor.layout)
            )
    return states


def _parts(tensor: Resharding, sharding: Sharding | None, *, world_size: int) -> list[torch.Tensor]:
    if sharding is None:
        return [tensor.whole.tensor(layout=tensor.layout) for _ in range(world_size)]
    return list(dealt(tensor.whole, sharding.parts, sharding.owners, world_size=world_size, layouts=sharding.layouts))


def check(case: Case, states: list[State]) -> None:
    for state in states:
        for number, tensor in enumerate(case.tensors):
            part = state[f"t{number}"]
            for offsets, chunk in part.chunks if isinstance(part, LocalShards) else [((0,) * part.dim(), part)]:
                expected = tensor.whole.cell((offsets, tuple(chunk.shape)))
                assert same_bits(chunk, expected), f"t{number} {tensor.whole.dtype} {offsets} {tuple(chunk.shape)}"


def check_chunks(states: list[State], whole: Whole) -> None:
    for state in states:
        for offsets, chunk in state["w"].chunks:
            assert same_bits(chunk, whole.cell((offsets, tuple(chunk.shape))))


@examples(250)
@given(case=cases())
def test_any_state_comes_back_at_any_world_size(case: Case) -> None:
    """Save with one assignment of cells to ranks, load with another, and compare every chunk with its original bytes.

    The same checkpoint is then loaded without a template.
    """
    store = MemoryStore()
    save_as_ranks(saved_states(case), lambda: writer(store, case.shard_bytes_max), AnyDtypePlanner)
    loaded = templates(case)
    load_as_ranks(loaded, lambda: RemoteReader(store))
    check(case, loaded)
    whole = load(store)
    for number, tensor in enumerate(case.tensors):
        assert same_bits(whole[f"t{number}"], tensor.whole.elements)
        assert whole[f"t{number}"].dtype == tensor.whole.dtype


def test_every_dtype() -> None:
    """Every dtype of torch, 0-d and not, in every memory layout, saved by three ranks, loads on two."""
    store = MemoryStore()
    wholes = {
        f"{str(dtype).removeprefix('torch.')}-{layout}-{len(shape)}": (random_whole(dtype, shape, 1), layout)
        for dtype in DTYPES
        for layout in LAYOUTS
        for shape in ((), (7, 3))
    }
    assert len(wholes) == 46 * 4 * 2
    parts = {
        name: dealt(w, (3, 1)[: len(w.shape)], [(0,), (1,), (2,)], world_size=3, layouts=[layout])
        for name, (w, layout) in wholes.items()
    }
    save_as_ranks(
        [{name: shards[rank] for name, shards in parts.items()} for rank in range(3)],
        lambda: RemoteWriter(store),
        AnyDtypePlanner,
    )
    loaded: list[State] = [
        {name: blank(w.dtype, w.shape, layout=layout) for name, (w, layout) in wholes.items()} for _ in range(2)
    ]
    load_as_ranks(loaded, lambda: RemoteReader(store))
    for state in loaded:
        for name, (w, _) in wholes.items():
            assert same_bits(state[name], w.elements), name


@pytest.mark.parametrize("dtype", [torch.uint8, torch.complex128])
def test_columns_of_a_large_matrix(dtype: torch.dtype) -> None:
    """A matrix saved in row slices of several pieces loads in column slices, by way of the block tables."""
    store = RecordingStore(MemoryStore())
    whole = random_whole(dtype, (1200, 1000), 3)
    save_as_ranks(
        [{"w": part} for part in dealt(whole, (2, 1), [(0,), (1,)], world_size=2, layouts=["contiguous"])],
        lambda: writer(store, 300_000),
    )
    store.clear()
    templates = dealt(whole, (1, 5), [(0,), (1,), (2,)], world_size=3, layouts=["contiguous"])
    loaded: list[State] = [{"w": blank_like(template, "contiguous")} for template in templates]
    load_as_ranks(loaded, lambda: RemoteReader(store))
    check_chunks(loaded, whole)
    assert {verb for verb, _ in store.calls} == {"get", "get_into"}


def test_rows_larger_than_a_shard() -> None:
    """Rows of 200,000 bytes in shards of 64,000 (so that pieces begin inside rows) load whole and in parts."""
    store = MemoryStore()
    whole = random_whole(torch.float64, (3, 25_000), 5)
    save_as_ranks([{"w": whole.tensor()}], lambda: writer(store, 64_000))
    for parts in [(1, 1), (3, 1), (1, 3), (2, 7)]:
        loaded: list[State] = [
            {"w": blank_like(part, "contiguous")}
            for part in dealt(whole, parts, [(0,), (1,)], world_size=2, layouts=["contiguous"])
        ]
        load_as_ranks(loaded, lambda: RemoteReader(store))
        check_chunks(loaded, whole)


def test_a_few_rows_cost_a_few_blocks() -> None:
    """A load of 64 KiB of a 16 MiB matrix reads at most two blocks more than that, and the table."""
    store = RecordingStore(MemoryStore())
    whole = random_whole(torch.float32, (1024, 4096), 6)
    save_as_ranks([{"w": whole.tensor()}], lambda: RemoteWriter(store, shard_bytes=64 * 2**20))
    manifest_bytes = store.requests[-1].size_bytes
    store.clear()
    rows = LocalShards((1024, 4096), torch.float32, [((510, 0), torch.zeros(4, 4096))])
    load_as_ranks([{"w": rows}], lambda: RemoteReader(store))
    assert same_bits(rows.chunks[0][1], whole.cell(((510, 0), (4, 4096))))
    block_bytes = 256 * 1024  # block size of a piece of 16 MiB
    assert store.size_bytes() - manifest_bytes <= 64 * 1024 + 2 * block_bytes + 64 * 16
    assert [verb for verb, _ in store.calls] == ["get", "get_into", "get_into"]


def test_a_rank_with_nothing() -> None:
    """A rank with an empty state, among five, writes no shard, and loads nothing."""
    store = MemoryStore()
    whole = random_whole(torch.int64, (2, 3), 8)
    states: list[State] = [{"w": part} for part in shard(whole.tensor(), 5, (2, 1))]
    states[4] = {}
    save_as_ranks(states, lambda: RemoteWriter(store))
    assert sorted(key[10:20] for key in store.space.objects if key.startswith("shards/")) == [
        "rank-00000",
        "rank-00001",
    ]
    loaded: list[State] = [{"w": blank_like(part, "contiguous")} for part in shard(whole.tensor(), 5, (1, 2))]
    loaded[3] = {}
    load_as_ranks(loaded, lambda: RemoteReader(store))
    for state, cell in zip(loaded, grid((2, 3), (1, 2)), strict=False):
        assert same_bits(state["w"].chunks[0][1], whole.cell(cell))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_views_of_every_kind_are_saved_as_what_they_show() -> None:
    """Expanded, lazily conjugated or negated, strided and overlapping views are saved with the values they show."""
    store = MemoryStore()
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    values = torch.complex(base, base + 0.5)
    views = {
        "expanded": base[:1].expand(5, 6),
        "expanded 0-d": base[2, 3].expand(3, 2),
        "conjugated": values.conj(),
        "conjugated and transposed": values.mH,
        "conjugated half": values.to(torch.complex32).conj(),
        "conjugated double": values.to(torch.complex128).conj(),
        "negated": values.conj().imag,
        "negated and strided": values.conj().imag[1:, ::2],
        "one element": base.view(-1)[3::50],
        "one column": base[:1, 2:3],
        "windows": base.view(-1).unfold(0, 6, 2),
        "flipped": base.flip(0),
        "no elements": base[:, 2:2],
    }
    assert views["negated"].is_neg()
    assert views["conjugated"].is_conj()
    assert views["one element"].stride() == (50,)
    save_as_ranks([dict(views)], lambda: RemoteWriter(store))
    loaded = load(store)
    template: State = {name: torch.full(view.shape, 9, dtype=view.dtype) for name, view in views.items()}
    load_as_ranks([template], lambda: RemoteReader(store))
    for name, view in views.items():
        expected = view.clone().resolve_conj().resolve_neg()
        for found in (loaded[name], template[name]):
            assert found.dtype == view.dtype
            assert (
                torch.equal(found, expected) if view.dtype != torch.complex32 else found.tolist() == expected.tolist()
            )
