"""Random histories of one run under several jobs; then the same with each rule of the protocol left out.

`jobs.py` has the actors, `world.py` the faults, and `invariants.py` the invariants. A rule that is left out must break
an invariant in some history; else the rule is needless, or the histories are too tame.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import CorruptCheckpointError, TransientStorageError
from dcp_remote.format import catalog as rules
from dcp_remote.format import keys
from dcp_remote.format.catalog import Attempt, Catalog, Entry
from dcp_remote.format.document import STORED_BYTES_MAX, unseal
from dcp_remote.run import catalog_store, deletions, gc, lookup
from dcp_remote.run.catalog_store import read_catalog
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.live_shards import LiveShards
from dcp_remote.run.retention import Decision, Retention, decide
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.base import Condition, ObjectInfo, Version
from dcp_remote.storage.rereads import get_decoded
from dcp_remote.storage.retrying import RetryingStore
from dcp_remote.storage.wrapper import WrappedStore
from tests.simulation.jobs import SCENES, History, play
from tests.simulation.rules_left_out import (
    no_floor_by_retiring,
    no_floor_for_saves,
    no_floor_for_thinning,
    no_look_at_the_lending_manifest,
    no_look_at_the_pin,
    no_look_at_what_is_reused,
    no_look_at_who_saved_since,
    no_moving_of_names,
    no_token,
)
from tests.simulation.world import BrokenError
from tests.support.figures import count
from tests.support.histories import run_histories

pytestmark = pytest.mark.torture

# Seeds of every run of the tests; the campaign runs more, as time allows.
HISTORIES = 1_000


@pytest.mark.parametrize("first", range(0, HISTORIES, 125))
def test_a_thousand_histories(first: int) -> None:
    """After each of a thousand histories every live checkpoint loads to the bit, and no orphan is left."""
    for seed in range(first, first + 125):
        requests = sum(is_request(line) for line in play(seed).world.lines)
        assert requests > 10
        count("histories simulated")
        count("requests simulated", requests)


def test_as_many_as_there_is_time_for(torture_seconds: float) -> None:
    def history(seed: int) -> None:
        play(HISTORIES + seed)
        count("histories simulated")

    run_histories(history, torture_seconds)


@pytest.mark.torture(smoke=False)
def test_a_seed_is_a_history() -> None:
    """Each seed gives the same history, line by line, also in another process; two seeds differ."""
    seeds = range(16)
    told = ["\n".join(play(seed).world.lines) for seed in seeds]
    assert ["\n".join(play(seed).world.lines) for seed in reversed(seeds)] == told[::-1]
    assert len(set(told)) == len(seeds)
    again = subprocess.run(
        [sys.executable, "-m", "tests.simulation.jobs", *map(str, seeds)],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert again.stdout == "\n".join(told) + "\n"


@pytest.mark.torture(smoke=False)
def test_everything_happens() -> None:
    """Every fault, and every error that an actor may get, occurs in some of these histories."""
    lines = [line for seed in range(300) for line in play(seed).world.lines]
    for part in (": lost", ": unheard", ": late", ": 503", "412", "is lost", "all is quiet", "+pin", "+thin", "+left"):
        assert any(part in line for line in lines), part
    for told in ("CommitConflictError", "CommitUnknownError", "FencedError", "CheckpointExistsError", "is committed"):
        assert any(f"is told {told}" in line or told in line for line in lines), told


def is_request(line: str) -> bool:
    """Return whether a line of a history tells of a request."""
    return any(f" {verb} " in line[:40] for verb in ("get", "put", "head", "list", "delete"))


# ---- each rule left out


def no_look_at_the_step(catalog: Catalog, attempt: Attempt) -> Catalog | None:
    there = catalog.entry_at(attempt.entry.step)
    return rules.add_entry(catalog, replace(attempt, before=there.save_id if there is not None else None))


def no_look_at_what_is_replaced(catalog: Catalog, attempt: Attempt) -> Catalog | None:
    """Let a job that may replace one checkpoint of a step replace any other of that step."""
    return rules.add_entry(catalog, attempt) if attempt.before is None else no_look_at_the_step(catalog, attempt)


def nothing_abandoned(catalog: Catalog, attempt: Attempt) -> Catalog | None:
    """Count checkpoints that a rollback left behind as before."""
    after = rules.add_entry(catalog, attempt)
    return after and replace(after, entries=tuple(replace(one, abandoned=False) for one in after.entries))


def unpinned(by: Retention, live: Sequence[Entry], **known: Any) -> Decision:
    """Let retention retire pinned checkpoints."""
    return decide(by, [replace(one, pinned=False) for one in live], **known)


def deleting_first(store: ObjectStore, change: catalog_store.Change, **other: Any) -> Catalog:
    before = read_catalog(store)
    after = change(before) if before is not None else None
    if before is not None and after is not None:
        kept = {entry.manifest for entry in after.entries}
        store.delete([entry.manifest for entry in before.entries if entry.manifest not in kept])
    return catalog_store.swap(store, change, **other)


class OwnShardsOnly(LiveShards):
    """Live shards that ignore the shards of other checkpoints."""

    def not_named(self, keys: Iterable[str], entries: Iterable[Entry]) -> set[str]:
        return set(keys).difference(entry.manifest for entry in entries)


class NoAnswerStore(WrappedStore):
    """Store whose lost answers count as success."""

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        try:
            return super().put(key, buffers, condition=condition)
        except TransientStorageError:
            return Version(None)


def taking_silence_for_success(store: ObjectStore, change: catalog_store.Change, **other: Any) -> Catalog:
    return catalog_store.swap(NoAnswerStore(store), change, **other)


def overwriting_unseen(store: ObjectStore, change: catalog_store.Change, **other: Any) -> Catalog:
    """Swap the catalog by an unconditional put."""

    class Careless(WrappedStore):
        def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
            return super().put(key, buffers)

    return catalog_store.swap(Careless(store), change, **other)


class LocallyDated(WrappedStore):
    """Store whose objects have the age that this machine's clock gives."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float]) -> None:
        super().__init__(store)
        self._clock = clock

    def head(self, key: str) -> ObjectInfo:
        return replace(super().head(key), modified_seconds=self._clock())


