"""Retiring, thinning and deletion: which objects go, which stay, and other jobs' acts at each request."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.format.catalog import CATALOG_KEY, Catalog, pin_entry
from dcp_remote.run.catalog_store import swap
from dcp_remote.run.deletions import Applied, Deletions
from dcp_remote.run.gc import remove_orphans
from dcp_remote.run.live_shards import LiveShards
from dcp_remote.run.retention import Retention
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.storage.deletion_queue import Deleted
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore
from tests.support.catalogs import stored
from tests.support.clocks import SleepClock
from tests.support.faults import denied, verb_is
from tests.support.runs import (
    FROZEN,
    OPTIMIZER,
    TRAINED,
    MeanwhileStore,
    a_run,
    assert_sound,
    assert_tidy,
    copied,
    keys,
    live,
    manifest_at,
    named,
    save,
    shard_at,
    steps,
    thin,
)

PATIENCE_SECONDS = 30.0


def deadline(seconds: float = PATIENCE_SECONDS) -> Deadline:
    return Deadline(seconds)


def applied_by(maintenance: Deletions, seconds: float = PATIENCE_SECONDS, **rules: Any) -> Applied:
    """Apply a retention of these rules."""
    return maintenance.apply(Retention(**rules), deadline=deadline(seconds))


def delete(maintenance: Deletions, **options: Any) -> Deleted:
    return maintenance.queue.delete(**{"deadline": deadline()} | options)


def retire(maintenance: Deletions, *steps: int, force: bool = False) -> tuple[int, ...]:
    return maintenance.retire(steps, deadline=deadline(), force=force).retired


def pin(store: ObjectStore, step: int) -> Catalog:
    return swap(store, partial(pin_entry, step=step, pin=True), deadline=deadline())


def apply(store: ObjectStore, retention: Retention) -> Applied:
    """Apply a retention, and delete the objects that it lets go."""
    maintenance = Deletions(store)
    applied = maintenance.apply(retention, deadline=deadline())
    assert delete(maintenance, pause_seconds=0).failed == {}
    assert len(maintenance.queue) == 0
    return applied


def damage(store: MemoryStore, step: int) -> str:
    """Damage the manifest of a checkpoint; return its key."""
    (entry,) = (entry for entry in live(store) if entry.step == step)
    store.put(entry.manifest, [store.space.objects[entry.manifest].data[:-1]])
    return entry.manifest


def verbs(recording: RecordingStore) -> list[str]:
    """Return the verbs of the requests, with "catalog" for those of the catalog."""
    return [f"{verb} catalog" if key == CATALOG_KEY else verb for verb, key in recording.calls]


# ---- retention


def test_what_retention_lets_go_is_deleted() -> None:
    """Retire three checkpoints of five and thin one: their objects go, but for a shard that all share."""
    store = a_run(1, 2, 3, 4, 5)
    frozen, optimizer = shard_at(store, 1, FROZEN), shard_at(store, 4, OPTIMIZER)
    before = stored(store)
    applied = apply(store, Retention(keep_last=2, keep_optimizer_last=1))
    assert (applied.retired, applied.thinned, applied.reason) == ((1, 2, 3), (4,), None)
    after = stored(store)
    assert before is not None
    assert after is not None
    assert (after.revision, after.floor) == (before.revision + 1, before.entries[2].began_revision + 1)
    assert steps(store) == [4, 5]
    assert_tidy(store)
    assert frozen in keys(store)
    assert optimizer not in keys(store)
    assert [entry.thinned for entry in live(store)] == [("optim",), ()]


def test_what_is_reused_stays() -> None:
    """Reuse an optimizer's shard: it stays when its own checkpoint is thinned, and when that is retired."""
    store = a_run(1)
    save(store, 2, base=1, borrows=(FROZEN, OPTIMIZER))
    optimizer = shard_at(store, 1, OPTIMIZER)
    thin(Deletions(store), [1], deadline=deadline())
    apply(store, Retention(keep_last=1))
    assert_sound(store)
    assert shard_at(store, 2, OPTIMIZER) == optimizer
    assert optimizer in keys(store)


def test_nothing_goes_twice() -> None:
    """Apply a retention again: no write, and one read of the catalog, or none if the caller passes it."""
    retention = Retention(keep_last=2, keep_optimizer_last=1)
    store = a_run(1, 2, 3)
    apply(store, retention)
    recording = RecordingStore(store)
    maintenance = Deletions(recording)
    applied = maintenance.apply(retention, deadline=deadline())
    assert (applied.retired, applied.thinned) == ((), ())
    assert verbs(recording) == ["get catalog"]
    recording.clear()
    assert maintenance.apply(retention, deadline=deadline(), catalog=stored(store)) == applied
    assert recording.calls == []


