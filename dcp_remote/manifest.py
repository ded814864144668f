"""The document that describes one checkpoint, whole: its model in memory, checked. No I/O, no torch.

`FORMAT.md` beside this file specifies the document; `manifest_json.py` writes and reads it. What is here has been
checked: every count, range, overlap and key. Whoever holds a `Manifest` may use its numbers without another look.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np

from dcp_remote.columns import VALUE_MAX
from dcp_remote.digests import DIGEST_BYTES, table_entries
from dcp_remote.dtypes import ITEM_BYTES
from dcp_remote.errors import CorruptCheckpointError, UnsupportedFormatError
from dcp_remote.ranges import I64, firsts
from dcp_remote.tiling import Comparisons, why_not_tiled

MANIFEST_KEY = "manifest.json"

# Keys are relative to the checkpoint (or run), and nothing that could leave it.
_SHARD_KEY = re.compile(r"shards/[0-9a-f]{2}/[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\.safetensors")

# 8 bytes of header length and "{}" come before any block table.
_HEADER_BYTES_MIN = 10

# Lists in the flatten mapping: their length is that of a path's index, and an entry that nobody saved costs 8 bytes.
LIST_ENTRIES_MAX = 10_000_000

# torch's own limit of dimensions is 64.
DIMENSIONS_MAX = 64

# Encodings of the bytes of a tensor's chunk: elements as they are, or a `torch.save` stream of the whole tensor.
RAW: Final = "raw"
TORCH: Final = "torch"
PICKLE: Final = "pickle"
# An object may also be JSON of ours (see `objects.py`).
JSON: Final = "json"


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What tensors have in common: torch's `TensorProperties` by name, and how their chunks are stored."""

    dtype: str
    encoding: str = RAW
    layout: str = "strided"
    requires_grad: bool = False
    memory_format: str = "contiguous"
    pin_memory: bool = False


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that lies in shards; its pieces are numbered among all pieces of the manifest."""

    name: str
    encoding: str
    piece_first: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards, one entry each.

    Attributes:
        keys: Relative to the checkpoint or run.
        sizes: Bytes of the whole object.
        data_starts: Where the first byte after the block table is.
        table_lengths: Bytes of the block table, which ends at `data_starts`.
        table_digests: 16 bytes each, one after another.
    """

    keys: tuple[str, ...]
    sizes: I64
    data_starts: I64
    table_lengths: I64
    table_digests: bytes

    def table_digest(self, shard: int) -> bytes:
        """Of one shard's block table."""
        return self.table_digests[shard * DIGEST_BYTES : (shard + 1) * DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Contiguous bytes in shards: those of all chunks in their order, then those of stored objects."""

    shard: I64
    start: I64
    length: I64
    digests: bytes

    def digest(self, piece: int) -> bytes:
        """Of one piece."""
        return self.digests[piece * DIGEST_BYTES : (piece + 1) * DIGEST_BYTES]


@dataclass(frozen=True)
class Tensors:
    """The tensors and their chunks, flat.

    Attributes:
        names: One per tensor.
        kinds: The distinct kinds.
        kind: Of each tensor, an index into `kinds`.
        dimensions: Of each tensor.
        shape: The sizes of all tensors, one after another.
        chunks: How many chunks each tensor has.
        chunk_offsets: Of all chunks, one after another.
        chunk_sizes: Of all chunks, one after another.
        chunk_pieces: How many pieces each chunk has.
    """

    names: tuple[str, ...]
    kinds: tuple[TensorKind, ...]
    kind: I64
    dimensions: I64
    shape: I64
    chunks: I64
    chunk_offsets: I64
    chunk_sizes: I64
    chunk_pieces: I64

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The number of each tensor by its name."""
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def shape_first(self) -> I64:
        """Where each tensor's sizes begin in `shape`."""
        return firsts(self.dimensions)

    @cached_property
    def chunk_first(self) -> I64:
        """The first chunk of each tensor, and the number of chunks."""
        return firsts(self.chunks)

    @cached_property
    def box_first(self) -> I64:
        """Where each chunk's values begin in `chunk_offsets` and `chunk_sizes`."""
        return firsts(np.repeat(self.dimensions, self.chunks))

    @cached_property
    def piece_first(self) -> I64:
        """The first piece of each chunk, and the number of pieces of tensors."""
        return firsts(self.chunk_pieces)

    def kind_of(self, tensor: int) -> TensorKind:
        """What the tensor is made of."""
        return self.kinds[int(self.kind[tensor])]

    def shape_of(self, tensor: int) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self.shape[self.shape_first[tensor] : self.shape_first[tensor + 1]].tolist())

    def offsets_of(self, chunk: int) -> tuple[int, ...]:
        """Where the chunk begins in its tensor."""
        return tuple(self.chunk_offsets[self.box_first[chunk] : self.box_first[chunk + 1]].tolist())

    def sizes_of(self, chunk: int) -> tuple[int, ...]:
        """How large it is."""
        return tuple(self.chunk_sizes[self.box_first[chunk] : self.box_first[chunk + 1]].tolist())

    def boxes_of(self, tensor: int) -> tuple[I64, I64]:
        """Offsets and sizes of its chunks, each of shape [chunks, dimensions]."""
        first, last = (int(self.box_first[self.chunk_first[tensor + i]]) for i in (0, 1))
        form = (int(self.chunks[tensor]), int(self.dimensions[tensor]))
        return self.chunk_offsets[first:last].reshape(form), self.chunk_sizes[first:last].reshape(form)


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a checkpoint of a run knows of it; a checkpoint by itself has none."""

    step: int
    token: int
    revision: int


@dataclass(frozen=True)
class Manifest:
    """One checkpoint.

    Attributes:
        save_id: Of the save that wrote it; 32 hex digits, fresh for each save.
        replaces: The saves whose manifests this one and its predecessors replaced, newest first.
        created: UTC, ISO 8601, by the coordinator's clock; information only.
        writer: What wrote it: names and versions.
        world_size: Ranks that saved.
        shards: See there.
        tensors: See there.
        pieces: See there.
        inline: Small objects: name to the JSON text of its value.
        stored: Objects in shards.
        positions: Where objects (`inline` in order, then `stored`) stand among all entries of the state dict.
        per_rank: Objects that differ between ranks: rank to name to the JSON text of its value.
        flatten: torch's `planner_data`: each name's path in the nested state dict; None if it was not flattened.
        user: What the user noted.
        run: Of a checkpoint in a run.
    """

    save_id: str
    replaces: tuple[str, ...]
    created: str
    writer: Mapping[str, str]
    world_size: int
    shards: Shards
    tensors: Tensors
    pieces: Pieces
    inline: Mapping[str, bytes] = field(default_factory=dict)
    stored: tuple[StoredObject, ...] = ()
    positions: tuple[int, ...] = ()
    per_rank: Mapping[int, Mapping[str, bytes]] = field(default_factory=dict)
    flatten: Mapping[str, tuple[str | int, ...]] | None = None
    user: Mapping[str, object] = field(default_factory=dict)
    run: RunInfo | None = None

    @cached_property
    def stored_index(self) -> Mapping[str, StoredObject]:
        """The objects in shards by name."""
        return {item.name: item for item in self.stored}

    def names(self) -> Iterator[str]:
        """All names of the state dict in the order in which they were saved."""
        objects = dict(zip(self.positions, [*self.inline, *(item.name for item in self.stored)], strict=True))
        tensors = iter(self.tensors.names)
        for position in range(len(objects) + len(self.tensors.names)):
            yield objects[position] if position in objects else next(tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards."""
        return int(self.shards.sizes.sum())


