"""Checkpoints whose manifests are in segments: saved, restored in parts, copied, verified, thinned and removed."""

from __future__ import annotations

import itertools
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dcp_remote import RemoteReader, RemoteWriter, Retention, Run, load
from dcp_remote.common.arrays import Buffer
from dcp_remote.errors import CheckpointGoneError, CorruptCheckpointError, DcpRemoteError
from dcp_remote.format import manifest_json
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.format.keys import MANIFESTS_PREFIX
from dcp_remote.format.manifest import Manifest
from dcp_remote.format.segments import place_of
from dcp_remote.loading.peers import Announcement, cohorts_of
from dcp_remote.loading.read_plan import wanted_blocks
from dcp_remote.loading.shared_read_plan import encode_wanted
from dcp_remote.manager import rank_restore
from dcp_remote.run import verification
from dcp_remote.run.copying import copy_checkpoints
from dcp_remote.run.gc import remove_orphans
from dcp_remote.run.info import require_run
from dcp_remote.run.lookup import join_segments, read_entry, read_manifest
from dcp_remote.run.verification import verify
from dcp_remote.storage.base import Condition, ObjectStore, Version
from dcp_remote.storage.memory import MemoryStore
from dcp_remote.storage.rereads import is_reread
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing import FaultyStore, RecordingStore
from dcp_remote.testing.wrappers import Fault
from tests.support.faults import denied, shorten_pauses
from tests.support.rank_threads import ManagerThreads, manager_threads, wait_until
from tests.support.segments import blank, lower_segments, shard_state
from tests.support.simulated_ranks import load_as_ranks, save_as_ranks
from tests.support.states import equal

RANKS = 4


@pytest.fixture(autouse=True)
def segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make segments of about six pieces, and retry without pauses."""
    shorten_pauses(monkeypatch)
    with lower_segments(6):
        yield


def state_at(step: int) -> dict[str, Any]:
    """Return a state of three keys of three tensors each, of which one never changes, and a scalar."""
    keys = {"frozen": 0, "model": step, "optim": 10 * step}
    state: dict[str, Any] = {
        key: {f"w{n}": torch.arange(24.0).reshape(8, 3) + 100 * n + add for n in range(3)}
        for n_key, (key, add) in enumerate(keys.items())
    }
    return state | {"step": step, "lr": torch.tensor(0.5 + step)}


def save(store: ObjectStore, *steps: int, ranks: int = RANKS, **options: Any) -> None:
    with manager_threads(ranks, store, **options) as managers:
        managers.values(lambda rank, manager: manager.restore(shard_state(blank(state_at(1)), ranks)[rank]))
        for step in steps:
            states = shard_state(state_at(step), ranks)
            managers.values(lambda rank, manager, step=step, states=states: manager.save(step, states[rank], wait=True))  # type: ignore[misc]  # bound now


def restore(stores: list[ObjectStore], *, host: str | None = None, **options: Any) -> dict[str, Any]:
    """Restore as that many ranks, each with its own store; return the state of all. Ranks of a `host` are linked."""
    whole = blank(state_at(1))
    states = shard_state(whole, len(stores))
    with manager_threads(len(stores), stores) as managers:
        link(managers, host)
        for ended in managers.run(lambda rank, manager: manager.restore(states[rank], **options)):
            if ended.error is not None:
                raise ended.error
    return whole | {"step": states[0]["step"]}


def link(managers: ManagerThreads, host: str | None) -> None:
    """Link the ranks, but for the coordinator."""
    for group in managers.groups.ranks:
        group._member._link_name = lambda: host


def reads_of(stores: Sequence[RecordingStore], keys: Iterable[str]) -> Counter[str]:
    """Return how often these stores were asked for each of the objects."""
    return Counter(key for store in stores for verb, key in store.calls if verb.startswith("get") and key in {*keys})


def documents_of(store: ObjectStore, step: int) -> list[str]:
    """Return the keys of the manifest and the segments of a checkpoint."""
    return [
        *(key for key in keys_of(store) if key.startswith(f"{MANIFESTS_PREFIX}step-{step:012d}")),
        *segments_of(store, step),
    ]


def manifest_of(store: ObjectStore, step: int) -> Manifest:
    (entry,) = (entry for entry in require_run(store, retry_seconds=1).entries if entry.step == step)
    return read_entry(store, entry)


def segments_of(store: ObjectStore, step: int) -> list[str]:
    """Return the keys of the segments of a checkpoint."""
    manifest = manifest_of(store, step)
    assert manifest.segments is not None
    return [place_of(manifest, number)[0] for number in range(len(manifest.segments.tensors))]


def keys_of(store: ObjectStore) -> set[str]:
    return {info.key for info in store.list()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_at_any_world_size(ranks: int) -> None:
    store = MemoryStore()
    save(store, 1)
    assert equal(restore([store] * ranks), state_at(1))
    assert equal(load(store), state_at(1))


def test_a_rank_reads_its_segments_alone() -> None:
    """One of each key, and that of the scalar; `include` leaves out those of other keys. All have 7 segments."""
    shared = MemoryStore()
    save(shared, 1)
    assert len(segments_of(shared, 1)) == 7
    for options, expected in ({}, 4), ({"include": "model.*"}, 1):
        stores = [RecordingStore(shared) for _ in range(RANKS)]
        restore([*stores], **options)
        for store in stores:
            assert (
                len([key for verb, key in store.calls if verb == "get_into" and key in segments_of(shared, 1)])
                == expected
            )


def test_load_reads_the_segments_of_what_is_chosen() -> None:
    """Two for each key, and that of the scalar; objects alone need none. The notes of a checkpoint need none."""
    shared = MemoryStore()
    save(shared, 1)
    for keys, expected in (None, 7), ("model.*", 2), ("step", 0):
        store = RecordingStore(shared)
        loaded = load(store, keys=keys)
        assert equal(loaded, state_at(1) if keys is None else {key: state_at(1)[key] for key in loaded})
        assert (
            len([key for verb, key in store.calls if verb == "get_into" and key in segments_of(shared, 1)]) == expected
        )
    notes = RecordingStore(shared)
    assert Run(notes).user() == {}
    assert not reads_of([notes], segments_of(shared, 1))


def test_load_of_a_stream_without_elements() -> None:
    """A sparse tensor without elements has a chunk, which no element of a box touches."""
    store = MemoryStore()
    dense = {f"w{number}": torch.full((4,), float(number)) for number in range(12)}
    none, some = torch.zeros(0, 3).to_sparse(), torch.eye(2, 3).to_sparse()
    with manager_threads(1, store) as managers:
        managers.values(lambda _, manager: manager.save(1, {"m": dense, "y": {"e": none}, "z": {"f": some}}, wait=True))
    assert manifest_of(store, 1).segments is not None
    for keys in None, "y.*", ["y.e", "m.w0"]:
        loaded = load(store, keys=keys)["y"]["e"]
        assert loaded.layout is torch.sparse_coo
        assert loaded.shape == (0, 3)


def test_ranks_of_a_host_read_each_document_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine ranks, of which eight are linked: of these one reads the manifest, and one each segment."""
    monkeypatch.setattr(rank_restore, "_MANIFESTS_BYTES_MAX", 0)
    shared = MemoryStore()
    save(shared, 1)
    stores = [RecordingStore(shared) for _ in range(9)]
    assert equal(restore([*stores], host=uuid.uuid4().hex), state_at(1))
    assert reads_of(stores[1:], documents_of(shared, 1)) == dict.fromkeys(documents_of(shared, 1), 1)
    assert sum(reads_of(stores[:1], documents_of(shared, 1)).values()) == 5