def test_requests() -> None:
    """Apply a retention: manifests that this process wrote or read are not read, and all objects go in one DELETE."""
    store = a_run(1, 2, 3)
    recording = RecordingStore(store)
    maintenance = Deletions(recording)
    for entry in live(store)[1:]:
        maintenance.named.remember(entry.manifest, manifest_at(store, entry.step).shards.keys)
    maintenance.apply(Retention(keep_last=2), deadline=deadline(), catalog=stored(store))
    assert verbs(recording) == ["get", "get catalog", "put catalog"]
    recording.clear()
    assert len(maintenance.queue) == 3
    delete(maintenance)
    assert verbs(recording) == ["delete"]
    save(store, 4)
    recording.clear()
    applied_by(maintenance, keep_last=2)
    assert verbs(recording) == ["get catalog", "get", "get catalog", "put catalog"]
    recording.clear()
    applied_by(maintenance, keep_last=2, keep_optimizer_last=1)
    assert verbs(recording) == ["get catalog", "get", "put", "get catalog", "put catalog"]


def test_what_has_no_optimizer_is_left_alone() -> None:
    """Thin a checkpoint without these keys: not marked as thinned, and no manifest is read again."""
    store = a_run(1, 2)
    recording = RecordingStore(store)
    maintenance = Deletions(recording)
    retention = Retention(keep_optimizer_last=1, optimizer_keys=("momentum",))
    before = stored(store)
    for expected in (["get catalog", "get", "get"], ["get catalog"]):
        recording.clear()
        applied = maintenance.apply(retention, deadline=deadline())
        assert (applied.thinned, applied.reason) == ((), None)
        assert verbs(recording) == expected
    assert stored(store) == before
    assert applied_by(maintenance, keep_optimizer_last=1).thinned == (1,)


def test_many_are_thinned_in_turn() -> None:
    """Thin many checkpoints: sixteen at once."""
    store = a_run(*range(20))
    maintenance = Deletions(store)
    retention = Retention(keep_optimizer_last=1)
    assert len(maintenance.apply(retention, deadline=deadline()).thinned) == 16
    assert len(maintenance.apply(retention, deadline=deadline()).thinned) == 3
    assert maintenance.apply(retention, deadline=deadline()).thinned == ()
    delete(maintenance)
    assert_tidy(store)


def test_named_ones_stay_until_their_name_moves() -> None:
    """Name checkpoints: kept whole until their name moves, or `rm`, or `keep_named=False`."""
    store = a_run(1)
    save(store, 2, names=("best",))
    save(store, 3)
    keep = Retention(keep_last=1, keep_optimizer_last=1)
    assert apply(store, keep).retired == (1,)
    assert [(entry.step, entry.thinned) for entry in live(store)] == [(2, ()), (3, ())]
    save(store, 4, names=("best", "last"))
    assert apply(store, keep).retired == (2, 3)
    save(store, 5)
    assert apply(copied(store), replace(keep, keep_named=False)).retired == (4,)
    assert retire(Deletions(store), 4) == (4,)


# ---- retiring and thinning by step


def test_some_go_by_name() -> None:
    """Retire the first and the last of three, the last by `force`: objects that only they name go."""
    store = a_run(1, 2, 3)
    maintenance = Deletions(store)
    with pytest.raises(InvalidArgumentError, match="newest"):
        retire(maintenance, 1, 3)
    assert steps(store) == [1, 2, 3]
    assert retire(maintenance, 1, 3, force=True) == (1, 3)
    delete(maintenance)
    assert steps(store) == [2]
    assert_tidy(store)


def test_what_a_person_may_not_retire() -> None:
    """Retire a step that is not live beside a live one, or a pinned one: refused, and nothing is changed."""
    store = a_run(1, 2, 3)
    pin(store, 1)
    before = dict(store.space.objects)
    with pytest.raises(CheckpointNotFoundError, match="step=7"):
        retire(Deletions(store), 2, 7)
    with pytest.raises(InvalidArgumentError, match="pinned"):
        retire(Deletions(store), 1, 2)
    assert store.space.objects == before
    with pytest.raises(CheckpointNotFoundError, match="no run here"):
        Deletions(MemoryStore()).retire([1], deadline=deadline())


# ---- unreadable manifests


