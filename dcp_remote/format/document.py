"""Stored form of a JSON document: its digest, its version, and zstd compression where that pays. Pure.

The digest finds damage that other checks cannot: a flipped digit of an offset contradicts the rest of the document, a
flipped digit of a learning rate does not.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TypeVar

import msgspec
import zstandard

from dcp_remote.common.digests import ALGORITHM, digest
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, UnsupportedFormatError

_T = TypeVar("_T")

# Every later release reads this version. An addition that a reader cannot ignore becomes a feature, which the document
# that uses it names in `requires`.
VERSION = "1"
SEGMENTS = "segments"  # columns of chunks and pieces in shards (`segments.py`)
FEATURES = {"manifest": frozenset({SEGMENTS})}  # that are known, by kind of document

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


class _Opening(msgspec.Struct):
    format: str
    version: str
    # Other versions may write these in any form.
    requires: msgspec.Raw = msgspec.Raw(b"null")
    writer: msgspec.Raw = msgspec.Raw(b"")


# Made here, in one thread: two threads that decode a type for the first time at the same moment crash msgspec 0.22.
_OPENING, _REQUIRES = msgspec.json.Decoder(_Opening), msgspec.json.Decoder(list[str])


def seal(document: bytes) -> bytes:
    """Return the stored form of a JSON object that has at least one field; refuse one larger than a reader accepts."""
    assert document.startswith(b'{"'), "a JSON object with at least one field"
    rest = document[1:]
    text = b'{"%s":"%s",%s' % (ALGORITHM.encode(), digest(rest).hex().encode(), rest)
    if len(text) < COMPRESS_FROM_BYTES:
        return text
    data = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(text)
    # No reader would accept the document, so it must not be committed.
    if len(text) > DOCUMENT_BYTES_MAX or len(data) > STORED_BYTES_MAX:
        raise InvalidArgumentError(
            "The manifest would be larger than readers accept, mostly by the names of tensors and objects; nothing was "
            "committed. Join small tensors into larger ones, or save parts of the state into runs of their own.",
            bytes=len(text),
            limit_bytes=DOCUMENT_BYTES_MAX,
            stored_bytes=len(data),
            stored_limit_bytes=STORED_BYTES_MAX,
        )
    return data


def unseal(data: bytes) -> bytes:
    """Return the JSON object that was sealed, after comparing its digest."""
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


def open_document(data: bytes, form: str) -> bytes:
    """Return the JSON object of a document, after comparing its digest, version and required features.

    `form` is the value of its field `format`, such as `dcp_remote manifest`.
    """
    text, kind = unseal(data), form.removeprefix("dcp_remote ")
    opening = parse(text, _OPENING, form)
    if opening.format != form:
        raise CorruptCheckpointError(f"This is not a {kind} of dcp_remote.", format=opening.format[:100])
    if opening.version != VERSION:
        advice = (
            "Only the software that wrote a draft reads it: load the checkpoint there."
            if "-draft" in opening.version
            else "Upgrade dcp_remote to a release that reads that version."
        )
        raise UnsupportedFormatError(
            f"The {kind} has another version of the format than this release of dcp_remote reads. {advice}",
            version=opening.version[:100],
            known_version=VERSION,
            writer=bytes(opening.writer)[:200].decode(errors="replace") or None,
        )
    required = parse(bytes(opening.requires), _REQUIRES, form)
    require_features(required, kind)
    return text


def require_features(names: Collection[str], kind: str) -> None:
    """Check that this release knows all features that a document requires."""
    unknown = sorted(set(names).difference(FEATURES.get(kind, ())))
    if unknown:
        raise UnsupportedFormatError(
            f"The {kind} needs features of the format that this release of dcp_remote does not know. Upgrade it.",
            features=", ".join(unknown)[:300],
        )


def parse(text: bytes, decoder: msgspec.json.Decoder[_T], form: str) -> _T:
    """Decode the JSON of a document, or a part of it."""
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"The {form.removeprefix('dcp_remote ')} is damaged: it is not JSON, or a field has another type.",
            cause=error,
            bytes=len(text),
        ) from error


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