def test_ranks_of_a_host_read_what_the_newest_checkpoint_has_once() -> None:
    """A job that has restored a part saves: each rank compares with the newest checkpoint, read once for eight."""
    shared = MemoryStore()
    save(shared, 1)
    stores, host = [RecordingStore(shared) for _ in range(9)], uuid.uuid4().hex
    with manager_threads(9, [*stores]) as managers:
        link(managers, host)
        states = shard_state(blank(state_at(1)), 9)
        managers.values(lambda rank, manager: manager.restore(states[rank], include="model.*"))
        before = reads_of(stores[1:], segments_of(shared, 1))
        changed = shard_state(state_at(2), 9)
        managers.values(lambda rank, manager: manager.save(2, changed[rank], wait=True))
    assert set((reads_of(stores[1:], documents_of(shared, 1)) - before).values()) == {1}
    assert equal(load(shared), state_at(2))


def test_a_segment_that_was_damaged_on_the_way_to_another_rank() -> None:
    """Each rank of the host that has got the damaged bytes reads the segment itself."""
    shared = MemoryStore()
    save(shared, 1)
    (damaged, *_) = segments_of(shared, 1)

    class Flipping(WrappedStore):
        def get_into(self, key: str, start: int, buffer: memoryview) -> None:
            super().get_into(key, start, buffer)
            buffer[-1] ^= key == damaged and not is_reread()

    stores = [RecordingStore(Flipping(shared)) for _ in range(9)]
    assert equal(restore([*stores], host=uuid.uuid4().hex), state_at(1))
    counts = [reads_of([store], [damaged])[damaged] for store in stores[1:]]
    assert sorted(counts)[-2:] in ([1, 2], [0, 2])