def test_who_has_lost_one_checkpoint_needs_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """Damage a live manifest: retention retires nothing, and logs once; when that checkpoint is gone, it goes on."""
    store = a_run(1, 2, 3, 4)
    manifest = damage(store, 4)
    before = dict(store.space.objects)
    maintenance = Deletions(store)
    for retention in (Retention(keep_last=1), Retention(keep_optimizer_last=2)):
        applied = maintenance.apply(retention, deadline=deadline())
        assert (applied.retired, applied.thinned) == ((), ())
        assert applied.reason is not None
        assert "step 4 cannot be read" in applied.reason
    assert store.space.objects == before
    assert len(maintenance.queue) == 0
    # Besides warnings about reading the manifest a second time.
    told = [record.levelno for record in caplog.records if record.name == "dcp_remote.run.deletions"]
    assert told == [logging.WARNING]
    retire(maintenance, 4, force=True)
    applied_by(maintenance, keep_last=1)
    delete(maintenance)
    assert steps(store) == [3]
    assert manifest not in keys(store)
    assert_sound(store)
    remove_orphans(store, grace_seconds=0)
    assert keys(store) == named(store)


def test_a_damaged_one_goes_as_any_other() -> None:
    """Retire a damaged checkpoint: its shards are left to gc; objects of other retired ones are deleted."""
    store = a_run(1, 2, 3, borrow=False)
    lost, other = manifest_at(store, 1).shards.keys, manifest_at(store, 2).shards.keys
    manifest = damage(store, 1)
    applied = apply(store, Retention(keep_last=1))
    assert applied.retired == (1, 2)
    assert applied.reason is not None
    assert keys(store) == named(store) | set(lost)
    assert manifest not in keys(store)
    assert not set(other) & keys(store)
    remove_orphans(store, grace_seconds=0)
    assert keys(store) == named(store)


def test_beside_a_damaged_one_shards_are_left_to_gc() -> None:
    """Retire a checkpoint beside a damaged one, which may name its shards: only the manifest is deleted."""
    store = a_run(1, 2, 3)
    damage(store, 2)
    gone = manifest_at(store, 1)
    maintenance = Deletions(store)
    applied = maintenance.retire([1], deadline=deadline())
    assert applied.retired == (1,)
    assert applied.reason is not None
    delete(maintenance)
    assert set(gone.shards.keys) <= keys(store)
    assert len([key for key in keys(store) if key.startswith("manifests/")]) == 2


def test_what_is_live_cannot_be_read_after_the_swap() -> None:
    """Deny reading a manifest that was committed before the swap: retired, and the shards are left to gc."""
    store = a_run(1, 2, 3)
    busy = MeanwhileStore(store, 5, lambda: save(store, 4, base=1))
    unreadable = Fault(
        lambda verb, key, number: verb == "get" and "000004" in key, "request", persistent=True, error=denied
    )
    maintenance = Deletions(FaultyStore(busy, [unreadable]))
    applied = applied_by(maintenance, keep_last=2)
    assert applied.retired == (1, 2)
    assert applied.reason is not None
    delete(maintenance)
    assert_sound(store)
    assert len(remove_orphans(store, grace_seconds=0).old) == 4
    assert keys(store) == named(store)


def test_meant_is_what_was_seen() -> None:
    """Overwrite a step before the swap that retires it: the new checkpoint stays, and none is reported as retired."""
    store = a_run(1, 2)
    busy = MeanwhileStore(store, 2, lambda: save(store, 1, letter="b", overwrite=True))
    maintenance = Deletions(busy)
    assert retire(maintenance, 1) == ()
    delete(maintenance)
    assert steps(store) == [1, 2]
    assert_sound(store)


# ---- deleting


def ready_to_delete(store: ObjectStore) -> Deletions:
    maintenance = Deletions(store)
    applied_by(maintenance, keep_last=1)
    return maintenance


def test_deleted_in_batches_with_pauses() -> None:
    """Delete nine objects, four per request."""
    store, clock = a_run(1, 2, 3, 4), SleepClock()
    recording = RecordingStore(store)
    maintenance = ready_to_delete(recording)
    assert len(maintenance.queue) == 9
    recording.clear()
    deleted = delete(maintenance, deadline=clock.deadline(PATIENCE_SECONDS), batch=4, pause_seconds=0.25)
    assert (deleted.removed, deleted.failed, deleted.left) == (9, {}, 0)
    assert [len(request.keys) for request in recording.requests] == [4, 4, 1]
    assert [request.keys[0].partition("/")[0] for request in recording.requests] == ["manifests", "shards", "shards"]
    assert clock.sleeps == [0.25, 0.25]
    assert keys(store) == named(store)


