"""Staging: a background save stores what `wait=True` stores, as of the call of `save`."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import gc
import io
import itertools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.weak import WeakIdRef

from dcp_remote import CheckpointManager, LocalBoxes, PerRank, load
from dcp_remote.errors import InvalidArgumentError, UnsafeObjectError
from dcp_remote.saving.staging import Stager
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore

MiB = 1024 * 1024


def saved_twice(value: Any, **options: Any) -> tuple[Any, Any]:
    """Save a value in the background and with `wait=True`; return both as loaded."""
    store = MemoryStore()
    with CheckpointManager(store, dedup=False, **options) as checkpoints:
        checkpoints.save(1, {"x": value})
        checkpoints.save(2, {"x": value}, wait=True)
    return tuple(load(store, step=step, **options)["x"] for step in (1, 2))


def assert_same(found: Any, expected: Any) -> None:
    """Check that two values have one type and are equal; tensors in all their properties."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.layout) == (expected.dtype, expected.layout)
        assert (found.requires_grad, found.is_quantized) == (expected.requires_grad, expected.is_quantized)
        assert all(map(torch.equal, _parts(found), _parts(expected)))
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return plain tensors that describe a tensor completely."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    return [tensor if tensor.layout == torch.strided else tensor.to_dense()]


# ---- tensors that are more than their memory


def complexes() -> torch.Tensor:
    """Return distinct complex values, none of which is its own conjugate."""
    return torch.complex(torch.arange(1.0, 7.0), torch.arange(7.0, 13.0)).view(3, 2)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "conjugated": lambda: complexes().conj(),
    "negated": lambda: complexes().conj().imag,
    "conjugated and transposed": lambda: complexes().mH,
    "of a negated memory": lambda: cast("Any", torch)._neg_view(complexes().conj()),
    "a view": lambda: torch.arange(12.0).view(3, 4)[:, 1:3],
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "empty": lambda: torch.empty(0, 3),
    "not a leaf": lambda: torch.ones(3, requires_grad=True) * 2,
    "sparse COO": lambda: torch.eye(3).to_sparse(),
    "sparse COO, not coalesced": lambda: torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2), (3,)),
    "sparse CSR": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(5), 0.1, 3, torch.quint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.rand(4, 2), torch.arange(1.0, 5.0), torch.zeros(4, dtype=torch.int64), 0, torch.qint8
    ),
    "quantized by channel, with zero points between": lambda: torch.quantize_per_channel(
        torch.rand(4, 2), torch.arange(1.0, 5.0), torch.zeros(4), 0, torch.quint8
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:.*quantize.*", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:.*TypedStorage.*:UserWarning")
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_stored_as_when_it_is_waited_for(name: str) -> None:
    """A staged tensor is stored like one that is waited for: by itself, in a tuple, in nested lists and dicts."""
    tensor = TENSORS[name]()
    if tensor.is_nested:
        # torch's planner refuses a nested tensor outside an object.
        found, expected = saved_twice((tensor,), allow_pickle=True)
        assert_same(found[0], expected[0])
        return
    for value in (tensor, (tensor,)):
        found, expected = saved_twice(value, allow_pickle=True)
        unpacked = (found, expected) if value is tensor else (found[0], expected[0])
        assert_same(*unpacked)
        if tensor.layout == torch.strided and not tensor.is_quantized:
            assert torch.equal(unpacked[0], tensor.detach().resolve_conj().resolve_neg())
    found, expected = saved_twice([{"a": [tensor]}], allow_pickle=True)
    assert_same(found[0]["a"][0], expected[0]["a"][0])


def test_memory_that_is_shared_stays_shared() -> None:
    """Tied tensors, a conjugated view, an imaginary part, and a tensor inside an object share one memory."""
    whole = complexes()
    state = {"a": whole, "tied": whole, "b": [whole.conj(), whole.conj().imag], "c": (whole[1:],), "d": whole.detach()}
    staged = Stager().stage(state)
    assert staged["a"] is staged["tied"]
    views = [staged["a"], *staged["b"], *staged["c"], staged["d"]]
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    assert staged["a"].untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    assert (staged["b"][0].is_conj(), staged["b"][1].is_neg()) == (True, True)


