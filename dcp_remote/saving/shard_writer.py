"""Write one rank's shards: from torch's plan to shards in the store, and a report of them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeGuard

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dcp_remote.common.arrays import Buffer, group_offsets
from dcp_remote.common.digests import DIGEST_BYTES, block_bytes, block_digests, piece_digest, table_entries
from dcp_remote.common.overrides import inherits_methods
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import InvalidArgumentError, SaveFailedError, UnsafeObjectError
from dcp_remote.format.manifest import JSON
from dcp_remote.format.raw_buffers import Segments
from dcp_remote.format.shard import SHARD_BYTES_MAX, HeaderEntry, ShardNames, header
from dcp_remote.saving.dedup import Baseline, Reuse, lay_out_pieces
from dcp_remote.saving.device_copy import Run, host_views, pinned_bytes, uses_pinned_memory
from dcp_remote.saving.packing import Piece, pack, piece_label
from dcp_remote.saving.plan_cache import SharedPart
from dcp_remote.saving.rank_report import Notes, RankReport, ReportedObject, UploadStats, WrittenShard
from dcp_remote.saving.uploads import Prepared, Uploads
from dcp_remote.saving.write_items import Comparison, DrawnEntries, Source, WriteItems, wait_for_sources
from dcp_remote.serialization.objects import EncodedObject, encode_object, encode_stream
from dcp_remote.serialization.tensors import dtype_name, is_copied

# Objects up to this size are stored in the manifest, where they cost no request and a person can read them. Their total
# is bounded, because every rank reads the manifest.
INLINE_BYTES_MAX = 16 * KiB
INLINE_TOTAL_BYTES_MAX = 8 * MiB

# Adjacent buffers smaller than this are joined before they are sent: below it, a buffer costs more than its bytes.
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
    shared: Mapping[MetadataIndex, SharedPart] = MappingProxyType({}),
    base: Baseline | None = None,
) -> RankReport:
    """Upload everything in a rank's plan that the baseline does not have; one PUT per shard.

    Objects are encoded first: an object that cannot be loaded safely is refused before a byte is uploaded.

    All entries are compared with the baseline piece by piece before anything is sent, so that of a large tensor only
    the changed pieces are sent. A tensor of which nothing is reused is cut anew; in other tensors the changed pieces
    keep their bounds, if they fit into a shard. A reused piece is read once, for the comparison.

    Args:
        plan: Final plan of this rank.
        planner: Planner that resolves its items.
        uploads: Uploads of this save; all shards are stored when this returns.
        names: Names of the shards, which no other writer uses.
        rank: Rank, for the report.
        url: URL of the checkpoint or run, for the report.
        allow_pickle: Store objects that need code to load.
        shard_bytes_max: Bytes of data in a shard.
        shared: Items of the plan that are parts of a replica which several ranks write.
        base: Baseline whose pieces may be reused, of the run at `url`; None to send everything. The commit must
            require that a live checkpoint still names every shard of `RankReport.borrowed_keys`.

    Raises:
        InvalidArgumentError: The baseline is of another run, so its shards are not at `url`.
        SaveFailedError: An upload failed, or the state is not what was planned.
        SaveTimeoutError: The deadline passed.
        UnsafeObjectError: An object needs code to load.
    """
    if base is not None and base.url != url:
        raise InvalidArgumentError("Shards of another run cannot be reused.", url=url, base_url=base.url)
    inline, stored = _encode_objects(plan, planner, allow_pickle=allow_pickle)
    items = WriteItems(plan, planner, allow_pickle, stored, shared)
    comparison = items.compare(base, partial(uploads.claim, 0)) if base is not None else Comparison()
    is_state = _resolves_to_state(planner)
    other_names = names.again()
    drawn = DrawnEntries()
    for number, pieces in enumerate(pack(items.draw(comparison, drawn), shard_bytes_max=shard_bytes_max)):
        claimed_bytes = _copied_bytes(pieces, is_state=is_state)
        uploads.claim(claimed_bytes)
        wait_for_sources([piece.item.source for piece in pieces])
        uploads.submit(
            names.key(number),
            partial(_prepare, pieces),
            claimed_bytes=claimed_bytes,
            second_key=other_names.key(number),
        )
    report = _make_report(drawn, comparison.reuse, uploads.finish(), inline, rank=rank, url=url)
    slowest = max(uploads.seconds, key=lambda key: uploads.seconds[key], default="")
    figures = UploadStats(
        put_bytes=int(report.shards.sizes[: report.put].sum()),
        borrowed_bytes=int(report.pieces.length[report.pieces.shard >= report.put].sum()),
        retries=uploads.retries,
        slowest_shard=slowest,
        slowest_seconds=uploads.seconds.get(slowest, 0.0),
    )
    return replace(report, figures=figures)


def _encode_objects(
    plan: SavePlan, planner: SavePlanner, *, allow_pickle: bool
) -> tuple[dict[str, bytes], dict[str, EncodedObject]]:
    """Return the JSON of objects for the manifest, and the objects that are stored in shards; both by name."""
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
    if _resolves_to_state(planner):
        # torch's resolve_data would `torch.save` the object into a stream of over a kilobyte, to be read back here.
        return encode_object(name, planner.lookup_object(write_item.index), allow_pickle=allow_pickle)
    try:
        stream = planner.resolve_data(write_item)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        # A pickler's error names a type, but not the key.
        raise UnsafeObjectError(
            "The planner failed to turn an object into a stream. If the object cannot be pickled, not even "
            "allow_pickle=True stores it: keep it out of the state.",
            key=name,
            cause=error,
        ) from error
    if isinstance(stream, torch.Tensor):
        raise InvalidArgumentError(
            "The planner returned a tensor for the item of an object. Correct its resolve_data.", object=name
        )
    return encode_stream(name, stream.getvalue(), allow_pickle=allow_pickle)


def _resolves_to_state(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Return whether a planner resolves items to the state's own values; others may copy (to bfloat16, say)."""
    return inherits_methods(planner, DefaultSavePlanner, ("resolve_data", "lookup_object", "transform_object"))


