"""Report of one rank to the coordinator on what it wrote: columns, not an object per item. Pure, without torch.

torch pickles the reports and gathers them from all ranks. A report is pickled as a `SentReport`, which is ten objects
however much the rank wrote: texts and numbers are packed, and compressed except for the digests. Measured for 1,000
tensors with names of 30 bytes: 18 KB, digests of 16 KB included, where the `WriteResult`s of torch's file system
writer, without digests, take 125 KB (`tests/benchmark/clients/scale.py`). The numbers of many ranks are unpacked
and joined at once (`join_numbers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import zstandard

from dcp_remote.common.arrays import I64, concat_arrays, group_offsets
from dcp_remote.common.digests import digest
from dcp_remote.format.manifest import Pieces, Shards, StoredObject, Tensors

# Higher levels gain little on names of layers and on columns of constant steps.
_ZSTD_LEVEL = 3

# Columns of each table of numbers: shards, chunks, pieces, offsets of chunks.
_COLUMNS = (3, 5, 4, 1)


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """Shard that a worker thread has put."""

    shards: Shards  # table of this one shard
    pieces: Pieces
    item: I64  # number of the item that each piece belongs to, among all that are sent
    first_blocks: bytes  # digest of the first block of each piece, 16 bytes each


@dataclass(frozen=True, slots=True)
class UploadStats:
    """Bytes and repeated requests of one rank's part of a save, and its slowest shard."""

    put_bytes: int = 0  # bytes of the shards that the rank put, headers and block tables included
    reused_bytes: int = 0  # bytes of reused pieces, which lie in shards of earlier saves and were not sent
    retries: int = 0  # puts that were repeated after a failure, or sent twice because they were late
    slowest_shard: str = ""  # key of the shard whose PUT took longest, pauses included; empty if none was put
    slowest_seconds: float = 0.0  # duration of that PUT


@dataclass(frozen=True, slots=True)
class RankReport:
    """Report of one rank on what it wrote."""

    rank: int
    url: str  # URL to which the shards' keys are relative; must equal the coordinator's
    # Shards that the rank put, then those of earlier saves of which it reuses pieces: a live checkpoint must still name
    # each of the latter when this save is committed.
    shards: Shards
    put: int  # number of shards that the rank put. If the save fails, only these are orphans
    tensors: Tensors  # tensors and chunks that the rank wrote, in kinds with dtype and encoding alone
    chunk_hint: I64  # position of each chunk among the chunks of its tensor, according to the plan; -1 if unknown
    chunk_piece_first: I64  # index of the first piece of each chunk
    pieces: Pieces  # pieces of chunks and objects, in the order in which they were written
    inline: Mapping[str, bytes]  # JSON text of each small object, by name
    stored: tuple[StoredObject, ...]  # objects in shards, with indices into `pieces`
    # For the rank's own next save; the coordinator does not receive them.
    first_blocks: bytes  # digest of the first block of each piece, 16 bytes each
    live_bytes: I64  # bytes of each shard in pieces that have not changed since (see `dedup.Baseline`)
    meshes: tuple[str, ...] = ()  # meshes of the state's DTensors, described; of rank 0 alone
    figures: UploadStats = UploadStats()

    @property
    def put_keys(self) -> tuple[str, ...]:
        """Keys of the shards that the rank put."""
        return self.shards.keys[: self.put]

    def to_sent(self) -> SentReport:
        """Return the report as the coordinator receives it."""
        shards, tensors, pieces = self.shards, self.tensors, self.pieces
        kinds = [tensors.kinds[kind] for kind in tensors.kind.tolist()]
        names = [(name, kind.dtype, kind.encoding) for name, kind in zip(tensors.names, kinds, strict=True)]
        owner = np.repeat(np.arange(len(kinds)), tensors.chunks)
        tables = (
            (shards.sizes, shards.data_starts, shards.table_lengths),
            (owner, self.chunk_hint, tensors.dimensions[owner], self.chunk_piece_first, tensors.chunk_pieces),
            (pieces.shard, pieces.start, pieces.length, pieces.table),
            (tensors.chunk_offsets,),
        )
        # Differences are mostly constant, which zstd compresses to almost nothing.
        differences = [np.diff(column, prepend=0) for table in tables for column in table]
        numbers = np.concatenate([np.array([len(table[0]) for table in tables]), *differences]).astype("<i8")
        compress = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress
        return SentReport(
            rank=self.rank,
            url=self.url,
            keys=shards.keys,
            put=self.put,
            tensors=compress(msgspec.msgpack.encode(names)),
            numbers=compress(numbers.tobytes()),
            stored=self.stored,
            table_digests=shards.table_digests,
            digests=pieces.digests,
            inline=self.inline,
            meshes=self.meshes,
        )


