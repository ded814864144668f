"""Engine of a load: fetches ranges, verifies every byte, and hands the bytes to targets.

Works on a manifest and *targets*; knows nothing of torch's planners. All targets are called from the caller's thread.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.digests import (
    DIGEST_BYTES,
    block_bytes,
    block_count,
    block_digests,
    digest,
    piece_digest,
    table_entries,
)
from dcp_remote.common.geometry import ByteRange
from dcp_remote.errors import CorruptCheckpointError, ObjectNotFoundError, PermissionDeniedError
from dcp_remote.format.manifest import Manifest
from dcp_remote.loading.downloads import Fetch, Fetched, download
from dcp_remote.loading.read_plan import RangePlan, ReadPlan, Segment, Want, plan_reads
from dcp_remote.run.lookup import explain_missing_shard, find_older_steps
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.rereads import RereadingStore

# Function that reads ranges once more, by another way.
_Reread: TypeAlias = Callable[[Iterable[Fetch[Any]]], Iterator[Fetched[Any]]]

# Callback for each range that has arrived: key of the object, first byte, the bytes, and whether the bytes stay in
# place until the load is over; otherwise they are valid until the callback returns.
Arrived: TypeAlias = Callable[[str, int, memoryview, bool], None]


class Target(Protocol):
    """Destination of one want. Byte positions count from the beginning of the chunk or object."""

    @property
    def want(self) -> Want:
        """Part of a chunk, or object, that the target needs."""

    def place(self, span: ByteRange) -> memoryview | None:
        """Return the memory to read these bytes into; None if they have to be copied by `take`."""

    def take(self, span: ByteRange, data: memoryview) -> None:
        """Copy the wanted part of these bytes."""

    def complete(self) -> None:
        """Finish: all bytes have arrived and are verified."""


def read_targets(
    store: ObjectStore,
    manifest: Manifest,
    targets: Sequence[Target],
    *,
    memory_budget_bytes: int,
    retry_seconds: float,
    deadline: Deadline | None = None,
    plan: ReadPlan | None = None,
    arrived: Arrived = lambda *_: None,
    latency_seconds: float = 0.0,
) -> None:
    """Read all targets in parallel, and verify every byte.

    One GET per range of at most 8 MiB, and one per shard of which only parts of pieces are read (its block table). If
    a shard is missing, refused or damaged, one or two more, which tell whether the checkpoint was removed, and which
    are older. Bytes that do not match their digest are read once more, by another way, before they are reported as
    damaged: one GET, or one per range of a whole piece.

    The store is that of the checkpoint or of its run. A plan must cover the wants of the targets; None is that of
    `plan_reads`. `arrived` is called in the caller's thread for each range that has arrived; a whole piece of several
    ranges is verified with the last of them. `latency_seconds` is that of `download`.

    Raises:
        CheckpointGoneError: The checkpoint was deleted, replaced or thinned while it was being read.
        CorruptCheckpointError: Bytes are not those that were written, or a shard is missing; names shard and entry.
        StorageError: The store failed one request for longer than `retry_seconds`, or the deadline has passed.
    """
    if plan is None:
        plan = plan_reads(manifest, [target.want for target in targets])
    fetch = partial(
        download,
        store,
        memory_budget_bytes=memory_budget_bytes,
        retry_seconds=retry_seconds,
        deadline=deadline,
        total_bytes=sum(request.length for request in plan.ranges),
        latency_seconds=latency_seconds,
    )
    # A budget of one byte lets one range through at a time, since the other ranges of the load are still in flight.
    reread = partial(
        download, RereadingStore(store), memory_budget_bytes=1, retry_seconds=retry_seconds, deadline=deadline
    )
    progress = _Progress(manifest, plan, targets, reread)
    step = manifest.run.step if manifest.run is not None else None
    try:
        for table in fetch(progress.table_fetches(), total_bytes=None):
            arrived(table.fetch.key, table.fetch.start, progress.take_table(table), True)  # noqa: FBT003  # `Arrived`
        for fetched in fetch(progress.range_fetches()):
            progress.take_range(fetched)
            arrived(fetched.fetch.key, fetched.fetch.start, fetched.data, fetched.fetch.into is not None)
    except CorruptCheckpointError as error:
        where = {"url": store.url} | find_older_steps(store, step, retry_seconds=retry_seconds)
        raise CorruptCheckpointError(error.what, **where | error.details) from error.__cause__
    except (ObjectNotFoundError, PermissionDeniedError) as error:
        gone = explain_missing_shard(store, manifest, retry_seconds=retry_seconds, error=error)
        if gone is not None:
            raise gone from error
        if isinstance(error, PermissionDeniedError):
            raise
        raise CorruptCheckpointError(
            "A shard of the checkpoint is missing. Use another checkpoint. In a run, use one that does not reuse this "
            "shard, and save once with dedup=False, which uploads unchanged values again.",
            url=store.url,
            cause=error,
            **find_older_steps(store, step, retry_seconds=retry_seconds),
        ) from error
    assert not any(progress.open_pieces.values()), "every piece of the plan has arrived"


class _Progress:
    """Progress of a load: segments still to come, and digests not yet verified."""

    def __init__(self, manifest: Manifest, plan: ReadPlan, targets: Sequence[Target], reread: _Reread) -> None:
        self._reread = reread
        self._manifest = manifest
        self._plan = plan
        self._targets = targets
        self._tables: dict[int, bytes] = {}  # block tables, by shard
        self._entries: dict[int, bytes] = {}  # verified block digests of a partly read piece, from its shard's table
        self._digests: dict[int, bytearray] = {}  # block digests of a whole piece, as its bytes arrive
        self.open_pieces = dict.fromkeys(range(len(targets)), 0)  # pieces still to come, by number of the target
        for numbers in plan.wanted.users.values():
            for number in numbers:
                self.open_pieces[number] += 1
        self._open_segments = Counter(segment.piece for request in plan.ranges for segment in request.segments)
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
        """Verify a block table, read once more if it does not match, and return the copy that is kept."""
        shard = fetched.fetch.subject
        for attempt in itertools.chain([fetched], self._reread([fetched.fetch])):
            if attempt.digest == self._manifest.shards.table_digest(shard):
                table = self._tables[shard] = bytes(attempt.data)
                return memoryview(table)
        raise _corrupt(fetched.fetch, "a block table")

    def range_fetches(self) -> Iterator[Fetch[RangePlan]]:
        for request in self._plan.ranges:
            into = self._find_place(request.segments[0]) if len(request.segments) == 1 else None
            yield self._fetch(request, into)

    def _fetch(self, request: RangePlan, into: memoryview | None) -> Fetch[RangePlan]:
        key, lengths = self._manifest.shards.keys[request.shard], self._manifest.pieces.length
        cuts = [(s.start - request.start, s.length, block_bytes(int(lengths[s.piece]))) for s in request.segments]

        def digest_blocks(data: memoryview) -> bytes:
            return b"".join(block_digests(data[a : a + n], size_bytes=size) for a, n, size in cuts)

        return Fetch(key, request.start, request.length, into, digest_blocks, request)

    def _find_place(self, segment: Segment) -> memoryview | None:
        users = self._plan.wanted.users[segment.piece]
        if len(users) != 1:
            return None
        return self._targets[users[0]].place(self._span(users[0], segment))

    def _span(self, user: int, segment: Segment) -> ByteRange:
        """Return the bytes of a segment, counted from the beginning of the target's chunk or object."""
        pieces = self._manifest.pieces
        before = int(pieces.length[self._targets[user].want.piece_first : segment.piece].sum())
        start = before + segment.start - int(pieces.start[segment.piece])
        return ByteRange(start, start + segment.length)

    def take_range(self, fetched: Fetched[RangePlan]) -> None:
        """Verify the segments of a range, and hand them to their targets."""
        position = 0
        for segment in fetched.fetch.subject.segments:
            size = (segment.block_stop - segment.block_first) * DIGEST_BYTES
            begin = segment.start - fetched.fetch.start
            data = fetched.data[begin : begin + segment.length]
            if not self._matches(segment, fetched.digest[position : position + size], fetched.fetch):
                self._read_again(segment, data, fetched.fetch)
            position += size
            if fetched.fetch.into is None:
                self._take(segment, data)
            self._close(segment)

    def _take(self, segment: Segment, data: memoryview) -> None:
        for user in self._plan.wanted.users[segment.piece]:
            self._targets[user].take(self._span(user, segment), data)

    def _matches(self, segment: Segment, blocks: bytes, fetch: Fetch[RangePlan]) -> bool:
        """Return whether blocks match their digests; of a whole piece, True until its last segment verifies it."""
        piece = segment.piece
        if piece in self._plan.wanted.partial:
            first = segment.block_first * DIGEST_BYTES
            return self._table_entries(piece, fetch)[first : first + len(blocks)] == blocks
        count = block_count(int(self._manifest.pieces.length[piece]))
        digests = self._digests.setdefault(piece, bytearray(count * DIGEST_BYTES))
        digests[segment.block_first * DIGEST_BYTES : segment.block_stop * DIGEST_BYTES] = blocks
        return self._open_segments[piece] > 1 or piece_digest(bytes(digests)) == self._manifest.pieces.digest(piece)

    def _read_again(self, segment: Segment, data: memoryview, fetch: Fetch[RangePlan]) -> None:
        """Read a segment once more into `data`; of a whole piece all segments, since any of them can be damaged."""
        piece = segment.piece
        segments = [segment]
        if piece not in self._plan.wanted.partial:
            segments = [part for request in self._plan.ranges for part in request.segments if part.piece == piece]
        requests = [RangePlan(fetch.subject.shard, part.start, part.length, (part,)) for part in segments]
        matches = False
        for fetched in self._reread(
            self._fetch(request, data if request.segments[0] == segment else None) for request in requests
        ):
            (part,) = fetched.fetch.subject.segments
            if part != segment:
                self._take(part, fetched.data)
            matches = self._matches(part, fetched.digest, fetched.fetch)
        if not matches:
            raise _corrupt(fetch, self._manifest.name_of_piece(piece))

    def _table_entries(self, piece: int, fetch: Fetch[RangePlan]) -> bytes:
        """Return the digests of all blocks of a piece, from its shard's table, verified by the manifest.

        Otherwise a forged table would let a partial read see other bytes than a whole read.
        """
        entries = self._entries.get(piece)
        if entries is None:
            pieces = self._manifest.pieces
            first = int(pieces.table[piece]) * DIGEST_BYTES
            stop = first + table_entries(int(pieces.length[piece])) * DIGEST_BYTES
            entries = self._tables[int(pieces.shard[piece])][first:stop]
            if piece_digest(entries) != pieces.digest(piece):
                raise _corrupt(fetch, self._manifest.name_of_piece(piece))
            self._entries[piece] = entries
        return entries

    def _close(self, segment: Segment) -> None:
        """Count a segment as arrived and verified; complete the targets that it was the last for."""
        self._open_segments[segment.piece] -= 1
        if self._open_segments[segment.piece]:
            return
        self._entries.pop(segment.piece, None)
        self._digests.pop(segment.piece, None)
        for user in self._plan.wanted.users[segment.piece]:
            self.open_pieces[user] -= 1
            if not self.open_pieces[user]:
                self._targets[user].complete()


def _corrupt(fetch: Fetch[int] | Fetch[RangePlan], entry: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "Bytes of a shard do not match their digest. Use another checkpoint.",
        shard=fetch.key,
        entry=entry,
        start=fetch.start,
        length=fetch.length,
    )
