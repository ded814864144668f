"""Restores that leave the run as it is, and saves of one step that are repeated; on one process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcp_remote import CheckpointManager, PerRank, load
from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    BucketNotFoundError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    CorruptCheckpointError,
    FencedError,
    InvalidArgumentError,
)
from dcp_remote.format.catalog import Catalog, Entry, retire_entries
from dcp_remote.run.catalog_store import read_catalog, swap
from dcp_remote.run.gc import find_orphans
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.storage.base import Condition, Version
from dcp_remote.testing import FaultyStore, RecordingStore, nth
from tests.support.rank_threads import manager_threads


def state_of(value: float) -> dict[str, Any]:
    return {"weight": torch.full((10,), float(value)), "step": value}


def catalog_of(store: ObjectStore) -> Catalog:
    catalog = read_catalog(store)
    assert catalog is not None
    return catalog


def entry_of(store: ObjectStore, step: int) -> Entry:
    entry = catalog_of(store).entry_at(step)
    assert entry is not None
    return entry


# ---- restores that leave the run as it is


def test_a_restore_that_does_not_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """Look at the best checkpoint and train on: no checkpoint is abandoned, and nothing warns of that."""
    store = MemoryStore()
    with CheckpointManager(store) as manager, caplog.at_level(logging.WARNING, "dcp_remote"):
        for step in (1, 2, 3):
            manager.save(step, state_of(step), name="best" if step == 1 else None)
        best = state_of(0)
        assert manager.restore(best, "best", go_on=False) == 1
        assert best["step"] == 1
        assert manager.last_load is not None
        assert manager.last_load.step == 1
        manager.save(4, state_of(4), wait=True)
        assert manager.run.steps() == [1, 2, 3, 4]
        assert [entry.abandoned for entry in catalog_of(store).entries] == [False] * 4
        assert len({entry.token for entry in catalog_of(store).entries}) == 1
        assert "abandons" not in caplog.text
        manager.restore(state_of(0), 1)
        assert "abandons 2, 3, 4" in caplog.text


def test_a_restore_that_does_not_go_on_begins_no_job() -> None:
    """A job that has only looked at a checkpoint may not save over the run; one that went back still goes back."""
    store = MemoryStore()
    with CheckpointManager(store) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
    with CheckpointManager(store) as manager:
        assert manager.restore(state_of(0), go_on=False) == 2
        with pytest.raises(CheckpointExistsError, match="restored from none"):
            manager.save(3, state_of(3), wait=True)
        assert manager.restore(state_of(0), 1) == 1
        assert manager.restore(state_of(0), 2, go_on=False) == 2
        manager.save(3, state_of(3), wait=True)
        assert manager.run.steps() == [1, 3]


def test_ranks_that_differ_in_going_on() -> None:
    """Some would change the run and others would not: both are told, and nothing is restored."""
    with manager_threads(2, MemoryStore()) as ranks:
        ranks.values(lambda _, manager: manager.save(1, state_of(1), wait=True))
        ended = ranks.run(lambda rank, manager: manager.restore(state_of(0), go_on=rank == 0))
        assert all("did something else instead of the restore" in str(one.error) for one in ended)
        assert ranks.values(lambda _, manager: manager.restore(state_of(0), go_on=False)) == [1, 1]


# ---- the same step again


def test_a_step_saved_again() -> None:
    """Names and metrics are added, names move, nothing is uploaded: two GETs and a PUT; one GET without names."""
    store = RecordingStore(MemoryStore())
    with CheckpointManager(store) as manager:
        manager.save(1, state_of(1), name=["first", "best"], metrics={"loss": 3.0})
        manager.save(2, state_of(2), metrics={"loss": 2.0}, wait=True)
        save_id = entry_of(store, 2).save_id
        store.clear()
        manager.save(2, state_of(20), name=["best", "stable"], metrics={"loss": 1.5, "score": 4}, exist_ok=True)
        report = manager.wait()
        assert [(verb, key) for verb, key in store.calls if verb != "get"] == [("put", "catalog.json")]
        assert store.count("get") == 2
        assert report is not None
        assert (report.step, report.save_id, report.is_repeated, report.written_bytes) == (2, save_id, True, 0)
        assert "had saved step 2" in str(report)
        entry = entry_of(store, 2)
        assert (entry.save_id, entry.names) == (save_id, ("best", "stable"))
        assert dict(entry.metrics) == {"loss": 1.5, "score": 4.0}
        assert entry_of(store, 1).names == ("first",)
        store.clear()
        manager.save(2, state_of(20), name="best", exist_ok=True, wait=True)
        assert store.calls == [("get", "catalog.json")] * 2
        store.clear()
        manager.save(2, state_of(20), exist_ok=True, wait=True)
        assert store.calls == [("get", "catalog.json")]
        # An older step that is live is no step back.
        manager.save(1, state_of(10), name="old", exist_ok=True, wait=True)
        manager.save(3, state_of(3), exist_ok=True, wait=True)
        assert manager.run.steps() == [1, 2, 3]
    assert load(store, step="old")["step"] == 1
    assert load(store, step="best")["step"] == 2
    assert find_orphans(store, grace_seconds=0).old == ()


def test_notes_of_a_repeated_save(caplog: pytest.LogCaptureFixture) -> None:
    """The manifest never changes: notes are dropped with a warning; a save that is not repeated stores them."""
    store = MemoryStore()
    with CheckpointManager(store) as manager, caplog.at_level(logging.WARNING, "dcp_remote"):
        manager.save(1, state_of(1), user={"epoch": 1}, exist_ok=True, wait=True)
        manager.save(1, state_of(1), exist_ok=True, wait=True)
        assert caplog.text == ""
        manager.save(1, state_of(1), user={"epoch": 2}, exist_ok=True, wait=True)
        assert "step 1 was saved before, and its checkpoint stays as it is" in caplog.text
        assert "without what has changed in the state since and the notes of this save (user=)" in caplog.text
        assert manager.run.user(1) == {"epoch": 1}


def test_a_missing_bucket_on_all_ranks() -> None:
    """Restore from, and save into a bucket that does not exist: the same error on every rank."""

    class NoBucket(MemoryStore):
        def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
            raise missing

        def explain_missing(self) -> BucketNotFoundError:
            return missing

    missing = BucketNotFoundError("The bucket does not exist.", bucket="data")
    with manager_threads(2, NoBucket()) as ranks:
        ended = ranks.run(lambda _, manager: manager.restore(state_of(0), "latest"))
        ended += ranks.run(lambda _, manager: manager.save(1, state_of(1), wait=True))
    assert [type(one.error) for one in ended] == [BucketNotFoundError] * 4
    assert all("bucket='data'" in str(one.error) for one in ended)


def test_a_restore_of_values_that_no_rank_saved(caplog: pytest.LogCaptureFixture) -> None:
    """A `PerRank` value that the checkpoint lacks stays, and the warning does not speak of other ranks."""
    store = MemoryStore()
    with CheckpointManager(store) as manager, caplog.at_level(logging.WARNING, "dcp_remote"):
        manager.save(1, state_of(1), wait=True)
        state = state_of(0) | {"own": PerRank(7)}
        assert manager.restore(state) == 1
    assert state["own"].value == 7
    assert [record.message for record in caplog.records] == [
        "The checkpoint has no values of own, which stay as they are."
    ]


@pytest.mark.parametrize(
    ("state", "step"), [(5, state_of(0)), (state_of(0), np.int64(1)), (state_of(0), torch.nn.Linear(1, 1))]
)
def test_a_restore_of_no_step(state: Any, step: Any) -> None:
    """The error has the type of the step, and the values of no state."""
    with CheckpointManager(MemoryStore()) as manager:
        with pytest.raises(InvalidArgumentError, match=r"exchanged|Write int\(step\)") as caught:
            manager.restore(state, step)
        assert caught.value.details["type"] == type(step).__name__
        assert "weight" not in str(caught.value)


def test_a_step_of_another_job_is_not_saved_again() -> None:
    """But for the one that the job went on from, as after a restart at the end of training."""
    store = MemoryStore()
    with CheckpointManager(store) as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
    with CheckpointManager(store) as manager:
        with pytest.raises(CheckpointExistsError, match="restored from none"):
            manager.save(2, state_of(2), exist_ok=True, wait=True)
        assert manager.restore(state_of(0)) == 2
        manager.save(2, state_of(2), name="final", exist_ok=True, wait=True)
        assert entry_of(store, 2).names == ("final",)
        with pytest.raises((CheckpointExistsError, InvalidArgumentError)):
            manager.save(1, state_of(1), exist_ok=True, wait=True)
        manager.save(3, state_of(3), wait=True)
        assert manager.run.steps() == [1, 2, 3]


def test_a_loop_that_begins_by_a_save(caplog: pytest.LogCaptureFixture) -> None:
    """Save the restored step, and the last step twice, as nanoGPT's loop: kept at every start, and logged once."""
    store = RecordingStore(MemoryStore())

    def train(manager: CheckpointManager, start: int) -> None:
        assert (manager.restore(state_of(0)) or 0) == start
        for step in range(start, start + 3):
            if step % 2 == 0:
                manager.save(step, state_of(step), name=f"step-{step}", metrics={"loss": 4.0 - step})
        manager.save(step, state_of(step))

    for start in (0, 2, 4):
        with manager_threads(2, store) as ranks:
            ranks.values(lambda _, manager: train(manager, start))  # noqa: B023  # called at once
    assert [entry.step for entry in catalog_of(store).entries] == [0, 2, 4, 6]
    assert dict(entry_of(store, 2).metrics) == {"loss": 2.0}
    kept = [record.message for record in caplog.records if "stays as it is" in record.message]
    assert len(kept) == 5  # by the coordinator alone: twice the restored step, three times the last


