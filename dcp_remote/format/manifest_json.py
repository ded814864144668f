"""Encoding and decoding of manifests: JSON, sealed with a digest (`document.py`). `FORMAT.md` specifies the fields.

Decoding is typed and bounded. It checks the version and the required features first (`document.py`), then the types of
all fields, then the numbers (`manifest_validation.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from dcp_remote.common import digests
from dcp_remote.common.arrays import I64
from dcp_remote.common.digests import DIGEST_BYTES
from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, UnsupportedFormatError
from dcp_remote.format.columns import decode_column, encode_column
from dcp_remote.format.document import DOCUMENT_BYTES_MAX, VERSION, open_document, parse, seal, unseal
from dcp_remote.format.manifest import (
    DIMENSIONS_MAX,
    Manifest,
    Pieces,
    RunInfo,
    Shards,
    StoredObject,
    TensorKind,
    Tensors,
)
from dcp_remote.format.manifest_validation import check, check_saves

FORMAT = "dcp_remote manifest"

CHECKPOINT, TOMBSTONE = "checkpoint", "tombstone"

# Decoded metadata takes up to 30 times the memory of its text.
USER_BYTES_MAX = 1 * MiB

# First field of a document that `reencode` made.
_NONCE = re.compile(rb'\{"nonce":"[0-9a-f]{32}",')


class _Head(msgspec.Struct):
    format: str
    version: str
    kind: str
    save_id: str
    requires: list[str] = []
    replaces: list[str] = []


class _Shards(msgspec.Struct):
    keys: list[str]
    sizes: str
    data_starts: str
    table_lengths: str
    table_digests: bytes


class _Kind(msgspec.Struct):
    dtype: str
    encoding: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool


class _Tensors(msgspec.Struct):
    names: list[str]
    kinds: list[_Kind]
    kind: str
    dimensions: str
    shape: str
    chunks: str


class _Chunks(msgspec.Struct):
    offsets: str
    sizes: str
    pieces: str


class _Pieces(msgspec.Struct):
    shard: str
    start: str
    length: str
    table: str
    digests: bytes


class _Stored(msgspec.Struct):
    name: str
    encoding: str
    pieces: int


class _Objects(msgspec.Struct):
    inline: dict[str, msgspec.Raw]
    stored: list[_Stored]
    positions: str


class _Run(msgspec.Struct):
    run_id: str
    step: int
    token: int
    revision: int
    names: list[str]
    metrics: dict[str, float]
    thinned: list[str]


class _Document(msgspec.Struct):
    format: str
    version: str
    requires: list[str]
    kind: str
    save_id: str
    replaces: list[str]
    created: str
    writer: dict[str, str]
    world_size: int
    run: _Run | None
    digest: str
    shards: _Shards
    tensors: _Tensors
    chunks: _Chunks
    pieces: _Pieces
    objects: _Objects
    flatten: dict[str, list[str | int]] | None
    user: msgspec.Raw


# Made here, in one thread: two threads that decode a type for the first time at the same moment crash msgspec 0.22.
_HEAD, _DOCUMENT = msgspec.json.Decoder(_Head), msgspec.json.Decoder(_Document)
_USER = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Head:
    """Fields that settle a commit whose answer was lost.

    Attributes:
        kind: `CHECKPOINT`, or `TOMBSTONE` where there is no checkpoint.
        save_id: Id of the save that wrote the document.
        replaces: save_ids that it and its predecessors replaced, newest first.
    """

    kind: str
    save_id: str
    replaces: tuple[str, ...]


def encode(manifest: Manifest) -> bytes:
    """Check a manifest and return the document to store.

    Raises:
        CorruptCheckpointError: The manifest contradicts itself: a bug of the caller.
        InvalidArgumentError: The user metadata is not JSON, or is too large, or the whole document is too large.
    """
    check(manifest)
    user = _encode(dict(manifest.user))
    if len(user) > USER_BYTES_MAX:
        raise InvalidArgumentError("The user metadata is too large.", bytes=len(user), limit_bytes=USER_BYTES_MAX)
    tensors, pieces, shards = manifest.tensors, manifest.pieces, manifest.shards
    document = _Document(
        format=FORMAT,
        version=VERSION,
        requires=[],
        kind=CHECKPOINT,
        save_id=manifest.save_id,
        replaces=list(manifest.replaces),
        created=manifest.created,
        writer=dict(manifest.writer),
        world_size=manifest.world_size,
        run=_run(manifest.run) if manifest.run else None,
        digest=digests.ALGORITHM,
        shards=_Shards(
            keys=list(shards.keys),
            sizes=encode_column(shards.sizes),
            data_starts=encode_column(shards.data_starts),
            table_lengths=encode_column(shards.table_lengths),
            table_digests=shards.table_digests,
        ),
        tensors=_Tensors(
            names=list(tensors.names),
            kinds=[
                _Kind(k.dtype, k.encoding, k.layout, k.requires_grad, k.memory_format, k.pin_memory)
                for k in tensors.kinds
            ],
            kind=encode_column(tensors.kind),
            dimensions=encode_column(tensors.dimensions),
            shape=encode_column(tensors.shape),
            chunks=encode_column(tensors.chunks),
        ),
        chunks=_Chunks(
            offsets=encode_column(tensors.chunk_offsets),
            sizes=encode_column(tensors.chunk_sizes),
            pieces=encode_column(tensors.chunk_pieces),
        ),
        pieces=_Pieces(
            shard=encode_column(pieces.shard),
            start=encode_column(pieces.start),
            length=encode_column(pieces.length),
            table=encode_column(pieces.table),
            digests=pieces.digests,
        ),
        objects=_Objects(
            inline={name: msgspec.Raw(text) for name, text in manifest.inline.items()},
            stored=[_Stored(item.name, item.encoding, item.pieces) for item in manifest.stored],
            positions=encode_column(np.asarray(manifest.positions, dtype=np.int64)),
        ),
        flatten=None if manifest.flatten is None else {name: list(path) for name, path in manifest.flatten.items()},
        user=msgspec.Raw(user),
    )
    return seal(_encode(document))


def _encode(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError("A name or the user metadata cannot be written as JSON.", cause=error) from error


def checked_user(user: object) -> dict[str, Any]:
    """Return a copy of user metadata as a reader will decode it.

    Raises:
        InvalidArgumentError: The metadata is no mapping, is not JSON (NaN is not), is too large, or has two keys that
            JSON writes alike.
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
    """Decode only the fields that settle a commit.

    Raises:
        CorruptCheckpointError: The data is not a manifest, or is damaged.
        UnsupportedFormatError: The document has another version, or requires a feature that this release lacks.
    """
    return _head(open_document(data, FORMAT))


