"""The catalog of a run: which checkpoints are live, and who may add to them. Values and what may become of them; pure.

The catalog is the one object of a run that is ever replaced, and only by compare-and-swap. Every rule of the run
protocol is a function here from a catalog to the next one, or a refusal: who swaps it asks again after each swap that
was lost, on what lies there then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dcp_remote.errors import CheckpointNotFoundError, CommitConflictError, FencedError, InvalidArgumentError

CATALOG_KEY = "catalog.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """A live checkpoint.

    Attributes:
        step: Of training, finished; one live checkpoint a step.
        save_id: Of the save that wrote it.
        manifest: Key of its manifest, relative to the run. Thinning gives it another.
        size_bytes: Of its shards, borrowed ones included.
        created: UTC, ISO 8601, by the coordinator's clock; information only.
        token: Of the job that wrote it.
        began: Revision that its save saw first, which the names of its shards carry.
        names: By which it can be asked for.
        metrics: What the user noted, by name.
        pinned: Exempt from retention, and from being replaced by a save that was not told to overwrite.
        thinned: Top-level keys of the state that were let go.
        abandoned: A later job went on from an older checkpoint: `latest` and retention pass this one by.
    """

    step: int
    save_id: str
    manifest: str
    size_bytes: int
    created: str
    token: int
    began: int
    names: tuple[str, ...] = ()
    metrics: tuple[tuple[str, float], ...] = ()
    pinned: bool = False
    thinned: tuple[str, ...] = ()
    abandoned: bool = False

    def is_replaceable_by(self, names: Iterable[str]) -> bool:
        """Whether, once it is abandoned, a save of its step that gets these names may take its place unasked."""
        return not self.pinned and set(self.names).issubset(names)


@dataclass(frozen=True, slots=True)
class Catalog:
    """A run at one moment.

    Attributes:
        run_id: 32 lower-case hex digits, for as long as the run lives.
        revision: How often it was replaced.
        token: Of the job that may commit.
        floor: Revision below which a save that began can no longer commit: its shards may be gone.
        entries: Live checkpoints by ascending step.
    """

    run_id: str
    revision: int = 0
    token: int = 0
    floor: int = 0
    entries: tuple[Entry, ...] = ()

    def at(self, step: int) -> Entry | None:
        """The live checkpoint of a step, abandoned or not."""
        return next((entry for entry in self.entries if entry.step == step), None)

    def latest(self) -> Entry | None:
        """The newest that counts."""
        return max((entry for entry in self.entries if not entry.abandoned), key=lambda one: one.step, default=None)

    def named(self, name: str) -> Entry | None:
        """The checkpoint that has this name; a name belongs to one at a time."""
        return next((entry for entry in self.entries if name in entry.names), None)

    def holds(self, save_id: str) -> bool:
        """Whether a save is committed and live."""
        return any(entry.save_id == save_id for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One save into a run, as it began.

    Attributes:
        entry: What it would add.
        run_id: Of the run that it saw.
        before: The save_id of the checkpoint of this step that it saw, and was told to overwrite; None if of none. What
            is abandoned, or would be by this very commit, is replaced unasked, unless a pin or a name holds it.
        borrowed: save_id and manifest key of the checkpoint whose shards it names again; None if of no other.
        abandons: The step that this job went on from (-1: from none): newer checkpoints of earlier jobs are abandoned.
            None if nothing is. Only the first commit of a job has to say it; to say it again changes nothing. A job
            that goes back once more takes the fence anew.
    """

    entry: Entry
    run_id: str
    before: str | None = None
    borrowed: tuple[str, str] | None = None
    abandons: int | None = None


class BeginAgainError(CommitConflictError):
    """What a save or a thinning rests on may be gone, its own objects or those it borrowed: it can be tried anew."""


def fenced(catalog: Catalog) -> Catalog:
    """A newer job owns the run: no earlier one commits any more. What is live stays as it is."""
    return replace(catalog, revision=catalog.revision + 1, token=catalog.token + 1)


def refreshed(catalog: Catalog) -> Catalog:
    """A new revision, and nothing else.

    For an attempt that follows one that did not commit: gc may raise the floor above the shards of the former without
    failing the latter.
    """
    return replace(catalog, revision=catalog.revision + 1)


