"""Removal of orphans of a run: objects that go and objects that stay, beside saves, and after faults."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptCheckpointError,
)
from dcp_remote.format.catalog import CATALOG_KEY, BeginAgainError, Catalog, raise_floor
from dcp_remote.format.keys import manifest_key, origin
from dcp_remote.format.shard import ShardNames
from dcp_remote.run.catalog_store import swap
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.gc import Orphans, find_orphans, remove_orphans
from dcp_remote.run.retention import Retention
from dcp_remote.storage import Content, MemoryStore, ObjectStore
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing import RecordingStore
from tests.support.catalogs import stored
from tests.support.runs import (
    MeanwhileStore,
    a_run,
    assert_sound,
    begin,
    keys,
    live,
    named,
    put_catalog,
    save,
    steps,
)

DAY_SECONDS = 24 * 3600.0


def shard_key(revision: int) -> str:
    return ShardNames(0, origin(revision=revision, step=7)).key(0)


def put_orphans(store: ObjectStore, *, revision: int = 0, count: int = 2) -> set[str]:
    """Put shards and a manifest as interrupted saves leave them; return their keys."""
    written = {shard_key(revision) for _ in range(count)} | {manifest_key(revision=revision, step=7)}
    for key in written:
        store.put(key, [b"an orphan"])
    return written


def removed(store: ObjectStore) -> set[str]:
    return {info.key for info in remove_orphans(store, grace_seconds=0).old}


def test_orphans_of_saves_that_were_cut_off_and_of_what_was_retired() -> None:
    """Remove them beside live checkpoints that share a shard: objects of other names stay."""
    store = a_run(1, 2, 3)
    Deletions(store).apply(Retention(keep_last=1), deadline=Deadline(30))
    begin(store, 4)
    foreign = {"shards/README", "manifests/notes.json", "manifests/step-1.json", "shards/ab/model.safetensors"}
    foreign.add(ShardNames(0).key(0))  # of a checkpoint by itself
    for key in foreign:
        store.put(key, [b"of another program"])
    orphans = keys(store) - named(store) - foreign
    assert len(orphans) == 3 + 3 + 4
    found = find_orphans(store, grace_seconds=0)
    assert {info.key for info in found.old} == orphans
    assert (found.young, found.abandoned) == ((), ())
    before = stored(store)
    assert removed(store) == orphans
    assert keys(store) == named(store) | foreign
    assert_sound(store)
    after = stored(store)
    assert before is not None
    assert after is not None
    assert (after.entries, after.revision, after.floor) == (before.entries, before.revision + 1, before.revision + 1)
    assert find_orphans(store, grace_seconds=0) == Orphans(old=(), young=(), is_run=True)


def test_requests() -> None:
    """Remove 2,500 orphans: listing, catalog, swap, second look, date, and then the requests to delete."""
    store = a_run(1)
    put_orphans(store, count=2500)
    recording = RecordingStore(store)
    assert len(removed(recording)) == 2501
    verbs = [verb for verb, _ in recording.calls]
    assert verbs == ["list", "list", "get", "get", "get", "put", "get", "head", "delete", "delete", "delete"]
    assert recording.requests[-3].key.startswith("manifests/")


def test_a_run_that_no_job_saves_to_any_more() -> None:
    """Raise the floor and end there; years later the catalog is swapped all the same, since its date tells the age."""
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    save(store, 1)
    swap(store, lambda run: raise_floor(run, 2), deadline=Deadline(30))
    written = put_orphans(store)
    now[0] = 100 * DAY_SECONDS
    assert {info.key for info in remove_orphans(store, clock=lambda: now[0]).old} == written


def test_names_of_a_later_revision_than_the_catalog_s() -> None:
    """Lose the catalog and begin another run in its place: objects of the former run count as young."""
    store = a_run(1, 2, 3)
    old = keys(store)
    store.delete([CATALOG_KEY])
    save(store, 1)
    removal = remove_orphans(store, grace_seconds=0)
    catalog = stored(store)
    assert catalog is not None
    assert {key for key in old if key in keys(store)} == {info.key for info in removal.young}
    assert removal.young
    assert_sound(store)


def test_a_save_that_began_before_begins_again() -> None:
    """Remove orphans at each request of a save: it begins again, or it began after the removal and is committed."""
    for number in itertools.count(1):
        store = a_run(1)
        put_orphans(store)
        saving = MeanwhileStore(store, number, partial(removed, store))
        try:
            save(saving, 2, base=1)
        except BeginAgainError:
            assert steps(store) == [1]
        assert_sound(store)
        removed(store)
        assert keys(store) == named(store)
        if number == 1:
            assert steps(store) == [1, 2]
        if not saving.acted:
            break
    assert number > 6


def test_abandoned_ones_are_live_and_listed_apart() -> None:
    """Abandon a checkpoint: its entry is returned apart, and its objects stay."""
    store = a_run(1, 2, 3)
    put_catalog(store, _as_of_a_later_job(store))
    save(store, 2, letter="b", base=1, abandons=1)
    found = find_orphans(store, grace_seconds=0)
    assert [entry.step for entry in found.abandoned] == [3]
    assert {info.key for info in found.old} == keys(store) - named(store)
    removed(store)
    assert steps(store) == [1, 2, 3]
    assert_sound(store)


def _as_of_a_later_job(store: MemoryStore) -> Catalog:
    catalog = stored(store)
    assert catalog is not None
    return Catalog(catalog.run_id, catalog.revision + 1, catalog.token + 1, catalog.floor, catalog.entries)


# ---- faults


def test_a_run_that_has_lost_its_catalog() -> None:
    """Damage the catalog, then lose it: the error names `recover`, and nothing is removed. No run: another error."""
    store = a_run(1, 2)
    catalog = store.space.objects[CATALOG_KEY].data
    for body, error in ((catalog[:-1], CorruptCheckpointError), (None, CheckpointNotFoundError)):
        store.delete([CATALOG_KEY])
        if body is not None:
            store.put(CATALOG_KEY, [body])
        before = keys(store)
        for act in (find_orphans, remove_orphans):
            with pytest.raises(error, match="dcp-remote recover"):
                act(store, grace_seconds=0)
        assert keys(store) == before
    empty = MemoryStore()
    empty.put("manifests/notes.json", [b""])
    with pytest.raises(CheckpointNotFoundError, match="no run"):
        find_orphans(empty)


@pytest.mark.parametrize("missing", [False, True])
def test_a_live_manifest_that_cannot_be_read(*, missing: bool) -> None:
    """Damage or delete a live manifest: refused until the checkpoint is retired, then all orphans are removed."""
    store = a_run(1, 2, 3)
    put_orphans(store)
    entry = live(store)[1]
    store.put(entry.manifest, [b"{}"])
    if missing:
        store.delete([entry.manifest])
    before = dict(store.space.objects)
    for act in (find_orphans, remove_orphans):
        with pytest.raises(CorruptCheckpointError, match=r"dcp-remote rm.*step=2"):
            act(store, grace_seconds=0)
    assert store.space.objects == before
    Deletions(store).retire([2], deadline=Deadline(30))
    removed(store)
    assert steps(store) == [1, 3]
    assert keys(store) == named(store)


def test_a_run_that_is_retired_as_fast_as_it_is_read() -> None:
    """Retire a checkpoint at each read of the catalog: `CommitConflictError`, and nothing is removed."""
    store = a_run(1)
    written = put_orphans(store)
    numbers = itertools.count(2)

    class BusyStore(WrappedStore):
        def get(self, key: str, *, limit_bytes: int) -> Content:
            if key != CATALOG_KEY:
                return super().get(key, limit_bytes=limit_bytes)
            step = next(numbers)
            save(store, step)
            content = super().get(key, limit_bytes=limit_bytes)
            maintenance = Deletions(store)
            maintenance.retire([step], deadline=Deadline(30), force=True)
            maintenance.queue.delete(deadline=Deadline(30))
            return content

    with pytest.raises(CommitConflictError, match="again and again"):
        remove_orphans(BusyStore(store), grace_seconds=0)
    assert written <= keys(store)


def test_another_run_is_begun_meanwhile() -> None:
    """Replace the catalog by that of another run before the swap: nothing is removed."""
    store = a_run(1)
    written = put_orphans(store)

    def begin_anew() -> None:
        store.delete([CATALOG_KEY])
        save(store, 1)

    with pytest.raises(CommitConflictError, match="Another run"):
        remove_orphans(MeanwhileStore(store, 5, begin_anew), grace_seconds=0)
    assert written <= keys(store)
