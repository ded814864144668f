"""Manifests of future versions: refused by what they require, before anything else in them is read."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_remote.errors import CorruptCheckpointError, UnsupportedFormatError
from dcp_remote.format.document import seal
from dcp_remote.serialization.objects import EncodedObject, decode_object
from tests.attacks.attacker import assert_harmless, assert_refused, bucket
from tests.support.figures import count

pytestmark = pytest.mark.torture

NEWER: dict[str, dict[str, Any]] = {
    "version": {"version": "2"},
    "no version": {"version": ""},
    "version of a megabyte": {"version": "9" * 1_000_000},
    "version with commands for a terminal": {"version": "\x1b[2J\x1b]0;owned\x07"},
    "version beside a document of any form": {"version": "2", "shards": 7, "tensors": None, "user": []},
    "feature": {"requires": ["dedup"]},
    "a hundred thousand features": {"requires": [f"feature {n}" for n in range(100_000)]},
    "feature without a name": {"requires": [""]},
    "digest": {"digest": "md5"},
}


@pytest.mark.parametrize("name", NEWER)
def test_a_newer_document(name: str) -> None:
    """Each victim of a newer document gets UnsupportedFormatError."""
    attacked = bucket()
    attacked.commit(attacked.document() | NEWER[name])
    assert_refused(attacked, UnsupportedFormatError)


@pytest.mark.parametrize("field", ["dtype", "encoding"])
@pytest.mark.parametrize("value", ["float7", "", "load", "nn", "float32\x00", "Float32", "x" * 1_000_000])
def test_a_newer_kind_of_tensor(field: str, value: str) -> None:
    """An unknown dtype or encoding is refused, also if torch has an attribute of that name."""
    attacked = bucket()
    document = attacked.document()
    document["tensors"]["kinds"][0][field] = value
    attacked.commit(document)
    assert_refused(attacked, UnsupportedFormatError)


@pytest.mark.parametrize("encoding", ["yaml", "raw", "", "Pickle", "json\x00"])
def test_a_newer_object(encoding: str) -> None:
    """An unknown encoding of an object, or one of tensors, is refused."""
    attacked = bucket()
    document = attacked.document()
    document["objects"]["stored"][0]["encoding"] = encoding
    attacked.commit(document)
    assert_refused(attacked, UnsupportedFormatError)


@pytest.mark.parametrize("tag", ["$", "$$", "$Tuple", "$tuple ", "$__reduce__", "$os.system", "$numpy.load"])
def test_a_newer_tag(tag: str) -> None:
    """An unknown tag is refused by comparison, and never called."""
    count("attacks")
    with pytest.raises(UnsupportedFormatError):
        decode_object("k", EncodedObject("json", b'{"%s":["true"]}' % tag.encode()))


@pytest.mark.parametrize("changes", [{"format": "zarr"}, {"kind": "grave"}, {"version": 1}, {"requires": None}])
def test_what_is_no_manifest(changes: dict[str, Any]) -> None:
    """A document of another format, kind or shape is refused."""
    attacked = bucket()
    attacked.commit(attacked.document() | changes)
    assert_refused(attacked, CorruptCheckpointError)


def test_fields_of_the_future_are_ignored() -> None:
    """Additional fields are ignored, however many and large."""
    attacked = bucket()
    attacked.commit(attacked.document() | {f"future {n}": ["x" * 100] * 10 for n in range(1000)})
    assert_harmless(attacked)


@pytest.mark.parametrize("text", [b'{"":0}', b'{"version":"9"}', b'{"format":"dcp_remote manifest","version":"2"}'])
def test_a_head_without_a_body(text: bytes) -> None:
    """A document with less than the fields common to all versions is refused."""
    attacked = bucket()
    attacked.put("manifest.json", seal(text))
    assert_refused(attacked, CorruptCheckpointError, UnsupportedFormatError)
