"""Simulated training jobs and everything else that acts on one run at the same time; a seed determines the history.

`world.py` decides which actor goes on and which request fails; `invariants.py` says what must hold. Here are the
actors, which use the functions of the package: jobs that save (and overwrite, reuse shards, roll back, and continue
although they are fenced), actors that retire, thin, pin, name, delete and remove orphans, and readers.

    python -m tests.simulation.jobs 1234     the history of this seed, one line a request
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.digests import digest, piece_digest
from dcp_remote.common.geometry import Box
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    CommitUnknownError,
    CorruptCheckpointError,
    DcpRemoteError,
    FencedError,
    InvalidArgumentError,
    SaveFailedError,
    StorageError,
)
from dcp_remote.format import catalog_json, manifest_json
from dcp_remote.format.catalog import CATALOG_KEY, Attempt, Catalog, Entry, Owner, pin_entry
from dcp_remote.format.columns import to_base64
from dcp_remote.format.document import seal, unseal
from dcp_remote.format.keys import origin
from dcp_remote.format.manifest import Manifest, RunInfo, TensorKind
from dcp_remote.format.segments import segment_keys
from dcp_remote.format.shard import HeaderEntry, ShardNames, header
from dcp_remote.loading.load import load
from dcp_remote.loading.run_handle import Run as RunHandle
from dcp_remote.run.catalog_store import read_catalog, swap
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.gc import remove_orphans
from dcp_remote.run.job import CheckpointLabels, JobSession
from dcp_remote.run.lookup import as_step, read_manifest_at
from dcp_remote.run.recovery import recover
from dcp_remote.run.retention import Best, Retention
from dcp_remote.storage.base import Content
from dcp_remote.storage.retrying import RetryingStore
from dcp_remote.storage.wrapper import WrappedStore
from tests.simulation import world
from tests.simulation.invariants import (
    Collecting,
    Deleting,
    Fencing,
    Keeping,
    Labelling,
    Naming,
    Pinning,
    Recovering,
    Removing,
    Run,
    Save,
    Settling,
    State,
    Thinning,
    Unnaming,
)
from tests.simulation.world import Actor, BrokenError, World
from tests.support.manifests import Layout, build
from tests.support.runs import thin
from tests.support.segments import lower_segments, split

# Long enough for a save with few faults, and no longer.
SAVE_SECONDS = 60.0

# Probability that the catalog is lost.
LOSES = 0.15

# Attempts of one save.
ATTEMPTS = 3

NAMES = ("model.frozen", "model.w", "optim.m")
BYTES = 16

# Attributes of a `JobSession` that belong to its machine, and are not copied with the job.
_MACHINE = ("_store",)


# Errors that an actor may get. An error that says that something is damaged is not among them.
TOLD = (CheckpointNotFoundError, CommitConflictError, CommitUnknownError, SaveFailedError, StorageError)


# ---- the contents of a checkpoint: one shard per tensor


@cache
def pattern(names: tuple[str, ...]) -> Any:
    """Return the document of a manifest of tensors of four numbers."""
    layouts = [Layout(name, TensorKind("float32"), (4,), (Box((0,), (4,)),), ((BYTES,),)) for name in names]
    manifest = build(layouts, shard_of=range(len(names)))
    starts = np.array([len(shard_header(name)) for name in names], dtype=np.int64)
    sizes = starts + BYTES
    shards = replace(manifest.shards, sizes=sizes, data_starts=starts, table_digests=digest(b"") * len(names))
    pieces = replace(manifest.pieces, start=starts)
    flatten: dict[str, tuple[str | int, ...]] = {name: tuple(name.split(".")) for name in names}
    whole = replace(manifest, replaces=(), shards=shards, pieces=pieces, flatten=flatten)
    return json.loads(unseal(manifest_json.encode(whole)))


@cache
def shard_header(name: str) -> bytes:
    """Return the bytes of a shard that precede its data."""
    return header([HeaderEntry(name, "float32", (4,), BYTES)], table_length=0)


def manifest_of(save_id: str, run: RunInfo, keys: Sequence[str], state: State) -> bytes:
    """Return the stored manifest of a state that lies in these shards.

    Made without the encoder, which has its own tests and takes longer than all requests of a save.
    """
    of = pattern(tuple(state))
    digests = b"".join(piece_digest(digest(data)) for data in state.values())
    fields = {name: getattr(run, name) for name in ("run_id", "step", "token", "revision", "names", "thinned")}
    changed = {
        "save_id": save_id,
        "run": fields | {"metrics": dict(run.metrics)},
        "shards": of["shards"] | {"keys": keys},
        "pieces": of["pieces"] | {"digests": to_base64(digests)},
    }
    return seal(msgspec.json.encode(of | changed))


def _in_segments(
    body: bytes, names: ShardNames, base: Manifest | None, *, pieces: int
) -> tuple[Manifest, bytes, dict[str, Sequence[Buffer]]]:
    """Return a manifest, if it is large in segments, one for each shard; its bytes, and segments to put.

    Segments of an earlier checkpoint are named again where they are the same.
    """
    manifest = manifest_json.decode(body)
    assert manifest is not None
    with lower_segments(pieces):
        large, segments = split(manifest, names.renew().key, segment_keys(base) if base is not None else {})
    return large, manifest_json.encode(large) if large.segments is not None else body, segments


def numbers(*values: float) -> bytes:
    """Return the bytes of a tensor."""
    return np.resize(np.array(values, dtype=np.float32), 4).tobytes()


def loaded(actor: Actor | World, run: Run, step: int | str | None) -> State:
    """Load a checkpoint by the real reader, and check it."""
    may_be_told = run.is_lost
    try:
        nested = load(actor.store, step=step)
    except CorruptCheckpointError as error:
        if may_be_told and "recover" in str(error):
            raise CheckpointNotFoundError(str(error)) from error
        raise
    state = {
        f"{key}.{name}": tensor.numpy().tobytes()
        for key, tensors in sorted(nested.items())
        for name, tensor in sorted(tensors.items())
    }
    run.loaded(state, as_step(step))
    return state


# ---- jobs that train


@dataclass(frozen=True, slots=True)
class Scene:
    """Actors of one history. Few, most of the time: interactions of two actors are rare among many."""

    jobs: tuple[int, int]  # fewest and most jobs that train
    keep: tuple[int, int] = (0, 0)  # fewest and most actors that retire and thin
    collect: tuple[int, int] = (0, 0)  # fewest and most actors that remove orphans
    pin: tuple[int, int] = (0, 0)  # fewest and most actors that pin
    read: tuple[int, int] = (0, 0)  # fewest and most readers
    handle: tuple[int, int] = (0, 0)  # fewest and most people that delete, name and list by the methods of `Run`
    doubles: float = 0.0  # probability that a job runs twice, at each save
    # Probability that steps are retired and thinned by an explicit call, rather than by a retention.
    explicit: float = 0.5
    rounds: int = 3  # most repetitions of each actor
    # Probability that, while a save reuses shards, another actor thins the checkpoint that holds them; and that an
    # actor that retires and thins only thins, while another one removes orphans.
    thins: float = 0.0
    pins: float = 0.0  # probability that, while a save replaces an abandoned checkpoint, another actor pins that one
    handles: float = 0.0  # probability that a job deletes or names a checkpoint after each of its saves
    # Probability that a job first saves the step that it has restored, as a loop that begins by a save.
    lingers: float = 0.0
    # Choices of where a job goes on: the newest checkpoint, an older one, none on purpose, or none by mistake.
    resumes: tuple[str, ...] = 7 * ("newest",) + 4 * ("older",) + ("none", "mistake")


SCENES = (
    Scene(jobs=(1, 3), keep=(0, 2), collect=(0, 1), pin=(0, 1), read=(0, 1), doubles=0.1),
    Scene(jobs=(2, 2), read=(0, 1)),
    Scene(jobs=(1, 1), keep=(1, 2), explicit=0.8, read=(0, 1)),
    Scene(jobs=(1, 1), keep=(1, 1), collect=(1, 1)),
    Scene(jobs=(1, 1), collect=(1, 2), doubles=0.1),
    Scene(jobs=(1, 1), doubles=0.5),
    Scene(jobs=(0, 1), keep=(1, 2), explicit=0.1, pin=(1, 2)),
    Scene(jobs=(1, 1), keep=(1, 2), explicit=1.0, rounds=1),
    Scene(jobs=(0, 1), keep=(1, 1), collect=(1, 1), explicit=1.0, rounds=1),
    Scene(jobs=(1, 1), collect=(1, 1), rounds=1),
    Scene(jobs=(1, 1), doubles=1.0, rounds=2),
    Scene(jobs=(0, 0), keep=(1, 1), explicit=0.8, read=(1, 1), rounds=1),
    Scene(jobs=(1, 2), keep=(0, 1), collect=(0, 1), read=(0, 1), handle=(1, 2)),
    Scene(jobs=(0, 0), handle=(2, 2), rounds=2),
    Scene(jobs=(0, 1), collect=(0, 1), handle=(1, 1), rounds=1),
    Scene(jobs=(2, 2), handles=0.7),
    Scene(jobs=(2, 3), keep=(0, 1), handle=(0, 1), doubles=0.1, lingers=0.7),
    Scene(jobs=(1, 2), pin=(0, 1), resumes=("older",), pins=0.5),
    Scene(jobs=(1, 1), rounds=1, resumes=("older",), thins=1.0),
    Scene(jobs=(0, 0), keep=(1, 1), rounds=1, thins=1.0),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one job."""

    resumes: str = "newest"  # where the job goes on; as in `Scene`
    saves: int = 1
    overwrites: float = 0.0  # probability of replacing an existing checkpoint, from 0 to 1
    borrows: bool = True  # whether shards of the newest checkpoint are reused
    stubborn: bool = False  # whether the job goes on although it is fenced
    scene: Scene = Scene(jobs=(1, 1))  # frozen
    retention: Retention | None = None  # policy that the job applies; None keeps all

    @classmethod
    def drawn(cls, rng: random.Random, scene: Scene) -> Plan:
        return cls(
            resumes=rng.choice(scene.resumes),
            saves=rng.randint(1, scene.rounds + 1),
            overwrites=rng.choice([0.0, 0.2, 0.7]),
            borrows=rng.random() < 0.7,
            stubborn=rng.random() < 0.5,
            scene=scene,
            retention=retention(rng) if rng.random() < 0.3 else None,
        )


