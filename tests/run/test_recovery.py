"""Recovery of a lost catalog: its content, the limits of that, and other jobs' acts at each request."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    CommitUnknownError,
    ConditionFailedError,
    FencedError,
    InvalidArgumentError,
    StorageError,
    UnsupportedFormatError,
)
from dcp_remote.format import catalog_json, document, manifest_json
from dcp_remote.format.catalog import CATALOG_KEY, BeginAgainError, Catalog, Entry
from dcp_remote.format.keys import manifest_key
from dcp_remote.format.manifest import MANIFEST_KEY, RunInfo
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.gc import remove_orphans
from dcp_remote.run.recovery import FoundManifest, LeftOut, Recovered, find_recovery, rebuild_catalog, recover
from dcp_remote.run.retention import Retention
from dcp_remote.storage import LocalStore, MemoryStore, ObjectStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore
from tests.support.catalogs import IDENTITIES, RUN, full_pauses, identity, stored
from tests.support.faults import denied, verb_is
from tests.support.runs import (
    OPTIMIZER,
    TRAINED,
    MeanwhileStore,
    a_run,
    assert_sound,
    assert_tidy,
    begin,
    fence,
    keys,
    live,
    manifest_at,
    manifest_of,
    put_catalog,
    put_shards,
    save,
    shard_at,
    steps,
    thin,
)


def lost(store: MemoryStore) -> MemoryStore:
    store.delete([CATALOG_KEY])
    return store


def damaged(store: MemoryStore) -> MemoryStore:
    store.put(CATALOG_KEY, [store.space.objects[CATALOG_KEY].data[:-1]])
    return store


def catalog_at(store: MemoryStore) -> Catalog:
    catalog = stored(store)
    assert catalog is not None
    return catalog


@pytest.mark.parametrize("lose", [lost, damaged])
def test_the_same_checkpoints(lose: Callable[[MemoryStore], MemoryStore]) -> None:
    """Recover a run: the same entries with names and metrics, thinned ones too. The plan alone changes nothing."""
    store = a_run(1, 2)
    fence(store)
    save(store, 3, base=2, names=("best", "new"), metrics=(("loss", 0.5),))
    maintenance = Deletions(store)
    maintenance.apply(Retention(keep_last=2, keep_optimizer_last=1), deadline=Deadline(30))
    maintenance.queue.delete(deadline=Deadline(30))
    before = catalog_at(store)
    lose(store)
    objects = dict(store.space.objects)
    plan = find_recovery(store)
    assert store.space.objects == objects
    recovered = recover(store)
    assert recovered == plan
    after = catalog_at(store)
    assert after == recovered.catalog
    assert (after.entries, after.run_id, after.token) == (before.entries, before.run_id, before.token + 1_000)
    assert [entry.thinned for entry in after.entries] == [("optim",), ()]
    assert (recovered.left, recovered.damaged) == ((), lose is damaged)
    assert_sound(store)


def test_requests() -> None:
    """Recover: a GET of the catalog, two LISTs, a GET of each manifest, and one PUT."""
    store = lost(a_run(1, 2))
    recording = RecordingStore(store)
    find_recovery(recording)
    calls = [("get", CATALOG_KEY), ("list", "shards/"), ("list", "manifests/")]
    assert recording.calls[:3] == calls
    assert sorted(recording.calls[3:]) == sorted(("get", key) for key in keys(store) if key.startswith("manifests/"))
    recording.clear()
    recover(recording)
    assert recording.calls[5:] == [("put", CATALOG_KEY)]


def test_nobody_goes_on_below_it() -> None:
    """Go on with a job that held the run, and with one that left no manifest: both are fenced.

    Objects that such a job puts afterwards have names of a revision below the floor, and are removed as orphans.
    """
    store = a_run(1)
    token = fence(store).token
    busy = MeanwhileStore(store, 4, lambda: recover(lost(store)))
    with pytest.raises(FencedError, match="holder='recovery of the catalog on "):
        save(busy, 2)
    assert busy.acted
    assert catalog_at(store).token > token
    assert catalog_at(store).floor == catalog_at(store).revision

    def recover_with_an_equal_token() -> None:
        token = catalog_at(store).token
        recover(lost(store))
        put_catalog(store, replace(catalog_at(store), token=token))

    with pytest.raises(BeginAgainError):
        save(MeanwhileStore(store, 4, recover_with_an_equal_token), 3)
    save(store, 4)
    assert steps(store) == [1, 2, 4]
    remove_orphans(store, grace_seconds=0)
    assert_tidy(store)


def test_a_checkpoint_that_lacks_a_shard_is_left_out() -> None:
    """Remove a shard, change its size, or damage a manifest: that checkpoint is left out, the others are there."""
    store = a_run(1, 2, 3, 4)
    begin(store, 5)  # whole, but never committed: nothing tells it from a checkpoint
    manifests = {entry.step: entry.manifest for entry in live(store)}
    store.delete([shard_at(store, 1, TRAINED)])
    store.put(shard_at(store, 2, OPTIMIZER), [b"short"])
    store.put(manifests[3], [b"{}"])
    recovered = recover(lost(store))
    assert steps(store) == [4, 5]
    assert [(left.key, left.step) for left in recovered.left] == [
        (manifests[1], 1),
        (manifests[2], 2),
        (manifests[3], None),
    ]
    assert_sound(store)


def thinned(store: MemoryStore) -> list[LeftOut]:
    first = live(store)[0]
    thin(Deletions(store), [1], deadline=Deadline(30))
    return [LeftOut(first.manifest, 1, "its checkpoint has a newer manifest")]


def overwritten(store: MemoryStore) -> list[LeftOut]:
    first = live(store)[0]
    save(store, 1, letter="b", overwrite=True)
    return [LeftOut(first.manifest, 1, "a later save of its step is there")]


def rolled_back(store: MemoryStore) -> list[LeftOut]:
    fence(store)
    save(store, 2, base=1, abandons=1)
    assert [entry.abandoned for entry in live(store)] == [False, False, True]
    return []


def renamed(store: MemoryStore) -> list[LeftOut]:
    """Give a name twice: the checkpoint that got it last has it, whatever its step."""
    save(store, 9, names=("best", "first"))
    save(store, 5, names=("best",))
    assert [entry.names for entry in live(store)[2:]] == [("best",), ("first",)]
    return []


@pytest.mark.parametrize("act", [thinned, overwritten, rolled_back, renamed])
def test_of_several_manifests_the_last_counts(act: Callable[[MemoryStore], list[LeftOut]]) -> None:
    """Recover before replaced objects were deleted: the same entries, and what is left out has its reason."""
    store = a_run(1, 3)
    left, before = act(store), catalog_at(store)
    recovered = recover(lost(store))
    assert live(store) == before.entries
    assert list(recovered.left) == left
    assert catalog_at(store).latest() == before.latest()


def test_a_thinned_manifest_that_is_damaged() -> None:
    """Damage the newer of two manifests of a save: the other one is used."""
    store = a_run(1, 2)
    before = live(store)
    thinned(store)
    store.put(live(store)[0].manifest, [b"{}"])
    recover(lost(store))
    assert live(store) == before


def test_pins_are_lost() -> None:
    """Recover a pinned checkpoint: no longer pinned, since no manifest holds pins."""
    store = a_run(1, 2)
    catalog = catalog_at(store)
    put_catalog(store, replace(catalog, entries=tuple(replace(entry, pinned=True) for entry in catalog.entries)))
    recover(lost(store))
    assert live(store) == catalog.entries


def test_of_two_runs_the_newer() -> None:
    """Begin another run in place of a lost one: the newer run is recovered, since tokens of two runs do not compare."""
    store = a_run(1, 2)
    old = live(store)
    lost(store)
    info = RunInfo(RUN, step=7, token=1, revision=1)
    manifest = replace(manifest_of(info), created="2027-01-01T00:00:00+00:00")
    put_shards(store, manifest)
    key = manifest_key(revision=1, step=7)
    store.put(key, [manifest_json.encode(manifest)])
    recovered = recover(store)
    assert recovered.catalog.run_id == RUN
    assert steps(store) == [7]
    assert recovered.left == tuple(LeftOut(entry.manifest, entry.step, "it is of another run") for entry in old)


def test_nothing_that_is_whole() -> None:
    """Damage a catalog without whole checkpoints: an empty one is written, so that a job can begin."""
    for store in (MemoryStore(), a_run(1)):
        store.delete(sorted(keys(store)))
        store.put(CATALOG_KEY, [b"{}"])
        assert recover(store).catalog.entries == ()
        save(store, 1)
        assert_sound(store)


def test_what_is_no_run() -> None:
    """Recover an empty store, a checkpoint by itself, and a run whose catalog can be read: refused."""
    with pytest.raises(CheckpointNotFoundError):
        recover(MemoryStore())
    alone = MemoryStore()
    alone.put(MANIFEST_KEY, [b""])
    alone.put("shards/ab/rank-00000-0123456789abcdef-0000.safetensors", [b""])
    with pytest.raises(CheckpointNotFoundError):
        recover(alone)
    store = a_run(1)
    before = dict(store.space.objects)
    for act in (find_recovery, recover):
        with pytest.raises(InvalidArgumentError, match="nothing to recover"):
            act(store)
    assert store.space.objects == before


def test_a_catalog_of_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recover a run whose catalog a newer version wrote: refused, and the catalog stays."""
    store = a_run(1)
    before = dict(store.space.objects)
    monkeypatch.setattr(document, "VERSION", "another")
    with pytest.raises(UnsupportedFormatError, match="another version"):
        recover(store)
    assert store.space.objects == before


