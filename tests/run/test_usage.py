"""Tests of the bytes that checkpoints of a run share, and that are freed when some of them go."""

from __future__ import annotations

import itertools

import pytest

from dcp_remote.common.deadline import Deadline
from dcp_remote.format.keys import SHARDS_PREFIX
from dcp_remote.run.catalog_store import require_catalog
from dcp_remote.run.retention import Decision
from dcp_remote.run.usage import clear, read_usage
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.runs import FROZEN, TRAINED, assert_tidy, copied, live, save, shard_at


@pytest.fixture
def store() -> MemoryStore:
    """Save four steps: 1 and 2 share one shard, 2 and 3 two, and 4 shares none."""
    store = MemoryStore()
    save(store, 1)
    save(store, 2, base=1)
    save(store, 3, base=2, borrows=(FROZEN, TRAINED))
    save(store, 4)
    return store


def shard_bytes(store: MemoryStore) -> int:
    return sum(len(item.data) for key, item in store.space.objects.items() if key.startswith(SHARDS_PREFIX))


@pytest.mark.parametrize("steps", [c for n in range(1, 5) for c in itertools.combinations((1, 2, 3, 4), n)])
def test_what_is_foretold_is_freed(store: MemoryStore, steps: tuple[int, ...]) -> None:
    """Delete each set of checkpoints: as many bytes go as were foretold, and as were counted."""
    catalog = require_catalog(store)
    usage = read_usage(store, catalog, Deadline(30))
    before = shard_bytes(store)
    assert usage.size_of(usage.sizes) == before
    foretold = usage.freed_bytes(Decision(steps, ()))
    recording = RecordingStore(store)
    applied, _, freed_bytes = clear(
        recording, usage, lambda deletions, deadline: deletions.retire(steps, deadline=deadline, force=True),
        timeout_seconds=30,
    )  # fmt: skip
    assert foretold == freed_bytes == before - shard_bytes(store) > 0
    assert applied.retired == steps
    assert recording.count("get") == 2  # of the catalog: no manifest is read again
    assert_tidy(store)


def test_a_shard_that_a_save_reuses_meanwhile_is_not_counted(store: MemoryStore) -> None:
    """Save a checkpoint that reuses a shard of the one that goes, after the usage was read."""
    catalog = require_catalog(store)
    usage = read_usage(store, catalog, Deadline(30))
    save(store, 5, base=4)
    before, kept = shard_bytes(store), len(store.space.objects[shard_at(store, 4, FROZEN)].data)
    _, _, freed_bytes = clear(
        store, usage, lambda deletions, deadline: deletions.retire([4], deadline=deadline), timeout_seconds=30
    )
    foretold = usage.freed_bytes(Decision((4,), ()))
    assert foretold is not None
    assert freed_bytes == before - shard_bytes(store) == foretold - kept
    assert_tidy(store)


def test_own_bytes_and_keys(store: MemoryStore) -> None:
    """Compare with the sizes of the shards that only one checkpoint names, and of each top-level key."""
    usage = read_usage(store, require_catalog(store), Deadline(30))
    frozen, trained, optimizer = (len(store.space.objects[shard_at(store, 1, number)].data) for number in range(3))
    own = [usage.own_bytes(entry) for entry in live(store)]
    assert own == [trained + optimizer, optimizer, optimizer, frozen + trained + optimizer]
    assert usage.sum_by_top() == {
        "model": (2 * frozen + 3 * trained, frozen + 2 * trained),
        "optim": (4 * optimizer, 4 * optimizer),
    }


def test_an_unreadable_manifest_hides_what_is_free(store: MemoryStore) -> None:
    """Damage a manifest: what is freed is not known, nor what each checkpoint has alone."""
    catalog = require_catalog(store)
    store.put(catalog.entries[0].manifest, [b"{}"])
    usage = read_usage(store, catalog, Deadline(30))
    assert list(usage.unreadable) == [catalog.entries[0]]
    assert [usage.freed_bytes(Decision(steps, ())) for steps in ((), (2,), (1, 4))] == [0, None, None]
    assert {usage.own_bytes(entry) for entry in catalog.entries} == {None}
    assert usage.orphan_bytes({}) is None


def test_checkpoints_that_go_meanwhile_are_left_out(store: MemoryStore) -> None:
    """Retire a checkpoint between the catalog and its manifest: the others are counted."""
    catalog = require_catalog(store)
    usage = read_usage(store, catalog, Deadline(30))
    after = copied(store)
    clear(after, usage, lambda deletions, deadline: deletions.retire([1], deadline=deadline), timeout_seconds=30)
    again = read_usage(after, catalog, Deadline(30))
    assert not again.unreadable
    assert again.size_of(again.sizes) == shard_bytes(after)
