"""What need not be sent again: a rank's pieces, compared with those of an earlier checkpoint of the run.

Frozen weights are the same in every checkpoint. A piece whose bytes did not change is *borrowed*: the new manifest
names the old shard's piece, and the commit sees to it that a live checkpoint still names that shard. Nothing is read
from the store to decide it: digests of 128 bits are compared, with name, offsets, sizes, dtype and encoding.

A piece belongs to one run of one chunk for ever: to that chunk's name and offsets, and to its place in the chunk. It is
only ever borrowed for just these. So no two chunks of a manifest can name one piece, whatever was borrowed from
whatever checkpoint by whatever rank; `manifest_check` would refuse them as pieces that overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from dcp_remote.digests import BLOCK_BYTES_MAX, DIGEST_BYTES, block_bytes, block_digests, digest, piece_digest
from dcp_remote.manifest import Manifest, Pieces, Shards
from dcp_remote.ranges import I64, firsts, joined
from dcp_remote.report import RankReport, WrittenShard

# A shard of which less did not change lends nothing: that little is sent again. Or one frozen bias among what is
# trained would keep 64 MiB alive, and another one at another step 64 MiB more; so, all that a checkpoint names is at
# most about four times as large as itself.
LIVE_SHARE_MIN = 0.25

# As much is copied at a time of what does not lie contiguous on the CPU; a multiple of every block size.
SPAN_BYTES = BLOCK_BYTES_MAX

_NONE = np.zeros(0, dtype=np.int64)

_Value = TypeVar("_Value", np.int64, np.uint8)

# The bytes of a chunk or object from a first to a last, as they would be sent.
ReadBytes: TypeAlias = Callable[[int, int], memoryview]


@dataclass(frozen=True, slots=True)
class Known:
    """A chunk or object of the base: how it is encoded, and the numbers of its pieces."""

    encoding: str
    pieces: range


@dataclass(frozen=True, slots=True)
class Part:
    """A run of the bytes of a chunk or object, `start` up to and without `stop`.

    Attributes:
        start: First byte.
        stop: One past its last byte.
        piece: Of the base, whose range this is.
        first_block: Digest of the piece's first block, if the piece still holds these bytes; None if they changed.
    """

    start: int
    stop: int
    piece: int
    first_block: bytes | None


@dataclass(frozen=True)
class _Chunks:
    """The chunks of a checkpoint, those of each tensor together; columns as in `Tensors`."""

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
        """The number of a chunk; the hint says at which place it may stand among those of its tensor."""
        number = self.index.get(name)
        if number is None:
            return None
        first, count = int(self.chunk_first[number]), int(self.chunk_first[number + 1] - self.chunk_first[number])
        if hint is not None and 0 <= hint < count and self._is(first + hint, first + hint + 1, offsets, sizes).any():
            return first + hint
        same = np.flatnonzero(self._is(first, first + count, offsets, sizes))
        return first + int(same[0]) if len(same) else None

    def _is(self, first: int, stop: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        start, end = int(self.box_first[first]), int(self.box_first[stop])
        form = (stop - first, len(offsets))
        if end - start != form[0] * form[1]:
            return np.zeros(form[0], dtype=bool)  # it had another number of dimensions
        same = self.offsets[start:end].reshape(form) == np.array(offsets, dtype=np.int64)
        same &= self.sizes[start:end].reshape(form) == np.array(sizes, dtype=np.int64)
        result: npt.NDArray[np.bool_] = same.all(axis=1)
        return result


@dataclass(frozen=True, slots=True)
class Loan:
    """What is borrowed of a base.

    Attributes:
        base: What it was compared with.
        parts: Of each chunk or object those that the base knows; what changed there, or is not worth it, has no digest.
        live_bytes: As in the base, without what changed.
    """

    base: Base
    parts: Sequence[Sequence[Part]]
    live_bytes: I64


@dataclass(frozen=True)
class Base:
    """What is known of an earlier checkpoint of the run, as far as one rank may borrow of it.

    Attributes:
        url: Of the run; the keys are relative to it.
        shards: Of the checkpoint, or those that this rank reported.
        pieces: In them.
        first_blocks: The digest of the first block of each piece, 16 bytes each; empty if nobody knows them. By these,
            a piece that changed is found at a 64th of the cost: training changes every part of a tensor.
        live_bytes: Of each shard, how many bytes lie in pieces that did not change since, as far as is known here.
        named: Whether a live checkpoint names each shard.
    """

    url: str
    shards: Shards
    pieces: Pieces
    first_blocks: bytes
    live_bytes: I64
    named: npt.NDArray[np.bool_]
    _chunks: _Chunks
    _objects: Mapping[str, Known]

    @classmethod
    def of_manifest(cls, manifest: Manifest, *, url: str) -> Self:
        """For the first save of a process: everything that a live checkpoint names. Makes no object per chunk.

        Args:
            manifest: Of a checkpoint of the run that is being saved into.
            url: Of that run.
        """
        tensors, pieces = manifest.tensors, manifest.pieces
        return cls(
            url=url,
            shards=manifest.shards,
            pieces=pieces,
            first_blocks=b"",
            live_bytes=_sums(pieces.shard, pieces.length, len(manifest.shards.keys)),
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
                item.name: Known(item.encoding, range(item.piece_first, item.piece_first + item.pieces))
                for item in manifest.stored
            },
        )

    @classmethod
    def of_report(cls, report: RankReport, *, left_out: Collection[str] = ()) -> Self:
        """For every later save: what this rank reported last, if that save was committed.

        Args:
            report: As `write_shards` gave it, in this process.
            left_out: Keys of shards that the committed manifest does not name (`assembly.left_out`), because
                another rank wrote the same chunks: they are orphans, and nobody may borrow of them.
        """
        notes = report.notes
        assert notes is not None, "a rank's own report, which was not pickled"
        kinds: dict[tuple[str, str], int] = {}
        kind = [kinds.setdefault(pair, len(kinds)) for pair in zip(report.dtypes, report.encodings, strict=True)]
        # Those of each tensor together, which in a plan may be anywhere.
        order = np.argsort(report.chunk_name, kind="stable")
        dimensions = report.chunk_dimensions[order]
        values = joined(firsts(report.chunk_dimensions)[:-1][order], dimensions)
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
                chunk_first=firsts(np.bincount(report.chunk_name, minlength=len(report.names)).astype(np.int64)),
                box_first=firsts(dimensions),
                offsets=report.chunk_offsets[values],
                sizes=notes.chunk_sizes[values],
                piece_first=report.chunk_piece_first[order],
                pieces=report.chunk_pieces[order],
            ),
            _objects={
                item.name: Known(item.encoding, range(item.piece_first, item.piece_first + item.pieces))
                for item in report.stored
            },
        )

    def chunk(
        self, name: str, *, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...], hint: int | None = None
    ) -> Known | None:
        """A chunk of a tensor; None if there was none just there, or of another dtype.

        Args:
            name: Of the tensor.
            dtype: Of its elements; torch's name.
            offsets: Of the chunk.
            sizes: Of the chunk.
            hint: Its place among the chunks of its tensor, if it may be where it was in the base.
        """
        chunks = self._chunks
        number = chunks.find(name, offsets=offsets, sizes=sizes, hint=hint)
        if number is None:
            return None
        known_dtype, encoding = chunks.kinds[int(chunks.kind[chunks.index[name]])]
        first = int(chunks.piece_first[number])
        return Known(encoding, range(first, first + int(chunks.pieces[number]))) if known_dtype == dtype else None

    def object(self, name: str) -> Known | None:
        """An object in shards."""
        return self._objects.get(name)

    def compare(self, pieces: range, *, length_bytes: int, read: ReadBytes) -> Iterator[Part]:
        """Compare the bytes of a chunk or object with its pieces, one piece after another.

        Costs one pass over what did not change. What changed costs one too; or a block a piece, of at most a 64th of
        it, where the digests of first blocks are known and differ.

        Args:
            pieces: Of a chunk or object.
            length_bytes: Of all of it. If that is not the length of the pieces, nothing is given.
            read: Gives at most `SPAN_BYTES` of it at a time.

        Yields:
            A part for each piece, in order; together they are the whole.
        """
        lengths = self.pieces.length[pieces.start : pieces.stop].tolist()
        if sum(lengths) != length_bytes:
            return
        start = 0
        for piece, length in zip(pieces, lengths, strict=True):
            yield Part(start, start + length, piece, self._first_block(piece, start, read))
            start += length

    def lend(self, compared: Sequence[Sequence[Part]]) -> Loan:
        """Decide what is borrowed, once everything is compared: nothing of a shard where nearly all has changed.

        Args:
            compared: The parts of each chunk or object; none of what the base does not know.
        """
        changed = [part.piece for parts in compared for part in parts if part.first_block is None]
        shard = self.pieces.shard
        live_bytes = self.live_bytes - _sums(shard[changed], self.pieces.length[changed], len(self.shards.keys))
        worth = live_bytes >= LIVE_SHARE_MIN * (self.shards.sizes - self.shards.data_starts)
        parts = [
            [part if worth[shard[part.piece]] else replace(part, first_block=None) for part in parts]
            for parts in compared
        ]
        return Loan(self, parts, live_bytes)

    def _first_block(self, piece: int, start: int, read: ReadBytes) -> bytes | None:
        """The digest of the first block, if all bytes of a piece are still those from `start` on; else None."""
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


def _sums(of: I64, values: I64, count: int) -> I64:
    """The sum of the values of each of `count` groups."""
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, of, values)
    return sums


_NO_BASE = Base(
    url="",
    shards=Shards((), _NONE, _NONE, _NONE, b""),
    pieces=Pieces(_NONE, _NONE, _NONE, _NONE, b""),
    first_blocks=b"",
    live_bytes=_NONE,
    named=np.zeros(0, dtype=bool),
    _chunks=_Chunks({}, (), _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE),
    _objects={},
)


NO_LOAN = Loan(_NO_BASE, (), _NONE)


@dataclass(slots=True)
class Parts:
    """What chunks and objects consist of, in order: items that are sent, or pieces of the base. One entry a part.

    Attributes:
        owner: Number of the chunk or object.
        number: Of the item among all that are sent, or of the piece in the base.
        first_block: Digest of the piece's first block; None for what is sent.
        sent: How many items are sent.
    """

    owner: list[int] = field(default_factory=list)
    number: list[int] = field(default_factory=list)
    first_block: list[bytes | None] = field(default_factory=list)
    sent: int = 0

    def send(self, owner: int) -> None:
        """Its next part is the next item that is sent."""
        self._add(owner, self.sent, None)
        self.sent += 1

    def borrow(self, owner: int, part: Part) -> None:
        """Its next part is a piece of the base, which did not change."""
        assert part.first_block is not None
        self._add(owner, part.piece, part.first_block)

    def _add(self, owner: int, number: int, first_block: bytes | None) -> None:
        self.owner.append(owner)
        self.number.append(number)
        self.first_block.append(first_block)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where everything lies.

    Attributes:
        shards: Those that were put, then those of the base that pieces lie in.
        live_bytes: Of each, see `Base`.
        pieces: In the order of the parts.
        first_blocks: The digest of the first block of each piece.
        piece_first: The first piece of each owner.
        piece_count: How many pieces it has.
    """

    shards: Shards
    live_bytes: I64
    pieces: Pieces
    first_blocks: bytes
    piece_first: I64
    piece_count: I64


