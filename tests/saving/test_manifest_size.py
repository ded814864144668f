"""Checkpoints of more pieces than a manifest can hold are refused on all ranks before a byte is uploaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from dcp_remote import RemoteWriter, load
from dcp_remote.common.digests import DIGEST_BYTES
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format import manifest_json
from dcp_remote.saving import manifest_size
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from tests.format.test_manifest_scale import wide
from tests.support.rank_threads import manager_threads
from tests.support.simulated_ranks import save_as_ranks, shard

_Answer = TypeVar("_Answer")

RANKS = range(3)


class PutsNoted(WrappedStore):
    """Store that notes the keys of its puts."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.puts: list[str] = []

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        if request.verb == "put":
            self.puts.append(request.key)
        return send()


def state_of(rank: int, tensors: int) -> dict[str, Any]:
    """Return tensors that are cut into two rows for each rank, the last of which has none; and a replica, a number."""
    whole = torch.arange(4.0 * 3).reshape(4, 3)
    return {f"w{number}": shard(whole, len(RANKS), (2, 1))[rank] for number in range(tensors)}


def limit(monkeypatch: pytest.MonkeyPatch, *, pieces: int) -> None:
    monkeypatch.setattr(manifest_size, "STORED_BYTES_MAX", pieces * manifest_size._PIECE_BYTES)


def test_too_many_pieces_end_a_save_of_all_ranks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save 2 tensors of 2 pieces where a manifest holds 4 pieces, then 3: nothing is put, and the next save works."""
    limit(monkeypatch, pieces=4)
    stores = [PutsNoted() for _ in RANKS]
    for store in stores[1:]:
        store._store = stores[0]._store
    with manager_threads(len(RANKS), stores) as threads:
        ended = threads.run(lambda rank, manager: manager.save(1, state_of(rank, 3), wait=True))
        for one in ended:
            assert isinstance(one.error, InvalidArgumentError), one
            assert one.error.details["pieces"] == 6
            assert one.error.details["pieces_max"] == 4
            assert "HSDP" in str(one.error)
        assert {key for store in stores for key in store.puts} <= {"catalog.json"}
        threads.values(lambda rank, manager: manager.save(2, state_of(rank, 2), wait=True))
    assert load(stores[0], step=2)["w1"].tolist() == torch.arange(12.0).reshape(4, 3).tolist()


def test_too_many_offsets_end_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save 4 chunks of two dimensions, which are 8 offsets: one more than a column has entries."""
    monkeypatch.setattr(manifest_size, "ENTRIES_MAX", 7)
    store = PutsNoted()
    states = [state_of(rank, 2) for rank in RANKS]
    with pytest.raises(InvalidArgumentError, match=r"offsets=8.*offsets_max=7"):
        save_as_ranks(states, lambda: RemoteWriter(store))
    assert store.puts == []
    monkeypatch.setattr(manifest_size, "ENTRIES_MAX", 8)
    save_as_ranks(states, lambda: RemoteWriter(store))


def test_pieces_are_counted_without_empty_chunks() -> None:
    """Empty the first, a middle and the last chunk of a manifest: the others are counted, of which none was cut."""
    tensors = wide(tensors=3, ranks=4).tensors
    assert manifest_size.count_pieces(tensors) == 12
    tensors.chunk_sizes[[0, 1, 12, 23]] = 0
    assert manifest_size.count_pieces(tensors) == 12 - 3


def test_a_manifest_takes_what_was_estimated() -> None:
    """Encode manifests of FSDP with 60 and with 10 pieces in a shard: they take the estimate, or up to a fifth more."""
    for pieces_of_a_shard in (10, 60):
        manifest = wide(tensors=120, ranks=100, chunks_of_a_shard=pieces_of_a_shard)
        pieces = len(manifest.pieces.shard)
        assert len(np.unique(np.frombuffer(manifest.pieces.digests, f"V{DIGEST_BYTES}"))) == pieces
        stored_bytes = len(manifest_json.encode(manifest))
        assert 1 <= stored_bytes / (pieces * manifest_size._PIECE_BYTES) < 1.2
