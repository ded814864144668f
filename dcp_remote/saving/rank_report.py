"""Report of one rank to the coordinator on what it wrote: columns, not an object per item. Pure, without torch.

torch pickles the reports and gathers them from all ranks, so a report is pickled like a manifest: packed columns,
compressed except for the digests. Measured for 1,000 tensors with names of 30 bytes: 18 KB,
digests of 16 KB included, where the `WriteResult`s of torch's file system writer, without digests, take 125 KB
(`tests/benchmark/clients/scale.py`).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import zstandard

from dcp_remote.common.arrays import I64
from dcp_remote.format.columns import decode_column, encode_column
from dcp_remote.format.manifest import Pieces, Shards, StoredObject

# Higher levels gain little on names of layers and on columns of constant steps.
_ZSTD_LEVEL = 3


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
class Notes:
    """Additions to a rank's report for its own next save, which the coordinator does not receive."""

    chunk_sizes: I64  # sizes of all chunks, one after another
    first_blocks: bytes  # digest of the first block of each piece, 16 bytes each
    live_bytes: I64  # bytes of each shard in pieces that have not changed since (see `dedup.Baseline`)


@dataclass(frozen=True, slots=True)
class RankReport:
    """Report of one rank on what it wrote."""

    rank: int
    url: str  # URL to which the shards' keys are relative; must equal the coordinator's
    shards: Shards  # shards that the rank put, then those of earlier saves of which it reuses pieces
    put: int  # number of shards that the rank put. If the save fails, only these are orphans
    names: tuple[str, ...]  # names of the tensors of which the rank wrote chunks
    dtypes: tuple[str, ...]  # dtype of each tensor, as written
    encodings: tuple[str, ...]  # encoding of each tensor
    chunk_name: I64  # index into `names` of each chunk
    chunk_hint: I64  # position of each chunk among the chunks of its tensor, according to the plan; -1 if unknown
    chunk_dimensions: I64  # number of dimensions of each chunk
    chunk_offsets: I64  # offsets of all chunks, one after another
    chunk_piece_first: I64  # index of the first piece of each chunk
    chunk_pieces: I64  # number of pieces of each chunk
    pieces: Pieces  # pieces of chunks and objects, in the order in which they were written
    inline: Mapping[str, bytes]  # JSON text of each small object, by name
    stored: tuple[StoredObject, ...]  # objects in shards, with indices into `pieces`
    meshes: tuple[str, ...] = ()  # meshes of the state's DTensors, described; of rank 0 alone
    figures: UploadStats = UploadStats()
    notes: Notes | None = None  # None after unpickling

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
