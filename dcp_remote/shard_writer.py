"""One rank's part of a save: from torch's plan to shards in the store and a report of them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeGuard

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dcp_remote.dedup import Base, place
from dcp_remote.devices import Run, host_views, is_linked, pinned_bytes
from dcp_remote.digests import DIGEST_BYTES, block_bytes, block_digests, piece_digest, table_entries
from dcp_remote.errors import InvalidArgumentError, SaveFailedError, UnsafeObjectError
from dcp_remote.manifest import JSON
from dcp_remote.object_raw import Segments
from dcp_remote.objects import EncodedObject, encode_object, encode_stream
from dcp_remote.packing import Piece, pack, piece_label
from dcp_remote.ranges import KiB, MiB, firsts
from dcp_remote.report import Notes, RankFigures, RankReport, ReportedObject, WrittenShard
from dcp_remote.save_items import SaveItems, Source, wait_for_sources
from dcp_remote.serialization import dtype_name, is_copied
from dcp_remote.shard import SHARD_BYTES_MAX, HeaderEntry, ShardNames, header
from dcp_remote.storage.base import Buffer
from dcp_remote.uploads import Prepared, Uploads

# Objects up to this size stand in the manifest, where they cost no request and can be read by eye; more of them than
# the total would make every rank's read of the manifest slow.
INLINE_BYTES_MAX = 16 * KiB
INLINE_TOTAL_BYTES_MAX = 8 * MiB

# Neighbors smaller than this are joined before they are sent: below it, a buffer costs more than its bytes.
JOIN_BYTES = 16 * KiB


def write_shards(
    plan: SavePlan,
    planner: SavePlanner,
    uploads: Uploads[WrittenShard],
    names: ShardNames,
    *,
    rank: int,
    url: str,
    allow_pickle: bool,
    shard_bytes_max: int = SHARD_BYTES_MAX,
    base: Base | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RankReport:
    """Put everything that a rank's plan holds and the base does not; one PUT per shard.

    Objects are encoded first: one that cannot be loaded safely is refused before a byte is uploaded.

    Everything is compared with the base piece by piece, before anything is sent, so of a large tensor only the pieces
    that changed are. Tensors of which nothing can be borrowed are cut anew; in others the pieces that changed keep
    their bounds, if they fit into a shard. What was compared and borrowed is not looked at again.

    Args:
        plan: The final plan of this rank.
        planner: Resolves its items.
        uploads: Sends the shards; everything is there when this returns.
        names: Of the shards, used by nobody else.
        rank: For the report.
        url: For the report.
        allow_pickle: Store objects that need code to load.
        shard_bytes_max: Bytes of data in a shard.
        base: What to borrow from, if anything; of the run at `url`. The commit must see to it that every shard of
            `RankReport.borrowed_keys` is then still named by a live checkpoint.
        clock: In seconds, for the figures.

    Raises:
        InvalidArgumentError: The base is of another run: its shards are not there.
        SaveFailedError: An upload failed, or the state is not what was planned.
        SaveTimeoutError: The deadline passed.
        UnsafeObjectError: An object needs code to load.
    """
    if base is not None and base.url != url:
        raise InvalidArgumentError(
            "Nothing can be borrowed from a checkpoint of another run.", url=url, base_url=base.url
        )
    began_seconds = clock()
    inline, stored = _encode_objects(plan, planner, allow_pickle=allow_pickle)
    encoded_seconds = clock()
    items = SaveItems(plan, planner, allow_pickle, stored)
    if base is not None:
        items.compare(base, partial(uploads.claim, 0))
    compared_seconds = clock()
    of_the_state = _gives_the_state_itself(planner)
    other_names = names.again()
    for number, pieces in enumerate(pack(items, shard_bytes_max=shard_bytes_max)):
        claimed_bytes = _held_bytes(pieces, of_the_state=of_the_state)
        uploads.claim(claimed_bytes)
        wait_for_sources([piece.item.source for piece in pieces])
        uploads.submit(
            names.key(number),
            partial(_prepare, pieces),
            claimed_bytes=claimed_bytes,
            second_key=other_names.key(number),
        )
    report = _report(rank, url, items, uploads.finish(), inline)
    slowest = max(uploads.seconds, key=lambda key: uploads.seconds[key], default="")
    figures = RankFigures(
        put_bytes=int(report.shards.sizes[: report.put].sum()),
        borrowed_bytes=int(report.pieces.length[report.pieces.shard >= report.put].sum()),
        requests=uploads.requests,
        retries=uploads.retries,
        encoding_seconds=encoded_seconds - began_seconds,
        comparing_seconds=compared_seconds - encoded_seconds,
        uploading_seconds=clock() - compared_seconds,
        slowest_shard=slowest,
        slowest_seconds=uploads.seconds.get(slowest, 0.0),
    )
    return replace(report, figures=figures)


def _encode_objects(
    plan: SavePlan, planner: SavePlanner, *, allow_pickle: bool
) -> tuple[dict[str, bytes], dict[str, EncodedObject]]:
    inline: dict[str, bytes] = {}
    stored: dict[str, EncodedObject] = {}
    total_bytes = 0
    for write_item in plan.items:
        if write_item.type != WriteItemType.BYTE_IO:
            continue
        name = write_item.index.fqn
        encoded = _encode_object(write_item, planner, allow_pickle=allow_pickle)
        small = len(encoded.data) <= INLINE_BYTES_MAX and total_bytes + len(encoded.data) <= INLINE_TOTAL_BYTES_MAX
        if encoded.encoding == JSON and small:
            inline[name] = encoded.data
            total_bytes += len(encoded.data)
        else:
            stored[name] = encoded
    return inline, stored


def _encode_object(write_item: WriteItem, planner: SavePlanner, *, allow_pickle: bool) -> EncodedObject:
    name = write_item.index.fqn
    if _gives_the_state_itself(planner):
        # torch's planner would `torch.save` the object into a stream of over a kilobyte, only for us to read it back.
        return encode_object(name, planner.lookup_object(write_item.index), allow_pickle=allow_pickle)
    try:
        stream = planner.resolve_data(write_item)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        # What a pickler raises names a type, but not the key.
        raise UnsafeObjectError(
            "The planner failed to give an object as a stream; if that is for pickling it, not even allow_pickle=True "
            "stores it. Keep it out of the state.",
            key=name,
            cause=error,
        ) from error
    if isinstance(stream, torch.Tensor):
        raise InvalidArgumentError("The planner gave a tensor for an object's item.", object=name)
    return encode_stream(name, stream.getvalue(), allow_pickle=allow_pickle)


def _gives_the_state_itself(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether what the planner resolves is what lies in the state; others may make a copy (in bfloat16, say)."""
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), name) is getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "lookup_object", "transform_object")
    )


