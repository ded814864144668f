"""Tests of copies of runs: labels, sharing, interruptions, damage, fences, and what each costs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event, Lock
from typing import Any, TypeVar

import pytest
import torch

from dcp_remote import CheckpointManager, RemoteWriter, load
from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FencedError,
    InvalidArgumentError,
    ObjectNotFoundError,
    PermissionDeniedError,
)
from dcp_remote.format.catalog import CATALOG_KEY, BeginAgainError, Entry, mark_entries
from dcp_remote.run.catalog_store import swap
from dcp_remote.run.copying import copy_checkpoints
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.gc import remove_orphans
from dcp_remote.run.labels import set_pin
from dcp_remote.run.verification import verify
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.storage.base import Condition, Version
from dcp_remote.storage.wrapper import Request, WrappedStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore, nth
from tests.support.runs import MeanwhileStore, copied, fence, live, manifest_at, named, steps, thin
from tests.support.simulated_ranks import save_as_ranks

_Answer = TypeVar("_Answer")

FROZEN = torch.arange(300_000, dtype=torch.float32)  # a shard with a block table, of which no other entry has a part


def state(step: int) -> dict[str, Any]:
    """Return the state of a step: `frozen` is that of all steps."""
    return {
        "model": {"frozen": FROZEN, "w": torch.full((3, 5), float(step))},
        "optim": {"m": torch.full((300_000,), float(step)), "lr": 0.5},
        "step": step,
    }


def save(store: ObjectStore, *numbers: int, **options: Any) -> None:
    """Save steps by a job of their own, which goes on from the newest checkpoint, or from `resumed_from`."""
    with CheckpointManager(store, progress=False, **options) as manager:
        for number in numbers:
            manager.save(number, state(number), wait=True, metrics={"loss": 1 / number})


@pytest.fixture(scope="module")
def saved() -> MemoryStore:
    """Save steps 10, 20 and 30: the first is pinned and thinned, the second has a name."""
    store = MemoryStore()
    save(store, 10, 20, 30)
    with CheckpointManager(store, progress=False) as manager:
        manager.run.name(20, "best")
        manager.run.pin(10)
    set_pin(store, 10, pin=False, deadline=Deadline(30))
    thin(Deletions(store), [10], deadline=Deadline(30))
    set_pin(store, 10, pin=True, deadline=Deadline(30))
    return store


@pytest.fixture
def source(saved: MemoryStore) -> MemoryStore:
    """Return the run of `saved`, which the test may change."""
    return copied(saved)


def assert_whole(store: MemoryStore) -> None:
    """Load every live checkpoint, which verifies all that it names."""
    for entry in live(store):
        loaded = load(store, step=entry.step)
        assert bool((loaded["model"]["frozen"] == FROZEN).all())
        assert bool((loaded["model"]["w"] == entry.step).all())
        assert ("optim" in loaded) == (not entry.thinned)


def labels(store: MemoryStore) -> list[tuple[object, ...]]:
    """Return what catalogs tell of checkpoints, but for the place in the run."""
    return [
        (e.step, e.save_id, e.size_bytes, e.created, e.names, e.metrics, e.pinned, e.thinned, e.abandoned)
        for e in live(store)
    ]


def assert_copied(source: MemoryStore, destination: MemoryStore, *, tidy: bool = True) -> None:
    assert labels(destination) == labels(source)
    assert_whole(destination)
    if tidy:
        assert set(destination.space.objects) == {CATALOG_KEY, *named(destination)}


def distinct_shards(store: MemoryStore) -> set[str]:
    return {key for entry in live(store) for key in manifest_at(store, entry.step).shards.keys}


def shard_keys(recording: RecordingStore, verb: str) -> list[str]:
    return [key for called, key in recording.calls if called == verb and key.startswith("shards/")]


def crash() -> PermissionDeniedError:
    """Return the error of a request, which is not repeated."""
    return PermissionDeniedError("An injected end.")


# ---- a run


def test_a_run(source: MemoryStore) -> None:
    """Copy a run: the same checkpoints with their labels, each shared shard once, and a later call copies nothing."""
    reading, writing = RecordingStore(source), RecordingStore(MemoryStore())
    destination = writing._store
    assert isinstance(destination, MemoryStore)
    report = copy_checkpoints(reading, writing)
    assert_copied(source, destination)
    distinct = distinct_shards(source)
    sizes = sum(len(source.space.objects[key].data) for key in distinct)
    assert (report.shards, report.bytes_copied) == (len(distinct), sizes)
    assert report.bytes_copied + report.bytes_there == sum(entry.size_bytes for entry in live(source))
    assert sorted(shard_keys(reading, "get_into")) == sorted(distinct)
    assert len(shard_keys(writing, "put")) == len(distinct)
    writing.clear()
    before = dict(destination.space.objects)
    again = copy_checkpoints(source, writing)
    assert (again.present, again.copied, again.shards) == ([10, 20, 30], [], 0)
    assert writing.calls == [("get", CATALOG_KEY)]
    assert destination.space.objects == before


def test_a_training_goes_on_from_the_copy(source: MemoryStore) -> None:
    """Restore and save at the destination: the checkpoint reuses shards; nothing more is copied there."""
    destination = MemoryStore()
    copy_checkpoints(source, destination)
    with CheckpointManager(destination, progress=False) as manager:
        restored = state(0)
        assert manager.restore(restored) == 30
        manager.save(40, state(40), wait=True)
    assert steps(destination) == [10, 20, 30, 40]
    assert_whole(destination)
    assert set(manifest_at(destination, 40).shards.keys) & set(manifest_at(destination, 30).shards.keys)
    save(source, 50, resumed_from=30)
    before = dict(destination.space.objects)
    with pytest.raises(InvalidArgumentError, match="a job has saved there"):
        copy_checkpoints(source, destination)
    assert destination.space.objects == before


def test_what_was_saved_since(source: MemoryStore) -> None:
    """Copy again after a save: one checkpoint, without the shard that it shares with one of the first copy."""
    destination = MemoryStore()
    copy_checkpoints(source, destination)
    save(source, 40, resumed_from=30)
    report = copy_checkpoints(source, destination)
    assert [entry.step for entry in report.copied] == [40]
    assert 0 < report.bytes_there < sum(manifest_at(source, 40).shards.sizes)
    assert report.shards == len(manifest_at(source, 40).shards.keys) - 1
    assert_copied(source, destination)


def test_some_checkpoints(source: MemoryStore) -> None:
    """Copy one by its name, then those since a step, then all: in any order, with all shards shared in the end."""
    destination = MemoryStore()
    assert [entry.step for entry in copy_checkpoints(source, destination, step="best").copied] == [20]
    assert copy_checkpoints(source, destination, since=20).present == [20]
    assert steps(destination) == [20, 30]
    copy_checkpoints(source, destination)
    assert_copied(source, destination)
    assert copy_checkpoints(source, MemoryStore(), since=31).checkpoints == 0
    with pytest.raises(CheckpointNotFoundError, match="this step"):
        copy_checkpoints(source, destination, step=11)


def test_a_source_that_goes_back(source: MemoryStore) -> None:
    """Go back to 10, save 15 and 20, delete the abandoned 30: the copy has the same newest checkpoint, and no other."""
    destination = MemoryStore()
    copy_checkpoints(source, destination)
    save(source, 15, resumed_from=10)
    report = copy_checkpoints(source, destination)
    assert report.abandoned == [20, 30]
    assert_copied(source, destination)
    with CheckpointManager(source, progress=False) as manager:
        manager.run.delete(30)
    with CheckpointManager(source, progress=False) as manager:
        manager.restore(state(0))
        manager.save(20, state(20), wait=True, name="best")
    report = copy_checkpoints(source, destination)
    assert ([entry.step for entry in report.copied], report.abandoned) == ([20], [])
    assert [(entry.step, entry.abandoned) for entry in live(destination)] == [
        (10, False),
        (15, False),
        (20, False),
        (30, True),
    ]
    assert_whole(destination)


def test_a_deleted_newest_checkpoint(source: MemoryStore) -> None:
    """Delete the newest checkpoint of the source: that of the copy is marked, so that it is not newest there either."""
    destination = MemoryStore()
    copy_checkpoints(source, destination)
    with CheckpointManager(source, progress=False) as manager:
        manager.run.delete(30, force=True)
    assert copy_checkpoints(source, destination, step=20).abandoned == []
    assert copy_checkpoints(source, destination).abandoned == [30]


def test_a_source_that_is_an_older_copy(source: MemoryStore) -> None:
    """Copy from a copy that has a part of the run: no mark. One that was set is taken away by a copy of the run."""
    older, destination = MemoryStore(), MemoryStore()
    copy_checkpoints(source, older, step=20)
    copy_checkpoints(source, destination)
    assert copy_checkpoints(older, destination).abandoned == []
    assert_copied(source, destination)
    save_ids = {entry.save_id: True for entry in live(destination)}
    swap(destination, lambda now: mark_entries(now, save_ids), deadline=Deadline(30))
    assert copy_checkpoints(older, destination).unmarked == []
    assert copy_checkpoints(source, destination).unmarked == [10, 20, 30]
    assert_copied(source, destination)


def test_marks_beside_a_checkpoint_that_is_not_replaced(source: MemoryStore) -> None:
    """Go back to 10 and save 20 anew, which is pinned in the copy: it stays, and 30 is not its newest any more."""
    destination = MemoryStore()
    copy_checkpoints(source, destination)
    set_pin(destination, 20, pin=True, deadline=Deadline(30))
    with CheckpointManager(source, progress=False, resumed_from=10) as manager:
        manager.save(20, state(20), wait=True, name="best")
    with pytest.raises(CheckpointExistsError, match="pinned"):
        copy_checkpoints(source, destination)
    assert [(entry.step, entry.abandoned) for entry in live(destination)] == [(10, False), (20, False), (30, True)]


def test_a_pinned_checkpoint_is_not_replaced(source: MemoryStore) -> None:
    """Pin a checkpoint at the destination, of whose step the source has another save: refused."""
    destination = MemoryStore()
    copy_checkpoints(source, destination)
    set_pin(destination, 30, pin=True, deadline=Deadline(30))
    save(source, 30, resumed_from=20)
    before = dict(destination.space.objects)
    with pytest.raises(CheckpointExistsError, match="pinned"):
        copy_checkpoints(source, destination)
    assert destination.space.objects == before


def test_other_destinations(source: MemoryStore) -> None:
    """Copy to the source itself, to another run, to a checkpoint by itself: nothing is changed."""
    other, alone = MemoryStore(), MemoryStore()
    save(other, 5)
    save_as_ranks([state(1)], lambda: RemoteWriter(alone))
    for destination, error in (
        (source, InvalidArgumentError),
        (other, InvalidArgumentError),
        (alone, CheckpointExistsError),
    ):
        before = dict(destination.space.objects)
        with pytest.raises(error):
            copy_checkpoints(source, destination)
        assert destination.space.objects == before


# ---- interruptions


@pytest.mark.parametrize("lost", ["request", "response"])
@pytest.mark.parametrize("is_source", [False, True], ids=["destination", "source"])
def test_ended_at_each_request(source: MemoryStore, lost: Any, *, is_source: bool) -> None:
    """End the copy at its first request to a store, at its second, and so on; another copy finishes each time."""
    for number in itertools.count(1):
        destination = MemoryStore()
        faulty = FaultyStore(source if is_source else destination, [nth(number, lost, error=crash, persistent=True)])
        try:
            copy_checkpoints(faulty if is_source else source, destination if is_source else faulty)
        except PermissionDeniedError:
            assert faulty.hits
        if CATALOG_KEY in destination.space.objects:
            assert_whole(destination)
        copy_checkpoints(source, destination)
        assert_copied(source, destination, tidy=False)
        if not faulty.hits:
            break
    assert number > 8


def _is_manifest(verb: str, key: str, number: int) -> bool:
    return verb == "put" and key.startswith("manifests/")


def _is_catalog(verb: str, key: str, number: int) -> bool:
    return verb == "put" and key == CATALOG_KEY


def interrupted(source: MemoryStore) -> MemoryStore:
    """Return the destination of a copy that ended before its first commit, with all shards of the checkpoint."""
    destination = MemoryStore()
    end = Fault(_is_manifest, "request", error=crash)
    with pytest.raises(PermissionDeniedError):
        copy_checkpoints(source, FaultyStore(destination, [end]))
    assert live(destination) == ()
    return destination


class FailingOnce(WrappedStore):
    """Store that refuses one shard once another one is on its way, which takes a while."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.is_slow_begun, self.is_slow_ended, self._lock = Event(), Event(), Lock()

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        if not key.startswith("shards/"):
            return super().put(key, buffers, condition=condition)
        if self._lock.acquire(blocking=False):
            self.is_slow_begun.wait(30)
            raise crash()
        self.is_slow_begun.set()
        time.sleep(0.2)  # time for an error that comes too early to end the copy
        self.is_slow_ended.set()
        return super().put(key, buffers, condition=condition)


