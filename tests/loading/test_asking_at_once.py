"""Requests before the first range: their number, and that those which do not depend on each other are sent at once.

The store is in memory under the URL of a cloud.
"""

from __future__ import annotations

import logging
import math
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import CheckpointManager, RemoteReader, RemoteWriter, load, open_run
from dcp_remote.common.digests import DIGEST_BYTES, block_bytes, block_digests, piece_digest
from dcp_remote.common.geometry import Box
from dcp_remote.common.units import MiB
from dcp_remote.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PermissionDeniedError,
    TransientStorageError,
)
from dcp_remote.format.catalog import CATALOG_KEY, Catalog
from dcp_remote.format.manifest import MANIFEST_KEY, RAW, TensorKind
from dcp_remote.format.manifest_json import encode
from dcp_remote.run import lookup
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.wrapper import Request
from dcp_remote.testing import RecordingStore
from tests.support.manifests import Layout, build
from tests.support.runs import entry_of, live, put_catalog
from tests.support.states import equal
from tests.support.threads import PATIENCE_SECONDS, opened

_Answer = TypeVar("_Answer")


def loaded(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.arange(50.0) + step}, "step": step}


class Cloud(RecordingStore):
    """Store under the URL of a cloud. Requests for the keys `together` are answered once all of them are under way."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        super().__init__(self.memory)
        self.place = f"s3://bucket/{uuid.uuid4().hex}"
        self.answer: Callable[[str], object] = lambda key: None
        self.expect()

    @property
    def url(self) -> str:
        return self.place

    def expect(self, *together: str) -> None:
        """Forget the records, and let these requests wait for each other."""
        self.clear()
        self.together, self.barrier = together, threading.Barrier(max(1, len(together)))

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        def answer() -> _Answer:
            if request.key in self.together:
                self.barrier.wait(PATIENCE_SECONDS)
            self.answer(request.key)
            return send()

        return super()._request(request, answer)


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture(autouse=True)
def nothing_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin as a fresh process does."""
    monkeypatch.setattr(lookup, "_last_read", {})


def saved_run(cloud: Cloud, *steps: int, after: int | None = None) -> list[str]:
    """Save into a run as another process does; return the keys of the manifests."""
    remembered = dict(lookup._last_read)
    with CheckpointManager(cloud, resumed_from=after) as checkpoints:
        for step in steps:
            checkpoints.save(step, loaded(step), wait=True)
    lookup._last_read.clear()
    lookup._last_read.update(remembered)
    return [entry.manifest for entry in live(cloud.memory)]


def documents(cloud: Cloud) -> list[str]:
    """Return the keys of all requests but those for ranges, sorted."""
    return sorted(key for verb, key in cloud.calls if verb != "get_into")


def test_a_fresh_process_reads_a_run_in_three_round_trips(cloud: Cloud) -> None:
    """manifest.json and the catalog are asked for together, then the manifest, then the ranges."""
    (manifest,) = saved_run(cloud, 1)
    cloud.expect(MANIFEST_KEY, CATALOG_KEY)
    assert equal(load(cloud), loaded(1))
    assert documents(cloud) == [CATALOG_KEY, MANIFEST_KEY, manifest]
    lookup._last_read.clear()
    cloud.expect(MANIFEST_KEY, CATALOG_KEY)
    with CheckpointManager(cloud) as checkpoints:
        state = loaded(0)
        checkpoints.restore(state)
        assert equal(state, loaded(1))
        assert documents(cloud) == [CATALOG_KEY, MANIFEST_KEY, manifest]
        assert checkpoints.last_load is not None
        assert checkpoints.last_load.early_reads_in_vain == 0