def test_a_checkpoint_by_itself() -> None:
    """Saved and loaded by torch's functions; replaced by a smaller one, which has no segments."""
    store, whole = MemoryStore(), blank(state_at(1))
    save_as_ranks(shard_state(state_at(1), 2), lambda: RemoteWriter(store))
    assert read_manifest(store).segments is not None
    load_as_ranks(shard_state(whole, 3), lambda: RemoteReader(store))
    assert equal(whole["model"], state_at(1)["model"])
    assert equal(load(store), state_at(1))
    assert not verify(store, depth="deep").damage
    save_as_ranks([{"x": torch.zeros(1)}], lambda: RemoteWriter(store, overwrite=True))
    assert read_manifest(store).segments is None
    remove_orphans(store, grace_seconds=0)
    assert keys_of(store) == {"manifest.json", *read_manifest(store).shards.keys}


def test_unchanged_segments_are_not_sent_again() -> None:
    """Those of a key that did not change are named by the next checkpoint of the job; others are new."""
    store = MemoryStore()
    save(store, 1, 2)
    first, second = (segments_of(store, step) for step in (1, 2))
    assert set(first) & set(second) == set(first[:2])
    assert equal(restore([store] * 2), state_at(2))


def test_retention_keeps_what_another_manifest_names() -> None:
    """A shared segment stays until no checkpoint names it; gc finds nothing but what was left."""
    store = MemoryStore()
    save(store, 1, 2, 3, retention=Retention(keep_last=1))
    assert equal(restore([store]), state_at(3))
    manifest = manifest_of(store, 3)
    assert keys_of(store) == {
        CATALOG_KEY,
        require_run(store, retry_seconds=1).entries[0].manifest,
        *manifest.shards.keys,
    }
    assert remove_orphans(store, grace_seconds=0).old == ()


def test_thinning_reads_no_segment() -> None:
    """The optimizer goes with its segments; what is left is read."""
    store = RecordingStore(MemoryStore())
    save(store, 1, 2, retention=Retention(keep_optimizer_last=1))
    assert equal(load(store, step=1), {key: value for key, value in state_at(1).items() if key != "optim"})
    assert equal(load(store, step=2), state_at(2))
    assert len(segments_of(store, 1)) == 5


def test_a_copy_has_the_segments_of_its_source() -> None:
    """Under other names, and whole; a segment that is damaged in the source is not copied."""
    store, copy = MemoryStore(), MemoryStore()
    save(store, 1, 2)
    assert len(copy_checkpoints(store, copy).copied) == 2
    for step in (1, 2):
        assert equal(load(copy, step=step), state_at(step))
    assert not verify(copy, depth="deep").damage
    assert not set(segments_of(store, 1)) & set(segments_of(copy, 1))


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_a_segment_that_cannot_be_read(what: str) -> None:
    """Every rank that needs the segment names it; others read the checkpoint. `verify` names the segment."""
    store = MemoryStore()
    save(store, 1, 2)
    key = segments_of(store, 2)[-1]
    if what == "missing":
        store.delete([key])
    else:
        data = bytearray(store.get(key, limit_bytes=2**20).data)
        data[-9] ^= 1
        store.put(key, [data])
    with pytest.raises(DcpRemoteError, match=f"segment of the manifest is {what}.*Use another checkpoint.*{key}"):
        restore([store] * 2)
    assert equal(restore([store] * 2, step=1), state_at(1))
    assert equal(restore([store], include="model.*")["model"], state_at(2)["model"])
    (damage,) = verify(store).damage
    assert (damage.key, damage.kind, damage.steps) == (key, "manifest", (2,))
    assert damage.reason.startswith(f"A segment of the manifest is {what}")
    assert damage.reason.endswith("Shards of this checkpoint alone were not checked.")
    with pytest.raises(CorruptCheckpointError, match="segment of the manifest"):
        copy_checkpoints(store, MemoryStore(), step=2)


