"""Stored form of a JSON document: a digest in its first field, and zstd compression where that pays. Pure.

The digest finds damage that other checks cannot: a flipped digit of an offset contradicts the rest of the document, a
flipped digit of a learning rate does not.
"""

from __future__ import annotations

import re

import zstandard

from dcp_remote.common.digests import ALGORITHM, digest
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError

# A manifest of a million chunks is under 25 MB; the bounds keep a hostile document from exhausting the host's memory.
STORED_BYTES_MAX = 256 * MiB
DOCUMENT_BYTES_MAX = 1024 * MiB

# Smaller documents are stored as plain text, readable with any tool.
COMPRESS_FROM_BYTES = 64 * KiB

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# Level 3 compresses columns of equal differences to almost nothing; higher levels spend seconds on digests in vain.
_ZSTD_LEVEL = 3
_ZSTD_WINDOW_BYTES_MAX = 128 * MiB

# First field of a stored document: the digest of all bytes after this field.
_SEAL = re.compile(rb'\{"' + ALGORITHM.encode() + rb'":"([0-9a-f]{32})",')


def seal(document: bytes) -> bytes:
    """Return the stored form of a JSON object that has at least one field.

    Raises:
        InvalidArgumentError: The document is larger than a reader accepts.
    """
    assert document.startswith(b'{"'), "a JSON object with at least one field"
    rest = document[1:]
    text = b'{"%s":"%s",%s' % (ALGORITHM.encode(), digest(rest).hex().encode(), rest)
    if len(text) < COMPRESS_FROM_BYTES:
        return text
    data = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(text)
    # No reader would accept the document, so it must not be committed.
    if len(text) > DOCUMENT_BYTES_MAX or len(data) > STORED_BYTES_MAX:
        raise InvalidArgumentError(
            "The checkpoint has more chunks than a manifest can hold.",
            bytes=len(text),
            limit_bytes=DOCUMENT_BYTES_MAX,
            stored_bytes=len(data),
            stored_limit_bytes=STORED_BYTES_MAX,
        )
    return data


def unseal(data: bytes) -> bytes:
    """Return the JSON object that was sealed, after comparing its digest.

    Raises:
        CorruptCheckpointError: The data is truncated, damaged, too large, or not a document of dcp_remote.
    """
    text = _decompress(data)
    match = _SEAL.match(text)
    if match is None:
        raise CorruptCheckpointError("This is not a document of dcp_remote, or it is damaged.", bytes=len(text))
    rest = memoryview(text)[match.end() :]
    if digest(rest).hex().encode() != match[1]:
        raise CorruptCheckpointError(
            "The document is damaged or truncated: its digest does not match.", bytes=len(text)
        )
    return b"{" + rest


def _decompress(data: bytes) -> bytes:
    if not data.startswith(_ZSTD_MAGIC):
        return data
    try:
        # The decompressor refuses a frame that is larger than its header states, or states no size (-1).
        size_bytes = zstandard.frame_content_size(data)
        if size_bytes > DOCUMENT_BYTES_MAX:
            raise CorruptCheckpointError("The document is too large.", bytes=size_bytes, limit_bytes=DOCUMENT_BYTES_MAX)
        # Bytes after the frame are refused, since no digest covers them.
        decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX)
        return decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptCheckpointError("The document is damaged: it cannot be decompressed.", cause=error) from error
