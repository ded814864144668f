"""Valid objects in wrong places, forged block tables, changed headers, and pickles with a valid digest."""

from __future__ import annotations

import base64
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dcp_remote import load
from dcp_remote.common.digests import digest
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpRemoteError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from dcp_remote.format.columns import to_base64
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.format.manifest_json import make_tombstone
from tests.attacks.attacker import (
    LOADS,
    LOOKS,
    SHAPE,
    Bucket,
    assert_harmless,
    bucket,
    call,
    numbers,
    outcomes,
    saved,
    stream,
    with_number,
    word,
)

pytestmark = pytest.mark.torture

DIGEST_BYTES = 16
BLOCK_BYTES = 65536


def of_the_same_shapes(value: float) -> dict[str, bytes]:
    """Return the objects of another checkpoint that differs only in its numbers."""
    return saved(torch.full(SHAPE, value))


def refused_by(attacked: Bucket) -> dict[str, DcpRemoteError]:
    """Return the errors of those loads that fail; the others load the saved values."""
    return {name: error for name, error in outcomes(attacked, LOADS).items() if error is not None}


def assert_corrupt(attacked: Bucket) -> None:
    """Check that each load names a shard as damaged."""
    found = refused_by(attacked)
    assert set(found) == set(LOADS)
    assert all(isinstance(error, CorruptCheckpointError) and "shards/" in str(error) for error in found.values())


def test_what_was_saved_is_harmless() -> None:
    """The checkpoint without an attack loads for every victim."""
    assert_harmless(bucket())


# ---- objects in wrong places


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_a_shard_of_another_checkpoint(value: float) -> None:
    """A shard of another checkpoint with equal size and layout, under a key of this one, is refused."""
    attacked = bucket()
    [model, _] = attacked.document()["shards"]["keys"]
    length = len(attacked.objects[model])
    [foreign] = [data for data in of_the_same_shapes(value).values() if len(data) == length]
    attacked.put(model, foreign)
    assert_corrupt(attacked)


def test_two_shards_that_changed_places() -> None:
    attacked = bucket()
    one, other = attacked.document()["shards"]["keys"]
    objects = attacked.objects
    attacked.put(one, objects[other])
    attacked.put(other, objects[one])
    assert_corrupt(attacked)


def test_a_manifest_at_another_prefix() -> None:
    """A manifest copied to another prefix without its shards is refused: its keys lead to no other prefix."""
    attacked = bucket()
    elsewhere = attacked.store.child("elsewhere")
    elsewhere.put(MANIFEST_KEY, [attacked.objects[MANIFEST_KEY]])
    with pytest.raises(CorruptCheckpointError, match="missing"):
        load(elsewhere)
    assert load(attacked.store)["step"] == 3


def test_a_manifest_of_another_save() -> None:
    """A manifest whose shards are elsewhere, or were replaced by those of a newer save, is refused."""
    attacked = bucket()
    newer, earlier = of_the_same_shapes(2.0), attacked.objects
    attacked.put(MANIFEST_KEY, newer[MANIFEST_KEY])
    assert_corrupt(attacked)
    for key in earlier:
        del attacked.store.space.objects[key]
    for key, data in {**newer, MANIFEST_KEY: earlier[MANIFEST_KEY]}.items():
        attacked.store.put(key, [data])
    assert_corrupt(attacked)


def test_a_tombstone_over_a_checkpoint() -> None:
    """A tombstone in place of the manifest means that there is no checkpoint, whatever shards exist."""
    attacked = bucket()
    attacked.put(MANIFEST_KEY, make_tombstone("0" * 32, ()))
    assert {type(error) for error in outcomes(attacked, LOADS | LOOKS).values()} == {CheckpointNotFoundError}


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 200, -1])
def test_a_shard_that_is_shorter(cut: int) -> None:
    """A shard cut short, to nothing, in its header or by a byte, is refused."""
    attacked = bucket()
    for key in attacked.document()["shards"]["keys"]:
        attacked.put(key, attacked.objects[key][:cut])
    assert set(refused_by(attacked)) >= {"load", "template"}


def test_a_shard_that_is_longer() -> None:
    """Bytes behind the end that the manifest states are not read."""
    attacked = bucket()
    for key in attacked.document()["shards"]["keys"]:
        attacked.put(key, attacked.objects[key] + b"evil" * 1000)
    assert refused_by(attacked) == {}