def check(manifest: Manifest) -> Manifest:
    """Check a manifest's numbers against each other; called before one is written, and after one is read.

    Takes time linear in its chunks and pieces for every regular layout, and refuses irregular ones that would not.

    Raises:
        CorruptCheckpointError: It contradicts itself; the message says where.
        UnsupportedFormatError: It names a dtype or an encoding that this version does not know.
    """
    _check_shards(manifest.shards)
    _check_kinds(manifest.tensors.kinds)
    _check_tensors(manifest.tensors)
    _check_pieces(manifest)
    _check_objects(manifest)
    _check_flatten(manifest)
    if not 1 <= manifest.world_size <= VALUE_MAX:
        raise _damaged("there cannot be so many ranks", world_size=manifest.world_size)
    run = manifest.run
    if run and not all(0 <= number <= VALUE_MAX for number in (run.step, run.token, run.revision)):
        raise _damaged("a number of the run is out of bounds", step=run.step, token=run.token, revision=run.revision)
    return manifest


def _damaged(what: str, **details: object) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"The manifest is damaged: {what}.", **details)


def _check_shards(shards: Shards) -> None:
    for key in shards.keys:
        if not _SHARD_KEY.fullmatch(key) or ".." in key:
            raise _damaged("a shard's key is not of the form shards/<hh>/<name>.safetensors", key=key[:300])
    if len(set(shards.keys)) != len(shards.keys):
        raise _damaged("two shards have one key")
    if bool((shards.table_lengths % DIGEST_BYTES != 0).any()):
        raise _damaged("a block table is not made of digests")
    headers = shards.data_starts - shards.table_lengths
    if bool((headers < _HEADER_BYTES_MIN).any() or (shards.data_starts > shards.sizes).any()):
        raise _damaged("a block table lies outside its shard")
    # In floats, which do not wrap around: no sum of lengths of pieces that lie in shards can do so then, either.
    if float(shards.sizes.sum(dtype=np.float64)) > VALUE_MAX:
        raise _damaged("the shards are larger than any store")


