"""Tests of the choice of encoding, and of refusals: what needs pickle is refused by name when it is saved.

Exactness of the JSON encoding is tested in `test_tags.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import io
import pickle
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dcp_remote.errors import UnsafeObjectError
from dcp_remote.format.json_tree import DEPTH_MAX
from dcp_remote.serialization.objects import decode_object, encode_object, encode_stream
from dcp_remote.serialization.torch_streams import save

pytestmark = [
    # Creating these tensors warns, but they must be supported.
    pytest.mark.filterwarnings("ignore:torch.quantize_per_:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # torch's own loading of quantized
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
]


@dataclasses.dataclass
class Record:
    x: int = 1


class Subclassed(dict[str, int]):
    pass


class Counting(tuple[int, ...]):
    __slots__ = ()


def ordered_with_attributes() -> collections.OrderedDict[str, int]:
    state = collections.OrderedDict(a=1)
    state._metadata = {"version": 1}  # type: ignore[attr-defined]  # as nn.Module.state_dict() does
    return state


def marked(tensor: torch.Tensor) -> torch.Tensor:
    tensor.mark = 1  # type: ignore[attr-defined]  # attributes of users are what is tested
    return tensor


ONLY_TORCH: dict[str, Callable[[], Any]] = {
    "OrderedDict with attributes": ordered_with_attributes,
    "sparse coo": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.ones(2, device="meta"),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "attributes": lambda: marked(torch.ones(2)),
    "parameter with attributes": lambda: marked(torch.nn.Parameter(torch.ones(2))),
    "qint8 dtype": lambda: [torch.ones(2).to_sparse(), torch.qint8, torch.Size([1]), torch.device("cpu"), {1}, 1j],
}


@pytest.mark.parametrize("name", ONLY_TORCH)
def test_values_without_a_tag_stay_torch_streams(name: str) -> None:
    """Encode values that only the restricted unpickler takes: decoded, they pickle to the same stream."""
    value = ONLY_TORCH[name]()
    for encoded in (encode_object("k", value), encode_stream("k", save(value))):
        assert encoded.encoding == "torch"
        decoded = decode_object("k", encoded)
        assert type(decoded) is type(value)
        assert without_identity(save(decoded)) == without_identity(save(value))


def without_identity(data: bytes) -> bytes:
    """Return a stream without its serialization id, which hashes the rest, and without the checksums of the zip."""
    return data[: data.index(b".data/serialization_id")]


def test_sharing_is_kept_by_torch_or_refused() -> None:
    """Reach a list, a tensor or its memory on two paths, and by cycles: identity holds after loading."""
    inner: list[Any] = [1]
    cycle: list[Any] = []
    cycle.append(cycle)
    tensor = torch.arange(4.0)
    large = ("x" * 2000, 1)
    for value in ([inner, inner], [tensor, tensor], [large, large], [inner, (inner,)]):
        encoded = encode_object("k", value)
        assert encoded.encoding == "torch"
        decoded: Any = decode_object("k", encoded)
        assert decoded[0] is (decoded[1][0] if type(value[1]) is not type(value[0]) else decoded[1])
    views: Any = decode_object("k", encode_object("k", [tensor, tensor[2:]]))
    views[0][3] = 9
    assert views[1].tolist() == [2, 9]
    again: Any = decode_object("k", encode_object("k", cycle))
    assert again[0] is again
    shared_array = np.ones(2)
    with pytest.raises(UnsafeObjectError, match=r"types='numpy.ndarray' where='\[1\]' why='shared with \[0\]'"):
        encode_object("k", [shared_array, shared_array])


def test_small_immutable_values_may_be_shared() -> None:
    """Encode AdamW's betas, which are one tuple in every group: still readable JSON."""
    betas = (np.float64(0.9), 0.999)
    encoded = encode_object("k", [{"betas": betas}, {"betas": betas}])
    assert encoded.encoding == "json"
    assert (
        encode_object("lr", {"lr": 0.001, "betas": (0.9, 0.999)}).data == b'{"lr":0.001,"betas":{"$tuple":[0.9,0.999]}}'
    )


def test_equal_sets_give_equal_bytes() -> None:
    orders = [[0, 8, 16, 24], [24, 16, 8, 0]]
    assert len({tuple({*order}) for order in orders}) == 2
    assert len({encode_object("k", set(order)).data for order in orders}) == 1


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def in_function() -> Any:
    class Local(enum.Enum):
        A = 1

    return Local.A


