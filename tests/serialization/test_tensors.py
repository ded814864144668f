"""Tests of tensors as bytes: which are stored as elements or as streams, and which are refused before any request."""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.testing._internal.two_tensor import TwoTensor

import dcp_remote.serialization
from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.common.geometry import Box
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, UnsafeObjectError
from dcp_remote.format.manifest import PICKLE, RAW, TORCH
from dcp_remote.serialization.tensors import (
    byte_view,
    choose_encoding,
    copy_into,
    decode_tensor,
    dtype_name,
    element_bytes,
    empty_tensor,
    narrow,
    needs_copy,
    tensor_from,
)
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.serialization.test_tags import same
from tests.support.strategies import DTYPES, LAYOUTS, blank, random_whole, same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # torch's own loading of quantized
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore(MemoryStore())


def failure(call: Callable[[], object]) -> BaseException:
    """Return what rank 0 raised, from torch's `CheckpointException`."""
    with pytest.raises(CheckpointException) as caught:
        call()
    return caught.value.failures[0][0]


# ---- elements


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_run_of_elements_is_the_bytes_of_numpy(dtype: torch.dtype, layout: str) -> None:
    """Compare all runs of a 2 x 3 x 2 tensor in any layout with numpy's bytes; only some layouts are copied."""
    whole = random_whole(dtype, (2, 3, 2), seed=4)
    tensor = whole.tensor(layout=layout)
    expected, item = whole.elements.tobytes(), dtype.itemsize
    for start in range(12):
        for stop in range(start + 1, 13):
            assert bytes(element_bytes(tensor, start, stop)) == expected[start * item : stop * item]
    assert needs_copy(tensor) == (layout in ("transposed", "strided"))


def test_a_contiguous_tensor_is_not_copied() -> None:
    """Write to the tensor and to the view: each shows the other's change."""
    tensor = torch.zeros(4, 4, dtype=torch.int32)
    view = element_bytes(tensor, 5, 7)
    tensor[1, 1] = 0x04030201
    assert bytes(view) == bytes([1, 2, 3, 4, 0, 0, 0, 0])
    byte_view(tensor)[:4] = bytes([7, 0, 0, 0])
    assert tensor[0, 0] == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_views_of_any_strides_of_single_elements(dtype: torch.dtype) -> None:
    """View tensors whose dimensions of one element have strides of any size, a number, and one without elements."""
    flat = torch.arange(24).to(dtype)
    for sizes, strides in [((4, 1, 6), (6, 7, 1)), ((1, 24), (99, 1)), ((24, 1), (1, 99)), ((), ()), ((0, 3), (3, 1))]:
        tensor = flat.as_strided(sizes, strides)
        expected = flat.view(torch.uint8).numpy().tobytes()[: tensor.nbytes]
        assert byte_view(tensor).tobytes() == expected
        assert byte_view(tensor).format == "B"


def test_the_view_of_a_tensor_keeps_it() -> None:
    """Delete the tensor, which has a gradient: the view still holds its memory."""
    tensor = torch.nn.Parameter(torch.full((3, 5), 2.0))
    view = byte_view(tensor)
    del tensor
    gc.collect()
    assert bytes(view) == np.full(15, 2, dtype=np.float32).tobytes()


@pytest.mark.parametrize("change", ["data", "set", "half", "resize"])
def test_the_memory_of_a_view_stays(change: str) -> None:
    """Give the tensor other memory while it is being sent; resizing is refused, as numpy demands."""
    tensor = torch.nn.Parameter(torch.full((1 << 20,), 3.0))
    view = element_bytes(tensor, 0, tensor.numel())
    match change:
        case "data":
            tensor.data = torch.zeros(1)
        case "set":
            with torch.no_grad():
                tensor.set_(torch.zeros(1))  # type: ignore[call-overload]  # the stubs do not know it
        case "half":
            torch.nn.ParameterList([tensor]).half()
        case "resize":
            with pytest.raises(RuntimeError, match="not resizable"):
                tensor.untyped_storage().resize_(0)
    assert bytes(view) == np.full(1 << 20, 3.0, dtype=np.float32).tobytes()


def test_the_view_of_a_tensor_subclass() -> None:
    """View a subclass that has memory, and one that has none, which torch refuses."""

    class Named(torch.Tensor):
        pass

    assert bytes(byte_view(torch.ones(2, dtype=torch.uint8).as_subclass(Named))) == b"\1\1"
    with pytest.raises((RuntimeError, TypeError)):
        byte_view(TwoTensor(torch.ones(2), torch.ones(2)))


