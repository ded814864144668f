"""Small inputs that would fill the memory: frames, columns, zips, claims."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zstandard

from dcp_remote import load
from dcp_remote.common.geometry import Box
from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError
from dcp_remote.format import document, manifest_json
from dcp_remote.format.document import seal
from dcp_remote.format.manifest import JSON, RAW, TORCH, Manifest, TensorKind
from dcp_remote.format.manifest_json import encode
from dcp_remote.loading.downloads import RANGE_BYTES_MAX
from dcp_remote.loading.read_plan import RANGES_MAX, Want, plan_reads
from dcp_remote.serialization.objects import EncodedObject, decode_object
from dcp_remote.storage import MemoryStore
from tests.attacks.attacker import LOADS, bucket, column, outcomes, stream
from tests.support.figures import count
from tests.support.manifests import Layout, ObjectLayout, build

pytestmark = pytest.mark.torture


@contextmanager
def at_most(size_bytes: int) -> Iterator[None]:
    """Check that the block allocates no more."""
    count("attacks")
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size_bytes
    finally:
        tracemalloc.stop()


def frame(size_bytes: int, *, says: bool = True) -> bytes:
    """Return a frame of spaces, a few KiB for each GiB."""
    compressor = zstandard.ZstdCompressor(write_content_size=says).compressobj(size=size_bytes if says else -1)
    return b"".join(compressor.compress(b" " * MiB) for _ in range(size_bytes // MiB)) + compressor.flush()


def lying(frame_of: bytes, size_bytes: int) -> bytes:
    """Return the same frame with another size in its header (RFC 8878, section 3.1.1)."""
    data = bytearray(frame_of)
    descriptor = data[4]
    size_at = 5 + (0 if descriptor & 0x20 else 1)
    width = {0: 1, 1: 2, 2: 4, 3: 8}[descriptor >> 6]
    data[size_at : size_at + width] = size_bytes.to_bytes(width, "little")
    return bytes(data)


def test_a_manifest_as_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame of 64 MiB is refused, whatever size it states, with no more memory than the limit of 16 MiB."""
    monkeypatch.setattr(document, "DOCUMENT_BYTES_MAX", 16 * MiB)
    honest = frame(64 * MiB)
    bombs = [honest, frame(64 * MiB, says=False), lying(honest, 8 * MiB), lying(honest, 2**32 - 1)]
    # A window of 256 MiB, which a decoder would take at once.
    wide = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    bombs.append(zstandard.ZstdCompressor(compression_params=wide).compress(b" " * 64 * MiB))
    for bomb in (*bombs, lying(frame(4 * MiB), 15 * MiB)):
        attacked = bucket()
        attacked.put("manifest.json", bomb)
        with at_most(40 * MiB):
            assert {type(error) for error in outcomes(attacked, LOADS).values()} == {CorruptCheckpointError}


def test_frames_beside_each_other() -> None:
    """Skippable frames, empty frames, a second document and an unknown dictionary are refused."""
    data = seal(json.dumps(bucket().document()).encode())
    good, empty = zstandard.ZstdCompressor().compress(data), zstandard.ZstdCompressor().compress(b"")
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"evil"
    samples = b"".join(b"some sample %d" % n * 10 for n in range(100))
    dictionary = zstandard.ZstdCompressionDict(samples, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    foreign = zstandard.ZstdCompressor(dict_data=dictionary).compress(data)
    foreign = foreign[:4] + b"\x01" + foreign[5:]
    for frames in (
        skippable + good,
        good + skippable,
        empty + good,
        good + empty,
        good + good,
        good[:-1],
        empty,
        foreign,
        good + b"\0",
        good + b"\n",
        zstandard.ZstdCompressor().compress(data[:100]) + zstandard.ZstdCompressor().compress(data[100:]),
    ):
        attacked = bucket()
        attacked.put("manifest.json", frames)
        assert {type(error) for error in outcomes(attacked, LOADS).values()} == {CorruptCheckpointError}


def test_memory_is_in_proportion_to_the_document() -> None:
    """A manifest of 100,000 minimal pieces, a column of three million zeros, and user metadata of lists are refused."""
    fields = bucket().document()
    pieces = 99_999  # of which three digests have no padding
    fields["pieces"] = {name: column([0] * pieces) for name in ("shard", "start", "length", "table")}
    fields["pieces"]["digests"] = "A" * (pieces * 16 * 4 // 3)
    zeros = bucket().document()
    zeros["shards"]["sizes"] = "1:" + "A" * 4_000_000
    lists = bucket().document() | {"user": {"x": [[]] * (10 * MiB // 4)}}
    for attack, factor in ((fields, 40), (zeros, 6), (lists, 4)):
        data = json.dumps(attack).encode()
        with at_most(factor * len(data)), pytest.raises(CorruptCheckpointError):
            manifest_json.decode(seal(data))


def test_a_compressed_zip() -> None:
    """A stream of a few KiB whose storage inflates to 64 MiB, and one that claims 4 GiB, are refused."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
        archive.writestr("archive/version", b"3")
        archive.writestr("archive/data/0", bytes(64 * MiB))
    for data in (packed.getvalue(), stream(b"N", d0=b"1234").replace(b"\x04\x00\x00\x00", b"\xff" * 4)):
        with at_most(4 * MiB), pytest.raises(CorruptCheckpointError):
            decode_object("k", EncodedObject("torch", data))


def claiming(*, length: int, encoding: str) -> Manifest:
    """Return the manifest of one tensor or object of so many bytes, in one shard that does not exist."""
    if encoding == JSON:
        return build([], [ObjectLayout("o", JSON, (length,))])
    kind = TensorKind("uint8", encoding=encoding)
    return build([Layout("w", kind, (length,), (Box((0,), (length,)),), ((length,),))])


def test_sizes_that_no_memory_holds() -> None:
    """A claim of more bytes than any memory has, with a shard of 4 bytes, is refused."""
    for encoding, length in ((RAW, 2**52), (RAW, 2**46), (RAW, 2**40), (TORCH, 2**38), (JSON, 2**38)):
        store = MemoryStore()
        manifest = claiming(length=length, encoding=encoding)
        store.put("manifest.json", [encode(manifest)])
        store.put(manifest.shards.keys[0], [b"1234"])
        with pytest.raises((InvalidArgumentError, CorruptCheckpointError)):
            load(store)


def test_a_list_of_requests_that_no_memory_holds() -> None:
    """A read of more than 2 million requests is refused, since a host may overcommit 16 TiB for a tensor."""
    length = RANGES_MAX * RANGE_BYTES_MAX + RANGE_BYTES_MAX
    with pytest.raises(InvalidArgumentError, match="more than one process can read"):
        plan_reads(claiming(length=length, encoding=RAW), [Want(0, 1, None)])
