"""The document: round trips, every single change, forged documents, and size."""

from __future__ import annotations

import base64
import itertools
import json
import random
import subprocess
import sys
import textwrap
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.common.geometry import Box
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, UnsupportedFormatError
from dcp_remote.format import catalog_json, document, manifest_json
from dcp_remote.format.document import COMPRESS_FROM_BYTES, seal, unseal
from dcp_remote.format.manifest import JSON, REPLACES_MAX, TORCH, Manifest, RunInfo, TensorKind
from dcp_remote.format.manifest_json import decode_head, encode, make_tombstone
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

COLUMNS = {
    "shards": ("sizes", "data_starts", "table_lengths"),
    "tensors": ("kind", "dimensions", "shape", "chunks"),
    "chunks": ("offsets", "sizes", "pieces"),
    "pieces": ("shard", "start", "length", "table"),
    "objects": ("positions",),
}


def numbers(text: str) -> list[int]:
    width, data = int(text[0]), base64.b64decode(text[2:])
    steps = [int.from_bytes(data[i : i + width], "little", signed=True) for i in range(0, len(data), width)]
    return list(itertools.accumulate(steps))


def packed(values: list[int]) -> str:
    steps = [b - a for a, b in itertools.pairwise([0, *values])]
    return "8:" + base64.b64encode(b"".join(s.to_bytes(8, "little", signed=True) for s in steps)).decode()


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in COLUMNS.items() for name in names])
def test_a_number_changed(part: str, name: str) -> None:
    """Each entry of each column is changed a little, to a negative or huge number, removed, added or swapped."""
    values = numbers(example_document()[part][name])
    assert values

    def changed_to(other: list[int]) -> Manifest | None:
        changed = example_document()
        changed[part][name] = packed(other)
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


def test_digests_of_another_length() -> None:
    for part, field in (("pieces", "digests"), ("shards", "table_digests")):
        for change in (-16, -1, 1, 16):
            changed = example_document()
            data = base64.b64decode(changed[part][field])
            data = data[:change] if change < 0 else data + bytes(change)
            changed[part][field] = base64.b64encode(data).decode()
            with pytest.raises(CorruptCheckpointError, match="wrong length"):
                decode(dump(changed))


def test_a_name_given_twice() -> None:
    """JSON allows a repeated name; the lost entry is noticed."""
    text = unseal(encode(example()))
    assert text.count(b'"step":1') == 1
    with pytest.raises(CorruptCheckpointError, match="positions"):
        decode(seal(text.replace(b'"step":1', b'"args":1')))
    with pytest.raises(CorruptCheckpointError, match="same name"):
        decode(seal(text.replace(b'"model.e"', b'"model.w"')))


def test_other_versions() -> None:
    """The version and `requires` are checked first, as other fields may have any form in another version."""
    changes: list[dict[str, Any]] = [
        {"version": "2", "shards": "?", "tensors": None, "requires": 7, "save_id": None, "kind": [], "writer": 1},
        {"version": "1-draft.3"},
        {"requires": ["dedup"], "pieces": 7},
        {"requires": [f"x{n}" for n in range(10_000)]},
        {"version": "9" * 10_000},
    ]
    for change in changes:
        with pytest.raises(UnsupportedFormatError) as caught:
            decode(dump({**example_document(), **change}))
        assert len(str(caught.value)) < 1500
        with pytest.raises(UnsupportedFormatError):
            decode_head(dump({**example_document(), **change}))
    with pytest.raises(UnsupportedFormatError):
        decode(dump({**example_document(), "digest": "md5"}))
    with pytest.raises(CorruptCheckpointError, match="not a manifest of dcp_remote"):
        decode(dump({**example_document(), "format": "zarr"}))


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


@pytest.mark.parametrize("data", [encode(example()), encode(large())], ids=["json", "zstd"])
def test_flipped(data: bytes) -> None:
    """Flip one random bit of 500 random bytes: refused, or (in fields of the zstd frame) the same document."""
    rng = random.Random(7)
    for _ in range(500):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            manifest = decode(bytes(flipped))
        except CorruptCheckpointError:
            continue
        assert plain(manifest) == plain(decode(data))


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


@pytest.mark.parametrize("field", ["user", "objects", "run", "created", "from the future"])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'], ids=["lists", "dicts"])
def test_deep_nesting(field: str, opening: bytes) -> None:
    """A million levels of nesting are refused anywhere, closed or not."""
    closing = b"]" if opening == b"[" else b"}"
    for tail in (b"", b"1" + closing * 1_000_000):
        text = unseal(dump({**example_document(), field: 7})).replace(
            b'"%b":7' % field.encode(), b'"%b":' % field.encode() + opening * 1_000_000 + tail
        )
        with pytest.raises(CorruptCheckpointError):
            decode(seal(text))


def peak_bytes(data: bytes) -> int:
    """Return the peak memory of refusing a document, in bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError):
            decode(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_bombs(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB in a small frame, with a true, false or missing content size, are refused (limit lowered to 1 MiB)."""
    monkeypatch.setattr(document, "DOCUMENT_BYTES_MAX", MiB)
    spaces = b" " * (64 * MiB)
    honest = zstandard.ZstdCompressor().compress(spaces)
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(spaces)
    # The frame says 64 KiB, and holds 64 MiB (RFC 8878: with 0x80 in the descriptor, four bytes after the window).
    liar = bytearray(silent)
    assert liar[4] & 0xE0 == 0, "no single segment and no content size"
    liar[4] |= 0x80
    liar[6:6] = (64 * KiB).to_bytes(4, "little")
    assert zstandard.frame_content_size(bytes(liar)) == 64 * KiB
    for bomb in (honest, silent, bytes(liar)):
        assert peak_bytes(bomb) < 4 * MiB
    wide = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    )
    assert peak_bytes(wide.compress(dump(example_document()) + spaces)) < 4 * MiB


def test_many_frames_are_not_one_document() -> None:
    """Bytes after the first frame, a frame or anything else, are refused."""
    whole = zstandard.ZstdCompressor().compress(dump(example_document()))
    assert plain(decode(whole)) == plain(example())
    for more in (b"\0", b"\n", whole, zstandard.ZstdCompressor().compress(b"")):
        for read in (decode, decode_head):
            with pytest.raises(CorruptCheckpointError, match="cannot be decompressed"):
                read(whole + more)
    one = zstandard.ZstdCompressor().compress(dump(example_document())[:100])
    other = zstandard.ZstdCompressor().compress(dump(example_document())[100:])
    with pytest.raises(CorruptCheckpointError):
        decode(one + other)


def test_user_metadata_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """User metadata is bounded, since many small values take many times the memory of their text."""
    lists = {**example_document(), "user": {"x": [[]] * (10 * MiB // 4)}}
    assert peak_bytes(dump(lists)) < 25 * MiB
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
            with pytest.raises(InvalidArgumentError, match="more chunks"):
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
