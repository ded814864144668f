"""Removing orphans of a run: what is removed and what is not, beside saves, and where something is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import pytest

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    CommitUnknownError,
    CorruptCheckpointError,
    InvalidArgumentError,
    PermissionDeniedError,
    StorageError,
)
from dcp_remote.format.catalog import CATALOG_KEY, BeginAgainError, Catalog, raised
from dcp_remote.format.keys import manifest_key, origin
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.format.shard import ShardNames
from dcp_remote.run.catalog_store import swap
from dcp_remote.run.gc import Orphans, find_orphans, remove_orphans
from dcp_remote.run.maintenance import Maintenance
from dcp_remote.run.retention import Retention
from dcp_remote.run.run_gc import RunOrphans, find_run_orphans, is_run, remove_run_orphans, run_orphans
from dcp_remote.storage import Content, MemoryStore, ObjectInfo, ObjectStore, Version
from dcp_remote.storage.wrapper import Verb, WrappedStore
from dcp_remote.testing import FaultyStore, RecordingStore, matching
from tests.support.catalogs import stored
from tests.support.runs import (
    MeanwhileStore,
    a_run,
    assert_sound,
    begin,
    commit,
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
    """So many shards of saves that were cut off, and a manifest."""
    written = {shard_key(revision) for _ in range(count)} | {manifest_key(revision=revision, step=7)}
    for key in written:
        store.put(key, [b"an orphan"])
    return written


def removed(store: ObjectStore) -> set[str]:
    return {info.key for info in remove_run_orphans(store, grace_seconds=0).removed}


def info(key: str, *, modified_seconds: float) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=1, version=Version(etag="e"), modified_seconds=modified_seconds)


def test_what_is_an_orphan() -> None:
    """Old, young, just as old as the grace, from the future; of the catalog's revision, and of a later one."""
    old, young, edge, future = (info(shard_key(3), modified_seconds=at) for at in (0, 11, 10, 99))
    later = info(manifest_key(revision=4, step=1), modified_seconds=0)
    live = info(shard_key(1), modified_seconds=0)
    listed = [old, young, edge, future, later, live]
    not_named = {one.key for one in listed} - {live.key}
    sort = partial(run_orphans, listed, not_named, revision=3, now_seconds=20)
    assert sort(grace_seconds=10) == RunOrphans(old=(old, edge), young=(young, future, later))
    assert sort(grace_seconds=0) == RunOrphans(old=(old, young, edge, future), young=(later,))


def test_orphans_of_saves_that_were_cut_off_and_of_what_was_retired() -> None:
    """Beside live checkpoints that share a shard; what has no name of ours stays."""
    store = a_run(1, 2, 3)
    Maintenance(store).apply(Retention(keep_last=1), deadline=Deadline(30))
    begin(store, 4)
    foreign = {"shards/README", "manifests/notes.json", "manifests/step-1.json", "shards/ab/model.safetensors"}
    for key in foreign:
        store.put(key, [b"somebody's"])
    orphans = keys(store) - named(store) - foreign
    assert len(orphans) == 3 + 3 + 4
    found = find_run_orphans(store, grace_seconds=0)
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
    assert find_run_orphans(store, grace_seconds=0) == RunOrphans(old=(), young=())


def test_nothing_is_written_where_nothing_is_old() -> None:
    """Orphans of now and a grace of a day: two LISTs, the catalog, and each live manifest."""
    store = a_run(1, 2)
    put_orphans(store)
    for act in (find_run_orphans, remove_run_orphans):
        recording = RecordingStore(store)
        act(recording)
        assert recording.calls[:3] == [("list", "manifests/"), ("list", "shards/"), ("get", CATALOG_KEY)]
        assert sorted(recording.calls[3:]) == [("get", entry.manifest) for entry in live(store)]


def test_requests() -> None:
    """2,500 orphans: listed before the catalog is read, the swap before the date is asked for, that before deletes."""
    store = a_run(1)
    put_orphans(store, count=2500)
    recording = RecordingStore(store)
    assert len(removed(recording)) == 2501
    verbs = [verb for verb, _ in recording.calls]
    assert verbs == ["list", "list", "get", "get", "get", "put", "get", "head", "delete", "delete", "delete"]
    assert recording.requests[-3].key.startswith("manifests/")


def test_age_is_by_the_store_s_clock() -> None:
    """Orphans of now; this machine's clock is a year ahead: nothing. Then the store's is: they go."""
    year_seconds = 365 * DAY_SECONDS
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    save(store, 1)
    written = put_orphans(store)
    removal = remove_run_orphans(store, clock=lambda: year_seconds)
    assert (removal.removed, {info.key for info in removal.kept}) == ((), written)
    now[0] = year_seconds
    young = put_orphans(store, revision=1)
    removal = remove_run_orphans(store, clock=lambda: year_seconds)
    assert {info.key for info in removal.removed} == written
    assert {info.key for info in removal.kept} == young


