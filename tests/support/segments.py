"""Manifests in segments of a few pieces, and the states of ranks that save them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dcp_remote.format import segments
from tests.support.simulated_ranks import shard


@contextmanager
def lower_segments(pieces: int) -> Iterator[None]:
    """Write manifests in segments of so many pieces, as large checkpoints have them of 200,000."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEGMENT_PIECES_MAX", pieces)
        yield


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
