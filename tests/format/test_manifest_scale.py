"""Manifests of many chunks: their size, and that no Python object is made per chunk. Counted, never timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from dcp_remote import RemoteLoadPlanner
from dcp_remote.common.arrays import I64, group_offsets
from dcp_remote.common.digests import DIGEST_BYTES, table_entries
from dcp_remote.common.units import MiB
from dcp_remote.format import manifest_json
from dcp_remote.format.manifest import Manifest, Pieces, Shards, TensorKind, Tensors
from dcp_remote.format.shard import SHARD_BYTES_MAX, ShardNames
from dcp_remote.loading.dcp_metadata import to_dcp_metadata
from tests.support.simulated_ranks import LocalShards

_Answer = TypeVar("_Answer")


def wide(*, tensors: int, ranks: int, shard_bytes_max: int = SHARD_BYTES_MAX, seed: int = 0) -> Manifest:
    """Return the manifest of a model saved by FSDP: dimension 0 of each tensor over all ranks, uneven at the end.

    Chunks of 8 KiB to 4 MiB, in each rank's shards in the order of the model; sizes, keys and digests are random.
    """
    random = np.random.default_rng(seed)
    width = 2 ** random.integers(6, 11, tensors)
    rows_each = 2 ** random.integers(5, 11, tensors)
    total = rows_each * ranks - random.integers(0, rows_each)
    start = np.minimum(rows_each[:, None] * np.arange(ranks), total[:, None])
    rows = np.minimum(rows_each[:, None] * np.arange(1, ranks + 1), total[:, None]) - start
    length = (4 * rows * width[:, None]).astype(np.int64)  # [tensors, ranks]; each chunk is one piece
    shard, begin, table = (np.zeros_like(length) for _ in range(3))
    keys: list[str] = []
    sizes, data_starts, table_lengths = [], [], []
    for rank in range(ranks):
        names = ShardNames(rank)
        ends = np.cumsum(length[:, rank])
        number = (ends - 1) // shard_bytes_max
        entries = np.array([table_entries(one) for one in length[:, rank].tolist()])
        for own, which in enumerate(np.unique(number).tolist()):
            inside = number == which
            table_length = int(entries[inside].sum()) * DIGEST_BYTES
            front = 10 + 8 * int(random.integers(5, 20)) * int(inside.sum()) + table_length
            shard[inside, rank] = len(keys)
            begin[inside, rank] = front + group_offsets(length[inside, rank])[:-1]
            table[inside, rank] = np.where(entries[inside] > 0, group_offsets(entries[inside])[:-1], 0)
            keys.append(names.key(own))
            sizes.append(front + int(length[inside, rank].sum()))
            data_starts.append(front)
            table_lengths.append(table_length)
    offsets, boxes = (np.zeros((tensors, ranks, 2), dtype=np.int64) for _ in range(2))
    offsets[:, :, 0], boxes[:, :, 0], boxes[:, :, 1] = start, rows, width[:, None]
    return Manifest(
        save_id=random.bytes(16).hex(),
        replaces=(),
        created="2026-01-02T03:04:05+00:00",
        writer={"dcp_remote": "0"},
        world_size=ranks,
        shards=Shards(
            keys=tuple(keys),
            sizes=column(sizes),
            data_starts=column(data_starts),
            table_lengths=column(table_lengths),
            table_digests=random.bytes(DIGEST_BYTES * len(keys)),
        ),
        tensors=Tensors(
            names=tuple(f"model.layers.{n // 9}.block.{n % 9}.weight" for n in range(tensors)),
            kinds=(TensorKind("float32"),),
            kind=np.zeros(tensors, dtype=np.int64),
            dimensions=np.full(tensors, 2),
            shape=np.stack([total, width], axis=1).reshape(-1).astype(np.int64),
            chunks=np.full(tensors, ranks),
            chunk_offsets=offsets.reshape(-1),
            chunk_sizes=boxes.reshape(-1),
            chunk_pieces=(length > 0).astype(np.int64).reshape(-1),
        ),
        pieces=Pieces(
            shard=shard[length > 0],
            start=begin[length > 0],
            length=length[length > 0],
            table=table[length > 0],
            digests=random.bytes(DIGEST_BYTES * int((length > 0).sum())),
        ),
    )


def column(values: list[int]) -> I64:
    return np.array(values, dtype=np.int64)


def work(call: Callable[[], _Answer]) -> tuple[_Answer, int, int]:
    """Return the result of a call, the number of function calls, and the number of new objects that remain."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    blocks = sys.getallocatedblocks()
    sys.setprofile(count)
    try:
        answer = call()
    finally:
        sys.setprofile(None)
    return answer, calls, sys.getallocatedblocks() - blocks


def test_a_chunk_takes_two_bytes_beside_its_digest() -> None:
    """A million chunks take 2 MB beside their digests, with as many shards as a large checkpoint, 60 chunks in each."""
    manifest = wide(tensors=300, ranks=40)
    chunks, shards = int(manifest.tensors.chunks.sum()), len(manifest.shards.keys)
    assert 20 < chunks / shards < 150
    data = manifest_json.encode(manifest)
    # base64 of digests compresses to their length; so do the random parts of keys.
    digests_bytes = DIGEST_BYTES * (len(manifest.pieces.shard) + shards)
    assert len(data) - digests_bytes < 2 * chunks


def test_nothing_is_done_chunk_by_chunk() -> None:
    """Decoding, metadata and a rank's plan take as many calls for four times the chunks, and leave as many objects."""
    answers = []
    for ranks in (50, 200):
        data = manifest_json.encode(wide(tensors=40, ranks=ranks, shard_bytes_max=4 * MiB * 50))
        manifest_json.decode(data)  # what is imported and cached
        manifest, calls, objects = work(lambda data=data: manifest_json.decode(data))  # type: ignore[misc]  # bound now
        assert manifest is not None
        shards = len(manifest.shards.keys)
        planner = RemoteLoadPlanner()
        state = {
            name: LocalShards(manifest.tensors.shape_of(n), torch.float32, [((0, 0), torch.zeros(1, 1))])
            for n, name in enumerate(manifest.tensors.names)
        }

        def planned(
            planner: RemoteLoadPlanner = planner, state: dict[str, LocalShards] = state, manifest: Manifest = manifest
        ) -> int:
            planner.set_up_planner(dict(state), to_dcp_metadata(manifest), is_coordinator=True)
            return len(planner.create_local_plan().items)

        items, plan_calls, plan_objects = work(planned)
        assert items == 40
        answers.append((calls - 6 * shards, plan_calls))  # a key is looked at six times
    few, many = answers
    for one, other in zip(few, many, strict=True):
        assert other < 1.1 * one
    assert max(objects, plan_objects) < 8000 / 8, "one for each of 8,000 chunks"