def test_a_second_read_asks_for_the_last_manifest_with_the_catalog(cloud: Cloud) -> None:
    """One round trip before the ranges, in all ways of reading, of a step as well, and of what this process saved."""
    (manifest,) = saved_run(cloud, 1)
    load(cloud)
    cloud.expect(MANIFEST_KEY, CATALOG_KEY, manifest)
    assert equal(load(cloud, include="model.*"), {"model": loaded(1)["model"]})
    assert documents(cloud) == [CATALOG_KEY, MANIFEST_KEY, manifest]
    cloud.expect(CATALOG_KEY, manifest)
    assert equal(load(cloud, step=1), loaded(1))
    assert documents(cloud) == [CATALOG_KEY, manifest]
    with CheckpointManager(cloud) as checkpoints:
        state = loaded(0)
        cloud.expect()
        checkpoints.restore(state)
        checkpoints.save(2, loaded(2), wait=True)
        manifest = live(cloud.memory)[-1].manifest
        cloud.expect(MANIFEST_KEY, CATALOG_KEY, manifest)
        checkpoints.restore(state)
        assert documents(cloud) == [CATALOG_KEY, MANIFEST_KEY, manifest]
    cloud.expect(MANIFEST_KEY, CATALOG_KEY, manifest)
    dcp.load(state, storage_reader=RemoteReader(cloud))
    assert equal(state, loaded(2))


def test_another_step_is_not_guessed(cloud: Cloud) -> None:
    """A step that is not that of the last read costs no request more."""
    first, second = saved_run(cloud, 1, 2)
    load(cloud, step=1)
    cloud.expect()
    assert equal(load(cloud, step=2), loaded(2))
    assert documents(cloud) == [CATALOG_KEY, second]
    assert first != second