def test_no_shard_is_on_its_way_after_an_error(source: MemoryStore) -> None:
    """Refuse a shard while another one is put: the error is raised once both have ended."""
    failing = FailingOnce(MemoryStore())
    with pytest.raises(PermissionDeniedError):
        copy_checkpoints(source, failing, step=20)
    assert failing.is_slow_ended.is_set()


def test_goes_on_with_shards_that_are_there(source: MemoryStore) -> None:
    """Interrupt a copy: what was put is neither read nor put again."""
    destination = interrupted(source)
    of_first = manifest_at(source, 10).shards
    assert len(destination.space.objects) == 1 + len(of_first.keys)
    reading = RecordingStore(source)
    report = copy_checkpoints(reading, destination)
    assert set(shard_keys(reading, "get_into")) == distinct_shards(source) - set(of_first.keys)
    assert report.shards == len(distinct_shards(source)) - len(of_first.keys)
    assert_copied(source, destination)


def cut(store: MemoryStore, key: str) -> None:
    """Drop the last byte of an object without the store."""
    found = store.space.objects[key]
    store.space.objects[key] = replace(found, data=found.data[:-1])


def test_a_shard_of_an_interrupted_copy_is_cut(source: MemoryStore) -> None:
    """Cut a shard that an interrupted copy has put: the error names it, and no checkpoint does; gc removes it."""
    destination = interrupted(source)
    key = next(key for key in destination.space.objects if key.startswith("shards/"))
    cut(destination, key)
    with pytest.raises(CorruptCheckpointError, match="another length") as caught:
        copy_checkpoints(source, destination, step=10)
    assert caught.value.details["key"] == key
    assert live(destination) == ()
    assert copy_checkpoints(source, copied(destination)).damaged == [10]
    remove_orphans(destination, grace_seconds=0)
    copy_checkpoints(source, destination)
    assert_copied(source, destination)


