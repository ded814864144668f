"""Catalog of a run: the live checkpoints, and the rules for changing them. Pure.

The catalog is the only object of a run that is ever replaced, and only by compare-and-swap. Each rule of the run
protocol is a function here that returns the next catalog or raises. After a lost swap the caller reads it again
and applies the same function.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    FencedError,
    InvalidArgumentError,
)

CATALOG_KEY = "catalog.json"

# Words that mean the newest checkpoint wherever a step is taken, and so are no names of checkpoints.
NEWEST_WORDS = ("latest", "last")


@dataclass(frozen=True, slots=True)
class Entry:
    """Live checkpoint."""

    step: int  # training step that was finished; at most one live checkpoint per step
    save_id: str  # of the save that wrote the checkpoint; 32 lower-case hex digits
    manifest: str  # key, relative to the run; thinning replaces the manifest and its key
    size_bytes: int  # of all shards that the manifest names, reused ones included
    created: str  # time in UTC, ISO 8601, by the coordinator's clock; information only
    token: int  # fencing token of the job that wrote the checkpoint
    began_revision: int  # revision of the catalog when the save began; part of the names of its shards
    names: tuple[str, ...] = ()  # by which the checkpoint can be loaded
    metrics: tuple[tuple[str, float], ...] = ()  # names and values that the user gave
    pinned: bool = False  # kept by retention, and replaced only by a save with `overwrite=True`
    thinned: tuple[str, ...] = ()  # top-level keys of the state dict that were dropped after the save
    abandoned: bool = False  # a later job went on from an older checkpoint; `latest` and retention skip this one

    def is_replaceable_by(self, names: Iterable[str]) -> bool:
        """Return whether a save with these names may replace the checkpoint, once abandoned, without `overwrite`."""
        return not self.pinned and set(self.names).issubset(names)


@dataclass(frozen=True, slots=True)
class Catalog:
    """One revision of a run."""

    run_id: str  # 32 lower-case hex digits; never changes
    revision: int = 0  # number of times that the catalog was replaced
    token: int = 0  # fencing token of the job that may commit
    floor: int = 0  # lowest revision at which a save that may still commit began; shards of older ones may be gone
    entries: tuple[Entry, ...] = ()  # live checkpoints by ascending step
    holder: str = ""  # description of the job that took the token (`common/provenance.py`); "" if not known
    requires_to_write: tuple[str, ...] = ()  # features that a release must know to replace the catalog

    def entry_at(self, step: int) -> Entry | None:
        """Return the live checkpoint of a step, abandoned or not."""
        return next((entry for entry in self.entries if entry.step == step), None)

    def latest(self) -> Entry | None:
        """Return the newest checkpoint that is not abandoned."""
        return max((entry for entry in self.entries if not entry.abandoned), key=lambda entry: entry.step, default=None)

    def find(self, step: int | str | None) -> Entry | None:
        """Return the checkpoint of a step or name; the newest for None and for `NEWEST_WORDS`."""
        if step is None or step in NEWEST_WORDS:
            return self.latest()
        return self.find_by_name(step) if isinstance(step, str) else self.entry_at(step)

    def find_by_name(self, name: str) -> Entry | None:
        """Return the checkpoint that has this name; a name belongs to at most one checkpoint."""
        return next((entry for entry in self.entries if name in entry.names), None)

    def holds(self, save_id: str) -> bool:
        """Return whether the checkpoint of a save is live."""
        return any(entry.save_id == save_id for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Commit that a save asks for, with the state of the run on which the save relies."""

    entry: Entry  # checkpoint to add
    run_id: str  # of the run when the save began
    # save_id of the checkpoint of this step to overwrite, as seen when the save began; None if there is nothing to
    # overwrite. A checkpoint that is abandoned, or that this commit abandons, is replaced in any case, unless it is
    # pinned or has a name that `entry` does not have.
    before: str | None = None
    reused: tuple[str, str] | None = None  # save_id and manifest key of the checkpoint whose shards are reused
    # Step that the job restored (-1: no step): newer checkpoints of earlier jobs become abandoned. None to abandon
    # nothing. Needed in the first commit of a job, harmless in later ones. A job that restores an older step again must
    # first take a new fencing token.
    abandons: int | None = None


@dataclass(frozen=True, slots=True)
class Owner:
    """Job that asks for a change other than a save; such a change is also made for no job, by a person or a tool."""

    run_id: str  # of the run when the job took the fence
    token: int


class BeginAgainError(CommitConflictError):
    """Objects that a save or a thinning wrote or reuses may have been removed; begin it again."""


def require_owner(catalog: Catalog, owner: Owner | None, *, url: str | None = None) -> None:
    """Refuse a change that a fenced job asks for, and name the job that took the fence; None is never refused."""
    if owner is not None and (owner.run_id, owner.token) != (catalog.run_id, catalog.token):
        raise FencedError(
            "A newer job owns this run; nothing was changed. Stop this job.",
            url=url,
            token=owner.token,
            newest=catalog.token,
            holder=catalog.holder or None,
        )


