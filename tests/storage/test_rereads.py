"""Bits that flip in transit: the bytes are read once more, by another path, and only then called damaged.

A wrapper of the store flips a bit of chosen answers; the objects themselves are good unless a test damages them.
Requests are counted.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import CheckpointManager, RemoteReader, RemoteWriter, load
from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.run.catalog_store import read_catalog
from dcp_remote.run.commit import read_slot
from dcp_remote.run.lookup import decode_entry, fetch_entry
from dcp_remote.run.recovery import find_recovery
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.storage.base import Content
from dcp_remote.storage.rereads import is_reread
from dcp_remote.testing import RecordingStore
from tests.end_to_end.test_corruption import READS, Saved, check_equal, saved

__all__ = ["saved"]  # a fixture


class FlippingStore(RecordingStore):
    """Store that flips a bit in the middle of those answers for whose number, from 1, `flips` is true."""

    def __init__(self, store: ObjectStore, flips: Callable[[int], bool]) -> None:
        super().__init__(store)
        self._flips = flips
        self._numbers = itertools.count(1)

    @property
    def reads(self) -> int:
        return self.count("get") + self.count("get_into")

    def get(self, key: str, *, limit_bytes: int) -> Content:
        number = next(self._numbers)
        content = super().get(key, limit_bytes=limit_bytes)
        data = bytearray(content.data)
        self._flip(number, memoryview(data))
        return Content(bytes(data), content.version)

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        number = next(self._numbers)
        super().get_into(key, start, buffer)
        self._flip(number, buffer)

    def _flip(self, number: int, data: memoryview) -> None:
        if self._flips(number):
            data[-1] ^= 4  # of a range the last byte of a piece, and not of a gap


def is_first_way(_number: int) -> bool:
    return not is_reread()


@pytest.mark.parametrize("name", list(READS))
def test_one_flipped_bit(saved: Saved, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Flip a bit of each answer in turn: of the manifest, of block tables and of ranges.

    All is correct each time, one warning is logged, and it costs one more request: every piece here is one range.
    """
    clean = FlippingStore(saved.store, lambda _: False)
    check_equal(READS[name](clean))
    assert clean.reads > 3
    assert not caplog.records
    for hit in range(1, clean.reads + 1):
        store = FlippingStore(saved.store, lambda number, hit=hit: number == hit)  # type: ignore[misc]  # bound now
        check_equal(READS[name](store))
        assert store.reads == clean.reads + 1
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "are read once more" in caplog.text
        caplog.clear()


@pytest.mark.parametrize("name", list(READS))
def test_every_first_read_flips_a_bit(saved: Saved, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Flip a bit of every first read: all is correct, every read costs two, and not each one logs a warning."""
    clean = FlippingStore(saved.store, lambda _: False)
    READS[name](clean)
    store = FlippingStore(saved.store, is_first_way)
    check_equal(READS[name](store))
    assert store.reads == 2 * clean.reads
    assert len(caplog.records) < store.reads - clean.reads


def test_damage_at_rest_costs_one_request_more(saved: Saved) -> None:
    """Damage each shard and the manifest in turn: an error, after its range was read twice."""
    for key, whole in list(saved.store.space.objects.items()):
        damaged = bytearray(whole.data)
        damaged[-2] ^= 1
        saved.put(key, damaged)
        store = RecordingStore(saved.store)
        with pytest.raises(CorruptCheckpointError):
            load(store)
        assert len([call for call in store.calls if call[1] == key]) == 2
        saved.put(key, whole.data)


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_a_piece_of_several_ranges(order: str) -> None:
    """Flip a bit of one of three ranges, which shows after the last: all are read again, in any memory order."""
    values = torch.arange(5 * MiB, dtype=torch.int32).reshape(1024, -1)
    inner = MemoryStore()
    dcp.save({"w": values, "b": torch.ones(3)}, storage_writer=RemoteWriter(inner, shard_bytes=64 * MiB))
    for hit in (2, 3, 4, 5):
        store = FlippingStore(inner, lambda number, hit=hit: number == hit)  # type: ignore[misc]  # bound now
        found = torch.zeros(values.shape[::-1], dtype=torch.int32).t()
        if order == "rows":
            found = found.contiguous()
        dcp.load({"w": found}, storage_reader=RemoteReader(store))
        assert torch.equal(found, values)
        assert store.reads == (4 if hit == 5 else 4 + 3)


def test_a_run() -> None:
    """Flip a bit of each answer to a restore in turn: the report counts the reread."""
    inner = MemoryStore()
    with CheckpointManager(inner) as manager:
        manager.save(1, {"w": torch.arange(1000), "text": "x" * 10_000}, wait=True)
    hits: list[str] = []
    for hit in range(1, 10):
        store = FlippingStore(inner, lambda number, hit=hit: number == hit)  # type: ignore[misc]  # bound now
        state = {"w": torch.zeros(1000, dtype=torch.int64), "text": ""}
        with CheckpointManager(store) as manager:
            assert manager.restore(state) == 1
            report = manager.last_load
        assert torch.equal(state["w"], torch.arange(1000))  # type: ignore[arg-type]  # a tensor
        assert state["text"] == "x" * 10_000
        assert report is not None
        if not report.rereads:
            break
        assert report.rereads == 1
        assert "1 read repeated because bytes did not match their digest" in str(report)
        hits.append([request.key for request in store.requests if request.verb in ("get", "get_into")][hit - 1])
    assert {key.partition("/")[0] for key in hits} == {"catalog.json", "manifests", "shards"}


def test_a_save_and_a_recovery(saved: Saved) -> None:
    """Flip a bit of every first read: neither a save nor a recovery takes manifest or catalog for damaged."""
    run = MemoryStore()
    with CheckpointManager(FlippingStore(run, is_first_way)) as manager:
        manager.save(1, {"x": 1}, wait=True)
        manager.save(2, {"x": 2}, wait=True)
        assert manager.run.steps() == [1, 2]
    slot = read_slot(FlippingStore(saved.store, is_first_way))
    assert slot.content is not None
    assert slot.content.save_id == saved.manifest.save_id
    del run.space.objects[CATALOG_KEY]
    found = find_recovery(FlippingStore(run, is_first_way))
    assert [entry.step for entry in found.catalog.entries] == [1, 2]
    assert not found.left


def test_a_manifest_that_changes_between_ranks() -> None:
    """Give a rank other bytes than the manifest's: it reads the manifest itself, in one GET; good bytes cost none."""
    store = RecordingStore(MemoryStore())
    with CheckpointManager(store) as manager:
        manager.save(1, {"x": 1}, wait=True)
    found = read_catalog(store)
    assert found is not None
    (entry,) = found.entries
    data = fetch_entry(store, entry)
    store.clear()
    good = decode_entry(store, entry, data)
    assert store.count() == 0
    assert decode_entry(store, entry, data[:-1]).save_id == good.save_id
    assert store.calls == [("get", entry.manifest)]