def committed(catalog: Catalog, attempt: Attempt) -> Catalog | None:
    """Add a checkpoint; None if it is there already, as after an answer that was lost.

    Raises:
        FencedError: A newer job owns the run, or another run was begun in its place.
        BeginAgainError: The save began below the floor, or what it borrowed is no longer live as it was.
        CommitConflictError: Another save of this step was committed meanwhile, or the checkpoint that this one was to
            replace was pinned.
    """
    entry = attempt.entry
    if catalog.holds(entry.save_id):
        return None
    # Tokens count from zero in every run: those of a run that was deleted say nothing to the one after it.
    if catalog.run_id != attempt.run_id:
        raise FencedError("Another run was begun here; stop this job.", run=attempt.run_id, newest=catalog.run_id)
    if catalog.token != entry.token:
        raise FencedError("A newer job owns this run; stop this one.", token=entry.token, newest=catalog.token)
    _require_above_floor(catalog, entry.began)
    there = catalog.at(entry.step)
    if (there.save_id if there is not None else None) != attempt.before:
        if there is None or not (there.abandoned or _abandons(attempt, there)):
            raise CommitConflictError(
                "Another save of this step was committed meanwhile; this one was not.",
                step=entry.step,
                committed=there.save_id if there is not None else None,
            )
        if not there.is_replaceable_by(entry.names):
            raise CommitConflictError(
                "The abandoned checkpoint of this step was pinned or named meanwhile, and stays; this one was not "
                "committed. Save another step, unpin that one, or pass overwrite=True.",
                step=entry.step,
                pinned=there.pinned,
                names=", ".join(there.names) or None,
            )
    if attempt.borrowed is not None and attempt.borrowed not in {
        (one.save_id, one.manifest) for one in catalog.entries
    }:
        raise BeginAgainError(
            "The checkpoint whose shards this save names again is no longer live as it was.",
            borrowed=attempt.borrowed[0],
        )
    rest = (_without_names(one, entry.names) for one in catalog.entries if one.step != entry.step)
    return _with(catalog, [*(replace(one, abandoned=True) if _abandons(attempt, one) else one for one in rest), entry])


def retired(catalog: Catalog, save_ids: Iterable[str]) -> Catalog | None:
    """Without these checkpoints; None if none of them is live. What only they named may be deleted after the swap.

    The floor rises above them. A save that was committed without hearing of it would otherwise find its step free
    again, and commit once more what is being deleted.
    """
    ids = frozenset(save_ids)
    gone = [entry for entry in catalog.entries if entry.save_id in ids]
    if not gone:
        return None
    floor = max(catalog.floor, *(entry.began + 1 for entry in gone))
    return _with(replace(catalog, floor=floor), [entry for entry in catalog.entries if entry.save_id not in ids])


def thinned(
    catalog: Catalog, save_id: str, *, began: int, seen: str, manifest: str, keys: Iterable[str], size_bytes: int
) -> Catalog | None:
    """With a manifest that leaves out some top-level keys; None if the checkpoint is not live with the one seen.

    Args:
        catalog: As it is.
        save_id: Of the checkpoint.
        began: Revision at which the new manifest was put; its name carries it, as those of shards do.
        seen: Key of the manifest that is replaced.
        manifest: Key of the new one.
        keys: What it leaves out.
        size_bytes: Of the shards that it names.

    Raises:
        BeginAgainError: Orphans were removed since it was put, perhaps it among them.
    """
    entry = next((one for one in catalog.entries if (one.save_id, one.manifest) == (save_id, seen)), None)
    if entry is None:
        return None
    _require_above_floor(catalog, began)
    kept = tuple(sorted({*entry.thinned, *keys}))
    return _changed(catalog, replace(entry, manifest=manifest, thinned=kept, size_bytes=size_bytes))


def pinned(catalog: Catalog, step: int, *, pin: bool) -> Catalog | None:
    """With a checkpoint exempt from retention, or not any more; None if it is so already.

    Raises:
        CheckpointNotFoundError: No checkpoint of this step is live.
    """
    entry = catalog.at(step)
    if entry is None:
        raise CheckpointNotFoundError("No checkpoint of this step is live.", step=step)
    return None if entry.pinned == pin else _changed(catalog, replace(entry, pinned=pin))


def raised(catalog: Catalog, floor: int) -> Catalog | None:
    """With a floor of at least this; None if it is that high already.

    Raises:
        InvalidArgumentError: Above the revision that this makes: not even a save that begins then could commit.
    """
    if catalog.floor >= floor:
        return None
    if floor > catalog.revision + 1:
        raise InvalidArgumentError("No save began at such a revision.", floor=floor, revision=catalog.revision)
    return replace(catalog, revision=catalog.revision + 1, floor=floor)


def _require_above_floor(catalog: Catalog, began: int) -> None:
    if began < catalog.floor:
        raise BeginAgainError(
            "Objects were removed since this began, its own perhaps among them.", began=began, floor=catalog.floor
        )


def _abandons(attempt: Attempt, entry: Entry) -> bool:
    return attempt.abandons is not None and entry.step > attempt.abandons and entry.token < attempt.entry.token


def _without_names(entry: Entry, names: tuple[str, ...]) -> Entry:
    left = tuple(name for name in entry.names if name not in names)
    return entry if left == entry.names else replace(entry, names=left)


def _changed(catalog: Catalog, entry: Entry) -> Catalog:
    return _with(catalog, [entry if one.step == entry.step else one for one in catalog.entries])


def _with(catalog: Catalog, entries: Iterable[Entry]) -> Catalog:
    ordered = tuple(sorted(entries, key=lambda one: one.step))
    return replace(catalog, revision=catalog.revision + 1, entries=ordered)
