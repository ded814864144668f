"""What a rank tells the coordinator after writing: columns, not an object per item. Pure, without torch.

torch gathers these from all ranks; at 1,000 items a rank, columns are an eighth of torch's own `WriteResult`s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcp_remote.manifest import Pieces, Shards
from dcp_remote.ranges import I64


@dataclass(frozen=True, slots=True)
class ReportedObject:
    """An object in shards; `piece_first` counts the pieces of the report."""

    name: str
    encoding: str
    piece_first: int
    pieces: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank wrote.

    Attributes:
        rank: In the process group.
        shards: That it put.
        names: The tensors that it wrote chunks of.
        dtypes: Of each of them, as written.
        encodings: Of each of them.
        chunk_name: For each chunk, an index into `names`.
        chunk_hint: For each chunk, where the plan says it stands among its tensor's chunks; -1 if it does not.
        chunk_dimensions: Of each chunk.
        chunk_offsets: Of all chunks, one after another.
        chunk_piece_first: The first piece of each chunk.
        chunk_pieces: How many pieces each chunk has.
        pieces: Of chunks and objects, in the order written.
        inline: Small objects: name to JSON text.
        stored: Objects in shards.
    """

    rank: int
    shards: Shards
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
