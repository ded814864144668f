"""Tests of objects that training keeps beside its tensors, through torch's own calls: kept without loss, or refused.

Covers the kinds of objects of Python, numpy and torch. Whole trainings are tested in `test_trajectories.py`.
"""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import pathlib
import random
import re
import struct
import types
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.errors import UnsafeObjectError
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.serialization.test_tags import same

pytestmark = [
    pytest.mark.torture,
    # Creating and loading these tensors warns, but they must be supported.
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # torch's own loading of quantized
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

State: TypeAlias = dict[str, Any]


class Pickling(DefaultSavePlanner):
    """Planner of a user that resolves objects to `torch.save` streams."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's name
        return super().transform_object(write_item, object)


def as_it_is(state: State) -> State:
    """Save and load without flattening, so that each value is one object; both ways to load give the same."""
    store = MemoryStore()
    plain = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    dcp.save(state, storage_writer=RemoteWriter(store), planner=DefaultSavePlanner(**plain))
    template: State = dict.fromkeys(state)
    dcp.load(template, storage_reader=RemoteReader(store), planner=DefaultLoadPlanner(**plain))
    loaded = load(store)
    assert same(list(template.values()), list(loaded.values()))
    return loaded


# ---- objects


class Span(NamedTuple):
    start: int
    stop: int


class Color(enum.Enum):
    RED = "r"


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    HELLO = "hello"


class StringAndEnum(str, enum.Enum):  # noqa: UP042  # what people wrote before there was StrEnum
    HELLO = "hello"


Point = collections.namedtuple("Point", ["x", "y"])  # noqa: PYI024  # the untyped kind is what is tested

NAN_WITH_PAYLOAD = struct.unpack("<d", bytes.fromhex("efbeadde0000f87f"))[0]

# Objects that torch's restricted unpickler takes from a `torch.save` stream.
TAKEN_BY_TORCH: dict[str, Callable[[], Any]] = {
    "int": lambda: [0, -1, 2**63, -(2**64), 10**300, True, False, None],
    "float": lambda: [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 5e-324, NAN_WITH_PAYLOAD],
    "complex": lambda: [1j, complex(-0.0, float("nan"))],
    "str": lambda: ["", "é\0\u2028", "\ud800"],
    "bytes": lambda: [b"", b"\0\xff", bytearray(b"ab")],
    "list": lambda: [[], [1, [2]], (), (1, ()), {1, "a"}, set()],
    "dict": lambda: {"b": 1, "a": 2, 3: 4, (1, 2): 5, None: 6, 2.5: 7},
    "OrderedDict": lambda: collections.OrderedDict([("b", 1), ("a", 2)]),
    "Counter": lambda: collections.Counter("aab"),
    "random.getstate": random.getstate,
    "torch.get_rng_state": torch.get_rng_state,
    "Generator.get_state": lambda: torch.Generator().manual_seed(7).get_state(),
    "torch types": lambda: [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 0]), torch.strided],
    "tensor": lambda: [torch.tensor([float("nan"), -0.0]), torch.ones(2, 0), torch.tensor(3), torch.arange(6)[::2]],
    "Parameter": lambda: nn.Parameter(torch.ones(2), requires_grad=False),
    "complex128": lambda: torch.tensor([1j], dtype=torch.complex128),
    "bit_generator.state": lambda: np.random.default_rng(1).bit_generator.state,
    "big": lambda: ["x" * 50_000, b"y" * 50_000],
}

# Objects that it refuses and that we have tags for.
TAKEN_BY_US: dict[str, Callable[[], Any]] = {
    "numpy scalars": lambda: [np.float64("nan"), np.float32(-0.0), np.int64(3), np.bool_(True), np.str_("é")],
    "numpy arrays": lambda: [np.arange(6.0).reshape(2, 3).T, np.array(3), np.zeros((0, 2)), np.array(["a", "bc"])],
    "numpy structured": lambda: np.ones(2, [("a", ">i2"), ("b", "f8", (2,))]),
    "numpy dtypes": lambda: [np.dtype("f4"), np.dtype(">i8"), np.dtype("M8[ns]")],
    "datetime64": lambda: [np.datetime64("2024-02-29T01:02:03", "ns"), np.timedelta64(5, "D"), np.datetime64("NaT")],
    "np.random.get_state": np.random.get_state,
    "RandomState": lambda: np.random.RandomState(3),
    "Generator": lambda: np.random.default_rng(2**70),
    "frozenset": lambda: [frozenset({1, "a"}), frozenset()],
    "defaultdict": lambda: collections.defaultdict(list, {"b": [1], "a": []}),
    "deque": lambda: [collections.deque([1, [2]], maxlen=3), collections.deque()],
    "namedtuple": lambda: [Span(0, 3), Point(1, [2])],
    "Enum": lambda: [Color.RED, Level.LOW, Word.HELLO, StringAndEnum.HELLO],
    "datetime": lambda: [
        dt.datetime(2024, 2, 29, 1, 2, 3, 4, fold=1),
        dt.datetime(2024, 2, 29, tzinfo=dt.UTC),
        dt.time(1, 2, fold=1),
        dt.date(1, 1, 1),
        dt.timedelta(days=-1, microseconds=1),
    ],
    "paths": lambda: [pathlib.Path("a/../b"), pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("C:\\x")],
    "numbers": lambda: [decimal.Decimal("1.10"), decimal.Decimal("-0"), fractions.Fraction(-7, 3)],
    "UUID": lambda: uuid.UUID(int=7),
    "range": lambda: [range(0, 10**30, 7), slice(1, None, 2)],
    "namespaces": lambda: [argparse.Namespace(lr=0.1, sizes=[1]), types.SimpleNamespace(b=(1,))],
    "array": lambda: array.array("d", [0.5, -0.0]),
    "torch.Generator": lambda: torch.Generator().manual_seed(7),
}

TAKEN = TAKEN_BY_TORCH | TAKEN_BY_US


@pytest.mark.parametrize("planner", [DefaultSavePlanner, Pickling])
@pytest.mark.parametrize("name", TAKEN)
def test_an_object_comes_back_as_it_was(name: str, planner: type[DefaultSavePlanner]) -> None:
    """Save by torch's planner and by one that pickles; load by `load` and by `dcp.load`: types, order, bits.

    In a tuple, which torch does not flatten. From a planner that pickles, the expected value is what stock torch reads:
    pickle's protocol 2, torch's own, loses the fold of a time.
    """
    state = {"extra": (TAKEN[name](), "beside")}
    expected = state
    if planner is Pickling:
        stream = io.BytesIO()
        torch.save(state, stream)
        stream.seek(0)
        expected = torch.load(stream, weights_only=False)
    store = MemoryStore()
    dcp.save(state, storage_writer=RemoteWriter(store), planner=planner())
    assert same(load(store), expected)
    template: State = {"extra": None}
    dcp.load(template, storage_reader=RemoteReader(store))
    assert same(template, expected)


KINDS_OF_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse coo": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 3, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
}


@pytest.mark.parametrize("name", KINDS_OF_TENSORS)
def test_tensors_that_are_more_than_their_elements(name: str) -> None:
    """Save sparse, quantized and nested tensors as values and inside objects; compare torch's streams of both."""

    def stream(tensor: torch.Tensor) -> bytes:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        # Without the serialization id, and the checksums of the zip.
        return buffer.getvalue().split(b".data/serialization_id")[0]

    tensor = KINDS_OF_TENSORS[name]()
    store = MemoryStore()
    state = {"inside": (tensor,)} if tensor.is_nested else {"inside": (tensor,), "itself": tensor}
    dcp.save(state, storage_writer=RemoteWriter(store))
    template: State = {"inside": None}
    dcp.load(template, storage_reader=RemoteReader(store))
    loaded = load(store)
    found = [loaded["inside"][0], template["inside"][0], *([] if tensor.is_nested else [loaded["itself"]])]
    for loaded_tensor in found:
        assert loaded_tensor.layout == tensor.layout
        assert stream(loaded_tensor) == stream(tensor)


def test_shared_values_stay_shared() -> None:
    """Reach a list, a tensor and its memory on two paths: a change through one is seen through the other."""
    inner: list[int] = [1]
    tensor = torch.arange(4.0)
    loaded = as_it_is({"lists": [inner, {"again": inner}], "tensors": (tensor, tensor[1:], nn.Parameter(tensor))})
    loaded["lists"][0].append(2)
    assert loaded["lists"][1]["again"] == [1, 2]
    loaded["tensors"][0][1] = 9
    assert loaded["tensors"][1][0] == 9
    assert loaded["tensors"][2][1] == 9


@pytest.mark.parametrize("planner", [DefaultSavePlanner, Pickling])
def test_a_tensor_whose_memory_was_freed_is_refused(planner: type[DefaultSavePlanner]) -> None:
    """Free the memory of a tensor inside an object: nothing beyond its end is read or stored."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(8)
    store = RecordingStore(MemoryStore())
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"extra": (tensor,)}, storage_writer=RemoteWriter(store), planner=planner())
    error = caught.value.failures[0][0]
    assert isinstance(error, UnsafeObjectError)
    assert error.details["key"] == "extra"
    assert store.count("put") == 0


@dataclasses.dataclass
class Record:
    x: int = 1


class Subclassed(dict[str, int]):
    pass


def local_enum() -> Any:
    return enum.Enum("Nowhere", ["A"], module="nowhere").A  # type: ignore[attr-defined]  # made here


# Function that creates the object, and the type that the error names.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dataclass": (Record, "Record"),
    "dict subclass": (Subclassed, "Subclassed"),
    "partial": (lambda: functools.partial(print, 1), "functools.partial"),
    "class": (lambda: Record, "Record"),
    "function": (lambda: as_it_is, "as_it_is"),
    "builtin": (lambda: print, "builtins.print"),
    "lambda": (lambda: lambda: 1, "<lambda>"),
    "pattern": (lambda: re.compile("x"), "re.Pattern"),
    "module": (lambda: nn.Linear(1, 1), "Linear"),
    "optimizer": (lambda: torch.optim.SGD([torch.ones(1)]), "SGD"),
    "exception": (lambda: ValueError("x"), "builtins.ValueError"),
    "memory format": (lambda: torch.contiguous_format, "torch.memory_format"),
    "objects in an array": (lambda: np.array([None, {}]), "numpy.ndarray"),
    "objects in a structure": (lambda: np.zeros(1, [("a", "O")]), "numpy.ndarray"),
    "dtype of objects": (lambda: np.dtype("O"), "numpy.dtypes.ObjectDType"),
    "local enum": (local_enum, "Nowhere"),
    "defaultdict of a function": (lambda: collections.defaultdict(Record), "collections.defaultdict"),
}


@pytest.mark.parametrize("planner", [DefaultSavePlanner, Pickling])
@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_code_to_load_is_refused_before_a_byte_is_uploaded(
    name: str, planner: type[DefaultSavePlanner]
) -> None:
    """Save it beside tensors, deep in a tuple: the error names key and type, and nothing is put."""
    make, type_name = REFUSED[name]
    store = RecordingStore(MemoryStore())
    state = {"a": torch.ones(1000), "trainer": {"extra": (0, [make()])}}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=RemoteWriter(store), planner=planner())
    error = caught.value.failures[0][0]
    assert isinstance(error, UnsafeObjectError)
    assert error.details["key"] == "trainer.extra"
    # A planner that pickles may fail before we see the object; then the pickler's message names the type.
    assert type_name in str(error) or "cannot pickle" in str(error.details["cause"])
    assert store.count("put") == 0