def test_every_type_of_elements() -> None:
    """Every dtype is copied bit for bit."""
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}:
        raw = torch.arange(32, dtype=torch.uint8)
        try:
            tensor = raw.view(dtype)
        except RuntimeError:
            continue
        if not tensor.is_quantized:
            staged = Stager().stage({"x": tensor})["x"]
            assert staged.dtype == dtype
            assert torch.equal(staged.view(torch.uint8), raw)


# ---- what cannot be copied


def test_what_cannot_be_copied_is_named() -> None:
    """The error names the key, as with `wait=True`; no shard was sent, and the next save succeeds."""
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    refused: list[tuple[Any, type[Exception], str]] = [
        (torch.empty(3, device="meta"), InvalidArgumentError, "tensor='model.v'"),
        (freed, InvalidArgumentError, "tensor='model.v'"),
        (threading.Lock(), UnsafeObjectError, "key='model.v'"),
        ((each for each in [1]), UnsafeObjectError, "key='model.v'"),
        (open(__file__), UnsafeObjectError, "key='model.v'"),  # noqa: SIM115  # closed below
    ]
    store = RecordingStore(MemoryStore())
    with refused[-1][0], CheckpointManager(store) as checkpoints:
        for value, error, named in refused:
            state = {"model": {"v": value}}
            for wait in (False, True):
                with pytest.raises(error, match=named):
                    checkpoints.save(1, state, wait=wait)
        assert not [key for verb, key in store.calls if key.startswith("shards/")]
        with pytest.raises(UnsafeObjectError, match=r"key='model.v.0' types='.*lock'"):
            checkpoints.save(1, {"model": {"v": [threading.Lock()]}})
        checkpoints.save(1, {"x": torch.ones(3)})
    assert torch.equal(load(store)["x"], torch.ones(3))


# ---- buffers


@pytest.mark.parametrize("elements", [2, 8])
def test_a_tensor_that_was_resized_in_place(elements: int) -> None:
    """Smaller or larger: its next two copies are whole, and other tensors are unaffected."""
    store = MemoryStore()
    resized, other = torch.arange(4.0), torch.zeros(3)
    with CheckpointManager(store) as checkpoints:
        for step in (1, 2, 3):
            if step == 2:
                resized.untyped_storage().resize_(4 * elements)
                resized.set_(resized.untyped_storage(), 0, (elements,), (1,))
            resized.copy_(torch.arange(float(len(resized))) + step)
            other.fill_(step)
            expected = resized.clone()
            checkpoints.save(step, {"resized": resized, "other": other})
            checkpoints.wait()
            found = load(store)
            assert torch.equal(found["resized"], expected)
            assert torch.equal(found["other"], torch.full((3,), float(step)))


def test_a_tensor_without_data_in_an_object() -> None:
    """A meta tensor is stored as its shape."""
    found, expected = saved_twice((torch.empty(3, device="meta"),))
    assert [(each[0].shape, each[0].device) for each in (found, expected)] == [((3,), torch.device("meta"))] * 2


def test_memory_that_was_freed_and_came_back() -> None:
    """FSDP frees memory and allocates it again: a tensor is refused meanwhile, and saved again afterwards."""
    store = MemoryStore()
    tensor = torch.arange(4.0)
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, {"x": tensor})
        tensor.untyped_storage().resize_(0)
        with pytest.raises(InvalidArgumentError, match="tensor='x'"):
            checkpoints.save(2, {"x": tensor})
        tensor.untyped_storage().resize_(16)
        tensor.fill_(7)
        checkpoints.save(3, {"x": tensor})
    assert torch.equal(load(store)["x"], torch.full((4,), 7.0))


