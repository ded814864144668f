"""Saves of one job into a run: what each may replace, and refusals before a byte is sent."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CheckpointExistsError,
    CommitConflictError,
    FencedError,
    SaveTimeoutError,
)
from dcp_remote.format.catalog import CATALOG_KEY, Attempt, Entry, Owner, pin_entry, retire_entries
from dcp_remote.format.keys import MANIFESTS_PREFIX
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.run.job import CheckpointLabels, JobSession
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.base import Condition, Version
from dcp_remote.testing import RecordingStore
from tests.support.catalogs import stored, swapped


def begin(job: JobSession, step: int, **note: Any) -> Attempt:
    labels = CheckpointLabels.of(step, **{"exist_ok": False, **note})
    begun = job.begin(labels, borrow=False, deadline=Deadline(60.0))
    assert isinstance(begun, Attempt)
    return begun


def commit(job: JobSession, begun: Attempt) -> Entry:
    return job.commit(begun, b"a manifest", size_bytes=1, deadline=Deadline(60.0))[1]


def save(job: JobSession, step: int, **note: Any) -> Entry:
    return commit(job, begin(job, step, **note))


def live(store: MemoryStore) -> dict[int, str]:
    catalog = stored(store)
    assert catalog is not None
    return {entry.step: entry.save_id for entry in catalog.entries}


def pin(store: MemoryStore, step: int) -> None:
    swapped(store, lambda now: pin_entry(now, step, pin=True))


def went_back(store: MemoryStore, step: int, seen: Owner | None = None) -> JobSession:
    """Return a job that goes on from a step, which it restored while the run had this owner."""
    job = JobSession(store)
    job.resume_from(step, seen)
    return job


def a_run(**note: Any) -> MemoryStore:
    """Save steps 100 and 200, the latter with these labels."""
    store = MemoryStore()
    job = JobSession(store)
    save(job, 100)
    save(job, 200, **note)
    return store


# ---- what a save may replace


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("how", "note"), [("pinned", {}), ("named", {"name": ["best", "stable"]})])
def test_what_is_held_is_not_replaced_after_going_back(how: str, note: dict[str, Any], *, later: bool) -> None:
    """Save over an abandoned checkpoint with a pin or a name, first or later: refused before anything is sent."""
    store = a_run(**note)
    if how == "pinned":
        pin(store, 200)
    before, job = live(store), went_back(store, 100)
    if later:
        before[150] = save(job, 150).save_id
    objects = set(store.space.objects)
    with pytest.raises(CheckpointExistsError, match=r"pinned or has a name.* step=200"):
        begin(job, 200, name="stable")
    assert (live(store), set(store.space.objects)) == (before, objects)
    assert save(job, 201).save_id in live(store).values()
    assert live(store)[200] == before[200]


def test_what_is_replaced_after_going_back() -> None:
    """Replace an abandoned checkpoint that nothing holds; with `overwrite=True`, or its own names, any other."""
    store = a_run()
    new = save(went_back(store, 100), 200)
    assert live(store)[200] == new.save_id
    store = a_run(name="step200")
    new = save(went_back(store, 100), 200, name=["step200", "best"])
    assert live(store)[200] == new.save_id
    pin(store, 200)
    new = save(went_back(store, 100), 200, overwrite=True)
    assert live(store)[200] == new.save_id


@pytest.mark.parametrize("later", [False, True])
def test_a_pin_that_comes_in_between(*, later: bool) -> None:
    """Pin between the beginning of a save and its commit: a conflict, unless the save passed `overwrite=True`."""
    store = a_run()
    job = went_back(store, 100)
    if later:
        save(job, 150)
    begun, before = begin(job, 200), live(store)
    pin(store, 200)
    with pytest.raises(CommitConflictError, match=r"pinned or named.* step=200"):
        commit(job, begun)
    assert live(store) == before
    told = begin(job, 200, overwrite=True)
    pin(store, 200)
    assert commit(job, told).save_id == live(store)[200]


def test_what_was_to_be_replaced_is_removed_meanwhile() -> None:
    """Remove the checkpoint that a save is to replace: its step is free, so the save is committed."""
    store = a_run()
    job = went_back(store, 100)
    save(job, 150)
    begun = begin(job, 200)
    swapped(store, lambda now: retire_entries(now, [live(store)[200]]))
    assert commit(job, begun).save_id == live(store)[200]


# ---- a thread that was left behind


class _AnsweringLate(MemoryStore):
    """Store that writes the catalog and calls a function once before it answers."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self._meanwhile: list[Callable[[], object]] = [meanwhile]

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        version = super().put(key, buffers, condition=condition)
        if key == CATALOG_KEY and self._meanwhile:
            self._meanwhile.pop()()
        return version


