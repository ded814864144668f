"""Report of one rank to the coordinator on what it wrote: columns, not an object per item. Pure, without torch.

torch pickles the reports and gathers them from all ranks, so a report is pickled like a manifest: packed columns, each
repeated word once, and compressed except for the digests. Measured for 1,000 tensors with names of 30 bytes: 18 KB,
digests of 16 KB included, where the `WriteResult`s of torch's file system writer, without digests, take 125 KB
(`tests/benchmark/clients/scale.py`).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import zstandard

from dcp_remote.common.arrays import I64
from dcp_remote.format.columns import decode_column, encode_column
from dcp_remote.format.manifest import Pieces, Shards

# Higher levels gain little on names of layers and on columns of constant steps.
_ZSTD_LEVEL = 3


@dataclass(frozen=True, slots=True)
class ReportedObject:
    """Object that is stored in shards; `piece_first` is an index into the pieces of the report."""

    name: str
    encoding: str
    piece_first: int
    pieces: int


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """Shard that a worker thread has put; the arrays have one entry per piece.

    Attributes:
        key: Key of the object.
        size_bytes: Size of the object.
        data_start: Offset of the first byte of data.
        table: Block table.
        item: Number of the item that each piece belongs to, among all that are sent.
        start: Offset of each piece in the object.
        length: Length of each piece, in bytes.
        table_first: First entry of each piece in the block table, counted in digests; 0 for a piece without entries.
        digests: Digest of each piece, 16 bytes each.
        first_blocks: Digest of the first block of each piece, 16 bytes each.
    """

    key: str
    size_bytes: int
    data_start: int
    table: bytes
    item: I64
    start: I64
    length: I64
    table_first: I64
    digests: bytes
    first_blocks: bytes


@dataclass(frozen=True, slots=True)
class UploadStats:
    """Bytes and repeated requests of one rank's part of a save, and its slowest shard.

    Attributes:
        put_bytes: Bytes of the shards that the rank put, headers and block tables included.
        reused_bytes: Bytes of reused pieces, which lie in shards of earlier saves and were not sent.
        retries: Number of puts that were repeated after a failure, or sent twice because they were late.
        slowest_shard: Key of the shard whose PUT took longest, attempts and pauses included; empty if none was put.
        slowest_seconds: Duration of that PUT.
    """

    put_bytes: int = 0
    reused_bytes: int = 0
    retries: int = 0
    slowest_shard: str = ""
    slowest_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Notes:
    """Additions to a rank's report for its own next save, which the coordinator does not receive.

    Attributes:
        chunk_sizes: Sizes of all chunks, one after another.
        first_blocks: Digest of the first block of each piece, 16 bytes each.
        live_bytes: Bytes of each shard in pieces that have not changed since (see `dedup.Baseline`).
    """

    chunk_sizes: I64
    first_blocks: bytes
    live_bytes: I64


@dataclass(frozen=True, slots=True)
class RankReport:
    """Report of one rank on what it wrote.

    Attributes:
        rank: Rank in the process group.
        url: URL to which the shards' keys are relative; must equal the coordinator's.
        shards: Shards that the rank put, then shards of earlier saves of which it reuses pieces.
        put: Number of shards that the rank put. If the save fails, only these are orphans.
        names: Names of the tensors of which the rank wrote chunks.
        dtypes: dtype of each tensor, as written.
        encodings: Encoding of each tensor.
        chunk_name: Index into `names` of each chunk.
        chunk_hint: Position of each chunk among the chunks of its tensor, according to the plan; -1 if unknown.
        chunk_dimensions: Number of dimensions of each chunk.
        chunk_offsets: Offsets of all chunks, one after another.
        chunk_piece_first: Index of the first piece of each chunk.
        chunk_pieces: Number of pieces of each chunk.
        pieces: Pieces of chunks and objects, in the order in which they were written.
        inline: JSON text of each small object, by name.
        stored: Objects that are stored in shards.
        figures: Bytes, repeated requests, and the slowest shard.
        notes: Additions for the next save of this rank; None after unpickling.
    """

    rank: int
    url: str
    shards: Shards
    put: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    encodings: tuple[str, ...]
    chunk_name: I64
    chunk_hint: I64
    chunk_dimensions: I64
    chunk_offsets: I64
    chunk_piece_first: I64
    chunk_pieces: I64
    pieces: Pieces
    inline: Mapping[str, bytes]
    stored: tuple[ReportedObject, ...]
    figures: UploadStats = UploadStats()
    notes: Notes | None = None

    @property
    def put_keys(self) -> tuple[str, ...]:
        """Keys of the shards that the rank put."""
        return self.shards.keys[: self.put]

    @property
    def reused_keys(self) -> tuple[str, ...]:
        """Keys of the reused shards: a live checkpoint must still name each of them when this save is committed."""
        return self.shards.keys[self.put :]

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle packed columns, compressed except for the digests, which do not shrink; without the notes."""
        packed = _packed(self) | {
            "notes": None,
            "shards": _packed(self.shards) | {"table_digests": b""},
            "pieces": _packed(self.pieces) | {"digests": b""},
            "dtypes": _indexed(self.dtypes),
            "encodings": _indexed(self.encodings),
            "chunk_hint": encode_column(self.chunk_hint + 1),  # a column holds no negative numbers
        }
        compressed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(pickle.dumps(packed))
        return _unpickled, (compressed, self.shards.table_digests, self.pieces.digests)


def _unpickled(compressed: bytes, table_digests: bytes, digests: bytes) -> RankReport:
    packed = pickle.loads(zstandard.ZstdDecompressor().decompress(compressed))  # noqa: S301  # from a rank of this job
    values = _unpacked(packed)
    return RankReport(
        **values
        | {
            "shards": Shards(**_unpacked(packed["shards"]) | {"table_digests": table_digests}),
            "pieces": Pieces(**_unpacked(packed["pieces"]) | {"digests": digests}),
            "dtypes": _words(packed["dtypes"]),
            "encodings": _words(packed["encodings"]),
            "chunk_hint": values["chunk_hint"] - 1,
        }
    )


def _packed(record: RankReport | Shards | Pieces) -> dict[str, object]:
    """Return the fields of a record, columns encoded as text; the only other text is the URL."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: encode_column(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}


def _unpacked(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record, columns decoded."""
    return {
        name: decode_column(value, name=name) if isinstance(value, str) and name != "url" else value
        for name, value in packed.items()
    }


def _indexed(words: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the distinct words, and the index of each word among them."""
    number = {word: n for n, word in enumerate(dict.fromkeys(words))}
    return tuple(number), encode_column(np.array([number[word] for word in words], dtype=np.int64))


def _words(indexed: tuple[Sequence[str], str]) -> tuple[str, ...]:
    """Return the words that `_indexed` was given."""
    distinct, numbers = indexed
    return tuple(distinct[n] for n in decode_column(numbers, name="words").tolist())