def test_a_shard_in_place_of_the_manifest() -> None:
    attacked = bucket()
    key = attacked.document()["shards"]["keys"][0]
    manifest, shard = attacked.objects[MANIFEST_KEY], attacked.objects[key]
    attacked.put(key, manifest)
    assert_corrupt(attacked)
    attacked.put(MANIFEST_KEY, shard)
    assert {type(error) for error in outcomes(attacked, LOADS | LOOKS).values()} == {CorruptCheckpointError}


# ---- block tables: a partial read and a full read must see the same


def table_of(attacked: Bucket) -> tuple[str, int, int]:
    """Return the key of the model's shard, and the start and end of its block table."""
    shards = attacked.document()["shards"]
    stop = numbers(shards["data_starts"])[0]
    return shards["keys"][0], stop - numbers(shards["table_lengths"])[0], stop


def state_digest(document: dict[str, Any], part: str, name: str, index: int, value: bytes) -> None:
    """Write another digest into a list of digests of the document."""
    digests = bytearray(base64.b64decode(document[part][name]))
    digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)] = value
    document[part][name] = to_base64(bytes(digests))


def put_table(attacked: Bucket, table: bytes) -> None:
    """Write another table of the same length, and state its digest."""
    key, start, stop = table_of(attacked)
    assert len(table) == stop - start
    data = attacked.objects[key]
    attacked.put(key, data[:start] + table + data[stop:])
    document = attacked.document()
    state_digest(document, "shards", "table_digests", 0, digest(table))
    attacked.commit(document)


def test_a_forged_table_for_forged_data() -> None:
    """A block of rows, its entry and the table's digest are exchanged: the digest of the piece shows it."""
    attacked = bucket()
    key, start, stop = table_of(attacked)
    data = bytearray(attacked.objects[key])
    block = 4  # of rows 285 to 356
    where = slice(stop + block * BLOCK_BYTES, stop + (block + 1) * BLOCK_BYTES)
    data[where] = bytes(len(data[where]))
    attacked.put(key, bytes(data))
    table = bytearray(data[start:stop])
    table[DIGEST_BYTES * block : DIGEST_BYTES * (block + 1)] = digest(bytes(len(data[where])))
    put_table(attacked, bytes(table))
    assert set(refused_by(attacked)) == set(LOADS)


@pytest.mark.parametrize("name", ["zeros", "reversed", "shifted"])
def test_a_table_of_other_digests(name: str) -> None:
    """A table of wrong entries with a valid digest fails partial reads; whole pieces are read without the table."""
    attacked = bucket()
    key, start, stop = table_of(attacked)
    table = attacked.objects[key][start:stop]
    entries = [table[at : at + DIGEST_BYTES] for at in range(0, len(table), DIGEST_BYTES)]
    zeros = [bytes(DIGEST_BYTES)] * len(entries)
    forged = {"zeros": zeros, "reversed": entries[::-1], "shifted": [*entries[1:], entries[0]]}
    put_table(attacked, b"".join(forged[name]))
    assert set(refused_by(attacked)) == {"rows"}


def test_a_table_that_begins_elsewhere() -> None:
    """A table that begins in the header fails partial reads, unless the piece's entries are moved along with it."""
    attacked = bucket()
    document = attacked.document()
    key, start, stop = table_of(attacked)
    state_digest(document, "shards", "table_digests", 0, digest(attacked.objects[key][start - DIGEST_BYTES : stop]))
    attacked.commit(with_number(document, "shards.table_lengths", 0, lambda n: n + DIGEST_BYTES))
    assert set(refused_by(attacked)) == {"rows"}
    # The piece's entries now begin at the second place: with that stated, the checkpoint is as before.
    attacked.commit(with_number(document, "pieces.table", 0, lambda _: 1))
    assert refused_by(attacked) == {}


def test_digests_of_other_pieces() -> None:
    """Digests exchanged between pieces in the manifest fail every full load, in any order of reads."""
    whole = base64.b64decode(bucket().document()["pieces"]["digests"])
    parts = [whole[at : at + DIGEST_BYTES] for at in range(0, len(whole), DIGEST_BYTES)]
    for one in range(len(parts)):
        other = (one + 1) % len(parts)
        attacked = bucket()
        document = attacked.document()
        state_digest(document, "pieces", "digests", one, parts[other])
        state_digest(document, "pieces", "digests", other, parts[one])
        attacked.commit(document)
        assert set(refused_by(attacked)) >= {"load", "template"}


