"""Attacks on objects: texts, raw bytes behind a text, and pickles in a zip. Each is refused, and has no effect.

An attack runs in an empty folder, which stays empty, with no more memory than a few times its own length; it imports
nothing. Under an encoding that runs nothing, it is refused, too.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError, DcpRemoteError, UnsafeObjectError, UnsupportedFormatError
from dcp_remote.format.json_tree import COLLISIONS_MAX
from dcp_remote.serialization.objects import EncodedObject, decode_object, encode_object
from tests.attacks.attacker import call, doubled, integer, named, stream, tensor, word
from tests.support.figures import count

pytestmark = pytest.mark.torture

LEVELS = 200_000

# Python's hash of an integer is its remainder by this.
HASH_MODULUS = 2**61 - 1

ORDERED = call("collections", "OrderedDict", b"")
STORAGE = b"(" + word("storage") + named("torch", "FloatStorage") + word("0") + word("cpu") + integer(1) + b"tQ"
QUANTIZED = STORAGE.replace(b"FloatStorage", b"QInt8Storage")


# ---- code: known attacks on unpicklers, each of which would make the folder, or import what does

PATH = word("made")
EVALUATED = word("__import__('os').mkdir('made')")


def with_state(state: bytes) -> bytes:
    """Return a parameter with attributes."""
    program = tensor(1, 1) + b"\x89" + ORDERED + b"}" + state + b"s"
    return call("torch._utils", "_rebuild_parameter_with_state", program)


GADGETS: dict[str, bytes] = {
    "os.mkdir": call("os", "mkdir", PATH),
    "subprocess": call("subprocess", "check_output", b"](" + word("mkdir") + PATH + b"e"),
    "eval": call("__builtin__", "eval", EVALUATED),
    "getattr": call("__builtin__", "getattr", named("os", "path") + word("join")),
    "importlib": call("importlib", "import_module", word("antigravity")),
    "functools": call("functools", "partial", named("os", "mkdir") + PATH),
    "pathlib": call("pathlib", "Path", PATH),
    "numpy": call("numpy.testing._private.utils", "runstring", EVALUATED + b"}"),
    "torch.load": call("torch", "load", PATH),
    "torch.jit unpickler": call("torch.jit._pickle", "restore_type_tag", b"N" + word("int")),
    "wrapper subclass": call("torch._utils", "_rebuild_wrapper_subclass", b"N" * 8),
    "device tensor": call("torch._utils", "_rebuild_device_tensor_from_numpy", b"NNNN"),
    "dtype as a function": b"ctorch\nfloat32\n)R",
    "storage as a function": b"ctorch\nFloatStorage\n(K\x04tR",
    "tensor as a function": b"ctorch\nTensor\n(K\x04tR",
    "function in a type": call("torch._tensor", "_rebuild_from_type_v2", named("os", "mkdir") + b"N(" + PATH + b"t}"),
    "attribute that is called by pickle": ORDERED + b"}" + word("__reduce_ex__") + named("torch", "Size") + b"sb",
    "attribute that is called by its owner": ORDERED + b"}" + word("items") + named("torch", "Size") + b"sb",
    "class of a value": ORDERED + b"}" + word("__class__") + named("torch", "Tensor") + b"sb",
    "attribute of a tensor": with_state(word("__reduce_ex__") + named("torch", "Size")),
    "gradient of a tensor": with_state(word("grad") + tensor(1, 1)),
    "new object": b"cos\nmkdir\n(" + PATH + b"t\x81",
    "named by the stack": word("os") + word("mkdir") + b"\x93(" + PATH + b"tR",
    "instance": b"(" + PATH + b"ios\nmkdir\n",
    "object": b"(cos\nmkdir\n" + PATH + b"o",
}

# ---- programs that Python's unpickler, torch's and pickletools read, or may read, differently


def storage(kind: str, items: int) -> bytes:
    return b"(" + word("storage") + named("torch", kind) + word("0") + word("cpu") + integer(items) + b"tQ"


DISPUTED: dict[str, bytes] = {
    "names of Python 2": b"ccopy_reg\n_reconstructor\n(c__builtin__\nobject\n",
    "a name with dots": b"ctorch\nSize.__class__\n",
    "a name with a carriage return": b"ctorch\nSize\r\n",
    "a name of another alphabet": "ctorch\n\uff33ize\n".encode(),
    "the same storage twice, larger": storage("FloatStorage", 1) + storage("FloatStorage", 10**6) + b"\x86",
    "the same storage as another class": b"("
    + tensor(4, 1, items=4, storage="ByteStorage")
    + tensor(10**6, 1, items=10**6, storage="DoubleStorage")
    + b"t",
    "a storage whose first use is smaller": b"(" + tensor(1, 1, items=1) + tensor(250_000, 1, items=250_000) + b"t",
    "a negative index of the memo": b"Nr\xff\xff\xff\xffh\xff",
    "a text with a wrong length": b"X\xff\xff\xff\xffabc",
    "a text of Python 2": b"U\x03abc",
    "a number in words": b"I01\n",
    "a number with an underscore": b"I1_000\n",
    "a long number without an end": b"\x8b\xff\xff\xff\x7f1",
    "duplicated": b"]2\x86",
    "popped to a mark": b"](]1",
    "an instance": b"(c__builtin__\nset\n]o",
    "an old instance": b"(]i__builtin__\nset\n",
    "an extension": b"\x82\x01",
    "a build of a list": b"]}b",
    "items of a list": b"]K\x01K\x02s",
    "a list as a persistent id": b"]Q",
}

# ---- programs that would keep a process busy, fill its memory or overflow its stack

THOUSANDS = b"](" + b"".join(map(integer, range(10_000))) + b"e"
STRIDELESS = tensor(10**12, 0)
HOOKS = b"\x89" + ORDERED
LISTS = b"](K\x01K\x01eq\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(40))
DEEP_LISTS = b"]" * LEVELS + b"a" * (LEVELS - 1)
EQUAL_HASHES = [n * HASH_MODULUS for n in range(1, 5_000)]
# Tuples of 14 numbers, each of which has the hash -2.
EQUAL_TUPLES = [tuple(-1 - (n >> bit & 1) for bit in range(14)) for n in range(5_000)]


def ten_thousand(function: bytes) -> bytes:
    """Return a list of as many results of a function, whose argument is the first value."""
    return b"q\x00](" + function * 10_000 + b"e"


ENDLESS: dict[str, bytes] = {
    "a tuple of 2**60 as a key": b"}" + doubled(60) + b"K\x01s",
    "as an element": call("__builtin__", "set", b"]" + doubled(60) + b"a"),
    "as what is called": doubled(60) + b")R",
    "as what is changed": doubled(60) + b"K\x01a",
    "as the key of a storage": b"(" + word("storage") + named("torch", "FloatStorage") + doubled(60) + b"NK\x00tQ",
    "as the place of a storage": STORAGE.replace(word("cpu") + integer(1), doubled(60) + b"K\x00"),
    "as a shape": call("torch", "Size", doubled(60)),
    "sets of one list": THOUSANDS + ten_thousand(call("__builtin__", "set", b"h\x00")),
    "sets of one tuple": b"]((" + THOUSANDS[2:-1] + b"te" + ten_thousand(call("__builtin__", "set", b"h\x00")),
    "counters of one dict": b"}"
    + ten_thousand(call("collections", "Counter", b"h\x00")).replace(
        b"q\x00", b"q\x00(" + b"".join(integer(n) * 2 for n in range(10_000)) + b"u"
    ),
    "copies of one text": word("a" * 10_000) + ten_thousand(call("_codecs", "encode", b"h\x00" + word("latin1"))),
    "copies of bytes": call("_codecs", "encode", word("a" * 10_000) + word("latin1"))
    + ten_thousand(call("__builtin__", "bytearray", b"h\x00")),
    "a set of a text": call("__builtin__", "set", word("abc")),
    "thousands of names in a set": call("__builtin__", "set", b"](" + word("a") * 1000 + b"e"),
    "one key a thousand times": b"}(" + (integer(1) + b"N") * 1000 + b"u",
    "numbers of a text": call("__builtin__", "complex", word("1" * 10_000)),
    "a set of a tensor without strides": call("__builtin__", "set", STRIDELESS),
    "sizes of one": call("torch", "Size", STRIDELESS),
    "a shape of one": call("torch._utils", "_rebuild_tensor_v2", STORAGE + b"K\x00" + STRIDELESS * 2 + HOOKS),
    "a nested tensor of them": call("torch._utils", "_rebuild_nested_tensor", STRIDELESS * 4),
    "a sparse tensor of them": call(
        "torch._utils",
        "_rebuild_sparse_tensor",
        call("torch.serialization", "_get_layout", word("torch.sparse_coo"))
        + b"("
        + STRIDELESS * 2
        + call("torch", "Size", integer(10**13) + b"\x85")
        + b"t",
    ),
    "a terabyte in an empty storage": tensor(10**12, 1, items=0),
    "a terabyte in four bytes": tensor(10**12, 1),
    "a terabyte behind four bytes": call(
        "torch._utils", "_rebuild_tensor_v2", STORAGE + integer(10**12) + b"K\x01\x85K\x01\x85" + HOOKS
    ),
    "size": tensor(2**70, 0),
    "stride": tensor(2, 2**62),
    "items": tensor(1, 1, items=2**62),
    "items below zero": tensor(1, 1, items=-1),
    "product of 100,000 sizes of 2,000 bits": call(
        "torch._utils",
        "_rebuild_qtensor",
        QUANTIZED + b"K\x00(" + integer(2**2000) + b"q\x00" + b"h\x00" * 100_000 + b"t)NN",
    ),
    "scales in lists of lists": call(
        "torch._utils",
        "_rebuild_qtensor",
        QUANTIZED + b"K\x00K\x01\x85K\x01\x85(" + named("torch", "per_channel_affine") + LISTS * 2 + b"K\x00t" + HOOKS,
    ),
    "keys of one hash": b"}(" + b"".join(integer(n) + b"N" for n in EQUAL_HASHES) + b"u",
    "keys of one hash, one by one": b"}" + b"".join(integer(n) + b"Ns" for n in EQUAL_HASHES),
    "elements of one hash": call("__builtin__", "set", b"](" + b"".join(map(integer, EQUAL_HASHES)) + b"e"),
    "tuples of one hash": b"}("
    + b"".join(b"(" + b"".join(map(integer, values)) + b"tN" for values in EQUAL_TUPLES)
    + b"u",
    "deep lists": DEEP_LISTS,
    "deep dicts": b"}" + b"K\x00}" * 50_000 + b"s" * 50_000,
    "deep tuples": b")" + b"\x85" * LEVELS,
    # Hashing it overflowed the stack.
    "a deep key": b"})" + b"\x85" * 1_000_000 + b"K\x01s",
    "a deep element": call("__builtin__", "set", b"](" + b")" + b"\x85" * 1_000_000 + b"e"),
    "a deep size": call("torch", "Size", b")" + b"\x85" * LEVELS),
    "deep marks": b"(" * LEVELS + b"t" * LEVELS,
    "deep calls": (b"ctorch._tensor\n_rebuild_from_type_v2\n(" * 2000) + b"Nt" * 2000,
    "deep attributes of an OrderedDict": ORDERED + b"}" + word("x") + DEEP_LISTS + b"sb",
    "deep attributes of a parameter": with_state(word("x") + DEEP_LISTS),
}

BOMBS: dict[str, bytes] = {
    "codec": call("_codecs", "encode", word("\\x00" * 100) + word("unicode_escape")),
    "codec zlib": call("_codecs", "encode", word("x") + word("zlib")),
    "decode": call("_codecs", "decode", word("x") + word("zlib")),
    "zlib": call("zlib", "decompress", word("x")),
    "bytearray": call("__builtin__", "bytearray", integer(2**30)),
    "bytes": call("__builtin__", "bytes", integer(2**30)),
    "range": call("__builtin__", "range", integer(2**30)),
    "list": call("__builtin__", "list", call("__builtin__", "range", integer(2**30))),
    "meta tensor": call("__builtin__", "set", call("torch._utils", "_rebuild_meta_tensor_no_storage", b"NNNN")),
    "memo": b"Nr\xff\xff\xff\x7f",
    "text": b"X\xff\xff\xff\x7fabc",
    "long": b"\x8b\xff\xff\xff\x7fabc",
}

# A storage's count of items as 1.0, True, None, "1", a list or a tuple.
NO_COUNTS = [b"G\x3f\xf0" + bytes(6), b"\x88", b"N", b"X\x01\x00\x00\x001", b"]", b")"]

# ---- texts

NO_NUMBERS = [
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "0x1", "1_0", "01", "+1", ".5", "5.", "-", "nan"),
    *("9223372036854775808", "-9223372036854775809"),
]
WHOLES = ["{}", "[{}]", '{{"a":{}}}', '{{"$tuple":[{}]}}']

TEXTS: list[str] = [
    # A name twice, of which parsers take one or the other.
    *('{"a":1,"a":1}', '{"a":1,"\\u0061":1}', '{"$tuple":[],"$tuple":[]}', '{"$dict":[[1,2],[1,2]]}'),
    *('{"$dict":[[1,2],[true,2]]}', '{"$dict":[[1,2],[1.0,2]]}', '{"$dict":[["a",2],["a",2]]}', '{"$set":[0,-0.0]}'),
    *('{"$OrderedDict":[[1,2],[1,2]]}', '{"$Counter":[[1,2],[1,2]]}', '{"$Namespace":[["a",2],["a",2]]}'),
    '{"$torch.device":"cpu","$torch.device":"cpu"}',
    # Nested too deep; closed or not.
    "[" * LEVELS + "]" * LEVELS,
    '{"a":' * LEVELS + "1" + "}" * LEVELS,
    '{"$tuple":[' * LEVELS + "]}" * LEVELS,
    '{"$dict":[[' * 150 + "1" + ",0]]}" * 150,
    "[" * 102 + "]" * 102,
    "[" * LEVELS,
    '["\\"[' + "[" * 50 + '",' + "[" * LEVELS,
]


def generator(pool_size: int) -> object:
    """Return numpy's generator with a pool that is mixed in quadratic time."""
    encoded = json.loads(encode_object("k", np.random.Generator(np.random.PCG64(1))).data)
    encoded["$numpy.Generator"]["seed"][2] = pool_size
    return encoded


