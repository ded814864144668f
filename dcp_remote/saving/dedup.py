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
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from dcp_remote.common.arrays import I64, concat_ranges, group_offsets
from dcp_remote.common.digests import BLOCK_BYTES_MAX, DIGEST_BYTES, block_bytes, block_digests, digest, piece_digest
from dcp_remote.format.manifest import Manifest, Pieces, Shards
from dcp_remote.saving.rank_report import RankReport, WrittenShard

# Of a shard with a smaller unchanged share, nothing is reused: one frozen bias among trained tensors would keep 64 MiB
# alive, and another bias at another step 64 MiB more. With it, the shards that a checkpoint names hold at most about
# four times its own bytes.
LIVE_SHARE_MIN = 0.25

# Bytes that are read at a time for a comparison: bounds the copy of a tensor that is not contiguous or not on the CPU.
# A multiple of every block size.
SPAN_BYTES = BLOCK_BYTES_MAX

_NONE = np.zeros(0, dtype=np.int64)


# Returns the bytes `start` to `stop` of an entry, as they would be sent.
ReadBytes: TypeAlias = Callable[[int, int], memoryview]


@dataclass(frozen=True, slots=True)
class KnownEntry:
    """A chunk or object of the baseline: its encoding, and the indices of its pieces."""

    encoding: str
    pieces: range


@dataclass(frozen=True, slots=True)
class ComparedPiece:
    """Byte range of an entry that one piece of the baseline covers, and the result of the comparison.

    Attributes:
        start: First byte, in the entry.
        stop: One past the last byte.
        piece: Index of the piece in the baseline.
        first_block: Digest of the first block (16 bytes), if the piece is reused; None if the bytes changed, or
            reusing the piece's shard is not worth its storage.
    """

    start: int
    stop: int
    piece: int
    first_block: bytes | None


