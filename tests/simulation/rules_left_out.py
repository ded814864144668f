"""The rules of a run's catalog, each left out: explorers of a run must find each of these broken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dcp_remote.format import catalog as rules
from dcp_remote.format.catalog import Attempt, Catalog, Entry, Owner


def no_token(catalog: Catalog, attempt: Attempt) -> Catalog | None:
    """Let a fenced job commit."""
    ours = replace(attempt, entry=replace(attempt.entry, token=catalog.token))
    after = rules.add_entry(catalog, ours)
    return after and replace(after, entries=tuple(attempt.entry if one == ours.entry else one for one in after.entries))


def no_look_at_who_saved_since(catalog: Catalog, holder: str = "", *, seen: Owner | None = None) -> Catalog:
    """Let a job take the fence although another one has saved since it restored its checkpoint."""
    return rules.take_fence(catalog, holder)


def no_floor_for_saves(catalog: Catalog, attempt: Attempt) -> Catalog | None:
    """Let a save commit that began before orphans were removed."""
    after = rules.add_entry(replace(catalog, floor=0), attempt)
    return after and replace(after, floor=catalog.floor)


def no_floor_for_thinning(catalog: Catalog, thin: Entry, *, seen: str) -> Catalog | None:
    """Let a manifest be committed that was put before orphans were removed."""
    after = rules.thin_entry(replace(catalog, floor=0), thin, seen=seen)
    return after and replace(after, floor=catalog.floor)


def no_floor_by_retiring(catalog: Catalog, save_ids: Iterable[str]) -> Catalog | None:
    """Let a retired checkpoint be committed again."""
    after = rules.retire_entries(catalog, save_ids)
    return after and replace(after, floor=catalog.floor)


def no_look_at_what_is_reused(catalog: Catalog, attempt: Attempt) -> Catalog | None:
    """Let a save commit whose reused checkpoint is gone."""
    return rules.add_entry(catalog, replace(attempt, reused=None))


def no_look_at_the_lending_manifest(catalog: Catalog, attempt: Attempt) -> Catalog | None:
    """Let a save commit whose reused checkpoint was thinned."""
    live = {entry.save_id: (entry.save_id, entry.manifest) for entry in catalog.entries}
    reused = attempt.reused and live.get(attempt.reused[0], attempt.reused)
    return rules.add_entry(catalog, replace(attempt, reused=reused))


def no_moving_of_names(catalog: Catalog, attempt: Attempt) -> Catalog | None:
    """Leave the names of a new checkpoint at the checkpoints that had them."""
    nameless = replace(attempt, entry=replace(attempt.entry, names=()))
    after = rules.add_entry(catalog, nameless)
    return after and replace(
        after, entries=tuple(attempt.entry if one == nameless.entry else one for one in after.entries)
    )


def no_look_at_the_pin(catalog: Catalog, attempt: Attempt) -> Catalog | None:
    """Let a checkpoint be replaced that was pinned since the save began."""
    unpinned = (replace(one, pinned=False) if one.step == attempt.entry.step else one for one in catalog.entries)
    return rules.add_entry(replace(catalog, entries=tuple(unpinned)), attempt)