def peak_bytes(act: Callable[[], object]) -> int:
    """Return the peak of the memory of CPU tensors during a call, in bytes above the start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        act()
    now_bytes = most_bytes = 0
    events = cast("Any", profiler.profiler).kineto_results.experimental_event_tree()
    flat = list(_flat(events))
    for event in sorted(flat, key=lambda event: event.start_time_ns):
        if event.name == "[memory]":
            now_bytes += event.extra_fields.alloc_size
            most_bytes = max(most_bytes, now_bytes)
    return most_bytes


def _flat(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flat(event.children)


@pytest.mark.parametrize("kept", [False, True])
def test_one_copy_at_a_time_of_fresh_tensors(kept: bool) -> None:
    """Each save has new tensors; the earlier ones are freed, or kept alive. Bytes are counted."""
    stager = Stager()
    states: list[dict[str, Any]] = []

    def stage() -> None:
        for number in range(4):
            if not kept:
                states.clear()
            states.append({"x": torch.full((MiB,), float(number)), "y": {"z": torch.full((MiB,), 1.0)}})
            staged = stager.stage(states[-1])
            assert staged["x"][5] == number
            del staged

    originals = 4 if kept else 1
    size_bytes = 8 * MiB
    assert originals * size_bytes <= peak_bytes(stage) - size_bytes < (originals + 0.2) * size_bytes


def test_buffers_are_used_again() -> None:
    """The same tensors reuse their buffers, beside small new ones, and after a smaller state was saved."""
    stager = Stager()
    large, small = torch.zeros(1000), torch.zeros(500)
    kept = []
    buffers = set()
    for number in range(5):
        kept.append(torch.full((10,), float(number)))
        large.fill_(number)
        staged = stager.stage({"large": large, "small": small, "number": kept[-1]})
        assert torch.equal(staged["large"], large)
        buffers.add(staged["large"].data_ptr())
        assert torch.equal(stager.stage({"small": small})["small"], small)
    assert len(buffers) == 1


def test_boxes_of_a_flat_buffer() -> None:
    """The buffer is copied once, into memory that the next save uses again, beside a tensor that is tied to it."""
    flat = torch.zeros(MiB)
    ends = [0, 5, 1000, 1000, 70_007, MiB]
    stager = Stager()
    staged: dict[str, Any] = {}

    def stage() -> None:
        held = [LocalBoxes.from_flat((4, MiB // 8, 2), a, flat[a:b]) for a, b in itertools.pairwise(ends)]
        staged.update(stager.stage({"optim": held, "tied": flat[3:]}))

    allocated, buffers = [], set()
    for number in range(3):
        flat.copy_(torch.arange(MiB) + number)
        staged.clear()
        allocated.append(peak_bytes(stage))
        flat.zero_()
        views = [box for boxes in staged["optim"] for _, box in boxes.boxes]
        assert {type(boxes) for boxes in staged["optim"]} == {LocalBoxes}
        assert len({view.untyped_storage().data_ptr() for view in [*views, staged["tied"]]}) == 1
        assert torch.equal(torch.cat([view.reshape(-1) for view in views]), torch.arange(float(MiB)) + number)
        buffers.add(staged["tied"].data_ptr())
    assert flat.nbytes <= allocated[0] < 1.01 * flat.nbytes
    assert max(allocated[1:]) < 1024
    assert len(buffers) == 1


def test_boxes_without_memory_are_named() -> None:
    """Memory that was freed after the boxes were made, as FSDP and ZeRO do."""
    flat = torch.zeros(6)
    held = LocalBoxes.from_flat((2, 3), 0, flat)
    flat.untyped_storage().resize_(0)
    for wait in (False, True):
        with (
            pytest.raises(InvalidArgumentError, match=r"no data to save.*tensor='optim\.w'"),
            CheckpointManager(MemoryStore()) as checkpoints,
        ):
            checkpoints.save(1, {"optim": {"w": held}}, wait=wait)


# ---- objects


@dataclasses.dataclass
class Progress:
    """Class of a user."""

    seen: list[int]
    mean: torch.Tensor


class Pair(NamedTuple):
    """Tuple that torch's planner does not take apart."""

    tensor: torch.Tensor
    numbers: list[int]


