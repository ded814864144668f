"""The engine of a load: fetch what is wanted, verify it, put it where it belongs.

Works on a manifest and *targets*; knows nothing of torch's planners. All targets are called from the caller's thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from dcp_remote.checkpoint import why_missing
from dcp_remote.digests import (
    DIGEST_BYTES,
    block_bytes,
    block_count,
    block_digests,
    digest,
    piece_digest,
    table_entries,
)
from dcp_remote.downloads import Fetch, Fetched, download
from dcp_remote.errors import CheckpointNotFoundError, CorruptCheckpointError, ObjectNotFoundError
from dcp_remote.manifest import Manifest
from dcp_remote.ranges import ByteRange
from dcp_remote.read_plan import RangePlan, ReadPlan, Segment, Want, plan_reads
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.rereads import RereadingStore
from dcp_remote.storage.retrying import Deadline

T = TypeVar("T")

# Called with what has arrived and was looked at: key, first byte, the bytes, and whether they stay where they are until
# the load is over; otherwise they are gone when this returns.
Arrived: TypeAlias = Callable[[str, int, memoryview, bool], None]


def _for_nobody_else(_key: str, _start: int, _data: memoryview, _stays: bool) -> None:  # noqa: FBT001  # `Arrived`
    """What one process reads for itself."""


class Target(Protocol):
    """Something that is wanted, and where it goes. Byte positions are those of the chunk or object."""

    @property
    def want(self) -> Want:
        """What is read for it."""
        ...

    def place(self, span: ByteRange) -> memoryview | None:
        """Where to read these bytes straight to; None if they have to be copied."""
        ...

    def take(self, span: ByteRange, data: memoryview) -> None:
        """Copy what is wanted of these bytes."""
        ...

    def complete(self) -> None:
        """Everything has arrived and is verified."""
        ...


def read_or_explain(
    store: ObjectStore,
    manifest: Manifest,
    targets: Sequence[Target],
    *,
    memory_budget_bytes: int,
    retry_seconds: float,
    deadline: Deadline | None = None,
    plan: ReadPlan | None = None,
    arrived: Arrived = _for_nobody_else,
) -> None:
    """Read everything that is wanted, in parallel, and verify every byte of it.

    One GET per range of at most 8 MiB, and one per shard of which only parts of pieces are read (its block table). If
    a shard is gone, one more, to see whether the checkpoint still is what it was. Bytes that do not match their digest
    are read once more, by another way, before they are called damaged: one GET; one per range of a whole piece.

    Args:
        store: Opened at the checkpoint, or at its run.
        manifest: Of the checkpoint.
        targets: What is wanted, and where it goes.
        memory_budget_bytes: Of what is under way.
        retry_seconds: How long one request is tried again.
        deadline: Of all of it.
        plan: For what the targets want; None is that of a process that reads for itself alone.
        arrived: See there; in the caller's thread. A whole piece of several ranges is verified with the last of them.

    Raises:
        CheckpointNotFoundError: It was removed or replaced while it was being read.
        CorruptCheckpointError: Bytes are not those that were written, or a shard is missing; names shard and entry.
        StorageError: The store failed one request for longer than `retry_seconds`, or the deadline has passed.
    """
    fetch = partial(
        download, store, memory_budget_bytes=memory_budget_bytes, retry_seconds=retry_seconds, deadline=deadline
    )
    # The budget lets one range at a time through: the others of the load are still under way.
    again = partial(
        download, RereadingStore(store), memory_budget_bytes=1, retry_seconds=retry_seconds, deadline=deadline
    )
    if plan is None:
        plan = plan_reads(manifest, [target.want for target in targets])
    reading = _Reading(manifest, plan, targets, again)
    try:
        for table in fetch(reading.table_fetches()):
            arrived(table.fetch.key, table.fetch.start, reading.take_table(table), True)  # noqa: FBT003  # `Arrived`
        for fetched in fetch(reading.range_fetches()):
            reading.take_range(fetched)
            arrived(fetched.fetch.key, fetched.fetch.start, fetched.data, fetched.fetch.into is not None)
    except ObjectNotFoundError as error:
        gone = why_missing(store, manifest, retry_seconds=retry_seconds)
        if gone is not None:
            raise CheckpointNotFoundError(
                f"The checkpoint was {gone} while it was being read; load again.",
                url=store.url,
                save_id=manifest.save_id,
            ) from error
        raise CorruptCheckpointError(
            "A shard of the checkpoint is missing. Use another checkpoint; of a run, one that does not name it as "
            "well, and save once with dedup=False, so that what did not change is sent again.",
            url=store.url,
            cause=error,
        ) from error
    assert not any(reading.open_pieces.values()), "every piece of the plan has arrived"


class _Again(Protocol):
    """Reads ranges once more, by another way."""

    def __call__(self, fetches: Iterable[Fetch[T]], /) -> Iterator[Fetched[T]]: ...


class _Reading:
    """What is still to come, and what has come unverified."""

    def __init__(self, manifest: Manifest, plan: ReadPlan, targets: Sequence[Target], again: _Again) -> None:
        self._again = again
        self._manifest = manifest
        self._plan = plan
        self._targets = targets
        self._tables: dict[int, bytes] = {}
        self._entries: dict[int, bytes] = {}
        self._digests: dict[int, bytearray] = {}
        self.open_pieces = dict.fromkeys(range(len(targets)), 0)
        for numbers in plan.users.values():
            for number in numbers:
                self.open_pieces[number] += 1
        self._open_segments = dict(plan.segments)
        for number, count in self.open_pieces.items():
            if not count:
                targets[number].complete()

    def table_fetches(self) -> Iterator[Fetch[int]]:
        shards = self._manifest.shards
        for shard in self._plan.tables:
            length = int(shards.table_lengths[shard])
            start = int(shards.data_starts[shard]) - length
            yield Fetch(shards.keys[shard], start, length, None, digest, shard)

    def take_table(self, fetched: Fetched[int]) -> memoryview:
        """Keep a block table, read once more if need be, and return where it is kept."""
        shard = fetched.fetch.subject
        for one in itertools.chain([fetched], self._again([fetched.fetch])):
            if one.digest == self._manifest.shards.table_digest(shard):
                kept = self._tables[shard] = bytes(one.data)
                return memoryview(kept)
        raise _corrupt(fetched.fetch, "a block table")

    def range_fetches(self) -> Iterator[Fetch[RangePlan]]:
        for request in self._plan.ranges:
            into = self._placed(request.segments[0]) if len(request.segments) == 1 else None
            yield self._fetch(request, into)

    def _fetch(self, request: RangePlan, into: memoryview | None) -> Fetch[RangePlan]:
        key = self._manifest.shards.keys[request.shard]
        return Fetch(key, request.start, request.length, into, self._digester(request), request)

    def _digester(self, request: RangePlan) -> Callable[[memoryview], bytes]:
        lengths = self._manifest.pieces.length
        cuts = [(s.start - request.start, s.length, block_bytes(int(lengths[s.piece]))) for s in request.segments]
        return lambda data: b"".join(block_digests(data[a : a + n], size_bytes=size) for a, n, size in cuts)

    def _placed(self, segment: Segment) -> memoryview | None:
        users = self._plan.users[segment.piece]
        if len(users) != 1:
            return None
        return self._targets[users[0]].place(self._span(users[0], segment))

    def _span(self, user: int, segment: Segment) -> ByteRange:
        """The bytes of a segment, counted from the beginning of the chunk or object that they belong to."""
        pieces = self._manifest.pieces
        before = int(pieces.length[self._targets[user].want.piece_first : segment.piece].sum())
        start = before + segment.start - int(pieces.start[segment.piece])
        return ByteRange(start, start + segment.length)

    def take_range(self, arrived: Fetched[RangePlan]) -> None:
        position = 0
        for segment in arrived.fetch.subject.segments:
            size = (segment.block_stop - segment.block_first) * DIGEST_BYTES
            begin = segment.start - arrived.fetch.start
            data = arrived.data[begin : begin + segment.length]
            if not self._matches(segment, arrived.digest[position : position + size], arrived.fetch):
                self._read_again(segment, data, arrived.fetch)
            position += size
            if arrived.fetch.into is None:
                self._take(segment, data)
            self._close(segment)

    def _take(self, segment: Segment, data: memoryview) -> None:
        for user in self._plan.users[segment.piece]:
            self._targets[user].take(self._span(user, segment), data)

    def _matches(self, segment: Segment, blocks: bytes, fetch: Fetch[RangePlan]) -> bool:
        """Whether the blocks match their digests; those of a whole piece are looked at with its last segment."""
        piece = segment.piece
        if piece in self._plan.partial:
            first = segment.block_first * DIGEST_BYTES
            return self._table_entries(piece, fetch)[first : first + len(blocks)] == blocks
        count = block_count(int(self._manifest.pieces.length[piece]))
        seen = self._digests.setdefault(piece, bytearray(count * DIGEST_BYTES))
        seen[segment.block_first * DIGEST_BYTES : segment.block_stop * DIGEST_BYTES] = blocks
        return self._open_segments[piece] > 1 or piece_digest(bytes(seen)) == self._manifest.pieces.digest(piece)

    def _read_again(self, segment: Segment, data: memoryview, fetch: Fetch[RangePlan]) -> None:
        """Read a segment once more into `data`; of a whole piece all of its segments, as any can be the wrong one."""
        piece = segment.piece
        segments = [segment]
        if piece not in self._plan.partial:
            segments = [one for request in self._plan.ranges for one in request.segments if one.piece == piece]
        requests = [RangePlan(fetch.subject.shard, one.start, one.length, (one,)) for one in segments]
        matches = False
        for fetched in self._again(
            self._fetch(request, data if request.segments[0] == segment else None) for request in requests
        ):
            (one,) = fetched.fetch.subject.segments
            if one != segment:
                self._take(one, fetched.data)
            matches = self._matches(one, fetched.digest, fetched.fetch)
        if not matches:
            raise _corrupt(fetch, self._name(piece))

    def _table_entries(self, piece: int, fetch: Fetch[RangePlan]) -> bytes:
        """The digests of all blocks of a piece, from its shard's table; they are those of the digest in the manifest.

        Or a table that somebody made up would let who reads a part see other bytes than who reads the whole.
        """
        entries = self._entries.get(piece)
        if entries is None:
            pieces = self._manifest.pieces
            first = int(pieces.table[piece]) * DIGEST_BYTES
            stop = first + table_entries(int(pieces.length[piece])) * DIGEST_BYTES
            entries = self._tables[int(pieces.shard[piece])][first:stop]
            if piece_digest(entries) != pieces.digest(piece):
                raise _corrupt(fetch, self._name(piece))
            self._entries[piece] = entries
        return entries

    def _close(self, segment: Segment) -> None:
        self._open_segments[segment.piece] -= 1
        if self._open_segments[segment.piece]:
            return
        self._entries.pop(segment.piece, None)
        self._digests.pop(segment.piece, None)
        for user in self._plan.users[segment.piece]:
            self.open_pieces[user] -= 1
            if not self.open_pieces[user]:
                self._targets[user].complete()

    def _name(self, piece: int) -> str:
        tensors = self._manifest.tensors
        if piece >= int(tensors.piece_first[-1]):
            return next(o.name for o in self._manifest.stored if o.piece_first <= piece < o.piece_first + o.pieces)
        chunk = int(tensors.piece_first.searchsorted(piece, side="right")) - 1
        return tensors.names[int(tensors.chunk_first.searchsorted(chunk, side="right")) - 1]


def _corrupt(fetch: Fetch[int] | Fetch[RangePlan], entry: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "The bytes of a shard are not those that were written. Use another checkpoint.",
        shard=fetch.key,
        entry=entry,
        start=fetch.start,
        length=fetch.length,
    )