@pytest.mark.parametrize("damage", [cut, lambda store, key: store.delete([key])], ids=["cut", "missing"])
def test_a_shared_shard_of_the_copy_is_damaged(source: MemoryStore, damage: Callable[..., None]) -> None:
    """Damage the shard of the frozen tensor in a copy of step 10: the next copy finds that out, and puts it again."""
    destination = MemoryStore()
    copy_checkpoints(source, destination, step=10)
    (key,) = manifest_at(destination, 10).shards.keys
    for is_damaged in (False, True):
        store = copied(destination)
        if is_damaged:
            damage(store, key)
        recording = RecordingStore(store)
        report = copy_checkpoints(source, recording)
        assert shard_keys(recording, "head").count(key) == 1
        assert (report.present, report.shards) == ([10], len(distinct_shards(source)) - 1 + is_damaged)
        assert [key in manifest_at(store, step).shards.keys for step in (20, 30)] == [not is_damaged] * 2
        assert [one.steps for one in verify(store, depth="quick").damage] == [(10,)] * is_damaged


def test_a_step_that_is_saved_anew_after_an_interruption() -> None:
    """Interrupt a copy, and save its step anew with the same shard: what was put for the first save is not trusted."""
    source = MemoryStore()
    save(source, 10)
    destination = interrupted(source)
    before = set(manifest_at(source, 10).shards.keys)
    with CheckpointManager(source, progress=False, resumed_from=10) as manager:
        manager.save(10, state(10), wait=True, overwrite=True)
    assert before & set(manifest_at(source, 10).shards.keys)
    assert copy_checkpoints(source, destination).bytes_there == 0
    assert_copied(source, destination, tidy=False)