def test_objects_that_are_changed_afterwards() -> None:
    """All objects are changed after staging; the copies keep the earlier values."""
    tensor = torch.zeros(3)
    state: dict[str, Any] = {
        "array": np.zeros(3),
        "objects": np.array([[1], tensor], dtype=object),
        "bytes": bytearray(b"abc"),
        "list": [1, [2, {"a": [3]}]],
        "dataclass": Progress([1], torch.zeros(2)),
        "pair": Pair(torch.zeros(2), [1]),
        "namespace": argparse.Namespace(a=[1]),
        "ordered": collections.OrderedDict(b=[1], a=2),
        "default": collections.defaultdict(list, a=[1]),
        "deque": collections.deque([[1]]),
        "set": {1},
        "file": io.BytesIO(b"abc"),
        "numbers": array.array("d", [1.0]),
        "generator": torch.Generator().manual_seed(3),
        "tuple": ([1], tensor),
    }
    before = torch.rand(2, generator=torch.Generator().manual_seed(3))
    staged = Stager().stage(state)
    state["array"][:] = 1
    state["objects"][0].append(2)
    tensor.fill_(9)
    state["bytes"][0] = 0
    state["list"][1][1]["a"].append(4)
    state["dataclass"].seen.append(2)
    state["dataclass"].mean.fill_(9)
    state["pair"].tensor.fill_(9)
    state["pair"].numbers.append(2)
    state["namespace"].a.append(2)
    state["ordered"]["b"].append(2)
    state["default"]["a"].append(2)
    state["deque"][0].append(2)
    state["set"].add(2)
    state["file"].write(b"xyz")
    state["numbers"][0] = 2.0
    torch.rand(5, generator=state["generator"])
    state["tuple"][0].append(2)
    assert staged["array"].tolist() == [0, 0, 0]
    assert staged["objects"][0] == [1]
    assert staged["objects"][1].tolist() == [0, 0, 0]
    assert staged["bytes"] == b"abc"
    assert staged["list"] == [1, [2, {"a": [3]}]]
    assert staged["dataclass"].seen == [1]
    assert staged["dataclass"].mean.tolist() == [0, 0]
    assert type(staged["pair"]) is Pair
    assert (staged["pair"].tensor.tolist(), staged["pair"].numbers) == ([0, 0], [1])
    assert staged["namespace"] == argparse.Namespace(a=[1])
    assert staged["ordered"] == collections.OrderedDict(b=[1], a=2)
    assert type(staged["ordered"]) is collections.OrderedDict
    assert (type(staged["default"]), staged["default"]["b"]) == (collections.defaultdict, [])
    assert staged["default"]["a"] == [1]
    assert list(staged["deque"]) == [[1]]
    assert staged["set"] == {1}
    assert staged["file"].getvalue() == b"abc"
    assert staged["numbers"].tolist() == [1.0]
    assert torch.equal(torch.rand(2, generator=staged["generator"]), before)
    assert staged["tuple"][0] == [1]
    assert staged["tuple"][1].tolist() == [0, 0, 0]


def test_what_is_one_object_stays_one_object() -> None:
    """Objects on two paths, and objects that contain themselves."""
    shared: list[Any] = [1]
    itself: list[Any] = [shared]
    itself.append((itself,))
    pair: tuple[list[Any]] = ([],)
    pair[0].append(pair)
    tensor = torch.zeros(3, requires_grad=True) * 1
    state = {"a": shared, "b": {"c": shared}, "d": itself, "e": Progress(shared, tensor[1:]), "f": tensor, "g": pair}
    staged = Stager().stage(state)
    assert staged["a"] is staged["b"]["c"] is staged["d"][0] is staged["e"].seen
    assert staged["a"] is not shared
    assert staged["d"][1][0] is staged["d"]
    assert staged["g"][0][0] is staged["g"]
    assert staged["g"] is not pair
    assert staged["e"].mean.untyped_storage() is staged["f"].untyped_storage()


class Uncopied:
    """Stand-in for a module that a parameter refers to; must not be copied."""

    def __deepcopy__(self, memo: object) -> Uncopied:
        raise AssertionError("copied")


