"""Values that some parsers take for numbers: NaN, infinities, true or 1.0 for 1, numbers in words, minus zero."""

from __future__ import annotations

import json
import math

import pytest

from dcp_remote import load
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format.document import seal
from dcp_remote.serialization.objects import EncodedObject, decode_object
from tests.attacks.attacker import LOOKS, assert_refused, bucket, outcomes, show_text, stream
from tests.support.figures import count

pytestmark = pytest.mark.torture

NO_INTEGERS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e400",
    "true",
    "false",
    "null",
    "1.0",
    "1e0",
    "1.5",
    "0x1",
    "1_0",
    "01",
    "+1",
    ".5",
    "5.",
    "-",
    "1-",
    "\u0661",
]
NO_INTEGERS += ['"1"', '"NaN"', "[1]", "{}", "1 1", "\x001", "--1", "1e", "Nan", "inf", ""]


@pytest.mark.parametrize("text", NO_INTEGERS, ids=ascii)
def test_a_field_that_is_an_integer(text: str) -> None:
    """Invalid text for the world size, or for the pieces of an object, is refused."""
    fields = bucket().document()
    fields["world_size"] = "HERE"
    other = bucket().document()
    other["objects"]["stored"][0]["pieces"] = "HERE"
    for document in (fields, other):
        attacked = bucket()
        attacked.put("manifest.json", seal(json.dumps(document).replace('"HERE"', text).encode()))
        assert_refused(attacked, CorruptCheckpointError)


def test_minus_nothing_is_no_count() -> None:
    """Minus zero as a world size is refused, as zero is."""
    attacked = bucket()
    document = attacked.document() | {"world_size": "HERE"}
    attacked.put("manifest.json", seal(json.dumps(document).replace('"HERE"', "-0").encode()))
    assert_refused(attacked, CorruptCheckpointError)


COLUMNS = [
    "",
    ":",
    "1",
    "1:",
    "1:A",
    "1:A===",
    "0:",
    "3:AAAA",
    "16:",
    "1 :AA==",
    "1:AA==\n",
    "1:A A=",
    "\uff11:AA==",
    "-1:AA==",
]
COLUMNS += ["1:AA==AA==", "1:_-==", "2:AA==", "8:AAAA", "1:AA", "NaN", "1:\x00", "01:AA==", "1:AAA=:", "\u0661:AA=="]


@pytest.mark.parametrize("text", COLUMNS, ids=ascii)
def test_a_column_that_is_none(text: str) -> None:
    """A column is refused in every spelling of base64 and width but the strict one."""
    for part, name in (("pieces", "start"), ("tensors", "chunks"), ("objects", "positions")):
        attacked = bucket()
        document = attacked.document()
        document[part][name] = text
        attacked.commit(document)
        assert_refused(attacked, CorruptCheckpointError)


VALUES = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e400",
    "0x1",
    "1_0",
    "01",
    "+1",
    ".5",
    "5.",
    "-",
    "nan",
    "9223372036854775808",
    "-9223372036854775809",
]


@pytest.mark.parametrize("text", VALUES)
def test_a_value_of_an_object(text: str) -> None:
    """Invalid JSON numbers are refused in objects and in values of a manifest, also by the command line."""
    count("attacks")
    for whole in (text, f"[{text}]", f'{{"a":{text}}}', f'{{"$tuple":[{text}]}}'):
        with pytest.raises(CorruptCheckpointError):
            decode_object("k", EncodedObject("json", whole.encode()))
    attacked = bucket()
    document = json.dumps(attacked.document(), separators=(",", ":")).replace('"step":3', f'"step":{text}')
    attacked.put("manifest.json", seal(document.encode()))
    for name, error in outcomes(attacked, LOOKS).items():
        # The summary counts entries without decoding them.
        assert isinstance(error, CorruptCheckpointError) or name == "show of top-level keys", name


def test_one_number_is_not_another() -> None:
    """1, 1.0, true and -0.0 keep type and sign, in a load and in `show`."""
    for text in ("1", "1.0", "true", "-0.0", "0", "-0", "1e-400", "5e-324"):
        count("attacks")
        attacked = bucket()
        document = json.dumps(attacked.document(), separators=(",", ":")).replace('"step":3', f'"step":{text}')
        attacked.put("manifest.json", seal(document.encode()))
        found = load(attacked.store)["step"]
        expected = json.loads(text)
        assert (type(found), found, math.copysign(1, found)) == (type(expected), expected, math.copysign(1, expected))
        assert show_text(attacked, patterns=["step"]).endswith(f"step  {text}\n")


INTEGERS_IN_TAGS: list[object] = [
    {"$deque": {"maxlen": True, "items": [1]}},
    {"$deque": {"maxlen": 1.0, "items": [1]}},
    {"$range": [0, True, 1]},
    {"$timedelta": [1.0, 0, 0]},
    {"$torch.Size": [1.0]},
    {"$torch.Size": [True]},
    {"$torch.Tensor": {"dtype": "float32", "shape": [1.0], "requires_grad": False, "data": "AAAAAA=="}},
    {"$torch.Tensor": {"dtype": "float32", "shape": [True], "requires_grad": False, "data": "AAAAAA=="}},
    {"$torch.Tensor": {"dtype": "float32", "shape": [1], "requires_grad": 0, "data": "AAAAAA=="}},
    {"$numpy.ndarray": {"dtype": "<f4", "shape": ["1"], "order": "C", "data": "AAAAAA=="}},
    {"$BytesIO": {"data": "", "position": 0.0}},
    {"$UUID": {"uuid": "00000000-0000-0000-0000-000000000007", "is_safe": 2}},
    {"$complex": [1, 2]},
    {"$float": "1.0"},
    {"$float": "Infinity"},
    {"$float": "7ff000000000000"},
    {"$int": "1"},
    {"$int": "0X1"},
    {"$Decimal": "1_0"},
    {"$Decimal": " 1"},
    {"$Decimal": "\u0661"},
    {"$Fraction": [1, 0]},
    {"$Fraction": [1.0, 2]},
]


@pytest.mark.parametrize("tree", INTEGERS_IN_TAGS, ids=lambda tree: json.dumps(tree)[:60])
def test_a_number_in_a_tag(tree: object) -> None:
    """Numbers in tags that Python's constructors would accept or round are refused."""
    count("attacks")
    with pytest.raises(CorruptCheckpointError):
        decode_object("k", EncodedObject("json", json.dumps(tree).encode()))


@pytest.mark.parametrize("items", [b"G\x3f\xf0" + bytes(6), b"\x88", b"N", b"X\x01\x00\x00\x001", b"]", b")"])
def test_a_number_in_a_stream(items: bytes) -> None:
    """A storage's count of items as 1.0, True, None, "1", a list or a tuple is refused."""
    count("attacks")
    program = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + items + b"tQ"
    with pytest.raises(CorruptCheckpointError):
        decode_object("k", EncodedObject("torch", stream(program, d0=b"1234")))