def take_fence(catalog: Catalog, holder: str = "", *, seen: Owner | None = None) -> Catalog:
    """Hand the run to a new job: earlier jobs cannot commit any more. Live checkpoints stay as they are.

    The holder is a description of the new job, for messages; `seen` is the owner of the run when the new job restored
    its checkpoint. If another job has saved since, the new job is refused: it would abandon what that one saved.
    """
    counted = [entry for entry in catalog.entries if not entry.abandoned]
    if seen is not None and any(catalog.run_id != seen.run_id or entry.token > seen.token for entry in counted):
        raise FencedError(
            "Another job has saved into this run since this job restored its checkpoint; nothing was changed. Stop "
            "this job. If the other one is the wrong one, end it, and start this job again from the newest checkpoint.",
            token=seen.token,
            newest=catalog.token,
            holder=catalog.holder or None,
        )
    return replace(catalog, revision=catalog.revision + 1, token=catalog.token + 1, holder=holder)


def raise_revision(catalog: Catalog) -> Catalog:
    """Raise the revision and nothing else.

    Called between two attempts of a save: gc can then raise the floor above the shards of the failed attempt without
    failing the next one.
    """
    return replace(catalog, revision=catalog.revision + 1)


def add_entry(catalog: Catalog, attempt: Attempt) -> Catalog | None:
    """Add a checkpoint. Return None if it is live already, as after a swap whose answer was lost."""
    entry = attempt.entry
    if catalog.holds(entry.save_id):
        return None
    # Compared before the tokens, which count from zero in every run and mean nothing in another one.
    if catalog.run_id != attempt.run_id:
        raise FencedError(
            "Another run was created here; stop this job.",
            run=attempt.run_id,
            newest=catalog.run_id,
            holder=catalog.holder or None,
        )
    require_owner(catalog, Owner(attempt.run_id, entry.token))
    _require_above_floor(catalog, entry.began_revision)
    there = catalog.entry_at(entry.step)
    if (there.save_id if there is not None else None) != attempt.before:
        if there is None or not (there.abandoned or _abandons(attempt, there)):
            raise CommitConflictError(
                "Another save of this step was committed meanwhile; this save was not committed.",
                step=entry.step,
                committed=there.save_id if there is not None else None,
            )
        if not there.is_replaceable_by(entry.names):
            raise CommitConflictError(
                "The abandoned checkpoint of this step is pinned or named, so this save was not committed. Save "
                "another step, unpin that checkpoint, or pass overwrite=True.",
                step=entry.step,
                pinned=there.pinned,
                names=", ".join(there.names) or None,
            )
    if attempt.reused is not None and attempt.reused not in {(live.save_id, live.manifest) for live in catalog.entries}:
        raise BeginAgainError(
            "The checkpoint whose shards this save reuses was removed, replaced or thinned meanwhile.",
            reused=attempt.reused[0],
        )
    rest = (_without_names(live, entry.names) for live in catalog.entries if live.step != entry.step)
    rest = (replace(live, abandoned=True) if _abandons(attempt, live) else live for live in rest)
    return _with(catalog, [*rest, entry])


def retire_entries(catalog: Catalog, save_ids: Iterable[str]) -> Catalog | None:
    """Remove checkpoints. Return None if none of them is live. Shards that only they named may go after the swap.

    The floor rises above the revisions at which their saves began. Otherwise a save whose commit had no answer would
    find its step free, and commit again the checkpoint that is being deleted.
    """
    ids = frozenset(save_ids)
    gone = [entry for entry in catalog.entries if entry.save_id in ids]
    if not gone:
        return None
    floor = max(catalog.floor, *(entry.began_revision + 1 for entry in gone))
    return _with(replace(catalog, floor=floor), [entry for entry in catalog.entries if entry.save_id not in ids])


def mark_entries(catalog: Catalog, marks: Mapping[str, bool]) -> Catalog | None:
    """Mark checkpoints as abandoned, or as not abandoned, by their `save_id`; return None if nothing changes."""
    marked = [replace(entry, abandoned=marks.get(entry.save_id, entry.abandoned)) for entry in catalog.entries]
    return None if marked == list(catalog.entries) else _with(catalog, marked)


def thin_entry(catalog: Catalog, thin: Entry, *, seen: str) -> Catalog | None:
    """Replace the manifest `seen` of a checkpoint by one without some top-level keys of the state dict.

    `thin` has the new manifest, its keys that were dropped and its size, and the revision of the catalog when the new
    manifest was put, which is part of its key. Return None if the checkpoint is not live with the manifest `seen`.
    """
    entry = next((live for live in catalog.entries if (live.save_id, live.manifest) == (thin.save_id, seen)), None)
    if entry is None:
        return None
    _require_above_floor(catalog, thin.began_revision)
    keys = tuple(sorted({*entry.thinned, *thin.thinned}))
    return _changed(catalog, replace(entry, manifest=thin.manifest, thinned=keys, size_bytes=thin.size_bytes))