def _copied_bytes(pieces: Sequence[Piece[Source]], *, is_state: bool) -> int:
    """Return the bytes of memory beyond the state that sending the pieces takes."""
    copied_bytes, device_bytes = 0, 0
    for piece in pieces:
        source = piece.item.source
        if isinstance(source, torch.Tensor) and uses_pinned_memory(source):
            device_bytes += piece.length
        elif _is_private(source) or piece.length < JOIN_BYTES or not is_state:
            copied_bytes += piece.length
    return copied_bytes + pinned_bytes(device_bytes)


def _is_private(source: Source) -> bool:
    """Return whether the bytes that are sent are a copy or immutable, so that the training cannot change them."""
    if isinstance(source, torch.Tensor):
        return is_copied(source)
    views = source.views if isinstance(source, Segments) else [source]
    return len(views) > 1 or isinstance(views[0].obj, bytes)


def _prepare(pieces: Sequence[Piece[Source]]) -> Prepared[WrittenShard]:
    """Return the buffers of a shard and their digests; called in a worker thread."""
    views: list[memoryview] = []
    to_check: list[tuple[str, memoryview, bytes]] = []
    tables: list[bytes] = []
    piece_digests: list[bytes] = []
    first_blocks: list[bytes] = []
    for piece, view in zip(pieces, _views(pieces), strict=True):
        assert len(view) == piece.length
        is_private = _is_private(piece.item.source)
        if len(view) < JOIN_BYTES and not is_private:
            # Small views are joined later anyway; a copy made now cannot change between its digest and the joining.
            view, is_private = memoryview(bytes(view)), True  # noqa: PLW2901  # the given view must not be used again
        views.append(view)
        blocks = block_digests(view, size_bytes=block_bytes(piece.length))
        piece_digests.append(piece_digest(blocks))
        if not is_private:
            to_check.append((piece.item.name, view, piece_digests[-1]))
        first_blocks.append(blocks[:DIGEST_BYTES])
        if table_entries(piece.length):
            tables.append(blocks)
    table = b"".join(tables)
    front = header([_header_entry(piece) for piece in pieces], table_length=len(table)) + table
    lengths = np.array([piece.length for piece in pieces], dtype=np.int64)
    starts = len(front) + group_offsets(lengths)
    entries = np.array([table_entries(piece.length) for piece in pieces], dtype=np.int64)
    written = partial(
        WrittenShard,
        size_bytes=int(starts[-1]),
        data_start=len(front),
        table=table,
        item=np.array([piece.number for piece in pieces], dtype=np.int64),
        start=starts[:-1],
        length=lengths,
        table_first=np.where(entries > 0, group_offsets(entries)[:-1], 0),
        digests=b"".join(piece_digests),
        first_blocks=b"".join(first_blocks),
    )
    return Prepared([front, *_join_small(views)], written, partial(_check_unchanged, to_check))


