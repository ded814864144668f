"""Invariants of a run, checked whenever something in its store changes.

Shares no code with the functions that swap the catalog: the next catalog is derived here from the operation that an
actor announced and from the catalog that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import msgspec

from dcp_remote.format import catalog_json
from dcp_remote.format.catalog import CATALOG_KEY, Catalog, Entry
from dcp_remote.format.document import unseal
from dcp_remote.format.keys import MANIFESTS_PREFIX
from dcp_remote.run.info import CheckpointInfo
from dcp_remote.run.retention import Retention, decide
from dcp_remote.storage.memory import MemoryObject
from tests.simulation.world import BrokenError

# Bytes of each tensor, by the tensor's name in the flat state dict.
State: TypeAlias = Mapping[str, bytes]

OPTIMIZER = "optim"


# ---- operations that an actor announces


@dataclass(frozen=True, slots=True)
class Fencing:
    """Beginning a save. Jobs of one name count as one job: a program, and a copy of it made while it ran."""

    job: str


@dataclass(frozen=True, slots=True)
class Save:
    """Committing a save that was begun."""

    label: str  # name of the save in messages
    save_id: str  # identity of the attempt
    job: str  # name of the job that saves
    step: int
    before: str | None  # save_id that the job saw at this step, and was told to replace; None for none
    abandons: int | None  # step that this job resumed from, until its first commit; None after that
    seen: int | None  # token of the run when this job restored its checkpoint; None if it restored none
    names: tuple[str, ...]
    metrics: tuple[tuple[str, float], ...]  # names and values
    began: int  # revision of the catalog that the job saw
    state: State


@dataclass(frozen=True, slots=True)
class Keeping:
    """Retiring and thinning by a retention; that of a job, or of an operator (None)."""

    retention: Retention
    job: str | None = None


@dataclass(frozen=True, slots=True)
class Removing:
    """Retiring these steps at a person's request."""

    steps: tuple[int, ...]
    force: bool


class Look(Protocol):
    """First catalog that a call read, in which a step or name means a checkpoint."""

    revision: int | None


@dataclass(frozen=True, slots=True)
class Deleting:
    """Deleting a checkpoint by its step or name, by a method of `Run`; for a job, or for a person (None)."""

    asked: int | str
    force: bool
    look: Look
    job: str | None = None


@dataclass(frozen=True, slots=True)
class Naming:
    """Giving names to a checkpoint, by a method of `Run`; for a job, or for a person (None)."""

    asked: int | str
    names: tuple[str, ...]
    move: bool
    look: Look
    job: str | None = None


@dataclass(frozen=True, slots=True)
class Labelling:
    """Adding the names and metrics of a repeated save to the checkpoint of its step."""

    save_id: str
    names: tuple[str, ...]
    metrics: tuple[tuple[str, float], ...]
    job: str


@dataclass(frozen=True, slots=True)
class Unnaming:
    """Taking names from the checkpoints that have them, by a method of `Run`; for a job, or for a person (None)."""

    names: tuple[str, ...]
    look: Look
    job: str | None = None


@dataclass(frozen=True, slots=True)
class Thinning:
    """Thinning these steps."""

    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Collecting:
    """Removing orphans older than the grace period."""

    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Settling:
    """Raising the floor above checkpoints that may no longer be live."""


@dataclass(frozen=True, slots=True)
class Pinning:
    """Pinning a step, or unpinning it."""

    step: int
    pin: bool


@dataclass(frozen=True, slots=True)
class Recovering:
    """Recreating a lost catalog."""


class _Named(msgspec.Struct):
    keys: list[str]


class _Document(msgspec.Struct):
    save_id: str
    shards: _Named


