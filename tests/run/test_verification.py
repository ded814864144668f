"""Verification of damaged runs: what is named is exactly what is damaged, each byte is read once, and nothing is held.

Objects are damaged without the store, in the dictionary of a `MemoryStore`. The oracles share no code with the check:
entries that `load` refuses, or the pieces of a manifest, one number at a time.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote import CheckpointManager, RemoteWriter, Run, load
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.digests import BLOCK_BYTES_MIN
from dcp_remote.errors import (
    CheckpointGoneError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidArgumentError,
    StorageError,
)
from dcp_remote.format import manifest_json
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.format.manifest import MANIFEST_KEY, Manifest
from dcp_remote.run import verification
from dcp_remote.run.copying import copy_checkpoints
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.shard_check import Damage, Depth
from dcp_remote.run.verification import VerifyReport, verify
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.rereads import is_reread
from dcp_remote.storage.wrapper import WrappedStore
from dcp_remote.testing import FaultyStore, RecordingStore, nth
from tests.support.manifests import decode
from tests.support.properties import examples
from tests.support.runs import MeanwhileStore, a_run, copied, live, manifest_at, thin
from tests.support.simulated_ranks import save_as_ranks

pytestmark = pytest.mark.usefixtures("short_pauses")

DEPTHS: tuple[Depth, ...] = ("quick", "sample", "deep")
ENTRIES = ("model.bias", "model.frozen", "model.weight", "optim.m", "text")


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "frozen": torch.arange(300_000.0),  # of many blocks, and the same in all checkpoints
            "weight": torch.randn(40_000, generator=generator),  # of three blocks
            "bias": torch.randn(10, generator=generator),
        },
        "optim": {"m": torch.randn(40_000, generator=generator)},
        "text": "0123456789" * 10_000,  # an object of two blocks
        "step": step,
    }


def make_run() -> MemoryStore:
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        for step in (100, 200, 300):
            checkpoints.save(step, state_of(step), wait=True)
    return store


_RUN = make_run()


@pytest.fixture
def run() -> MemoryStore:
    """Return a run of three steps; the shard of the frozen tensor is named by all."""
    return copied(_RUN)


def put(store: MemoryStore, key: str, data: bytes) -> None:
    """Change an object without the store."""
    store.space.objects[key] = replace(store.space.objects[key], data=data)


def flip(store: MemoryStore, key: str, at: int, bit: int = 0) -> None:
    data = bytearray(store.space.objects[key].data)
    data[at] ^= 1 << bit
    put(store, key, bytes(data))


def sole(report: VerifyReport) -> Damage:
    (damage,) = report.damage
    return damage


def place_of(manifest: Manifest, name: str) -> tuple[str, int, int]:
    """Return shard, first byte and length of an entry that is one piece."""
    number = manifest.tensors.index.get(name)
    piece = int(manifest.tensors.piece_first[number]) if number is not None else manifest.stored_index[name].piece_first
    pieces = manifest.pieces
    return manifest.shards.keys[int(pieces.shard[piece])], int(pieces.start[piece]), int(pieces.length[piece])


def entries_in(manifest: Manifest, key: str, start: int = 0) -> tuple[str, ...]:
    """Return the entries with bytes in a shard from `start` on."""
    places = {name: place_of(manifest, name) for name in ENTRIES}
    return tuple(name for name, (shard, at, length) in places.items() if shard == key and at + length > start)


# ---- sound checkpoints, and requests


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_sound_run_and_its_requests(run: MemoryStore, depth: Depth) -> None:
    """Count the requests of each depth: a HEAD a shard, up to four GETs, or every range once."""
    recording = RecordingStore(run)
    report = Run(recording).verify(depth=depth)
    keys = {key for step in (100, 200, 300) for key in manifest_at(run, step).shards.keys}
    sizes = sum(len(run.space.objects[key].data) for key in keys)
    assert (report.steps, report.changed, report.damage) == ((100, 200, 300), (), ())
    assert report.shards == len(keys)
    heads = Counter(key for verb, key in recording.calls if verb == "head")
    assert heads == dict.fromkeys(keys, 1)
    assert recording.count("get") == 1 + 3  # catalog and manifests
    reads = Counter(key for verb, key in recording.calls if verb == "get_into")
    if depth == "quick":
        assert not reads
    elif depth == "sample":
        assert set(reads) == keys
        assert max(reads.values()) <= 4
        assert report.read_bytes < sizes / 2
    else:
        assert sizes - 2_000 * len(keys) < recording.size_bytes("get_into") <= sizes
    assert len(recording.calls) == 4 + len(keys) + sum(reads.values())


@pytest.mark.parametrize("arguments", [{"step": 1.5}, {"depth": "deeper"}])
def test_wrong_calls(run: MemoryStore, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(arguments))):
        Run(run).verify(**arguments)


# ---- a shard is damaged


def test_the_ends_of_a_shard_are_in_every_sample(run: MemoryStore) -> None:
    """Flip the first and then the last byte of the data of each shard: a sample finds both."""
    manifest = manifest_at(run, 100)
    for number, key in enumerate(manifest.shards.keys):
        for at in (int(manifest.shards.data_starts[number]), len(run.space.objects[key].data) - 1):
            store = copied(run)
            flip(store, key, at)
            damage = sole(Run(store).verify())
            assert (damage.key, damage.kind, len(damage.entries)) == (key, "bytes", 1)


def test_a_bit_of_a_block_table_that_concerns_another_piece(run: MemoryStore) -> None:
    """Flip a bit for a tensor that only step 100 names: parts of what step 200 shares cannot be verified, either."""
    manifest = manifest_at(run, 100)
    key, _, _ = place_of(manifest, "model.weight")
    number = manifest.shards.keys.index(key)
    piece = int(manifest.tensors.piece_first[manifest.tensors.index["model.weight"]])
    table_start = int(manifest.shards.data_starts[number] - manifest.shards.table_lengths[number])
    flip(run, key, table_start + 16 * int(manifest.pieces.table[piece]))
    assert sole(Run(run).verify(200, depth="deep")).entries == ("model.frozen", "model.weight")


@pytest.mark.parametrize("depth", ["sample", "deep"])
def test_a_manifest_that_disagrees_with_a_block_table(run: MemoryStore, depth: Depth) -> None:
    """Change the digest of a tensor of many blocks in a sealed manifest: no load takes the tensor, and no copy."""
    (*_, entry) = live(run)
    manifest = manifest_at(run, entry.step)
    piece = int(manifest.tensors.piece_first[manifest.tensors.index["model.weight"]])
    digests = bytearray(manifest.pieces.digests)
    digests[16 * piece] ^= 1
    wrong = replace(manifest, pieces=replace(manifest.pieces, digests=bytes(digests)))
    put(run, entry.manifest, manifest_json.encode(wrong))
    damage = sole(verify(run, depth=depth))
    assert (damage.kind, damage.entries, damage.steps) == ("bytes", ("model.weight",), (entry.step,))
    with pytest.raises(CorruptCheckpointError):
        load(run, step=entry.step, keys="model.*")
    with pytest.raises(CorruptCheckpointError, match="verify"):
        copy_checkpoints(run, MemoryStore(), step=entry.step)


def test_places_of_another_form(run: MemoryStore) -> None:
    for place in ("300:shards/00/x", "000000000300:shards/00/x", "shards/00/x", "x"):
        with pytest.raises(InvalidArgumentError, match="place"):
            verify(run, after=place)


def test_places_sort_like_steps() -> None:
    """Go on behind the last step of twelve digits, and behind one before the highest: the next one is verified."""
    steps = (10**12 - 1, 10**12, 2**53 - 2, 2**53 - 1)
    store, places = a_run(*steps), list[str]()
    report = verify(store, depth="quick", report_progress=lambda place, *_: places.append(place))
    assert places == sorted(places)
    for number in range(report.shards):
        assert verify(store, depth="quick", after=places[number]).shards == report.shards - number - 1


@examples(40)
@given(st.data())
def test_random_bits(data: st.DataObject) -> None:
    """Flip bits anywhere in the shards of a run: named are the entries that `load` refuses, and those of tables."""
    store = copied(_RUN)
    manifests = {step: manifest_at(store, step) for step in (100, 200, 300)}
    shards = sorted({key for manifest in manifests.values() for key in manifest.shards.keys})
    expected: set[tuple[str, str]] = set()
    hit: dict[str, set[int]] = {}  # steps with entries that are damaged, by shard
    for key in data.draw(st.lists(st.sampled_from(shards), min_size=1, max_size=3, unique=True)):
        last = len(store.space.objects[key].data) - 1
        # Header and table are short, so that places there are drawn apart.
        somewhere = st.integers(0, last) | st.integers(0, min(1_500, last))
        for at in data.draw(st.lists(somewhere, min_size=1, max_size=3, unique=True)):
            flip(store, key, at, data.draw(st.integers(0, 7)))
    for (step, manifest), name in itertools.product(manifests.items(), ENTRIES):
        key, _, length = place_of(manifest, name)
        number = manifest.shards.keys.index(key)
        stop, size = int(manifest.shards.data_starts[number]), int(manifest.shards.table_lengths[number])
        table = slice(stop - size, stop)
        is_table_hit = store.space.objects[key].data[table] != _RUN.space.objects[key].data[table]
        if is_table_hit:
            hit.setdefault(key, set())  # no entry may need these bytes of the table
        is_damaged = is_table_hit and length > BLOCK_BYTES_MIN
        try:
            load(store, step=step, keys=name)
        except CorruptCheckpointError:
            is_damaged = True
        if is_damaged:
            expected.add((key, name))
            hit.setdefault(key, set()).add(step)
    report = verify(store, depth="deep")
    assert {(damage.key, name) for damage in report.damage for name in damage.entries} == expected
    assert {damage.key: damage.steps for damage in report.damage} == {
        key: tuple(sorted(found)) for key, found in hit.items()
    }


class FlippingStore(WrappedStore):
    """Store in which a bit of every range flips in transit, unless the range is read once more."""

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        super().get_into(key, start, buffer)
        if not is_reread():
            buffer[0] ^= 1


def test_a_bit_that_flips_in_transit_is_no_damage(run: MemoryStore) -> None:
    """Flip bits on the way: read once more by another way before anything is reported."""
    assert not Run(FlippingStore(run)).verify(depth="deep").damage


def test_a_foreign_object_of_the_same_length(run: MemoryStore) -> None:
    """Replace a shard by other bytes: a sample finds it, and then names all entries."""
    manifest = manifest_at(run, 200)
    key, _, _ = place_of(manifest, "model.weight")
    put(run, key, b"\x5a" * len(run.space.objects[key].data))
    for depth in ("sample", "deep"):
        damage = sole(Run(run).verify(depth=depth))
        assert (damage.kind, damage.entries) == ("bytes", entries_in(manifest, key))


def test_a_checkpoint_that_shares_what_is_whole() -> None:
    """Let two checkpoints share one tensor of a shard, and damage another one: only the one that has it is damaged."""
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, {"a": torch.zeros(30_000), "b": torch.full((30_000,), float(step))}, wait=True)
    key, start, _ = place_of(manifest_at(store, 10), "b")
    assert key in manifest_at(store, 20).shards.keys
    flip(store, key, start + 70_000)
    damage = sole(verify(store, depth="deep"))
    assert (damage.key, damage.entries, damage.steps) == (key, ("b",), (10,))
    assert not verify(store, step=20, depth="deep").damage


def test_pieces_that_an_earlier_checkpoint_does_not_name() -> None:
    """Let the first live checkpoint reuse one tensor of a shard, and a later one two: the other is checked, too."""
    store, later = MemoryStore(), torch.ones(30_000)
    first = {"a": torch.zeros(30_000), "b": torch.arange(30_000.0)}
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(100, first, wait=True)
        checkpoints.save(200, {**first, "b": later}, wait=True)
    with CheckpointManager(store) as checkpoints:
        checkpoints.restore({name: torch.empty_like(value) for name, value in first.items()}, 100)
        checkpoints.save(300, first, wait=True)
    Run(store).delete(100)
    manifest = manifest_at(store, 300)
    shared = set(manifest.shards.keys) & set(manifest_at(store, 200).shards.keys)
    key, start, _ = place_of(manifest, "b")
    assert shared == {key}
    assert not verify(store, depth="deep").damage
    flip(store, key, start + 70_000)
    damage = sole(verify(store, depth="deep"))
    assert (damage.key, damage.entries, damage.steps) == (key, ("b",), (300,))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("size", [None, 0, 5, 700_000, -1, 4])
def test_a_shard_that_is_missing_too_short_or_too_long(run: MemoryStore, depth: Depth, size: int | None) -> None:
    """Delete, cut or lengthen a shard that all name: the entries behind the cut are named, and no other."""
    manifest = manifest_at(run, 100)
    key, _, _ = place_of(manifest, "model.frozen")
    data = run.space.objects[key].data
    kept = (data + b"more")[: len(data) + size if size in (-1, 4) else size]
    put(run, key, kept)
    if size is None:
        del run.space.objects[key]
    damage = sole(Run(run).verify(300, depth=depth))
    assert damage.kind == ("missing" if size is None else "length")
    assert damage.reason == ("missing" if size is None else f"{len(kept)} bytes instead of {len(data)}")
    start = 0 if size is None else len(kept)
    assert damage.entries == entries_in(manifest, key, start)
    hit = tuple(step for step in (100, 200, 300) if entries_in(manifest_at(run, step), key, start))
    assert (damage.key, damage.steps) == (key, hit)


def test_objects_that_no_checkpoint_names_are_no_damage(run: MemoryStore) -> None:
    run.put("shards/00/1-step-000000000001-rank-00000-0123456789abcdef-0000.safetensors", [b"x"])
    run.put("notes.txt", [b"x"])
    assert not Run(run).verify(depth="deep").damage


# ---- manifests and catalogs


def test_damaged_manifests(run: MemoryStore) -> None:
    """Flip a bit, delete, exchange: each is named with its step, and the other checkpoints are verified."""
    first, second, third = (entry.manifest for entry in live(run))
    flip(run, first, 700)
    run.space.objects[second] = run.space.objects[third]
    del run.space.objects[third]
    report = Run(run).verify(depth="deep")
    assert [(damage.key, damage.kind, damage.steps) for damage in report.damage] == [
        (first, "manifest", (100,)),
        (second, "manifest", (200,)),
        (third, "manifest", (300,)),
    ]


def test_a_damaged_or_lost_catalog(run: MemoryStore) -> None:
    for damage in (lambda: flip(run, CATALOG_KEY, 200), lambda: run.space.objects.pop(CATALOG_KEY)):
        damage()
        with pytest.raises(CorruptCheckpointError, match="dcp-remote recover"):
            Run(run).verify()


# ---- a checkpoint by itself


@pytest.fixture
def alone() -> MemoryStore:
    store = MemoryStore()
    save_as_ranks([{"w": torch.arange(40_000.0)}, {"v": torch.ones(7), "n": 1}], lambda: RemoteWriter(store))
    return store


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_checkpoint_by_itself(alone: MemoryStore, depth: Depth) -> None:
    """Verify it sound, with a shard deleted, with a damaged manifest."""
    assert (verify(alone, depth=depth).damage, verify(alone).steps) == ((), ())
    key, _, _ = place_of(decode(alone.space.objects[MANIFEST_KEY].data), "v")
    del alone.space.objects[key]
    assert sole(verify(alone, depth=depth)).entries == ("v",)
    flip(alone, MANIFEST_KEY, 300)
    damage = sole(verify(alone, depth=depth))
    assert (damage.key, damage.kind, damage.steps) == (MANIFEST_KEY, "manifest", ())
    del alone.space.objects[MANIFEST_KEY]
    with pytest.raises(CheckpointNotFoundError):
        verify(alone, depth=depth)


# ---- meanwhile


def outcomes(before: MemoryStore, act: Callable[[MemoryStore], None], every: int = 1) -> set[tuple[int, ...] | None]:
    """Act before each request of a check in turn: never damage. Return what has changed; None if all was replaced."""
    found: set[tuple[int, ...] | None] = set()
    for number in range(1, 100, every):
        store = copied(before)
        meanwhile = MeanwhileStore(store, number, partial(act, store))
        try:
            report = verify(meanwhile, depth="deep")
        except CheckpointGoneError:
            found.add(None)
        else:
            assert not report.damage, (number, report)
            found.add(report.changed)
        if not meanwhile.acted:
            break
    return found


def delete_step(store: MemoryStore) -> None:
    Run(store).delete(200)


def thin_step(store: MemoryStore) -> None:
    deletions = Deletions(store)
    thin(deletions, [200], deadline=Deadline(30))
    deletions.queue.delete(deadline=Deadline(30), pause_seconds=0)


def save_step(store: MemoryStore) -> None:
    with CheckpointManager(store) as checkpoints:
        checkpoints.restore(state_of(0))
        checkpoints.save(400, state_of(400), wait=True)


def replace_all(store: MemoryStore) -> None:
    old = [key for key in store.space.objects if key.startswith("shards/")]
    save_as_ranks([{"w": torch.zeros(5)}], lambda: RemoteWriter(store, overwrite=True))
    store.delete(old)


def test_changes_meanwhile(alone: MemoryStore) -> None:
    """Delete, thin, save or replace a checkpoint: a deleted or thinned one is named."""
    assert outcomes(_RUN, delete_step) == outcomes(_RUN, thin_step) == {(), (200,)}
    assert outcomes(_RUN, save_step, every=5) == {()}  # a save takes a tenth of a second
    assert outcomes(alone, replace_all) == {(), None}


def test_a_damaged_manifest_of_a_checkpoint_that_is_deleted_meanwhile(run: MemoryStore) -> None:
    """Delete the checkpoint before the last request, which reads the catalog again: no damage is left."""
    flip(run, live(run)[1].manifest, 700)
    recording = RecordingStore(run)
    assert sole(verify(recording, depth="quick")).kind == "manifest"
    meanwhile = MeanwhileStore(run, len(recording.calls), lambda: Run(run).delete(200))
    report = verify(meanwhile, depth="quick")
    assert (report.damage, report.changed) == ((), (200,))


# ---- interruptions, and memory


def test_interrupted_and_continued(run: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail for ever from each request on, and go on behind the last place: together, every shard is checked once."""
    shards = {key for step in (100, 200, 300) for key in manifest_at(run, step).shards.keys}
    key, start, _ = place_of(manifest_at(run, 300), "optim.m")
    flip(run, key, start)
    monkeypatch.setattr(verification, "_BATCH", 2)
    places = 0
    for number in range(2, 60, 3):
        seen: list[tuple[str, Damage | None, int]] = []
        rest: list[tuple[str, Damage | None, int]] = []
        failing = FaultyStore(run, [nth(number, "request", persistent=True, error=lambda: StorageError("Injected."))])
        try:
            verify(failing, depth="deep", report_progress=lambda *given, seen=seen: seen.append(given))
        except StorageError:
            after = seen[-1][0] if seen else ""
        else:
            break
        report = verify(run, depth="deep", after=after, report_progress=lambda *given, rest=rest: rest.append(given))
        assert sorted(place.rpartition(":")[2] for place, _, _ in seen + rest) == sorted(shards)
        assert report.shards == len(rest)
        assert bool(report.damage) != any(damage for _, damage, _ in seen)
        places += bool(after)
    assert places > 3
    Run(run).delete(100)  # and its shard, at which a check was interrupted
    assert sole(verify(run, depth="deep", after="0000000000000100:shards/zz/gone.safetensors")).key == key
    with pytest.raises(InvalidArgumentError, match="place"):
        verify(run, after="100")


@pytest.mark.parametrize("depth", ["sample", "deep"])
def test_memory_is_bounded(depth: Depth) -> None:
    """Verify 96 MiB in two shards: held are a range of 4 MiB of each, and little else."""
    store = MemoryStore()
    save_as_ranks([{"a": torch.arange(24 * 2**20, dtype=torch.int32)}], lambda: RemoteWriter(store, shard_bytes=2**26))
    assert len(decode(store.space.objects[MANIFEST_KEY].data).shards.keys) == 2
    verify(store, depth="quick")  # what is made once per process
    tracemalloc.start()
    try:
        assert not verify(store, depth=depth).damage
        assert tracemalloc.get_traced_memory()[1] < 12 * 2**20
    finally:
        tracemalloc.stop()
