"""What a JSON document is wrapped in to be stored: a digest of itself, and zstd where that pays. Pure.

Damage to a document must never read as another document: a digit of a learning rate is as easily flipped as a digit
of an offset, and only one of them would contradict the rest.
"""

from __future__ import annotations

import re

import zstandard

from dcp_remote.digests import ALGORITHM, digest
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError
from dcp_remote.ranges import KiB, MiB

# A manifest of a million chunks is under 25 MB; these keep a hostile one from taking the memory of the host.
STORED_BYTES_MAX = 256 * MiB
DOCUMENT_BYTES_MAX = 1024 * MiB

# Small documents stay readable with any tool.
COMPRESS_FROM_BYTES = 64 * KiB

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# Level 3 shrinks columns of equal differences to almost nothing; higher levels cost seconds on digests, for nothing.
_ZSTD_LEVEL = 3
_ZSTD_WINDOW_BYTES_MAX = 128 * MiB

# The first field of a stored document; its digest is that of everything behind it.
_SEAL = re.compile(rb'\{"' + ALGORITHM.encode() + rb'":"([0-9a-f]{32})",')


def seal(document: bytes) -> bytes:
    """The stored form of a JSON object that has at least one field.

    Raises:
        InvalidArgumentError: It is larger than a reader takes.
    """
    assert document.startswith(b'{"'), "an object with a field"
    rest = document[1:]
    text = b'{"%s":"%s",%s' % (ALGORITHM.encode(), digest(rest).hex().encode(), rest)
    if len(text) < COMPRESS_FROM_BYTES:
        return text
    data = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(text)
    # What no reader would take must not be committed.
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
    """The JSON object of a stored form, which is just what was sealed.

    Raises:
        CorruptCheckpointError: Truncated, damaged, larger than any document, or no document of ours.
    """
    text = _decompress(data)
    match = _SEAL.match(text)
    if match is None:
        raise CorruptCheckpointError("This is not a document of dcp_remote, or it is damaged.", bytes=len(text))
    rest = memoryview(text)[match.end() :]
    if digest(rest).hex().encode() != match[1]:
        raise CorruptCheckpointError("The document is damaged or truncated: its digest is another.", bytes=len(text))
    return b"{" + rest


def _decompress(data: bytes) -> bytes:
    if not data.startswith(_ZSTD_MAGIC):
        return data
    try:
        # The decompressor holds a frame to what it says of its size, and refuses one that says nothing (-1).
        size_bytes = zstandard.frame_content_size(data)
        if size_bytes > DOCUMENT_BYTES_MAX:
            raise CorruptCheckpointError(
                "The document is larger than any manifest.", bytes=size_bytes, limit_bytes=DOCUMENT_BYTES_MAX
            )
        # One frame, and nothing behind it: bytes that no digest covers are nobody's.
        decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX)
        return decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptCheckpointError("The document is damaged: it cannot be decompressed.", cause=error) from error