def test_a_catalog_that_is_larger_than_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recover a run whose catalog is larger than any may be: replaced unread."""
    store = a_run(1)
    store.put(CATALOG_KEY, [b"x" * 10_000])
    monkeypatch.setattr(catalog_json, "STORED_BYTES_MAX", 9_999)
    assert recover(store).damaged
    assert steps(store) == [1]


def test_a_store_without_swaps_is_refused(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recover on a store without compare-and-swap: refused."""
    monkeypatch.setattr("dcp_remote.storage.local.swap_refusal", lambda path: "it is on a network file system")
    with pytest.raises(InvalidArgumentError, match="on condition"):
        recover(LocalStore(str(tmp_path)))


# ---- made-up numbers and names


def test_numbers_that_no_run_has() -> None:
    """Store manifests with too large a token, revision or name: left out, and the run goes on."""
    store = a_run(1)
    for info in (
        RunInfo(RUN, step=2, token=2**53, revision=1),
        RunInfo(RUN, step=2, token=1, revision=2**53),
        RunInfo(RUN, step=2, token=1, revision=1, names=("n" * 2_000,)),
    ):
        manifest = manifest_of(info)
        store.put(manifest_key(revision=1, step=2), [manifest_json.encode(manifest)])
    store.put(manifest_key(revision=10**30, step=3), [manifest_json.encode(manifest_at(store, 1))])
    recovered = recover(lost(store))
    assert steps(store) == [1]
    assert len(recovered.left) == 4
    assert recovered.catalog.revision < 10_000
    save(store, 2)
    remove_orphans(store, grace_seconds=0)
    assert_sound(store)


