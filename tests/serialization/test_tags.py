"""Tests that objects of every tagged type come back as they were.

Every value is encoded live (`encode_object`) and from the stream that torch's planner writes (`encode_stream`). `same`
compares types exactly and numbers by their bits.
"""

from __future__ import annotations

import argparse
import array
import collections
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import json
import pathlib
import random
import re
import struct
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.errors import UnsafeObjectError
from dcp_remote.format.dtypes import ITEM_BYTES
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

Point = collections.namedtuple("Point", ["x", "y"])  # noqa: PYI024  # the untyped kind is what is tested


class Span(NamedTuple):
    start: int
    stop: int = 3


class Color(enum.Enum):
    RED = "r"
    CRIMSON = "r"  # noqa: PIE796  # an alias is what is tested
    BLUE = ("b", 1)


class Odd(enum.Enum):
    NAN = float("nan")
    PAIR = (float("nan"), 1)
    LIST = [1]  # noqa: RUF012  # a value that has no hash is what is tested
    HUGE = 2**100
    NUMPY = np.float64(1)
    NONE = None


class Real(float, enum.Enum):
    NAN = float("nan")


class Loose(enum.IntFlag, boundary=enum.KEEP):
    HIGH = 1 << 70
    LOW = 1


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    HELLO = "hello"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Bits(enum.IntFlag):
    A = 1
    B = 4