def retention(rng: random.Random) -> Retention:
    """Return a random retention that retires many checkpoints."""
    return Retention(
        keep_last=rng.choice([1, 1, 2]),
        keep_every=rng.choice([None, None, 2]),
        keep_best=rng.choice([None, Best("loss")]),
        keep_optimizer_last=rng.choice([None, 1, 1, 2]),
        keep_named=rng.random() < 0.5,
    )


class Trainer:
    """A job and its state in memory. A copy of a trainer is the same job, run twice."""

    def __init__(self, actor: Actor, run: Run, plan: Plan, *, name: str) -> None:
        self.actor, self.run, self.plan, self.name = actor, run, plan, name
        self.job = self._job()
        self.maintenance = _maintenance(self.actor)
        self.step = 0
        # The step that each commit names until one succeeds, as in `JobSession`.
        self.abandons: int | None = None
        # Owner of the run when the job restored its checkpoint; None if it restored none.
        self.seen: Owner | None = None
        # Job as which the last save began; kept although the job was fenced since, as by `RankSaver`.
        self.owner: Owner | None = None

    def resume(self) -> None:
        """Go on from a checkpoint."""
        actor = self.actor
        catalog = read_catalog(RetryingStore(actor.store, actor.deadline(SAVE_SECONDS)))
        if catalog is None or not catalog.entries or self.plan.resumes == "mistake":
            return
        entry = catalog.latest() or catalog.entries[-1]  # one by its step, where all are abandoned
        if self.plan.resumes == "older":
            entry = actor.rng.choice(catalog.entries)
        self.step = entry.step
        if self.plan.resumes == "none":
            self.step = 0
            self.abandons = -1
        else:
            self.abandons, self.seen = self.step, Owner(catalog.run_id, catalog.token)
            if actor.rng.random() < 0.3:
                loaded(actor, self.run, self.step)
        self.job.resume_from(self.abandons, self.seen)

    def train(self) -> None:
        """Save repeatedly."""
        actor, rng = self.actor, self.actor.rng
        for number in range(self.plan.saves):
            if number and self.plan.overwrites:
                self.step += rng.choice([0, 0, 1, 1, 1, 2])
            elif number or not self.plan.scene.lingers or rng.random() > self.plan.scene.lingers:
                self.step += rng.choice([1, 1, 2])
            if rng.random() < self.plan.scene.doubles:
                self._double()
            try:
                self._save()
            except FencedError:
                if not self.plan.stubborn:
                    return
            self._apply_retention()
            if rng.random() < self.plan.scene.handles and self.owner is not None:  # else it acts as a person does
                record_error(actor, partial(_change_by_handle, actor, self.run, owner=self.owner, job=self.name))
            if rng.random() < 0.5:
                actor.world.rest(actor)

    def _apply_retention(self) -> None:
        """Apply retention as the manager does after a save."""
        actor, maintenance = self.actor, self.maintenance
        actor.doing = Settling()
        record_error(actor, lambda: maintenance.settle(deadline=actor.deadline(SAVE_SECONDS)))
        if self.plan.retention is not None and self.owner is not None:
            apply_retention(actor, maintenance, self.plan.retention, owner=self.owner, job=self.name)
        else:
            record_error(actor, lambda: maintenance.queue.delete(deadline=actor.deadline(SAVE_SECONDS)))

    def copied(self) -> Callable[[Actor], Trainer]:
        """Return a function that continues this job in another actor, from a copy of its memory."""
        other, known = copy.copy(self), {name: value for name, value in vars(self.job).items() if name not in _MACHINE}

        def started(actor: Actor) -> Trainer:
            other.actor = actor
            other.job, other.maintenance = other._job(), _maintenance(actor)
            vars(other.job).update(known)
            return other

        return started

    def _double(self) -> None:
        """Run this job twice from here on, as if from a snapshot of its machine: both copies are about to save."""
        start = self.copied()
        is_new = self.job.owner is None

        def play(actor: Actor) -> None:
            other = start(actor)
            if is_new:
                other.name = actor.name  # the copy takes a fence of its own
            other.plan = replace(self.plan, scene=replace(self.plan.scene, doubles=0.0))
            other.step = max(other.step - 1, 0)
            other.train()

        self.actor.world.add(f"{self.name}'", play)

    def _save(self) -> None:
        rng = self.actor.rng
        note = CheckpointLabels.of(
            self.step,
            name=rng.choice([None, None, "best", ("best", "stable")]),
            metrics={"loss": rng.randrange(4)} if rng.random() < 0.7 else None,
            overwrite=rng.random() < self.plan.overwrites,
        )
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._attempt(note, borrow=self.plan.borrows and attempt < ATTEMPTS)
                return
            except FencedError as error:
                self.actor.say(f"    is told {type(error).__name__}")
                raise
            except (
                CheckpointExistsError,
                InvalidArgumentError,
            ) as error:  # InvalidArgumentError where the other copy is ahead
                self.actor.say(f"    is told {type(error).__name__}")
                return
            except TOLD as error:
                self.actor.say(f"    is told {type(error).__name__}: {error}")

    def _attempt(self, note: CheckpointLabels, *, borrow: bool) -> None:
        actor, world = self.actor, self.actor.world
        deadline = actor.deadline(SAVE_SECONDS)
        begun = self._begin(note, borrow=borrow, deadline=deadline)
        if begun is None:
            return
        ours = begun.entry
        self.owner = Owner(begun.run_id, ours.token)
        number, base = world.number(), self._base(begun)
        label = f"{self.name}.{number}"
        state, reused = self._state(number, base)
        save = Save(
            label=label,
            save_id=ours.save_id,
            job=self.name,
            step=note.step,
            before=begun.before if note.overwrite else None,
            abandons=self.abandons,
            seen=self.seen.token if self.seen is not None else None,
            names=note.names,
            metrics=note.metrics,
            began=ours.began_revision,
            state=state,
        )
        actor.doing = save
        self.run.begin(save)
        self._disturb(base, note.step)
        actor.say(
            f"    begins {label} of step {note.step}"
            + (f", with {', '.join(reused)} of an earlier checkpoint" if reused else "")
        )
        storing = RetryingStore(actor.store, deadline)
        names = ShardNames(0, origin(revision=ours.began_revision, step=note.step))
        keys = [reused.get(name) or names.key(number) for number, name in enumerate(state)]
        put: list[str] = []
        try:
            for name, key in zip(state, keys, strict=True):
                if name not in reused:
                    put.append(key)
                    storing.put(key, [shard_header(name), state[name]])
            run = RunInfo(begun.run_id, ours.step, ours.token, ours.began_revision, ours.names, ours.metrics)
            body = manifest_of(ours.save_id, run, keys, state)
            manifest, body, segments = _in_segments(body, names, base, pieces=3 * (number % 2))
            put += segments
            for key, parts in segments.items():
                storing.put(key, parts)
        except StorageError as error:
            self.run.refuse(save, error)
            storing.delete(put)  # no manifest can name them
            raise
        replaced: dict[str, Entry] = {}

        def look(now: Catalog) -> None:
            there = now.entry_at(note.step)
            if there is not None and there.save_id != ours.save_id:
                replaced[there.manifest] = there

        try:
            catalog, entry = self.job.commit(begun, body, size_bytes=manifest.total_bytes, deadline=deadline, look=look)
        except DcpRemoteError as error:
            if not isinstance(error, CommitUnknownError):
                self.run.refuse(save, error)
            self.maintenance.note(begun.run_id, ours, put)
            raise
        finally:
            for one in replaced.values():
                self.maintenance.note(begun.run_id, one)
        actor.say(f"    is told that {label} is committed")
        self.run.committed(save, catalog)
        self.abandons = None
        self.maintenance.named.remember(entry.manifest, manifest.shards.keys)

    def _begin(self, note: CheckpointLabels, *, borrow: bool, deadline: Deadline) -> Attempt | None:
        """Begin a save; None if the step is saved already, whose checkpoint gets the names and metrics."""
        self.actor.doing = Fencing(self.name)
        begun = self.job.begin(note, borrow=borrow, deadline=deadline)
        if isinstance(begun, Attempt):
            return begun
        self.actor.doing = Labelling(begun.save_id, note.names, note.metrics, self.name)
        self.job.label(begun, note, deadline=deadline)
        self.actor.say(f"    keeps step {note.step}")
        return None

    def _disturb(self, base: Manifest | None, step: int) -> None:
        """Let other actors thin the reused checkpoint, and pin the one to be replaced, during the save."""
        rng, world = self.actor.rng, self.actor.world
        if base is not None and self.plan.scene.thins and rng.random() < self.plan.scene.thins:
            reused_step = self.run.saves[base.save_id].step
            world.add(f"{self.name}-thins", lambda other: record_error(other, lambda: _thin(other, reused_step)))
        before = self.run.catalog.entry_at(step) if self.run.catalog is not None else None
        if before is not None and self.plan.scene.pins and rng.random() < self.plan.scene.pins:
            world.add(f"{self.name}-pins", lambda other: record_error(other, lambda: _pin(other, before.step)))

    def _base(self, begun: Attempt) -> Manifest | None:
        if begun.reused is None:
            return None
        save_id, key = begun.reused
        try:
            return read_manifest_at(self.actor.store, key, save_id=save_id)
        except DcpRemoteError:
            return None

    def _state(self, number: int, base: Manifest | None) -> tuple[dict[str, bytes], dict[str, str]]:
        """Return the state to save, and the keys of the earlier shards that hold some of it."""
        rng = self.actor.rng
        names = NAMES if rng.random() < 0.9 else NAMES[:2]
        state = {name: numbers(number, index) for index, name in enumerate(names)}
        reused: dict[str, str] = {}
        if base is not None:
            before = self.run.saves[base.save_id].state
            for index, name in enumerate(base.tensors.names):
                if name in state and name != "model.w" and rng.random() < 0.6:
                    state[name] = before[name]
                    reused[name] = base.shards.keys[index]
        return state, reused

    def _job(self) -> JobSession:
        return JobSession(self.actor.store)