@dataclass(frozen=True)
class _Chunks:
    """Chunks of a checkpoint, grouped by tensor; columns as in `Tensors`."""

    index: Mapping[str, int]
    kinds: Sequence[tuple[str, str]]  # dtype and encoding
    kind: I64
    chunk_first: I64
    box_first: I64
    offsets: I64
    sizes: I64
    piece_first: I64
    pieces: I64

    def find(self, name: str, *, offsets: tuple[int, ...], sizes: tuple[int, ...], hint: int | None) -> int | None:
        """Return the index of a chunk, or None. `hint` is its likely position among the chunks of its tensor."""
        number = self.index.get(name)
        if number is None:
            return None
        first, count = int(self.chunk_first[number]), int(self.chunk_first[number + 1] - self.chunk_first[number])
        if hint is not None and 0 <= hint < count:
            candidate = first + hint
            if self._matches(candidate, candidate + 1, offsets, sizes).any():
                return candidate
        matching = np.flatnonzero(self._matches(first, first + count, offsets, sizes))
        return first + int(matching[0]) if len(matching) else None

    def _matches(
        self, first: int, stop: int, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> npt.NDArray[np.bool_]:
        """Return, for each of the chunks `first` to `stop`, whether it has these offsets and sizes."""
        start, end = int(self.box_first[first]), int(self.box_first[stop])
        form = (stop - first, len(offsets))
        if end - start != form[0] * form[1]:
            return np.zeros(form[0], dtype=bool)  # the tensor had another number of dimensions
        same = self.offsets[start:end].reshape(form) == np.array(offsets, dtype=np.int64)
        same &= self.sizes[start:end].reshape(form) == np.array(sizes, dtype=np.int64)
        result: npt.NDArray[np.bool_] = same.all(axis=1)
        return result


@dataclass(frozen=True, slots=True)
class Reuse:
    """Decision which pieces of a baseline are reused.

    Attributes:
        base: The baseline.
        pieces: Compared pieces of each entry, in order; empty for an entry that the baseline does not have.
        live_bytes: `Baseline.live_bytes` of each shard, without the pieces that changed.
    """

    base: Baseline
    pieces: Sequence[Sequence[ComparedPiece]]
    live_bytes: I64


@dataclass(frozen=True)
class Baseline:
    """Earlier checkpoint of the run, as far as one rank may reuse its pieces.

    Attributes:
        url: URL of the run; the shards' keys are relative to it.
        shards: Shards of the checkpoint, or those that this rank reported.
        pieces: Pieces in these shards.
        first_blocks: Digest of the first block of each piece, 16 bytes each; empty if unknown. With them, a changed
            piece is detected at a 64th of the cost, since training changes every part of a tensor.
        live_bytes: Bytes of each shard in pieces that have not changed since, as far as this rank knows.
        named: True for each shard that a live checkpoint names.
    """

    url: str
    shards: Shards
    pieces: Pieces
    first_blocks: bytes
    live_bytes: I64
    named: npt.NDArray[np.bool_]
    _chunks: _Chunks
    _objects: Mapping[str, KnownEntry]

    @classmethod
    def of_manifest(cls, manifest: Manifest, *, url: str) -> Self:
        """Return a baseline for the first save of a process, without an object per chunk.

        Args:
            manifest: Manifest of a live checkpoint of the run that is saved into.
            url: URL of that run.
        """
        tensors, pieces = manifest.tensors, manifest.pieces
        return cls(
            url=url,
            shards=manifest.shards,
            pieces=pieces,
            first_blocks=b"",
            live_bytes=_group_sums(pieces.shard, pieces.length, len(manifest.shards.keys)),
            named=np.ones(len(manifest.shards.keys), dtype=bool),
            _chunks=_Chunks(
                index=tensors.index,
                kinds=[(kind.dtype, kind.encoding) for kind in tensors.kinds],
                kind=tensors.kind,
                chunk_first=tensors.chunk_first,
                box_first=tensors.box_first,
                offsets=tensors.chunk_offsets,
                sizes=tensors.chunk_sizes,
                piece_first=tensors.piece_first[:-1],
                pieces=tensors.chunk_pieces,
            ),
            _objects={
                item.name: KnownEntry(item.encoding, range(item.piece_first, item.piece_first + item.pieces))
                for item in manifest.stored
            },
        )

    @classmethod
    def of_report(cls, report: RankReport, *, left_out: Collection[str] = ()) -> Self:
        """Return a baseline for a later save: the last report of this rank, whose save was committed.

        Args:
            report: Report that `write_shards` returned in this process.
            left_out: Keys of shards that the committed manifest does not name (`manifest_assembly.left_out`), because
                another rank wrote the same chunks: these shards are orphans, which must not be reused.
        """
        notes = report.notes
        assert notes is not None, "the report was pickled, which drops its notes"
        kinds: dict[tuple[str, str], int] = {}
        kind = [kinds.setdefault(pair, len(kinds)) for pair in zip(report.dtypes, report.encodings, strict=True)]
        # A plan may list the chunks of a tensor apart from each other; `_Chunks` needs them together.
        order = np.argsort(report.chunk_name, kind="stable")
        dimensions = report.chunk_dimensions[order]
        values = concat_ranges(group_offsets(report.chunk_dimensions)[:-1][order], dimensions)
        return cls(
            url=report.url,
            shards=report.shards,
            pieces=report.pieces,
            first_blocks=notes.first_blocks,
            live_bytes=notes.live_bytes,
            named=np.array([key not in left_out for key in report.shards.keys], dtype=bool),
            _chunks=_Chunks(
                index={name: number for number, name in enumerate(report.names)},
                kinds=list(kinds),
                kind=np.array(kind, dtype=np.int64),
                chunk_first=group_offsets(np.bincount(report.chunk_name, minlength=len(report.names)).astype(np.int64)),
                box_first=group_offsets(dimensions),
                offsets=report.chunk_offsets[values],
                sizes=notes.chunk_sizes[values],
                piece_first=report.chunk_piece_first[order],
                pieces=report.chunk_pieces[order],
            ),
            _objects={
                item.name: KnownEntry(item.encoding, range(item.piece_first, item.piece_first + item.pieces))
                for item in report.stored
            },
        )

    def chunk(
        self, name: str, *, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...], hint: int | None = None
    ) -> KnownEntry | None:
        """Return a chunk of a tensor, or None if the baseline has no such chunk, or has it with another dtype.

        Args:
            name: Name of the tensor.
            dtype: torch's name of the dtype.
            offsets: Offsets of the chunk in the tensor, in elements.
            sizes: Sizes of the chunk, in elements.
            hint: Likely position among the chunks of the tensor; None if unknown.
        """
        chunks = self._chunks
        number = chunks.find(name, offsets=offsets, sizes=sizes, hint=hint)
        if number is None:
            return None
        known_dtype, encoding = chunks.kinds[int(chunks.kind[chunks.index[name]])]
        first = int(chunks.piece_first[number])
        return KnownEntry(encoding, range(first, first + int(chunks.pieces[number]))) if known_dtype == dtype else None

    def object(self, name: str) -> KnownEntry | None:
        """Return an object that is stored in shards, or None."""
        return self._objects.get(name)

    def compare(self, pieces: range, *, length_bytes: int, read: ReadBytes) -> Iterator[ComparedPiece]:
        """Compare the bytes of an entry with its pieces, one piece after another.

        Costs one pass over an unchanged piece. A changed piece costs a pass as well; or one block, at most a 64th of
        the piece, if the digests of first blocks are known and differ.

        Args:
            pieces: Indices of the entry's pieces.
            length_bytes: Length of the entry. Nothing is yielded if the pieces have another total length.
            read: Returns bytes of the entry; called for at most `SPAN_BYTES` at a time.

        Yields:
            One result for each piece, in order; together they cover the entry.
        """
        lengths = self.pieces.length[pieces.start : pieces.stop].tolist()
        if sum(lengths) != length_bytes:
            return
        start = 0
        for piece, length in zip(pieces, lengths, strict=True):
            yield ComparedPiece(start, start + length, piece, self._first_block(piece, start, read))
            start += length

    def decide_reuse(self, compared: Sequence[Sequence[ComparedPiece]]) -> Reuse:
        """Decide which pieces are reused, once all are compared: none of a shard that has changed almost entirely.

        Args:
            compared: Compared pieces of each entry; empty for an entry that the baseline does not have.
        """
        changed = [piece.piece for pieces in compared for piece in pieces if piece.first_block is None]
        shard = self.pieces.shard
        changed_bytes = _group_sums(shard[changed], self.pieces.length[changed], len(self.shards.keys))
        live_bytes = self.live_bytes - changed_bytes
        is_worth_keeping = live_bytes >= LIVE_SHARE_MIN * (self.shards.sizes - self.shards.data_starts)
        decided = [
            [piece if is_worth_keeping[shard[piece.piece]] else replace(piece, first_block=None) for piece in pieces]
            for pieces in compared
        ]
        return Reuse(self, decided, live_bytes)

    def _first_block(self, piece: int, start: int, read: ReadBytes) -> bytes | None:
        """Return the digest of a piece's first block if the bytes from `start` on equal the piece, else None."""
        if not self.named[self.pieces.shard[piece]]:
            return None
        stop = start + int(self.pieces.length[piece])
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


