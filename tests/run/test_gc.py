"""Removing orphans: what is removed and what is not, beside saves, at each request of each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import RemoteWriter
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
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.format.shard import ShardNames
from dcp_remote.run.gc import Orphans, find_orphans, orphans, remove_orphans
from dcp_remote.run.lookup import read_stored
from dcp_remote.storage import LocalStore, MemoryStore, ObjectInfo, ObjectStore, Version
from dcp_remote.storage.wrapper import Request, Verb, WrappedStore
from dcp_remote.testing import FaultyStore, RecordingStore, matching
from tests.support.runs import MeanwhileStore
from tests.support.valued_states import found, named, put_orphans, save, shards_in

_Answer = TypeVar("_Answer")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")


def keys(store: ObjectStore) -> set[str]:
    return {info.key for info in store.list()}


def _info(key: str, *, modified_seconds: float) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=1, version=Version(etag="e"), modified_seconds=modified_seconds)


def test_what_is_an_orphan() -> None:
    """Named, old, young, just as old as the grace, from the future; and what no save of ours would have put."""
    named_one, old, young, edge, future = (
        _info(ShardNames(0).key(0), modified_seconds=at) for at in (0, 9, 11, 10, 99)
    )
    foreign = _info("shards/ab/model.safetensors", modified_seconds=0)
    below = _info(f"shards/ab/{ShardNames(0).key(0)}", modified_seconds=0)
    listed = [named_one, old, young, edge, future, foreign, below]
    assert orphans(listed, [named_one.key], now_seconds=20, grace_seconds=10) == Orphans(
        old=(old, edge), young=(young, future)
    )
    everything = orphans(listed, [named_one.key], now_seconds=20, grace_seconds=0)
    assert everything == Orphans(old=(old, young, edge, future), young=())
    for grace_seconds in (-1.0, float("nan")):
        with pytest.raises(InvalidArgumentError):
            orphans(listed, [], now_seconds=20, grace_seconds=grace_seconds)


def test_orphans_of_a_save_that_was_cut_off_and_of_one_that_was_replaced() -> None:
    """Beside a checkpoint that has replaced another: its shards stay, and the checkpoint loads as before."""
    store = MemoryStore()
    save(store, 1.0, 2)
    replaced = named(store)
    save(store, 2.0, 2)
    cut_off = put_orphans(store)
    store.put("shards/README", [b"somebody's"])
    assert {info.key for info in find_orphans(store, grace_seconds=0).old} == replaced | cut_off
    assert {info.key for info in remove_orphans(store, grace_seconds=0).removed} == replaced | cut_off
    assert shards_in(store) == named(store) | {"shards/README"}
    assert found(store) == 2.0
    assert find_orphans(store, grace_seconds=0) == Orphans(old=(), young=())


def test_nothing_is_written_where_nothing_is_old() -> None:
    """Orphans of now and a grace of a day: a LIST and a GET, and a save under way is left alone."""
    store = MemoryStore()
    put_orphans(store)
    for act in (find_orphans, remove_orphans):
        recording = RecordingStore(store)
        act(recording)
        assert recording.calls == [("list", "shards/"), ("get", MANIFEST_KEY)]


def test_requests() -> None:
    """1,500 orphans: one LIST here, the manifest read and put again, its time asked for, two deletes."""
    store = MemoryStore()
    save(store, 1.0, 2)
    put_orphans(store, 1500)
    recording = RecordingStore(store)
    assert len(remove_orphans(recording, grace_seconds=0).removed) == 1500
    assert [verb for verb, _ in recording.calls] == ["list", "get", "put", "head", "delete", "delete"]


class LaterStore(WrappedStore):
    """A store whose clock is ahead: it dates what it holds so many seconds later."""

    def __init__(self, store: ObjectStore, ahead_seconds: float) -> None:
        super().__init__(store)
        self._ahead_seconds = ahead_seconds

    def head(self, key: str) -> ObjectInfo:
        info = super().head(key)
        return replace(info, modified_seconds=info.modified_seconds + self._ahead_seconds)


def test_age_is_by_the_store_s_clock() -> None:
    """Orphans of now; this machine's clock is a year ahead, then the store's: only the latter removes them."""
    year_seconds = 365 * 24 * 3600.0
    store = MemoryStore()
    save(store, 1.0, 2)
    written = put_orphans(store)
    now_seconds = store.head(MANIFEST_KEY).modified_seconds
    removal = remove_orphans(store, clock=lambda: now_seconds + year_seconds)
    assert (removal.removed, {info.key for info in removal.kept}) == ((), written)
    later = LaterStore(store, year_seconds)
    assert {info.key for info in remove_orphans(later, clock=lambda: now_seconds + year_seconds).removed} == written


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("overwriting", [False, True])
def test_orphans_removed_at_each_request_of_a_save(*, overwriting: bool, after: bool) -> None:
    """The save commits what is whole, or is told that it did not; what was there before is whole then."""
    outcomes: set[type[BaseException] | None] = set()
    for number in itertools.count(1):
        store = MemoryStore()
        if overwriting:
            save(store, 1.0, 2)
        put_orphans(store)

        def clean(store: MemoryStore = store) -> None:
            remove_orphans(store, grace_seconds=0)

        saving = MeanwhileStore(store, number, clean, after=after)
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


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_save_at_each_request_of_a_removal(*, begun: bool, after: bool) -> None:
    """Either the save is committed and whole, or it is told that it is not; a removal never tears a checkpoint.

    The other save does all its work at that moment; or it began before the removal, and only commits then.
    """
    for number in itertools.count(1):
        store = MemoryStore()
        save(store, 1.0, 2)
        put_orphans(store)
        committed: list[float] = []

        def commit(store: MemoryStore = store, committed: list[float] = committed) -> None:
            save(store, 2.0, 2)
            committed.append(2.0)

        removing = MeanwhileStore(store, number, commit, after=after)

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


def test_a_place_that_changes_again_and_again() -> None:
    """A save is committed before each conditional put: nothing is removed."""
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
    assert written < keys(store)


class KeepingStore(WrappedStore):
    """Deletes what it is told, but for the keys that it may not."""

    def __init__(self, store: ObjectStore, kept: set[str]) -> None:
        super().__init__(store)
        self._kept = kept

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        failed = dict(super().delete([key for key in keys if key not in self._kept]))
        return failed | {key: PermissionDeniedError("Kept.", key=key) for key in keys if key in self._kept}


def test_what_cannot_be_deleted_is_reported() -> None:
    """One of two orphans is under a lock: it is returned with its reason, and the other is gone."""
    store = MemoryStore()
    save(store, 1.0, 2)
    kept, other = sorted(put_orphans(store))
    removal = remove_orphans(KeepingStore(store, {kept}), grace_seconds=0)
    assert isinstance(removal.failed[kept], PermissionDeniedError)
    assert [info.key for info in removal.removed] == [other]
    assert shards_in(store) == named(store) | {kept}


def test_a_job_that_may_not_delete() -> None:
    """The whole request is denied: raised, and every orphan is still there."""
    store = MemoryStore()
    written = put_orphans(store)
    denied = matching(
        lambda verb, key, number: verb == "delete",
        "request",
        persistent=True,
        error=lambda: PermissionDeniedError("This may not be deleted."),
    )
    with pytest.raises(PermissionDeniedError):
        remove_orphans(FaultyStore(store, [denied]), grace_seconds=0)
    assert written < keys(store)


def test_a_store_that_throttles_is_waited_for() -> None:
    """Ten conditional puts are answered 503, with a pause after each; if it never ends, the store's error is told."""
    store = MemoryStore()
    put_orphans(store)

    def throttled(verb: Verb, key: str, number: int) -> bool:
        return verb == "put"

    pauses: list[float] = []
    busy = FaultyStore(store, [matching(throttled, "request") for _ in range(10)])
    removal = remove_orphans(busy, grace_seconds=0, sleep=pauses.append, uniform=lambda _, most: most)
    assert len(removal.removed) == 2
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]
    put_orphans(store)
    busy = FaultyStore(store, [matching(throttled, "request", persistent=True)])
    with pytest.raises(TransientStorageError):
        remove_orphans(busy, grace_seconds=0, timeout_seconds=0.2)