# ---- other actors of a run


def keep(actor: Actor, *, scene: Scene) -> None:
    """Retire and thin, by a retention or by an explicit call."""
    rng = actor.rng
    maintenance = _maintenance(actor)
    by = retention(rng)
    for _ in range(rng.randint(1, scene.rounds)):
        if scene.thins:
            record_error(actor, partial(_thin_beside_gc, actor))
        elif rng.random() >= scene.explicit:
            apply_retention(actor, maintenance, by)
        else:
            record_error(actor, partial(_remove, actor, maintenance))
        if scene.rounds > 1:
            actor.world.rest(actor)


def apply_retention(
    actor: Actor, maintenance: Deletions, by: Retention, *, owner: Owner | None = None, job: str | None = None
) -> None:
    """Apply retention and delete, as the manager does after a save."""
    actor.doing = Keeping(by, job)
    record_error(actor, lambda: maintenance.apply(by, deadline=actor.deadline(SAVE_SECONDS), owner=owner))
    if actor.rng.random() < 0.3:
        actor.world.rest(actor)
    record_error(
        actor,
        lambda: maintenance.queue.delete(deadline=actor.deadline(SAVE_SECONDS), batch=actor.rng.choice([2, 1000])),
    )


def _remove(actor: Actor, maintenance: Deletions) -> None:
    rng = actor.rng
    catalog = _catalog(actor)
    if not catalog.entries:
        return
    # The newest more often: other actors are most likely to read it at this moment.
    steps = (catalog.entries[-1 if rng.random() < 0.5 else rng.randrange(len(catalog.entries))].step,)
    force = rng.random() < 0.7
    deadline = actor.deadline(SAVE_SECONDS)
    if rng.random() < 0.5:
        actor.doing = Removing(steps, force)
        maintenance.retire(steps, deadline=deadline, force=force)
    else:
        actor.doing = Thinning(steps)
        thin(maintenance, steps, deadline=deadline)
    maintenance.queue.delete(deadline=deadline)