def _check_kinds(kinds: tuple[TensorKind, ...]) -> None:
    for kind in kinds:
        if kind.dtype not in ITEM_BYTES:
            raise UnsupportedFormatError("A tensor's dtype is unknown to this version.", dtype=kind.dtype)
        if kind.encoding not in (RAW, TORCH, PICKLE):
            raise UnsupportedFormatError("A tensor's encoding is unknown to this version.", encoding=kind.encoding)


def _check_tensors(tensors: Tensors) -> None:
    if len(tensors.index) != len(tensors.names):
        raise _damaged("two tensors have one name")
    if tensors.names and int(tensors.kind.max()) >= len(tensors.kinds):
        raise _damaged("a tensor is of a kind that is not listed")
    comparisons = Comparisons()
    # A tensor in one chunk needs no geometry; most tensors of a large state dict are such.
    whole = tensors.chunks == 1
    for number in np.flatnonzero(~whole).tolist():
        shape = _checked_shape(tensors, number)
        offsets, sizes = tensors.boxes_of(number)
        if tensors.kind_of(number).encoding != RAW:
            raise _damaged("a tensor that is stored as a stream has not one chunk", tensor=tensors.names[number])
        reason = why_not_tiled(shape, offsets, sizes, comparisons)
        if reason:
            raise _damaged(reason, tensor=tensors.names[number], shape=shape, chunks=len(sizes))
    for number in np.flatnonzero(whole).tolist():
        shape = _checked_shape(tensors, number)
        chunk = int(tensors.chunk_first[number])
        if tensors.sizes_of(chunk) != shape or any(tensors.offsets_of(chunk)):
            raise _damaged("a tensor's only chunk is not the whole of it", tensor=tensors.names[number], shape=shape)


def _checked_shape(tensors: Tensors, number: int) -> tuple[int, ...]:
    shape = tensors.shape_of(number)
    # Bounded also with the zeros left out, so that no product of some of the sizes can wrap around.
    if math.prod(max(size, 1) for size in shape) * ITEM_BYTES[tensors.kind_of(number).dtype] > VALUE_MAX:
        raise _damaged("a tensor is larger than any store", tensor=tensors.names[number], shape=shape)
    return shape


def _check_pieces(manifest: Manifest) -> None:
    shards, pieces, tensors = manifest.shards, manifest.pieces, manifest.tensors
    count = len(pieces.shard)
    if count != int(tensors.piece_first[-1]) + sum(item.pieces for item in manifest.stored):
        raise _damaged("the pieces are not those of the chunks and objects")
    if count and int(pieces.shard.max()) >= len(shards.keys):
        raise _damaged("a piece lies in a shard that is not listed")
    stops = pieces.start + pieces.length
    if bool((pieces.length < 1).any()):
        raise _damaged("a piece is empty")
    if bool((pieces.start < shards.data_starts[pieces.shard]).any() or (stops > shards.sizes[pieces.shard]).any()):
        raise _damaged("a piece lies outside the data of its shard")
    order = np.lexsort((pieces.start, pieces.shard))
    same = pieces.shard[order][1:] == pieces.shard[order][:-1]
    if bool((same & (pieces.start[order][1:] < stops[order][:-1])).any()):
        raise _damaged("two pieces overlap")
    _check_tables(shards, pieces)
    _check_chunk_lengths(tensors, pieces)


def _check_tables(shards: Shards, pieces: Pieces) -> None:
    lengths, inverse = np.unique(pieces.length, return_inverse=True)
    entries = np.array([table_entries(length) for length in lengths.tolist()], dtype=np.int64)[inverse]
    needed = np.bincount(pieces.shard, weights=entries, minlength=len(shards.keys)) if len(entries) else 0
    if bool((shards.table_lengths != np.asarray(needed, dtype=np.float64) * DIGEST_BYTES).any()):
        raise _damaged("a block table does not have the digests of its shard's pieces")