def torch_tensor(shape: list[object], *, data: object = "AAAAAA==", requires_grad: object = False) -> object:
    fields = {"dtype": "float32", "shape": shape, "requires_grad": requires_grad, "data": data}
    return {"$torch.Tensor": fields}


EQUAL_KEYS = [[{"$int": hex(n)}, 0] for n in EQUAL_HASHES]

TREES: list[object] = [
    # Numbers that Python's constructors would accept or round.
    {"$deque": {"maxlen": True, "items": [1]}},
    {"$deque": {"maxlen": 1.0, "items": [1]}},
    {"$deque": {"maxlen": 2**64, "items": []}},
    {"$range": [0, True, 1]},
    {"$range": [0, 10**30, 1]},
    {"$timedelta": [1.0, 0, 0]},
    {"$timedelta": [10**18, 0, 0]},
    {"$torch.Size": [1.0]},
    {"$torch.Size": [True]},
    {"$torch.Size": [2**64]},
    torch_tensor([1.0]),
    torch_tensor([True]),
    torch_tensor([1], requires_grad=0),
    torch_tensor([2**62, 4], data=""),
    {"$numpy.ndarray": {"dtype": "<f4", "shape": ["1"], "order": "C", "data": "AAAAAA=="}},
    {"$BytesIO": {"data": "", "position": 0.0}},
    {"$BytesIO": {"data": "", "position": 2**64}},
    {"$UUID": {"uuid": "00000000-0000-0000-0000-000000000007", "is_safe": 2}},
    {"$complex": [1, 2]},
    *({"$float": text} for text in ("1.0", "Infinity", "7ff000000000000")),
    *({"$int": text} for text in ("1", "0X1", "9" * 1_000_000)),
    *({"$Decimal": text} for text in ("1_0", " 1", "\u0661")),
    *({"$Fraction": values} for values in ([1, 0], [1.0, 2], [{"$int": "0x" + "f" * 100_000}, 7])),
    # Equal hashes, which take quadratic time.
    *({tag: EQUAL_KEYS} for tag in ("$dict", "$Counter", "$OrderedDict")),
    {"$set": [key for key, _ in EQUAL_KEYS]},
    {"$frozenset": [{"$tuple": values} for values in EQUAL_TUPLES]},
    [generator(4096)] * 1000,
]