def test_a_run_that_nobody_saves_to_any_more() -> None:
    """A removal raised the floor and was cut off; years later the catalog is still dated anew, or nothing would be old.

    What is younger than the catalog was then goes as well.
    """
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    save(store, 1)
    swap(store, lambda run: raised(run, 2), deadline=Deadline(30))
    written = put_orphans(store)
    now[0] = 100 * DAY_SECONDS
    assert {info.key for info in remove_run_orphans(store, clock=lambda: now[0]).removed} == written


def test_names_of_a_revision_that_has_not_been() -> None:
    """The catalog was lost, and another run begun in its place: what the old one named is none of its orphans."""
    store = a_run(1, 2, 3)
    old = keys(store)
    store.delete([CATALOG_KEY])
    save(store, 1)
    removal = remove_run_orphans(store, grace_seconds=0)
    catalog = stored(store)
    assert catalog is not None
    assert {key for key in old if key in keys(store)} == {info.key for info in removal.kept}
    assert removal.kept
    assert_sound(store)


def test_a_save_that_began_before_begins_again() -> None:
    """Its shards may be gone; one that began after the removal commits."""
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


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("begun", [False, True])
def test_a_save_at_each_request_of_a_look(number: int, *, begun: bool) -> None:
    """Nothing that is live is shown as an orphan: not what is saved meanwhile, nor what is committed before the look.

    What began before and is committed after the catalog was read is one as far as anybody could see.
    """
    store = a_run(1)
    attempt = begin(store, 2)
    busy = MeanwhileStore(store, number, lambda: commit(store, attempt) if begun else save(store, 3))
    orphans = {info.key for info in find_run_orphans(busy, grace_seconds=0).old}
    assert busy.acted == (number < 5)
    if not (begun and number == 4):
        assert not orphans & named(store)


def test_abandoned_ones_are_live_and_listed_apart() -> None:
    """Nothing of them is an orphan."""
    store = a_run(1, 2, 3)
    put_catalog(store, _as_of_a_later_job(store))
    save(store, 2, letter="b", base=1, abandons=1)
    found = find_run_orphans(store, grace_seconds=0)
    assert [entry.step for entry in found.abandoned] == [3]
    assert {info.key for info in found.old} == keys(store) - named(store)
    removed(store)
    assert steps(store) == [1, 2, 3]
    assert_sound(store)


def _as_of_a_later_job(store: MemoryStore) -> Catalog:
    catalog = stored(store)
    assert catalog is not None
    return Catalog(catalog.run_id, catalog.revision + 1, catalog.token + 1, catalog.floor, catalog.entries)


# ---- where something is wrong ----


def test_a_run_that_has_lost_its_catalog() -> None:
    """Or whose catalog is damaged: told to recover, and nothing is removed. Where nothing is, that is said."""
    store = a_run(1, 2)
    assert is_run(store)
    catalog = store.space.objects[CATALOG_KEY].data
    for body, error in ((catalog[:-1], CorruptCheckpointError), (None, CheckpointNotFoundError)):
        store.delete([CATALOG_KEY])
        if body is not None:
            store.put(CATALOG_KEY, [body])
        before = keys(store)
        for act in (find_run_orphans, remove_run_orphans):
            with pytest.raises(error, match="dcp-remote recover"):
                act(store, grace_seconds=0)
        assert keys(store) == before
        assert is_run(store)
    empty = MemoryStore()
    empty.put("manifests/notes.json", [b""])
    assert not is_run(empty)
    with pytest.raises(CheckpointNotFoundError, match="no run"):
        find_run_orphans(empty)


@pytest.mark.parametrize("missing", [False, True])
def test_a_live_manifest_that_cannot_be_read(*, missing: bool) -> None:
    """What it names cannot be known: refused, with what to do. When the checkpoint is given up, all else is removed."""
    store = a_run(1, 2, 3)
    put_orphans(store)
    entry = live(store)[1]
    store.put(entry.manifest, [b"{}"])
    if missing:
        store.delete([entry.manifest])
    before = dict(store.space.objects)
    for act in (find_run_orphans, remove_run_orphans):
        with pytest.raises(CorruptCheckpointError, match=r"dcp-remote rm.*step=2"):
            act(store, grace_seconds=0)
    assert store.space.objects == before
    Maintenance(store).retire([2], deadline=Deadline(30))
    removed(store)
    assert steps(store) == [1, 3]
    assert keys(store) == named(store)


