"""Removal of orphans: objects that go and stay, at any URL; then beside saves, of a checkpoint by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from dcp_remote.errors import (
    CommitConflictError,
    CorruptCheckpointError,
    InvalidArgumentError,
    PermissionDeniedError,
    SaveFailedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.format import manifest_json
from dcp_remote.format.catalog import CATALOG_KEY, Catalog
from dcp_remote.format.keys import origin
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.format.shard import ShardNames
from dcp_remote.run.gc import Orphans, _Seen, find_orphans, remove_orphans
from dcp_remote.storage import LocalStore, MemoryStore, ObjectInfo, ObjectStore, Version
from dcp_remote.storage.wrapper import Request, WrappedStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore
from tests.support import runs
from tests.support.catalogs import full_pauses
from tests.support.faults import denied, verb_is
from tests.support.runs import MeanwhileStore
from tests.support.valued_states import found, named, put_orphans, save, shards_in

_Answer = TypeVar("_Answer")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")


def keys(store: ObjectStore) -> set[str]:
    return {info.key for info in store.list()}


def in_a_checkpoint(store: MemoryStore) -> set[str]:
    """Put orphans beside a checkpoint by itself, which is saved first if there is none; return their keys."""
    if not keys(store):
        save(store, 1.0, 2)
    return put_orphans(store)


def in_a_run(store: MemoryStore) -> set[str]:
    """Put all objects of a save into a run, which is begun first if there is none; return their keys."""
    if not keys(store):
        runs.save(store, 1)
    before = keys(store)
    runs.begin(store, 2)
    return keys(store) - before


class HoldingStore(WrappedStore):
    """Store with object lock, which does not delete one key."""

    def __init__(self, store: ObjectStore, held: str) -> None:
        super().__init__(store)
        self._held = held

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        super().delete([key for key in keys if key != self._held])
        return {key: PermissionDeniedError("Held.", key=key) for key in keys if key == self._held}


PutOrphans = Callable[[MemoryStore], set[str]]

at_any_url = pytest.mark.parametrize("put", [in_a_checkpoint, in_a_run])


# ---- a run or a checkpoint by itself ----


def test_sort_by_age() -> None:
    """Sort orphans that are old, young, as old as the grace, dated in the future, or of a later catalog."""
    key = ShardNames(0, origin(revision=3, step=7)).key
    old, young, edge, future, named_one = (
        ObjectInfo(key(number), size_bytes=1, version=Version(etag="e"), modified_seconds=at)
        for number, at in enumerate((9, 11, 10, 99, 0))
    )
    listed = [old, young, edge, future, named_one]
    not_named = {info.key for info in listed} - {named_one.key}

    def sort(grace_seconds: float, catalog: Catalog | None = None) -> Orphans:
        return _Seen(listed, not_named, catalog).orphans(now_seconds=20, grace_seconds=grace_seconds)

    assert sort(10) == Orphans(old=(old, edge), young=(young, future))
    assert sort(0) == Orphans(old=(old, young, edge, future), young=())
    assert sort(10, Catalog("0" * 32, 3)) == Orphans((old, edge), (young, future), is_run=True)
    assert sort(0, Catalog("0" * 32, 2)) == Orphans((), (old, young, edge, future), is_run=True)


@at_any_url
def test_nothing_is_written_where_nothing_is_old(put: PutOrphans) -> None:
    """Remove orphans of now with a grace of a day: the listing, then the catalog, then a manifest, and no write."""
    store = MemoryStore()
    put(store)
    for act in (find_orphans, remove_orphans):
        recording = RecordingStore(store)
        act(recording)
        assert recording.calls[:3] == [("list", "manifests/"), ("list", "shards/"), ("get", CATALOG_KEY)]
        assert [verb for verb, _ in recording.calls[3:]] == ["get"]


@at_any_url
def test_age_is_by_the_store_s_clock(put: PutOrphans) -> None:
    """Set this machine's clock a year ahead, then the store's: only then are orphans of the year before removed."""
    year_seconds = 365 * 24 * 3600.0
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    written = put(store)
    removal = remove_orphans(store, clock=lambda: year_seconds)
    assert (removal.old, {info.key for info in removal.young}) == ((), written)
    now[0] = year_seconds
    young = put(store)
    removal = remove_orphans(store, clock=lambda: year_seconds)
    assert {info.key for info in removal.old} == written
    assert {info.key for info in removal.young} == young


@at_any_url
def test_orphans_that_cannot_be_deleted(put: PutOrphans) -> None:
    """Hold one orphan under a lock: returned with its reason, and the others go. Deny all: the error is raised."""
    store = MemoryStore()
    held, *others = sorted(put(store))
    before = keys(store)
    removal = remove_orphans(HoldingStore(store, held), grace_seconds=0)
    assert isinstance(removal.failed[held], PermissionDeniedError)
    assert sorted(info.key for info in removal.old) == others
    assert keys(store) == before.difference(others)
    refused = Fault(verb_is("delete"), "request", persistent=True, error=denied)
    with pytest.raises(PermissionDeniedError):
        remove_orphans(FaultyStore(store, [refused]), grace_seconds=0)
    assert keys(store) == before.difference(others)


# ---- a checkpoint by itself ----


def test_orphans_of_a_save_that_was_cut_off_and_of_one_that_was_replaced() -> None:
    """Remove them beside a checkpoint that replaced another: it loads as before, and objects of other names stay."""
    store = MemoryStore()
    save(store, 1.0, 2)
    replaced = named(store)
    save(store, 2.0, 2)
    cut_off = put_orphans(store)
    foreign = {"shards/README", "shards/ab/model.safetensors", f"shards/ab/{ShardNames(0).key(0)}"}
    for key in foreign:
        store.put(key, [b"of another program"])
    assert {info.key for info in find_orphans(store, grace_seconds=0).old} == replaced | cut_off
    assert {info.key for info in remove_orphans(store, grace_seconds=0).old} == replaced | cut_off
    assert shards_in(store) == named(store) | foreign
    assert found(store) == 2.0
    assert find_orphans(store, grace_seconds=0) == Orphans(old=(), young=())


def test_requests() -> None:
    """Remove 1,500 orphans: the manifest is read, put again and asked for its date, before two requests to delete."""
    store = MemoryStore()
    save(store, 1.0, 2)
    put_orphans(store, 1500)
    recording = RecordingStore(store)
    assert len(remove_orphans(recording, grace_seconds=0).old) == 1500
    assert [verb for verb, _ in recording.calls] == ["list", "list", "get", "get", "put", "head", "delete", "delete"]


@pytest.mark.parametrize("overwriting", [False, True])
def test_orphans_removed_at_each_request_of_a_save(*, overwriting: bool) -> None:
    """Remove orphans at each request of a save: it is committed whole, or fails and leaves the former checkpoint."""
    outcomes: set[type[BaseException] | None] = set()
    for number in itertools.count(1):
        store = MemoryStore()
        if overwriting:
            save(store, 1.0, 2)
        put_orphans(store)

        def clean(store: MemoryStore = store) -> None:
            remove_orphans(store, grace_seconds=0)

        saving = MeanwhileStore(store, number, clean)
        try:
            save(saving, 2.0, 2)
        except (CommitConflictError, SaveFailedError) as error:
            outcomes.add(type(error))
            assert found(store) == (1.0 if overwriting else None)
        else:
            outcomes.add(None)
            assert found(store) == 2.0
        save(store, 3.0, 2)
        clean()
        assert shards_in(store) == named(store)
        assert found(store) == 3.0
        if not saving.acted:
            break
    assert outcomes == {CommitConflictError, None}


@pytest.mark.parametrize("begun", [False, True])
def test_a_save_at_each_request_of_a_removal(*, begun: bool) -> None:
    """Save at each request of a removal, within an outer save that began before: no checkpoint loses a shard."""
    for number in itertools.count(1):
        store = MemoryStore()
        save(store, 1.0, 2)
        put_orphans(store)
        committed: list[float] = []

        def commit(store: MemoryStore = store, committed: list[float] = committed) -> None:
            save(store, 2.0, 2)
            committed.append(2.0)

        removing = MeanwhileStore(store, number, commit)

        def remove(removing: MeanwhileStore = removing) -> None:
            remove_orphans(removing, grace_seconds=0)

        if begun:
            # The removal runs between the shards of an outer save and its manifest.
            outer = MeanwhileStore(store, 4, remove, after=False)
            with pytest.raises(CommitConflictError):
                save(outer, 4.0, 2)
        else:
            remove()
        assert found(store) == (2.0 if committed else 1.0)
        if not removing.acted:
            return


def test_a_manifest_that_is_damaged_or_changes_at_each_attempt() -> None:
    """Commit a save before each conditional PUT, or damage the manifest: an error, and nothing is removed."""
    store = MemoryStore()
    save(store, 1.0, 2)
    written = put_orphans(store)

    class BusyStore(WrappedStore):
        def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
            if request.verb == "put":
                save(store, 2.0, 2)
            return send()

    with pytest.raises(CommitConflictError, match="nothing was removed"):
        remove_orphans(BusyStore(store), grace_seconds=0)
    store.put(MANIFEST_KEY, [store.space.objects[MANIFEST_KEY].data[:-1]])
    for act in (find_orphans, remove_orphans):
        with pytest.raises(CorruptCheckpointError):
            act(store, grace_seconds=0)
    assert written < keys(store)


def test_a_run_is_begun_meanwhile() -> None:
    """Begin a run after the catalog was looked for, where shards have no manifest: no tombstone hides the run."""
    store = MemoryStore()
    written = put_orphans(store)
    busy = MeanwhileStore(store, 4, lambda: runs.save(store, 1))
    with pytest.raises(CommitConflictError, match="A run was begun here"):
        remove_orphans(busy, grace_seconds=0)
    assert busy.acted
    assert MANIFEST_KEY not in keys(store)
    assert remove_orphans(store, grace_seconds=0) == Orphans((), (), is_run=True)
    assert written < keys(store)


def test_a_store_that_throttles_is_waited_for() -> None:
    """Answer ten conditional PUTs with 503: a pause follows each. Answer all so: the store's error is raised."""
    store = MemoryStore()
    put_orphans(store)
    pauses: list[float] = []
    busy = FaultyStore(store, [Fault(verb_is("put"), "request") for _ in range(10)])
    with full_pauses(pauses.append):
        removal = remove_orphans(busy, grace_seconds=0)
    assert len(removal.old) == 2
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    put_orphans(store)
    busy = FaultyStore(store, [Fault(verb_is("put"), "request", persistent=True)])
    with pytest.raises(TransientStorageError):
        remove_orphans(busy, grace_seconds=0, timeout_seconds=0.2)


def test_a_store_without_swaps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open a folder on a network file system: orphans are found there, and removing them is refused."""
    monkeypatch.setattr("dcp_remote.storage.local.swap_refusal", lambda path: "it is on a network file system")
    store = LocalStore(tmp_path)
    put_orphans(store)
    assert len(find_orphans(store, grace_seconds=0).old) == 2
    with pytest.raises(InvalidArgumentError, match="cannot tell orphans from a save under way"):
        remove_orphans(store, grace_seconds=0)
    assert len(keys(store)) == 2


def test_renewed_documents() -> None:
    """Renew a manifest and a tombstone: other bytes, and so another ETag, of equal length and meaning each time."""
    store = MemoryStore()
    save(store, 1.0, 2)
    for first in (store.space.objects[MANIFEST_KEY].data, manifest_json.make_tombstone("0" * 32, ("1" * 32,))):
        seen = [first]
        for digit in "abc":
            seen.append(manifest_json.reencode(seen[-1], digit * 32))
            assert manifest_json.decode_head(seen[-1]) == manifest_json.decode_head(first)
            assert repr(manifest_json.decode(seen[-1])) == repr(manifest_json.decode(first))
        assert len(set(seen)) == 4
        assert len({len(data) for data in seen[1:]}) == 1
