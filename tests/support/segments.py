"""Manifests in segments of a few pieces, and the states of ranks that save them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dcp_remote.common.arrays import Buffer
from dcp_remote.format import segments
from dcp_remote.format.manifest import Manifest, tensor_groups
from dcp_remote.format.segments import Segment, choose_band_pieces, draft_segments, put_segments
from tests.support.simulated_ranks import shard


@contextmanager
def lower_segments(pieces: int, *, box_values: int = segments.BOX_VALUES) -> Iterator[None]:
    """Write manifests in segments of so many pieces, as large checkpoints have them of 200,000.

    `box_values` is about the most that all boxes have together.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEGMENT_PIECES_MAX", pieces)
        patch.setattr(segments, "SEGMENT_PIECES", max(pieces, 1))
        patch.setattr(segments, "BOX_VALUES", box_values)
        yield


def split(
    manifest: Manifest,
    make_key: Callable[[int], str],
    known: Mapping[bytes, str],
    put: Callable[[str, Sequence[Buffer]], object] | None = None,
) -> tuple[Manifest, dict[str, Sequence[Buffer]]]:
    """Return a large manifest as an index, and its segments that are not known by key; a smaller one as it is.

    Segments are given to `put` instead, if there is one.
    """
    tensors, pieces = manifest.tensors, manifest.pieces
    count = int(tensors.piece_first[-1])
    if count <= segments.SEGMENT_PIECES_MAX:
        return manifest, {}
    tensor = np.repeat(np.arange(len(tensors.names)), tensors.chunks)
    number = np.arange(len(tensor)) - tensors.chunk_first[tensor]
    columns = tensors.chunk_offsets, tensors.chunk_sizes, tensors.chunk_pieces
    chunks = Segment(tensor, tensors.dimensions[tensor], number, *columns, pieces.take(np.arange(count)))
    groups = tensor_groups(tensors.names, manifest.flatten)
    objects: dict[str, Sequence[Buffer]] = {}
    index = put_segments(
        replace(
            manifest,
            tensors=Segment.concat([]).within(tensors),
            pieces=pieces.take(np.arange(count, len(pieces.shard))),
            stored=tuple(replace(item, piece_first=item.piece_first - count) for item in manifest.stored),
        ),
        tensors.chunks,
        list(draft_segments(chunks, groups, np.arange(count), band_pieces=choose_band_pieces(count, tensors))),
        digests_of=lambda indices: pieces.take(indices).digests,
        make_key=make_key,
        known=known,
        put=put or objects.__setitem__,
    )
    return index, {key: objects[key] for key in index.shards.keys if key in objects}


def shard_state(state: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Return the states of ranks that have a part of the first dimension of each tensor of a state."""
    dealt: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for key, value in state.items():
        parts: list[Any] = [value] * ranks
        if isinstance(value, dict):
            parts = shard_state(value, ranks)
        elif isinstance(value, torch.Tensor) and value.dim():
            parts = shard(value, ranks, [ranks, *[1] * (value.dim() - 1)])
        for own, part in zip(dealt, parts, strict=True):
            own[key] = part
    return dealt


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of the same structure with zeros."""
    return {
        key: blank(value) if isinstance(value, dict) else torch.zeros_like(value) if torch.is_tensor(value) else None
        for key, value in state.items()
    }
