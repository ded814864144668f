"""States and shardings for property tests: any dtype, shape, memory layout and assignment of chunks to ranks.

The elements of a tensor are kept as numpy bytes (`Whole`), and loaded tensors are compared with them: the oracle shares
no code with the package.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TypeAlias

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from tests.support.simulated_ranks import LocalShards, grid

Cell: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_NUMPY_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}

# Memory layouts of a tensor.
LAYOUTS = ("contiguous", "transposed", "strided", "offset")


@dataclass(frozen=True)
class Whole:
    """A tensor's dtype, and its elements as opaque numpy items of the dtype's size."""

    dtype: torch.dtype
    elements: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the tensor."""
        return self.elements.shape

    def cell(self, cell: Cell) -> np.ndarray:
        offsets, sizes = cell
        # With the ellipsis an array without dimensions stays an array.
        place: list[slice | EllipsisType] = [slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)]
        return self.elements[(*place, ...)]

    def tensor(self, cell: Cell | None = None, *, layout: str = "contiguous") -> torch.Tensor:
        """Return the tensor, or a chunk of it, in a memory layout."""
        elements = self.elements if cell is None else self.cell(cell)
        size_bytes = self.elements.itemsize
        integers = torch.from_numpy(np.array(elements).view(_NUMPY_INTEGERS[size_bytes]))
        result = blank(self.dtype, elements.shape, layout=layout)
        result.view(_INTEGERS[size_bytes]).copy_(integers)
        return result


def blank(dtype: torch.dtype, shape: Sequence[int], *, layout: str) -> torch.Tensor:
    """Return a tensor of 0xA5 bytes in a memory layout."""
    integer = _INTEGERS[dtype.itemsize]
    if layout == "transposed":
        elements = _fresh(tuple(reversed(shape)), integer).permute(tuple(reversed(range(len(shape)))))
    elif layout == "strided" and shape:
        elements = _fresh((*shape[:-1], shape[-1] * 3), integer)[..., 1::3]
    elif layout == "offset":
        elements = _fresh((int(np.prod(shape)) + 1,), integer)[1:].view(tuple(shape))
    else:
        elements = _fresh(tuple(shape), integer)
    return elements.view(dtype)


def _fresh(shape: tuple[int, ...], integer: torch.dtype) -> torch.Tensor:
    count = int(np.prod(shape))
    return torch.full((count * integer.itemsize,), 0xA5, dtype=torch.uint8).view(integer).view(shape)


def same_bits(tensor: torch.Tensor, expected: np.ndarray) -> bool:
    """Return whether a tensor has exactly these elements."""
    if tuple(tensor.shape) != expected.shape:
        return False
    integers = tensor.detach().resolve_conj().resolve_neg().view(_INTEGERS[tensor.element_size()])
    return bool(integers.numpy().tobytes() == expected.tobytes())


def random_whole(dtype: torch.dtype, shape: Sequence[int], seed: int) -> Whole:
    """Return random bytes; for bool, only 0 and 1."""
    generator = np.random.default_rng(seed)
    count = int(np.prod(shape)) * dtype.itemsize
    data = generator.integers(0, 2 if dtype == torch.bool else 256, count, dtype=np.uint8)
    return Whole(dtype, data.view(f"V{dtype.itemsize}").reshape(tuple(shape)))


def dealt(
    whole: Whole, parts: Sequence[int], owners: Sequence[Sequence[int]], *, world_size: int, layouts: Sequence[str]
) -> list[LocalShards]:
    """Return one `LocalShards` per rank: cell `i` of the grid goes to the ranks `owners[i]`, in layout `layouts[i]`."""
    chunks: list[list[tuple[tuple[int, ...], torch.Tensor]]] = [[] for _ in range(world_size)]
    # Uneven grids have several empty cells at the end of a dimension; a rank holds one chunk per offset.
    for cell, ranks, layout in zip(grid(whole.shape, parts), itertools.cycle(owners), itertools.cycle(layouts)):
        for rank in ranks:
            if all(offsets != cell[0] for offsets, _ in chunks[rank]):
                chunks[rank].append((cell[0], whole.tensor(cell, layout=layout)))
    return [LocalShards(whole.shape, whole.dtype, rank_chunks) for rank_chunks in chunks]


def blank_like(shards: LocalShards, layout: str) -> LocalShards:
    """Return templates of the same chunks, with other bytes."""
    chunks = [(offsets, blank(chunk.dtype, chunk.shape, layout=layout)) for offsets, chunk in shards.chunks]
    return LocalShards(shards.shape, shards.dtype, chunks)


class AnyDtypePlanner(DefaultSavePlanner):
    """torch's planner without its balancing by size, which knows 27 of the 46 dtypes: the first rank writes."""

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        seen: set[MetadataIndex] = set()
        kept: list[SavePlan] = []
        for plan in all_plans:
            items = [item for item in plan.items if item.index not in seen]
            seen.update(item.index for item in items)
            kept.append(SavePlan(items, plan.storage_data, plan.planner_data))
        return kept


@dataclass(frozen=True)
class Sharding:
    """Grid of a tensor, and the ranks and memory layouts of its cells."""

    parts: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    layouts: tuple[str, ...]


@dataclass(frozen=True)
class Resharding:
    """Shardings of one tensor at its save and its load; None: whole on every rank."""

    whole: Whole
    saved: Sharding | None
    loaded: Sharding | None
    layout: str


@dataclass(frozen=True)
class Case:
    """Tensors with the world sizes that save and load them."""

    saving: int
    loading: int
    shard_bytes_max: int
    tensors: tuple[Resharding, ...]


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes without dimensions up to three of them; some empty, and some of more than one block (64 KiB) of bytes."""
    small = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    large = st.tuples(st.integers(200, 500), st.integers(150, 400))
    return st.one_of(small, small, small, large)


def shardings(dimensions: int, world_size: int) -> st.SearchStrategy[Sharding]:
    """Grids of up to 5 parts a dimension; each cell on one rank, sometimes on several."""
    rank = st.integers(0, world_size - 1)
    owner = st.one_of(rank.map(lambda r: (r,)), st.sets(rank, min_size=1, max_size=3).map(lambda r: tuple(sorted(r))))
    return st.builds(
        Sharding,
        parts=st.tuples(*[st.integers(1, 5)] * dimensions),
        owners=st.lists(owner, min_size=1, max_size=9).map(tuple),
        layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=4).map(tuple),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw one to four tensors on 1 to 8 ranks, loaded on 1 to 8."""
    saving, loading = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        whole = random_whole(draw(st.sampled_from(DTYPES)), draw(shapes()), draw(st.integers(0, 2**32 - 1)))
        dimensions = len(whole.shape)
        saved = draw(st.one_of(st.none(), shardings(dimensions, saving), shardings(dimensions, saving)))
        loaded = draw(st.one_of(st.none(), shardings(dimensions, loading), shardings(dimensions, loading)))
        tensors.append(Resharding(whole, saved, loaded, draw(st.sampled_from(LAYOUTS))))
    shard_bytes_max = draw(st.sampled_from([16, 1000, 100_000, 64 * 2**20]))
    if any(tensor.whole.elements.nbytes > 200 * shard_bytes_max for tensor in tensors):
        shard_bytes_max = 100_000
    return Case(saving, loading, shard_bytes_max, tuple(tensors))