def _thin_beside_gc(actor: Actor) -> None:
    older = [entry.step for entry in _catalog(actor).entries][:-1]
    if older:
        step = actor.rng.choice(older)
        actor.world.add(f"{actor.name}-collects", partial(collect, rounds=1))
        # Orphans are removed at about the time when the new manifest exists, and the catalog does not name it yet.
        actor.gives_way_at = frozenset({actor.requests + actor.rng.randint(3, 7)})
        _thin(actor, step)


def _thin(actor: Actor, step: int) -> None:
    maintenance, deadline = _maintenance(actor), actor.deadline(SAVE_SECONDS)
    actor.doing = Thinning((step,))
    thin(maintenance, [step], deadline=deadline)
    maintenance.queue.delete(deadline=deadline)


def _maintenance(actor: Actor) -> Deletions:
    return Deletions(actor.store)


def collect(actor: Actor, *, rounds: int) -> None:
    """Remove orphans."""
    for _ in range(actor.rng.randint(1, rounds)):
        grace_seconds = actor.rng.choice([0.0, 0.0, 30.0])
        actor.doing = Collecting(grace_seconds)
        record_error(
            actor,
            partial(
                remove_orphans,
                actor.store,
                grace_seconds=grace_seconds,
                timeout_seconds=100.0,
                clock=actor.time,
            ),
        )
        if rounds > 1:
            actor.world.rest(actor)