def _views(pieces: Sequence[Piece[Source]]) -> Iterator[memoryview]:
    """Yield the bytes of each piece; all pieces that lie on one device are copied together."""
    tensors = [(piece, piece.item.source) for piece in pieces if isinstance(piece.item.source, torch.Tensor)]
    tensor_views = iter(host_views([Run(tensor, piece.start, piece.stop) for piece, tensor in tensors]))
    for piece in pieces:
        source = piece.item.source
        yield next(tensor_views) if isinstance(source, torch.Tensor) else source[piece.start : piece.stop]


def _check_unchanged(sent: Sequence[tuple[str, memoryview, bytes]]) -> None:
    """Refuse a shard whose tensors changed while they were sent: the bytes that were sent may not fit their digests.

    Args:
        sent: Name, memory, and digest of each piece that was sent without a copy.
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


def _join_small(views: Sequence[memoryview]) -> Iterator[Buffer]:
    """Yield the views, with adjacent small views joined into one buffer."""
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


def _make_report(
    drawn: DrawnEntries,
    reuse: Reuse,
    written: Sequence[WrittenShard],
    inline: dict[str, bytes],
    *,
    rank: int,
    url: str,
) -> RankReport:
    entries = drawn.entries
    layout = lay_out_pieces(drawn.sources, written, reuse, entries=len(entries))
    tensors = [n for n, (write_item, _) in enumerate(entries) if write_item.type != WriteItemType.BYTE_IO]
    objects = [n for n, (write_item, _) in enumerate(entries) if write_item.type == WriteItemType.BYTE_IO]
    names: dict[str, int] = {}
    dtypes: list[str] = []
    encodings: list[str] = []
    for number in tensors:
        write_item, encoding = entries[number]
        assert write_item.tensor_data is not None
        if write_item.index.fqn not in names:
            names[write_item.index.fqn] = len(names)
            dtypes.append(dtype_name(write_item.tensor_data.properties.dtype))
            encodings.append(encoding)
    chunks = [entries[n][0] for n in tensors]
    boxes = [chunk.tensor_data.chunk for chunk in chunks if chunk.tensor_data is not None]
    hints = [chunk.index.index for chunk in chunks]
    return RankReport(
        rank=rank,
        url=url,
        shards=layout.shards,
        put=len(written),
        names=tuple(names),
        dtypes=tuple(dtypes),
        encodings=tuple(encodings),
        chunk_name=np.array([names[chunk.index.fqn] for chunk in chunks], dtype=np.int64),
        chunk_hint=np.array([-1 if hint is None else hint for hint in hints], dtype=np.int64),
        chunk_dimensions=np.array([len(box.offsets) for box in boxes], dtype=np.int64),
        chunk_offsets=np.array([value for box in boxes for value in box.offsets], dtype=np.int64),
        chunk_piece_first=layout.piece_first[tensors],
        chunk_pieces=layout.piece_count[tensors],
        pieces=layout.pieces,
        inline=inline,
        stored=tuple(
            ReportedObject(
                entries[n][0].index.fqn, entries[n][1], int(layout.piece_first[n]), int(layout.piece_count[n])
            )
            for n in objects
        ),
        notes=Notes(
            chunk_sizes=np.array([value for box in boxes for value in box.sizes], dtype=np.int64),
            first_blocks=layout.first_blocks,
            live_bytes=layout.live_bytes,
        ),
    )
