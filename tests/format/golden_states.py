"""States of the golden files, as the tests expect them back. Never change a state."""

from __future__ import annotations

import argparse
import array
import decimal
import enum
import io
import math
import struct
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_remote import Files
from dcp_remote.format.dtypes import ITEM_BYTES


class Point(NamedTuple):
    """Class of a namedtuple."""

    x: float
    y: float


class Colour(enum.Enum):
    """Class of an enumeration."""

    RED = 1


class Access(enum.Flag):
    """Class of flags."""

    READ = 1
    WRITE = 2


class NeedsPickle:
    """Class that has no tag."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NeedsPickle) and self.value == other.value

    def __hash__(self) -> int:
        return self.value


class TaggedTensor(torch.Tensor):
    """Tensor of a class of its own."""


def of_dtype(name: str) -> torch.Tensor:
    """Return a tensor of shape [2, 3] whose bytes count up."""
    size = ITEM_BYTES[name]
    data = bytearray([n % 2 for n in range(6)] if name == "bool" else range(1, 6 * size + 1))
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[size]
    return torch.frombuffer(data, dtype=carrier).view(getattr(torch, name)).reshape(2, 3)


def counting(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).to(dtype).reshape(shape)


def tensors() -> dict[str, Any]:
    """Return tensors of every dtype that torch makes without a scale, and of unusual shapes."""
    plain = [name for name in ITEM_BYTES if not name.startswith(("qint", "quint"))]
    return {
        **{f"dtype.{name}": of_dtype(name) for name in plain},
        "shape.scalar": torch.tensor(-0.0),
        "shape.empty": torch.zeros(0, 4, dtype=torch.int16),
        "shape.ones": counting(1, 3, 1),
        "parameter": torch.nn.Parameter(counting(3)),
        "channels_last": counting(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "transposed": counting(3, 5).T,
        "name with spaces / ä \U0001f600": counting(2),
    }


def streams() -> dict[str, Any]:
    """Return tensors that are stored as streams."""
    matrix = torch.tensor([[0.0, 1.5], [2.0, 0.0]])
    return {
        "coo": matrix.to_sparse(),
        "csr": matrix.to_sparse_csr(),
        "csc": matrix.to_sparse_csc(),
        "quint8": torch.quantize_per_tensor(matrix, 0.5, 3, torch.quint8),
        "qint8": torch.quantize_per_channel(matrix, torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), 0, torch.qint8),
        "qint32": torch.quantize_per_tensor(matrix, 0.5, 0, torch.qint32),
        "subclass": matrix.as_subclass(TaggedTensor),
    }


def sharded() -> dict[str, torch.Tensor]:
    """Return tensors that three ranks saved in chunks; each chunk of `blocks` has two blocks."""
    return {
        "blocks": counting(140, 1000, dtype=torch.uint8),
        "grid": counting(7, 5, 3),
        "rows": counting(4, 2, dtype=torch.int64),
        "empty": counting(0, 3),
    }


def pieces() -> dict[str, torch.Tensor]:
    """Return a tensor whose chunks are cut into pieces."""
    return {"cut": counting(40, 250, dtype=torch.int32)}


def tagged() -> dict[str, Any]:
    """Return objects of every tag; a name of the form `tag-what`."""
    shared = np.zeros((2, 3), dtype=[("a", "<f4"), ("b", "i1", (2,)), ("ü", [("c", ">i8")])])
    shared["a"], shared["b"] = 1.5, [1, 2]
    aligned = np.array([(1, 2.0)], dtype=np.dtype([("x", "i1"), ("y", "<f8")], align=True))
    nan = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]
    philox = np.random.Generator(np.random.Philox(np.random.SeedSequence(5, spawn_key=(1, 2), n_children_spawned=3)))
    generator = torch.Generator().manual_seed(7)
    return {
        "plain": [None, True, -1, 2**63 - 1, 0.1, -0.0, 1e300, "ä\u2028\0", [], {}, {"k": [1]}],
        "int": -(2**70),
        "float": [math.nan, math.inf, -math.inf, nan],
        "complex": complex(-0.0, math.nan),
        "str": "a\ud800b",
        "bytes": b"\x00\xff",
        "bytearray": bytearray(b"abc"),
        "Decimal": [decimal.Decimal(text) for text in ("-1.10E+5", "sNaN12", "-Infinity", "0.0")],
        "Fraction": Fraction(-(2**65), 3),
        "tuple": ((), (1, (2,))),
        "set": {3, "x", (1, 2), None},
        "frozenset": frozenset({1.5}),
        "dict": {1: "a", (2, 3): "b", "$c": 4, None: 5},
        "OrderedDict": OrderedDict([("b", 1), ("a", 2)]),
        "Counter": Counter({"x": 2, "y": -1}),
        "defaultdict": [defaultdict(None, {"a": 1}), defaultdict(list, {2: [3]})],
        "deque": [deque([1, 2], maxlen=5), deque()],
        "slice": slice(None, 5, -1),
        "range": range(0, 10, 3),
        "Namespace": argparse.Namespace(lr=0.1, name="x"),
        "SimpleNamespace": types.SimpleNamespace(a=[1]),
        "namedtuple": Point(1.5, 2.0),
        "Enum": [Colour.RED, Access.READ | Access.WRITE],
        "date": date(2024, 2, 29),
        "datetime": [
            datetime(2024, 2, 29, 1, 2, 3, 4),
            datetime(2024, 2, 29, tzinfo=UTC, fold=1),
            datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=1), "CET")),
        ],
        "time": time(1, 2, 3, 4, tzinfo=timezone(timedelta(hours=-1, seconds=1))),
        "timedelta": timedelta(days=-1, seconds=5, microseconds=7),
        "UUID": uuid.UUID(int=7),
        "Path": [PurePosixPath("a/b"), PureWindowsPath("C:\\x")],
        "BytesIO": stream(b"abcdef", 3),
        "array": [array.array("h", [-1, 2]), array.array("L", [2**31]), array.array("d", [0.5])],
        "numpy.dtype": [np.dtype(">i8"), np.dtype("<M8[25s]"), aligned.dtype, np.dtype("<U7")],
        "numpy.scalar": [np.float32(1.5), np.bool_(True), np.datetime64("2024-02-29", "D"), np.complex64(1 - 2j)],
        "numpy.ndarray": [
            np.arange(6, dtype=">i4").reshape(2, 3),
            np.asfortranarray([[1.5, 2], [3, 4]]),
            shared,
            aligned,
        ],
        "numpy.ndarray-text": [np.array(["ä", "bcd"]), np.array([b"x", b"yz"]), np.zeros((0, 2), "f2")],
        "numpy.str": np.str_("ä"),
        "numpy.bytes": np.bytes_(b"x\x00y"),
        "numpy.longdouble": [np.longdouble(0.5), np.clongdouble(1 - 2j)],
        "numpy.RandomState": np.random.RandomState(3),
        "numpy.Generator": [
            philox,
            *(np.random.Generator(kind(1)) for kind in (np.random.MT19937, np.random.PCG64, np.random.SFC64)),
            np.random.Generator(np.random.PCG64DXSM([1, 2**80])),
        ],
        "torch.Tensor": [
            counting(2, 3).to(torch.bfloat16),
            of_dtype("float8_e4m3fn"),
            torch.tensor([1j], requires_grad=True),
        ],
        "torch.Parameter": torch.nn.Parameter(counting(2), requires_grad=False),
        "torch.Size": torch.Size([2, 0, 3]),
        "torch.dtype": [torch.bfloat16, torch.quint8],
        "torch.layout": [torch.strided, torch.sparse_coo],
        "torch.device": torch.device("cuda:1"),
        "torch.Generator": generator,
    }


def stream(data: bytes, position: int) -> io.BytesIO:
    opened = io.BytesIO(data)
    opened.seek(position)
    return opened


def encoded() -> dict[str, Any]:
    """Return an object of each encoding: in the manifest, in a shard, with raw bytes, as streams."""
    shared = [1, 2]
    return {
        "inline": ("short",),
        "json": (list(range(5_000)),),
        "json+raw": ({"a": np.arange(2_000), "b": counting(1_001), "c": b"xyz" * 1_001, "d": b"short"},),
        "torch": ([shared, shared],),
        "pickle": (NeedsPickle(3),),
    }


def nested() -> dict[str, Any]:
    """Return a nested state: lists, tuples, empty containers, keys with dots, keys that are integers."""
    return {
        "model": {"a.b": counting(2), "c": {"d": counting(3)}, "": counting(1)},
        "optim": {
            "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "list": [counting(2), [1, {"x": counting(1)}], {}, [], "text", None],
        "empty": {},
        "none": None,
        "objects": [[1, 2], {"a": {}}],
    }


def many() -> dict[str, Any]:
    """Return so many tensors that the manifest is compressed."""
    return {
        f"model.layers.{n}.a_name_that_is_longer_than_needed.{'x' * 60}.weight": counting(1) + n for n in range(250)
    }


def run_state(step: int, *, optimizer: bool = True) -> dict[str, Any]:
    """Return the state of a step of a run, of which a part never changes."""
    state: dict[str, Any] = {"model": {"frozen": counting(70_000, dtype=torch.uint8), "w": counting(3) + step}}
    if optimizer:
        state["optim"] = {"m": counting(5) * step}
    return state | {"step": step}


def in_segments(step: int, *, optimizer: bool = True) -> dict[str, Any]:
    """Return the state of a step of a run whose manifests are in segments."""
    frozen = {"embedding": counting(6, 2), "norm": counting(3), "empty": counting(0, 2)}
    weights = {"w": counting(7, 2) + step, "w2": counting(4) + step, "scale": counting(1)[0] + step}
    state: dict[str, Any] = {"frozen": frozen, "model": weights, "top": counting(2) + step}
    if optimizer:
        state["optim"] = {"m": counting(7, 2) * step, "m2": counting(4) * step}
    return state | {"step": step}


def per_rank() -> dict[str, Any]:
    """Return the state of two ranks; per-rank values as `load` returns them."""
    shared = {"model": counting(2), "hparams": {"lr": 1e-3, "layers": [64, 64]}, "files": {"a/b.json": b"{}"}}
    return shared | {"per_rank": {str(rank): {"loader": rank_value(rank)} for rank in range(2)}}


def rank_value(rank: int) -> dict[str, Any]:
    return {"position": 10 * rank, "seen": counting(rank + 1)}


def properties() -> dict[str, Any]:
    """Return tensors whose golden files have other properties, of many dimensions, and huge empty ones."""
    return {
        "channels_last": counting(1, 2, 3, 3),
        "preserve": counting(2),
        "pinned": counting(3),
        "dimensions": counting(1, 2, 1, 3, 1, 2, 2),
        "wide": torch.zeros(0, 2**33),
    }


def layouts() -> dict[str, Any]:
    """Return tensors of rarer layouts and quantizations, all stored as streams."""
    matrix, scales = torch.tensor([[0.0, 1.5], [2.0, 0.0]]), torch.tensor([0.5, 0.25])
    return {
        "bsr": matrix.to_sparse_bsr((1, 1)),
        "bsc": matrix.to_sparse_bsc((1, 1)),
        "parameter": torch.nn.Parameter(matrix.to_sparse()),
        "quint4x2": torch.quantize_per_channel(torch.ones(2, 4), scales, torch.zeros(2), 0, torch.quint4x2),
        "quint2x4": torch.quantize_per_channel(torch.ones(2, 4), scales, torch.zeros(2), 0, torch.quint2x4),
    }


def stream_objects() -> dict[str, Any]:
    """Return objects that are stored as streams: all but the nested tensor because a part is reachable twice."""
    values = [{1, "x"}, Counter({"a": 1}), 1 + 2j, b"\xff\x00", bytearray(b"ab"), bytearray(), torch.Size([2])]
    types_of_torch = [torch.device("cpu"), torch.float16, torch.strided]
    ordered, parameter = OrderedDict([("b", 1), ("a", 2)]), torch.nn.Parameter(counting(2))
    return {
        "values": ([values, values],),
        "types": ([types_of_torch, types_of_torch],),
        "ordered": ([ordered, ordered],),
        "parameters": ([parameter, parameter],),
        "nested": (torch.nested.nested_tensor([counting(2), counting(3)]),),
    }


def blocks() -> dict[str, torch.Tensor]:
    """Return tensors of one shard, three of which have several blocks; those of the first are of 128 KiB."""
    large = torch.arange(5 * 2**20) // 2**16 % 251
    return {
        "large": large.to(torch.uint8),
        "small": counting(3),
        "second": large[: 3 * 2**16].to(torch.uint8),
        "third": large[: 2**16 + 5].to(torch.uint8),
    }


def header_names() -> dict[str, torch.Tensor]:
    """Return tensors whose names in the header of a shard get suffixes: runs that are no boxes, and reserved names."""
    return {"runs": counting(2, 5_000), "__metadata__": counting(2), "__dcp_remote_blocks__": counting(3)}


def raw_places() -> dict[str, Any]:
    """Return an object with raw bytes of every kind, and a long one without; both have several pieces."""
    data = bytes(range(256)) * 10
    return {
        "places": (
            {
                "bytearray": bytearray(data),
                "BytesIO": stream(data, 7),
                "array": array.array("d", [0.5] * 300),
                "scalar": np.void(data),
                "parameter": torch.nn.Parameter(counting(600)),
                "F": np.asfortranarray(np.arange(600.0).reshape(20, 30)),
            },
        ),
        "text": (list(range(5_000)),),
    }


def forms() -> dict[str, Any]:
    """Return objects whose tags have rarer contents."""
    unseeded: Any = np.random.RandomState(3)
    return {
        "scalar": (torch.tensor(1.5), torch.tensor(3, dtype=torch.int8)),
        "Path": (Path("a/b"),),
        "UUID": (uuid.UUID(int=7, is_safe=uuid.SafeUUID.safe), uuid.UUID(int=8, is_safe=uuid.SafeUUID.unsafe)),
        "Enum": (Access.READ | Access.WRITE,),
        "Generator": (np.random.Generator(unseeded._bit_generator),),
        "zone": (datetime(2024, 2, 29, tzinfo=timezone(timedelta(microseconds=1))),),
    }


def marks() -> dict[str, Any]:
    """Return an object in which each mark but those in tuples was taken off."""
    inner = ("dcp_remote.Opaque", 1)
    files = OrderedDict([("files", Files({"a": b"\0"}))])
    return {"marks": [inner, {"x": files}, (("dcp_remote.Opaque", inner),)]}


def rare_run() -> dict[str, Any]:
    """Return the state of a run: files of several names, values that were opaque, a long value of one rank."""
    return {
        "files": Files({"a/b.json": b"{}", "größe/ünï.txt": b"\x00\xff", "z.bin": bytes(5_000)}),
        "list": [(1, [2]), "text", {"inner": {"a": ()}}],
        "model": many(),
        "per_rank": {"0": {"loader": {"order": list(range(5_000))}}},
    }


# By folder and step (None outside a run): function that returns the nested state.
STATES: dict[tuple[str, int | None], Callable[[], dict[str, Any]]] = {
    ("tensors", None): tensors,
    ("streams", None): streams,
    ("sharded", None): sharded,
    ("pieces", None): pieces,
    ("tags", None): lambda: {name: (value,) for name, value in tagged().items()},
    ("encodings", None): encoded,
    ("replaced", None): lambda: run_state(2),
    ("renewed", None): lambda: {"x": counting(3)},
    ("compressed", None): many,
    ("nested", 1): nested,
    ("dedup", 1): lambda: run_state(1),
    ("dedup", 2): lambda: run_state(2),
    ("thinned", 1): lambda: run_state(1, optimizer=False),
    ("thinned", 2): lambda: run_state(2),
    ("labels", 2): lambda: run_state(2),
    ("labels", 3): lambda: run_state(3),
    ("labels", 4): lambda: run_state(4),
    ("abandoned", 1): lambda: run_state(1),
    ("abandoned", 2): lambda: run_state(2),
    ("abandoned", 3): lambda: run_state(30),
    ("per_rank", 1): per_rank,
    ("properties", None): properties,
    ("layouts", None): layouts,
    ("stream_objects", None): stream_objects,
    ("blocks", None): blocks,
    ("header_names", None): header_names,
    ("raw_places", None): raw_places,
    ("forms", None): forms,
    ("marks", None): marks,
    ("rare_run", 1): rare_run,
    ("replaced_twice", None): lambda: run_state(3),
    ("overwritten", 1): lambda: run_state(2),
    ("future", 1): lambda: run_state(1),
    ("segments", 1): lambda: in_segments(1, optimizer=False),
    ("segments", 2): lambda: in_segments(2),
}
