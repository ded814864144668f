"""Stored catalogs: round trips, every check, forged documents with valid digests, and damage to every byte."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from hypothesis import given

from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, UnsupportedFormatError
from dcp_remote.format import catalog_json
from dcp_remote.format.catalog import Catalog
from dcp_remote.format.catalog_json import check, decode, encode
from dcp_remote.format.document import COMPRESS_FROM_BYTES, seal, unseal
from tests.support.catalogs import catalog, catalogs, entry, identity

NONCE, OTHER_NONCE = "0" * 32, "1" * 32

Document: TypeAlias = dict[str, Any]

EXAMPLE = catalog(
    entry(1, names=("best", "ünï"), metrics=(("loss", 0.25), ("accuracy", 1.0)), pinned=True),
    entry(2, thinned=("optim",), abandoned=True),
    entry(3, began_revision=9),
    floor=3,
)


def document() -> Document:
    loaded: Document = json.loads(unseal(encode(EXAMPLE, NONCE)))
    return loaded


def dump(value: object) -> bytes:
    """Seal a changed document, so that its digest is right and later checks are reached."""
    return seal(json.dumps(value, separators=(",", ":")).encode())


def large() -> Catalog:
    """Return a catalog large enough to be compressed."""
    return catalog(*(entry(step) for step in range(1_000)))


@given(catalogs())
def test_round_trip(run: Catalog) -> None:
    """Any catalog is decoded as it was encoded, metrics in their order and to the last bit."""
    assert repr(decode(encode(run, NONCE))) == repr(run)


def test_round_trip_of_a_large_one() -> None:
    """Compression makes the repeated fields of a large catalog cost nearly nothing."""
    data = encode(large(), NONCE)
    assert len(unseal(data)) > COMPRESS_FROM_BYTES
    assert len(data) < 50 * len(large().entries)
    assert decode(data) == large()


def test_default_values_are_left_out() -> None:
    """Fields with default values are left out, since a catalog is read at every access to a run."""
    assert list(document()["checkpoints"][2]) == [
        "step",
        "save_id",
        "manifest",
        "size_bytes",
        "created",
        "token",
        "began",
    ]


def test_equal_catalogs_are_different_objects() -> None:
    """The nonce makes the bytes differ: equal bytes could get an equal version (ETag)."""
    assert encode(EXAMPLE, NONCE) != encode(EXAMPLE, OTHER_NONCE)
    assert decode(encode(EXAMPLE, NONCE)) == decode(encode(EXAMPLE, OTHER_NONCE))


def changed(at: int, **fields: Any) -> Catalog:
    """Return a catalog with changed fields in the checkpoint of a step."""
    entries = tuple(replace(one, **fields) if one.step == at else one for one in EXAMPLE.entries)
    return replace(EXAMPLE, entries=entries)


WRONG: dict[str, Catalog] = {
    "run_id is short": replace(EXAMPLE, run_id="f" * 31),
    "run_id is upper case": replace(EXAMPLE, run_id="F" * 32),
    "run_id in other digits": replace(EXAMPLE, run_id="\u0661" * 32),
    "run_id ends a line": replace(EXAMPLE, run_id="f" * 31 + "\n"),
    "revision too high": replace(EXAMPLE, revision=2**53 + 1),
    "floor above the revision": replace(EXAMPLE, floor=11),
    "step too high": changed(3, step=2**53 + 1),
    "token of a checkpoint above the run's": changed(1, token=2),
    "began when it was committed": changed(1, began_revision=10),
    "save_id is no identity": changed(1, save_id="best"),
    "save_id twice": changed(1, save_id=identity(2)),
    "manifest twice": changed(1, manifest=entry(2).manifest),
    "name twice": changed(2, names=("best",)),
    "name twice at one checkpoint": changed(2, names=("last", "last")),
    "not in order": replace(EXAMPLE, entries=EXAMPLE.entries[::-1]),
    "step twice": changed(1, step=2),
    "metric twice": changed(1, metrics=(("loss", 1.0), ("loss", 2.0))),
    "metric is NaN": changed(1, metrics=(("loss", float("nan")),)),
    "metric is infinite": changed(1, metrics=(("loss", float("-inf")),)),
    "long name": changed(1, names=("x" * 1_001,)),
    "long name of a metric": changed(1, metrics=(("x" * 1_001, 1.0),)),
    "long time": changed(1, created="x" * 1_001),
    "long key": changed(1, thinned=("x" * 1_001,)),
    "name is not Unicode": changed(1, names=("\ud800",)),
    "metric is not Unicode": changed(1, metrics=(("\udfff", 1.0),)),
    **{
        f"manifest {key!r}"[:60]: changed(1, manifest=key)
        for key in (
            *("", "manifest.json", "manifests/.json", "manifests/..json", "manifests/a..json", "manifests/../a.json"),
            *("manifests/a/b.json", "manifests//a.json", "/manifests/a.json", "manifests/a.json/", "shards/a.json"),
            *("manifests/a.json\n", "manifests/ä.json", "manifests/a\0.json", "manifests/a b.json"),
            *("manifests/a%2f.json", "manifests/a.JSON", f"manifests/{'a' * 201}.json"),
        )
    },
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_catalogs(what: str) -> None:
    """An invalid catalog is refused before it is written, and again when its bytes are read."""
    wrong = WRONG[what]
    with pytest.raises(CorruptCheckpointError):
        check(wrong)
    with pytest.raises(CorruptCheckpointError):
        encode(wrong, NONCE)


def test_too_many_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalog with one checkpoint above the limit (lowered here) is refused."""
    monkeypatch.setattr(catalog_json, "ENTRIES_MAX", 3)
    assert check(EXAMPLE) == EXAMPLE
    with pytest.raises(CorruptCheckpointError, match="limit=3"):
        check(replace(EXAMPLE, entries=(*EXAMPLE.entries, entry(4))))


