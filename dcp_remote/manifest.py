"""What describes one checkpoint, whole, in memory: shards, tensors, chunks, pieces, objects. No I/O, no torch.

`FORMAT.md` beside this file specifies the document; `manifest_json.py` writes and reads it, and lets none pass that
`manifest_check.py` finds fault with. Whoever holds a `Manifest` may use its numbers without another look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from dcp_remote.digests import DIGEST_BYTES
from dcp_remote.ranges import I64, firsts

MANIFEST_KEY = "manifest.json"

# A lost answer is settled by finding our save among those replaced since; so many may overwrite it meanwhile.
REPLACES_MAX = 64

# torch's own limit of dimensions is 64.
DIMENSIONS_MAX = 64

# Encodings of the bytes of a tensor's chunk: elements as they are, or a `torch.save` stream of the whole tensor.
RAW: Final = "raw"
TORCH: Final = "torch"
PICKLE: Final = "pickle"
# An object may also be JSON of ours, with raw bytes behind it where it holds large buffers (see `objects.py`).
JSON: Final = "json"
JSON_RAW: Final = "json+raw"


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
    """Contiguous bytes in shards: those of all chunks in their order, then those of stored objects.

    Attributes:
        shard: Index of the shard that each lies in.
        start: Its first byte, in the shard.
        length: Its bytes.
        table: Its first entry in its shard's block table, counted in digests; 0 if it is one block, which has none.
            Said here, because a table may also hold the digests of pieces that this manifest does not name.
        digests: 16 bytes each, one after another.
    """

    shard: I64
    start: I64
    length: I64
    table: I64
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
    """What a checkpoint of a run knows of it, so that a lost catalog can be made again; one by itself has none.

    Attributes:
        run_id: Of the run; 32 lower-case hex digits.
        step: Of training, finished.
        token: Of the job that wrote it.
        revision: Of the catalog when the save began, which the names of its shards carry.
        names: By which it could be asked for when it was committed.
        metrics: What the user noted, by name.
        thinned: Top-level keys of the state that were let go since.
    """

    run_id: str
    step: int
    token: int
    revision: int
    names: tuple[str, ...] = ()
    metrics: tuple[tuple[str, float], ...] = ()
    thinned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """One checkpoint.

    Attributes:
        save_id: Of the save that wrote it; 32 lower-case hex digits, fresh for each save.
        replaces: The saves whose manifests this one and its predecessors replaced, newest first; at most
            `REPLACES_MAX`.
        created: UTC, ISO 8601, by the coordinator's clock; information only.
        writer: What wrote it: names and versions.
        world_size: Ranks that saved.
        shards: Those that pieces lie in.
        tensors: See there.
        pieces: See there.
        inline: Small objects: name to the JSON text of its value.
        stored: Objects in shards.
        positions: Where objects (`inline` in order, then `stored`) stand among all entries of the state dict.
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