@st.composite
def entries(draw: st.DrawFn) -> FoundManifest:
    small = st.integers(0, 4)
    revision, began = draw(small) + 5, draw(small)
    entry = Entry(
        step=draw(small),
        save_id=draw(st.sampled_from([identity(number) for number in range(6)])),
        manifest=f"manifests/{draw(IDENTITIES)}.json",
        size_bytes=1,
        created=draw(st.sampled_from(["2026", "2027"])),
        token=draw(small),
        began_revision=began,
        names=tuple(draw(st.lists(st.sampled_from("xyz"), unique=True))),
    )
    whole = draw(st.booleans())
    run_id = draw(st.sampled_from([RUN, "e" * 32]))
    return FoundManifest(entry.manifest, revision, run_id, entry, reason=None if whole else "not whole")


@given(st.lists(entries(), max_size=8, unique_by=lambda one: one.key), st.lists(st.integers(0, 100)))
def test_any_manifests_make_a_catalog(found: list[FoundManifest], revisions: list[int]) -> None:
    """Recover any manifests: each is used, or left out with a reason, and the catalog is above all their numbers."""
    catalog, left = rebuild_catalog(found, revisions, run_id=RUN)
    assert catalog_json.decode(catalog_json.encode(catalog, "0" * 32)) == catalog
    assert sorted([*(entry.manifest for entry in catalog.entries), *(one.key for one in left)]) == sorted(
        one.key for one in found
    )
    whole = {one.key: one for one in found if one.reason is None}
    assert {entry.manifest for entry in catalog.entries} <= set(whole)
    ours = [one for one in whole.values() if one.run_id == catalog.run_id]
    assert {entry.step for entry in catalog.entries} <= {one.entry.step for one in ours}
    assert bool(catalog.entries) == bool(whole)
    for one in found:
        assert one.entry.token < catalog.token
        assert one.entry.began_revision < catalog.floor
    assert all(revision < catalog.floor == catalog.revision for revision in revisions)
    given_names = {name for one in ours for name in one.entry.names}
    assert {name for entry in catalog.entries for name in entry.names} <= given_names


# ---- while it is written


def quick(store: ObjectStore, *, seconds: float = 30.0) -> Recovered:
    with full_pauses(lambda _: None):
        return recover(store, timeout_seconds=seconds)


def test_somebody_else_writes_a_catalog() -> None:
    """Begin a run, or recover a second time, at each request: a run stays, and two recoveries agree.

    The catalogs of two recoveries are equal, since they are made of the same manifests.
    """
    for number in itertools.count(1):
        store = lost(a_run(1, 2))

        def begin(store: MemoryStore = store) -> None:
            fence(store)

        busy = MeanwhileStore(store, number, begin)
        try:
            quick(busy)
        except (CommitConflictError, InvalidArgumentError):
            assert catalog_at(store).entries == ()
        else:
            assert not busy.acted
            break
    assert number > 5
    store = lost(a_run(1, 2))
    quick(MeanwhileStore(store, 6, lambda: quick(store)))
    assert steps(store) == [1, 2]


def test_a_store_that_refuses_for_ever() -> None:
    """Refuse each PUT as if another were under way: an error of the store, and nothing is changed."""
    store = damaged(a_run(1))
    before = dict(store.space.objects)
    refused = Fault(verb_is("put"), "request", persistent=True, error=lambda: ConditionFailedError("A 412."))
    with pytest.raises(StorageError, match="may not support"):
        quick(FaultyStore(store, [refused]))
    assert store.space.objects == before


def test_what_is_on_its_way_is_not_denied() -> None:
    """Lose the first answer and refuse later PUTs for good: unknown, since the first PUT may still arrive."""
    store = damaged(a_run(1))
    refused = Fault(verb_is("put"), "request", persistent=True, error=denied)
    faulty = FaultyStore(store, [Fault(verb_is("put"), "late"), refused])
    with pytest.raises(CommitUnknownError):
        quick(faulty, seconds=0.5)
    faulty.settle()
    assert steps(store) == [1]