def _held_bytes(pieces: Sequence[Piece[Source]], *, of_the_state: bool) -> int:
    """The memory beyond the state that sending them takes."""
    held_bytes, linked_bytes = 0, 0
    for piece in pieces:
        source = piece.item.source
        if isinstance(source, torch.Tensor) and is_linked(source):
            linked_bytes += piece.length
        elif _is_own(source) or piece.length < JOIN_BYTES or not of_the_state:
            held_bytes += piece.length
    return held_bytes + pinned_bytes(linked_bytes)


def _is_own(source: Source) -> bool:
    """Whether the bytes that are sent are a copy, which nobody else can change."""
    if isinstance(source, torch.Tensor):
        return is_copied(source)
    # Nobody changes bytes, neither ours nor those of an object.
    views = source.views if isinstance(source, Segments) else [source]
    return len(views) > 1 or isinstance(views[0].obj, bytes)


def _prepare(pieces: Sequence[Piece[Source]]) -> Prepared[WrittenShard]:
    """Called in a worker thread: the buffers of a shard, digested on the way."""
    views: list[memoryview] = []
    to_check: list[tuple[str, memoryview, bytes]] = []
    tables: list[bytes] = []
    piece_digests: list[bytes] = []
    first_blocks: list[bytes] = []
    for piece, view in zip(pieces, _views(pieces), strict=True):
        assert len(view) == piece.length
        is_own = _is_own(piece.item.source)
        if len(view) < JOIN_BYTES and not is_own:
            # Small ones are joined later: from copies, which nobody changes meanwhile.
            view, is_own = memoryview(bytes(view)), True  # noqa: PLW2901  # what was given is not to be used any more
        views.append(view)
        blocks = block_digests(view, size_bytes=block_bytes(piece.length))
        piece_digests.append(piece_digest(blocks))
        if not is_own:
            to_check.append((piece.item.name, view, piece_digests[-1]))
        first_blocks.append(blocks[:DIGEST_BYTES])
        if table_entries(piece.length):
            tables.append(blocks)
    table = b"".join(tables)
    front = header([_header_entry(piece) for piece in pieces], table_length=len(table)) + table
    lengths = np.array([piece.length for piece in pieces], dtype=np.int64)
    starts = len(front) + firsts(lengths)
    entries = np.array([table_entries(piece.length) for piece in pieces], dtype=np.int64)
    written = partial(
        WrittenShard,
        size_bytes=int(starts[-1]),
        data_start=len(front),
        table=table,
        item=np.array([piece.number for piece in pieces], dtype=np.int64),
        start=starts[:-1],
        length=lengths,
        table_first=np.where(entries > 0, firsts(entries)[:-1], 0),
        digests=b"".join(piece_digests),
        first_blocks=b"".join(first_blocks),
    )
    return Prepared([front, *_joined(views)], written, partial(_check_unchanged, to_check))