def test_a_damaged_manifest_stops_everything() -> None:
    """What it named cannot be known, so that all shards might be its."""
    store = MemoryStore()
    save(store, 1.0, 2)
    before = keys(store)
    store.put(MANIFEST_KEY, [store.space.objects[MANIFEST_KEY].data[:-1]])
    for act in (find_orphans, remove_orphans):
        with pytest.raises(CorruptCheckpointError):
            act(store, grace_seconds=0)
    assert keys(store) == before


def test_a_store_without_swaps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on a network file system: orphans can be shown there, and not be removed."""
    monkeypatch.setattr("dcp_remote.storage.local.swap_refusal", lambda path: "it is on a network file system")
    store = LocalStore(tmp_path)
    put_orphans(store)
    assert len(find_orphans(store, grace_seconds=0).old) == 2
    with pytest.raises(InvalidArgumentError, match="cannot tell orphans from a save under way"):
        remove_orphans(store, grace_seconds=0)
    assert len(keys(store)) == 2


def test_the_document_stays_the_same() -> None:
    """Put again three times, of a checkpoint and of a tombstone: other bytes each time, equal length, equal meaning."""
    store = MemoryStore()
    dcp.save({"a": torch.ones(2), "n": 1}, storage_writer=RemoteWriter(store), no_dist=True)
    stored = read_stored(store)
    assert stored is not None
    for data in (stored.data, manifest_json.tombstone("0" * 32, ("1" * 32,))):
        seen = [data]
        for digit in "abc":
            seen.append(manifest_json.renewed(seen[-1], digit * 32))
            assert manifest_json.decode_head(seen[-1]) == manifest_json.decode_head(data)
            assert repr(manifest_json.decode(seen[-1])) == repr(manifest_json.decode(data))
        assert len(set(seen)) == 4
        assert len({len(one) for one in seen[1:]}) == 1