NEWER_TAGS = ["$", "$$", "$Tuple", "$tuple ", "$__reduce__", "$os.system", "$numpy.load"]

# ---- raw bytes behind a text


def raw_object(tree: object, raw: bytes, *, length: int | None = None) -> EncodedObject:
    text = json.dumps(tree).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return EncodedObject("json+raw", struct.pack("<Q", len(text) if length is None else length) + text + raw)


def data_at(start: object, length: object) -> dict[str, object]:
    return {"$bytes": [start, length]}


def tensor_at(start: int, length: int, shape: list[int], dtype: str = "float32") -> dict[str, object]:
    return {"$torch.Tensor": {"dtype": dtype, "shape": shape, "requires_grad": False, "data": [start, length]}}


def array_at(start: int, length: int, shape: list[int], dtype: object = "<f4") -> dict[str, object]:
    return {"$numpy.ndarray": {"dtype": dtype, "shape": shape, "order": "C", "data": [start, length]}}


RAW = bytes(range(200)) * 20

# Values at places of these 4000 bytes.
PLACES: dict[str, list[object]] = {
    "bytes left out behind": [data_at(0, 3999)],
    "bytes left out before": [data_at(1, 3999)],
    "bytes left out between": [data_at(0, 1999), data_at(2000, 2000)],
    "bytes of no value": [],
    "overlap": [data_at(0, 3000), data_at(2999, 1001)],
    "one place twice": [data_at(0, 4000), data_at(0, 4000)],
    "a million in one place": [data_at(0, 4000)] * 100_000,
    "beyond the end": [data_at(0, 4001)],
    "starts beyond": [data_at(4001, 1)],
    "before the start": [data_at(-1, 4001)],
    "less than none": [data_at(4000, -4000), data_at(0, 4000)],
    "huge": [data_at(0, 2**63 - 1)],
    "sum that wraps": [data_at(2**63 - 1, 2**63 - 1)],
    "true": [data_at(False, True), data_at(1, 3999)],  # booleans are integers to Python
    "floats": [data_at(0.0, 4000.0)],
    "an object": [{"$bytes": {"start": 0}}],
    "huge shape": [tensor_at(0, 4000, [2**40])],
    "shape that overflows": [tensor_at(0, 4000, [2**62, 2**62, 0])],
    "shape too small": [tensor_at(0, 4000, [999])],
    "boolean tensor of 2": [tensor_at(0, 4000, [4000], "bool")],
    "boolean array of 2": [array_at(0, 4000, [4000], "|b1")],
    "no bytes each": [array_at(0, 4000, [2**40], "|V0")],
    "objects": [array_at(0, 4000, [500], "|O8")],
    "half an item": [{"$array": {"typecode": "d", "item_bytes": 8, "data": [0, 3996]}}, data_at(3996, 4)],
}