def same(left: Any, right: Any) -> bool:  # noqa: C901, PLR0912  # one line per kind of value
    """Return True if types are equal at all levels, and so are the order of dictionaries and the bits of numbers."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (np.longdouble, np.clongdouble)):
        return repr(left) == repr(right)
    if isinstance(left, (np.ndarray, np.generic)):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.flags.f_contiguous == right.flags.f_contiguous
            and (
                # By field, because the padding between fields is not part of the value.
                all(same(np.asarray(left)[field], np.asarray(right)[field]) for field in left.dtype.names)
                if left.dtype.names
                else left.tobytes() == right.tobytes()
            )
        )
    if isinstance(left, torch.Tensor):
        properties = [(each.dtype, each.shape, each.requires_grad) for each in (left, right)]
        left, right = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (left, right))
        return properties[0] == properties[1] and torch.equal(left, right)
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, complex):
        return same((left.real, left.imag), (right.real, right.imag))
    if isinstance(left, collections.defaultdict) and left.default_factory is not right.default_factory:
        return False
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, collections.deque):
        return left.maxlen == right.maxlen and same(list(left), list(right))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, (set, frozenset)):
        return len(left) == len(right) and all(any(same(x, y) for y in right) for x in left)
    if isinstance(left, slice):
        return same((left.start, left.stop, left.step), (right.start, right.stop, right.step))
    if isinstance(left, (argparse.Namespace, types.SimpleNamespace)):
        return same(vars(left), vars(right))
    if isinstance(left, io.BytesIO):
        return (left.getvalue(), left.tell()) == (right.getvalue(), right.tell())
    if isinstance(left, np.random.RandomState):
        return same(left.get_state(legacy=False), right.get_state(legacy=False))
    if isinstance(left, np.random.Generator):
        seeds = [state_of(generator.bit_generator.seed_seq) for generator in (left, right)]
        return same(left.bit_generator.state, right.bit_generator.state) and same(*seeds)
    if isinstance(left, torch.Generator):
        return torch.equal(left.get_state(), right.get_state())
    if isinstance(left, decimal.Decimal):
        return bool(left.as_tuple() == right.as_tuple())
    if isinstance(left, (dt.datetime, dt.time)):
        return (left, left.fold, zone_of(left)) == (right, right.fold, zone_of(right))
    return bool(left == right)


def state_of(seed: Any) -> Any:
    return seed.state


def zone_of(value: Any) -> Any:
    return value.tzinfo and value.tzinfo.__getinitargs__()


def both_ways(value: object) -> Iterator[tuple[Any, Any]]:
    """Encode a value live and from the planner's stream, as JSON; yield each decoded and expected value.

    From a stream, the expected value is what stock torch loads: pickle protocol 2 itself loses the fold of a time.
    """
    stock = torch.load(io.BytesIO(save(value)), weights_only=False)
    for encoded, expected in ((encode_object("k", value), value), (encode_stream("k", save(value)), stock)):
        assert encoded.encoding == "json"
        json.loads(encoded.data, parse_constant=pytest.fail)
        yield decode_object("k", encoded), expected


STRUCTURED = np.dtype([("a", ">i2"), ("b", np.dtype([("c", "S3"), ("d", "<f8", (2, 3))]))])


EXACT: dict[str, object] = {
    "plain": {"step": 3, "lr": 0.001, "none": None, "list": [True, False, -0.0, 1.0, 1e300, "é\n\u2028\0"]},
    "ints": [2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**64, 10**400, -(10**5000)],
    "floats": [float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1e16],
    "nan payloads": list(struct.unpack("<2d", bytes.fromhex("010000000000f8ffefbeadde0000f87f"))),
    "complex": [1j, complex(-0.0, float("nan"))],
    "strings": ["", "\ud800 lone", "$tuple", "x" * 5000],
    "bytes": [b"", b"\0\xff", bytearray(), bytearray(b"ab")],
    "sequences": [(), (1,), ((), [()]), set(), {1, "a", (2, None)}, frozenset({b"x"}), frozenset()],
    "dicts": [{}, {1: 2, "1": 3, None: 4, (1, 2): 5, 2.5: 6}, {"$tuple": [1]}, {"a": 1, "$b": 2}, {"\udc80": 1}],
    "collections": [
        collections.OrderedDict(b=1, a=2),
        collections.Counter("aab"),
        collections.defaultdict(list, {1: [2]}),
        collections.defaultdict(None, a=1),
        collections.defaultdict(int),
        collections.deque([1, [2]], maxlen=5),
        collections.deque(),
        collections.deque(maxlen=0),
    ],
    "ranges": [range(10), range(0, 10**30, 7), slice(1, None, (2,)), slice(None)],
    "numbers": [
        *map(decimal.Decimal, ["1.10", "-0", "1E+400", "NaN", "sNaN12", "-Infinity", "0E-999999"]),
    ],
    "times": [
        dt.datetime(2024, 2, 29, 1, 2, 3, 4, fold=1),
        dt.datetime.max.replace(tzinfo=dt.UTC),
        dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=-23, microseconds=1), "X")),
        dt.date(1, 1, 1),
        dt.time(23, 59, fold=1, tzinfo=dt.timezone(dt.timedelta(minutes=5))),
        dt.timedelta.max,
        dt.timedelta.min,
    ],
    "paths": [
        pathlib.Path("a/../b"),
        pathlib.PurePosixPath("//x/\udcff"),
        pathlib.PureWindowsPath("C:\\x"),
        pathlib.Path(),
    ],
    "namespaces": [argparse.Namespace(lr=0.1, a=[1]), types.SimpleNamespace(b=(1,)), argparse.Namespace()],
    "classes": [Point(1, [2]), Span(0), Color.RED, Color.CRIMSON, Color.BLUE, Level.LOW, Word.HELLO],
    "flags": [Access.READ, Access.READ | Access.WRITE, Access(0), Bits.A | Bits.B, Bits(64 | 1)],
    "numpy scalars": [
        *(np.dtype(code).type(1) for code in "?bBhHiIlLefdFD"),
        np.float64("nan"),
        np.str_("a\0"),
        np.str_(),
        np.bytes_(b"a\0"),
        np.array("2020-01-01T00", "M8[25h]")[()],
        np.datetime64("NaT"),
        np.timedelta64(5, "ns"),
        np.void(b"abc"),
    ],
    "numpy arrays": [
        *(np.ones((2, 3), code) for code in "?bBhHiIlLefdFDmMSU"),
        np.zeros((2, 3), "V3"),
        np.arange(6).reshape(2, 3).T,
        np.arange(6, dtype=">u4"),
        np.array(3.5),
        np.array(["a", "bcd"]),
        np.zeros((0, 3)),
        np.zeros((3, 0), order="F"),
        np.datetime64("2020-01-01") + np.arange(3),
    ],
    "numpy dtypes": [*map(np.dtype, ["f4", ">i8", "?", "S3", "U7", "V5", "M8[25s]"])],
    "numpy random": [
        np.random.RandomState(3),
        np.random.default_rng(2**100).spawn(3)[2],
        *(np.random.Generator(kind(5)) for kind in (np.random.MT19937, np.random.PCG64DXSM, np.random.Philox)),
        np.random.Generator(np.random.SFC64([1, 2])),
        np.random.RandomState(np.random.PCG64(1)),
        np.random.default_rng(1).bit_generator.state,
    ],
    "random states": [random.getstate(), np.random.get_state(), torch.get_rng_state()],
    "torch": [torch.Size([2, 0]), torch.float8_e5m2, torch.device("cuda:1"), torch.sparse_coo, torch.strided],
    "tensors": [
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(3),
        torch.empty(0, 5),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.tensor([True]), requires_grad=False),
        torch.tensor([float("nan")]),
        torch.Generator(),
    ],
}


@pytest.mark.parametrize("name", EXACT)
def test_comes_back_exactly(name: str) -> None:
    """Encode values of every tag: types, order and bits are equal."""
    values = EXACT[name]
    for value in values if isinstance(values, list) else [values]:
        for decoded, expected in both_ways(value):
            assert same(decoded, expected), repr(value)


@pytest.mark.parametrize("name", [name for name in ITEM_BYTES if not name.startswith(("qint", "quint"))])
def test_tensors_of_every_dtype_keep_their_bytes(name: str) -> None:
    """View consecutive bytes (0 and 1 for booleans) as each dtype, 1-d and 0-d."""
    dtype = getattr(torch, name)
    data = torch.arange(2 * dtype.itemsize, dtype=torch.uint8)
    tensor = data.view(dtype)
    for value in (tensor, tensor[0]):
        assert same(decode_object("k", encode_object("k", value)), value)
        if not re.fullmatch("u?int[1-7]", name):  # torch cannot save these
            assert same(decode_object("k", encode_stream("k", save(value))), value)


def test_random_generators_go_on_as_before() -> None:
    """Draw from generators, and from a spawned one, and compare with the originals."""
    generator, legacy = np.random.default_rng(5), np.random.RandomState(5)
    generator.random(3)
    legacy.randn(3)
    decoded = decode_object("k", encode_object("k", [generator, legacy]))
    assert isinstance(decoded, list)
    assert decoded[0].random() == generator.random()
    assert decoded[0].spawn(1)[0].random() == generator.spawn(1)[0].random()
    assert decoded[1].randn() == legacy.randn()


def optimizers() -> Iterator[tuple[str, Callable[[], Any]]]:
    def trained(kind: Callable[..., Any], **settings: Any) -> Any:
        model = torch.nn.Linear(2, 1)
        optimizer = kind(model.parameters(), lr=0.1, **settings)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return optimizer

    lr = torch.optim.lr_scheduler
    sgd = functools.partial(trained, torch.optim.SGD, momentum=0.9)
    yield "AdamW", functools.partial(trained, torch.optim.AdamW)
    yield "SGD", sgd
    yield "GradScaler", lambda: torch.amp.GradScaler("cpu")
    yield "LambdaLR", lambda: lr.LambdaLR(sgd(), lambda step: 0.9**step)
    yield "CosineAnnealingLR", lambda: lr.CosineAnnealingLR(sgd(), 10)
    yield "OneCycleLR", lambda: lr.OneCycleLR(sgd(), 0.1, total_steps=10)
    yield "MultiStepLR", lambda: lr.MultiStepLR(sgd(), [2, 5, 5])
    yield "ReduceLROnPlateau", lambda: lr.ReduceLROnPlateau(sgd())
    yield "CyclicLR", lambda: lr.CyclicLR(sgd(), 0.1, 0.2)

    def sequential() -> Any:
        optimizer = sgd()
        return lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], [2])

    yield "SequentialLR", sequential


@pytest.mark.parametrize(("name", "make"), [*optimizers()])
def test_states_of_training_come_back(name: str, make: Callable[[], Any]) -> None:
    """Encode state dicts of common optimizers and schedulers after a step: JSON unless something is shared."""
    state = make().state_dict()
    # The schedulers of SequentialLR share one list of learning rates.
    expected = "torch" if name == "SequentialLR" else "json"
    for encoded in (encode_object(name, state), encode_stream(name, save(state))):
        assert encoded.encoding == expected
        assert same(decode_object(name, encoded), state)


floats = st.floats() | st.sampled_from([-0.0, float("inf")])


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**70), max_value=2**70),
    floats,
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=[])),
    st.binary(),
    st.datetimes(timezones=st.none() | st.just(dt.UTC)),
    st.timedeltas(),
    st.decimals(),
    floats.map(np.float64),
    st.integers(0, 255).map(np.uint8),
    st.sampled_from([Color.RED, Level.LOW, Access.READ | Access.WRITE, torch.bfloat16, np.dtype(">u2")]),
)


keys = st.one_of(
    st.text(), st.integers(), st.booleans(), st.floats(), st.tuples(st.integers(), st.text()), st.just("$tuple")
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw containers of every kind."""
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda items: collections.defaultdict(list, items)),
        st.lists(inner, max_size=3).map(lambda items: collections.deque(items, 3)),
        st.builds(Point, inner, inner),
        st.builds(slice, inner, inner, inner),
        st.dictionaries(st.text(), inner, max_size=3).map(lambda names: types.SimpleNamespace(**names)),
        st.frozensets(keys, max_size=3),
    )