def decode(data: bytes) -> Manifest | None:
    """Decode and check a document. Return None for a tombstone, which says that there is no checkpoint.

    Raises:
        CorruptCheckpointError: The document is truncated or damaged, or contradicts itself.
        UnsupportedFormatError: The document has another version, or requires a feature that this release lacks.
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
    tensors = _tensors(document.tensors, document.chunks)
    return check(
        Manifest(
            save_id=document.save_id,
            replaces=tuple(document.replaces),
            created=document.created,
            writer=document.writer,
            world_size=document.world_size,
            run=_run_info(document.run) if document.run else None,
            shards=_shards(document.shards),
            tensors=tensors,
            pieces=_pieces(document.pieces),
            inline={name: bytes(text) for name, text in document.objects.inline.items()},
            stored=_stored(document.objects.stored, int(tensors.piece_first[-1])),
            positions=tuple(
                decode_column(
                    document.objects.positions,
                    name="objects.positions",
                    count=len(document.objects.inline) + len(document.objects.stored),
                ).tolist()
            ),
            flatten=None
            if document.flatten is None
            else {name: tuple(path) for name, path in document.flatten.items()},
            user=_user(document.user),
        )
    )


def make_tombstone(save_id: str, replaces: tuple[str, ...]) -> bytes:
    """Return the document that, stored in place of a manifest, prevents the commit of saves that saw no manifest.

    Raises:
        CorruptCheckpointError: A save_id is malformed, or there are too many: a bug of the caller.
    """
    check_saves(save_id, replaces)
    head = _Head(format=FORMAT, version=VERSION, kind=TOMBSTONE, save_id=save_id, replaces=list(replaces))
    return seal(msgspec.json.encode(head))


def reencode(data: bytes, nonce: str) -> bytes:
    """Return the same document in other bytes: an object of equal bytes could get an equal version (ETag).

    Args:
        data: Stored form of a manifest or tombstone.
        nonce: 32 lower-case hex digits, fresh.

    Raises:
        CorruptCheckpointError: The document is damaged.
    """
    text = unseal(data)
    match = _NONCE.match(text)
    rest = text[match.end() :] if match else text[1:]
    return seal(b'{"nonce":"%s",%s' % (nonce.encode(), rest))


def _head(text: bytes) -> Head:
    head = parse(text, _HEAD, FORMAT)
    check_saves(head.save_id, head.replaces)
    return Head(head.kind, head.save_id, tuple(head.replaces))


def _shards(wire: _Shards) -> Shards:
    count = len(wire.keys)
    return Shards(
        keys=tuple(wire.keys),
        sizes=decode_column(wire.sizes, name="shards.sizes", count=count),
        data_starts=decode_column(wire.data_starts, name="shards.data_starts", count=count),
        table_lengths=decode_column(wire.table_lengths, name="shards.table_lengths", count=count),
        table_digests=_digests(wire.table_digests, name="shards.table_digests", count=count),
    )


def _tensors(wire: _Tensors, chunks: _Chunks) -> Tensors:
    count = len(wire.names)
    dimensions = decode_column(wire.dimensions, name="tensors.dimensions", count=count)
    if count and int(dimensions.max()) > DIMENSIONS_MAX:
        raise CorruptCheckpointError(
            "The manifest is damaged: a tensor has more dimensions than torch allows.", dimensions_max=DIMENSIONS_MAX
        )
    shape = decode_column(wire.shape, name="tensors.shape", count=_total(dimensions))
    chunk_counts = decode_column(wire.chunks, name="tensors.chunks", count=count)
    chunk_pieces = decode_column(chunks.pieces, name="chunks.pieces", count=_total(chunk_counts))
    _total(chunk_pieces)
    values = _total(dimensions * chunk_counts)
    return Tensors(
        names=tuple(wire.names),
        kinds=tuple(
            TensorKind(k.dtype, k.encoding, k.layout, k.requires_grad, k.memory_format, k.pin_memory)
            for k in wire.kinds
        ),
        kind=decode_column(wire.kind, name="tensors.kind", count=count),
        dimensions=dimensions,
        shape=shape,
        chunks=chunk_counts,
        chunk_offsets=decode_column(chunks.offsets, name="chunks.offsets", count=values),
        chunk_sizes=decode_column(chunks.sizes, name="chunks.sizes", count=values),
        chunk_pieces=chunk_pieces,
    )


def _total(counts: I64) -> int:
    # A larger sum or product of counts could wrap around in int64 and match by chance.
    if counts.size and (int(counts.max()) > DOCUMENT_BYTES_MAX or int(counts.min()) < 0):
        raise CorruptCheckpointError("The manifest is damaged: a count is larger than the document.")
    return int(counts.sum())


def _pieces(wire: _Pieces) -> Pieces:
    shard = decode_column(wire.shard, name="pieces.shard")
    count = len(shard)
    return Pieces(
        shard=shard,
        start=decode_column(wire.start, name="pieces.start", count=count),
        length=decode_column(wire.length, name="pieces.length", count=count),
        table=decode_column(wire.table, name="pieces.table", count=count),
        digests=_digests(wire.digests, name="pieces.digests", count=count),
    )


def _digests(data: bytes, *, name: str, count: int) -> bytes:
    # msgspec has decoded the base64: with Python's own, that would take a third of all the time.
    if len(data) != count * DIGEST_BYTES:
        raise CorruptCheckpointError(
            "The manifest is damaged: a field has the wrong length.", field=name, bytes=len(data), digests=count
        )
    return data


def _stored(wire: list[_Stored], piece: int) -> tuple[StoredObject, ...]:
    stored: list[StoredObject] = []
    for item in wire:
        stored.append(StoredObject(item.name, item.encoding, piece, item.pieces))
        piece += item.pieces
    return tuple(stored)


def _user(text: msgspec.Raw) -> dict[str, Any]:
    if len(bytes(text)) > USER_BYTES_MAX:
        raise CorruptCheckpointError("The manifest is damaged: the user metadata is too large.", limit=USER_BYTES_MAX)
    return parse(bytes(text), _USER, FORMAT)


def _run(run: RunInfo) -> _Run:
    return _Run(run.run_id, run.step, run.token, run.revision, list(run.names), dict(run.metrics), list(run.thinned))


def _run_info(wire: _Run) -> RunInfo:
    return RunInfo(
        wire.run_id,
        wire.step,
        wire.token,
        wire.revision,
        tuple(wire.names),
        tuple(wire.metrics.items()),
        tuple(wire.thinned),
    )