@pytest.mark.parametrize("after", [False, True])
def test_what_is_retired_meanwhile_is_looked_for_again(*, after: bool) -> None:
    """A checkpoint is retired and deleted at each request in turn, its manifest perhaps about to be read."""
    for number in itertools.count(1):
        store = a_run(1, 2, 3)
        put_orphans(store)

        def retire(store: MemoryStore = store) -> None:
            maintenance = Maintenance(store)
            maintenance.apply(Retention(keep_last=2), deadline=Deadline(30))
            maintenance.delete(deadline=Deadline(30))

        busy = MeanwhileStore(store, number, retire, after=after)
        remove_run_orphans(busy, grace_seconds=0)
        assert_sound(store)
        assert keys(store) == named(store)
        if not busy.acted:
            break
    assert number > 8


def test_a_run_that_is_retired_as_fast_as_it_is_read() -> None:
    """Given up after a few looks; nothing was removed."""
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
            maintenance = Maintenance(store)
            maintenance.retire([step], deadline=Deadline(30), force=True)
            maintenance.delete(deadline=Deadline(30))
            return content

    with pytest.raises(CommitConflictError, match="again and again"):
        remove_run_orphans(BusyStore(store), grace_seconds=0)
    assert written <= keys(store)


def test_another_run_is_begun_meanwhile() -> None:
    """The catalog was removed and made anew between the look and the swap: nothing is removed."""
    store = a_run(1)
    written = put_orphans(store)

    def begin_anew() -> None:
        store.delete([CATALOG_KEY])
        save(store, 1)

    with pytest.raises(CommitConflictError, match="Another run"):
        remove_run_orphans(MeanwhileStore(store, 5, begin_anew), grace_seconds=0)
    assert written <= keys(store)


class KeepingStore(WrappedStore):
    """Deletes what it is told, but for the keys that it may not."""

    def __init__(self, store: ObjectStore, kept: set[str]) -> None:
        super().__init__(store)
        self._kept = kept

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        failed = dict(super().delete([key for key in keys if key not in self._kept]))
        return failed | {key: PermissionDeniedError("Kept.", key=key) for key in keys if key in self._kept}


def test_what_cannot_be_deleted() -> None:
    """One of three orphans is under a lock: returned with its reason. All are: the store's error is raised."""
    store = a_run(1)
    kept, *_ = sorted(put_orphans(store))
    removal = remove_run_orphans(KeepingStore(store, {kept}), grace_seconds=0)
    assert set(removal.failed) == {kept}
    assert len(removal.removed) == 2

    def is_delete(verb: Verb, key: str, number: int) -> bool:
        return verb == "delete"

    denied = matching(is_delete, "request", persistent=True, error=lambda: PermissionDeniedError("An injected 403."))
    with pytest.raises(PermissionDeniedError):
        removed(FaultyStore(store, [denied]))
    assert kept in keys(store)


def test_the_store_never_said_whether_it_was_swapped() -> None:
    """Nothing is removed."""
    store = a_run(1)
    written = put_orphans(store)
    silent = matching(lambda verb, key, number: number > 5, "response", persistent=True)
    with pytest.raises(CommitUnknownError):
        remove_run_orphans(FaultyStore(store, [silent]), grace_seconds=0, timeout_seconds=0.1)
    assert written <= keys(store)


def test_a_grace_that_is_none() -> None:
    """Refused before anything is asked."""
    for grace_seconds in (-1.0, float("nan"), float("inf")):
        for act in (find_run_orphans, remove_run_orphans):
            recording = RecordingStore(a_run(1))
            with pytest.raises(InvalidArgumentError):
                act(recording, grace_seconds=grace_seconds)
            assert recording.calls == []


# ---- gc of a checkpoint by itself, in a run ----


def test_gc_of_a_checkpoint_by_itself_refuses_a_run() -> None:
    """Of the run alone; and beside shards of such a checkpoint, which has no manifest: no tombstone is put."""
    store = a_run(1)
    for act in (find_orphans, remove_orphans):
        with pytest.raises(InvalidArgumentError, match="This is a run"):
            act(store, grace_seconds=0)
    store.put(ShardNames(0).key(0), [b"an orphan"])
    with pytest.raises(InvalidArgumentError, match="This is a run"):
        remove_orphans(store, grace_seconds=0)
    assert MANIFEST_KEY not in keys(store)
    store.delete([CATALOG_KEY])
    assert isinstance(find_orphans(store, grace_seconds=0), Orphans)
    assert remove_orphans(store, grace_seconds=0).removed
    assert MANIFEST_KEY in keys(store)