def test_too_large_catalogs_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalog above the size limit (lowered here) is not written, since the run could never be read again."""
    length = len(encode(EXAMPLE, NONCE))
    monkeypatch.setattr(catalog_json, "STORED_BYTES_MAX", length)
    encode(EXAMPLE, NONCE)
    monkeypatch.setattr(catalog_json, "STORED_BYTES_MAX", length - 1)
    with pytest.raises(InvalidArgumentError, match=f"stored_bytes={length}"):
        encode(EXAMPLE, NONCE)


def test_features_that_a_writer_must_know() -> None:
    """A catalog that names them is read, with all fields, but neither written nor changed."""
    newer = decode(dump(document() | {"requires_to_write": ["wings"]}))
    assert replace(newer, requires_to_write=()) == EXAMPLE
    for changed in (newer, replace(newer, revision=newer.revision + 1)):
        with pytest.raises(UnsupportedFormatError, match="wings"):
            encode(changed, NONCE)


def test_the_holder_may_be_left_out() -> None:
    """A release that does not know the field leaves it out; a text that is no such text is refused."""
    held = replace(EXAMPLE, holder="gpu-07, pid 4711")
    assert decode(encode(held, NONCE)) == held
    assert "holder" not in document()
    for wrong in (7, "x" * 1001):
        with pytest.raises(CorruptCheckpointError):
            decode(dump(document() | {"holder": wrong}))


def test_numbers_of_metrics() -> None:
    """An integer is accepted as a metric: other writers may leave out the fraction."""
    written = document()
    written["checkpoints"][0]["metrics"] = {"loss": 1}
    assert decode(dump(written)).entries[0].metrics == (("loss", 1.0),)


def test_damage_to_any_byte() -> None:
    """Flip one bit or all bits of each byte of a small catalog, and truncate it at each byte."""
    data = encode(EXAMPLE, NONCE)
    for index in range(len(data)):
        for flip in (1 << index % 8, 0xFF):
            damaged = bytearray(data)
            damaged[index] ^= flip
            with pytest.raises(CorruptCheckpointError):
                decode(bytes(damaged))
        with pytest.raises(CorruptCheckpointError):
            decode(data[:index])
    with pytest.raises(CorruptCheckpointError):
        decode(data + b" ")