def test_tensors_over_bytes_at_any_address() -> None:
    """Create tensors over buffers that are not aligned: copied, and equal."""
    data = bytearray(range(64))
    for start in range(9):
        found = tensor_from(memoryview(data)[start : start + 48], torch.float64, (2, 3))
        assert byte_view(found).tobytes() == bytes(data[start : start + 48])


def test_narrow_is_a_view_of_the_box() -> None:
    """Compare with slicing, also for a tensor without dimensions."""
    tensor = torch.arange(24).view(2, 3, 4)
    found = narrow(tensor, Box((1, 0, 2), (1, 3, 2)))
    assert torch.equal(found, tensor[1:2, :, 2:4])
    assert found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert narrow(torch.tensor(5), Box((), ())) == 5


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_copies_keep_every_bit(dtype: torch.dtype) -> None:
    """Copy random bytes, NaN included, into every layout, and into an empty tensor of ours."""
    whole = random_whole(dtype, (5, 3), seed=9)
    for layout in LAYOUTS:
        destination = blank(dtype, (5, 3), layout=layout)
        copy_into(destination, whole.tensor())
        assert same_bits(destination, whole.elements)
    fresh = empty_tensor(dtype, (5, 3))
    copy_into(fresh, whole.tensor(layout="strided"))
    assert same_bits(fresh, whole.elements)
    assert not fresh.is_quantized


# ---- streams


def kinds_of_tensors() -> dict[str, torch.Tensor]:
    """Return tensors whose elements are not their whole content."""
    dense = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0]])
    return {
        "coo": dense.to_sparse(),
        "coo, not coalesced": torch.sparse_coo_tensor(
            torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 3), check_invariants=True
        ),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": torch.ones(4, 4).to_sparse_bsr((2, 2)),
        "quantized": torch.quantize_per_tensor(dense, 0.5, 3, torch.quint8),
        "quantized by channel": torch.quantize_per_channel(
            dense, torch.tensor([0.5, 0.25]), torch.tensor([1, 2]), 0, torch.qint8
        ),
    }


def as_lists(tensor: torch.Tensor) -> list[Any]:
    """Return the whole content of a sparse or quantized tensor as lists."""
    if tensor.is_quantized:
        scale: list[Any] = (
            [tensor.q_scale(), tensor.q_zero_point()]
            if tensor.qscheme() == torch.per_tensor_affine
            else [tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist()]
        )
        return [str(tensor.dtype), tensor.int_repr().tolist(), *scale]
    if tensor.layout == torch.sparse_coo:
        return [tensor.shape, tensor._indices().tolist(), tensor._values().tolist(), tensor.is_coalesced()]
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    outer, inner = (
        (tensor.crow_indices(), tensor.col_indices()) if rows else (tensor.ccol_indices(), tensor.row_indices())
    )
    return [tensor.shape, outer.tolist(), inner.tolist(), tensor.values().tolist()]


@pytest.mark.parametrize("name", sorted(kinds_of_tensors()))
def test_sparse_and_quantized_tensors_come_back_as_they_are(store: RecordingStore, name: str) -> None:
    """Save as streams without pickle; load without a template, and into one."""
    tensor = kinds_of_tensors()[name]
    dcp.save({"t": tensor, "w": torch.ones(2)}, storage_writer=RemoteWriter(store))
    found = load(store)["t"]
    assert (found.dtype, found.layout, as_lists(found)) == (tensor.dtype, tensor.layout, as_lists(tensor))
    if not name.startswith("coo"):
        template = {"t": _emptied(tensor)}
        dcp.load(template, storage_reader=RemoteReader(store))
        assert as_lists(template["t"]) == as_lists(tensor)


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_quantized:
        return tensor.clone() * 0
    zeros = torch.zeros(tensor.shape)
    if tensor.qscheme() == torch.per_tensor_affine:
        return torch.quantize_per_tensor(zeros, 1.0, 0, tensor.dtype)
    return torch.quantize_per_channel(zeros, torch.ones(2), torch.zeros(2, dtype=torch.int64), 0, tensor.dtype)


def test_sparse_tensors_load_into_sparse_templates(store: RecordingStore) -> None:
    """Load into a template that has other entries than were saved."""
    tensor = kinds_of_tensors()["coo"]
    dcp.save({"t": tensor}, storage_writer=RemoteWriter(store))
    other = torch.sparse_coo_tensor(torch.tensor([[1], [1]]), torch.tensor([9.0]), (2, 3), check_invariants=True)
    template = {"t": other}
    dcp.load(template, storage_reader=RemoteReader(store))
    assert torch.equal(template["t"].to_dense(), tensor.to_dense())


