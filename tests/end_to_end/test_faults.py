"""Errors of failed saves and loads, and stored objects after crashes, refusals, stalls and deadlines.

Stored objects are read without the faults. Ranks are simulated in one process; the pauses of retries are real, and
short. `test_fault_matrix.py` fails every request in every way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import TypeVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_remote import RemoteWriter, load
from dcp_remote.errors import (
    CommitConflictError,
    PermissionDeniedError,
    SaveFailedError,
    SaveTimeoutError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.saving import uploads
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from dcp_remote.testing import Fault, FaultyStore, nth
from dcp_remote.testing.wrappers import Predicate
from tests.support.faults import verb_is
from tests.support.threads import HookedStore
from tests.support.valued_states import found, save, shards_in

_Answer = TypeVar("_Answer")

OLD, NEW, THIRD = 1.0, 2.0, 3.0

pytestmark = pytest.mark.torture


def _puts(part: str) -> Predicate:
    return lambda verb, key, _number: verb == "put" and part in key


def test_shards_that_never_go_through() -> None:
    """Shards of rank 1 that fail until the deadline: the error names rank, shard and attempts; its shards are removed.

    The old checkpoint remains, and the next save replaces it.
    """
    store = MemoryStore()
    save(store, OLD, 3)
    before = shards_in(store)
    faulty = FaultyStore(store, [Fault(_puts("rank-00001"), "response", persistent=True)])
    with pytest.raises(SaveFailedError) as caught:
        save(faulty, NEW, 3, timeout_seconds=2.0)
    details = caught.value.details
    assert details["rank"] == 1
    assert "rank-00001" in str(details["shard"])
    assert isinstance(details["attempts"], int)
    assert details["attempts"] >= 2
    assert "was lost" in str(caught.value)
    assert found(store) == OLD
    # Rank 0 had finished and gets no message, so that its shards are left to gc.
    assert {PurePosixPath(key).name[:10] for key in shards_in(store) - before} == {"rank-00000"}
    save(store, NEW, 3)
    assert found(store) == NEW


@pytest.mark.parametrize(
    ("refusal", "word"),
    [
        (PermissionDeniedError("This may not be written."), "PermissionDeniedError"),
        (StorageError("The disk is full."), "The disk is full"),
    ],
)
def test_refusals_are_not_repeated(refusal: StorageError, word: str) -> None:
    """Access denied and a full disk: one attempt, the cause in the message, no object left."""
    store = MemoryStore()
    faulty = FaultyStore(store, [Fault(_puts("shards/"), "request", persistent=True, error=lambda: refusal)])
    with pytest.raises(SaveFailedError) as caught:
        save(faulty, NEW, 1)
    assert caught.value.details["attempts"] == 1
    assert word in str(caught.value)
    assert caught.value.__cause__ is refusal
    assert list(store.list()) == []


@pytest.mark.parametrize("overwriting", [False, True])
def test_another_save_that_is_committed_first(*, overwriting: bool) -> None:
    """A save committed meanwhile is not overwritten, even if its predecessor may be: the later save gets a conflict."""
    store = MemoryStore()
    if overwriting:
        save(store, OLD, 2)
    with pytest.raises(CommitConflictError):
        save(HookedStore(store, lambda key: save(store, THIRD, 2) if key == MANIFEST_KEY else None), NEW, 2)
    assert found(store) == THIRD


def test_a_place_that_cannot_be_looked_at() -> None:
    """A save whose first request fails until the deadline names the attempts, and puts no shard."""
    store = MemoryStore()
    save(store, OLD, 1)
    before = shards_in(store)
    faulty = FaultyStore(store, [Fault(verb_is("get"), "request", persistent=True)])
    with pytest.raises(TransientStorageError) as caught:
        save(faulty, NEW, 1, timeout_seconds=2.0)
    assert caught.value.details["key"] == MANIFEST_KEY
    assert isinstance(caught.value.details["attempts"], int)
    assert caught.value.details["attempts"] >= 2
    assert shards_in(store) == before
    assert found(store) == OLD


def test_shards_that_cannot_be_deleted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A failed save whose shards cannot be deleted raises its own cause, and logs the orphans that are left to gc."""
    monkeypatch.setattr(uploads, "CLEANUP_SECONDS", 0.3)
    store = MemoryStore()
    faulty = FaultyStore(
        store,
        [
            Fault(_puts("shards/"), "response", persistent=True),
            Fault(verb_is("delete"), "request", persistent=True),
        ],
    )
    with pytest.raises(SaveFailedError, match="shard"):
        save(faulty, NEW, 1, timeout_seconds=2.0)
    assert found(store) is None
    assert shards_in(store)
    assert any("stay as orphans" in record.getMessage() for record in caplog.records)


class StallingStore(WrappedStore):
    """Store whose puts of shards wait until they are released, and which records deleted keys."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.let_go = threading.Event()
        self.deleted: set[str] = set()
        self.changed = threading.Condition()

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        if request.verb == "put" and request.key != MANIFEST_KEY:
            self.let_go.wait(30)
        answer = send()
        if request.verb == "delete":
            with self.changed:
                self.deleted.update(request.keys)
                self.changed.notify_all()
        return answer

    def wait_until_deleted(self, keys: Sequence[str]) -> bool:
        """Wait until these keys are deleted; return False after half a minute."""
        with self.changed:
            return self.changed.wait_for(lambda: self.deleted.issuperset(keys), timeout=30)


def test_a_stalled_shard_ends_by_the_deadline() -> None:
    """A put of a shard that hangs ends the save at its deadline, with the key in the error; a late shard is deleted."""
    store = MemoryStore()
    stalling = StallingStore(store)
    with pytest.raises(SaveTimeoutError) as caught:
        save(stalling, NEW, 1, timeout_seconds=2.0)
    assert caught.value.details["rank"] == 0
    assert "rank-00000" in str(caught.value.details["shard"])
    assert isinstance(caught.value.details["unfinished"], int)
    assert found(store) is None
    with stalling.changed:
        stalling.deleted.clear()  # the keys deleted before the shard arrived
    stalling.let_go.set()
    assert stalling.wait_until_deleted([str(caught.value.details["shard"])])
    assert str(caught.value.details["shard"]) not in shards_in(store)


def test_under_torch_every_error_keeps_its_class_and_details() -> None:
    """`dcp.save` raises an error that contains this package's own, with rank and shard, and its message."""
    store = MemoryStore()
    faulty = FaultyStore(store, [Fault(_puts("shards/"), "request", persistent=True)])
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(2)}, storage_writer=RemoteWriter(faulty, timeout_seconds=3.0))
    error = caught.value.failures[0][0]
    assert isinstance(error, SaveFailedError)
    assert {"rank", "shard", "attempts", "cause"} <= error.details.keys()
    assert "could not write a shard" in str(caught.value)


def test_loads_that_cannot_go_on_are_errors_of_ours() -> None:
    """Reads that are refused, or fail until the time for one range is over, raise typed errors, at each request."""
    store = MemoryStore()
    save(store, NEW, 1)
    refusal = PermissionDeniedError("This may not be read.")
    for number in (1, 2, 3):
        faulty = FaultyStore(store, [nth(number, "request", persistent=True, error=lambda: refusal)])
        with pytest.raises(PermissionDeniedError):
            load(faulty)
    for number, key in ((1, MANIFEST_KEY), (2, "shards/")):
        faulty = FaultyStore(store, [nth(number, "request", persistent=True)])
        with pytest.raises(TransientStorageError) as caught:
            load(faulty, timeout_seconds=0.3)
        assert key in str(caught.value.details["key"])
        assert caught.value.details["attempts"]