# ---- headers, which other tools read: for dcp_remote the manifest alone counts


def padded(text: bytes, length: int) -> bytes:
    assert len(text) <= length - 8
    return (length - 8).to_bytes(8, "little") + text.ljust(length - 8)


def tensor_header(shape: list[int], offsets: list[int]) -> bytes:
    return json.dumps({"a": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}).encode()


ONE, OTHER = tensor_header([1], [0, 1]), tensor_header([1], [1, 2])

HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "length of 16 EiB": lambda header: b"\xff" * 8 + header[8:],
    "length of 100 MB": lambda header: (10**8).to_bytes(8, "little") + header[8:],
    "nothing": lambda header: padded(b"{}", len(header)),
    "no JSON": lambda header: padded(b"\xff\x00{", len(header)),
    "deep": lambda header: padded(b"[" * (len(header) - 8), len(header)),
    "a name twice": lambda header: padded(ONE[:-1] + b"," + OTHER[1:], len(header)),
    "offsets beyond the file": lambda header: padded(tensor_header([2**40], [0, 2**40]), len(header)),
    "offsets backwards": lambda header: padded(tensor_header([1], [1, 0]), len(header)),
    "a shape that wraps around": lambda header: padded(tensor_header([2**32, 2**32], [0, 0]), len(header)),
    "the other tensors": lambda header: header.replace(b"weight", b"thgiew"),
}


def with_header(attacked: Bucket, key: str, change: Callable[[bytes], bytes]) -> bytes:
    """Return a shard with other bytes before its block table, or before its data."""
    shards = attacked.document()["shards"]
    shard = shards["keys"].index(key)
    stop = numbers(shards["data_starts"])[shard] - numbers(shards["table_lengths"])[shard]
    data = attacked.objects[key]
    changed = change(data[:stop])
    assert len(changed) == stop
    return changed + data[stop:]


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_of_anything(name: str) -> None:
    """With any header in every shard, data and manifest unchanged, each load gets the saved values."""
    attacked = bucket()
    for key in attacked.document()["shards"]["keys"]:
        attacked.put(key, with_header(attacked, key, HEADERS[name]))
    assert refused_by(attacked) == {}


# ---- objects with a valid digest


@pytest.mark.parametrize(("entry", "piece"), [("sparse", 2), ("shared", 4)])
@pytest.mark.parametrize("encoding", ["torch", "pickle"])
def test_a_checkpoint_with_a_pickle(entry: str, piece: int, encoding: str, tmp_path: pathlib.Path) -> None:
    """A pickle with a valid digest in a tensor's or object's stream is refused by name, also with a template."""
    folder = tmp_path / "made"
    evil = stream(call("os", "mkdir", word(str(folder))))
    attacked = bucket()
    document = attacked.document()
    shard, start = (numbers(document["pieces"][name])[piece] for name in ("shard", "start"))
    key = document["shards"]["keys"][shard]
    data = attacked.objects[key]
    attacked.put(key, data[:start] + evil + data[start + len(evil) :])
    document = with_number(document, "pieces.length", piece, lambda length: min(length, len(evil)))
    state_digest(document, "pieces", "digests", piece, digest(digest(evil)))
    kinds, stored = document["tensors"]["kinds"], document["objects"]["stored"]
    (kinds if entry == "sparse" else stored)[1]["encoding"] = encoding
    attacked.commit(document)
    found = refused_by(attacked)
    assert set(found) == {"load", "template"}, "rows do not need that entry"
    assert {type(error) for error in found.values()} == {UnsafeObjectError}
    assert found["load"].details["key"] == entry
    assert not folder.exists()


@pytest.mark.parametrize("number", [0, 1])
def test_an_object_that_is_said_to_be_raw_bytes_behind_a_text(number: int) -> None:
    attacked = bucket()
    document = attacked.document()
    document["objects"]["stored"][number]["encoding"] = "json+raw"
    attacked.commit(document)
    assert set(refused_by(attacked)) == {"load", "template"}, "rows do not need that entry"


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
    assert isinstance(refused_by(attacked)["template"], UnsupportedFormatError)
    assert set(sys.modules) == before