class Tagged(torch.Tensor):
    """Subclass whose stream needs the class to load."""


def test_a_tensor_subclass_needs_pickle(store: RecordingStore) -> None:
    """Save and load with allow_pickle on both sides, on one side, on neither: only both succeed.

    A refused save leaves nothing in the store.
    """
    tensor = torch.arange(6.0).as_subclass(Tagged)
    error = failure(lambda: dcp.save({"a": torch.ones(3), "t": tensor}, storage_writer=RemoteWriter(store)))
    assert isinstance(error, UnsafeObjectError)
    assert error.details["key"] == "t"
    assert "Tagged" in str(error)
    assert list(store.list()) == []
    dcp.save({"t": tensor}, storage_writer=RemoteWriter(store, allow_pickle=True))
    with pytest.raises(UnsafeObjectError):
        load(store)
    found = load(store, allow_pickle=True)["t"]
    assert type(found) is Tagged
    template = {"t": torch.zeros(6)}
    assert isinstance(failure(lambda: dcp.load(template, storage_reader=RemoteReader(store))), UnsafeObjectError)
    dcp.load(template, storage_reader=RemoteReader(store, allow_pickle=True))
    assert template["t"].tolist() == tensor.tolist()


class AsPlain(torch.Tensor):
    """Subclass that pickles as the plain tensor of its elements."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def test_a_tensor_subclass_that_pickles_as_a_plain_tensor(store: RecordingStore) -> None:
    """Save small and large ones: always a stream, never JSON, and loaded as plain tensors."""
    for size in (3, 100_000):
        dcp.save({"x": torch.ones(size).as_subclass(AsPlain)}, storage_writer=RemoteWriter(store, overwrite=True))
        found = load(store)["x"]
        assert type(found) is torch.Tensor
        assert torch.equal(found, torch.ones(size))


def test_encodings() -> None:
    """Encode parameters and buffers (elements), sparse and quantized tensors (streams), and a subclass (pickle)."""
    for plain in (torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.ones(2)), torch.tensor(1)):
        assert choose_encoding("t", plain, allow_pickle=False) == (RAW, b"")
    for tensor in kinds_of_tensors().values():
        encoding, stream = choose_encoding("t", tensor, allow_pickle=False)
        assert encoding == TORCH
        dtype = dtype_name(tensor.dtype)
        found = decode_tensor(
            "t", encoding, memoryview(stream), dtype=dtype, sizes=tuple(tensor.shape), allow_pickle=False
        )
        assert as_lists(found) == as_lists(tensor)
    assert choose_encoding("t", torch.ones(1).as_subclass(Tagged), allow_pickle=True)[0] == PICKLE


def test_a_stream_that_holds_no_tensor_is_refused() -> None:
    """Decode streams of another value, shape or dtype, and truncated ones."""
    for value in ({"no": "tensor"}, torch.ones(3), torch.ones(2, dtype=torch.float64)):
        stream = io.BytesIO()
        torch.save(value, stream)
        with pytest.raises(CorruptCheckpointError, match="tensor"):
            decode_tensor("t", TORCH, stream.getbuffer(), dtype="float32", sizes=(2,), allow_pickle=False)
        with pytest.raises(CorruptCheckpointError):
            decode_tensor("t", TORCH, stream.getbuffer()[:-20], dtype="float32", sizes=(3,), allow_pickle=False)


def test_a_tensor_without_data_is_refused(store: RecordingStore) -> None:
    """Save tensors on the meta device and fake ones: named in the error, and nothing is left in the store."""
    with FakeTensorMode():
        fake = torch.ones(3)
    for tensor in (torch.ones(3, device="meta"), fake):
        error = failure(lambda: dcp.save({"t": tensor}, storage_writer=RemoteWriter(store)))  # noqa: B023  # called here
        assert isinstance(error, InvalidArgumentError)
        assert error.details["tensor"] == "t"
        assert list(store.list()) == []


# ---- objects


class Pickling(DefaultSavePlanner):
    """Planner of a user that resolves objects to `torch.save` streams, since it overrides this."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's name
        return super().transform_object(write_item, object)


def planners() -> list[DefaultSavePlanner]:
    return [DefaultSavePlanner(), DefaultSavePlanner(flatten_state_dict=False), Pickling()]


