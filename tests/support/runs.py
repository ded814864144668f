"""Runs for tests: saves of real manifests and shards without torch, and checks of stored objects.

Each checkpoint has a model of two shards, an optimizer of one, and a step at the top. The bytes of a shard follow from
its name, so that they can be checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.geometry import Box
from dcp_remote.errors import CheckpointNotFoundError
from dcp_remote.format import manifest_json
from dcp_remote.format.catalog import CATALOG_KEY, Attempt, Catalog, Entry, add_entry, take_fence
from dcp_remote.format.catalog_json import encode
from dcp_remote.format.keys import manifest_key, origin
from dcp_remote.format.manifest import TORCH, Manifest, RunInfo, TensorKind
from dcp_remote.format.shard import ShardNames
from dcp_remote.run.catalog_store import read_catalog, swap
from dcp_remote.run.deletions import Applied, Deletions, require_expendable
from dcp_remote.run.lookup import read_entry
from dcp_remote.run.retention import Decision, Retention
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.storage.retrying import RetryingStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from tests.support.catalogs import identity, stored
from tests.support.manifests import Layout, ObjectLayout, build, decode

_Answer = TypeVar("_Answer")

# Numbers of a checkpoint's shards.
FROZEN, TRAINED, OPTIMIZER = 0, 1, 2

PATIENCE_SECONDS = 30.0


def _manifest() -> Manifest:
    def tensor(name: str) -> Layout:
        return Layout(name, TensorKind("float32"), (4,), (Box((0,), (4,)),), ((16,),))

    manifest = build(
        [tensor("model.frozen"), tensor("optim.m"), tensor("model.trained")],
        [ObjectLayout("optim.groups", TORCH, (5,))],
        {"optim.lr": b"0.5", "step": b"1"},
        shard_of=[FROZEN, OPTIMIZER, TRAINED, OPTIMIZER],
    )
    flatten: dict[str, tuple[str | int, ...]] = {name: tuple(name.split(".")) for name in manifest.names()}
    return replace(manifest, flatten=flatten, replaces=())


_PATTERN = _manifest()


def content(key: str, size_bytes: int) -> bytes:
    """Return the bytes of a shard."""
    return (key.encode() * size_bytes)[:size_bytes]


def manifest_of(
    run: RunInfo, *, letter: str = "a", base: Manifest | None = None, borrows: Sequence[int] = ()
) -> Manifest:
    """Return the manifest of a checkpoint with new shards, except those reused from the base."""
    names = ShardNames(0, origin(revision=run.revision, step=run.step))
    # A thinned base has no optimizer shard to reuse.
    reused = dict(enumerate(base.shards.keys)) if base is not None else {}
    keys = [reused[number] if number in reused and number in borrows else names.key(number) for number in range(3)]
    return replace(
        _PATTERN,
        save_id=identity(run.step, letter),
        created="2026-01-02T03:04:05+00:00",
        shards=replace(_PATTERN.shards, keys=tuple(keys)),
        run=run,
    )


def put_shards(store: ObjectStore, manifest: Manifest, *, base: Manifest | None = None) -> None:
    """Put the shards of a manifest, except those of the base."""
    reused = base.shards.keys if base is not None else ()
    for key, size_bytes in zip(manifest.shards.keys, manifest.shards.sizes.tolist(), strict=True):
        if key not in reused:
            store.put(key, [content(key, size_bytes)])


def begin(
    store: ObjectStore,  # store at the run's prefix
    step: int,
    *,
    letter: str = "a",  # letter of the save_id; see `identity`
    base: int | None = None,  # step whose shards are reused; None for none
    borrows: Sequence[int] = (FROZEN,),  # numbers of the shards that are reused
    abandons: int | None = None,  # step that the job rolled back to; see `Attempt`
    overwrite: bool = False,  # whether to replace a live checkpoint of this step
    names: tuple[str, ...] = (),
    metrics: tuple[tuple[str, float], ...] = (),  # names and values
) -> Attempt:
    """Carry out a save into the run, which is created if needed, by the job that holds the fence, up to its commit."""
    asking = RetryingStore(store, Deadline(PATIENCE_SECONDS))
    now = read_catalog(asking) or fence(store)
    there, source = now.entry_at(step), None if base is None else now.entry_at(base)
    if base is not None and source is None:
        raise CheckpointNotFoundError("The checkpoint whose shards are to be reused is gone.", step=base)
    info = RunInfo(now.run_id, step, now.token, now.revision, names, metrics)
    reused = read_entry(asking, source) if source is not None else None
    manifest = manifest_of(info, letter=letter, base=reused, borrows=borrows)
    put_shards(asking, manifest, base=reused)
    key = manifest_key(revision=now.revision, step=step)
    asking.put(key, [manifest_json.encode(manifest)])
    return Attempt(
        entry_of(key, manifest),
        now.run_id,
        before=there.save_id if there is not None and overwrite else None,
        reused=(source.save_id, source.manifest) if source is not None else None,
        abandons=abandons,
    )


def commit(store: ObjectStore, attempt: Attempt) -> Entry:
    """Commit a save that was begun."""
    swap(store, lambda run: add_entry(run, attempt), deadline=Deadline(PATIENCE_SECONDS))
    return attempt.entry


def thin(maintenance: Deletions, steps: Sequence[int], *, deadline: Deadline) -> Applied:
    """Thin checkpoints by their steps, as retention does; refuse pinned ones and the newest."""
    keys = Retention().optimizer_keys
    save_ids: set[str] = set()

    def choose(now: Catalog) -> Decision:
        if not save_ids:
            entries = [now.entry_at(step) for step in steps]
            if None in entries:
                raise CheckpointNotFoundError("No checkpoint of one of these steps is live.", steps=steps)
            save_ids.update(entry.save_id for entry in entries if entry is not None)
        whole = [
            entry
            for entry in now.entries
            if entry.save_id in save_ids
            and set(keys).isdisjoint(entry.thinned)
            and (entry.manifest, keys) not in maintenance._bare
        ]
        require_expendable(now, whole)
        return Decision(retire=(), thin=tuple(entry.step for entry in whole))

    return maintenance._carry_out(choose, keys=keys, deadline=deadline)


def save(store: ObjectStore, step: int, **how: Any) -> Entry:
    """Begin a save, and commit it."""
    return commit(store, begin(store, step, **how))


def fence(store: ObjectStore) -> Catalog:
    """Take the fence of the run for a newer job."""
    return swap(store, take_fence, deadline=Deadline(PATIENCE_SECONDS), create=True)


def entry_of(key: str, manifest: Manifest) -> Entry:
    run = manifest.run
    assert run is not None
    return Entry(
        step=run.step,
        save_id=manifest.save_id,
        manifest=key,
        size_bytes=manifest.total_bytes,
        created=manifest.created,
        token=run.token,
        began_revision=run.revision,
        names=run.names,
        metrics=run.metrics,
        thinned=run.thinned,
    )


def a_run(*steps: int, borrow: bool = True) -> MemoryStore:
    """Return a run of these steps; each reuses the frozen shard of the one before."""
    store = MemoryStore()
    for before, step in itertools.pairwise([None, *steps]):
        assert step is not None
        save(store, step, base=before if borrow else None)
    return store


def copied(store: MemoryStore) -> MemoryStore:
    """Return an independent copy of a store, with objects of the same versions."""
    copy = MemoryStore()
    copy.space.objects.update(store.space.objects)
    copy.space._writes = store.space._writes
    return copy


def put_catalog(store: MemoryStore, catalog: Catalog) -> None:
    """Put a catalog, without a condition."""
    store.put(CATALOG_KEY, [encode(catalog, "0" * 32)])


# ---- stored objects, read without wrappers


def steps(store: MemoryStore) -> list[int]:
    return [entry.step for entry in live(store)]


def live(store: MemoryStore) -> tuple[Entry, ...]:
    """Return the catalog's entries."""
    catalog = stored(store)
    assert catalog is not None
    return catalog.entries


