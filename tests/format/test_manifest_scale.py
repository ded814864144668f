"""Manifests of many chunks: their size, and that no Python object is made per chunk. Counted, never timed."""

from __future__ import annotations

import numpy as np
import torch

from dcp_remote import RemoteLoadPlanner
from dcp_remote.common.digests import DIGEST_BYTES
from dcp_remote.common.geometry import Box
from dcp_remote.format import manifest_json
from dcp_remote.format.manifest import Manifest, TensorKind
from dcp_remote.loading.dcp_metadata import to_dcp_metadata
from tests.support.manifests import Layout, build
from tests.support.simulated_ranks import LocalShards
from tests.support.work import count_work


def wide(*, tensors: int, ranks: int, chunks_of_a_shard: int = 60) -> Manifest:
    """Return the manifest of a model saved by FSDP: dimension 0 of each tensor over all ranks, uneven at the end."""
    random = np.random.default_rng(0)
    layouts: list[Layout] = []
    for number in range(tensors):
        width, rows_each = 2 ** int(random.integers(6, 11)), 2 ** int(random.integers(5, 11))
        rows = rows_each * ranks - int(random.integers(0, rows_each))
        chunks = tuple(Box((rows_each * r, 0), (min(rows_each, rows - rows_each * r), width)) for r in range(ranks))
        pieces = tuple((4 * box.sizes[0] * width,) for box in chunks)
        name = f"model.layers.{number // 9}.block.{number % 9}.weight"
        layouts.append(Layout(name, TensorKind("float32"), (rows, width), chunks, pieces))
    shard_of = [rank + ranks * (number // chunks_of_a_shard) for number in range(tensors) for rank in range(ranks)]
    return build(layouts, shard_of=shard_of)


def test_a_chunk_takes_two_bytes_beside_its_digest() -> None:
    """A million chunks take 2 MB beside their digests, with as many shards as a large checkpoint, 60 chunks in each."""
    manifest = wide(tensors=300, ranks=40)
    chunks, shards = int(manifest.tensors.chunks.sum()), len(manifest.shards.keys)
    assert 20 < chunks / shards < 150
    data = manifest_json.encode(manifest)
    # base64 of digests compresses to their length.
    digests_bytes = DIGEST_BYTES * (len(manifest.pieces.shard) + shards)
    assert len(data) - digests_bytes < 2 * chunks


def test_nothing_is_done_chunk_by_chunk() -> None:
    """Decoding, metadata and a rank's plan take as many calls for four times the chunks, and leave as many objects."""
    answers = []
    for ranks in (50, 200):
        data = manifest_json.encode(wide(tensors=40, ranks=ranks))
        manifest_json.decode(data)  # what is imported and cached
        manifest, calls, objects = count_work(lambda data=data: manifest_json.decode(data))  # type: ignore[misc]  # bound now
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

        items, plan_calls, plan_objects = count_work(planned)
        assert items == 40
        answers.append((calls - 6 * shards, plan_calls))  # a key is looked at six times
    few, many = answers
    for one, other in zip(few, many, strict=True):
        assert other < 1.1 * one
    assert max(objects, plan_objects) < 8000 / 8, "one for each of 8,000 chunks"