@pytest.mark.parametrize("number", range(len(planners())))
def test_an_unsafe_object_is_refused_before_anything_is_uploaded(store: RecordingStore, number: int) -> None:
    """Save a lock, a function, a class, a nested lambda: the error names key and type; no shard is put."""
    bad_values: list[tuple[object, str]] = [
        (threading.Lock(), "lock"),
        (failure, "failure"),
        (Tagged, "Tagged"),
        ({"deep": [1, {"er": lambda: 0}]}, "lambda"),
    ]
    for value, word in bad_values:
        store.clear()
        state = {"model": {"w": torch.ones(1000)}, "bad": {"key": value}}
        error = failure(
            lambda: dcp.save(
                state,  # noqa: B023  # called here
                storage_writer=RemoteWriter(store),
                planner=planners()[number],
            )
        )
        assert isinstance(error, UnsafeObjectError)
        assert str(error.details["key"]).startswith("bad")
        # A planner that pickles may fail before we see the object; then the pickler's message names the type.
        assert word in str(error) or "pickle" in str(error.details["cause"])
        assert [verb for verb, _ in store.calls] == ["get"]


def test_an_unsafe_object_with_pickle(store: RecordingStore) -> None:
    """Allow pickle in the writer: a reader that does not allow it raises, and runs no code."""
    dcp.save({"f": failure}, storage_writer=RemoteWriter(store, allow_pickle=True))
    template: dict[str, Any] = {"f": None}
    assert isinstance(failure(lambda: dcp.load(template, storage_reader=RemoteReader(store))), UnsafeObjectError)
    with pytest.raises(UnsafeObjectError):
        load(store)
    dcp.load(template, storage_reader=RemoteReader(store, allow_pickle=True))
    assert template["f"] is failure
    assert load(store, allow_pickle=True)["f"] is failure


@pytest.mark.parametrize("planner", [DefaultSavePlanner, Pickling])
def test_objects_that_training_keeps(store: RecordingStore, planner: type[DefaultSavePlanner]) -> None:
    """Save through torch's planners: every value is equal and of its own type; `test_tags.py` has all kinds."""
    state: dict[str, Any] = {
        "numpy": np.arange(3),
        "numpy scalar": np.float32(1.5),
        "numpy random": np.random.RandomState(3).get_state(),
        "torch random": torch.get_rng_state(),
        "generator": torch.Generator().manual_seed(7),
        "arguments": argparse.Namespace(lr=1e-3),
        "torch types": (torch.Size([1, 2]), torch.bfloat16, torch.device("cpu")),
        "tuple": (1, (2.0, "x"), None, {1, 2}, b"\x00\xff", 10**40),
    }
    dcp.save(dict(state), storage_writer=RemoteWriter(store), planner=planner())
    template: dict[str, Any] = dict.fromkeys(state) | {"torch random": torch.zeros_like(state["torch random"])}
    dcp.load(template, storage_reader=RemoteReader(store))
    assert same(template, state)
    assert same(load(store), state)


def as_it_is(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load without flattening, so that each value is one object; both ways to load give the same."""
    store = MemoryStore()
    plain = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    dcp.save(state, storage_writer=RemoteWriter(store), planner=DefaultSavePlanner(**plain))
    template: dict[str, Any] = dict.fromkeys(state)
    dcp.load(template, storage_reader=RemoteReader(store), planner=DefaultLoadPlanner(**plain))
    loaded = load(store)
    assert same(list(template.values()), list(loaded.values()))
    return loaded


def test_shared_values_stay_shared() -> None:
    """Reach a list, a tensor and its memory on two paths: a change through one is seen through the other."""
    inner: list[int] = [1]
    tensor = torch.arange(4.0)
    loaded = as_it_is({"lists": [inner, {"again": inner}], "tensors": (tensor, tensor[1:], torch.nn.Parameter(tensor))})
    loaded["lists"][0].append(2)
    assert loaded["lists"][1]["again"] == [1, 2]
    loaded["tensors"][0][1] = 9
    assert (loaded["tensors"][1][0], loaded["tensors"][2][1]) == (9, 9)


@pytest.mark.parametrize("planner", [DefaultSavePlanner, Pickling])
def test_a_tensor_whose_memory_was_freed_is_refused(store: RecordingStore, planner: type[DefaultSavePlanner]) -> None:
    """Free the memory of a tensor inside an object: nothing beyond its end is read or stored."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(8)
    error = failure(lambda: dcp.save({"x": (tensor,)}, storage_writer=RemoteWriter(store), planner=planner()))
    assert isinstance(error, UnsafeObjectError)
    assert error.details["key"] == "x"
    assert store.count("put") == 0


def test_a_big_endian_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ImportError, match="big-endian host"):
        importlib.reload(dcp_remote.serialization)