def pin(actor: Actor, *, rounds: int) -> None:
    """Pin a live checkpoint, or unpin one."""
    for _ in range(actor.rng.randint(1, rounds)):
        record_error(actor, lambda: _pin(actor))
        if rounds > 1:
            actor.world.rest(actor)


def _pin(actor: Actor, step: int | None = None) -> None:
    steps = [entry.step for entry in _catalog(actor).entries] if step is None else [step]
    if steps:
        doing = Pinning(actor.rng.choice(steps), step is not None or actor.rng.random() < 0.8)
        actor.doing = doing
        swap(
            actor.store,
            lambda now: pin_entry(now, doing.step, pin=doing.pin),
            deadline=actor.deadline(SAVE_SECONDS),
        )


class _FirstLook(WrappedStore):
    """Store that notes the first catalog that was read through it."""

    revision: int | None = None

    def get(self, key: str, *, limit_bytes: int) -> Content:
        content = super().get(key, limit_bytes=limit_bytes)
        if key == CATALOG_KEY and self.revision is None:
            self.revision = catalog_json.decode(content.data).revision
        return content


def handle(actor: Actor, run: Run, *, rounds: int) -> None:
    """Delete, name and list checkpoints as a person does, by the methods of `Run`."""
    for _ in range(actor.rng.randint(1, rounds + 1)):
        if actor.rng.random() < 0.3:
            record_error(actor, partial(_list, actor, run))
        else:
            record_error(actor, partial(_change_by_handle, actor, run))
        if rounds > 1:
            actor.world.rest(actor)


