"""Objects that would run code, by all that a pickle, a tag or a field can name. None runs, and none is imported."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from dcp_remote import load
from dcp_remote.common.digests import digest
from dcp_remote.errors import CorruptCheckpointError, UnsafeObjectError, UnsupportedFormatError
from dcp_remote.format.columns import decode_bytes, encode_bytes
from dcp_remote.serialization.objects import EncodedObject, decode_object
from tests.attacks.attacker import (
    LOADS,
    assert_harmless,
    bucket,
    call,
    named,
    numbers,
    outcomes,
    stream,
    tensor,
    with_number,
    word,
)
from tests.support.figures import count

pytestmark = pytest.mark.torture

REFUSALS = (CorruptCheckpointError, UnsafeObjectError, UnsupportedFormatError)

ORDERED = call("collections", "OrderedDict", b"")


def gadgets(folder: pathlib.Path) -> dict[str, bytes]:
    """Return pickles of known attacks on unpicklers; each would make the folder, or import what does."""
    path = word(str(folder))
    made_by_eval = word(f"__import__('os').mkdir({str(folder)!r})")
    return {
        "os.mkdir": call("os", "mkdir", path),
        "posix.mkdir": call("posix", "mkdir", path),
        "os.system": call("os", "system", word(f"mkdir {folder}")),
        "subprocess": call("subprocess", "check_output", b"](" + word("mkdir") + path + b"e"),
        "eval": call("__builtin__", "eval", made_by_eval),
        "exec": call("builtins", "exec", made_by_eval),
        "getattr": call("__builtin__", "getattr", named("os", "path") + word("join")),
        "importlib": call("importlib", "import_module", word("antigravity")),
        "pydoc": call("pydoc", "locate", word("antigravity")),
        "operator": call("operator", "methodcaller", word("mkdir")),
        "functools": call("functools", "partial", named("os", "mkdir") + path),
        "pathlib": call("pathlib", "Path", path),
        "numpy": call("numpy.testing._private.utils", "runstring", made_by_eval + b"}"),
        "torch.load": call("torch", "load", path),
        "torch.hub": call("torch.hub", "load", path),
        "torch.jit": call("torch.jit._script", "CompilationUnit", word("def f(): pass")),
        "torch.jit unpickler": call("torch.jit._pickle", "restore_type_tag", b"N" + word("int")),
        "torch._dynamo": call("torch._dynamo", "run", path),
        "torch library": call("torch.ops", "load_library", path),
        "wrapper subclass": call("torch._utils", "_rebuild_wrapper_subclass", b"N" * 8),
        "device tensor": call("torch._utils", "_rebuild_device_tensor_from_numpy", b"NNNN"),
        "distributed tensor": call("torch.distributed.tensor", "DTensor", b""),
        "dtype as a function": b"ctorch\nfloat32\n)R",
        "storage as a function": b"ctorch\nFloatStorage\n(K\x04tR",
        "tensor as a function": b"ctorch\nTensor\n(K\x04tR",
        "function in a type": call(
            "torch._tensor", "_rebuild_from_type_v2", named("os", "mkdir") + b"N(" + path + b"t}"
        ),
        "attribute that is called by pickle": ORDERED + b"}" + word("__reduce_ex__") + named("torch", "Size") + b"sb",
        "attribute that is called by its owner": ORDERED + b"}" + word("items") + named("torch", "Size") + b"sb",
        "class of a value": ORDERED + b"}" + word("__class__") + named("torch", "Tensor") + b"sb",
        "attribute of a tensor": call(
            "torch._utils",
            "_rebuild_parameter_with_state",
            tensor(1, 1) + b"\x89" + ORDERED + b"}" + word("__reduce_ex__") + named("torch", "Size") + b"s",
        ),
        "gradient of a tensor": call(
            "torch._utils",
            "_rebuild_parameter_with_state",
            tensor(1, 1) + b"\x89" + ORDERED + b"}" + word("grad") + tensor(1, 1) + b"s",
        ),
        "new object": b"cos\nmkdir\n(" + path + b"t\x81",
        "named by the stack": word("os") + word("mkdir") + b"\x93(" + path + b"tR",
        "instance": b"(" + path + b"ios\nmkdir\n",
        "object": b"(cos\nmkdir\n" + path + b"o",
    }


GADGETS = list(gadgets(pathlib.Path("made")))


@pytest.mark.parametrize("name", GADGETS)
def test_a_pickle(name: str, tmp_path: pathlib.Path) -> None:
    """A pickle of a known attack is refused under each encoding, makes no folder and imports no module."""
    folder = tmp_path / "made"
    data = stream(gadgets(folder)[name], d0=b"1234")
    before = set(sys.modules)
    for encoding in ("torch", "pickle", "json"):
        count("attacks")
        with pytest.raises(REFUSALS):
            decode_object("k", EncodedObject(encoding, data))
    assert not folder.exists()
    assert "antigravity" not in set(sys.modules) - before


@pytest.mark.parametrize("entry", ["sparse", "shared"])
@pytest.mark.parametrize("encoding", ["torch", "pickle"])
def test_a_checkpoint_with_a_pickle(entry: str, encoding: str, tmp_path: pathlib.Path) -> None:
    """A pickle with a valid digest in a tensor's or object's stream is refused by name, also with a template."""
    folder = tmp_path / "made"
    evil = stream(call("os", "mkdir", word(str(folder))))
    attacked = bucket()
    document = attacked.document()
    piece = {"sparse": 2, "shared": 4}[entry]
    shard, start = (numbers(document["pieces"][name])[piece] for name in ("shard", "start"))
    length = numbers(document["pieces"]["length"])[piece]
    assert len(evil) <= length
    key = document["shards"]["keys"][shard]
    data = attacked.objects[key]
    attacked.put(key, data[:start] + evil + data[start + len(evil) :])
    document = with_number(document, "pieces.length", piece, lambda _: len(evil))
    digests = bytearray(decode_bytes(document["pieces"]["digests"], name="digests"))
    digests[16 * piece : 16 * piece + 16] = digest(digest(evil))
    document["pieces"]["digests"] = encode_bytes(bytes(digests))
    if entry == "sparse":
        document["tensors"]["kinds"][1]["encoding"] = encoding
    else:
        document["objects"]["stored"][1]["encoding"] = encoding
    attacked.commit(document)
    found = outcomes(attacked, LOADS)
    assert isinstance(found["load"], UnsafeObjectError)
    assert isinstance(found["template"], UnsafeObjectError)
    assert found["load"].details["key"] == entry
    assert found["rows"] is None, "it does not read that entry"
    assert not folder.exists()


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


@pytest.mark.parametrize("name", ["_dynamo", "onnx", "has_mps", "load", "nn", "float32", "__class__", "strided.x"])
@pytest.mark.parametrize("field", ["layout", "memory_format"])
def test_a_field_that_names_something_of_torch(field: str, name: str) -> None:
    """A field that names another attribute of torch is refused, and imports nothing."""
    attacked = bucket()
    document = attacked.document()
    document["tensors"]["kinds"][0][field] = name
    attacked.commit(document)
    outcomes(bucket(), LOADS)  # the imports of any load
    before = set(sys.modules)
    found = outcomes(attacked, LOADS)
    assert isinstance(found["template"], UnsupportedFormatError)
    assert set(sys.modules) == before


def test_a_class_of_the_user_is_named_and_no_more() -> None:
    """A message shows the class that the attacker named, without control characters for a terminal."""
    count("attacks")
    tree = {"$Enum": {"class": ["\x1b]0;owned\x07\n" + "x" * 100_000, "A\x1b[2J"], "name": "A"}}
    with pytest.raises(UnsafeObjectError) as caught:
        decode_object("k", EncodedObject("json", json.dumps(tree).encode()))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2_000


def test_what_was_saved_is_harmless() -> None:
    """The checkpoint without an attack loads for every victim."""
    assert_harmless(bucket())
    assert load(bucket().store)["step"] == 3