def test_what_is_refused_of_a_step_twice() -> None:
    """By the call itself: a state of other names, an older step, or any where the caller wants to know."""
    store = RecordingStore(MemoryStore())
    with CheckpointManager(store) as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2), wait=True)
        store.clear()
        with pytest.raises(CheckpointExistsError, match=r"exist_ok=True.* overwrite=True.*'average, step, weight'"):
            manager.save(2, {"average": torch.ones(2)})
        with pytest.raises(CheckpointExistsError, match="new_names='average'"):
            manager.save(2, state_of(22), name="average")
        with pytest.raises(CheckpointExistsError, match=r"exist_ok=True.* overwrite=True"):
            manager.save(2, state_of(2), exist_ok=False)
        with pytest.raises(InvalidArgumentError, match="older than the newest"):
            manager.save(1, state_of(1))
        assert store.count("put") == 0
        manager.save(2, state_of(22), overwrite=True, wait=True)
        assert manager.restore(state_of(0), 1) == 1
        manager.save(1, state_of(11))  # goes back no less than without it
        manager.save(2, state_of(222))
    assert load(store, step=2)["step"] == 222
    assert load(store, step=1)["step"] == 1


@pytest.mark.parametrize("is_restored", [True, False])
@pytest.mark.parametrize(
    ("changed", "name", "differing"),
    [
        ({"weight": torch.ones(20)}, "first", "differing='weight'"),
        ({"weight": torch.ones(10).double()}, None, "differing='weight'"),
        ({"weight": 1}, None, "differing='weight'"),
        ({"more": 1}, None, "differing='more'"),
        ({}, ["first", "average"], "new_names='average'"),
    ],
)
def test_another_state_at_the_step_that_a_job_goes_on_from(
    is_restored: bool, changed: dict[str, Any], name: Any, differing: str
) -> None:
    """Resize, average or quantize what was restored, and save it there: refused, and the old weights get no name."""
    store = MemoryStore()
    with CheckpointManager(store) as manager:
        manager.save(1, state_of(1), name="first", metrics={"loss": 1.0})
    before = entry_of(store, 1)
    with CheckpointManager(store, resumed_from=None if is_restored else 1) as manager:
        if is_restored:
            manager.restore(state_of(0))
        with pytest.raises(CheckpointExistsError, match=f"exist_ok=True.*{differing}"):
            manager.save(1, state_of(1) | changed, name=name, metrics={"loss": 0.5})
        assert entry_of(store, 1) == before
        manager.save(2, state_of(1) | changed, name=name, metrics={"loss": 0.5})
    assert entry_of(store, 2).names == (() if name is None else tuple([name] if isinstance(name, str) else name))