@given(st.recursive(leaves, containers, max_leaves=20))
def test_any_tree_comes_back_exactly(tree: Any) -> None:
    """Encode random trees of hashable and unhashable values: types and bits are equal."""
    for decoded, expected in both_ways(tree):
        assert same(decoded, expected)


@pytest.mark.parametrize("member", [*Odd, *Real, *Loose, Loose(6)])
def test_members_come_back_by_their_names(member: enum.Enum) -> None:
    """Encode members that cannot be found by their values, by which pickle names them."""
    assert decode_object("k", encode_object("k", [member])) == [member]


# Untyped, because the stubs allow fewer arguments than the constructors.
SeedSequence: Any = np.random.SeedSequence
default_rng: Any = np.random.default_rng
mkldnn: Any = vars(torch)["_mkldnn"]

ODD: dict[str, tuple[Any, Any]] = {
    "seed of numpy's": (np.random.default_rng(np.int64(5)), np.random.default_rng(5)),
    "seeds of numpy's": (default_rng(np.array([1, 2])), default_rng([1, 2])),
    "list of numpy's": (default_rng([np.uint8(1), 2**80]), np.random.default_rng([1, 2**80])),
    "key of numpy's": (
        default_rng(SeedSequence(1, spawn_key=(np.int64(3),))),
        np.random.default_rng(np.random.SeedSequence(1, spawn_key=(3,))),
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_numpy_numbers_in_values_become_python_s(name: str) -> None:
    """Encode values in which numpy's numbers equal Python's, so that the decoded value behaves the same."""
    value, expected = ODD[name]
    assert same(decode_object("k", encode_object("k", [value])), [expected])


@pytest.mark.parametrize(
    "value",
    [
        # Read, and written no longer.
        fractions.Fraction(1, 3),
        uuid.UUID(int=7),
        array.array("d", [0.5]),
        np.zeros(2, STRUCTURED),
        np.zeros(2, STRUCTURED)[0],
        STRUCTURED,
        np.dtype(("f8", (2, 3))),
        # Of a kind that no constructor returns.
        default_rng(SeedSequence(1, spawn_key=("1",))),
    ],
    # Without the address in the repr of a generator: workers of pytest-xdist must collect the same ids.
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
def test_values_without_a_form_are_refused_by_name(value: object) -> None:
    """Encode values that have no form in which they are written."""
    with pytest.raises(UnsafeObjectError, match=r"where=\"\['a'\]\[0\]\""):
        encode_object("k", {"a": [value]})


def test_an_unknown_layout_is_not_written_as_json() -> None:
    """Encode a layout that has no tag: a stream or a refusal, as no version could read it in JSON."""
    try:
        encoded = encode_object("k", mkldnn)
    except UnsafeObjectError:
        return
    assert decode_object("k", encoded) is mkldnn


# Without aliases, such as `longlong` of `int64`, and without those that are written no longer.
kinds = st.sampled_from(
    [
        kind
        for kind in np.sctypeDict.values()
        if np.dtype(np.dtype(kind).str).type is kind and not issubclass(kind, (np.longdouble, np.clongdouble))
    ]
)
zones = st.none() | st.builds(dt.timezone, st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)), st.text())
rare = st.one_of(
    st.sampled_from([*Odd, *Real, *Loose, Loose(6), Access(0), ~Access.READ, *Word, *Color]),
    st.decimals(),
    st.complex_numbers(),
    st.builds(np.complex64, st.complex_numbers(width=64)),
    st.builds(lambda kind, number: kind(number), kinds, st.integers(0, 99)),
    st.builds(lambda when, fold, zone: when.replace(fold=fold, tzinfo=zone), st.datetimes(), st.integers(0, 1), zones),
    st.builds(lambda when, fold, zone: when.replace(fold=fold, tzinfo=zone), st.times(), st.integers(0, 1), zones),
    st.builds(range, st.integers(), st.integers(), st.integers(min_value=1)),
    st.text(st.characters(exclude_categories=[])),
    st.text(st.characters(exclude_categories=[])).map(np.str_),
    st.binary().map(np.bytes_),
    st.binary(min_size=1).map(np.void),
    st.integers(0, 2**64).map(np.random.default_rng),
    st.integers(-(2**62), 2**62).map(lambda number: np.datetime64(number, "ns")),
    st.lists(st.floats(), max_size=3).map(lambda items: collections.deque(items, len(items))),
    st.builds(Span, st.floats()),
    st.sampled_from([torch.bfloat16, torch.strided, torch.sparse_coo, torch.device("cuda:1"), torch.Size([2, 0])]),
)


@given(st.recursive(rare, containers, max_leaves=10))
def test_rare_values_come_back(value: Any) -> None:
    """Nest odd values of every kind: JSON, and equal when decoded; NaN equals NaN."""
    encoded = encode_object("k", [value])
    assert encoded.encoding == "json"
    assert same(decode_object("k", encoded), [value])


def test_sets_are_sorted_by_the_text_that_is_written() -> None:
    """Sort by UTF-8 text; JSON with escapes, where "é" begins with a backslash, would sort differently."""
    encoded = encode_object("k", {"é", "a", "😀", "Z", (1, "é"), (1, "z")})
    assert json.loads(encoded.data)["$set"] == ["Z", "a", "é", "😀", {"$tuple": [1, "z"]}, {"$tuple": [1, "é"]}]