def test_gc_between_two_copies(source: MemoryStore) -> None:
    """Remove the shards of an interrupted copy: the next copy puts all of them, by other names."""
    destination = interrupted(source)
    remove_orphans(destination, grace_seconds=0)
    report = copy_checkpoints(source, destination)
    assert report.shards == len(distinct_shards(source))
    assert_copied(source, destination)


def test_gc_while_shards_are_reused(source: MemoryStore) -> None:
    """Remove the shards after a copy has found them, at each of its requests: nothing is committed without them."""
    refused = 0
    for number in itertools.count(1):
        destination = interrupted(source)
        meanwhile = MeanwhileStore(destination, number, partial(remove_orphans, destination, grace_seconds=0))
        try:
            copy_checkpoints(source, meanwhile)
        except BeginAgainError:
            refused += 1
        assert_whole(destination)
        copy_checkpoints(source, destination)
        assert_copied(source, destination, tidy=False)
        if not meanwhile.acted:
            break
    assert refused > 3


def test_a_checkpoint_of_the_copy_is_deleted_meanwhile(source: MemoryStore) -> None:
    """Delete all of the copy in between two requests of another: nothing is committed that shares shards with it."""
    first, refused = MemoryStore(), 0
    copy_checkpoints(source, first)
    save(source, 40, resumed_from=30)
    for number in itertools.count(1):
        destination = copied(first)

        def delete(destination: MemoryStore = destination) -> None:
            deletions = Deletions(destination)
            deletions.retire([10, 20, 30], deadline=Deadline(30), force=True)
            deletions.queue.delete(deadline=Deadline(30), pause_seconds=0)

        meanwhile = MeanwhileStore(destination, number, delete)
        try:
            copy_checkpoints(source, meanwhile)
        except BeginAgainError as error:
            refused += "Run the same copy again" in error.message
        assert_whole(destination)
        if not meanwhile.acted:
            break
    assert refused > 2


