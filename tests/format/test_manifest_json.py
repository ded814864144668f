"""The document: round trips, every single change, forged documents, and size."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.common.geometry import Box
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, UnsupportedFormatError
from dcp_remote.format import catalog_json, document, manifest_json
from dcp_remote.format.document import COMPRESS_FROM_BYTES, seal, unseal
from dcp_remote.format.manifest import JSON, REPLACES_MAX, TORCH, Manifest, RunInfo, TensorKind
from dcp_remote.format.manifest_json import decode_head, encode, make_tombstone
from tests.attacks.attacker import column, numbers
from tests.attacks.test_documents import COLUMNS
from tests.support.manifests import Layout, ObjectLayout, assert_sound, build, decode, manifests, plain

REFUSED = (CorruptCheckpointError, UnsupportedFormatError)
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def example() -> Manifest:
    """Return a manifest with every kind of entry."""
    quarters = tuple(Box((i, j), (2, 3)) for i in (0, 2) for j in (0, 3))
    manifest = build(
        [
            Layout("model.w", TensorKind("float32"), (4, 6), quarters, ((24,), (8, 16), (24,), (24,))),
            Layout("model.e", TensorKind("float32"), (0, 6), (Box((0, 0), (0, 6)),), ((),)),
            Layout("optim.s", TensorKind("complex128", encoding=TORCH), (2,), (Box((0,), (2,)),), ((70_000, 5),)),
        ],
        [ObjectLayout("optim.o", TORCH, (100, 20)), ObjectLayout("j", JSON, (30_000,))],
        {"step": b"1", "args": b'{"lr":0.1}'},
        shard_of=[0, 0, 1, 1, 0, 1, 0, 0, 1, 1],
        gap_bytes=1,
        seed=5,
    )
    return replace(
        manifest,
        replaces=("1" * 32,),
        run=RunInfo("7" * 32, 5, 2, 9, ("best", "émile"), (("loss", 0.25), ("accuracy", 1e-300)), ("optim",)),
        flatten={
            "model.w": ("model", "w"),
            "model.e": ("model", "e"),
            "optim.s": ("optim", 0),
            "optim.o": ("optim", 1),
        },
    )


def large() -> Manifest:
    """Return a manifest of 2,000 tensors, which is compressed."""
    kind = TensorKind("uint8")
    return build([Layout(f"model.layers.{n}.bias", kind, (1,), (Box((0,), (1,)),), ((1,),)) for n in range(2000)])


def example_document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(unseal(encode(example())))
    return loaded


def dump(value: object) -> bytes:
    """Seal a changed document, so that its digest is right and later checks are reached."""
    return seal(json.dumps(value, separators=(",", ":")).encode())


def refused_or_sound(data: bytes) -> Manifest | None:
    """Decoding raises one of our two errors, or returns a sound manifest."""
    try:
        manifest = decode(data)
    except REFUSED:
        return None
    assert_sound(manifest)
    return manifest


@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    """Decoding returns equal plain values; equal manifests have equal bytes."""
    data = encode(manifest)
    assert plain(decode(data)) == plain(manifest)
    head = decode_head(data)
    assert (head.kind, head.save_id, head.replaces) == ("checkpoint", manifest.save_id, manifest.replaces)
    assert encode(decode(data)) == data


def test_round_trip_of_everything() -> None:
    """Round trip of per-rank objects and paths, which the strategy leaves out, and of a compressed document."""
    assert plain(decode(encode(example()))) == plain(example())
    data = encode(large())
    assert data.startswith(ZSTD_MAGIC)
    assert plain(decode(data)) == plain(large())


def test_small_documents_are_plain_json() -> None:
    """A small document is plain JSON with columns as specified: width, then differences."""
    loaded = example_document()
    assert loaded["chunks"]["pieces"] == "1:" + base64.b64encode(bytes([1, 1, 255, 0, 255, 2])).decode()
    assert loaded["objects"]["inline"] == {"step": 1, "args": {"lr": 0.1}}
    assert len(encode(example())) < COMPRESS_FROM_BYTES


# ---- one number changed


@pytest.mark.parametrize("path", COLUMNS)
def test_a_number_changed(path: str) -> None:
    """Each entry of each column is changed a little, to a negative or huge number, removed, added or swapped."""
    part, name = path.split(".")
    values = numbers(example_document()[part][name])
    assert values

    def changed_to(other: list[int]) -> Manifest | None:
        changed = example_document()
        changed[part][name] = column(other)
        return refused_or_sound(dump(changed))

    assert plain(changed_to(values)) == plain(example()), "another width is the same column"
    for others in (values[:-1], [*values, 0], []):
        assert changed_to(others) is None
    for i, value in enumerate(values):
        for other in (value - 1, value + 1, value + 16, -1, 2**53, 2**53 + 1, 2**62):
            accepted = changed_to([*values[:i], other, *values[i + 1 :]])
            assert accepted is None or 0 <= other <= 2**53
        for j in range(i):
            swapped = list(values)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            changed_to(swapped)


def test_tombstones_are_no_checkpoints() -> None:
    data = make_tombstone("0" * 32, ("1" * 32,))
    head = decode_head(data)
    assert (head.kind, head.save_id, head.replaces) == ("tombstone", "0" * 32, ("1" * 32,))
    assert manifest_json.decode(data) is None
    assert manifest_json.decode(dump({**example_document(), "kind": "tombstone"})) is None
    with pytest.raises(CorruptCheckpointError, match="not that of a checkpoint"):
        decode(dump({**example_document(), "kind": "grave"}))


# ---- damaged and hostile bytes


@pytest.mark.parametrize("data", [encode(example()), encode(large())], ids=["json", "zstd"])
def test_truncated(data: bytes) -> None:
    """A document truncated at every twentieth byte, and by one byte, is refused."""
    for stop in [*(len(data) * n // 20 for n in range(20)), len(data) - 1]:
        for read in (decode, decode_head):
            with pytest.raises(CorruptCheckpointError):
                read(data[:stop])


@given(st.binary(max_size=200) | st.binary(max_size=200).map(ZSTD_MAGIC.__add__))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode(data)


@pytest.mark.parametrize("text", [b"null", b"[]", b"{}", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"NaN"])
def test_other_texts(text: bytes) -> None:
    for read in (decode, decode_head):
        with pytest.raises(CorruptCheckpointError):
            read(text)


@pytest.mark.parametrize("text", [b'{"format":"\xff"}', b'{"format":"\\ud800"}', b'{"format":NaN}', b'{"a":1}'])
def test_sealed_texts_that_are_no_document(text: bytes) -> None:
    for read in (decode, decode_head, catalog_json.decode):
        with pytest.raises(CorruptCheckpointError):
            read(seal(text))


def test_user_metadata_is_bounded() -> None:
    """User metadata is bounded, since many small values take many times the memory of their text."""
    with pytest.raises(InvalidArgumentError, match="too large"):
        encode(replace(example(), user={"x": "y" * 2 * MiB}))
    assert decode(encode(replace(example(), user={"x": "y" * (MiB - 100)}))).user["x"] == "y" * (MiB - 100)


@pytest.mark.parametrize("user", [{"x": object()}, {"x": 1j}, {"x": "\ud800"}, {1.5j: 1}])
def test_what_json_cannot_say(user: dict[Any, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="JSON"):
        encode(replace(example(), user=user))


def test_lone_surrogates_in_names() -> None:
    """Lone surrogates, which Python strings may hold, are refused; other names are written."""
    layout = Layout("\ud800", TensorKind("uint8"), (), (Box((), ()),), ((1,),))
    with pytest.raises(InvalidArgumentError, match="JSON"):
        encode(build([layout]))
    for name in ("", "\0", '"\\', "\u2028", "\U0001f600", "a" * 10_000):
        assert decode(encode(build([replace(layout, name=name)]))).tensors.names == (name,)


def test_unreadable_manifests_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("DOCUMENT_BYTES_MAX", "STORED_BYTES_MAX"):
        with monkeypatch.context() as patch:
            patch.setattr(document, limit, 20 * KiB)
            with pytest.raises(InvalidArgumentError, match="larger than readers accept"):
                encode(large())
    with pytest.raises(CorruptCheckpointError):
        encode(replace(example(), world_size=0))


def test_save_ids() -> None:
    """Heads, tombstones and whole documents have well-formed save_ids, and at most 64 in `replaces`."""
    many = tuple(f"{n:032x}" for n in range(REPLACES_MAX + 1))
    assert decode_head(make_tombstone("f" * 32, many[1:])).replaces == many[1:]
    assert decode(encode(replace(example(), replaces=many[1:]))).replaces == many[1:]
    bad = ("", "f" * 31, "f" * 33, "F" * 32, "g" * 32, "f" * 32 + "\n", "\u0661" * 32)
    changes: list[tuple[str, tuple[str, ...]]] = [("f" * 32, many), *((save_id, ()) for save_id in bad)]
    changes += [("f" * 32, ("0" * 32, save_id)) for save_id in bad]
    for save_id, replaces in changes:
        with pytest.raises(CorruptCheckpointError, match=r"save_id|more saves"):
            make_tombstone(save_id, replaces)
        with pytest.raises(CorruptCheckpointError, match=r"save_id|more saves"):
            encode(replace(example(), save_id=save_id, replaces=replaces))
        for read in (decode, decode_head):
            with pytest.raises(CorruptCheckpointError, match=r"save_id|more saves"):
                read(dump({**example_document(), "save_id": save_id, "replaces": list(replaces)}))


def test_many_threads_decode_at_once_for_the_first_time(tmp_path: Path) -> None:
    """As when a process reads all manifests of a run: msgspec 0.22 crashes if it learns a type in two threads."""
    (tmp_path / "manifest.json").write_bytes(encode(example()))
    program = f"""
        import sys, threading
        from pathlib import Path
        from dcp_remote.format import manifest_json
        sys.setswitchinterval(1e-6)
        data = Path({str(tmp_path / "manifest.json")!r}).read_bytes()
        start = threading.Barrier(8)
        def decode():
            start.wait()
            manifest_json.decode(data)
        threads = [threading.Thread(target=decode) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    """
    for _ in range(2):
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
