"""A bit that flips on the way: the bytes are read once more, by another way, and only then called damaged.

A wrapper of the store flips a bit of what it answers, on requests of the test's choice; what lies in the store is good
unless a test says otherwise. Requests are counted.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import CheckpointManager, RemoteReader, RemoteWriter, load
from dcp_remote.catalog import CATALOG_KEY
from dcp_remote.catalog_store import read_catalog
from dcp_remote.checkpoint import decode_entry, fetch_entry
from dcp_remote.commit import look
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.ranges import MiB
from dcp_remote.recover import find_recovery
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.storage.base import Content
from dcp_remote.storage.rereads import is_reread
from dcp_remote.testing import RecordingStore
from tests.test_corruption import READS, Saved, check_equal, saved

__all__ = ["saved"]  # a fixture


class FlippingStore(RecordingStore):
    """Flips a bit in the middle of the answers to those reads that `flips(number)` is true of; counts from 1."""

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
            data[len(data) // 2] ^= 4


def is_first_way(_number: int) -> bool:
    return not is_reread()


@pytest.mark.parametrize("name", list(READS))
def test_one_flipped_bit_on_the_way(saved: Saved, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the answer to the first read, then to the second, until all were hit: manifest, block tables and ranges.

    All is right each time, one warning says so, and it costs one request: every piece here is one range.
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
def test_a_first_way_that_always_flips(saved: Saved, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """All is right, every read costs two, and no read more than one warning."""
    clean = FlippingStore(saved.store, lambda _: False)
    READS[name](clean)
    store = FlippingStore(saved.store, is_first_way)
    check_equal(READS[name](store))
    assert store.reads == 2 * clean.reads
    assert len(caplog.records) < store.reads - clean.reads


def test_damage_at_rest_costs_one_request_more(saved: Saved) -> None:
    """Each shard and the manifest in turn: an error after its range, or the manifest, was read twice."""
    for key, whole in list(saved.store.space.objects.items()):
        damaged = bytearray(whole.data)
        damaged[-2] ^= 1
        saved.put(key, damaged)
        store = RecordingStore(saved.store)
        with pytest.raises(CorruptCheckpointError):
            load(store)
        assert len([one for one in store.calls if one[1] == key]) == 2
        saved.put(key, whole.data)


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_a_piece_of_several_ranges(order: str) -> None:
    """Which range is wrong shows with the last one: all three are read again, also into memory that is in no order."""
    values = torch.arange(5 * MiB, dtype=torch.int32).reshape(1024, -1)
    inner = MemoryStore()
    dcp.save({"w": values, "b": torch.ones(3)}, storage_writer=RemoteWriter(inner))
    for hit in (2, 3, 4, 5):
        store = FlippingStore(inner, lambda number, hit=hit: number == hit)  # type: ignore[misc]  # bound now
        found = torch.zeros(values.shape[::-1], dtype=torch.int32).t()
        if order == "rows":
            found = found.contiguous()
        dcp.load({"w": found}, storage_reader=RemoteReader(store))
        assert torch.equal(found, values)
        assert store.reads == (4 if hit == 5 else 4 + 3)


def test_a_run() -> None:
    """A bit in each answer to a restore in turn, catalog and manifest included: the report counts the read."""
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
    """What they ask about is not taken for damaged: the manifest, the catalog, the manifests of a run."""
    run = MemoryStore()
    with CheckpointManager(FlippingStore(run, is_first_way)) as manager:
        manager.save(1, {"x": 1}, wait=True)
        manager.save(2, {"x": 2}, wait=True)
        assert manager.steps() == [1, 2]
    slot = look(FlippingStore(saved.store, is_first_way))
    assert slot.head is not None
    assert slot.head.save_id == saved.manifest.save_id
    del run.space.objects[CATALOG_KEY]
    found = find_recovery(FlippingStore(run, is_first_way))
    assert [entry.step for entry in found.catalog.entries] == [1, 2]
    assert not found.left


def test_a_manifest_that_changes_between_ranks() -> None:
    """A rank that was sent other bytes reads the manifest itself: one GET; of a good one none."""
    store = RecordingStore(MemoryStore())
    with CheckpointManager(store) as manager:
        manager.save(1, {"x": 1}, wait=True)
    seen = read_catalog(store)
    assert seen is not None
    (entry,) = seen.catalog.entries
    data = fetch_entry(store, entry)
    store.clear()
    good = decode_entry(store, entry, data)
    assert store.count() == 0
    assert decode_entry(store, entry, data[:-1]).save_id == good.save_id
    assert store.calls == [("get", entry.manifest)]