class PutOnce(WrappedStore):
    """Store that notes the keys of shards that were put."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.shards: list[str] = []

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        version = super().put(key, buffers, condition=condition)
        self.shards += [key] if key.startswith("shards/") else []
        return version


def test_two_copies_at_once(source: MemoryStore) -> None:
    """Save another checkpoint and copy all in between two requests of a copy: both succeed, and it stays newest.

    No key is written twice.
    """
    for number in itertools.count(1):
        training, destination = copied(source), MemoryStore()
        once = PutOnce(destination)

        def copy_more(training: MemoryStore = training, once: PutOnce = once) -> None:
            save(training, 40, resumed_from=30)
            copy_checkpoints(training, once)

        meanwhile = MeanwhileStore(once, number, copy_more)
        copy_checkpoints(training, meanwhile)
        assert_copied(training if meanwhile.acted else source, destination, tidy=False)
        assert len(once.shards) == len(set(once.shards))
        if not meanwhile.acted:
            break


@pytest.mark.parametrize("faults", [[], [Fault(_is_catalog, "response", persistent=True)]], ids=["", "lost answers"])
def test_a_job_fences_the_destination_meanwhile(source: MemoryStore, faults: list[Fault]) -> None:
    """Take the fence in between two requests of a copy: no more is committed than was then, and the error says so."""
    refused: list[str] = []
    for number in itertools.count(1):
        destination = MemoryStore()
        at_fence: list[tuple[Entry, ...]] = []

        def take(destination: MemoryStore = destination, at_fence: list[Any] = at_fence) -> None:
            fence(destination)
            at_fence.append(live(destination))

        meanwhile = MeanwhileStore(FaultyStore(destination, faults), number, take)
        try:
            copy_checkpoints(source, meanwhile)
        except (FencedError, InvalidArgumentError) as error:
            refused.append(str(error))
        if not meanwhile.acted:
            break
        assert live(destination) == at_fence[0]
    assert len(refused) > 10
    assert not [text for text in refused if "stop this" in text]  # as jobs are told


def test_a_checkpoint_that_is_pinned_meanwhile(source: MemoryStore) -> None:
    """Pin a checkpoint of the copy in between two requests of a copy that is to replace it: it stays."""
    before = MemoryStore()
    copy_checkpoints(source, before)
    with CheckpointManager(source, progress=False, resumed_from=20) as manager:
        manager.save(30, state(30), wait=True, overwrite=True)
    for number in itertools.count(1):
        destination = copied(before)
        pinned: list[str] = []

        def pin(destination: MemoryStore = destination, pinned: list[str] = pinned) -> None:
            set_pin(destination, 30, pin=True, deadline=Deadline(30))
            pinned.extend(entry.save_id for entry in live(destination) if entry.pinned)

        meanwhile = MeanwhileStore(destination, number, pin)
        with suppress(CheckpointExistsError):
            copy_checkpoints(source, meanwhile)
        if not meanwhile.acted:
            break
        assert {*pinned} <= {entry.save_id for entry in live(destination)}
    assert number > 5


# ---- the source


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:-1], None],
    ids=["a bit", "a byte less", "missing"],
)
def test_damage_is_refused(source: MemoryStore, damage: Callable[[bytes], bytes] | None) -> None:
    """Damage the shard of the frozen tensor: the error names shard and step, and nothing is committed."""
    manifest = manifest_at(source, 10)
    key = next(key for key in manifest.shards.keys if len(source.space.objects[key].data) > FROZEN.nbytes)
    whole = source.space.objects[key].data
    source.delete([key])
    if damage is not None:
        source.put(key, [damage(whole)])
    destination = MemoryStore()
    with pytest.raises(CorruptCheckpointError, match="dcp-remote verify") as caught:
        copy_checkpoints(source, destination, step=10)
    assert copy_checkpoints(source, MemoryStore()).damaged == [10, 20, 30]  # all share it
    assert (caught.value.details["step"], caught.value.details["shard"]) == (10, key)
    assert live(destination) == ()
    source.put(key, [whole])
    copy_checkpoints(source, destination)
    assert_copied(source, destination)


def test_every_byte_but_the_header_is_verified(source: MemoryStore) -> None:
    """Change a byte in the table, or in any piece of a shard: refused."""
    shards = manifest_at(source, 20).shards
    for number, key in enumerate(shards.keys):
        whole = source.space.objects[key].data
        start = int(shards.data_starts[number] - shards.table_lengths[number])
        for place in {start, (start + len(whole)) // 2, len(whole) - 1}:
            source.put(key, [whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :]])
            with pytest.raises(CorruptCheckpointError, match="damaged"):
                copy_checkpoints(source, MemoryStore(), step=20)
        source.put(key, [whole])


def test_other_pieces_of_a_shard_that_was_copied_are_verified() -> None:
    """Copy a checkpoint that reuses a part of a shard, then one that names all of it, of which the rest is damaged."""
    source, destination = MemoryStore(), MemoryStore()
    a, b = torch.arange(60_000), torch.arange(60_000) + 7
    with CheckpointManager(source, progress=False) as manager:
        manager.save(10, {"a": a, "b": b}, wait=True)
        manager.save(20, {"a": a, "b": b + 1}, wait=True)
    (key,) = set(manifest_at(source, 10).shards.keys) & set(manifest_at(source, 20).shards.keys)
    whole = source.space.objects[key].data
    place = whole.index(b.numpy().tobytes())
    copy_checkpoints(source, destination, step=20)
    source.put(key, [whole[:place] + b"x" + whole[place + 1 :]])
    assert copy_checkpoints(source, destination).damaged == [10]
    source.put(key, [whole])
    assert [entry.step for entry in copy_checkpoints(source, destination).copied] == [10]
    assert bool((load(destination, step=10)["b"] == b).all())


class Denying(WrappedStore):
    """Store that refuses manifests and shards that are missing, as S3 does without a grant to list."""

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        try:
            return send()
        except ObjectNotFoundError as error:
            if request.key.startswith(("manifests/", "shards/")):
                raise PermissionDeniedError("The store refused.", key=request.key) from error
            raise


@pytest.mark.parametrize("wrap", [WrappedStore, Denying], ids=["missing", "refused"])
def test_a_checkpoint_that_is_deleted_meanwhile(wrap: type[WrappedStore], source: MemoryStore) -> None:
    """Delete a checkpoint of the source in between two requests: it is left out, and the others are copied."""
    gone = 0
    for number in itertools.count(1):
        store, destination = copied(source), MemoryStore()

        def delete(store: MemoryStore = store) -> None:
            with CheckpointManager(store, progress=False) as manager:
                manager.run.delete(20)

        meanwhile = MeanwhileStore(store, number, delete)
        report = copy_checkpoints(wrap(meanwhile), destination)
        gone += report.gone == [20]
        assert_whole(destination)
        assert {10, 30} <= set(steps(destination))
        if not meanwhile.acted:
            break
    assert gone > 1