def by_the_local_clock(store: ObjectStore, *, clock: Callable[[], float], **other: Any) -> object:
    return gc.remove_orphans(LocallyDated(store, clock), clock=clock, **other)


def deciding_once(self: Deletions, choose: deletions.Choose, **other: Any) -> deletions.Applied:
    decided: list[Any] = []

    def chosen(now: Catalog) -> Any:
        decided.append(choose(now))
        return decided[0]

    return CARRY_OUT(self, chosen, **other)


def choosing_again(self: Deletions, steps: Sequence[int | str], *, force: bool = False, **other: Any) -> object:
    """Delete whatever a step or name means when the swap succeeds."""

    def choose(now: Catalog) -> Decision:
        entries = [lookup.find_entry(now, step, url="") for step in steps]
        if not force:
            deletions.require_expendable(now, entries)
        return Decision(retire=tuple(entry.step for entry in entries), thin=())

    return self._carry_out(choose, keys=(), explicit=True, **other)


CARRY_OUT = Deletions._carry_out
LIVE = gc._live


def looking_once() -> Callable[..., gc._Seen | None]:
    """Remove the orphans of the first look, though a save committed before the floor was raised."""
    seen: dict[int, gc._Seen | None] = {}

    def live(store: ObjectStore, named: LiveShards, *other: Any) -> gc._Seen | None:
        if id(named) not in seen:
            seen.clear()
            seen[id(named)] = LIVE(store, named, *other)
        return seen[id(named)]

    return live


def no_second_look(store: ObjectStore, entry: Entry, *, retry_seconds: float, read_early: object = None) -> bytes:
    """Let a reader take a checkpoint for damaged when an object is missing at its first look."""
    reading = RetryingStore(store, Deadline(retry_seconds))
    try:
        return get_decoded(reading, entry.manifest, unseal, limit_bytes=STORED_BYTES_MAX)[0].data
    except FileNotFoundError as error:
        raise CorruptCheckpointError("Missing.") from error