class Renamed(NamedTuple):
    x: int


def class_replaced() -> Any:
    """Return an instance of a class whose name now belongs to another class."""
    make: Any = enum.Enum
    other = make("Renamed", ["A"])
    other.__module__ = Renamed.__module__
    return other.A


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "dataclass": (lambda: {"a": [0, (Record(),)]}, "Record", "['a'][1][0]"),
    "dict subclass": (lambda: {"a": {(1, 2): Subclassed()}}, "Subclassed", "['a'][<builtins.tuple>]"),
    "tuple subclass": (lambda: Counting((1,)), "Counting", "the object itself"),
    "partial": (lambda: functools.partial(print), "functools.partial", "the object itself"),
    "class": (lambda: [Record], "Record", "[0]"),
    "function": (lambda: [save], "save", "[0]"),
    "lambda": (lambda: [lambda: 1], "<lambda>", "[0]"),
    "pattern": (lambda: re.compile("x"), "re.Pattern", "the object itself"),
    "module": (lambda: {"m": torch.nn.Linear(1, 1)}, "torch.nn.modules.linear.Linear", "['m']"),
    "exception": (lambda: ValueError("x"), "builtins.ValueError", "the object itself"),
    "memory format": (lambda: torch.contiguous_format, "torch.memory_format", "the object itself"),
    "object array": (lambda: [np.array([None])], "numpy.ndarray", "[0]"),
    "record array": (lambda: np.zeros(1, [("a", "f4")]).view(np.recarray), "numpy.rec.recarray", "the object itself"),
    "long double": (lambda: np.longdouble("0.5"), "numpy.longdouble", "the object itself"),
    "stream of bytes": (lambda: [io.BytesIO(b"abc")], "_io.BytesIO", "[0]"),
    "factory": (lambda: collections.defaultdict(Record), "collections.defaultdict", "the object itself"),
    "local enum": (in_function, "in_function.<locals>.Local", "the object itself"),
    "replaced class": (class_replaced, "Renamed", "the object itself"),
    "deep": (lambda: nested(DEPTH_MAX + 1), "list", "[0][0]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_key_type_and_place(name: str) -> None:
    """Encode what needs code to load: the error can be pickled, and names key, type and place."""
    make, type_name, where = REFUSED[name]
    with pytest.raises(UnsafeObjectError) as caught:
        encode_object("extra.thing", make())
    assert caught.value.details["key"] == "extra.thing"
    assert str(caught.value.details["types"]).endswith(type_name)
    assert str(caught.value.details["where"]).startswith(where)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_refusals_are_the_same_for_streams_and_pickle_takes_them() -> None:
    """Encode a dataclass from its stream: refused by name; with allow_pickle it is stored, and loaded only so."""
    with pytest.raises(UnsafeObjectError, match=r"types='[\w.]*Record' where=\"\['a'\]\""):
        encode_stream("k", save({"a": Record(5)}))
    for encoded in (
        encode_object("k", Record(5), allow_pickle=True),
        encode_stream("k", save(Record(5)), allow_pickle=True),
    ):
        assert encoded.encoding == "pickle"
        with pytest.raises(UnsafeObjectError, match="allow_pickle"):
            decode_object("k", encoded)
        assert decode_object("k", encoded, allow_pickle=True) == Record(5)
    assert encode_object("k", [1, (2,)], allow_pickle=True).encoding == "json"


def test_a_stream_that_this_process_cannot_load_is_refused() -> None:
    """Change the class name in a stream to one that does not exist."""
    with pytest.raises(UnsafeObjectError, match="cannot load what it just pickled"):
        encode_stream("k", save(Record()).replace(b"\nRecord\n", b"\nRecorX\n"), allow_pickle=True)


def test_many_refusals_are_counted_and_a_few_named() -> None:
    """Refuse a thousand values: the error stays short."""
    with pytest.raises(UnsafeObjectError) as caught:
        encode_object("k", [Record() for _ in range(1000)])
    assert caught.value.details["refused"] == 1000
    assert len(str(caught.value)) < 1000


def test_depth_of_both_encodings_ends_at_the_same_limit() -> None:
    """Nest lists up to the limit: JSON; one level more, and many more, is refused without a RecursionError."""
    assert decode_object("k", encode_object("k", nested(DEPTH_MAX))) == nested(DEPTH_MAX)
    for levels in (DEPTH_MAX + 1, 20_000):
        with pytest.raises(UnsafeObjectError):
            encode_object("k", nested(levels))