def test_a_wrong_guess_costs_one_request_and_is_reported(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    """Another process saves meanwhile: the newest is loaded, and the early read is counted and logged."""
    (first,) = saved_run(cloud, 1)
    load(cloud)
    _, second = saved_run(cloud, 2, after=1)
    cloud.expect(MANIFEST_KEY, CATALOG_KEY, first)
    state = loaded(0)
    with CheckpointManager(cloud) as checkpoints, caplog.at_level(logging.INFO):
        checkpoints.restore(state)
        report = checkpoints.last_load
    assert equal(state, loaded(2))
    assert documents(cloud) == [CATALOG_KEY, MANIFEST_KEY, first, second]
    assert report is not None
    assert report.early_reads_in_vain == 1
    assert "1 early read of a manifest in vain" in str(report)
    assert report.requests == len(cloud.calls)
    assert "step 1 was in vain" in caplog.text


@pytest.mark.parametrize("error", [TransientStorageError, PermissionDeniedError])
def test_a_wrong_guess_that_fails_is_not_waited_for(cloud: Cloud, error: type[Exception]) -> None:
    """The manifest that is no longer wanted cannot be read, or not yet: the newest is loaded all the same."""
    (first,) = saved_run(cloud, 1)
    load(cloud)
    saved_run(cloud, 2, after=1)
    is_loaded = threading.Event()

    def answer(key: str) -> None:
        if key == first:
            opened(is_loaded)
            raise error("It failed.")

    cloud.answer = answer
    assert equal(load(cloud), loaded(2))
    is_loaded.set()


def test_a_manifest_that_was_read_early_is_verified(cloud: Cloud) -> None:
    """Damage, and a manifest that is gone, are reported as without the early read, and after as many requests."""
    (manifest,) = saved_run(cloud, 1)
    load(cloud)
    data = bytearray(cloud.memory.get(manifest, limit_bytes=MiB).data)
    data[-5] ^= 1
    cloud.memory.put(manifest, [bytes(data)])
    cloud.expect()
    with pytest.raises(CorruptCheckpointError, match="Use another checkpoint"):
        load(cloud)
    assert documents(cloud).count(manifest) == 2
    cloud.memory.delete([manifest])
    cloud.expect()
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        load(cloud)
    assert documents(cloud).count(manifest) == 1
    put_catalog(cloud.memory, Catalog("5" * 32))
    with pytest.raises(CheckpointNotFoundError):
        load(cloud)


def test_an_early_read_that_fails_is_not_begun_again(cloud: Cloud) -> None:
    """The store fails until the time of the load has passed: all requests for the manifest are attempts of one read."""
    (manifest,) = saved_run(cloud, 1)
    load(cloud)
    cloud.expect()

    def answer(key: str) -> None:
        if key == manifest:
            raise TransientStorageError("It failed.")

    cloud.answer = answer
    with pytest.raises(TransientStorageError) as caught:
        load(cloud, timeout_seconds=0.5)
    assert documents(cloud).count(manifest) == caught.value.details["attempts"]


def test_an_early_read_that_is_refused_tells_that_the_checkpoint_is_gone(cloud: Cloud) -> None:
    """Delete the checkpoint between the answers, on a store that refuses what is missing."""
    first, second = saved_run(cloud, 1, 2)
    load(cloud)
    catalogs: list[str] = []

    def answer(key: str) -> None:
        if key == CATALOG_KEY:
            catalogs.append(key)
            if len(catalogs) == 2:
                open_run(cloud.memory).delete(2, force=True)
        if key == second:
            raise PermissionDeniedError("A store without a grant to list says so of what is missing.")

    cloud.answer = answer
    with pytest.raises(CheckpointGoneError):
        load(cloud)
    assert first != second


def test_a_checkpoint_by_itself_does_not_wait_for_the_catalog(cloud: Cloud) -> None:
    """The first read of a process asks for a catalog that is not there, and a later one does not."""
    dcp.save(loaded(3), storage_writer=RemoteWriter(cloud))
    is_loaded, asked = threading.Event(), threading.Event()

    def answer(key: str) -> None:
        if key == CATALOG_KEY:
            asked.set()
            with suppress(AssertionError):
                opened(is_loaded)
            raise PermissionDeniedError("A store without a grant to list says so of what is missing.")

    cloud.answer = answer
    cloud.expect()
    assert equal(load(cloud), loaded(3))
    opened(asked)
    is_loaded.set()
    assert documents(cloud) == [CATALOG_KEY, MANIFEST_KEY]
    cloud.expect()
    assert equal(load(cloud), loaded(3))
    assert documents(cloud) == [MANIFEST_KEY]


def test_one_layer_of_a_terabyte(cloud: Cloud) -> None:
    """A layer of 1 TB costs the catalog, the manifest of less than 1 MB, and the ranges of the layer."""
    wanted = {"model.layers.3.norm": torch.randn(9_000), "model.layers.3.w": torch.randn(3_000, 1_000)}
    layers = {f"model.layers.{n}.{part}": (16_384, 16_384) for n in range(128) for part in range(8) if n != 3}
    shapes = layers | {name: tuple(value.shape) for name, value in wanted.items()}
    # Pieces of 64 MiB, a shard each; those of the wanted layer, which come last, share one.
    sizes = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
    pieces = {name: (64 * MiB,) * (size // (64 * MiB)) or (size,) for name, size in sizes.items()}
    kind = TensorKind("float32", RAW, "strided", requires_grad=False, memory_format="contiguous", pin_memory=False)
    layouts = [
        Layout(name, kind, shape, (Box((0,) * len(shape), shape),), (pieces[name],)) for name, shape in shapes.items()
    ]
    shards = sum(len(pieces[name]) for name in layers)
    manifest = build(layouts, shard_of=[*range(shards), shards, shards], seed=7)
    shard, digests = bytearray(int(manifest.shards.sizes[-1])), bytearray(manifest.pieces.digests)
    for piece, value in enumerate(wanted.values(), shards):
        start, data = int(manifest.pieces.start[piece]), value.numpy().tobytes()
        shard[start : start + len(data)] = data
        blocks = block_digests(data, size_bytes=block_bytes(len(data)))
        digests[DIGEST_BYTES * piece : DIGEST_BYTES * (piece + 1)] = piece_digest(blocks)
    manifest = replace(manifest, pieces=replace(manifest.pieces, digests=bytes(digests)))
    entry = entry_of("manifests/step-000000000007-3-0123456789abcdef.json", manifest)
    cloud.memory.put(entry.manifest, [document := encode(manifest)])
    cloud.memory.put(manifest.shards.keys[-1], [shard])
    put_catalog(cloud.memory, Catalog("5" * 32, revision=9, token=9, entries=(entry,)))
    assert manifest.total_bytes > 10**12
    assert len(document) < 1_000_000
    found = load(cloud, include="model.layers.3.*", step=7)
    assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in wanted.items()}
    assert documents(cloud) == [CATALOG_KEY, entry.manifest]
    ranges = [request for request in cloud.requests if request.verb == "get_into"]
    assert [request.key for request in ranges] == [manifest.shards.keys[-1]] * 3
    assert sum(request.size_bytes for request in ranges) == sum(value.nbytes for value in wanted.values())
