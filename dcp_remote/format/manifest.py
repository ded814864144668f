"""Manifest of one checkpoint in memory: shards, tensors, chunks, pieces, objects. No I/O, no torch.

`FORMAT.md` specifies the document. `manifest_json.py` writes and reads it, and calls `manifest_validation.py` both
times: the numbers of a decoded `Manifest` need no further check.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Any, Final, Self

import numpy as np

from dcp_remote.common.arrays import I64, concat_arrays, group_offsets
from dcp_remote.common.digests import DIGEST_BYTES
from dcp_remote.format.entry_names import top_level_key

MANIFEST_KEY = "manifest.json"

# A commit without an answer is settled by looking for its save_id here: so many later saves may have replaced it.
REPLACES_MAX = 64

# The limit of torch.
DIMENSIONS_MAX = 64

# Encodings of a chunk: its elements, or a `torch.save` stream of the whole tensor; loading a PICKLE stream runs code.
RAW: Final = "raw"
TORCH: Final = "torch"
PICKLE: Final = "pickle"
# Further encodings of an object: tagged JSON (`json_tree.py`), and the same followed by large buffers as raw bytes.
JSON: Final = "json"
JSON_RAW: Final = "json+raw"


@dataclass(frozen=True, slots=True)
class Table:
    """Base class of tables: each field is a column of integers, texts, or digests of 16 bytes one after another."""

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Return the entries of all parts, one part after another; indices in a column are left as they are."""
        make: Callable[..., Self] = cls
        return make(*(_concat(one.type, [getattr(part, one.name) for part in parts]) for one in fields(cls)))

    def take(self, indices: I64) -> Self:
        """Return the entries at these indices, in their order; indices in a column are left as they are."""
        make: Callable[..., Self] = type(self)
        return make(*(_take(getattr(self, one.name), indices) for one in fields(self)))


def _concat(annotation: object, parts: Sequence[Any]) -> Any:
    if annotation == "I64":
        return concat_arrays(parts)
    if annotation == "Pieces":
        return Pieces.concat(parts)
    return b"".join(parts) if annotation == "bytes" else tuple(chain.from_iterable(parts))