def _group_sums(group: I64, values: I64, count: int) -> I64:
    """Return the sum of the values of each of `count` groups; `group` is the group of each value."""
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, group, values)
    return sums


_NO_BASE = Baseline(
    url="",
    shards=Shards((), _NONE, _NONE, _NONE, b""),
    pieces=Pieces(_NONE, _NONE, _NONE, _NONE, b""),
    first_blocks=b"",
    live_bytes=_NONE,
    named=np.zeros(0, dtype=bool),
    _chunks=_Chunks({}, (), _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE),
    _objects={},
)


NO_REUSE = Reuse(_NO_BASE, (), _NONE)


@dataclass(slots=True)
class PieceSources:
    """Sources of the bytes of all entries, in order: items that are sent, and pieces of the baseline.

    Attributes:
        entry: Index of the entry that each source is a part of.
        number: Index of each source: among the items that are sent, or among the pieces of the baseline.
        first_block: Digest of the first block of a reused piece; None for an item that is sent.
        sent: Number of items that are sent.
    """

    entry: list[int] = field(default_factory=list)
    number: list[int] = field(default_factory=list)
    first_block: list[bytes | None] = field(default_factory=list)
    sent: int = 0

    def add_sent(self, entry: int) -> None:
        """Add the next item that is sent."""
        self._add(entry, self.sent, None)
        self.sent += 1

    def add_reused(self, entry: int, piece: ComparedPiece) -> None:
        """Add a piece of the baseline that did not change."""
        assert piece.first_block is not None
        self._add(entry, piece.piece, piece.first_block)

    def _add(self, entry: int, number: int, first_block: bytes | None) -> None:
        self.entry.append(entry)
        self.number.append(number)
        self.first_block.append(first_block)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Location of the bytes of all entries.

    Attributes:
        shards: Shards that were put, then shards of the baseline that hold reused pieces.
        live_bytes: Bytes of each shard in pieces that have not changed since, as in `Baseline`.
        pieces: Pieces of all entries, in order.
        first_blocks: Digest of the first block of each piece, 16 bytes each.
        piece_first: Index of the first piece of each entry.
        piece_count: Number of pieces of each entry.
    """

    shards: Shards
    live_bytes: I64
    pieces: Pieces
    first_blocks: bytes
    piece_first: I64
    piece_count: I64


def lay_out_pieces(
    sources: PieceSources, written: Sequence[WrittenShard], reuse: Reuse, *, entries: int
) -> ShardLayout:
    """Merge the pieces that were sent with those that are reused, in the order of the entries.

    Args:
        sources: Sources of all entries, in order.
        written: Shards that were put, in the order in which they were packed: so their pieces are in the order of the
            items.
        reuse: Pieces that are reused.
        entries: Number of entries.
    """
    base = reuse.base
    entry, number = np.array(sources.entry, dtype=np.int64), np.array(sources.number, dtype=np.int64)
    is_sent = np.array([first_block is None for first_block in sources.first_block], dtype=bool)
    reused_numbers = number[~is_sent]
    old_shards, old_shard = np.unique(base.pieces.shard[reused_numbers], return_inverse=True)
    put_shards = _put_shards(written)
    item = np.concatenate([_NONE, *(shard.item for shard in written)])
    count = np.ones_like(number)
    count[is_sent] = np.bincount(item, minlength=sources.sent)
    is_sent = np.repeat(is_sent, count)

    # The index of each source's piece, where all sent pieces come before all reused pieces.
    order = np.empty(len(is_sent), dtype=np.int64)
    order[is_sent], order[~is_sent] = np.arange(len(item)), len(item) + np.arange(len(reused_numbers))
    reused = replace(base.pieces.take(reused_numbers), shard=len(written) + old_shard)
    first_blocks = [shard.first_blocks for shard in written]
    first_blocks += [first_block for first_block in sources.first_block if first_block is not None]
    piece_count = _group_sums(entry, count, entries)
    return ShardLayout(
        shards=Shards.concat([put_shards, base.shards.take(old_shards)]),
        live_bytes=np.concatenate([put_shards.sizes - put_shards.data_starts, reuse.live_bytes[old_shards]]),
        pieces=Pieces.concat([_put_pieces(written), reused]).take(order),
        first_blocks=np.frombuffer(b"".join(first_blocks), np.uint8).reshape(-1, DIGEST_BYTES)[order].tobytes(),
        piece_first=group_offsets(piece_count)[:-1],
        piece_count=piece_count,
    )


def _put_shards(written: Sequence[WrittenShard]) -> Shards:
    return Shards(
        keys=tuple(shard.key for shard in written),
        sizes=np.array([shard.size_bytes for shard in written], dtype=np.int64),
        data_starts=np.array([shard.data_start for shard in written], dtype=np.int64),
        table_lengths=np.array([len(shard.table) for shard in written], dtype=np.int64),
        table_digests=b"".join(digest(shard.table) for shard in written),
    )


def _put_pieces(written: Sequence[WrittenShard]) -> Pieces:
    return Pieces(
        shard=np.repeat(np.arange(len(written)), [len(shard.item) for shard in written]).astype(np.int64),
        start=np.concatenate([_NONE, *(shard.start for shard in written)]),
        length=np.concatenate([_NONE, *(shard.length for shard in written)]),
        table=np.concatenate([_NONE, *(shard.table_first for shard in written)]),
        digests=b"".join(shard.digests for shard in written),
    )