def test_verify_has_one_whole_manifest_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where damage is looked for in all of them once more."""
    store = MemoryStore()
    save(store, 1, 2, 3)
    made: list[weakref.ref[Manifest]] = []

    def join(*arguments: Any, **options: Any) -> Manifest:
        assert not any(one() for one in made)
        made.append(weakref.ref(manifest := join_segments(*arguments, **options)))
        return manifest

    monkeypatch.setattr(verification, "join_segments", join)
    store.delete([manifest_of(store, 2).shards.keys[0]])
    assert verify(store).damage
    assert len(made) == 6


def test_a_checkpoint_that_is_deleted_while_it_is_read() -> None:
    """The segments are gone with it, and the error says so."""
    store = MemoryStore()
    save(store, 1, 2)
    (entry, _) = require_run(store, retry_seconds=1).entries
    data = store.get(entry.manifest, limit_bytes=2**20).data
    save(store, 3, retention=Retention(keep_last=1))
    store.put(entry.manifest, [data])
    with pytest.raises(CheckpointGoneError):
        read_entry(store, entry)


@pytest.mark.parametrize("lost", ["request", "response"])
def test_a_segment_whose_answer_is_lost_is_sent_again(lost: Any) -> None:
    shared = MemoryStore()
    fault = Fault(lambda verb, key, _: verb == "put" and key.endswith("-0006.safetensors"), lost)
    store = FaultyStore(shared, [fault])
    save(store, 1)
    assert len(store.hits) == 1
    assert equal(restore([shared] * 2), state_at(1))


@pytest.mark.parametrize("refused", ["manifest", "segment"])
def test_a_save_that_fails_leaves_no_segment(refused: str) -> None:
    """The manifest or the last segment is refused after others were put: these are deleted; the next save is whole."""
    shared = MemoryStore()
    save(shared, 1)
    before = keys_of(shared)
    last = max(key[-len("0000.safetensors") :] for key in before if "-rank-00000-" in key)

    def is_refused(verb: str, key: str, _: int) -> bool:
        is_last = "-rank-00000-" in key and key.endswith(last)
        return verb == "put" and (is_last if refused == "segment" else key.startswith("manifests/"))

    store = RecordingStore(FaultyStore(shared, [Fault(is_refused, "request", error=denied, persistent=True)]))
    with pytest.raises(AssertionError):  # of a call that is to succeed
        save(store, 2)
    assert sum(verb == "put" and "-rank-00000-" in key for verb, key in store.calls) > 5  # of which 4 are of the rank
    assert keys_of(shared) == before
    save(shared, 2)
    assert equal(restore([shared] * 2), state_at(2))


def test_segments_that_are_put_late() -> None:
    """The first is refused at once, while others are on their way: these are deleted as well, once they are there."""
    shared, has_failed, numbers = MemoryStore(), threading.Event(), itertools.count()

    class Late(WrappedStore):
        def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
            if b"dcp_remote segment" in b"".join(buffers) and not has_failed.is_set():
                if next(numbers) == 0:
                    raise denied()
                assert has_failed.wait(60)
            return self._store.put(key, buffers, condition=condition)

    with manager_threads(RANKS, Late(shared)) as managers:
        states = shard_state(state_at(1), RANKS)
        ended = managers.run(lambda rank, manager: manager.save(1, states[rank], wait=True))
        assert all(isinstance(one.error, DcpRemoteError) for one in ended)
        has_failed.set()
        wait_until(lambda: not [key for key in keys_of(shared) if key.endswith(".safetensors")])
        assert next(numbers) > 1


def test_ranks_read_together_if_they_have_the_same_segments() -> None:
    """Others number the blocks of other chunks, and are in no cohort with them."""
    store = MemoryStore()
    save(store, 1)
    manifest = manifest_of(store, 1)
    wanted = encode_wanted(manifest, wanted_blocks(manifest, []))
    cohorts = cohorts_of([Announcement(None, wanted, chunks) for chunks in (b"a", b"b", b"a", b"", b"b")])
    assert [list(cohort) for cohort in cohorts] == [[0, 2], [1, 4], [0, 2], [3], [1, 4]]


def test_an_index_that_lacks_a_segment() -> None:
    """No reader takes the chunks that are nowhere for values, as after a defect of the writer."""
    store = MemoryStore()
    save(store, 1)
    (entry,) = require_run(store, retry_seconds=1).entries
    manifest = manifest_json.decode(store.get(entry.manifest, limit_bytes=2**20).data)
    assert manifest is not None
    table, count = manifest.segments, len(manifest.pieces.shard) - 1
    assert table is not None
    tensors, shards = int(table.tensors[:-1].sum()), int(table.shards[:-1].sum())
    values = int(manifest.tensors.dimensions[table.tensor[:tensors]].sum())
    fewer = replace(
        table,
        shards=table.shards[:-1],
        shard=table.shard[:shards],
        tensors=table.tensors[:-1],
        tensor=table.tensor[:tensors],
        offsets=table.offsets[:values],
        sizes=table.sizes[:values],
    )
    index = replace(manifest, segments=fewer, pieces=manifest.pieces.take(np.arange(count)))
    store.put(entry.manifest, [manifest_json.encode(index)])
    with pytest.raises(CorruptCheckpointError, match="in no segment"):
        load(store, step=1)
    with pytest.raises(CorruptCheckpointError, match="lack chunks"):
        restore([store] * 2)
    assert verify(store).damage