# Made here, in one thread: two threads that decode a type for the first time at the same moment crash msgspec 0.22.
_TENSORS = msgspec.msgpack.Decoder(list[tuple[str, str, str]])


class SentReport(NamedTuple):
    """Report of one rank as the coordinator receives it."""

    rank: int
    url: str
    keys: tuple[str, ...]  # of the shards
    put: int  # number of shards that the rank put, the first ones
    tensors: bytes  # name, dtype and encoding of each tensor, packed; equal on most ranks
    numbers: bytes  # packed; equal to those of the rank's last save if only values have changed
    stored: tuple[StoredObject, ...]
    table_digests: bytes
    digests: bytes  # of the pieces
    inline: Mapping[str, bytes]
    meshes: tuple[str, ...]

    @property
    def put_keys(self) -> tuple[str, ...]:
        """Keys of the shards that the rank put."""
        return self.keys[: self.put]

    @property
    def layout(self) -> bytes:
        """Digest of the report without names of shards, digests and values; 16 bytes."""
        return digest(msgspec.msgpack.encode((self.tensors, self.numbers, self.stored, tuple(self.inline))))

    def unpack_tensors(self) -> list[tuple[str, str, str]]:
        """Return name, dtype and encoding of each tensor of which the rank wrote chunks."""
        return _TENSORS.decode(zstandard.ZstdDecompressor().decompress(self.tensors))


@dataclass(frozen=True, slots=True)
class JoinedNumbers:
    """Numbers of the reports of all ranks: in each table a row for each column, one rank after another."""

    shards: I64  # sizes, data_starts, table_lengths
    chunks: I64  # index of the tensor, hint, number of dimensions, index of the first piece, number of pieces
    pieces: I64  # shard, start, length, table
    offsets: I64  # offsets of the chunks, one after another
    # Index of the first entry of each rank, then the number of all.
    shard_first: I64
    chunk_first: I64
    piece_first: I64

    def take(self, pieces: I64) -> Pieces:
        """Return the pieces at these indices, without digests."""
        shard, start, length, table = self.pieces[:, pieces]
        return Pieces(shard, start, length, table, digests=b"")


def join_numbers(reports: Sequence[SentReport]) -> JoinedNumbers:
    """Unpack and join the numbers of all reports; indices still count the entries of each rank alone."""
    decompress = zstandard.ZstdDecompressor().decompress
    tables: list[list[I64]] = [[] for _ in _COLUMNS]
    for report in reports:
        numbers = np.frombuffer(decompress(report.numbers), dtype="<i8")
        start = len(_COLUMNS)
        for table, columns, count in zip(tables, _COLUMNS, numbers[:start].tolist(), strict=True):
            stop = start + columns * count
            table.append(numbers[start:stop].reshape(columns, count).cumsum(axis=1))
            start = stop
    firsts = [group_offsets(np.array([part.shape[1] for part in table], dtype=np.int64)) for table in tables[:3]]
    return JoinedNumbers(*map(concat_arrays, tables), *firsts)
