"""Check of one shard: its length, and its bytes against the digests in a manifest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from dcp_remote.common.arrays import I64
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.digests import DIGEST_BYTES, block_bytes, digest, piece_digest, table_entries
from dcp_remote.common.geometry import ByteRange
from dcp_remote.common.text import human_bytes
from dcp_remote.common.units import MiB
from dcp_remote.errors import ObjectNotFoundError
from dcp_remote.format.manifest import Manifest, Pieces, Shards
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.rereads import RereadingStore
from dcp_remote.storage.retrying import RetryingStore

Depth: TypeAlias = Literal["quick", "sample", "deep"]

# Bytes of one request; at least those of the largest block.
RANGE_BYTES_MAX = 4 * MiB

# Generator of its own: that of the process belongs to the training, which saves its state in checkpoints.
_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Damage:
    """Damaged object of a run or checkpoint.

    Attributes:
        key: Key of the object, relative to the URL of the run or checkpoint.
        kind: "missing", "length" or "bytes" of a shard; "manifest" if a manifest, or a segment of it, cannot be read.
        reason: Text for people that says what was found.
        ranges: Damaged bytes of a shard, as far as they are known.
        steps: Steps of the live checkpoints that have one of `entries`, or this manifest, ascending; () if none has
            one, and for a checkpoint by itself.
        entries: Names of the tensors and objects that need these bytes; all of a shard that is missing.
    """

    key: str
    kind: Literal["missing", "length", "bytes", "manifest"]
    reason: str
    ranges: tuple[ByteRange, ...] = ()
    steps: tuple[int, ...] = ()
    entries: tuple[str, ...] = ()


class ShardPart(NamedTuple):
    """Shard, and pieces in it that are to be checked."""

    shard: Shards  # one
    pieces: Pieces  # by ascending start

    @classmethod
    def of(cls, manifest: Manifest, shard: int, pieces: I64) -> ShardPart:
        """Return the shard of this number, with the pieces of these numbers."""
        return cls(manifest.shards.take(np.array([shard])), manifest.pieces.take(pieces))

    @property
    def key(self) -> str:
        """Key of the shard."""
        return self.shard.keys[0]

    @property
    def size_bytes(self) -> int:
        """Length of the shard."""
        return int(self.shard.sizes[0])

    @property
    def table_span(self) -> ByteRange:
        """Bytes of the block table; empty if the shard has none."""
        stop = int(self.shard.data_starts[0])
        return ByteRange(stop - int(self.shard.table_lengths[0]), stop)

    def iterate_pieces(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield start, length, first entry of the block table and digest of each piece."""
        columns = (column.tolist() for column in (self.pieces.start, self.pieces.length, self.pieces.table))
        for number, (start, length, first) in enumerate(zip(*columns, strict=True)):
            yield start, length, first, self.pieces.digest(number)

    def is_whole(self, data: memoryview) -> bool:
        """Compare the block table and the pieces with their digests; none is of the header, which no load needs."""
        table = data[self.table_span.start : self.table_span.stop]
        if len(table) and digest(table) != self.shard.table_digests:
            return False
        return not _find_mismatched(self, table) and all(block.is_whole(data) for block in _iterate_blocks(self, table))


def group_pieces(manifest: Manifest) -> list[I64]:
    """Return the numbers of the pieces in each shard, by ascending start."""
    pieces = manifest.pieces
    order = np.lexsort((pieces.start, pieces.shard))
    bounds = np.searchsorted(pieces.shard[order], np.arange(len(manifest.shards.keys) + 1))
    return np.split(order, bounds)[1:-1]


class _Block(NamedTuple):
    span: ByteRange  # in the shard
    twice_digested: bytes  # digest of the digest of the block: of a piece of one block, this is the piece's own

    def is_whole(self, data: memoryview, *, start: int = 0) -> bool:
        """Compare the block with its digest, in the bytes of the shard from `start` on."""
        return piece_digest(digest(data[self.span.start - start : self.span.stop - start])) == self.twice_digested