RAW_OBJECTS: dict[str, EncodedObject] = {
    "nothing": EncodedObject("json+raw", b""),
    "half a length": EncodedObject("json+raw", b"\x40\0\0\0"),
    "text beyond the end": raw_object([], b"", length=2**63),
    "text cut": raw_object([], RAW, length=0),
    "text that is not filled up": raw_object([], b"", length=3),
    "text that takes raw bytes": raw_object([data_at(0, 4000)], RAW, length=56 + 64),
    "none are there": raw_object([data_at(0, 1)], b""),
    "raw bytes behind a text without": EncodedObject("json", json.dumps([data_at(0, 4)]).encode()),
}


def attacks() -> Iterator[tuple[str, EncodedObject, tuple[type[DcpRemoteError], ...]]]:
    """Yield a name, an object, and the errors that may refuse it."""
    corrupt, unsafe = (CorruptCheckpointError,), (CorruptCheckpointError, UnsafeObjectError)
    for encoding, (name, program) in itertools.product(("torch", "pickle", "json"), GADGETS.items()):
        data = stream(program, d0=b"1234")
        yield f"{name} as {encoding}", EncodedObject(encoding, data), (*unsafe, UnsupportedFormatError)  # type: ignore[arg-type]  # one of the four encodings
    for name, program in (DISPUTED | ENDLESS | BOMBS).items():
        yield name, EncodedObject("torch", stream(program, d0=b"1234")), unsafe
    for items in NO_COUNTS:
        program = STORAGE.replace(integer(1), items)
        yield f"{items!r} items", EncodedObject("torch", stream(program, d0=b"1234")), corrupt
    wholes = [whole.format(text) for whole, text in itertools.product(WHOLES, NO_NUMBERS)]
    for text in (*wholes, *TEXTS, *map(json.dumps, TREES)):
        yield text, EncodedObject("json", text.encode()), corrupt
    for tag in NEWER_TAGS:
        yield tag, EncodedObject("json", json.dumps({tag: ["true"]}).encode()), (UnsupportedFormatError,)
    for name, tree in PLACES.items():
        yield f"raw: {name}", raw_object(tree, RAW), corrupt
    for name, encoded in RAW_OBJECTS.items():
        yield f"raw: {name}", encoded, corrupt