LEFT_OUT: dict[str, tuple[str, object]] = {
    "the token": ("dcp_remote.run.job.add_entry", no_token),
    "looking at who saved since": ("dcp_remote.run.job.take_fence", no_look_at_who_saved_since),
    "the floor, of saves": ("dcp_remote.run.job.add_entry", no_floor_for_saves),
    "the floor, of thinning": ("dcp_remote.run.deletions.thin_entry", no_floor_for_thinning),
    "raising the floor, of retiring": ("dcp_remote.run.deletions.retire_entries", no_floor_by_retiring),
    "raising the floor, of gc": ("dcp_remote.run.gc.raise_floor", lambda catalog, floor: None),
    "looking at the step": ("dcp_remote.run.job.add_entry", no_look_at_the_step),
    "looking at what is replaced": ("dcp_remote.run.job.add_entry", no_look_at_what_is_replaced),
    "looking at the reused checkpoint": ("dcp_remote.run.job.add_entry", no_look_at_what_is_reused),
    "looking at the reused manifest": ("dcp_remote.run.job.add_entry", no_look_at_the_lending_manifest),
    "moving names": ("dcp_remote.run.job.add_entry", no_moving_of_names),
    "looking at the pin": ("dcp_remote.run.job.add_entry", no_look_at_the_pin),
    "pins, of saves": (
        "dcp_remote.format.catalog.Entry.is_replaceable_by",
        lambda there, names: set(there.names).issubset(names),
    ),
    "names, of saves": ("dcp_remote.format.catalog.Entry.is_replaceable_by", lambda there, names: not there.pinned),
    "pins, of retention": ("dcp_remote.run.deletions.decide", unpinned),
    "names, of retention": (
        "dcp_remote.run.deletions.decide",
        lambda by, live, **known: decide(replace(by, keep_named=False), live, **known),
    ),
    "marking what is abandoned": ("dcp_remote.run.job.add_entry", nothing_abandoned),
    "the swap before deletion": ("dcp_remote.run.deletions.swap", deleting_first),
    "shards of other checkpoints": ("dcp_remote.run.deletions.LiveShards", OwnShardsOnly),
    "reading back a lost answer, of saves": ("dcp_remote.run.job.swap", taking_silence_for_success),
    "reading back a lost answer, of retiring": ("dcp_remote.run.deletions.swap", taking_silence_for_success),
    "the condition": ("dcp_remote.run.deletions.swap", overwriting_unseen),
    "deciding in the swap": ("dcp_remote.run.deletions.Deletions._carry_out", deciding_once),
    "looking again after the floor was raised": ("dcp_remote.run.gc._live", looking_once()),
    "the store's clock": ("tests.simulation.jobs.remove_orphans", by_the_local_clock),
    "a fresh name for a thinned manifest": (
        "dcp_remote.run.deletions.manifest_key",
        lambda *, revision, step: f"manifests/step-{step:012d}-{revision}-{0:016x}.json",
    ),
    "the revision in the name of a thinned manifest": (
        "dcp_remote.run.deletions.manifest_key",
        lambda *, revision, step: keys.manifest_key(revision=0, step=step),
    ),
    "the revision in the names of shards": (
        "tests.simulation.jobs.origin",
        lambda *, revision, step: f"0-step-{step:012d}-",
    ),
    "looking again for what a reader misses": ("dcp_remote.run.lookup.fetch_entry", no_second_look),
    "the token, of deleting and retention": ("dcp_remote.run.deletions.require_owner", lambda catalog, owner: None),
    "the token, of naming": ("dcp_remote.run.labels.require_owner", lambda catalog, owner: None),
    "moving names only if told to": (
        "dcp_remote.run.labels.name_entry",
        lambda catalog, step, names, *, move: rules.name_entry(catalog, step, names, move=True),
    ),
    "choosing the checkpoint to delete once": (
        "dcp_remote.run.deletions.Deletions.retire",
        choosing_again,
    ),
    "what lacks shards, of recovering": ("dcp_remote.run.recovery._why_not_whole", lambda manifest, shards: None),
}


# Rules whose loss shows only in histories with specific actors.
SCENES_OF = {
    "looking again after the floor was raised": SCENES[3:5],
    "the store's clock": SCENES[3:5],
    "a fresh name for a thinned manifest": SCENES[8:9],
    "raising the floor, of retiring": SCENES[2:3],
    "looking at the pin": SCENES[-3:-2],
    "looking at the reused manifest": SCENES[-2:-1],
    "the floor, of thinning": SCENES[-1:],
    "the revision in the name of a thinned manifest": SCENES[-1:],
}


@pytest.mark.parametrize("rule", LEFT_OUT)
def test_a_rule_left_out_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, planted = LEFT_OUT[rule]
    monkeypatch.setattr(target, planted)
    for seed in range(2_000):
        try:
            History(seed, SCENES_OF.get(rule, SCENES)).play()
        except (BrokenError, CorruptCheckpointError, LookupError):  # LookupError where two objects have one name
            return
    pytest.fail(f"no history needs {rule}")
