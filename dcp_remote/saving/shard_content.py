"""Content of a shard: the buffers that are sent, their digests, and the header before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from dcp_remote.common.arrays import Buffer, group_offsets
from dcp_remote.common.digests import DIGEST_BYTES, block_bytes, block_digests, digest, piece_digest, table_entries
from dcp_remote.common.units import KiB
from dcp_remote.errors import SaveFailedError
from dcp_remote.format.manifest import Pieces, Shards
from dcp_remote.format.raw_buffers import Segments
from dcp_remote.format.shard import HeaderEntry, header
from dcp_remote.saving.device_copy import ElementRange, host_views, pinned_bytes, uses_pinned_memory
from dcp_remote.saving.packing import Piece, piece_label
from dcp_remote.saving.rank_report import WrittenShard
from dcp_remote.saving.uploads import Prepared
from dcp_remote.saving.write_items import Source
from dcp_remote.serialization.tensors import needs_copy

# Adjacent buffers smaller than this are joined before they are sent: below it, a buffer costs more than its bytes.
JOIN_BYTES = 16 * KiB


def count_copied_bytes(pieces: Sequence[Piece[Source]], *, is_state: bool) -> int:
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
        return needs_copy(source)
    views = source.views if isinstance(source, Segments) else [source]
    return len(views) > 1 or isinstance(views[0].obj, bytes)


def prepare_shard(pieces: Sequence[Piece[Source]]) -> Prepared[WrittenShard]:
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
        blocks = block_digests(view, size_bytes=block_bytes(len(view)))
        piece_digests.append(piece_digest(blocks))
        if not is_private:
            to_check.append((piece.item.name, view, piece_digests[-1]))
        first_blocks.append(blocks[:DIGEST_BYTES])
        if len(blocks) > DIGEST_BYTES:
            tables.append(blocks)
    table = b"".join(tables)
    front = header([_header_entry(piece) for piece in pieces], table_length=len(table)) + table
    lengths = np.array([len(view) for view in views], dtype=np.int64)
    starts = len(front) + group_offsets(lengths)
    entries = np.array([table_entries(len(view)) for view in views], dtype=np.int64)

    def written(key: str) -> WrittenShard:
        size, data_start, table_length = (
            np.array([value], dtype=np.int64) for value in (starts[-1], len(front), len(table))
        )
        return WrittenShard(
            Shards((key,), size, data_start, table_length, digest(table)),
            Pieces(
                shard=np.zeros(len(pieces), dtype=np.int64),
                start=starts[:-1],
                length=lengths,
                table=np.where(entries > 0, group_offsets(entries)[:-1], 0),
                digests=b"".join(piece_digests),
            ),
            item=np.array([piece.number for piece in pieces], dtype=np.int64),
            first_blocks=b"".join(first_blocks),
        )

    return Prepared([front, *_join_small(views)], written, partial(_check_unchanged, to_check))


def _views(pieces: Sequence[Piece[Source]]) -> Iterator[memoryview]:
    """Yield the bytes of each piece; all pieces that lie on one device are copied together."""
    tensors = [(piece, piece.item.source) for piece in pieces if isinstance(piece.item.source, torch.Tensor)]
    tensor_views = iter(host_views([ElementRange(tensor, piece.start, piece.stop) for piece, tensor in tensors]))
    for piece in pieces:
        source = piece.item.source
        yield next(tensor_views) if isinstance(source, torch.Tensor) else source[piece.start : piece.stop]


def _check_unchanged(sent: Sequence[tuple[str, memoryview, bytes]]) -> None:
    """Refuse a shard whose tensors changed while they were sent: the bytes that were sent may not fit their digests.

    `sent` has name, memory and digest of each piece that was sent without a copy.
    """
    for name, view, expected in sent:
        if piece_digest(block_digests(view, size_bytes=block_bytes(len(view)))) != expected:
            raise SaveFailedError(
                "A tensor was changed while it was being saved. Nothing may write to the state until the save returns; "
                "a save in the background (dcp.async_save) copies it first.",
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