def test_a_restored_step_with_other_metrics_and_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """A loss that is computed anew differs a little, and other ranks come: kept, with the metrics that it had."""
    store = MemoryStore()

    def state(rank: int) -> dict[str, Any]:
        return state_of(1) | {f"of rank {rank}": torch.ones(3), "random": PerRank({"seed": rank})}

    def train(rank: int, manager: CheckpointManager) -> None:
        manager.restore(state_of(0), include=["weight", "step"])
        manager.save(1, state(rank), metrics={"loss": 1.01})
        with pytest.raises(CheckpointExistsError, match="differing='of rank 1'"):
            manager.save(1, state(0), metrics={"loss": 1.0})

    with CheckpointManager(store) as manager:
        manager.save(1, state(0) | {"of rank 1": torch.ones(3)}, metrics={"loss": 1.0})
    with manager_threads(2, store) as ranks:
        ranks.values(train)
    assert dict(entry_of(store, 1).metrics) == {"loss": 1.0}
    assert "the metrics of this save" in caplog.text


def test_an_abandoned_step_with_names_is_saved_anew() -> None:
    """As by a framework that names each checkpoint; a pin still keeps the checkpoint."""
    store = MemoryStore()
    with CheckpointManager(store) as manager:
        manager.save(1, state_of(1), name="step-1")
        manager.save(2, state_of(2), name=["step-2", "last.ckpt"])
        manager.restore(state_of(0), "step-1")
        with pytest.raises(CheckpointExistsError, match="has a name"):
            manager.save(2, state_of(22), name="step-2", wait=True)
        manager.save(2, state_of(22), name="step-2", exist_ok=True, wait=True)
        assert entry_of(store, 2).names == ("step-2", "last.ckpt")
        manager.restore(state_of(0), 1)
        manager.run.pin(2)
        with pytest.raises(CheckpointExistsError, match="pinned"):
            manager.save(2, state_of(222), name="step-2", exist_ok=True, wait=True)
    assert load(store, step="last.ckpt")["step"] == 22