ATTACKS = {
    f"{number} {ascii(name)[1:50]}": (encoded, errors) for number, (name, encoded, errors) in enumerate(attacks())
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode each, also with the recursion limit raised beyond the stack."""
    encoded, errors = ATTACKS[name]
    monkeypatch.chdir(tmp_path)
    limit = sys.getrecursionlimit()
    for raised in (limit, 10_000_000) if encoded.encoding == "json" else (limit,):
        count("attacks")
        tracemalloc.start()
        sys.setrecursionlimit(raised)
        try:
            with pytest.raises(errors):
                decode_object("k", encoded)
            assert tracemalloc.get_traced_memory()[1] < 50 * len(encoded.data) + 32 * MiB
        finally:
            sys.setrecursionlimit(limit)
            tracemalloc.stop()
    assert list(tmp_path.iterdir()) == []
    assert "antigravity" not in sys.modules


MODULES = ["antigravity", "this", "tests.support.ceph", "xmlrpc.server", "torch.onnx"]


def test_a_tag_imports_nothing() -> None:
    """A tag of classes from modules that are not loaded imports none of these; shown in a process of its own."""
    count("attacks", len(MODULES))
    trees = [{"$Enum": {"class": [module, "A"], "name": "A"}} for module in MODULES]
    code = """
import json, sys
from dcp_remote.errors import UnsafeObjectError
from dcp_remote.serialization.objects import EncodedObject, decode_object
before = set(sys.modules)
for tree in json.loads(sys.argv[1]):
    try:
        decode_object("k", EncodedObject("json", json.dumps(tree).encode()))
    except UnsafeObjectError:
        continue
    raise SystemExit(f"{tree} was taken")
raise SystemExit(sorted(set(sys.modules) - before) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code, json.dumps(trees)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_in_a_process_without_memory(tmp_path: pathlib.Path) -> None:
    """In a process with half a GiB to spare each bomb ends in an error of this package, and none in a MemoryError."""
    if not pathlib.Path("/proc/self/status").exists():
        pytest.skip("the size of a process is read from /proc")
    count("attacks", len(BOMBS))
    for number, program in enumerate(BOMBS.values()):
        (tmp_path / f"{number}").write_bytes(stream(program, d0=b"1234"))
    code = """
import pathlib, re, resource, sys
from dcp_remote.errors import CorruptCheckpointError, UnsafeObjectError
from dcp_remote.serialization.objects import EncodedObject, decode_object
size = int(re.search(r"VmSize:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 2**29,) * 2)
for path in pathlib.Path(sys.argv[1]).iterdir():
    try:
        found = decode_object("k", EncodedObject("torch", path.read_bytes()))
    except (CorruptCheckpointError, UnsafeObjectError) as error:
        print(path.name, type(error).__name__)
    else:
        raise SystemExit(f"{path.name} was taken: {found!r:.200}")
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(BOMBS)


def test_a_class_of_the_user_is_named_and_no_more() -> None:
    """A message shows the class that the attacker named, without control characters for a terminal."""
    tree = {"$Enum": {"class": ["\x1b]0;owned\x07\n" + "x" * 100_000, "A\x1b[2J"], "name": "A"}}
    with pytest.raises(UnsafeObjectError) as caught:
        decode_object("k", EncodedObject("json", json.dumps(tree).encode()))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2_000


# ---- what is no attack


@pytest.mark.parametrize(
    ("program", "value"),
    [(b"NN", None), (b"}(K\x01K\x02K\x01K\x03u", {1: 3})],
    ids=["two values", "one key twice"],
)
def test_a_harmless_program(program: bytes, value: object) -> None:
    """A program that every unpickler reads as this plain value is read as well."""
    assert decode_object("k", EncodedObject("torch", stream(program))) == value


def test_what_honest_keys_have_in_common_is_no_attack() -> None:
    """A hundred keys with one hash are accepted, in both encodings, and so are twenty thousand different ones."""
    alike = {n * HASH_MODULUS: n for n in range(COLLISIONS_MAX)}
    spread = dict.fromkeys((n, float(n)) for n in range(20_000))
    for value in (alike, spread, [alike, alike], set(alike)):
        assert decode_object("k", encode_object("k", value)) == value
    with pytest.raises(UnsafeObjectError):
        encode_object("k", {n * HASH_MODULUS: n for n in range(COLLISIONS_MAX + 1)})


def test_places_that_are_not_aligned_are_copied() -> None:
    """Unaligned values, which other writers may store, are copied into aligned arrays."""
    floats = np.arange(50_000, dtype="<f4").tobytes()
    tree = [data_at(0, 1), tensor_at(1, 200_000, [50_000]), data_at(200_001, 1), array_at(200_002, 200_000, [50_000])]
    data = memoryview(bytearray(raw_object(tree, b"\1" + floats + b"\1" + floats).data))
    decoded: Any = decode_object("k", EncodedObject("json+raw", b"", (data,)))
    _, found, _, values = decoded
    assert torch.equal(found, torch.arange(50_000.0))
    assert values.flags.aligned
    np.testing.assert_array_equal(values, np.arange(50_000))