def pin_entry(catalog: Catalog, step: int, *, pin: bool) -> Catalog | None:
    """Pin or unpin the checkpoint of a step. Return None if nothing changes."""
    return _changed(catalog, replace(_require_entry(catalog, step), pinned=pin))


def _require_entry(catalog: Catalog, step: int) -> Entry:
    """Return the checkpoint of a step: one that has gone is not pinned or named, and must not seem to be."""
    entry = catalog.entry_at(step)
    if entry is None:
        raise CheckpointNotFoundError("No checkpoint of this step is live.", step=step)
    return entry


def label_entry(
    catalog: Catalog,
    save_id: str,
    *,
    token: int,
    names: tuple[str, ...] = (),
    metrics: tuple[tuple[str, float], ...] = (),
) -> Catalog | None:
    """Give a checkpoint more names, which other checkpoints lose, and more metrics. Return None if nothing changes.

    The token is that of the job that gives them. A metric that the checkpoint has already gets the new value.
    """
    require_owner(catalog, Owner(catalog.run_id, token))
    entry = next((live for live in catalog.entries if live.save_id == save_id), None)
    if entry is None:
        raise CommitConflictError(
            "The checkpoint of this step was removed or replaced meanwhile; nothing was saved. Save again.",
            save_id=save_id,
        )
    every_name = tuple(dict.fromkeys((*entry.names, *names)))
    every_metric = tuple((dict(entry.metrics) | dict(metrics)).items())
    return _changed(catalog, replace(entry, names=every_name, metrics=every_metric))


def name_entry(catalog: Catalog, step: int, names: Iterable[str], *, move: bool) -> Catalog | None:
    """Give names to the checkpoint of a step, in one revision. Return None if it has all of them.

    Names that other checkpoints have are refused, or taken from them if `move` is true.
    """
    entry = _require_entry(catalog, step)
    given = tuple(dict.fromkeys(names))
    others = [live for live in catalog.entries if live.step != step and not set(live.names).isdisjoint(given)]
    if others and not move:
        raise CheckpointExistsError(
            "Other checkpoints have these names.",
            step=step,
            names=", ".join(f"{name} (step {live.step})" for live in others for name in live.names if name in given),
        ).advise(move="move=True moves them here")
    return _changed(catalog, replace(entry, names=tuple(dict.fromkeys((*entry.names, *given)))))


def unname_entries(catalog: Catalog, names: Iterable[str], *, save_ids: Collection[str]) -> Catalog | None:
    """Take names from the checkpoints of these saves, in one revision. Return None if none of them has one."""
    taken = tuple(names)
    left = [_without_names(entry, taken) if entry.save_id in save_ids else entry for entry in catalog.entries]
    return None if left == list(catalog.entries) else _with(catalog, left)


def raise_floor(catalog: Catalog, floor: int) -> Catalog | None:
    """Raise the floor to `floor`. Return None if it is that high already.

    Above the revision of the next catalog, no save could commit, so that such a floor is refused.
    """
    if catalog.floor >= floor:
        return None
    if floor > catalog.revision + 1:
        raise InvalidArgumentError(
            "The floor cannot be above the next revision of the catalog.", floor=floor, revision=catalog.revision
        )
    return replace(catalog, revision=catalog.revision + 1, floor=floor)


def _require_above_floor(catalog: Catalog, began: int) -> None:
    if began < catalog.floor:
        raise BeginAgainError(
            "Unreferenced objects were removed since this save or thinning began, perhaps its own among them.",
            began=began,
            floor=catalog.floor,
        )


def _abandons(attempt: Attempt, entry: Entry) -> bool:
    return attempt.abandons is not None and entry.step > attempt.abandons and entry.token < attempt.entry.token


def _without_names(entry: Entry, names: tuple[str, ...]) -> Entry:
    left = tuple(name for name in entry.names if name not in names)
    return entry if left == entry.names else replace(entry, names=left)


def _changed(catalog: Catalog, entry: Entry) -> Catalog | None:
    """Replace the entry of a step, whose names are taken from the others. Return None if the entry is there already."""
    if entry in catalog.entries:
        return None
    others = (_without_names(live, entry.names) for live in catalog.entries if live.step != entry.step)
    return _with(catalog, [*others, entry])


def _with(catalog: Catalog, entries: Iterable[Entry]) -> Catalog:
    ordered = tuple(sorted(entries, key=lambda entry: entry.step))
    return replace(catalog, revision=catalog.revision + 1, entries=ordered)
