"""Duplicate names: parsers differ in which of the two counts, so that two readers could see two checkpoints."""

from __future__ import annotations

import json

import pytest

from dcp_remote import load
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format.document import seal, unseal
from dcp_remote.format.manifest_json import decode_head
from dcp_remote.serialization.objects import EncodedObject, decode_object
from tests.attacks.attacker import assert_harmless, assert_refused, bucket, call, integer, stream, word
from tests.support.figures import count
from tests.support.manifests import decode

pytestmark = pytest.mark.torture


def test_the_last_field_counts() -> None:
    """The last of two equal fields counts: a false value before the true one has no effect, for each field."""
    attacked = bucket()
    fields = attacked.document()
    false_of: dict[str, object] = {
        "save_id": "0" * 32,
        "version": "9",
        "kind": "tombstone",
        "format": "x",
        "requires": ["x"],
        "digest": "md5",
        "world_size": 7,
        "flatten": None,
        "user": {"a": 1},
    }
    for name, value in fields.items():
        rest = json.dumps(fields, separators=(",", ":"))[1:]
        false = json.dumps({name: false_of.get(name, value)}, separators=(",", ":"))[:-1]
        attacked.put("manifest.json", seal(f"{false},{rest}".encode()))
        assert_harmless(attacked)


def test_head_and_document_agree() -> None:
    """The parse that settles a commit and the parse that loads read the same values from one text."""
    count("attacks")
    text = json.dumps(bucket().document(), separators=(",", ":"))
    for one, other in (("a" * 32, "b" * 32), ("b" * 32, "a" * 32)):
        data = seal(f'{text[:-1]},"save_id":"{one}","save_id":"{other}"}}'.encode())
        assert decode_head(data).save_id == decode(data).save_id == other


def test_one_entry_twice() -> None:
    """A name used for two entries is refused; of a JSON key given twice the last one counts."""
    attacked = bucket()
    text = unseal(attacked.objects["manifest.json"])
    for before, after in (
        (b'"sparse"],"kinds"', b'"model.bias"],"kinds"'),
        (b'"step":3', b'"step":3,"step":4'),
        (b'"step":3', b'"model.bias":3'),
        (b'"name":"notes"', b'"name":"step"'),
        (b'"name":"notes"', b'"name":"model.weight"'),
    ):
        assert text.count(before) == 1, before
        attacked.put("manifest.json", seal(text.replace(before, after)))
        if after == b'"step":3,"step":4':
            # The last one counts, as if the attacker had written the value 4 alone.
            assert load(attacked.store)["step"] == 4
        else:
            assert_refused(attacked, CorruptCheckpointError)


def test_two_entries_in_one_place() -> None:
    """Entries with conflicting paths in the nested state dict are refused: equal, nested, or of a list and a dict."""
    paths_of: list[dict[str, list[str | int]]] = [
        {"step": ["notes"], "notes": ["notes"]},
        {"step": ["a"], "notes": ["a", "b"]},
        {"step": ["a", "b"], "notes": ["a"]},
        {"step": ["a", 0], "notes": ["a", "0"]},
        {"step": [0], "notes": [1]},
        {"step": []},
        {"step": ["sparse"]},
    ]
    for paths in paths_of:
        attacked = bucket()
        document = attacked.document()
        document["flatten"] |= paths
        attacked.commit(document)
        assert_refused(attacked, CorruptCheckpointError)


TEXTS = [
    b'{"a":1,"a":1}',
    b'{"a":1,"\\u0061":1}',
    b'{"$tuple":[],"$tuple":[]}',
    b'{"$dict":[[1,2],[1,2]]}',
    b'{"$dict":[[1,2],[true,2]]}',
    b'{"$dict":[[1,2],[1.0,2]]}',
    b'{"$dict":[["a",2],["a",2]]}',
    b'{"$set":[0,-0.0]}',
    b'{"$OrderedDict":[[1,2],[1,2]]}',
    b'{"$Counter":[[1,2],[1,2]]}',
    b'{"$Namespace":[["a",2],["a",2]]}',
    b'{"$torch.device":"cpu","$torch.device":"cpu"}',
]


@pytest.mark.parametrize("text", TEXTS, ids=bytes.decode)
def test_one_name_twice_in_an_object(text: bytes) -> None:
    """A duplicate name in an object is refused, also where the two are spelled in two ways."""
    count("attacks")
    with pytest.raises(CorruptCheckpointError):
        decode_object("k", EncodedObject("json", text))


def test_one_key_twice_in_a_stream() -> None:
    """A second key in a pickle overwrites the first, for every unpickler; thousands of them are refused."""
    count("attacks")
    assert decode_object("k", EncodedObject("torch", stream(b"}(K\x01K\x02K\x01K\x03u"))) == {1: 3}
    with pytest.raises(CorruptCheckpointError):
        decode_object("k", EncodedObject("torch", stream(b"}(" + (integer(1) + b"N") * 1000 + b"u")))
    with pytest.raises(CorruptCheckpointError):
        decode_object("k", EncodedObject("torch", stream(call("__builtin__", "set", b"](" + word("a") * 1000 + b"e"))))
