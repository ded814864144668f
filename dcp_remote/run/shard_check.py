"""Check of one shard: its length, and its bytes against the digests in a manifest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.digests import DIGEST_BYTES, block_bytes, digest, piece_digest, table_entries
from dcp_remote.common.geometry import ByteRange
from dcp_remote.common.text import human_bytes
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import CorruptCheckpointError, ObjectNotFoundError
from dcp_remote.format.manifest import Pieces
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.rereads import RereadingStore
from dcp_remote.storage.retrying import RetryingStore

Depth: TypeAlias = Literal["quick", "sample", "deep"]

# Bytes of one request, and of the buffer of one check; at least that of the largest block.
RANGE_BYTES_MAX = 4 * MiB

# Blocks with a smaller gap between them are read by one request.
_GAP_BYTES = 16 * KiB

# Blocks of a shard in a sample: the first, the last, and others at random.
_SAMPLED_BLOCKS = 3

# Generator of its own: that of the process belongs to the training, which saves its state in checkpoints.
_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class ShardPart:
    """Shard as a manifest describes it, and the pieces in it that are to be checked."""

    step: int | None  # of the checkpoint; None outside a run
    key: str
    size_bytes: int
    table: ByteRange  # bytes of the block table
    table_digest: bytes
    pieces: Pieces  # by ascending start


@dataclass(frozen=True, slots=True)
class ShardDamage:
    """Damage that was found in a shard."""

    kind: Literal["missing", "length", "bytes"]
    reason: str
    ranges: tuple[ByteRange, ...]  # damaged bytes of the shard, as far as they are known


class _Block(NamedTuple):
    piece: int  # index among the pieces of the part
    number: int  # in the piece
    start: int  # first byte in the shard
    stop: int  # one past the last byte


class ShardChecker:
    """Checks shards, of one store and to one depth; for many threads at a time, each with a buffer of 4 MiB."""

    def __init__(self, store: ObjectStore, *, depth: Depth, make_deadline: Callable[[], Deadline]) -> None:
        """Store the arguments; each request is retried until a deadline of its own."""
        self._store, self._depth, self._make_deadline = store, depth, make_deadline
        self._rereading = RereadingStore(store)  # one for all, which warns once

    def check(self, part: ShardPart) -> ShardDamage | None:
        """Check a shard; one HEAD.

        A sample also costs a GET for the block table, if the shard has one, and up to three for blocks; the whole part
        costs a GET per 4 MiB. Where bytes do not match, the whole part is read once more, by another way.
        """
        try:
            found_bytes = RetryingStore(self._store, self._make_deadline()).head(part.key).size_bytes
            bad = self._find_bad(part, found_bytes) if self._depth != "quick" else []
        except ObjectNotFoundError:
            return ShardDamage("missing", "missing", (ByteRange(0, part.size_bytes),))
        if found_bytes != part.size_bytes:
            bad += [ByteRange(found_bytes, part.size_bytes)] if found_bytes < part.size_bytes else []
            return ShardDamage("length", f"{found_bytes} bytes instead of {part.size_bytes}", tuple(bad))
        if not bad:
            return None
        total = human_bytes(sum(one.length for one in bad))
        return ShardDamage("bytes", f"{total} from byte {bad[0].start} on differ", tuple(bad))

    def _find_bad(self, part: ShardPart, found_bytes: int) -> list[ByteRange]:
        # Pieces behind the end are damaged anyway, and a hostile manifest may claim any length for them.
        is_inside = part.pieces.start + part.pieces.length <= found_bytes
        part = replace(part, pieces=part.pieces.take(np.flatnonzero(is_inside)))
        blocks = list(_iterate_blocks(part.pieces))
        chosen = blocks
        if self._depth == "sample" and found_bytes == part.size_bytes and len(blocks) > _SAMPLED_BLOCKS:
            # The ends, where a cut or a write that stopped shows; the others change from one call to the next.
            chosen = [blocks[0], *_random.sample(blocks[1:-1], _SAMPLED_BLOCKS - 2), blocks[-1]]
        if not self._find_bad_among(chosen, part, found_bytes, self._store):
            return []
        return self._find_bad_among(blocks, part, found_bytes, self._rereading)

    def _find_bad_among(
        self, blocks: Sequence[_Block], part: ShardPart, found_bytes: int, store: ObjectStore
    ) -> list[ByteRange]:
        """Return the ranges of the block table and of these blocks that do not match, ascending."""
        groups = list(_group(blocks))
        table_length = part.table.length if part.table.stop <= found_bytes else 0
        buffer = memoryview(bytearray(max([table_length, *map(_length, groups)])))

        def read(start: int, length: int) -> memoryview:
            """Return bytes of the shard; none if the shard was cut meanwhile."""
            try:
                if length:
                    RetryingStore(store, self._make_deadline()).get_into(part.key, start, buffer[:length])
                return buffer[:length]
            except CorruptCheckpointError:
                return buffer[:0]

        table = bytes(read(part.table.start, table_length))
        is_table_good = not part.table.length or digest(table) == part.table_digest
        digests: dict[_Block, bytes] = {}
        for group in groups:
            start = group[0].start
            data = read(start, _length(group))
            digests |= {block: digest(data[block.start - start : block.stop - start]) for block in group}
        bad: list[ByteRange] = []
        for piece, members in groupby(blocks, key=lambda block: block.piece):
            own = list(members)
            whole = part.pieces.digest(piece)
            count = table_entries(int(part.pieces.length[piece]))
            first = int(part.pieces.table[piece]) * DIGEST_BYTES
            entries = table[first : first + count * DIGEST_BYTES]
            if count and is_table_good and piece_digest(entries) == whole:
                known = [entries[at : at + DIGEST_BYTES] for at in range(0, len(entries), DIGEST_BYTES)]
                bad += [ByteRange(one.start, one.stop) for one in own if digests[one] != known[one.number]]
                continue
            # A table that is the one that was written, and disagrees with the piece, is damaged as well.
            is_table_good = is_table_good and not count
            if len(own) == max(count, 1) and piece_digest(b"".join(digests[one] for one in own)) != whole:
                bad.append(ByteRange(own[0].start, own[-1].stop))
        return bad if is_table_good else [part.table, *bad]


def _iterate_blocks(pieces: Pieces) -> Iterator[_Block]:
    for piece, (start, length) in enumerate(zip(pieces.start.tolist(), pieces.length.tolist(), strict=True)):
        size = block_bytes(length)
        for number, at in enumerate(range(start, start + length, size)):
            yield _Block(piece, number, at, min(at + size, start + length))


def _group(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """Yield neighbors, of at most 4 MiB together, each of which one request reads."""
    group: list[_Block] = []
    for block in blocks:
        if group and (block.start - group[-1].stop > _GAP_BYTES or block.stop - group[0].start > RANGE_BYTES_MAX):
            yield group
            group = []
        group.append(block)
    if group:
        yield group


def _length(group: Sequence[_Block]) -> int:
    return group[-1].stop - group[0].start