def _take(column: Any, indices: I64) -> Any:
    if isinstance(column, tuple):
        return tuple(map(column.__getitem__, indices.tolist()))
    if not isinstance(column, bytes):
        return column[indices]
    return np.frombuffer(column, dtype=f"V{DIGEST_BYTES}")[indices].tobytes() if column else b""  # not known yet


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Properties that many tensors share: torch's `TensorProperties` by name, and the encoding of their chunks."""

    dtype: str
    encoding: str = RAW
    layout: str = "strided"
    requires_grad: bool = False
    memory_format: str = "contiguous"
    pin_memory: bool = False


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Object stored in shards."""

    name: str  # of the entry in the state dict
    encoding: str  # `JSON`, `JSON_RAW`, `TORCH` or `PICKLE`
    piece_first: int  # index of its first piece among all pieces of the manifest
    pieces: int  # number of its pieces


@dataclass(frozen=True, slots=True)
class Shards(Table):
    """Shards, one entry each in every column."""

    keys: tuple[str, ...]  # relative to the checkpoint or run
    sizes: I64  # bytes of the whole object
    data_starts: I64  # byte in the shard at which the data begins, just after the block table
    table_lengths: I64  # bytes of the block table, which ends at `data_starts`
    table_digests: bytes  # of the block tables, 16 bytes each, one after another

    def table_digest(self, shard: int) -> bytes:
        """Return the digest of the block table of a shard; 16 bytes."""
        return self.table_digests[shard * DIGEST_BYTES : (shard + 1) * DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class Pieces(Table):
    """Contiguous byte ranges in shards: those of all chunks in their order, then those of stored objects."""

    shard: I64  # index of the shard that holds each piece
    start: I64  # first byte of each piece, counted from the start of the shard
    length: I64  # bytes of each piece
    # Index of the first digest of each piece in the block table of its shard; 0 for a piece of one block, which has
    # none there. Stored, because a table may hold digests of pieces that the manifest does not name.
    table: I64
    digests: bytes  # of the pieces, 16 bytes each, one after another

    def digest(self, piece: int) -> bytes:
        """Return the digest of a piece; 16 bytes."""
        return self.digests[piece * DIGEST_BYTES : (piece + 1) * DIGEST_BYTES]


@dataclass(frozen=True)
class Tensors:
    """Tensors and their chunks as flat columns."""

    names: tuple[str, ...]  # one per tensor
    kinds: tuple[TensorKind, ...]  # distinct
    kind: I64  # index into `kinds`, one per tensor
    dimensions: I64  # number of dimensions, one per tensor
    shape: I64  # sizes of all tensors, one tensor after another
    chunks: I64  # number of chunks, one per tensor
    chunk_offsets: I64  # of all chunks, one chunk after another
    chunk_sizes: I64  # of all chunks, one chunk after another
    chunk_pieces: I64  # number of pieces, one per chunk

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Index of each tensor by its name."""
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def shape_first(self) -> I64:
        """Index in `shape` of the first size of each tensor; shape [tensors + 1]."""
        return group_offsets(self.dimensions)

    @cached_property
    def chunk_first(self) -> I64:
        """Index of the first chunk of each tensor, then the number of chunks; shape [tensors + 1]."""
        return group_offsets(self.chunks)

    @cached_property
    def box_first(self) -> I64:
        """Index in `chunk_offsets` and `chunk_sizes` of the first value of each chunk; shape [chunks + 1]."""
        return group_offsets(np.repeat(self.dimensions, self.chunks))

    @cached_property
    def value_first(self) -> I64:
        """Index in `chunk_offsets` and `chunk_sizes` of the first value of each tensor."""
        return group_offsets(self.chunks * self.dimensions)[:-1]

    @cached_property
    def piece_first(self) -> I64:
        """Index of the first piece of each chunk, then the number of pieces of tensors; shape [chunks + 1]."""
        return group_offsets(self.chunk_pieces)

    def kind_of(self, tensor: int) -> TensorKind:
        """Return the kind of a tensor."""
        return self.kinds[int(self.kind[tensor])]

    def shape_of(self, tensor: int) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self.shape[self.shape_first[tensor] : self.shape_first[tensor + 1]].tolist())

    def offsets_of(self, chunk: int) -> tuple[int, ...]:
        """Return the offsets of a chunk in its tensor."""
        return tuple(self.chunk_offsets[self.box_first[chunk] : self.box_first[chunk + 1]].tolist())

    def sizes_of(self, chunk: int) -> tuple[int, ...]:
        """Return the sizes of a chunk."""
        return tuple(self.chunk_sizes[self.box_first[chunk] : self.box_first[chunk + 1]].tolist())

    def boxes_of(self, tensor: int) -> tuple[I64, I64]:
        """Return the offsets and the sizes of the chunks of a tensor, each of shape [chunks, dimensions]."""
        shape = (int(self.chunks[tensor]), int(self.dimensions[tensor]))
        first = int(self.value_first[tensor])
        own = slice(first, first + shape[0] * shape[1])
        offsets, sizes = self.chunk_offsets[own].reshape(shape), self.chunk_sizes[own].reshape(shape)
        return offsets.astype(np.int64, copy=False), sizes.astype(np.int64, copy=False)  # a plan's are narrow


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """Segments of a large manifest: shards that hold the columns of its chunks and of their pieces, a part in each.

    The tensors of a segment are below one top-level key of the state dict, or all at the top.
    """

    chunks: I64  # number of chunks of each tensor in all segments
    shards: I64  # number of shards that hold the pieces of each segment
    shard: I64  # their indices, one segment after another
    tensors: I64  # number of tensors of which each segment has chunks
    tensor: I64  # their indices, ascending, one segment after another
    # Box around the chunks of each of these tensors in the segment: its values, one tensor after another.
    offsets: I64
    sizes: I64

    @property
    def owner(self) -> I64:
        """Number of the segment of each entry of `tensor`."""
        return np.repeat(np.arange(len(self.tensors)), self.tensors)

    def parts(self) -> list[tuple[I64, I64]]:
        """Return the indices of the shards and those of the tensors of each segment."""
        bounds = (group_offsets(self.shards).tolist(), group_offsets(self.tensors).tolist())
        shards, tensors = (itertools.pairwise(one) for one in bounds)
        return [(self.shard[a:b], self.tensor[c:d]) for (a, b), (c, d) in zip(shards, tensors, strict=True)]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Place of a checkpoint in its run, from which a lost catalog can be rebuilt."""

    run_id: str  # 32 lower-case hex digits
    step: int  # training step that was finished
    token: int  # fencing token of the job that wrote the checkpoint
    revision: int  # of the catalog when the save began; part of the names of its shards
    names: tuple[str, ...] = ()  # of the checkpoint when it was committed
    metrics: tuple[tuple[str, float], ...] = ()  # names and values that the user gave
    thinned: tuple[str, ...] = ()  # top-level keys of the state dict that were dropped after the save


@dataclass(frozen=True)
class Manifest:
    """Contents of one checkpoint."""

    save_id: str  # of the save that wrote the checkpoint; 32 lower-case hex digits, fresh for each save
    replaces: tuple[str, ...]  # save_ids that this and its predecessors replaced, newest first; at most REPLACES_MAX
    created: str  # time in UTC, ISO 8601, by the coordinator's clock; information only
    writer: Mapping[str, str]  # names and versions of the software that wrote the checkpoint
    world_size: int  # number of ranks that saved
    shards: Shards
    tensors: Tensors
    pieces: Pieces  # of all chunks, then of `stored`, then one of each segment
    inline: Mapping[str, bytes] = field(default_factory=dict)  # small objects: name to JSON text
    stored: tuple[StoredObject, ...] = ()
    # Position among all entries of the state dict, one per object (`inline` in order, then `stored`).
    positions: tuple[int, ...] = ()
    # torch's `planner_data`: the path of each name in the nested state dict; None if it was not flattened.
    flatten: Mapping[str, tuple[str | int, ...]] | None = None
    user: Mapping[str, object] = field(default_factory=dict)  # metadata of the user's own
    run: RunInfo | None = None  # None for a checkpoint outside a run
    # Segments, which a large manifest has: `tensors` and `pieces` have the chunks of those that were joined, or none.
    segments: SegmentTable | None = None

    @cached_property
    def stored_index(self) -> Mapping[str, StoredObject]:
        """Objects in shards by name."""
        return {item.name: item for item in self.stored}

    def names(self) -> Iterator[str]:
        """Yield the names of all entries in the order in which they were saved."""
        objects = dict(zip(self.positions, [*self.inline, *(item.name for item in self.stored)], strict=True))
        tensors = iter(self.tensors.names)
        for position in range(len(objects) + len(self.tensors.names)):
            yield objects[position] if position in objects else next(tensors)

    def name_of_piece(self, piece: int) -> str:
        """Return the name of the tensor or object that a piece belongs to."""
        tensors = self.tensors
        if piece >= self.segment_first:
            return f"segment {piece - self.segment_first} of the manifest"
        if piece >= int(tensors.piece_first[-1]):
            return self.stored[bisect_right(self.stored, piece, key=lambda item: item.piece_first) - 1].name
        chunk = int(tensors.piece_first.searchsorted(piece, side="right")) - 1
        return tensors.names[int(tensors.chunk_first.searchsorted(chunk, side="right")) - 1]

    @property
    def segment_first(self) -> int:
        """Index of the piece of the first segment; the number of pieces if there are no segments."""
        return len(self.pieces.shard) - (len(self.segments.tensors) if self.segments is not None else 0)

    @property
    def chunk_counts(self) -> I64:
        """Number of chunks of each tensor, whether their segments were joined or not."""
        return self.tensors.chunks if self.segments is None else self.segments.chunks

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards."""
        return int(self.shards.sizes.sum())


def tensor_groups(names: Iterable[str], flatten: Mapping[str, tuple[str | int, ...]] | None) -> I64:
    """Return the number of the top-level key below which each tensor is; one for all at the top of the state dict."""
    paths, groups = flatten or {}, dict[str, int]()
    keys = [top_level_key(paths.get(name)) for name in names]
    return np.array([groups.setdefault(key, len(groups)) for key in keys], dtype=np.int64)
