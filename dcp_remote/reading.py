"""The engine of a load: fetch what is wanted, verify it, put it where it belongs.

Works on a manifest and *targets*; knows nothing of torch's planners. All targets are called from the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from dcp_remote.digests import DIGEST_BYTES, block_bytes, block_count, block_digests, digest, piece_digest
from dcp_remote.dtypes import ITEM_BYTES
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError
from dcp_remote.manifest import Manifest
from dcp_remote.ranges import Box, ByteRange, boxes_of_run, only_run
from dcp_remote.read_plan import RangePlan, ReadPlan, Segment, Want, plan_reads, table_positions, want_box
from dcp_remote.serialization import byte_view, copy_into, dtype_of, is_copied, narrow, tensor_from
from dcp_remote.storage.base import ObjectStore
from dcp_remote.transfer import Fetch, Fetched, download


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


class TensorTarget:
    """A box of a chunk of a tensor, copied into a tensor of the box's shape.

    Args:
        manifest: Of the checkpoint.
        tensor: Number of the tensor.
        chunk: Number of the chunk.
        box: Relative to the chunk; not empty.
        resolve: Gives the destination; called once, when its first bytes are asked for.
        commit: Called with the destination when it is complete.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        tensor: int,
        chunk: int,
        box: Box,
        resolve: Callable[[], torch.Tensor],
        commit: Callable[[torch.Tensor], None],
    ) -> None:
        """See the class."""
        self._name = manifest.tensors.names[tensor]
        self._sizes = manifest.tensors.sizes_of(chunk)
        self._box = box
        kind = manifest.tensors.kind_of(tensor)
        self._item_bytes = ITEM_BYTES[kind.dtype]
        self._dtype = dtype_of(kind.dtype)
        self._resolve = resolve
        self._commit = commit
        self._destination: torch.Tensor | None = None
        self._memory: memoryview | None = None
        self._memory_start = 0
        self.want = want_box(manifest, tensor=tensor, chunk=chunk, box=box)

    def place(self, span: ByteRange) -> memoryview | None:
        """Straight into the destination, where the span lies in the box as one run of its memory."""
        self._resolved()
        if self._memory is None:
            return None
        start, stop = span.start - self._memory_start, span.stop - self._memory_start
        return self._memory[start:stop] if start >= 0 and stop <= len(self._memory) else None

    def take(self, span: ByteRange, data: memoryview) -> None:
        """Copy the part of the span that lies in the box, as at most `2 * dimensions - 1` boxes."""
        destination, item = self._resolved(), self._item_bytes
        first = span.start // item
        for start, box in boxes_of_run(self._sizes, first, span.stop // item):
            common = box.intersection(self._box)
            if common is None:
                continue
            begin = (start - first) * item
            source = tensor_from(data[begin : begin + box.elements * item], self._dtype, box.sizes)
            copy_into(
                narrow(destination, common.relative_to(self._box.offsets)),
                narrow(source, common.relative_to(box.offsets)),
            )

    def complete(self) -> None:
        """Hand the destination back."""
        self._commit(self._resolved())

    def _resolved(self) -> torch.Tensor:
        if self._destination is not None:
            return self._destination
        destination = self._resolve().detach()
        if tuple(destination.shape) != self._box.sizes:
            raise InvalidArgumentError(
                "The planner gave a tensor of another shape than it asked for.",
                tensor=self._name,
                asked=self._box.sizes,
                given=tuple(destination.shape),
            )
        first = only_run(self._sizes, self._box)
        if first is not None and destination.dtype == self._dtype and not is_copied(destination):
            self._memory = byte_view(destination)
            self._memory_start = first * self._item_bytes
        self._destination = destination
        return destination


class BytesTarget:
    """A whole object or stream, read into memory.

    Args:
        want: All its pieces.
        length: In bytes.
        done: Called with it when it is complete.
    """

    def __init__(self, want: Want, *, length: int, done: Callable[[bytes], None]) -> None:
        """See the class."""
        self.want = want
        self._length = length
        self._done = done
        self._data: bytearray | None = None

    def place(self, span: ByteRange) -> memoryview | None:
        """Straight into the buffer."""
        return memoryview(self._buffer())[span.start : span.stop]

    def take(self, span: ByteRange, data: memoryview) -> None:
        """Copy into the buffer."""
        self._buffer()[span.start : span.stop] = data

    def complete(self) -> None:
        """Hand it over."""
        self._done(bytes(self._buffer()))
        self._data = None

    def _buffer(self) -> bytearray:
        if self._data is None:
            self._data = bytearray(self._length)
        return self._data


def read_targets(
    store: ObjectStore,
    manifest: Manifest,
    targets: Sequence[Target],
    *,
    memory_budget_bytes: int,
    retry_seconds: float,
) -> None:
    """Read everything that is wanted, in parallel, and verify every byte of it.

    One GET per range of at most 8 MiB, and one per shard of which only parts of pieces are read (its block table).

    Raises:
        CorruptCheckpointError: Bytes are not those that were written; names the shard and the entry.
        ObjectNotFoundError: A shard is gone.
        StorageError: The store failed one request for longer than `retry_seconds`.
    """
    plan = plan_reads(manifest, [target.want for target in targets])
    reading = _Reading(manifest, plan, targets)
    for fetched in download(
        store, reading.table_fetches(), memory_budget_bytes=memory_budget_bytes, retry_seconds=retry_seconds
    ):
        reading.take_table(fetched)
    for arrived in download(
        store, reading.range_fetches(), memory_budget_bytes=memory_budget_bytes, retry_seconds=retry_seconds
    ):
        reading.take_range(arrived)
    assert not any(reading.open_pieces.values()), "every piece of the plan has arrived"


class _Reading:
    """What is still to come, and what has come unverified."""

    def __init__(self, manifest: Manifest, plan: ReadPlan, targets: Sequence[Target]) -> None:
        self._manifest = manifest
        self._plan = plan
        self._targets = targets
        self._tables: dict[int, bytes] = {}
        self._table_position = table_positions(manifest, plan.tables)
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

    def take_table(self, fetched: Fetched[int]) -> None:
        shard = fetched.fetch.subject
        if fetched.digest != self._manifest.shards.table_digest(shard):
            raise _corrupt(fetched.fetch, "a block table")
        self._tables[shard] = bytes(fetched.data)

    def range_fetches(self) -> Iterator[Fetch[RangePlan]]:
        keys = self._manifest.shards.keys
        for request in self._plan.ranges:
            into = self._placed(request.segments[0]) if len(request.segments) == 1 else None
            yield Fetch(keys[request.shard], request.start, request.length, into, self._digester(request), request)

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
            self._verify(segment, arrived.digest[position : position + size], arrived.fetch)
            position += size
            if arrived.fetch.into is None:
                begin = segment.start - arrived.fetch.start
                for user in self._plan.users[segment.piece]:
                    self._targets[user].take(self._span(user, segment), arrived.data[begin : begin + segment.length])
            self._close(segment)

    def _verify(self, segment: Segment, blocks: bytes, fetch: Fetch[RangePlan]) -> None:
        piece = segment.piece
        if piece in self._plan.partial:
            shard = int(self._manifest.pieces.shard[piece])
            first = self._table_position[piece] + segment.block_first * DIGEST_BYTES
            if self._tables[shard][first : first + len(blocks)] != blocks:
                raise _corrupt(fetch, self._name(piece))
            return
        count = block_count(int(self._manifest.pieces.length[piece]))
        seen = self._digests.setdefault(piece, bytearray(count * DIGEST_BYTES))
        seen[segment.block_first * DIGEST_BYTES : segment.block_stop * DIGEST_BYTES] = blocks
        last = self._open_segments[piece] == 1
        if last and piece_digest(bytes(self._digests.pop(piece))) != self._manifest.pieces.digest(piece):
            raise _corrupt(fetch, self._name(piece))

    def _close(self, segment: Segment) -> None:
        self._open_segments[segment.piece] -= 1
        if self._open_segments[segment.piece]:
            return
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