class ShardChecker:
    """Checks shards, of one store and to one depth; for many threads at a time."""

    def __init__(self, store: ObjectStore, *, depth: Depth, make_deadline: Callable[[], Deadline]) -> None:
        """Store the arguments; each request is retried until a deadline of its own."""
        self._depth, self._make_deadline = depth, make_deadline
        # Bytes that do not match are read once more, by another way. One store for all shards, which warns once.
        self._stores = (store, RereadingStore(store))

    def check(self, part: ShardPart) -> Damage | None:
        """Check a shard; one HEAD.

        A sample also costs a GET for the block table, if the shard has one, and up to three for blocks; a deep check
        costs a GET for the table and one for each 4 MiB, as does a sample that finds damage.
        """
        key, size_bytes = part.key, part.size_bytes
        try:
            found_bytes = RetryingStore(self._stores[0], self._make_deadline()).head(key).size_bytes
            bad = [] if self._depth == "quick" else self._find_bad(part, found_bytes)
        except ObjectNotFoundError:
            return Damage(key, "missing", "missing", (ByteRange(0, size_bytes),))
        if found_bytes < size_bytes:
            bad.append(ByteRange(found_bytes, size_bytes))
        if found_bytes != size_bytes:
            return Damage(key, "length", f"{found_bytes} bytes instead of {size_bytes}", tuple(bad))
        if not bad:
            return None
        total = human_bytes(sum(one.length for one in bad))
        return Damage(key, "bytes", f"{total} from byte {bad[0].start} on differ", tuple(bad))

    def _find_bad(self, part: ShardPart, found_bytes: int) -> list[ByteRange]:
        """Return the ranges before the end that do not match: the block table, and blocks."""
        span = part.table_span
        if found_bytes < span.stop:
            return []
        table, bad = memoryview(b""), list[ByteRange]()
        if span.length:
            table, bad = self._read(part, [_Block(span, piece_digest(part.shard.table_digests))])
            bad = bad or _find_mismatched(part, table)
        # Without a table, longer pieces are named as damaged in any case.
        blocks = [block for block in _iterate_blocks(part, None if bad else table) if block.span.stop <= found_bytes]
        is_sample = self._depth == "sample" and found_bytes == part.size_bytes and bool(blocks) and not bad
        # The ends, where a cut or a write that stopped shows; the one between changes from one call to the next.
        if is_sample and not self._compare(part, dict.fromkeys([blocks[0], _random.choice(blocks), blocks[-1]])):
            return []
        return bad + self._compare(part, blocks)

    def _compare(self, part: ShardPart, blocks: Iterable[_Block]) -> list[ByteRange]:
        """Return the ranges of the blocks that do not match."""
        return [one for group in _group(blocks) for one in self._read(part, group)[1]]

    def _read(self, part: ShardPart, group: Sequence[_Block]) -> tuple[memoryview, list[ByteRange]]:
        """Read neighbors by one GET, or by two if any does not match; return the bytes, and the ranges that do not."""
        start = group[0].span.start
        data = memoryview(bytearray(group[-1].span.stop - start))
        bad: list[ByteRange] = []
        for store in self._stores:
            RetryingStore(store, self._make_deadline()).get_into(part.key, start, data)
            bad = [block.span for block in group if not block.is_whole(data, start=start)]
            if not bad:
                break
        return data, bad


def _find_mismatched(part: ShardPart, table: memoryview) -> list[ByteRange]:
    """Return the pieces whose digest is not that of their entries in the block table."""
    found: list[ByteRange] = []
    for start, length, first, known in part.iterate_pieces():
        entries = bytes(table[first * DIGEST_BYTES :][: table_entries(length) * DIGEST_BYTES])
        if entries and piece_digest(entries) != known:
            found.append(ByteRange(start, start + length))
    return found


def _iterate_blocks(part: ShardPart, table: memoryview | None) -> Iterator[_Block]:
    for start, length, first, known in part.iterate_pieces():
        stop, size = start + length, block_bytes(length)
        if 0 < length <= size:
            yield _Block(ByteRange(start, stop), known)
        elif table is not None:
            for number, at in enumerate(range(start, stop, size), first):
                entry = table[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
                yield _Block(ByteRange(at, min(at + size, stop)), piece_digest(bytes(entry)))


def _group(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """Yield neighbors, of at most 4 MiB together, each of which one request reads."""
    group: list[_Block] = []
    for block in blocks:
        span = block.span
        if group and (span.start != group[-1].span.stop or span.stop - group[0].span.start > RANGE_BYTES_MAX):
            yield group
            group = []
        group.append(block)
    if group:
        yield group
