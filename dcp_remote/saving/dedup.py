"""Deduplication: compare a rank's entries with an earlier checkpoint of the run, and reuse unchanged pieces.

Frozen weights are the same in every checkpoint. A piece whose bytes did not change is *reused*: the new manifest names
the piece in the old shard, and the commit requires that a live checkpoint still names that shard. Nothing is read from
the store: digests of 128 bits are compared, with name, offsets, sizes, dtype and encoding.

An *entry* is a chunk of a tensor, or an object. A piece belongs to one entry for ever, identified by name and offsets,
and to one byte range of that entry; only that entry reuses it. So no two chunks of a manifest can name one piece,
whichever ranks and checkpoints took part; `format/manifest_validation.py` would refuse them as overlapping pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from dcp_remote.common.arrays import I64
from dcp_remote.common.digests import BLOCK_BYTES_MAX, DIGEST_BYTES, block_bytes, block_digests, digest, piece_digest
from dcp_remote.format.manifest import Manifest, Pieces, Shards, StoredObject, Tensors
from dcp_remote.saving.rank_report import RankReport

# Of a shard with a smaller unchanged share, nothing is reused: one frozen bias among trained tensors would keep 64 MiB
# alive, and another bias at another step 64 MiB more. With it, the shards that a checkpoint names hold at most about
# four times its own bytes.
LIVE_SHARE_MIN = 0.25

# Bytes that are read at a time for a comparison: bounds the copy of a tensor that is not contiguous or not on the CPU.
# A multiple of every block size.
SPAN_BYTES = BLOCK_BYTES_MAX

# Returns the bytes `start` to `stop` of an entry, as they would be sent.
ReadBytes: TypeAlias = Callable[[int, int], memoryview]


class KnownEntry(NamedTuple):
    """A chunk or object of the baseline: its encoding, and the indices of its pieces."""

    encoding: str
    pieces: range


class ComparedPiece(NamedTuple):
    """Byte range of an entry that one piece of the baseline covers, and the result of the comparison."""

    start: int  # first byte, in the entry
    stop: int  # one past the last byte
    piece: int  # index in the baseline
    # Digest of the first block (16 bytes), if the piece is reused; None if the bytes changed, or reusing the piece's
    # shard is not worth its storage.
    first_block: bytes | None


class ComparedEntry(NamedTuple):
    """Entry as compared with the baseline; without an encoding and pieces if the baseline does not have it."""

    encoding: str = ""
    pieces: Sequence[ComparedPiece] = ()


@dataclass(frozen=True, slots=True)
class Reuse:
    """Decision which pieces of a baseline are reused; by default none, of an empty one."""

    entries: Sequence[ComparedEntry] = ()
    shards: Shards = field(default_factory=lambda: Shards.concat([]))  # shards of the baseline
    pieces: Pieces = field(default_factory=lambda: Pieces.concat([]))  # pieces of the baseline
    # Bytes of each shard in pieces that have not changed, as in `Baseline`.
    live_bytes: I64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class Baseline:
    """Earlier checkpoint of the run, as far as one rank may reuse its pieces."""

    shards: Shards  # shards of the checkpoint, or those that this rank reported
    pieces: Pieces  # pieces in these shards
    tensors: Tensors
    objects: Mapping[str, StoredObject]  # objects in shards, by name
    chunk_piece_first: I64  # index of the first piece of each chunk
    # Bytes of each shard in pieces that have not changed since, as far as this rank knows.
    live_bytes: I64
    is_named: npt.NDArray[np.bool_]  # True for each shard that a live checkpoint names
    # Digest of the first block of each piece, 16 bytes each; empty if unknown. With them, a changed piece is detected
    # at a 64th of the cost, since training changes every part of a tensor.
    first_blocks: bytes = b""

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> Self:
        """Return a baseline for the first save of a process: a live checkpoint of the run that is saved into."""
        shards = len(manifest.shards.keys)
        return cls(
            shards=manifest.shards,
            pieces=manifest.pieces,
            tensors=manifest.tensors,
            objects=manifest.stored_index,
            chunk_piece_first=manifest.tensors.piece_first,
            live_bytes=group_sums(manifest.pieces.shard, manifest.pieces.length, shards),
            is_named=np.ones(shards, dtype=bool),
        )

    @classmethod
    def of_report(cls, report: RankReport, *, left_out: Collection[str] = ()) -> Self:
        """Return a baseline for a later save: the last report of this rank, whose save was committed.

        `left_out` has the keys of shards that the committed manifest does not name (`find_orphaned_shards`), because
        another rank wrote the same chunks: these shards are orphans, which must not be reused.
        """
        return cls(
            shards=report.shards,
            pieces=report.pieces,
            tensors=report.tensors,
            objects={item.name: item for item in report.stored},
            chunk_piece_first=report.chunk_piece_first,
            live_bytes=report.live_bytes,
            is_named=np.array([key not in left_out for key in report.shards.keys], dtype=bool),
            first_blocks=report.first_blocks,
        )

    def chunk(
        self, name: str, *, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...], hint: int | None = None
    ) -> KnownEntry | None:
        """Return a chunk of a tensor, or None if the baseline has no such chunk, or has it with another dtype.

        `hint` is the likely position among the chunks of the tensor.
        """
        tensors, number = self.tensors, self.tensors.index.get(name)
        if number is None or tensors.dimensions[number] != len(offsets) or tensors.kind_of(number).dtype != dtype:
            return None
        chunk, count = int(tensors.chunk_first[number]), int(tensors.chunks[number])
        likely = chunk + (hint or 0)
        if 0 <= likely - chunk < count and tensors.offsets_of(likely) == offsets and tensors.sizes_of(likely) == sizes:
            chunk = likely
        else:
            begins, extents = tensors.boxes_of(number)
            matching = np.flatnonzero((begins == offsets).all(axis=1) & (extents == sizes).all(axis=1))
            if not len(matching):
                return None
            chunk += int(matching[0])
        first = int(self.chunk_piece_first[chunk])
        return KnownEntry(tensors.kind_of(number).encoding, range(first, first + int(tensors.chunk_pieces[chunk])))

    def object(self, name: str) -> KnownEntry | None:
        """Return an object that is stored in shards, or None."""
        item = self.objects.get(name)
        return KnownEntry(item.encoding, range(item.piece_first, item.piece_first + item.pieces)) if item else None

    def compare(self, pieces: range, *, length_bytes: int, read: ReadBytes) -> Iterator[ComparedPiece]:
        """Compare the bytes of an entry with its pieces, one piece after another.

        Costs one pass over an unchanged piece. A changed piece costs a pass as well; or one block, at most a 64th of
        the piece, if the digests of first blocks are known and differ. Yields one result for each piece, in order;
        together they cover the entry. Nothing if the pieces have another total length. `read` is called for at most
        `SPAN_BYTES` at a time.
        """
        lengths = self.pieces.length[pieces.start : pieces.stop].tolist()
        if sum(lengths) != length_bytes:
            return
        start = 0
        for piece, length in zip(pieces, lengths, strict=True):
            yield ComparedPiece(start, start + length, piece, self._first_block(piece, start, start + length, read))
            start += length

    def decide_reuse(self, compared: Sequence[ComparedEntry]) -> Reuse:
        """Decide which pieces are reused, once all are compared: none of a shard that has changed almost entirely."""
        changed = [piece.piece for entry in compared for piece in entry.pieces if piece.first_block is None]
        shard = self.pieces.shard
        changed_bytes = group_sums(shard[changed], self.pieces.length[changed], len(self.shards.keys))
        live_bytes = self.live_bytes - changed_bytes
        is_kept = (live_bytes >= LIVE_SHARE_MIN * (self.shards.sizes - self.shards.data_starts))[shard]
        decided = [
            entry._replace(
                pieces=[
                    piece if piece.first_block is None or is_kept[piece.piece] else piece._replace(first_block=None)
                    for piece in entry.pieces
                ]
            )
            for entry in compared
        ]
        return Reuse(decided, self.shards, self.pieces, live_bytes)

    def _first_block(self, piece: int, start: int, stop: int, read: ReadBytes) -> bytes | None:
        """Return the digest of a piece's first block if the bytes `start` to `stop` equal the piece, else None."""
        if not self.is_named[self.pieces.shard[piece]]:
            return None
        size = block_bytes(stop - start)
        first = digest(read(start, min(start + size, stop)))
        known = self.first_blocks[piece * DIGEST_BYTES : (piece + 1) * DIGEST_BYTES]
        if known and first != known:
            return None
        rest = (
            block_digests(read(at, min(at + SPAN_BYTES, stop)), size_bytes=size)
            for at in range(start + size, stop, SPAN_BYTES)
        )
        return first if piece_digest(b"".join([first, *rest])) == self.pieces.digest(piece) else None


def group_sums(group: I64, values: I64, count: int) -> I64:
    """Return the sum of the values of each of `count` groups; `group` is the group of each value."""
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, group, values)
    return sums