def _list(actor: Actor, run: Run) -> None:
    since = run.catalog.revision if run.catalog is not None else 0
    run.listed(RunHandle(actor.store, timeout_seconds=SAVE_SECONDS).checkpoints(), since=since)


def _change_by_handle(actor: Actor, run: Run, *, owner: Owner | None = None, job: str | None = None) -> None:
    """Delete a checkpoint, or give or take names, and check what the actor was told."""
    rng, look = actor.rng, _FirstLook(actor.store)
    by_handle = RunHandle(look, timeout_seconds=SAVE_SECONDS, owner=lambda: owner)
    steps = [entry.step for entry in run.catalog.entries] if run.catalog is not None else []
    known: list[int | str] = [*steps, *steps, "best", "stable", "latest"]
    asked = rng.choice(known)
    names = rng.choice([("best",), ("stable",), ("best", "stable")])
    match rng.choice(["delete", "delete", "name", "unname"]):
        case "delete":
            actor.doing = deleting = Deleting(asked, rng.random() < 0.6, look, job)
            by_handle.delete(asked, force=deleting.force)
            run.deleted_step(deleting)
        case "name":
            actor.doing = naming = Naming(asked, names, rng.random() < 0.6, look, job)
            by_handle.name(asked, names, move=naming.move)
            run.named_step(naming)
        case "unname":
            actor.doing = Unnaming(names, look, job)
            by_handle.unname(names)