def manifest_at(store: MemoryStore, step: int) -> Manifest:
    """Return the manifest of a live checkpoint."""
    (entry,) = (entry for entry in live(store) if entry.step == step)
    return decode(store.space.objects[entry.manifest].data)


def shard_at(store: MemoryStore, step: int, number: int) -> str:
    """Return the key of a shard of a live checkpoint."""
    return manifest_at(store, step).shards.keys[number]


def keys(store: MemoryStore) -> set[str]:
    """Return the keys of all objects except the catalog."""
    return set(store.space.objects) - {CATALOG_KEY}


def named(store: MemoryStore) -> set[str]:
    """Return the keys of live manifests and of their shards."""
    return {
        key
        for entry in live(store)
        for key in (entry.manifest, *_decoded(store.space.objects[entry.manifest].data).shards.keys)
    }


def assert_sound(store: MemoryStore) -> None:
    """Check that every live checkpoint has its manifest, as the catalog says, and its shards with their bytes."""
    for entry in live(store):
        assert entry.manifest in store.space.objects, entry
        manifest = _decoded(store.space.objects[entry.manifest].data)
        run = manifest.run
        assert run is not None
        assert (manifest.save_id, run.step, run.thinned) == (entry.save_id, entry.step, entry.thinned)
        assert manifest.total_bytes == entry.size_bytes
        for key, size_bytes in zip(manifest.shards.keys, manifest.shards.sizes.tolist(), strict=True):
            assert key in store.space.objects, (entry, key)
            assert store.space.objects[key].data == content(key, size_bytes)


def assert_tidy(store: MemoryStore) -> None:
    """Check that live checkpoints are sound, and that the store holds what they name and nothing else."""
    assert_sound(store)
    assert keys(store) == named(store)


# A campaign decodes the same few manifests repeatedly.
_decoded = lru_cache(maxsize=1_000)(decode)


class MeanwhileStore(WrappedStore):
    """Store in which another program acts just before, or just after, the n-th request."""

    def __init__(self, store: ObjectStore, number: int, act: Callable[[], object], *, after: bool = False) -> None:
        super().__init__(store)
        self._numbers = itertools.count(1)
        self._number = number
        self._act = act
        self._after = after
        self.acted = False

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        due = next(self._numbers) == self._number
        if due and not self._after:
            self._meanwhile()
        try:
            return send()
        finally:
            if due and self._after:
                self._meanwhile()

    def _meanwhile(self) -> None:
        self.acted = True
        self._act()