def test_a_fenced_job_adds_no_names() -> None:
    """A newer job owns the run: nothing is added, and the job stays fenced."""
    store = MemoryStore()
    with CheckpointManager(store) as manager:
        manager.save(1, state_of(1), wait=True)
        with CheckpointManager(store, resumed_from=1) as newer:
            newer.save(2, state_of(2), wait=True)
        for _ in range(2):
            with pytest.raises(FencedError):
                manager.save(1, state_of(1), name="best", exist_ok=True, wait=True)
    assert entry_of(store, 1).names == ()


def test_a_repeated_save_of_ranks() -> None:
    """All ranks get the answer; the coordinator's names and its `exist_ok` count."""
    store = RecordingStore(MemoryStore())
    with manager_threads(3, store) as ranks:
        ranks.values(lambda _, manager: manager.save(1, state_of(1), wait=True))
        store.clear()
        ranks.values(
            lambda rank, manager: manager.save(1, state_of(1), name=f"of rank {rank}", exist_ok=rank == 0, wait=True)
        )
        assert store.count("put") == 1
        assert [one.last_save is not None and one.last_save.is_repeated for one in ranks.managers] == [True] * 3
        assert entry_of(store, 1).names == ("of rank 0",)


def test_a_damaged_checkpoint_names_the_older_ones(tmp_path: Path) -> None:
    """A flipped bit in a shard, and then a shard that is missing; an abandoned checkpoint is not named."""
    state = {"a": torch.zeros(1)}
    with CheckpointManager(tmp_path, dedup=False) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, {"a": torch.full((1,), float(step))})
    with CheckpointManager(tmp_path, dedup=False) as checkpoints:
        checkpoints.restore(state, 2)
        checkpoints.save(5, state)
    (shard,) = (tmp_path / "shards").glob("*/*-step-000000000005-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    for is_missing in (False, True):
        if is_missing:
            shard.unlink()
        with CheckpointManager(tmp_path) as checkpoints, pytest.raises(CorruptCheckpointError) as caught:
            checkpoints.restore(state)
        assert (caught.value.details["step"], caught.value.details["older"]) == (5, "2, 1")
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.restore(state, 2) == 2


@pytest.mark.parametrize("lost", ["request", "response"])
def test_names_are_added_whole_or_not_at_all(lost: Any) -> None:
    """Each request is lost in turn: repeated, so that all names and metrics are there at the end, and no more."""
    for number in range(1, 9):
        faulty = FaultyStore(MemoryStore(), [])
        with CheckpointManager(faulty) as manager:
            manager.save(1, state_of(1), wait=True)
        inner = faulty._store
        faulty = FaultyStore(inner, [nth(number, lost)])
        with CheckpointManager(faulty, resumed_from=1) as manager:
            manager.save(1, state_of(1), name="best", metrics={"loss": 1.0}, exist_ok=True, wait=True)
        entry = entry_of(inner, 1)
        assert (entry.names, dict(entry.metrics)) == (("best",), {"loss": 1.0})
        assert len(catalog_of(inner).entries) == 1
        if not faulty.hits:
            break
    else:
        pytest.fail("more requests than faults")


def test_errors_of_labels() -> None:
    """The checkpoint goes while names are added: a conflict, and no name for another one."""
    store = MemoryStore()
    with CheckpointManager(store) as manager:
        manager.save(1, state_of(1), wait=True)
        coordinator = manager._coordinator
        assert coordinator is not None
        label = coordinator.job.label

        def remove_first(*arguments: Any, **terms: Any) -> Entry:
            swap(store, lambda now: retire_entries(now, [entry.save_id for entry in now.entries]), deadline=Deadline(9))
            return label(*arguments, **terms)

        coordinator.job.label = remove_first  # type: ignore[method-assign]
        with pytest.raises(CommitConflictError, match="removed or replaced"):
            manager.save(1, state_of(1), name="best", exist_ok=True, wait=True)
    with pytest.raises(CheckpointNotFoundError):
        load(store, step="best")
