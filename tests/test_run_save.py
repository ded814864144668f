"""One job's side of a run, on a store in memory: what a save may replace, and what is refused before a byte is sent."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_remote.catalog import Entry, pinned, retired
from dcp_remote.errors import CheckpointExistsError, CommitConflictError
from dcp_remote.run_save import Begun, Job, Note
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.retrying import Deadline
from tests.catalogs import stored, swapped


def begin(job: Job, step: int, **note: Any) -> Begun:
    return job.begin(Note.of(step, **note), borrow=False, deadline=Deadline(60.0))


def commit(job: Job, begun: Begun) -> Entry:
    return job.commit(begun, b"a manifest", size_bytes=1, deadline=Deadline(60.0))[1]


def save(job: Job, step: int, **note: Any) -> Entry:
    return commit(job, begin(job, step, **note))


def live(store: MemoryStore) -> dict[int, str]:
    catalog = stored(store)
    assert catalog is not None
    return {entry.step: entry.save_id for entry in catalog.entries}


def pin(store: MemoryStore, step: int) -> None:
    swapped(store, lambda now: pinned(now, step, pin=True))


def went_back(store: MemoryStore, step: int) -> Job:
    """A job that goes on from a step."""
    job = Job(store)
    job.go_on_from(step)
    return job


def a_run(**note: Any) -> MemoryStore:
    """Of steps 100 and 200; the latter is noted so."""
    store = MemoryStore()
    job = Job(store)
    save(job, 100)
    save(job, 200, **note)
    return store


# ---- what a save may replace ----


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("how", "note"), [("pinned", {}), ("named", {"name": ["best", "last"]})])
def test_what_is_held_is_not_replaced_after_going_back(how: str, note: dict[str, Any], *, later: bool) -> None:
    """A pin and a name hold an abandoned checkpoint, at a job's first save and at later ones; nothing is sent."""
    store = a_run(**note)
    if how == "pinned":
        pin(store, 200)
    before, job = live(store), went_back(store, 100)
    if later:
        before[150] = save(job, 150).save_id
    objects = set(store.space.objects)
    with pytest.raises(CheckpointExistsError, match=r"pinned or has a name.* overwrite=True.* step=200"):
        begin(job, 200, name="last")
    assert (live(store), set(store.space.objects)) == (before, objects)
    assert save(job, 201).save_id in live(store).values()
    assert live(store)[200] == before[200]


def test_what_is_held_is_replaced_by_an_explicit_call() -> None:
    """By `overwrite=True`, and, where nothing but names holds it, by giving them to the new one."""
    store = a_run(name="step200")
    new = save(went_back(store, 100), 200, name=["step200", "best"])
    assert live(store)[200] == new.save_id
    pin(store, 200)
    new = save(went_back(store, 100), 200, overwrite=True)
    assert live(store)[200] == new.save_id


def test_what_nothing_holds_is_replaced_after_going_back() -> None:
    """As ever."""
    store = a_run()
    new = save(went_back(store, 100), 200)
    assert live(store)[200] == new.save_id


@pytest.mark.parametrize("later", [False, True])
def test_a_pin_that_comes_in_between(*, later: bool) -> None:
    """Between the beginning of a save and its commit: it holds, unless the save was told to overwrite."""
    store = a_run()
    job = went_back(store, 100)
    if later:
        save(job, 150)
    begun, before = begin(job, 200), live(store)
    pin(store, 200)
    with pytest.raises(CommitConflictError, match=r"pinned or named meanwhile.* step=200 pinned=True"):
        commit(job, begun)
    assert live(store) == before
    told = begin(job, 200, overwrite=True)
    pin(store, 200)
    assert commit(job, told).save_id == live(store)[200]


def test_what_was_to_be_replaced_is_removed_meanwhile() -> None:
    """The step of an abandoned checkpoint that somebody removes is free: no reason to refuse the save."""
    store = a_run()
    job = went_back(store, 100)
    save(job, 150)
    begun = begin(job, 200)
    swapped(store, lambda now: retired(now, [live(store)[200]]))
    assert commit(job, begun).save_id == live(store)[200]