def _views(pieces: Sequence[Piece[Source]]) -> Iterator[memoryview]:
    """The same of each piece; what has to be copied from devices is copied at once."""
    tensors = [(piece, piece.item.source) for piece in pieces if isinstance(piece.item.source, torch.Tensor)]
    of_tensors = iter(host_views([Run(tensor, piece.start, piece.stop) for piece, tensor in tensors]))
    for piece in pieces:
        source = piece.item.source
        yield next(of_tensors) if isinstance(source, torch.Tensor) else source[piece.start : piece.stop]


def _check_unchanged(sent: Sequence[tuple[str, memoryview, bytes]]) -> None:
    """Tensors are sent from where they lie: what was changed meanwhile was sent changed, and no digest fits it.

    Args:
        sent: Name, memory, and digest of each piece of which no copy of our own was sent.
    """
    for name, view, expected in sent:
        if piece_digest(block_digests(view, size_bytes=block_bytes(len(view)))) != expected:
            raise SaveFailedError(
                "A tensor was changed while it was being saved. Nothing may write to the state until dcp.save returns; "
                "dcp.async_save makes a copy first.",
                tensor=name,
            )


def _header_entry(piece: Piece[Source]) -> HeaderEntry:
    name, shape = piece_label(piece)
    return HeaderEntry(name, piece.item.dtype, shape, piece.length)


def _joined(views: Sequence[memoryview]) -> Iterator[Buffer]:
    small: list[memoryview] = []
    for view in views:
        if len(view) < JOIN_BYTES:
            small.append(view)
            continue
        if small:
            yield b"".join(small)
            small = []
        yield view
    if small:
        yield b"".join(small)


def _report(
    rank: int,
    url: str,
    items: SaveItems,
    written: Sequence[WrittenShard],
    inline: dict[str, bytes],
) -> RankReport:
    drawn = items.drawn
    placed = place(items.parts, written, items.loan, owners=len(drawn))
    tensors = [n for n, (write_item, _) in enumerate(drawn) if write_item.type != WriteItemType.BYTE_IO]
    objects = [n for n, (write_item, _) in enumerate(drawn) if write_item.type == WriteItemType.BYTE_IO]
    names: dict[str, int] = {}
    dtypes: list[str] = []
    encodings: list[str] = []
    for number in tensors:
        write_item, encoding = drawn[number]
        assert write_item.tensor_data is not None
        if write_item.index.fqn not in names:
            names[write_item.index.fqn] = len(names)
            dtypes.append(dtype_name(write_item.tensor_data.properties.dtype))
            encodings.append(encoding)
    chunks = [drawn[n][0] for n in tensors]
    boxes = [w.tensor_data.chunk for w in chunks if w.tensor_data is not None]
    hints = [w.index.index for w in chunks]
    return RankReport(
        rank=rank,
        url=url,
        shards=placed.shards,
        put=len(written),
        names=tuple(names),
        dtypes=tuple(dtypes),
        encodings=tuple(encodings),
        chunk_name=np.array([names[w.index.fqn] for w in chunks], dtype=np.int64),
        chunk_hint=np.array([-1 if hint is None else hint for hint in hints], dtype=np.int64),
        chunk_dimensions=np.array([len(box.offsets) for box in boxes], dtype=np.int64),
        chunk_offsets=np.array([value for box in boxes for value in box.offsets], dtype=np.int64),
        chunk_piece_first=placed.piece_first[tensors],
        chunk_pieces=placed.piece_count[tensors],
        pieces=placed.pieces,
        inline=inline,
        stored=tuple(
            ReportedObject(drawn[n][0].index.fqn, drawn[n][1], int(placed.piece_first[n]), int(placed.piece_count[n]))
            for n in objects
        ),
        notes=Notes(
            chunk_sizes=np.array([value for box in boxes for value in box.sizes], dtype=np.int64),
            first_blocks=placed.first_blocks,
            live_bytes=placed.live_bytes,
        ),
    )