def test_an_old_fence_that_is_answered_late_leaves_the_job_its_newer_one() -> None:
    """Answer a fence after its save was given up: the job keeps the token that the next save took."""
    given_up = threading.Event()

    def next_save() -> None:
        given_up.set()
        save(job, 100)

    job = JobSession(_AnsweringLate(next_save))
    deadline = Deadline(60.0, lambda: math.inf if given_up.is_set() else 0.0)
    with pytest.raises(SaveTimeoutError):
        job.begin(CheckpointLabels.of(100), borrow=False, deadline=deadline)
    assert job.owner is not None
    assert job.owner.token == 2
    save(job, 200)


# ---- who took the fence


def owner_of(store: MemoryStore) -> Owner:
    catalog = stored(store)
    assert catalog is not None
    return Owner(catalog.run_id, catalog.token)


def test_a_job_that_hung_between_its_restore_and_its_first_save() -> None:
    """Its successor has saved meanwhile: the job that hung is fenced, and the successor goes on saving."""
    store = a_run()
    hung, successor = (went_back(store, 200, owner_of(store)) for _ in range(2))
    save(successor, 300)
    before = stored(store)
    for _ in range(2):
        with pytest.raises(FencedError, match=r"saved into this run since this job restored.* token=1 newest=2"):
            begin(hung, 250)
    assert stored(store) == before
    save(successor, 400)
    assert list(live(store)) == [100, 200, 300, 400]
    with pytest.raises(FencedError):
        begin(hung.after(400, owner_of(store)), 500)


def test_whom_a_restored_job_outranks() -> None:
    """A job that saves after the restore by an earlier fence, or took the fence and saved nothing, or was abandoned."""
    store = a_run()
    older = went_back(store, 200, owner_of(store))
    save(older, 300)
    job = went_back(store, 200, owner_of(store))
    save(older, 400)
    begin(went_back(store, 300), 500)
    save(job, 250)
    catalog = stored(store)
    assert catalog is not None
    assert [entry.step for entry in catalog.entries if entry.abandoned] == [300, 400]
    late = went_back(store, 100, owner_of(store))
    save(went_back(store, 250), 600)
    swapped(store, lambda now: replace(now, entries=tuple(replace(one, abandoned=True) for one in now.entries)))
    save(late, 700)


def test_a_run_of_the_same_url_is_another_one() -> None:
    """The run was deleted and begun anew since the restore: its tokens are lower; the job is fenced all the same."""
    store = a_run()
    job = went_back(store, 200, replace(owner_of(store), run_id="0" * 32))
    with pytest.raises(FencedError, match="since this job restored"):
        begin(job, 300)


def test_a_fenced_job_is_told_who_took_the_fence() -> None:
    """Host, process and user of the newer job, in each error; nothing where other software wrote the catalog."""
    store = MemoryStore()
    job = JobSession(store)
    save(job, 1)
    begun = begin(job, 2)
    newer = JobSession(store)
    newer.resume_from(1)
    begin(newer, 3)
    holder = f"{socket.gethostname()}, pid {os.getpid()}, user "
    for call in (lambda: commit(job, begun), lambda: begin(job, 4)):
        with pytest.raises(FencedError, match="A newer job owns this run") as caught:
            call()
        assert str(caught.value.details["holder"]).startswith(holder)
    swapped(store, lambda now: replace(now, revision=now.revision + 1, token=now.token + 1, holder=""))
    with pytest.raises(FencedError) as caught:
        begin(newer, 5)
    assert "holder" not in str(caught.value)


def test_the_description_of_the_job_costs_no_request() -> None:
    """A first save, a swap of another kind and a later save: the swap that takes the fence writes the description."""
    store = MemoryStore()
    recording = RecordingStore(store)
    job = JobSession(recording)
    begin(job, 1)
    catalog = ("get", CATALOG_KEY)
    assert recording.calls == [("head", MANIFEST_KEY), catalog, ("list", MANIFESTS_PREFIX), ("put", CATALOG_KEY)]
    written = stored(store)
    assert written is not None
    save(job, 2)
    pin(store, 2)
    kept = stored(store)
    assert kept is not None
    assert kept.holder == written.holder != ""


def test_a_job_that_restored_nothing_is_told_whose_run_it_is() -> None:
    """The error that refuses its first save names the job that wrote last."""
    with pytest.raises(CheckpointExistsError, match="restored from none") as caught:
        begin(JobSession(a_run()), 300)
    assert f"pid {os.getpid()}" in str(caught.value.details["holder"])