def test_attributes_of_a_parameter_are_not_copied() -> None:
    """A parameter's module, hooks and gradient are not copied; inside an object, it keeps its attributes uncopied."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.module = Uncopied()  # type: ignore[attr-defined]
    parameter.register_hook(lambda gradient: gradient)
    parameter.grad = torch.ones(2)
    staged = Stager().stage({"by itself": parameter})["by itself"]
    assert not vars(staged)
    assert staged.grad is None
    inside: Any
    (inside,) = Stager().stage({"object": (parameter,)})["object"]
    assert inside.module is cast("Any", parameter).module
    assert type(inside) is nn.Parameter


def test_values_of_one_rank() -> None:
    """A parameter inside `PerRank` stays a parameter, as with `wait=True`; later changes are not saved."""
    store = MemoryStore()
    value = {"p": nn.Parameter(torch.ones(2)), "n": [1], "free": torch.ones(2, requires_grad=True)}
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, {"own": PerRank(value)})
        cast("Any", value["n"]).append(2)
        own = PerRank[Any](None)
        checkpoints.restore({"own": own})
    assert own.value["n"] == [1]
    assert type(own.value["p"]) is nn.Parameter
    assert own.value["free"].requires_grad


# ---- subclasses


class Scaled(torch.Tensor):
    """Tensor subclass with its own memory, and attributes."""

    scale: torch.Tensor
    module: Uncopied


def test_subclasses() -> None:
    """A subclass with its own memory, whose tensors are copied but not its module; and one made of two tensors."""
    scaled = torch.zeros(3).as_subclass(Scaled)
    scaled.scale, scaled.module = torch.zeros(1), Uncopied()
    two = TwoTensor(torch.zeros(2), torch.ones(2))
    staged = Stager().stage({"scaled": scaled, "two": two})
    for tensor in (scaled, scaled.scale, two.a, two.b):
        tensor.fill_(9)
    assert type(staged["scaled"]) is Scaled
    assert (staged["scaled"].tolist(), staged["scaled"].scale.tolist()) == ([0, 0, 0], [0])
    assert staged["scaled"].module is scaled.module
    assert type(staged["two"]) is TwoTensor
    assert (staged["two"].a.tolist(), staged["two"].b.tolist()) == ([0, 0], [1, 1])


@contextmanager
def one_rank() -> Iterator[None]:
    """Initialize a process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed", "ignore::FutureWarning")
def test_distributed_tensors() -> None:
    """`DTensor` and `ShardedTensor`: conjugated, tied to a plain tensor, and on the meta device."""
    with one_rank():
        mesh = DeviceMesh("cpu", [0])
        whole = complexes()

        def distributed(local: torch.Tensor) -> DTensor:
            return DTensor.from_local(local, mesh, [Replicate()], run_check=False)

        def sharded(local: torch.Tensor) -> ShardedTensor:
            shard = LocalShard.from_tensor_and_offsets(local, [0] * local.dim(), 0)
            return init_from_local_shards([shard], *local.shape)

        parameter = nn.Parameter(distributed(torch.ones(2)))
        first = distributed(whole.conj())
        shards = sharded(whole.detach())
        stager = Stager()
        staged = stager.stage({"d": first, "s": shards, "plain": whole, "p": parameter})
        expected = whole.conj().resolve_conj()
        whole.fill_(0)
        assert type(staged["d"]) is DTensor
        assert (staged["d"].placements, staged["d"].device_mesh) == (first.placements, mesh)
        assert torch.equal(staged["d"].to_local().resolve_conj(), expected)
        assert type(staged["s"]) is ShardedTensor
        assert staged["s"].metadata() == shards.metadata()
        (part,) = staged["s"].local_shards()
        assert torch.equal(part.tensor, expected.conj().resolve_conj())
        assert part.metadata == shards.local_shards()[0].metadata
        assert staged["p"].requires_grad
        memories = {id(each.untyped_storage()) for each in (staged["d"].to_local(), part.tensor, staged["plain"])}
        assert len(memories) == 1
        with pytest.raises(InvalidArgumentError, match=r"tensor='model\.d'"):
            stager.stage({"model": {"d": distributed(torch.empty(2, device="meta"))}})


def test_nothing_is_held_after_closing() -> None:
    """The buffers are freed; the state itself is never kept alive."""
    stager = Stager()
    tensor = torch.ones(3)
    staged: dict[str, Any] = stager.stage({"x": tensor, "y": types.SimpleNamespace(a=[torch.ones(3)])})
    original, buffer = (WeakIdRef(each.untyped_storage()) for each in (tensor, staged["x"]))
    del tensor
    gc.collect()
    assert original() is None
    del staged
    stager.close()
    gc.collect()
    assert buffer() is None