def _check_chunk_lengths(tensors: Tensors, pieces: Pieces) -> None:
    item = np.array([ITEM_BYTES[kind.dtype] for kind in tensors.kinds], dtype=np.int64)
    raw = np.array([kind.encoding == RAW for kind in tensors.kinds], dtype=bool)
    tensor_of = np.repeat(np.arange(len(tensors.names)), tensors.chunks)
    kind_of = tensors.kind[tensor_of]
    # prod over each chunk's sizes; `reduceat` wants a value for every group, also for those of no dimensions.
    padded = np.ones(len(tensors.chunk_sizes) + len(tensor_of), dtype=np.int64)
    places = np.arange(len(tensors.chunk_sizes)) + np.repeat(
        np.arange(len(tensor_of)) + 1, tensors.dimensions[tensor_of]
    )
    padded[places] = tensors.chunk_sizes
    starts = tensors.box_first[:-1] + np.arange(len(tensor_of))
    elements = np.multiply.reduceat(padded, starts) if len(starts) else np.zeros(0, dtype=np.int64)
    lengths = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(pieces.length[: int(tensors.piece_first[-1])])])
    stored = lengths[tensors.piece_first[1:]] - lengths[tensors.piece_first[:-1]]
    wrong = raw[kind_of] & (stored != elements * item[kind_of]) if len(kind_of) else np.zeros(0, dtype=bool)
    # A stream is never empty, whatever the tensor's shape.
    wrong |= ~raw[kind_of] & (stored == 0) if len(kind_of) else wrong
    if bool(wrong.any()):
        name = tensors.names[int(tensor_of[int(np.flatnonzero(wrong)[0])])]
        raise _damaged("a chunk's pieces are not as long as the chunk", tensor=name)
    piece_item = item[np.repeat(kind_of, tensors.chunk_pieces)] if len(kind_of) else item[:0]
    piece_raw = raw[np.repeat(kind_of, tensors.chunk_pieces)] if len(kind_of) else raw[:0]
    if bool((piece_raw & (pieces.length[: len(piece_item)] % np.maximum(piece_item, 1) != 0)).any()):
        raise _damaged("a piece cuts an element in two")


def _check_objects(manifest: Manifest) -> None:
    names = [*manifest.inline, *(item.name for item in manifest.stored)]
    if len(set(names)) != len(names) or any(name in manifest.tensors.index for name in names):
        raise _damaged("two entries have one name")
    first = int(manifest.tensors.piece_first[-1])
    for item in manifest.stored:
        if item.encoding not in (JSON, TORCH, PICKLE):
            raise UnsupportedFormatError(
                "An object's encoding is unknown to this version.", object=item.name, encoding=item.encoding
            )
        if item.piece_first != first or item.pieces < 1:
            raise _damaged("a stored object has no pieces of its own", object=item.name)
        first += item.pieces
    total = len(names) + len(manifest.tensors.names)
    positions = manifest.positions
    if len(positions) != len(names) or len(set(positions)) != len(names) or any(p >= total for p in positions):
        raise _damaged("the order of the entries is not an order")


def _check_flatten(manifest: Manifest) -> None:
    """See that the paths lead to one nested state dict: no two to one place, and none through another's value."""
    if manifest.flatten is None:
        return
    root: dict[str | int, Any] = {}
    paths = [*manifest.flatten.values(), *((name,) for name in manifest.names() if name not in manifest.flatten)]
    for path in paths:
        node: dict[str | int, Any] | None = root
        for part in path[:-1]:
            node = node.setdefault(part, {}) if node is not None else None
        if node is None or not path or path[-1] in node:
            raise _damaged("two entries have one place in the state dict, or one has none", path=path)
        node[path[-1]] = None
    if any(isinstance(part, int) for part in root):
        raise _damaged("the state dict is a list")
    entries = 0
    nodes = [root]
    while nodes:
        node = nodes.pop()
        indices = [part for part in node if isinstance(part, int)]
        if indices:
            entries += max(indices) + 1
            if len(indices) != len(node) or min(indices) < 0 or entries > LIST_ENTRIES_MAX:
                raise _damaged("a list in the state dict has other keys than its indices", keys=list(node)[:3])
        nodes += (child for child in node.values() if child is not None)