def test_deleting_stops_when_told() -> None:
    """Stop before a request: the next call deletes the rest."""
    store = a_run(1, 2, 3, 4)
    maintenance = ready_to_delete(store)
    told = iter([False, True])
    assert delete(maintenance, stop=lambda: next(told), batch=4).left == 5
    assert delete(maintenance, stop=lambda: True).left == 5
    assert maintenance.queue.delete(deadline=Deadline(0)).left == 5
    assert delete(maintenance).left == 0
    assert keys(store) == named(store)


is_delete = verb_is("delete")


def test_what_fails_for_now_is_tried_again() -> None:
    """Fail deletions for a while: retried within the deadline, and by the next call."""
    store, clock = a_run(1, 2, 3), SleepClock()
    faulty = FaultyStore(store, [Fault(is_delete, "response"), *[Fault(is_delete, "request")] * 3])
    maintenance = ready_to_delete(faulty)
    deleted = delete(maintenance, deadline=clock.deadline(0.3))
    assert deleted.removed == 0
    assert len(deleted.failed) == deleted.left == len(maintenance.queue) == 6
    assert all(isinstance(error, TransientStorageError) for error in deleted.failed.values())
    assert delete(maintenance, deadline=clock.deadline(PATIENCE_SECONDS)).left == 0
    assert keys(store) == named(store)


class KeepingStore(WrappedStore):
    """Store with object lock, which does not delete some keys."""

    def __init__(self, store: ObjectStore, kept: set[str]) -> None:
        super().__init__(store)
        self._kept = kept

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        failed = dict(super().delete([key for key in keys if key not in self._kept]))
        return failed | {key: PermissionDeniedError("Kept.", key=key) for key in keys if key in self._kept}


def test_what_fails_for_good_is_reported_and_left_to_gc() -> None:
    """Lock one object: the others go, and that one is reported and not tried again."""
    store = a_run(1, 2, 3)
    kept = shard_at(store, 1, TRAINED)
    maintenance = ready_to_delete(KeepingStore(store, {kept}))
    deleted = delete(maintenance)
    assert set(deleted.failed) == {kept}
    assert (deleted.removed, deleted.left) == (5, 0)
    assert keys(store) == named(store) | {kept}
    save(store, 4)
    applied_by(maintenance, keep_last=1)
    assert delete(maintenance).removed == 4  # the frozen shard, too


@pytest.mark.parametrize("whole", [False, True])
def test_a_job_that_may_not_delete(caplog: pytest.LogCaptureFixture, *, whole: bool) -> None:
    """Deny deletion, of the request or of each key: logged once, and all objects are left to gc and counted."""
    store = a_run(1, 2, 3)
    refused = Fault(is_delete, "request", persistent=True, error=denied)
    denying: ObjectStore = FaultyStore(store, [refused]) if whole else KeepingStore(store, keys(store))
    recording = RecordingStore(denying)
    maintenance = ready_to_delete(recording)
    deleted = delete(maintenance, batch=4)
    assert (len(deleted.failed), deleted.given_up, deleted.removed, deleted.left) == (4, 2, 0, 0)
    save(store, 4)
    recording.clear()
    applied_by(maintenance, keep_last=1)
    assert steps(store) == [4]
    assert delete(maintenance) == Deleted(given_up=4)  # the frozen shard, too
    assert delete(maintenance) == Deleted()
    assert len(maintenance.queue) == 0
    assert "delete" not in verbs(recording)
    (told,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "dcp-remote gc --yes" in told.getMessage()


def test_names_are_held_in_little_memory() -> None:
    """Remember ten thousand shards of a hundred ranks: at most 24 bytes each."""
    draw = random.Random(1)
    tokens = [f"{draw.getrandbits(64):016x}" for _ in range(100)]
    shards = [
        f"shards/{draw.getrandbits(8):02x}/17-step-000000001000-rank-{rank:05d}-{tokens[rank]}-{number:04d}.safetensors"
        for rank in range(100)
        for number in range(100)
    ]
    known = LiveShards()
    known.remember("manifests/a", shards)
    assert sum(map(len, known._keys.values())) < 24 * len(shards)


def test_deletions_at_exit() -> None:
    """Apply a retention at interpreter exit, when no thread can be started: it is carried out."""
    script = (
        "import atexit\n"
        "from dcp_remote.run.retention import Retention\n"
        "from tests.run import test_deletions as here\n"
        "store = here.a_run(1, 2, 3, 4)\n"
        "atexit.register(lambda: print(here.apply(store, Retention(keep_last=1)).retired))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("(1, 2, 3)\n", "")