def place(parts: Parts, written: Sequence[WrittenShard], loan: Loan, *, owners: int) -> Placed:
    """Put together what was sent and what was borrowed.

    Args:
        parts: In the order in which they were drawn.
        written: In the order in which they were packed: their pieces, one after another, are in the order of the items.
        loan: What was borrowed.
        owners: How many chunks and objects there are.
    """
    base = loan.base
    owner, number = np.array(parts.owner, dtype=np.int64), np.array(parts.number, dtype=np.int64)
    is_sent = np.array([first_block is None for first_block in parts.first_block], dtype=bool)
    borrowed = number[~is_sent]
    lenders, lender = np.unique(base.pieces.shard[borrowed], return_inverse=True)
    put = _put_pieces(written)
    item = np.concatenate([_NONE, *(shard.item for shard in written)])
    count = np.ones_like(number)
    count[is_sent] = np.bincount(item, minlength=parts.sent)
    is_sent = np.repeat(is_sent, count)

    def mixed(sent: npt.NDArray[_Value], lent: npt.NDArray[_Value]) -> npt.NDArray[_Value]:
        """What is said of each piece that was sent and of each that was borrowed, in the order of the parts."""
        values = np.empty((len(is_sent), *sent.shape[1:]), dtype=sent.dtype)
        values[is_sent], values[~is_sent] = sent, lent
        return values

    piece_count = _sums(owner, count, owners)
    return Placed(
        shards=Shards(
            keys=(*(shard.key for shard in written), *(base.shards.keys[number] for number in lenders.tolist())),
            sizes=_column([shard.size_bytes for shard in written], base.shards.sizes[lenders]),
            data_starts=_column([shard.data_start for shard in written], base.shards.data_starts[lenders]),
            table_lengths=_column([len(shard.table) for shard in written], base.shards.table_lengths[lenders]),
            table_digests=b"".join(digest(shard.table) for shard in written)
            + _rows(base.shards.table_digests)[lenders].tobytes(),
        ),
        live_bytes=_column([shard.size_bytes - shard.data_start for shard in written], loan.live_bytes[lenders]),
        pieces=Pieces(
            shard=mixed(put.shard, len(written) + lender),
            start=mixed(put.start, base.pieces.start[borrowed]),
            length=mixed(put.length, base.pieces.length[borrowed]),
            table=mixed(put.table, base.pieces.table[borrowed]),
            digests=mixed(_rows(put.digests), _rows(base.pieces.digests)[borrowed]).tobytes(),
        ),
        first_blocks=mixed(
            _rows(b"".join(shard.first_blocks for shard in written)),
            _rows(b"".join(first_block for first_block in parts.first_block if first_block is not None)),
        ).tobytes(),
        piece_first=firsts(piece_count)[:-1],
        piece_count=piece_count,
    )


def _put_pieces(written: Sequence[WrittenShard]) -> Pieces:
    return Pieces(
        shard=np.repeat(np.arange(len(written)), [len(shard.item) for shard in written]).astype(np.int64),
        start=np.concatenate([_NONE, *(shard.start for shard in written)]),
        length=np.concatenate([_NONE, *(shard.length for shard in written)]),
        table=np.concatenate([_NONE, *(shard.table_first for shard in written)]),
        digests=b"".join(shard.digests for shard in written),
    )


def _column(values: list[int], more: I64) -> I64:
    return np.concatenate([np.array(values, dtype=np.int64), more])


def _rows(digests: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