@dataclass
class Run:
    """A run, as its objects lie in the store."""

    objects: Mapping[str, MemoryObject]
    store_seconds: Callable[[], float]  # the store's clock, in seconds
    catalog: Catalog | None = None  # the present catalog; None before the first, and after an accident
    catalogs: dict[int, Catalog] = field(default_factory=dict)  # all catalogs since the last accident, by revision
    saves: dict[str, Save] = field(default_factory=dict)  # all saves that were begun, by save_id
    lived: dict[str, bool] = field(default_factory=dict)  # save_ids that were ever live, and whether each was thinned
    refused: set[str] = field(default_factory=set)  # save_ids of which an actor was told that they are not committed
    gone: set[str] = field(default_factory=set)  # save_ids that were live, and are not any more
    # Valid answers so far: what a reader asked for (a step, a name, or None for the newest), and its save_id.
    answers: set[tuple[int | str | None, str]] = field(default_factory=set)
    is_lost: bool = False  # whether the catalog is lost and not yet recreated
    _owners: dict[int, str] = field(default_factory=dict)
    _documents: dict[str, _Document] = field(default_factory=dict)
    _named: frozenset[str] = frozenset()
    _first: dict[str, float] = field(
        default_factory=dict
    )  # time at which each object was first put; a repeated put does not change it

    # ---- reports of actors

    def begin(self, save: Save) -> None:
        """Record that a save began."""
        _require(save.save_id not in self.saves, f"{save.label} has the save_id of {self.saves.get(save.save_id)}")
        self.saves[save.save_id] = save

    def committed(self, save: Save, catalog: Catalog) -> None:
        """Check a save of which an actor was told that it is committed."""
        _require(save.save_id in self.lived, f"{save.label} was reported as committed, and never was live")
        _require(catalog.holds(save.save_id), f"{save.label} was reported as committed with a catalog without it")
        self.existed(catalog)

    def refuse(self, save: Save, why: BaseException) -> None:
        """Check a save of which an actor was told that it is not committed, and never will be.

        The save may have been live for a while: committed, its answer lost, then replaced or retired before its job
        looked.
        """
        self.refused.add(save.save_id)
        live = self.catalog is not None and self.catalog.holds(save.save_id)
        _require(not live, f"{save.label} was reported as {type(why).__name__}, and is committed")

    def existed(self, catalog: Catalog) -> None:
        """Check a catalog that an actor was given."""
        there = self.catalogs.get(catalog.revision)
        _require(catalog == there, f"an actor was given a catalog that never existed: {self.show(catalog)}")

    def listed(self, found: Sequence[CheckpointInfo], *, since: int) -> None:
        """Check a list that an actor was given: that of one catalog, no older than its call."""
        catalogs = [catalog for revision, catalog in self.catalogs.items() if revision >= since]
        _require(
            not found or any([CheckpointInfo.of(entry) for entry in one.entries] == list(found) for one in catalogs),
            f"an actor was given a list that no catalog since revision {since} had: {[one.step for one in found]}",
        )

    def deleted_step(self, doing: Deleting) -> None:
        """Check a deletion of which an actor was told that it is done: the checkpoint is gone, and stays so."""
        meant = self._meant(doing.asked, doing.look)
        _require(meant is not None and meant.save_id in self.gone, f"reported as deleted, and it is live: {doing}")

    def named_step(self, doing: Naming) -> None:
        """Check names of which an actor was told that they are given: the checkpoint had them all at one moment."""
        meant, first = self._meant(doing.asked, doing.look), doing.look.revision or 0
        there = [
            set(entry.names)
            for revision, catalog in self.catalogs.items()
            for entry in catalog.entries
            if revision >= first and meant is not None and entry.save_id == meant.save_id
        ]
        _require(any(names.issuperset(doing.names) for names in there), f"reported as named, and it never was: {doing}")

    def _meant(self, asked: int | str, look: Look) -> Entry | None:
        """Return the checkpoint that a step or name meant in the first catalog of a call."""
        catalog = self.catalogs.get(look.revision) if look.revision is not None else None
        if catalog is None:
            return None
        if asked == "latest":
            counting = [entry for entry in catalog.entries if not entry.abandoned]
            return counting[-1] if counting else None
        found = [entry for entry in catalog.entries if entry.step == asked or asked in entry.names]
        return found[0] if found else None

    def loaded(self, state: State, asked: int | str | None) -> None:
        """Check what an actor loaded: a whole checkpoint that was live and is the one asked for, bit for bit."""
        found = [save for save in self.saves.values() if save.state.get("model.w") == state.get("model.w")]
        _require(len(found) == 1, f"a loaded state belongs to no save: {state}")
        (save,) = found
        _require((asked, save.save_id) in self.answers, f"{save.label} was loaded, and never was an answer to {asked}")
        left = {name: data for name, data in save.state.items() if not name.startswith(OPTIMIZER)}
        _require(
            state == save.state or (self.lived[save.save_id] and state == left),
            f"{save.label} was loaded with other bytes, or in part",
        )

    def lose(self) -> None:
        """Record an accident: the catalog is gone. Refused and retired checkpoints may come back."""
        self.catalog = None
        self.is_lost = True
        self.catalogs.clear()
        self.refused.clear()
        self.gone.clear()
        self._named = frozenset()
        if not any(key.startswith(MANIFESTS_PREFIX) for key in self.objects):
            self._owners.clear()  # no manifest is left that could name the owners: it is a new run

    # ---- requests as the store carried them out

    def wrote(self, key: str, data: bytes, before: bytes | None, doing: object) -> str:
        """Check an object that was put; see `Observer.wrote`."""
        if key == CATALOG_KEY:
            return self._swapped(catalog_json.decode(data), doing)
        _require(before in (None, data), f"{key} was written again, with other bytes")
        self._first.setdefault(key, self.store_seconds())
        if key.startswith(MANIFESTS_PREFIX):
            self._documents[key] = document = msgspec.json.decode(unseal(data), type=_Document)
            save = self.saves.get(document.save_id)
            return save.label if save is not None else ""
        return ""

    def deleted(self, keys: Sequence[str], doing: object) -> None:
        """Check objects that were deleted; see `Observer.deleted`."""
        live = sorted(self._named.intersection(keys))
        _require(not live, f"deleted, and named by a live checkpoint: {live}")
        if isinstance(doing, Collecting):
            ages = {key: self.store_seconds() - self._first[key] for key in keys if key in self._first}
            young = {key: age for key, age in ages.items() if age < doing.grace_seconds}
            _require(not young, f"removed as orphans, younger than the grace period (ages in seconds): {young}")

    def named(self) -> frozenset[str]:
        """Return the keys that the catalog names, and the catalog's own."""
        return self._named

    def _swapped(self, new: Catalog, doing: object) -> str:
        old = self.catalog
        said = self.show(new)
        if old is None:
            _require(
                isinstance(doing, Recovering | Fencing) and (isinstance(doing, Recovering) or not new.entries),
                f"a run was created by {doing}: {said}",
            )
            # The new owner is newer than any job before.
            _require(new.token >= max(self._owners, default=0), f"an older job owns the run: {said}")
            if isinstance(doing, Fencing):
                self._owners[new.token] = doing.job
        else:
            _require(old.run_id == new.run_id, "one run replaced another")
            _require(old.revision < new.revision, f"the revision went down: {said}")
            _require(old.token <= new.token, f"the token went down: {said}")
            _require(old.floor <= new.floor, f"the floor went down: {said}")
            self._check(doing, old, new)
            self._check_pins_and_names(doing, old, new)
            self.gone |= {one.save_id for one in old.entries} - {one.save_id for one in new.entries}
        self.catalog = self.catalogs[new.revision] = new
        self.is_lost = False
        self._look(new, said)
        return said

    def _look(self, catalog: Catalog, said: str) -> None:
        """Check that everything that the catalog names exists."""
        names = [name for entry in catalog.entries for name in entry.names]
        _require(len(set(names)) == len(names), f"two checkpoints have one name: {said}")
        named = {CATALOG_KEY}
        for entry in catalog.entries:
            label = self._label(entry)
            document = self._documents.get(entry.manifest)
            _require(document is not None, f"the manifest of {label} was never put: {said}")
            assert document is not None
            _require(
                document.save_id == entry.save_id, f"the manifest of {label} belongs to another checkpoint: {said}"
            )
            mine = {entry.manifest, *document.shards.keys}
            missing = sorted(key for key in mine if key not in self.objects)
            _require(not missing, f"live, and missing: {label} {missing}: {said}")
            named |= mine
            self.lived[entry.save_id] = self.lived.get(entry.save_id, False) or bool(entry.thinned)
            self.answers.add((entry.step, entry.save_id))
            self.answers.update((name, entry.save_id) for name in entry.names)
        counting = [entry for entry in catalog.entries if not entry.abandoned]
        if counting:
            self.answers.add((None, counting[-1].save_id))
        self._named = frozenset(named)
        late = [self._label(entry) for entry in catalog.entries if entry.save_id in self.refused]
        _require(not late, f"refused, and committed: {late}: {said}")
        back = [self._label(entry) for entry in catalog.entries if entry.save_id in self.gone]
        _require(not back, f"deleted, and live again: {back}: {said}")

    def _check(self, doing: object, old: Catalog, new: Catalog) -> None:
        """Check that a swap did what its operation is for, and nothing else."""
        told = f"{doing} made {self.show(new)} of {self.show(old)}"
        if not isinstance(doing, Fencing):
            _require(new.token == old.token, f"an operation that must not take the fence took it: {told}")
        match doing:
            case Fencing(job):
                _require((new.entries, new.floor) == (old.entries, old.floor), told)
                _require(new.token - old.token in (0, 1), told)
                if new.token > old.token:
                    self._owners[new.token] = job
            case Save():
                self._check_commit(doing, old, new, told)
            case Labelling():
                self._check_owner(doing.job, old, told)
                self._check_labels(doing, old, new, told)
            case Keeping(retention, job):
                self._check_owner(job, old, told)
                decision = decide(retention, old.entries)
                self._check_maintenance(old, new, gone=decision.retire, thin=decision.thin, told=told)
            case Removing(steps, force):
                newest = old.latest()
                kept = () if force else [one.step for one in old.entries if one.pinned or one == newest]
                self._check_maintenance(old, new, gone=set(steps).difference(kept), thin=(), told=told)
            case Deleting() | Naming() | Unnaming():
                self._check_owner(doing.job, old, told)
                self._check_handle(doing, old, new, told)
            case Thinning(steps):
                self._check_maintenance(old, new, gone=(), thin=steps, told=told)
            case Collecting() | Settling():
                _require(new.entries == old.entries, told)
            case Pinning(step, pin):
                entries = tuple(replace(one, pinned=pin) if one.step == step else one for one in old.entries)
                _require((new.entries, new.floor) == (entries, old.floor), told)
            case _:
                raise BrokenError(f"an operation that must not swap the catalog did: {told}")

    def _check_owner(self, job: str | None, old: Catalog, told: str) -> None:
        owner = self._owners.get(old.token)
        _require(job in (None, owner), f"a job that was fenced changed the run; the fence is {owner}'s: {told}")

    def _check_handle(self, doing: Deleting | Naming | Unnaming, old: Catalog, new: Catalog, told: str) -> None:
        if isinstance(doing, Deleting):
            self._check_deletion(doing, old, new, told)
        elif isinstance(doing, Naming):
            self._check_naming(doing, old, new, told)
        else:
            holders = {meant.save_id for name in doing.names if (meant := self._meant(name, doing.look)) is not None}
            entries = tuple(_unnamed(one, doing.names) if one.save_id in holders else one for one in old.entries)
            _require((new.entries, new.floor) == (entries, old.floor), told)

    def _check_deletion(self, doing: Deleting, old: Catalog, new: Catalog, told: str) -> None:
        meant = self._meant(doing.asked, doing.look)
        _require(meant is not None, f"deleted what is not there: {told}")
        assert meant is not None
        gone = [one for one in old.entries if one.save_id == meant.save_id]
        _require(gone and new.entries == tuple(one for one in old.entries if one not in gone), told)
        _require(doing.force or not (gone[0].pinned or gone[0] == old.latest()), f"deleted without force: {told}")

    def _check_naming(self, doing: Naming, old: Catalog, new: Catalog, told: str) -> None:
        meant = self._meant(doing.asked, doing.look)
        entries: list[Entry] = []
        for one in old.entries:
            if meant is not None and one.save_id == meant.save_id:
                added = tuple(name for name in doing.names if name not in one.names)
                entries.append(replace(one, names=one.names + added))
            else:
                _require(doing.move or set(one.names).isdisjoint(doing.names), f"a name was moved unasked: {told}")
                entries.append(_unnamed(one, doing.names))
        _require((new.entries, new.floor) == (tuple(entries), old.floor), told)

    def _check_labels(self, doing: Labelling, old: Catalog, new: Catalog, told: str) -> None:
        _require([one.save_id for one in new.entries] == [one.save_id for one in old.entries], told)
        for before, after in zip(old.entries, new.entries, strict=True):
            if before.save_id == doing.save_id:
                _require(set(after.names) == {*before.names, *doing.names}, told)
                _require(dict(after.metrics) == {**dict(before.metrics), **dict(doing.metrics)}, told)
                _require(replace(after, names=before.names, metrics=before.metrics) == before, told)
            else:
                _require(after == _unnamed(before, doing.names), told)

    def _check_commit(self, save: Save, old: Catalog, new: Catalog, told: str) -> None:
        owner = self._owners.get(old.token)
        _require(owner == save.job, f"a job that was fenced committed; the fence is {owner}'s: {told}")
        _require(new.floor == old.floor, told)
        since = [one for one in old.entries if save.seen is not None and save.seen < one.token < old.token]
        _require(all(one.abandoned for one in since), f"a job took over what was saved since it restored: {told}")
        entry = new.entry_at(save.step)
        _require(entry is not None and entry.save_id == save.save_id, told)
        assert entry is not None
        as_noted = (old.token, save.names, save.metrics, save.began, False, (), False)
        as_is = (
            entry.token,
            entry.names,
            entry.metrics,
            entry.began_revision,
            entry.pinned,
            entry.thinned,
            entry.abandoned,
        )
        _require(as_is == as_noted, f"the entry differs from the save, or has the token of a fenced job: {told}")
        kept: list[Entry] = []
        for one in old.entries:
            left = save.abandons is not None and one.step > save.abandons and one.token < old.token
            if one.step != save.step:
                names = tuple(name for name in one.names if name not in save.names)
                kept.append(replace(one, names=names, abandoned=one.abandoned or left))
            elif not (one.abandoned or left):
                _require(one.save_id == save.before, f"replaced a checkpoint without being told to: {told}")
        # Among them: what the rollback leaves behind is abandoned.
        _require([one for one in new.entries if one != entry] == kept, f"other checkpoints changed: {told}")

    def _check_pins_and_names(self, doing: object, old: Catalog, new: Catalog) -> None:
        """Check that a pin or a name is lost only by an explicit call, whatever else this swap may do."""
        after = {entry.save_id: entry for entry in new.entries}
        for one in old.entries:
            there = after.get(one.save_id)
            match doing:
                case Removing(steps) if one.step in steps:
                    continue
                case Deleting() if there is None:  # checked by `_check_deletion`
                    continue
                case Save(before=before) if one.save_id == before:  # the job was told to overwrite it
                    continue
                case Pinning(step, pin=False) if one.step == step:
                    unpinned = True
                case _:
                    unpinned = False
            told = f"{doing} made {self.show(new)} of {self.show(old)}"
            if one.pinned and not unpinned:
                _require(there is not None and there.pinned, f"a pin was lost: {told}")
            moved = doing.names if isinstance(doing, Save | Labelling | Naming | Unnaming) else ()
            kept = set(one.names).difference(moved)
            if kept and not (isinstance(doing, Keeping) and not doing.retention.keep_named):
                _require(there is not None and kept.issubset(there.names), f"a name was lost: {told}")

    def _check_maintenance(
        self, old: Catalog, new: Catalog, *, gone: Iterable[int], thin: Iterable[int], told: str
    ) -> None:
        gone, thin = frozenset(gone), frozenset(thin)
        for one in old.entries:
            there = new.entry_at(one.step)
            if there is None:
                _require(one.step in gone, f"retired a checkpoint that was to be kept: {told}")
            elif there != one:
                _require(one.step in thin, f"thinned a checkpoint that was to stay whole: {told}")
                after = replace(one, manifest=there.manifest, thinned=there.thinned, size_bytes=there.size_bytes)
                _require(there == after and there.thinned == (OPTIMIZER,), f"changed by more than thinning: {told}")
        _require(all(old.holds(one.save_id) for one in new.entries), told)

    def show(self, catalog: Catalog) -> str:
        """Return the catalog as one line of the history."""
        entries = " ".join(map(self._shown, catalog.entries))
        return f"r{catalog.revision} t{catalog.token} f{catalog.floor} [{entries}]"

    def _shown(self, entry: Entry) -> str:
        marks = ("+pin" * entry.pinned, "+thin" * bool(entry.thinned), "+left" * entry.abandoned)
        return f"{entry.step}:{self._label(entry)}{''.join(marks)}{''.join(f'={name}' for name in entry.names)}"

    def _label(self, entry: Entry) -> str:
        save = self.saves.get(entry.save_id)
        return save.label if save is not None else entry.save_id


def _unnamed(entry: Entry, names: Sequence[str]) -> Entry:
    return replace(entry, names=tuple(name for name in entry.names if name not in names))


def _require(condition: object, what: str) -> None:
    if not condition:
        raise BrokenError(what)
