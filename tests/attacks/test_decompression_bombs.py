"""Small inputs that expand: frames, zips, columns, codecs. Memory is allocated for actual data, not for stated sizes.

Bombs are opened in a process whose memory limit is little more than its memory at the start.
"""

from __future__ import annotations

import io
import json
import pathlib
import subprocess
import sys
import tracemalloc
import zipfile

import pytest
import zstandard

from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format import document, manifest_json
from dcp_remote.format.document import seal
from dcp_remote.serialization.objects import EncodedObject, decode_object
from tests.attacks.attacker import LOADS, bucket, call, column, outcomes, stream, word
from tests.support.figures import count

pytestmark = pytest.mark.torture

GiB = 1024 * MiB


def frame(size_bytes: int, *, content: bytes = b" ", says: bool = True) -> bytes:
    """Return a frame of one repeated byte, a few KiB for each GiB."""
    compressor = zstandard.ZstdCompressor(write_content_size=says).compressobj(size=size_bytes if says else -1)
    part = content * MiB
    parts = [compressor.compress(part) for _ in range(size_bytes // MiB)]
    return b"".join(parts) + compressor.flush()


def lying(frame_of: bytes, size_bytes: int) -> bytes:
    """Return the same frame with another size in its header (RFC 8878, section 3.1.1)."""
    data = bytearray(frame_of)
    descriptor = data[4]
    size_at = 5 + (0 if descriptor & 0x20 else 1)
    width = {0: 1, 1: 2, 2: 4, 3: 8}[descriptor >> 6]
    data[size_at : size_at + width] = size_bytes.to_bytes(width, "little")
    return bytes(data)


@pytest.mark.parametrize("says", ["the truth", "nothing", "less", "more", "more than any"])
def test_a_manifest_as_a_frame(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 16 MiB, a frame of 64 MiB is refused, and takes no more memory than the limit."""
    monkeypatch.setattr(document, "DOCUMENT_BYTES_MAX", 16 * MiB)
    honest = frame(64 * MiB)
    bombs = {
        "the truth": honest,
        "nothing": frame(64 * MiB, says=False),
        "less": lying(honest, 8 * MiB),
        "more": lying(frame(4 * MiB), 15 * MiB),
        "more than any": lying(honest, 2**32 - 1),
    }
    assert len(bombs[says]) < 16 * 1024
    attacked = bucket()
    attacked.put("manifest.json", bombs[says])
    tracemalloc.start()
    try:
        for error in outcomes(attacked, LOADS).values():
            assert isinstance(error, CorruptCheckpointError)
        assert tracemalloc.get_traced_memory()[1] < 40 * MiB
    finally:
        tracemalloc.stop()


def test_frames_beside_each_other() -> None:
    """Skippable frames, empty frames, a second document and an unknown dictionary are refused."""
    document = seal(json.dumps(bucket().document()).encode())
    good = zstandard.ZstdCompressor().compress(document)
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"evil"
    empty = zstandard.ZstdCompressor().compress(b"")
    samples = [b"some sample %d" % n * 10 for n in range(100)]
    dictionary = zstandard.ZstdCompressionDict(b"".join(samples), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    foreign = zstandard.ZstdCompressor(dict_data=dictionary).compress(document)
    for data in (skippable + good, good + skippable, empty + good, good + empty, good + good, good[:-1], empty):
        attacked = bucket()
        attacked.put("manifest.json", data)
        assert {type(error) for error in outcomes(attacked, LOADS).values()} == {CorruptCheckpointError}
    attacked = bucket()
    attacked.put("manifest.json", foreign[:4] + b"\x01" + foreign[5:])
    assert {type(error) for error in outcomes(attacked, LOADS).values()} == {CorruptCheckpointError}


def test_columns_of_zeros() -> None:
    """A column of thirty million zeros is refused by its length, in memory of a few times the document."""
    count("attacks")
    document = bucket().document()
    entries = 30_000_000
    zeros = "1:" + "A" * (entries // 3 * 4)
    data = json.dumps({**document, "shards": {**document["shards"], "sizes": zeros}}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="wrong length"):
            manifest_json.decode(seal(data))
        assert tracemalloc.get_traced_memory()[1] < 6 * len(data)
    finally:
        tracemalloc.stop()


def test_memory_is_in_proportion_to_the_document() -> None:
    """A manifest of 100,000 minimal pieces is checked within 40 times its length of memory."""
    count("attacks")
    document = bucket().document()
    pieces = 100_000
    document["pieces"] = {name: column([0] * pieces) for name in ("shard", "start", "length", "table")}
    document["pieces"]["digests"] = "A" * (pieces * 16 * 4 // 3 // 4 * 4) + "AA=="[: 4 if pieces * 16 % 3 else 0]
    data = json.dumps(document).encode()
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError):
            manifest_json.decode(seal(data))
        assert tracemalloc.get_traced_memory()[1] < 40 * len(data)
    finally:
        tracemalloc.stop()


def test_a_compressed_zip() -> None:
    """A stream of a few KiB whose storage inflates to 64 MiB, and one that claims 1 TiB, are refused."""
    count("attacks")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
        archive.writestr("archive/version", b"3")
        archive.writestr("archive/data/0", bytes(64 * MiB))
    tracemalloc.start()
    try:
        for data in (packed.getvalue(), stream(b"N", d0=b"1234").replace(b"\x04\x00\x00\x00", b"\xff" * 4)):
            with pytest.raises(CorruptCheckpointError):
                decode_object("k", EncodedObject("torch", data))
        assert tracemalloc.get_traced_memory()[1] < 4 * MiB
    finally:
        tracemalloc.stop()


BOMBS = {
    "codec": call("_codecs", "encode", word("\\x00" * 100) + word("unicode_escape")),
    "codec zlib": call("_codecs", "encode", word("x") + word("zlib")),
    "decode": call("_codecs", "decode", word("x") + word("zlib")),
    "zlib": call("zlib", "decompress", word("x")),
    "bytearray": call("__builtin__", "bytearray", b"\x8a\x05\x00\x00\x00\x00\x40"),
    "bytes": call("__builtin__", "bytes", b"\x8a\x05\x00\x00\x00\x00\x40"),
    "range": call("__builtin__", "range", b"\x8a\x05\x00\x00\x00\x00\x40"),
    "list": call("__builtin__", "list", call("__builtin__", "range", b"\x8a\x05\x00\x00\x00\x00\x40")),
    "meta tensor": call("__builtin__", "set", call("torch._utils", "_rebuild_meta_tensor_no_storage", b"NNNN")),
    "memo": b"Nr\xff\xff\xff\x7f",
    "text": b"X\xff\xff\xff\x7fabc",
    "long": b"\x8b\xff\xff\xff\x7fabc",
    "many lists": b"]" * 200_000 + b"a" * 199_999,
}


def test_in_a_process_without_memory(tmp_path: pathlib.Path) -> None:
    """In a process with half a GiB to spare each bomb ends in an error of this package, and none in a MemoryError."""
    count("attacks", len(BOMBS))
    for number, program in enumerate(BOMBS.values()):
        (tmp_path / f"{number}").write_bytes(stream(program, d0=b"1234"))
    code = """
import pathlib, re, resource, sys
from dcp_remote.errors import CorruptCheckpointError, UnsafeObjectError
from dcp_remote.serialization.objects import EncodedObject, decode_object
size = int(re.search(r"VmSize:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 2**29,) * 2)
for path in sorted(pathlib.Path(sys.argv[1]).iterdir(), key=lambda path: int(path.name)):
    try:
        found = decode_object("k", EncodedObject("torch", path.read_bytes()))
    except (CorruptCheckpointError, UnsafeObjectError) as error:
        print(path.name, type(error).__name__)
    else:
        raise SystemExit(f"{path.name} was taken: {found!r:.200}")
"""
    if not pathlib.Path("/proc/self/status").exists():
        pytest.skip("the size of a process is read from /proc")
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(BOMBS)
