"""`LocalBoxes`: what is refused, ranges of flattened tensors, and saves and loads by ranks in one process."""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_remote import CheckpointManager, LocalBoxes, PerRank, RemoteReader, RemoteWriter, Retention, load
from dcp_remote.common.geometry import Box
from dcp_remote.errors import InvalidArgumentError, UnsafeObjectError
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.simulated_ranks import grid, load_as_ranks, save_as_ranks

State: TypeAlias = dict[str, Any]

SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (3, 4), (1, 5, 1), (2, 3, 4), (2, 1, 3, 2), (0,), (3, 0)]


def whole(shape: Sequence[int], *, first: float = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of distinct values."""
    return torch.arange(first, first + math.prod(shape)).to(dtype).view(tuple(shape))


def assemble(held: Sequence[LocalBoxes]) -> torch.Tensor:
    """Return the whole tensor, from all ranks' boxes; what no rank holds is zero."""
    result = torch.zeros(held[0].shape, dtype=held[0].dtype)
    for boxes in held:
        for offsets, tensor in boxes.boxes:
            result[tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))] = tensor
    return result


def partition(tensor: torch.Tensor, ranks: int, *, blank: bool = False) -> list[LocalBoxes]:
    """Return ranks' even ranges of a flattened tensor, as ZeRO partitions it: the last ones are short, or empty."""
    flat = tensor.reshape(-1).clone()
    length = -(-len(flat) // ranks)
    parts = [flat[rank * length : (rank + 1) * length] for rank in range(ranks)]
    return [
        LocalBoxes.from_flat(tensor.shape, rank * length, torch.zeros_like(part) if blank else part)
        for rank, part in enumerate(parts)
    ]


# ---- ranges of flattened tensors


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_range_of_a_flattened_tensor(shape: tuple[int, ...]) -> None:
    """Every range becomes few boxes, which are views: writing into the flat memory writes into them."""
    tensor = whole(shape)
    elements = tensor.numel()
    for start, stop in itertools.combinations_with_replacement(range(elements + 1), 2):
        flat = tensor.reshape(-1)[start:stop].clone()
        held = LocalBoxes.from_flat(shape, start, flat)
        if elements:
            assert len(held.boxes) <= min(max(1, 2 * len(shape) - 1), stop - start)
            assert sum(box.numel() for _, box in held.boxes) == stop - start
        assert (held.shape, held.dtype) == (tensor.shape, torch.float32)
        flat += 100
        expected = torch.zeros(elements)
        expected[start:stop] = flat
        assert torch.equal(assemble([held]).reshape(-1), expected)


def test_a_range_that_is_no_range() -> None:
    """Padding and negative numbers are refused; an empty partition may begin anywhere."""
    for start, length in ((5, 8), (-1, 2), (12, 1)):
        with pytest.raises(InvalidArgumentError, match="padding") as caught:
            LocalBoxes.from_flat((3, 4), start, torch.ones(length))
        assert caught.value.details["elements"] == 12
    with pytest.raises(InvalidArgumentError, match="one dimension"):
        LocalBoxes.from_flat((3, 4), 0, torch.ones(3, 4))
    with pytest.raises(InvalidArgumentError, match="plain strided"):
        LocalBoxes.from_flat((3, 4), 0, torch.ones(4, device="meta"))
    assert LocalBoxes.from_flat((3, 4), 90, torch.ones(0)).boxes == ()


# ---- what is refused

FOUR = torch.ones(2, 2)

REFUSED: dict[str, tuple[Callable[[], LocalBoxes], str, str]] = {
    "another dtype than declared": (
        lambda: LocalBoxes((4, 4), [((2, 0), FOUR)], dtype=torch.bfloat16),
        "another dtype",
        "(2, 0)",
    ),
    "two dtypes": (lambda: LocalBoxes((4, 4), [((0, 0), FOUR), ((2, 0), FOUR.half())]), "another dtype", "(2, 0)"),
    "outside": (lambda: LocalBoxes((4, 4), [((0, 0), FOUR), ((3, 0), FOUR)]), "outside", "(3, 0)"),
    "before the first": (lambda: LocalBoxes((4, 4), [((0, -1), FOUR)]), "outside", "(0, -1)"),
    "empty and outside": (lambda: LocalBoxes((4, 4), [((5, 0), torch.ones(0, 4))]), "outside", "(5, 0)"),
    "flat": (lambda: LocalBoxes((4, 4), [((0, 0), torch.ones(4))]), "from_flat", "(0, 0)"),
    "fewer offsets": (lambda: LocalBoxes((4, 4), [((1,), FOUR)]), "number of dimensions", "(1,)"),
    "overlapping": (lambda: LocalBoxes((4, 4), [((2, 2), FOUR), ((0, 0), FOUR), ((1, 1), FOUR)]), "overlap", "(0, 0)"),
    "twice": (lambda: LocalBoxes((4, 4), [((0, 0), FOUR), ((0, 0), FOUR.clone())]), "overlap", "(0, 0)"),
    "one number twice": (lambda: LocalBoxes((), [((), torch.ones(())), ((), torch.ones(()))]), "overlap", "()"),
    "sparse": (lambda: LocalBoxes((2, 2), [((0, 0), FOUR.to_sparse())]), "plain strided", "(0, 0)"),
    "without memory": (lambda: LocalBoxes((2, 2), [((0, 0), FOUR.to("meta"))]), "plain strided", "(0, 0)"),
    "nested": (lambda: LocalBoxes((2, 2), [((0, 0), LocalBoxes((2, 2), [((0, 0), FOUR)]))]), "plain strided", "(0, 0)"),
    "no tensor": (lambda: LocalBoxes((2, 2), [((0, 0), [1])]), "plain strided", "(0, 0)"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_box_is_named(case: str) -> None:
    """The error names the box by its offsets, and the shape of the tensor."""
    make, message, offsets = REFUSED[case]
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        make()
    assert caught.value.details["offsets"] == offsets
    assert "shape" in caught.value.details


def test_what_is_no_tensor() -> None:
    """Neither a box nor a dtype, and a negative size."""
    with pytest.raises(InvalidArgumentError, match="dtype="):
        LocalBoxes((4, 4))
    with pytest.raises(InvalidArgumentError, match="negative"):
        LocalBoxes((4, -4), dtype=torch.float32)


def test_overlaps_are_found_in_any_layout() -> None:
    """Grids of many boxes are accepted in any order; with one box a row longer or shifted, they are refused."""
    for shape, parts in (((12,), (5,)), ((6, 6), (3, 2)), ((4, 40), (1, 20)), ((4, 4, 4), (2, 2, 4))):
        cells = [(offsets, torch.zeros(sizes)) for offsets, sizes in grid(shape, parts)]
        cells = [cell for cell in cells if cell[1].numel()]
        assert len(LocalBoxes(shape, cells[::-1]).boxes) == len(cells)
        offsets, tensor = cells[-1]
        for dimension, offset in enumerate(offsets):
            if offset:
                moved = tuple(o - (d == dimension) for d, o in enumerate(offsets))
                with pytest.raises(InvalidArgumentError, match="overlap"):
                    LocalBoxes(shape, [*cells[:-1], (moved, tensor)])


# ---- an instance


def test_memory_is_the_callers() -> None:
    """Boxes are views, also of parameters, that need no gradient; empty ones are left out."""
    parameter = nn.Parameter(torch.zeros(4, 2))
    boxes = LocalBoxes((4, 4), [((0, 2), parameter), ((4, 0), torch.ones(0, 4))])
    ((offsets, tensor),) = boxes.boxes
    assert offsets == (0, 2)
    assert tensor.data_ptr() == parameter.data_ptr()
    assert not tensor.requires_grad
    assert (boxes.shape, boxes.dtype, boxes.device) == ((4, 4), torch.float32, torch.device("cpu"))
    assert repr(boxes) == "LocalBoxes(shape=(4, 4), dtype=torch.float32, offsets and sizes: [((0, 2), (4, 2))])"


def test_there_are_no_elements_to_compute_with() -> None:
    """Operations are refused, and so is pickling; a deep copy has memory of its own, shared as before."""
    flat = torch.arange(8.0)
    boxes = LocalBoxes.from_flat((2, 4), 0, flat)
    for operation in (lambda: boxes + 1, boxes.clone, lambda: boxes[0], lambda: torch.equal(boxes, boxes)):
        with pytest.raises(InvalidArgumentError, match="no elements of its own"):
            operation()
    with pytest.raises(InvalidArgumentError, match="every rank holds other parts"):
        torch.save(boxes, io.BytesIO())
    with pytest.raises(InvalidArgumentError, match="does not hold"):
        boxes.__get_tensor_shard__(MetadataIndex("w", torch.Size([1, 1])))
    copied, same = copy.deepcopy((boxes, flat))
    flat.zero_()
    assert torch.equal(assemble([copied]), torch.arange(8.0).view(2, 4))
    assert copied.boxes[0][1].untyped_storage().data_ptr() == same.untyped_storage().data_ptr()


def test_between_processes_of_a_rank() -> None:
    """`dcp.async_save` in a process is refused."""
    with pytest.raises(InvalidArgumentError, match="PROCESS"):
        ForkingPickler.dumps(LocalBoxes.from_flat((3, 4), 2, torch.arange(8.0)))


# ---- saves and loads


def test_of_one_process() -> None:
    """In the background and with `wait=True`, in dicts and lists; restored into other boxes, and loaded whole."""
    store = MemoryStore()
    flat = torch.arange(24.0)
    memory = torch.zeros(2, 3, 4)
    state: State = {
        "model": [{"w": LocalBoxes.from_flat((2, 3, 4), 0, flat)}],
        "scale": LocalBoxes((), [((), flat[3])]),
    }
    template: State = {
        "model": [{"w": LocalBoxes((2, 3, 4), [((n, 0, 0), memory[n : n + 1]) for n in (0, 1)])}],
        "scale": LocalBoxes.from_flat((), 0, torch.zeros(1)),
    }
    with CheckpointManager(store) as checkpoints:
        for step, wait in ((1, True), (2, False)):
            flat.copy_(torch.arange(24.0) * step)
            checkpoints.save(step, state, wait=wait)
            flat.zero_()
            before = template["model"][0]["w"]
            assert checkpoints.restore(template) == step
            assert template["model"][0]["w"] is before
            expected = torch.arange(24.0).view(2, 3, 4) * step
            assert torch.equal(memory, expected)
            assert torch.equal(assemble([template["scale"]]), torch.tensor(3.0 * step))
            assert torch.equal(load(store, step=step)["model"][0]["w"], expected)


def test_what_did_not_change_is_not_sent_again() -> None:
    """A background save of other LocalBoxes of the same memory sends what changed; thinning leaves the model."""
    store, flat, moments = RecordingStore(MemoryStore()), torch.arange(1000.0), torch.zeros(1000)
    sent = []
    with CheckpointManager(store, retention=Retention(keep_optimizer_last=1)) as checkpoints:
        for step in (1, 2, 3):
            store.clear()
            moments[500:] = step
            state = {
                "model": {"w": LocalBoxes.from_flat((10, 100), 0, flat)},
                "optim": {
                    "w": LocalBoxes(
                        (10, 100), [((0, 0), moments[:500].view(5, 100)), ((5, 0), moments[500:].view(5, 100))]
                    )
                },
            }
            checkpoints.save(step, state)
            checkpoints.wait()
            sent.append(sum(one.size_bytes for one in store.requests if one.verb == "put" and "shards/" in one.key))
    assert sent[0] > 8000
    assert all(2000 <= size < 3000 for size in sent[1:])
    assert load(store, step=1).keys() == {"model"}
    newest = load(store)
    assert torch.equal(newest["model"]["w"], flat.view(10, 100))
    assert torch.equal(newest["optim"]["w"], moments.view(10, 100))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ranks", [(3, 2), (2, 5), (1, 3), (4, 1)], ids=str)
def test_flat_partitions_at_any_world_size(shape: tuple[int, ...], ranks: tuple[int, int]) -> None:
    """`dcp.save` and `dcp.load` by torch's planner; tensors smaller than the number of ranks, and without elements."""
    url, (saving, loading) = f"memory://boxes-{len(shape)}-{math.prod(shape)}-{ranks[0]}-{ranks[1]}", ranks
    tensor = whole(shape)
    saved = [{"model": {"w": part}} for part in partition(tensor, saving)]
    save_as_ranks(saved, lambda: RemoteWriter(url))
    assert torch.equal(load(url)["model"]["w"], tensor)
    loaded = [{"model": {"w": part}} for part in partition(tensor, loading, blank=True)]
    load_as_ranks(loaded, lambda: RemoteReader(url))
    assert torch.equal(assemble([state["model"]["w"] for state in loaded]), tensor)
    plain = [{"model": {"w": torch.zeros(shape)}}]
    load_as_ranks(plain, lambda: RemoteReader(url))
    assert torch.equal(plain[0]["model"]["w"], tensor)


def test_boxes_that_several_ranks_hold() -> None:
    """Replicas are stored once; a dtype is converted, and memory that is not contiguous is filled."""
    url, tensor = "memory://replicated-boxes", whole((6, 5))
    rows = [LocalBoxes((6, 5), [((3 * (rank % 2), 0), tensor[3 * (rank % 2) :][:3])]) for rank in range(4)]
    save_as_ranks([{"w": part, "n": LocalBoxes((), [((), tensor[0, 0])])} for part in rows], lambda: RemoteWriter(url))
    memory = torch.zeros(5, 6, dtype=torch.float64)
    columns = LocalBoxes((6, 5), [((0, n), memory[n : n + 1].t()) for n in range(5)])
    load_as_ranks([{"w": columns}], lambda: RemoteReader(url))
    assert torch.equal(memory, tensor.t().double())


@pytest.mark.parametrize("case", ["a gap", "overlapping", "held by no rank"])
def test_boxes_that_make_no_tensor(case: str) -> None:
    """The save is refused, and commits nothing: with torch's plans, and with those of a manager."""
    held: dict[str, list[LocalBoxes]] = {
        "a gap": [LocalBoxes((4,), [((0,), torch.ones(1))]), LocalBoxes((4,), [((2,), torch.ones(2))])],
        "overlapping": [LocalBoxes((4,), [((0,), torch.ones(3))]), LocalBoxes((4,), [((2,), torch.ones(2))])],
        "held by no rank": [LocalBoxes((4,), dtype=torch.float32)] * 2,
    }
    url = f"memory://no-tensor-{case.replace(' ', '-')}"
    states: list[State] = [{"w": boxes, "step": 1, "none": {}} for boxes in held[case]]
    with pytest.raises(ValueError, match=r"volume|overlap|No rank holds"):
        save_as_ranks(states, lambda: RemoteWriter(url))
    with pytest.raises(FileNotFoundError):
        load(url)
    if case != "overlapping":  # one rank alone holds no overlapping boxes
        for wait in (True, False):
            with (
                pytest.raises(InvalidArgumentError, match=r"in no chunk|No rank holds") as caught,
                CheckpointManager(MemoryStore()) as checkpoints,
            ):
                checkpoints.save(1, states[0], wait=wait)
            assert caught.value.details["tensor"] == "w"


@pytest.mark.parametrize("wrap", [lambda boxes: (boxes,), PerRank], ids=["in a tuple", "in PerRank"])
@pytest.mark.parametrize("allow_pickle", [True, False])
def test_inside_an_object(wrap: Callable[[LocalBoxes], Any], allow_pickle: bool) -> None:
    """Refused, also with `allow_pickle`: all ranks would load the boxes of one."""
    state = {"w": wrap(LocalBoxes((4,), [((0,), torch.ones(4))]))}
    for wait in (True, False):
        with (
            pytest.raises(UnsafeObjectError, match=r"every rank holds other parts") as caught,
            CheckpointManager(MemoryStore(), allow_pickle=allow_pickle) as checkpoints,
        ):
            checkpoints.save(1, state, wait=wait)
        assert "LocalBoxes" in str(caught.value.details["types"])


def test_async_save_by_torchs_stager() -> None:
    """`dcp.async_save` copies the boxes with torch's own stager."""
    url, flat = "memory://staged-boxes", torch.arange(12.0)
    state = {"w": LocalBoxes.from_flat((3, 4), 0, flat), "flat": flat}
    future = dcp.async_save(state, storage_writer=RemoteWriter(url), no_dist=True)
    flat.zero_()
    future.result()  # type: ignore[union-attr]  # a future, since staging is not asynchronous
    assert torch.equal(load(url)["w"], torch.arange(12.0).view(3, 4))


def test_boxes_and_their_sizes_are_those_of_the_plan() -> None:
    """One item per box, none for a rank without; the properties do not depend on the memory."""
    held = LocalBoxes.from_flat((2, 3, 4), 5, nn.Parameter(torch.arange(14.0)))
    items: list[Any] = held.__create_write_items__("w", held)
    boxes = [Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)) for item in items]
    assert sum(box.elements for box in boxes) == 14
    assert [item.index.offset for item in items] == [torch.Size(box.offsets) for box in boxes]
    assert {item.tensor_data.properties.requires_grad for item in items} == {False}
    none = LocalBoxes((2, 3, 4), dtype=torch.float32)
    assert none.__create_write_items__("w", none) == []
