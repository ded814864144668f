"""Encoding and decoding of manifests: JSON, sealed with a digest (`document.py`). `FORMAT.md` specifies the fields.

Decoding is typed and bounded. It checks the version and the required features first (`document.py`), then the types of
all fields, then the numbers (`manifest_validation.py`).
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
import numpy as np

from dcp_remote.common import digests
from dcp_remote.common.arrays import I64
from dcp_remote.common.digests import DIGEST_BYTES
from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, UnsupportedFormatError
from dcp_remote.format.columns import damaged, encode_column, sum_column, sum_counts, unpack_column
from dcp_remote.format.document import SEGMENTS, VERSION, open_document, parse, seal, unseal
from dcp_remote.format.manifest import (
    DIMENSIONS_MAX,
    Manifest,
    Pieces,
    RunInfo,
    SegmentTable,
    Shards,
    StoredObject,
    TensorKind,
    Tensors,
)
from dcp_remote.format.manifest_validation import check, check_saves

_Part = TypeVar("_Part")

FORMAT = "dcp_remote manifest"

CHECKPOINT, TOMBSTONE = "checkpoint", "tombstone"

# Decoded metadata takes up to 30 times the memory of its text.
USER_BYTES_MAX = 1 * MiB

# First field of a document that `reencode` made.
_NONCE = re.compile(rb'\{"nonce":"[0-9a-f]{32}",')


class Head(msgspec.Struct, frozen=True):
    """Fields that settle a commit whose answer was lost."""

    format: str
    version: str
    kind: str  # `CHECKPOINT`, or `TOMBSTONE` where there is no checkpoint
    save_id: str
    requires: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()  # save_ids that it and its predecessors replaced, newest first


class _Kind(msgspec.Struct):
    dtype: str
    encoding: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool


class _Tensors(msgspec.Struct):
    names: tuple[str, ...]
    kinds: list[_Kind]
    kind: I64
    dimensions: I64
    shape: I64
    chunks: I64


class _Chunks(msgspec.Struct):
    offsets: I64
    sizes: I64
    pieces: I64


class _Stored(msgspec.Struct):
    name: str
    encoding: str
    pieces: int


class _Objects(msgspec.Struct):
    inline: dict[str, msgspec.Raw]
    stored: list[_Stored]
    positions: I64


class _Run(msgspec.Struct):
    run_id: str
    step: int
    token: int
    revision: int
    names: tuple[str, ...]
    metrics: dict[str, float]
    thinned: tuple[str, ...]


class _Segments(msgspec.Struct):
    shards: I64
    shard: I64
    tensors: I64
    tensor: I64
    offsets: I64
    sizes: I64


class _Document(msgspec.Struct, omit_defaults=True):
    format: str
    version: str
    requires: list[str]
    kind: str
    save_id: str
    replaces: tuple[str, ...]
    created: str
    writer: Mapping[str, str]
    world_size: int
    run: _Run | None
    digest: str
    shards: Shards
    tensors: _Tensors
    chunks: _Chunks
    pieces: Pieces
    objects: _Objects
    flatten: Mapping[str, tuple[str | int, ...]] | None
    user: msgspec.Raw
    segments: _Segments | None = None


# Made here, in one thread: two threads that decode a type for the first time at the same moment crash msgspec 0.22.
_HEAD, _DOCUMENT = msgspec.json.Decoder(Head), msgspec.json.Decoder(_Document, dec_hook=unpack_column)
_USER = msgspec.json.Decoder(dict[str, Any])

_values_of_kind = operator.attrgetter(*_Kind.__struct_fields__)
_columns_of_segments = operator.attrgetter(*_Segments.__struct_fields__)


def encode(manifest: Manifest, *, is_known: bool = False) -> bytes:
    """Check a manifest and return the document to store; refuse one that a reader would refuse.

    `is_known` as for `check`.
    """
    check(manifest, is_known=is_known)
    user = _encode(dict(manifest.user))
    if len(user) > USER_BYTES_MAX:
        raise InvalidArgumentError("The user metadata is too large.", bytes=len(user), limit_bytes=USER_BYTES_MAX)
    tensors, run, pieces, segments = manifest.tensors, manifest.run, manifest.pieces, manifest.segments
    chunks = _Chunks(tensors.chunk_offsets, tensors.chunk_sizes, tensors.chunk_pieces)
    if segments is not None:  # which have all of this
        pieces = pieces.take(np.arange(tensors.piece_first[-1], len(pieces.shard)))
        chunks = _Chunks(*[np.zeros(0, dtype=np.int64)] * 3)
    document = _Document(
        format=FORMAT,
        version=VERSION,
        requires=[] if segments is None else [SEGMENTS],
        kind=CHECKPOINT,
        save_id=manifest.save_id,
        replaces=manifest.replaces,
        created=manifest.created,
        writer=manifest.writer,
        world_size=manifest.world_size,
        run=_Run(run.run_id, run.step, run.token, run.revision, run.names, dict(run.metrics), run.thinned)
        if run is not None
        else None,
        digest=digests.ALGORITHM,
        shards=manifest.shards,
        tensors=_Tensors(
            tensors.names,
            [_Kind(*_values_of_kind(kind)) for kind in tensors.kinds],
            tensors.kind,
            tensors.dimensions,
            tensors.shape,
            manifest.chunk_counts,
        ),
        chunks=chunks,
        pieces=pieces,
        objects=_Objects(
            inline={name: msgspec.Raw(text) for name, text in manifest.inline.items()},
            stored=[_Stored(item.name, item.encoding, item.pieces) for item in manifest.stored],
            positions=np.asarray(manifest.positions, dtype=np.int64),
        ),
        flatten=manifest.flatten,
        user=msgspec.Raw(user),
        segments=_Segments(*_columns_of_segments(segments)) if segments is not None else None,
    )
    return seal(_encode(document, columns=encode_column))


def _encode(value: object, *, columns: Callable[[object], str] | None = None) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=columns)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError("A name or the user metadata cannot be written as JSON.", cause=error) from error


def checked_user(user: object) -> dict[str, Any]:
    """Return a copy of user metadata as a reader will decode it.

    Refuse what is no mapping, is not JSON (NaN is not), is too large, or has two keys that JSON writes alike.
    """
    if not isinstance(user, Mapping):
        raise InvalidArgumentError("The user metadata must be a mapping.", type=type(user).__qualname__)
    try:
        text = json.dumps(dict(user), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            "The user metadata cannot be written as JSON: use texts, finite numbers, booleans, None, lists and dicts.",
            keys=", ".join(sorted({str(key) for key, value in user.items() if not _is_json(value)})[:5]) or None,
            cause=error,
        ) from error
    copied: dict[str, Any] = json.loads(text, object_pairs_hook=_distinct)
    length = len(_encode(copied))
    if length > USER_BYTES_MAX:
        raise InvalidArgumentError("The user metadata is too large.", bytes=length, limit_bytes=USER_BYTES_MAX)
    return copied


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise InvalidArgumentError(
            "Different keys of the user metadata become the same JSON text, so a value would be lost. Rename them.",
            keys=", ".join(sorted({key for key in keys if keys.count(key) > 1})[:5]),
        )
    return found


def decode_head(data: bytes) -> Head:
    """Decode only the fields that settle a commit."""
    return _head(open_document(data, FORMAT))


def decode(data: bytes) -> Manifest | None:
    """Decode and check a document. Return None for a tombstone, which says that there is no checkpoint.

    Of a manifest in segments, no segment is joined (`segments.py`).
    """
    text = open_document(data, FORMAT)
    head = _head(text)
    if head.kind == TOMBSTONE:
        return None
    if head.kind != CHECKPOINT:
        raise CorruptCheckpointError("The manifest is not that of a checkpoint.", kind=head.kind)
    document = parse(text, _DOCUMENT, FORMAT)
    if document.digest != digests.ALGORITHM:
        raise UnsupportedFormatError(
            "The manifest uses a digest algorithm that this version does not know. Upgrade dcp_remote.",
            digest=document.digest,
        )
    if (document.segments is not None) != (SEGMENTS in document.requires):
        raise damaged("it has segments and does not say so, or none")
    _sum_columns(document)
    tensors, chunks, objects, run = document.tensors, document.chunks, document.objects, document.run
    segments = None
    if document.segments is not None:
        segments = SegmentTable(tensors.chunks, *_columns_of_segments(document.segments))
    # Python's integers, since the document may claim any number of pieces.
    first_pieces = accumulate((item.pieces for item in objects.stored), initial=int(chunks.pieces.sum()))
    return check(
        Manifest(
            save_id=document.save_id,
            replaces=document.replaces,
            created=document.created,
            writer=document.writer,
            world_size=document.world_size,
            run=RunInfo(
                run.run_id, run.step, run.token, run.revision, run.names, tuple(run.metrics.items()), run.thinned
            )
            if run is not None
            else None,
            shards=document.shards,
            tensors=Tensors(
                names=tensors.names,
                kinds=tuple(TensorKind(*_values_of_kind(kind)) for kind in tensors.kinds),
                kind=tensors.kind,
                dimensions=tensors.dimensions,
                shape=tensors.shape,
                chunks=tensors.chunks if segments is None else np.zeros_like(tensors.chunks),
                chunk_offsets=chunks.offsets,
                chunk_sizes=chunks.sizes,
                chunk_pieces=chunks.pieces,
            ),
            pieces=document.pieces,
            inline={name: bytes(text) for name, text in objects.inline.items()},
            stored=tuple(
                StoredObject(item.name, item.encoding, first, item.pieces)
                for item, first in zip(objects.stored, first_pieces, strict=False)
            ),
            positions=tuple(objects.positions.tolist()),
            flatten=document.flatten,
            user=_user(document.user),
            segments=segments,
        )
    )


def make_tombstone(save_id: str, replaces: tuple[str, ...]) -> bytes:
    """Return the document that, stored in place of a manifest, prevents the commit of saves that saw no manifest."""
    check_saves(save_id, replaces)
    head = Head(format=FORMAT, version=VERSION, kind=TOMBSTONE, save_id=save_id, replaces=replaces)
    return seal(msgspec.json.encode(head))


def reencode(data: bytes, nonce: str) -> bytes:
    """Return a manifest or tombstone in other bytes: an object of equal bytes could get an equal version (ETag).

    The nonce, 32 lower-case hex digits, is fresh.
    """
    text = unseal(data)
    match = _NONCE.match(text)
    rest = text[match.end() :] if match else text[1:]
    return seal(b'{"nonce":"%s",%s' % (nonce.encode(), rest))


def _head(text: bytes) -> Head:
    head = parse(text, _HEAD, FORMAT)
    check_saves(head.save_id, head.replaces)
    return head


def _sum_columns(document: _Document) -> None:
    """Put the values of each column in the place of their differences, once others say how many there are."""
    count = len(document.tensors.names)
    tensors = _sum(document.tensors, "tensors", kind=count, dimensions=count, chunks=count)
    if count and int(tensors.dimensions.max()) > DIMENSIONS_MAX:
        raise damaged("a tensor has more dimensions than torch allows", dimensions_max=DIMENSIONS_MAX)
    document.tensors = _sum(tensors, "tensors", shape=sum_counts(tensors.dimensions))
    own, values = sum_counts(tensors.chunks), sum_counts(tensors.dimensions * tensors.chunks)
    if document.segments is not None:
        own, values = 0, 0
        document.segments = _sum_segments(document.segments, tensors.dimensions)
    document.chunks = _sum(document.chunks, "chunks", pieces=own, offsets=values, sizes=values)
    sum_counts(document.chunks.pieces)
    count = len(document.shards.keys)
    _require_digests(document.shards.table_digests, count, name="shards.table_digests")
    document.shards = _sum(document.shards, "shards", sizes=count, data_starts=count, table_lengths=count)
    count = len(document.pieces.shard)
    _require_digests(document.pieces.digests, count, name="pieces.digests")
    document.pieces = _sum(document.pieces, "pieces", shard=count, start=count, length=count, table=count)
    count = len(document.objects.inline) + len(document.objects.stored)
    document.objects = _sum(document.objects, "objects", positions=count)


def _sum_segments(segments: _Segments, dimensions: I64) -> _Segments:
    count = len(segments.tensors)
    segments = _sum(segments, "segments", tensors=count, shards=count)
    segments = _sum(segments, "segments", shard=sum_counts(segments.shards), tensor=sum_counts(segments.tensors))
    if len(segments.tensor) and int(segments.tensor.max()) >= len(dimensions):
        raise damaged("a segment has a tensor that is not listed")
    values = sum_counts(dimensions[segments.tensor])
    return _sum(segments, "segments", offsets=values, sizes=values)


def _sum(part: _Part, place: str, **counts: int) -> _Part:
    """Return a part of a document with the values of these columns, so many of each."""
    change: Callable[..., _Part] = msgspec.structs.replace if isinstance(part, msgspec.Struct) else replace
    values = {
        name: sum_column(getattr(part, name), name=f"{place}.{name}", count=count) for name, count in counts.items()
    }
    return change(part, **values)


def _require_digests(data: bytes, count: int, *, name: str) -> None:
    if len(data) != count * DIGEST_BYTES:
        raise damaged("a field has the wrong length", field=name, entries=len(data), count=count)


def _user(text: msgspec.Raw) -> dict[str, Any]:
    if len(bytes(text)) > USER_BYTES_MAX:
        raise damaged("the user metadata is too large", limit=USER_BYTES_MAX)
    return parse(bytes(text), _USER, FORMAT)
