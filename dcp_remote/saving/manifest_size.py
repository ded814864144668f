"""Size of a manifest, estimated from the plans: what no manifest can hold is refused before any upload. Pure."""

from __future__ import annotations

import numpy as np

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.columns import ENTRIES_MAX
from dcp_remote.format.document import STORED_BYTES_MAX
from dcp_remote.format.manifest import Tensors

# Stored bytes of a piece: 16 for its digest, which zstd cannot shorten, and one for all else. Measured with 10 to 300
# pieces in a shard: 16.4 to 19, so that nothing is refused which would fit.
_PIECE_BYTES = 17


def count_pieces(tensors: Tensors) -> int:
    """Return the least number of pieces of planned tensors: one for each chunk that has elements."""
    without_elements = tensors.box_first.searchsorted(np.flatnonzero(tensors.chunk_sizes == 0), side="right")
    return int(tensors.chunk_first[-1]) - len(np.unique(without_elements))


def require_room(pieces: int, *, offsets: int) -> None:
    """Refuse a checkpoint of more pieces, or of more numbers in its chunks' offsets, than a manifest can hold."""
    pieces_max = min(ENTRIES_MAX, STORED_BYTES_MAX // _PIECE_BYTES)
    if pieces > pieces_max or offsets > ENTRIES_MAX:
        raise InvalidArgumentError(
            "The checkpoint has more pieces of tensors than a manifest can hold; nothing was uploaded. Cut tensors "
            "into fewer and larger shards: shard over fewer ranks, and replicate between these groups (HSDP).",
            pieces=pieces,
            pieces_max=pieces_max,
            offsets=offsets,
            offsets_max=ENTRIES_MAX,
        )
