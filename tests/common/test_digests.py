"""Digests: the block size found by search, known answers of XXH3, and blocks cut by hand."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.common import digests
from dcp_remote.common.digests import (
    DIGEST_BYTES,
    block_bytes,
    block_count,
    block_digests,
    digest,
    piece_digest,
    table_entries,
)
from dcp_remote.common.units import KiB, MiB


@given(
    st.integers(1, 80 * MiB)
    | st.integers(0, 12).map(lambda n: 64 * KiB << n).flatmap(lambda n: st.integers(n - 1, n + 1))
)
def test_blocks(piece_bytes: int) -> None:
    """The least power of two from 64 KiB to 1 MiB with at most 64 blocks; a table only where there are several."""
    fitting = [size for size in (64 * KiB << n for n in range(5)) if len(range(0, piece_bytes, size)) <= 64]
    size = min(fitting, default=MiB)
    assert block_bytes(piece_bytes) == size
    assert block_count(piece_bytes) == len(range(0, piece_bytes, size))
    assert table_entries(piece_bytes) == (0 if piece_bytes <= size else block_count(piece_bytes))


def test_known_answers() -> None:
    """XXH3-128 of the reference implementation, big-endian: the empty string, and one short one."""
    assert digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert digest(b"abc").hex() == "06b05ab6733a618578af5f94892f3950"


def test_with_gil_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long wait for the GIL, digests keep the GIL for a second; their values stay the same."""
    now_seconds = iter([10.0, 10.1, 10.2, 11.05, 11.2, 11.2])
    monkeypatch.setattr(digests, "time", SimpleNamespace(monotonic=lambda: next(now_seconds)))
    monkeypatch.setattr(digests, "_keep_until_seconds", 0.0)
    by_parts: list[int] = []
    in_parts = digests._digest_by_parts

    def counted(view: memoryview) -> bytes:
        by_parts.append(len(view))
        return in_parts(view)

    monkeypatch.setattr(digests, "_digest_by_parts", counted)
    data = random.Random(3).randbytes(MiB + 7)
    assert digest(data) == xxhash.xxh3_128_digest(data)
    assert not by_parts
    assert digest(data) == digest(memoryview(data)) == xxhash.xxh3_128_digest(data)
    assert by_parts == [len(data), len(data)]
    assert digest(data) == xxhash.xxh3_128_digest(data)
    assert len(by_parts) == 2, "a second later it is tried again"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("length", [0, 1, 99, 100, 101, 250])
def test_blocks_of_data(kind: type[bytes | bytearray | memoryview], length: int) -> None:
    """Each block is digested alone, the last one short; the digest of the piece is that of these digests."""
    data = bytes(n * 7 % 256 for n in range(length))
    digests = block_digests(kind(data), size_bytes=100)
    assert len(digests) == DIGEST_BYTES * len(range(0, length, 100))
    assert digests == b"".join(digest(data[start : start + 100]) for start in range(0, length, 100))
    assert piece_digest(digests) == digest(digests)
    for position in range(0, length, 50):
        flipped = bytearray(data)
        flipped[position] ^= 1
        changed = block_digests(flipped, size_bytes=100)
        block = position // 100 * DIGEST_BYTES
        assert changed[:block] == digests[:block]
        assert changed[block : block + DIGEST_BYTES] != digests[block : block + DIGEST_BYTES]
        assert changed[block + DIGEST_BYTES :] == digests[block + DIGEST_BYTES :]