def read(actor: Actor, run: Run, *, rounds: int) -> None:
    """Load the newest checkpoint, or any."""
    for _ in range(actor.rng.randint(1, rounds)):
        step: int | str | None = actor.rng.choice([None, "latest", "best", actor.rng.randrange(5)])
        record_error(actor, partial(loaded, actor, run, step))
        if rounds > 1:
            actor.world.rest(actor)


def record_error(actor: Actor, act: Callable[[], object]) -> None:
    """Call `act`, and record the error that it raises; no actor may be told that a checkpoint is damaged."""
    try:
        act()
    except (*TOLD, CheckpointExistsError, InvalidArgumentError) as error:
        actor.say(f"    is told {type(error).__name__}: {error}")


def _catalog(actor: Actor) -> Catalog:
    catalog = read_catalog(RetryingStore(actor.store, actor.deadline(SAVE_SECONDS)))
    if catalog is None:
        raise CheckpointNotFoundError("There is no run here.")
    return catalog


# ---- a history


class History:
    """History that a seed determines."""

    def __init__(self, seed: int, scenes: Sequence[Scene] = SCENES) -> None:
        """Make a history in which nothing has happened yet."""
        self.world = World(seed)  # the scheduler and its faults
        self._scenes = scenes
        self._trainers: list[Trainer] = []
        self.run = Run(self.world.store.space.objects, lambda: self.world.store_seconds)  # the run, with its invariants
        self.world.observer = self.run

    def play(self) -> None:
        """Play the whole history; raises `BrokenError` if an invariant is broken."""
        with world.simulated(self.world):
            self._begin()
            self._go_on()
            if self.world.rng.random() < LOSES:
                self._lose()
            self._end()

    def _begin(self) -> None:
        """Let a job save a few checkpoints without faults."""
        world = self.world
        rates = world.rates
        world.stop_faults()
        plan = Plan(saves=world.rng.choice([0, 1, 1, 1, 1, 2, 2, 2, 3]))
        self._train("first", plan)
        world.run()
        world.rates = rates

    def _go_on(self) -> None:
        """Let several actors act at a time."""
        world, rng = self.world, self.world.rng
        scene = rng.choice(self._scenes)
        rounds = scene.rounds
        for number in range(rng.randint(*scene.jobs)):
            self._train(f"job{number}", Plan.drawn(rng, scene), rests=number > 0)
        others = {
            "keep": (scene.keep, partial(keep, scene=scene)),
            "collect": (scene.collect, partial(collect, rounds=rounds)),
            "pin": (scene.pin, partial(pin, rounds=rounds)),
            "read": (scene.read, partial(read, rounds=rounds, run=self.run)),
            "handle": (scene.handle, partial(handle, rounds=rounds, run=self.run)),
        }
        for name, (how_many, play) in others.items():
            for number in range(rng.randint(*how_many)):
                actor = world.add(f"{name}{number}", play, rests=rng.random() < 0.8)
                actor.may_delete = rng.random() < 0.95
        world.choose_who_gives_way()
        world.run()

    def _train(self, name: str, plan: Plan, *, rests: bool = False) -> None:
        def play(actor: Actor) -> None:
            trainer = Trainer(actor, self.run, plan, name=name)
            self._trainers.append(trainer)
            try:
                trainer.resume()
            except (StorageError, CheckpointNotFoundError) as error:
                actor.say(f"    is told {type(error).__name__}: {error}")
                return
            trainer.train()

        self.world.add(name, play, rests=rests)

    def _lose(self) -> None:
        """Delete the catalog, and let up to two actors recreate it while others read or go on saving."""
        world, rng = self.world, self.world.rng
        if self.run.catalog is None:
            return
        world.store.delete([CATALOG_KEY])
        world.say("", "the catalog is lost")
        self.run.lose()

        def play(actor: Actor) -> None:
            actor.doing = Recovering()
            record_error(actor, lambda: recover(actor.store, timeout_seconds=100.0))

        for number in range(rng.randint(1, 2)):
            world.add(f"recover{number}", play, rests=True)
        if rng.random() < 0.5:
            world.add("read", partial(read, rounds=2, run=self.run), rests=True)
        known = [trainer for trainer in self._trainers if trainer.job.owner is not None]
        if known and rng.random() < 0.5:
            start = rng.choice(known).copied()

            def go_on(actor: Actor) -> None:
                zombie = start(actor)
                # A job that retires would delete even what the recovery brought back; other saves do no harm.
                zombie.plan = Plan(saves=2, overwrites=0.5, stubborn=True)
                zombie.train()

            world.add("zombie", go_on, rests=True)
        world.run()

    def _end(self) -> None:
        """Check, without faults, that every checkpoint loads, a new job goes on, and all orphans can be removed."""
        world, run = self.world, self.run
        world.stop_faults()
        world.say("", "all is quiet")

        def play(actor: Actor) -> None:
            if run.catalog is None and world.store.space.objects:
                actor.doing = Recovering()
                recover(actor.store, timeout_seconds=100.0)
            for entry in run.catalog.entries if run.catalog is not None else ():
                loaded(actor, run, entry.step)
            live = run.catalog.entries if run.catalog is not None else ()
            newest = (run.catalog.latest() or live[-1]) if run.catalog is not None and live else None
            trainer = Trainer(actor, run, Plan(), name="last")
            trainer.resume()
            assert (newest.step if newest is not None else 0) == trainer.step
            trainer.step += 1
            while run.catalog is not None and any(
                one.step == trainer.step and (one.pinned or one.names) for one in run.catalog.entries
            ):
                trainer.step += 1
            trainer._attempt(CheckpointLabels.of(trainer.step), borrow=True)
            actor.doing = Collecting(0.0)
            remove_orphans(actor.store, grace_seconds=0.0, clock=actor.time)
            left = sorted(set(world.store.space.objects) ^ run.named())
            if left:
                raise BrokenError(f"objects that the catalog does not name are left after orphans were removed: {left}")

        world.add("last", play)
        world.run()


def play(seed: int) -> History:
    """Play the history of a seed; an error names the seed and how to repeat the history."""
    history = History(seed)
    try:
        history.play()
    except BaseException as error:
        error.add_note("\n".join(history.world.lines))
        error.add_note(f"seed={seed}; again: python -m tests.simulation.jobs {seed}")
        raise
    return history


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        told = play(int(argument))
        sys.stdout.write("\n".join(told.world.lines) + "\n")
